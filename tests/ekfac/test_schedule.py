"""When bases and scales are renewed, what a refresh makes of the scales, and what must leave them alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.ekfac import (
    held_bases,
    held_scales,
    measure,
    next_directions,
    plain_ekfac,
    standing,
    state_of,
    train_step,
)
from tests.support.kfac import assert_close, backward, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import (
    Reference,
    diagonal_in,
    eigenbasis,
    exact_fisher,
    frobenius,
    layer_gradients,
    operator,
    scales,
    solve,
)
from tests.support.oracles.kfac import expected_factors

modes = pytest.mark.parametrize("basis_update", ["eigh", "qr"])


def regression(n=12, seed=0):
    """Data under which both factors of `mlp((3, 4, 2))` have simple spectra."""
    return noise(n, 3, seed=seed), noise(n, 2, seed=seed + 100)


def network():
    return mlp((3, 4, 2))


def snapshot(opt, layer):
    """Everything that the optimizer holds of a layer, copied."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state_of(opt, layer).items()}


def unchanged(opt, layer, before, keys=("scale", "scale_weight", "scale_updates")):
    state = state_of(opt, layer)
    return all(
        torch.equal(state[key], before[key]) if isinstance(before[key], torch.Tensor) else state[key] == before[key]
        for key in keys
    )


# ---------------------------------------------------------------------------------------------------------------------
# The order of a step
# ---------------------------------------------------------------------------------------------------------------------


def test_the_first_scales_are_a_placeholder_that_leaves_no_trace():
    model, plain = network(), network()
    opt = plain_ekfac(model)
    with standing(opt):
        train_step(opt, model, *regression(seed=1), F.mse_loss)
        state = state_of(opt, model[0])
        assert_close(state["scale"], torch.outer(state["eigenvalues_g"], state["eigenvalues_a"]), 1e-12)
        assert float(state["scale_weight"]) == 0
        assert state["scale_updates"] == 0
        train_step(opt, model, *regression(seed=2), F.mse_loss)
    G = layer_gradients(plain, "0", *regression(seed=2), F.mse_loss)
    assert_close(held_scales(opt, model[0]), scales(G, *held_bases(opt, model[0])), 1e-10)
    assert float(state["scale_weight"]) == 12
    assert state["scale_updates"] == 1


def due(t, factors, scale, refresh):
    letters = (("f", factors), ("s", scale), ("r", refresh))
    return "".join(letter for letter, steps in letters if t % steps == 0)


def follow(opt, model, references, dues, lr=0.05, data=regression):
    """Train on batches of unequal size; at every step compare operators, weights and directions with the references.

    ``dues(t, j)`` has the letters of what is due for block j. Operators are compared, so signs and order play no part.
    """
    plain = copy.deepcopy(model)
    for t in range(9):
        x, y = data(8 + t % 3, seed=t)
        plain.load_state_dict(model.state_dict())
        for j, reference in enumerate(references):
            reference.step(plain, x, y, F.mse_loss, dues(t, j))
        moved = next_directions(opt, model, x, y, F.mse_loss, [reference.name for reference in references])
        for reference in references:
            name, fisher = reference.name, reference.operator()
            gradient, change = moved[name]
            assert_close(opt.dense_curvature(name), fisher, 1e-7, f"{name} at {t}")
            assert_close(change, lr * solve(fisher, gradient, 1e-2), 1e-7, f"{name} at {t}")
            if reference.W_s:
                held = float(state_of(opt, model.get_submodule(name))["scale_weight"])
                assert held == pytest.approx(reference.W_s, rel=1e-12)


@pytest.mark.parametrize("estimator", ["intra", "running"])
@pytest.mark.parametrize("decays", [(0.95, None), (0.5, 0.8), (0.9, 0.0)])
@pytest.mark.parametrize("steps", [(1, 1, 1), (2, 1, 4), (2, 3, 6), (3, 2, 3)])
def test_average_refresh_and_transport_against_a_dense_restatement(steps, decays, estimator):
    model = network()
    keywords = dict(zip(("factor_update_steps", "scale_update_steps", "inv_update_steps"), steps, strict=True))
    opt = plain_ekfac(model, lr=0.05, factor_decay=decays[0], scale_decay=decays[1], estimator=estimator, **keywords)
    references = [Reference(name, *decays, estimator) for name in ("0", "2")]
    follow(opt, model, references, lambda t, j: due(t, *steps))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_sides_that_stay_diagonal_through_refreshes(limit):
    """Of (4, 4) and (2, 5): both sides diagonal, one, both; the identity moves nothing on its side."""
    model = network()
    opt = plain_ekfac(model, lr=0.05, max_factor_dim=limit, inv_update_steps=2)
    references = [Reference(name, limit=limit) for name in ("0", "2")]
    follow(opt, model, references, lambda t, j: due(t, 1, 1, 2))


