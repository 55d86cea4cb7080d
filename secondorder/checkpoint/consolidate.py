"""Gathers the state that other ranks hold, so that the ``state_dict()`` of one rank is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from secondorder.comm.layout import is_cut, whole
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.schema import of_kinds
from secondorder.curvature.window.shards import base_key
from secondorder.parameters import ParameterTable
from secondorder.preconditioners.base import CurvatureState, DividedState

Tensors = dict[nn.Parameter, dict[str, Tensor]]

#: Dtypes, whose index represents them in a message.
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_MOST_DIMS = 8


class GatheredState:
    """Tensors of other ranks that this rank has gathered for its next ``state_dict()``.

    Args:
        comm: Communication strategy.
        table: The parameters.
        curvature: The curvature in the state of the parameters.
        divided: The curvature again if its tensors may be divided between ranks.
    """

    def __init__(
        self, comm: CommStrategy, table: ParameterTable, curvature: CurvatureState, divided: DividedState | None = None
    ) -> None:
        self._comm, self._table, self._curvature, self._divided = comm, table, curvature, divided
        self.tensors: Tensors = {}
        #: The step after which they were gathered.
        self.step = 0

    def require_rank(self, to: int | None) -> None:
        """Raise an error unless ``to`` is a rank, or None.

        Raises:
            ValueError: If there is no such rank.
        """
        world = self._comm.world
        if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < world):
            raise ValueError(f"to must be a rank below {world}, or None for all, got {to!r}")

    @torch.no_grad()
    def gather(self, to: int | None, step: int, *, pieces: bool) -> None:
        """Gather what a rank lacks. All ranks must call it.

        Args:
            to: The rank; None for all of them.
            step: Number of steps taken.
            pieces: Whether to gather the momentum and the moments of sharded parameters too.
        """
        asks = to is None or to == self._comm.rank
        self.tensors = self._from_owners(asks) if self._divided is None else self._divided.gather(asks)
        self.step = step
        if pieces:
            self._gather_shards(asks)

    def completed(self, p: nn.Parameter, found: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter with the gathered tensors, which replace slices."""
        if not (own := self.tensors.get(p)):
            return found
        return {key: value for key, value in {**found, **own}.items() if base_key(key) == key}

    def _gather_shards(self, asks: bool) -> None:
        """Add the tensors that are sharded like their parameter."""
        for p in self._table.group_of:
            state = self._table.state[p]
            for key in sorted(key for key, value in state.items() if is_cut(value)):
                found = whole(cast(Tensor, state[key]))
                if asks:
                    self.tensors.setdefault(p, {})[key] = found.cpu()

    def _from_owners(self, asks: bool) -> Tensors:
        """Copy the tensors of blocks from their owners to the ranks that lack them."""
        comm, table, found, placed = self._comm, self._table, Tensors(), self._curvature.placed() or ()
        keys = sorted(table.entries.keys() - of_kinds(table.entries, "momentum"))
        sums = comm.agree(self._headers(placed, keys, asks)).reshape(len(placed), len(keys), 3 + _MOST_DIMS)
        for (index, p), headers in zip(placed, sums.long().tolist(), strict=True):
            owner = comm.owner(index)
            for key, (needed, code, dims, *shape) in zip(keys, headers, strict=True):
                if not (needed and code):
                    continue
                if owner == comm.rank:
                    tensor = table.state[p][key]
                else:
                    tensor = torch.empty(shape[:dims], dtype=_DTYPES[code - 1], device=p.device)
                comm.copy_from(owner, [tensor])
                if asks and key not in table.state[p]:
                    found.setdefault(p, {})[key] = tensor.cpu()
        return found

    def _headers(self, placed: Sequence[tuple[int, nn.Parameter]], keys: Sequence[str], asks: bool) -> Tensor:
        """The number of ranks that need a tensor, and its dtype and shape on its owner ``[blocks, keys, …]``."""
        words = torch.zeros(len(placed), len(keys), 3 + _MOST_DIMS, dtype=torch.float64)
        for row, (index, p) in zip(words, placed, strict=True):
            for word, key in zip(row, keys, strict=True):
                tensor = self._table.state[p].get(key)
                word[0] = float(tensor is None and asks)
                if isinstance(tensor, Tensor) and self._comm.owner(index) == self._comm.rank:
                    dims = [*tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())]
                    word[1:] = torch.tensor([_DTYPES.index(tensor.dtype) + 1, tensor.dim(), *dims], dtype=torch.float64)
        return words.flatten()
