"""Steps that fail, data that must not enter the scales, and tensors that a step must not keep."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from secondorder import EKFAC
from tests.support import ekfac
from tests.support.building import built
from tests.support.ekfac import held_bases, network, plain_ekfac, regression, snapshot, standing, train_step, unchanged
from tests.support.kfac import assert_close, backward, noise
from tests.support.models import mlp, seeded_build, vectors
from tests.support.networks import rescaled
from tests.support.oracles.ekfac import Reference

LEAVING = {
    "recompute": (EKFAC, {"transport": "recompute"}),
    "running": (EKFAC, {"estimator": "running"}),
    "mc": (EKFAC, {"fisher": "mc"}),
}


@pytest.mark.parametrize("mode", ["raise", "nan"])
def test_a_sweep_that_fails_never_leaves_a_bad_basis(monkeypatch, mode):
    """Either a full update takes its place or nothing does, so bases are orthonormal and scales fit them."""
    original, totals = torch.linalg.qr, []

    def broken(matrices, *args, **kwargs):
        if mode == "raise":
            return failing()
        Q, R = original(matrices, *args, **kwargs)
        return Q * float("nan"), R

    for keywords in ({"inv_update_steps": 1, "basis_update": "qr", "full_every": 10**6}, {}):
        model = network()
        opt = plain_ekfac(model, **keywords)
        with standing(opt), monkeypatch.context() as patch:
            for t in range(4):
                if t == 2 and keywords:
                    patch.setattr(torch.linalg, "qr", broken)
                train_step(opt, model, *regression(seed=t), F.mse_loss)
                for Q in held_bases(opt, model[0]):
                    assert_close(Q.mT @ Q, torch.eye(Q.shape[-1], dtype=Q.dtype)[None], 1e-9)
        totals.append(float(ekfac.held_scales(opt, model[0]).sum()))
    assert totals[0] == pytest.approx(totals[1], rel=1e-9)


def test_a_non_finite_square_is_dropped_for_its_block_alone_and_counted():
    """The gradient of the step is finite, so the step is taken with the previous scales."""

    def batch(seed):
        x, y = vectors(seed=seed)
        return x.float(), y

    model = seeded_build(rescaled).float()
    opt = plain_ekfac(model, lr=0.1, factor_update_steps=100, inv_update_steps=100)
    for seed in range(2):
        train_step(opt, model, *batch(seed), F.cross_entropy)
    before = snapshot(opt, model.first)
    other = snapshot(opt, model.second)
    skipped = opt.diagnostics()["skipped_statistics"]
    model.scale = 1e25
    weights = model.first.weight.detach().clone()
    train_step(opt, model, *batch(2), F.cross_entropy)
    assert torch.isfinite(model.first.weight.grad).all()
    assert unchanged(opt, model.first, before, ("scale", "scale_weight"))
    assert not unchanged(opt, model.second, other, ("scale",))
    assert opt.diagnostics()["skipped_statistics"] == skipped + 1
    assert torch.isfinite(model.first.weight).all()
    assert not torch.equal(model.first.weight, weights)
    model.scale = 1.0
    train_step(opt, model, *batch(3), F.cross_entropy)
    assert not unchanged(opt, model.first, before, ("scale",))
    assert torch.isfinite(ekfac.held_scales(opt, model.first)).all()


def failing(*args, **kwargs):
    raise torch.linalg.LinAlgError("made to fail")


def test_a_failed_refresh_keeps_bases_and_scales_for_the_next_one(monkeypatch):
    model = network()
    reference = Reference("0", 0.5)
    opt = plain_ekfac(model, factor_decay=0.5, inv_update_steps=1)
    with standing(opt):
        for t in range(4):
            failed = t == 2
            reference.step(network(), *regression(seed=t), F.mse_loss, "fs" if failed else "fsr")
            bases = held_bases(opt, model[0]) if failed else ()
            with monkeypatch.context() as patch:
                if failed:
                    patch.setattr(torch.linalg, "eigh", failing)
                train_step(opt, model, *regression(seed=t), F.mse_loss)
            assert_close(opt.dense_curvature("0"), reference.operator(), 1e-8, f"at {t}")
            if failed:
                assert opt.diagnostics()["refresh_failures"] >= 1
                assert all(torch.equal(*pair) for pair in zip(held_bases(opt, model[0]), bases, strict=True))


@pytest.mark.parametrize("transport", ["project", "recompute"])
@pytest.mark.parametrize(("side", "size", "layer"), [("a", 4, 0), ("g", 2, 2)])
def test_if_one_side_cannot_be_factorized_the_other_stays(monkeypatch, side, size, layer, transport):
    """Q_A, Q_B and s belong together: a new basis of one side alone would not fit s."""
    model, original = network(), torch.linalg.eigh
    opt = plain_ekfac(model, inv_update_steps=1, transport=transport)

    def some(matrices, *args, **kwargs):
        return failing() if matrices.shape[-1] == size else original(matrices, *args, **kwargs)

    with standing(opt):
        for t in range(2):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
        bases, before = held_bases(opt, model[layer]), snapshot(opt, model[layer])
        monkeypatch.setattr(torch.linalg, "eigh", some)
        train_step(opt, model, *regression(seed=2), F.mse_loss)
    assert all(torch.equal(*pair) for pair in zip(held_bases(opt, model[layer]), bases, strict=True))
    if transport == "recompute":  # which would have started again in the new bases
        assert unchanged(opt, model[layer], before, ("scale", "scale_weight"))


@pytest.mark.parametrize("transport", ["recompute", "project"])
def test_an_input_buffer_may_be_overwritten_between_micro_batches(transport):
    model, buffer = mlp(), torch.empty(4, 4, dtype=torch.float64)
    opt = plain_ekfac(model, transport=transport, inv_update_steps=1 if transport == "recompute" else ekfac.HELD)
    x, y = vectors(8)
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                backward(model, buffer.copy_(rows), targets, F.cross_entropy, 1 / 2)
            buffer.fill_(7.0)
            opt.step()
    ekfac.assert_scales(opt, model, mlp(), x, y, F.cross_entropy)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # gc finds what torch has deprecated
@pytest.mark.parametrize("case", LEAVING)
def test_nothing_of_a_batch_outlives_its_step(case):
    (method, options), model = LEAVING[case], mlp((4, 5, 3))
    opt = built(method, model, lr=0.01, damping=0.1, factor_update_steps=1, inv_update_steps=1, **options)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    for seed in range(3):
        x, y = vectors(29, seed=seed)
        seen.append(weakref.ref(x))
        outputs = model(x)
        opt.observe(outputs, "categorical")
        F.cross_entropy(outputs, y).backward()
        del outputs
        opt.step()
        opt.zero_grad()
        del x, y
    gc.collect()
    assert [r() for r in seen] == [None] * 6
    assert not [t for t in gc.get_objects() if isinstance(t, Tensor) and 29 in t.shape]
    assert opt.memory_usage()["pending"] == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rotated_gradients_do_not_outlive_the_step():
    model = mlp((40, 30), bias=False)
    opt = plain_ekfac(model, estimator="running", momentum=0.9, lr=0.01)
    for seed in range(2):
        train_step(opt, model, noise(5, 40, seed=seed), noise(5, 30, seed=seed + 9), F.mse_loss)
    opt.zero_grad()
    gc.collect()
    alive = [t for t in gc.get_objects() if isinstance(t, Tensor) and tuple(t.shape) == (30, 40)]
    known = [model[0].weight, *ekfac.state_of(opt, model[0]).values()]
    assert [t for t in alive if not any(t is k for k in known)] == []
