"""Examples that repeat, or have no gradient or no finite one; batches of one; refreshes that fail; bad values."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import HyLo
from secondorder.linalg import woodbury
from tests.support.grid import pairs
from tests.support.kfac import assert_close, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.hylo import (
    LATER,
    check_block,
    flat,
    gradients,
    layer_rows,
    plain_hylo,
    sngd,
    step,
    vectors_of,
    with_gradient,
)

MODES = {
    "sngd": {"mode": "sngd"},
    "kid": {"mode": "kid", "rank_fraction": 0.4},
    "kid full": {"mode": "kid", "rank_fraction": 0.4, "kid_residual": "full"},
    "kid none": {"mode": "kid", "rank_fraction": 0.4, "kid_residual": "none"},
    "kid all": {"mode": "kid", "rank_fraction": 1.0},
    "kid all, no residual": {"mode": "kid", "rank_fraction": 1.0, "kid_residual": "none"},
    "kid qr": {"mode": "kid", "rank_fraction": 0.4, "kid_pivoting": "qr"},
    "kid score": {"mode": "kid", "rank_fraction": 0.4, "kid_pivoting": "score"},
    "kis": {"mode": "kis", "rank_fraction": 0.4},
    "kis all": {"mode": "kis", "rank_fraction": 1.0},
    "kis replacement": {"mode": "kis", "rank_fraction": 1.0, "kis_sampling": "replacement"},
    "kis unweighted": {"mode": "kis", "rank_fraction": 1.0, "kis_sampling": "unweighted"},
    "kis uniform": {"mode": "kis", "rank_fraction": 0.4, "kis_sampling": "uniform"},
    "auto": {"mode": "auto", "rank_fraction": 0.4},
}
modes = pytest.mark.parametrize("mode", MODES)
EXACT = ("sngd", "kid", "kid full", "kid none", "kid all", "kid all, no residual", "kis all")  # of kernels of low rank


def assert_exact(model, kept, name, U, tolerance):
    V, moved = (v.double() for v in vectors_of(model, name, kept))
    assert_close(moved, sngd(U, V, 1e-2), tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Singular kernels
# ---------------------------------------------------------------------------------------------------------------------


@pairs(mode=list(MODES), dtype={"float32": torch.float32, "float64": torch.float64})
def test_duplicated_examples(mode, dtype):
    """A kernel of rank 3 for 12 rows; what is exact stays exact."""
    (x, y), model = vectors(3), mlp().to(dtype)
    opt = plain_hylo(model, **MODES[mode])
    kept = step(opt, model, x.repeat(4, 1).to(dtype), y.repeat(4), F.cross_entropy)
    assert torch.isfinite(flat(kept)).all()
    for name in ("0", "2") if mode in EXACT else ():
        U = layer_rows(mlp(), name, x, y, F.cross_entropy)
        assert_exact(model, kept, name, U, 1e-3 if dtype == torch.float32 else 1e-7)


@modes
def test_more_rows_than_parameters(mode):
    (x, y), model = vectors(30, 2, 2), mlp((2, 2), bias=False)
    kept = step(plain_hylo(model, **MODES[mode]), model, x, y, F.cross_entropy)
    assert torch.isfinite(flat(kept)).all()
    if mode in EXACT:
        U = layer_rows(mlp((2, 2), bias=False), "0", x, y, F.cross_entropy)
        assert_exact(model, kept, "0", U, 1e-6)


@modes
def test_examples_without_a_gradient(mode):
    """Some rows are zero: a masked loss."""
    (x, y), keep, model = vectors(10), (torch.arange(10) % 3 > 0).double(), mlp()
    opt = plain_hylo(model, **MODES[mode])
    kept = step(opt, model, x, y, lambda out, t: (keep * F.cross_entropy(out, t, reduction="none")).mean())
    assert torch.isfinite(flat(kept)).all()
    for name in ("0", "2") if mode in ("sngd", "kid all", "kis all") else ():
        U = layer_rows(mlp(), name, x, y, F.cross_entropy) * keep[:, None]
        check_block(opt, model, name, U, kept, 1e-2, 1e-6)


@pairs(mode=list(MODES), damping=[1e-2, 1e-8])
def test_a_batch_without_any_gradient(mode, damping):
    """Nothing is known: the step is V/λ with the next gradient, and zero with this one."""
    (x, y), model = vectors(), mlp()
    opt = plain_hylo(model, damping=damping, **{**MODES[mode], "update_steps": LATER})
    kept = step(opt, model, x, y, lambda out, t: 0.0 * F.cross_entropy(out, t))
    assert not flat(kept).any()
    moved = flat(with_gradient(opt, model, 0))
    assert_close(damping * moved, flat(gradients(model)), 1e-9)


@modes
def test_relative_damping_without_a_trace_and_of_tiny_and_huge_losses(mode):
    """No trace to be relative to, or one of 1e-24 or 1e12 in single precision: the step is a number."""
    x, y = vectors(12)
    for scale in (0.0, 1e-12, 1e6):
        model = mlp().float()
        opt = plain_hylo(model, damping=0.1, damping_mode="relative", **MODES[mode])
        kept = step(opt, model, x.float(), y, lambda out, t, s=scale: s * F.cross_entropy(out, t))
        assert torch.isfinite(flat(kept)).all()
        assert flat(kept).any() == (scale > 0)
        assert torch.isfinite(flat(step(opt, model, x.float(), y, F.cross_entropy))).all()


# ---------------------------------------------------------------------------------------------------------------------
# Batches and refreshes that are dropped
# ---------------------------------------------------------------------------------------------------------------------


@pairs(mode=list(MODES), value=[float("nan"), float("inf")])
def test_a_bad_batch_leaves_the_last_good_rows(mode, value):
    (x, y), model = vectors(8), mlp()
    opt = plain_hylo(model, lr=0.1, **MODES[mode])
    step(opt, model, x, y, F.cross_entropy)
    before = opt.dense_curvature("0"), flat(dict(model.named_parameters())).clone()
    step(opt, model, x, y, lambda out, t: value * F.cross_entropy(out, t))
    assert torch.equal(opt.dense_curvature("0"), before[0])
    assert torch.equal(flat(dict(model.named_parameters())), before[1])
    assert torch.isfinite(flat(step(opt, model, x, y, F.cross_entropy))).all()


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_a_batch_that_overflows_is_dropped(mode):
    """The rows of the last good batch stay, whatever came after them."""
    (x, y), model = vectors(8), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = plain_hylo(model, mode=mode, rank_fraction=0.4, grad_scaler=scaler)
    held = []
    for scale in (1.0, float("inf")):
        opt.zero_grad()
        (scaler.scale(F.cross_entropy(model(x), y)) * scale).backward()
        scaler.step(opt)
        scaler.update()
        held.append(opt.dense_curvature("0"))
    assert held[0].any()
    assert torch.equal(*held)


class Branches(nn.Module):
    """A layer that takes part in some forwards only."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.used = nn.Linear(4, 3), nn.Linear(4, 3)
        self.both = True

    def forward(self, x):
        return self.used(x) + self.rare(x) if self.both else self.used(x)


