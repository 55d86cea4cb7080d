"""What the sparse window sends and what it keeps for later."""

from typing import Any

import pytest
import torch
from torch import Tensor

from secondorder import MFAC, TopK
from secondorder.curvature.window import topk
from tests.support.building import built
from tests.support.grid import each
from tests.support.oracles.window import TopKRows, fisher_direction
from tests.support.tasks import snapshot
from tests.support.window import (
    assert_near,
    differences,
    history,
    noise,
    parameters,
    push,
    residual,
    size,
    spans,
    states,
)

SHAPES = [(9, 15), (64,), (5,), (3, 1)]  # in blocks of 64: two and a short one, one exactly, short ones
D = size(SHAPES)


def test_indices_ascend_and_have_the_documented_number() -> None:
    params = parameters(SHAPES)
    opt = MFAC(params, window_size=3, compression=TopK(density=0.3, block_size=64))
    for step in range(5):
        push(opt, params, noise(D, seed=step))
    shapes = {}
    for i, state in states(opt).items():
        for key in ("window", "tail"):
            if f"{key}_idx" in state:
                index = state[f"{key}_idx"]
                assert index.dtype == torch.int16
                assert (index.diff(dim=2) > 0).all()
                assert state[f"{key}_val"].shape == index.shape
                shapes[i, key] = tuple(index.shape)
    # A full block keeps 16 (19.2, in eights), short ones of 7, 5 and 3 entries keep 3, 2 and 1.
    assert shapes == {
        (0, "window"): (2, 3, 16), (0, "tail"): (1, 3, 3), (1, "window"): (1, 3, 16), (2, "tail"): (1, 3, 2),
        (3, "tail"): (1, 3, 1),
    }  # fmt: skip


