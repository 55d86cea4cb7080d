"""Lookup tables: padding, positions that the whole batch shares, memory, and what has no block."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.kfac import assert_close, labels, plain_kfac, twin
from tests.support.layer_cases import Words, words
from tests.support.models import seeded_build
from tests.support.oracles.layers import (
    block_state,
    check_block,
    follows_fallback,
    largest_tensor,
    row_of,
    step_of,
    train,
)

V, D, N, S = 7, 3, 4, 4


def test_more_padding_changes_nothing():
    """Two batches that differ in the number of padding positions only, with a loss summed over real tokens."""

    class Summed(Words):
        def forward(self, x):
            z = torch.tanh(self.embedding(x)) * (x != 0)[..., None]
            return self.head(z.sum(1))

    y, short = labels(N, 3), words(N, S).clamp(min=1)
    held = []
    for x in (short, F.pad(short, (0, 3)), F.pad(short, (2, 0))):
        model = seeded_build(lambda: Summed(padding_idx=0))
        opt = plain_kfac(model)
        train(opt, model, (x,), y, F.cross_entropy)
        held.append(opt.dense_curvature("embedding"))
    assert_close(held[1], held[0])
    assert_close(held[2], held[0])


class Positioned(nn.Module):
    """A position table looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(V, D), nn.Embedding(6, D), nn.Linear(D, 3)

    def positions_of(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        z = self.words(x) + self.positions(self.positions_of(x))
        return self.head(torch.tanh(z).mean(1))


@pytest.mark.parametrize(("examples", "axis"), [(5, None), (4, None), (1, None), (4, "expanded"), (4, "one")])
def test_a_position_index_shared_over_the_batch(examples, axis):
    """One row set per forward: A is divided by the rows there are, B follows the rule of the captured gradients."""

    class Axis(Positioned):
        def positions_of(self, x):
            index = super().positions_of(x)
            return index if axis is None else index[None].expand(len(x) if axis == "expanded" else 1, -1)

    model, x, y = seeded_build(Axis), words(examples, S), labels(examples, 3)
    plain = twin(model)
    shared = plain.positions(plain.positions_of(x)).detach().requires_grad_()
    output = plain.head(torch.tanh(plain.words(x) + shared).mean(1))
    (g,) = torch.autograd.grad(F.cross_entropy(output, y), shared)
    g = g.reshape(-1, D)
    A = torch.diag(torch.tensor([1.0] * S + [0.0] * (6 - S), dtype=torch.float64) / S)
    B = examples * g.mT @ g
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "positions", (A, B), torch.kron(A, B))


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "method"), [(nn.Embedding, "eigen"), (nn.EmbeddingBag, "cholesky")])
def test_a_large_vocabulary_makes_no_square_matrix_and_no_one_hot_rows(kind, method):
    vocabulary, width = 50_000, 4
    model = nn.Sequential(kind(vocabulary, width), nn.Flatten(), nn.LazyLinear(2))
    x, y = torch.randint(vocabulary, (8, 16)), labels(8, 2)
    model(x)
    opt = plain_kfac(model, inverse_method=method, momentum=0.0)
    with largest_tensor() as largest:
        train(opt, model, (x,), y, F.cross_entropy)
    state = block_state(opt, "0")
    assert state["factor_a"].shape == (vocabulary,)
    assert state["factor_g"].shape == (width, width)
    second = {"eigen": 2 * vocabulary + width + width**2, "cholesky": vocabulary + width**2}[method]
    held = {key: x.numel() for key, x in state.items() if isinstance(x, Tensor)}
    assert sum(held.values()) <= vocabulary + width**2 + second + 16
    assert largest.numel <= 2 * vocabulary * (width + 1)
    assert opt.memory_usage()["total"] < 4 * 12 * vocabulary


# ---------------------------------------------------------------------------------------------------------------------
# What has no block
# ---------------------------------------------------------------------------------------------------------------------


class Refused(nn.Module):
    def __init__(self, kind: type[nn.Module], **options) -> None:
        super().__init__()
        self.table, self.head = kind(V, D, **options), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.table(x)
        return self.head(torch.tanh(z.mean(1) if z.ndim == 3 else z))


REFUSALS = [
    (nn.Embedding, {"sparse": True}, "sparse"),
    (nn.Embedding, {"max_norm": 1.0}, "max_norm"),
    (nn.Embedding, {"scale_grad_by_freq": True}, "scale_grad_by_freq"),
    (nn.EmbeddingBag, {"sparse": True}, "sparse"),
    (nn.EmbeddingBag, {"mode": "max"}, "max"),
    (nn.EmbeddingBag, {"max_norm": 1.0}, "max_norm"),
    (nn.EmbeddingBag, {"scale_grad_by_freq": True}, "scale_grad_by_freq"),
]


def test_refused_options_take_the_fallback_and_say_why_once():
    x, y = words(N, S), labels(N, 3)
    for kind, options, reason in REFUSALS:
        model = seeded_build(lambda kind=kind, options=options: Refused(kind, **options))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            opt = plain_kfac(model, lr=0.1)
            assert follows_fallback(opt, "table.weight", reason)
            assert "fallback" not in row_of(opt, "head.weight")
            F.cross_entropy(model(x), y).backward()
            ((gradient, moved),) = step_of(opt, [model.table.weight])
            train(opt, model, (x,), y, F.cross_entropy)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        assert_close(moved, 0.1 * gradient)
        (message,) = [str(w.message) for w in told if "table.weight" in str(w.message)]
        assert reason in message


def test_a_table_without_a_trained_weight_or_without_a_word_is_no_trouble():
    model, x, y = seeded_build(Words), words(N, S), labels(N, 3)
    model.embedding.weight.requires_grad_(False)
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == {"head"}
    assert "frozen" in row_of(opt, "embedding.weight")
    model = seeded_build(lambda: Words(padding_idx=0))
    opt = plain_kfac(model, lr=0.1)
    train(opt, model, (torch.zeros_like(x),), y, F.cross_entropy)  # nothing but padding
    train(opt, model, (x,), y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())
