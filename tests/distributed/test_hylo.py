"""HyLo on several ranks: SNGD is that of the joined batch, KIS and KID choose from each shard by itself.

What sampling and interpolation come to is told by one process that has all shards and dense matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.oracle import TASKS, assert_replicas, assert_same_path, distance
from tests.distributed.pool import Pool
from tests.distributed.rows import Case, chosen_path, in_one_process, on_ranks

EVERYWHERE = ("comm", "mem", "comm_owner", "mem_replicated", "chief", "chief_inverses")
GRID = {2: EVERYWHERE, 3: (*EVERYWHERE, "hybrid_third"), 4: (*EVERYWHERE, "hybrid_half")}
UNEQUAL = {2: (9, 3), 3: (1, 7, 4), 4: (5, 0, 6, 1)}


def assert_like_one_process(
    pool: Pool, case: Case, world: int, strategies: Sequence[str], same_bits: bool = True
) -> None:
    """Every rank under every strategy; rows are put together in one order, so that strategies agree to the bit."""
    of_ranks, expected = pool.run(on_ranks, case, strategies, world=world), in_one_process(case, world)
    of_strategies = [list(paths) for paths in zip(*of_ranks, strict=True)]
    for paths in of_strategies:
        assert_same_path(paths, expected, tolerance=1e-10)
    if same_bits:
        assert_replicas([paths[0] for paths in of_strategies])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sngd_of_unequal_batches_is_that_of_the_joined_batch(pool: Pool, world: int) -> None:
    assert_like_one_process(pool, Case(sizes=UNEQUAL[world]), world, GRID[world])


@pytest.mark.parametrize(("task", "keywords"), [
    ("cnn", {"approx": "expand", "damping_mode": "relative", "damping": 10.0}),
    ("words", {"approx": "expand", "loss_terms": 3}),
    ("branches", {}),
    ("branches", {"damping_mode": "relative", "damping": 10.0}),
    ("lengths", {"approx": "expand"}),
])  # fmt: skip
def test_sngd_of_every_kind_of_rows(pool: Pool, task: str, keywords: dict[str, Any]) -> None:
    """Lookup tables tell rows by indices; where positions differ, so does the form that is the smaller one."""
    case = Case(task, {"mode": "sngd", **keywords}, sizes=(3, 5, 4))
    assert_like_one_process(pool, case, 3, ("comm", "mem", "hybrid_third"))


@pytest.mark.parametrize("approx", ["reduce", "expand"])
def test_factors_that_replace_rows(pool: Pool, approx: str) -> None:
    keywords = {"mode": "sngd", "kfac_when_cheaper": True, "approx": approx, "factor_decay": 0.7}
    case = Case("cnn", keywords, sizes=(3, 5, 4))
    model = case.model()
    optimizer = case.build(model)
    case.backward(model, TASKS["cnn"].batch(0), 0)
    optimizer.step()
    factored = [optimizer.is_factored(b) for b in optimizer.blocks.values()]
    assert any(factored)
    assert approx == "expand" or not all(factored)
    assert_like_one_process(pool, case, 3, ("comm", "mem", "hybrid_third", "comm_owner"), same_bits=False)


CHOICES = [
    {"mode": "kid", "rank_fraction": 0.5},
    {"mode": "kid", "rank_fraction": 0.5, "damping_mode": "relative", "damping": 3.0},
    {"mode": "kis", "rank_fraction": 0.5},
    {"mode": "kis", "rank_fraction": 0.4, "kis_sampling": "replacement", "damping_mode": "relative", "damping": 3.0},
    {"mode": "kis", "rank_fraction": 1.0, "max_rank": 7},
]


@pytest.mark.parametrize("keywords", CHOICES, ids=lambda keywords: "-".join(map(str, keywords.values())))
def test_chosen_rows_are_those_of_every_shard(pool: Pool, keywords: dict[str, Any]) -> None:
    case = Case(keywords=keywords, sizes=(5, 3, 4), steps=7)
    expected = chosen_path(case, 3)
    of_ranks = pool.run(on_ranks, case, ("comm", "mem", "hybrid_third"), world=3)
    assert_replicas([path for paths in of_ranks for path in paths])
    assert distance(of_ranks[0][0], expected) < 1e-9


@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_every_row_is_sngd(pool: Pool, mode: str) -> None:
    case = Case(keywords={"mode": mode, "rank_fraction": 1.0}, sizes=(5, 3, 4))
    expected = in_one_process(Case(sizes=case.sizes), 3)
    assert_same_path([paths[0] for paths in pool.run(on_ranks, case, ("mem",), world=3)], expected)
