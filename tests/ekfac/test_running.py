"""``estimator="running"``: squares of the projected mean gradient; and with an exponent of 1/2, Adam in that basis."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from secondorder import EKFAC
from tests.support.ekfac import (
    HELD,
    Branches,
    assert_scales,
    held_bases,
    held_scales,
    measured,
    next_directions,
    plain_ekfac,
    standing,
    state_of,
    train_step,
)
from tests.support.grid import each
from tests.support.kfac import assert_close, backward, labels, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import (
    Whitening,
    damped_power,
    eigenbasis,
    layer_gradients,
    mean_gradient,
    measured_scales,
    operator,
    scales,
    solve,
    values,
)
from tests.support.oracles.kfac import covered_names, expected_factors

BUILDS = {"mlp": (mlp, vectors), "convnet": (lambda: convnet(stride=2, padding=1), images)}
WHITE = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.9, "factor_update_steps": 1}


def running(params, **keywords):
    return plain_ekfac(params, estimator="running", **keywords)


# ---------------------------------------------------------------------------------------------------------------------
# The estimate
# ---------------------------------------------------------------------------------------------------------------------


@each(kind=BUILDS, decay=[0.0, 0.95])
def test_first_value_is_the_number_of_examples_times_the_squared_mean(kind, decay):
    """It needs no rows, so the step that makes the basis measures too; the direction is the dense solve."""
    (build, data), plain = kind, kind[0]()
    model, (x, y) = build(), data(7)
    opt, names = running(model, scale_decay=decay), covered_names(plain)
    with standing(opt):
        for t in range(2):
            train_step(opt, model, x, y, F.cross_entropy)
            assert_scales(opt, model, plain, x, y, F.cross_entropy, estimator="running")
            assert {state_of(opt, model.get_submodule(name))["scale_updates"] for name in names} == {t + 1}
    for name, (gradient, V) in next_directions(opt, model, x, y, F.cross_entropy, names).items():
        Q_B, Q_A = held_bases(opt, model.get_submodule(name))
        s = measured_scales(plain, name, x, y, (Q_B, Q_A), "running", F.cross_entropy)
        assert_close(V, solve(operator(Q_B, s, Q_A), gradient, 1e-2), 1e-8, name)


def test_the_average_over_steps_is_a_debiased_ratio():
    """Batches of unequal size in one basis: W ← βW + n, s ← s + (n/W)(s_b − s)."""
    model, value, weight = mlp(), 0.0, 0.0
    opt = running(model, scale_decay=0.7)
    with standing(opt):
        for n in (6, 5, 2, 7, 4):
            x, y = vectors(n, seed=n)
            train_step(opt, model, x, y, F.cross_entropy)
            batch = measured_scales(mlp(), "0", x, y, held_bases(opt, model[0]), "running", F.cross_entropy)
            weight = 0.7 * weight + n
            value = value + n / weight * (batch - value)
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
    model = mlp((3, 2))
    opt = running(model, factor_decay=1.0)
    with standing(opt):
        train_step(opt, model, *population, linear_loss)
        bases = held_bases(opt, model[0])
        state_of(opt, model[0])["scale"].zero_()
        state_of(opt, model[0])["scale_weight"].zero_()
        for pair in itertools.product(range(4), repeat=2):
            train_step(opt, model, *(t[list(pair)] for t in population), linear_loss)
    G = layer_gradients(mlp((3, 2)), "0", *population, linear_loss)
    expected = scales(G - G.mean(0), *bases) + 2 * scales(G.mean(0, keepdim=True), *bases)
    assert_close(held_scales(opt, model[0]), expected, 1e-10)
    if mean == 0:
        assert_close(expected, scales(G, *bases), 1e-10)


def test_a_replicated_batch_counts_as_more_examples():
    """The mean gradient is the same, so the estimate grows with the number of examples, and is "intra" for one."""
    x, y = vectors(1)
    once, intra = (
        measured(mlp(), x, y, F.cross_entropy, estimator=estimator).dense_curvature("0")
        for estimator in ("running", "intra")
    )
    assert_close(once, intra, 1e-9)
    many = measured(mlp(), x.repeat(4, 1), y.repeat(4), F.cross_entropy, estimator="running")
    assert_close(many.dense_curvature("0"), 4 * once, 1e-8)


def test_an_exponent_without_momentum_is_that_of_the_damped_block_and_may_be_scheduled():
    """It is read at use, like λ."""
    model, (x, y) = mlp(), vectors()
    opt = measured(model, x, y, F.cross_entropy, estimator="running", power=0.25)
    dense = opt.dense_curvature("0")
    for power in (0.25, 0.5, 1.0):
        opt.param_groups[0].update(power=power)
        model.load_state_dict(mlp().state_dict())
        gradient, V = next_directions(opt, model, x, y, F.cross_entropy, ["0"])["0"]
        assert_close(V, damped_power(dense, 1e-2, power, gradient), 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Adam in the factors' eigenbasis
# ---------------------------------------------------------------------------------------------------------------------


class Restated:
    """The whole method for a network of Linear layers, on parameters of its own."""

    def __init__(self, model, lr, beta1, beta2, eps, inv_update_steps):
        self.model, self.lr, self.K = model, lr, inv_update_steps
        self.rules = {name: Whitening(beta1, beta2, eps) for name in covered_names(model)}
        self.factors, self.bases, self.weight, self.t = {}, {}, 0.0, 0

    def step(self, x, y, loss):
        self.weight = 0.95 * self.weight + len(x)
        for name, pair in expected_factors(self.model, x, y, loss).items():
            old = self.factors.get(name, pair)
            self.factors[name] = tuple(a + len(x) / self.weight * (b - a) for a, b in zip(old, pair, strict=True))
            if self.t % self.K == 0:
                A, B = self.factors[name]
                self.bases[name] = eigenbasis(B)[1], eigenbasis(A)[1]
        self.model.zero_grad()
        backward(self.model, x, y, loss)
        for name, rule in self.rules.items():
            layer = self.model.get_submodule(name)
            V = rule.direction(mean_gradient(layer), *self.bases[name])[0]
            with torch.no_grad():
                layer.weight.sub_(self.lr * V[:, : layer.weight.shape[1]])
                layer.bias.sub_(self.lr * V[:, -1])
        self.t += 1


@pytest.mark.parametrize("K", [1, 3, 100])
def test_whitening_against_its_restatement(K):
    """Every step of it moves parameters of its own: the trajectories agree only if every step does."""
    model, start = mlp((3, 4, 2)), mlp((3, 4, 2))
    reference = Restated(mlp((3, 4, 2)), 0.03, 0.9, 0.8, 1e-6, K)
    opt = plain_ekfac(model, **{**WHITE, "lr": 0.03, "scale_decay": 0.8, "fallback_eps": 1e-6, "inv_update_steps": K})
    for t in range(10):
        x, y = noise(12, 3, seed=t), noise(12, 2, seed=t + 50)
        reference.step(x, y, F.mse_loss)
        train_step(opt, model, x, y, F.mse_loss)
    for i in (0, 2):
        assert_close(values(model[i]) - values(start[i]), values(reference.model[i]) - values(start[i]), 1e-6, str(i))


def test_the_first_whitened_step_has_the_size_of_lr_whatever_the_number_of_examples():
    """At t = 1 both moments are those of the gradient: every rotated entry moves by lr, up to ε, as in Adam."""
    x, y = vectors()
    found = []
    for times in (1, 3):
        model = mlp((4, 3))
        opt = plain_ekfac(model, **{**WHITE, "lr": 0.1, "scale_decay": 0.99, "fallback_eps": 1e-12})
        batch = x.repeat(times, 1), y.repeat(times), F.cross_entropy
        _, V = next_directions(opt, model, *batch, ["0"])["0"]
        Q_B, Q_A = held_bases(opt, model[0])
        rotated = (Q_B.mT @ V @ Q_A).abs()
        null = rotated < 1e-3  # the logits' gradients sum to zero: one row of the rotated gradient is nothing
        assert int(null.sum()) <= 5
        assert_close(rotated[~null], torch.full_like(rotated[~null], 0.1), 1e-6)
        for _ in range(2):
            train_step(opt, model, *batch)
        found.append(parameters_to_vector(model.parameters()).detach())
    assert_close(found[1], found[0], 1e-6)


@each(kind=BUILDS, intervals=[(1, HELD), (1, 1), (3, 6)])
def test_diagonal_factors_make_it_adam(kind, intervals):
    """Q = I on both sides, from the first step on: torch's Adam with β₂ = scale_decay, up to rounding."""
    build, data = kind
    model, reference = build(), build()
    own = {"lr": 0.01, "scale_decay": 0.99, "fallback_eps": 1e-8, "max_factor_dim": 1}
    opt = plain_ekfac(model, **{**WHITE, **own, "factor_update_steps": intervals[0], "inv_update_steps": intervals[1]})
    adam = torch.optim.Adam(reference.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8)
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


