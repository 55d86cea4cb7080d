"""Gradients that are missing, not finite, or of parameters that are added, frozen and unfrozen."""

from typing import Any

import pytest
import torch

from secondorder.diagnostics.step_record import StepRecord
from tests.support import window
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.oracles.window import Average
from tests.support.tasks import snapshot
from tests.support.window import assert_near, columns_of, flat, give, history, noise, parameters, push, put, states
from tests.support.window_storages import FEW, METHODS, STORAGES, averaging, explicit, regular

SHAPES, D, M = [(4, 5), (3,), (3, 7)], 44, 4
EVERY = [0, 1, 2]


def build(method: str, params: Any, **keywords: Any) -> torch.optim.Optimizer:
    return built(METHODS[method], params, **{"lr": 1.0, "window_size": M, **regular(method, 1e-2), **keywords})


# ---------------------------------------------------------------------------------------------------- missing gradients
@each(storage=FEW, method=list(METHODS))
def test_a_parameter_without_gradient_has_a_zero_slice_and_stays(method: str, storage: str) -> None:
    kind, params = STORAGES[storage], parameters(SHAPES)
    opt = build(method, params, weight_decay=0.1, decoupled_weight_decay=True, **kind.keywords)
    for step in range(3 * M + 2):
        missing = step in (3, 4, 6, 7, 8, 9, 10)
        put(params, torch.zeros(D))
        give(params, noise(D, seed=step))
        before = snapshot(opt)["state"][2]
        if missing:
            params[2].grad = None
            put(params[2:], torch.ones(21))
        opt.step()
        u, rows = -flat(params), history(opt, params, EVERY, kind.block_size)
        if missing:
            assert torch.equal(u[23:], -torch.ones(21, dtype=torch.float64))
            assert not rows[-1, 23:].any()
            assert all(torch.equal(states(opt)[2][key], value) for key, value in before.items() if "error" in key)
        c = slice(0, 23 if missing else D)
        assert_near(u[c], explicit(method, rows, rows[-1], 1e-2)[c], 1e-9, step)


@pytest.mark.parametrize("method", METHODS)
def test_average_of_gradients_with_a_missing_slice(method: str) -> None:
    """The slice counts as zero: x = v decays there as with a gradient of zero."""
    params, average, seen = parameters(SHAPES), Average(D, 0.8), []
    opt = build(method, params, **averaging(method, 0.8, 0.9))
    for step in range(3 * M):
        g, missing = noise(D, seed=step), step in (2, 3, 7)
        g[20:23] *= not missing
        moved = push(opt, params, g, [1] if missing else [])
        seen.append(g)
        v, rows = average.add(g), torch.stack(seen[-M:])
        u = explicit(method, rows, v, 1e-2, 0.9)
        u[20:23] *= not missing
        assert_near(moved, u, 1e-9, step)


@each(storage=["dense", "topk", "rank-1"], partition=["global", "layer"])
def test_a_parameter_frozen_and_unfrozen_during_a_run(partition: str, storage: str) -> None:
    kind, params = STORAGES[storage], parameters(SHAPES)
    opt = build("mfac", params, partition=partition, **kind.keywords)
    for step in range(4 * M):
        frozen = 5 <= step < 9
        params[0].requires_grad_(not frozen)
        u = push(opt, params, noise(D, seed=step), [0] if frozen else [])
        for unit in [EVERY] if partition == "global" else [[0], [1], [2]]:
            columns = columns_of(params, unit)
            if frozen and unit == [0]:
                assert not u[columns].any()
                assert int(states(opt)[0]["count"]) == 5
                continue
            rows = history(opt, params, unit, kind.block_size)
            expected = explicit("mfac", rows, rows[-1], 1e-2)
            if frozen and unit == EVERY:
                assert not rows[-1, :20].any()
                expected[:20] = 0
            assert_near(u[columns], expected, 1e-9, step)


@each(method=list(METHODS), storage=["dense", "topk", "rank-1"])
def test_a_parameter_frozen_at_construction_and_unfrozen_later(method: str, storage: str) -> None:
    """It joins the window with zeros in the old rows."""
    kind, params = STORAGES[storage], parameters(SHAPES)
    params[1].requires_grad_(False)
    opt = build(method, params, **kind.keywords)
    assert not any(key.startswith(("window", "tail")) for key in states(opt).get(1, {}))
    twins = parameters([SHAPES[0], SHAPES[2]])
    alone, outside = build(method, twins, **kind.keywords), columns_of(params, [0, 2])
    for step in range(6):
        g = noise(D, seed=step)
        assert_near(push(opt, params, g, [1])[outside], push(alone, twins, g[outside]), 1e-12)
    before = window.ring(alone, twins, [0, 1], kind.block_size)
    params[1].requires_grad_(True)
    for step in range(6, 6 + 2 * M):
        u, rows = push(opt, params, noise(D, seed=step)), history(opt, params, EVERY, kind.block_size)
        if step == 6:
            assert torch.equal(rows[:-1][:, outside], before[[3, 0, 1]])
            assert not rows[:-1, 20:23].any()
            assert rows[-1, 20:23].any()
        assert_near(u, explicit(method, rows, rows[-1], 1e-2), 1e-9, step)


