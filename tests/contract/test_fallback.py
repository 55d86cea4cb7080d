"""Parameters without a block follow torch's SGD, Adam or AdamW bit for bit, with the scheduled learning rate.

A layer method has no block for `scale.gain`; a window method only excludes parameters by its options. `graft`,
`fallback` and `inner` accept two names of Adam's rule: for `"adam"`, `decoupled_weight_decay` decides whether weight
decay is decoupled, and for `"adamw"`, it always is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from tests.contract.test_schedulers import SCHEDULERS, tick
from tests.support.methods import Method, Variant
from tests.support.oracles.layers import row_of
from tests.support.tasks import TRANSFORMER, Shadow, Task, assert_changed, assert_identical, backward, values

pytestmark = pytest.mark.option("fallback", "fallback_lr")
LAYERWISE = pytest.mark.option("skip_layers")
WINDOWED = pytest.mark.option("skip_biases", "skip_norm_layers")

LR, DECAY = 0.05, 0.1
OWN: dict[str, Any] = {"fallback": "adamw", "fallback_lr": 0.02, "fallback_betas": (0.5, 0.75)}
PLAIN = {"step", "global_step", "momentum_buffer", "exp_avg", "exp_avg_sq"}


def sgd(momentum: float = 0.9, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda p: SGD(p, LR, momentum=momentum, **options)


def adamw(lr: float = LR, weight_decay: float = 0.0, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda p: AdamW(p, lr, weight_decay=weight_decay, **options)


own_adamw = adamw(0.02, betas=(0.5, 0.75))

Case = tuple[dict[str, Any], Callable[[Any], Optimizer]]
CASES: dict[str, Case] = {
    "default is sgd": ({}, sgd()),
    "sgd": ({"fallback": "sgd", "weight_decay": DECAY}, sgd(weight_decay=DECAY)),
    "sgd ignores fallback_lr": ({"fallback": "sgd", "fallback_lr": 7.0}, sgd()),
    "nesterov": ({"nesterov": True}, sgd(nesterov=True)),
    "no momentum": ({"momentum": 0.0}, sgd(0.0)),
    "maximize": ({"maximize": True}, sgd(maximize=True)),
    "adamw": ({"fallback": "adamw"}, adamw(1e-3)),
    "adamw lr": ({"fallback": "adamw", "fallback_lr": 0.02}, adamw(0.02)),
    "adamw decay": ({"fallback": "adamw", "fallback_lr": 0.02, "weight_decay": DECAY}, adamw(0.02, DECAY)),
    "adamw betas": ({**OWN, "fallback_eps": 1e-3}, adamw(0.02, betas=(0.5, 0.75), eps=1e-3)),
    "adamw maximize": ({"fallback": "adamw", "fallback_lr": 0.02, "maximize": True}, adamw(0.02, maximize=True)),
    "graft sgd": ({"graft": "sgd"}, sgd()),
    "graft sgd decay": ({"graft": "sgd", "weight_decay": DECAY}, sgd(weight_decay=DECAY)),
    "graft adam": ({"graft": "adam"}, adamw()),
    "graft adam coupled": ({"graft": "adam", "weight_decay": DECAY}, lambda p: Adam(p, LR, weight_decay=DECAY)),
    "graft adam decoupled": (
        {"graft": "adam", "weight_decay": DECAY, "decoupled_weight_decay": True},
        adamw(LR, DECAY),
    ),
    "graft adamw": ({"graft": "adamw", "weight_decay": DECAY}, adamw(LR, DECAY)),
    "graft adam, fallback sgd": ({"graft": "adam", "fallback": "sgd"}, sgd()),
    "graft sgd, fallback adamw": ({"graft": "sgd", "fallback": "adamw"}, adamw()),
    "graft adam, fallback lr": ({"graft": "adam", "fallback_lr": 0.02}, adamw(0.02)),
    "inner adamw alone": ({"inner": "adamw"}, sgd()),
    "clipped": ({"clip_norm": 1e-6, "clip_value": 1e-6}, sgd()),
    "clipped by the curvature": ({"kl_clip": 1e-9}, sgd()),
}
#: Cases in which any schedule sets the same rates and momenta as for torch's own optimizer.
SCHEDULED = {"graft sgd decay", "graft adam", "graft adam coupled", "graft adam decoupled", "graft adamw"}


def uncovered(method: Method, model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in method.left_out(model)]


def side_by_side(model: nn.Module, optimizer: Any, task: Task, *shadows: Shadow, steps: int = 5) -> None:
    """Train next to torch's optimizers on copies of parameters with the fallback: both are bitwise equal."""
    for step in range(steps):
        backward(model, optimizer, task, step)
        for shadow in shadows:
            shadow.step()
        optimizer.step()
        for shadow in shadows:
            shadow.assert_identical()


@pytest.mark.cover(dtype=[torch.float64, torch.float32])
@pytest.mark.rules(CASES)
def test_uncovered_parameters_next_to_covered_ones(method: Method, mlp: Task, rule: str, dtype: torch.dtype) -> None:
    keywords, reference = CASES[rule]
    model = mlp.model(dtype)
    optimizer = method.build(model, **method.leave_out, **keywords)
    before = values(model)
    side_by_side(model, optimizer, mlp, Shadow(uncovered(method, model), reference), steps=6)
    assert_changed(model, before)


