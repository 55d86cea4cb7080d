"""What ranks exchange about blocks, on plain values."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from secondorder.capture.statistics.measurement import mean_of
from secondorder.config import FisherOptions
from secondorder.curvature.eigenbasis import square_weights
from secondorder.curvature.example_rows import Kept, Raw, Sizes
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.schema import Place
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
