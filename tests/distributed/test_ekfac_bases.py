"""EK-FAC's scale on ranks with examples of layers that they do not precondition: every rank has the bases.

Layers have fewer columns than batches have examples. Otherwise there would be a null space, whose basis depends on
rounding.
"""

import copy
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder.curvature.eigenbasis import EigenbasisBlock
from tests.support.grid import sample
from tests.support.oracles import ranks as oracle
from tests.support.oracles.ranks import (
    CLASSES,
    LENGTH,
    STRATEGIES,
    TASKS,
    Run,
    Task,
    alone,
    assert_replicas,
    assert_same_path,
    build,
    descend,
    distance,
    flat,
    mean_loss,
    optimizer_on,
    shard,
)
from tests.support.pool import Pool, device_of, everywhere, on_every_rank
from tests.support.saving import interrupted, paths_of, started, through_a_file, train, trained

WIDTH, LAYERS = 6, 12
RARE = {"inv_update_steps": 2, "scale_update_steps": 4}
"""Scales are measured less often than bases change."""
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}


class Wide(nn.Module):
    """Twelve parallel layers, so that 2, 3 and 4 ranks own the same number of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(LAYERS))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.tanh(part(inputs)) for part in self.parts]).sum(0)


class Twice(nn.Module):
    """A layer that is called twice, on parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(3, 3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = torch.tanh(self.twice(inputs[:, :1])), torch.tanh(self.twice(inputs[:, 1:]))
        return self.head(first.sum(1) + second.sum(1))


TASKS |= {
    "wide": Task(Wide, oracle._normal(WIDTH)),
    "twice": Task(Twice, oracle._normal(LENGTH, 3)),
}
SIDES = {"wide": [(WIDTH + 1, CLASSES)] * LAYERS, "mixed": [(19, 3), (WIDTH + 1, 5), (6, CLASSES)]}
"""Columns and rows of the gradients."""


def numbers_in_bases(task: str) -> int:
    return sum(n_a**2 + n_g**2 for n_a, n_g in SIDES[task])


# -------------------------------------------------------------------------------------------- Ranks against one process
@cache
def reference(run_of: str, **keywords: Any) -> Tensor:
    return alone(Run(run_of, "ekfac_intra", keywords, steps=10))[0]


def trained_here(rank: int, world: int, strategy: str, run: Run) -> dict[str, Any]:
    """Run `trained` in ranks that have imported this file, and with it the tasks that it adds."""
    return trained(rank, world, strategy, run)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("wide", RARE),
    "mixed": ("mixed", RARE),
    "recomputed": ("mixed", {**RARE, "transport": "recompute"}),
    "cnn": ("cnn", {}),
    "words": ("words", {}),
    "tokens": ("words", {"token_is_example": True}),
    "attention": ("attention", {"transport": "recompute", "scale_update_steps": 2, "token_is_example": True}),
    "mlp": ("mlp", {"transport": "recompute"}),
    "diagonal": ("mlp", {"max_factor_dim": 5, "basis_update": "qr"}),
}
PLACES = {
    f"{strategy}-{world}": (strategy, world)
    for strategy, world in [
        ("mem", 2), ("hybrid_half", 4), ("mem", 3), ("mem_replicated", 2), ("hybrid_third", 3), ("mem", 4),
        ("chief", 2),
    ]
}  # fmt: skip


@sample(kind=KINDS, place=PLACES)
def test_every_rank_has_the_bases(pool: Pool, kind: tuple[str, dict[str, Any]], place: tuple[str, int]) -> None:
    """The scales in these bases are those of one process, and rows are not sent."""
    (task, keywords), (strategy, world) = kind, place
    found = pool.run(trained_here, strategy, Run(task, "ekfac_intra", keywords, steps=10), world=world)
    assert_same_path(paths_of(found), reference(task, **keywords), tolerance=1e-10)
    for of_rank in found:
        assert "rows" not in of_rank["sent"]
        assert of_rank["bases"] == (numbers_in_bases(task) if task in SIDES else found[0]["bases"])


def test_nothing_is_sent_if_the_ranks_with_the_data_have_the_bases(pool: Pool) -> None:
    for strategy in ("comm", "comm_owner", "chief_inverses", "local_factors"):
        found = pool.run(trained_here, strategy, Run("wide", "ekfac_intra", RARE, steps=10))
        for of_rank in found:
            assert not {"rows", "spread"} & of_rank["sent"].keys()
        assert_replicas(paths_of(found))
        if strategy != "local_factors":
            assert_same_path(paths_of(found), reference("wide", **RARE), tolerance=1e-10)
        else:
            whole = alone(Run("wide", "ekfac_intra", steps=1))[2].memory_usage()["second_order"]
            assert found[0]["stored"]["second_order"] <= 1.15 * whole / 2


