"""Stages of a step over blocks on plain values: capturing, folding, sending and gathering."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from secondorder.capture.statistics.measurement import Measured, Reduced, mean_of
from secondorder.curvature.block import ESTIMATE_ALONE, Due
from secondorder.curvature.refresh_schedule import RefreshSchedule
from secondorder.curvature.schema import Place
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.preconditioners.capture_schedule import CaptureSchedule
from secondorder.preconditioners.directions import WholeGradients
from secondorder.preconditioners.layer_statistics import LayerStatistics


def scheduled(step: int, *updates: int, learns: Any = lambda i: True) -> dict[int, Due]:
    """What is due in a step, for blocks with the given numbers of updates and an interval of 3."""
    group = {"every": 3, "interval": 10}
    blocks = [SimpleNamespace(index=i, group=group, state={"factor_updates": n}) for i, n in enumerate(updates)]
    plan = SimpleNamespace(
        blocks=blocks, interval="interval", runtime=SimpleNamespace(step=step), comm=SimpleNamespace(learns=learns)
    )
    refresher = SimpleNamespace(schedule=RefreshSchedule(warmup=False))
    found: CaptureSchedule[Any] = CaptureSchedule(
        cast(Any, plan), cast(Any, refresher), cast(Any, None), "every", "factor_updates"
    )
    return found.find_due()


def test_blocks_are_captured_at_their_interval_and_at_once_if_they_have_no_estimate() -> None:
    assert scheduled(6, 2, 2) == {0: ESTIMATE_ALONE, 1: ESTIMATE_ALONE}
    assert scheduled(7, 2, 2) == {}
    assert scheduled(7, 2, 0) == {1: ESTIMATE_ALONE}
    # If no rank uses its statistics, a block is left out.
    assert scheduled(6, 2, 2, learns=lambda i: i == 1) == {1: ESTIMATE_ALONE}


class Estimate:
    """A block that folds a number."""

    name, index = "layer", 0

    def __init__(self) -> None:
        self.updates = 0

    def fold(self, measured: Measured, gate: Tensor | None) -> Tensor:
        return torch.tensor(measured.examples > 0)

    def count_update(self, measured: Measured, due: Due) -> None:
        self.updates += 1


@pytest.mark.parametrize(("examples", "updates", "skipped"), [(4, 1, 0), (0, 0, 1)])
def test_a_batch_that_is_not_finite_is_counted_but_is_no_update(examples: int, updates: int, skipped: int) -> None:
    block, exchange = Estimate(), StatisticsExchange(cast(Any, None))
    plan = SimpleNamespace(blocks=[block], comm=SimpleNamespace(combines=False), runtime=SimpleNamespace(step=5))
    statistics = LayerStatistics(cast(Any, plan), cast(Any, SimpleNamespace(due={})), exchange)
    statistics.fold(Reduced({0: Measured({}, examples)}, {0: examples}), None)
    assert block.updates == updates
    assert int(exchange.skipped.get("layer", 0)) == skipped
    assert exchange.learned_at == ({"layer": 5} if updates else {})


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_a_block_without_examples_is_zero(dtype: torch.dtype) -> None:
    """Other blocks have the quotient of the sum and their number of examples."""
    total = torch.tensor([[10.0, 15.0], [0.0, 0.0]], dtype=dtype)
    found = mean_of(total, torch.tensor([5.0, 0.0], dtype=torch.float64))
    assert found.total.tolist() == [[2.0, 3.0], [0.0, 0.0]]
