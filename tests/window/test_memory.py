"""Bytes of every storage by its formula, before and after steps."""

from typing import Any

import torch

from secondorder import LowRank, TopK
from tests.support.building import built
from tests.support.grid import each
from tests.support.storages import Factored, Sparse, Storage
from tests.support.window import noise, parameters, push, size
from tests.support.window_storages import METHODS

SHAPES, M = [(40, 30), (70,), (8, 3, 5), (64,), (), (6,), (4, 4)], 5
D = size(SHAPES)

#: Keywords, their formulas, and the bytes of the residual where they differ. `tests/contract/` tests more storages.
CASES: dict[str, tuple[dict[str, Any], Storage, int | None]] = {
    "dense": ({}, Storage(), None),
    "float64": ({"window_dtype": torch.float64}, Storage(torch.float64), None),
    "topk-defaults": ({"compression": TopK()}, Sparse(), None),
    "topk-odd": ({"compression": TopK(0.3, 7)}, Sparse(density=0.3, block=7), None),
    "topk-wide": ({"compression": TopK(0.25, 65536)}, Sparse(density=0.25, block=65536), None),
    "topk-bfloat16": (
        {"compression": TopK(0.3, 300, torch.bfloat16, error_bits=4)},
        Sparse(torch.bfloat16, 0.3, 300, bits=4),
        None,
    ),
    "topk-8-bit": ({"compression": TopK(0.3, 300, error_bits=8)}, Sparse(density=0.3, block=300, bits=8), None),
    "topk-forgetful": ({"compression": TopK(0.3, 64, error_feedback=False)}, Sparse(density=0.3, block=64), 0),
    # Without indices. Only the rounding of values leaves a residual.
    "topk-all": ({"compression": TopK(1.0, 64)}, Storage(), None),
    "topk-all-bfloat16": ({"compression": TopK(1.0, 64, torch.bfloat16)}, Storage(torch.bfloat16), 4 * D),
    "rank-2": ({"compression": LowRank(2)}, Factored(rank=2), None),  # factors of the last shape are not smaller
    "rank-4": ({"compression": LowRank(4)}, Factored(rank=4), None),
}


@each(case=list(CASES), method=list(METHODS))
def test_bytes_are_those_of_the_formulas(case: str, method: str) -> None:
    keywords, storage, error = CASES[case]
    params = parameters(SHAPES, torch.float32)
    if error is None:
        error = sum(storage.error_bytes(p, 4) for p in params)
    opt = built(METHODS[method], params, window_size=M, **keywords)
    for steps in (0, 2):
        for step in range(steps):
            push(opt, params, noise(D, seed=step))
        used = opt.memory_usage()
        assert used["window"] == sum(storage.window_bytes(p, M, 4) for p in params)
        assert used["error"] == error
        assert used["gram"] == 8 * M * (M + 1) // 2
        assert used["total"] == sum(value for key, value in used.items() if key != "total")
