"""Repeated examples, gradients that are zero or not finite, batches of one, failing refreshes, and plain training."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import HyLo
from secondorder.linalg import woodbury
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.kfac import assert_close, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.networks import Sometimes
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
EXACT = ("sngd", "kid", "kid full", "kid none", "kid all", "kid all, no residual", "kis all")  # of kernels of low rank
ALL_ROWS = ("sngd", "kid all", "kis all")


def finite(values, what):
    found = flat(values)
    assert torch.isfinite(found).all(), what
    return found


def assert_exact(model, kept, name, U, tolerance, what):
    V, moved = (v.double() for v in vectors_of(model, name, kept))
    assert_close(moved, sngd(U, V, 1e-2), tolerance, what)


# A batch, how often its examples are repeated, and the model.
SINGULAR = {
    "rank 3 for 12 rows": (vectors(3), 4, mlp),
    "more rows than parameters": (vectors(30, 2, 2), 1, lambda: mlp((2, 2), bias=False)),
}


@pairs(case=list(SINGULAR), dtype=[torch.float64, torch.float32])
def test_exact_modes_stay_exact_with_singular_kernels(case, dtype):
    (x, y), times, build = SINGULAR[case]
    tolerance = 1e-3 if dtype == torch.float32 else 1e-6 if times == 1 else 1e-7
    for mode, keywords in MODES.items():
        model = build().to(dtype)
        opt = plain_hylo(model, **keywords)
        kept = step(opt, model, x.repeat(times, 1).to(dtype), y.repeat(times), F.cross_entropy)
        finite(kept, mode)
        for name in opt.blocks if mode in EXACT else ():
            assert_exact(model, kept, name, layer_rows(build(), name, x, y, F.cross_entropy), tolerance, mode)


def test_examples_without_a_gradient():
    """A masked loss makes some rows zero."""
    (x, y), keep = vectors(10), (torch.arange(10) % 3 > 0).double()
    for mode, keywords in MODES.items():
        model = mlp()
        opt = plain_hylo(model, **keywords)
        kept = step(opt, model, x, y, lambda out, t: (keep * F.cross_entropy(out, t, reduction="none")).mean())
        finite(kept, mode)
        for name in ("0", "2") if mode in ALL_ROWS else ():
            U = layer_rows(mlp(), name, x, y, F.cross_entropy) * keep[:, None]
            check_block(opt, model, name, U, kept, 1e-2, 1e-6)


@pytest.mark.parametrize("damping", [1e-2, 1e-8])
def test_a_batch_without_any_gradient(damping):
    """The curvature is zero, so the step is zero with this gradient and V/λ with the next one."""
    for mode, keywords in MODES.items():
        (x, y), model = vectors(), mlp()
        opt = plain_hylo(model, damping=damping, **{**keywords, "update_steps": LATER})
        kept = step(opt, model, x, y, lambda out, t: 0.0 * F.cross_entropy(out, t))
        assert not flat(kept).any(), mode
        assert_close(damping * flat(with_gradient(opt, model, 0)), flat(gradients(model)), 1e-9, mode)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e6])
def test_steps_are_finite_with_relative_damping_and_zero_tiny_and_huge_losses(scale):
    """The trace that the damping is relative to is zero, about 1e-24 or about 1e12, in single precision."""
    x, y = vectors(12)
    for mode, keywords in MODES.items():
        model = mlp().float()
        opt = plain_hylo(model, damping=0.1, damping_mode="relative", **keywords)
        kept = step(opt, model, x.float(), y, lambda out, t: scale * F.cross_entropy(out, t))
        assert finite(kept, mode).any() == (scale > 0), mode
        finite(step(opt, model, x.float(), y, F.cross_entropy), mode)


def test_rows_stay_when_a_batch_overflows():
    for mode in ("sngd", "kid", "kis"):
        (x, y), model, held = vectors(8), mlp(), []
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        opt = plain_hylo(model, mode=mode, rank_fraction=0.4, grad_scaler=scaler)
        for scale in (1.0, float("inf")):
            opt.zero_grad()
            (scaler.scale(F.cross_entropy(model(x), y)) * scale).backward()
            scaler.step(opt)
            scaler.update()
            held.append(opt.dense_curvature("0"))
        assert held[0].any()
        assert torch.equal(*held)


def test_rows_of_a_step_that_failed_are_discarded(monkeypatch):
    model = seeded_build(Sometimes)
    opt = plain_hylo(model)

    def broken(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(woodbury, "damped_inverse", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            step(opt, model, *vectors(), F.cross_entropy)
    model.both = False
    step(opt, model, *vectors(seed=1), F.cross_entropy)
    assert opt.state[model.first.weight]["refreshes"] == 1
    assert opt.state[model.second.weight]["refreshes"] == 0
    assert opt.memory_usage()["pending"] == 0


def test_a_refresh_that_fails_keeps_the_rows_and_their_mode():
    """Rows of 1e22 are finite in single precision, but their products are not."""
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


def test_batches_of_one_and_two_of_every_kind_of_layer():
    """With a single row every mode is exact."""
    x, y = images(1)
    for mode, keywords in MODES.items():
        model, single, plain = seeded_build(Zoo), convnet(), convnet()
        opt = plain_hylo(model, lr=1e-3, approx="reduce", **keywords)
        for n in (2, 12, 2):
            finite(step(opt, model, *images(n), F.cross_entropy), mode)
        kept = step(plain_hylo(single, **keywords), single, x, y, F.cross_entropy)
        assert_exact(single, kept, "head", layer_rows(plain, "head", x, y, F.cross_entropy), 1e-7, mode)


def test_steps_are_finite_with_a_gradient_that_is_not_a_mean_over_examples():
    """The loss is one of the whole batch, such as Dice."""

    def dice(out, t):
        return 1 - out.softmax(1)[torch.arange(6), t].sum() / out.abs().sum()

    for mode in ("sngd", "kid", "kis"):
        (x, y), model = images(6), convnet()
        opt = plain_hylo(model, mode=mode, rank_fraction=0.5, lr=1e-3)
        for _ in range(3):
            finite(step(opt, model, x, y, dice), mode)


class Small(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8 * 16, classes)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(x.flatten(1))


def patterns(n, seed, classes=4):
    """Noisy copies of one 8 × 8 pattern per class, shifted by up to one pixel."""
    generator = torch.Generator().manual_seed(1234)
    base = torch.randn(classes, 8, 8, generator=generator)
    generator.manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    shift = torch.randint(-1, 2, (n, 2), generator=generator).tolist()
    x = torch.stack([base[c].roll(s, (0, 1)) for c, s in zip(y.tolist(), shift, strict=True)])
    return (x + 0.5 * torch.randn(n, 8, 8, generator=generator))[:, None], y


# With a normalized damping, lr · λ is what the plain form has for lr.
SETTINGS = {
    "kid": {"lr": 0.003, "mode": "kid", "approx": "expand"},
    "kis": {"lr": 0.003, "mode": "kis", "approx": "reduce"},
    "normalized": {"lr": 0.03, "mode": "auto", "approx": "reduce", "normalize_damping": True},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_small_network_of_convolutions_learns_with_a_tenth_of_the_rows(case):
    torch.manual_seed(0)
    model, losses = Small(), []
    opt = built(HyLo, model, damping=0.1, rank_fraction=0.1, update_steps=5, **SETTINGS[case])
    for seed in range(80):
        x, y = patterns(64, seed)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.2
    assert sum(losses[-10:]) / 10 < 0.1
