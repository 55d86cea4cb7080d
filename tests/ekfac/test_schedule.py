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
from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, backward, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import (
    Reference,
    diagonal_in,
    exact_fisher,
    layer_gradients,
    operator,
    scales,
    solve,
)

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
            name, fisher, state = (
                reference.name,
                reference.operator(),
                state_of(opt, model.get_submodule(reference.name)),
            )
            gradient, change = moved[name]
            assert_close(opt.dense_curvature(name), fisher, 1e-7, f"{name} at {t}")
            assert_close(change, lr * solve(fisher, gradient, 1e-2), 1e-7, f"{name} at {t}")
            assert float(state["scale_weight"]) == pytest.approx(reference.W_s, rel=1e-12)


@pairs(
    steps=[(1, 1, 1), (2, 1, 4), (2, 3, 6), (3, 2, 3)],
    decays=[(0.95, None), (0.5, 0.8), (0.9, 0.0)],
    estimator=["intra", "running"],
)
def test_average_refresh_and_transport_against_a_dense_restatement(steps, decays, estimator):
    model = network()
    keywords = dict(zip(("factor_update_steps", "scale_update_steps", "inv_update_steps"), steps, strict=True))
    opt = plain_ekfac(model, lr=0.05, factor_decay=decays[0], scale_decay=decays[1], estimator=estimator, **keywords)
    references = [Reference(name, *decays, estimator) for name in ("0", "2")]
    follow(opt, model, references, lambda t, j: due(t, *steps))


RESTATED = {  # options, what the reference of each layer knows of them, what is due for block j at step t
    # of sides (4, 4) and (2, 5): both sides diagonal, one, both; the identity moves nothing on its side
    "diagonal beyond 1": ({"max_factor_dim": 1, "inv_update_steps": 2}, {"limit": 1}, lambda t, j: due(t, 1, 1, 2)),
    "diagonal beyond 2": ({"max_factor_dim": 2, "inv_update_steps": 2}, {"limit": 2}, lambda t, j: due(t, 1, 1, 2)),
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


@pytest.mark.parametrize("case", RESTATED)
def test_options_of_the_schedule_against_the_restatement(case):
    options, known, dues = RESTATED[case]
    model = network()
    opt = plain_ekfac(model, lr=0.05, **options)
    follow(opt, model, [Reference(name, **known) for name in ("0", "2")], dues)


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_every_group_of_a_convolution_moves_with_its_own_basis(estimator):
    model = nn.Sequential(seeded_build(lambda: nn.Conv1d(4, 4, 2, groups=2)))
    opt = plain_ekfac(model, lr=0.05, inv_update_steps=2, estimator=estimator)

    def sequences(n, seed):
        return noise(n, 4, 6, seed=seed), noise(n, 4, 5, seed=seed + 100)

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


@each(transport=["project", "none"], basis_update=["eigh", "qr"])
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


# ---------------------------------------------------------------------------------------------------------------------
# The cheap basis update
# ---------------------------------------------------------------------------------------------------------------------


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
