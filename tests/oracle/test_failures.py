"""The failure ladder: a failed factorization is repaired or the last good one stays; bad statistics do not count."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import kfac
from tests.support.grid import each, pairs
from tests.support.kfac import all_factors, assert_solves, next_directions, noise, plain_kfac, train_step, twin
from tests.support.models import Net, mlp, seeded_build, vectors
from tests.support.networks import rescaled
from tests.support.oracles.kfac import expected_factors, solve_exact, solve_pi


class Faults:
    """Replaces a function of ``torch.linalg``: raises or returns NaN if ``when(matrices)`` is true."""

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


FACTORIZATIONS = {"eigen": ("eigh",), "cholesky": ("cholesky_ex", "cholesky")}
SOLVES = {"eigen": solve_exact, "cholesky": solve_pi}


def inject(monkeypatch, method: str, mode: str = "raise", when=lambda matrices: True) -> list[Faults]:
    faults = []
    for name in FACTORIZATIONS[method]:
        if name == "cholesky" and mode == "nan":
            continue  # returns one tensor, and raises instead
        faults.append(Faults(getattr(torch.linalg, name), mode, when))
        monkeypatch.setattr(torch.linalg, name, faults[-1])
    return faults


methods = pytest.mark.parametrize("method", SOLVES)
ways = {"method": list(SOLVES), "mode": ["raise", "nan"]}


@pairs(**ways)
def test_the_last_good_factorisation_stays(monkeypatch, method, mode):
    model = mlp()
    opt = plain_kfac(model, lr=0.1, inverse_method=method)
    train_step(opt, model, *vectors(), F.cross_entropy)
    good = all_factors(opt, model)
    faults = inject(monkeypatch, method, mode)
    assert_solves(next_directions(opt, model, *vectors(seed=1), F.cross_entropy), good, SOLVES[method], 1e-2, 0.1)
    for name, (A, _) in all_factors(opt, model).items():
        assert not torch.equal(A, good[name][0]), "the estimate itself is updated"
    assert sum(fault.faults for fault in faults) >= 2
    assert opt.diagnostics()["refresh_failures"] >= 1
    monkeypatch.undo()
    recovered = next_directions(opt, model, *vectors(seed=2), F.cross_entropy)
    assert_solves(recovered, all_factors(opt, model), SOLVES[method], 1e-2, 0.1)


@pairs(**ways, fails=["in float32", "at first"])
def test_a_failure_is_repaired_by_the_next_rung(monkeypatch, method, mode, fails):
    """The rungs are a jitter of 1e-6 of the mean diagonal, and float64."""
    model, (x, y), calls = mlp().float(), vectors(), []

    def when(matrices):
        calls.append(matrices.dtype)
        return matrices.dtype == torch.float32 if fails == "in float32" else len(calls) == 1

    inject(monkeypatch, method, mode, when)
    opt = plain_kfac(model, inverse_method=method)
    moved = next_directions(opt, model, x.float(), y, F.cross_entropy)
    assert len(calls) > 1
    assert fails == "at first" or torch.float64 in calls
    assert_solves(moved, all_factors(opt, model), SOLVES[method], 1e-2, tolerance=1e-3)


@each(**ways)
def test_the_first_failure_leaves_a_finite_descent(monkeypatch, method, mode):
    """Without an earlier factorization, the identity takes its place, so the step is finite and downhill."""
    model = mlp()
    inject(monkeypatch, method, mode)
    opt = plain_kfac(model, lr=0.1, inverse_method=method)
    for gradient, step in next_directions(opt, model, *vectors(), F.cross_entropy).values():
        assert torch.isfinite(step).all()
        assert float((gradient * step).sum()) > 0


@each(**ways)
def test_too_many_failures_in_a_row_raise_with_the_layer_s_name(monkeypatch, method, mode):
    """A success in between resets the count."""
    model = nn.Sequential()
    model.add_module("encoder", mlp((4, 3)))
    opt = plain_kfac(model, lr=0.01, inverse_method=method, max_failures=3)

    def train(steps):
        for seed in range(steps):
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)

    for _ in range(2):
        train(1)
        with monkeypatch.context() as patch:
            inject(patch, method, mode)
            train(2)
    assert opt.diagnostics()["refresh_failures"] >= 4
    inject(monkeypatch, method, mode)
    with pytest.raises(RuntimeError, match=r"encoder\.0"):
        train(2)


@methods
def test_a_loaded_state_has_no_failures(monkeypatch, method):
    model = mlp()
    opt = plain_kfac(model, lr=0.01, inverse_method=method, max_failures=3)
    fresh = copy.deepcopy(opt.state_dict())
    for _ in range(3):  # two failures before loading and two after it, and a success at once
        with monkeypatch.context() as patch:
            inject(patch, method)
            for seed in range(2):
                train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
        opt.load_state_dict(fresh)
    train_step(opt, model, *vectors(), F.cross_entropy)
    assert {state["refreshes"] for state in opt.state.values() if "refreshes" in state} == {1}


def two() -> Net:
    """Layers of one shape, of which the second is recognized by its first feature."""

    def forward(net, x):
        return net.good(x) + net.bad(x * torch.tensor([100.0, 1.0, 1.0, 1.0], dtype=x.dtype))

    return Net(forward, good=nn.Linear(4, 4, bias=False), bad=nn.Linear(4, 4, bias=False))


@pytest.mark.parametrize("mode", ["raise", "nan"])
def test_a_bad_matrix_does_not_affect_others_of_its_shape(monkeypatch, mode):
    """Refreshes are batched over equal shapes, but failures are not."""

    def dominated_by_the_first(matrices):
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        return bool((diagonal[..., 0] > 0.95 * diagonal.sum(-1)).any())

    model, x, y = seeded_build(two), noise(20, 4), noise(20, 4, seed=1)
    faults = inject(monkeypatch, "eigen", mode, dominated_by_the_first)
    opt = plain_kfac(model, lr=0.1)
    moved = next_directions(opt, model, x, y, F.mse_loss)
    assert faults[0].faults > 0
    assert_solves({"good": moved["good"]}, all_factors(opt, model), solve_exact, 1e-2, 0.1, 1e-6)
    assert torch.isfinite(moved["bad"][1]).all()


@methods
def test_an_overflowing_statistic_is_dropped_for_its_block_alone(method):
    model, (x, y) = seeded_build(rescaled).float(), vectors()
    opt = plain_kfac(model, lr=0.1, inverse_method=method, factor_decay=0.5)
    train_step(opt, model, x.float(), y, F.cross_entropy)
    held = all_factors(opt, model)
    weight = kfac.layer_state(opt, model, "first")["factor_weight"].clone()
    model.scale = 1e25
    moved = next_directions(opt, model, vectors(seed=1)[0].float(), y, F.cross_entropy)
    assert all(torch.isfinite(tensor).all() for pair in moved.values() for tensor in pair)
    kfac.assert_same_factors(opt, model, {"first": held["first"]})
    assert torch.equal(kfac.layer_state(opt, model, "first")["factor_weight"], weight)
    assert not torch.equal(all_factors(opt, model)["second"][0], held["second"][0])
    assert opt.diagnostics()["skipped_statistics"] == 1
    assert_solves({"first": moved["first"]}, held, SOLVES[method], 1e-2, 0.1, 1e-3)


def test_an_overflow_in_the_first_statistic_leaves_the_block_without_estimate():
    model, (x, y) = seeded_build(rescaled).float(), vectors()
    model.scale = 1e25
    opt = plain_kfac(model, lr=0.1)
    gradient, step = next_directions(opt, model, x.float(), y, F.cross_entropy)["first"]
    assert torch.isfinite(step).all()
    assert float((gradient * step).sum()) > 0
    model.scale = 1.0
    expected = expected_factors(twin(model), x.float(), y, F.cross_entropy, ["first"])
    train_step(opt, model, x.float(), y, F.cross_entropy)
    kfac.assert_factors(all_factors(opt, model), expected, 1e-5)


def test_a_non_finite_direction_falls_back_to_the_gradient_for_that_step():
    model = mlp()
    opt = plain_kfac(model, lr=0.1, factor_update_steps=10, inv_update_steps=10)
    train_step(opt, model, *vectors(), F.cross_entropy)
    kfac.layer_state(opt, model, "0")["eigenvalues_a"].fill_(float("nan"))
    moved = next_directions(opt, model, *vectors(seed=1), F.cross_entropy)
    gradient, step = moved.pop("0")
    kfac.assert_close(step, 0.1 * gradient)
    assert_solves(moved, all_factors(opt, model), solve_exact, 1e-2, 0.1)


@methods
def test_duplicate_features_make_a_singular_factor_and_nothing_worse(method):
    model, (x, y) = mlp((4, 3)), vectors()
    opt = plain_kfac(model, damping=1e-4, inverse_method=method)
    moved = next_directions(opt, model, x[:, [0, 0, 1, 1]] * 1e3, y, F.cross_entropy)
    assert_solves(moved, all_factors(opt, model), SOLVES[method], 1e-4, tolerance=1e-6)


def test_factors_of_size_one_need_no_factorization(monkeypatch):
    """In a depthwise 1×1 convolution without bias, every matrix is a number, and LAPACK is not called."""
    layer = seeded_build(lambda: nn.Conv2d(3, 3, 1, groups=3, bias=False))
    x, y, plain = noise(4, 3, 2, 2), noise(4, 3, 2, 2, seed=1), twin(layer)
    faults = inject(monkeypatch, "eigen")
    gradient, V = next_directions(plain_kfac(layer), layer, x, y, F.mse_loss)[""]
    A, B = expected_factors(plain, x, y, F.mse_loss)[""]
    kfac.assert_close(V, gradient / (A.reshape(3, 1) * B.reshape(3, 1) + 1e-2), 1e-9)
    assert faults[0].faults == 0
