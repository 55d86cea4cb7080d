"""`nn.Embedding` and `nn.EmbeddingBag` against products with dense one-hot rows, which they are."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.kfac import assert_close, labels, noise, plain_kfac, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import solve_exact, solve_pi
from tests.support.oracles.layers import (
    Tape,
    block_state,
    check_block,
    diagonal_of,
    embedding,
    expected_pairs,
    follows_fallback,
    largest_tensor,
    row_of,
    rows_by_example,
    singles,
    step_of,
    train,
)

V, D, N, S = 7, 3, 5, 4
approximations = pytest.mark.parametrize("approx", ["expand", "reduce"])


def tokens(*shape: int, seed: int = 0, words: int = V) -> Tensor:
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


def natural(A: Tensor, B: Tensor) -> Tensor:
    """The block over the weight's own row-major order ``[V, D]``."""
    return torch.kron(A, B)


def in_order(pair: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    A, B = diagonal_of(pair[0]), pair[1]
    return (A, B), natural(A, B)


class Words(nn.Module):
    """A table, a nonlinearity, a mean over positions, a head."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D, **options), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)).flatten(1, -2).mean(1))

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        z = embedding(tape, "embedding", x, self.embedding.weight, self.embedding.padding_idx)
        return tape.linear("head", self.head, torch.tanh(z).flatten(1, -2).mean(1))


@approximations
@pytest.mark.parametrize("shape", [(N, S), (N, 2, 3), (N, 1)], ids=str)
def test_factors_are_those_of_one_hot_rows(shape, approx):
    model, x, y = seeded_build(Words), tokens(*shape), labels(N, 3)
    plain = twin(model)
    expected = expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy, approx)
    opt = plain_kfac(model, approx=approx)
    train(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "embedding", *in_order(expected["embedding"]))
    check_block(opt, "head", expected["head"])
    assert "fallback" not in opt.describe()


def test_one_index_per_example():
    class Single(Words):
        def forward(self, x):
            return self.head(torch.tanh(self.embedding(x)))

        def by_hand(self, tape, x):
            z = embedding(tape, "embedding", x, self.embedding.weight)
            return tape.linear("head", self.head, torch.tanh(z))

    model, x, y = seeded_build(Single), tokens(6), labels(6, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "embedding", *in_order(expected["embedding"]))


@pytest.mark.parametrize("padding_idx", [0, 2, -1])
def test_padding_is_no_row_of_either_factor(padding_idx):
    model, x, y = seeded_build(lambda: Words(padding_idx=padding_idx)), tokens(N, S), labels(N, 3)
    assert (x == padding_idx % V).any()
    plain = twin(model)
    expected = expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy)["embedding"]
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    assert expected[0][padding_idx % V, padding_idx % V] == 0
    check_block(opt, "embedding", *in_order(expected))


def test_more_padding_changes_nothing():
    """Two batches that differ in the number of padding positions only, with a loss summed over real tokens."""

    class Summed(Words):
        def forward(self, x):
            z = torch.tanh(self.embedding(x)) * (x != 0)[..., None]
            return self.head(z.sum(1))

    y, short = labels(N, 3), tokens(N, S).clamp(min=1)
    held = []
    for x in (short, F.pad(short, (0, 3)), F.pad(short, (2, 0))):
        model = seeded_build(lambda: Summed(padding_idx=0))
        opt = plain_kfac(model)
        train(opt, model, (x,), y, F.cross_entropy)
        held.append(opt.dense_curvature("embedding"))
    assert_close(held[1], held[0])
    assert_close(held[2], held[0])


def test_a_batch_of_nothing_but_padding_is_finite():
    model, y = seeded_build(lambda: Words(padding_idx=0)), labels(N, 3)
    opt = plain_kfac(model, lr=0.1)
    train(opt, model, (torch.zeros(N, S, dtype=torch.int64),), y, F.cross_entropy)
    train(opt, model, (tokens(N, S),), y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Positioned(nn.Module):
    """A position table looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(V, D), nn.Embedding(6, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.words(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(torch.tanh(z).mean(1))


@pytest.mark.parametrize("examples", [5, 4, 2, 1], ids=lambda n: f"{n} examples")
def test_a_position_index_shared_over_the_batch(examples):
    """One row set per forward: A is divided by the rows there are, B follows the rule of the captured gradients."""
    model, x, y = seeded_build(Positioned), tokens(examples, S), labels(examples, 3)
    plain = twin(model)
    z = plain.positions.weight[:S]
    shared = z.detach().clone().requires_grad_()
    output = plain.head(torch.tanh(plain.words(x) + shared).mean(1))
    (g,) = torch.autograd.grad(F.cross_entropy(output, y), shared)
    A = torch.diag(torch.tensor([1.0] * S + [0.0] * (6 - S), dtype=torch.float64) / S)
    B = examples * g.mT @ g
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "positions", (A, B), natural(A, B))


@pytest.mark.parametrize("expanded", [True, False], ids=["expanded", "batch of one"])
def test_a_position_index_with_a_batch_axis(expanded):
    class Axis(Positioned):
        def forward(self, x):
            index = torch.arange(x.shape[1])[None]
            z = self.words(x) + self.positions(index.expand(len(x), -1) if expanded else index)
            return self.head(torch.tanh(z).mean(1))

    model, x, y = seeded_build(Axis), tokens(N, S), labels(N, 3)
    plain = twin(model)
    shared = plain.positions.weight[:S].detach().repeat(N if expanded else 1, 1, 1).requires_grad_()
    output = plain.head(torch.tanh(plain.words(x) + shared).mean(1))
    (g,) = torch.autograd.grad(F.cross_entropy(output, y), shared)
    g = g.flatten(0, 1)
    A = torch.diag(torch.tensor([1.0] * S + [0.0] * (6 - S), dtype=torch.float64) / S)
    B = N * g.mT @ g
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "positions", (A, B), natural(A, B))


@pytest.mark.parametrize(
    ("keywords", "solve"),
    [
        ({"inverse_method": "eigen"}, solve_exact),
        ({"inverse_method": "eigen", "damping_split": "pi"}, solve_pi),
        ({"inverse_method": "cholesky"}, solve_pi),
    ],
    ids=["eigen", "eigen pi", "cholesky"],
)
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_direction_is_the_dense_solve(keywords, solve, padding_idx):
    model, x, y = seeded_build(lambda: Words(padding_idx=padding_idx)), tokens(N, S), labels(N, 3)
    A, B = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)["embedding"]
    opt = plain_kfac(model, damping=0.02, **keywords)
    F.cross_entropy(model(x), y).backward()
    ((gradient, moved),) = step_of(opt, [model.embedding.weight])
    assert_close(moved.mT, solve(B, diagonal_of(A), gradient.mT, 0.02), 1e-8)
    assert float((moved - gradient).abs().max()) > 1e-3


