"""HyLo on several ranks: SNGD agrees with the joined batch, while KIS and KID choose rows from each shard separately.

The references of sampling and interpolation are computed in one process that has all shards and uses dense matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import HyLo
from secondorder.capture.statistics.measurement import Measured
from secondorder.switching import ProbeError
from tests.support.grid import only
from tests.support.oracles import ranks
from tests.support.oracles.ranks import TASKS, Run, assert_replicas, assert_same_path, descend, distance, optimizer_on
from tests.support.pool import Failure, Pool, device_of, everywhere, on_every_rank
from tests.support.rows import SETTINGS, Case, chosen_path, in_one_process, on_rank, on_ranks

# ---------------------------------------------------------------------------------------------------------------- Paths
SNGD = {"mode": "sngd"}
RELATIVE = {**SNGD, "damping_mode": "relative", "damping": 10.0}
EXPANDED = {**SNGD, "approx": "expand"}
FACTORED = {**SNGD, "kfac_when_cheaper": True, "factor_decay": 0.7}
EVERYWHERE = ("comm", "mem", "comm_owner", "mem_replicated", "chief", "chief_inverses")
SIZES = (3, 5, 4)


class Same(NamedTuple):
    """A case that agrees with SNGD of the joined batch, and strategies, which are bitwise equal if rows are kept."""

    case: Case
    strategies: Sequence[str] = ("comm", "hybrid_third")
    world: int = 3
    to_the_bit: bool = True


SAME = {
    "unequal-2": Same(Case(sizes=(9, 3), steps=7), EVERYWHERE, 2),
    "unequal-3": Same(Case(sizes=(1, 7, 4), steps=7), (*EVERYWHERE, "hybrid_third")),
    "unequal-4": Same(Case(sizes=(5, 0, 6, 1), steps=7), (*EVERYWHERE, "hybrid_half"), 4),
    "cnn": Same(Case("cnn", {**RELATIVE, "approx": "expand"}, SIZES, 5)),
    "words": Same(Case("words", {**EXPANDED, "loss_terms": 3}, SIZES, 5)),
    "branches": Same(Case("branches", SNGD, SIZES, 5)),
    "branches_relative": Same(Case("branches", RELATIVE, SIZES, 5)),
    "lengths": Same(Case("lengths", EXPANDED, SIZES, 5)),
    "groups_relative": Same(Case("groups", RELATIVE, SIZES, 5)),
    "groups": Same(Case("groups", EXPANDED, SIZES, 5)),
    "factors-reduce": Same(Case("cnn", FACTORED, SIZES, 5), ("mem", "comm_owner"), to_the_bit=False),
    "factors-groups": Same(Case("groups", {**FACTORED, **EXPANDED}, SIZES, 5), ("mem", "comm_owner"), to_the_bit=False),
}


@only("unequal-3", "cnn", "words", "branches_relative", "groups", "factors-groups", same=SAME)
def test_sngd_is_that_of_the_joined_batch(pool: Pool, same: Same) -> None:
    """This includes lookup tables, whose rows are indices, and sequences whose length differs between ranks."""
    case, strategies, world, to_the_bit = same
    expected = in_one_process(case, world)
    of_strategies = [list(paths) for paths in zip(*pool.run(on_ranks, case, strategies, world=world), strict=True)]
    for paths in of_strategies:
        assert_same_path(paths, expected, tolerance=1e-10)
    if to_the_bit:
        assert_replicas([paths[0] for paths in of_strategies])


RELATED = {"damping_mode": "relative", "damping": 3.0}
CHOICES: dict[str, dict[str, Any]] = {
    "kid": {"mode": "kid", "rank_fraction": 0.5},
    "kid_relative": {"mode": "kid", "rank_fraction": 0.5, **RELATED},
    "kis": {"mode": "kis", "rank_fraction": 0.5},
    "kis_bounded": {"mode": "kis", "rank_fraction": 1.0, "max_rank": 7, "kis_sampling": "replacement", **RELATED},
}


@only("kid", "kis_bounded", keywords=CHOICES)
def test_rows_are_chosen_from_every_shard(pool: Pool, keywords: dict[str, Any]) -> None:
    case = Case(keywords=keywords, sizes=(5, 3, 4), steps=4)
    expected = chosen_path(case, 3)
    of_ranks = pool.run(on_ranks, case, ("comm", "mem", "hybrid_third"), world=3)
    assert_replicas([path for paths in of_ranks for path in paths])
    assert distance(of_ranks[0][0], expected) < 1e-9


@on_every_rank(2)
def test_draws_differ_between_ranks_and_between_steps(rank: int, world: int) -> None:
    """Equal draws of two ranks, which have the same examples, or of two steps would add no information."""
    torch.manual_seed(0)
    model, x, found = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64), []
    with HyLo(model, lr=1e-300, fisher="mc", mode="sngd", update_steps=1, approx="expand") as optimizer:
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs, "categorical")
            outputs.logsumexp(1).mean().backward()
            optimizer.step()
            found += optimizer.state[model.weight]["rows_g"].clone().chunk(world)
    assert len(found) == 6
    for i, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[:i])


# ---------------------------------------------------------------------------------------------------- Messages and rows
SIDES = {"0": (6, 6), "2": (7, 5), "4": (6, 4)}  # sizes of a and g of the layers of the task


def second_refresh(rank: int, world: int, strategy: str, keywords: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of the second refresh by stage."""
    model = DDP(TASKS["mlp"].model(device_of(rank)))
    run = Run("mlp", "hylo_sngd", {**SETTINGS, "update_steps": 1, **keywords})
    with optimizer_on(model, strategy, run) as optimizer:
        for step in range(2):
            optimizer.comm.collectives.counter.clear()
            descend(model, optimizer, ranks.shard(run.batch(step), rank, world), run)
        return optimizer.comm.collectives.counter.bytes_by_stage()


