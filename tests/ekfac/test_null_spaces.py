"""Factors of fewer rows than columns: which basis of a null space a factorization returns depends on rounding.

Steps must not depend on it, and rounding must not be whitened where the gradient of a batch is 0: steps in float32 are
those of a reference in float64 that knows the rank of every factor.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC
from secondorder.linalg import dense, eigenbasis
from tests.support.building import built
from tests.support.ekfac import plain_ekfac, train_step
from tests.support.kfac import assert_close, noise
from tests.support.quadratic import flat

ADAM = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.9}


eigh = dense._eigh


def turned_eigh(x):
    """Eigenvectors as another library might return them, with those of the null space rotated at random."""
    (values, vectors), ok = eigh(x)
    for matrix, spectrum in zip(vectors, values, strict=True):
        null = spectrum <= 1e-12 * spectrum.max()
        k = int(null.sum())
        if k:
            generator = torch.Generator().manual_seed(len(spectrum))
            rotation = torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=x.dtype)).Q
            matrix[:, null] = matrix[:, null] @ rotation
    return (values, vectors), ok


def path(keywords):
    """Parameters after each step on new batches of 5 examples."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 9), nn.Tanh(), nn.Linear(9, 4)]
    model, found = nn.Sequential(*layers).double(), []
    opt = plain_ekfac(model, **{"lr": 0.05, "inv_update_steps": 3, **keywords})
    for t in range(5):
        x, y = noise(5, 8, 4, 4, seed=t), torch.arange(5) % 4
        train_step(opt, model, x, y, F.cross_entropy)
        found.append(flat(model.parameters()))
    return torch.stack(found)


@pytest.mark.parametrize(
    "keywords",
    [
        {"power": 0.5, "damping": 1e-4},
        {"transport": "kfac"},
        {"transport": "recompute"},
        {"momentum": 0.9, "momentum_mode": "pre", "scale_update_steps": 2},
        {"estimator": "running"},
        {**ADAM, "orthogonalize": True},
        {"factor_update_steps": 2, "inv_update_steps": 2, "weighting": "update"},
    ],
    ids=lambda keywords: "-".join(keywords) or "plain",
)
def test_steps_do_not_depend_on_the_basis_of_a_null_space(monkeypatch, keywords):
    expected = path(keywords)
    monkeypatch.setattr(dense, "_eigh", turned_eigh)
    assert_close(path(keywords), expected, 1e-9)


def test_a_refresh_averages_the_scale_over_the_null_space():
    layer = nn.Linear(6, 2, bias=False).double()
    opt = plain_ekfac(layer, lr=0.0, inv_update_steps=1, scale_update_steps=100)
    batch = noise(3, 6), noise(3, 2, seed=1), F.mse_loss
    train_step(opt, layer, *batch)
    state, scale = opt.state[layer.weight], noise(2, 6, seed=2).square()
    state["scale"].copy_(scale)
    state["scale_updates"] = 1
    train_step(opt, layer, *batch)
    null = state["scale"][:, state["eigenvalues_a"] == 0]
    assert null.shape == (2, 3)
    assert_close(null, null.mean(1, keepdim=True).expand_as(null), 1e-12)
    assert float(state["scale"].sum()) == pytest.approx(float(scale.sum()))


def test_the_rank_of_a_factor_is_that_of_its_rows():
    for dtype, (n, rows) in itertools.product((torch.float32, torch.float64), ((8, 3), (64, 20), (256, 32))):
        torch.manual_seed(n)
        x = torch.randn(rows, n, dtype=dtype).relu()
        values = torch.linalg.eigvalsh(x.T @ x / rows).clamp(min=0)
        assert int((eigenbasis.without_rounding(values, dtype) == 0).sum()) == n - rows


# ----------------------------------------------------------------------------------- Adam in the eigenbasis, in float32


