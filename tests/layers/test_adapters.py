"""Adapters of lookup tables, normalization layers, transposed convolutions and the like, against autograd.

A parameter's gradient is linear in the output gradient, so that of one example is what autograd gives when the output
gradients of all other examples are set to zero. It is the oracle of every per-example result of an adapter.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder.capture.layers import conv
from secondorder.capture.layers.conv import ConvTransposeAdapter
from secondorder.capture.layers.embedding import EmbeddingAdapter, EmbeddingBagAdapter
from secondorder.capture.layers.norms import BatchNormAdapter, LayerNormAdapter
from secondorder.capture.layers.others import BilinearAdapter, StackedAdapter
from tests.support.grid import each, pairs
from tests.support.networks import TRANSPOSED

close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10, check_dtype=False)


# ------------------------------- Transposed convolutions; their factors under every option are in `test_layer_types.py`


def check_rows(adapter, module: nn.Module, args: tuple, examples: int, **kwargs) -> tuple[Tensor, ...]:
    """Σ g aᵀ of the rows is the gradient; returns the prepared input, the output gradient, and both kinds of rows."""
    y = module(*args, **kwargs)
    g, x = torch.randn_like(y), adapter.prepare(args, kwargs)
    a, rows = torch.cat(list(adapter.input_rows(x)), -2), adapter.output_rows(g, x, examples)
    matrix = adapter.to_matrix(*torch.autograd.grad(y, [module.weight, module.bias], g))
    close(rows.mT @ torch.cat([a, torch.ones_like(a[..., :1])], -1), matrix)
    return x, g, a, rows


@each(axes=[1, 2, 3], batched=[True, False], by_keyword=[True, False])
def test_transposed_convolution_with_an_output_size(axes, batched, by_keyword):
    module = TRANSPOSED[axes](2, 3, 3, stride=3, padding=1).double()
    adapter = ConvTransposeAdapter(module, True, True)
    x, size = torch.randn(2, 2, *[2, 3, 2][:axes], dtype=torch.float64), [6, 7, 5][:axes]  # the smallest is [4, 7, 4]
    x = x if batched else x[0]
    assert adapter.is_unbatched(adapter.prepare((x, size), {})) != batched
    args, kwargs = ((x,), {"output_size": size}) if by_keyword else ((x, size), {})
    check_rows(adapter, module, args, 2 if batched else 1, **kwargs)


def test_rows_of_many_examples_come_in_chunks_and_drawn_rows_belong_together():
    module = nn.ConvTranspose2d(8, 2, 5, stride=4).double()
    adapter, x = ConvTransposeAdapter(module, True, True), torch.randn(3, 8, 16, 20, dtype=torch.float64)
    assert len(list(adapter.input_rows(x))) > 1
    x, g, *rows = check_rows(adapter, module, (x.to(memory_format=torch.channels_last),), 3)
    *drawn, ratio = adapter.sample_rows(x, g, 2, 3, torch.Generator().manual_seed(0))
    pairs_of_rows, drawn = torch.cat(rows, -1), torch.cat(drawn, -1)
    equal = (drawn[:, None] == pairs_of_rows).all(-1)
    assert equal.any(1).all()
    assert equal.any(0).sum() == len(drawn) == 6  # different ones
    assert len(drawn) * ratio == pytest.approx(len(pairs_of_rows))


def test_rows_that_do_not_split_into_examples_are_refused_with_the_shape():
    for adapter, x in (
        (LayerNormAdapter(nn.LayerNorm(3), True, True), torch.ones(5, 3)),
        (BatchNormAdapter(nn.BatchNorm1d(3), True, True), torch.ones(5, 3)),
        (EmbeddingAdapter(nn.Embedding(9, 3), True), torch.ones(5, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"\(5, \d\) do not split into the 4 examples"):
            adapter.output_sums(torch.ones(5, 3), x, 4)


def check_table(adapter, module: nn.Module, args: tuple, rows: Tensor, owner: Tensor, **kwargs) -> None:
    """``rows`` ``[rows, V]`` are the dense input rows, ``owner`` ``[rows]`` the example of each."""
    y = module(*args, **kwargs)
    g, examples = torch.randn_like(y), int(owner.max()) + 1
    x = adapter.prepare(args, kwargs)
    flat, per_row = g.reshape(-1, module.embedding_dim), owner.view(*y.shape[:-1], 1)
    whole, *single = (
        torch.autograd.grad(y, module.weight, part, retain_graph=True)[0]
        for part in (g, *(g * (per_row == n) for n in range(examples)))
    )
    matrix = adapter.to_matrix(whole, None)
    assert matrix.shape == (adapter.n_g, adapter.n_a) == (module.embedding_dim, module.num_embeddings)
    found = adapter.output_rows(g, x, examples)
    close(found.mT @ rows, matrix)
    close(found, flat * rows.any(1, keepdim=True))  # rows that reach no weight are in no factor
    squares, count = adapter.input_squares(x)
    assert count == rows.any(1).sum()  # padding does not count
    close(squares, (rows.mT @ rows).diagonal())
    totals, positions = adapter.input_sums(x, examples)
    assert positions * examples == len(rows)
    close(totals, torch.stack([rows[owner == n].sum(0) for n in range(examples)]))
    expected = torch.stack([found[owner == n].sum(0) for n in range(examples)])
    close(adapter.output_sums(g, x, examples), expected)
    ordered = adapter.example_outputs(g, x, examples).flatten(0, 1)
    close(adapter.example_squares(x, ordered, examples), sum(one.square() for one in single).mT)
    ones = adapter.example_squares(x, torch.ones(len(rows), 1, dtype=torch.float64), examples)
    close(ones[0], totals.square().sum(0))
    assert torch.equal(adapter.from_matrix(matrix, module.weight)[0], whole)
    keep = torch.arange(len(rows)) % 3 != 1
    squares, _ = adapter.input_squares(adapter.masked(x, keep.view(y.shape[:-1])))
    close(squares, (rows * keep[:, None]).square().sum(0))


def test_a_batch_without_an_index_has_no_rows():
    module = nn.Embedding(4, 3).double()
    adapter, x = EmbeddingAdapter(module, True), torch.randint(4, (3, 0))
    assert not adapter.input_squares(x)[0].any()
    assert not adapter.output_rows(torch.ones(3, 0, 3), x, 3).any()


def test_embedding_with_positions_that_come_first_or_are_shared():
    module = nn.Embedding(4, 3, padding_idx=1).double()
    adapter = EmbeddingAdapter(module, True)
    x = torch.randint(4, (5, 3))
    rows = F.one_hot(x.reshape(-1), 4).double()
    rows[:, 1] = 0
    check_table(adapter, module, (x,), rows, torch.arange(3).repeat(5))
    x = adapter.prepare((torch.arange(4),), {})  # one lookup for all examples of the batch
    close(adapter.output_rows(torch.ones(4, 3), x, 3), torch.ones(4, 3) * (torch.arange(4) != 1)[:, None])
    for question in (adapter.indices, adapter.input_sums, lambda x, n: adapter.example_squares(x, torch.ones(4, 3), n)):
        with pytest.raises(ValueError, match="do not split into the 3 examples"):
            question(x, 3)


def dense_bags(module: nn.EmbeddingBag, bags: list[list[int]], weights: list[list[float]] | None) -> Tensor:
    rows = torch.zeros(len(bags), module.num_embeddings, dtype=torch.float64)
    for b, bag in enumerate(bags):
        kept = [(k, v) for k, v in enumerate(bag) if v != module.padding_idx]
        for k, v in kept:
            rows[b, v] += weights[b][k] if weights else 1.0 / len(kept) if module.mode == "mean" else 1.0
    return rows


RAGGED = [[], [1, 1, 3], [0], [], [2, 0, 0, 2, 1], []]
EVEN = [[1, 1, 3], [0, 2, 0], [0, 0, 0], [3, 2, 1]]


@pairs(
    mode=["sum", "mean", "weighted"],
    bags={"ragged": (RAGGED, False), "even": (EVEN, False), "rows": (EVEN, True), "empty": ([[], []], False)},
    padding_idx=[None, 0], include_last_offset=[False, True],
)  # fmt: skip
def test_embedding_bag(mode, padding_idx, bags, include_last_offset):
    (bags, two_axes), entries = bags, list(itertools.chain(*bags[0]))
    options = {"padding_idx": padding_idx, "include_last_offset": include_last_offset}
    module = nn.EmbeddingBag(4, 3, mode="sum" if mode == "weighted" else mode, **options).double()
    weights = [[0.5 + b + 2 * k for k in range(len(bag))] for b, bag in enumerate(bags)] if mode == "weighted" else None
    rows, flat = dense_bags(module, bags, weights), torch.tensor(entries, dtype=torch.int64)
    given = None if weights is None else torch.tensor(list(itertools.chain(*weights)), dtype=torch.float64)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, bags))][: None if include_last_offset else -1])
    if two_axes:
        flat, offsets = flat.view(len(bags), -1), None
        given = None if given is None else given.view(len(bags), -1)
    adapter = EmbeddingBagAdapter(module, True)
    for per_example in (1, 2):
        owner = torch.arange(len(bags)) // per_example
        check_table(adapter, module, (flat, offsets, given), rows, owner)
    check_table(adapter, module, (flat,), rows, owner, offsets=offsets, per_sample_weights=given)


@pytest.mark.parametrize("bags", [RAGGED, EVEN])
def test_examples_of_bags_are_picked_with_their_entries(bags):
    module = nn.EmbeddingBag(4, 3, mode="mean").double()
    adapter, rows = EmbeddingBagAdapter(module, True), dense_bags(module, bags, None)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, bags))][:-1])
    x = adapter.prepare((torch.tensor(list(itertools.chain(*bags))), offsets), {})
    g = torch.arange(len(bags))[:, None].expand(-1, 3) + 0.5
    examples = len(bags) // 2
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        picked, of_picked, kept, ratio = adapter.pick_examples(x, g, examples - 1, examples, generator)
        chosen = of_picked[:, 0].long()
        assert chosen.view(-1, 2).diff().eq(1).all()  # both bags of an example
        assert (kept, ratio) == (examples - 1, examples / (examples - 1))
        close(adapter.input_sums(picked, len(chosen))[0], rows[chosen])
        close(adapter.output_rows(of_picked, picked, kept), of_picked * rows[chosen].any(1, keepdim=True))


def test_positions_of_stacked_linears_come_first():
    adapter = StackedAdapter(2, 4, 3, True, True)
    with pytest.raises(ValueError, match="batch of 4"):
        adapter.example_inputs(torch.randn(4, 5, 2), 4)
    assert adapter.is_unbatched(torch.ones(2))


def test_sums_of_half_precision_are_not_rounded_to_it():
    for adapter, x, shape in (
        (LayerNormAdapter(nn.LayerNorm(2), False, True), None, (1, 257, 2)),
        (BatchNormAdapter(nn.BatchNorm2d(2), False, True), None, (1, 2, 257, 1)),
        (EmbeddingAdapter(nn.Embedding(2, 2), True), torch.zeros(1, 257, dtype=torch.int64), (1, 257, 2)),
        (BilinearAdapter(nn.Bilinear(1, 2, 2), False, True), None, (1, 257, 2)),
        (StackedAdapter(2, 1, 2, False, True), None, (257, 1, 2)),
    ):
        for dtype in (torch.bfloat16, torch.float16):
            sums = adapter.output_sums(torch.ones(shape, dtype=dtype), x, 1)
            assert sums.dtype == torch.float32
            assert set(sums.flatten().tolist()) == {257.0}  # bfloat16 has 8 bits


@pytest.mark.parametrize("kernel", [3, 5])
def test_sums_over_windows_of_an_image_with_a_bright_border(kernel: int) -> None:
    """Entries of the kernel that never cover the border keep all their digits."""
    adapter = conv.ConvAdapter(nn.Conv2d(2, 4, kernel, padding=kernel // 2), True, True)
    x = torch.randn(3, 2, 9, 8)
    x[..., 0], x[..., -1, :] = 1e4, 1e4
    found, count = adapter.input_sums(x, 3)
    wanted = F.unfold(x.double(), kernel, padding=kernel // 2).sum(-1)
    assert count == 72
    small = wanted.abs() < 1e3
    assert small.any()
    torch.testing.assert_close(found.double()[small], wanted[small], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-2)
