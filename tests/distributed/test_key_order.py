"""States whose keys are in another order on each rank: what ranks send each other is laid out alike all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.oracles.ranks import Run, assert_replicas
from tests.support.pool import Pool
from tests.support.saving import Saved, started, through_a_file, train

BREAK, END = 5, 9


def ordered(saved: Saved, backwards: bool) -> Saved:
    """The same state; its keys from A to Z or from Z to A."""

    def arrange(state: dict[str, Any]) -> dict[str, Any]:
        return {key: state[key] for key in sorted(state, reverse=backwards)}

    return {**saved, "state": {i: arrange(state) for i, state in saved["state"].items()}}


def resumed(rank: int, world: int, method: str) -> tuple[Tensor, Tensor]:
    """Paths after a break: with the same order of keys on all ranks, and with another one on the last rank."""
    run = Run(method=method)
    model, optimizer = started(rank, "mem", run)
    train(model, optimizer, rank, world, run, 0, BREAK)
    optimizer.consolidate_state_dict(to=None)
    saved, paths = optimizer.state_dict(), []
    for backwards in (False, rank == world - 1):
        twin_model, twin = started(rank, "comm", run)
        twin_model.load_state_dict(model.state_dict())
        twin.load_state_dict(ordered(through_a_file(saved), backwards))
        paths.append(torch.stack(train(twin_model, twin, rank, world, run, BREAK, END)))
        twin.close()
    optimizer.close()
    return paths[0], paths[1]


@pytest.mark.parametrize("method", ["kfac_eigen", "ekfac_intra"])
def test_the_order_of_keys_in_a_loaded_state_changes_nothing(pool: Pool, method: str) -> None:
    alike, unlike = zip(*pool.run(resumed, method), strict=True)
    assert_replicas(list(alike))
    assert_replicas(list(unlike))
    assert torch.equal(unlike[0], alike[0])
