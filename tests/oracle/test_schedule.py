"""When factors and factorisations are renewed: intervals, the first estimate of each block, and the stagger table."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.kfac import (
    assert_close,
    backward,
    directions,
    held_factors,
    layer_state,
    plain_kfac,
    train_step,
)
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.kfac import expected_factors, layer_gradient, solve_exact


def counted(opt, model, names, steps, key):
    """Steps at which ``key`` of each layer's state grew."""
    seen, last = {name: [] for name in names}, dict.fromkeys(names, 0)
    for t in range(steps):
        train_step(opt, model, *vectors(seed=t), F.cross_entropy)
        for name in names:
            now = layer_state(opt, model, name)[key]
            if now > last[name]:
                assert now == last[name] + 1
                seen[name].append(t)
            last[name] = now
    return seen


@pytest.mark.parametrize(("F_", "K"), [(1, 1), (2, 4), (3, 3), (5, 10)])
def test_due_steps_are_multiples_of_their_interval(F_, K):
    for key, interval in (("factor_updates", F_), ("refreshes", K)):
        model = mlp()
        opt = plain_kfac(model, lr=0.01, factor_update_steps=F_, inv_update_steps=K)
        due = [t for t in range(13) if t % interval == 0]
        assert counted(opt, model, ["0", "2"], 13, key) == {"0": due, "2": due}


