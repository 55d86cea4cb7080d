"""Equivalent options have equal results: `maximize` of the negative loss, both values of `foreach`, a tensor as `lr`.

Results do not depend on the memory layout either: transposed weights, strided gradients and channels_last models.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support import contract, tasks
from tests.support.methods import Method, Variant
from tests.support.tasks import CNN, MLP, Task, assert_all_close, assert_identical, moved_names, train, values

LR = 0.125  # exact in every dtype
OFF = {"switched-off": {"inv_update_steps": 0}, "switched-off, with rows": {"update_steps": 0}}
RULES: dict[str, dict[str, Any]] = contract.RULES | OFF


def ascended(method: Method, task: Task, **keywords: Any) -> dict[str, torch.Tensor]:
    """The parameters after five steps that maximize the negative loss."""
    model, optimizer = method.start(task, maximize=True, **keywords)
    for step in range(5):
        optimizer.zero_grad()
        (-task.loss(model, step)).backward()
        optimizer.step()
    return values(model)


def check(method: Method, task: Task, **keywords: Any) -> None:
    assert_identical(ascended(method, task, **keywords), method.trained(task, **keywords))
    loop, batched = (method.trained(task, **keywords, foreach=foreach) for foreach in (False, True))
    assert_all_close(batched, loop)


def test_maximize_and_foreach_for_every_variant_and_task(method: Method, variant: Variant, task: Task) -> None:
    check(method, task, **variant.keywords)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.rules(RULES)
def test_maximize_foreach_and_tensor_lr_under_every_rule(method: Method, mlp: Task, rule: str) -> None:
    check(method, mlp, **RULES[rule])
    expected = method.trained(mlp, **{**RULES[rule], "lr": LR})
    for shape, foreach in (((), False), ((1,), True), ((), None)):
        lr = torch.full(shape, LR, dtype=torch.float64)
        assert_all_close(method.trained(mlp, **{**RULES[rule], "lr": lr, "foreach": foreach}), expected)


def test_foreach_with_parameters_of_several_dtypes(method: Method, mlp: Task) -> None:
    results = []
    for foreach in (False, True):
        model = mlp.model()
        model.second.float()
        optimizer = method.build(model, foreach=foreach)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = mlp.batch(step)
            hidden = model.scale(torch.tanh(model.first(inputs)))
            torch.nn.functional.cross_entropy(model.second(hidden.float()), targets).backward()
            optimizer.step()
        results.append(values(model))
    assert_all_close(results[1], results[0], rtol=1e-5, atol=1e-7)


def test_a_scheduler_moves_a_tensor_lr_in_place(method: Method, mlp: Task) -> None:
    results = []
    for lr in (LR, torch.tensor(LR, dtype=torch.float64)):
        model, optimizer = method.start(mlp, lr=lr)
        inside = optimizer.param_groups[0]["lr"]
        assert inside is lr
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(4):
            train(model, optimizer, mlp, 1, start=step)
            assert float(optimizer.param_groups[0]["lr"]) == LR / 2**step  # steps do not change it
            scheduler.step()
        results.append(values(model))
    assert optimizer.param_groups[0]["lr"] is inside
    assert_all_close(results[1], results[0])


def test_groups_do_not_share_a_tensor_lr_by_accident(method: Method, mlp: Task) -> None:
    model = mlp.model()
    groups: list[dict[str, Any]] = [{"params": list(layer.parameters())} for layer in (model.first, model.second)]
    groups[0]["lr"] = torch.tensor(LR)
    optimizer, before = method.build(model, groups), values(model)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    train(model, optimizer, mlp, 2)
    assert moved_names(model, before) == {"second.weight", "second.bias"}


def test_tensor_lr_survives_a_checkpoint(method: Method, mlp: Task) -> None:
    _, optimizer = method.start(mlp, 2, lr=torch.tensor(LR))
    second = method.build(mlp.model(), lr=torch.tensor(1.0))
    saved = tasks.snapshot(optimizer)
    second.load_state_dict(saved)
    assert_identical(second.param_groups[0]["lr"], torch.tensor(LR))
    saved["param_groups"][0]["lr"].fill_(7.0)  # the optimizer must have made a copy
    assert_identical(second.param_groups[0]["lr"], torch.tensor(LR))


class Layout(NamedTuple):
    """A memory layout of models and gradients that does not affect results."""

    task: Task
    change: Callable[[nn.Module], object]
    is_kept: Callable[[nn.Module], bool]


def transpose(model: nn.Module) -> None:
    for layer in (model.first, model.second):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())


LAYOUTS = {
    "transposed": Layout(MLP, transpose, lambda model: model.first.weight.stride() == (1, 4)),
    "channels last": Layout(
        CNN,
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.first.weight.is_contiguous(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_layout_of_weights_and_gradients(method: Method, variant: Variant, layout: Layout) -> None:
    """In every other step, gradients have gaps between their entries."""
    model = layout.task.model()
    layout.change(model)
    optimizer = method.build(model, **variant.keywords)
    for step in range(5):
        tasks.backward(model, optimizer, layout.task, step)
        for parameter in model.parameters() if step % 2 else ():
            parameter.grad = torch.stack([parameter.grad, torch.zeros_like(parameter.grad)], -1)[..., 0]
        optimizer.step()
    assert_all_close(values(model), method.trained(layout.task, **variant.keywords), rtol=1e-10, atol=1e-12)
    assert layout.is_kept(model)
