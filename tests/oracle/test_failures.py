"""The failure ladder: a factorisation that fails is repaired or the last good one stays; bad statistics never enter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.grid import each
from tests.support.kfac import (
    all_factors,
    assert_close,
    backward,
    directions,
    held_factors,
    layer_state,
    noise,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact, solve_pi


class Faults:
    """Stands in for a function of ``torch.linalg``: raises, or returns NaN, where ``when(matrices)`` says so."""

    def __init__(self, original, mode: str, when) -> None:
        self.original, self.mode, self.when = original, mode, when
        self.faults, self.dtypes = 0, []

    def __call__(self, matrices, *args, **kwargs):
        self.dtypes.append(matrices.dtype)
        if not self.when(matrices):
            return self.original(matrices, *args, **kwargs)
        self.faults += 1
        if self.mode == "raise":
            raise torch.linalg.LinAlgError("made to fail")
        good = self.original(torch.eye(matrices.shape[-1], dtype=matrices.dtype).expand_as(matrices), *args, **kwargs)
        parts = [part.clone() for part in good]
        for part in parts:
            part.fill_(float("nan") if part.is_floating_point() else 0)
        return type(good)(parts)


FACTORISATIONS = {"eigen": ("eigh",), "cholesky": ("cholesky_ex", "cholesky")}
SOLVES = {"eigen": solve_exact, "cholesky": solve_pi}


def inject(monkeypatch, method: str, mode: str = "raise", when=lambda matrices: True) -> list[Faults]:
    faults = []
    for name in FACTORISATIONS[method]:
        original = getattr(torch.linalg, name)
        if name == "cholesky" and mode == "nan":
            continue  # returns one tensor, and raises rather than this
        faults.append(Faults(original, mode, when))
        monkeypatch.setattr(torch.linalg, name, faults[-1])
    return faults


methods = pytest.mark.parametrize("method", ["eigen", "cholesky"])
modes = pytest.mark.parametrize("mode", ["raise", "nan"])


@methods
@modes
def test_the_last_good_factorisation_stays(monkeypatch, method, mode):
    model = mlp()
    opt = plain_kfac(model, lr=0.1, inverse_method=method)
    train_step(opt, model, *vectors(), F.cross_entropy)
    good = all_factors(opt, model)
    faults = inject(monkeypatch, method, mode)
    opt.zero_grad()
    backward(model, *vectors(seed=1), F.cross_entropy)
    for name, (gradient, step) in directions(opt, model).items():
        A, B = good[name]
        assert_close(step, 0.1 * SOLVES[method](B, A, gradient, 1e-2), 1e-8, name)
        assert not torch.equal(held_factors(opt, model, name)[0], A), "the estimate itself goes on"
    assert sum(fault.faults for fault in faults) >= 2
    assert opt.diagnostics()["refresh_failures"] >= 1
    monkeypatch.undo()
    opt.zero_grad()
    backward(model, *vectors(seed=2), F.cross_entropy)
    moved = directions(opt, model)
    for name, (gradient, step) in moved.items():
        A, B = held_factors(opt, model, name)
        assert_close(step, 0.1 * SOLVES[method](B, A, gradient, 1e-2), 1e-8, f"{name} recovered")


@each(method=["eigen", "cholesky"], mode=["raise", "nan"])
def test_float64_is_tried_before_giving_up(monkeypatch, method, mode):
    model, (x, y) = mlp().float(), vectors()
    faults = inject(monkeypatch, method, mode, lambda matrices: matrices.dtype == torch.float32)
    opt = plain_kfac(model, inverse_method=method)
    backward(model, x.float(), y, F.cross_entropy)
    moved = directions(opt, model)
    assert any(torch.float64 in fault.dtypes for fault in faults)
    for name, (gradient, V) in moved.items():
        A, B = (X.double() for X in held_factors(opt, model, name))
        assert_close(V.double(), SOLVES[method](B, A, gradient.double(), 1e-2), 1e-3, name)


@methods
@modes
def test_a_single_failure_is_repaired_by_the_next_rung(monkeypatch, method, mode):
    model, (x, y) = mlp(), vectors()
    calls = []

    def first_only(matrices):
        calls.append(matrices.shape)
        return len(calls) == 1

    inject(monkeypatch, method, mode, first_only)
    opt = plain_kfac(model, inverse_method=method)
    backward(model, x, y, F.cross_entropy)
    moved = directions(opt, model)
    assert len(calls) > 1
    for name, (gradient, V) in moved.items():
        A, B = held_factors(opt, model, name)
        assert_close(V, SOLVES[method](B, A, gradient, 1e-2), 1e-3, name)  # jitter is 1e-6 of the mean diagonal


@each(method=["eigen", "cholesky"], mode=["raise", "nan"])
def test_the_first_failure_leaves_a_finite_descent(monkeypatch, method, mode):
    """Nothing good yet: identity, so the step is finite, downhill and not zero."""
    model, (x, y) = mlp(), vectors()
    inject(monkeypatch, method, mode)
    opt = plain_kfac(model, lr=0.1, inverse_method=method)
    backward(model, x, y, F.cross_entropy)
    for gradient, step in directions(opt, model).values():
        assert torch.isfinite(step).all()
        assert float((gradient * step).sum()) > 0


@each(method=["eigen", "cholesky"], mode=["raise", "nan"])
def test_too_many_failures_in_a_row_raise_with_the_layer_s_name(monkeypatch, method, mode):
    model = nn.Sequential()
    model.add_module("encoder", mlp((4, 3)))
    opt = plain_kfac(model, lr=0.01, inverse_method=method, max_failures=3)
    train_step(opt, model, *vectors(), F.cross_entropy)
    inject(monkeypatch, method, mode)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)

    def two_more():
        for seed in range(2):
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)

    with pytest.raises(RuntimeError, match=r"encoder\.0"):
        two_more()


@methods
def test_a_success_in_between_starts_the_count_anew(monkeypatch, method):
    model = mlp((4, 3))
    opt = plain_kfac(model, lr=0.01, inverse_method=method, max_failures=3)
    train_step(opt, model, *vectors(), F.cross_entropy)
    for _ in range(3):
        with monkeypatch.context() as patch:
            inject(patch, method)
            for seed in range(2):
                train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
        train_step(opt, model, *vectors(), F.cross_entropy)
    assert opt.diagnostics()["refresh_failures"] >= 6


@modes
def test_a_bad_matrix_does_not_take_others_of_its_shape_along(monkeypatch, mode):
    """Refreshes are batched over equal shapes, failures are not: layer 1's input is told by its first feature."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            weights = torch.tensor([100.0, 1.0, 1.0, 1.0], dtype=x.dtype)
            return self.good(x) + self.bad(x * weights)

    def dominated_by_the_first(matrices):
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        return bool((diagonal[..., 0] > 0.95 * diagonal.sum(-1)).any())

    model, x, y = seeded_build(Two), noise(20, 4), noise(20, 4, seed=1)
    faults = inject(monkeypatch, "eigen", mode, dominated_by_the_first)
    opt = plain_kfac(model, lr=0.1)
    backward(model, x, y, F.mse_loss)
    moved = directions(opt, model)
    assert faults[0].faults > 0
    gradient, step = moved["good"]
    A, B = held_factors(opt, model, "good")
    assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-6)
    assert torch.isfinite(moved["bad"][1]).all()


