"""Forwards and backwards that train nothing, and what must not be kept: references, memory, operations, hooks."""

import copy
import gc
import os
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.grid import each
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    assert_same_factors,
    backward,
    directions,
    held_factors,
    hook_counts,
    layer_state,
    noise,
    plain_kfac,
    train_step,
)
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact


def forward_only(model, x):
    return model(x)


def no_grad(model, x):
    with torch.no_grad():
        model(x)


def inference_mode(model, x):
    with torch.inference_mode():
        model(x)


def evaluation(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def evaluation_with_backward(model, x):
    """As in attacks and saliency maps."""
    model.eval()
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model.train()


def teacher(model, x):
    """An EMA teacher: a copy in train mode under no_grad."""
    with torch.no_grad():
        copy.deepcopy(model)(x)


def gradient_of_inputs(model, x):
    """As in adversarial training: weights take no part in it."""
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def functional_gradient(model, x):
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    torch.func.grad(lambda q: torch.func.functional_call(model, q, (x,)).sum())(parameters)


def per_example_gradients(model, x):
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def value(q, row):
        return torch.func.functional_call(model, q, (row[None],)).sum()

    torch.func.vmap(torch.func.grad(value), (None, 0))(parameters, x)


def foreign_parameters(model, x):
    """Fast weights of a meta-learner: gradients go to other leaves."""
    fast = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    torch.func.functional_call(model, fast, (x,)).sum().backward()


def trained_copy(model, x):
    """Made after the optimizer, it follows without hooks: its backward feeds nothing of the student's optimizer."""
    copy.deepcopy(model)(x).sum().backward()


BYSTANDERS = [
    forward_only,
    no_grad,
    inference_mode,
    evaluation,
    evaluation_with_backward,
    teacher,
    trained_copy,
    gradient_of_inputs,
    functional_gradient,
    per_example_gradients,
    foreign_parameters,
]


MOMENTS = ["before", "between forward and backward", "between backward and step"]


@pytest.mark.parametrize("bystander", BYSTANDERS)
def test_forwards_that_train_nothing_leave_no_trace(bystander):
    (x, y), other = vectors(), vectors(9, seed=5)[0]
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    for when in MOMENTS:
        model = mlp()
        opt = plain_kfac(model)
        if when == MOMENTS[0]:
            bystander(model, other)
        value = F.cross_entropy(model(x), y)
        if when == MOMENTS[1]:
            bystander(model, other)
        value.backward()
        if when == MOMENTS[2]:
            bystander(model, other)
        moved = directions(opt, model)
        assert_factors(all_factors(opt, model), expected)
        for name, (gradient, V) in moved.items():
            A, B = expected[name]
            assert_close(V, solve_exact(B, A, gradient, 1e-2), 1e-8, f"{name}, {when}")
        assert layer_state(opt, model, "0")["factor_updates"] == 1
    held, values = all_factors(opt, model), [p.detach().clone() for p in model.parameters()]
    opt.zero_grad()
    bystander(model, other)  # alone
    opt.step()
    assert_same_factors(opt, model, held)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), values, strict=True))


def test_evaluation_with_accumulating_backward_is_not_captured():
    """Capture belongs to train mode: gradients of an eval forward reach .grad, statistics do not come from it."""
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, lr=0.1)
    train_step(opt, model, x, y, F.cross_entropy)
    held = all_factors(opt, model)
    model.eval()
    train_step(opt, model, *vectors(seed=1), F.cross_entropy)
    assert_same_factors(opt, model, held)


# ---------------------------------------------------------------------------------------------------------------------
# pause_capture
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["forward and backward", "forward", "nested", "an exception"])
def test_nothing_inside_a_pause_is_captured(inside):
    (x, y), (other, target) = vectors(), vectors(9, seed=5)
    model = mlp()
    opt = plain_kfac(model)
    if inside == "an exception":
        with pytest.raises(KeyError), opt.pause_capture():
            raise KeyError
    else:
        with opt.pause_capture():
            if inside == "nested":
                with opt.pause_capture():
                    backward(model, other, target, F.cross_entropy)
            value = F.cross_entropy(model(other), target)
            if inside != "forward":
                value.backward()
        if inside == "forward":
            value.backward()
    backward(model, x, y, F.cross_entropy)
    opt.step()
    assert_factors(all_factors(opt, model), expected_factors(mlp(), x, y, F.cross_entropy))


