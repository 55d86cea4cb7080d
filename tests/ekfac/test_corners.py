"""Steps out of the ordinary: late layers, missing gradients, skipped and paused steps, observed curvature."""

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
from tests.support.kfac import assert_close, backward, labels, noise
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.ekfac import (
    curvature_gradients,
    exact_fisher,
    layer_gradients,
    operator,
    scales,
    solve,
)

estimators = pytest.mark.parametrize("estimator", ["intra", "running"])


def defined(plain, name, x, y, bases, estimator="intra", loss=F.cross_entropy):
    G = layer_gradients(plain, name, x, y, loss)
    if estimator == "running":
        G = len(x) ** 0.5 * G.mean(0, keepdim=True)
    return scales(G, *bases)


# ---------------------------------------------------------------------------------------------------------------------
# Layers that come and go
# ---------------------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare = nn.Linear(4, 3), nn.Linear(4, 3)
        self.both = False

    def forward(self, x):
        return self.used(x) + self.rare(x) if self.both else self.used(x)


@estimators
def test_a_late_branch_begins_with_a_basis_and_measures_afterwards(estimator):
    model, plain = seeded_build(Branches), seeded_build(Branches)
    plain.both = True
    opt = plain_ekfac(model, estimator=estimator)
    with standing(opt):
        for seed in range(3):
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
        assert state_of(opt, model.rare)["refreshes"] == 0
        model.both = True
        for seed in (3, 4):
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    state = state_of(opt, model.rare)
    assert state["refreshes"] == 1
    assert state["scale_updates"] == (1 if estimator == "intra" else 2)
    if estimator == "intra":
        expected = defined(plain, "rare", *vectors(seed=4), held_bases(opt, model.rare))
        assert_close(held_scales(opt, model.rare), expected, 1e-9)


@estimators
def test_a_branch_without_gradient_keeps_its_scales(estimator):
    model = seeded_build(Branches)
    model.both = True
    opt = plain_ekfac(model, lr=0.1, estimator=estimator)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    model.both = False
    held, weight = held_scales(opt, model.rare), float(state_of(opt, model.rare)["scale_weight"])
    values = model.rare.weight.detach().clone()
    used = held_scales(opt, model.used)
    for seed in range(2, 5):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    assert torch.equal(held_scales(opt, model.rare), held)
    assert float(state_of(opt, model.rare)["scale_weight"]) == weight
    assert torch.equal(model.rare.weight, values)
    assert not torch.equal(held_scales(opt, model.used), used)


# ---------------------------------------------------------------------------------------------------------------------
# Intervals that cross
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["project", "kfac", "none"])
def test_refreshes_before_the_first_measurement_leave_no_trace_in_it(transport):
    """Until step 6 there are placeholders only, whatever a refresh makes of them."""
    model = mlp((3, 4, 2))
    opt = plain_ekfac(model, scale_update_steps=6, inv_update_steps=2, transport=transport)
    with standing(opt):
        for t in range(6):
            train_step(opt, model, noise(12, 3, seed=t), noise(12, 2, seed=t + 100), F.mse_loss)
            assert state_of(opt, model[0])["scale_updates"] == 0
            assert torch.isfinite(held_scales(opt, model[0])).all()
        bases = held_bases(opt, model[0])
        opt.param_groups[0]["inv_update_steps"] = 10**6
        x, y = noise(12, 3, seed=6), noise(12, 2, seed=106)
        train_step(opt, model, x, y, F.mse_loss)
    expected = defined(mlp((3, 4, 2)), "0", x, y, bases, loss=F.mse_loss)
    assert_close(held_scales(opt, model[0]), expected, 1e-9)