def decoded(state: dict[str, Any], key: str, bits: int, length: int) -> tuple[Tensor, Tensor]:
    """Residual ``[n, length]`` and hi − lo of every entry; the first of two entries is in the low half of a byte."""
    packed, bounds = state[key], state[f"{key}_range"].double()
    assert (packed.dtype, state[f"{key}_range"].dtype) == (torch.uint8, torch.bfloat16)
    assert packed.shape == (len(bounds), -(-length * bits // 8))
    assert bounds.shape == (len(bounds), -(-length // 128), 2)
    low, high = (bounds[:, :, side].repeat_interleave(128, dim=1)[:, :length] for side in (0, 1))
    levels = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :length]
    return low + levels * (high - low) / (2**bits - 1), high - low


@each(
    sizes={"one": (200, 200), "two-tail": (2 * 300 + 133, 300), "tail": (77, 4096), "entry": (1, 64)},
    bits=[4, 8],
    value_dtype=[torch.float32, torch.bfloat16],
)
def test_loss_of_a_quantized_residual(sizes: tuple[int, int], bits: int, value_dtype: torch.dtype) -> None:
    """Each step loses at most half a level: |sent + e − (e_old + g)| ≤ (hi − lo)/(2 (2^bits − 1)), entry by entry."""
    N, block = sizes
    params = parameters([(N,)], torch.float32)
    spec = {"density": 0.1, "block_size": block, "value_dtype": value_dtype, "error_bits": bits}
    opt = MFAC(params, window_size=2, compression=TopK(**spec))
    lengths = [("error", block)] * (block <= N) + [("tail_error", N % block)] * (N % block > 0)
    left = torch.zeros(N, dtype=torch.float64)
    for step in range(12):
        g = noise(N, seed=step)
        push(opt, params, g)
        accumulated, row = left + g, history(opt, params, [0], block)[-1]
        parts = [decoded(states(opt)[0], key, bits, length) for key, length in lengths]
        left, width = (torch.cat([part[side].reshape(-1) for part in parts]) for side in (0, 1))
        half, slack = width / (2 * (2**bits - 1)), 1e-6 * accumulated.abs() + 1e-12
        assert ((row + left - accumulated).abs() <= half * (1 + 1e-5) + slack).all(), step


@pytest.mark.parametrize("bits", [4, 8])
def test_the_ends_of_the_quantized_range_are_exact(bits: int) -> None:
    """This includes lo = hi, if bfloat16 represents them."""
    params = parameters([(64,)], torch.float32)
    opt = MFAC(params, window_size=2, compression=TopK(density=0.125, block_size=64, error_bits=bits))
    push(opt, params, torch.zeros(64))
    assert not states(opt)[0]["error_range"].any()
    sent = torch.cat([torch.ones(8), torch.zeros(56)]).double()
    for factor in (1, 2):
        push(opt, params, factor * (1.5 + 2.5 * sent))
        assert torch.equal(history(opt, params, [0], 64)[-1], 4.0 * factor * sent)


def test_ties_keep_the_invariants() -> None:
    params = parameters([(64,), (10,)])
    opt = MFAC(params, lr=1.0, window_size=3, damping=1e-2, compression=TopK(density=0.125, block_size=64))
    g, sent = torch.ones(74, dtype=torch.float64), torch.zeros(74, dtype=torch.float64)
    for step in range(9):
        u, rows = push(opt, params, g), history(opt, params, [0, 1], 64)
        sent = sent + rows[-1]
        assert rows[-1, :64].count_nonzero() == 8
        assert rows[-1, 64:].count_nonzero() == 2
        left = torch.cat([residual(states(opt)[i], n) for i, n in ((0, 64), (1, 10))])
        assert torch.equal(sent + left, (step + 1) * g)
        assert_near(u, fisher_direction(rows, rows[-1], 1e-2))


@pytest.mark.parametrize(("density", "block", "bits"), [(0.25, 64, 8), (0.5, 200, None)])
def test_tiles_smaller_than_the_rows_of_a_block(
    density: float, block: int, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles have so few entries that rows of a block are split; in the last case a row is larger than a tile."""
    rule = TopK(density=density, block_size=block, error_bits=bits)
    keywords = {"damping": 1e-2, "compression": rule, "weight_decay": 0.1, "weight_decay_mode": "reg"}

    def run() -> tuple[Tensor, dict[str, Any]]:
        params = parameters([(7, 70), (3,), (210,)])
        opt = built(MFAC, params, lr=1.0, window_size=21, **keywords)
        return torch.stack([push(opt, params, noise(703, seed=step)) for step in range(25)]), snapshot(opt)

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


SPECS: dict[str, dict[str, Any]] = {
    "float32": {"density": 0.3},
    "float64": {"density": 0.3, "value_dtype": torch.float64},
    "bfloat16": {"density": 0.3, "value_dtype": torch.bfloat16},
    "one-in-a-hundred": {"density": 0.01},
    "forgetful": {"density": 0.3, "error_feedback": False},
}


@pytest.mark.parametrize("spec", SPECS)
def test_the_largest_entries_of_every_block_are_sent(spec: str) -> None:
    """They are compared with a loop over blocks; the learning rate changes."""
    settings = {"block_size": 64, **SPECS[spec]}
    for dtype in (torch.float64, torch.float32):
        params = parameters(SHAPES, dtype)
        opt = MFAC(params, lr=0.25, window_size=3, compression=TopK(**settings))
        loops = [TopKRows(p.numel(), settings, dtype) for p in params]
        for step in range(11):
            lr = opt.param_groups[0]["lr"] = 0.25 * 2.0 ** (step % 3)
            g = noise(D, seed=step)
            push(opt, params, g)
            for i, (loop, columns) in enumerate(zip(loops, spans(params), strict=True)):
                row = loop.send(g[columns], lr)
                assert torch.equal(history(opt, params, [0, 1, 2, 3], 64)[-1, columns], row)
                if settings.get("error_feedback", True):
                    assert torch.equal(residual(states(opt)[i], len(columns)), loop.error.double())
                else:
                    assert not any("error" in key for key in states(opt)[i])