class Rescaled(nn.Module):
    """``scale`` inflates what the first layer sees and deflates what it says: gradients stay, aaᵀ overflows float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x):
        return self.second(torch.tanh(self.first(x * self.scale) / self.scale))


@methods
def test_an_overflowing_statistic_is_dropped_for_its_block_alone(method):
    model = seeded_build(Rescaled).float()
    x, y = vectors()
    opt = plain_kfac(model, lr=0.1, inverse_method=method, factor_decay=0.5)
    train_step(opt, model, x.float(), y, F.cross_entropy)
    held = all_factors(opt, model)
    weight = layer_state(opt, model, "first")["factor_weight"].clone()
    model.scale = 1e25
    opt.zero_grad()
    backward(model, vectors(seed=1)[0].float(), y, F.cross_entropy)
    assert torch.isfinite(model.first.weight.grad).all()
    moved = directions(opt, model)
    now = all_factors(opt, model)
    assert torch.equal(now["first"][0], held["first"][0])
    assert torch.equal(now["first"][1], held["first"][1])
    assert torch.equal(layer_state(opt, model, "first")["factor_weight"], weight)
    assert not torch.equal(now["second"][0], held["second"][0])
    assert opt.diagnostics()["skipped_statistics"] == 1
    gradient, step = moved["first"]
    A, B = (X.double() for X in held["first"])
    assert_close(step.double(), 0.1 * SOLVES[method](B, A, gradient.double(), 1e-2), 1e-3)
    assert torch.isfinite(moved["second"][1]).all()


def test_an_overflow_in_the_very_first_statistic_leaves_the_block_without_estimate():
    model = seeded_build(Rescaled).float()
    x, y = vectors()
    model.scale = 1e25
    opt = plain_kfac(model, lr=0.1)
    backward(model, x.float(), y, F.cross_entropy)
    gradient, step = directions(opt, model)["first"]
    assert torch.isfinite(step).all()
    assert float((gradient * step).sum()) > 0
    model.scale = 1.0
    plain = seeded_build(Rescaled).float()
    plain.load_state_dict(model.state_dict())
    expected = expected_factors(plain, x.float(), y, F.cross_entropy)["first"]
    train_step(opt, model, x.float(), y, F.cross_entropy)
    A, B = held_factors(opt, model, "first")
    assert_close(A, expected[0], 1e-5)
    assert_close(B, expected[1], 1e-5)


@each(value=[float("inf"), float("nan")], where=["first", "last"])
def test_a_non_finite_micro_batch_skips_the_step_and_poisons_nothing(value, where):
    model = mlp()
    opt = plain_kfac(model, lr=0.1, momentum=0.9)
    train_step(opt, model, *vectors(), F.cross_entropy)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    held = all_factors(opt, model)
    parameters = [p.detach().clone() for p in model.parameters()]
    momenta = [opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    opt.zero_grad()
    for part in ("first", "last"):
        x, y = vectors(seed=1)
        if part == where:
            x = x.clone()
            x[0, 0] = value
        backward(model, x, y, F.cross_entropy, 0.5)
    opt.step()
    assert opt.diagnostics()["skipped_steps"] == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
    for p, buffer in zip(model.parameters(), momenta, strict=True):
        assert torch.equal(opt.state[p]["momentum_buffer"], buffer)
    for name, (A, B) in held.items():
        assert torch.equal(held_factors(opt, model, name)[0], A)
        assert torch.equal(held_factors(opt, model, name)[1], B)
    x, y = vectors(seed=2)
    expected = expected_factors(plain, x, y, F.cross_entropy)
    share = len(x) / (0.95 * 6 + len(x))
    train_step(opt, model, x, y, F.cross_entropy)
    for name, (A, B) in expected.items():
        now = held_factors(opt, model, name)
        assert_close(now[0], held[name][0] + share * (A - held[name][0]))
        assert_close(now[1], held[name][1] + share * (B - held[name][1]))
    assert opt.diagnostics()["skipped_steps"] == 1


def test_a_non_finite_direction_falls_back_to_the_gradient_for_that_step():
    model = mlp()
    opt = plain_kfac(model, lr=0.1, factor_update_steps=10, inv_update_steps=10)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held = all_factors(opt, model)
    layer_state(opt, model, "0")["eigenvalues_a"].fill_(float("nan"))
    opt.zero_grad()
    backward(model, *vectors(seed=1), F.cross_entropy)
    moved = directions(opt, model)
    gradient, step = moved["0"]
    assert_close(step, 0.1 * gradient)
    gradient, step = moved["2"]
    assert_close(step, 0.1 * solve_exact(held["2"][1], held["2"][0], gradient, 1e-2), 1e-8)


@methods
def test_duplicate_features_make_a_singular_factor_and_nothing_worse(method):
    model, (x, y) = mlp((4, 3)), vectors()
    x = x[:, [0, 0, 1, 1]] * 1e3
    opt = plain_kfac(model, damping=1e-4, inverse_method=method)
    backward(model, x, y, F.cross_entropy)
    gradient, V = directions(opt, model)["0"]
    A, B = held_factors(opt, model, "0")
    assert_close(V, SOLVES[method](B, A, gradient, 1e-4), 1e-6)


def test_factors_of_size_one_need_no_factorisation(monkeypatch):
    """Depthwise 1×1 without bias: every matrix is a number, and LAPACK is not asked."""
    layer = seeded_build(lambda: nn.Conv2d(3, 3, 1, groups=3, bias=False))
    x, y = noise(4, 3, 2, 2), noise(4, 3, 2, 2, seed=1)
    plain = twin(layer)
    faults = inject(monkeypatch, "eigen")
    opt = plain_kfac(layer)
    backward(layer, x, y, F.mse_loss)
    gradient, V = directions(opt, layer)[""]
    A, B = expected_factors(plain, x, y, F.mse_loss)[""]
    assert_close(V, gradient / (A.reshape(3, 1) * B.reshape(3, 1) + 1e-2), 1e-9)
    assert faults[0].faults == 0
