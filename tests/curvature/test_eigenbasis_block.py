"""Blocks with a scale in their eigenbases on plain states, against dense linear algebra in float64.

The scale over steps and refreshes is tested in `tests/ekfac`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder.capture.statistics.call import Call
from secondorder.config import FisherOptions
from secondorder.curvature.block import Due
from secondorder.curvature.eigenbasis import EigenbasisBlock
from secondorder.curvature.factorization import factorise
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.schema import Place, keys
from secondorder.runtime import Runtime
from tests.support.kfac import allocate, noise

LAMBDA, N, D_IN, D_OUT = 0.3, 9, 4, 3
GOOD = torch.tensor(True)
GROUP: dict[str, Any] = {
    "estimator": "intra", "basis_update": "eigh", "full_every": 5, "transport": "project", "momentum_mode": "post",
    "scale_decay": 0.75, "scale_update_steps": 1, "scale_batch_size": None, "token_is_example": False, "power": 1.0,
    "damping": LAMBDA, "damping_mode": "absolute", "weight_decay_in_curvature": False, "factor_decay": 0.5, "eps": 1e-8,
    "max_factor_dim": None, "decay_per_step": False, "burnin_steps": 0, "weighting": "samples", "approx": "expand",
    "loss_reduction": "mean", "loss_terms": 1, "factor_batch_size": None, "factor_positions": None,
}  # fmt: skip


def block_of(**changed: Any) -> EigenbasisBlock:
    """The block of a linear layer without a bias, with the bases of two random factors; its state is a plain dict."""
    model = nn.Linear(D_IN, D_OUT, bias=False).double()
    (layer,) = plan_layers(model, model.parameters(), LayerOptions()).layers
    runtime = Runtime(step=1, states={layer.owner: {}}, blocks=1)
    block = EigenbasisBlock(layer, 0, {**GROUP, **changed}, runtime, LayerOptions(), FisherOptions())
    allocate(block, block.schema(block.group, {}))
    for side, n in (("a", D_IN), ("g", D_OUT)):
        rows = noise(2 * n, n, seed=1)
        block.state[f"factor_{side}"].copy_(rows.mT @ rows)
    found = factorise(block.tasks(), True)
    block.adopt({side: results for side, (results, _) in found.items()}, GOOD)
    block.state["refreshes"] += 1
    return block


def a_call() -> Call:
    """A batch under a mean over examples."""
    return Call(noise(N, D_IN, seed=5), noise(N, D_OUT, seed=6) / N, block_of().adapter)


def squares(block: EigenbasisBlock, gradients: Tensor) -> Tensor:
    return (block.state["basis_g"].mT @ gradients @ block.state["basis_a"]).square()


@pytest.mark.parametrize(
    ("due", "expected"),
    [
        (Due(True), ["factor_a", "factor_g"]),
        (Due(True, scale=True), ["factor_a", "factor_g", "scale"]),
        (Due(False, scale=True, keeps_calls=True), ["scale"]),
        (Due(True, late=True, keeps_calls=True), ["factor_a", "factor_g"]),
    ],
)
def test_only_what_is_due_is_summed(due: Due, expected: list[str]) -> None:
    block, call = block_of(), a_call()
    assert list(block.sums(due)) == expected
    sums = block.statistic(due)
    sums.add([call], N)
    assert (sums.factors is not None, sums.scales is not None) == (due.factors, due.scale and not due.keeps_calls)
    assert len(sums.calls) == due.keeps_calls
    assert set(block.measure(sums, N).parts) == set(expected) - ({"scale"} if due.keeps_calls else set())


def test_the_running_scale_of_a_summed_gradient_that_two_ranks_have_averaged() -> None:
    """It is N (S / N)² for the sum S over the N examples of both ranks, of which each rank has S / 2."""
    total = noise(D_OUT, D_IN, seed=8)
    block = block_of(estimator="running", loss_reduction="sum")
    before = block.state["scale"].clone()
    block.fold_gradient(total / 2, N, 2, ~GOOD)
    torch.testing.assert_close(block.state["scale"], before, rtol=0, atol=0)
    block.fold_gradient(total / 2, N, 2, None)
    torch.testing.assert_close(block.state["scale"], N * squares(block, total / N))
    assert keys(block.schema(block.group, {}), Place.MEASURED) == []  # no rank measures examples in the bases


def test_a_scale_restarts_from_stored_calls_after_a_successful_refresh() -> None:
    block, call = block_of(transport="recompute"), a_call()
    block.state["scale"].copy_(noise(D_OUT, D_IN, seed=3).square())
    sums = block.statistic(Due(False, late=True, keeps_calls=True))
    sums.add([call], N)
    block.measure(sums, N)
    block.state["scale_weight"].fill_(5.0)
    before = block.state["scale"].clone(), block.state["scale_weight"].clone()
    block.replace_scale(block.measure_calls(sums), ~GOOD)
    torch.testing.assert_close((block.state["scale"], block.state["scale_weight"]), before, rtol=0, atol=0)
    block.replace_scale(block.measure_calls(sums), GOOD)
    gradients = N * torch.einsum("ni,nj->nij", call.g, call.x)
    torch.testing.assert_close(block.state["scale"], squares(block, gradients).mean(0))