def sequences(n=8, seed=0):
    return noise(n, 4, 6, seed=seed), noise(n, 4, 5, seed=seed + 100)


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_every_group_of_a_convolution_moves_with_its_own_basis(estimator):
    model = nn.Sequential(seeded_build(lambda: nn.Conv1d(4, 4, 2, groups=2)))
    opt = plain_ekfac(model, lr=0.05, inv_update_steps=2, estimator=estimator)
    follow(opt, model, [Reference("0", estimator=estimator)], lambda t, j: due(t, 1, 1, 2), data=sequences)


def test_groups_of_parameters_keep_intervals_of_their_own():
    model = network()
    groups = [
        {"params": list(model[0].parameters()), "scale_update_steps": 2},
        {"params": list(model[2].parameters()), "scale_update_steps": 3, "scale_decay": 0.5},
    ]
    opt = plain_ekfac(groups, module=model, lr=0.05, inv_update_steps=4)
    references = [Reference("0"), Reference("2", 0.95, 0.5)]
    follow(opt, model, references, lambda t, j: due(t, 1, (2, 3)[j], 4))


def test_weights_that_count_updates():
    model = network()
    opt = plain_ekfac(model, lr=0.05, factor_decay=0.8, weighting="update", inv_update_steps=3)
    references = [Reference(name, 0.8, weighting="update") for name in ("0", "2")]
    follow(opt, model, references, lambda t, j: due(t, 1, 1, 3))


def test_staggered_blocks_have_the_sequence_of_their_own_phase():
    """The second of two blocks refreshes half an interval later; its scales do not wait."""
    model = network()
    opt = plain_ekfac(model, lr=0.05, stagger=True, inv_update_steps=4)
    references = [Reference(name) for name in ("0", "2")]
    follow(opt, model, references, lambda t, j: "fs" + "r" * (t == 0 or (t - 2 * j) % 4 == 0))


def test_a_warm_up_refreshes_at_powers_of_two():
    model = network()
    opt = plain_ekfac(
        model, lr=0.05, refresh_warmup=True, factor_update_steps=4, scale_update_steps=1, inv_update_steps=16
    )
    references = [Reference(name) for name in ("0", "2")]
    follow(opt, model, references, lambda t, j: "fs" + "r" * (t in (0, 1, 2, 4, 8)))


@pytest.mark.parametrize("estimator", ["intra", "running"])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_scales_are_renewed_at_multiples_of_their_interval_only(estimator, interval):
    model = network()
    opt = plain_ekfac(model, lr=0.01, scale_update_steps=interval, inv_update_steps=100, estimator=estimator)
    seen = []
    for t in range(8):
        before = snapshot(opt, model[0])
        train_step(opt, model, *regression(seed=t), F.mse_loss)
        if t and not unchanged(opt, model[0], before):
            assert state_of(opt, model[0])["scale_updates"] == before["scale_updates"] + 1
            seen.append(t)
    assert seen == [t for t in range(1, 8) if t % interval == 0]


@pytest.mark.parametrize(("factors", "refresh"), [(1, 2), (2, 4), (3, 3)])
def test_factors_and_bases_keep_their_own_intervals(factors, refresh):
    model = network()
    opt = plain_ekfac(model, lr=0.01, factor_update_steps=factors, inv_update_steps=refresh)
    for t in range(9):
        train_step(opt, model, *regression(seed=t), F.mse_loss)
        state = state_of(opt, model[0])
        assert state["factor_updates"] == t // factors + 1
        assert state["refreshes"] == t // refresh + 1


def test_steps_without_a_due_update_leave_the_scales_bit_identical():
    """Also those on which the factors are due: λ is never added in place."""
    model = network()
    opt = plain_ekfac(model, lr=0.01, damping=0.3, scale_update_steps=5, inv_update_steps=10, factor_update_steps=1)
    for t in range(6):
        train_step(opt, model, *regression(seed=t), F.mse_loss)
    before = snapshot(opt, model[0])
    for t in range(6, 9):
        train_step(opt, model, *regression(seed=t), F.mse_loss)
        assert unchanged(opt, model[0], before)
        assert unchanged(opt, model[0], before, ("basis_a", "basis_g"))
    assert not unchanged(opt, model[0], before, ("factor_a", "factor_updates"))