class Restated:
    """The Adam form for one linear layer in float64, whose factors have the rank of the rows so far."""

    def __init__(self, beta2, eps=1e-8, beta1=0.9, nesterov=False):
        self.beta1, self.beta2, self.eps, self.nesterov = beta1, beta2, eps, nesterov
        self.rows, self.t, self.weight = 0, 0, 0.0
        self.A = self.G = self.m = self.v = self.Q = None

    def direction(self, x, g, update, refresh):
        """Take inputs ``[N, n_a]`` and gradients of the examples' own losses ``[N, n_g]``, and return the direction."""
        x, g, n = x.double(), g.double(), len(x)
        gradient, self.t = g.T @ x / n, self.t + 1
        if self.m is None:
            self.A, self.G, self.m, self.v = 0 * x.T @ x, 0 * g.T @ g, 0 * gradient, 0 * gradient
        self.m = self.beta1 * self.m + (1 - self.beta1) * gradient
        if update:
            self.weight, self.rows = 0.95 * self.weight + n, self.rows + n
            self.A = self.A + n / self.weight * (x.T @ x / n - self.A)
            self.G = self.G + n / self.weight * (g.T @ g / n - self.G)
        if refresh:
            new = [torch.linalg.eigh(X).eigenvectors for X in (self.G, self.A)]
            if self.Q is not None:
                R_g, R_a = (Q.T @ P for Q, P in zip(new, self.Q, strict=True))
                self.v = R_g**2 @ self.v @ (R_a**2).T
            self.Q = new
            self.nulls = [max(len(Q) - self.rows, 0) for Q in new]
        self.v = self.beta2 * self.v + (1 - self.beta2) * self.rotated(gradient, update) ** 2
        k_g, k_a = self.nulls
        v = self.v / (1 - self.beta2**self.t)
        if k_a:
            v[:, :k_a] = v[:, :k_a].mean(1, keepdim=True)
        if k_g:
            v[:k_g] = v[:k_g].mean(0, keepdim=True)
        m = self.m / (1 - self.beta1**self.t)
        m = self.beta1 * m + (1 - self.beta1) * gradient if self.nesterov else m
        Q_g, Q_a = self.Q
        return Q_g @ (self.rotated(m, update) / (v.sqrt() + self.eps)) @ Q_a.T

    def rotated(self, gradient, seen):
        """A gradient in the basis; along the null spaces of all rows so far it is 0, without rounding."""
        found = self.Q[0].T @ gradient @ self.Q[1]
        if seen:
            found[:, : self.nulls[1]] = 0
            found[: self.nulls[0]] = 0
        return found


def spectral(V):
    """Muon's five iterations in float64."""
    x = (V.T if len(V) > V.shape[1] else V) / torch.linalg.matrix_norm(V)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return 0.2 * max(V.shape) ** 0.5 * (x.T if len(V) > V.shape[1] else x)


@pytest.mark.parametrize(
    ("sizes", "steps", "intervals", "keywords"),
    [  # n_a, n_g and the number of examples; steps; of factors and of bases
        ((512, 512, 64), 1, (1, 1), {}),
        ((512, 512, 64), 1, (1, 1), {"orthogonalize": True}),
        ((256, 384, 24), 3, (1, 1), {"orthogonalize": True, "nesterov": True}),
        ((384, 256, 24), 3, (100, 100), {}),
        ((5, 4, 12), 10, (1, 1), {}),
        ((5, 4, 12), 10, (1, 3), {"scale_decay": 0.8, "fallback_eps": 1e-6}),
        ((5, 4, 12), 10, (1, 100), {"nesterov": True}),
    ],
)
def test_steps_are_those_of_the_reference(sizes, steps, intervals, keywords):
    """In float32, the rounding of coordinates that are 0 is not scaled to the length of others."""
    torch.manual_seed(0)
    n_a, n_g, examples = sizes
    dtype, tolerance = (torch.float64, 1e-9) if n_a < 10 else (torch.float32, 2e-3)
    layer = nn.Linear(n_a, n_g, bias=False, dtype=dtype)
    options = {"scale_decay": 0.9, "factor_update_steps": intervals[0], "inv_update_steps": intervals[1], **keywords}
    opt = built(EKFAC, layer, lr=0.1, kl_clip=None, **ADAM, **options)
    reference = Restated(options["scale_decay"], options.get("fallback_eps", 1e-8), nesterov="nesterov" in keywords)
    for t in range(steps):
        x, g = torch.randn(examples, n_a, dtype=dtype), torch.randn(examples, n_g, dtype=dtype)
        opt.zero_grad()
        (layer(x) * g).sum(1).mean().backward()
        with opt.keep_directions() as kept:
            opt.step()
        expected = reference.direction(x, g, *(t % interval == 0 for interval in intervals))
        expected = spectral(expected) if "orthogonalize" in keywords else expected
        error = torch.linalg.matrix_norm(kept["weight"].double() - expected) / torch.linalg.matrix_norm(expected)
        assert error < tolerance, f"off by {error:.3g} at step {t}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_gradients_that_are_not_rounding_are_whitened(dtype):
    """Gradients of a later batch, a millionth as large, are in the null space of the first one, of 63 dimensions.

    Their steps have the same length as others, with one scale for the whole space.
    """
    torch.manual_seed(0)
    layer = nn.Linear(64, 8, bias=False).to(dtype)
    settings = {"factor_update_steps": 100, "inv_update_steps": 100, "eps": 1e-12}
    opt = built(EKFAC, layer, lr=0.1, scale_decay=0.0, kl_clip=None, **settings, **{**ADAM, "momentum": 0.0})
    first, second = torch.zeros(2, 64, dtype=dtype), torch.zeros(2, 64, dtype=dtype)
    first[:, :4], second[:, 4:] = 1.0, 1e-6
    for x in (first, second):
        opt.zero_grad()
        layer(x).sum(1).mean().backward()
        with opt.keep_directions() as kept:
            opt.step()
    sizes = (torch.linalg.vector_norm(kept["weight"][:, columns]) for columns in (slice(4), slice(4, None)))
    assert [float(size) for size in sizes] == [0.0, pytest.approx(63**0.5, rel=1e-3)]