@on_every_rank(2)
def test_bytes_of_a_refresh(rank: int, world: int) -> None:
    """Messages contain the rows of all ranks or of one, depending on the strategy, and a triangle of each kernel."""
    for mode, r in [("sngd", 6), ("kid", 3), ("kis", 3)]:
        keywords = {"mode": mode, **({} if mode == "sngd" else {"rank_fraction": 0.5})}
        comm, mem, owner = (second_refresh(rank, world, s, keywords) for s in ("comm", "mem", "comm_owner"))
        rows = sum(r * (n_a + n_g) for n_a, n_g in SIDES.values()) + len(SIDES) * (r * r if mode == "kid" else 0)
        kept = sum(2 * r * (n_a + n_g) for n_a, n_g in SIDES.values())
        kernels = len(SIDES) * r * (2 * r + 1)
        directions = sum(n_a * n_g for n_a, n_g in SIDES.values())
        assert comm.pop("words") == mem.pop("words") == owner.pop("words")
        assert comm == {"rows": 8 * 2 * rows, "curvature": 8 * kernels}
        assert mem == {"rows": 8 * rows, "directions": 8 * directions}
        assert owner == {"rows": 8 * rows, "curvature": 8 * (kernels + kept)}


def allocated(rank: int, world: int, strategy: str, case: Case) -> Tensor:
    """The trajectory on fewer examples than `batch_size`."""

    def shapes() -> dict[str, tuple[int, ...]]:
        states = {name: optimizer.state[block.owner] for name, block in optimizer.blocks.items()}
        kept = {"rows_a", "rows_g", "kernel"}
        return {f"{name} {key}": tuple(of[key].shape) for name, of in states.items() for key in kept & of.keys()}

    expected = {"0 rows_a": (18, 1, 6), "4 rows_g": (18, 1, 4), "2 kernel": (18, 18)}
    with on_rank(case, strategy, rank, world) as (_, optimizer, go):
        before = shapes()
        of_all = {name: shape for of_rank in everywhere(before) for name, shape in of_rank.items()}
        assert {name: of_all[name] for name in expected} == expected
        assert len(before) == (9 if strategy == "comm" else 3)
        path = go(*range(case.steps))
        assert shapes() == before
        return path


