"""EK-FAC's scale where examples and bases are on different ranks: bases travel to the data, or rows to the bases.

Which of the two is a matter of bytes, and must change nothing but those. Where a route is to be looked at on every kind
of layer, it is imposed. Layers have fewer columns than batches have examples: without a null space, in which a basis
would be a matter of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import EKFAC, routing
from secondorder.curvature.block import Block
from secondorder.curvature.eigensums import EigenSums
from secondorder.curvature.kernel import Rows
from secondorder.curvature.measured import mean_of
from secondorder.curvature.shipping import (
    choose_scale_route,
    common_size,
    has_rows,
    joined,
    no_rows,
    resized,
    size_words,
    squares,
    tensors_of,
)
from tests.distributed import oracle
from tests.distributed.oracle import (
    CLASSES,
    EXAMPLES,
    LENGTH,
    STRATEGIES,
    TASKS,
    Run,
    Task,
    alone,
    assert_replicas,
    assert_same_path,
    build,
    curvatures,
    descend,
    distance,
    flat,
    mean_loss,
    optimizer_on,
    path_of,
    shard,
)
from tests.distributed.pool import Pool, device_of
from tests.distributed.saving import started, through_a_file, train

WIDTH, LAYERS = 6, 12
RARE = {"inv_update_steps": 2, "scale_update_steps": 4}
"""Scales that are measured less often than bases change, so that rows are cheap."""
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}


class Wide(nn.Module):
    """Twelve layers beside each other, so that 2, 3 and 4 ranks own as many."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(LAYERS))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.tanh(part(inputs)) for part in self.parts]).sum(0)


