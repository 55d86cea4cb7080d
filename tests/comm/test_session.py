"""When ranks connect and which facts they compare, with a strategy that records its calls."""

from unittest.mock import Mock, call

import torch
from torch import nn

from secondorder.parallel.session import RankSession
from secondorder.parameters import ParameterTable
from secondorder.runtime import Runtime


def test_ranks_connect_again_after_new_units_and_compare_initial_values_once() -> None:
    p, comm = nn.Parameter(torch.ones(2)), Mock(combines=True)
    table = ParameterTable("Newton", groups=[{"params": [p], "lr": torch.tensor(0.5), "graft": None}])
    table.regroup()
    table.name_parameters()
    session = RankSession(comm, table, Runtime(step=3))
    session.place(["a unit"])
    session.connect({"own": ["x"]})
    assert session.is_connected
    expected = {
        "the method": ["Newton"],
        "parameters": ["group 0 parameter 0 (2,) torch.float32"],
        "options of the groups": ["lr=0.5", "graft=None"],
        "steps taken": ["3"],
        "own": ["x"],
    }
    comm.connect.assert_called_once_with(expected, p.device)
    session.place(["another unit"])
    assert not session.is_connected
    assert comm.place.mock_calls == [call(["a unit"]), call(["another unit"])]
    for _ in range(2):
        session.compare_start({p: torch.full((2,), 2.0)})
    ((facts,), _) = comm.compare.call_args
    assert comm.compare.call_count == 1
    assert list(facts.values()) == [["3"], ["group 0 parameter 0: 2.0"], ["group 0 parameter 0: 4.0"]]


def test_a_session_without_parameters_does_not_connect() -> None:
    comm = Mock()
    session = RankSession(comm, ParameterTable("Newton"), Runtime())
    session.connect({})
    assert not session.is_connected
    comm.connect.assert_not_called()
