"""EK-FAC's scale on ranks with examples of layers that they do not precondition: every rank has the bases.

Layers have fewer columns than batches have examples. Otherwise there would be a null space, whose basis depends on
rounding.
"""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder.curvature.eigenbasis import EigenbasisBlock
from tests.support.oracles import ranks
from tests.support.oracles.ekfac import layer_gradients, scales
from tests.support.oracles.ranks import TASKS, Run, alone, assert_replicas, assert_same_path, build, descend, shard
from tests.support.pool import Pool, device_of, everywhere, on_every_rank
from tests.support.saving import interrupted, paths_of, resumed, started, through_a_file, train, trained

RARE = {"inv_update_steps": 2, "scale_update_steps": 4}  # scales are measured less often than bases change
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}
#: Entries of the bases of the task "mixed", whose gradients have these columns and rows.
NUMBERS = sum(n_a**2 + n_g**2 for n_a, n_g in [(19, 3), (7, 5), (6, 4)])


# -------------------------------------------------------------------------------------------------------- What is sent
def test_nothing_is_sent_if_the_ranks_with_the_data_have_the_bases(pool: Pool) -> None:
    run = Run("mixed", "ekfac_intra", RARE, steps=10)
    for strategy in ("comm", "comm_owner", "chief_inverses", "local_factors"):
        found = pool.run(trained, strategy, run)
        for of_rank in found:
            assert not {"rows", "spread"} & of_rank["sent"].keys()
        assert_replicas(paths_of(found))
        if strategy != "local_factors":
            assert_same_path(paths_of(found), alone(run)[0], tolerance=1e-10)


@pytest.mark.parametrize("transport", ["project", "recompute"])
@on_every_rank(3)
def test_bases_are_sent_with_each_refresh_as_in_the_plan(rank: int, world: int, transport: str) -> None:
    """Every rank has all bases, and rows are not sent."""
    run, sent = Run("mixed", "ekfac_intra", {**RARE, "transport": transport}), []
    model, optimizer = started(rank, "mem", run)
    with optimizer:
        for step in range(8):
            optimizer.comm.collectives.counter.clear()
            train(model, optimizer, rank, world, run, step, step + 1)
            sent.append(optimizer.comm.collectives.counter.bytes_by_stage())
        stored, plan = optimizer.memory_usage()["second_order"], optimizer.plan().ranks[rank]
        states = [optimizer.state[block.owner] for block in optimizer.blocks.values()]
    assert [of_step.get("spread", 0) for of_step in sent[4:]] == [8 * NUMBERS, 0] * 2
    assert not any("rows" in of_step for of_step in sent)
    assert plan.sent["spread"] == 8 * NUMBERS / 2
    assert plan.stored["second_order"] == stored
    assert sum(v.numel() for state in states for k, v in state.items() if k.startswith("basis_")) == NUMBERS


def test_replicas_are_equal_even_if_each_rank_samples_its_own_examples(pool: Pool) -> None:
    run = Run("words", "ekfac_intra", {"scale_batch_size": 2, "token_is_example": True}, steps=10)
    assert_replicas(paths_of(pool.run(trained, "mem", run)))


# -------------------------------------------------------------------------------------------- Ranks that cannot measure
def one_rank_refuses(rank: int, world: int, run: Run) -> dict[str, Tensor]:
    """Take two steps, in the second of which the last rank cannot measure its scale."""
    model, measure = DDP(TASKS[run.task].model(device_of(rank))), EigenbasisBlock.new_scales

    def refuse(self: Any, calls: Any = ()) -> Any:
        if calls:
            raise ValueError("examples cannot be distinguished")
        return measure(self)

    with ranks.optimizer_on(model, "mem", run) as optimizer:
        descend(model, optimizer, shard(run.batch(0), rank, world), run)
        with mock.patch.object(EigenbasisBlock, "new_scales", refuse if rank == world - 1 else measure):
            descend(model, optimizer, shard(run.batch(1), rank, world), run)
        return {
            name: optimizer.state[block.owner]["scale"]
            for name, block in optimizer.blocks.items()
            if optimizer.comm.preconditions(block.index)
        }


def test_examples_of_one_rank_are_left_out(pool: Pool) -> None:
    """They are left out of the scale only: bases are those of all examples."""
    run = Run("mlp", "ekfac_intra", {**STILL, "transport": "recompute"})
    found = pool.run(one_rank_refuses, run)
    model = TASKS[run.task].model()
    optimizer = build(run.method, model, **run.keywords)
    for step in range(2):
        descend(model, optimizer, run.batch(step), run)
    inputs, targets = shard(run.batch(1), 0, 2)
    for name, block in optimizer.blocks.items():
        (scale,) = [of_rank[name] for of_rank in found if name in of_rank]
        state, gradients = optimizer.state[block.owner], layer_gradients(model, name, inputs, targets, ranks.mean_loss)
        assert ranks.distance(scale, scales(gradients, state["basis_g"], state["basis_a"])[0]) < 1e-10, name


# --------------------------------------------------------------------------------------------------------- Checkpoints
def without_bases(state: dict[str, Any]) -> dict[str, Any]:
    """The file of a rank of earlier versions, in which only ranks that precondition had bases."""
    for found in state["state"].values():
        if "scale" not in found:
            for key in [key for key in found if key.startswith("basis_")]:
                del found[key]
    return state


def resumed_elsewhere(rank: int, world: int, strategy: str, run: Run, saved: list[Any], at: int) -> Tensor:
    """Continue in an optimizer that has trained before, and so has other bases."""
    model, optimizer = started(rank, strategy, run)
    with optimizer:
        train(model, optimizer, rank, world, run, 0, 2)
        model.load_state_dict(saved[rank][1])
        optimizer.load_state_dict(saved[rank][0])
        return torch.stack(train(model, optimizer, rank, world, run, at, run.steps))


@pytest.mark.parametrize("at", [3, 4])
@on_every_rank(2)
def test_a_resumed_run_goes_on_exactly(rank: int, world: int, at: int) -> None:
    """Files without bases can be loaded, too: bases are sent in the first step, which may measure the scale."""
    run = Run("mixed", "ekfac_intra", {**RARE, "factor_update_steps": 3}, steps=9)
    own, weights, expected = interrupted(rank, world, "mem", run, at)
    old = without_bases(copy.deepcopy(own))
    for state, resume in ((own, resumed), (old, resumed), (old, resumed_elsewhere)):
        path = resume(rank, world, "mem", run, [(state, weights, expected)] * world, at)
        assert torch.equal(path, expected)


def completed(rank: int, world: int, run: Run) -> Any:
    """The complete checkpoint of ranks that have loaded files without some bases, before the first step."""
    state, weights, _ = interrupted(rank, world, "mem", run, 3)
    saved = everywhere(without_bases(state))
    model, optimizer = started(rank, "mem", run)
    with optimizer:
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved[rank])
        optimizer.consolidate_state_dict(to=None)
        complete = through_a_file(optimizer.state_dict())
    for i, found in complete["state"].items():
        for key in filter(lambda key: key.startswith("basis_"), found):
            (owned,) = [own["state"][i][key] for own in saved if key in own["state"][i]]
            assert torch.equal(found[key], owned)
            assert found[key].any()
    return complete


@pytest.mark.filterwarnings("ignore:.*is partial")
def test_loaded_files_can_be_consolidated_before_the_first_step(pool: Pool) -> None:
    run = Run("mixed", "ekfac_intra", RARE, steps=4)
    for complete in pool.run(completed, run):
        alone(run)[2].load_state_dict(complete)
