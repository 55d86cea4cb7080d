"""The oracle itself, checked against autograd, torch's own unfold and curvlinops."""

import pytest
import torch.nn.functional as F
from torch import nn

from tests.support.grid import each
from tests.support.kfac import assert_close, assert_factors, backward, labels, noise
from tests.support.models import Tokens, seeded_build
from tests.support.networks import CONVS
from tests.support.oracles import kfac as oracle
from tests.support.oracles.kfac import example_rows, layer_gradient, objective, pi_factors, solve_pi
from tests.support.oracles.trajectory import curvlinops_blocks


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
