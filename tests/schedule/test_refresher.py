"""The refresher on blocks with plain dicts as their state, without an optimizer."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from secondorder.config import FisherOptions
from secondorder.curvature.factorization import joint_ok
from secondorder.curvature.kronecker import KroneckerBlock
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.refresh import Refresher
from secondorder.curvature.schema import tensors
from secondorder.runtime import Runtime

N, INTERVAL = 3, 10
LAG = 1
GROUP = {
    "inverse_method": "eigen", "max_factor_dim": None, "inv_update_steps": INTERVAL, "decay_per_step": False,
}  # fmt: skip


def _block(overlap: bool = False) -> KroneckerBlock:
    model = nn.Linear(N, N, bias=False).double()
    (layer,) = plan_layers(model, model.parameters(), LayerOptions()).layers
    runtime = Runtime()
    block = KroneckerBlock(layer, 0, dict(GROUP), runtime, LayerOptions(overlap=overlap), FisherOptions())
    schema = block.schema(block.group, {})
    numbers: dict[str, Tensor | int] = {k: e.like for k, e in schema.items() if isinstance(e.like, int)}
    state = numbers | {k: torch.zeros_like(like, device="cpu") for k, like in tensors(schema).items()}
    runtime.states = {layer.owner: state}
    _learn(block, 1.0)
    return block


def _learn(block: KroneckerBlock, size: float) -> None:
    for side in "ag":
        block.state[f"factor_{side}"].copy_(size * torch.eye(N))
    block.state["factor_updates"] += 1


def _refresher(block: KroneckerBlock, max_failures: int = 3) -> Refresher:
    return Refresher(block.options.schedule, "inv_update_steps", max_failures)


def _take(refresher: Refresher, block: KroneckerBlock, step: int) -> list[int]:
    """The refresh of one step."""

    def refresh(blocks: list[KroneckerBlock], host_checks: bool) -> Tensor:
        found = refresher.find(blocks, host_checks, mirrors=False)
        ok = joint_ok(found, blocks)
        for b, good in zip(blocks, ok, strict=True):
            b.adopt({side: found[b, side][0] for side in "ag"}, good)
        return ok

    block.runtime.step = step
    due = [block] if refresher.is_due(block, 1) else []
    with refresher.adopting([block]):
        refreshed = refresher.run(due, refresh, True) if due else []
    if refresher.begins(block, 1) and not refreshed:
        refresher.begin([block], lambda _: True, mirrors=False)
    return refreshed


def test_a_first_refresh_that_failed_waits_for_another_estimate_and_the_limit_raises() -> None:
    block = _block()
    refresher = _refresher(block)
    _learn(block, float("nan"))
    assert _take(refresher, block, 0) == [0]
    assert (refresher.failed, refresher.failures, block.state["refreshes"]) == (1, {block.name: 1}, 0)
    assert _take(refresher, block, 1) == []
    _learn(block, float("nan"))
    assert _take(refresher, block, 2) == [0]
    _learn(block, float("nan"))
    with pytest.raises(RuntimeError, match="could not be factorized 3 times in a row"):
        _take(refresher, block, 3)


@pytest.mark.parametrize("forget", ["blocks", "by an error"])
def test_a_refresh_that_is_discarded_is_not_adopted(forget: str) -> None:
    block = _block(overlap=True)
    refresher = _refresher(block)
    _take(refresher, block, 0)
    _learn(block, 2.0)
    _take(refresher, block, INTERVAL)
    assert refresher.jobs
    if forget == "blocks":
        refresher.forget([block])
        assert block.state["adopt_at"] == 0
    else:
        block.runtime.step = INTERVAL + LAG
        with pytest.raises(ValueError, match="in a step"), refresher.adopting([block]):
            raise ValueError("in a step")
        assert block.state["adopt_at"] == INTERVAL + LAG  # the next step adopts the copies
    assert not refresher.jobs
    refresher.close()


def test_results_that_arrive_later_are_counted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda device: arrived)
    block = _block()
    refresher = _refresher(block)
    refresher.run([block], lambda blocks, host_checks: torch.tensor([False]), look=False)
    assert refresher.failed == 0
    refresher.settle()
    assert (refresher.failed, refresher.failures) == (1, {block.name: 1})
    refresher.settle()
    assert refresher.failed == 1
