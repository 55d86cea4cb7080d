"""Factors and dense curvature of Linear layers against per-example autograd and against curvlinops.

Linear layers over positions, called twice, tied and partly frozen are in `tests/layers/test_layer_types.py`.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import kfac
from tests.support.grid import pairs
from tests.support.kfac import all_factors, assert_close, assert_factors, held_factors, labels, noise, one_step, twin
from tests.support.models import Tokens, mlp, seeded_build, vectors
from tests.support.oracles.curvlinops import curvlinops_blocks
from tests.support.oracles.kfac import example_rows, expected_factors, factors, kron, objective


@pairs(
    kind=["ce", "mse", "bce"],
    reduction=["mean", "sum"],
    approx=["expand", "reduce"],
    bias={"bias": True, "no bias": False},
)
def test_mlp_equals_definitions_and_curvlinops(kind, reduction, approx, bias):
    model, (x, y) = mlp((4, 5, 6, 3), bias=bias), vectors()
    loss = objective("mse" if kind == "bce" else kind, reduction, outputs=3)
    if kind != "ce":
        y = noise(6, 3, seed=3)
    if kind == "bce":
        loss, y = replace(loss, module=nn.BCEWithLogitsLoss(reduction=reduction)), (y > 0).double()
    plain = twin(model)
    theirs = curvlinops_blocks(plain, x, y, loss, approx)
    given = loss.loss_terms if reduction == "mean" else 7  # which is ignored for a sum
    opt = one_step(model, x, y, loss, approx=approx, loss_reduction=reduction, loss_terms=given)
    assert_factors(all_factors(opt, model), theirs)
    assert_factors(expected_factors(plain, x, y, loss, approx=approx, loss_terms=loss.loss_terms), theirs, 1e-11)
    for name, (A, B) in theirs.items():
        assert_close(opt.dense_curvature(name), kron(B, A), what=name)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_the_number_of_terms_undoes_a_mean_over_positions(approx):
    """Positions have an axis of their own, or are part of the batch axis of the layers."""
    x = noise(4, 5, 3)
    flat = nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Unflatten(0, (-1, 5)))
    for build, y, loss, terms in (
        (Tokens, labels(20, 3).view(4, 5), F.cross_entropy, 5),
        (lambda: flat, noise(4, 5, 2, seed=1), F.mse_loss, 10),
    ):
        model = seeded_build(build)
        expected = expected_factors(twin(model), x, y, loss, approx=approx, loss_terms=terms)
        opt = one_step(model, x, y, loss, approx=approx, loss_terms=terms)
        assert_factors(all_factors(opt, model), expected)
        for name, (A, B) in expected.items():
            assert_close(opt.dense_curvature(name), kron(B, A), what=f"dense block of {name!r}")


def test_a_frozen_layer_has_no_block():
    model, (x, y) = mlp((4, 5, 6, 3)), vectors()
    model[2].requires_grad_(False)
    plain = twin(model)
    opt = one_step(model, x, y, F.cross_entropy)
    for name, expected in expected_factors(plain, x, y, F.cross_entropy, names=["0", "4"]).items():
        assert_factors({name: held_factors(opt, model, name)}, {name: expected})
    assert "2" not in opt.blocks
    assert all(torch.equal(p, q) for p, q in zip(model[2].parameters(), plain[2].parameters(), strict=True))
    with pytest.raises((ValueError, KeyError), match="nonsense"):
        opt.dense_curvature("nonsense")


class SharedTable(nn.Module):
    """A linear layer applied to a constant [T, d] table that all examples share; takes its batch by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, 3))
        self.positions, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, *, tokens):
        self.shared = self.positions(self.table)
        return self.outer(torch.tanh(tokens + self.shared)).mean(1)


def test_an_input_shared_by_the_batch_counts_its_rows_once():
    """``expand`` divides A by the number of shared rows; B is N · Σ g°g°ᵀ over them."""
    model, x, y = seeded_build(SharedTable), noise(4, 5, 3), torch.tensor([0, 1, 2, 0])
    plain = twin(model)
    value = F.cross_entropy(plain(tokens=x), y)
    (g,) = torch.autograd.grad(value, plain.shared)
    rows = torch.cat([plain.table, torch.ones(5, 1, dtype=x.dtype)], 1)
    opt = kfac.plain_kfac(model)
    F.cross_entropy(model(tokens=x), y).backward()
    opt.step()
    A, B = held_factors(opt, model, "positions")
    assert_close(A, rows.T @ rows / 5)
    assert_close(B, 4 * g.T @ g)


def test_a_vector_without_batch_axis_is_one_example():
    model, x, y = mlp((4, 3)), noise(4), noise(3, seed=1)
    A, B = factors(example_rows(twin(model), ["0"], x, y, F.mse_loss, batched=False)["0"])
    assert_factors(all_factors(one_step(model, x, y, F.mse_loss), model), {"0": (A[0], B[0])})
