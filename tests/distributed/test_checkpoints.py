"""The partial state that a single rank saves, when it is refused, and how `consolidate_state_dict` completes it."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import prune

from secondorder import LowRank
from tests.support.grid import each
from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, alone, assert_replicas, build
from tests.support.pool import Pool, everywhere, on_every_rank
from tests.support.saving import Saved, interrupted, raised, resumed, snapshot, started, through_a_file, train
from tests.support.tasks import assert_identical
from tests.support.warned import warned

BREAK, END = 5, 11
REMEDY = "consolidate_state_dict() on all ranks"


def tensors(saved: Saved) -> dict[tuple[int, str], Tensor]:
    return {(i, k): v for i, found in saved["state"].items() for k, v in found.items() if isinstance(v, Tensor)}


def shapes(saved: Saved) -> dict[tuple[int, str], Any]:
    return {place: tuple(t.shape) for place, t in tensors(saved).items()}


def one_process(run: Run) -> Saved:
    return copy.deepcopy(alone(run)[2].state_dict())


# ------------------------------------------------------------------------------------------------- Saved by one rank
def saved_with_warnings(optimizer: Any) -> tuple[Saved, list[str]]:
    with warned() as caught:
        saved = optimizer.state_dict()
    return saved, caught


@pytest.mark.parametrize(("strategy", "world"), [("mem", 2), ("hybrid_half", 4), ("comm_owner", 2)])
@on_every_rank()
def test_one_rank_saves_its_own_part_with_one_warning(rank: int, world: int, strategy: str) -> None:
    """It does not communicate."""
    run = Run(steps=2)
    model, optimizer = started(rank, strategy, run)
    assert saved_with_warnings(optimizer)[1] == []
    train(model, optimizer, rank, world, run, 0, 2)
    sent = len(optimizer.comm.collectives.counter.records)
    saved, (warning,) = saved_with_warnings(optimizer)
    if rank == 0:  # may save and load without the others
        assert saved_with_warnings(optimizer)[1] == []
        optimizer.load_state_dict(saved)
    assert len(optimizer.comm.collectives.counter.records) == sent
    (mark,) = saved["partial"]
    assert f"rank {rank} of {world}" in mark
    assert mark in warning
    assert REMEDY in warning
    parts = everywhere(shapes(saved))
    if strategy == "mem":
        curvature = [{place for place in part if place[1].startswith(("factor_", "basis_"))} for part in parts]
        assert not curvature[0] & curvature[1]
        optimizer.consolidate_state_dict(to=None)
        assert parts[0] | parts[1] == shapes(optimizer.state_dict())
    if strategy == "hybrid_half":  # both ranks of a column precondition a layer, and one of them has its factors
        for key, owners in (("factor_a", 1), ("basis_a", 2)):
            assert [sum((i, key) in part for part in parts) for i in (0, 2, 4)] == [owners] * 3


@on_every_rank(2)
def test_under_comm_opt_every_rank_saves_everything(rank: int, world: int) -> None:
    for method in ("kfac_cholesky", "ekfac_running"):
        model, optimizer = started(rank, "comm", Run(method=method))
        train(model, optimizer, rank, world, Run(), 0, 2)
        saved, texts = saved_with_warnings(optimizer)
        assert (saved.keys(), texts) == ({"state", "param_groups"}, [])
        assert_identical(*everywhere(through_a_file(saved)))


# ------------------------------------------------------------------------------------------------------ Consolidated
def consolidated(rank: int, world: int, strategy: str, to: int | None, run: Run) -> tuple[Saved, Saved, Saved]:
    """The state before and after a consolidation, and after another step."""
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, BREAK)
    own = snapshot(optimizer)
    assert optimizer.consolidate_state_dict(to=to) is None
    complete = snapshot(optimizer)
    train(model, optimizer, rank, world, run, BREAK, BREAK + 1)
    assert len(optimizer._checkpoint.gathered.tensors) == 0
    return own, complete, snapshot(optimizer)


#: No refresh has used the last batch yet, but its statistics have to be in the checkpoint.
LATE = {"factor_update_steps": 1, "inv_update_steps": 3}
DECAYED = {"weight_decay": 0.1, "weight_decay_mode": "both", "momentum_mode": "pre", "partition": "layer"}
COMPLETE = {
    "kfac": Run(method="kfac_eigen", keywords=LATE, steps=BREAK),
    "ekfac": Run(method="ekfac_running", keywords=LATE, steps=BREAK),
    "sparse": Run("cnn", "mfac_sparse", steps=BREAK),
    "low rank": Run("cnn", "mfac", {"compression": LowRank(1)}, steps=BREAK),
    "decay by layer": Run("cnn", "mfac", DECAYED, steps=BREAK),
}


@each(run=COMPLETE, where=[("mem", 3, 2), ("hybrid_half", 4, 0)])
def test_consolidated_state_is_that_of_one_process(pool: Pool, run: Run, where: tuple[str, int, int]) -> None:
    strategy, world, to = where
    expected = one_process(run)
    _, of_ranks, later = zip(*pool.run(consolidated, strategy, to, run, world=world), strict=True)
    assert [rank for rank, saved in enumerate(of_ranks) if "partial" not in saved] == [to]
    assert all("partial" in saved for saved in later)
    complete = of_ranks[to]
    assert complete.keys() == expected.keys()
    assert shapes(complete) == shapes(expected)
    for place, tensor in tensors(complete).items():
        assert tensor.device.type == "cpu"
        assert tensor.dtype == tensors(expected)[place].dtype
        if not place[1].startswith("basis"):  # signs of eigenvectors are arbitrary
            torch.testing.assert_close(tensor, tensors(expected)[place], rtol=1e-8, atol=1e-10)


def test_a_checkpoint_without_curvature_is_complete_without_it(pool: Pool) -> None:
    for kind in ("factors", "none"):
        run = Run(keywords={"checkpoint_curvature": kind}, steps=BREAK)
        (_, complete, _), (own, *_) = pool.run(consolidated, "mem", 0, run)
        assert tensors(complete).keys() == tensors(one_process(run)).keys()
        assert ("partial" in own) == (kind == "factors")


@on_every_rank(3)
def test_a_state_may_be_completed_on_all_ranks_and_only_on_existing_ones(rank: int, world: int) -> None:
    for method in ("kfac_eigen", "ekfac_intra", "mfac"):
        _, complete, later = consolidated(rank, world, "mem", None, Run(method=method))
        assert ("partial" in complete, "partial" in later) == (False, True)
        assert_identical(complete, everywhere(complete)[0])
    _, optimizer = started(rank, "mem", Run())
    for to in (3, -1, True, "0"):
        with pytest.raises(ValueError, match="rank below 3"):
            optimizer.consolidate_state_dict(to)


def test_the_state_of_one_process_is_always_complete() -> None:
    optimizer = build("kfac_eigen", TASKS["mlp"].model())
    assert optimizer.consolidate_state_dict() is None
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    with pytest.raises(ValueError, match="rank below 1"):
        optimizer.consolidate_state_dict(1)


@on_every_rank(2, timeout=40, group_timeout=30)
def test_consolidation_on_some_ranks_only_raises_with_the_remedy(rank: int, world: int) -> None:
    model, optimizer = started(rank, "mem", Run(), timeout=2.0)
    train(model, optimizer, rank, world, Run(), 0, 1)
    if rank == 0:  # rank 1 does not take part
        kind, text = raised(optimizer.consolidate_state_dict)
        assert kind == "RuntimeError"
        for word in ("consolidate_state_dict()", "on all ranks", "2 s", "only rank 0 of 2"):
            assert word in text
    dist.barrier()
    train(model, optimizer, rank, world, Run(), 1, 2)
    optimizer.consolidate_state_dict()


# -------------------------------------------------------------------------------------------- Loading a partial state
def continued(rank: int, world: int, strategy: str, run: Run) -> tuple[Tensor, Tensor]:
    """The trajectory after a break, and that of another optimizer, which loads what this rank saved."""
    own = interrupted(rank, world, strategy, run, BREAK)
    return own[-1], resumed(rank, world, strategy, run, [own] * world, BREAK)


EXACTLY = {"rows": Run(method="hylo_kid"), **COMPLETE}


@each(
    lambda run, where: where[0] != "local_factors" or run.task == "mlp",
    where=[("mem", 2), ("comm", 2), ("hybrid_half", 4), ("local_factors", 2)],
    run=EXACTLY,
)
def test_every_rank_continues_exactly_from_its_own_state(pool: Pool, run: Run, where: tuple[str, int]) -> None:
    strategy, world = where
    for expected, path in pool.run(continued, strategy, replace(run, steps=END), world=world):
        assert torch.equal(path, expected)


def load(rank: int, world: int, strategy: str, run: Run, *states: Saved) -> list[tuple[str, str]]:
    """The errors of loading some states; a refused state does not change the optimizer."""
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 1)
    before, found = snapshot(optimizer), []
    for saved in states:
        found.append(raised(optimizer.load_state_dict, saved))
        if found[-1][0]:
            assert_identical(snapshot(optimizer), before)
        else:
            optimizer.load_state_dict(before)
    return found


def test_what_one_rank_saved_is_refused_elsewhere(pool: Pool) -> None:
    """This holds even without the mark of a partial state, which is lost if a trainer only copies the usual keys."""
    run = Run(steps=BREAK + 1)
    saved = pool.run(interrupted, "mem", run, BREAK)[0][0]
    bare = {key: value for key, value in saved.items() if key != "partial"}
    wrong = one_process(run)
    wrong["state"][0]["surprise"] = torch.zeros(1)
    for other, strategy, world, ranks in (
        ("another rank", "mem", 2, [1]),
        ("another world", "mem", 3, [0, 1, 2]),
        ("another strategy", "comm", 2, [0, 1]),
        ("another fraction", "hybrid_half", 2, [0, 1]),
        ("one process", "mem", 1, [0]),
    ):
        answers = pool.run(load, strategy, run, saved, bare, wrong, world=world)
        for rank in ranks:
            (kind, text), unmarked, _ = answers[rank]
            assert kind == "RuntimeError", (other, answers[rank])
            for word in ("partial", "rank 0 of 2 under MemOpt()", f"rank {rank} of {world}", REMEDY):
                assert word in text, other
            if other in ("another rank", "one process"):
                assert unmarked[0] == "RuntimeError", other
                assert "factor_a is missing" in unmarked[1]
                assert REMEDY in unmarked[1]
        for _, _, (kind, text) in answers:  # an invalid checkpoint has a different error
            assert kind == "ValueError"
            assert "surprise" in text
        if other == "another rank":
            assert answers[0][:2] == [("", ""), ("", "")]


@on_every_rank(2)
def test_loaded_factors_may_be_saved_and_copied_before_the_first_step(rank: int, world: int) -> None:
    """A run continues from factors alone: at once, after another save, in a copy, and if another layer was pruned."""
    run = Run(keywords={"factor_update_steps": 1, "refresh_warmup": False, "checkpoint_curvature": "factors"})
    trained, optimizer = started(rank, "mem", run)
    train(trained, optimizer, rank, world, run, 0, BREAK)
    optimizer.consolidate_state_dict(to=None)
    saved, paths = snapshot(optimizer), []
    for how in ("once", "twice", "copied", "pruned"):
        model, optimizer = started(rank, "mem", run)
        model.load_state_dict(trained.state_dict())
        if how == "pruned":
            prune.l1_unstructured(model[0], "weight", amount=0.5)
        optimizer.load_state_dict(saved)
        if how == "twice":
            optimizer.load_state_dict(snapshot(optimizer))
        if how == "copied":
            model, optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)
            optimizer.attach(model)
        refreshes = {block.name: block.state["refreshes"] for block in optimizer.preconditioner.plan.blocks}
        assert refreshes == dict.fromkeys(("2", "4") if how == "pruned" else ("0", "2", "4"), 2)
        paths.append(torch.stack(train(model, optimizer, rank, world, run, BREAK, BREAK + 4)))
    for of_ranks in zip(*everywhere(paths), strict=True):
        assert_replicas(list(of_ranks))
    assert_replicas(paths[:3])


@on_every_rank(2)
def test_the_order_of_keys_in_a_loaded_state_changes_nothing(rank: int, world: int) -> None:
    """The order is the same on all ranks, or different on the last one."""
    for method in ("kfac_eigen", "ekfac_intra"):
        run = Run(method=method)
        model, optimizer = started(rank, "mem", run)
        train(model, optimizer, rank, world, run, 0, BREAK)
        optimizer.consolidate_state_dict(to=None)
        saved, paths = through_a_file(optimizer.state_dict()), []
        for backwards in (False, rank == world - 1):
            twin_model, twin = started(rank, "comm", run)
            twin_model.load_state_dict(model.state_dict())
            state = {i: dict(sorted(found.items(), reverse=backwards)) for i, found in saved["state"].items()}
            twin.load_state_dict({**saved, "state": state})
            paths.append(torch.stack(train(twin_model, twin, rank, world, run, BREAK, BREAK + 4)))
            twin.close()
        optimizer.close()
        assert_replicas([path for of_rank in everywhere(paths) for path in of_rank])


@pytest.mark.parametrize(
    ("strategy", "method"), [("comm", "kfac_eigen"), ("comm", "hylo_kid"), ("mem", "kfac_eigen"), ("mem", "mfac")]
)
@on_every_rank(2)
def test_a_run_with_a_frozen_layer_resumes(rank: int, world: int, strategy: str, method: str) -> None:
    """If the curvature of a frozen layer is on one rank only, its estimate starts again when the layer is unfrozen."""
    run = Run(method=method)
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 3)
    model[0].requires_grad_(False)
    train(model, optimizer, rank, world, run, 3, BREAK)
    optimizer.consolidate_state_dict(to=None)
    other = copy.deepcopy(model)
    second = build(method, other, STRATEGIES[strategy](average_gradients=True), **run.keywords)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the curvature of frozen parameters")
        second.load_state_dict(through_a_file(optimizer.state_dict()))
    paths = []
    for net, opt in ((model, optimizer), (other, second)):
        paths.append(train(net, opt, rank, world, run, BREAK, 7))
        net[0].requires_grad_(True)
        paths[-1] += train(net, opt, rank, world, run, 7, END)
    expected, found = paths
    if strategy == "comm":
        assert_identical(found, expected)
    else:  # layers and windows have other owners, which changes the order of sums
        torch.testing.assert_close(found[: 7 - BREAK], expected[: 7 - BREAK])
        assert all(x.isfinite().all() for x in found)
