"""When bases and scales are renewed, how a refresh transports scales, and options that change during a run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import ekfac, tasks
from tests.support.ekfac import branches, held_bases, network, plain_ekfac, regression, standing, state_of, train_step
from tests.support.grid import each
from tests.support.kfac import assert_close, noise, plain_kfac
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.ekfac import Reference, diagonal_in, layer_gradients, operator, scales
from tests.support.oracles.kfac import solve

# -------------------------------------------------------------------------------------------------- The order of a step


def due(t, factors, scale, refresh):
    letters = (("f", factors), ("s", scale), ("r", refresh))
    return "".join(letter for letter, steps in letters if t % steps == 0)


def follow(opt, model, references, dues, lr=0.05, data=regression):
    """Train on batches of unequal size; at every step compare operators, weights and directions with the references.

    ``dues(t, j)`` has the letters of what is due for block j. Operators do not depend on signs and order.
    """
    plain = copy.deepcopy(model)
    for t in range(9):
        x, y = data(8 + t % 3, seed=t)
        plain.load_state_dict(model.state_dict())
        for j, reference in enumerate(references):
            reference.step(plain, x, y, F.mse_loss, dues(t, j))
        moved = ekfac.next_directions(opt, model, x, y, F.mse_loss, [reference.name for reference in references])
        for reference in references:
            name, fisher = reference.name, reference.operator()
            state, (gradient, change) = state_of(opt, model.get_submodule(name)), moved[name]
            assert_close(opt.dense_curvature(name), fisher, 1e-7, f"{name} at {t}")
            assert_close(change, lr * solve(fisher, gradient, 1e-2), 1e-7, f"{name} at {t}")
            assert float(state["scale_weight"]) == pytest.approx(reference.W_s, rel=1e-12)


@each(
    steps=[(1, 1, 1), (2, 1, 4), (2, 3, 6), (3, 2, 3)],
    decays=[(0.95, None), (0.5, 0.8), (0.9, 0.0), (1.0, None)],
    estimator=["intra", "running"],
)
def test_average_refresh_and_transport_against_a_dense_reference(steps, decays, estimator):
    model = network()
    keywords = dict(zip(("factor_update_steps", "scale_update_steps", "inv_update_steps"), steps, strict=True))
    opt = plain_ekfac(model, lr=0.05, factor_decay=decays[0], scale_decay=decays[1], estimator=estimator, **keywords)
    references = [Reference(name, *decays, estimator) for name in ("0", "2")]
    follow(opt, model, references, lambda t, j: due(t, *steps))


CASES = {  # options, those of the reference of each layer, what is due for block j at step t
    # with sides (4, 4) and (2, 5), both sides are diagonal or one is; a diagonal side has the identity as its basis
    "diagonal beyond 3": ({"max_factor_dim": 3, "inv_update_steps": 2}, {"limit": 3}, lambda t, j: due(t, 1, 1, 2)),
    "weights that count updates": (
        {"factor_decay": 0.8, "weighting": "update", "inv_update_steps": 3},
        {"factor_decay": 0.8, "weighting": "update"},
        lambda t, j: due(t, 1, 1, 3),
    ),
    # the second of two blocks refreshes half an interval later; its scales do not wait
    "stagger": (
        {"stagger": True, "inv_update_steps": 4}, {}, lambda t, j: "fs" + "r" * (t == 0 or (t - 2 * j) % 4 == 0),
    ),
    "warm-up": (
        {"refresh_warmup": True, "factor_update_steps": 4, "inv_update_steps": 16},
        {},
        lambda t, j: "fs" + "r" * (t in (0, 1, 2, 4, 8)),
    ),
}  # fmt: skip


def test_groups_have_their_own_intervals_and_bases():
    """This holds for parameter groups and for groups of a convolution."""
    model = network()
    groups = [
        {"params": list(model[0].parameters()), "scale_update_steps": 2},
        {"params": list(model[2].parameters()), "scale_update_steps": 3, "scale_decay": 0.5},
    ]
    opt = plain_ekfac(groups, module=model, lr=0.05, inv_update_steps=4)
    references = [Reference("0"), Reference("2", 0.95, 0.5)]
    follow(opt, model, references, lambda t, j: due(t, 1, (2, 3)[j], 4))

    def sequences(n, seed):
        return noise(n, 4, 6, seed=seed), noise(n, 4, 5, seed=seed + 100)

    for estimator in ("intra", "running"):
        model = nn.Sequential(seeded_build(lambda: nn.Conv1d(4, 4, 2, groups=2)))
        opt = plain_ekfac(model, lr=0.05, inv_update_steps=2, estimator=estimator)
        follow(opt, model, [Reference("0", estimator=estimator)], lambda t, j: due(t, 1, 1, 2), data=sequences)


@pytest.mark.parametrize("case", CASES)
def test_options_of_the_schedule_against_the_reference(case):
    options, known, dues = CASES[case]
    model = network()
    opt = plain_ekfac(model, lr=0.05, **options)
    follow(opt, model, [Reference(name, **known) for name in ("0", "2")], dues)


@each(transport=["project", "none", "kfac", "recompute"], basis_update=["eigh", "qr"])
def test_transport_of_the_scales_at_a_refresh(transport, basis_update):
    """A refresh transports the scales in the old basis, which include the batch of its step."""
    model, plain, batch = network(), network(), regression(seed=3)
    keywords = {"transport": transport, "basis_update": basis_update}
    opt = plain_ekfac(model, factor_decay=0.5, inv_update_steps=3, **keywords)
    with standing(opt):
        for t in range(3):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
        (Q_B, Q_A), s = held_bases(opt, model[0]), ekfac.held_scales(opt, model[0])
        weight = 0.5 * float(state_of(opt, model[0])["scale_weight"]) + 12
        G = layer_gradients(plain, "0", *batch, F.mse_loss)
        s = s + 12 / weight * (scales(G, Q_B, Q_A) - s)
        train_step(opt, model, *batch, F.mse_loss)
    state, now, held = state_of(opt, model[0]), held_bases(opt, model[0]), ekfac.held_scales(opt, model[0])
    assert state["refreshes"] == 2
    assert float((now[1] - Q_A).abs().max()) > 1e-3
    if transport == "none":  # by their index; "qr" sorts its columns and the scales with them
        one, other = (x if basis_update == "eigh" else x.flatten().sort().values for x in (held, s))
        assert_close(one, other, 1e-12)
    else:
        expected = {
            "project": lambda: diagonal_in(operator(Q_B, s, Q_A), *now, held),
            "kfac": lambda: torch.outer(state["eigenvalues_g"], state["eigenvalues_a"])[None],
            "recompute": lambda: scales(G, *now),  # this batch in the new basis
        }
        assert_close(held, expected[transport](), 1e-10)
    assert float(held.min()) >= 0
    if transport != "kfac":
        expected_weight = 12 if transport == "recompute" else weight
        assert float(state["scale_weight"]) == pytest.approx(expected_weight, rel=1e-12)
        return
    with standing(opt):  # (β·start + batch) / (β + 1): the start has the weight of one update
        train_step(opt, model, *regression(seed=4), F.mse_loss)
    batch_scales = scales(layer_gradients(plain, "0", *regression(seed=4), F.mse_loss), *now)
    assert_close(ekfac.held_scales(opt, model[0]), held + (batch_scales - held) / 1.5, 1e-10)


def test_a_cheap_update_is_one_sweep_from_the_last_basis():
    """Q ← qr(X Q) with columns sorted by their Rayleigh quotients first, and a positive diagonal of R."""
    model = network()
    opt = plain_ekfac(model, factor_decay=0.99, inv_update_steps=1, basis_update="qr", full_every=10**6)
    with standing(opt):
        for t in range(20):
            train_step(opt, model, *regression(40, seed=t), F.mse_loss)
        for t in range(20, 25):
            old = held_bases(opt, model[0])
            train_step(opt, model, *regression(40, seed=t), F.mse_loss)
            for side, before, now in zip("ga", old, held_bases(opt, model[0]), strict=True):
                X, Q = state_of(opt, model[0])[f"factor_{side}"], before[0]
                order = (Q.mT @ X @ Q).diagonal().argsort(descending=True)
                swept, R = torch.linalg.qr(X @ Q[:, order])
                overlaps = now[0].mT @ (swept * R.diagonal().sign())
                assert_close(overlaps.amax(1), torch.ones_like(overlaps[0]), 1e-9, f"{side} at {t}")


def test_full_every_determines_which_updates_are_full():
    """Every third basis is the eigenbasis of its factor."""
    model, full = network(), []
    opt = plain_ekfac(model, lr=0.05, inv_update_steps=1, basis_update="qr", full_every=3, factor_decay=0.0)
    for t in range(7):
        train_step(opt, model, *regression(seed=t), F.mse_loss)
        Q, factor = held_bases(opt, model[0])[1][0], state_of(opt, model[0])["factor_a"]
        rotated = Q.mT @ factor @ Q
        full.append(float((rotated - torch.diag(rotated.diagonal())).abs().max()) < 1e-10 * float(rotated.abs().max()))
    assert full == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_a_late_branch_starts_with_a_basis_then_measures_and_keeps_its_scales_without_a_gradient(estimator):
    model = seeded_build(branches)
    opt = plain_ekfac(model, estimator=estimator)
    with standing(opt):
        for seed in range(6):
            model.both = seed in (3, 4)
            before, used = ekfac.snapshot(opt, model.rare), ekfac.held_scales(opt, model.used)
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
            assert ekfac.unchanged(opt, model.rare, before) == (not model.both)
            assert not torch.equal(ekfac.held_scales(opt, model.used), used)
            assert state_of(opt, model.rare)["refreshes"] == (seed >= 3)
    assert state_of(opt, model.rare)["scale_updates"] == (1 if estimator == "intra" else 2)
    if estimator == "intra":
        ekfac.assert_scales(opt, model, seeded_build(branches), *vectors(seed=4), F.cross_entropy, ["rare"])


@pytest.mark.parametrize("transport", ["project", "kfac", "none"])
def test_refreshes_before_the_first_measurement_do_not_affect_it(transport):
    """Until step 6 there are only placeholders, which start as products of eigenvalues."""
    model, batch = network(), regression(seed=6)
    opt = plain_ekfac(model, scale_update_steps=6, inv_update_steps=2, transport=transport)
    with standing(opt):
        for t in range(6):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
            state = state_of(opt, model[0])
            assert state["scale_updates"] == float(state["scale_weight"]) == 0
            assert torch.isfinite(state["scale"]).all()
            if t == 0:
                assert_close(state["scale"], torch.outer(state["eigenvalues_g"], state["eigenvalues_a"]), 1e-12)
        opt.param_groups[0]["inv_update_steps"] = 10**6
        train_step(opt, model, *batch, F.mse_loss)
    ekfac.assert_scales(opt, model, network(), *batch, F.mse_loss)
    assert state["scale_updates"] == 1
    assert float(state["scale_weight"]) == 12


@pytest.mark.parametrize("options", [{"scale_decay": 0.5}, {"decay_per_step": True}, {"burnin_steps": 100}], ids=str)
def test_a_scale_that_restarts_from_eigenvalues_has_the_weight_of_one_update(options):
    model, intervals = mlp(), {"factor_update_steps": 5, "scale_update_steps": 5, "inv_update_steps": 20}
    opt = plain_ekfac(model, transport="kfac", lr=0.0, **intervals, **options)
    for t in range(21):
        train_step(opt, model, *vectors(8, seed=t), F.cross_entropy)
    assert state_of(opt, model[0])["refreshes"] == 2
    assert float(state_of(opt, model[0])["scale_weight"]) == pytest.approx(8)


# ---------------------------------------------------------- Options that change between steps, and those of checkpoints

ADAM = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.9, "lr": 1e-2}

ACTING = {  # options of a layer whose scale is not due, and options that change before a forward
    "interval of intra": ("intra", {"scale_update_steps": 50}, {"scale_update_steps": 1}),
    "interval of running": ("running", {"scale_update_steps": 50}, {"scale_update_steps": 1}),
    "to intra": ("intra", {"estimator": "running"}, {"estimator": "intra"}),
    "to running": ("running", {"estimator": "intra"}, {"estimator": "running"}),
}


@pytest.mark.parametrize("case", ACTING)
def test_interval_and_estimator_of_the_scale_take_effect_at_the_next_forward(case):
    estimator, before, after = ACTING[case]
    model = mlp()
    opt = plain_ekfac(model, **{"estimator": estimator, **before}, factor_update_steps=100, scale_decay=0.0, lr=0.0)
    for seed in range(5):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    opt.param_groups[0].update(after)
    x, y = vectors(7, seed=9)
    updates = state_of(opt, model[0])["scale_updates"]
    train_step(opt, model, x, y, F.cross_entropy)
    assert state_of(opt, model[0])["scale_updates"] == updates + 1
    ekfac.assert_scales(opt, model, mlp(), x, y, F.cross_entropy, estimator=estimator)


CHANGES = {
    "inverse": (plain_kfac, {"inverse_method": "eigen"}, {"inverse_method": "cholesky"}),
    "bound": (plain_kfac, {"max_factor_dim": None}, {"max_factor_dim": 4}),
    "bound of bases": (plain_ekfac, {"max_factor_dim": None}, {"max_factor_dim": 4}),
    "bases": (plain_ekfac, {"basis_update": "eigh"}, {"basis_update": "qr"}),
    "momentum": (plain_ekfac, {"momentum_mode": "post"}, {"momentum_mode": "pre"}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_options_that_determine_the_state_take_effect_at_the_next_step(change, back):
    """On one batch without memory, state and direction are those of an optimizer that always had the option."""
    build, before, after = CHANGES[change]
    if back:
        before, after = after, before
    x, y = vectors()
    found = []
    for first in (after, before):
        model = mlp()
        opt = build(model, factor_decay=0.0, inv_update_steps=1, **first)
        with standing(opt):
            for _ in range(3):
                train_step(opt, model, x, y, F.cross_entropy)
            opt.param_groups[0].update(after)
            train_step(opt, model, x, y, F.cross_entropy)
            keys = {name: set(opt.state[p]) for name, p in model.named_parameters()}
            for _ in range(2):
                train_step(opt, model, x, y, F.cross_entropy)
        assert keys == {name: set(opt.state[p]) for name, p in model.named_parameters()}
        moved = ekfac.next_directions(opt, model, x, y, F.cross_entropy, ["0", "2"])
        found.append((keys, {name: V for name, (_, V) in moved.items()}))
    optional = {"momentum_buffer"}  # made when it is first needed
    assert {n: k - optional for n, k in found[0][0].items()} == {n: k - optional for n, k in found[1][0].items()}
    for name in ("0", "2"):
        assert_close(found[1][1][name], found[0][1][name], 1e-7, name)


REFUSED_LOADS = {
    "fisher": ({"estimator": "running"}, {"fisher": "mc"}),
    "model": ({"momentum_mode": "pre"}, {"quadratic_model": True}),
    "adaptive": (ADAM, {"adaptive_damping": True}),
}


@pytest.mark.parametrize("case", REFUSED_LOADS)
def test_a_checkpoint_whose_options_exclude_those_of_the_optimizer_is_refused_as_a_whole(case):
    theirs, mine = REFUSED_LOADS[case]
    model, other = mlp(), mlp()
    opt, second = plain_ekfac(model, **theirs), plain_ekfac(other, **mine)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    before = tasks.snapshot(second), tasks.values(other)
    with pytest.raises(ValueError, match=r"running|pre"):
        second.load_state_dict(opt.state_dict())
    tasks.assert_identical((tasks.snapshot(second), tasks.values(other)), before)


@pytest.mark.parametrize("transport", ["project", "recompute"])
def test_the_scale_of_a_layer_without_rows_in_some_micro_batches(transport):
    """Examples that did not reach the layer have a gradient of zero."""
    model, batches = seeded_build(branches), [vectors(seed=seed) for seed in range(2)]
    opt = plain_ekfac(model, lr=0.0, scale_decay=0.0, transport=transport, inv_update_steps=1)
    for _ in range(3):
        opt.zero_grad()
        for model.both, (x, y) in zip((True, False), batches, strict=True):
            (F.cross_entropy(model(x), y) / 2).backward()
        opt.step()
    ekfac.assert_scales(opt, model, seeded_build(branches), *batches[0], F.cross_entropy, ["rare"], factor=0.5)
