"""Packed triangles, lists that are split into messages, and buffers of messages."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secondorder.comm.buffers import Buffers, buckets, pack, packed_numel, reduce_kind, shared_buckets, unpack

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_packing_a_triangle_is_lossless(device: str) -> None:
    dtypes = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
    for (dtype, integers), n, batch in product(dtypes.items(), [0, 1, 2, 3, 4, 5, 8, 33], [(), (3,), (2, 3)]):
        matrix = torch.randn(*batch, n, n, dtype=dtype, device=device)
        matrix = matrix.tril() + matrix.tril(-1).mT
        if n > 1:
            matrix[..., 1, 0] = matrix[..., 0, 1] = -0.0
            matrix[..., -1, -1] = float("inf")
        packed = torch.full((packed_numel(matrix.shape, True),), float("nan"), dtype=dtype, device=device)
        pack(matrix, packed)
        result = torch.full_like(matrix, float("nan"))
        unpack(packed, result)
        assert torch.equal(result.view(integers), matrix.contiguous().view(integers)), (dtype, n, batch)


def test_the_lower_triangle_is_packed_and_dtypes_are_converted() -> None:
    matrix = torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 9.0], [4.0, 5.0, 6.0]])
    packed = torch.empty(6, dtype=torch.bfloat16)
    pack(matrix, packed)
    result = torch.empty(3, 3, dtype=torch.float64).t()
    unpack(packed, result)
    assert result.tolist() == [[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]]


# ---------------------------------------------------------------------- messages
def test_lists_are_split_at_the_capacity() -> None:
    assert buckets([5, 3, 20, 4, 0, 2, 9, 1], 10) == [[0, 1], [2], [3, 5], [6, 7]]
    assert buckets([], 10) == []
    assert buckets([0, 0], 10) == []
    assert buckets([10, 10], 10) == [[0], [1]]


@given(st.lists(st.integers(0, 30)), st.integers(1, 20))
def test_every_tensor_is_in_one_message(sizes: list[int], capacity: int) -> None:
    messages = buckets(sizes, capacity)
    assert sorted(i for message in messages for i in message) == [i for i, size in enumerate(sizes) if size]
    assert all(sum(sizes[i] for i in message) <= capacity or len(message) == 1 for message in messages)


@given(st.lists(st.lists(st.integers(0, 30)), min_size=1, max_size=4), st.integers(1, 50))
def test_every_tensor_of_every_root_is_in_one_message(sizes: list[list[int]], capacity: int) -> None:
    messages = shared_buckets(sizes, capacity)
    for rank, of in enumerate(sizes):
        assert sorted(i for message in messages for i in message[rank]) == [i for i, size in enumerate(of) if size]
    small = sum(size for of in sizes for size in of if size <= capacity)
    large = sum(size > capacity for of in sizes for size in of)
    assert len(messages) <= large + -(-small // capacity)


def test_messages_with_many_roots_stay_balanced() -> None:
    messages = shared_buckets([[10] * 12] * 4, 120)
    assert [[len(positions) for positions in message] for message in messages] == [[3] * 4] * 4


def test_form_of_a_reduction() -> None:
    for shares, kind, rounded in [
        ([10, 10], "reduce_scatter", "all_to_all"),
        ([100, 82], "reduce_scatter", "all_to_all"),  # padding to 200 adds 9.9 %
        ([100, 81], "all_to_all", "all_to_all"),  # padding would add 10.5 %
        ([100, 100, 0, 0], "all_to_all", "all_to_all"),
        ([100, 99, 0, 0], "reduce", "twice"),
        ([100, 0], "reduce", "all_to_all"),
        ([0, 0, 100], "reduce", "twice"),
    ]:
        assert (reduce_kind(shares), reduce_kind(shares, rounded=True)) == (kind, rounded)


# ---------------------------------------------------------------------- buffers
def test_a_buffer_in_use_is_not_lent_again() -> None:
    buffers, cpu = Buffers(), torch.device("cpu")
    group, other = object(), object()
    first = buffers.take(group, 10, torch.float32, cpu)
    second = buffers.take(group, 10, torch.float32, cpu)
    assert first.whole is not second.whole
    buffers.give(first)
    assert buffers.take(other, 10, torch.float32, cpu).whole is not first.whole
    assert buffers.take(group, 10, torch.float64, cpu).view.dtype == torch.float64
    again = buffers.take(group, 8, torch.float32, cpu)
    assert again.whole is first.whole
    assert again.view.shape == (8,)
    assert buffers.nbytes == 3 * 40 + 80


def test_a_larger_buffer_replaces_a_free_one() -> None:
    buffers, cpu = Buffers(), torch.device("cpu")
    for numel in (10, 30, 20):
        buffers.give(buffers.take(None, numel, torch.float32, cpu))
    assert buffers.nbytes == 120
    small, large = (buffers.take(None, numel, torch.float32, cpu) for numel in (5, 30))
    buffers.give(small)
    buffers.give(large)
    assert buffers.take(None, 20, torch.float32, cpu).whole.numel() == 30
    buffers.clear()
    assert buffers.nbytes == 120  # the lent buffer remains
