"""``estimator="running"``: squares of the projected mean gradient; and with an exponent of 1/2, Adam in that basis."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.ekfac import (
    HELD,
    held_bases,
    held_scales,
    measured,
    next_directions,
    plain_ekfac,
    standing,
    state_of,
    train_step,
)
from tests.support.kfac import assert_close, backward, noise, twin
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.ekfac import (
    Whitening,
    damped_power,
    eigenbasis,
    layer_gradients,
    mean_gradient,
    operator,
    scales,
    solve,
    values,
)
from tests.support.oracles.kfac import covered_names, expected_factors

BUILDS = {"mlp": (mlp, vectors), "convnet": (lambda: convnet(stride=2, padding=1), images)}
builds = pytest.mark.parametrize("kind", BUILDS)
WHITE = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "factor_update_steps": 1}


def running(params, **keywords):
    return plain_ekfac(params, estimator="running", **keywords)


def squared_mean(plain, name, x, y, loss, bases):
    """(Q_Bᵀ ∇ Q_A)² of the mean gradient."""
    gradient = layer_gradients(plain, name, x, y, loss).mean(0)
    return scales(gradient[None], *bases)


# ---------------------------------------------------------------------------------------------------------------------
# The estimate
# ---------------------------------------------------------------------------------------------------------------------


@builds
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("steps", [1, 2])
def test_first_value_is_the_number_of_examples_times_the_squared_mean(kind, decay, steps):
    """It needs no rows, so the step that makes the basis measures too: the first batch alone, whatever the decay."""
    build, data = BUILDS[kind]
    model, (x, y) = build(), data(7)
    opt = running(model, scale_decay=decay)
    with standing(opt):
        for _ in range(steps):
            train_step(opt, model, x, y, F.cross_entropy)
    for name in covered_names(model):
        layer = model.get_submodule(name)
        expected = 7 * squared_mean(build(), name, x, y, F.cross_entropy, held_bases(opt, layer))
        assert_close(held_scales(opt, layer), expected, 1e-9, name)
        assert state_of(opt, layer)["scale_updates"] == steps


def test_the_average_over_steps_is_a_debiased_ratio():
    """Batches of unequal size in one basis: W ← βW + n, s ← s + (n/W)(s_b − s)."""
    model, plain = mlp(), mlp()
    opt = running(model, scale_decay=0.7)
    batches = [vectors(n, seed=n) for n in (5, 2, 7, 4)]
    with standing(opt):
        train_step(opt, model, *vectors(6, seed=9), F.cross_entropy)
        value, weight = held_scales(opt, model[0]), 6.0
        for x, y in batches:
            train_step(opt, model, x, y, F.cross_entropy)
            batch = len(x) * squared_mean(plain, "0", x, y, F.cross_entropy, held_bases(opt, model[0]))
            weight = 0.7 * weight + len(x)
            value = value + len(x) / weight * (batch - value)
            assert_close(held_scales(opt, model[0]), value, 1e-10)
    assert float(state_of(opt, model[0])["scale_weight"]) == pytest.approx(weight)


@pytest.mark.parametrize("mean", [0.0, 0.6])
def test_expectation_over_resampled_batches(mean):
    """Var(G) + n·mean², exactly, over all ordered pairs of a small population; with zero mean that of the examples.

    The loss is linear in the outputs, so the output gradients are the targets: every one is there with both signs.
    """

    def linear_loss(outputs, targets):
        return (outputs * targets).sum(1).mean()

    x, v = noise(2, 3), noise(2, 2, seed=1)
    population = torch.cat([x, x]), torch.cat([v + mean, mean - v])
    model, plain = mlp((3, 2)), mlp((3, 2))
    opt = running(model, factor_decay=1.0)
    with standing(opt):
        train_step(opt, model, *population, linear_loss)
        bases = held_bases(opt, model[0])
        state_of(opt, model[0])["scale"].zero_()
        state_of(opt, model[0])["scale_weight"].zero_()
        for pair in itertools.product(range(4), repeat=2):
            train_step(opt, model, *(t[list(pair)] for t in population), linear_loss)
    G = layer_gradients(plain, "0", *population, linear_loss)
    expected = scales(G - G.mean(0), *bases) + 2 * scales(G.mean(0, keepdim=True), *bases)
    assert_close(held_scales(opt, model[0]), expected, 1e-10)
    if mean == 0:
        assert_close(expected, scales(G, *bases), 1e-10)


def test_one_example_is_the_same_as_intra():
    x, y = vectors(1)
    found = [measured(mlp(), x, y, F.cross_entropy, estimator=e).dense_curvature("0") for e in ("intra", "running")]
    assert_close(found[1], found[0], 1e-9)


@pytest.mark.parametrize("times", [2, 4])
def test_a_replicated_batch_counts_as_more_examples(times):
    """The mean gradient is the same, so the estimate grows with the number of examples, as documented."""
    x, y = vectors()
    once = measured(mlp(), x, y, F.cross_entropy, estimator="running").dense_curvature("0")
    many = measured(mlp(), torch.cat([x] * times), torch.cat([y] * times), F.cross_entropy, estimator="running")
    assert_close(many.dense_curvature("0"), times * once, 1e-8)


@builds
def test_direction_is_the_dense_solve(kind):
    build, data = BUILDS[kind]
    model, (x, y) = build(), data(7)
    opt = measured(model, x, y, F.cross_entropy, estimator="running")
    names = covered_names(model)
    for name, (gradient, V) in next_directions(opt, model, x, y, F.cross_entropy, names).items():
        bases = held_bases(opt, model.get_submodule(name))
        s = 7 * squared_mean(build(), name, x, y, F.cross_entropy, bases)
        assert_close(V, solve(operator(bases[0], s, bases[1]), gradient, 1e-2), 1e-8, name)


@pytest.mark.parametrize("fisher", ["mc", "exact", "curvature_prop"])
def test_it_needs_the_empirical_gradient(fisher):
    with pytest.raises((ValueError, RuntimeError), match="running"):
        running(mlp(), fisher=fisher)


def test_half_the_power_without_momentum_is_that_of_the_damped_block():
    model, (x, y) = mlp(), vectors()
    opt = measured(model, x, y, F.cross_entropy, estimator="running", power=0.5)
    dense = opt.dense_curvature("0")
    gradient, V = next_directions(opt, model, x, y, F.cross_entropy, ["0"])["0"]
    assert_close(V, damped_power(dense, 1e-2, 0.5, gradient), 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Adam in the factors' eigenbasis
# ---------------------------------------------------------------------------------------------------------------------


class Restated:
    """The whole method for a network of Linear layers, on parameters of its own."""

    def __init__(self, model, lr, beta1, beta2, eps, factor_decay=0.95, inv_update_steps=1):
        self.model, self.lr, self.factor_decay, self.K = model, lr, factor_decay, inv_update_steps
        self.names = covered_names(model)
        self.rules = {name: Whitening(beta1, beta2, eps) for name in self.names}
        self.factors, self.bases, self.weight, self.t = {}, {}, 0.0, 0

    def step(self, x, y, loss):
        found = expected_factors(self.model, x, y, loss)
        self.weight = self.factor_decay * self.weight + len(x)
        for name, pair in found.items():
            old = self.factors.get(name, pair)
            self.factors[name] = tuple(a + len(x) / self.weight * (b - a) for a, b in zip(old, pair, strict=True))
            if self.t % self.K == 0:
                A, B = self.factors[name]
                self.bases[name] = eigenbasis(B)[1], eigenbasis(A)[1]
        self.model.zero_grad()
        backward(self.model, x, y, loss)
        for name in self.names:
            layer = self.model.get_submodule(name)
            V = self.rules[name].direction(mean_gradient(layer), *self.bases[name])[0]
            with torch.no_grad():
                layer.weight.sub_(self.lr * V[:, : layer.weight.shape[1]])
                layer.bias.sub_(self.lr * V[:, -1])
        self.t += 1


@pytest.mark.parametrize(("steps", "K"), [(1, 1), (1, 100), (10, 1), (10, 3), (10, 100)])
def test_whitening_against_its_restatement(steps, K):
    """Every step of it moves parameters of its own: the trajectories agree only if every step does."""
    model = mlp((3, 4, 2))
    reference = Restated(mlp((3, 4, 2)), 0.03, 0.9, 0.8, 1e-6, inv_update_steps=K)
    opt = plain_ekfac(
        model, **{**WHITE, "lr": 0.03, "momentum": 0.9, "scale_decay": 0.8, "fallback_eps": 1e-6, "inv_update_steps": K}
    )
    start = {name: values(model.get_submodule(name)) for name in ("0", "2")}
    for t in range(steps):
        x, y = noise(12, 3, seed=t), noise(12, 2, seed=t + 50)
        reference.step(x, y, F.mse_loss)
        train_step(opt, model, x, y, F.mse_loss)
    for name in ("0", "2"):
        moved = values(model.get_submodule(name)) - start[name]
        expected = values(reference.model.get_submodule(name)) - start[name]
        assert_close(moved, expected, 1e-6, name)


def test_whitening_ignores_the_number_of_examples():
    """lr has the meaning that it has in Adam: the same mean gradient makes the same step."""
    x, y = vectors()
    found = []
    for times in (1, 3):
        model = mlp()
        opt = plain_ekfac(model, **{**WHITE, "lr": 0.1, "momentum": 0.9})
        for _ in range(3):
            train_step(opt, model, torch.cat([x] * times), torch.cat([y] * times), F.cross_entropy)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(found[1], found[0], 1e-6)


def test_the_first_whitened_step_has_the_size_of_lr():
    """At t = 1 both moments are those of the gradient: every rotated entry moves by lr, up to ε."""
    model, (x, y) = mlp((4, 3)), vectors()
    opt = plain_ekfac(model, **{**WHITE, "lr": 0.1, "momentum": 0.9, "scale_decay": 0.99, "fallback_eps": 1e-12})
    _, V = next_directions(opt, model, x, y, F.cross_entropy, ["0"])["0"]
    Q_B, Q_A = held_bases(opt, model[0])
    rotated = (Q_B.mT @ V @ Q_A).abs()
    null = rotated < 1e-3  # the logits' gradients sum to zero: one row of the rotated gradient is nothing
    assert int(null.sum()) <= 5
    assert_close(rotated[~null], torch.full_like(rotated[~null], 0.1), 1e-6)


@builds
@pytest.mark.parametrize("intervals", [(1, HELD), (1, 1), (3, 6)])
def test_diagonal_factors_make_it_adam(kind, intervals):
    """Q = I on both sides, from the first step on: torch's Adam with β₂ = scale_decay, up to rounding."""
    build, data = BUILDS[kind]
    model, reference = build(), build()
    betas, eps = (0.9, 0.99), 1e-8
    opt = plain_ekfac(
        model,
        **{
            **WHITE,
            "lr": 0.01,
            "momentum": betas[0],
            "scale_decay": betas[1],
            "fallback_eps": eps,
            "max_factor_dim": 1,
            "factor_update_steps": intervals[0],
            "inv_update_steps": intervals[1],
        },
    )
    adam = torch.optim.Adam(reference.parameters(), lr=0.01, betas=betas, eps=eps)
    for t in range(12):
        x, y = data(4 + t % 3, seed=t)  # sizes must not matter
        train_step(opt, model, x, y, F.cross_entropy)
        train_step(adam, reference, x, y, F.cross_entropy)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.detach(), q.detach(), 1e-10, f"{name} at {t}")


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_momentum_before_the_preconditioner_is_a_mean_of_gradients(estimator):
    """V = (F + λ)⁻¹ m / (1 − β₁^t), m the running mean of gradients in parameter space."""
    model, beta = mlp(), 0.8
    opt = plain_ekfac(model, lr=0.1, momentum=beta, momentum_mode="pre", estimator=estimator, inv_update_steps=2)
    m = 0.0
    for t in range(1, 6):
        gradient, change = next_directions(opt, model, *vectors(seed=t), F.cross_entropy, ["0"])["0"]
        m = beta * m + (1 - beta) * gradient
        expected = solve(opt.dense_curvature("0"), m / (1 - beta**t), 1e-2)
        assert_close(change, 0.1 * expected, 1e-8, f"at {t}")


def test_an_exponent_may_be_scheduled():
    """It is read at use, like λ."""
    model, (x, y) = mlp(), vectors()
    opt = measured(model, x, y, F.cross_entropy, estimator="running")
    plain = twin(mlp())
    dense = opt.dense_curvature("0")
    for power in (0.5, 1.0):
        opt.param_groups[0].update(power=power)
        model.load_state_dict(plain.state_dict())
        gradient, V = next_directions(opt, model, x, y, F.cross_entropy, ["0"])["0"]
        assert_close(V, damped_power(dense, 1e-2, power, gradient), 1e-8)
