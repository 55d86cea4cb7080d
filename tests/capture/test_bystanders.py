"""Forwards and backwards that train nothing; references, memory, operations and hooks that must not be kept."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.grid import each, pairs
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    assert_same_factors,
    assert_solves,
    backward,
    directions,
    hook_counts,
    layer_state,
    plain_kfac,
    train_step,
)
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.operators import Operators
from tests.support.oracles.kfac import expected_factors, solve_exact
from tests.support.tasks import assert_identical


@pytest.mark.parametrize("inside", ["forward and backward", "forward", "nested", "an exception", "evaluation"])
def test_nothing_inside_a_pause_or_of_an_evaluation_is_captured(inside):
    """Its gradients are in .grad, but it has no statistics."""
    other, target = vectors(9, seed=5)
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model)
    pause = nullcontext() if inside == "evaluation" else opt.pause_capture()
    with pytest.raises(KeyError) if inside == "an exception" else nullcontext(), pause:
        model.train(inside != "evaluation")
        if inside == "nested":
            with opt.pause_capture():
                backward(model, other, target, F.cross_entropy)
        value = F.cross_entropy(model(other), target)
        if inside != "forward":
            value.backward()
        if inside == "an exception":
            raise KeyError
    if inside == "forward":
        value.backward()
    backward(model.train(), x, y, F.cross_entropy)
    opt.step()
    assert_factors(all_factors(opt, model), expected_factors(mlp(), x, y, F.cross_entropy))


@each(approx=["expand", "reduce"], mode=["plain", "whole", "whole reentrant"])
def test_a_pause_around_backward_alone(approx, mode):
    """Its gradients stay, but its statistics do not, even if the forward is recomputed inside the pause."""
    (x, y), (other, target), plain, model = vectors(), vectors(9, seed=5), mlp(), mlp()
    opt = plain_kfac(model, approx=approx)
    other = other.requires_grad_()
    output = model(other) if mode == "plain" else checkpoint(model, other, use_reentrant=mode.endswith("reentrant"))
    value = F.cross_entropy(output, target)
    with opt.pause_capture():
        value.backward()
    paused = model[0].weight.grad.clone()
    backward(model, x, y, F.cross_entropy)
    moved = directions(opt, model)
    assert_factors(all_factors(opt, model), expected_factors(plain, x, y, F.cross_entropy, approx=approx))
    backward(plain, x, y, F.cross_entropy)
    assert_close(moved["0"][0][:, :-1], paused + plain[0].weight.grad)
    assert layer_state(opt, model, "0")["factor_updates"] == 1


class Watched(nn.Module):
    """Keeps weak references to all activations."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.checkpointed = checkpointed
        self.seen: list[weakref.ref] = []

    def watch(self, tensor):
        self.seen.append(weakref.ref(tensor))
        return tensor

    def middle(self, x):
        return self.watch(torch.tanh(self.watch(self.second(self.watch(x * 1.0)))))

    def forward(self, x):
        x = self.watch(torch.tanh(self.watch(self.first(self.watch(x * 1.0)))))
        return self.third(checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x))


@each(checkpointed=[False, True], approx=["expand", "reduce"])
def test_no_activation_survives_its_backward_or_a_dropped_forward(checkpointed, approx):
    """This holds while the loss and its graph are alive and, after a dropped forward, without garbage collection."""
    model, (x, y) = seeded_build(lambda: Watched(checkpointed)), vectors()
    opt = plain_kfac(model, approx=approx)
    value = F.cross_entropy(model(x), y)
    assert len(model.seen) >= 6
    value.backward()
    gc.collect()
    assert [ref() for ref in model.seen] == [None] * len(model.seen)
    opt.step()
    assert value.grad_fn is not None
    output = model(x)
    assert any(ref() is not None for ref in model.seen)
    del output
    assert [ref() for ref in model.seen] == [None] * len(model.seen)


def operations(model, x, y):
    model.zero_grad()
    with Operators() as seen:
        backward(model, x, y, F.cross_entropy)
    return seen.names