def test_calls_and_micro_batches(pool: Pool) -> None:
    run = Run("twice", "ekfac_intra", steps=10, micro=2)
    assert_same_path(paths_of(pool.run(trained_here, "mem", run)), reference("twice"), tolerance=1e-10)


def test_replicas_are_equal_even_if_each_rank_samples_its_own_examples(pool: Pool) -> None:
    run = Run("words", "ekfac_intra", {"scale_batch_size": 2, "token_is_example": True}, steps=10)
    assert_replicas(paths_of(pool.run(trained_here, "mem", run)))


# -------------------------------------------------------------------------------------------- Ranks that cannot measure
def one_rank_refuses(rank: int, world: int, run: Run) -> dict[str, Tensor]:
    """Take two steps, in the second of which the last rank cannot measure its scale."""
    model = DDP(TASKS[run.task].model(device_of(rank)))

    measure = EigenbasisBlock.new_scales

    def refuse(self: Any, calls: Any = ()) -> Any:
        if calls:
            raise ValueError("examples cannot be distinguished")
        return measure(self)

    with optimizer_on(model, "mem", run) as optimizer:
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
    run = Run("wide", "ekfac_intra", {**STILL, "transport": "recompute"})
    found = pool.run(one_rank_refuses, run)
    model = TASKS["wide"].model()
    optimizer = build(run.method, model, **run.keywords)
    for step in range(2):
        descend(model, optimizer, run.batch(step), run)
    inputs, targets = shard(run.batch(1), 0, 2)
    for name, block in optimizer.blocks.items():
        (scale,) = [of_rank[name] for of_rank in found if name in of_rank]
        state, layer = optimizer.state[block.owner], model.get_submodule(name)
        expected = torch.zeros_like(scale)
        for x, y in zip(inputs, targets, strict=True):
            grads = torch.autograd.grad(mean_loss(model(x[None]), y[None]), [layer.weight, layer.bias])
            matrix = torch.cat([grads[0], grads[1][:, None]], 1)
            expected += (state["basis_g"].mT @ matrix @ state["basis_a"]).square() / len(inputs)
        assert distance(scale, expected) < 1e-10, name


# ---------------------------------------------------------------------------------------------------------------- Bytes
@pytest.mark.parametrize("transport", ["project", "recompute"])
@on_every_rank(3)
def test_bases_are_sent_with_each_refresh_as_in_the_plan(rank: int, world: int, transport: str) -> None:
    run, sent = Run("mixed", "ekfac_intra", {**RARE, "transport": transport}), []
    model, optimizer = started(rank, "mem", run)
    with optimizer:
        for step in range(8):
            optimizer.comm.collectives.counter.clear()
            train(model, optimizer, rank, world, run, step, step + 1)
            sent.append(optimizer.comm.collectives.counter.bytes_by_stage().get("spread", 0))
        stored, plan = optimizer.memory_usage()["second_order"], optimizer.plan().ranks[rank]
    nbytes = 8 * numbers_in_bases("mixed")
    assert sent[4:] == [nbytes, 0] * 2
    assert plan.sent["spread"] == nbytes / 2
    assert plan.stored["second_order"] == stored >= nbytes


# ---------------------------------------------------------------------------------- Checkpoints, and layers that change
def without_bases(state: dict[str, Any]) -> dict[str, Any]:
    """The file of a rank of earlier versions, in which only ranks that precondition had bases."""
    for found in state["state"].values():
        if "scale" not in found:
            for key in [key for key in found if key.startswith("basis_")]:
                del found[key]
    return state


def resumed_in_every_way(
    rank: int, world: int, run: Run, saved: list[tuple[Any, Any]], at: int
) -> dict[str, list[Tensor]]:
    """Continue in a new optimizer, a copy or one with bases, and then again from the state after loading."""
    paths: dict[str, list[Tensor]] = {}
    for how in ("new", "live", "copied"):
        model, optimizer = started(rank, "mem", run)
        if how == "live":
            train(model, optimizer, rank, world, run, 0, 2)
        state, paths[how] = saved[rank][0], []
        for _ in range(2):
            model.load_state_dict(saved[rank][1])
            optimizer.load_state_dict(state)
            if how == "copied":
                optimizer.close()
                model, optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)
                optimizer.attach(model)
            state = through_a_file(optimizer.state_dict())
            paths[how].append(torch.stack(train(model, optimizer, rank, world, run, at, run.steps)))
        optimizer.close()
    return paths


