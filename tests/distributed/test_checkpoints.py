"""What a rank saves alone and what it lacks, who refuses it, and how `consolidate_state_dict` completes it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.grid import each
from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, assert_replicas, build, descend
from tests.support.pool import Pool
from tests.support.saving import Saved, raised, shifted, snapshot, started, through_a_file, train
from tests.support.tasks import assert_identical

BREAK, END = 5, 11
MEND = "consolidate_state_dict() on all ranks"


def tensors(saved: Saved) -> dict[tuple[int, str], Tensor]:
    return {(i, k): v for i, found in saved["state"].items() for k, v in found.items() if isinstance(v, Tensor)}


# ---------------------------------------------------------------------------------------------------------------------
# Alone
# ---------------------------------------------------------------------------------------------------------------------


def saved_alone(rank: int, world: int, strategy: str, method: str) -> tuple[Saved, list[str], list[str], int]:
    """What every rank saves by itself; what it warns of before training, twice after it; messages meanwhile."""
    model, optimizer = started(rank, strategy, Run(method=method))
    texts = []
    for steps in (0, 2, 0):
        train(model, optimizer, rank, world, Run(method=method), 0, steps)
        before = len(optimizer.comm.collectives.counter.records)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = optimizer.state_dict()
        texts.append([str(w.message) for w in caught])
    sent = len(optimizer.comm.collectives.counter.records) - before
    return through_a_file(saved), texts[0] + texts[2], texts[1], sent


@pytest.mark.parametrize(("strategy", "world"), [("hybrid_half", 4), ("comm_owner", 2)])
def test_a_rank_alone_saves_what_it_holds_and_says_so(pool: Pool, strategy: str, world: int) -> None:
    for rank, (saved, otherwise, warned, sent) in enumerate(pool.run(saved_alone, strategy, "kfac_eigen", world=world)):
        (mark,) = saved["partial"]
        assert f"rank {rank} of {world}" in mark
        assert otherwise == []
        assert len(warned) == 1
        assert mark in warned[0]
        assert MEND in warned[0]
        assert sent == 0


@pytest.mark.parametrize("method", ["kfac_cholesky", "ekfac_running"])
def test_under_comm_opt_every_rank_saves_everything(pool: Pool, method: str) -> None:
    first, second = pool.run(saved_alone, "comm", method, world=2)
    assert first[0].keys() == {"state", "param_groups"}
    assert first[1:] == ([], [], 0)
    assert_identical(second[0], first[0])


def shapes_of_state(rank: int, world: int, strategy: str, method: str) -> dict[tuple[int, str], Any]:
    model, optimizer = started(rank, strategy, Run(method=method))
    train(model, optimizer, rank, world, Run(method=method), 0, 2)
    return {place: tuple(t.shape) for place, t in tensors(snapshot(optimizer)).items()}


def test_owners_alone_have_their_layers(pool: Pool) -> None:
    whole = shapes_of_one_process("kfac_eigen")
    parts = pool.run(shapes_of_state, "mem", "kfac_eigen", world=2)
    curvature = [{place for place in part if place[1].startswith(("factor_", "basis_"))} for part in parts]
    assert not curvature[0] & curvature[1]
    assert parts[0] | parts[1] == whole
    # of two ranks in a column both precondition a layer, and one has its factors
    half = pool.run(shapes_of_state, "hybrid_half", "kfac_eigen", world=4)
    for key, owners in (("factor_a", 1), ("basis_a", 2)):
        assert [sum((i, key) in part for part in half) for i in (0, 2, 4)] == [owners] * 3


def shapes_of_one_process(method: str) -> dict[tuple[int, str], Any]:
    model = TASKS["mlp"].model()
    optimizer = build(method, model)
    descend(model, optimizer, TASKS["mlp"].batch(0), Run())
    return {place: tuple(t.shape) for place, t in tensors(optimizer.state_dict()).items()}


def saved_by_one(rank: int, world: int) -> Saved | None:
    """Rank 0 saves alone in the middle of training, as trainers do."""
    model, optimizer = started(rank, "mem", Run())
    saved = None
    for step in range(3):
        train(model, optimizer, rank, world, Run(), step, step + 1)
        if rank == 0:
            saved = snapshot(optimizer)
    return saved


def test_one_rank_may_save_alone_while_the_others_train_on(pool: Pool) -> None:
    saved, nothing = pool.run(saved_by_one, world=2, timeout=20)
    assert nothing is None
    assert "partial" in saved


# ---------------------------------------------------------------------------------------------------------------------
# Together
# ---------------------------------------------------------------------------------------------------------------------


def consolidated(rank: int, world: int, strategy: str, method: str, to: int | None, keywords: Any) -> dict[str, Any]:
    run = Run(method=method, keywords=keywords)
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, BREAK)
    own = snapshot(optimizer)
    assert optimizer.consolidate_state_dict(to=to) is None
    complete = snapshot(optimizer)
    train(model, optimizer, rank, world, run, BREAK, BREAK + 1)
    return {
        "own": own,
        "complete": complete,
        "later": snapshot(optimizer),
        "gathered": len(optimizer._checkpoint.gathered.tensors),
    }


def one_process(method: str, keywords: Any = None) -> Saved:
    run = Run(method=method, keywords=keywords or {})
    model = TASKS[run.task].model()
    optimizer = build(method, model, **run.keywords)
    for step in range(BREAK):
        descend(model, optimizer, run.batch(step), run)
    return copy.deepcopy(optimizer.state_dict())


#: The last batch is in no refresh yet: its statistics have to be in the checkpoint all the same.
LATE = {"factor_update_steps": 1, "inv_update_steps": 3}


@each(method=["kfac_eigen", "ekfac_running"], where=[("mem", 3, 2), ("hybrid_half", 4, 0)])
def test_consolidated_state_is_that_of_one_process(pool: Pool, method: str, where: tuple[str, int, int]) -> None:
    strategy, world, to = where
    expected = one_process(method, LATE)
    for rank, found in enumerate(pool.run(consolidated, strategy, method, to, LATE, world=world)):
        complete = found["complete"]
        assert ("partial" in complete) == (rank != to)
        assert "partial" in found["later"]
        assert found["gathered"] == 0
        if rank == to:
            assert complete.keys() == expected.keys()
            own, whole = tensors(complete), tensors(expected)
            assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in whole.items()}
            for place, tensor in whole.items():
                if not place[1].startswith("basis"):  # signs of eigenvectors are chance
                    torch.testing.assert_close(own[place], tensor, rtol=1e-8, atol=1e-10)
            assert all(tensor.device.type == "cpu" for tensor in own.values())


@pytest.mark.parametrize("kind", ["factors", "none"])
def test_what_a_checkpoint_leaves_out_is_not_missed(pool: Pool, kind: str) -> None:
    expected = tensors(one_process("kfac_eigen", {"checkpoint_curvature": kind})).keys()
    first, second = pool.run(consolidated, "mem", "kfac_eigen", 0, {"checkpoint_curvature": kind}, world=2)
    assert tensors(first["complete"]).keys() == expected
    assert ("partial" in second["own"]) == (kind == "factors")


@pytest.mark.parametrize("method", ["kfac_eigen", "ekfac_intra", "mfac"])
def test_on_every_rank(pool: Pool, method: str) -> None:
    answers = pool.run(consolidated, "mem", method, None, {}, world=3)
    for found in answers:
        assert "partial" not in found["complete"]
        assert_identical(found["complete"], answers[0]["complete"])
        assert "partial" in found["later"]
        assert found["gathered"] == 0


def bad_targets(rank: int, world: int) -> list[tuple[str, str]]:
    _, optimizer = started(rank, "mem", Run())
    return [raised(optimizer.consolidate_state_dict, to) for to in (2, -1, True, "0")]


def test_there_must_be_such_a_rank(pool: Pool) -> None:
    for of_rank in pool.run(bad_targets, world=2):
        assert all(kind == "ValueError" and "rank below 2" in text for kind, text in of_rank)


def test_one_process_has_everything_already() -> None:
    model = TASKS["mlp"].model()
    optimizer = build("kfac_eigen", model)
    assert optimizer.consolidate_state_dict() is None
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    with pytest.raises(ValueError, match="rank below 1"):
        optimizer.consolidate_state_dict(1)


def alone_in_consolidation(rank: int, world: int) -> tuple[str, str]:
    """Rank 0 consolidates while rank 1 is elsewhere; later both do."""
    model, optimizer = started(rank, "mem", Run(), timeout=3.0)
    train(model, optimizer, rank, world, Run(), 0, 1)
    answer = raised(optimizer.consolidate_state_dict) if rank == 0 else ("", "")
    dist.barrier()
    train(model, optimizer, rank, world, Run(), 1, 2)
    optimizer.consolidate_state_dict()
    return answer


def test_on_some_ranks_only_it_raises_with_the_mend(pool: Pool) -> None:
    first, _ = pool.run(alone_in_consolidation, world=2, timeout=40, group_timeout=30)
    assert first[0] == "RuntimeError"
    for word in ("consolidate_state_dict()", "on all ranks", "3 s", "only rank 0 of 2"):
        assert word in first[1]


# ---------------------------------------------------------------------------------------------------------------------
# Loading what a rank saved alone
# ---------------------------------------------------------------------------------------------------------------------


def broken_off(rank: int, world: int, strategy: str, run: Run) -> tuple[Saved, Saved, Tensor]:
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, BREAK)
    saved = through_a_file(snapshot(optimizer)), through_a_file(model.state_dict())
    path = train(model, optimizer, rank, world, run, BREAK, END)
    return *saved, torch.stack(path)


def resumed(rank: int, world: int, strategy: str, run: Run, saved: list[tuple[Saved, Saved]]) -> tuple[Tensor, int]:
    """Load what the same rank saved, into a model that is somewhere else; messages that this takes."""
    model, optimizer = started(rank, strategy, run)
    shifted(model).load_state_dict(saved[rank][1])
    before = len(optimizer.comm.collectives.counter.records)
    optimizer.load_state_dict(saved[rank][0])
    sent = len(optimizer.comm.collectives.counter.records) - before
    return torch.stack(train(model, optimizer, rank, world, run, BREAK, END)), sent


@each(
    method=["kfac_eigen", "ekfac_running"],
    where=[("mem", 2), ("comm", 2), ("hybrid_half", 4), ("local_factors", 2)],
)
def test_every_rank_goes_on_exactly_with_what_it_saved(pool: Pool, method: str, where: tuple[str, int]) -> None:
    strategy, world = where
    run = Run(method=method)
    before = pool.run(broken_off, strategy, run, world=world)
    after = pool.run(resumed, strategy, run, [(own, model) for own, model, _ in before], world=world)
    for (_, _, expected), (path, sent) in zip(before, after, strict=True):
        assert torch.equal(path, expected)
        assert sent == 0


def load(rank: int, world: int, strategy: str, saved: Saved) -> tuple[str, str, bool]:
    """What loading says, and whether it left the optimizer as it was."""
    model, optimizer = started(rank, strategy, Run())
    train(model, optimizer, rank, world, Run(), 0, 1)
    before = snapshot(optimizer)
    kind, text = raised(optimizer.load_state_dict, saved)
    try:
        assert_identical(snapshot(optimizer), before)
    except AssertionError:
        return kind, text, False
    return kind, text, True


OTHERS = {
    "another rank": ("mem", 2, [1]),
    "another world": ("mem", 3, [0, 1, 2]),
    "another strategy": ("comm", 2, [0, 1]),
    "another fraction": ("hybrid_half", 2, [0, 1]),
    "one process": ("mem", 1, [0]),
}


def test_what_one_rank_saved_is_refused_elsewhere(pool: Pool) -> None:
    saved = pool.run(broken_off, "mem", Run(), world=2)[0][0]
    for other, (strategy, world, ranks) in OTHERS.items():
        answers = pool.run(load, strategy, saved, world=world)
        for rank in ranks:
            kind, text, untouched = answers[rank]
            assert kind == "RuntimeError", (other, answers[rank])
            for word in ("partial", "rank 0 of 2 under MemOpt()", f"rank {rank} of {world}", MEND):
                assert word in text, other
            assert untouched, other


def test_a_mark_that_was_lost_does_not_hide_what_is_missing(pool: Pool) -> None:
    """Trainers copy the two usual keys only."""
    saved = pool.run(broken_off, "mem", Run(), world=2)[0][0]
    saved.pop("partial")
    (kept, refused), (alone,) = pool.run(load, "mem", saved, world=2), pool.run(load, "mem", saved, world=1)
    assert kept[0] == ""
    for kind, text, untouched in (refused, alone):
        assert kind == "RuntimeError"
        assert "factor_a is missing" in text
        assert MEND in text
        assert untouched


def test_a_wrong_checkpoint_is_still_a_wrong_checkpoint(pool: Pool) -> None:
    wrong = copy.deepcopy(one_process("kfac_eigen"))
    wrong["state"][0]["surprise"] = torch.zeros(1)
    for kind, text, untouched in pool.run(load, "mem", wrong, world=2):
        assert kind == "ValueError"
        assert "surprise" in text
        assert untouched


def own_state_again(rank: int, world: int, strategy: str, run: Run) -> tuple[Tensor, Tensor]:
    """Wrappers of optimizers load their own state at construction."""
    paths = []
    for again in (False, True):
        model, optimizer = started(rank, strategy, run)
        if again:
            optimizer.load_state_dict(optimizer.state_dict())
        path = train(model, optimizer, rank, world, run, 0, 3)
        if again:
            optimizer.load_state_dict(snapshot(optimizer))
        paths.append(torch.stack(path + train(model, optimizer, rank, world, run, 3, 7)))
    return paths[0], paths[1]


@pytest.mark.parametrize("strategy", ["mem", "comm"])
def test_loading_ones_own_state_changes_nothing(pool: Pool, strategy: str) -> None:
    for silent, again in pool.run(own_state_again, strategy, Run(), world=2):
        assert torch.equal(again, silent)


def renewed_late(rank: int, world: int) -> dict[str, tuple[Tensor, list[int]]]:
    """Go on from factors alone: at once, from what is saved before the first step, and in a copy."""
    run = Run(keywords={"factor_update_steps": 1, "refresh_warmup": False, "checkpoint_curvature": "factors"})
    trained, optimizer = started(rank, "mem", run)
    train(trained, optimizer, rank, world, run, 0, BREAK)
    optimizer.consolidate_state_dict(to=None)
    saved, found = snapshot(optimizer), {}
    for how in ("once", "twice", "copied"):
        model, optimizer = started(rank, "mem", run)
        model.load_state_dict(trained.state_dict())
        optimizer.load_state_dict(saved)
        if how == "twice":
            optimizer.load_state_dict(snapshot(optimizer))
        if how == "copied":
            model, optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)
            optimizer.attach(model)
        refreshes = [optimizer.state[block.owner]["refreshes"] for block in optimizer.preconditioner.plan.blocks]
        found[how] = torch.stack(train(model, optimizer, rank, world, run, BREAK, BREAK + 4)), refreshes
    return found


def test_loaded_factors_may_be_saved_and_copied_before_the_first_step(pool: Pool) -> None:
    first, second = pool.run(renewed_late)
    for how in ("once", "twice", "copied"):
        assert torch.equal(first[how][0], second[how][0])
        assert torch.equal(first[how][0], first["once"][0])
        assert first[how][1] == second[how][1] == [2, 2, 2]


def ordered(saved: Saved, backwards: bool) -> Saved:
    """The same state; its keys from A to Z or from Z to A."""

    def arrange(state: dict[str, Any]) -> dict[str, Any]:
        return {key: state[key] for key in sorted(state, reverse=backwards)}

    return {**saved, "state": {i: arrange(state) for i, state in saved["state"].items()}}


def resumed_in_order(rank: int, world: int, method: str) -> tuple[Tensor, Tensor]:
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
        paths.append(torch.stack(train(twin_model, twin, rank, world, run, BREAK, BREAK + 4)))
        twin.close()
    optimizer.close()
    return paths[0], paths[1]


@pytest.mark.parametrize("method", ["kfac_eigen", "ekfac_intra"])
def test_the_order_of_keys_in_a_loaded_state_changes_nothing(pool: Pool, method: str) -> None:
    alike, unlike = zip(*pool.run(resumed_in_order, method), strict=True)
    assert_replicas(list(alike))
    assert_replicas(list(unlike))
    assert torch.equal(unlike[0], alike[0])


def one_rank_loads(rank: int, world: int, saved: Saved) -> bool:
    """Loading sends nothing: a rank may do it while the others wait elsewhere."""
    _, optimizer = started(rank, "mem", Run())
    if rank == 0:
        optimizer.load_state_dict(saved)
    dist.barrier()
    return True


def test_loading_needs_no_other_rank(pool: Pool) -> None:
    assert pool.run(one_rank_loads, one_process("kfac_eigen"), world=2, timeout=20) == [True, True]


# ---------------------------------------------------------------------------------------------------------------------
# A layer that is frozen
# ---------------------------------------------------------------------------------------------------------------------


def resumed_beside_a_frozen_layer(
    rank: int, world: int, strategy: str, method: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Paths of a run in which a layer is frozen for a while, and of one that is resumed meanwhile."""
    run = Run(method=method)
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 3)
    model[0].requires_grad_(False)
    train(model, optimizer, rank, world, run, 3, BREAK)
    optimizer.consolidate_state_dict(to=None)
    other = TASKS[run.task].model(model[0].weight.device)
    other.load_state_dict(model.state_dict())
    other[0].requires_grad_(False)
    second = build(method, other, STRATEGIES[strategy](average_gradients=True), **run.keywords)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the curvature of frozen parameters")
        second.load_state_dict(through_a_file(optimizer.state_dict()))
    paths = []
    for net, opt in ((model, optimizer), (other, second)):
        paths.append(train(net, opt, rank, world, run, BREAK, 7))
        net[0].requires_grad_(True)
        paths[-1] += train(net, opt, rank, world, run, 7, END)
    return paths[0], paths[1]


@pytest.mark.parametrize(
    ("strategy", "method"), [("comm", "kfac_eigen"), ("comm", "hylo_kid"), ("mem", "kfac_eigen"), ("mem", "mfac")]
)
def test_a_run_resumes_beside_a_frozen_layer(pool: Pool, strategy: str, method: str) -> None:
    """Where the curvature of a frozen layer is on one rank, it begins anew on all when the layer is unfrozen."""
    for expected, found in pool.run(resumed_beside_a_frozen_layer, strategy, method, world=2):
        if strategy == "comm":
            assert_identical(found, expected)
        else:  # layers and windows have other owners, which changes the order of sums
            torch.testing.assert_close(found[: 7 - BREAK], expected[: 7 - BREAK])
            assert all(x.isfinite().all() for x in found)
