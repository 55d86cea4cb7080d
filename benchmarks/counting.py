"""What a training step does, counted rather than timed: operators, FLOPs, bytes moved, bytes of new tensors.

Counts do not depend on the machine's mood: the same code on the same version of torch gives the same numbers, so one
that grows says that a change made steps dearer.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

_CUBIC = ("_linalg_eigh", "linalg_cholesky_ex", "cholesky_inverse", "_linalg_solve_ex", "linalg_qr")
"""Factorisations, of which n³ FLOPs are counted: torch counts none."""
_PRODUCTS = {"addmm_": 1, "baddbmm_": 1, "addmv_": 1, "addmv": 1, "mv": 0, "dot": 0, "vdot": 0}
"""Products that torch does not count, by the place of their first operand. Of other operators no FLOPs are counted."""
_SOLVES = {"linalg_solve_triangular": (0, 1), "cholesky_solve": (1, 2)}
"""Solutions with a factor at hand: the place of the factor, and FLOPs over n² and right-hand sides."""


@dataclass(frozen=True)
class Counts:
    """Of one step."""

    operators: int
    """Calls of torch's operators, views left out."""
    flops: int
    """Of products, convolutions, factorisations and solutions with factors."""
    moved: int
    """Bytes of all arguments and results: what would be read and written if nothing stayed in a cache."""
    allocated: int
    """Bytes of tensors that were made."""
    tensors: int
    """Their number."""

    def __sub__(self, other: "Counts") -> "Counts":
        mine, theirs = asdict(self), asdict(other)
        return Counts(**{field.name: mine[field.name] - theirs[field.name] for field in fields(self)})


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.moved = self.allocated = self.tensors = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given}
        fresh = [x for x in made if x.untyped_storage().data_ptr() not in known]
        # A view moves nothing: its result lies in the memory of an argument that it does not change.
        if made and not fresh and not func._schema.is_mutable:
            return out
        self.operators += 1
        self.moved += sum(x.nbytes for x in (*given, *made))
        self.allocated += sum(x.untyped_storage().nbytes() for x in fresh)
        self.tensors += len(fresh)
        self.flops += _uncounted_flops(func.overloadpacket.__name__, given)
        return out


def _uncounted_flops(name: str, given: list[Tensor]) -> int:
    """Return the FLOPs of an operator that torch's own counter does not know."""
    if name in _CUBIC:
        return given[0].shape[:-2].numel() * int(given[0].shape[-1]) ** 3
    if name in _PRODUCTS:
        left, right = given[_PRODUCTS[name]], given[_PRODUCTS[name] + 1]
        return 2 * left.numel() * (int(right.shape[-1]) if right.dim() > 1 else 1)
    if name in _SOLVES:
        place, times = _SOLVES[name]
        return times * given[1 - place].numel() * int(given[place].shape[-1])
    return 0


def count(step: Callable[[], object]) -> Counts:
    with FlopCounterMode(display=False) as products, _Counter() as counter:
        step()
    return Counts(
        counter.operators, products.get_total_flops() + counter.flops, counter.moved, counter.allocated, counter.tensors
    )


def graph_breaks(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """Count how often the compiler has to give up on the forward pass of a model, with the hooks that it has."""
    torch._dynamo.reset()
    try:
        return int(torch._dynamo.explain(model)(*batch).graph_break_count)
    finally:
        torch._dynamo.reset()
