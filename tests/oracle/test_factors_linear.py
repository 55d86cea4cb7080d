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
    noise,
    one_step,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import Tokens, mlp, seeded_build, vectors
from tests.support.networks import Flattened, Sequence
from tests.support.oracles.kfac import Objective, example_rows, expected_factors, factors, kron, objective
from tests.support.oracles.trajectory import curvlinops_blocks, curvlinops_dense

BIAS = {"bias": True, "no bias": False}


def checked(model, x, y, loss, tolerance=1e-9, **keywords):
    """One step of KFAC on ``model``; its factors and dense blocks are those of the definitions."""
    plain = twin(model)
    approx, terms = keywords.get("approx", "expand"), keywords.get("loss_terms", 1)
    expected = expected_factors(plain, x, y, loss, approx=approx, loss_terms=terms)
    opt = one_step(model, x, y, loss, **keywords)
    assert_factors(all_factors(opt, model), expected, tolerance)
    for name, (A, B) in expected.items():
        assert_close(opt.dense_curvature(name), kron(B, A), tolerance, f"dense block of {name!r}")
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


@pairs(leading={"3-D": (5,), "4-D": (2, 3)}, read=["positions", "mean"], approx=["expand", "reduce"], bias=BIAS)
def test_any_leading_dimensions(leading, read, approx, bias):
    model = seeded_build(lambda: Tokens(read=read, bias=bias))
    x = noise(4, *leading, 3)
    shape = (4,) if read == "mean" else (4, *leading)
    y = torch.randint(3, shape, generator=torch.Generator().manual_seed(0))
    terms = 1 if read == "mean" else int(torch.tensor(leading).prod())
    checked(model, x, y, F.cross_entropy, approx=approx, loss_terms=terms)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_token_mean_cross_entropy_equals_curvlinops(approx):
    model = seeded_build(Tokens)
    x, y = noise(4, 5, 3), torch.randint(3, (4, 5), generator=torch.Generator().manual_seed(0))
    theirs = curvlinops_blocks(twin(model), x, y, objective("ce", "mean", 3), approx)
    opt = one_step(model, x, y, F.cross_entropy, approx=approx, loss_terms=5)
    assert_factors(all_factors(opt, model), theirs)


def test_loss_terms_are_ignored_for_a_sum():
    """T undoes a mean over terms; a sum has none to undo."""
    x, target = vectors()[0], noise(6, 3, seed=3)
    loss = objective("mse", "sum", 3)
    one, three = mlp(), mlp()
    opt_one = one_step(one, x, target, loss, loss_reduction="sum", loss_terms=1)
    opt_three = one_step(three, x, target, loss, loss_reduction="sum", loss_terms=3)
    assert_factors(all_factors(opt_three, three), all_factors(opt_one, one), 1e-14)


def test_bce_with_logits_equals_curvlinops():
    model, (x, _) = mlp(), vectors()
    y = torch.randint(2, (6, 3), generator=torch.Generator().manual_seed(2)).double()
    loss = Objective(nn.BCEWithLogitsLoss(), "mean", 3, False)
    theirs = curvlinops_blocks(twin(model), x, y, loss, "expand")
    opt = checked(model, x, y, loss, loss_terms=3)
    assert_factors(all_factors(opt, model), theirs)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_tokens_flattened_into_the_batch_axis_are_positions(approx):
    checked(seeded_build(Flattened), noise(4, 5, 3), noise(4, 5, 2, seed=1), F.mse_loss, approx=approx, loss_terms=10)


def test_sequence_first_layout_expands_alike():
    """Examples come first outside, and second in front of the layers."""
    checked(seeded_build(lambda: Sequence(first=False)), noise(4, 5, 3), torch.tensor([0, 1, 2, 0]), F.cross_entropy)


