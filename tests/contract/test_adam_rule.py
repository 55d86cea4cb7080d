"""Where a rule is Adam's, it is `torch.optim.Adam` or `AdamW`: under every schedule, with either kind of weight decay.

`graft`, `fallback` and `inner` take both names: `"adam"` decays weights as `decoupled_weight_decay` says, `"adamw"`
always decoupled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

import secondorder
from tests.contract.test_schedulers import SCHEDULERS, tick
from tests.support.methods import METHODS, Method
from tests.support.tasks import Task, assert_identical, backward, block_vector, train, values

LR, DECAY = 0.05, 0.1

RULES: dict[str, tuple[dict[str, Any], Callable[[Any], Optimizer]]] = {
    "adam": ({"graft": "adam"}, lambda p: AdamW(p, LR, weight_decay=0.0)),
    "coupled": ({"graft": "adam", "weight_decay": DECAY}, lambda p: Adam(p, LR, weight_decay=DECAY)),
    "decoupled": (
        {"graft": "adam", "weight_decay": DECAY, "decoupled_weight_decay": True},
        lambda p: AdamW(p, LR, weight_decay=DECAY),
    ),
    "adamw": ({"graft": "adamw", "weight_decay": DECAY}, lambda p: AdamW(p, LR, weight_decay=DECAY)),
    "sgd": (
        {"graft": "sgd", "momentum": 0.9, "weight_decay": DECAY},
        lambda p: SGD(p, LR, momentum=0.9, weight_decay=DECAY),
    ),
}


def norms() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5)).double()


@pytest.mark.cover(rule=[*RULES])
def test_everything_on_the_fallback_follows_every_schedule_as_torchs_own(method: Method, rule: str) -> None:
    """Each pair of a method, a rule and a schedule occurs: a case has one third of the schedules, the next another."""
    first = (METHODS.index(method) + [*RULES].index(rule)) % 3
    follow_schedules(method, rule, [*SCHEDULERS][first::3])


@pytest.mark.slow
@pytest.mark.cover(rule=[*RULES])
def test_every_rule_of_a_method_follows_every_schedule(method: Method, rule: str) -> None:
    follow_schedules(method, rule, [*SCHEDULERS])


def follow_schedules(method: Method, rule: str, names: list[str]) -> None:
    keywords, reference = RULES[rule]
    nothing = {"skip_layers": (nn.LayerNorm,)} if method.layerwise else {"skip_norm_layers": True}
    for name in names:
        schedule = SCHEDULERS[name]
        nets = norms(), norms()
        optimizers = method.build(nets[0], **{"lr": LR, **keywords, **nothing}), reference(nets[1].parameters())
        schedules = [schedule(optimizer) for optimizer in optimizers]
        for step in range(6):
            inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            for net, optimizer, scheduler in zip(nets, optimizers, schedules, strict=True):
                optimizer.zero_grad()
                (net(inputs) - inputs.roll(1, 0)).square().sum().backward()
                optimizer.step()
                tick(scheduler)
        assert_identical(values(nets[0]), values(nets[1])), name


@pytest.mark.cover(cycle=["OneCycleLR", "CyclicLR"])
def test_the_momentum_of_grafted_steps_follows_the_schedule(method: Method, mlp: Task, cycle: str) -> None:
    """β₁ of the mean that is preconditioned, and of the one that gives steps their length, is the scheduled one."""
    model, optimizer = method.start(mlp, graft="adam", lr=LR, weight_decay=DECAY)
    schedule = SCHEDULERS[cycle](optimizer)
    weight, mean, seen = model.first.weight, torch.zeros_like(model.first.weight), set()
    for step in range(6):
        backward(model, optimizer, mlp, step)
        beta1 = optimizer.param_groups[0]["betas"][0]
        seen.add(beta1)
        mean.mul_(beta1).add_(weight.grad + DECAY * weight.detach(), alpha=1 - beta1)
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], mean, rtol=1e-12, atol=1e-14)
    assert len(seen) > 2


@pytest.mark.parametrize(("rule", "decoupled"), [("adam", False), ("adam", True), ("adamw", True)])
def test_grafted_steps_are_as_long_as_those_of_adam_with_its_decay(
    method: Method, mlp: Task, rule: str, decoupled: bool
) -> None:
    """Coupled decay is a part of the gradient, whose moments Adam keeps; decoupled decay comes on top."""
    model = mlp.model()
    keywords = {"graft": rule, "lr": LR, "weight_decay": DECAY}
    if rule == "adam":
        keywords["decoupled_weight_decay"] = decoupled
    optimizer = method.build(model, **keywords)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step in range(1, 6):
        backward(model, optimizer, mlp, step)
        before, expected = values(model), {}
        for name, p in model.named_parameters():
            gradient, (first, second) = p.grad + (0.0 if decoupled else DECAY * p.detach()), moments[name]
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            expected[name] = LR * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        optimizer.step()
        kept = 1 - LR * DECAY if decoupled else 1.0
        moved = {name: value - kept * before[name] for name, value in values(model).items()}
        for names in method.variants[0].units(model).values():
            length = block_vector(moved, names).norm()
            torch.testing.assert_close(length, block_vector(expected, names).norm(), rtol=1e-9, atol=1e-12)


def test_inner_adam_decays_as_its_name_says(method: Method, mlp: Task) -> None:
    """Coupled, decay is a part of what Adam is fed with; of a window method, of what enters the window."""
    results = {}
    for name in ("adam", "adamw"):
        for decoupled in (False, True):
            model = mlp.model()
            keywords = {
                "inner": name,
                "fallback": name,
                "lr": 0.01,
                "weight_decay": DECAY,
                "decoupled_weight_decay": decoupled,
            }
            train(model, method.build(model, **keywords), mlp, 4)
            results[name, decoupled] = values(model)
    assert_identical(results["adamw", False], results["adamw", True])
    assert_identical(results["adam", True], results["adamw", True])
    assert not torch.equal(results["adam", False]["first.weight"], results["adam", True]["first.weight"])


@pytest.mark.cover(spelled=["adam", "adamw"])
def test_the_fallback_is_named_like_the_graft(method: Method, mlp: Task, spelled: str) -> None:
    optimizer = method.build(mlp.model(), graft=spelled, **method.leave_out)
    assert optimizer.param_groups[0]["fallback"] == spelled
    for name in method.left_out(mlp.model()):
        (line,) = [line for line in optimizer.describe().splitlines() if line.startswith(name)]
        assert f"{spelled} fallback" in line


def test_betas_of_ggt_are_not_those_of_its_fallback(mlp: Task) -> None:
    """Its own options are named betas and eps, so those of Adam's rule keep their longer names there."""
    model = mlp.model()
    given = {"betas": (0.5, 0.75), "eps": 1e-4, "fallback_betas": (0.25, 0.5), "fallback_eps": 1e-6}
    group = secondorder.GGT(model.parameters(), graft="adam", **given).param_groups[0]
    assert {key: group[key] for key in given} == given