def test_a_changed_interval_acts_on_the_next_step():
    model = network()
    opt = plain_ekfac(model, lr=0.01)
    counts = []
    for t in range(8):
        opt.param_groups[0]["scale_update_steps"] = 1 if t in (0, 1, 2, 6, 7) else 100
        train_step(opt, model, *regression(seed=t), F.mse_loss)
        counts.append(state_of(opt, model[0])["scale_updates"])
    assert counts == [0, 1, 2, 2, 2, 2, 3, 4]


def test_damping_is_read_at_every_step():
    model, (x, y) = network(), regression()
    opt = plain_ekfac(model)
    measure(opt, model, x, y, F.mse_loss)
    opt.param_groups[0].update(scale_update_steps=1000, factor_update_steps=1000)
    for damping in (1.0, 1e-3, 0.1):
        opt.param_groups[0]["damping"] = damping
        moved = next_directions(opt, model, x, y, F.mse_loss, ["0", "2"])
        for name, (gradient, V) in moved.items():
            assert_close(V, solve(opt.dense_curvature(name), gradient, damping), 1e-8, f"{name} λ={damping}")


# ---------------------------------------------------------------------------------------------------------------------
# Transport
# ---------------------------------------------------------------------------------------------------------------------


def before_and_after_a_refresh(transport, basis_update="eigh", **keywords):
    """Scales in the old basis with the refreshing step's batch in them, and the optimizer after that step."""
    model, plain = network(), network()
    opt = plain_ekfac(
        model, factor_decay=0.5, inv_update_steps=3, transport=transport, basis_update=basis_update, **keywords
    )
    with standing(opt):
        for t in range(3):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
        bases, s = held_bases(opt, model[0]), held_scales(opt, model[0])
        weight = 0.5 * float(state_of(opt, model[0])["scale_weight"]) + 12
        G = layer_gradients(plain, "0", *regression(seed=3), F.mse_loss)
        s = s + 12 / weight * (scales(G, *bases) - s)
        train_step(opt, model, *regression(seed=3), F.mse_loss)
    assert state_of(opt, model[0])["refreshes"] == 2
    return opt, model, plain, bases, s, weight


@modes
def test_project_is_the_diagonal_of_the_old_operator_in_the_new_basis(basis_update):
    opt, model, _, (Q_B, Q_A), s, weight = before_and_after_a_refresh("project", basis_update)
    new_bases, held = held_bases(opt, model[0]), held_scales(opt, model[0])
    assert float((new_bases[1] - Q_A).abs().max()) > 1e-3
    assert_close(held, diagonal_in(operator(Q_B, s, Q_A), *new_bases, held), 1e-10)
    assert float(held.sum()) == pytest.approx(float(s.sum()), rel=1e-12)
    assert float(held.min()) >= 0
    assert float(state_of(opt, model[0])["scale_weight"]) == pytest.approx(weight, rel=1e-12)


def test_kfac_starts_again_from_the_new_eigenvalues_as_one_update():
    opt, model, plain, *_ = before_and_after_a_refresh("kfac")
    state = state_of(opt, model[0])
    start = torch.outer(state["eigenvalues_g"], state["eigenvalues_a"])[None]
    assert_close(held_scales(opt, model[0]), start, 1e-12)
    with standing(opt):
        train_step(opt, model, *regression(seed=4), F.mse_loss)
    batch = scales(layer_gradients(plain, "0", *regression(seed=4), F.mse_loss), *held_bases(opt, model[0]))
    assert_close(held_scales(opt, model[0]), start + (batch - start) / 1.5, 1e-10)  # (β·start + batch) / (β + 1)


@modes
def test_none_keeps_the_scales_by_their_index(basis_update):
    opt, model, _, _, s, weight = before_and_after_a_refresh("none", basis_update)
    held = held_scales(opt, model[0])
    if basis_update == "eigh":
        assert_close(held, s, 1e-12)
    else:  # columns are sorted, and the scales with them
        assert_close(held.flatten().sort().values, s.flatten().sort().values, 1e-12)
    assert float(state_of(opt, model[0])["scale_weight"]) == pytest.approx(weight, rel=1e-12)