@estimators
def test_preconditioning_that_is_switched_off_and_on(estimator):
    x, y = vectors()
    model, reference = mlp(), mlp()
    opt = plain_ekfac(model, lr=0.1, momentum=0.9, inv_update_steps=0, estimator=estimator)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        train_step(opt, model, x, y, F.cross_entropy)
        train_step(sgd, reference, x, y, F.cross_entropy)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    opt.param_groups[0].update(inv_update_steps=10**6, momentum=0.0)
    measure(opt, model, x, y, F.cross_entropy)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    gradient, change = next_directions(opt, model, x, y, F.cross_entropy, ["0"])["0"]
    Q_B, Q_A = held_bases(opt, model[0])
    fisher = operator(Q_B, defined(plain, "0", x, y, (Q_B, Q_A), estimator), Q_A)
    assert_close(change, 0.1 * solve(fisher, gradient, 1e-2), 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Steps that are skipped, paused or driven by a closure
# ---------------------------------------------------------------------------------------------------------------------


@estimators
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


def test_a_paused_step_keeps_the_scales():
    model = mlp()
    opt = plain_ekfac(model, lr=0.1)
    for seed in range(3):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    held = held_scales(opt, model[0])
    opt.zero_grad()
    with opt.pause_capture():
        backward(model, *vectors(seed=3), F.cross_entropy)
    opt.step()
    assert torch.equal(held_scales(opt, model[0]), held)


@estimators
def test_a_closure_is_the_same_step(estimator):
    models = [mlp(), mlp()]
    opts = [plain_ekfac(model, lr=0.1, estimator=estimator) for model in models]
    for t in range(4):
        x, y = vectors(seed=t)
        train_step(opts[0], models[0], x, y, F.cross_entropy)

        def closure(x=x, y=y):
            opts[1].zero_grad()
            return backward(models[1], x, y, F.cross_entropy)

        opts[1].step(closure)
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert torch.equal(held_scales(opts[0], models[0][0]), held_scales(opts[1], models[1][0]))


def test_two_optimizers_on_one_module_measure_apart():
    model, (x, y) = mlp(), vectors()
    opts = [plain_ekfac(model, lr=0.0), plain_ekfac(model, lr=0.0, approx="reduce", max_factor_dim=4)]
    for _ in range(2):
        model.zero_grad()
        backward(model, x, y, F.cross_entropy)
        for opt in opts:
            opt.step()
    for opt in opts:
        expected = defined(mlp(), "0", x, y, held_bases(opt, model[0]))
        assert_close(held_scales(opt, model[0]), expected, 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Layers under the running estimate
# ---------------------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Token and position embeddings, a norm, a grouped convolution, a read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(6, 4), nn.Embedding(5, 4)
        self.norm, self.conv, self.head = nn.LayerNorm(4), nn.Conv1d(4, 4, 2, groups=2), nn.Linear(4, 3)

    def forward(self, index):
        z = self.norm(self.words(index) + self.place(torch.arange(index.shape[1])))
        return self.head(torch.tanh(self.conv(z.mT)).mean(-1))


def test_the_running_estimate_covers_every_layer():
    """No rows of single examples are needed, so layers whose input all examples share are covered too."""
    model, plain = seeded_build(Mixed), seeded_build(Mixed)
    index = torch.randint(6, (7, 5), generator=torch.Generator().manual_seed(3))
    y = labels(7, 3)
    opt = plain_ekfac(model, estimator="running")
    measure(opt, model, index, y, F.cross_entropy)
    for name in ("words", "place", "norm", "conv", "head"):
        layer = model.get_submodule(name)
        expected = defined(plain, name, index, y, held_bases(opt, layer), "running")
        assert_close(held_scales(opt, layer), expected, 1e-9, name)


# ---------------------------------------------------------------------------------------------------------------------
# Observed curvature
# ---------------------------------------------------------------------------------------------------------------------


def observed_step(opt, model, batches, likelihood="categorical"):
    opt.zero_grad()
    for x, y in batches:
        outputs = model(x)
        opt.observe(outputs, likelihood)
        (F.cross_entropy(outputs, y) / len(batches)).backward()
    opt.step()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_observed_micro_batches_are_one_batch(parts):
    model, (x, y) = mlp(), vectors(8)
    opt = plain_ekfac(model, fisher="exact")
    with standing(opt):
        for _ in range(2):
            observed_step(opt, model, list(zip(x.chunk(parts), y.chunk(parts), strict=True)))
    G = curvature_gradients(mlp(), "0", x, "categorical")
    assert_close(held_scales(opt, model[0]), scales(G, *held_bases(opt, model[0])), 1e-9)


def test_a_step_without_observation_keeps_the_scales_and_still_moves():
    model = mlp()
    opt = plain_ekfac(model, lr=0.1, fisher="exact")
    for seed in range(3):
        observed_step(opt, model, [vectors(seed=seed)])
    held, weight = held_scales(opt, model[0]), model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="observe"):
        train_step(opt, model, *vectors(seed=3), F.cross_entropy)
    assert torch.equal(held_scales(opt, model[0]), held)
    assert not torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("fisher", ["mc", "curvature_prop"])
def test_sampled_curvature_converges_to_the_exact_one(fisher):
    """800 draws per example: the trace within 5 %, every entry within 15 % of the largest one."""
    model, (x, y) = mlp((3, 2, 3)), (noise(4, 3), labels(4, 3))
    opt = plain_ekfac(model, fisher=fisher, fisher_samples=4, factor_decay=1.0, deterministic_seed=3)
    with standing(opt):
        for _ in range(201):
            observed_step(opt, model, [(x, y)])
    for name in ("0", "2"):
        layer = model.get_submodule(name)
        G = curvature_gradients(mlp((3, 2, 3)), name, x, "categorical")
        expected, held = scales(G, *held_bases(opt, layer)), held_scales(opt, layer)
        assert float(held.sum()) == pytest.approx(float(exact_fisher(G).trace()), rel=0.05)
        assert_close(held, expected, 0.15, name)


@pytest.mark.parametrize("fisher", ["mc", "curvature_prop", "exact"])
def test_the_loss_s_own_gradients_do_not_enter_observed_scales(fisher):
    found = []
    for factor in (1.0, 100.0):
        model, (x, y) = mlp(), vectors()
        opt = plain_ekfac(model, fisher=fisher)
        with standing(opt):
            for _ in range(2):
                opt.zero_grad()
                outputs = model(x)
                opt.observe(outputs, "categorical")
                (factor * F.cross_entropy(outputs, y)).backward()
                opt.step()
        found.append(held_scales(opt, model[0]))
    assert torch.equal(*found)
