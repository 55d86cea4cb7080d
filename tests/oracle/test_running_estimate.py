"""The ratio EMA of the factors against a plain Python list: W ← βW + w, X ← X + (w/W)(X_batch − X)."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.support.grid import pairs
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    assert_same_factors,
    held_factors,
    layer_state,
    plain_kfac,
    train_step,
)
from tests.support.models import mlp, vectors
from tests.support.oracles.kfac import expected_factors, ratio_average

BATCHES = [vectors(n, seed=seed) for seed, n in enumerate((5, 2, 7, 1, 4))]


@pairs(decay=[0.0, 0.3, 0.95, 1.0], interval=[1, 3])
def test_unequal_batches_against_a_list(decay, interval):
    """From the first batch on, which is the first estimate; the decay is per update, whatever the interval."""
    model = mlp()
    opt = plain_kfac(model, lr=0.0, factor_decay=decay, factor_update_steps=interval, inv_update_steps=6)
    history, weight = [], 0.0
    for t, (x, y) in enumerate(BATCHES):
        if t % interval == 0:
            history.append((len(x), expected_factors(mlp(), x, y, F.cross_entropy)))
            weight = decay * weight + len(x)
        train_step(opt, model, x, y, F.cross_entropy)
        for name in ("0", "2"):
            for i, X in enumerate(held_factors(opt, model, name)):
                assert_close(X, ratio_average([(n, factors[name][i]) for n, factors in history], decay), 1e-10)
                assert torch.equal(X, X.mT)
            state = layer_state(opt, model, name)
            assert float(state["factor_weight"]) == pytest.approx(weight, rel=1e-12)
            assert state["factor_updates"] == len(history)
    if decay == 1 == interval:  # the pooled mean over all examples
        x, y = (torch.cat(parts) for parts in zip(*BATCHES, strict=True))
        assert_factors(all_factors(opt, model), expected_factors(mlp(), x, y, F.cross_entropy), 1e-10)


def test_the_decay_is_read_from_its_group_at_use():
    model = mlp()
    opt = plain_kfac(model, lr=0.0)
    weight, value = 0.0, 0.0
    for decay, (x, y) in zip((0.9, 0.2, 1.0), BATCHES, strict=False):
        opt.param_groups[0]["factor_decay"] = decay
        train_step(opt, model, x, y, F.cross_entropy)
        weight = decay * weight + len(x)
        value = value + len(x) / weight * (expected_factors(mlp(), x, y, F.cross_entropy)["0"][0] - value)
    assert_close(held_factors(opt, model, "0")[0], value, 1e-10)


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_refreshes_leave_the_factors_bit_identical(method):
    """Damping is applied to a copy: five refreshes without a factor update change nothing in the estimate."""
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # refreshes without new factors are an odd wish
        opt = plain_kfac(model, inverse_method=method, damping=0.3, factor_update_steps=1000)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held, before = all_factors(opt, model), layer_state(opt, model, "0")["refreshes"]
    for seed in range(1, 6):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    assert layer_state(opt, model, "0")["refreshes"] == before + 5
    assert_same_factors(opt, model, held)