def test_the_first_mean_of_gradients_is_corrected_for_its_own_updates():
    """λ is so large that directions are multiples of what is preconditioned."""
    model = mlp()
    opt = plain_ekfac(model, lr=0.01, momentum=0.9, momentum_mode="pre", damping=1e9, inv_update_steps=0)
    for seed in range(30):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    opt.param_groups[0]["inv_update_steps"] = HELD
    means = [torch.zeros_like(p) for p in model.parameters()]
    for t in range(3):
        with opt.keep_directions() as directions:
            train_step(opt, model, *vectors(seed=30 + t), F.cross_entropy)
        means = [0.9 * m + 0.1 * p.grad for m, p in zip(means, model.parameters(), strict=True)]
        for (name, _), m in zip(model.named_parameters(), means, strict=True):
            assert_close(1e9 * directions[name], m / (1 - 0.9 ** (t + 1)), 1e-6, name)


@pytest.mark.parametrize("options", [WHITE, {"momentum_mode": "pre", "momentum": 0.9}], ids=["adam", "pre"])
def test_the_first_step_after_a_resume_without_curvature_is_that_of_a_new_optimizer(options):
    options = {**options, "lr": 1e-2, "checkpoint_curvature": "none", "damping": 0.1, "inv_update_steps": 10}
    model = mlp()
    opt = plain_ekfac(model, **options)
    for seed in range(25):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    moved = []
    for load in (True, False):
        other = mlp()
        other.load_state_dict(model.state_dict())
        second = plain_ekfac(other, **options)
        if load:
            second.load_state_dict(copy.deepcopy(opt.state_dict()))
        train_step(second, other, *vectors(seed=99), F.cross_entropy)
        moved.append((parameters_to_vector(other.parameters()) - parameters_to_vector(model.parameters())).detach())
    assert_close(moved[0], moved[1], 1e-9)
    if "power" in options:  # Adam's: lr along every axis
        assert float(moved[0].norm()) <= 1e-2 * len(moved[0]) ** 0.5 * 1.001


