"""Steps without gradients, with some gradients missing, or with gradients of zero."""

import copy
from typing import Any

import pytest
import torch

from tests.support import contract
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_changed, assert_identical, backward, moved_names, train, values

RULES: dict[str, dict[str, Any]] = {
    **{name: rule for name, rule in contract.RULES.items() if "weight_decay" not in rule},
    "no-kl-clip": {"kl_clip": None},
    "cholesky": {"solver": "cholesky"},
}


@pytest.mark.rules(RULES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # without a backward pass, no statistics are captured
def test_first_steps_without_gradients_and_with_zero_gradients_change_nothing(
    method: Method, mlp: Task, rule: str
) -> None:
    for zeros in (False, True):
        model, optimizer = method.start(mlp, **RULES[rule])
        before = values(model)
        for parameter in model.parameters() if zeros else ():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert_identical(values(model), before)


@pytest.mark.cover(trained=[0, 3])
def test_zero_gradients_of_a_real_backward_change_nothing(
    method: Method, variant: Variant, task: Task, trained: int
) -> None:
    """Factors of output gradients and rows of a window that are all zero must not cause a NaN."""
    model, optimizer = method.start(task, trained, momentum=0.0, **variant.keywords)
    before = values(model)
    for step in range(trained, trained + 5):
        optimizer.zero_grad()
        (0.0 * task.loss(model, step)).backward()
        optimizer.step()
    if trained and variant.lingers:  # error feedback and averages of gradients still move the parameters
        assert all(value.isfinite().all() for value in values(model).values())
    else:
        assert_identical(values(model), before)


EVERYTHING = "first.weight first.bias scale.gain second.weight second.bias"
MISSING = ("first.weight", "first.bias", "second.weight", "scale.gain", "second.weight second.bias", EVERYTHING)


@pytest.mark.parametrize("trained", [0, 2])
def test_parameters_without_a_gradient_are_left_alone_and_join_later(method: Method, mlp: Task, trained: int) -> None:
    """As in torch, neither momentum nor decay moves them, and `step` does not count."""

    def kept(names: list[str]) -> list[dict[str, Any]]:
        states = [optimizer.state[model.get_parameter(name)] for name in names]
        return [{key: state.get(key) for key in ("step", "momentum_buffer")} for state in states]

    for missing in map(str.split, MISSING):
        model, optimizer = method.start(mlp, trained, weight_decay=0.1)
        before, state = values(model), copy.deepcopy(kept(missing))
        for step in range(trained, trained + 2):
            backward(model, optimizer, mlp, step)
            for name in missing:
                model.get_parameter(name).grad = None
            optimizer.step()
        assert all(value.isfinite().all() for value in values(model).values())
        assert moved_names(model, before) == before.keys() - set(missing)
        assert_identical(kept(missing), state)
        before = values(model)
        train(model, optimizer, mlp, 2, start=trained + 2)
        assert_changed(model, before)


@pytest.mark.option("module")
def test_every_kind_of_zero_grad_trains_alike(method: Method, task: Task) -> None:
    """This includes `zero_grad` of the model, which the Hugging Face trainer calls."""
    results = []
    for kind in ("set_to_none", "zero", "model"):
        model, optimizer = method.start(task)
        for step in range(5):
            model.zero_grad() if kind == "model" else optimizer.zero_grad(set_to_none=kind == "set_to_none")
            task.loss(model, step).backward()
            optimizer.step()
        results.append(values(model))
    assert_identical(results[1:], results[:1] * 2)
