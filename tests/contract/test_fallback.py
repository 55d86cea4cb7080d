"""The rule of parameters without a block is torch's SGD or AdamW, to the bit, at the scheduled learning rate.

A layer method has no block for `scale.gain`; a window leaves out what it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from tests.support.methods import Method, Variant
from tests.support.tasks import TRANSFORMER, Shadow, Task, assert_changed, assert_identical, backward, train, values

pytestmark = pytest.mark.option("fallback", "fallback_lr")
LAYERWISE = pytest.mark.option("skip_layers")
WINDOWED = pytest.mark.option("skip_biases", "skip_norm_layers")

PLAIN = {"step", "global_step", "momentum_buffer", "exp_avg", "exp_avg_sq"}

Case = tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]
CASES: dict[str, Case] = {
    "default is sgd": ({}, lambda p: SGD(p, 0.05, momentum=0.9)),
    "sgd": ({"fallback": "sgd", "weight_decay": 0.1}, lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.1)),
    "sgd ignores fallback_lr": ({"fallback": "sgd", "fallback_lr": 7.0}, lambda p: SGD(p, 0.05, momentum=0.9)),
    "nesterov": ({"nesterov": True}, lambda p: SGD(p, 0.05, momentum=0.9, nesterov=True)),
    "no momentum": ({"momentum": 0.0}, lambda p: SGD(p, 0.05)),
    "maximize": ({"maximize": True}, lambda p: SGD(p, 0.05, momentum=0.9, maximize=True)),
    "adamw": ({"fallback": "adamw"}, lambda p: AdamW(p, 1e-3, weight_decay=0.0)),
    "adamw lr": ({"fallback": "adamw", "fallback_lr": 0.02}, lambda p: AdamW(p, 0.02, weight_decay=0.0)),
    "adamw decay": (
        {"fallback": "adamw", "fallback_lr": 0.02, "weight_decay": 0.1},
        lambda p: AdamW(p, 0.02, weight_decay=0.1),
    ),
    "adamw betas": (
        {"fallback": "adamw", "fallback_lr": 0.02, "fallback_betas": (0.5, 0.75), "fallback_eps": 1e-3},
        lambda p: AdamW(p, 0.02, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.0),
    ),
    "adamw maximize": (
        {"fallback": "adamw", "fallback_lr": 0.02, "maximize": True},
        lambda p: AdamW(p, 0.02, weight_decay=0.0, maximize=True),
    ),
    "graft sgd": ({"graft": "sgd"}, lambda p: SGD(p, 0.05, momentum=0.9)),
    "graft adam": ({"graft": "adam"}, lambda p: AdamW(p, 0.05, weight_decay=0.0)),
    "graft adam, sgd asked": ({"graft": "adam", "fallback": "sgd"}, lambda p: SGD(p, 0.05, momentum=0.9)),
    "graft sgd, adamw asked": (
        {"graft": "sgd", "fallback": "adamw"},
        lambda p: AdamW(p, 0.05, weight_decay=0.0),
    ),
    "graft adam, lr asked": (
        {"graft": "adam", "fallback_lr": 0.02},
        lambda p: AdamW(p, 0.02, weight_decay=0.0),
    ),
    "inner adamw alone": ({"inner": "adamw"}, lambda p: SGD(p, 0.05, momentum=0.9)),
}


def uncovered(method: Method, model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in method.left_out(model)]


@pytest.mark.cover(dtype=[torch.float64, torch.float32])
@pytest.mark.rules(CASES)
def test_uncovered_parameter_beside_covered_ones(method: Method, mlp: Task, rule: str, dtype: torch.dtype) -> None:
    keywords, reference = CASES[rule]
    model = mlp.model(dtype)
    optimizer = method.build(model, **method.leave_out, **keywords)
    shadow = Shadow(uncovered(method, model), reference)
    before = values(model)
    for step in range(6):
        backward(model, optimizer, mlp, step)
        shadow.step()
        optimizer.step()
        shadow.assert_identical()
    assert_changed(model, before)


@pytest.mark.cover(case=[*CASES])
@WINDOWED
def test_window_that_everything_left(method: Method, case: str) -> None:
    keywords, reference = CASES[case]
    nets = [nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5)) for _ in range(2)]
    optimizer = method.build(nets[0], skip_norm_layers=True, **keywords)
    theirs = reference(nets[1].parameters())
    for step in range(5):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        for net, opt in zip(nets, (optimizer, theirs), strict=True):
            opt.zero_grad()
            (net(inputs) - inputs.roll(1, 0)).square().sum().backward()
            opt.step()
    assert_identical(values(nets[0]), values(nets[1]))
    assert all(state.keys() <= PLAIN for state in optimizer.state.values())


@pytest.mark.cover(case=[*CASES])
@LAYERWISE
def test_model_with_every_layer_skipped(method: Method, task: Task, case: str) -> None:
    keywords, reference = CASES[case]
    model, twin = task.model(torch.float32), task.model(torch.float32)
    everything = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm)
    present = tuple(kind for kind in everything if any(isinstance(module, kind) for module in model.modules()))
    optimizer, theirs = method.build(model, skip_layers=present, **keywords), reference(twin.parameters())
    for step in range(5):
        train(model, optimizer, task, 1, start=step)
        train(twin, theirs, task, 1, start=step)
    assert_identical(values(model), values(twin))


@WINDOWED
@pytest.mark.cover(how=["module", "named", "module="])
def test_norm_layers_are_known_by_their_type(method: Method, how: str) -> None:
    """Where there is a module: the gain of the model is one-dimensional too, and stays."""
    model = TRANSFORMER.model()
    params = {"module": None, "named": model.named_parameters(), "module=": model.parameters()}[how]
    extra = {} if how == "module" else {"module": model}
    optimizer = method.build(model, params, skip_norm_layers=True, **extra)
    shadow = Shadow(list(model.norm.parameters()), lambda p: SGD(p, 0.05, momentum=0.9))
    before = values(model)
    for step in range(6):
        backward(model, optimizer, TRANSFORMER, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()
    assert_changed(model, before)
    out = {name for name, p in model.named_parameters() if optimizer.state[p].keys() <= PLAIN}
    assert out == {"norm.weight", "norm.bias"}


@WINDOWED
def test_norm_layers_are_what_has_one_dimension_without_a_module(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.parameters(), skip_norm_layers=True)
    small = [p for p in model.parameters() if p.ndim <= 1]
    shadow = Shadow(small, lambda p: SGD(p, 0.05, momentum=0.9))
    before = values(model)
    for step in range(6):
        backward(model, optimizer, mlp, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()
    assert_changed(model, before)


@WINDOWED
def test_what_is_left_out_takes_no_part_in_the_window(method: Method, variant: Variant, mlp: Task) -> None:
    """The rest trains as if the biases were not there: their huge gradients do not reach it."""
    results = []
    for factor in (1.0, 1e6):
        model = mlp.model()
        optimizer = method.build(model, **variant.keywords, **method.leave_out)
        start = values(model)
        for step in range(6):
            backward(model, optimizer, mlp, step)
            for parameter in uncovered(method, model):
                parameter.grad.mul_(factor)
            optimizer.step()
            with torch.no_grad():
                for name in method.left_out(model):
                    model.get_parameter(name).copy_(start[name])
        results.append(values(model))
    assert_identical(results[1], results[0])


@LAYERWISE
@pytest.mark.cover(skipped=["second", "sec*", nn.Linear])
def test_skipped_layers_follow_the_fallback(method: Method, mlp: Task, skipped: Any) -> None:
    model = mlp.model()
    optimizer = method.build(model, skip_layers=(skipped,))
    shadow = Shadow(list(model.second.parameters()), lambda p: SGD(p, 0.05, momentum=0.9))
    for step in range(5):
        backward(model, optimizer, mlp, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()


@LAYERWISE
def test_skipped_instance_follows_the_fallback(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, skip_layers=(model.second,))
    assert optimizer.state[model.second.weight].keys() == {"step", "momentum_buffer"}
    assert method.landmark in optimizer.state[model.first.weight]


@WINDOWED
def test_fallback_per_group_beside_a_window(method: Method, mlp: Task) -> None:
    model = mlp.model()
    named = [(name, p) for name, p in model.named_parameters() if name != "second.bias"]
    own: dict[str, Any] = {"fallback": "adamw", "fallback_lr": 0.02, "fallback_betas": (0.5, 0.75)}
    groups: list[dict[str, Any]] = [{"params": named}, {"params": [("second.bias", model.second.bias)], **own}]
    optimizer = method.build(model, groups, **method.leave_out)
    sgd = Shadow([model.first.bias], lambda p: SGD(p, 0.05, momentum=0.9))
    adamw = Shadow([model.second.bias], lambda p: AdamW(p, 0.02, betas=(0.5, 0.75), weight_decay=0.0))
    for step in range(5):
        backward(model, optimizer, mlp, step)
        sgd.step()
        adamw.step()
        optimizer.step()
    sgd.assert_identical()
    adamw.assert_identical()


@LAYERWISE
def test_fallback_per_group(method: Method, mlp: Task) -> None:
    model = mlp.model()
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters())},
        {"params": [extra], "fallback": "adamw", "fallback_lr": 0.02, "fallback_betas": (0.5, 0.75)},
    ]
    optimizer = method.build(model, groups)
    sgd = Shadow([model.scale.gain], lambda p: SGD(p, 0.05, momentum=0.9))
    adamw = Shadow([extra], lambda p: AdamW(p, 0.02, betas=(0.5, 0.75), weight_decay=0.0))
    for step in range(5):
        backward(model, optimizer, mlp, step)
        extra.grad = torch.full_like(extra, 0.5 - step)
        sgd.step()
        adamw.step()
        optimizer.step()
    sgd.assert_identical()
    adamw.assert_identical()


def test_fallback_lr_is_scheduled_in_proportion_to_lr(method: Method, mlp: Task) -> None:
    """Halving is exact in floating point: equal to the bit."""
    model = mlp.model()
    optimizer = method.build(model, fallback="adamw", fallback_lr=0.02, weight_decay=0.1, **method.leave_out)
    shadow = Shadow(uncovered(method, model), lambda p: AdamW(p, 0.02, weight_decay=0.1))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, shadow.optimizer)]
    for step in range(5):
        backward(model, optimizer, mlp, step)
        shadow.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    shadow.assert_identical()


@pytest.mark.cover(lr_as=[float, torch.tensor])
def test_any_schedule_keeps_the_proportion(method: Method, mlp: Task, lr_as: Callable[[float], Any]) -> None:
    model = mlp.model()
    optimizer = method.build(model, lr=lr_as(0.05), fallback="adamw", fallback_lr=0.02, **method.leave_out)
    shadow = Shadow(uncovered(method, model), lambda p: AdamW(p, 0.02, weight_decay=0.0))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 7) for o in (optimizer, shadow.optimizer)]
    for step in range(6):
        backward(model, optimizer, mlp, step)
        shadow.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    tolerance = 1e-12 if lr_as is float else 1e-6  # the tensor is single precision
    for parameter, expected in zip(uncovered(method, model), shadow.values(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=tolerance, atol=0)


def test_proportion_survives_a_checkpoint(method: Method, mlp: Task) -> None:
    """The learning rate that the proportion refers to is not the one at which training resumes."""

    def build() -> Any:
        model = mlp.model()
        optimizer = method.build(model, fallback="adamw", fallback_lr=0.02, **method.leave_out)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model, optimizer, schedule = build()
    for step in range(2):
        train(model, optimizer, mlp, 1, start=step)
        schedule.step()
    other, second, later = build()
    other.load_state_dict(model.state_dict())
    second.load_state_dict(optimizer.state_dict())
    later.load_state_dict(schedule.state_dict())
    for step in range(2, 5):
        for net, opt, sched in ((model, optimizer, schedule), (other, second, later)):
            train(net, opt, mlp, 1, start=step)
            sched.step()
    assert_identical(values(other), values(model))


@LAYERWISE
def test_fallback_lr_of_a_group_that_joins_late(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.parameters(), fallback="adamw", fallback_lr=0.02)
    optimizer.param_groups[0]["lr"] *= 0.5
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra], "lr": 0.4})
    shadow = Shadow([extra], lambda p: AdamW(p, 0.02, weight_decay=0.0))
    for step in range(3):
        backward(model, optimizer, mlp, step)
        extra.grad = torch.full_like(extra, 0.5 - step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()


def test_kl_clip_and_clipping_leave_it_alone(method: Method, mlp: Task) -> None:
    model = mlp.model()
    tight = {"kl_clip": 1e-9, "clip_norm": 1e-6, "clip_value": 1e-6}
    known = {keyword: bound for keyword, bound in tight.items() if method.accepts(keyword)}
    optimizer = method.build(model, **known, **method.leave_out)
    shadow = Shadow(uncovered(method, model), lambda p: SGD(p, 0.05, momentum=0.9))
    before = values(model)
    for step in range(3):
        backward(model, optimizer, mlp, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()
    assert_changed(model, before)