# ---------------------------------------------------------------------------------------------------------------------
# What it counts
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
    model, y = seeded_build(Mixed), labels(7, 3)
    index = torch.randint(6, (7, 5), generator=torch.Generator().manual_seed(3))
    opt = measured(model, index, y, F.cross_entropy, estimator="running")
    names = ["words", "place", "norm", "conv", "head"]
    assert_scales(opt, model, seeded_build(Mixed), index, y, F.cross_entropy, names, estimator="running")


@each(terms=[1, 3], weighting=["samples", "update"])
def test_a_summed_loss_has_the_running_scale_of_its_mean(terms, weighting):
    x, y = vectors(8)
    keywords = {"estimator": "running", "weighting": weighting}
    total = {"loss_reduction": "sum", "loss_terms": terms}
    opts = [
        measured(mlp(), x, y, F.cross_entropy, **keywords),
        measured(mlp(), x, y, lambda o, t: F.cross_entropy(o, t, reduction="sum"), **keywords, **total),
    ]
    assert_close(*(opt.dense_curvature("0") for opt in opts), 1e-9)
    for opt in opts:
        weight = float(opt.state[opt.blocks["0"].owner]["scale_weight"])
        assert weight == pytest.approx((8 if weighting == "samples" else 1) * (1 + 0.95))


