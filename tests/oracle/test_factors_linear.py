"""Factors and dense curvature of Linear layers against per-example autograd and against curvlinops."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.grid import pairs
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    held_factors,
    labels,
    noise,
    one_step,
    plain_kfac,
    twin,
)
from tests.support.models import Tokens, mlp, seeded_build, vectors
from tests.support.networks import Flattened, Sequence
from tests.support.oracles.kfac import Objective, example_rows, expected_factors, factors, kron, objective
from tests.support.oracles.trajectory import curvlinops_blocks, curvlinops_dense

BIAS = {"bias": True, "no bias": False}


def checked(model, x, y, loss, **keywords):
    """One step of KFAC on ``model``; its factors and dense blocks are those of the definitions."""
    approx, terms = keywords.get("approx", "expand"), keywords.get("loss_terms", 1)
    expected = expected_factors(twin(model), x, y, loss, approx=approx, loss_terms=terms)
    opt = one_step(model, x, y, loss, **keywords)
    assert_factors(all_factors(opt, model), expected)
    for name, (A, B) in expected.items():
        assert_close(opt.dense_curvature(name), kron(B, A), what=f"dense block of {name!r}")
    return opt


@pairs(kind=["ce", "mse"], reduction=["mean", "sum"], approx=["expand", "reduce"], bias=BIAS)
def test_mlp_equals_definitions_and_curvlinops(kind, reduction, approx, bias):
    model, (x, y) = mlp((4, 5, 6, 3), bias=bias), vectors()
    loss = objective(kind, reduction, outputs=3)
    y = y if loss.classes else noise(6, 3, seed=3)
    plain = twin(model)
    theirs = curvlinops_blocks(plain, x, y, loss, approx)
    dense = curvlinops_dense(twin(model), x, y, loss, approx)
    opt = checked(model, x, y, loss, approx=approx, loss_reduction=reduction, loss_terms=loss.loss_terms)
    assert_factors(expected_factors(plain, x, y, loss, approx=approx, loss_terms=loss.loss_terms), theirs, 1e-11)
    for name, block in dense.items():
        assert_close(opt.dense_curvature(name), block, what=name)


def test_bce_with_logits_equals_curvlinops():
    model, (x, _) = mlp(), vectors()
    y = torch.randint(2, (6, 3), generator=torch.Generator().manual_seed(2)).double()
    loss = Objective(nn.BCEWithLogitsLoss(), "mean", 3, False)
    theirs = curvlinops_blocks(twin(model), x, y, loss, "expand")
    assert_factors(all_factors(checked(model, x, y, loss, loss_terms=3), model), theirs)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_positions_of_any_leading_dimensions(approx):
    """Losses of every position, of which curvlinops knows those of one axis, and tokens in the batch axis."""
    for leading, bias in (((5,), True), ((2, 3), False)):
        model, x, y = seeded_build(lambda bias=bias: Tokens(bias=bias)), noise(4, *leading, 3), labels(24, 3)
        terms = len(x[0].flatten(0, -2))
        y = y[: 4 * terms].view(4, *leading)
        plain = twin(model)
        opt = checked(model, x, y, F.cross_entropy, approx=approx, loss_terms=terms)
        if len(leading) == 1:
            theirs = curvlinops_blocks(plain, x, y, objective("ce", "mean", 3), approx)
            assert_factors(all_factors(opt, model), theirs)
    checked(seeded_build(Flattened), noise(4, 5, 3), noise(4, 5, 2, seed=1), F.mse_loss, approx=approx, loss_terms=10)


def test_sequence_first_layout_expands_alike():
    """Examples come first outside, and second in front of the layers."""
    checked(seeded_build(lambda: Sequence(first=False)), noise(4, 5, 3), torch.tensor([0, 1, 2, 0]), F.cross_entropy)


def test_loss_terms_are_ignored_for_a_sum():
    """T undoes a mean over terms; a sum has none to undo."""
    found = []
    for terms in (1, 3):
        model, loss = mlp(), objective("mse", "sum", 3)
        opt = one_step(model, vectors()[0], noise(6, 3, seed=3), loss, loss_reduction="sum", loss_terms=terms)
        found.append(all_factors(opt, model))
    assert_factors(found[1], found[0], 1e-14)


@pytest.mark.parametrize(("frozen", "n_a"), [("bias", 4), ("weight", 1)])
def test_what_is_frozen_has_no_columns(frozen, n_a):
    model, (x, y) = mlp(), vectors()
    getattr(model[0], frozen).requires_grad_(False)
    before = getattr(model[0], frozen).detach().clone()
    opt = checked(model, x, y, F.cross_entropy)
    assert held_factors(opt, model, "0")[0].shape == (n_a, n_a)
    assert torch.equal(getattr(model[0], frozen), before)


def test_a_wholly_frozen_layer_has_no_block():
    model, (x, y) = mlp((4, 5, 6, 3)), vectors()
    model[2].requires_grad_(False)
    plain = twin(model)
    opt = one_step(model, x, y, F.cross_entropy)
    for name, expected in expected_factors(plain, x, y, F.cross_entropy, names=["0", "4"]).items():
        assert_factors({name: held_factors(opt, model, name)}, {name: expected})
    assert "2" not in opt.blocks
    assert all(torch.equal(p, q) for p, q in zip(model[2].parameters(), plain[2].parameters(), strict=True))


class SharedTable(nn.Module):
    """A linear layer applied to a constant [T, d] table that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, 3))
        self.positions, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        self.shared = self.positions(self.table)
        return self.outer(torch.tanh(x + self.shared)).mean(1)


def test_an_input_shared_by_the_batch_counts_its_rows_once():
    """``expand`` divides A by the rows there are; B keeps N · Σ g°g°ᵀ over the shared rows."""
    model, x, y = seeded_build(SharedTable), noise(4, 5, 3), torch.tensor([0, 1, 2, 0])
    plain = twin(model)
    value = F.cross_entropy(plain(x), y)
    (g,) = torch.autograd.grad(value, plain.shared)
    rows = torch.cat([plain.table, torch.ones(5, 1, dtype=x.dtype)], 1)
    A, B = held_factors(one_step(model, x, y, F.cross_entropy), model, "positions")
    assert_close(A, rows.T @ rows / 5)
    assert_close(B, 4 * g.T @ g)


def test_a_vector_without_batch_axis_is_one_example():
    model, x, y = mlp((4, 3)), noise(4), noise(3, seed=1)
    A, B = factors(example_rows(twin(model), ["0"], x, y, F.mse_loss, batched=False)["0"])
    assert_factors(all_factors(one_step(model, x, y, F.mse_loss), model), {"0": (A[0], B[0])})


class MeanOfTokens(nn.Module):
    """Takes its batch by keyword, or by position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, *args, tokens=None):
        return self.inner(tokens if tokens is not None else args[0]).mean(1)


def test_a_keyword_batch_is_counted_like_a_positional_one():
    model, x, y = seeded_build(MeanOfTokens), noise(4, 5, 3), noise(4, 3, seed=1)
    expected = expected_factors(twin(model), x, y, F.mse_loss)
    opt = plain_kfac(model)
    F.mse_loss(model(tokens=x), y).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def test_dense_curvature_of_an_unknown_name_is_refused():
    with pytest.raises((ValueError, KeyError), match="nonsense"):
        plain_kfac(mlp()).dense_curvature("nonsense")