def test_the_average_gradient_is_that_of_the_rows():
    """Checks the definitions themselves: Σ g aᵀ over the rows is the weight's gradient."""
    model, x, y = seeded_build(lambda: Words(padding_idx=1)), tokens(N, S), labels(N, 3)
    rows = rows_by_example(model.by_hand, singles(x), y.split(1), F.cross_entropy)["embedding"]
    F.cross_entropy(model(x), y).backward()
    assert_close(rows.mean_gradient()[0].mT, model.embedding.weight.grad, 1e-12)


def test_micro_batches_and_a_second_call_of_the_table():
    class Twice(Words):
        def forward(self, x):
            return self.head(torch.tanh(self.embedding(x[:, :2]).mean(1) * self.embedding(x[:, 2:]).mean(1)))

        def by_hand(self, tape, x):
            left, right = (embedding(tape, "embedding", part, self.embedding.weight) for part in (x[:, :2], x[:, 2:]))
            return tape.linear("head", self.head, torch.tanh(left.mean(1) * right.mean(1)))

    model, x, y = seeded_build(Twice), tokens(6, S + 1), labels(6, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (F.cross_entropy(model(part), target) / 3).backward()
    opt.step()
    check_block(opt, "embedding", *in_order(expected["embedding"]))


# ---------------------------------------------------------------------------------------------------------------------
# Bags
# ---------------------------------------------------------------------------------------------------------------------


class Bags(nn.Module):
    """A bag per example beside a dense feature, a head."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(V, D, **options), nn.Linear(D, 3)

    def forward(self, feature: Tensor, *inputs: Tensor | None) -> Tensor:
        return self.head(torch.tanh(self.bag(*inputs) * feature))

    def by_hand(self, tape: Tape, feature: Tensor, indices: list[int], weights: list[float]) -> Tensor:
        kept = [(i, w) for i, w in zip(indices, weights, strict=True) if i != self.bag.padding_idx]
        row = torch.zeros(min(len(kept), 1), V, dtype=torch.float64)  # nothing to look up is no row, as is padding
        for i, w in kept:
            row[0, i] += w / (len(kept) if self.bag.mode == "mean" else 1)
        z = tape.product("bag", row, self.bag.weight.mT).sum(0, keepdim=True)
        return tape.linear("head", self.head, torch.tanh(z * feature))


BAGS = [[0, 3, 3], [5], [1, 2, 6, 1], [4, 2], [6, 6, 6]]


def bag_examples(bags: list[list[int]], weights: list[list[float]] | None = None) -> list[tuple]:
    features = noise(len(bags), 1).split(1)
    weights = [[1.0] * len(bag) for bag in bags] if weights is None else weights
    return list(zip(features, bags, weights, strict=True))


def flattened(bags: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0] + [len(bag) for bag in bags])
    return torch.tensor([i for bag in bags for i in bag]), lengths.cumsum(0)


def check_bags(model: Bags, inputs: tuple, examples: list[tuple], **keywords) -> None:
    y = labels(len(examples), 3)
    expected = expected_pairs(twin(model).by_hand, examples, y.split(1), F.cross_entropy)
    opt = plain_kfac(model, damping=0.02, **keywords)
    F.cross_entropy(model(noise(len(examples), 1), *inputs), y).backward()
    ((gradient, moved),) = step_of(opt, [model.bag.weight])
    A, B = diagonal_of(expected["bag"][0]), expected["bag"][1]
    check_block(opt, "bag", (A, B), natural(A, B))
    assert_close(moved.mT, solve_exact(B, A, gradient.mT, 0.02), 1e-8)
    assert "fallback" not in opt.describe()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_bags_of_equal_length(mode, padding_idx):
    model, x = seeded_build(lambda: Bags(mode=mode, padding_idx=padding_idx)), tokens(N, S, seed=3)
    assert (x == 3).any()
    check_bags(model, (x,), bag_examples(x.tolist()))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True], ids=["offsets", "with the last offset"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_bags_by_offsets(mode, last, padding_idx):
    model = seeded_build(lambda: Bags(mode=mode, include_last_offset=last, padding_idx=padding_idx))
    flat, offsets = flattened(BAGS)
    check_bags(model, (flat, offsets if last else offsets[:-1]), bag_examples(BAGS))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_an_empty_bag_is_no_row(mode):
    bags = [*BAGS[:2], [], *BAGS[2:]]
    flat, offsets = flattened(bags)
    check_bags(seeded_build(lambda: Bags(mode=mode)), (flat, offsets[:-1]), bag_examples(bags))


def test_bags_of_one_index_are_a_table_with_padding():
    class One(nn.Module):
        def __init__(self, kind: type[nn.Module]) -> None:
            super().__init__()
            self.table, self.head = kind(V, D, padding_idx=2), nn.Linear(D, 3)

        def forward(self, x):
            z = self.table(x.reshape(-1, 1) if isinstance(self.table, nn.EmbeddingBag) else x.flatten())
            return self.head(torch.tanh(z).unflatten(0, x.shape).mean(1))

    x, y, held = tokens(N, S), labels(N, 3), []
    assert (x == 2).any()
    for kind in (nn.Embedding, nn.EmbeddingBag):
        model = seeded_build(lambda kind=kind: One(kind))
        opt = plain_kfac(model)
        train(opt, model, (x,), y, F.cross_entropy)
        held.append(opt.dense_curvature("table"))
    assert_close(held[1], held[0])


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_weights_per_sample(padding_idx):
    flat, offsets = flattened(BAGS)
    weights = noise(len(flat), seed=7)
    parts = [part.tolist() for part in weights.split([len(bag) for bag in BAGS])]
    model = seeded_build(lambda: Bags(mode="sum", padding_idx=padding_idx))
    check_bags(model, (flat, offsets[:-1], weights), bag_examples(BAGS, parts))


def test_weights_per_sample_of_bags_of_equal_length():
    x, weights = tokens(N, S), noise(N, S, seed=7)
    check_bags(seeded_build(lambda: Bags(mode="sum")), (x, None, weights), bag_examples(x.tolist(), weights.tolist()))


def test_a_bag_called_with_keywords():
    class Named(Bags):
        def forward(self, feature, flat, offsets):
            return self.head(torch.tanh(self.bag(input=flat, offsets=offsets) * feature))

    flat, offsets = flattened(BAGS)
    check_bags(seeded_build(lambda: Named(mode="mean")), (flat, offsets[:-1]), bag_examples(BAGS))


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_large_vocabulary_makes_no_square_matrix_and_no_one_hot_rows(kind, method):
    words, width = 50_000, 4
    model = nn.Sequential(kind(words, width), nn.Flatten(), nn.LazyLinear(2))
    x, y = tokens(8, 16, words=words), labels(8, 2)
    model(x)
    opt = plain_kfac(model, inverse_method=method, momentum=0.0)
    with largest_tensor() as largest:
        train(opt, model, (x,), y, F.cross_entropy)
    state = block_state(opt, "0")
    assert state["factor_a"].shape == (words,)
    assert state["factor_g"].shape == (width, width)
    second = {"eigen": 2 * words + width + width**2, "cholesky": words + width**2}[method]
    held = {key: x.numel() for key, x in state.items() if isinstance(x, Tensor)}
    assert sum(held.values()) <= words + width**2 + second + 16
    assert largest.numel <= 2 * words * (width + 1)
    assert opt.memory_usage()["total"] < 4 * 12 * words


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


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (nn.Embedding, {"sparse": True}, "sparse"),
        (nn.Embedding, {"max_norm": 1.0}, "max_norm"),
        (nn.Embedding, {"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        (nn.EmbeddingBag, {"sparse": True}, "sparse"),
        (nn.EmbeddingBag, {"max_norm": 1.0}, "max_norm"),
        (nn.EmbeddingBag, {"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        (nn.EmbeddingBag, {"mode": "max"}, "max"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_refused_options_take_the_fallback_say_why_and_are_told_once(kind, options, reason):
    model, x, y = seeded_build(lambda: Refused(kind, **options)), tokens(N, S), labels(N, 3)
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
    assert len([w for w in told if "table.weight" in str(w.message)]) == 1
    assert any(reason in str(w.message) for w in told)


def test_a_table_without_a_trained_weight_has_no_block():
    model, x, y = seeded_build(Words), tokens(N, S), labels(N, 3)
    model.embedding.weight.requires_grad_(False)
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == {"head"}
    assert "frozen" in row_of(opt, "embedding.weight")
