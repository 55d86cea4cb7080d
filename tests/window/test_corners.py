"""Rows that say nearly the same, gates on a device, complex numbers, and other corners of the window methods."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secondorder import GGT, MFAC, TopK
from secondorder.curvature.window import topk
from secondorder.diagnostics.step_record import StepRecord
from secondorder.linalg import gram
from tests.support.oracles.window import extended, fisher_direction, solve
from tests.support.window import (
    assert_near,
    differences,
    flat,
    give,
    history,
    noise,
    parameters,
    push,
    put,
    residual,
    snapshot,
    states,
    stored_rows,
)
from tests.support.window_storages import METHODS, STORAGES, explicit, regular

SHAPES, D, M = [(4, 5), (3,), (3, 7)], 44, 4


def push_through(rows: Tensor, damping: float) -> Tensor:
    """``Gᵀ (λI + GGᵀ/n)⁻¹ e`` for the newest row, the last: fisher_direction for a large d."""
    G = extended(rows)
    unit = np.zeros(len(G))
    unit[-1] = 1
    a = solve(damping * np.eye(len(G), dtype=np.longdouble) + G @ G.T / len(G), unit)
    return torch.from_numpy((G.T @ a).astype(np.float64))


# ------------------------------------------------------------------------------------------------- nearly the same rows
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("d", [40, 2000])  # products of the small window are exact
def test_the_same_gradient_in_every_step(d: int, scale: float) -> None:
    params, g = parameters([(d,)], torch.float32), scale * noise(d, dtype=torch.float32)
    opt = MFAC(params, lr=1.0)
    exact = g.double()
    expected = exact / (1e-5 + exact @ exact)
    for step in range(14):
        assert_near(push(opt, params, g), expected, 1e-3, step)


@pytest.mark.parametrize("d", [40, 2000])
def test_a_schedule_that_begins_with_steps_of_length_zero(d: int) -> None:
    params = parameters([(d,)], torch.float32)
    params[0].data += noise(d, seed=1, dtype=torch.float32)
    target, rows = noise(d, seed=2, dtype=torch.float32), []
    opt = MFAC(params, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: float(step >= 3))
    for step in range(8):
        give(params, params[0].detach() - target)
        rows.append(params[0].grad.clone())
        with opt.keep_directions() as kept:
            opt.step()
        schedule.step()
        (u,) = kept.values()
        expected = push_through(torch.stack(rows), 1e-5)
        if step <= 3:
            assert_near(u, expected, 1e-3, step)
        else:  # what sets the new gradient apart from the old ones is of the size of rounding, and may be left out
            assert float(u.norm()) <= 1.01 * float(expected.norm())
            assert float((u * rows[-1]).sum()) > 0
    assert torch.equal(rows[0], rows[3])


@pytest.mark.parametrize("cosine", [0.99, 0.9999])
def test_float32_direction_of_correlated_rows(cosine: float) -> None:
    m, d = 32, 2000
    common, own = noise(d) / d**0.5, noise(m + 6, d, seed=1) / d**0.5
    rows = (cosine**0.5 * common + (1 - cosine) ** 0.5 * own).float()
    params = parameters([(d,)], torch.float32)
    opt = MFAC(params, lr=1.0, window_size=m, damping=1e-6)
    for step in range(len(rows)):
        u = push(opt, params, rows[step])
        if step in (1, 9, 31, 37):
            assert_near(u, push_through(rows[max(0, step + 1 - m) : step + 1], 1e-6), 1e-5, step)


@pytest.mark.parametrize("last_resort", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failing_solve_does_not_change_the_others_of_its_batch(
    bad: int, last_resort: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal rows whose length is a power of two: the second pivot is exactly zero."""
    keywords: dict[str, Any] = {"lr": 1.0, "window_size": M, "damping": 1e-18, "solver": "cholesky"}
    params, others = parameters([(8,)] * 3), parameters([(8,)] * 3)
    opt, fine = (MFAC(p, partition="layer", **keywords) for p in (params, others))
    good = [push(fine, others, noise(24, seed=step)).view(3, 8) for step in range(6)]
    assert fine.diagnostics()["solve_failures"] == 0
    filtered, calls = gram.mfac_filtered, []

    def second(*args: Any, **named: Any) -> Tensor:
        calls.append(args)
        if last_resort:
            raise torch.linalg.LinAlgError("does not converge")
        return filtered(*args, **named)

    monkeypatch.setattr(gram, "mfac_filtered", second)
    which, row = [i for i in range(3) if i != bad], torch.tensor([2.0] * 4 + [0.0] * 4, dtype=torch.float64)
    for step in range(6):
        g = noise(24, seed=step)
        g[8 * bad : 8 * bad + 8] = row
        u = push(opt, params, g).view(3, 8)
        assert_near(u[which], good[step][which], 1e-12, step)
        assert_near(u[bad], row / 16 * (min(step + 1, M) if last_resort else 1), 1e-9, step)
    assert calls
    failures = [int(states(opt)[i]["solve_failures"]) for i in range(3)]
    assert failures == [len(calls) if last_resort and i == bad else 0 for i in range(3)]


