"""Collectives on lists of tensors agree with sums and copies of the lists of all ranks.

Most tests use small integers, so that sums are exact in every dtype, including bfloat16, and in every order. Tests of
rounding use random numbers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from secondorder.comm import counter
from secondorder.comm.collectives import Collectives
from secondorder.comm.counter import Counter, Record
from tests.support.pool import device_of, everywhere, on_every_rank

# shape, dtype, symmetric
LIST: list[tuple[tuple[int, ...], torch.dtype, bool]] = [
    ((3, 4), torch.float32, False),
    ((5, 5), torch.float64, True),
    ((), torch.float32, False),
    ((2, 6, 6), torch.float32, True),
    ((0,), torch.float32, False),
    ((9,), torch.int64, False),
    ((4, 3), torch.bfloat16, False),
    ((40,), torch.float32, False),
    ((4, 2), torch.complex64, False),
    ((1, 1), torch.float32, True),
]
SYMMETRIC = [symmetric for *_, symmetric in LIST]
CAPACITIES = [1, 64, 25 * 2**20]
TRANSPOSED = 7  # the tensor that is made non-contiguous


def tensors_of(rank: int, salt: int = 0, moved: bool = False) -> list[Tensor]:
    """The list of a rank, which is the same on all ranks that ask for it."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    result = []
    for shape, dtype, symmetric in LIST:
        tensor = torch.randint(-20, 20, shape, generator=generator).to(dtype)
        tensor = tensor.tril() + tensor.tril(-1).mT if symmetric else tensor
        result.append(tensor.to(device_of(dist.get_rank())))
    result[TRANSPOSED] = result[TRANSPOSED].view(8, 5).t()
    if moved:  # dtypes that can only be copied
        result += [torch.arange(5, dtype=torch.int16, device=result[0].device) - rank, result[0] > 0]
    return result


def summed(lists: list[list[Tensor]]) -> list[Tensor]:
    return [sum(tensors[1:], tensors[0].clone()) for tensors in zip(*lists, strict=True)]


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for i, (tensor, other) in enumerate(zip(ours, expected, strict=True)):
        assert tensor.shape == other.shape, i
        assert tensor.dtype == other.dtype, i
        assert torch.equal(tensor, other), (i, tensor, other)


def collectives(capacity: int = 25 * 2**20, wire: torch.dtype | None = None) -> Collectives:
    return Collectives(bucket_bytes=capacity, wire_dtype=wire, device=device_of(dist.get_rank()))


WIRES = [None, torch.bfloat16]


def forms() -> Iterator[Collectives]:
    """Collectives of every capacity and wire dtype."""
    for capacity in CAPACITIES:
        for wire in WIRES:
            yield collectives(capacity, wire)


# ---------------------------------------------------------------------- sums
def all_reduces(rank: int, world: int) -> None:
    expected = summed([tensors_of(r) for r in range(world)])
    for comm in forms():
        for _ in range(2):  # the second call reuses buffers
            ours = tensors_of(rank)
            comm.all_reduce(ours, group=None, stage="s", symmetric=SYMMETRIC).wait()
            same(ours, expected)


def averages(rank: int, world: int) -> None:
    """Averages divide by the count, and ignore the wire dtype."""
    ours = [t for t in tensors_of(rank) if t.is_floating_point()]
    expected = summed([[t for t in tensors_of(r) if t.is_floating_point()] for r in range(world)])
    collectives(64, torch.bfloat16).average(ours, group=None, stage="s", count=4).wait()
    same(ours, [t / 4 for t in expected])


def roots_of(world: int) -> list[dict[int, int]]:
    """Salts of lists by root: all ranks in another order, a single root, and two roots."""
    return [{root: root for root in reversed(range(world))}, {world - 1: 7}, {0: 1, world - 1: 2}]


def reductions(rank: int, world: int) -> None:
    """The cases cover every form, and tensors only change on their root."""
    kinds = set()
    for roots in roots_of(world):
        for comm in forms():
            ours = {root: tensors_of(rank, salt) for root, salt in roots.items()}
            before = {root: [t.clone() for t in tensors] for root, tensors in ours.items()}
            comm.reduce(ours, group=None, stage="s", symmetric=dict.fromkeys(roots, SYMMETRIC)).wait()
            for root, salt in roots.items():
                sums = summed([tensors_of(r, salt) for r in range(world)])
                same(ours[root], sums if root == rank else before[root])
            kinds |= {record.kind for record in comm.counter.records}
    assert world not in (2, 4) or kinds == {"reduce_scatter", "all_to_all", "reduce"}


