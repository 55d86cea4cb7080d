"""What a layer's statistics and curvature are sent as, seen by a strategy that records its messages.

Several ranks find out only what a message costs; here it shows what is in it. All sums are over this rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

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
    """What the exchange reads of a block."""

    count_size = 1

    def __init__(self, index: int) -> None:
        self.index, self.name, self.owner = index, f"layer {index}", torch.nn.Parameter(torch.zeros(2))
        self.state = {key: torch.full(entry.like.shape, 1.0 + index) for key, entry in STATE.items()}

    def is_finite(self, measured: Measured) -> Tensor:
        return torch.stack([part.total.isfinite().all() for part in measured.parts.values()]).all()


class Recorder(Local):
    """One of several ranks: it lists what it sends, and which roles it has for which of the blocks."""

    def __init__(self, sources: int = 1, **roles: Sequence[int]) -> None:
        self.number, self.roles = sources, roles
        self.reduced: list[Parcel] = []
        self.shared: list[Parcel] = []
        self.spreads: list[Parcel] = []

    def captures(self, index: int) -> bool:
        return index in self.roles["captures"]

    def estimates(self, index: int) -> bool:
        return index in self.roles.get("estimates", ())

    def preconditions(self, index: int) -> bool:
        return index in self.roles["preconditions"]

    def captures_elsewhere(self, index: int) -> bool:
        return index in self.roles.get("elsewhere", ())

    def sources(self, index: int) -> int:
        return self.number

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        self.reduced += parcels
        return Pending()

    def share_curvature(self, parcels: Sequence[Parcel]) -> None:
        self.shared += parcels

    def spread(self, parcels: Sequence[Parcel]) -> None:
        self.spreads += parcels


def layers(count: int) -> list[Block]:
    return [cast(Block, Layer(i)) for i in range(count)]


def measured(value: float) -> Measured:
    return Measured({"factor": Estimate(torch.full((2, 2), value), 0.5, 4.0)}, 4)


def sizes(parcels: Sequence[Parcel]) -> dict[int, list[tuple[int, ...]]]:
    return {parcel.index: [tuple(t.shape) for t in parcel.tensors] for parcel in parcels}


def schemas(blocks: Sequence[Block], schema: Schema) -> Mapping[Block, Schema]:
    return dict.fromkeys(blocks, schema)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------
def test_nothing_travels_of_a_layer_that_another_rank_alone_captures() -> None:
    comm, blocks = Recorder(captures=[0], preconditions=[]), layers(2)
    StatisticsExchange(comm).post(schemas(blocks, SUMS), {0: measured(3.0)}, [])
    assert sizes(comm.reduced) == {0: [(2, 2)], 1: []}
    assert [parcel.symmetric for parcel in comm.reduced] == [(True,), ()]


def test_a_rank_that_has_not_seen_a_layer_that_it_captures_sends_zeros() -> None:
    comm, blocks = Recorder(captures=[0, 1], preconditions=[]), layers(2)
    StatisticsExchange(comm).post(schemas(blocks, SUMS), {0: measured(3.0)}, [])
    assert sizes(comm.reduced) == {0: [(2, 2)], 1: [(2, 2)]}
    assert comm.reduced[0].tensors[0].unique().tolist() == [3.0 * 0.5 * 4]
    assert comm.reduced[1].tensors[0].unique().tolist() == [0.0]


def test_ranks_that_do_not_capture_take_part_in_a_sum_over_several() -> None:
    comm, blocks = Recorder(sources=2, captures=[], preconditions=[]), layers(1)
    StatisticsExchange(comm).post(schemas(blocks, SUMS), {}, [])
    assert sizes(comm.reduced) == {0: [(2, 2)]}


def test_sums_become_means_where_the_estimate_is_and_words_are_added_up() -> None:
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


# ---------------------------------------------------------------------------------------------------------------------
# Curvature
# ---------------------------------------------------------------------------------------------------------------------
def test_only_ranks_that_precondition_a_layer_take_part_in_sharing_its_curvature() -> None:
    comm, blocks = Recorder(captures=[0, 1], preconditions=[1]), layers(2)
    StatisticsExchange(comm).share(schemas(blocks, STATE))
    assert [parcel.index for parcel in comm.shared] == [1]
    assert all(parcel.tensors for parcel in comm.shared)
    assert comm.spreads == []


def test_estimates_and_what_every_rank_computes_itself_are_not_shared() -> None:
    comm, (block,) = Recorder(captures=[0], preconditions=[0]), layers(1)
    StatisticsExchange(comm).share({block: STATE})
    (parcel,) = comm.shared
    assert {id(t) for t in parcel.tensors} == {id(block.state["basis"]), id(block.state["values"])}


def test_what_a_layer_is_measured_with_goes_to_all_ranks_that_capture_it() -> None:
    comm, blocks = Recorder(captures=[0, 1], preconditions=[1], elsewhere=[0, 1]), layers(2)
    exchange = StatisticsExchange(comm)
    exchange.share(schemas(blocks, STATE))
    assert sizes(comm.shared) == {1: [(2,)]}
    assert sizes(comm.spreads) == {0: [(2, 2)], 1: [(2, 2)]}


def test_what_is_not_sent_to_all_ranks_yet_goes_to_those_that_precondition() -> None:
    comm, (block,) = Recorder(captures=[0], preconditions=[0], elsewhere=[0]), layers(1)
    exchange = StatisticsExchange(comm)
    exchange.unsent = {"layer 0"}
    exchange.share({block: STATE})
    assert sizes(comm.shared) == {0: [(2, 2), (2,)]}
    assert comm.spreads == []
