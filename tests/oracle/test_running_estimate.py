"""The running estimate of the factors, and when factors and factorizations are renewed.

All of its options are compared with a plain list in `tests/fisher/test_running_options.py`; the tables of every
schedule are in `tests/schedule/test_refresh_schedule.py`.
"""

import warnings

import pytest
import torch.nn.functional as F

from tests.support import kfac
from tests.support.ekfac import branches
from tests.support.kfac import all_factors, held_factors, layer_state, plain_kfac, train_step
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_refreshes_leave_the_factors_bit_identical(method):
    """Damping is applied to a copy, so five refreshes without a factor update leave the estimate unchanged."""
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # refreshes without new factors are unusual
        opt = plain_kfac(model, inverse_method=method, damping=0.3, factor_update_steps=1000)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held, before = all_factors(opt, model), layer_state(opt, model, "0")["refreshes"]
    for seed in range(1, 6):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    assert layer_state(opt, model, "0")["refreshes"] == before + 5
    kfac.assert_same_factors(opt, model, held)


RENEWED = [  # layers, options, steps at which each of them has its factors updated, and is refreshed
    (2, {"factor_update_steps": 2, "inv_update_steps": 4}, [[0, 2, 4, 6, 8]] * 2, [[0, 4, 8]] * 2),
    (
        5,
        {"stagger": True, "factor_update_steps": 1, "inv_update_steps": 3},
        [list(range(7))] * 5,
        [[0, 3, 6], [0, 3, 6], [0, 1, 4], [0, 1, 4], [0, 2, 5]],
    ),
]


@pytest.mark.parametrize(("layers", "options", "updated", "refreshed"), RENEWED)
def test_factors_and_factorizations_are_renewed_when_they_are_due(layers, options, updated, refreshed):
    """After each refresh, V is the dense solve with the factors of that step, so both sides are renewed."""
    model, names = mlp((4, *[3] * layers)), [str(2 * j) for j in range(layers)]
    opt = plain_kfac(model, lr=1e-3, **options)
    assert list(opt.blocks) == names
    found = {"factor_updates": [[] for _ in names], "refreshes": [[] for _ in names]}
    for t in range(max(map(max, updated + refreshed)) + 1):
        moved = kfac.next_directions(opt, model, *vectors(seed=t), F.cross_entropy)
        for j, name in enumerate(names):
            state = layer_state(opt, model, name)
            for key, seen in found.items():
                assert state[key] - len(seen[j]) in (0, 1)
                seen[j] += [t] * (state[key] - len(seen[j]))
            if found["refreshes"][j][-1] == t:
                held = {name: held_factors(opt, model, name)}
                kfac.assert_solves({name: moved[name]}, held, solve_exact, 1e-2, 1e-3, 1e-7)
    assert found == {"factor_updates": updated, "refreshes": refreshed}


def test_a_late_branch_is_estimated_and_factorized_when_it_first_appears():
    """At t = 3 nothing else is due; afterwards it follows the common schedule."""
    model, (x, y) = seeded_build(branches), vectors()
    model.both = False
    opt = plain_kfac(model, lr=0.1, factor_update_steps=5, inv_update_steps=5)
    for _ in range(3):
        train_step(opt, model, x, y, F.cross_entropy)
    assert layer_state(opt, model, "rare").get("factor_updates", 0) == 0
    model.both = True
    plain = seeded_build(branches)
    plain.load_state_dict(model.state_dict())
    expected = expected_factors(plain, x, y, F.cross_entropy, names=["rare"])
    moved = kfac.next_directions(opt, model, x, y, F.cross_entropy)
    kfac.assert_factors(all_factors(opt, model), expected)
    kfac.assert_solves({"rare": moved["rare"]}, expected, solve_exact, 1e-2, 0.1)
    updates = []
    for _ in range(2):  # t = 4: not due, t = 5: due for all
        updates.append([layer_state(opt, model, name)["factor_updates"] for name in ("used", "rare")])
        train_step(opt, model, x, y, F.cross_entropy)
    updates.append([layer_state(opt, model, name)["factor_updates"] for name in ("used", "rare")])
    assert updates == [[1, 1], [1, 1], [2, 2]]
