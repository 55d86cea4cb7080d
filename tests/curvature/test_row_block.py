"""Blocks with rows of examples on plain states, against dense linear algebra in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder.capture.statistics.examples import second_moments
from secondorder.config import FisherOptions
from secondorder.curvature import row_choice
from secondorder.curvature.example_rows import Kept, Raw, Sizes
from secondorder.curvature.factorization import factorise
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_choice import Pivots
from secondorder.linalg import kernel, woodbury
from secondorder.linalg.kernel import Rows
from secondorder.parallel.rows import census_of, filled_up, put_together, words_of
from secondorder.runtime import Runtime
from tests.support.kfac import allocate

LAMBDA, N, D_IN, D_OUT = 0.3, 9, 4, 3
GOOD = torch.tensor(True)
GROUP: dict[str, Any] = {
    "approx": "reduce", "conv_scale": "exact", "kfac_when_cheaper": False, "factor_decay": 0.0, "damping": LAMBDA,
    "damping_mode": "absolute", "normalize_damping": False, "loss_reduction": "mean", "loss_terms": 1,
}  # fmt: skip


def block_of() -> RowBlock:
    """The block of a linear layer, whose state is a plain dict."""
    model = nn.Linear(D_IN, D_OUT).double()
    (layer,) = plan_layers(model, model.parameters(), LayerOptions()).layers
    return RowBlock(layer, 0, GROUP, Runtime(states={layer.owner: {}}), fisher=FisherOptions())


def some_rows(seed: int = 0, n: int = N) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    a, g = (torch.randn(n, 1, d, dtype=torch.float64, generator=generator) for d in (D_IN + 1, D_OUT))
    return Rows(a, g / n**0.5)


def vectors(rows: Rows) -> Tensor:
    """Gradients of the examples ``[n, n_g · n_a]``."""
    assert rows.a is not None
    return torch.einsum("nsi,nsj->nij", rows.g, rows.a).flatten(1)


def damped(curvature: Tensor) -> Tensor:
    return curvature + LAMBDA * torch.eye(len(curvature), dtype=torch.float64)


def with_all_rows(interpolated: bool) -> tuple[RowBlock, Tensor]:
    block, rows, damping = block_of(), some_rows(), torch.tensor(LAMBDA, dtype=torch.float64)
    allocate(block, block.schema(GROUP, {}, N))
    gram, kept = kernel.gram(rows), Kept(rows, damping)
    if interpolated:
        wish = Pivots(rows, N, "cholesky", "diag", lambda trace: damping)
        kept = row_choice.interpolated({"0": wish})["0"]
        assert kept.core is not None
        inverse, _ = woodbury.interpolated_inverse(kept.core, kernel.gram(kept.rows))
    else:
        inverse, _ = woodbury.damped_inverse(gram, damping)
    block.with_rows.adopt(block.state, kept, inverse, GOOD)
    u = vectors(rows)
    return block, u.T @ u


def with_factors() -> tuple[RowBlock, Tensor]:
    block, rows = block_of(), some_rows()
    allocate(block, block.with_factors.schema(N, 1))
    a, g = second_moments(rows, float(N))
    block.with_factors.fold(block.state, block.group, [a, g], N, GOOD)
    block.with_factors.keep_damping(block.state, torch.tensor(LAMBDA, dtype=torch.float64), GOOD)
    found = factorise({(block, side): task for side, task in block.tasks().items()}, True)
    block.adopt({side: found[block, side][0] for side in "ag"}, GOOD)
    return block, torch.kron(block.state["factor_g"], block.state["factor_a"])


def made(form: str) -> tuple[RowBlock, Tensor]:
    return with_factors() if form == "factors" else with_all_rows(form == "interpolated")


@pytest.mark.parametrize("form", ["rows", "interpolated", "factors"])
def test_all_methods_of_rows_and_factors_are_those_of_the_dense_operator(form: str) -> None:
    block, curvature = made(form)
    x = torch.randn(D_OUT, D_IN + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.eigvalsh(damped(curvature))
    wanted = torch.linalg.solve(damped(curvature), x.flatten()).view_as(x)
    torch.testing.assert_close(block.precondition(x), wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(block.dense(), curvature, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(block.product(x).flatten(), curvature @ x.flatten(), rtol=1e-9, atol=1e-9)
    found, bounds = block.extremes(), block.bounds()
    assert found is not None
    assert bounds is not None
    assert bounds.largest is not None
    torch.testing.assert_close(torch.stack([found.smallest, found.largest]), values[[0, -1]], rtol=1e-9, atol=1e-12)
    assert bounds.largest >= values[-1] * (1 - 1e-12)


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
