"""`graft` takes the method's direction with the step length of SGD or Adam; `inner` passes the direction to Adam.

`test_fallback.py` tests the same rules for parameters without a block.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, lr_scheduler

import secondorder
from tests.contract.test_schedulers import SCHEDULERS
from tests.support.building import built
from tests.support.methods import Method, Variant
from tests.support.tasks import (
    Shadow,
    Task,
    assert_identical,
    assert_same_moves,
    backward,
    block_vector,
    displacements,
    train,
    values,
)

pytestmark = pytest.mark.option("graft", "inner")

LR, DECAY = 0.05, 0.1
DECOUPLED = {"weight_decay": DECAY, "decoupled_weight_decay": True}

#: Options, and a rule of torch whose steps are as long, except for decoupled decay.
RULES: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"graft": "sgd"}, lambda p: SGD(p, LR)),
    "sgd, decoupled decay": ({"graft": "sgd", **DECOUPLED}, lambda p: SGD(p, LR)),
    "adam": ({"graft": "adam"}, lambda p: Adam(p, LR)),
    "adam, coupled decay": ({"graft": "adam", "weight_decay": DECAY}, lambda p: Adam(p, LR, weight_decay=DECAY)),
    "adam, decoupled decay": ({"graft": "adam", **DECOUPLED}, lambda p: Adam(p, LR)),
    "adamw": ({"graft": "adamw", "weight_decay": DECAY}, lambda p: Adam(p, LR)),
    "betas and eps": (
        {"graft": "adam", "fallback_betas": (0.5, 0.75), "fallback_eps": 0.01},
        lambda p: Adam(p, LR, (0.5, 0.75), 0.01),
    ),
}


def lengths(variant: Variant, model: torch.nn.Module, moved: dict[str, torch.Tensor]) -> dict[str, float]:
    return {block: float(block_vector(moved, names).norm()) for block, names in variant.units(model).items()}


def assert_same_direction(variant: Variant, model: torch.nn.Module, one: Any, other: Any) -> None:
    for names in variant.units(model).values():
        cosine = torch.cosine_similarity(block_vector(one, names), block_vector(other, names), dim=0)
        torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-9)


@pytest.mark.cover(rule=[*RULES])
def test_block_steps_are_as_long_as_the_rules(method: Method, variant: Variant, task: Task, rule: str) -> None:
    """Coupled decay is a part of the gradient; decoupled decay is added to the step. kl-clip does not shorten steps."""
    options, reference = RULES[rule]
    clip = {"kl_clip": 1e-12} if method.accepts("kl_clip") else {}
    model, optimizer = method.start(task, lr=LR, momentum=0.0, **clip, **options, **variant.keywords)
    shadow = Shadow(list(model.parameters()), reference)
    schedules = [lr_scheduler.CosineAnnealingLR(each, 6) for each in (optimizer, shadow.optimizer)]
    is_decoupled = "decoupled_weight_decay" in options or rule == "adamw"
    for step in range(6):
        before, kept = values(model), 1 - optimizer.param_groups[0]["lr"] * DECAY * is_decoupled
        shadow.follow()
        backward(model, optimizer, task, step)
        shadow.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        moved = {name: value - kept * before[name] for name, value in values(model).items()}
        wanted = {name: value - before[name] for name, value in zip(before, shadow.values(), strict=True)}
        assert lengths(variant, model, moved) == pytest.approx(lengths(variant, model, wanted), rel=1e-6)


def test_adam_grafting_preconditions_adams_first_moment(method: Method, task: Task) -> None:
    """If the curvature stays as it is after the first step, directions are linear; otherwise β₁ is zero."""
    is_steady = method.layerwise and not method.accepts("scale_update_steps")
    beta1, steady = (0.5, method.every(20)) if is_steady else (0.0, {})
    plain = method.bare_moves(task, 3, **steady)
    grafted = method.bare_moves(task, 3, **steady, graft="adam", fallback_betas=(beta1, 0.999))
    mean = {name: torch.zeros_like(value) for name, value in plain[0].items()}
    for direction, moved in zip(plain, grafted, strict=True):
        mean = {name: beta1 * mean[name] + value for name, value in direction.items()}
        assert_same_direction(method.variants[0], task.model(), moved, mean)


def test_sgd_grafting_is_the_direction_scaled_at_every_step(method: Method, variant: Variant, mlp: Task) -> None:
    model, grafted = method.start(mlp, **method.bare(graft="sgd", **variant.keywords))
    plain = method.bare_moves(mlp, 6, **variant.keywords)
    for direction, moved in zip(plain, displacements(model, grafted, mlp, 6), strict=True):
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for names in variant.units(model).values():
            v, g = block_vector(direction, names), block_vector(gradients, names)
            torch.testing.assert_close(block_vector(moved, names), v * g.norm() / v.norm(), rtol=1e-6, atol=1e-13)


def test_momentum_averages_grafted_directions_except_under_adam(method: Method, mlp: Task) -> None:
    """Under Adam, the first moment takes the place of momentum."""
    one, two, three = method.bare_moves(mlp, 3, graft="sgd")
    *_, moved = method.bare_moves(mlp, 3, graft="sgd", momentum=0.5)
    assert_same_moves(moved, {name: three[name] + 0.5 * two[name] + 0.25 * one[name] for name in moved})
    assert_identical(*(method.trained(mlp, graft="adam", lr=0.01, momentum=mu) for mu in (0.0, 0.9)))


@pytest.mark.parametrize("cycle", ["OneCycleLR", "CyclicLR"])
def test_the_momentum_of_grafted_steps_follows_the_schedule(method: Method, mlp: Task, cycle: str) -> None:
    """β₁ of the preconditioned mean and of the mean that determines the length is the scheduled one."""
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


def test_inner_adam_may_couple_decay_and_inner_adamw_always_decouples_it(method: Method, mlp: Task) -> None:
    options = {"lr": 0.01, "weight_decay": DECAY}
    coupled, decoupled, always, adamw = (
        method.trained(mlp, 4, inner=name, fallback=name, decoupled_weight_decay=is_decoupled, **options)
        for name in ("adam", "adamw")
        for is_decoupled in (False, True)
    )
    assert_identical(always, adamw)
    assert_identical(decoupled, adamw)
    assert not torch.equal(coupled["first.weight"], decoupled["first.weight"])


def test_betas_of_ggt_are_not_those_of_its_fallback(mlp: Task) -> None:
    """GGT has options with the names betas and eps, so those of Adam's rule have longer names."""
    given = {"betas": (0.5, 0.75), "eps": 1e-4, "fallback_betas": (0.25, 0.5), "fallback_eps": 1e-6}
    group = built(secondorder.GGT, mlp.model().parameters(), graft="adam", **given).param_groups[0]
    assert {key: group[key] for key in given} == given