@pytest.mark.parametrize(("frozen", "n_a"), [("bias", 4), ("weight", 1)])
def test_what_is_frozen_has_no_columns(frozen, n_a):
    model, (x, y) = mlp(), vectors()
    getattr(model[0], frozen).requires_grad_(False)
    before = getattr(model[0], frozen).detach().clone()
    opt = checked(model, x, y, F.cross_entropy)
    A = held_factors(opt, model, "0")[0]
    assert A.shape == (n_a, n_a)
    assert frozen == "bias" or A.item() == 1
    assert torch.equal(getattr(model[0], frozen), before)


class SharedTable(nn.Module):
    """A linear layer applied to a constant [T, d] table that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, 3))
        self.positions, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.outer(torch.tanh(x + self.positions(self.table))).mean(1)


def test_an_input_shared_by_the_batch_counts_its_rows_once():
    """``expand divides A by the rows there are``; B keeps N · Σ g°g°ᵀ over the shared rows."""
    model, x, y = seeded_build(SharedTable), noise(4, 5, 3), torch.tensor([0, 1, 2, 0])
    plain = twin(model)
    seen = []

    def keep(module, args, output):
        output.retain_grad()
        seen.append((args[0], output))

    plain.positions.register_forward_hook(keep)
    F.cross_entropy(plain(x), y).backward()
    table, out = seen[0]
    rows = torch.cat([table, torch.ones(5, 1, dtype=table.dtype)], 1)
    opt = one_step(model, x, y, F.cross_entropy)
    A, B = held_factors(opt, model, "positions")
    assert_close(A, rows.T @ rows / 5)
    assert_close(B, 4 * out.grad.T @ out.grad)


def test_a_vector_without_batch_axis_is_one_example():
    model, x, y = mlp((4, 3)), noise(4), noise(3, seed=1)
    plain = twin(model)
    A, B = factors(example_rows(plain, ["0"], x, y, F.mse_loss, batched=False)["0"])
    opt = one_step(model, x, y, F.mse_loss)
    assert_factors(all_factors(opt, model), {"0": (A[0], B[0])})


class MeanOfTokens(nn.Module):
    """Takes its batch by keyword only, or by position."""

    def __init__(self, inner: nn.Module, keyword: bool) -> None:
        super().__init__()
        self.inner, self.keyword = inner, keyword

    def forward(self, *args, tokens=None):
        assert self.keyword == (not args)
        return self.inner(tokens if self.keyword else args[0]).mean(1)


def test_a_keyword_batch_is_counted_like_a_positional_one():
    layer, x, y = seeded_build(lambda: nn.Linear(3, 3)), noise(4, 5, 3), noise(4, 3, seed=1)
    model = MeanOfTokens(layer, keyword=True)
    expected = expected_factors(MeanOfTokens(twin(layer), keyword=False), x, y, F.mse_loss)
    opt = plain_kfac(model)
    F.mse_loss(model(tokens=x), y).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def test_a_submodule_called_without_its_root_counts_its_own_rows():
    model, (x, y) = mlp(), vectors()
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = plain_kfac(model)
    hidden = x
    for layer in model:
        hidden = layer(hidden)
    F.cross_entropy(hidden, y).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def test_a_wholly_frozen_layer_has_no_block():
    model, (x, y) = mlp((4, 5, 6, 3)), vectors()
    model[2].requires_grad_(False)
    before = [p.detach().clone() for p in model[2].parameters()]
    expected = expected_factors(twin(model), x, y, F.cross_entropy, names=["0", "4"])
    opt = plain_kfac(model)
    train_step(opt, model, x, y, F.cross_entropy)
    held = {name: held_factors(opt, model, name) for name in ("0", "4")}
    assert_factors(held, expected)
    assert "2" not in opt.blocks
    assert all(torch.equal(p, q) for p, q in zip(model[2].parameters(), before, strict=True))


def test_dense_curvature_of_an_unknown_name_is_refused():
    model = mlp()
    opt = plain_kfac(model)
    with pytest.raises((ValueError, KeyError), match="nonsense"):
        opt.dense_curvature("nonsense")
