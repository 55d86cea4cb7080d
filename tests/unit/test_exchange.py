"""What ranks exchange about blocks, on plain values, and the messages that carry it, with a strategy that records them.

Tests on several ranks show only the cost of a message; here its contents are checked. Sums are over this rank alone.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from secondorder.capture.statistics.measurement import Estimate, Measured, mean_of
from secondorder.comm.strategy import Local, Parcel, Pending
from secondorder.config import FisherOptions
from secondorder.curvature.block import Block
from secondorder.curvature.eigenbasis import square_weights
from secondorder.curvature.example_rows import Kept, Raw, Sizes
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.schema import Entry, Place, Schema
from secondorder.linalg import kernel
from secondorder.linalg.kernel import Rows
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parallel.rows import census_of, filled_up, put_together, words_of
from secondorder.preconditioners.directions import WholeGradients
from secondorder.runtime import Runtime

LAMBDA, D_IN, D_OUT = 0.3, 4, 3
GROUP: dict[str, Any] = {
    "approx": "reduce", "conv_scale": "exact", "kfac_when_cheaper": False, "factor_decay": 0.0, "damping": LAMBDA,
    "damping_mode": "absolute", "normalize_damping": False, "loss_reduction": "mean", "loss_terms": 1,
}  # fmt: skip


def block_of() -> RowBlock:
    """The block of a linear layer, whose state is a plain dict."""
    model = nn.Linear(D_IN, D_OUT).double()
    (layer,) = plan_layers(model, model.parameters(), LayerOptions()).layers
    return RowBlock(layer, 0, GROUP, Runtime(states={layer.owner: {}}), fisher=FisherOptions())


def some_rows(seed: int, n: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    a, g = (torch.randn(n, 1, d, dtype=torch.float64, generator=generator) for d in (D_IN + 1, D_OUT))
    return Rows(a, g / n**0.5)


def vectors(rows: Rows) -> Tensor:
    """Gradients of the examples ``[n, n_g · n_a]``."""
    assert rows.a is not None
    return torch.einsum("nsi,nsj->nij", rows.g, rows.a).flatten(1)


def test_a_census_is_the_sum_of_the_words_of_all_ranks() -> None:
    block, rows = block_of(), [some_rows(0, 5), some_rows(1, 3)]
    traces = [kernel.norms(x).sum().reshape(1) for x in rows]
    words = [
        words_of(block, Raw(x, 1.0), t, x.n, rank=i, world=2) for i, (x, t) in enumerate(zip(rows, traces, strict=True))
    ]
    census = census_of(block, torch.stack(words).sum(0), 2)
    assert census is not None
    assert (census.examples, census.rows, census.positions, census.whole) == ([5, 3], [5, 3], 1, False)
    scales = [block.gradient_scale(x.n) * x.n for x in rows]
    torch.testing.assert_close(census.trace, (traces[0] * scales[0] + traces[1] * scales[1]).sum() / 8)
    assert census_of(block, torch.zeros_like(words[0]), 2) is None


def test_rows_of_all_ranks_are_concatenated_without_padding() -> None:
    block, rows, damping = block_of(), [some_rows(0, 5), some_rows(1, 3)], torch.tensor(LAMBDA, dtype=torch.float64)
    sizes = Sizes(5, 1, D_IN + 1, D_OUT)
    sent = [filled_up(block, sizes, Kept(x, damping), interpolates=True, device=torch.device("cpu")) for x in rows]
    stacks = [torch.stack(parts) for parts in zip(*sent, strict=True)]
    found = put_together(block, sizes, stacks, [5, 3], damping, interpolates=True)
    torch.testing.assert_close(vectors(found.rows), torch.cat([vectors(x) for x in rows]), rtol=0, atol=0)
    assert torch.equal(found.core, torch.eye(8, dtype=torch.float64))


def test_a_checkpoint_is_compared_as_if_nothing_had_been_sent() -> None:
    comm = SimpleNamespace(
        combines=True, estimates=lambda i: False, preconditions=lambda i: False, captures=lambda i: True,
        captures_elsewhere=lambda i: True,
    )  # fmt: skip
    exchange, block = StatisticsExchange(cast(Any, comm)), cast(Any, SimpleNamespace(name="layer", index=0))
    assert Place.MEASURED in exchange.places_here(block)

    def compare() -> None:
        with exchange.holding_back():
            assert Place.MEASURED not in exchange.places_here(block)
            assert exchange.lacks_measured(block)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        compare()
    assert Place.MEASURED in exchange.places_here(block)
    assert exchange.unsent == set()


class Shards:
    """Doubles what it gathers, and records how many parameters each message has."""

    def __init__(self) -> None:
        self.messages: list[int] = []

    def gather(self, params: Sequence[nn.Parameter], pieces: Mapping[Any, Tensor], ranks: Any) -> dict[Any, Tensor]:
        self.messages.append(len(params))
        return {p: 2 * pieces[p] for p in params}


def test_a_gradient_is_gathered_once_in_a_step() -> None:
    shards = Shards()
    wholes = WholeGradients(
        cast(Any, SimpleNamespace(preconditioners=lambda i: [0])), cast(Any, SimpleNamespace(shards=shards))
    )
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    blocks = cast(Any, [SimpleNamespace(index=i, params=[x]) for i, x in enumerate((p, q))])
    gradients = {p: torch.full((2,), 3.0), q: torch.full((3,), 5.0)}
    wholes.keep(blocks, gradients)
    source = {p: gradients[p], q: gradients[q] + 1}  # the second one is a mean of gradients, which was not sent yet
    found = wholes.gather(blocks, source)
    assert shards.messages == [2, 1]
    assert found[p].tolist() == [6.0, 6.0]
    assert found[q].tolist() == [12.0, 12.0, 12.0]
    wholes.forget()
    wholes.gather(blocks, source)
    assert shards.messages == [2, 1, 2]


def test_the_running_scale_of_a_summed_gradient_that_ranks_have_averaged() -> None:
    """It is N (S / N)² for the sum S over the N examples of all ranks, but two ranks have averaged S / 2."""
    group = {"loss_reduction": "sum", "momentum_mode": "post", "power": 1.0, "estimator": "running"}
    block = cast(Any, SimpleNamespace(group=group, batch_weight=float))
    assert square_weights(block, examples=8, ranks=2) == (2**2 / 8, 8.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_a_block_without_examples_is_zero(dtype: torch.dtype) -> None:
    """Other blocks have the quotient of the sum and their number of examples."""
    total = torch.tensor([[10.0, 15.0], [0.0, 0.0]], dtype=dtype)
    found = mean_of(total, torch.tensor([5.0, 0.0], dtype=torch.float64))
    assert found.total.tolist() == [[2.0, 3.0], [0.0, 0.0]]


# ---------------------------------------------------------------------------------------------------- Messages

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
        self.index, self.name, self.owner = index, f"layer {index}", nn.Parameter(torch.zeros(2))
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