def test_recompute_takes_this_batch_in_the_new_basis():
    opt, model, plain, *_ = before_and_after_a_refresh("recompute")
    G = layer_gradients(plain, "0", *regression(seed=3), F.mse_loss)
    assert_close(held_scales(opt, model[0]), scales(G, *held_bases(opt, model[0])), 1e-10)
    assert float(state_of(opt, model[0])["scale_weight"]) == 12


@pytest.mark.parametrize("transport", ["project", "none"])
@modes
def test_the_sum_of_the_scales_survives_any_refresh(transport, basis_update):
    """With β = 1 it is the pooled trace of the exact blocks, whatever happened to the basis in between."""
    model, plain = network(), network()
    opt = plain_ekfac(
        model, factor_decay=1.0, inv_update_steps=1, transport=transport, basis_update=basis_update, full_every=3
    )
    traces = []
    with standing(opt):
        for t in range(8):
            x, y = regression(seed=t)
            train_step(opt, model, x, y, F.mse_loss)
            if t:
                traces.append(float(exact_fisher(layer_gradients(plain, "0", x, y, F.mse_loss)).trace()))
                held = held_scales(opt, model[0])
                assert float(held.sum()) == pytest.approx(sum(traces) / t, rel=1e-9)
                assert float(held.min()) >= 0


def test_a_degenerate_factor_does_not_lose_what_was_learnt():
    """Inputs with A near the identity: every refresh may rotate the basis at will, and the sum stays."""
    model = nn.Sequential(seeded_build(lambda: nn.Linear(4, 3, bias=False)))
    plain = copy.deepcopy(model)
    opt = plain_ekfac(model, factor_decay=1.0, inv_update_steps=1)
    traces = []
    with standing(opt):
        for t in range(6):
            x = torch.eye(4, dtype=torch.float64)[torch.randperm(4)] + 1e-9 * noise(4, 4, seed=t)
            y = noise(4, 3, seed=t)
            train_step(opt, model, x, y, F.mse_loss)
            if t:
                traces.append(float(exact_fisher(layer_gradients(plain, "0", x, y, F.mse_loss)).trace()))
    assert float(held_scales(opt, model[0]).sum()) == pytest.approx(sum(traces) / len(traces), rel=1e-9)


@modes
def test_on_stationary_data_the_scatter_of_the_scales_falls_across_refreshes(basis_update):
    """An average that restarts at every refresh would stay as noisy as one batch."""
    population = noise(400, 3, seed=7), noise(400, 2, seed=8)
    plain = network()
    G = layer_gradients(plain, "0", *population, F.mse_loss)
    A, B = expected_factors(plain, *population, F.mse_loss)["0"]
    bases = eigenbasis(B)[1], eigenbasis(A)[1]
    exact = operator(bases[0], scales(G, *bases), bases[1])
    last = {}
    for decay in (1.0, 0.0):
        model = network()
        opt = plain_ekfac(model, factor_decay=1.0, scale_decay=decay, inv_update_steps=2, basis_update=basis_update)
        errors = []
        with standing(opt):
            for t in range(40):
                part = slice(10 * t, 10 * t + 10)
                train_step(opt, model, population[0][part], population[1][part], F.mse_loss)
                errors.append(frobenius(opt.dense_curvature("0") - exact) / frobenius(exact))
        last[decay] = sum(errors[-5:]) / 5
    assert last[1.0] < 0.2  # the bases of the first refreshes were rough
    assert last[1.0] < 0.4 * last[0.0]


# ---------------------------------------------------------------------------------------------------------------------
# The cheap basis update
# ---------------------------------------------------------------------------------------------------------------------


def spread(n=12, seed=0):
    """Features of very unequal size, so that orthogonal iteration converges in a few sweeps."""
    x, y = noise(n, 3, seed=seed), noise(n, 2, seed=seed + 100)
    return x * torch.tensor([5.0, 1.0, 0.2]), y * torch.tensor([3.0, 0.3])


