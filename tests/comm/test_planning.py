"""Plans agree with formulas by hand and with the documented promises."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.commands.scaling import architecture
from secondorder import EKFAC, KFAC, MFAC, CommOpt, HybridOpt, HyLo, MemOpt, RefreshOptions, RowOptions
from secondorder.comm import ChiefOnly, Local, LocalFactors
from secondorder.plan.plan import Plan, Sum, Traffic, means
from secondorder.switching import LRChange
from tests.support.building import built

MIB = 2**20
FACTOR_STEPS, REFRESH_STEPS = 10, 100
LAYERS = [(20, 30), (30, 10), (10, 40), (40, 10)]
SIDES = [(d_in + 1, d_out) for d_in, d_out in LAYERS]


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(*layer) for layer in LAYERS))


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def each(plan: Plan, part: str, name: str) -> list[Any]:
    return [getattr(rank, part).get(name, 0) for rank in plan.ranks]


# ------------------------------------------------------------------------------------------------------------- Formulas
STATISTICS = 4 * sum(triangle(a) + triangle(g) for a, g in SIDES)
BASES = 4 * sum(a * a + g * g + a + g for a, g in SIDES)
INVERSES = STATISTICS
DIRECTIONS = 4 * sum(a * g for a, g in SIDES)
FACTORS = 4 * sum(a * a + g * g for a, g in SIDES)


def test_comm_opt_sends_statistics_and_curvature() -> None:
    for method, curvature, stored in (("eigen", BASES, BASES), ("cholesky", INVERSES, FACTORS)):
        split = {"damping_split": "pi"} if method == "cholesky" else {}
        plan = built(KFAC, network(), inverse_method=method, **split).plan(4, CommOpt())
        for part, name, expected in (
            ("sent", "statistics", STATISTICS / FACTOR_STEPS),
            ("sent", "curvature", curvature / REFRESH_STEPS),
            ("sent", "directions", 0),
            ("worst_sent", "curvature", curvature),
            ("worst_sent", "statistics", STATISTICS),
            ("stored", "factors", FACTORS),
            ("stored", "second_order", stored),
        ):
            assert each(plan, part, name) == [expected] * 4, (method, part, name)
        assert (plan.groups, plan.padding) == (1, 0)


def test_mem_opt_divides_curvature_and_sends_directions() -> None:
    plan = KFAC(network()).plan(4, MemOpt())
    assert each(plan, "sent", "curvature") == [0] * 4
    assert each(plan, "sent", "directions") == [DIRECTIONS] * 4
    assert each(plan, "sent", "statistics") == [STATISTICS / FACTOR_STEPS * (1 + plan.padding)] * 4
    assert 0 <= plan.padding <= 0.1
    assert sum(each(plan, "stored", "factors")) == FACTORS
    assert sum(each(plan, "stored", "second_order")) == BASES
    assert sum(each(plan, "flops", "refresh")) == sum(9 * (a**3 + g**3) for a, g in SIDES) / REFRESH_STEPS
    assert sum(each(plan, "flops", "precondition")) == sum(4 * (a * a * g + a * g * g) for a, g in SIDES)


def test_hybrid_opt_divides_curvature_between_columns() -> None:
    """In two rows of two ranks, every column has half of the layers, which are on both of its ranks."""
    plan = KFAC(network()).plan(4, HybridOpt(0.5))
    assert each(plan, "sent", "directions") == [DIRECTIONS] * 4
    columns = each(plan, "stored", "second_order")
    assert columns[0] == columns[2]
    assert columns[1] == columns[3]
    assert columns[0] + columns[1] == BASES
    assert [REFRESH_STEPS * n for n in each(plan, "sent", "curvature")] == pytest.approx(columns)
    assert sum(each(plan, "stored", "factors")) == FACTORS
    assert plan.groups == 3  # all ranks, a row and a column


def test_flops_of_statistics() -> None:
    """Before the first step, an example is assumed to have one row in a linear layer."""
    optimizer = KFAC(network())
    rows = 2 * sum(a * a + g * g for a, g in SIDES) / FACTOR_STEPS
    plan = optimizer.plan(4, CommOpt())
    assert each(plan, "flops", "statistics") == [0] * 4
    assert "it is not known how many rows an example has in 4 layers" in plan.notes[0]
    assert each(optimizer.plan(4, CommOpt(), batch_size=8), "flops", "statistics") == pytest.approx([8 * rows] * 4)
    model = network()
    optimizer = KFAC(model)
    model(torch.randn(6, 5, 20)).square().mean().backward()
    optimizer.step()
    assert each(optimizer.plan(4, CommOpt()), "flops", "statistics") == pytest.approx([6 * 5 * rows] * 4)
    local = optimizer.plan(4, LocalFactors(), batch_size=2)
    assert sum(each(local, "flops", "statistics")) == pytest.approx(2 * 5 * rows)
    assert local.notes == []


def test_wire_dtype_bfloat16_halves_the_bytes() -> None:
    plain, narrow = (KFAC(network()).plan(2, CommOpt(wire_dtype=wire)) for wire in (None, torch.bfloat16))
    # Equal parts are summed and sent back, which are twice the elements of half the size.
    for part, ratio in (("sent", 1), ("wire", 2)):
        expected = [n / ratio for n in each(plain, part, "statistics")]
        assert each(narrow, part, "statistics") == pytest.approx(expected, rel=1e-3)
    directions = KFAC(network()).plan(2, MemOpt(wire_dtype=torch.bfloat16))
    assert each(directions, "sent", "directions") == [DIRECTIONS / 2] * 2


def test_a_window_is_divided_evenly() -> None:
    """With `W` parts of a window of 8 rows, ranks send 8 dot products and gather the direction in float64."""
    for world in [1, 2, 4, 8]:
        model = network()
        d = sum(p.numel() for p in model.parameters())
        plan = MFAC(model, window_size=8).plan(world, MemOpt())
        window = each(plan, "stored", "window")
        assert sum(window) == 8 * 4 * d
        assert max(window) - min(window) <= 2 * 8 * 4 * 16  # split at multiples of 16 entries
        assert each(plan, "sent", "dots") == [8 * 8 if world > 1 else 0] * world
        assert max(each(plan, "sent", "directions")) == (8 * world * (max(window) // 32) if world > 1 else 0)
        assert each(MFAC(model, window_size=8).plan(world, CommOpt()), "stored", "window") == [8 * 4 * d] * world


@pytest.mark.filterwarnings("ignore:.*is not a multiple of factor_update_steps")
def test_options_that_change_messages() -> None:
    nbytes = 4 * sum(p.numel() for p in network().parameters())
    averaging = KFAC(network()).plan(4, CommOpt(average_gradients=True))
    assert each(averaging, "sent", "gradients") == [nbytes] * 4
    uneven = KFAC(network(), factor_update_steps=3, inv_update_steps=7).plan(2, CommOpt())
    assert each(uneven, "sent", "statistics") == pytest.approx([STATISTICS / 3] * 2)
    assert each(uneven, "sent", "curvature") == pytest.approx([BASES / 7] * 2)
    off = KFAC(network(), inv_update_steps=0).plan(4, CommOpt())
    assert each(off, "sent", "statistics") == each(off, "sent", "curvature") == [0] * 4
    assert each(off, "flops", "refresh") == [0] * 4
    at_once, staggered = (
        KFAC(network(), refresh=RefreshOptions(stagger=stagger)).plan(2, CommOpt()) for stagger in (False, True)
    )
    assert each(staggered, "sent", "curvature") == pytest.approx(each(at_once, "sent", "curvature"))
    assert max(each(staggered, "worst_sent", "curvature")) < BASES / 2


# --------------------------------------------------------------------------------------------------------- Known models
def test_factors_of_known_models() -> None:
    """The published figures are those of convolutions and the linear layer, without norms."""
    for model, mebibytes in [("resnet50", 587), ("resnet32", 15.7)]:
        optimizer = KFAC(architecture(model).model, skip_layers=nn.BatchNorm2d)
        stored = each(optimizer.plan(64, CommOpt()), "stored", "factors")
        assert stored == [pytest.approx(mebibytes * MIB, rel=4e-3)] * 64


def test_rows_of_known_models() -> None:
    """ResNet-50 on 64 ranks with 80 examples and a tenth of the rows has 512 rows in each of 54 layers."""
    optimizer = HyLo(architecture("resnet50").model, rank_fraction=0.1, skip_layers=nn.BatchNorm2d)
    plan = optimizer.plan(64, CommOpt(), batch_size=80)
    assert len(optimizer.blocks) == 54
    assert each(plan, "stored", "rows") == [pytest.approx(161 * MIB, rel=2e-3)] * 64
    assert each(plan, "stored", "kernel") == [54 * (512 * 512 + 1) * 8] * 64  # 54 MiB in float32
    shared = optimizer.plan(64, MemOpt(), batch_size=80)
    assert sum(each(shared, "stored", "rows")) == plan.ranks[0].stored["rows"]
    assert sum(each(shared, "stored", "kernel")) == plan.ranks[0].stored["kernel"]
    small = HyLo(
        architecture("resnet32").model, rank_fraction=0.1, rows=RowOptions(max_rank=384), skip_layers=nn.BatchNorm2d
    )
    plan = small.plan(32, CommOpt(), batch_size=128)
    assert each(plan, "stored", "rows") == [pytest.approx(15.9 * MIB, rel=1e-2)] * 32
    assert each(plan, "stored", "kernel") == [pytest.approx(2 * 18 * MIB, rel=1e-2)] * 32


def curvature(plan: Plan) -> list[int]:
    rest = ("momentum", "fallback", "buffers")
    return [sum(n for kind, n in rank.stored.items() if kind not in rest) for rank in plan.ranks]


@pytest.mark.parametrize("build", [KFAC, lambda model: EKFAC(model, estimator="running")], ids=["KFAC", "EKFAC"])
def test_mem_opt_divides_curvature_by_the_ranks(build: Any) -> None:
    for model, worlds in (("resnet20", [2, 4]), ("bert-base", [4, 8])):
        optimizer = build(architecture(model).model)
        (alone,) = curvature(optimizer.plan(1))
        for world in worlds:
            assert max(curvature(optimizer.plan(world, MemOpt()))) <= 1.15 / world * alone


# ------------------------------------------------------------------------------------------------------ Calls of plan()
@pytest.mark.parametrize("build", [
    lambda model: EKFAC(model, factor_update_steps=1, inv_update_steps=2),
    lambda model: HyLo(model, update_steps=2, mode=LRChange(hold=1, period_steps=2)),
    lambda model: HyLo(model, update_steps=1, rows=RowOptions(kfac_when_cheaper=True), mode="kis", damping=1e-3),
    lambda model: MFAC(model, window_size=4),
], ids=["EKFAC", "HyLo", "factors", "MFAC"])  # fmt: skip
def test_a_plan_changes_nothing(build: Any) -> None:
    model = network()
    optimizer = build(model)
    for _ in range(3):
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    before, random = copy.deepcopy(optimizer.state_dict()), torch.random.get_rng_state()
    diagnostics = optimizer.diagnostics()
    comm = HybridOpt(0.5)
    attributes = dict(vars(comm))
    for other in (None, comm, MemOpt()):
        assert optimizer.plan(4, other, batch_size=8).world_size == 4
    assert optimizer.plan().world_size == 1
    assert dict(vars(comm)) == attributes
    assert torch.equal(torch.random.get_rng_state(), random)
    assert optimizer.diagnostics() == diagnostics
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(after["state"][index][key], value, rtol=0, atol=0, equal_nan=True, msg=key)


def test_the_world_and_the_strategy_are_the_optimizers_own_unless_given() -> None:
    optimizer = KFAC(network())
    assert optimizer.plan().world_size == 1
    assert optimizer.plan().strategy == "Local()"
    assert optimizer.plan(4).strategy == "CommOpt()"  # the default of several ranks
    assert KFAC(network(), comm=MemOpt()).plan(4).strategy == "MemOpt()"
    assert optimizer.plan(1, comm=Local()).ranks[0].sent == {}
    for optimizer in (KFAC(network(), fallback="adamw"), EKFAC(network()), MFAC(network(), window_size=4)):
        usage = optimizer.memory_usage()
        (rank,) = optimizer.plan().ranks
        assert rank.stored == {kind: usage[kind] for kind in rank.stored}
        assert sum(rank.stored.values()) == usage["total"]


def test_invalid_arguments_are_refused() -> None:
    for arguments, error, message in [
        ({"world_size": 0}, ValueError, "world_size must be >= 1, got 0"),
        ({"world_size": 2.0}, TypeError, "world_size must be an integer, got 2.0"),
        ({"world_size": True}, TypeError, "world_size must be an integer, got True"),
        ({"comm": "mem_opt"}, TypeError, "comm must be a CommStrategy, got 'mem_opt'"),
        ({"comm": MemOpt}, TypeError, "comm must be a CommStrategy"),
        ({"world_size": 4, "comm": Local()}, ValueError, r"comm=Local\(\) is for one process, not 4"),
        ({"world_size": 4, "comm": HybridOpt(1 / 3)}, ValueError, "fractions that work: 0.25, 0.5, 1"),
        ({"world_size": 4, "comm": ChiefOnly(root=4)}, ValueError, "root=4, but there are 4 ranks"),
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be an integer, got 1.5"),
    ]:
        with pytest.raises(error, match=message):
            KFAC(network()).plan(**arguments)


# ---------------------------------------------------------------------------------------------------- Results of plan()
def test_a_plan_as_json_and_as_text() -> None:
    """The text has a column per rank, or statistics and a note about idle ranks if there are many ranks."""
    for world in (1, 2, 64):
        plan = KFAC(network()).plan(world, MemOpt())
        found = json.loads(json.dumps(plan.to_dict()))
        assert len(found["ranks"]) == found["world_size"] == world
        assert found["ranks"][0]["stored"] == plan.ranks[0].stored
        lines = str(plan).splitlines()
        assert any(line.startswith("stored") and "factors" in line for line in lines)
        if world == 2:
            assert lines[0] == "KFAC · MemOpt() · 2 ranks · 1 group per rank"
            assert lines[1].split() == ["rank", "0", "rank", "1"]
            assert any(line.startswith("sent per step") and "statistics" in line for line in lines)
        if world == 64:
            assert lines[1].split() == ["min", "mean", "max", "heaviest"]
            assert "rank " in str(plan)
            assert "note: 60 of 64 ranks own none of the 4 blocks and refresh nothing" in lines


def test_means_of_steps() -> None:
    plain = Traffic(3, {"x": Sum(8, 4.0, 2)}, {})
    refresh = Traffic(1, {"x": Sum(8, 4.0, 2)}, {1: {"y": Sum(100, 50.0, 1)}})
    first, second = means([plain, refresh], 2)
    assert first.sent == {"x": 8.0, "y": 0.0}
    assert first.worst_sent == {"x": 8, "y": 0}
    assert second.sent == {"x": 8.0, "y": 25.0}
    assert second.worst_sent == {"x": 8, "y": 100}
    assert second.wire == {"x": 4.0, "y": 12.5}
    assert second.messages == {"x": 2.0, "y": 0.25}
