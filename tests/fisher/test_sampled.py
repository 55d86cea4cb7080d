"""Sampled Fishers: what they converge to, and where their randomness comes from.

Every example of the batches here is repeated many times. Blocks do not depend on that, while every copy draws for
itself: so one step is an average over many draws, and few steps make a sharp test.
"""

import copy
import io
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder import EKFAC, KFAC
from tests.support.grid import each, pairs
from tests.support.kfac import all_factors, assert_same_factors, held_factors, labels, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.fisher import METHODS, assert_mean, observed, observed_step, state_of, still
from tests.support.oracles.kfac import covered_names

SAMPLED = ["mc", "curvature_prop"]
LIKELIHOODS = {
    "categorical": (lambda: "categorical", lambda f, y: F.cross_entropy(f, y, reduction="sum")),
    "gaussian": (lambda: "gaussian", lambda f, y: (f - y).square().sum()),
    "gaussian mean": (lambda: secondorder.Gaussian(mean=True), lambda f, y: (f - y).square().mean()),
    "bernoulli": (lambda: "bernoulli", lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum")),
    "bernoulli mean": (lambda: secondorder.Bernoulli(mean=True), F.binary_cross_entropy_with_logits),
}


def any_targets(likelihood: str, *shape: int) -> Tensor:
    return labels(shape[0], shape[1]) if likelihood == "categorical" else noise(*shape).sigmoid()


def draws(opt, model, x, likelihood, steps: int, key: str = "factor_g", targets=None) -> dict[str, Tensor]:
    """One statistic of every layer after each of some steps at fixed weights, ``[steps, …]``."""
    names = covered_names(model)
    seen = {name: [] for name in names}
    for _ in range(steps):
        observed_step(opt, model, x, likelihood, targets)
        for name in names:
            seen[name].append(state_of(opt, model, name)[key].detach().clone())
    return {name: torch.stack(values) for name, values in seen.items()}


def repeated(x: Tensor, times: int = 96) -> Tensor:
    return x.repeat(times, *[1] * (x.ndim - 1))


# ---------------------------------------------------------------------------------------------------------------------
# Convergence
# ---------------------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Per-token logits, each of which depends on all tokens of its example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.outer(h + torch.cumsum(h, 1).square() / 4)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.left(h), self.right(h)


def token_mean(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum") / (5 / 2)


def of_two_heads(f: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(f[0], y[0], reduction="sum") + (f[1] - y[1]).square().sum()


IGNORING = torch.tensor([[0, -100, 2], [1, 2, 0]])
# name: model, batch, likelihood, targets that are told, loss of one example and its targets, precision
PROBLEMS = {
    **{
        name: (lambda: mlp((3, 4, 3)), noise(3, 3), told, None, loss, any_targets(name, 3, 3), 0.05)
        for name, (told, loss) in LIKELIHOODS.items()
    },
    "images": (
        lambda: convnet(stride=2, padding=1), images(2)[0], lambda: "categorical", None,
        LIKELIHOODS["categorical"][1], labels(2, 3), 0.1,
    ),
    # one draw for all tokens of an example, or for all heads, would leave cross terms between them
    "tokens": (
        lambda: seeded_build(Mixing), noise(2, 3, 3), lambda: "categorical", IGNORING, token_mean, IGNORING, 0.1
    ),
    "heads": (
        lambda: seeded_build(TwoHeads), noise(3, 3), lambda: ("categorical", "gaussian"), None,
        of_two_heads, (labels(3, 3), noise(3, 2)), 0.05,
    ),
}  # fmt: skip


@pairs(
    lambda approx, problem, **_: approx == "expand" or problem[0] in ("images", "tokens"),
    fisher=SAMPLED,
    problem={name: (name, *parts) for name, parts in PROBLEMS.items()},
    approx=["expand", "reduce"],
)
def test_the_mean_over_draws_is_the_exact_fisher(fisher, problem, approx):
    _, build, x, told, targets, loss, y, precision = problem
    model = build()
    rows = observed(model, covered_names(model), x, y, loss)
    targets = None if targets is None else repeated(targets)
    found = draws(still(model, fisher, approx=approx), model, repeated(x), told(), 40, targets=targets)
    for name, values in found.items():
        assert_mean(values, rows[name].factors(approx)[1], f"B of {name}", precision)


@each(fisher=SAMPLED, likelihood=LIKELIHOODS.keys(), samples=[1, 4])
def test_the_scales_of_ekfac(fisher, likelihood, samples):
    model, x = mlp((3, 4, 3)), noise(3, 3)
    told, loss = LIKELIHOODS[likelihood]
    rows = observed(model, ["0", "2"], x, any_targets(likelihood, 3, 3), loss)
    opt = still(model, fisher, EKFAC, fisher_samples=samples, scale_decay=0.0, inv_update_steps=1000)
    observed_step(opt, model, repeated(x), told())  # without a basis there is nothing to measure in
    found = draws(opt, model, repeated(x), told(), 30, key="scale")
    for name, values in found.items():
        state = state_of(opt, model, name)
        assert_mean(values, rows[name].scale(state["basis_a"], state["basis_g"]), f"scale of {name}")


@each(fisher=SAMPLED, method=METHODS)
def test_more_samples_have_less_variance_about_the_same_mean(fisher, method):
    x = vectors(3, d=3)[0]
    spread = {}
    for samples in (1, 4):
        model = mlp((3, 4, 3))
        rows = observed(model, ["0"], x, vectors(3)[1], LIKELIHOODS["categorical"][1])
        opt = still(model, fisher, method, fisher_samples=samples)
        values = draws(opt, model, repeated(x, 32), "categorical", 30)["0"]
        assert_mean(values, rows["0"].factors()[1], f"{samples} samples", 0.1)
        spread[samples] = float(values.var(0).sum())
    assert 2 < spread[1] / spread[4] < 8


def test_draws_of_a_classifier_are_its_own_labels():
    """B of the last layer is v vᵀ, and v is p − onehot of some class, each as often as p says."""
    model, x = mlp((3, 4, 3)), vectors(1, d=3)[0]
    with torch.no_grad():
        p = model(x).softmax(1)[0]
    values = draws(still(model, "mc"), model, x, "categorical", 80)["2"]
    allowed = torch.stack([torch.outer(p - e, p - e) for e in torch.eye(3, dtype=torch.float64)])
    distances = (values[:, None] - allowed).abs().amax((2, 3))
    assert float(distances.amin(1).max()) < 1e-12
    drawn = distances.argmin(1).bincount(minlength=3) / 80
    assert ((drawn - p).abs() <= 5 * (p * (1 - p) / 80).sqrt()).all()


# ---------------------------------------------------------------------------------------------------------------------
# Where the randomness comes from
# ---------------------------------------------------------------------------------------------------------------------


def sequence(fisher: str, method: type = KFAC, steps: int = 3, parts: int = 1, **keywords) -> list[Tensor]:
    """Factors of the first layer after each of some steps; every micro-batch is the same batch."""
    model, (x, y) = mlp(), vectors(16)
    opt = still(model, fisher, method, **keywords)
    found = []
    for _ in range(steps):
        opt.zero_grad()
        for _ in range(parts):
            outputs = model(x)
            opt.observe(outputs, "categorical")
            (F.cross_entropy(outputs, y) / parts).backward()
        opt.step()
        found.append(held_factors(opt, model, "0")[1])
    return found


@each(fisher=SAMPLED, method=METHODS)
def test_the_seed_decides_the_draws_and_the_global_generator_does_not(fisher, method):
    first = sequence(fisher, method, deterministic_seed=7)
    torch.manual_seed(1)
    again = sequence(fisher, method, deterministic_seed=7)
    other = sequence(fisher, method, deterministic_seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("fisher", SAMPLED)
def test_every_step_micro_batch_sample_and_example_draws_anew(fisher):
    """Two equal micro-batches with equal draws would add up to one of them, equal examples to a block of rank one."""
    found = sequence(fisher, steps=5)
    assert not any(torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])
    for keywords in ({"parts": 2}, {"fisher_samples": 4}):
        (other,) = sequence(fisher, steps=1, **keywords)
        assert not torch.allclose(other, found[0])
    for copies, rank in ((1, 1), (16, 2)):
        model, x = mlp((3, 4, 3)), vectors(1, d=3)[0]
        opt = still(model, fisher)
        observed_step(opt, model, repeated(x, copies), "categorical")
        assert int(torch.linalg.matrix_rank(held_factors(opt, model, "2")[1], rtol=1e-9)) == rank


@each(fisher=["mc", "curvature_prop", "exact"], likelihood=["categorical", "gaussian", "bernoulli"])
def test_the_user_s_generators_are_not_touched(fisher, likelihood):
    model, x = mlp(), vectors(4)[0]
    opt = still(model, fisher)
    outputs = model(x)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    opt.observe(outputs, likelihood)
    outputs.square().mean().backward()
    opt.step()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Resume
# ---------------------------------------------------------------------------------------------------------------------


def train(opt, model, seeds) -> None:
    for seed in seeds:
        x, y = vectors(4, seed=seed)
        observed_step(opt, model, x, "categorical", objective=lambda f, y=y: F.cross_entropy(f, y))


def saved(opt, model, fisher, method, **keywords):
    """Through a file, into an optimizer of another seed: draws are state, so the one of the checkpoint goes on."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    resumed = mlp()
    resumed.load_state_dict(model.state_dict())
    again = still(resumed, fisher, method, **keywords, deterministic_seed=4)
    again.load_state_dict(torch.load(file, weights_only=True))
    return again, resumed


def copied(opt, model, fisher, method, **keywords):
    other, again = copy.deepcopy((model, opt))
    again.attach(other)
    return again, other


@pairs(fisher=SAMPLED, method=METHODS, way=[saved, copied])
def test_a_run_goes_on_with_the_same_draws(fisher, method, way):
    keywords = {"lr": 0.1, "momentum": 0.9, "factor_decay": 0.9, "factor_batch_size": 3}
    model = mlp()
    opt = still(model, fisher, method, **keywords, deterministic_seed=3)
    train(opt, model, range(3))
    again, resumed = way(opt, model, fisher, method, **keywords)
    train(opt, model, range(3, 6))
    train(again, resumed, range(3, 6))
    for (name, p), q in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert_same_factors(again, resumed, all_factors(opt, model))
