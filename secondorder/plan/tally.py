"""What operators cost, counted while a program runs on the ``meta`` device.

A program on ``meta`` tensors dispatches the operators of the real one without computing anything. Where it reads a
number on the host it is given a 1, which every check of the package takes for a good outcome.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

#: Stage of everything outside of the optimizer's step.
MODEL = "model"
#: Factorizations of symmetric [n, n] by operator: their kind, and FLOPs divided by n³.
_FACTORIZATIONS: Mapping[str, tuple[str, float]] = {
    "aten::_linalg_eigh": ("eigh", 9.0),
    "aten::linalg_cholesky_ex": ("cholesky", 1 / 3),
    "aten::cholesky_inverse": ("cholesky", 2 / 3),
    "aten::linalg_inv_ex": ("cholesky", 2.0),
    "aten::linalg_lu_factor_ex": ("cholesky", 2 / 3),
    "aten::linalg_ldl_factor_ex": ("cholesky", 1 / 3),
    "aten::linalg_qr": ("cholesky", 4.0),
    "aten::geqrf": ("cholesky", 4 / 3),
}
#: Words in the names of operators that move single numbers.
_SCATTERED = ("gather", "scatter", "index", "topk", "sort", "take", "embedding", "masked_select", "nonzero", "put")


class Cost(NamedTuple):
    """One operator.

    Attributes:
        kind: ``"matmul"``, ``"conv"``, ``"eigh"``, ``"cholesky"``, ``"scattered"``, ``"entrywise"`` or ``"view"``.
        size: Side of a factorized matrix, or the smallest dimension of a product; 0 for others.
        flops: FLOPs.
        nbytes: Bytes read and written.
    """

    kind: str
    size: int
    flops: float
    nbytes: int


class Tally(TorchDispatchMode):
    """Counts the operators that run inside the ``with`` block by stage; a clock for ``time_stages()``.

    Attributes:
        costs: How many operators of a cost there were, by stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[str, Counter[Cost]] = {}
        self._stage = MODEL

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count it."""
        keywords = kwargs or {}
        if (read := _read(func, args, keywords)) is not None:
            return read
        out = func(*args, **keywords)
        self.costs.setdefault(self._stage, Counter())[cost_of(func, args, keywords, out)] += 1
        return out

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside the ``with`` block under a name."""
        before, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = before

    def end_step(self) -> None:
        """Do nothing, since stages of all steps are added up."""

    def last_step(self) -> dict[str, float]:
        """Return nothing, since nothing is timed."""
        return {}


def cost_of(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], out: Any) -> Cost:
    """Return the cost of an operator, from its arguments and its result."""
    name = func.name().partition(".")[0]
    results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    if func.is_view or not results:
        return Cost("view", 0, 0.0, 0)
    inputs = [x for x in tree_leaves((args, keywords)) if isinstance(x, Tensor)]
    nbytes = sum(map(_nbytes, inputs)) + sum(map(_nbytes, results))
    if name in _FACTORIZATIONS:
        kind, factor = _FACTORIZATIONS[name]
        *lead, n = inputs[0].shape[:-1]
        return Cost(kind, n, factor * math.prod(lead) * n**3, nbytes)
    if name in ("aten::linalg_solve_triangular", "aten::cholesky_solve", "aten::triangular_solve"):
        return Cost("matmul", min(inputs[1].shape[-2:]), inputs[0].numel() * inputs[1].shape[-1] * 1.0, nbytes)
    if (count := flop_registry.get(func.overloadpacket)) is not None:
        flops = float(count(*args, **keywords, out_val=out))
        kind = "conv" if "conv" in name else "matmul"
        return Cost(kind, _least_side(inputs), flops, nbytes)
    if name.startswith(("aten::empty", "aten::new_empty")):
        return Cost("view", 0, 0.0, 0)
    return Cost("scattered" if any(word in name for word in _SCATTERED) else "entrywise", 0, 0.0, nbytes)


def _least_side(inputs: Sequence[Tensor]) -> int:
    """Return the smallest dimension of a product of matrices."""
    sides = [side for x in inputs[-2:] for side in x.shape[-2:]]
    return min(sides, default=0)


def _nbytes(x: Tensor) -> int:
    """Return the bytes that an operator moves of a tensor; an expanded dimension is read once."""
    numel = math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) if x.layout == torch.strided else 0
    return numel * x.element_size()


def _read(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return ones for what the host reads of a ``meta`` tensor; None for operators that read nothing."""
    packet = func.overloadpacket
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is None:
        return None
    if packet is torch.ops.aten._local_scalar_dense and first.is_meta:
        return torch.ones((), dtype=first.dtype).item()
    if packet is torch.ops.aten.equal and first.is_meta:
        return True
    if packet is torch.ops.aten._to_copy and first.is_meta:
        device = keywords.get("device")
        if device is not None and torch.device(device).type != "meta":
            return torch.ones(first.shape, dtype=keywords.get("dtype") or first.dtype)
    if packet is torch.ops.aten.copy_ and not first.is_meta and args[1].is_meta:
        return first.fill_(1)
    return None
