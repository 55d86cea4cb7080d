"""Rare but legal training loops and models: right factors, or a warning that names the layer, never silently wrong."""

import gc
import warnings
import weakref
from collections import UserDict
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    backward,
    directions,
    held_factors,
    hook_counts,
    layer_state,
    noise,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import Tokens, mlp, seeded_build, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact

approximations = pytest.mark.parametrize("approx", ["expand", "reduce"])


def token_data(n: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(n, 3, 4, seed=seed), vectors(n, seed=seed)[1]


def single(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


@contextmanager
def left_out():
    """Collects the warnings that a layer with a gradient got no statistics."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in found if "nothing was captured" in str(w.message)]


# ---------------------------------------------------------------------------------------------------------------------
# What is a forward, and how many examples are in it
# ---------------------------------------------------------------------------------------------------------------------


@approximations
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sizes", [[5], [4, 1]], ids=["one forward", "two forwards"])
def test_the_whole_model_checkpointed(approx, reentrant, sizes):
    x, y = noise(5, 4, 3), vectors(5)[1]

    def build():
        return seeded_build(lambda: Tokens("mean"))

    expected = expected_factors(build(), x, y, F.cross_entropy, approx=approx)
    model = build()
    opt = plain_kfac(model, approx=approx)
    outputs = [checkpoint(model, part.clone().requires_grad_(), use_reentrant=reentrant) for part in x.split(sizes)]
    F.cross_entropy(torch.cat(outputs), y).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


class Recursive(nn.Module):
    """Layers before, inside and behind its call of itself."""

    def __init__(self, recursive: bool) -> None:
        super().__init__()
        self.down, self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.recursive = recursive

    def forward(self, x, depth=2, outermost=True):
        if self.recursive:
            x = torch.tanh(self.down(x))
            x = self(x, depth - 1, outermost=False) if depth else x
            x = torch.tanh(self.up(x))
        else:
            for layer in [self.down] * (depth + 1) + [self.up] * (depth + 1):
                x = torch.tanh(layer(x))
        return self.head(x).mean(1) if outermost else x


@approximations
def test_a_model_that_calls_itself(approx):
    x, y = token_data()
    expected = expected_factors(seeded_build(lambda: Recursive(False)), x, y, F.cross_entropy, approx=approx)
    model = seeded_build(lambda: Recursive(True))
    opt = plain_kfac(model, approx=approx, factor_decay=0.0)
    for _ in range(2):
        model.load_state_dict(seeded_build(lambda: Recursive(True)).state_dict())
        train_step(opt, model, x, y, F.cross_entropy)
        assert_factors(all_factors(opt, model), expected)


@dataclass
class Output:
    mask: Tensor
    logits: Tensor


class Dressed(nn.Module):
    """Takes and returns containers; ``body`` may be recomputed in backward."""

    def __init__(self, output: str = "tensor", reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.output, self.reentrant = output, reentrant

    def middle(self, x):
        return torch.tanh(self.body(x))

    def forward(self, batch):
        x = batch if isinstance(batch, Tensor) else batch["x"]
        z = torch.tanh(self.first(x))
        z = checkpoint(self.middle, z, use_reentrant=True) if self.reentrant else self.middle(z)
        z = self.head(z.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)
        if self.output == "tensor":
            return z
        mask = torch.ones(7, 2)
        return (mask, z) if self.output == "tuple" else Output(mask, z)


@approximations
@pytest.mark.parametrize("output", ["tuple", "dataclass"])
def test_recomputed_layers_find_their_forward_behind_a_structured_output(approx, output):
    (xa, ya), (xb, yb) = token_data(4), token_data(2, seed=1)
    x, y = torch.cat([xa, xb]), torch.cat([ya, yb])
    expected = expected_factors(seeded_build(Dressed), x, y, F.cross_entropy, approx=approx)
    model = seeded_build(lambda: Dressed(output, reentrant=True))
    opt = plain_kfac(model, approx=approx)
    outputs = model(xa), model(xb)
    logits = [o[1] if output == "tuple" else o.logits for o in outputs]
    sum(F.cross_entropy(z, t, reduction="sum") / 6 for z, t in zip(logits, (ya, yb), strict=True)).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


@approximations
@pytest.mark.parametrize("container", [dict, UserDict])
def test_a_mapping_is_counted_by_its_first_tensor(approx, container):
    """The read-out sees rows flattened from examples and positions: alone it would count three times too many."""
    x, y = token_data()
    expected = expected_factors(seeded_build(Dressed), x, y, F.cross_entropy, approx=approx)
    model = seeded_build(Dressed)
    opt = plain_kfac(model, approx=approx)
    train_step(opt, model, container(name="batch", x=x, other=noise(2, 9)), y, F.cross_entropy)
    assert_factors(all_factors(opt, model), expected)


# ---------------------------------------------------------------------------------------------------------------------
# float16 without a loss scale
# ---------------------------------------------------------------------------------------------------------------------


def half_step(opt, model, x, y):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        value = F.cross_entropy(model(x.float()), y)
    value.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt.step()
    return gradients, {n: before[n] - p.detach() for n, p in model.named_parameters()}


def test_float16_gradients_of_unknown_scale_give_a_warning_and_no_statistics():
    x, y = vectors()
    model = mlp((4, 3)).float()
    opt = plain_kfac(model, lr=0.1)
    with left_out() as messages:
        for _ in range(3):
            gradients, moved = half_step(opt, model, x, y)
            for n, gradient in gradients.items():
                assert_close(moved[n], 0.1 * gradient, 1e-4, n)
    (message,) = messages
    assert "0: " in message
    assert "grad_scaler" in message
    state = layer_state(opt, model, "0")
    assert state["factor_updates"] == 0
    assert not state["factor_g"].any()


def test_float16_gradients_of_unknown_scale_follow_the_adamw_fallback():
    x, y = vectors()
    model, plain = mlp((4, 3)).float(), mlp((4, 3)).float()
    opt = plain_kfac(model, fallback="adamw", fallback_lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    with left_out() as messages:
        for _ in range(3):
            half_step(opt, model, x, y)
            half_step(reference, plain, x, y)
    assert len(messages) == 1
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), 1e-5)


def test_a_disabled_scaler_says_that_float16_gradients_are_not_scaled():
    x, y = vectors()
    expected = expected_factors(mlp((4, 3)), x, y, F.cross_entropy)
    model = mlp((4, 3)).float()
    opt = plain_kfac(model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    with left_out() as messages:
        half_step(opt, model, x, y)
    assert not messages
    A, B = held_factors(opt, model, "0")
    assert_close(A.double(), expected["0"][0], 2e-2)
    assert_close(B.double(), expected["0"][1], 4e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Layers whose statistics cannot be had
# ---------------------------------------------------------------------------------------------------------------------


class LearnedInputs(nn.Module):
    """Layers that see a parameter, not the batch: ``vector`` one row, ``image`` one picture, ``table`` six rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        shape = {"vector": (4,), "image": (1, 2, 3, 3), "table": (6, 4)}[kind]
        self.learned = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape))
        self.odd = nn.Conv2d(2, 4, 2) if kind == "image" else nn.Linear(4, 4)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        shift = self.odd(self.learned)
        if self.kind != "vector":
            shift = shift.mean(0) if self.kind == "table" else shift.mean((0, 2, 3))
        return self.head(torch.tanh(self.first(x)) + shift)