@pytest.mark.filterwarnings("ignore:.*is partial")
@pytest.mark.parametrize("at", [3, 4])
def test_a_resumed_run_goes_on_exactly(pool: Pool, at: int) -> None:
    """Files without bases can be loaded, too: bases are sent in the first step, which may measure the scale."""
    run = Run("mixed", "ekfac_intra", {**RARE, "factor_update_steps": 3}, steps=9)
    before = pool.run(interrupted, "mem", run, at)
    for old in (False, True):
        saved = [(without_bases(own) if old else own, model) for own, model, _ in before]
        for (_, _, expected), found in zip(before, pool.run(resumed_in_every_way, run, saved, at), strict=True):
            for how, paths in found.items():
                assert all(torch.equal(path, expected) for path in paths), how


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
        for key, value in found.items():
            if key.startswith("basis_"):
                (owned,) = [own["state"][i][key] for own in saved if key in own["state"][i]]
                assert torch.equal(value, owned)
                assert value.any()
    return complete


@pytest.mark.filterwarnings("ignore:.*is partial")
def test_loaded_files_can_be_consolidated_before_the_first_step(pool: Pool) -> None:
    run = Run("mixed", "ekfac_intra", RARE, steps=4)
    for complete in pool.run(completed, run):
        alone(run)[2].load_state_dict(complete)


def freezing(model: nn.Module, optimizer: Any, step: int) -> None:
    """Freeze a bias from step 3 until step 7, and a layer from step 5 until step 8."""
    model.conv.bias.requires_grad_(not 3 <= step < 7)
    model.wide.requires_grad_(not 5 <= step < 8)


def switching(model: nn.Module, optimizer: Any, step: int) -> None:
    """Use the other estimator from step 3 until step 7."""
    if step in (3, 7):
        now = optimizer.param_groups[0]["estimator"]
        optimizer.param_groups[0]["estimator"] = "running" if now == "intra" else "intra"


CHANGES = {"layers": (freezing, {}), "to running": (switching, {}), "to intra": (switching, {"estimator": "running"})}
"""Functions that are called before a step, and options."""


def changing(rank: int, world: int, run: Run, change: str) -> tuple[Tensor, list[int]]:
    """The trajectory, and the number of entries of the bases after every step."""
    model = TASKS[run.task].model()
    comm = STRATEGIES["mem"](average_gradients=True) if world > 1 else None
    with build(run.method, model, comm, **run.keywords) as optimizer:
        path, kept = [], []
        for step in range(run.steps):
            CHANGES[change][0](model, optimizer, step)
            descend(model, optimizer, shard(run.batch(step), rank, world), run)
            path.append(flat(model))
            states = [optimizer.state[block.owner] for block in optimizer.blocks.values()]
            kept.append(sum(v.numel() for state in states for k, v in state.items() if k.startswith("basis_")))
        return torch.stack(path), kept


@pytest.mark.parametrize("change", CHANGES)
def test_layers_and_the_estimator_may_change(pool: Pool, change: str) -> None:
    run = Run("mixed", "ekfac_intra", {**RARE, **CHANGES[change][1]}, steps=13)
    found = pool.run(changing, run, change)
    assert_same_path([path for path, _ in found], changing(0, 1, run, change)[0], tolerance=1e-10)
    if change != "layers":
        bases = numbers_in_bases("mixed")
        for step in range(run.steps):
            kept = sum(numbers[step] for _, numbers in found)
            assert kept == (2 * bases if (3 <= step < 7) == (change == "to intra") else bases), step


def observed(rank: int, world: int, run: Run) -> Tensor:
    model = TASKS[run.task].model()
    comm = STRATEGIES["mem"](average_gradients=True) if world > 1 else None
    with build(run.method, model, comm, **run.keywords) as optimizer:
        path = []
        for step in range(run.steps):
            inputs, targets = shard(run.batch(step), rank, world)
            optimizer.zero_grad()
            outputs = model(inputs)
            optimizer.observe(outputs, "categorical")
            F.cross_entropy(outputs, targets).backward()
            optimizer.step()
            path.append(flat(model))
        return torch.stack(path)


def test_an_exact_fisher(pool: Pool) -> None:
    for transport in ["project", "recompute"]:
        run = Run("mlp", "ekfac_intra", {"fisher": "exact", "transport": transport}, steps=6)
        assert_same_path(pool.run(observed, run), observed(0, 1, run), tolerance=1e-10)