@pytest.mark.parametrize("interval", [1, 10])
def test_examples_are_counted_when_the_first_layer_takes_no_part(interval):
    model, plain = seeded_build(Branches), seeded_build(Branches)
    plain.both = False
    opt = running(model, factor_update_steps=interval, scale_decay=0.0)
    with standing(opt):
        for t in range(5):
            model.both = t == 0
            x, y = vectors(4 + t, seed=t)
            train_step(opt, model, x, y, F.cross_entropy)
            assert state_of(opt, model.used)["scale_updates"] == t + 1
            assert float(state_of(opt, model.used)["scale_weight"]) == 4 + t
    assert_scales(opt, model, plain, x, y, F.cross_entropy, ["used"], estimator="running")
    assert state_of(opt, model.rare)["scale_updates"] == 1


class ChangesItsInput(nn.Module):
    """Its first layer cannot be captured: under autocast nothing forbids the change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x)
        x.mul_(2.0)
        return self.second(torch.tanh(h.float()))


@pytest.mark.filterwarnings("ignore:EKFAC")
def test_examples_are_counted_when_the_first_layer_is_refused():
    model = seeded_build(ChangesItsInput).float()
    opt = running(model, lr=0.0)
    for seed in range(4):
        train_step(opt, model, noise(5, 3, seed=seed).float(), noise(5, 2).float(), F.mse_loss)
    assert state_of(opt, model.second)["scale_updates"] == 4
    assert float(state_of(opt, model.second)["scale_weight"]) == pytest.approx(5 * (1 + 0.95 + 0.95**2 + 0.95**3))


REFUSED = [{"transport": "recompute"}, {"token_is_example": True}, {"scale_batch_size": 4}]


def test_the_running_estimate_refuses_what_only_rows_can_have():
    for options in REFUSED:
        plain_ekfac(mlp(), **options)
    for options in REFUSED + [{"fisher": fisher} for fisher in ("mc", "exact", "curvature_prop")]:
        with pytest.raises((ValueError, RuntimeError), match="running"):
            running(mlp(), **options)


class Output:
    """No container that anybody knows."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Wrapped(nn.Module):
    """A network beside a head without a loss, in a container of its own or in a tuple."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.aux, self.kind = mlp(), nn.Linear(4, 2).double(), kind

    def forward(self, x: torch.Tensor):
        logits = self.net(x)
        return Output(logits) if self.kind == "own class" else (self.aux(x), logits)


FORWARDS = {
    "own class": lambda net: (model := Wrapped("own class"), model.net, lambda x: model(x).logits),
    "unused head first": lambda net: (model := Wrapped("tuple"), model.net, lambda x: model(x)[1]),
    "compiled": lambda net: (net, net, torch.compile(net, backend="aot_eager")),
    # a gradient of inputs counts no examples
    "beside a gradient of inputs": lambda net: (net, net, lambda x: (input_gradient(net), net(x))[1]),
}


def input_gradient(net):
    z = noise(8, 4, seed=1).requires_grad_()
    return torch.autograd.grad(net(z).square().mean(), z)


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_running_scale_is_measured_on_every_step_whatever_the_model_returns(kind):
    model, net, forward = FORWARDS[kind](mlp())
    optimizer = EKFAC(model, lr=0.01, estimator="running", factor_update_steps=3, inv_update_steps=3)
    weight = 0.0
    for step in range(6):
        optimizer.zero_grad()
        forward(noise(8, 4, seed=step)).square().mean().backward()
        optimizer.step()
        weight = 0.95 * weight + 8
    for i in (0, 2):
        assert optimizer.state[net[i].weight]["scale_updates"] == 6
        assert float(optimizer.state[net[i].weight]["scale_weight"]) == pytest.approx(weight)
