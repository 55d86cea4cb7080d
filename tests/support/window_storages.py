"""All storages of the window, each with a plain loop that computes the stored rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secondorder import GGT, MFAC, LowRank, TopK
from tests.support.oracles.window import DenseRows, LowRankRows, TopKRows, fisher_direction, root_direction
from tests.support.window import states

METHODS: dict[str, Any] = {"mfac": MFAC, "ggt": GGT}


def regular(method: str, value: float) -> dict[str, float]:
    """The keyword of the damping, which GGT adds to the roots of the eigenvalues."""
    return {"damping": value} if method == "mfac" else {"eps": value}


def averaging(method: str, beta1: float, beta2: float) -> dict[str, Any]:
    """Keywords of momentum over gradients; the rows of GGT's window decay by β₂."""
    return {"momentum": beta1, "momentum_mode": "pre"} if method == "mfac" else {"betas": (beta1, beta2)}


def explicit(method: str, rows: Tensor, x: Tensor | np.ndarray, value: float, beta2: float = 1.0) -> Tensor:
    """The direction of ``x`` from the dense matrix of ``rows``, which are given from the oldest to the newest."""
    return fisher_direction(rows, x, value) if method == "mfac" else root_direction(rows, x, value, beta2)


@dataclass(frozen=True)
class Storage:
    """A storage of the window: a dtype, arguments of ``TopK``, or a rank."""

    window_dtype: torch.dtype | None = None
    topk: dict[str, Any] = field(default_factory=dict)
    rank: int = 0

    @property
    def keywords(self) -> dict[str, Any]:
        if self.topk:
            return {"compression": TopK(**self.topk)}
        if self.rank:
            return {"compression": LowRank(rank=self.rank)}
        return {} if self.window_dtype is None else {"window_dtype": self.window_dtype}

    @property
    def block_size(self) -> int:
        return int(self.topk.get("block_size", 4096)) if self.topk else 0

    @property
    def quantised(self) -> bool:
        return self.topk.get("error_bits") is not None

    def senders(self, opt: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[Any]:
        """One loop per parameter of a new optimizer, which must receive the same gradients as the optimizer."""
        return [self._sender(states(opt)[i], p) for i, p in enumerate(params)]

    def _sender(self, state: dict[str, Any], p: nn.Parameter) -> Any:
        precision = torch.float64 if p.dtype == torch.float64 else torch.float32
        if self.topk:
            return TopKRows(p.numel(), self.topk, precision)
        if self.rank and "window_p" in state:
            return LowRankRows((p.shape[0], p.numel() // p.shape[0]), state["q_prev"])
        return DenseRows(self.window_dtype or precision)


SMALL = {"density": 0.25, "block_size": 8}
STORAGES = {
    "dense": Storage(),
    "float32": Storage(torch.float32),
    "bfloat16": Storage(torch.bfloat16),
    "float64": Storage(torch.float64),
    "topk": Storage(topk=SMALL),
    "topk-odd-blocks": Storage(topk={"density": 0.3, "block_size": 7}),
    "topk-one-short-block": Storage(topk={"density": 0.3}),
    "topk-float64": Storage(topk={**SMALL, "value_dtype": torch.float64}),
    "topk-bfloat16": Storage(topk={**SMALL, "value_dtype": torch.bfloat16}),
    "topk-4-bit": Storage(topk={**SMALL, "value_dtype": torch.bfloat16, "error_bits": 4}),
    "topk-8-bit": Storage(topk={**SMALL, "error_bits": 8}),
    "topk-forgetful": Storage(topk={**SMALL, "error_feedback": False}),
    "topk-all": Storage(topk={"density": 1.0, "block_size": 8}),
    "rank-1": Storage(rank=1),
    "rank-2": Storage(rank=2),
}
FEW = ("dense", "bfloat16", "topk", "topk-4-bit", "topk-forgetful", "rank-1")  # one of each kind of state