# ---------------------------------------------------------------------- copies
def broadcasts(rank: int, world: int) -> None:
    for roots in roots_of(world):
        for comm in forms():
            ours = {root: tensors_of(rank, salt, moved=True) for root, salt in roots.items()}
            flags = {root: [*SYMMETRIC, False, False] for root in roots}
            comm.broadcast(ours, group=None, stage="s", symmetric=flags).wait()
            for root, salt in roots.items():
                same(ours[root], tensors_of(root, salt, moved=True))


def gathers(rank: int, world: int) -> None:
    for capacity in CAPACITIES:
        comm = collectives(capacity, torch.bfloat16)
        stacks = comm.all_gather(tensors_of(rank, moved=True), group=None, stage="s").wait()
        lists = [tensors_of(r, moved=True) for r in range(world)]
        same(stacks, [torch.stack(tensors) for tensors in zip(*lists, strict=True)])
        for roots in roots_of(world):
            ours = {root: tensors_of(rank, salt, moved=True) for root, salt in roots.items()}
            result = comm.gather(ours, group=None, stage="s").wait()
            assert set(result) == {rank} & set(roots)
            for root, tensors in result.items():
                lists = [tensors_of(r, roots[root], moved=True) for r in range(world)]
                same(tensors, [torch.stack(tensors) for tensors in zip(*lists, strict=True)])