@pytest.mark.parametrize("state", ["not due", "off", "paused", "evaluated", "detached"])
def test_hooks_add_no_operation_when_nothing_is_due(state):
    model, (x, y) = convnet(activation=nn.ReLU(inplace=True)), images()
    bare = operations(model, x, y)
    refresh = 0 if state == "off" else 100
    opt = plain_kfac(model, lr=0.01, factor_update_steps=100, inv_update_steps=refresh, momentum=0.9)
    if state != "off":
        assert len(operations(model, x, y)) > len(bare)  # the count can see a tap
    opt.step()
    if state in {"paused", "evaluated"}:
        opt.param_groups[0].update(factor_update_steps=1)
        opt.step()
    if state == "detached":
        opt.detach()
    model.train(state != "evaluated")
    with opt.pause_capture() if state == "paused" else nullcontext():
        assert operations(model, x, y) == bare


@pytest.mark.parametrize("when", ["made", "between forward and backward", "between backward and step", "after a step"])
def test_a_deleted_optimizer_is_freed_at_once(when):
    """Its reference count is enough: factors of a big model must not wait for the garbage collector."""
    model, (x, y) = mlp(), vectors()
    bare = hook_counts(model)
    gc.collect()
    gc.disable()
    try:
        opt = plain_kfac(model)
        if when != "made":
            train_step(opt, model, x, y, F.cross_entropy)
        value = F.cross_entropy(model(x), y) if when.startswith("between") else None
        if when == "between backward and step":
            value.backward()
        value = None
        references = weakref.ref(layer_state(opt, model, "0")["factor_a"]), weakref.ref(opt)
        del opt
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    assert hook_counts(model) == bare
    backward(model, x, y, F.cross_entropy)
    assert torch.isfinite(model[0].weight.grad).all()


@pairs(
    lambda parts, direction: not (parts == "weight bias" and direction == "frozen"),
    parts=["weight", "bias", "weight bias"], direction=["frozen", "unfrozen"],
)  # fmt: skip
def test_a_layer_of_which_a_part_is_frozen_or_unfrozen_later_has_a_new_estimate(parts, direction):
    """[W | b] changes its width; the first batch is enough, because a block without an estimate is due at once."""
    model = mlp((4, 5, 6, 3))
    moving = [getattr(model[2], part) for part in parts.split()]
    for p in moving:
        p.requires_grad_(direction == "frozen")
    opt = plain_kfac(model, lr=0.1, factor_decay=0.0)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    for p in moving:
        p.requires_grad_(direction == "unfrozen")
    x, y = vectors(seed=7)
    expected = expected_factors(model, x, y, F.cross_entropy)
    opt.zero_grad()
    backward(model, x, y, F.cross_entropy)
    moved = directions(opt, model)
    assert_factors(all_factors(opt, model), expected)
    assert_solves(moved, expected, solve_exact, 1e-2, lr=0.1)
    assert hook_counts(model)["2"] == hook_counts(model)["0"]


def test_a_layer_frozen_later_stays_and_keeps_its_estimate():
    model = mlp((4, 5, 6, 3))
    opt = plain_kfac(model, lr=0.1, weight_decay=0.1, factor_decay=0.5)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held, values = all_factors(opt, model)["2"], copy.deepcopy(model[2].state_dict())
    model[2].requires_grad_(False)
    for seed in (1, 2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    assert_identical(model[2].state_dict(), values)
    model[2].requires_grad_(True)
    assert_same_factors(opt, model, {"2": held})
    x, y = vectors(seed=3)
    batch = expected_factors(model, x, y, F.cross_entropy)["2"]
    train_step(opt, model, x, y, F.cross_entropy)
    share = 1 / 1.5  # equal batches under a decay of one half
    mean = tuple(old + share * (new - old) for old, new in zip(held, batch, strict=True))
    assert_factors(all_factors(opt, model), {"2": mean})
