"""Routes between two shardings of a tensor: every entry arrives once, and ranks agree without communication."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secondorder.comm import layout
from secondorder.comm.layout import NOTHING, Layout, Route, Spans, layout_of, route


@st.composite
def cuts(draw: st.DrawFn, world: int, numel: int) -> Spans:
    """Spans that cover a tensor: pieces in any order, copies of pieces, or the whole tensor on some ranks."""
    parts = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    ends = sorted(draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1)))
    bounds = [0, *ends, numel]
    pieces = [(a, b) if a < b else NOTHING for a, b in zip(bounds, bounds[1:], strict=False)]
    if parts == 1:
        holders = draw(st.sets(st.integers(0, world - 1), min_size=1))
        return tuple((0, numel) if numel and r in holders else NOTHING for r in range(world))
    return tuple(pieces[k] for k in draw(st.permutations([r % parts for r in range(world)])))


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, Spans, Spans, tuple[tuple[int, ...], ...]]:
    world, numel = draw(st.integers(1, 6)), draw(st.integers(0, 12))
    near = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    mates = tuple(tuple(range(r - r % near, r - r % near + near)) for r in range(world))
    return numel, draw(cuts(world, numel)), draw(cuts(world, numel)), mates


def ways_of(have: Spans, want: Spans, mates: tuple[tuple[int, ...], ...]) -> list[Route]:
    return [route(have, want, mates, rank) for rank in range(len(have))]


@given(problems())
def test_every_wanted_entry_is_sent_and_received_once(
    problem: tuple[int, Spans, Spans, tuple[tuple[int, ...], ...]],
) -> None:
    numel, have, want, mates = problem
    whole = torch.arange(1, numel + 1)
    ways = ways_of(have, want, mates)
    for rank, way in enumerate(ways):
        first, last = want[rank]
        found = torch.zeros(last - first, dtype=torch.int64)
        for source, (start, stop) in [(rank, way.keeps), *way.takes]:
            held = have[source][0]
            found[start - first : stop - first] += whole[slice(*have[source])][start - held : stop - held]
        assert torch.equal(found, whole[first:last])
    given_away = {(r, to, span) for r, way in enumerate(ways) for to, span in way.gives}
    taken = {(of, r, span) for r, way in enumerate(ways) for of, span in way.takes}
    assert given_away == taken
    assert {way.travels for way in ways} == {sum(stop - start for _, _, (start, stop) in taken)}
    assert all(len(dict(way.gives)) == len(way.gives) for way in ways)


def test_ranks_of_the_same_copy_are_preferred_as_sources() -> None:
    """There are two copies of two pieces. Rank 3 needs both pieces, and receives the first one from its own copy."""
    have, want = ((0, 4), (4, 8), (0, 4), (4, 8)), (NOTHING, NOTHING, NOTHING, (0, 8))
    mates = ((0, 1), (0, 1), (2, 3), (2, 3))
    assert [way.gives for way in ways_of(have, want, mates)] == [(), (), ((3, (0, 4)),), ()]
    assert route(have, want, mates, 3).keeps == (4, 8)
    apart = tuple((r,) for r in range(4))
    assert [way.gives for way in ways_of(have, want, apart)] == [((3, (0, 4)),), (), (), ()]


def test_spans_that_overlap_or_leave_out_entries_are_refused() -> None:
    for first, match in ((5, "overlap"), (3, "ranks want")):
        with pytest.raises(ValueError, match=match):
            route(((0, first), (4, 8)), ((0, 8), NOTHING), ((0, 1), (0, 1)), 0)


def test_work_does_not_grow_with_the_number_of_pairs_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand pieces are sent to one rank, back, and to a thousand other pieces; counts comparisons of spans."""
    world, looks, original = 1024, [], layout._common
    monkeypatch.setattr(layout, "_common", lambda *spans: looks.append(spans) or original(*spans))
    pieces = tuple((r * 10, r * 10 + 10) for r in range(world))
    ends = [0, *accumulate([9] * (world - 1)), world * 10]
    others = tuple(zip(ends, ends[1:], strict=False))
    owner = tuple((0, world * 10) if r == 7 else NOTHING for r in range(world))
    everyone = (tuple(range(world)),) * world
    for have, want in ((pieces, owner), (owner, pieces), (pieces, others)):
        for rank in (0, 7, 1023):
            route(have, want, everyone, rank)
    assert 0 < len(looks) < 9 * 6 * world


def test_a_layout_counts_entries_with_the_sharded_dimension_first() -> None:
    x = torch.arange(24).view(2, 4, 3)
    cut = Layout(x.shape, 1, ((0, 12), (12, 24)), ((0, 1), (0, 1)), (True, True))
    flat = cut.flat(x)
    pieces = [cut.piece(flat[slice(*span)], rank) for rank, span in enumerate(cut.spans)]
    assert torch.equal(torch.cat(pieces, 1), x)
    assert torch.equal(cut.whole(flat), x)


def test_a_plain_tensor_is_whole_on_every_rank() -> None:
    for x in [torch.zeros(3, 4), torch.zeros(()), torch.zeros(0, 3)]:
        plain = layout_of(x, "weight", 3)
        assert plain.spans == ((0, x.numel()),) * 3
        assert plain.counts == (True, False, False)
        assert plain.piece(plain.flat(x), 0).shape == x.shape
