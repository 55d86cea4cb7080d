"""Bytes of every storage by its formula, before and after steps."""

from math import prod
from typing import Any

import torch

from secondorder import LowRank, TopK
from tests.support.building import built
from tests.support.grid import each
from tests.support.oracles.window import kept_entries
from tests.support.window import noise, parameters, push, size
from tests.support.window_storages import METHODS

SHAPES, M = [(40, 30), (70,), (8, 3, 5), (64,), (), (6,)], 5


def dense(width: int) -> tuple[int, int]:
    return M * size(SHAPES) * width, 0


def sparse(density: float, block: int, width: int, bits: int | None, feedback: bool) -> tuple[int, int]:
    """m Σ k (value + index), and 4 bytes of residual per entry or a few bits and two bfloat16 per 128 entries."""
    index = 0 if density >= 1 else 2 if block <= 32768 else 4
    feedback = feedback and (density < 1 or width < 4)  # otherwise there is no residual
    window = error = 0
    for shape in SHAPES:
        numel = prod(shape)
        for start in range(0, numel, block):
            length = min(block, numel - start)
            window += M * kept_entries(length, density, block) * (width + index)
            if feedback:
                error += 4 * length if bits is None else -(-length * bits // 8) + 4 * -(-length // 128)
    return window, error


def factors(rank: int) -> tuple[int, int]:
    window = error = 0
    for shape in SHAPES:
        n0, n1 = (shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 1)
        r = min(rank, n0, n1)
        if len(shape) < 2 or r * (n0 + n1) >= n0 * n1:
            window += M * n0 * n1 * 4
        else:
            window += M * r * (n0 + n1) * 4
            error += 4 * n0 * n1
    return window, error


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "dense": ({}, dense(4)),
    "bfloat16": ({"window_dtype": torch.bfloat16}, dense(2)),
    "float64": ({"window_dtype": torch.float64}, dense(8)),
    "topk": ({"compression": TopK(0.3, 64)}, sparse(0.3, 64, 4, None, True)),
    "topk-defaults": ({"compression": TopK()}, sparse(0.01, 4096, 4, None, True)),
    "topk-odd": ({"compression": TopK(0.3, 7)}, sparse(0.3, 7, 4, None, True)),
    "topk-wide": ({"compression": TopK(0.25, 65536)}, sparse(0.25, 65536, 4, None, True)),
    "topk-bfloat16": ({"compression": TopK(0.3, 64, torch.bfloat16)}, sparse(0.3, 64, 2, None, True)),
    "topk-forgetful": ({"compression": TopK(0.3, 64, error_feedback=False)}, sparse(0.3, 64, 4, None, False)),
    "topk-4-bit": ({"compression": TopK(0.3, 300, torch.bfloat16, error_bits=4)}, sparse(0.3, 300, 2, 4, True)),
    "topk-8-bit": ({"compression": TopK(0.3, 300, error_bits=8)}, sparse(0.3, 300, 4, 8, True)),
    "topk-all": ({"compression": TopK(1.0, 64)}, sparse(1.0, 64, 4, None, True)),
    "topk-all-bfloat16": ({"compression": TopK(1.0, 64, torch.bfloat16)}, sparse(1.0, 64, 2, None, True)),
    "rank-1": ({"compression": LowRank(1)}, factors(1)),
    "rank-4": ({"compression": LowRank(4)}, factors(4)),
}


@each(case=list(CASES), method=list(METHODS))
def test_bytes_are_those_of_the_formulas(case: str, method: str) -> None:
    keywords, (window, error) = CASES[case]
    params = parameters(SHAPES, torch.float32)
    opt = built(METHODS[method], params, window_size=M, **keywords)
    for steps in (0, 2):
        for step in range(steps):
            push(opt, params, noise(size(SHAPES), seed=step))
        used = opt.memory_usage()
        assert used["window"] == window
        assert used["error"] == error
        assert used["gram"] == 8 * M * (M + 1) // 2
        assert used["total"] == sum(value for key, value in used.items() if key != "total")
