"""Sharded windows: where tensors are cut, and W ranks (threads) that together do what one process does."""

import copy
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from secondorder import GGT, MFAC, LowRank, SparseMFAC, TopK
from secondorder.curvature.window.shards import Cutting, base_key
from secondorder.preconditioners import window_plan
from secondorder.preconditioners.window_plan import CATALOG
from tests.support.building import built
from tests.support.grid import each
from tests.support.saving import through_a_file
from tests.support.window import assert_near, differences, flat, give, noise, parameters, push, put
from tests.support.window_ranks import ThreadRank, run
from tests.support.window_storages import METHODS, STORAGES, averaging

SHAPES, D, M = [(4, 5), (3,), (3, 7), (), (2, 30)], 105, 4
#: Ranks, and rows of their grid.
WORLDS = [(3, 1), (4, 2)]


# --------------------------------------------------------------------------------------------------------- where to cut
SIZES = st.lists(st.integers(0, 300), max_size=8)


@given(sizes=SIZES, grain=st.integers(1, 40), parts=st.integers(1, 6))
def test_parts_are_even_and_cut_between_grains(sizes: list[int], grain: int, parts: int) -> None:
    bounds = Cutting(grain).bounds(sizes, sizes, parts)
    for size, own in zip(sizes, bounds, strict=True):
        assert (own[0], own[-1], len(own)) == (0, size, parts + 1)
        assert all(a <= b for a, b in pairwise(own))
        assert all(cut % grain == 0 or cut == size for cut in own)
    loads = [sum(own[k + 1] - own[k] for own in bounds) for k in range(parts)]
    assert all(abs(load - sum(sizes) / parts) <= grain for load in loads)