@pytest.mark.full
@pytest.mark.cover(case=sorted(SCHEDULED), schedule=[*SCHEDULERS])
def test_a_model_on_the_fallback_follows_every_schedule_as_in_torch(method: Method, case: str, schedule: str) -> None:
    """All layers are skipped."""
    keywords, reference = CASES[case]
    nothing = {"skip_layers": (nn.LayerNorm,)} if method.layerwise else {"skip_norm_layers": True}
    nets = [nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5)).double() for _ in range(2)]
    optimizers = method.build(nets[0], **{"lr": LR, **keywords, **nothing}), reference(nets[1].parameters())
    schedules = [SCHEDULERS[schedule](optimizer) for optimizer in optimizers]
    for step in range(6):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for net, optimizer, scheduler in zip(nets, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            (net(inputs) - inputs.roll(1, 0)).square().sum().backward()
            optimizer.step()
            tick(scheduler)
    assert all(state.keys() <= PLAIN for state in optimizers[0].state.values())
    assert_identical(values(nets[0]), values(nets[1]))


@WINDOWED
@pytest.mark.parametrize("how", ["module", "named", "module=", "parameters"])
def test_norm_layers_are_recognized_by_type_or_by_dimension(method: Method, how: str) -> None:
    """Without a module, all parameters with one dimension count as those of norm layers."""
    model = TRANSFORMER.model()
    params = {"module": None, "named": model.named_parameters()}.get(how, model.parameters())
    extra = {"module": model} if how in ("named", "module=") else {}
    optimizer = method.build(model, params, skip_norm_layers=True, **extra)
    named, before = dict(model.named_parameters()), values(model)
    expected = {n: p for n, p in named.items() if (p.ndim <= 1 if how == "parameters" else n.startswith("norm."))}
    side_by_side(model, optimizer, TRANSFORMER, Shadow([*expected.values()], sgd()))
    assert_changed(model, before)
    assert {name for name, p in named.items() if optimizer.state[p].keys() <= PLAIN} == expected.keys()


@WINDOWED
def test_parameters_that_are_left_out_do_not_affect_the_window(method: Method, variant: Variant, mlp: Task) -> None:
    """The size of their gradients does not change the steps of other parameters."""
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
    side_by_side(model, optimizer, mlp, Shadow(list(model.second.parameters()), sgd()))
    assert optimizer.state[model.second.weight].keys() == {"step", "momentum_buffer"}
    assert (method.landmark in optimizer.state[model.first.weight]) == (skipped is not nn.Linear)


def test_fallback_per_group(method: Method, mlp: Task) -> None:
    model = mlp.model()
    left_out = {"skip_layers": ("second",)} if method.layerwise else method.leave_out
    last = "scale.gain" if method.layerwise else "second.bias"
    rest = [(name, p) for name, p in model.named_parameters() if name != last]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [(last, model.get_parameter(last))], **OWN}]
    optimizer = method.build(model, groups, **left_out)
    plain = list(model.second.parameters()) if method.layerwise else [model.first.bias]
    side_by_side(model, optimizer, mlp, Shadow(plain, sgd()), Shadow([model.get_parameter(last)], own_adamw))


def test_fallback_lr_is_scheduled_in_proportion_to_lr(method: Method, mlp: Task) -> None:
    """`OneCycleLR` replaces the learning rate of the constructor, so its peak takes the place of that rate."""
    cosine, cycle = partial(CosineAnnealingLR, T_max=7), partial(OneCycleLR, total_steps=8, cycle_momentum=False)
    for lr, ours, theirs in (
        (LR, cosine, cosine),
        (torch.tensor(LR, dtype=torch.float64), cosine, cosine),
        (LR, partial(cycle, max_lr=0.3), partial(cycle, max_lr=0.02)),
    ):
        options = {"fallback": "adamw", "fallback_lr": 0.02, "weight_decay": DECAY, **method.leave_out}
        model, optimizer = method.start(mlp, lr=lr, **options)
        shadow = Shadow(uncovered(method, model), adamw(0.02, DECAY))
        schedules = [ours(optimizer), theirs(shadow.optimizer)]
        for step in range(6):
            backward(model, optimizer, mlp, step)
            shadow.step()
            optimizer.step()
            for schedule in schedules:
                schedule.step()
        found = [parameter.detach() for parameter in uncovered(method, model)]
        torch.testing.assert_close(found, shadow.values(), rtol=1e-12, atol=0)


def test_nothing_moves_without_a_learning_rate(method: Method, mlp: Task) -> None:
    model, _ = method.start(mlp, 2, lr=0.0, fallback="adamw", fallback_lr=0.02, **method.leave_out)
    assert_identical(values(model), values(mlp.model()))


@LAYERWISE
def test_fallback_lr_of_a_group_that_is_added_later(method: Method, mlp: Task) -> None:
    model = mlp.model()
    rest = [p for n, p in model.named_parameters() if n != "scale.gain"]
    optimizer = method.build(model, rest, fallback="adamw", fallback_lr=0.02)
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.add_param_group({"params": [model.scale.gain], "lr": 0.4})
    side_by_side(model, optimizer, mlp, Shadow([model.scale.gain], adamw(0.02)), steps=3)


@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_the_fallback_has_the_name_of_the_graft(method: Method, mlp: Task, rule: str) -> None:
    optimizer = method.build(mlp.model(), graft=rule, **method.leave_out)
    assert optimizer.param_groups[0]["fallback"] == rule
    for name in method.left_out(mlp.model()):
        assert f"{rule} fallback" in row_of(optimizer, name)