@each(approx=["expand", "reduce"], mode=["plain", "whole", "whole reentrant"])
def test_a_pause_around_backward_alone(approx, mode):
    """Its gradients stay, its statistics do not; a forward recomputed inside the pause is no exception."""
    x, y = vectors()
    expected = expected_factors(mlp(), x, y, F.cross_entropy, approx=approx)
    model = mlp()
    opt = plain_kfac(model, approx=approx)
    other, target = vectors(9, seed=5)
    other = other.requires_grad_()
    output = model(other) if mode == "plain" else checkpoint(model, other, use_reentrant=mode.endswith("reentrant"))
    value = F.cross_entropy(output, target)
    with opt.pause_capture():
        value.backward()
    paused = model[0].weight.grad.clone()
    backward(model, x, y, F.cross_entropy)
    moved = directions(opt, model)
    assert_factors(all_factors(opt, model), expected)
    plain = mlp()
    backward(plain, x, y, F.cross_entropy)
    assert_close(moved["0"][0][:, :-1], paused + plain[0].weight.grad)
    assert layer_state(opt, model, "0")["factor_updates"] == 1


@pytest.mark.filterwarnings("ignore:.*nothing was captured")
def test_a_window_that_is_paused_whole_leaves_the_estimate():
    model = mlp()
    opt = plain_kfac(model, lr=0.1)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held = all_factors(opt, model)
    opt.zero_grad()
    value = F.cross_entropy(model(vectors(seed=1)[0]), vectors(seed=1)[1])
    with opt.pause_capture():
        value.backward()
    moved = directions(opt, model)
    for name, (A, B) in held.items():
        now = held_factors(opt, model, name)
        assert torch.equal(now[0], A)
        assert torch.equal(now[1], B)
        gradient, step = moved[name]
        assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is kept
# ---------------------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Hands out weak references to every activation."""

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
        x = self.watch(self.first(self.watch(x * 1.0)))
        x = self.watch(torch.tanh(x))
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x)
        return self.third(x)


@each(checkpointed=[False, True], approx=["expand", "reduce"])
def test_no_activation_survives_its_backward_or_a_dropped_forward(checkpointed, approx):
    """Even while the loss, and with it the graph, is still held; after a dropped forward without the collector."""
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


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux' /proc")
def test_memory_stays_flat_over_forwards_without_backward():
    """200 forwards that keep an activation of 1 MB each would show as 200 MB."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    opt = plain_kfac(model)
    x = torch.randn(4096, 64)
    for _ in range(5):
        model(x)
    before = resident_bytes()
    for _ in range(200):
        model(x)
    assert resident_bytes() - before < 30e6
    assert opt.memory_usage()["total"] < 1e6


def test_pending_memory_is_given_back_by_the_step():
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model)
    train_step(opt, model, x, y, F.cross_entropy)
    idle = opt.memory_usage()
    opt.zero_grad()
    backward(model, x, y, F.cross_entropy)
    assert opt.memory_usage()["pending"] > 0
    opt.step()
    assert opt.memory_usage() == idle
    assert idle.get("pending", 0) == 0


class Operations(TorchDispatchMode):
    """Every operation that reaches the dispatcher, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operations(model, x, y):
    model.zero_grad()
    with Operations() as seen:
        backward(model, x, y, F.cross_entropy)
    return seen.names


@pytest.mark.parametrize("state", ["not due", "off", "paused", "evaluated", "detached"])
def test_hooks_add_no_operation_where_nothing_is_due(state):
    model, (x, y) = convnet(activation=nn.ReLU(inplace=True)), images()
    bare = operations(model, x, y)
    opt = plain_kfac(
        model, lr=0.01, factor_update_steps=100, inv_update_steps=0 if state == "off" else 100, momentum=0.9
    )
    if state != "off":
        captured = operations(model, x, y)
        assert len(captured) > len(bare)  # the count can see a tap
    opt.step()
    if state in {"paused", "evaluated"}:
        opt.param_groups[0].update(factor_update_steps=1)
        opt.step()
    if state == "evaluated":
        model.eval()
    if state == "detached":
        opt.detach()
    with opt.pause_capture() if state == "paused" else nullcontext():
        assert operations(model, x, y) == bare


def test_capture_leaves_the_random_stream_alone():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    bare = copy.deepcopy(model)
    x, y = noise(6, 4, dtype=torch.float32), vectors()[1]
    opt = plain_kfac(model)
    torch.manual_seed(0)
    backward(bare, x, y, F.cross_entropy)
    torch.manual_seed(0)
    backward(model, x, y, F.cross_entropy)
    assert torch.equal(model[0].weight.grad, bare[0].weight.grad)
    before = torch.random.get_rng_state()
    opt.step()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("when", ["made", "between forward and backward", "between backward and step", "after a step"])