def test_repeated_cheap_updates_reach_the_eigenbasis():
    """The basis of another batch, then sweeps on this one: the operator becomes that of its eigenbasis."""
    model, plain = nn.Sequential(seeded_build(lambda: nn.Linear(3, 2))), nn.Sequential()
    plain = copy.deepcopy(model)
    opt = plain_ekfac(
        model, factor_decay=0.0, inv_update_steps=1, basis_update="qr", full_every=10**6, transport="project"
    )
    x, y = spread(seed=3)
    G = layer_gradients(plain, "0", x, y, F.mse_loss)
    A, B = expected_factors(plain, x, y, F.mse_loss)["0"]
    bases = eigenbasis(B)[1], eigenbasis(A)[1]
    exact = operator(bases[0], scales(G, *bases), bases[1])
    errors = []
    with standing(opt):
        train_step(opt, model, *spread(seed=1), F.mse_loss)
        for _ in range(60):
            train_step(opt, model, x, y, F.mse_loss)
            errors.append(frobenius(opt.dense_curvature("0") - exact) / frobenius(exact))
    assert errors[0] > 1e-3, "the start was no start"
    assert errors[-1] < 1e-6
    for Q in held_bases(opt, model[0]):
        assert_close(Q.mT @ Q, torch.eye(Q.shape[-1], dtype=Q.dtype)[None], 1e-10)


def test_a_cheap_update_is_one_sweep_from_the_last_basis():
    """Q ← qr(X Q), columns sorted by their Rayleigh quotients first, the diagonal of R positive; in whatever order."""
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


def test_every_so_many_cheap_updates_is_a_full_one():
    """At ``full_every`` = 1 nothing is cheap, and at 3 every third basis is the eigenbasis of its factor."""
    found = []
    for keywords in ({"basis_update": "eigh"}, {"basis_update": "qr", "full_every": 1}):
        model = network()
        opt = plain_ekfac(model, lr=0.05, inv_update_steps=1, **keywords)
        for t in range(4):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
        found.append(opt.dense_curvature("0"))
    assert_close(found[1], found[0], 1e-9)
    model = network()
    opt = plain_ekfac(model, lr=0.05, inv_update_steps=1, basis_update="qr", full_every=3, factor_decay=0.0)
    full = []
    for t in range(7):
        train_step(opt, model, *regression(seed=t), F.mse_loss)
        Q, factor = held_bases(opt, model[0])[1][0], state_of(opt, model[0])["factor_a"]
        rotated = Q.mT @ factor @ Q
        full.append(float((rotated - torch.diag(rotated.diagonal())).abs().max()) < 1e-10 * float(rotated.abs().max()))
    assert full == [True, False, False, True, False, False, True]


def test_cheap_bases_stay_orthonormal_over_many_updates_and_null_directions():
    """float32, a dead feature and logits whose gradients sum to zero."""
    model = mlp((5, 4, 3)).float()
    opt = plain_ekfac(model, lr=0.0, inv_update_steps=1, basis_update="qr", full_every=10**6, factor_decay=0.5)
    for t in range(100):
        x, y = vectors(8, 5, seed=t)
        x[:, 2:4] = 0.0
        train_step(opt, model, x.float(), y, F.cross_entropy)
    for layer in (model[0], model[2]):
        for Q in held_bases(opt, layer):
            identity = torch.eye(Q.shape[-1])[None]
            assert float((Q.mT @ Q - identity).abs().max()) < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong
# ---------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("estimator", ["intra", "running"])
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


def test_state_holds_tensors_and_numbers_of_the_documented_shapes():
    model, (x, y) = convnet(), images()
    opt = plain_ekfac(model)
    measure(opt, model, x, y, F.cross_entropy)
    for layer, shape in ((model.first, (3, 19)), (model.second, (4, 12)), (model.head, (3, 5))):
        state = state_of(opt, layer)
        assert state["scale"].shape == shape
        assert state["scale_weight"].dtype == torch.float64
        assert state["scale_weight"].shape == ()
        assert type(state["scale_updates"]) is int
        assert all(isinstance(value, torch.Tensor | int) for value in state.values())


def test_resume_between_refreshes_is_bit_exact():
    models = [network(), network()]
    opts = [plain_ekfac(model, lr=0.05, momentum=0.9, inv_update_steps=4, scale_update_steps=2) for model in models]
    for t in range(3):
        train_step(opts[0], models[0], *regression(seed=t), F.mse_loss)
    models[1].load_state_dict(models[0].state_dict())
    opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
    for t in range(3, 9):
        for opt, model in zip(opts, models, strict=True):
            train_step(opt, model, *regression(seed=t), F.mse_loss)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(opts[0].dense_curvature("0"), opts[1].dense_curvature("0"))
