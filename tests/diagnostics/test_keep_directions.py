"""`keep_directions()` shows what each method subtracts, and goes together with `quantify_preconditioning`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder.diagnostics import quantify_preconditioning
from tests.support.methods import METHODS, Method
from tests.support.tasks import CNN, MLP, Task

CASES = [(method, variant.keywords) for method in METHODS for variant in method.variants]
IDS = [f"{method.name}-{variant.name}" for method in METHODS for variant in method.variants]
every_variant = pytest.mark.parametrize(("method", "keywords"), CASES, ids=IDS)
every_method = pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def step(model: nn.Module, optimizer: Any, task: Task, number: int) -> dict[str, Tensor]:
    """One step; returns the directions that were kept."""
    optimizer.zero_grad()
    task.loss(model, number).backward()
    with optimizer.keep_directions() as kept:
        optimizer.step()
    return kept


@pytest.mark.parametrize("task", [MLP, CNN], ids=["mlp", "cnn"])
@every_variant
def test_a_plain_step_subtracts_them(method: Method, keywords: dict[str, Any], task: Task) -> None:
    model = task.model()
    rate = 1e-3  # a whole step without any bound would diverge
    optimizer = method.build(model, **method.bare(lr=rate, **keywords))
    for number in range(6):
        before = values(model)
        kept = step(model, optimizer, task, number)
        assert set(kept) == method.covered(model)
        for name, p in model.named_parameters():
            if name in kept:
                assert kept[name].shape == p.shape
                torch.testing.assert_close(rate * kept[name], before[name] - p.detach(), rtol=1e-9, atol=1e-13)


@every_method
def test_they_come_before_momentum_learning_rate_and_decoupled_decay(method: Method) -> None:
    plain, busy = MLP.model(), MLP.model()
    first = method.build(plain, **method.bare(lr=1e-3))
    second = method.build(busy, lr=0.1, momentum=0.9, weight_decay=0.3, decoupled_weight_decay=True, **unbound(method))
    for number in range(5):
        busy.load_state_dict(plain.state_dict())  # so that both see the same gradients
        kept, wanted = step(busy, second, MLP, number), step(plain, first, MLP, number)
        for name in wanted:
            torch.testing.assert_close(kept[name], wanted[name], rtol=1e-9, atol=1e-12)


def unbound(method: Method) -> dict[str, Any]:
    return {"kl_clip": None} if method.accepts("kl_clip") else {}


@every_method
def test_they_are_copies_that_the_next_step_replaces(method: Method) -> None:
    model = MLP.model()
    optimizer = method.build(model)
    with optimizer.keep_directions() as kept:
        MLP.loss(model, 0).backward()
        optimizer.step()
        first, frozen = dict(kept), copy.deepcopy(kept)
        optimizer.zero_grad()
        MLP.loss(model, 1).backward()
        optimizer.step()
    assert kept.keys() == first.keys()
    for name in kept:
        assert torch.equal(first[name], frozen[name])
        assert not torch.equal(kept[name], first[name])


@every_method
def test_nothing_is_kept_outside_of_the_block_even_after_an_error(method: Method) -> None:
    model = MLP.model()
    optimizer = method.build(model)
    with pytest.raises(KeyError, match="stop"), optimizer.keep_directions() as kept:
        raise KeyError("stop")
    MLP.loss(model, 0).backward()
    optimizer.step()
    assert kept == {}


@every_method
def test_blocks_can_be_nested_and_left_in_any_order(method: Method) -> None:
    model = MLP.model()
    optimizer = method.build(model)
    outer, inner = optimizer.keep_directions(), optimizer.keep_directions()
    first, second = outer.__enter__(), inner.__enter__()
    MLP.loss(model, 0).backward()
    optimizer.step()
    assert set(first) == method.covered(model)
    assert first == second
    assert first is not second
    outer.__exit__(None, None, None)
    before = dict(first)
    MLP.loss(model, 1).backward()
    optimizer.step()
    assert all(first[name] is before[name] for name in before)
    assert all(second[name] is not before[name] for name in before)
    inner.__exit__(None, None, None)


@every_method
def test_looking_changes_nothing(method: Method) -> None:
    seen, unseen = MLP.model(), MLP.model()
    one, other = method.build(seen), method.build(unseen)
    for number in range(6):
        kept = step(seen, one, MLP, number)
        gradients = {name: p.grad for name, p in seen.named_parameters() if name in kept}
        quantify_preconditioning(gradients, kept, histogram=True)
        other.zero_grad()
        MLP.loss(unseen, number).backward()
        other.step()
    for name, value in values(seen).items():
        assert torch.equal(value, values(unseen)[name])


@every_variant
def test_preconditioning_by_a_positive_matrix_turns_by_less_than_a_right_angle(
    method: Method, keywords: dict[str, Any]
) -> None:
    """Of the vector that is preconditioned: where error feedback or momentum changes it, the first step has no past."""
    model = MLP.model()
    kept = step(model, method.build(model, **{**method.bare(), **keywords}), MLP, 0)
    gradients = {name: p.grad for name, p in model.named_parameters() if name in kept}
    report = quantify_preconditioning(gradients, kept)
    assert 0 <= float(report["qp_angle"]) < 90
    assert set(report["layers"]) == set(kept)
    assert report["qp_n"] == sum(int((g != 0).sum()) for g in gradients.values() if g is not None)


def test_parameters_without_a_gradient_have_no_direction() -> None:
    for method in METHODS:
        model = MLP.model()
        optimizer = method.build(model)
        MLP.loss(model, 0).backward()
        model.get_submodule("first").zero_grad()
        with optimizer.keep_directions() as kept:
            optimizer.step()
        assert set(kept) == {name for name in method.covered(model) if not name.startswith("first")}