@pytest.mark.option("damping")
def test_betas_and_eps_have_two_names_in_a_group_that_cannot_disagree(method: Method, mlp: Task) -> None:
    model, old = mlp.model(), {"fallback_betas": (0.5, 0.75), "fallback_eps": 1e-4}
    params = list(model.parameters())
    for optimizer in (
        method.build(mlp.model(), graft="adam", betas=(0.5, 0.75), eps=1e-4),
        method.build(model, [{"params": params, **old}], graft="adam"),
    ):
        (group,) = optimizer.param_groups
        assert (group["betas"], group["eps"]) == ((0.5, 0.75), 1e-4)
        assert not old.keys() & group.keys()
    with pytest.raises(ValueError, match="betas and fallback_betas are the same option"):
        method.build(model, [{"params": params, "betas": (0.5, 0.75), "fallback_betas": (0.5, 0.8)}], graft="adam")


@pytest.mark.option("damping")
def test_old_checkpoints_keep_their_weight_decay(method: Method, mlp: Task) -> None:
    """Groups of old checkpoints have other names of options, and grafted Adam always decoupled the decay."""
    keywords = {"graft": "adam", "lr": LR, "weight_decay": DECAY}
    model, optimizer = method.start(mlp, 3, **keywords, decoupled_weight_decay=True)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["fallback_betas"], group["fallback_eps"] = group.pop("betas"), group.pop("eps")
        group["decoupled_weight_decay"], group["fallback"] = False, "adamw"
    other, second = method.start(mlp, **keywords)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(saved)
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, 4, start=3)
    assert_identical(values(other), values(model))