@pytest.mark.option("damping")
def test_betas_and_eps_have_two_names_that_cannot_disagree(method: Method, mlp: Task) -> None:
    new, old = {"betas": (0.5, 0.75), "eps": 1e-4}, {"fallback_betas": (0.5, 0.75), "fallback_eps": 1e-4}
    groups = [
        method.build(mlp.model(), graft="adam", **new).param_groups[0],
        method.build(mlp.model(), graft="adam", **old).param_groups[0],
        method.build(model := mlp.model(), [{"params": model.parameters(), **old}], graft="adam").param_groups[0],
    ]
    for group in groups:
        assert (group["betas"], group["eps"]) == ((0.5, 0.75), 1e-4)
        assert not old.keys() & group.keys()
    with pytest.raises(ValueError, match="betas and fallback_betas are one option"):
        method.build(mlp.model(), graft="adam", betas=(0.5, 0.75), fallback_betas=(0.5, 0.8))


@pytest.mark.option("damping")
def test_a_checkpoint_from_before_decays_as_it_did(method: Method, mlp: Task) -> None:
    """Its groups have the old names of the options; with Adam's size, weights were decayed apart from the gradient."""
    model, optimizer = method.start(mlp, 3, graft="adam", lr=LR, weight_decay=DECAY, decoupled_weight_decay=True)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["fallback_betas"], group["fallback_eps"] = group.pop("betas"), group.pop("eps")
        group["decoupled_weight_decay"], group["fallback"] = False, "adamw"
    other = mlp.model()
    other.load_state_dict(model.state_dict())
    second = method.build(other, graft="adam", lr=LR, weight_decay=DECAY)
    second.load_state_dict(saved)
    train(model, optimizer, mlp, 4, start=3)
    train(other, second, mlp, 4, start=3)
    assert_identical(values(other), values(model))


def test_a_scheduler_of_options_knows_the_old_names(mlp: Task) -> None:
    optimizer = secondorder.KFAC(mlp.model(), graft="adam")
    secondorder.ParamScheduler(optimizer, fallback_eps=lambda step: 1e-6)
    assert optimizer.param_groups[0]["eps"] == 1e-6
    lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
    assert optimizer.param_groups[0]["betas"] == (0.95, 0.999)