# The table of j·K/L, written out: steps after the first at which block j refreshes.
STAGGERED = [
    # L, K, F, steps, refreshes of every block
    (3, 6, 1, 19, [[0, 6, 12, 18], [0, 2, 8, 14], [0, 4, 10, 16]]),
    (3, 6, 3, 13, [[0, 6, 12], [0, 2, 8], [0, 4, 10]]),
    (4, 10, 1, 21, [[0, 10, 20], [0, 2, 12], [0, 5, 15], [0, 7, 17]]),
    (2, 1, 1, 4, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    (5, 3, 1, 7, [[0, 3, 6], [0, 3, 6], [0, 1, 4], [0, 1, 4], [0, 2, 5]]),
]


@pytest.mark.parametrize(("L", "K", "F_", "steps", "table"), STAGGERED)
def test_stagger_table(L, K, F_, steps, table):
    model = mlp((4, *[3] * L))
    names = [str(2 * j) for j in range(L)]
    opt = plain_kfac(model, lr=0.01, stagger=True, factor_update_steps=F_, inv_update_steps=K)
    assert list(opt.blocks) == names
    seen = counted(opt, model, names, steps, "refreshes")
    assert [seen[name] for name in names] == table
    most = -(-L // K)
    for t in range(1, steps):
        assert sum(t in seen[name] for name in names) <= most


def test_stagger_spreads_the_work_but_changes_no_estimate():
    found = []
    for stagger in (False, True):
        model = mlp()
        opt = plain_kfac(model, lr=0.0, stagger=stagger, factor_update_steps=2, inv_update_steps=4)
        for t in range(5):
            train_step(opt, model, *vectors(seed=t), F.cross_entropy)
        found.append({name: held_factors(opt, model, name) for name in ("0", "2")})
    for name, (A, B) in found[0].items():
        assert torch.equal(found[1][name][0], A)
        assert torch.equal(found[1][name][1], B)


def test_both_factors_of_a_staggered_block_are_refreshed_together():
    """After each refresh V is the dense solve with the block's factors of that very step."""
    model = mlp((4, 3, 3, 3))
    opt = plain_kfac(model, lr=1e-3, stagger=True, factor_update_steps=1, inv_update_steps=6)
    last = dict.fromkeys(("0", "2", "4"), 0)
    for t in range(9):
        opt.zero_grad()
        backward(model, *vectors(seed=t), F.cross_entropy)
        for name, (gradient, step) in directions(opt, model).items():
            state = layer_state(opt, model, name)
            if state["refreshes"] > last[name]:
                A, B = held_factors(opt, model, name)
                assert_close(step / 1e-3, solve_exact(B, A, gradient, 1e-2), 1e-7, f"{name} at {t}")
            last[name] = state["refreshes"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare = nn.Linear(4, 3), nn.Linear(4, 3)
        self.both = False

    def forward(self, x):
        return self.used(x) + self.rare(x) if self.both else self.used(x)


def test_a_late_branch_is_estimated_and_factorised_when_it_first_appears():
    """At t = 3 nothing else is due; from then on it keeps the common schedule."""
    model, (x, y) = seeded_build(Branches), vectors()
    opt = plain_kfac(model, lr=0.1, factor_update_steps=5, inv_update_steps=10)
    for _ in range(3):
        train_step(opt, model, x, y, F.cross_entropy)
    assert layer_state(opt, model, "rare")["factor_updates"] == 0
    model.both = True
    plain = seeded_build(Branches)
    plain.load_state_dict(model.state_dict())
    plain.both = True
    expected = expected_factors(plain, x, y, F.cross_entropy, names=["rare"])["rare"]
    opt.zero_grad()
    backward(model, x, y, F.cross_entropy)
    gradient, step = directions(opt, model)["rare"]
    A, B = held_factors(opt, model, "rare")
    assert_close(A, expected[0])
    assert_close(B, expected[1])
    assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-8)
    assert layer_state(opt, model, "used")["factor_updates"] == 1
    train_step(opt, model, x, y, F.cross_entropy)  # t = 4: not due
    assert layer_state(opt, model, "rare")["factor_updates"] == 1
    train_step(opt, model, x, y, F.cross_entropy)  # t = 5: due for all
    assert layer_state(opt, model, "rare")["factor_updates"] == 2
    assert layer_state(opt, model, "used")["factor_updates"] == 2


def test_a_block_without_gradient_is_left_alone_and_keeps_its_estimate():
    model, (x, y) = seeded_build(Branches), vectors()
    model.both = True
    opt = plain_kfac(model, lr=0.1)
    train_step(opt, model, x, y, F.cross_entropy)
    held = held_factors(opt, model, "rare")
    values = [p.detach().clone() for p in model.rare.parameters()]
    model.both = False
    for seed in range(3):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    assert all(torch.equal(p, q) for p, q in zip(model.rare.parameters(), values, strict=True))
    now = held_factors(opt, model, "rare")
    assert torch.equal(now[0], held[0])
    assert torch.equal(now[1], held[1])
    model.both = True
    train_step(opt, model, x, y, F.cross_entropy)
    assert layer_state(opt, model, "rare")["factor_updates"] == 2


def test_a_covered_layer_without_statistics_moves_by_its_fallback():
    """Its gradient exists but nothing was captured: the rule of uncovered parameters, never nothing."""
    model, (x, y) = seeded_build(Branches), vectors()
    model.both = True
    opt = plain_kfac(model, lr=0.1, fallback="sgd")
    with opt.pause_capture():
        backward(model, x, y, F.cross_entropy)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step()
    for n, p in model.named_parameters():
        assert_close(before[n] - p.detach(), 0.1 * gradients[n], 1e-9, n)


def test_intervals_are_read_from_their_group_at_use():
    """A changed one acts on the very next step."""
    model = mlp()
    opt = plain_kfac(model, lr=0.01)
    updates = []
    for t in range(8):
        interval = 3 if 1 <= t < 5 else 1 if t < 6 else 2
        opt.param_groups[0].update(factor_update_steps=interval, inv_update_steps=interval)
        train_step(opt, model, *vectors(seed=t), F.cross_entropy)
        state = layer_state(opt, model, "0")
        updates.append((state["factor_updates"], state["refreshes"]))
    assert updates == [(1, 1)] * 3 + [(2, 2)] * 2 + [(3, 3)] + [(4, 4)] * 2


def test_all_micro_batches_of_a_due_step_are_captured_and_none_of_another():
    model = mlp()
    plain = mlp()
    opt = plain_kfac(model, lr=0.0, factor_update_steps=2, inv_update_steps=2, factor_decay=0.0)
    for t in range(3):
        opt.zero_grad()
        x, y = vectors(9, seed=t)
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
            backward(model, a, b, F.cross_entropy, 1 / 3)
        opt.step()
        if t % 2 == 0:
            expected = expected_factors(plain, x, y, F.cross_entropy)["0"]
        A, B = held_factors(opt, model, "0")
        assert_close(A, expected[0])
        assert_close(B, expected[1])


def test_a_refresh_interval_that_is_no_multiple_of_the_factor_interval_warns():
    with pytest.warns(UserWarning, match="multiple"):
        plain_kfac(mlp(), factor_update_steps=4, inv_update_steps=6)


def test_between_refreshes_the_old_inverse_meets_the_new_gradient():
    model = mlp()
    opt = plain_kfac(model, lr=0.1, factor_update_steps=1, inv_update_steps=3)
    train_step(opt, model, *vectors(), F.cross_entropy)
    at_refresh = {name: held_factors(opt, model, name) for name in ("0", "2")}
    opt.zero_grad()
    backward(model, *vectors(seed=1), F.cross_entropy)
    for name, (gradient, step) in directions(opt, model).items():
        A, B = at_refresh[name]
        assert not torch.equal(held_factors(opt, model, name)[0], A)
        assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-8, name)


def test_preconditioning_off_captures_nothing_and_is_plain_sgd():
    x, y = vectors()
    model, reference = mlp(), mlp()
    opt = plain_kfac(model, lr=0.1, momentum=0.9, inv_update_steps=0)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        train_step(opt, model, x, y, F.cross_entropy)
        train_step(sgd, reference, x, y, F.cross_entropy)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert layer_state(opt, model, "0").get("factor_updates", 0) == 0
    opt.param_groups[0].update(inv_update_steps=1, momentum=0.0, factor_decay=0.0)
    train_step(opt, model, x, y, F.cross_entropy)
    opt.zero_grad()
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    expected = expected_factors(plain, x, y, F.cross_entropy)
    backward(model, x, y, F.cross_entropy)
    gradient = layer_gradient(model[0]).clone()
    _, step = directions(opt, model)["0"]
    A, B = expected["0"]
    assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-8)
