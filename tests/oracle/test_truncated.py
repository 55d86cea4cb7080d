"""Directions from leading eigenvectors solve the equations of truncated factors, as dense matrices in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secondorder import KFAC, InverseOptions
from secondorder.linalg.eigenpairs import leading_eigh
from tests.support.grid import pairs
from tests.support.oracles.ekfac import damped_power
from tests.support.oracles.kfac import layer_values, pi_factors

DAMPING, RANK = 0.3, 3


def factors_of(gradients, inputs, examples):
    """A and G from rows ``[rows, n]`` with the gradients of a mean over examples."""
    return inputs.T @ inputs / len(inputs), examples * gradients.T @ gradients


def truncated(matrix):
    """The matrix with all but its largest eigenvalues replaced by their mean, by a full eigendecomposition."""
    n = len(matrix)
    if n <= 2 * RANK:
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    values[:-RANK] = values[:-RANK].mean()
    return vectors @ values.diag() @ vectors.T


def solution(a, g, gradient, split, power, relative):
    """``(G̃ ⊗ Ã + λI)^(-p) vec(∇)``, or its factored form."""
    low_a, low_g = truncated(a), truncated(g)
    damping = DAMPING * float(a.trace() / len(a) * g.trace() / len(g)) if relative else DAMPING
    if split == "exact":
        return damped_power(torch.kron(low_g, low_a), damping, power, gradient)
    return damped_power(torch.kron(*pi_factors(low_g, low_a, damping)), 0.0, power, gradient)


def rows(shape):
    """Random rows with dominant leading directions, which the iteration finds up to rounding."""
    scales = torch.logspace(0, -12, shape[-1]).double()
    return torch.randn(*shape).double() * scales @ torch.linalg.qr(torch.randn(shape[-1], shape[-1]).double())[0]


def steps_of(layers, xs, weights, **keywords):
    """The changes of weights and biases as one matrix each, for the loss ``Σ weights · outputs / N``."""
    every = {"factor_update_steps": 1, "inv_update_steps": 1}
    model, before = nn.ModuleList(layers), [layer_values(layer) for layer in layers]
    optimizer = KFAC(model, lr=1.0, momentum=0.0, kl_clip=None, damping=DAMPING, **every, **keywords)
    (sum((layer(x) * w).sum() for layer, x, w in zip(layers, xs, weights, strict=True)) / len(xs[0])).backward()
    optimizer.step()
    return [old - layer_values(layer) for old, layer in zip(before, layers, strict=True)], optimizer


#: Both factors are wide, only that of the inputs, only that of the outputs, or neither.
SIZES = {"both": (11, 9), "inputs": (11, 4), "outputs": (4, 9), "neither": (3, 4)}
#: Options, and the split that they mean.
SPLITS = {
    "exact": ({"damping_split": "exact"}, "exact"),
    "pi": ({"damping_split": "pi"}, "pi"),
    "that of eigen": ({"method": "eigen"}, "exact"),
    "that of cholesky": ({"method": "cholesky"}, "pi"),
}


def is_supported(split, power, **_):
    return "cholesky" not in split[0].values() or power[0] == 1.0


@pairs(
    is_supported,
    sizes=SIZES,
    split=SPLITS,
    power={"inverse": (1.0, "absolute"), "root": (0.5, "relative")},
    layers=[1, 5],
)
def test_linear_layers(sizes, split, power, layers):
    """With four equal layers or more, one batched product gives the directions of all of them."""
    torch.manual_seed(0)
    (n_in, n_out), (own, meaning), (exponent, mode) = sizes, split, power
    nets = [nn.Linear(n_in, n_out).double() for _ in range(layers)]
    xs, weights = [rows((40, n_in)) for _ in nets], [rows((40, n_out)) for _ in nets]
    options = {"inverse_method": InverseOptions(rank=RANK, **own), "power": exponent, "damping_mode": mode}
    found, _ = steps_of(nets, xs, weights, **options)
    for step, x, w in zip(found, xs, weights, strict=True):
        inputs, gradients = torch.cat([x, torch.ones(40, 1).double()], 1), w / 40
        a, g = factors_of(gradients, inputs, 40)
        expected = solution(a, g, gradients.T @ inputs, meaning, exponent, mode == "relative")
        torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


def test_a_convolution_with_groups():
    torch.manual_seed(0)
    layer, x = nn.Conv2d(6, 16, 2, groups=2).double(), rows((5, 6, 3, 3))
    weights = rows((5, 2, 2, 16)).permute(0, 3, 1, 2)
    (found,), _ = steps_of([layer], [x], [weights], inverse_method=InverseOptions(rank=RANK))
    patches = F.unfold(x, 2).view(5, 2, 12, 4)
    for part in range(2):
        inputs = patches[:, part].transpose(1, 2).reshape(-1, 12)
        inputs = torch.cat([inputs, torch.ones(len(inputs), 1).double()], 1)
        own = weights[:, 8 * part : 8 * part + 8].flatten(2).transpose(1, 2).reshape(-1, 8) / 5
        a, g = factors_of(own, inputs, 5)
        expected = solution(a, g, own.T @ inputs, "exact", 1.0, False)
        torch.testing.assert_close(
            found[8 * part : 8 * part + 8], expected, rtol=1e-4, atol=1e-7 * float(expected.abs().max())
        )


def test_memory_and_flops_are_those_of_thin_bases():
    torch.manual_seed(0)
    xs, weights = [torch.randn(8, 40)], [torch.randn(8, 30)]
    _, optimizer = steps_of([nn.Linear(40, 30)], xs, weights, inverse_method=InverseOptions(rank=4))
    assert optimizer.memory_usage()["second_order"] == 4 * (4 * 41 + 4 * 30 + 5 + 5)
    stages = optimizer.plan(world_size=1, batch_size=8).ranks[0].flops
    assert 2 * 2 * 8 * 41 * 30 <= stages["precondition"] < 1.2 * 2 * 2 * 8 * 41 * 30
    assert stages["refresh"] == 2 * 4 * 12 * (41**2 + 30**2)
    assert "41 (4 kept), 30 (4 kept)" in optimizer.describe()


@pytest.mark.parametrize(("k", "n", "rank"), [(1, 30, 4), (3, 12, 5), (2, 9, 8)])
def test_leading_pairs_are_those_of_a_full_decomposition(k, n, rank):
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(k, n, n).double())[0]
    values = 10 ** -torch.arange(n).double()
    found, vectors, ok = leading_eigh(basis @ (values[:, None] * basis.mT), rank, True)
    assert ok.all()
    torch.testing.assert_close(found[:, 1:], values[:rank].flip(0).expand(k, -1), rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(found[:, 0], values[rank:].mean().expand(k), rtol=1e-6, atol=1e-14)
    products = (vectors.mT @ basis[..., :rank].flip(-1)).abs()
    torch.testing.assert_close(products, torch.eye(rank).double().expand(k, -1, -1), rtol=0, atol=1e-6)


def test_singular_matrices_and_one_that_is_not_finite():
    x = torch.zeros(3, 20, 20)
    x[1, 3, 3], x[2, 0, 0] = 2.0, torch.nan
    values, vectors, ok = leading_eigh(x, 4, False)
    assert ok.tolist() == [True, True, False]
    values, vectors, x = values[:2], vectors[:2], x[:2]
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(4).expand(2, -1, -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(values.sum(1) + 15 * values[:, 0], x.diagonal(dim1=1, dim2=2).sum(1))


def test_equal_matrices_give_equal_bits():
    torch.manual_seed(0)
    x = torch.randn(3, 40, 30)
    x = x.mT @ x
    first = leading_eigh(x, 5, True)
    torch.manual_seed(1)  # the global generator is not used
    for one, other in zip(first, leading_eigh(x, 5, True), strict=True):
        assert torch.equal(one, other)