def test_param_scheduler_accepts_the_old_names(mlp: Task) -> None:
    optimizer = secondorder.KFAC(mlp.model(), graft="adam")
    secondorder.ParamScheduler(optimizer, fallback_eps=lambda step: 1e-6)
    lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
    assert (optimizer.param_groups[0]["eps"], optimizer.param_groups[0]["betas"]) == (1e-6, (0.95, 0.999))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "betas": ({"fallback_betas": (0.5, 0.75), "fallback_eps": 1e-4}, {"betas": (0.5, 0.75), "eps": 1e-4}),
    "momentum has no effect": ({"momentum": 0.9}, {}),
    "decay is always decoupled": ({"weight_decay": 0.1, "decoupled_weight_decay": True}, {"weight_decay": 0.1}),
}


@pytest.mark.cover(case=[*CASES])
def test_inner_adamw_is_adamw_with_directions_as_gradients(method: Method, task: Task, case: str) -> None:
    """The directions are the steps of a second optimizer; every step starts from the same parameters."""
    ours, theirs = CASES[case]
    model, optimizer = method.start(task, **{**method.bare(lr=0.01, inner="adamw"), **ours})
    start = values(model)
    # the loss does not depend on the bias of the keys, whose gradient is rounding, divided by its own size and ε
    noise = 1e-12 if method.accepts("factor_update_steps") else 1e-10
    fed = {name: torch.nn.Parameter(start[name].clone()) for name in sorted(method.covered(model))}
    reference = AdamW(fed.values(), 0.01, **{"weight_decay": 0.0, **theirs})
    directions = method.bare_moves(task, 6)
    for direction, moved in zip(directions, displacements(model, optimizer, task, 6), strict=True):
        for name, parameter in fed.items():
            parameter.grad = -direction[name]
        reference.step()
        for name, parameter in fed.items():
            torch.testing.assert_close(moved[name], parameter.detach() - start[name], rtol=1e-6, atol=noise)
            parameter.data.copy_(start[name])
            if case == "plain":
                kept = optimizer.state[model.get_parameter(name)]["exp_avg"]
                torch.testing.assert_close(kept, reference.state[parameter]["exp_avg"], rtol=1e-9, atol=noise)


@pytest.mark.option("skip_layers")
@pytest.mark.filterwarnings("ignore:.*nothing was captured")
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_a_block_without_estimate_follows_the_rule_of_torch(method: Method, task: Task, inner: str) -> None:
    kind = {"sgd": partial(SGD, momentum=0.9), "adamw": partial(AdamW, betas=(0.8, 0.95), eps=1e-6)}[inner]
    options = {"fallback_betas": (0.8, 0.95), "fallback_eps": 1e-6} if inner == "adamw" else {}
    model, optimizer = method.start(task, lr=LR, weight_decay=DECAY, inner=inner, **options)
    covered = [model.get_parameter(name) for name in sorted(method.covered(model))]
    shadow = Shadow(covered, partial(kind, lr=LR, weight_decay=DECAY))
    with optimizer.pause_capture():
        for step in range(4):
            backward(model, optimizer, task, step)
            shadow.step()
            optimizer.step()
    assert all(optimizer.state[block.owner]["refreshes"] == 0 for block in optimizer.blocks.values())
    shadow.assert_identical()