# ---------------------------------------------------------------------------------------------------------------- gates
Gated = Callable[[bool], None]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gated:
    """Steps from now on as on a device: with a gate that is open or closed."""

    def close(opened: bool) -> None:
        monkeypatch.setattr(StepRecord, "gate", lambda self, finite: (True, torch.tensor(opened)))

    return close


GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "pre": ("mfac", {"momentum": 0.9, "momentum_mode": "pre"}),
    "legacy": ("mfac", {"weight_decay": 0.1, "weight_decay_mode": "legacy"}),
    "pre-both": ("mfac", {"momentum": 0.9, "momentum_mode": "pre", "weight_decay": 0.1, "weight_decay_mode": "both"}),
    "decoupled": ("mfac", {"momentum": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "ggt": ("ggt", {"betas": (0.9, 0.8), "weight_decay": 0.1, "weight_decay_mode": "legacy"}),
    "adam": ("mfac", {"graft": "adam", "weight_decay": 0.1}),
}  # fmt: skip
GATED_STORAGES = ("dense", "bfloat16", "topk", "topk-4-bit", "rank-1")


def build(kind: str, storage: str, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    method, keywords = GATED[kind]
    keywords = {**keywords, **regular(method, 1e-2), **STORAGES[storage].keywords}
    return METHODS[method](params, lr=0.1, window_size=M, **keywords)


def train(opt: torch.optim.Optimizer, params: Sequence[nn.Parameter], steps: range) -> None:
    for step in steps:
        give(params, noise(D, seed=step) + 0.1 * flat(params))
        opt.step()


@pytest.mark.parametrize("storage", GATED_STORAGES)
@pytest.mark.parametrize("kind", GATED)
def test_an_open_gate_changes_nothing(kind: str, storage: str, gate: Gated) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    opt, gated = build(kind, storage, params), build(kind, storage, others)
    put(params, noise(D, seed=100))
    put(others, noise(D, seed=100))
    train(opt, params, range(7))
    gate(True)
    train(gated, others, range(7))
    assert_near(flat(others), flat(params), 1e-15 if kind in ("pre", "legacy") else 1e-14)
    mine, theirs = snapshot(gated)["state"], snapshot(opt)["state"]
    for i, state in theirs.items():
        assert state.keys() == mine[i].keys()
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert_near(mine[i][key].double(), value.double(), 1e-14, key)


@pytest.mark.parametrize(("storage", "steps"), [*((s, 7) for s in GATED_STORAGES), ("dense", 2), ("topk", 2)])
@pytest.mark.parametrize("kind", GATED)
def test_a_closed_gate_keeps_everything(kind: str, storage: str, steps: int, gate: Gated) -> None:
    params = parameters(SHAPES)
    opt = build(kind, storage, params)
    put(params, noise(D, seed=100))
    train(opt, params, range(steps))
    before, values = snapshot(opt), flat(params)
    gate(False)
    train(opt, params, range(steps, steps + 2))
    give(params, torch.full((D,), torch.nan))
    opt.step()
    assert torch.equal(flat(params), values)
    after = snapshot(opt)
    changed = differences(before, after)
    assert changed - {"step", "global_step", "amplification"} == {"skipped"}
    assert int(after["state"][0]["skipped"]) == int(before["state"][0]["skipped"]) + 3


# -------------------------------------------------------------------------------------------------------------- complex
@pytest.mark.parametrize("real", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("storage", ["dense", "topk", "rank-1"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)], ids=str)
def test_complex_parameters_beside_an_odd_number_of_real_entries(
    order: tuple[int, ...], method: str, storage: str, real: torch.dtype
) -> None:
    """The real ones come first, between and last: pairs of numbers start at odd places."""
    kind, pair = STORAGES[storage], torch.complex128 if real == torch.float64 else torch.complex64
    every = [nn.Parameter(torch.zeros(3, dtype=real)), *parameters([(2, 3), (5,)], pair)]
    params = [every[i] for i in order]
    opt = METHODS[method](params, lr=1.0, window_size=M, **regular(method, 1e-2), **kind.keywords)
    lengths = [p.numel() * (2 if p.is_complex() else 1) for p in params]
    for step in range(2 * M + 1):
        for i, p in enumerate(params):
            p.data.zero_()
            own = torch.Generator().manual_seed(10 * step + i)
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=own)
        opt.step()
        u = -flat(params)
        rows = torch.cat(
            [stored_rows(opt.state[p], n, kind.block_size) for p, n in zip(params, lengths, strict=True)], dim=1
        )
        rows = rows[[i % M for i in range(max(0, step + 1 - M), step + 1)]]
        if storage == "dense":
            assert_near(rows[-1], flat([p.grad for p in params]), 0.0)
        assert_near(u, explicit(method, rows, rows[-1], 1e-2), 1e-9 if real == torch.float64 else 1e-5, step)


@pytest.mark.parametrize("storage", ["dense", "topk"])
@pytest.mark.parametrize("method", METHODS)
def test_conjugated_gradients(method: str, storage: str) -> None:
    kind = STORAGES[storage]
    (p,), (twin,) = parameters([(7,)], torch.complex128), parameters([(7,)], torch.complex128)
    opt, plain = (METHODS[method]([x], lr=0.1, window_size=M, **kind.keywords) for x in (p, twin))
    with torch.no_grad():
        for x in (p, twin):
            x.copy_(torch.complex(noise(7), noise(7, seed=1)))
    for step in range(6):
        g = torch.complex(noise(7, seed=2 * step + 5), noise(7, seed=2 * step + 6))
        p.grad = g.conj()
        assert p.grad.is_conj()
        twin.grad = g.conj().resolve_conj()
        opt.step()
        plain.step()
        assert torch.equal(p, twin)
    before = p.detach().clone()
    p.grad = None
    (p.conj() * p * torch.complex(noise(7), noise(7, seed=3))).real.sum().backward()
    opt.step()
    assert torch.isfinite(torch.view_as_real(p)).all()
    assert not torch.equal(before, p)


# ---------------------------------------------------------------------------------------------------------- diagnostics
@pytest.mark.parametrize("storage", ["topk", "topk-4-bit"])
@pytest.mark.parametrize("missing", [[0, 1], [1], [2, 3]], ids=str)
def test_diagnostics_after_a_layer_without_gradient_and_a_dropped_step(storage: str, missing: list[int]) -> None:
    kind = STORAGES[storage]
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    params = list(net.parameters())
    opt = MFAC(net, lr=1.0, window_size=M, damping=1e-2, partition="layer", **kind.keywords)
    lengths: dict[str, Tensor] = {}
    for step in range(6):
        give(params, noise(39, seed=step))
        for i in missing if step in (3, 5) else []:
            params[i].grad = None
        for name, unit in {"0": params[:2], "1": params[2:]}.items():
            there = [p.grad for p in unit if p.grad is not None]
            if there:
                lengths[name] = flat(there).norm()
        opt.step()
    told = opt.diagnostics()
    for name, unit in {"0": [0, 1], "1": [2, 3]}.items():
        found = told["units"][name]
        state = states(opt)
        if storage == "topk":
            left = torch.cat([residual(state[i], params[i].numel()) for i in unit]).norm()
            assert found["residual_norm"] == pytest.approx(float(left), rel=1e-12)
        assert found["residual_ratio"] == pytest.approx(found["residual_norm"] / float(lengths[name]), rel=1e-9)
        assert 0 < found["sent_energy"] <= 1
        assert found["count"] == int(state[unit[0]]["count"])
        assert found["count"] == (4 if set(unit) <= set(missing) else 6)
        assert all(torch.isfinite(torch.tensor(float(value))) for value in found.values())
    give(params, torch.full((39,), torch.nan))
    opt.step()
    after = opt.diagnostics()
    assert after["units"] == told["units"]
    assert after["skipped_steps"] == told["skipped_steps"] + 1
    assert after["solve_failures"] == 0


def test_diagnostics_of_a_layer_that_never_had_a_gradient() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    params = list(net.parameters())
    opt = MFAC(net, lr=1.0, window_size=M, partition="layer", compression=TopK(density=0.25, block_size=8))
    give(params, torch.full((39,), torch.nan))
    opt.step()
    assert opt.diagnostics()["units"]["0"] == {"rows": 0, "count": 0}
    give(params, noise(39))
    params[2].grad = params[3].grad = None
    opt.step()
    units = opt.diagnostics()["units"]
    assert units["0"]["count"] == 1
    assert units["1"] == {"rows": 0, "count": 0}


# ------------------------------------------------------------------------------------------------------- sparse windows
@pytest.mark.parametrize(("density", "block", "bits"), [(0.5, 8, None), (0.25, 64, 8), (0.5, 200, None)])
def test_tiles_smaller_than_the_rows_of_a_block(
    density: float, block: int, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few entries per tile: rows of a block are cut, and in the last case a single row is larger than a tile."""

    def run() -> tuple[list[Tensor], dict[str, Any]]:
        params = parameters([(7, 70), (3,), (210,)])
        rule = TopK(density=density, block_size=block, error_bits=bits)
        opt = MFAC(
            params, lr=1.0, window_size=21, damping=1e-2, compression=rule, weight_decay=0.1, weight_decay_mode="reg"
        )
        return [push(opt, params, noise(703, seed=step)) for step in range(25)], snapshot(opt)

    whole, before = run()
    monkeypatch.setattr(topk, "_PRODUCT", 64)
    cut, after = run()
    for step, (u, expected) in enumerate(zip(cut, whole, strict=True)):
        assert_near(u, expected, 1e-12, step)
    assert differences(before, after) <= {"gram", "amplification"}
    assert_near(after["state"][0]["gram"], before["state"][0]["gram"], 1e-14)


def test_packed_errors_of_dense_rows_are_refused() -> None:
    for bits in (4, 8):
        with pytest.raises(ValueError, match="error_bits"):
            TopK(density=1, error_bits=bits)
    for density in (1, 1.0):
        TopK(density=density)


# --------------------------------------------------------------------------------------------------------------- layers
class LN(nn.LayerNorm):
    """Its name does not say what it is."""


@pytest.mark.parametrize("method", [MFAC, GGT])
def test_a_derived_norm_layer_is_left_out(method: Any) -> None:
    net = nn.Sequential(nn.Linear(5, 4), LN(4), nn.Linear(4, 3)).double()
    opt = method(net, lr=1.0, window_size=M, skip_norm_layers=True)
    params, g = list(net.parameters()), noise(47)
    u = push(opt, params, g)
    assert torch.equal(u[24:32], g[24:32])
    assert not torch.allclose(u[:24], g[:24])
    assert [i for i, state in states(opt).items() if "window" in state] == [0, 1, 4, 5]
    everything = method(net, lr=1.0, window_size=M)
    assert all("window" in state for state in states(everything).values())


def test_the_explicit_matrix_of_the_push_through() -> None:
    rows = noise(5, 30)
    assert_near(push_through(rows, 1e-3), fisher_direction(rows, rows[-1], 1e-3), 1e-12)
    params = parameters([(30,)])
    opt = MFAC(params, lr=1.0, window_size=5, damping=1e-3)
    for row in rows:
        u = push(opt, params, row)
    assert torch.equal(history(opt, params, [0]), rows)
    assert_near(u, push_through(rows, 1e-3), 1e-10)