class Mixed(nn.Module):
    """A convolution, with many positions, and layers without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.wide = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = F.adaptive_avg_pool2d(torch.tanh(self.conv(images)), (2, 1)).flatten(1)
        return self.head(torch.tanh(self.wide(features)))


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
    "mixed": Task(Mixed, oracle._normal(2, 4, 4)),
    "twice": Task(Twice, oracle._normal(LENGTH, 3)),
}
ROUTES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "wide": (RARE, {f"parts.{i}": "rows" for i in range(LAYERS)}),
    "mixed": (RARE, {"conv": "bases", "wide": "rows", "head": "rows"}),
    "cnn": ({}, {"first": "bases", "second": "bases", "head": "bases"}),
}
"""Settings, and what the layers then choose."""


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_a", "n_g", "examples", "positions", "world", "inv_steps", "scale_steps", "route"),
    [
        (1025, 1024, 32, 1, 8, 100, 1, "rows"),
        (1025, 1024, 128, 1, 8, 100, 1, "bases"),
        (577, 64, 32, 3136, 8, 100, 1, "bases"),  # the first layers of a network for images
        (1025, 1024, 128, 1, 8, 100, 100, "rows"),  # per scale as many rows, per step fewer
        (10, 10, 5, 2, 1, 2, 1, "rows"),  # a tie: 200 / 2 + 100 = 10 · 20
        (10, 10, 11, 1, 1, 2, 1, "bases"),
        (10, 10, 5, 2, 1, 3, 1, "bases"),
    ],
)
def test_fewer_numbers_travel(
    n_a: int, n_g: int, examples: int, positions: int, world: int, inv_steps: int, scale_steps: int, route: str
) -> None:
    assert choose_scale_route(n_a, n_g, examples, positions, world, inv_steps, scale_steps) == route
    per_step = {
        "bases": (n_a**2 + n_g**2) / inv_steps + n_a * n_g / scale_steps,
        "rows": world * examples * positions * (n_a + n_g) / scale_steps,
    }
    assert per_step[route] == min(per_step.values())


def test_a_table_has_no_basis_and_rows_of_one_number() -> None:
    assert choose_scale_route(1000, 10, 4, 10, 2, 10, 1, bases=100, row=11) == "rows"  # 880 < 10 + 10000
    assert choose_scale_route(1000, 10, 4, 200, 2, 10, 1, bases=100, row=11) == "bases"


def test_sizes_are_known_from_sums() -> None:
    def told(*shapes: tuple[int, int] | None) -> list[float]:
        words = [size_words(None if shape is None else Rows(None, torch.zeros(*shape, 2))) for shape in shapes]
        return torch.tensor(words).sum(0).tolist()

    assert common_size(told((5, 3), (5, 3), None)) == (5, 3)
    assert common_size(told((5, 3), (4, 3))) is None
    assert common_size(told((5, 3), (5, 2))) is None


# ---------------------------------------------------------------------------------------------------------------------
# Rows of one process
# ---------------------------------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Layers with groups, padding, calls for one of several blocks, and parameters that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)
        self.cross = nn.MultiheadAttention(4, 2, batch_first=True)
        self.grouped = nn.Conv1d(4, 6, 2, groups=2, padding=1)
        self.turned = nn.ConvTranspose1d(6, 4, 2)
        self.channels = nn.BatchNorm1d(4)
        self.twice = nn.Linear(4, 4)
        self.shift = nn.Linear(4, 4)
        self.bag = nn.EmbeddingBag(6, 4)
        self.shift.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.cross(hidden, hidden.flip(1), hidden.cos(), need_weights=False)[0]
        hidden = self.channels(self.turned(self.grouped(hidden.mT))).mT
        return self.shift(self.twice(hidden[:, :2]).sum(1) + self.twice(hidden[:, 2:]).sum(1)) + self.bag(tokens)


@pytest.mark.parametrize("keywords", [{}, {"token_is_example": True}, {"scale_batch_size": 3}], ids=str)
@pytest.mark.parametrize("micro", [1, 2])
def test_squares_of_rows_are_the_sum_that_is_measured(keywords: dict[str, Any], micro: int) -> None:
    torch.manual_seed(0)
    model = Kinds().double()
    optimizer = EKFAC(model, lr=0.1, factor_update_steps=1, inv_update_steps=10, refresh_warmup=False, **keywords)
    compared: dict[str, bool] = {}

    def statistic(block: Block, group: dict[str, Any]) -> EigenSums:
        factors, scales = optimizer.new_sums(block, group), optimizer._new_scales(block)
        return EigenSums(block.adapter, factors, scales, True, True, group["scale_batch_size"])

    def compare(block: Block, sums: EigenSums, examples: int) -> Any:
        part = optimizer._measured_scale(block, sums.scales, examples)
        if has_rows(block.adapter):
            found = optimizer._shipment(block, sums, examples)
            n, positions = found.rows.g.shape[-3:-1]
            nothing = no_rows(block.adapter, n, positions, torch.float64, "cpu")
            assert nothing[2:] == found.rows[2:]
            for zeros, rows in zip(tensors_of(nothing), tensors_of(found.rows), strict=True):
                assert (zeros.dtype, zeros.shape) == (rows.dtype, rows.shape)
            wider = resized(found.rows, n + 2, positions + 1)
            stacks = [torch.stack([x, x]) for x in tensors_of(wider)]  # of two ranks with the same examples
            tokens = block.group["token_is_example"] and block.adapter.positions_are_tokens
            bases = optimizer.basis(block, "a"), optimizer.basis(block, "g")
            total = squares(block.adapter, joined(wider, stacks), *bases, tokens)
            mean = mean_of(total, 2 * found.counts).total
            torch.testing.assert_close(mean, part.total * part.scale, rtol=1e-11, atol=1e-14)
            compared[block.name] = sums.rows == n * positions or "scale_batch_size" in keywords
        return measure(block, sums, examples)

    measure = optimizer.measure
    for step in range(3):
        if step == 2:  # there are bases
            optimizer.new_statistic, optimizer.measure = statistic, compare
        optimizer.zero_grad()
        for part in range(micro):
            tokens = torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(10 * step + part))
            (model(tokens).square().sum(1).mean() / micro).backward()
        optimizer.step()
    assert len(compared) == len(optimizer.blocks) - 1  # bags have no rows of one shape
    assert all(compared.values()), compared


# ---------------------------------------------------------------------------------------------------------------------
# Ranks against one process
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def imposed(route: str | None) -> Iterator[None]:
    """One route for all layers that can have it; with None each has its own."""
    if route is None:
        yield
        return
    with mock.patch.object(routing, "choose_scale_route", return_value=route):
        yield


@cache
def reference(run_of: str, **keywords: Any) -> Tensor:
    return alone(Run(run_of, "ekfac_intra", keywords, steps=10))[0]


def trained(rank: int, world: int, strategy: str, run: Run, route: str | None = None) -> dict[str, Any]:
    """What a rank has after a run: its path, the routes, and bytes that it holds and has sent."""
    model = DDP(TASKS[run.task].model(device_of(rank)))
    with imposed(route), optimizer_on(model, strategy, run) as optimizer:
        path = path_of(model, optimizer, rank, world, run)
        return {
            "path": path,
            "routes": {name: optimizer.route_of(block) for name, block in optimizer.blocks.items()},
            "stored": optimizer.memory_usage()["second_order"],
            "sent": optimizer.comm.collectives.counter.bytes_by_stage(),
            "told": optimizer.describe(),
        }


def paths(found: list[dict[str, Any]]) -> list[Tensor]:
    return [of_rank["path"] for of_rank in found]


@pytest.mark.parametrize(
    ("strategy", "world"), [("mem", 2), ("mem", 3), ("mem", 4), ("hybrid_third", 3), ("hybrid_half", 4)]
)
@pytest.mark.parametrize("task", ROUTES)
def test_each_layer_takes_the_cheaper_route(pool: Pool, task: str, strategy: str, world: int) -> None:
    keywords, routes = ROUTES[task]
    found = pool.run(trained, strategy, Run(task, "ekfac_intra", keywords, steps=10), world=world)
    assert all(of_rank["routes"] == routes for of_rank in found)
    assert_same_path(paths(found), reference(task, **keywords), tolerance=1e-10)
    assert ("gathers rows" in found[0]["told"]) == ("rows" in routes.values())
    assert ("sends its bases to all" in found[0]["told"]) == ("bases" in routes.values())
    if task == "wide" and strategy == "mem":
        whole = alone(Run(task, "ekfac_intra", steps=1))[2].memory_usage()["second_order"]
        assert max(of_rank["stored"] for of_rank in found) <= 1.15 * whole / world


@pytest.mark.parametrize("strategy", ["comm", "comm_owner", "chief_inverses", "local_factors"])
def test_no_route_where_bases_are_with_the_data(pool: Pool, strategy: str) -> None:
    found = pool.run(trained, strategy, Run("wide", "ekfac_intra", RARE, steps=10), world=2)
    for of_rank in found:
        assert not {"rows", "spread"} & of_rank["sent"].keys()
        assert "rows" not in of_rank["told"]
    assert_replicas(paths(found))
    if strategy != "local_factors":
        assert_same_path(paths(found), reference("wide", **RARE), tolerance=1e-10)
    else:
        whole = alone(Run("wide", "ekfac_intra", steps=1))[2].memory_usage()["second_order"]
        assert found[0]["stored"] <= 1.15 * whole / 2


@pytest.mark.parametrize("strategy", ["mem_replicated", "chief"])
def test_factors_may_be_elsewhere(pool: Pool, strategy: str) -> None:
    keywords, routes = ROUTES["mixed"]
    found = pool.run(trained, strategy, Run("mixed", "ekfac_intra", keywords, steps=10), world=2)
    assert found[0]["routes"] == routes
    assert_same_path(paths(found), reference("mixed", **keywords), tolerance=1e-10)


@pytest.mark.parametrize(("strategy", "world"), [("mem", 3), ("hybrid_half", 4)])
@pytest.mark.parametrize(
    ("task", "keywords"),
    [
        ("cnn", {}),
        ("words", {}),
        ("words", {"token_is_example": True}),
        ("attention", {}),
        ("attention", {"transport": "recompute", "scale_update_steps": 2, "token_is_example": True}),
        ("mlp", {"transport": "recompute"}),
        ("mlp", {"max_factor_dim": 5, "basis_update": "qr"}),
    ],
)
def test_rows_of_every_kind_of_layer(
    pool: Pool, task: str, keywords: dict[str, Any], strategy: str, world: int
) -> None:
    found = pool.run(trained, strategy, Run(task, "ekfac_intra", keywords, steps=10), "rows", world=world)
    assert all(route == "rows" for route in found[0]["routes"].values())
    assert_same_path(paths(found), reference(task, **keywords), tolerance=1e-10)


@pytest.mark.parametrize("route", ["bases", None])
def test_recomputed_scales(pool: Pool, route: str | None) -> None:
    keywords = {**RARE, "transport": "recompute"}
    found = pool.run(trained, "mem", Run("mixed", "ekfac_intra", keywords, steps=10), route, world=2)
    assert_same_path(paths(found), reference("mixed", **keywords), tolerance=1e-10)


@pytest.mark.parametrize(
    ("task", "keywords", "micro"),
    [
        ("twice", {}, 2),
        ("attention", {"scale_batch_size": 2}, 1),
        ("words", {"scale_batch_size": 2, "token_is_example": True}, 1),
        ("mlp", {"loss_reduction": "sum", "lr": 1e-3}, 2),
    ],
)
def test_both_routes_are_one_estimate(pool: Pool, task: str, keywords: dict[str, Any], micro: int) -> None:
    """Samples, which depend on the shards, calls and micro-batches."""
    run = Run(task, "ekfac_intra", keywords, steps=10, micro=micro)
    rows, bases = (pool.run(trained, "mem", run, route, world=2) for route in ("rows", "bases"))
    assert_same_path(paths(rows), bases[0]["path"], tolerance=1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# Unequal batches, and ranks that lose theirs
# ---------------------------------------------------------------------------------------------------------------------


def held_after(
    rank: int, world: int, run: Run, sizes: list[tuple[int, ...]], route: str | None, lengths: list[int] | None
) -> dict[str, Tensor]:
    """Curvature of a rank after a step for each tuple of shard sizes, with so many tokens on each rank."""
    model = DDP(TASKS[run.task].model(device_of(rank)))
    with imposed(route), optimizer_on(model, "mem", run) as optimizer:
        for step, of_step in enumerate(sizes):
            batch = tuple(part[: sum(of_step)] for part in run.batch(step))
            mine = shard(batch, rank, world, of_step)
            if lengths is not None:
                mine = mine[0][:, : lengths[rank]], mine[1]
            descend(model, optimizer, mine, run)
        return curvatures(optimizer)


def assert_held(of_ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, dense in expected.items():
        (matrix,) = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        assert distance(matrix, dense) < 1e-10, name


@pytest.mark.parametrize("task", ["wide", "mixed", "words"])
def test_unequal_batches(pool: Pool, task: str) -> None:
    run, sizes = Run(task, "ekfac_intra", STILL), [(4, 4, 4), (5, 2, 1), (1, 8, 3)]
    model = TASKS[task].model()
    optimizer = build(run.method, model, **run.keywords)
    for step, of_step in enumerate(sizes):
        inputs, targets = (part[: sum(of_step)] for part in run.batch(step))
        descend(model, optimizer, (inputs, targets), run)
    assert_held(pool.run(held_after, run, sizes, "rows", None, world=3), curvatures(optimizer))


def test_sequences_of_unequal_length(pool: Pool) -> None:
    """A rank with shorter sequences fills its rows up."""
    run, sizes, lengths = Run("twice", "ekfac_intra", STILL), [(6, 6)] * 3, [3, 2]
    rows, bases = (pool.run(held_after, run, sizes, route, lengths, world=2) for route in ("rows", "bases"))
    expected = {name: dense for of_rank in bases for name, dense in of_rank.items()}
    assert_held(rows, expected)


def one_rank_is_lost(rank: int, world: int, run: Run, how: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two steps; what the last rank says of its scale in the second one is of no use."""
    model = DDP(TASKS[run.task].model(device_of(rank)))

    def poisoned(self: Any, block: Any, sums: Any, examples: int) -> Any:
        if how == "refuses":
            raise ValueError("examples cannot be told apart")
        found = shipment(self, block, sums, examples)
        found.rows.g.view(-1)[0] = torch.nan
        return found._replace(finite=torch.tensor(False))

    shipment = routing.RoutingOptimizer._shipment
    with imposed("rows"), optimizer_on(model, "mem", run) as optimizer:
        descend(model, optimizer, shard(run.batch(0), rank, world), run)
        with mock.patch.object(routing.RoutingOptimizer, "_shipment", poisoned if rank == world - 1 else shipment):
            descend(model, optimizer, shard(run.batch(1), rank, world), run)
        return curvatures(optimizer), optimizer.diagnostics()