def test_a_deleted_optimizer_is_freed_at_once(when):
    """By its reference count alone: factors of a big model must not wait for the cycle collector."""
    model, (x, y) = mlp(), vectors()
    bare = hook_counts(model)
    gc.collect()
    gc.disable()
    try:
        opt = plain_kfac(model)
        if when != "made":
            train_step(opt, model, x, y, F.cross_entropy)
        if when == "between forward and backward":
            F.cross_entropy(model(x), y)
        if when == "between backward and step":
            backward(model, x, y, F.cross_entropy)
        factor = weakref.ref(layer_state(opt, model, "0")["factor_a"])
        alive = weakref.ref(opt)
        del opt
        assert alive() is None
        assert factor() is None
    finally:
        gc.enable()
    assert hook_counts(model) == bare
    model.zero_grad()
    backward(model, x, y, F.cross_entropy)
    assert torch.isfinite(model[0].weight.grad).all()


# ---------------------------------------------------------------------------------------------------------------------
# Freezing
# ---------------------------------------------------------------------------------------------------------------------


def fresh_copy(model):
    plain = mlp((4, 5, 6, 3))
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("batches", [1, 2])
def test_a_layer_unfrozen_later_joins(batches):
    """With its first batch, as a block without estimate is due at once; in any case with its second."""
    model = mlp((4, 5, 6, 3))
    model[2].requires_grad_(False)
    opt = plain_kfac(model, lr=0.1, factor_decay=0.0)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    model[2].requires_grad_(True)
    if batches == 2:
        before = model[2].weight.detach().clone()
        train_step(opt, model, *vectors(seed=3), F.cross_entropy)
        assert not torch.equal(model[2].weight, before)
    x, y = vectors(seed=7)
    A, B = expected_factors(fresh_copy(model), x, y, F.cross_entropy)["2"]
    opt.zero_grad()
    backward(model, x, y, F.cross_entropy)
    gradient, step = directions(opt, model)["2"]
    assert_close(layer_state(opt, model, "2")["factor_a"], A)
    assert_close(layer_state(opt, model, "2")["factor_g"], B)
    assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-8)


def test_a_layer_frozen_later_stays_and_keeps_its_estimate():
    model = mlp((4, 5, 6, 3))
    opt = plain_kfac(model, lr=0.1, weight_decay=0.1, factor_decay=0.5)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held = all_factors(opt, model)["2"]
    model[2].requires_grad_(False)
    values = [p.detach().clone() for p in model[2].parameters()]
    for seed in (1, 2):
        opt.zero_grad()
        x, y = vectors(seed=seed)
        backward(model, x, y, F.cross_entropy)
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model[2].parameters(), values, strict=True))
    model[2].requires_grad_(True)
    assert "factor_a" in opt.state[model[2].weight], "the estimate was thrown away"
    now = all_factors(opt, model)["2"]
    assert torch.equal(now[0], held[0])
    assert torch.equal(now[1], held[1])
    x, y = vectors(seed=3)
    A, B = expected_factors(fresh_copy(model), x, y, F.cross_entropy)["2"]
    train_step(opt, model, x, y, F.cross_entropy)
    now = all_factors(opt, model)["2"]
    share = 1 / 1.5  # equal batches under a decay of one half
    assert_close(now[0], held[0] + share * (A - held[0]))
    assert_close(now[1], held[1] + share * (B - held[1]))


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("direction", ["frozen", "unfrozen"])
def test_a_part_frozen_or_unfrozen_on_the_way_is_never_silently_wrong(part, direction):
    """[W | b] changes its width: the layer goes on with a fresh estimate of the new shape, or by its fallback."""
    model = mlp((4, 5, 6, 3))
    moving = getattr(model[2], part)
    moving.requires_grad_(direction == "frozen")
    opt = plain_kfac(model, lr=0.1)
    train_step(opt, model, *vectors(), F.cross_entropy)
    moving.requires_grad_(direction == "unfrozen")
    for seed in (1, 2):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        opt.zero_grad()
        backward(model, *vectors(seed=seed), F.cross_entropy)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        opt.step()
        descent = dict.fromkeys(("0", "2", "4"), 0.0)
        for n, p in model.named_parameters():
            assert torch.isfinite(p).all(), n
            assert torch.equal(p, before[n]) == (n not in gradients), n
            if n in gradients:
                descent[n[0]] += float(((before[n] - p.detach()) * gradients[n]).sum())
        assert all(value > 0 for value in descent.values()), descent
    assert hook_counts(model)["2"] == hook_counts(model)["0"]