@each(method=list(METHODS), storage=["dense", "bfloat16", "topk", "rank-1"], partition=["global", "group", "layer"])
def test_a_group_added_after_training_started(method: str, storage: str, partition: str) -> None:
    """New columns are zero in old rows, so nothing else changes."""
    kind, params = STORAGES[storage], parameters(SHAPES)
    opt = build(method, params[:2], partition=partition, **kind.keywords)
    for step in range(6):
        push(opt, params[:2], noise(D, seed=step)[:23])
    before = snapshot(opt)["state"]
    opt.add_param_group({"params": params[2:], "lr": 0.5})
    after = snapshot(opt)["state"]
    for i in before:
        for key, value in before[i].items():
            assert torch.equal(torch.as_tensor(after[i][key]), torch.as_tensor(value)), key
    rates = torch.cat([torch.ones(23), torch.full((21,), 0.5)])
    units = {"global": [EVERY], "group": [[0, 1], [2]], "layer": [[0], [1], [2]]}[partition]
    for step in range(6, 6 + 2 * M):
        moved = push(opt, params, noise(D, seed=step)) / rates
        for unit in units:
            columns, rows = columns_of(params, unit), history(opt, params, unit, kind.block_size)
            assert len(rows) == (min(step - 5, M) if unit == [2] else M)
            if unit == EVERY:
                assert rows[:, 23:].any(dim=1).sum() == min(step - 5, M)
            assert_near(moved[columns], explicit(method, rows, rows[-1], 1e-2), 1e-9, step)


# --------------------------------------------------------------------------------------------------------- closed gates
GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "legacy": ("mfac", {"weight_decay": 0.1, "weight_decay_mode": "legacy"}),
    "pre": ("mfac", {"momentum": 0.9, "momentum_mode": "pre", "weight_decay": 0.1, "weight_decay_mode": "both"}),
    "decoupled": ("mfac", {"momentum": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "ggt": ("ggt", {"betas": (0.9, 0.8), "weight_decay": 0.1, "weight_decay_mode": "legacy"}),
    "adam": ("mfac", {"graft": "adam", "weight_decay": 0.1}),
}


@pairs(kind=list(GATED), storage=["dense", "topk", "topk-4-bit", "rank-1"], steps=[2, 7])
def test_a_closed_gate_keeps_everything(kind: str, storage: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the case of a device, where the host does not wait to know whether gradients are finite."""
    (method, keywords), params = GATED[kind], parameters(SHAPES)
    opt = build(method, params, **keywords, **STORAGES[storage].keywords)
    put(params, noise(D, seed=100))
    for step in range(steps):
        give(params, noise(D, seed=step) + 0.1 * flat(params))
        opt.step()
    before, values = snapshot(opt), flat(params)
    monkeypatch.setattr(StepRecord, "gate", lambda self, finite: (True, torch.tensor(False)))
    for g in (noise(D, seed=50), torch.full((D,), torch.nan)):
        give(params, g)
        opt.step()
    after = snapshot(opt)
    assert torch.equal(flat(params), values)
    assert window.differences(before, after) - {"step", "global_step", "amplification"} == {"skipped"}
    assert int(after["state"][0]["skipped"]) == int(before["state"][0]["skipped"]) + 2


@pytest.mark.parametrize("momentum", [{"momentum": 0.5}, {"inner": "adamw"}], ids=str)
def test_momentum_of_a_parameter_without_gradient_stays(momentum: dict[str, Any]) -> None:
    params = parameters(SHAPES)
    opt = build("mfac", params, weight_decay=0.1, **momentum)
    for step in range(6):
        push(opt, params, noise(D, seed=step))
    kept = {
        key: value for key, value in snapshot(opt)["state"][1].items() if key in ("momentum_buffer", "exp_avg", "step")
    }
    params[1].grad = None
    opt.step()
    assert len(kept) == 2
    assert all(torch.equal(states(opt)[1][key], value) for key, value in kept.items())
