"""Temporary memory of a step: the directions, and the temporaries of one layer at a time.

Only the allocations within `step()` count, and gradients and state exist before it.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.machine import peak_bytes
from secondorder import EKFAC, KFAC, SecondOrderOptimizer, SparseMFAC
from secondorder.curvature import refresh as refresh_module
from tests.support.building import built
from tests.support.methods import Method

WIDTH, INTERVAL = 160, 4
#: Bytes of the matrix of one layer, with rows padded to 64 bytes.
LAYER = 4 * WIDTH * 176
#: Scalars, counters and lists of small tensors.
SMALL = 1 << 14


def deep(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def backward(model: nn.Module, optimizer: SecondOrderOptimizer) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype)
    F.cross_entropy(model(x), torch.arange(16)).backward()


def peak(model: nn.Module, optimizer: SecondOrderOptimizer, before: int) -> int:
    """Peak of a step after `before` steps, which allocate all buffers."""
    for _ in range(before):
        backward(model, optimizer)
        optimizer.step()
    backward(model, optimizer)
    return peak_bytes(lambda: optimizer.step())


def model_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.cover(graft=[None, "adam"])
def test_a_step_allocates_directions_and_one_layer(method: Method, graft: str | None) -> None:
    """With grafted Adam, the step also allocates its first moments; a tile of a sparse window has 6 MiB."""
    model = deep(8)
    optimizer = method.build(model, graft=graft)
    assert isinstance(optimizer, SecondOrderOptimizer)
    allowed = (2 if graft else 1) * model_bytes(model) + LAYER + SMALL
    if isinstance(optimizer, SparseMFAC):
        allowed += 12 << 19  # a tile
    assert peak(model, optimizer, 9) <= allowed


@pytest.mark.parametrize("keywords", [{}, {"momentum_mode": "pre", "power": 0.5}], ids=["post", "pre"])
def test_a_running_scale_keeps_rotated_gradients(keywords: dict[str, Any]) -> None:
    model = deep(8)
    optimizer = built(EKFAC, model, estimator="running", **keywords)
    assert peak(model, optimizer, 9) <= 2 * model_bytes(model) + LAYER + SMALL


@pytest.mark.parametrize(
    ("build", "copies"),
    [(partial(KFAC, inverse_method="cholesky"), 4), (KFAC, 3), (EKFAC, 3)], ids=["cholesky", "eigen", "ekfac"],
)  # fmt: skip
def test_temporaries_of_a_refresh_do_not_grow_with_the_model(
    build: Any, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh works on two layers at a time: their factors, results and intermediate values."""
    one = (WIDTH + 1) ** 2 + WIDTH**2
    monkeypatch.setattr(refresh_module, "REFRESH_PORTION", 2 * one)
    beyond = []
    for layers in (4, 8):
        model = deep(layers)
        intervals = {"factor_update_steps": 1, "inv_update_steps": INTERVAL, "refresh_warmup": False}
        found = peak(model, built(build, model, lr=0.1, **intervals), 2 * INTERVAL)
        beyond.append(found)
        assert found <= max(copies * 2 * 4 * one, model_bytes(model) + LAYER) + SMALL
    assert beyond[1] - beyond[0] <= SMALL


@pytest.mark.parametrize("way", ["cholesky", "eigen"])
def test_portions_change_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    intervals, ends = {"factor_update_steps": 1, "inv_update_steps": 2, "refresh_warmup": False}, []
    for portion in (1, 1 << 24):
        monkeypatch.setattr(refresh_module, "REFRESH_PORTION", portion)
        model = deep(3).double()
        optimizer = built(KFAC, model, inverse_method=way, **intervals)
        for _ in range(5):
            backward(model, optimizer)
            optimizer.step()
        ends.append(list(model.parameters()))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)