def test_rows_of_a_step_that_failed_are_forgotten(monkeypatch):
    model = seeded_build(Branches)
    opt = plain_hylo(model)

    def broken(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(woodbury, "damped_inverse", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            step(opt, model, *vectors(), F.cross_entropy)
    model.both = False
    step(opt, model, *vectors(seed=1), F.cross_entropy)
    assert opt.state[model.used.weight]["refreshes"] == 1
    assert opt.state[model.rare.weight]["refreshes"] == 0
    assert opt.memory_usage()["pending"] == 0


def test_a_refresh_that_fails_leaves_rows_and_their_kind():
    """Rows of 1e22 are finite in single precision, their products are not."""
    model, x, y = mlp((4, 3)).float(), noise(12, 4).float(), noise(12, 3, seed=50).float()

    def squares(out, target):
        return (out - target).square().sum(1).mean()

    opt = plain_hylo(model, mode="kid", rank_fraction=0.3, update_steps=2)
    step(opt, model, x, y, squares)
    state = opt.state[model[0].weight]
    before = {key: state[key].clone() for key in ("rows_a", "rows_g", "kernel", "kernel_damping", "interpolated")}
    matrix, direction = opt.dense_curvature("0").clone(), with_gradient(opt, model, 0)
    opt.param_groups[0]["mode"] = "kis"
    step(opt, model, x * 1e11, y, squares)
    assert opt.diagnostics()["refresh_failures"] == 1
    assert torch.equal(opt.dense_curvature("0"), matrix)
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert torch.equal(flat(with_gradient(opt, model, 0)), flat(direction))


# ---------------------------------------------------------------------------------------------------------------------
# Tiny batches, plain loops, refusals
# ---------------------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """A grouped convolution, a shared layer without bias, tokens, a norm layer, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, groups=2, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.mix = nn.Linear(4, 4, bias=False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        z = self.act(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(self.norm(torch.tanh(self.mix(self.mix(z)))).mean(1))


@modes
def test_batches_of_one_and_two_of_every_kind_of_layer(mode):
    """With one row, which is all there is, every mode is exact."""
    model = seeded_build(Zoo)
    opt = plain_hylo(model, lr=1e-3, approx="reduce", **MODES[mode])
    for n in (2, 12, 2):
        assert torch.isfinite(flat(step(opt, model, *images(n), F.cross_entropy))).all()
    (x, y), single, plain = images(1), convnet(), convnet()
    kept = step(plain_hylo(single, **MODES[mode]), single, x, y, F.cross_entropy)
    assert_exact(single, kept, "head", layer_rows(plain, "head", x, y, F.cross_entropy), 1e-7)


def test_a_plain_loop_with_default_arguments_learns_without_a_warning():
    model = seeded_build(Zoo).float()
    opt = HyLo(model)
    (x, y), losses = images(16), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(25):
            opt.zero_grad()
            loss = F.cross_entropy(model(x.float()), y)
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    group = opt.param_groups[0]
    assert (group["lr"], group["momentum"], group["update_steps"], group["rank_fraction"]) == (0.1, 0.9, 10, 0.1)


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_a_gradient_that_is_no_mean_of_examples(mode):
    """A loss of the whole batch (Dice, say): rows are what backward makes of it, and steps stay numbers."""
    (x, y), model = images(6), convnet()
    opt = plain_hylo(model, mode=mode, rank_fraction=0.5, lr=1e-3)
    for _ in range(3):
        kept = step(opt, model, x, y, lambda out, t: 1 - out.softmax(1)[torch.arange(6), t].sum() / out.abs().sum())
        assert torch.isfinite(flat(kept)).all()


BAD = {
    "mode": "kfac",
    "rank_fraction": 0.0,
    "rank_fraction ": 1.5,
    "max_rank": 0,
    "rank_energy": 1.5,
    "kis_sampling": "best",
    "kid_pivoting": "random",
    "kid_residual": "half",
    "approx": "mean",
    "conv_scale": "paper",
    "damping": -1.0,
    "damping ": 0.0,
    "update_steps": -1,
    "weight_decay_mode": "l2",
    "damping_mode": "odd",
}


def test_bad_values_are_refused_by_name():
    for key, value in BAD.items():
        more = {"damping": 0.1} if key == "damping_mode" else {}
        with pytest.raises(ValueError, match=str(value)):
            HyLo(mlp(), **{key.strip(): value, **more})
    with pytest.raises(ValueError, match="module"):
        HyLo(mlp().parameters())