@pytest.mark.parametrize("how", ["refuses", "is not finite"])
def test_rows_of_one_rank_are_left_out(pool: Pool, how: str) -> None:
    run = Run("wide", "ekfac_intra", {**STILL, "inv_update_steps": 4})
    model = TASKS["wide"].model()
    optimizer = build(run.method, model, **run.keywords)
    descend(model, optimizer, run.batch(0), run)
    descend(model, optimizer, shard(run.batch(1), 0, 2), run)
    found = pool.run(one_rank_is_lost, run, how, world=2)
    assert_held([held for held, _ in found], curvatures(optimizer))
    assert found[0][1]["skipped_statistics"] == (LAYERS if how == "is not finite" else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------------------------------


def bytes_of_steps(
    rank: int, world: int, task: str, strategy: str, keywords: dict[str, Any]
) -> tuple[list[dict[str, int]], Any]:
    """Bytes by stage of each step of the second interval, and the plan that this rank makes."""
    run, found = Run(task, "ekfac_intra", keywords), []
    model, optimizer = started(rank, strategy, run)
    with optimizer:
        for step in range(8):
            optimizer.comm.collectives.counter.clear()
            train(model, optimizer, rank, world, run, step, step + 1)
            found.append(optimizer.comm.collectives.counter.bytes_by_stage())
        return found[4:], optimizer.plan().to_dict()


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_the_formulas(pool: Pool, world: int) -> None:
    double, batch = 8, EXAMPLES // world
    for steps, _ in pool.run(bytes_of_steps, "wide", "mem", RARE, world=world):
        rows = LAYERS * double * batch * (WIDTH + CLASSES)  # the 1 of a bias need not travel
        assert [step.get("rows", 0) for step in steps] == [rows, 0, 0, 0]
        assert not any("spread" in step for step in steps)
    sizes = [(19, 3), (12, 4), (5, 4)]
    for steps, _ in pool.run(bytes_of_steps, "cnn", "mem", {"scale_update_steps": 2}, world=world):
        assert [step.get("spread", 0) for step in steps] == [double * sum(a * a + g * g for a, g in sizes), 0, 0, 0]
        assert not any("rows" in step for step in steps)


@pytest.mark.parametrize(("strategy", "world"), [("mem", 3), ("hybrid_half", 4), ("mem_replicated", 2)])
@pytest.mark.parametrize("transport", ["project", "recompute"])
def test_a_plan_knows_the_routes(pool: Pool, strategy: str, world: int, transport: str) -> None:
    model, keywords = TASKS["mixed"].model(), {**RARE, "transport": transport}
    optimizer = build("ekfac_intra", model, **keywords)
    inputs, targets = TASKS["mixed"].batch(0)
    mean_loss(model(inputs), targets).backward()
    optimizer.step()
    plan = optimizer.plan(world, STRATEGIES[strategy](average_gradients=True), batch_size=EXAMPLES // world)
    for rank, (steps, own) in enumerate(pool.run(bytes_of_steps, "mixed", strategy, keywords, world=world)):
        stages = {stage for step in steps for stage in step}
        mean = {stage: sum(step.get(stage, 0) for step in steps) / 4 for stage in stages}
        assert {stage: sent for stage, sent in plan.ranks[rank].sent.items() if sent} == mean
        assert own == plan.to_dict()
    assert "rows of examples go to the owners of wide, head" in str(plan)
    assert "bases go to all ranks from conv" in str(plan)


def test_a_plan_without_a_batch_says_what_it_supposes() -> None:
    optimizer = build("ekfac_intra", TASKS["mixed"].model())
    assert "not known before a step" in str(optimizer.plan(4, STRATEGIES["mem"]()))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, and layers that change
# ---------------------------------------------------------------------------------------------------------------------


def broken_off(rank: int, world: int, run: Run, at: int) -> tuple[Any, Any, Tensor]:
    model, optimizer = started(rank, "mem", run)
    with optimizer:
        train(model, optimizer, rank, world, run, 0, at)
        saved = through_a_file(optimizer.state_dict()), through_a_file(model.state_dict())
        return *saved, torch.stack(train(model, optimizer, rank, world, run, at, run.steps))


def resumed(rank: int, world: int, run: Run, saved: list[tuple[Any, Any]], at: int, live: bool) -> list[Tensor]:
    """Go on, in a new optimizer or in one that has chosen its routes; then again, from what the state was loaded as."""
    model, optimizer = started(rank, "mem", run)
    with optimizer:
        if live:
            train(model, optimizer, rank, world, run, 0, 2)
        state, found = saved[rank][0], []
        for _ in range(2):
            model.load_state_dict(saved[rank][1])
            optimizer.load_state_dict(state)
            assert all(optimizer.route_of(block) is None for block in optimizer.blocks.values())
            state = through_a_file(optimizer.state_dict())
            found.append(torch.stack(train(model, optimizer, rank, world, run, at, run.steps)))
        return found


@pytest.mark.filterwarnings("ignore:.*is partial")
@pytest.mark.parametrize("live", [False, True], ids=["new", "live"])
@pytest.mark.parametrize("at", [3, 4])
def test_a_resumed_run_goes_on_exactly(pool: Pool, at: int, live: bool) -> None:
    """Routes are chosen again by the first batch, whose scale is due before any basis was sent."""
    run = Run("mixed", "ekfac_intra", {**RARE, "factor_update_steps": 3}, steps=9)
    before = pool.run(broken_off, run, at, world=2)
    after = pool.run(resumed, run, [(own, model) for own, model, _ in before], at, live, world=2)
    for (_, _, expected), found in zip(before, after, strict=True):
        assert all(torch.equal(path, expected) for path in found)


def frozen_for_a_while(rank: int, world: int, run: Run) -> tuple[Tensor, dict[str, Any]]:
    """A bias is frozen after three steps and trained again after seven."""
    model = TASKS[run.task].model()
    comm = STRATEGIES["mem"](average_gradients=True) if world > 1 else None
    with build(run.method, model, comm, **run.keywords) as optimizer:
        path = []
        for step in range(run.steps):
            model.conv.bias.requires_grad_(not 3 <= step < 7)
            descend(model, optimizer, shard(run.batch(step), rank, world), run)
            path.append(flat(model))
        return torch.stack(path), {name: optimizer.route_of(block) for name, block in optimizer.blocks.items()}


def test_layers_that_change_choose_anew(pool: Pool) -> None:
    run = Run("mixed", "ekfac_intra", RARE, steps=13)
    expected, _ = frozen_for_a_while(0, 1, run)
    found = pool.run(frozen_for_a_while, run, world=2)
    assert_same_path([path for path, _ in found], expected, tolerance=1e-10)
    assert found[0][1] == ROUTES["mixed"][1]


def estimator_changes(rank: int, world: int, run: Run) -> Tensor:
    model = TASKS[run.task].model()
    comm = STRATEGIES["mem"](average_gradients=True) if world > 1 else None
    with build(run.method, model, comm, **run.keywords) as optimizer:
        path = []
        for step in range(run.steps):
            optimizer.param_groups[0]["estimator"] = "running" if 3 <= step < 7 else "intra"
            descend(model, optimizer, shard(run.batch(step), rank, world), run)
            path.append(flat(model))
        return torch.stack(path)


def test_the_estimator_may_change(pool: Pool) -> None:
    run = Run("mixed", "ekfac_intra", RARE, steps=13)
    assert_same_path(pool.run(estimator_changes, run, world=2), estimator_changes(0, 1, run), tolerance=1e-10)


def observed(rank: int, world: int, run: Run, route: str) -> Tensor:
    model = TASKS[run.task].model()
    comm = STRATEGIES["mem"](average_gradients=True) if world > 1 else None
    with imposed(route), build(run.method, model, comm, **run.keywords) as optimizer:
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


@pytest.mark.parametrize("transport", ["project", "recompute"])
def test_rows_of_an_exact_fisher(pool: Pool, transport: str) -> None:
    run = Run("mlp", "ekfac_intra", {"fisher": "exact", "transport": transport}, steps=6)
    assert_same_path(pool.run(observed, run, "rows", world=2), observed(0, 1, run, "rows"), tolerance=1e-10)


def masked(rank: int, world: int, run: Run, route: str) -> Tensor:
    model = TASKS["words"].model()
    comm = STRATEGIES["mem"](average_gradients=True) if world > 1 else None
    with imposed(route), build(run.method, model, comm, **run.keywords) as optimizer:
        path = []
        for step in range(run.steps):
            lengths = torch.randint(1, LENGTH + 1, (EXAMPLES,), generator=torch.Generator().manual_seed(step))
            keep = torch.arange(LENGTH) < lengths[:, None]
            (inputs, targets), (kept, _) = shard(run.batch(step), rank, world), shard((keep, keep), rank, world)
            optimizer.zero_grad()
            with optimizer.mask(kept):
                losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
            (losses.view(targets.shape) * kept).sum(1).mean().backward()
            optimizer.step()
            path.append(flat(model))
        return torch.stack(path)


def test_masked_rows(pool: Pool) -> None:
    run = Run("words", "ekfac_intra", steps=6)
    assert_same_path(pool.run(masked, run, "rows", world=2), masked(0, 1, run, "rows"), tolerance=1e-10)
    tokens = Run("words", "ekfac_intra", {"token_is_example": True}, steps=6)
    bases = pool.run(masked, tokens, "bases", world=2)
    assert_same_path(pool.run(masked, tokens, "rows", world=2), bases[0], tolerance=1e-10)
