"""Public members that observers of an optimizer read: steps, module, names of parameters, capture."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch

from secondorder import EKFAC, KFAC, HyLo
from tests.support.methods import METHODS, Method
from tests.support.tasks import MLP, train

LAYERWISE = [method for method in METHODS if method.layerwise]
every_method = pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
every_layer_method = pytest.mark.parametrize("method", LAYERWISE, ids=[method.name for method in LAYERWISE])


@every_method
def test_steps_are_counted_over_a_checkpoint_and_parameters_have_the_names_of_the_module(method: Method) -> None:
    model = MLP.model()
    optimizer: Any = method.build(model)
    assert [optimizer.parameter_name(p) for p in model.parameters()] == [name for name, _ in model.named_parameters()]
    for number in range(3):
        assert optimizer.steps == number
        train(model, optimizer, MLP, 1, start=number)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.steps == 3, "without a gradient no step is taken"
    other: Any = method.build(MLP.model())
    other.load_state_dict(optimizer.state_dict())
    assert other.steps == 3


@every_layer_method
def test_the_module_is_the_attached_one_and_its_statistics_can_be_discarded(method: Method) -> None:
    model = MLP.model()
    optimizer: Any = method.build(model)
    assert optimizer.module is model
    twin = copy.deepcopy(optimizer)
    assert twin.module is None
    with pytest.raises(RuntimeError, match="is a copy and has no module to capture from"):
        _ = twin.capture
    MLP.loss(model, 0).backward()
    assert optimizer.capture.statistics.by_site
    optimizer.preconditioner.hooks.discard()
    assert not optimizer.capture.statistics.by_site
    taps = optimizer.capture
    optimizer.detach()
    assert optimizer.module is None
    assert taps.gate.is_closed
    with pytest.raises(RuntimeError, match="was closed"):
        _ = optimizer.capture
    optimizer.attach(model)
    assert optimizer.module is model
    assert not optimizer.capture.gate.is_closed


@pytest.mark.parametrize(("make", "factor"), [(KFAC, 4), (EKFAC, 2)])
def test_dense_curvature_reads_a_state_that_was_replaced(make: Any, factor: float) -> None:
    model = MLP.model()
    optimizer = make(model, lr=0.01, factor_update_steps=1)
    train(model, optimizer, MLP, 1)
    before = optimizer.dense_curvature("first")
    optimizer.state = defaultdict(dict, {p: copy.deepcopy(state) for p, state in optimizer.state.items()})
    for state in optimizer.state.values():
        for name, value in state.items():
            if name in ("factor_a", "factor_g", "scale"):
                value.mul_(2)
    torch.testing.assert_close(optimizer.dense_curvature("first"), factor * before)


def test_fisher_is_the_argument() -> None:
    model = torch.nn.Linear(3, 2)
    found = [KFAC(model), KFAC(model, fisher="mc"), HyLo(model), HyLo(model, fisher="exact")]
    assert [optimizer.fisher for optimizer in found] == ["empirical", "mc", "empirical", "exact"]
