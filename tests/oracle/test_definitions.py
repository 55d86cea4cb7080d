"""The oracle itself, checked against autograd and curvlinops, and the package where K-FAC is exact in theory.

The gradients of the empirical Fisher come from the residuals r = f − y, so the blocks of a linear network are *exactly*
Kronecker products if residuals are independent of the inputs. In the last test, they are independent by design: every
input is paired with every residual of a fixed set.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.grid import each
from tests.support.kfac import assert_close, assert_factors, backward, labels, noise, plain_kfac, train_step, twin
from tests.support.models import Tokens, seeded_build
from tests.support.networks import CONVS
from tests.support.oracles import kfac as oracle
from tests.support.oracles.curvlinops import curvlinops_blocks
from tests.support.oracles.kfac import Rows, example_rows, layer_gradient, objective, pi_factors, solve_pi


@each(
    dims=[1, 2, 3],
    mode=["zeros", "reflect", "replicate", "circular"],
    padding=[1, "same", "valid"],
    groups=[1, 2],
    dilation=[1, 2],
)
def test_rows_reproduce_the_gradient_of_every_convolution(dims, mode, padding, groups, dilation):
    """Σ g aᵀ = ∂ℓ/∂W is the identity that every adapter has to satisfy."""
    size = ((7,), (5, 4), (4, 3, 3))[dims - 1]
    kernel = ((3,), (3, 2), (2, 1, 2))[dims - 1]
    options = {"padding": padding, "groups": groups, "dilation": dilation, "padding_mode": mode}
    layer = seeded_build(lambda: CONVS[dims](2, 4, kernel, **options))
    x = noise(2, 2, *size)
    y = noise(*layer(x).shape, seed=1)
    backward(layer, x, y, F.mse_loss)
    rows = example_rows(layer, [""], x, y, F.mse_loss)[""]
    assert_close(rows.mean_gradient().flatten(0, 1), layer_gradient(layer), 1e-12)


def test_rows_reproduce_the_gradient_of_linear():
    for shape in ((5, 3), (4, 2, 3), (3, 2, 2, 3)):
        layer = seeded_build(lambda: nn.Linear(3, 2))
        x, y = noise(*shape), noise(*shape[:-1], 2, seed=1)
        backward(layer, x, y, F.mse_loss)
        rows = example_rows(layer, [""], x, y, F.mse_loss)[""]
        assert_close(rows.mean_gradient()[0], layer_gradient(layer), 1e-12)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_own_token_factors_are_those_of_curvlinops(approx):
    model, x, y = seeded_build(Tokens), noise(4, 5, 3), labels(20, 3).view(4, 5)
    own = oracle.expected_factors(model, x, y, nn.CrossEntropyLoss(), approx=approx, loss_terms=5)
    assert_factors(own, curvlinops_blocks(model, x, y, objective("ce", "mean", 3), approx), 1e-11)


def test_solves_undo_their_matrices():
    root_a, root_b, gradient = noise(3, 3), noise(2, 2, seed=1), noise(2, 3, seed=2)
    A, B = root_a @ root_a.T, root_b @ root_b.T
    V = oracle.solve_exact(B, A, gradient, 0.1)
    assert_close(B @ V @ A + 0.1 * V, gradient, 1e-12)
    B_damped, A_damped = pi_factors(B, A, 0.1)
    assert_close(B_damped @ solve_pi(B, A, gradient, 0.1) @ A_damped, gradient, 1e-12)


def summed_square(output: Tensor, target: Tensor) -> Tensor:
    """(1/N) Σ_n ‖f_n − y_n‖², summed over everything but the examples."""
    return ((output - target) ** 2).sum() / len(output)


def crossed(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Pair every input with the residuals √(J/2)·e_j, j = 1..J, J entries of one output."""
    with torch.no_grad():
        outputs = model(inputs)
    J = outputs[0].numel()
    residuals = math.sqrt(J / 2) * torch.eye(J, dtype=inputs.dtype).reshape(J, *outputs.shape[1:])
    x = inputs.repeat_interleave(J, 0)
    y = outputs.repeat_interleave(J, 0) - residuals.repeat(len(inputs), *[1] * (outputs.ndim - 1))
    return x, y


def empirical_block(rows: Rows) -> Tensor:
    """The exact block (1/N) Σ_n vec(∇ℓ_n) vec(∇ℓ_n)ᵀ, without any Kronecker approximation."""
    vectors = [rows.gradient(n).reshape(-1) for n in range(len(rows.a))]
    return sum(torch.outer(v, v) for v in vectors) / len(vectors)


class Shared(nn.Module):
    """A linear network that uses its weights at several positions; its output is per position or their mean."""

    def __init__(self, kind: str, read: str) -> None:
        super().__init__()
        self.kind, self.read = kind, read
        self.layer = nn.Conv2d(2, 3, 2) if kind == "convolution" else nn.Linear(3, 2)

    def forward(self, x):
        if self.kind == "calls":
            z = torch.stack([self.layer(x[:, s]) for s in range(x.shape[1])], 1)
        else:
            z = self.layer(x).flatten(2).mT if self.kind == "convolution" else self.layer(x)
        return z.mean(1) if self.read == "mean" else z


@pytest.mark.parametrize("kind", ["tokens", "convolution", "calls"])
@pytest.mark.parametrize(("approx", "read"), [("expand", "positions"), ("reduce", "mean")])
def test_weight_sharing_cases_that_are_exact(approx, read, kind):
    """Expand is exact with a loss term per position, reduce with positions averaged before the loss."""
    model = seeded_build(lambda: Shared(kind, read))
    x, y = crossed(model, noise(2, 2, 3, 3) if kind == "convolution" else noise(3, 5, 3))
    exact = empirical_block(example_rows(twin(model), ["layer"], x, y, summed_square)["layer"])
    opt = plain_kfac(model, approx=approx)
    train_step(opt, model, x, y, summed_square)
    assert_close(opt.dense_curvature("layer"), exact, 1e-9)
