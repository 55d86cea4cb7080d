"""What a step may cost in addition to its two passes: no temporary as large as the window, no loop over its rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import GGT, MFAC, LowRank, TopK
from secondorder.curvature.window import lowrank, rows, topk
from tests.support.building import built
from tests.support.grid import each
from tests.support.operators import Operators

WIDE = (96, 512)  # d = 49,152
TILE = 1 << 12
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bfloat16": {"window_dtype": torch.bfloat16},
    "topk": {"compression": TopK(density=0.1, block_size=512)},
    "4-bit": {"compression": TopK(density=0.1, block_size=512, value_dtype=torch.bfloat16, error_bits=4)},
    "low-rank": {"compression": LowRank(4)},
    "pre": {"momentum": 0.9, "momentum_mode": "pre"},
    "reg": {"weight_decay": 1e-6, "weight_decay_mode": "reg"},
}


def record(cls: Any, m: int, **keywords: Any) -> Operators:
    """One step with a full window."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(WIDE, generator=generator)), nn.Parameter(torch.randn(37, generator=generator))]
    opt = built(cls, params, lr=0.1, window_size=m, **keywords)

    def push() -> None:
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()

    for _ in range(m + 1):
        push()
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    held = [v for p in params for v in opt.state[p].values() if isinstance(v, Tensor)]
    with Operators(*params, *(p.grad for p in params), *held) as found:
        opt.step()
    return found


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows too large for products in float64."""
    monkeypatch.setattr(rows, "EXACT", 0)


@pytest.fixture
def small_tiles(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE", TILE)
    monkeypatch.setattr(lowrank, "TILE", TILE)
    monkeypatch.setattr(topk, "_SELECT", TILE)
    monkeypatch.setattr(topk, "_PRODUCT", TILE)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("form", FORMS)
def test_no_temporary_is_larger_than_a_gradient(form: str) -> None:
    """The window is as large as 24 gradients; a tile is at least one of its blocks or rows."""
    d, m = WIDE[0] * WIDE[1] + 37, 24
    found = record(MFAC, m, **FORMS[form])
    tile = max(8 * TILE, 4 * rows.CHUNK * m)  # int64 offsets; one chunk of columns in working precision
    assert found.nbytes <= max(4 * d, tile)


@pytest.mark.usefixtures("large")
@each(cls=[MFAC, GGT], form=list(FORMS))
def test_operators_do_not_grow_with_the_window(cls: Any, form: str) -> None:
    keywords = {"betas": (0.9, 0.99)} if cls is GGT and form == "pre" else FORMS[form]
    assert record(cls, 6, **keywords).names == record(cls, 24, **keywords).names
