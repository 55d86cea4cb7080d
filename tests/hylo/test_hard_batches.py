"""Repeated examples, gradients that are zero or not finite, batches of one, failing refreshes, and plain training."""

import pytest
import torch
import torch.nn.functional as F

from secondorder.linalg import woodbury
from tests.support.grid import pairs
from tests.support.kfac import assert_close, noise
from tests.support.layer_cases import CASES
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.networks import Sometimes
from tests.support.oracles import hylo as oracle
from tests.support.oracles.hylo import LATER, MODES, check_block, flat, layer_rows, plain_hylo, step, with_gradient

#: Modes that are exact for kernels of low rank.
EXACT = ("sngd", "kid diag", "kid full", "kid none", "kid all", "kid all, no residual", "kis all")
ALL_ROWS = ("sngd", "kid all", "kis all")


def finite(values, what):
    found = flat(values)
    assert torch.isfinite(found).all(), what
    return found


def assert_exact(model, kept, name, U, tolerance, what):
    V, moved = (v.double() for v in oracle.vectors_of(model, name, kept))
    assert_close(moved, oracle.sngd(U, V, 1e-2), tolerance, what)


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
        assert_close(damping * flat(with_gradient(opt, model, 0)), flat(oracle.gradients(model)), 1e-9, mode)


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

    def unbounded(out, target):
        return (out - target).square().sum(1).mean()

    opt = plain_hylo(model, mode="kid", rank_fraction=0.3, update_steps=2)
    step(opt, model, x, y, unbounded)
    state = opt.state[model[0].weight]
    before = {key: state[key].clone() for key in ("rows_a", "rows_g", "kernel", "kernel_damping", "interpolated")}
    matrix, direction = opt.dense_curvature("0").clone(), with_gradient(opt, model, 0)
    opt.param_groups[0]["mode"] = "kis"
    step(opt, model, x * 1e11, y, unbounded)
    assert opt.diagnostics()["refresh_failures"] == 1
    assert torch.equal(opt.dense_curvature("0"), matrix)
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert torch.equal(flat(with_gradient(opt, model, 0)), flat(direction))


@pytest.mark.parametrize("name", ["conv2d-groups", "linear-called-twice", "linear-no-bias"])
def test_batches_of_one_and_two(name):
    """With a single row every mode is exact."""
    case, (x, y) = CASES[name], images(1)
    (inputs, target), model_of_one = case.data(), convnet()
    for mode, keywords in MODES.items():
        model, single = case.model(), convnet()
        opt = plain_hylo(model, lr=1e-3, approx="reduce", **keywords)
        for n in (2, 4, 2):
            finite(step(opt, model, tuple(part[:n] for part in inputs), target[:n], case.loss), mode)
        kept = step(plain_hylo(single, **keywords), single, x, y, F.cross_entropy)
        U = layer_rows(model_of_one, "head", x, y, F.cross_entropy)
        assert_exact(single, kept, "head", U, 1e-7, mode)
