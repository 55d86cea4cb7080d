"""Directions from leading eigenvectors solve the equations of truncated factors, as dense matrices in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secondorder import KFAC, InverseOptions
from secondorder.linalg.eigenpairs import leading_eigh

DAMPING, RANK = 0.3, 3


def factors_of(gradients, inputs, examples):
    """A and G from rows ``[rows, n]`` with the gradients of a mean over examples."""
    return inputs.T @ inputs / len(inputs), examples * gradients.T @ gradients


def truncated(matrix, rank=RANK):
    """The matrix with all but its largest eigenvalues replaced by their mean, by a full eigendecomposition."""
    n = len(matrix)
    if n <= 2 * rank:
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    values[:-rank] = values[:-rank].mean()
    return vectors @ values.diag() @ vectors.T


def solution(a, g, gradient, split, power, relative):
    """``(G̃ ⊗ Ã + λI)^(-p) vec(∇)``, or its factored form."""
    low_a, low_g = truncated(a), truncated(g)
    mean = a.trace() / len(a) * g.trace() / len(g)
    damping = DAMPING * mean if relative else torch.tensor(DAMPING).double()
    if split == "exact":
        fisher = torch.kron(low_g, low_a) + damping * torch.eye(len(a) * len(g)).double()
    else:
        pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
        eye_a, eye_g = torch.eye(len(a)).double(), torch.eye(len(g)).double()
        fisher = torch.kron(low_g + damping.sqrt() / pi * eye_g, low_a + damping.sqrt() * pi * eye_a)
    values, vectors = torch.linalg.eigh(fisher)
    return (vectors @ (values**-power * (vectors.T @ gradient.flatten()))).view_as(gradient)


def rows(shape):
    """Random rows with dominant leading directions, which the iteration finds up to rounding."""
    scales = torch.logspace(0, -12, shape[-1]).double()
    return torch.randn(*shape).double() * scales @ torch.linalg.qr(torch.randn(shape[-1], shape[-1]).double())[0]


def step_of(model, x, weights, **keywords):
    """The change of the weight and the bias of a layer as one matrix, for the loss ``Σ weights · outputs / N``."""
    every = {"factor_update_steps": 1, "inv_update_steps": 1}
    optimizer = KFAC(model, lr=1.0, momentum=0.0, kl_clip=None, damping=DAMPING, **every, **keywords)
    before = torch.cat([model.weight.flatten(1), model.bias[:, None]], 1).detach().clone()
    ((model(x) * weights).sum() / len(x)).backward()
    optimizer.step()
    return before - torch.cat([model.weight.flatten(1), model.bias[:, None]], 1).detach(), optimizer


# Both factors are wide, only that of the inputs, or only that of the outputs.
@pytest.mark.parametrize(("n_in", "n_out"), [(11, 9), (11, 4), (4, 9)])
@pytest.mark.parametrize("split", ["exact", "pi"])
@pytest.mark.parametrize(("power", "mode"), [(1.0, "absolute"), (0.5, "relative")])
def test_a_linear_layer(n_in, n_out, split, power, mode):
    torch.manual_seed(0)
    model, x, weights = nn.Linear(n_in, n_out).double(), rows((40, n_in)), rows((40, n_out))
    options = {"inverse_method": InverseOptions(rank=RANK, damping_split=split), "power": power, "damping_mode": mode}
    found, _ = step_of(model, x, weights, **options)
    inputs, gradients = torch.cat([x, torch.ones(40, 1).double()], 1), weights / 40
    a, g = factors_of(gradients, inputs, 40)
    expected = solution(a, g, gradients.T @ inputs, split, power, mode == "relative")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


def test_a_convolution_with_groups():
    torch.manual_seed(0)
    model, x = nn.Conv2d(6, 16, 2, groups=2).double(), rows((5, 6, 3, 3))
    weights = rows((5, 2, 2, 16)).permute(0, 3, 1, 2)
    found, _ = step_of(model, x, weights, inverse_method=InverseOptions(rank=RANK))
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


@pytest.mark.parametrize(("n_in", "n_out"), [(11, 9), (11, 4), (4, 9)])
def test_equal_layers_that_precondition_together(n_in, n_out):
    """With four equal layers or more, one batched product gives the directions of all of them."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(n_in, n_out).double() for _ in range(5))
    xs, weights = [rows((40, n_in)) for _ in model], [rows((40, n_out)) for _ in model]
    options = {"lr": 1.0, "momentum": 0.0, "kl_clip": None, "damping": DAMPING}
    optimizer = KFAC(model, **options, inverse_method=InverseOptions(rank=RANK), factor_update_steps=1)
    before = [torch.cat([m.weight, m.bias[:, None]], 1).detach().clone() for m in model]
    (sum((m(x) * w).sum() for m, x, w in zip(model, xs, weights, strict=True)) / 40).backward()
    optimizer.step()
    for m, x, w, old in zip(model, xs, weights, before, strict=True):
        inputs = torch.cat([x, torch.ones(40, 1).double()], 1)
        gradient = (w / 40).T @ inputs
        expected = solution(*factors_of(w / 40, inputs, 40), gradient, "exact", 1.0, False)
        found = old - torch.cat([m.weight, m.bias[:, None]], 1).detach()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(("method", "split"), [("eigen", "exact"), ("cholesky", "pi")])
@pytest.mark.parametrize("narrow", [True, False])
def test_without_a_split_the_method_chooses_one_for_narrow_and_wide_layers(method, split, narrow):
    torch.manual_seed(0)
    n_in, n_out = (3, 4) if narrow else (11, 9)
    model, x, weights = nn.Linear(n_in, n_out).double(), rows((40, n_in)), rows((40, n_out))
    found, _ = step_of(model, x, weights, inverse_method=InverseOptions(method, rank=RANK))
    inputs, gradients = torch.cat([x, torch.ones(40, 1).double()], 1), weights / 40
    solved = solution(*factors_of(gradients, inputs, 40), gradients.T @ inputs, split, 1.0, False)
    torch.testing.assert_close(found, solved, rtol=1e-5, atol=1e-8 * float(solved.abs().max()))


def test_memory_and_flops_are_those_of_thin_bases():
    torch.manual_seed(0)
    model, x, weights = nn.Linear(40, 30), torch.randn(8, 40), torch.randn(8, 30)
    _, optimizer = step_of(model, x, weights, inverse_method=InverseOptions(rank=4))
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


@pytest.mark.parametrize("matrix", ["zeros", "one row"])
def test_singular_matrices(matrix):
    x = torch.zeros(1, 20, 20)
    if matrix == "one row":
        x[0, 3, 3] = 2.0
    values, vectors, ok = leading_eigh(x, 4, True)
    assert ok.all()
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(4)[None], rtol=0, atol=1e-5)
    torch.testing.assert_close(values.sum() - values[0, 0] + 16 * values[0, 0], x.diagonal(dim1=1, dim2=2).sum())


def test_equal_matrices_give_equal_bits():
    torch.manual_seed(0)
    x = torch.randn(3, 40, 30)
    x = x.mT @ x
    first = leading_eigh(x, 5, True)
    torch.manual_seed(1)  # the global generator is not used
    for one, other in zip(first, leading_eigh(x, 5, True), strict=True):
        assert torch.equal(one, other)


def test_a_matrix_that_is_not_finite_is_reported():
    x = torch.eye(20).repeat(2, 1, 1)
    x[1, 0, 0] = torch.nan
    assert leading_eigh(x, 4, False)[2].tolist() == [True, False]