@pytest.mark.parametrize(("kind", "n"), [("vector", 8), ("image", 4)])
def test_reduce_leaves_out_a_layer_whose_rows_are_no_examples(kind, n):
    x, y = vectors(n)
    model = seeded_build(lambda: LearnedInputs(kind))
    expected = expected_factors(twin(model), x, y, F.cross_entropy, ["first", "head"], approx="reduce")
    opt = plain_kfac(model, lr=0.1, approx="reduce", factor_decay=0.0)
    start = twin(model).state_dict()
    with left_out() as messages:
        for _ in range(2):
            model.load_state_dict(start)
            opt.zero_grad()
            backward(model, x, y, F.cross_entropy)
            moved = directions(opt, model)
            gradient, step = moved["odd"]
            assert_close(step, 0.1 * gradient)
            for name, (A, B) in expected.items():
                assert_close(moved[name][1], 0.1 * solve_exact(B, A, moved[name][0], 1e-2), 1e-8, name)
    (message,) = messages
    assert "odd: " in message
    assert "first: " not in message
    assert_factors({name: held_factors(opt, model, name) for name in expected}, expected)
    assert layer_state(opt, model, "odd")["factor_updates"] == 0


def test_one_odd_batch_does_not_cost_a_good_estimate():
    """Six learned rows split into six examples, and into three, but not into four."""
    model = seeded_build(lambda: LearnedInputs("table"))
    opt = plain_kfac(model, lr=0.1, approx="reduce")
    train_step(opt, model, *vectors(6), F.cross_entropy)
    A, B = held_factors(opt, model, "odd")
    opt.zero_grad()
    backward(model, *vectors(4), F.cross_entropy)
    with pytest.warns(UserWarning, match="odd: "):
        gradient, step = directions(opt, model)["odd"]
    assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-8)
    now = held_factors(opt, model, "odd")
    assert torch.equal(now[0], A)
    assert torch.equal(now[1], B)
    train_step(opt, model, *vectors(3), F.cross_entropy)
    assert layer_state(opt, model, "odd")["factor_updates"] == 2
    assert not torch.equal(held_factors(opt, model, "odd")[1], B)


@pytest.mark.parametrize("sizes", [(4, 6, 3), (6, 4, 3), (6, 3, 4)])
def test_one_odd_micro_batch_voids_the_layer_for_its_window_alone(sizes):
    model = seeded_build(lambda: LearnedInputs("table"))
    opt = plain_kfac(model, lr=0.1, approx="reduce")
    train_step(opt, model, *vectors(6), F.cross_entropy)
    A, B = held_factors(opt, model, "odd")
    opt.zero_grad()
    for n in sizes:
        backward(model, *vectors(n), F.cross_entropy)
    with pytest.warns(UserWarning, match="odd: "):
        opt.step()
    now = held_factors(opt, model, "odd")
    assert torch.equal(now[0], A)
    assert torch.equal(now[1], B)
    assert layer_state(opt, model, "odd")["factor_updates"] == 1
    assert layer_state(opt, model, "head")["factor_updates"] == 2
    train_step(opt, model, *vectors(6), F.cross_entropy)
    assert layer_state(opt, model, "odd")["factor_updates"] == 2


