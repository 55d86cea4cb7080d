"""Bit-exact resume across the seam of the ring, other window sizes, refusals, dtypes that survive torch's casts."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import MFAC, LowRank, TopK
from tests.support.building import built
from tests.support.checkpoints import assert_goes_on
from tests.support.grid import each, pairs
from tests.support.oracles.window import Average
from tests.support.saving import through_a_file
from tests.support.tasks import assert_identical, snapshot
from tests.support.window import assert_near, differences, flat, give, history, noise, parameters, push
from tests.support.window_storages import METHODS, STORAGES, averaging, explicit, regular

SHAPES, D, M = [(4, 5), (3,), (3, 7)], 44, 5
KINDS: dict[str, dict[str, Any]] = {
    **{name: STORAGES[name].keywords for name in ("float64", "topk-8-bit", "topk-forgetful", "topk-all", "rank-2")},
    "topk-bfloat16, pre": {"momentum": 0.9, "momentum_mode": "pre", **STORAGES["topk-bfloat16"].keywords},
}


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_exact(kind: str) -> None:
    """After a dropped step, with a seam in the middle of the ring; `tests/checkpoint/` has more methods and ways."""

    def new() -> tuple[nn.ParameterList, Any]:
        model = nn.ParameterList(parameters(SHAPES, torch.float32))
        return model, built(MFAC, model.parameters(), lr=1e-3, window_size=M, **KINDS[kind])

    def train(model: nn.Module, opt: Any, first: int, last: int) -> None:
        params = list(model.parameters())
        for step in range(first, last):
            give(params, noise(D, seed=step) + 0.1 * flat(params))
            if step == 3:
                params[1].grad.fill_(torch.nan)  # type: ignore[union-attr]
            opt.step()

    _, opt = assert_goes_on(new, train, M + 3, 3 * M + 4)
    assert opt.diagnostics()["skipped_steps"] == 1


@pytest.mark.parametrize("saved_at", [6, 17, 28])
def test_resume_while_the_chosen_solver_lags_behind(saved_at: int) -> None:
    """Repeated gradients make "auto" change its solver some steps later, which a resumed run does at the same step."""

    def steps(opt: torch.optim.Optimizer, params: list[nn.Parameter], which: range) -> list[Tensor]:
        return [push(opt, params, noise(D, seed=0 if 2 <= step < 16 else step)) for step in which]

    params, others = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    opt, twin = (MFAC(p, lr=1.0, window_size=8, damping=1e-8) for p in (params, others))
    steps(opt, params, range(saved_at))
    twin.load_state_dict(through_a_file(opt.state_dict()))
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
    twin.load_state_dict(through_a_file(opt.state_dict()))
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
    twin.load_state_dict(through_a_file(opt.state_dict()))
    seen = list(g[12 - min(wanted, M) : 12])
    for step in range(12, 12 + 2 * wanted + 3):
        seen.append(g[step])
        rows, v = torch.stack(seen[-wanted:]), average.add(g[step])
        assert_near(push(twin, others, g[step]), explicit(method, rows, v, 1e-3, 0.8), 1e-9, step)


# ------------------------------------------------------------------------------------------------------------- refusals
OTHERS: dict[str, tuple[Any, Any]] = {
    "block size, same number of entries": (TopK(0.25, 8), TopK(0.5, 4)),
    "density": (TopK(0.25, 8), TopK(0.5, 8)),
    "dense": (TopK(0.25, 8), None),
    "from dense": (None, TopK(0.25, 8)),
    "rank": (LowRank(1), LowRank(2)),
    "entries to factors": (TopK(0.25, 8), LowRank(1)),
    "dense bits": (TopK(0.25, 8, error_bits=4), TopK(0.25, 8, error_bits=8)),
}


@each(case=list(OTHERS), other=[3, 5])
def test_another_compression_is_refused_before_anything_changes(case: str, other: int) -> None:
    params, others = parameters(SHAPES), parameters(SHAPES)
    opt, twin = (
        MFAC(p, lr=0.5, window_size=m, compression=compression)
        for p, m, compression in zip((params, others), (5, other), OTHERS[case], strict=True)
    )
    for step in range(7):
        push(opt, params, noise(D, seed=step))
        push(twin, others, noise(D, seed=20 + step))
    before = snapshot(twin)
    with pytest.raises(ValueError):
        twin.load_state_dict(through_a_file(opt.state_dict()))
    assert_identical(snapshot(twin), before)
    push(twin, others, noise(D))


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