@pytest.mark.parametrize("strategy", ["comm", "mem"])
def test_rows_are_allocated_at_construction(pool: Pool, strategy: str) -> None:
    """They have space for the given batch size on W ranks, and results are exact even if it is not filled."""
    case = Case(keywords={"mode": "sngd", "batch_size": 6}, sizes=(5, 3, 4), steps=4)
    paths = pool.run(allocated, strategy, case, world=3)
    assert_same_path(paths, in_one_process(Case(sizes=case.sizes, steps=4), 3), 1e-10)


@on_every_rank(2)
def test_curvature_of_other_ranks_is_reported_as_elsewhere(rank: int, world: int) -> None:
    with on_rank(Case(), "mem", rank, world) as (_, optimizer, go):
        go(0)
        own = [name for name, block in optimizer.blocks.items() if optimizer.comm.refreshes(block.index)]
        others = [name for name in optimizer.blocks if name not in own]
        assert own
        assert others
        assert all(optimizer.dense_curvature(name).isfinite().all() for name in own)
        with pytest.raises(RuntimeError, match="ask there"):
            optimizer.dense_curvature(others[0])
        assert optimizer.describe().count("elsewhere") >= len(others)


# --------------------------------------------------------------------------------------- Decisions that all ranks share
@pytest.mark.parametrize("policy", [None, ProbeError(layers=2, threshold=0.6)], ids=["norms", "probes"])
@on_every_rank(3)
def test_policies_decide_alike(rank: int, world: int, policy: Any) -> None:
    """Each rank probes its own examples, and the state of the policy is the mean."""
    case, found = Case(keywords={"mode": "auto", "rank_fraction": 0.5, "switch": policy}, sizes=(5, 3, 4)), []
    for strategy in ("comm", "mem"):
        with on_rank(case, strategy, rank, world) as (_, optimizer, go):
            path = go(*range(case.steps))
            found.append((path, optimizer.diagnostics()["switches"], list(optimizer.switch.state_dict().values())))
    results = [result for of_rank in everywhere(found) for result in of_rank]
    assert_replicas([path for path, _, _ in results])
    assert all(switches == results[0][1] for _, switches, _ in results)
    if policy is not None:
        assert [mode for _, mode in results[0][1]] == ["kid", "kis"]
        assert len({remembered[0] for _, _, remembered in results}) == 1


@on_every_rank(3)
def test_the_rank_that_needs_most_rows_determines_their_number(rank: int, world: int) -> None:
    sizes = (40, 10, 22)
    case = Case("mlp", {"mode": "kid", "rank_energy": 0.97}, sizes=sizes, batches=6)
    with on_rank(case, "comm", rank, world) as (_, optimizer, go):
        asked: dict[str, int] = {}
        selection = optimizer.preconditioner.selection
        by_energy = selection.by_energy

        def listening(limits: Mapping[Any, int]) -> dict[Any, int]:
            found = by_energy(limits)
            asked.update({block.name: rows for block, rows in found.items()})
            return found

        selection.by_energy = listening
        go(0)
        kept = optimizer.diagnostics()["rank"]
    of_ranks = everywhere(asked)
    assert any(len({of[name] for of in of_ranks}) > 1 for name in kept)
    for name, rows in kept.items():
        most = max(of[name] for of in of_ranks)
        assert rows == sum(min(n, most) for n in sizes)


# ------------------------------------------------------------------------------------ Statistics and errors of one rank
def _measured_with_nan(measure: Callable[..., Measured], *args: Any) -> Measured:
    found = measure(*args)
    found.rest.rows.g[0] = torch.nan
    return found


