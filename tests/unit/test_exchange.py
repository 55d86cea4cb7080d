"""The messages that carry a layer's statistics and curvature, with a strategy that records them.

Tests on several ranks show only the cost of a message; here its contents are checked. Sums are over this rank alone.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from secondorder.capture.statistics.measurement import Estimate, Measured
from secondorder.comm.strategy import Local, Parcel, Pending
from secondorder.curvature.block import Block
from secondorder.curvature.schema import Entry, Place, Schema
from secondorder.parallel.exchange import StatisticsExchange

FACTOR = Entry(torch.empty(2, 2, device="meta"), "factors", Place.ESTIMATE, symmetric=True)
BASIS = Entry(torch.empty(2, 2, device="meta"), "bases", Place.MEASURED)
VALUES = Entry(torch.empty(2, device="meta"), "bases", Place.CURVATURE)
DAMPING = Entry(torch.empty((), device="meta"), "bases", Place.CURVATURE, known=True)
SUMS: Schema = {"factor": FACTOR}
STATE: Schema = {"factor": FACTOR, "basis": BASIS, "values": VALUES, "damping": DAMPING}


class Layer:
    """The attributes of a block that the exchange reads."""

    adapter = SimpleNamespace(row_groups=1)

    def __init__(self, index: int) -> None:
        self.index, self.name, self.owner = index, f"layer {index}", torch.nn.Parameter(torch.zeros(2))
        self.state = {key: torch.full(entry.like.shape, 1.0 + index) for key, entry in STATE.items()}

    def is_finite(self, measured: Measured) -> Tensor:
        return torch.stack([part.total.isfinite().all() for part in measured.parts.values()]).all()


class Recorder(Local):
    """One of several ranks, which records what it sends and has roles for some of the blocks."""

    def __init__(self, sources: int = 1, **roles: Sequence[int]) -> None:
        self.number = sources
        self.reduced: list[Parcel] = []
        self.shared: list[Parcel] = []
        self.spreads: list[Parcel] = []
        for role in ("captures", "estimates", "preconditions", "captures_elsewhere"):
            setattr(self, role, frozenset(roles.get(role, ())).__contains__)
        self.share_curvature, self.spread = self.shared.extend, self.spreads.extend  # type: ignore[method-assign]

    def sources(self, index: int) -> int:
        return self.number

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        self.reduced += parcels
        return Pending()


def layers(count: int) -> list[Block]:
    return [cast(Block, Layer(i)) for i in range(count)]


def measured(value: float) -> Measured:
    return Measured({"factor": Estimate(torch.full((2, 2), value), 0.5, 4.0)}, 4)


def sizes(parcels: Sequence[Parcel]) -> dict[int, list[tuple[int, ...]]]:
    return {parcel.index: [tuple(t.shape) for t in parcel.tensors] for parcel in parcels}


def schemas(blocks: Sequence[Block], schema: Schema) -> Mapping[Block, Schema]:
    return dict.fromkeys(blocks, schema)


@pytest.mark.parametrize(
    ("roles", "batch", "sent"),
    [
        ({"captures": [0]}, {0: 3.0}, {0: 3.0, 1: None}),  # nothing for a layer that only another rank captures
        ({"captures": [0, 1]}, {0: 3.0}, {0: 3.0, 1: 0.0}),  # zeros for a layer that was not used
        ({"captures": [], "sources": 2}, {}, {0: 0.0, 1: 0.0}),  # all ranks take part in a sum over several
    ],
)
def test_ranks_send_statistics_of_layers_that_they_capture(roles: Any, batch: Any, sent: Any) -> None:
    comm = Recorder(preconditions=[], **roles)
    StatisticsExchange(comm).post(schemas(layers(2), SUMS), {i: measured(x) for i, x in batch.items()}, [])
    assert sizes(comm.reduced) == {i: [] if mean is None else [(2, 2)] for i, mean in sent.items()}
    for parcel in comm.reduced:
        assert parcel.symmetric == (True,) * len(parcel.tensors)
        assert all(t.unique().tolist() == [sent[parcel.index] * 0.5 * 4] for t in parcel.tensors)


def test_sums_become_means_on_the_rank_of_the_estimate_and_words_are_added() -> None:
    comm, blocks = Recorder(captures=[0, 1], estimates=[0], preconditions=[]), layers(2)
    batch = {0: measured(3.0), 1: measured(5.0)}
    found, words = StatisticsExchange(comm).combine(schemas(blocks, SUMS), batch, [7.0, 8.0])
    assert found[0].parts["factor"].total.unique().tolist() == [1.5]
    assert not found[1].parts
    assert [own.examples for own in found.values()] == [4, 4]
    assert words.tolist() == [7.0, 8.0]


def test_a_batch_that_is_not_finite_is_sent_as_zeros_and_counted() -> None:
    comm, blocks = Recorder(captures=[0, 1], estimates=[0, 1], preconditions=[]), layers(2)
    exchange = StatisticsExchange(comm)
    found, _ = exchange.combine(schemas(blocks, SUMS), {0: measured(torch.nan), 1: measured(5.0)}, [])
    assert comm.reduced[0].tensors[0].unique().tolist() == [0.0]
    assert exchange.skipped == {"layer 0": 1}
    assert found.keys() == {1}


def test_ranks_share_curvature_only_of_layers_that_they_precondition() -> None:
    comm, blocks = Recorder(captures=[0, 1], preconditions=[1]), layers(2)
    StatisticsExchange(comm).share(schemas(blocks, STATE))
    (parcel,) = comm.shared
    assert parcel.index == 1
    assert {id(t) for t in parcel.tensors} == {id(blocks[1].state["basis"]), id(blocks[1].state["values"])}
    assert comm.spreads == []


def test_bases_go_to_all_ranks_that_capture_the_layer() -> None:
    comm, blocks = Recorder(captures=[0, 1], preconditions=[1], captures_elsewhere=[0, 1]), layers(2)
    exchange = StatisticsExchange(comm)
    exchange.share(schemas(blocks, STATE))
    assert sizes(comm.shared) == {1: [(2,)]}
    assert sizes(comm.spreads) == {0: [(2, 2)], 1: [(2, 2)]}


def test_bases_that_were_not_sent_to_all_ranks_go_to_those_that_precondition() -> None:
    comm, (block,) = Recorder(captures=[0], preconditions=[0], captures_elsewhere=[0]), layers(1)
    exchange = StatisticsExchange(comm)
    exchange.unsent = {"layer 0"}
    exchange.share({block: STATE})
    assert sizes(comm.shared) == {0: [(2, 2), (2,)]}
    assert comm.spreads == []