@given(old=SIZES, new=SIZES, parts=st.integers(2, 4))
def test_cut_tensors_stay_and_new_ones_balance_the_parts(old: list[int], new: list[int], parts: int) -> None:
    before = tuple((0, *[size] * parts) for size in old)  # all in the first part
    bounds = Cutting(1).bounds(old + new, old + new, parts, [*before, *[None] * len(new)])
    assert bounds[: len(old)] == before
    loads = [sum(own[k + 1] - own[k] for own in bounds) for k in range(parts)]
    even = max(sum(old), -(-(sum(old) + sum(new)) // parts) + 1)
    assert max(loads) <= even


@given(costs=st.lists(st.integers(1, 99), min_size=1, max_size=9), parts=st.integers(1, 4))
def test_whole_tensors_go_to_the_least_loaded_part(costs: list[int], parts: int) -> None:
    bounds = Cutting(0).bounds([7] * len(costs), costs, parts)
    loads = [sum(c for c, own in zip(costs, bounds, strict=True) if own[k + 1] > own[k]) for k in range(parts)]
    assert all(set(own) <= {0, 7} for own in bounds)
    assert sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs)


# ------------------------------------------------------------------------------------------------------------ the steps
def train(opt: Any, params: list[nn.Parameter], steps: range) -> Tensor:
    """Train with gradients that depend on the parameters, so that errors persist; return ``[steps, d]``."""
    path = []
    for step in steps:
        give(params, noise(D, seed=step) + 0.1 * flat(params))
        opt.step()
        path.append(flat(params))
    return torch.stack(path)


PRE = {"momentum": 0.9, "momentum_mode": "pre"}
REG = {"weight_decay": 0.1, "weight_decay_mode": "reg"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"mfac {name}": (MFAC, kind.keywords) for name, kind in STORAGES.items()},
    "ggt": (GGT, {}),
    "ggt betas": (GGT, {"betas": (0.9, 0.8), "bias_correction": True, "nesterov": True, "momentum": 0.5}),
    "ggt topk": (GGT, {"betas": (0.9, 1.0), **STORAGES["topk"].keywords}),
    "sparse, blocks of 4096": (SparseMFAC, {}),
    "momentum": (MFAC, {"momentum": 0.9, "weight_decay": 0.1}),
    "pre": (MFAC, PRE),
    "pre rank": (MFAC, {**PRE, "compression": LowRank(1)}),
    "reg": (MFAC, REG),
    "both, topk": (MFAC, {**REG, "weight_decay_mode": "both", **STORAGES["topk"].keywords}),
    "reg pre": (MFAC, {**PRE, **REG}),
    "legacy, clipped": (MFAC, {**REG, "weight_decay_mode": "legacy", "clip_norm": 0.1, "clip_value": 0.05}),
    "graft sgd": (MFAC, {"graft": "sgd", "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "graft adam": (MFAC, {"graft": "adam", **STORAGES["topk"].keywords}),
    "adamw inside": (MFAC, {"inner": "adamw"}),
    "eigh, relative": (MFAC, {"solver": "eigh", "damping": 1e-3, "damping_mode": "relative"}),
}


def assert_alike(steps: Callable[..., Tensor], tolerance: float, world: int = 3) -> list[Tensor]:
    """Ranks find what one process finds; return the results of the ranks."""
    expected, found = steps(), run(world, steps)
    for path in found:
        assert_near(path, expected, tolerance)
    return found


def made(kind: str, comm: ThreadRank | None = None, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    cls, keywords = KINDS[kind]
    params = parameters(SHAPES, dtype)
    return built(cls, params, comm=comm, **{"lr": 1e-2, "window_size": M, **keywords, **more}), params


@cache
def alone(kind: str, partition: str = "global", steps: int = 3 * M) -> tuple[Tensor, Any, list[nn.Parameter]]:
    opt, params = made(kind, partition=partition)
    return train(opt, params, range(steps)), opt, params


FEW = ("mfac dense", "mfac topk-4-bit", "reg pre", "graft adam", "ggt betas")


@each(
    kind=[*FEW, *(kind for kind in KINDS if kind not in FEW)],
    ranks={"3": (3, 1), "4-by-2": (4, 2), "2": (2, 1), "4": (4, 1), "2-by-2": (2, 2)},
    partition=["global", "layer"],
)
def test_ranks_together_do_what_one_process_does(kind: str, ranks: tuple[int, int], partition: str) -> None:
    world, workers = ranks

    def rank(comm: ThreadRank) -> tuple[Tensor, list[float]]:
        opt, params = made(kind, comm, partition=partition)
        path = train(opt, params, range(3 * M))
        return path, [unit.window.noise for unit in opt.preconditioner.plan.units]

    expected, single, _ = alone(kind, partition)
    found = run(world, rank, workers)
    for path, noises in found:
        assert torch.equal(path, found[0][0])
        assert_near(path, expected, 1e-9)
        assert noises == [unit.window.noise for unit in single.preconditioner.plan.units]


@each(storage=list(STORAGES), world=[3, 2], dtype=[torch.float32, torch.float64])
def test_stored_values_do_not_depend_on_the_world(storage: str, world: int, dtype: torch.dtype) -> None:
    """For the same gradients, rows, residuals and momentum outside of the window are equal bit for bit."""

    def trained(comm: ThreadRank | None = None) -> tuple[Any, list[nn.Parameter]]:
        opt, params = made(f"mfac {storage}", comm, dtype, **PRE, partition="group")
        for step in range(M + 3):
            give(params, noise(D, seed=step))
            opt.step()
        return opt, params

    def rank(comm: ThreadRank) -> list[dict[str, Tensor]]:
        opt, params = trained(comm)
        opt._checkpoint.gathered.gather(0, opt.steps, pieces=False)
        return [opt._checkpoint.gathered.tensors.get(p, {}) for p in params]

    single, params = trained()
    shared = {*single.preconditioner.plan.units[0].window.shared_state(), "amplification"}
    for p, state in zip(params, run(world, rank)[0], strict=True):
        assert state.keys() == set(single.state[p]) & set(CATALOG) - shared
        for key, value in state.items():
            assert value.dtype == single.state[p][key].dtype
            assert torch.equal(value, single.state[p][key]), key


WORDS = {"mfac dense": M, "mfac topk": M, "pre": M + 1, "reg": 2 * M, "reg pre": 2 * M + 1, "momentum": M}


@each(kind=list(WORDS), ranks={"3": (3, 1), "4-by-2": (4, 2)})
def test_one_sum_and_one_gather_per_step(kind: str, ranks: tuple[int, int]) -> None:
    """They have 8 bytes per row of the window and d entries, in the first step and in later ones."""
    (world, workers), words = ranks, WORDS[kind]

    def rank(comm: ThreadRank) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        opt, params = made(kind, comm)
        del comm.sent[:]
        train(opt, params, range(1))
        first, count = list(comm.sent), len(comm.sent)
        train(opt, params, range(1, M + 3))
        return first, comm.sent[-count:]

    found = run(world, rank, workers)
    for first, later in found:
        assert first == later
        assert [verb for verb, _ in first] == ["sum", "gather"]
        assert first[0][1] == 8 * words
    assert sum(first[1][1] for first, _ in found) == 8 * D * workers


def test_units_share_their_messages_and_whole_ones_need_no_sum() -> None:
    def sent(partition: str, workers: int = 1) -> list[list[tuple[str, int]]]:
        def rank(comm: ThreadRank) -> list[tuple[str, int]]:
            params = parameters(SHAPES)
            opt = MFAC([{"params": params[:2]}, {"params": params[2:]}], window_size=M, comm=comm, partition=partition)
            train(opt, params, range(1))
            return comm.sent

        return run(2, rank, workers)

    for first, second in sent("group"):
        assert first == ("sum", 2 * 8 * M)
        assert second[0] == "gather"
    assert sent("layer") == [[("directions", 8 * D)]] * 2
    assert sent("global", workers=2)[0][0][0] != "sum"


# ------------------------------------------------------------------------------------------------------- unusual events
@each(storage=["dense", "topk", "rank-1"], partition=["global", "layer"])
def test_more_ranks_than_parts(storage: str, partition: str) -> None:
    keywords = {"window_size": M, "partition": partition, **STORAGES[storage].keywords}

    def steps(comm: ThreadRank | None = None) -> Tensor:
        params = parameters([(3,), (1, 2)])
        opt = built(MFAC, params, lr=0.1, comm=comm, **keywords)
        return torch.stack([push(opt, params, noise(5, seed=step)) for step in range(3)])

    assert_alike(steps, 1e-12, world=5)


def sparse_run(opt: Any, params: list[nn.Parameter]) -> Tensor:
    """Parameters without gradients, a parameter that is frozen for a while, and gradients that are not finite."""
    path = []
    for step in range(10):
        params[2].requires_grad_(not 4 <= step < 7)
        give(params, noise(D, seed=step) + 0.1 * flat(params))
        absent = [[1], [0, 1, 2, 3, 4], [0, 4], [2]][step % 4]
        for i in absent if step < 8 else []:
            params[i].grad = None
        if step == 4:
            params[3].grad.fill_(torch.nan)  # type: ignore[union-attr]
        opt.step()
        path.append(flat(params))
    return torch.stack(path)


@each(
    kind=["mfac dense", "mfac topk", "mfac topk-4-bit", "mfac rank-1", "reg pre", "ggt betas"],
    partition=["global", "layer"],
    gate=["host", "device"],
)
def test_gradients_that_are_missing_or_not_finite(kind: str, partition: str, gate: str) -> None:
    """On a device, the host does not wait to know whether gradients are finite."""

    def sparse(comm: ThreadRank | None = None) -> Tensor:
        opt, params = made(kind, comm, partition=partition)
        if gate == "device":
            opt._record.gate = lambda finite: (True, finite)
        path = sparse_run(opt, params)
        assert opt.diagnostics()["skipped_steps"] == 1
        return path

    for path in assert_alike(sparse, 1e-11):
        assert torch.equal(path[3], path[4])


def eventful(opt: Any, params: list[nn.Parameter]) -> Tensor:
    """Groups are added, a parameter is removed, the window size changes, and parameters are cast."""
    every, path = list(params), []

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            d = sum(p.numel() for p in every)
            give(every, noise(d, seed=step) + 0.1 * flat(every))
            opt.step()
            path.append(flat(every)[:50])

    steps(0, 3)
    late = parameters([(9, 4), (7,)])
    opt.add_param_group({"params": late})
    every += late
    steps(3, 6)
    gone = opt.param_groups[0]["params"].pop(2)
    every = [p for p in every if p is not gone]
    gone.grad = None
    steps(6, 8)
    for group in opt.param_groups:
        group["window_size"] = 3
    steps(8, 10)
    for first, dtype in ((10, torch.float32), (12, torch.float64)):
        for p in every:
            p.data = p.data.to(dtype)
        opt.zero_grad()
        steps(first, first + 2)
    return torch.stack(path)


@each(
    storage=["dense", "topk-4-bit", "bfloat16", "topk", "rank-1"],
    method=list(METHODS),
    partition=["global", "group", "layer"],
    averaged=[True, False],
)
def test_changes_during_a_run_keep_the_rows(method: str, storage: str, partition: str, averaged: bool) -> None:
    keywords = {"partition": partition, **STORAGES[storage].keywords}
    keywords |= averaging(method, 0.9, 0.8) if averaged else {}

    def live(comm: ThreadRank | None = None) -> Tensor:
        params = parameters(SHAPES)
        return eventful(built(METHODS[method], params, lr=1e-2, window_size=M, comm=comm, **keywords), params)

    found = assert_alike(live, 1e-4)
    assert all(torch.equal(path, found[0]) for path in found)
    assert_near(found[0][:10], live()[:10], 1e-10)  # before sums in float32


def test_a_copy_trains_like_the_original_and_may_be_attached_to_the_copy_of_a_module() -> None:
    """Other parameters then take the place of the optimizer's and keep their cuts."""

    def rank(comm: ThreadRank) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
        first, rest = list(net[0].named_parameters("0")), list(net[1].named_parameters("1"))
        keywords = {"momentum": 0.9, "momentum_mode": "pre", "window_size": M, "comm": comm}
        opt = built(MFAC, [{"params": first}], lr=0.1, module=net, **keywords)
        opt.add_param_group({"params": rest})  # cut differently from all at once
        params = list(net.parameters())
        push(opt, params, noise(53))
        twin, twin_net = copy.deepcopy(opt), copy.deepcopy(net)
        others = [p for group in twin.param_groups for p in group["params"]]
        for step in range(4):
            if step == 2:
                twin.attach(twin_net)
                others = list(twin_net.parameters())
            assert set(opt.state[params[0]]) == set(twin.state[others[0]])
            assert torch.equal(push(opt, params, noise(53, seed=step)), push(twin, others, noise(53, seed=step)))
        assert opt.diagnostics()["units"] == twin.diagnostics()["units"]

    run(3, rank)


def test_a_refused_group_leaves_the_ranks_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(comm: ThreadRank | None = None) -> Tensor:
        opt, params = made("mfac dense", comm)
        first = train(opt, params, range(3))
        if comm is not None:
            comm.meet("before")
            if comm.rank == 0:
                monkeypatch.setattr(window_plan, "free_bytes", lambda device: 2000)
            comm.meet("now")
            with pytest.raises(RuntimeError, match="window"):
                opt.add_param_group({"params": parameters([(300, 7)])})
            comm.meet("after")
        return torch.cat([first, train(opt, params, range(3, 6))])

    assert_alike(steps, 1e-11, world=2)


# -------------------------------------------------------------------------------------------------------------- reports
@each(compression={"dense": None, "topk": TopK(0.05, 256), "rank": LowRank(2)}, world=[2, 4])
def test_bytes_fall_with_the_number_of_parts(compression: Any, world: int) -> None:
    shapes = [(40, 30), (70,), (50, 16), (64,), (30, 40), (6,), (12, 12, 3)]
    d, block = sum(prod(shape) for shape in shapes), 256 if isinstance(compression, TopK) else 16

    def rank(comm: ThreadRank | None = None) -> dict[str, int]:
        params = parameters(shapes, torch.float32)
        opt = MFAC(params, window_size=M, comm=comm, compression=compression)
        give(params, noise(d))
        opt.step()
        usage = opt.memory_usage()
        assert usage["total"] == sum(value for key, value in usage.items() if key != "total")
        assert usage["gram"] == 8 * M * (M + 1) // 2
        return usage

    whole, found = rank(), run(world, rank)
    for kind in ("window", "error"):
        assert sum(usage[kind] for usage in found) == whole[kind]
    if compression is None:
        assert all(usage["window"] <= 4 * M * (d / world + block) for usage in found)
    elif isinstance(compression, TopK):
        kept = compression.kept(block)
        assert all(usage["window"] <= M * 6 * (kept * (d / world / block + 1) + len(shapes)) for usage in found)
        assert all(usage["error"] <= 4 * (d / world + block) for usage in found)
    else:
        assert max(usage["window"] for usage in found) <= 1.34 * whole["window"] / world + 4 * M * 2 * 90


def test_reports_of_a_rank_need_no_communication() -> None:
    def rank(comm: ThreadRank) -> None:
        opt, params = made("mfac topk", comm)
        layers, others = made("mfac topk", comm, partition="layer")
        train(opt, params, range(2))
        train(layers, others, range(2))
        del comm.sent[:]
        units = opt.diagnostics()["units"]
        assert units["all"]["rows"] == 2
        assert 0 < units["all"]["cos"] <= 1
        assert "residual_norm" not in units["all"]
        held = [i for i in range(len(SHAPES)) if i % comm.world == comm.rank]
        assert list(layers.diagnostics()["units"]) == [f"group 0 parameter {i}" for i in held]
        assert "in 3 parts" in opt.describe()
        assert "rank 2" in layers.describe()
        with pytest.raises(RuntimeError, match=r"rows .*CommOpt"):
            opt.dense_curvature("group 0 parameter 0")
        if comm.rank != 0:
            with pytest.raises(RuntimeError, match="CommOpt"):
                layers.dense_curvature("group 0 parameter 0")
        assert not comm.sent

    run(3, rank)


# ---------------------------------------------------------------------------------------------------------- checkpoints
def consolidated(comm: ThreadRank, opt: Any) -> dict[str, Any]:
    """The whole state on every rank."""
    for to in range(comm.world):
        opt.consolidate_state_dict(to)
        if to == comm.rank:
            saved = through_a_file(opt.state_dict())
    assert "partial" not in saved
    return saved


def resumed(kind: str, comm: ThreadRank | None, saved: dict[str, Any], start: Tensor, **more: Any) -> Any:
    """A new optimizer, which has loaded a checkpoint, and its parameters."""
    opt, params = made(kind, comm, **more)
    put(params, start)
    opt.load_state_dict(saved)
    return opt, params


SECOND_HALF = range(M + 2, 3 * M)
RESUMED = [f"mfac {name}" for name in ("dense", "bfloat16", "topk", "topk-odd-blocks", "topk-4-bit", "topk-8-bit")]
RESUMED += ["mfac rank-1", "reg pre", "ggt betas"]


@each(kind=RESUMED, partition=["global", "layer"])
def test_a_whole_checkpoint_loads_in_every_world(kind: str, partition: str) -> None:
    """It moves from one process to ranks, from ranks to one process and to other ranks."""
    opt, params = made(kind, partition=partition)
    train(opt, params, range(M + 2))
    saved, start = through_a_file(opt.state_dict()), flat(params)
    expected = train(opt, params, SECOND_HALF)

    def again(comm: ThreadRank) -> tuple[dict[str, Any], Tensor]:
        twin, others = resumed(kind, comm, saved, start, partition=partition)
        assert not comm.sent
        return consolidated(comm, twin), train(twin, others, SECOND_HALF)

    for world, workers in WORLDS:
        for whole, path in run(world, again, workers):
            assert_near(path, expected, 1e-11)
            for i, state in saved["state"].items():
                assert whole["state"][i].keys() == state.keys()
                for key, value in state.items():
                    assert torch.equal(torch.as_tensor(whole["state"][i][key]), torch.as_tensor(value)), key
    assert_near(train(*resumed(kind, None, whole, start, partition=partition), SECOND_HALF), expected, 1e-11)


@each(kind=RESUMED, partition=["global", "layer"])
def test_every_rank_resumes_from_its_own_part_bit_for_bit(kind: str, partition: str) -> None:
    """No name of a slice occurs on two ranks, because a checkpoint of all ranks keeps one value of each name."""

    def rank(comm: ThreadRank) -> list[str]:
        opt, params = made(kind, comm, partition=partition)
        train(opt, params, range(M + 2))
        del comm.sent[:]
        saved, start = through_a_file(_quiet(opt)), flat(params)
        assert not comm.sent
        names = [f"{i} {key}" for i, state in saved["state"].items() for key in state if "@" in key]
        assert all(name.endswith(f"@{comm.rank}of3") for name in names)
        assert bool(names) == (partition == "global")
        expected = train(opt, params, SECOND_HALF)
        assert torch.equal(train(*resumed(kind, comm, saved, start, partition=partition), SECOND_HALF), expected)
        return names

    names = [name for own in run(3, rank) for name in own]
    assert len(names) == len(set(names))


def _quiet(opt: Any) -> dict[str, Any]:
    """The part of this rank, without the warning that it is partial."""
    opt.warned_of_partial = True
    return opt.state_dict()


@each(kind=["mfac dense", "mfac topk"], marked=[True, False])
def test_the_part_of_another_rank_is_refused_with_the_remedy(kind: str, marked: bool) -> None:
    """It is refused even if a checkpoint library has dropped the mark."""

    def part(comm: ThreadRank) -> dict[str, Any]:
        opt, params = made(kind, comm)
        train(opt, params, range(3))
        return {k: v for k, v in through_a_file(_quiet(opt)).items() if marked or k != "partial"}

    parts = run(3, part)

    def other(comm: ThreadRank | None, saved: dict[str, Any]) -> None:
        opt, params = made(kind, comm)
        train(opt, params, range(1))
        before = copy.deepcopy(_quiet(opt))
        with pytest.raises(RuntimeError, match=r"part.*consolidate_state_dict\(\)"):
            opt.load_state_dict(saved)
        assert differences(before, _quiet(opt)) == set()

    other(None, parts[0])
    run(3, lambda comm: other(comm, parts[(comm.rank + 1) % 3]))
    run(2, lambda comm: other(comm, parts[comm.rank]))


@each(storage=["dense", "topk", "topk-8-bit", "rank-1"], wanted=[2, 7])
def test_another_window_size_in_another_world(wanted: int, storage: str) -> None:
    kind = f"mfac {storage}"
    opt, params = made(kind, **PRE)
    train(opt, params, range(M + 2))
    saved, start = through_a_file(opt.state_dict()), flat(params)

    def resized(comm: ThreadRank | None = None) -> Tensor:
        return train(*resumed(kind, comm, saved, start, window_size=wanted, **PRE), range(8))

    assert_alike(resized, 1e-11)


@pytest.mark.parametrize("saved_again", [False, True])
def test_rows_that_are_rounded_at_loading_get_their_products_at_the_next_step(saved_again: bool) -> None:
    """Summing over the parts needs a message, and loading sends none; a checkpoint in between allows for this."""
    opt, params = made("pre", dtype=torch.float32)
    train(opt, params, range(M + 2))
    saved, start = through_a_file(opt.state_dict()), flat(params)

    def rounded(comm: ThreadRank | None = None) -> Tensor:
        twin, others = resumed("pre", comm, saved, start, dtype=torch.float32, window_dtype=torch.bfloat16)
        if saved_again and comm is not None:
            own = through_a_file(_quiet(twin))
            assert own["state"][0]["gram"].isnan().all()
            twin, others = resumed("pre", comm, own, start, dtype=torch.float32, window_dtype=torch.bfloat16)
        if comm is not None:
            assert not comm.sent
        return train(twin, others, range(M + 2, 2 * M))

    assert_alike(rounded, 1e-5)


def test_parts_of_another_precision_are_not_converted_and_without_curvature_nothing_is_partial() -> None:
    def rank(comm: ThreadRank) -> None:
        opt, params = made("mfac dense", comm, torch.float32)
        train(opt, params, range(3))
        twin, _ = made("mfac dense", comm, torch.float32, window_dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"bfloat16.*consolidate_state_dict\(\)"):
            twin.load_state_dict(_quiet(opt))
        opt, params = made("mfac topk", comm, checkpoint_curvature="none")
        train(opt, params, range(3))
        saved = through_a_file(opt.state_dict())
        assert "partial" not in saved
        assert all(base_key(key) not in CATALOG for state in saved["state"].values() for key in state)
        opt.load_state_dict(saved)
        assert opt.diagnostics()["units"]["all"]["rows"] == 0
        train(opt, params, range(2))

    run(2, rank)
