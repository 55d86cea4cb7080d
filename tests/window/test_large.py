"""Windows too large for products in float64: chunks of columns, blocks of rows, tiles, in working precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secondorder import GGT, MFAC, LowRank, TopK
from secondorder.curvature.window import lowrank, rows
from tests.support.grid import each, pairs
from tests.support.window import assert_near, error_of, history, noise, parameters, push


def through_gram(G: torch.Tensor, damping: float) -> torch.Tensor:
    """``(λI + GᵀG/n)⁻¹ g`` of the last row in float64, by the small side: d x d would not fit."""
    G = G.double()
    unit = torch.zeros(len(G), dtype=torch.float64)
    unit[-1] = 1
    return G.T @ torch.linalg.solve(damping * torch.eye(len(G), dtype=torch.float64) + G @ G.T / len(G), unit)


@pairs(d=[1, 4095, 4096, 4097, 16389, 33000], t=[1, 257])
def test_products_in_chunks(d: int, t: int) -> None:
    window, x, a = (noise(*shape, seed=s, dtype=torch.float32) for s, shape in enumerate(((t, d), (d,), (t,))))
    out = torch.full((d,), torch.nan)
    rows.combine_rows(window, a, out)
    dots, wanted = rows.row_dots(window, x), window.double() @ x.double()
    lengths = window.double().norm(dim=1) * x.double().norm()
    assert float(((dots - wanted).abs() / lengths).max()) < 2e-7  # what the filter of the spectrum takes for rounding
    assert error_of(out, window.double().T @ a.double()) < 2e-6


@each(damping=[1e-4, 1e-6, 1e-8], common=[0.0, 2.0])  # cosine of two rows: 0 and 0.8
def test_float32_direction_in_working_precision(common: float, damping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "EXACT", 0)
    params = parameters([(200,)], torch.float32)
    opt, seen = MFAC(params, lr=1.0, window_size=32, damping=damping), []
    base = common * noise(200, seed=99, dtype=torch.float32)
    for step in range(40):
        seen.append(noise(200, seed=step, dtype=torch.float32) + base)
        with opt.keep_directions() as kept:
            push(opt, params, seen[-1])
        assert_near(next(iter(kept.values())), through_gram(torch.stack(seen[-32:]), damping), 1e-5, step)


FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bfloat16": {"window_dtype": torch.bfloat16},
    "topk": {"compression": TopK(density=0.05, block_size=4096)},
    "low-rank": {"compression": LowRank(4)},
}


@pairs(cls=[MFAC, GGT], form=list(FORMS))
def test_whole_steps_of_a_wide_window(cls: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE", 1 << 15)
    monkeypatch.setattr(lowrank, "TILE", 1 << 12)
    params = parameters([(130, 300), (77,)], torch.float32)  # d = 39,077: nine whole chunks and a rest
    block = 4096 if form == "topk" else 0
    opt = cls(params, lr=1.0, window_size=20, **({"damping": 1e-4} if cls is MFAC else {}), **FORMS[form])
    for step in range(27):
        with opt.keep_directions() as kept:
            push(opt, params, noise(39077, seed=step, dtype=torch.float32))
    G = history(opt, params, [0, 1], block)
    u = torch.cat([d.flatten() for d in kept.values()])
    if cls is MFAC:
        assert_near(u, through_gram(G, 1e-4), 1e-5)
        return
    values, vectors = torch.linalg.eigh(G @ G.T)
    assert_near(u, G.T @ (vectors @ (vectors[-1] / (values.sqrt() + 1e-4))), 1e-5)
