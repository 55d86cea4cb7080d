"""The ratio EMA of the factors against a plain Python list: W ← βW + w, X ← X + (w/W)(X_batch − X)."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    held_factors,
    layer_state,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import mlp, vectors
from tests.support.oracles.kfac import expected_factors, ratio_average

BATCHES = [(5, 0), (2, 1), (7, 2), (1, 3), (4, 4)]  # (examples, seed)


def recorded(model, opt, sizes=BATCHES, still=True):
    """Train on batches of unequal size; per layer the list of (examples, batch A, batch B).

    With ``still`` the parameters are put back after every step, so every batch factor is that of the first weights.
    """
    plain = twin(model)
    history = {"0": [], "2": []}
    opt = opt(model)
    start = [p.detach().clone() for p in model.parameters()]
    for n, seed in sizes:
        x, y = vectors(n, seed=seed)
        for name, (A, B) in expected_factors(plain, x, y, F.cross_entropy).items():
            history[name].append((n, A, B))
        train_step(opt, model, x, y, F.cross_entropy)
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
    return opt, history


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 1.0])
def test_unequal_batches_against_a_list(decay):
    model = mlp()
    opt, history = recorded(model, lambda m: plain_kfac(m, factor_decay=decay))
    for name, batches in history.items():
        A, B = held_factors(opt, model, name)
        assert_close(A, ratio_average([(n, a) for n, a, _ in batches], decay), 1e-10)
        assert_close(B, ratio_average([(n, b) for n, _, b in batches], decay), 1e-10)
        state = layer_state(opt, model, name)
        weight = 0.0
        for n, _, _ in batches:
            weight = decay * weight + n
        assert float(state["factor_weight"]) == pytest.approx(weight, rel=1e-12)
        assert state["factor_updates"] == len(batches)


def test_decay_one_is_the_pooled_mean_over_all_examples():
    model = mlp()
    plain = twin(model)
    opt, _ = recorded(model, lambda m: plain_kfac(m, factor_decay=1.0))
    x = torch.cat([vectors(n, seed=seed)[0] for n, seed in BATCHES])
    y = torch.cat([vectors(n, seed=seed)[1] for n, seed in BATCHES])
    assert_factors(all_factors(opt, model), expected_factors(plain, x, y, F.cross_entropy), 1e-10)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 0.999])
def test_the_first_estimate_is_the_first_batch(decay):
    """Debiased from the first batch on: no identity, no zero in it, whatever the decay."""
    model, (x, y) = mlp(), vectors()
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = plain_kfac(model, factor_decay=decay)
    train_step(opt, model, x, y, F.cross_entropy)
    assert_factors(all_factors(opt, model), expected, 1e-12)


def test_a_constant_batch_keeps_the_estimate_constant():
    model = mlp()
    opt, history = recorded(model, lambda m: plain_kfac(m, factor_decay=0.7), [(5, 0)] * 4)
    for name, batches in history.items():
        A, B = held_factors(opt, model, name)
        assert_close(A, batches[0][1], 1e-12)
        assert_close(B, batches[0][2], 1e-12)


def test_the_decay_multiplies_the_old_value():
    """β = .9 and equal batches: the second estimate is (0.9·first + second) / 1.9."""
    model = mlp()
    opt, history = recorded(model, lambda m: plain_kfac(m, factor_decay=0.9), [(5, 0), (5, 1)])
    for name, ((_, A0, B0), (_, A1, B1)) in history.items():
        A, B = held_factors(opt, model, name)
        assert_close(A, (0.9 * A0 + A1) / 1.9, 1e-10)
        assert_close(B, (0.9 * B0 + B1) / 1.9, 1e-10)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_decay_is_per_factor_update_and_not_rescaled_by_the_interval(interval):
    model = mlp()
    keywords = {"factor_decay": 0.6, "factor_update_steps": interval, "inv_update_steps": 6}
    opt, history = recorded(model, lambda m: plain_kfac(m, **keywords))
    for name, batches in history.items():
        due = batches[::interval]
        A, B = held_factors(opt, model, name)
        assert_close(A, ratio_average([(n, a) for n, a, _ in due], 0.6), 1e-10)
        assert_close(B, ratio_average([(n, b) for n, _, b in due], 0.6), 1e-10)
        assert layer_state(opt, model, name)["factor_updates"] == len(due)


def test_the_decay_is_read_from_its_group_at_use():
    model = mlp()
    opt = plain_kfac(model, factor_decay=0.9)
    history = []
    for n, seed, decay in ((5, 0, 0.9), (2, 1, 0.2), (3, 2, 1.0)):
        x, y = vectors(n, seed=seed)
        plain = mlp()
        plain.load_state_dict(model.state_dict())
        history.append((n, decay, expected_factors(plain, x, y, F.cross_entropy)["0"][0]))
        opt.param_groups[0]["factor_decay"] = decay
        train_step(opt, model, x, y, F.cross_entropy)
    weight, value = 0.0, None
    for n, decay, A in history:
        weight = decay * weight + n
        value = A if value is None else value + n / weight * (A - value)
    assert_close(held_factors(opt, model, "0")[0], value, 1e-10)


def test_factors_are_not_due_on_other_steps():
    model = mlp()
    opt = plain_kfac(model, factor_update_steps=3, inv_update_steps=3)
    seen = []
    for t in range(7):
        train_step(opt, model, *vectors(seed=t), F.cross_entropy)
        seen.append(layer_state(opt, model, "0")["factor_updates"])
    assert seen == [1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_refreshes_leave_the_factors_bit_identical(method):
    """Damping is applied to a copy: five refreshes without a factor update change nothing in the estimate."""
    model, (x, y) = mlp(), vectors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # refreshes without new factors are an odd wish
        opt = plain_kfac(model, inverse_method=method, damping=0.3, factor_update_steps=1000)
    train_step(opt, model, x, y, F.cross_entropy)
    held = all_factors(opt, model)
    before = layer_state(opt, model, "0")["refreshes"]
    for seed in range(1, 6):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    assert layer_state(opt, model, "0")["refreshes"] == before + 5
    now = all_factors(opt, model)
    for name, (A, B) in held.items():
        assert torch.equal(now[name][0], A)
        assert torch.equal(now[name][1], B)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_low_precision_parameters_are_float32(dtype):
    model = mlp().to(dtype)
    x, y = vectors()
    opt = plain_kfac(model, lr=0.01, grad_scaler=torch.amp.GradScaler("cpu", enabled=False))  # nothing is scaled
    train_step(opt, model, x.to(dtype), y, lambda out, target: F.cross_entropy(out.float(), target))
    A, B = held_factors(opt, model, "0")
    assert A.dtype == B.dtype == torch.float32
    exact = expected_factors(mlp(), x, y, F.cross_entropy)["0"]
    assert_close(A.double(), exact[0], 3e-2)
    assert_close(B.double(), exact[1], 6e-2)


def test_factors_stay_symmetric():
    model = mlp()
    opt, _ = recorded(model, lambda m: plain_kfac(m))
    for name in ("0", "2"):
        for X in held_factors(opt, model, name):
            assert_close(X, X.mT.contiguous(), 1e-14)
