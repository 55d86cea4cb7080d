"""What ranks compare before they train together, on plain values and a strategy that writes down what it is asked."""

from typing import Any, cast

import torch
from torch import nn

from secondorder.parallel.session import RankSession, words_of_options
from secondorder.parameters import ParameterTable
from secondorder.runtime import Runtime


class Recorder:
    """Writes down what a session says."""

    combines = True

    def __init__(self) -> None:
        self.placed: list[Any] = []
        self.met: list[dict[str, list[str]]] = []
        self.compared: list[dict[str, list[str]]] = []

    def place(self, units: Any) -> None:
        self.placed.append(units)

    def connect(self, facts: dict[str, list[str]], device: torch.device) -> None:
        self.met.append(facts)

    def compare(self, facts: dict[str, list[str]]) -> None:
        self.compared.append(facts)


def opened(**options: Any) -> tuple[RankSession, Any, nn.Parameter]:
    p, comm = nn.Parameter(torch.ones(2)), Recorder()
    table = ParameterTable("Newton", groups=[{"params": [p], **options}])
    table.regroup()
    table.name_parameters()
    return RankSession(cast(Any, comm), table, Runtime(step=3)), comm, p


def test_ranks_meet_again_when_units_were_placed() -> None:
    session, comm, _ = opened(lr=0.5)
    session.place(["a unit"])
    session.connect({"own": ["x"]})
    assert session.is_connected
    (facts,) = comm.met
    assert facts == {
        "the method": ["Newton"],
        "parameters": ["group 0 parameter 0 (2,) torch.float32"],
        "options of the groups": ["lr=0.5"],
        "steps taken": ["3"],
        "own": ["x"],
    }
    session.place(["another unit"])
    assert not session.is_connected
    assert comm.placed == [["a unit"], ["another unit"]]


def test_the_start_is_compared_once() -> None:
    session, comm, p = opened()
    for _ in range(2):
        session.compare_start({p: torch.full((2,), 2.0)})
    (facts,) = comm.compared
    steps, values, gradients = facts.values()
    assert (steps, values, gradients) == (["3"], ["group 0 parameter 0: 2.0"], ["group 0 parameter 0: 4.0"])


def test_a_session_without_parameters_does_not_connect() -> None:
    comm = Recorder()
    session = RankSession(cast(Any, comm), ParameterTable("Newton"), Runtime())
    session.connect({})
    assert not session.is_connected
    assert not comm.met


def test_options_in_words_leave_parameters_out() -> None:
    groups = [{"params": [], "param_names": [], "lr": torch.tensor(0.5), "graft": None}]
    assert words_of_options(groups) == ["lr=0.5", "graft=None"]
