"""What goes wrong in a step, what must not enter the scales, and what a step must not leave behind."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from tests.support.ekfac import (
    HELD,
    held_bases,
    held_scales,
    measure,
    network,
    next_directions,
    plain_ekfac,
    regression,
    snapshot,
    standing,
    state_of,
    train_step,
    unchanged,
)
from tests.support.grid import each
from tests.support.kfac import assert_close, backward, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import Reference, layer_gradients, scales, solve

LEAVING = {
    "recompute": (EKFAC, {"transport": "recompute"}),
    "running": (EKFAC, {"estimator": "running"}),
    "mc": (EKFAC, {"fisher": "mc"}),
    "kfac": (KFAC, {"approx": "reduce"}),
}


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raise", "nan"])
def test_a_sweep_that_fails_never_leaves_a_bad_basis(monkeypatch, mode):
    """A full update takes its place, or nothing does: orthonormal, and scales that go with it."""
    model = network()
    opt = plain_ekfac(model, inv_update_steps=1, basis_update="qr", full_every=10**6)
    original = torch.linalg.qr

    def broken(matrices, *args, **kwargs):
        if mode == "raise":
            return failing()
        Q, R = original(matrices, *args, **kwargs)
        return Q * float("nan"), R

    total = []
    with standing(opt):
        for t in range(4):
            if t == 2:
                monkeypatch.setattr(torch.linalg, "qr", broken)
            train_step(opt, model, *regression(seed=t), F.mse_loss)
            for Q in held_bases(opt, model[0]):
                assert_close(Q.mT @ Q, torch.eye(Q.shape[-1], dtype=Q.dtype)[None], 1e-9)
            total.append(float(held_scales(opt, model[0]).sum()))
        monkeypatch.undo()
    fine = network()
    other = plain_ekfac(fine)
    with standing(other):
        for t in range(4):
            train_step(other, fine, *regression(seed=t), F.mse_loss)
    assert total[-1] == pytest.approx(float(held_scales(other, fine[0]).sum()), rel=1e-9)


class Rescaled(nn.Module):
    """``scale`` inflates what the first layer sees and deflates what it says: gradients stay, squares overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x):
        return self.second(torch.tanh(self.first(x * self.scale) / self.scale))


def test_a_non_finite_square_is_dropped_for_its_block_alone_and_counted():
    """The gradient of the step is finite, so the step is taken, with the scales that there were."""
    model = seeded_build(Rescaled).float()
    opt = plain_ekfac(model, lr=0.1, factor_update_steps=100, inv_update_steps=100)
    for seed in range(2):
        train_step(opt, model, *float_vectors(seed), F.cross_entropy)
    before = snapshot(opt, model.first)
    other = snapshot(opt, model.second)
    skipped = opt.diagnostics()["skipped_statistics"]
    model.scale = 1e25
    opt.zero_grad()
    backward(model, *float_vectors(2), F.cross_entropy)
    assert torch.isfinite(model.first.weight.grad).all()
    weights = model.first.weight.detach().clone()
    opt.step()
    assert unchanged(opt, model.first, before, ("scale", "scale_weight"))
    assert not unchanged(opt, model.second, other, ("scale",))
    assert opt.diagnostics()["skipped_statistics"] == skipped + 1
    assert torch.isfinite(model.first.weight).all()
    assert not torch.equal(model.first.weight, weights)
    model.scale = 1.0
    train_step(opt, model, *float_vectors(3), F.cross_entropy)
    assert not unchanged(opt, model.first, before, ("scale",))
    assert torch.isfinite(held_scales(opt, model.first)).all()


def float_vectors(seed):
    x, y = vectors(seed=seed)
    return x.float(), y


@each(value=[float("inf"), float("nan")], estimator=["intra", "running"])
def test_a_non_finite_batch_changes_nothing(value, estimator):
    model, (x, y) = network(), regression(seed=5)
    opt = plain_ekfac(model, lr=0.1, inv_update_steps=1, estimator=estimator)
    for seed in range(3):
        train_step(opt, model, *regression(seed=seed), F.mse_loss)
    before = {name: snapshot(opt, model.get_submodule(name)) for name in ("0", "2")}
    parameters = [p.detach().clone() for p in model.parameters()]
    x = x.clone()
    x[0, 0] = value
    train_step(opt, model, x, y, F.mse_loss)
    keys = ("scale", "scale_weight", "factor_a", "factor_g", "factor_weight")
    for name, state in before.items():
        assert unchanged(opt, model.get_submodule(name), state, keys), name
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
    assert opt.diagnostics()["skipped_steps"] == 1
    train_step(opt, model, *regression(seed=6), F.mse_loss)
    assert all(torch.isfinite(held_scales(opt, model[i])).all() for i in (0, 2))


