"""Saved in one world under one strategy, gone on with in another: the same path as if nothing had happened.

One process saves for all after `consolidate_state_dict`; the file is read in the safe mode of `torch.load`.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.oracles.ranks import METHODS, Run, distance
from tests.support.pool import Pool
from tests.support.saving import Saved, shifted, started, through_a_file, train

# Factors every 2 steps and refreshes every 4: after the break one step as before, an update, and a refresh. Rows are
# renewed every 3 steps, from other examples in another world: only what comes before is the same there.
BREAK, END, ROWS_END = 5, 10, 6
QUICK = ("kfac_eigen", "ekfac_intra", "hylo_kid", "mfac", "mfac_sparse")
STRATEGIES = {1: ("mem",), 2: ("comm", "mem"), 3: ("comm", "mem", "chief"), 4: ("comm", "mem", "hybrid_half")}
OF_FACTORS = ("comm_owner", "mem_replicated", "local_factors", "chief", "chief_inverses")


class Checkpoint(NamedTuple):
    """What was saved, and the path of the run that went on.

    Attributes:
        run: The run.
        model: State of the model.
        optimizer: State of the optimizer.
        path: Parameters ``[END - BREAK, P]`` after each of the steps that follow.
    """

    run: Run
    model: Saved
    optimizer: Saved
    path: Tensor


def last_step(method: str) -> int:
    return ROWS_END if method.startswith("hylo") else END


def save(rank: int, world: int, strategy: str, methods: tuple[str, ...]) -> list[Checkpoint]:
    found = []
    for method in methods:
        run = Run(method=method)
        model, optimizer = started(rank, strategy, run)
        train(model, optimizer, rank, world, run, 0, BREAK)
        optimizer.consolidate_state_dict()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*partial")
            saved = through_a_file((model.state_dict(), optimizer.state_dict()))
        path = train(model, optimizer, rank, world, run, BREAK, last_step(method))
        found.append(Checkpoint(run, *saved, torch.stack(path)))
        optimizer.close()
    return found


def go_on(rank: int, world: int, strategy: str, checkpoints: list[Checkpoint]) -> list[Tensor]:
    paths = []
    for run, model_state, state, path in checkpoints:
        model, optimizer = started(rank, strategy, run)
        shifted(model).load_state_dict(model_state)
        before = len(optimizer.comm.collectives.counter.records)
        optimizer.load_state_dict(state)
        assert len(optimizer.comm.collectives.counter.records) == before
        paths.append(torch.stack(train(model, optimizer, rank, world, run, BREAK, BREAK + len(path))))
        optimizer.close()
    return paths


def judge(checkpoints: list[Checkpoint], paths: list[list[Tensor]], exact: bool) -> None:
    """Every rank goes on alike; the first step to 1e-10, and to the bit where nothing has changed."""
    for i, checkpoint in enumerate(checkpoints):
        for of_rank in paths:
            assert torch.equal(of_rank[i], paths[0][i]), checkpoint.run.method
        if exact:
            assert torch.equal(paths[0][i], checkpoint.path), checkpoint.run.method
        assert distance(paths[0][i][:1], checkpoint.path[:1]) < 1e-10, checkpoint.run.method
        assert distance(paths[0][i], checkpoint.path) < 1e-9, checkpoint.run.method


@pytest.fixture(scope="module")
def saved_at_two(pool: Pool) -> dict[str, list[Checkpoint]]:
    """Checkpoints of two ranks by strategy."""
    return {strategy: pool.run(save, strategy, QUICK, world=2)[0] for strategy in ("comm", "mem")}


@pytest.mark.parametrize("before", ["comm", "mem"])
@pytest.mark.parametrize(
    ("world", "after"),
    [
        *((w, s) for w, names in STRATEGIES.items() for s in names if w < 3 or s != "comm"),
        *(pytest.param(w, "comm", marks=pytest.mark.slow) for w in (3, 4)),
    ],
)
def test_from_two_ranks_to_others(
    pool: Pool, saved_at_two: dict[str, list[Checkpoint]], before: str, world: int, after: str
) -> None:
    checkpoints = [c for c in saved_at_two[before] if after != "chief" or c.run.method.startswith(("kfac", "ekfac"))]
    judge(checkpoints, pool.run(go_on, after, checkpoints, world=world), exact=(world, after) == (2, before))


@pytest.mark.parametrize(
    ("old", "before", "new", "after"),
    [(1, "mem", 4, "hybrid_half"), (4, "hybrid_half", 2, "mem"), (4, "mem", 1, "comm"), (3, "mem", 4, "comm")],
)
def test_from_other_worlds(pool: Pool, old: int, before: str, new: int, after: str) -> None:
    checkpoints = pool.run(save, before, ("kfac_cholesky", "ekfac_running", "ggt"), world=old)[0]
    judge(checkpoints, pool.run(go_on, after, checkpoints, world=new), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_every_method_from_every_world_to_every_other(pool: Pool, before: int, after: int) -> None:
    for old in STRATEGIES[before]:
        methods = tuple(m for m in METHODS if old != "chief" or m.startswith(("kfac", "ekfac")))
        checkpoints = pool.run(save, old, methods, world=before, timeout=200)[0]
        for new in STRATEGIES[after]:
            fit = [c for c in checkpoints if new != "chief" or c.run.method.startswith(("kfac", "ekfac"))]
            paths = pool.run(go_on, new, fit, world=after, timeout=200)
            judge(fit, paths, exact=(before, old) == (after, new))


@pytest.mark.slow
@pytest.mark.parametrize("after", OF_FACTORS)
@pytest.mark.parametrize("before", OF_FACTORS)
def test_strategies_that_say_where_factors_are(pool: Pool, before: str, after: str) -> None:
    """The estimate of `local_factors` is another one: only the step that makes none is the same."""
    checkpoints = pool.run(save, before, ("kfac_eigen", "kfac_cholesky", "ekfac_intra"), world=2)[0]
    if "local_factors" in (before, after) and before != after:
        checkpoints = [c._replace(path=c.path[:1]) for c in checkpoints if c.run.method.startswith("kfac")]
    judge(checkpoints, pool.run(go_on, after, checkpoints, world=2), exact=before == after)


def lean_path(rank: int, world: int, strategy: str, run: Run, saved: Any) -> Tensor:
    model, optimizer = started(rank, strategy, run)
    if saved is None:
        train(model, optimizer, rank, world, run, 0, BREAK)
        optimizer.consolidate_state_dict()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*partial")
            return through_a_file((model.state_dict(), optimizer.state_dict()))
    shifted(model).load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return torch.stack(train(model, optimizer, rank, world, run, BREAK, END))


@pytest.mark.parametrize("kind", ["factors", "none"])
def test_checkpoints_without_curvature_load_alike_everywhere(pool: Pool, kind: str) -> None:
    """What they leave out is found anew, the same in every world."""
    run = Run(method="kfac_eigen", keywords={"checkpoint_curvature": kind})
    saved = pool.run(lean_path, "mem", run, None, world=2)[0]
    paths = {
        (world, strategy): pool.run(lean_path, strategy, run, saved, world=world)
        for world, strategy in ((1, "mem"), (2, "mem"), (2, "comm"), (4, "hybrid_half"))
    }
    reference = paths[1, "mem"][0]
    for of_ranks in paths.values():
        assert all(torch.equal(path, of_ranks[0]) for path in of_ranks)
        assert distance(of_ranks[0], reference) < 1e-9
