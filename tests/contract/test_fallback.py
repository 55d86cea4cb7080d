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
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from tests.support.methods import Method, Variant
from tests.support.tasks import TRANSFORMER, Shadow, Task, assert_changed, assert_identical, backward, train, values

pytestmark = pytest.mark.option("fallback", "fallback_lr")
LAYERWISE = pytest.mark.option("skip_layers")
WINDOWED = pytest.mark.option("skip_biases", "skip_norm_layers")

OWN: dict[str, Any] = {"fallback": "adamw", "fallback_lr": 0.02, "fallback_betas": (0.5, 0.75)}
PLAIN = {"step", "global_step", "momentum_buffer", "exp_avg", "exp_avg_sq"}


def momentum(p: Any) -> SGD:
    return SGD(p, 0.05, momentum=0.9)


def own_adamw(p: Any) -> AdamW:
    return AdamW(p, 0.02, betas=(0.5, 0.75), weight_decay=0.0)


Case = tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]
CASES: dict[str, Case] = {
    "default is sgd": ({}, momentum),
    "sgd": ({"fallback": "sgd", "weight_decay": 0.1}, lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.1)),
    "sgd ignores fallback_lr": ({"fallback": "sgd", "fallback_lr": 7.0}, momentum),
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
    "graft sgd": ({"graft": "sgd"}, momentum),
    "graft adam": ({"graft": "adam"}, lambda p: AdamW(p, 0.05, weight_decay=0.0)),
    "graft adam, sgd asked": ({"graft": "adam", "fallback": "sgd"}, momentum),
    "graft sgd, adamw asked": (
        {"graft": "sgd", "fallback": "adamw"},
        lambda p: AdamW(p, 0.05, weight_decay=0.0),
    ),
    "graft adam, lr asked": (
        {"graft": "adam", "fallback_lr": 0.02},
        lambda p: AdamW(p, 0.02, weight_decay=0.0),
    ),
    "inner adamw alone": ({"inner": "adamw"}, momentum),
}


def uncovered(method: Method, model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in method.left_out(model)]


def side_by_side(
    model: nn.Module,
    optimizer: Any,
    task: Task,
    *shadows: Shadow,
    steps: int = 5,
    after: Callable[[], Any] | None = None,
) -> None:
    """Train; torch's optimizers step on copies of what follows the fallback, with the same gradients."""
    for step in range(steps):
        backward(model, optimizer, task, step)
        for shadow in shadows:
            shadow.step()
        optimizer.step()
        if after is not None:
            after()


@pytest.mark.cover(dtype=[torch.float64, torch.float32])
@pytest.mark.rules(CASES)
def test_uncovered_parameter_beside_covered_ones(method: Method, mlp: Task, rule: str, dtype: torch.dtype) -> None:
    keywords, reference = CASES[rule]
    model = mlp.model(dtype)
    optimizer = method.build(model, **method.leave_out, **keywords)
    shadow, before = Shadow(uncovered(method, model), reference), values(model)
    side_by_side(model, optimizer, mlp, shadow, steps=6, after=shadow.assert_identical)
    assert_changed(model, before)


@pytest.mark.cover(case=[*CASES])
def test_a_model_that_everything_left_follows_the_fallback_alone(method: Method, case: str) -> None:
    """All layers that are skipped, or all norm layers of a window."""
    keywords, reference = CASES[case]
    nets = [nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5)) for _ in range(2)]
    left_out: dict[str, Any] = {"skip_layers": (nn.LayerNorm,)} if method.layerwise else {"skip_norm_layers": True}
    optimizer = method.build(nets[0], **left_out, **keywords)
    theirs = reference(nets[1].parameters())
    for step in range(5):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        for net, opt in zip(nets, (optimizer, theirs), strict=True):
            opt.zero_grad()
            (net(inputs) - inputs.roll(1, 0)).square().sum().backward()
            opt.step()
    assert_identical(values(nets[0]), values(nets[1]))
    assert all(state.keys() <= PLAIN for state in optimizer.state.values())


@LAYERWISE
def test_a_model_whose_every_layer_is_skipped_follows_the_fallback(method: Method, task: Task) -> None:
    model, twin = task.model(torch.float32), task.model(torch.float32)
    everything = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm)
    present = tuple(kind for kind in everything if any(isinstance(module, kind) for module in model.modules()))
    train(model, method.build(model, skip_layers=present), task, 5)
    train(twin, SGD(twin.parameters(), 0.05, momentum=0.9), task, 5)
    assert_identical(values(model), values(twin))


@WINDOWED
@pytest.mark.cover(how=["module", "named", "module="])
def test_norm_layers_are_known_by_their_type(method: Method, how: str) -> None:
    """Where there is a module: the gain of the model is one-dimensional too, and stays."""
    model = TRANSFORMER.model()
    params = {"module": None, "named": model.named_parameters(), "module=": model.parameters()}[how]
    extra = {} if how == "module" else {"module": model}
    optimizer = method.build(model, params, skip_norm_layers=True, **extra)
    shadow, before = Shadow(list(model.norm.parameters()), momentum), values(model)
    side_by_side(model, optimizer, TRANSFORMER, shadow)
    shadow.assert_identical()
    assert_changed(model, before)
    out = {name for name, p in model.named_parameters() if optimizer.state[p].keys() <= PLAIN}
    assert out == {"norm.weight", "norm.bias"}