class Overwritten(nn.Module):
    """Changes a layer's input after the layer; autocast has kept a copy of it, so autograd does not mind."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.middle, self.head, self.inplace = nn.Linear(4, 4), nn.Linear(4, 3), inplace

    def forward(self, x):
        h = x * self.gain
        y = self.middle(h)
        if self.inplace:
            h += 3 * y
        else:
            h = h + 3 * y
        return self.head(h)


def test_an_input_modified_in_place_after_its_layer_is_not_captured():
    x, y = vectors()
    expected = expected_factors(seeded_build(lambda: Overwritten(False)), x, y, F.cross_entropy)
    model = seeded_build(lambda: Overwritten(True)).float()
    opt = plain_kfac(model, lr=0.1)
    with left_out() as messages:
        for _ in range(2):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = F.cross_entropy(model(x.float()), y)
            value.backward()
            gradient, step = directions(opt, model)["middle"]
            assert_close(step, 0.1 * gradient, 1e-4)
            if layer_state(opt, model, "head")["factor_updates"] == 1:
                A, B = held_factors(opt, model, "head")
                assert_close(A.double(), expected["head"][0], 3e-2)
                assert_close(B.double(), expected["head"][1], 6e-2)
    (message,) = messages
    assert "middle: " in message
    assert "in place" in message
    assert layer_state(opt, model, "middle")["factor_updates"] == 0


def test_the_same_model_without_the_modification_is_captured():
    x, y = vectors()
    model = seeded_build(lambda: Overwritten(False)).float()
    opt = plain_kfac(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = F.cross_entropy(model(x.float()), y)
    value.backward()
    opt.step()
    assert layer_state(opt, model, "middle")["factor_updates"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Changes between two micro-batches, between two steps, and at the end
# ---------------------------------------------------------------------------------------------------------------------


@approximations
@pytest.mark.parametrize("part", ["one layer", "all"])
def test_freezing_for_a_forward_between_two_micro_batches(approx, part):
    x, y = vectors()
    expected = expected_factors(mlp((4, 5, 6, 3)), x, y, F.cross_entropy, approx=approx)
    model = mlp((4, 5, 6, 3))
    opt = plain_kfac(model, approx=approx)
    frozen = model[2] if part == "one layer" else model
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        backward(model, a, b, F.cross_entropy, 0.5)
        frozen.requires_grad_(False)
        model(vectors(9, seed=5)[0])
        frozen.requires_grad_(True)
    opt.step()
    assert_factors(all_factors(opt, model), expected)


@pytest.mark.parametrize("when", ["before the first step", "after a step"])
@pytest.mark.parametrize(
    ("method", "graft"), [("eigen", None), ("cholesky", None), ("eigen", "adam")], ids=["eigen", "cholesky", "graft"]
)
def test_a_model_cast_to_float64_after_the_optimizer_was_made(when, method, graft):
    x, y = vectors()
    model = mlp().float()
    opt = plain_kfac(model, lr=0.01, momentum=0.9, inverse_method=method, graft=graft, factor_decay=0.0)
    if when == "after a step":
        train_step(opt, model, x.float(), y, F.cross_entropy)
    model.double()
    expected = expected_factors(mlp_like(model), x, y, F.cross_entropy)
    train_step(opt, model, x, y, F.cross_entropy)
    assert_factors(all_factors(opt, model), expected)
    for _ in range(2):
        train_step(opt, model, x, y, F.cross_entropy)
    for p in model.parameters():
        for key, value in opt.state[p].items():
            if isinstance(value, Tensor) and key != "step":
                assert value.dtype == torch.float64, key
        assert torch.isfinite(p).all()


def mlp_like(model: nn.Module) -> nn.Module:
    """The plain model with the same weights and without hooks."""
    plain = mlp().to(next(model.parameters()).dtype)
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("when", ["before the first step", "after a step"])
def test_a_model_cast_to_bfloat16_after_the_optimizer_was_made(when):
    x, y = vectors()
    model = mlp().float()
    opt = plain_kfac(model, lr=0.01, momentum=0.9, damping=0.1)
    if when == "after a step":
        train_step(opt, model, x.float(), y, F.cross_entropy)
    model.bfloat16()
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        train_step(opt, model, x.bfloat16(), y, lambda o, t: F.cross_entropy(o.float(), t))
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    for p in model.parameters():
        assert opt.state[p]["momentum_buffer"].dtype == torch.bfloat16
    for A, B in all_factors(opt, model).values():
        assert A.dtype == B.dtype == torch.float32


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


@approximations
@pytest.mark.parametrize("mode", ["plain", "whole", "whole reentrant"])
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
