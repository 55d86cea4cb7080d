"""Bit-exact resume across the seam of the ring, other window sizes, refusals, dtypes that survive torch's casts."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import GGT, MFAC, LowRank, TopK
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.oracles.window import Average
from tests.support.window import (
    assert_near,
    differences,
    flat,
    from_disk,
    give,
    history,
    noise,
    parameters,
    push,
    put,
    snapshot,
    states,
)
from tests.support.window_storages import FEW, METHODS, STORAGES, averaging, explicit, regular

SHAPES, D, M = [(4, 5), (3,), (3, 7)], 44, 5
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"mfac {name}": (MFAC, kind.keywords) for name, kind in STORAGES.items()},
    **{f"ggt {name}": (GGT, STORAGES[name].keywords) for name in FEW},
    "mfac pre topk": (MFAC, {"momentum": 0.9, "momentum_mode": "pre", "compression": TopK(0.25, 8)}),
    "mfac layer": (MFAC, {"partition": "layer", "momentum": 0.9, "momentum_mode": "pre"}),
    "ggt betas": (GGT, {"betas": (0.9, 0.8), "bias_correction": True}),
}


def train(opt: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> list[Tensor]:
    """Train with gradients that depend on the parameters, so that errors persist."""
    path = []
    for step in steps:
        give(params, noise(D, seed=step) + 0.1 * flat(params))
        opt.step()
        path.append(flat(params))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_exact(kind: str) -> None:
    """It is saved with a full ring whose seam is in the middle; the next 2m + 1 steps cross it twice."""
    cls, keywords = KINDS[kind]
    for dtype in (torch.float32, torch.float64) if kind.split()[-1] in FEW else (torch.float32,):
        params, others = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
        opt, twin = (built(cls, p, lr=1e-3, window_size=M, **keywords) for p in (params, others))
        train(opt, params, range(M + 2))
        give(params, torch.full((D,), torch.nan))
        opt.step()
        twin.load_state_dict(from_disk(opt))
        put(others, flat(params))
        assert opt.diagnostics()["skipped_steps"] == twin.diagnostics()["skipped_steps"] == 1
        assert differences(opt.state_dict(), twin.state_dict()) == set()
        steps = range(M + 2, 3 * M + 3)
        paths = zip(train(opt, params, steps), train(twin, others, steps), strict=True)
        assert all(torch.equal(a, b) for a, b in paths)
        assert differences(opt.state_dict(), twin.state_dict()) == set()


@pytest.mark.parametrize("saved_at", [6, 17, 28])
def test_resume_while_the_chosen_solver_lags_behind(saved_at: int) -> None:
    """Repeated gradients make "auto" change its solver some steps later, which a resumed run does at the same step."""

    def steps(opt: torch.optim.Optimizer, params: list[nn.Parameter], which: range) -> list[Tensor]:
        return [push(opt, params, noise(D, seed=0 if 2 <= step < 16 else step)) for step in which]

    params, others = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    opt, twin = (MFAC(p, lr=1.0, window_size=8, damping=1e-8) for p in (params, others))
    steps(opt, params, range(saved_at))
    twin.load_state_dict(from_disk(opt))
    rest = range(saved_at, 45)
    assert all(torch.equal(a, b) for a, b in zip(steps(opt, params, rest), steps(twin, others, rest), strict=True))


@pairs(how=[f"{m} {s}" for m in METHODS for s in ("dense", "topk-4-bit", "rank-1")], wanted=[1, 3, 8])
def test_another_window_size_keeps_the_newest_rows(how: str, wanted: int) -> None:
    method, storage = how.split()
    kind, every, steps = STORAGES[storage], [0, 1, 2], 2 if wanted == 3 else 11
    own = {**regular(method, 1e-2), **({"betas": (0.0, 0.9)} if method == "ggt" else {}), **kind.keywords}
    params, others = parameters(SHAPES), parameters(SHAPES)
    opt, twin = (built(METHODS[method], p, lr=1.0, window_size=m, **own) for p, m in ((params, M), (others, wanted)))
    for step in range(steps):
        push(opt, params, noise(D, seed=step))
    kept = history(opt, params, every, kind.block_size)
    twin.load_state_dict(from_disk(opt))
    assert twin.param_groups[0]["window_size"] == wanted
    assert torch.equal(history(twin, others, every, kind.block_size), kept[-wanted:])
    left = {"error", "error_range", "tail_error", "tail_error_range", "q_prev"}
    assert not left & differences(opt.state_dict(), twin.state_dict())
    seen = list(kept[-wanted:])
    for step in range(steps, steps + 2 * wanted + 1):
        u = push(twin, others, noise(D, seed=step))
        seen.append(history(twin, others, every, kind.block_size)[-1])
        rows = torch.stack(seen[-wanted:])
        assert torch.equal(history(twin, others, every, kind.block_size), rows)
        assert_near(u, explicit(method, rows, rows[-1], 1e-2, 0.9), 1e-9, step)


@pairs(method=list(METHODS), wanted=[2, 3, 8])
def test_another_window_size_under_momentum_on_gradients(method: str, wanted: int) -> None:
    """Rows that leave the window at loading stay in the average."""
    keywords = {"lr": 1.0, **averaging(method, 0.9, 0.8), **regular(method, 1e-3)}
    params, others = parameters(SHAPES), parameters(SHAPES)
    opt, twin = (built(METHODS[method], p, window_size=m, **keywords) for p, m in ((params, M), (others, wanted)))
    g, average = noise(40, D), Average(D, 0.9)
    for step in range(12):
        push(opt, params, g[step])
        average.add(g[step])
    twin.load_state_dict(from_disk(opt))
    seen = list(g[12 - min(wanted, M) : 12])
    for step in range(12, 12 + 2 * wanted + 3):
        seen.append(g[step])
        rows, v = torch.stack(seen[-wanted:]), average.add(g[step])
        assert_near(push(twin, others, g[step]), explicit(method, rows, v, 1e-3, 0.8), 1e-9, step)


# ------------------------------------------------------------------------------------------------------------- refusals
TOPK = {"density": 0.25, "block_size": 8}
OTHERS: dict[str, tuple[Any, Any]] = {
    "block size": (TopK(**TOPK), TopK(density=0.25, block_size=16)),
    "block size, same number of entries": (TopK(density=0.25, block_size=8), TopK(density=0.5, block_size=4)),
    "density": (TopK(**TOPK), TopK(density=0.5, block_size=8)),
    "dense": (TopK(**TOPK), None),
    "from dense": (None, TopK(**TOPK)),
    "rank": (LowRank(1), LowRank(2)),
    "factors to dense": (LowRank(1), None),
    "entries to factors": (TopK(**TOPK), LowRank(1)),
    "dense bits": (TopK(error_bits=4, **TOPK), TopK(error_bits=8, **TOPK)),
}


@each(case=list(OTHERS), sizes={"another-size": (5, 3), "the-same": (5, 5)})
def test_another_compression_is_refused_before_anything_changes(case: str, sizes: tuple[int, int]) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    opt, twin = (
        MFAC(p, lr=0.5, window_size=m, compression=compression)
        for p, m, compression in zip((params, others), sizes, OTHERS[case], strict=True)
    )
    for step in range(7):
        push(opt, params, noise(D, seed=step))
        push(twin, others, noise(D, seed=20 + step))
    before, groups = snapshot(twin), str(twin.param_groups)
    with pytest.raises(ValueError):
        twin.load_state_dict(from_disk(opt))
    assert differences(before, twin.state_dict()) == set()
    assert str(twin.param_groups) == groups
    push(twin, others, noise(D))


@pytest.mark.parametrize("storage", ["topk-bfloat16", "topk-8-bit", *FEW])
def test_a_model_in_bfloat16_keeps_the_dtypes_of_the_state(storage: str) -> None:
    """``Optimizer.load_state_dict`` casts floating-point state to the dtype of the parameter."""
    kind = STORAGES[storage]
    for saved_in in (torch.bfloat16, torch.float32):
        params, others = parameters(SHAPES, saved_in), parameters(SHAPES, torch.bfloat16)
        opt, twin = (built(MFAC, p, lr=1.0, window_size=M, **kind.keywords) for p in (params, others))
        for step in range(M + 2):
            push(opt, params, noise(D, seed=step))
        twin.load_state_dict(from_disk(opt))
        changed = differences(opt.state_dict(), twin.state_dict())
        assert not [key for key in changed if key.startswith(("window", "tail", "error", "gram", "q_prev"))]
        if saved_in == torch.bfloat16:
            assert not changed
            for step in range(2 * M + 1):
                g = noise(D, seed=100 + step)
                assert torch.equal(push(opt, params, g), push(twin, others, g))
        first = {key: value.dtype for key, value in states(twin)[0].items() if isinstance(value, Tensor)}
        assert first["gram"] == torch.float64
        if kind.topk:
            assert first["window_idx"] == torch.int16
            assert first["window_val"] == kind.topk.get("value_dtype", torch.float32)
            assert first.get("error", torch.float32) == (torch.uint8 if kind.quantised else torch.float32)
        elif "window" in first:
            assert first["window"] == (kind.window_dtype or torch.float32)


def test_offsets_outside_of_their_block_are_refused() -> None:
    params = parameters([(20,)])
    opt = MFAC(params, window_size=3, compression=TopK(density=0.5, block_size=8))
    push(opt, params, noise(20))
    before = snapshot(opt)
    for key, offset in product(("window_idx", "tail_idx"), (-1, 8)):
        damaged = snapshot(opt)
        damaged["state"][0][key].view(-1)[3] = offset
        with pytest.raises(ValueError, match=key):
            opt.load_state_dict(damaged)
        assert differences(before, opt.state_dict()) == set()