@WINDOWED
def test_norm_layers_are_what_has_one_dimension_without_a_module(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.parameters(), skip_norm_layers=True)
    shadow, before = Shadow([p for p in model.parameters() if p.ndim <= 1], momentum), values(model)
    side_by_side(model, optimizer, mlp, shadow)
    shadow.assert_identical()
    assert_changed(model, before)


@WINDOWED
def test_what_is_left_out_takes_no_part_in_the_window(method: Method, variant: Variant, mlp: Task) -> None:
    """The rest trains as if the biases were not there: their huge gradients do not reach it."""
    results = []
    for factor in (1.0, 1e6):
        model, optimizer = method.start(mlp, **variant.keywords, **method.leave_out)
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
@pytest.mark.cover(skipped={"name": "second", "pattern": "sec*", "type": nn.Linear, "instance": None})
def test_skipped_layers_follow_the_fallback(method: Method, mlp: Task, skipped: Any) -> None:
    model = mlp.model()
    optimizer = method.build(model, skip_layers=(model.second if skipped is None else skipped,))
    shadow = Shadow(list(model.second.parameters()), momentum)
    side_by_side(model, optimizer, mlp, shadow)
    shadow.assert_identical()
    assert optimizer.state[model.second.weight].keys() == {"step", "momentum_buffer"}
    assert (method.landmark in optimizer.state[model.first.weight]) == (skipped is not nn.Linear)


@WINDOWED
def test_fallback_per_group_beside_a_window(method: Method, mlp: Task) -> None:
    model = mlp.model()
    named = [(name, p) for name, p in model.named_parameters() if name != "second.bias"]
    groups: list[dict[str, Any]] = [{"params": named}, {"params": [("second.bias", model.second.bias)], **OWN}]
    optimizer = method.build(model, groups, **method.leave_out)
    sgd, adamw = Shadow([model.first.bias], momentum), Shadow([model.second.bias], own_adamw)
    side_by_side(model, optimizer, mlp, sgd, adamw)
    sgd.assert_identical()
    adamw.assert_identical()


@LAYERWISE
def test_fallback_per_group(method: Method, mlp: Task) -> None:
    model = mlp.model()
    rest = [(name, p) for name, p in model.named_parameters() if name != "scale.gain"]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [("scale.gain", model.scale.gain)], **OWN}]
    optimizer = method.build(model, groups, skip_layers=("second",))
    sgd, adamw = Shadow(list(model.second.parameters()), momentum), Shadow([model.scale.gain], own_adamw)
    side_by_side(model, optimizer, mlp, sgd, adamw)
    sgd.assert_identical()
    adamw.assert_identical()


def halved(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, 0.5)


def test_fallback_lr_is_scheduled_in_proportion_to_lr(method: Method, mlp: Task) -> None:
    """Halving is exact in floating point: equal to the bit."""
    model, optimizer = method.start(mlp, fallback="adamw", fallback_lr=0.02, weight_decay=0.1, **method.leave_out)
    shadow = Shadow(uncovered(method, model), lambda p: AdamW(p, 0.02, weight_decay=0.1))
    schedules = [halved(optimizer), halved(shadow.optimizer)]
    side_by_side(model, optimizer, mlp, shadow, after=lambda: [schedule.step() for schedule in schedules])
    shadow.assert_identical()


@pytest.mark.cover(lr_as=[float, torch.tensor])
def test_any_schedule_keeps_the_proportion(method: Method, mlp: Task, lr_as: Callable[[float], Any]) -> None:
    model, optimizer = method.start(mlp, lr=lr_as(0.05), fallback="adamw", fallback_lr=0.02, **method.leave_out)
    shadow = Shadow(uncovered(method, model), lambda p: AdamW(p, 0.02, weight_decay=0.0))
    schedules = [CosineAnnealingLR(o, 7) for o in (optimizer, shadow.optimizer)]
    side_by_side(model, optimizer, mlp, shadow, steps=6, after=lambda: [schedule.step() for schedule in schedules])
    tolerance = 1e-12 if lr_as is float else 1e-6  # the tensor is single precision
    for parameter, expected in zip(uncovered(method, model), shadow.values(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=tolerance, atol=0)


def test_proportion_survives_a_checkpoint(method: Method, mlp: Task) -> None:
    """The learning rate that the proportion refers to is not the one at which training resumes."""

    def build() -> Any:
        model, optimizer = method.start(mlp, fallback="adamw", fallback_lr=0.02, **method.leave_out)
        return model, optimizer, halved(optimizer)

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
    optimizer = method.build(
        model, [p for n, p in model.named_parameters() if n != "scale.gain"], fallback="adamw", fallback_lr=0.02
    )
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.add_param_group({"params": [model.scale.gain], "lr": 0.4})
    shadow = Shadow([model.scale.gain], lambda p: AdamW(p, 0.02, weight_decay=0.0))
    side_by_side(model, optimizer, mlp, shadow, steps=3)
    shadow.assert_identical()


def test_kl_clip_and_clipping_leave_it_alone(method: Method, mlp: Task) -> None:
    model = mlp.model()
    tight = {"kl_clip": 1e-9, "clip_norm": 1e-6, "clip_value": 1e-6}
    known = {keyword: bound for keyword, bound in tight.items() if method.accepts(keyword)}
    optimizer = method.build(model, **known, **method.leave_out)
    shadow, before = Shadow(uncovered(method, model), momentum), values(model)
    side_by_side(model, optimizer, mlp, shadow, steps=3)
    shadow.assert_identical()
    assert_changed(model, before)
