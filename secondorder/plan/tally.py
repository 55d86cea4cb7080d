"""Counts the costs of operators while a program runs on the ``meta`` device.

A program on ``meta`` tensors dispatches the same operators as the real program without computing anything. If the host
reads a number from such a tensor, it gets a 1, which passes every check in the package.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

#: Stage of all operators outside of the optimizer's step.
MODEL = "model"
#: Stage of the operators of an optimizer of ``torch.optim``.
TORCH = "torch.optim"
#: Factorizations of a matrix [n, n] by operator: their kind, and their FLOPs divided by n³. QR takes ``[m, n]``.
_FACTORIZATIONS: Mapping[str, tuple[str, float]] = {
    "aten::_linalg_eigh": ("eigh", 9.0),
    "aten::linalg_cholesky_ex": ("cholesky", 1 / 3),
    "aten::cholesky_inverse": ("cholesky", 2 / 3),
    "aten::linalg_inv_ex": ("cholesky", 2.0),
    "aten::linalg_lu_factor_ex": ("cholesky", 2 / 3),
    "aten::linalg_ldl_factor_ex": ("cholesky", 1 / 3),
    "aten::linalg_qr": ("cholesky", 4 / 3),
    "aten::geqrf": ("cholesky", 4 / 3),
}
#: Triangular solves: the positions of the right side and of the matrix among the arguments.
_SOLVES = {"aten::linalg_solve_triangular": (1, 0), "aten::cholesky_solve": (0, 1), "aten::triangular_solve": (0, 1)}
#: Words in the names of operators that move single numbers.
_SCATTERED = ("gather", "scatter", "index", "topk", "sort", "take", "embedding", "put")
#: Operators that write, read and replace entries of their first argument.
_WRITERS = {
    f"aten::{n}_" for n in ("index_copy", "index_add", "index_put", "_index_put_impl", "scatter", "scatter_add")
}
_READERS = {"aten::gather", "aten::index", "aten::index_select", "aten::take", "aten::embedding"}
_OVERWRITERS = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::ones_like", "aten::zeros_like"}
#: Operators that copy a tensor, possibly in another order.
_COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy"}
#: Operators that only allocate.
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


class Cost(NamedTuple):
    """The cost of one operator.

    Attributes:
        kind: ``"matmul"``, ``"conv"``, ``"eigh"``, ``"cholesky"``, ``"scattered"``, ``"strided"``, ``"entrywise"`` or
            ``"view"``.
        size: Side of a factorized matrix, smallest side of a product, channels of a convolution, or number of entries
            that stay next to each other in a copy; otherwise 0.
        flops: Number of FLOPs.
        nbytes: Number of bytes read and written.
        itemsize: Number of bytes per element.
    """

    kind: str
    size: int
    flops: float
    nbytes: int
    itemsize: int = 4


_VIEW = Cost("view", 0, 0.0, 0)


class Tally(TorchDispatchMode):
    """Counts the operators that run inside the ``with`` block, by stage. It is also a clock of ``time_stages()``.

    Attributes:
        costs: Number of operators of each cost, by stage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.costs: dict[str, Counter[Cost]] = {}
        self._stage = MODEL
        self._known: dict[Any, tuple[Cost, Callable[[tuple[Any, ...], Mapping[str, Any]], Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it. An operator that ran before with equal arguments need not run again."""
        keywords = kwargs or {}
        key = _key(func, args, keywords)
        if key is not None and key in self._known:
            cost, remake = self._known[key]
            out = remake(args, keywords)
        else:
            if (read := _read(func, args, keywords)) is not None:
                return read
            args = _joined(func, args)
            out = func(*args, **keywords)
            cost = cost_of(func, args, keywords, out)
            if key is not None and (again := _remake(func, out)) is not None:
                self._known[key] = cost, again
        self.costs.setdefault(self._stage, Counter())[cost] += 1
        return out

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the operators inside the ``with`` block under a name."""
        before, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = before

    def end_step(self) -> None:
        """Do nothing, since the counts of all steps are added up."""

    def last_step(self) -> dict[str, float]:
        """Return an empty dict, since nothing is timed."""
        return {}

    def take(self) -> dict[str, Counter[Cost]]:
        """Return the counts since the last call."""
        found, self.costs = self.costs, {}
        return found


# ---------------------------------------------------------------------- the cost of an operator
def cost_of(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], out: Any) -> Cost:
    """Return the cost of an operator based on its arguments and its result."""
    if func.is_view:
        return _VIEW
    name = func.name().partition(".")[0]
    if name in _ALLOCATIONS:
        return _VIEW
    results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    inputs = [x for x in tree_leaves((args, keywords)) if isinstance(x, Tensor)]
    nbytes = _moved(name, inputs, results, keywords)
    itemsize = max((x.element_size() for x in inputs), default=4)
    if name in _FACTORIZATIONS:
        kind, factor = _FACTORIZATIONS[name]
        *lead, rows, n = inputs[0].shape  # as many columns as rows, but for QR
        return Cost(kind, n, factor * math.prod(lead) * rows * n**2, nbytes, itemsize)
    if name in _SOLVES:
        right, matrix = (inputs[i] for i in _SOLVES[name])
        return Cost("matmul", min(right.shape[-2:]), float(right.numel() * matrix.shape[-1]), nbytes, itemsize)
    if (count := _flops_of(func)) is not None:
        flops = float(count(*args, **keywords, out_val=out))
        if "convolution" in name:
            return Cost("conv", _channels(inputs, "backward" in name), flops, nbytes, itemsize)
        side = min((n for x in inputs[-2:] for n in x.shape[-2:]), default=0)
        return Cost("matmul", side, flops, nbytes, itemsize)
    if name in _COPIES:
        return Cost("strided", _run(inputs[-1], results[0]), 0.0, nbytes)
    return Cost("scattered" if _is_scattered(name, inputs, results) else "entrywise", 0, 0.0, nbytes)


def _run(source: Tensor, target: Tensor) -> int:
    """Return the number of entries that lie next to each other in both tensors."""
    run = 1
    if source.shape == target.shape and source.layout == target.layout == torch.strided:
        for stride, n, own in sorted(zip(target.stride(), target.shape, source.stride(), strict=True)):
            if n > 1 and (stride, own) != (run, run):
                break
            run *= n
        return run
    return target.numel()


def _is_scattered(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Return whether an operator moves single numbers instead of complete rows."""
    if "masked" in name or not any(word in name for word in _SCATTERED):
        return False
    moved = inputs[-1] if name in _WRITERS else results[0] if results else inputs[0]
    indices = [x.numel() for x in inputs[1:] if not x.is_floating_point()]
    return not indices or 4 * max(indices) >= moved.numel()


def _flops_of(func: Any) -> Callable[..., int] | None:
    """Return the function that counts the FLOPs of an operator. In-place operators use that of their counterpart."""
    if func.overloadpacket in flop_registry:
        exact: Callable[..., int] = flop_registry[func.overloadpacket]
        return exact
    name = func.name().partition(".")[0].removeprefix("aten::")
    other = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found: Callable[..., int] | None = flop_registry.get(other)
    return found


def _channels(inputs: Sequence[Tensor], is_backward: bool) -> int:
    """Return the smaller number of channels in one group of a convolution."""
    weight = inputs[2 if is_backward else 1]
    return min(weight.shape[:2])


def _moved(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor], keywords: Mapping[str, Any]) -> int:
    """Return the bytes that an operator reads and writes, counting only the entries of a tensor that it accesses."""
    if name in _WRITERS:  # the operator writes as many entries as its source has
        return sum(map(_nbytes, inputs[1:])) + _nbytes(inputs[-1])
    if name in _READERS:
        return 2 * sum(map(_nbytes, results)) + sum(map(_nbytes, inputs[1:]))
    if name in _OVERWRITERS:
        return sum(map(_nbytes, inputs))
    given = [x for x in results if x is not keywords.get("out")]
    return sum(map(_nbytes, inputs)) + sum(map(_nbytes, given))


def _nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor that an operator moves. An expanded dimension is read once."""
    if x.layout != torch.strided:
        return 0
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)


# ---------------------------------------------------------------------- operators that need not run
def _read(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return ones for the values that the host reads from a ``meta`` tensor; None for operators that read nothing."""
    packet = func.overloadpacket
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is None:
        return None
    if first.is_meta and packet is torch.ops.aten._local_scalar_dense:
        return torch.ones((), dtype=first.dtype).item()
    if first.is_meta and packet is torch.ops.aten.equal:
        return True
    if (
        first.is_meta
        and packet is torch.ops.aten._to_copy
        and torch.device(keywords.get("device") or "meta").type != "meta"
    ):
        return torch.ones(first.shape, dtype=keywords.get("dtype") or first.dtype)
    if packet is torch.ops.aten.copy_ and not first.is_meta and args[1].is_meta:
        return first.fill_(1)
    return None


def _joined(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move arguments to one device, since a model may combine tables that it makes on the CPU with ``meta`` tensors."""
    given = [x for x in args if isinstance(x, Tensor)]
    if func.is_view or len({x.is_meta for x in given if x.dim()}) < 2:
        return args
    return tuple(x.to("meta") if isinstance(x, Tensor) and x.dim() and not x.is_meta else x for x in args)


def _key(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return a key that is equal for calls with equal results; None for calls that have to run."""
    if func.is_view:
        return None
    try:
        key = func, *_alike(args), *keywords, *_alike(keywords.values())
        hash(key)
    except (TypeError, _MustRun):
        return None
    return key


class _MustRun(Exception):  # noqa: N818 - no error
    """Raised if an argument has data."""


def _alike(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                raise _MustRun
            yield value.shape, value.stride(), value.dtype
        elif isinstance(value, (list, tuple)):
            yield tuple(_alike(value))
        else:
            yield type(value), value


def _remake(func: Any, out: Any) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any] | None:
    """Return a function that makes the result of an operator from equal arguments; None if the operator has to run."""
    schema = func._schema
    if schema.is_mutable:
        names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if out is None:
            return lambda args, keywords: None
        if len(names) != 1 or not isinstance(out, Tensor):
            return None
        name, place = names[0], next(i for i, a in enumerate(schema.arguments) if a.name == names[0])
        return lambda args, keywords: keywords[name] if name in keywords else args[place]
    outs = out if isinstance(out, (list, tuple)) else (out,)
    if not all(isinstance(x, Tensor) and x.is_meta for x in outs):
        return None
    forms = [(tuple(x.shape), x.stride(), x.dtype) for x in outs]
    kind = type(out)

    def remake(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        made = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in forms]
        return made[0] if issubclass(kind, Tensor) else kind(made)

    return remake