def unequal_parts(rank: int, world: int) -> None:
    dtypes = [torch.float32, torch.float64, torch.int16, torch.float32, torch.complex64]
    sizes = [[(3 * i + 5 * r) % 7 for r in range(world)] for i in range(len(dtypes))]
    sizes[3] = [0] * (world - 1) + [11]
    wholes = [torch.arange(sum(of)).to(dtype) + i for i, (of, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
    wholes = [whole.to(device_of(rank)) for whole in wholes]
    shards = [whole.split(of)[rank] for whole, of in zip(wholes, sizes, strict=True)]
    for capacity in CAPACITIES:
        same(collectives(capacity).gather_uneven(shards, sizes, group=None, stage="s").wait(), wholes)
    empty = [torch.empty(0)]
    comm = collectives()
    same(comm.gather_uneven(empty, [[0] * world], group=None, stage="s").wait(), empty)
    assert not comm.counter.records


def words(rank: int, world: int) -> None:
    comm = collectives()
    vector = torch.tensor([rank, 2**40 + rank, -rank])
    total = sum(range(world))
    for op, expected in {
        "sum": [total, world * 2**40 + total, -total],
        "max": [world - 1, 2**40 + world - 1, 0],
        "min": [0, 2**40, 1 - world],
    }.items():
        result = comm.words(vector, group=None, stage="w", op=op)
        assert result.tolist() == expected
        assert (result.dtype, result.device.type) == (torch.float64, "cpu")
    assert vector.tolist() == [rank, 2**40 + rank, -rank]
    assert comm.counter.bytes_by_stage() == ({"w": 3 * 24} if world > 1 else {})


def waits(rank: int, world: int) -> None:
    """A second wait changes nothing, and parameters remain parameters."""
    tensor = torch.ones(3)
    comm = collectives()
    work = comm.all_reduce([tensor, torch.ones(2)], group=None, stage="s")
    work.wait()
    tensor.zero_()
    work.wait()
    assert tensor.tolist() == [0.0] * 3
    stacks = comm.all_gather([tensor], group=None, stage="s")
    assert stacks.wait() is stacks.wait()
    parameter = torch.nn.Parameter(torch.ones(2))
    comm.all_reduce([parameter], group=None, stage="s").wait()
    comm.broadcast({0: [parameter, torch.nn.Parameter(torch.ones(1))]}, group=None, stage="s").wait()
    assert parameter.tolist() == [float(world)] * 2
    assert parameter.requires_grad


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_every_rank()
def test_lists_of_all_ranks_are_added_and_copied(rank: int, world: int) -> None:
    for kind in (all_reduces, averages, reductions, broadcasts, gathers, unequal_parts, words, waits):
        kind(rank, world)


# ---------------------------------------------------------------------- rounding, and equality between ranks
@pytest.mark.parametrize("wire", WIRES)
@on_every_rank(3)
def test_replicas_are_bitwise_equal_and_sums_are_accumulated_in_float32(
    rank: int, world: int, wire: torch.dtype | None
) -> None:
    """A sum on a root adds the rounded parts in the order of ranks, and is not rounded itself."""
    generator = torch.Generator().manual_seed(rank)
    comm = collectives(wire=wire)
    sums = [torch.randn(7, 7, generator=generator), torch.randn(5, generator=generator)]
    rows = [torch.randn(11, generator=generator) for _ in range(2)]
    own, copies = rows[0].clone(), [torch.randn(6, 6, generator=generator), torch.randn(3, generator=generator)]
    exact = [copies[1].clone()]
    comm.all_reduce(sums, group=None, stage="s", symmetric=[True, False]).wait()
    comm.reduce({0: rows[:1], 1: rows[1:]}, group=None, stage="s").wait()
    comm.broadcast({1: copies}, group=None, stage="s", symmetric={1: [True, False]}).wait()
    comm.broadcast({1: exact}, group=None, stage="s", exact=True).wait()
    for tensors in zip(*everywhere([*sums, *copies, *exact]), strict=True):
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    assert torch.equal(copies[0], copies[0].mT)
    assert torch.equal(copies[1], exact[0].to(wire or torch.float32).float())
    parts = [part.to(wire or torch.float32).float() for part in everywhere(own)]
    assert rank > 0 or wire is None or torch.equal(rows[0], parts[0] + parts[1] + parts[2])


@on_every_rank(4)
def test_few_roots_and_a_wire_dtype(rank: int, world: int) -> None:
    """Every rank adds parts of three elements, and sends the sums to the roots in float32, which 4 + 6/64 needs."""
    comm = collectives(wire=torch.bfloat16)
    ours = {1: [torch.full((9,), 1.0 + rank / 64)], 3: [torch.full((2,), 2.0)]}
    comm.reduce(ours, group=None, stage="s").wait()
    expected = {1: [4 + 6 / 64] * 9, 3: [8.0] * 2}
    if rank in ours:
        assert ours[rank][0].tolist() == expected[rank]
    assert comm.counter.records == [
        Record("s", "all_to_all", 4, 12, torch.bfloat16, 24),
        Record("s", "all_to_all", 4, 3, torch.float32, 12),
    ]


# ---------------------------------------------------------------------- groups, buffers, order
@on_every_rank(3)
def test_groups_do_not_share_buffers_in_flight(rank: int, world: int) -> None:
    """Two groups of equal size have calls in flight at once, and rank 1 is in both."""
    members = [[0, 1], [1, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    comm = collectives()
    pending = []
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            ours, copies = tensors_of(rank), tensors_of(rank, 3)
            roots = {root: tensors_of(rank, 5) for root in ranks}
            works = [
                comm.all_reduce(ours, group=group, stage="s", symmetric=SYMMETRIC),
                comm.broadcast({ranks[1]: copies}, group=group, stage="s"),
                comm.reduce(roots, group=group, stage="s"),
            ]
            gathered = comm.gather({ranks[1]: copies[:1]}, group=group, stage="s")
            pending.append((ranks, ours, copies, roots, works, gathered))
    for ranks, ours, copies, roots, works, gathered in reversed(pending):
        for work in reversed(works):
            work.wait()
        same(ours, summed([tensors_of(r) for r in ranks]))
        same(copies, tensors_of(ranks[1], 3))
        same(roots[rank], summed([tensors_of(r, 5) for r in ranks]))
        assert set(gathered.wait()) == {rank} & {ranks[1]}


@on_every_rank(2)
def test_buffers_are_bounded_and_reused(rank: int, world: int) -> None:
    comm = collectives(400)
    comm.all_reduce([torch.ones(30) for _ in range(200)], group=None, stage="s").wait()
    assert 0 < comm.nbytes <= 5 * 400
    for numel in (30, 7, 50):  # other layouts use the same buffers
        comm.all_reduce([torch.ones(numel) for _ in range(200)], group=None, stage="s").wait()
    last = comm.nbytes
    assert last <= 5 * 400
    big = torch.ones(1000)
    comm.all_reduce([big], group=None, stage="s").wait()  # works in place, without a buffer
    assert comm.nbytes == last
    assert big.tolist() == [2.0] * 1000
    comm.buffers.clear()
    assert comm.nbytes == 0


SEEN = [
    "all_reduce", "reduce", "broadcast", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
    "reduce_scatter_tensor", "all_to_all_single",
]  # fmt: skip


@on_every_rank(2)
def test_the_counter_agrees_with_calls_of_torch_distributed(rank: int, world: int) -> None:
    calls: list[str] = []

    def spy(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in SEEN:
            if hasattr(dist, name):
                patch.setattr(dist, name, spy(name, getattr(dist, name)))
        comm = collectives(64, torch.bfloat16)
        comm.all_reduce(tensors_of(rank), group=None, stage="a", symmetric=SYMMETRIC).wait()
        comm.reduce({r: tensors_of(rank) for r in range(world)}, group=None, stage="b").wait()
        comm.reduce({0: tensors_of(rank)}, group=None, stage="b", exact=True).wait()
        comm.broadcast({0: tensors_of(rank)}, group=None, stage="c").wait()
        comm.gather({0: tensors_of(rank)}, group=None, stage="d").wait()
        comm.all_gather(tensors_of(rank), group=None, stage="d").wait()
        comm.words(torch.ones(2), group=None, stage="e")
    assert list(comm.counter.bytes_by_stage()) == ["a", "b", "c", "d", "e"]
    names = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
    kinds = [record.kind for record in comm.counter.records]
    assert [names.get(call, call.removesuffix("_single")) for call in calls] == kinds
    assert everywhere(calls) == [calls] * world


@on_every_rank(3)
def test_payloads_by_hand(rank: int, world: int) -> None:
    comm = collectives()
    square, vector = torch.ones(10, 10), torch.ones(6)
    comm.all_reduce([square, vector], group=None, stage="s", symmetric=[True, False]).wait()
    comm.broadcast({0: [square, vector], 1: [vector]}, group=None, stage="s").wait()
    comm.all_gather([square, vector], group=None, stage="s").wait()
    comm.gather({0: [vector], 1: [square]}, group=None, stage="s").wait()
    comm.gather_uneven([torch.ones([4, 1, 2][rank])], [[4, 1, 2]], group=None, stage="s").wait()
    assert comm.counter.bytes_by_stage() == {"s": sum(r.nbytes for r in comm.counter.records)}
    assert [(r.kind, r.numel, r.nbytes) for r in comm.counter.records] == [
        ("all_reduce", 61, 244),
        ("broadcast", 106, 424),
        ("broadcast", 6, 24),
        ("all_gather", 318, 1272),
        ("all_to_all", 106, 424),
        ("all_gather", 12, 48),
    ]


@on_every_rank(3)
def test_form_of_a_reduction(rank: int, world: int) -> None:
    """It depends on the number of elements for each of three roots."""
    for numels, kind, sent in (
        ([100, 100, 91], "reduce_scatter", [300]),  # 3 % of padding
        ([90, 0, 60], "all_to_all", [150]),
        ([100, 10, 10], "reduce", [100, 10, 10]),  # otherwise the first would receive 300 elements instead of 120
    ):
        comm = collectives()
        comm.reduce({root: [torch.ones(n)] for root, n in enumerate(numels)}, group=None, stage="s").wait()
        assert comm.counter.records == [Record("s", kind, 3, n, torch.float32, 4 * n) for n in sent]


# ---------------------------------------------------------------------- counter
def test_bytes_by_stage_are_those_of_all_messages_and_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Counter()
    messages.add("a", "all_reduce", 4, 10, torch.float32)
    messages.add("b", "broadcast", 4, 10, torch.bfloat16)
    messages.add("a", "all_gather", 4, 5, torch.float64)
    assert messages.bytes_by_stage() == {"a": 80, "b": 20}
    assert [record.wire_bytes for record in messages.records] == [60.0, 20.0, 30.0]
    messages.clear()
    assert (messages.bytes_by_stage(), messages.records) == ({}, [])
    monkeypatch.setattr(counter, "MOST_RECORDS", 10)
    for i in range(100):
        messages.add("a", "reduce", 2, i, torch.uint8)
    assert 5 <= len(messages.records) <= 10
    assert messages.records[-1].numel == 99
    assert messages.bytes_by_stage() == {"a": sum(range(100))}
