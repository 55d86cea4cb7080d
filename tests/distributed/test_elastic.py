"""Runs that are saved in one world under one strategy continue in another one with the same trajectory.

One process saves for all after `consolidate_state_dict`, and `torch.load` reads the file with `weights_only=True`; or
each rank writes and reads its own part with `torch.distributed.checkpoint`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from secondorder import LowRank
from tests.support import saving
from tests.support.oracles.ranks import METHODS, Run, distance
from tests.support.pool import Pool, everywhere, on_every_rank
from tests.support.saving import dcp_load, dcp_options, dcp_state, raised, shifted, snapshot, started, train
from tests.support.tasks import assert_identical

# Factors are updated every 2 steps and refreshed every 4: after the break come a plain step, an update, and a refresh.
# Rows that are chosen every 3 steps depend on the shards, and so on the world: only earlier steps can be compared.
BREAK, END, ROWS_END = 5, 10, 6
QUICK = ("kfac_eigen", "ekfac_intra", "hylo_sngd", "hylo_kid", "mfac", "mfac_sparse")
LAYERS = ("kfac_eigen", "kfac_cholesky", "ekfac_intra")
STRATEGIES = {1: ("mem",), 2: ("comm", "mem"), 3: ("comm", "mem", "chief"), 4: ("comm", "mem", "hybrid_half")}
LAYOUTS = {f"{strategy}-{world}": (strategy, world) for world, names in STRATEGIES.items() for strategy in names}
#: Other storages and options.
EXTRA = {
    "hylo_cheaper": Run("cnn", "hylo_sngd", {"kfac_when_cheaper": True}),
    "mfac_low_rank": Run("cnn", "mfac", {"compression": LowRank(1), "momentum_mode": "pre"}),
    "mfac_decay": Run("cnn", "mfac", {"weight_decay": 0.1, "weight_decay_mode": "both", "partition": "layer"}),
    "mfac_sparse_layer": Run("cnn", "mfac_sparse", {"partition": "layer"}),
}
OF_FACTORS = ("comm_owner", "mem_replicated", "local_factors", "chief", "chief_inverses")


class Checkpoint(NamedTuple):
    """A run, its saved state or the folder of its files, and the trajectory ``[steps, P]`` that followed."""

    run: Run
    saved: Any
    path: Tensor


def save(
    rank: int,
    world: int,
    strategy: str,
    methods: tuple[str, ...],
    form: str = "file",
    folder: str = "",
    how: str = "at once",
    keywords: Mapping[str, Any] = {},
) -> list[Checkpoint]:
    """Train, save and continue; with ``how="later"``, while the checkpoint is written."""
    found = []
    for method in methods:
        run = EXTRA.get(method) or Run(method=method, keywords=keywords)
        model, optimizer = started(rank, strategy, run)
        train(model, optimizer, rank, world, run, 0, BREAK)
        if form == "file" or how == "gathered":
            optimizer.consolidate_state_dict(**({} if form == "file" else {"to": None}))
        if form == "file":
            saved = saving.through_a_file((model.state_dict(), snapshot(optimizer)))
        else:
            saved, state = str(Path(folder, method)), dcp_state(model, optimizer, form)
            pending = (checkpoint.async_save if how == "later" else checkpoint.save)(state, checkpoint_id=saved)
        path = train(model, optimizer, rank, world, run, BREAK, ROWS_END if method in ("hylo_kid", "hylo_kis") else END)
        if how == "later":
            pending.result()
        found.append(Checkpoint(run, saved, torch.stack(path)))
        optimizer.close()
    return found


def continue_run(
    rank: int, world: int, strategy: str, found: list[Checkpoint], form: str = "file", how: str = "at once"
) -> list[Tensor]:
    paths = []
    for run, saved, path in found:
        model, optimizer = started(rank, strategy, run)
        shifted(model)
        if form == "file":
            model.load_state_dict(saved[0])
            before = len(optimizer.comm.collectives.counter.records)
            optimizer.load_state_dict(saved[1])
            assert len(optimizer.comm.collectives.counter.records) == before
        else:
            if how == "gathered":
                optimizer.consolidate_state_dict(to=None)
            dcp_load(model, optimizer, form, saved)
        paths.append(torch.stack(train(model, optimizer, rank, world, run, BREAK, BREAK + len(path))))
        optimizer.close()
    return paths


def assert_continued(found: list[Checkpoint], paths: list[list[Tensor]], exact: bool = False) -> None:
    """All ranks continue alike, with the expected trajectory, which is bitwise equal if ``exact`` is true."""
    for i, (run, _, path) in enumerate(found):
        assert all(torch.equal(of_rank[i], paths[0][i]) for of_rank in paths), run.method
        if exact:
            assert torch.equal(paths[0][i], path), run.method
        assert distance(paths[0][i][:1], path[:1]) < 1e-10, run.method
        assert distance(paths[0][i], path) < 1e-9, run.method


# ------------------------------------------------------------------------------------------------------------- One file
def fit_for(strategy: str, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    return [c for c in checkpoints if strategy != "chief" or c.run.method.startswith(("kfac", "ekfac"))]


@pytest.mark.parametrize(
    ("before", "methods", "others"),
    [
        ("mem-2", QUICK, ("comm-2", "hybrid_half-4")),
        ("comm-2", QUICK[1::2], ("mem-3",)),
        ("hybrid_half-4", ("kfac_cholesky", "ekfac_running", "ggt", *EXTRA), ("mem-3", "comm-2")),
    ],
)
def test_some_ranks_continue_from_the_file_of_others(
    pool: Pool, before: str, methods: tuple[str, ...], others: tuple[str, ...]
) -> None:
    strategy, world = LAYOUTS[before]
    checkpoints = pool.run(save, strategy, methods, world=world)[0]
    for after, ranks in (LAYOUTS[other] for other in others):
        assert_continued(checkpoints, pool.run(continue_run, after, checkpoints, world=ranks))


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_every_method_from_every_world_to_every_other(pool: Pool, before: int, after: int) -> None:
    for old in STRATEGIES[before]:
        methods = tuple(m for m in METHODS if old != "chief" or m.startswith(("kfac", "ekfac")))
        checkpoints = pool.run(save, old, methods, world=before, timeout=200)[0]
        for new in STRATEGIES[after]:
            fit = fit_for(new, checkpoints)
            assert_continued(
                fit, pool.run(continue_run, new, fit, world=after, timeout=200), exact=(before, old) == (after, new)
            )


@pytest.mark.slow
@pytest.mark.parametrize("after", OF_FACTORS)
@pytest.mark.parametrize("before", OF_FACTORS)
def test_strategies_that_place_factors(pool: Pool, before: str, after: str) -> None:
    """The estimate of `local_factors` differs from that of others: only the step without an update is the same."""
    checkpoints = pool.run(save, before, LAYERS, world=2)[0]
    if "local_factors" in (before, after) and before != after:
        checkpoints = [c._replace(path=c.path[:1]) for c in checkpoints if c.run.method.startswith("kfac")]
    assert_continued(checkpoints, pool.run(continue_run, after, checkpoints, world=2), exact=before == after)


LEAN = {
    "none": ("kfac_eigen", {"checkpoint_curvature": "none"}),
    "kfac": ("kfac_eigen", {"checkpoint_curvature": "factors"}),
    "running": ("ekfac_running", {"checkpoint_curvature": "factors"}),
    "intra": ("ekfac_intra", {"checkpoint_curvature": "factors", "scale_update_steps": 2}),
}


@pytest.mark.parametrize("kind", LEAN)
def test_checkpoints_without_curvature_load_alike_everywhere(pool: Pool, kind: str) -> None:
    """The curvature is estimated again, with the same result in every world, or computed exactly from the factors."""
    method, keywords = LEAN[kind]
    checkpoints = pool.run(save, "mem", (method,), keywords=keywords)[0]
    for world, strategy in ((2, "comm"), (3, "mem"), (1, "mem")):
        paths = pool.run(continue_run, strategy, checkpoints, world=world)
        if kind == "none" and world == 2:
            checkpoints = [checkpoints[0]._replace(path=paths[0][0])]
        assert_continued(checkpoints, paths)


# ----------------------------------------------------------------------------------------- torch.distributed.checkpoint
class Way(NamedTuple):
    """How methods are saved, the layouts that continue, and the forms, of which the first one is not slow.

    A form is the state dict of the optimizer ("plain"), or torch's nested or flat version of it.
    """

    forms: tuple[str, ...]
    methods: tuple[str, ...]
    saved: str
    loaded: tuple[str, ...]
    how: str = "at once"
    keywords: Mapping[str, Any] = {}


SLICES = ("mfac", "mfac_sparse")
WAYS = {
    "layers": Way(("nested", "plain", "flat"), LAYERS[::2], "mem-2", ("mem-2", "mem-1", "mem-3", "hybrid_half-4")),
    "copies": Way(("flat", "plain", "nested"), LAYERS[::2], "comm-2", ("comm-2", "mem-3")),
    "one process": Way(("plain", "nested", "flat"), LAYERS, "mem-1", ("hybrid_half-4", "comm-3")),
    # The state is copied before `async_save` returns, so that it does not contain later steps.
    "during training": Way(("flat", "plain"), LAYERS[:1], "mem-2", ("mem-2", "comm-3"), "later"),
    # The names of slices of windows differ between ranks, and the same ranks load them.
    "slices": Way(("flat", "plain", "nested"), SLICES, "mem-2", ("mem-2",)),
    "slices of layers": Way(("flat", "plain", "nested"), SLICES, "mem-2", ("mem-2",), keywords={"partition": "layer"}),
    "whole windows": Way(("nested", "plain", "flat"), ("mfac",), "comm-2", ("comm-3", "mem-1")),
    # not in the flat form, because torch only reads the names of the state that a rank has
    "gathered": Way(("nested", "plain"), ("mfac_sparse", "ggt"), "mem-2", ("mem-2", "comm-4", "mem-1"), "gathered"),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if form == way.forms[0] else pytest.mark.slow)
        for name, way in WAYS.items()
        for form in way.forms
    ],
)
def test_ranks_write_and_read_their_parts_of_common_files(pool: Pool, tmp_path: Path, name: str, form: str) -> None:
    way = WAYS[name]
    strategy, world = LAYOUTS[way.saved]
    saved = pool.run(save, strategy, way.methods, form, str(tmp_path), way.how, way.keywords, world=world)[0]
    for layout in way.loaded:
        other, ranks = LAYOUTS[layout]
        paths = pool.run(continue_run, other, saved, form, way.how, world=ranks)
        assert_continued(saved, paths, exact=layout == way.saved)


@pytest.mark.parametrize("form", ["nested", "flat"])
@on_every_rank(2)
def test_full_state_of_one_rank_needs_consolidation(rank: int, world: int, form: str) -> None:
    """Torch only uses the keys of rank 0, and a rank whose keys are lost raises an error."""
    run = Run()
    for first in (False, True):
        model, optimizer = started(rank, "mem", run)
        train(model, optimizer, rank, world, run, 0, BREAK)
        if first:
            optimizer.consolidate_state_dict()
        state = dcp_state(model, optimizer, form, full_state_dict=True)["optim"]
        other, second = started(rank, "mem", run)
        other.load_state_dict(model.state_dict())
        state = everywhere(state)[0]
        kind, message = raised(set_optimizer_state_dict, other, second, state, options=dcp_options(form))
        if first:
            assert (kind, message) == ("", "")
            pairs = ((model, optimizer), (other, second))
            assert_identical(*(train(*pair, rank, world, run, BREAK, END) for pair in pairs))
        elif kind == "KeyError" and rank == 1:  # torch itself raises because of the missing key
            assert (form, torch.__version__ < "2.13") == ("flat", True)
        elif rank == 1:
            assert kind == "RuntimeError"
            assert "consolidate_state_dict() on all ranks" in message