def failing(*args, **kwargs):
    raise torch.linalg.LinAlgError("made to fail")


def test_a_failed_refresh_keeps_bases_and_scales_together(monkeypatch):
    """The scales go on in the basis that stays; nothing is transported to one that does not exist."""
    model, plain = network(), network()
    opt = plain_ekfac(model, factor_decay=0.5, inv_update_steps=1)
    with standing(opt):
        for t in range(2):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
        bases, s = held_bases(opt, model[0]), held_scales(opt, model[0])
        weight = 0.5 * float(state_of(opt, model[0])["scale_weight"]) + 12
        monkeypatch.setattr(torch.linalg, "eigh", failing)
        train_step(opt, model, *regression(seed=2), F.mse_loss)
    assert opt.diagnostics()["refresh_failures"] >= 1
    for now, old in zip(held_bases(opt, model[0]), bases, strict=True):
        assert torch.equal(now, old)
    G = layer_gradients(plain, "0", *regression(seed=2), F.mse_loss)
    s = s + 12 / weight * (scales(G, *bases) - s)
    assert_close(held_scales(opt, model[0]), s, 1e-10)
    opt.param_groups[0].update(scale_update_steps=1000, factor_update_steps=1000, inv_update_steps=1000)
    gradient, V = next_directions(opt, model, *regression(seed=3), F.mse_loss, ["0"])["0"]
    fisher = opt.dense_curvature("0")
    assert_close(V, solve(fisher, gradient, 1e-2), 1e-8)
    monkeypatch.undo()


def test_a_refresh_after_a_failed_one_transports_from_the_basis_that_stayed(monkeypatch):
    model = network()
    reference = Reference("0", 0.5)
    opt = plain_ekfac(model, factor_decay=0.5, inv_update_steps=1)
    with standing(opt):
        for t in range(4):
            failed = t == 2
            reference.step(network(), *regression(seed=t), F.mse_loss, "fs" if failed else "fsr")
            with monkeypatch.context() as patch:
                if failed:
                    patch.setattr(torch.linalg, "eigh", failing)
                train_step(opt, model, *regression(seed=t), F.mse_loss)
            assert_close(opt.dense_curvature("0"), reference.operator(), 1e-8, f"at {t}")