def held(rank: int, world: int, strategy: str, case: Case, spoils: bool) -> tuple[dict[str, Tensor], int]:
    """Curvature after a step in which rank 1 may have captured non-finite statistics, and their number."""
    with on_rank(case, strategy, rank, world) as (_, optimizer, go):
        if spoils and rank == 1:
            for block in optimizer.blocks.values():
                block.measure = partial(_measured_with_nan, block.measure)
        go(0)
        comm, blocks = optimizer.comm, optimizer.blocks
        found = {n: optimizer.dense_curvature(n) for n, b in blocks.items() if comm.estimates(b.index)}
        return found, optimizer.diagnostics()["skipped_statistics"]


def test_rows_come_from_the_chief_or_from_ranks_whose_rows_are_finite(pool: Pool) -> None:
    case = Case(sizes=(5, 7))
    model = case.model()
    optimizer = case.build(model)
    case.backward(model, case.shards(0, 2)[0], 0)
    optimizer.step()
    for strategy, mode, spoils, layers in [
        ("comm", "sngd", True, 6),
        ("mem", "sngd", True, 3),
        ("chief_own", "sngd", False, 3),
        ("chief_own", "kid", False, 3),
    ]:
        other = Case(keywords={"mode": mode, "rank_fraction": 1.0}, sizes=(5, 7))
        results = pool.run(held, strategy, other, spoils, world=2)
        assert sum(len(found) for found, _ in results) == layers
        assert [skipped for _, skipped in results] == [3 * spoils] * 2
        for found, _ in results:
            assert all(distance(dense, optimizer.dense_curvature(name)) < 1e-9 for name, dense in found.items())


def failing(rank: int, world: int, strategy: str, where: str) -> tuple[dict[str, Any], Tensor, list[int]]:
    """Counters, trajectory and refreshes of each layer after three refreshes, the second of which fails."""
    case = Case(keywords={"mode": "kid", "rank_fraction": 0.5, "update_steps": 1})
    with on_rank(case, strategy, rank, world) as (_, optimizer, go):
        path = [go(0)]
        with pytest.MonkeyPatch.context() as patch:
            if where == "choosing" and rank == 1:
                patch.setattr(optimizer.preconditioner.selection, "choose", raising)
            if where == "inverting":
                patch.setattr("secondorder.preconditioners.rows.invert_kernels", none_inverted)
            path.append(go(1))
        path.append(go(2))
        refreshes = [optimizer.state[b.owner]["refreshes"] for b in optimizer.blocks.values()]
        return optimizer.diagnostics(), torch.cat(path), refreshes


def none_inverted(kept: Mapping[Any, Any], *args: Any) -> dict[Any, Tensor]:
    return dict.fromkeys(kept, torch.tensor(False))


def raising(*args: Any) -> Any:
    raise MemoryError("no room for rows")


def test_the_last_kernels_remain_if_new_ones_cannot_be_inverted(pool: Pool) -> None:
    for strategy in ["comm", "mem", "comm_owner"]:
        results = pool.run(failing, strategy, "inverting", world=2)
        assert_replicas([path for _, path, _ in results])
        for counters, _, refreshes in results:
            assert counters["refresh_failures"] == 3
            assert refreshes == [2, 2, 2]


def test_an_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    for failure in pool.run(failing, "mem", "choosing", world=3, expect_failure=True):
        assert isinstance(failure, Failure)
        assert failure.type == "RuntimeError"
        assert "rank 1: choosing rows failed: MemoryError: no room for rows" in failure.message


@on_every_rank(2)
def test_layers_may_be_frozen_for_a_while(rank: int, world: int) -> None:
    """Blocks are planned again while ranks have different rows."""
    paths = []
    for strategy in ("comm", "mem"):
        with on_rank(Case(keywords={"mode": "kid", "rank_fraction": 0.5}), strategy, rank, world) as (model, _, go):
            path = []
            for step in range(6):
                model[2].requires_grad_(step not in (2, 3))
                path.append(go(step))
        paths.append(torch.cat(path))
    assert_replicas([path for of_rank in everywhere(paths) for path in of_rank])