@pytest.mark.parametrize("side", ["a", "g"])
def test_one_side_that_cannot_be_factorised_keeps_the_other_back(monkeypatch, side):
    """Q_A, Q_B and s are of one version: a new basis of one side alone would mix two."""
    model, size = network(), {"a": 4, "g": 2}
    opt = plain_ekfac(model, inv_update_steps=1)
    with standing(opt):
        for t in range(2):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
        bases = held_bases(opt, model[2 if side == "g" else 0])
        original = torch.linalg.eigh

        def some(matrices, *args, **kwargs):
            if matrices.shape[-1] == size[side]:
                return failing()
            return original(matrices, *args, **kwargs)

        monkeypatch.setattr(torch.linalg, "eigh", some)
        train_step(opt, model, *regression(seed=2), F.mse_loss)
    for now, old in zip(held_bases(opt, model[2 if side == "g" else 0]), bases, strict=True):
        assert torch.equal(now, old)


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_a_step_that_the_scaler_skips_leaves_nothing_behind(estimator):
    found = []
    for overflow in (False, True):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        opt = plain_ekfac(model, lr=0.1, grad_scaler=scaler, estimator=estimator)
        for t in range(4):
            opt.zero_grad()
            if overflow and t == 2:
                scaler.scale(F.cross_entropy(model(vectors(seed=90)[0]), vectors(seed=90)[1])).backward()
                model[0].weight.grad[0, 0] = float("inf")
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            x, y = vectors(seed=t)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
        found.append((held_scales(opt, model[0]), [p.detach().clone() for p in model.parameters()]))
    assert_close(found[1][0], found[0][0], 1e-9)
    for p, q in zip(found[0][1], found[1][1], strict=True):
        assert_close(q, p, 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# What must not enter
# ---------------------------------------------------------------------------------------------------------------------


def test_forwards_that_train_nothing_change_nothing():
    x, y = images()
    models = [convnet(), convnet()]
    opts = [plain_ekfac(model, lr=0.1) for model in models]
    for t in range(3):
        for i, (model, opt) in enumerate(zip(models, opts, strict=True)):
            opt.zero_grad()
            backward(model, *images(seed=t), F.cross_entropy)
            if i:
                model.eval()
                model(x * 100)
                F.cross_entropy(model(x * 100), y)  # with a graph that nobody uses
                model.train()
                with torch.no_grad():
                    model(x * 100)
            opt.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    for name in ("first", "second", "head"):
        held = (held_scales(opt, model.get_submodule(name)) for opt, model in zip(opts, models, strict=True))
        assert torch.equal(*held)


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_the_gradient_that_is_there_is_the_one_that_is_used(estimator):
    """Twice ``.grad`` is twice the step: it is not recomputed from what was captured."""
    found = []
    for factor in (1.0, 2.0):
        model = network()
        opt = plain_ekfac(model, estimator=estimator)
        measure(opt, model, *regression(), F.mse_loss)
        opt.param_groups[0].update(scale_update_steps=1000, factor_update_steps=1000)
        with standing(opt):
            train_step(opt, model, *regression(), F.mse_loss)  # from the next step on nothing is due
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        backward(model, *regression(seed=1), F.mse_loss)
        for p in model.parameters():
            p.grad *= factor
        opt.step()
        found.append([b - p.detach() for b, p in zip(before, model.parameters(), strict=True)])
    for once, twice in zip(*found, strict=True):
        assert_close(twice, 2 * once, 1e-9)


def test_a_discarded_backward_leaves_no_squares_behind():
    """``zero_grad`` after a backward: what it captured goes with its gradients."""
    found = []
    for extra in (False, True):
        model = network()
        opt = plain_ekfac(model, lr=0.1)
        for t in range(3):
            if extra:
                backward(model, *regression(seed=t + 50), F.mse_loss)
                opt.zero_grad()
            train_step(opt, model, *regression(seed=t), F.mse_loss)
        found.append(opt.dense_curvature("0"))
    assert torch.equal(*found)


@pytest.mark.parametrize("transport", ["recompute", "project"])
def test_an_input_buffer_may_be_filled_anew_between_micro_batches(transport):
    model, buffer = mlp(), torch.empty(4, 4, dtype=torch.float64)
    opt = plain_ekfac(model, transport=transport, inv_update_steps=1 if transport == "recompute" else HELD)
    x, y = vectors(8)
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                backward(model, buffer.copy_(rows), targets, F.cross_entropy, 1 / 2)
            buffer.fill_(7.0)
            opt.step()
    for name in ("0", "2"):
        G, layer = layer_gradients(mlp(), name, x, y, F.cross_entropy), model.get_submodule(name)
        assert_close(held_scales(opt, layer), scales(G, *held_bases(opt, layer)), 1e-9, name)


# ---------------------------------------------------------------------------------------------------------------------
# What is left behind
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")  # gc finds what torch has deprecated
@pytest.mark.parametrize("case", LEAVING)
def test_nothing_of_a_batch_outlives_its_step(case):
    (method, options), model = LEAVING[case], mlp((4, 5, 3))
    opt = method(model, lr=0.01, damping=0.1, factor_update_steps=1, inv_update_steps=1, **options)
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
    known = [model[0].weight, *state_of(opt, model[0]).values()]
    assert [t for t in alive if not any(t is k for k in known)] == []


def test_calls_that_are_kept_for_the_step_count_as_pending():
    model, (x, y) = mlp((4, 3)), vectors(64)
    opt = plain_ekfac(model, transport="recompute", inv_update_steps=1)
    assert opt.memory_usage()["pending"] == 0
    backward(model, x, y, F.cross_entropy)
    assert opt.memory_usage()["pending"] >= (64 * 4 + 64 * 3 + 5 * 5 + 3 * 3) * 8
    opt.step()
    assert opt.memory_usage()["pending"] == 0
