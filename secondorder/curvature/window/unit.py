"""A unit of a window method: the parameters that share a window, and the results of a step for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from secondorder.curvature.window.shards import Slice
from secondorder.curvature.window.window import GradientWindow


class Source(NamedTuple):
    """The vector that a unit preconditions, ``x = Gᵀ b + r``.

    Attributes:
        b: Coefficients on the rows ``[t]``.
        q: Dots of the rows with r ``[t]``, None without r.
        r: The rest, one tensor or None per parameter; None if there is none.
    """

    b: Tensor
    q: Tensor | None
    r: list[Tensor | None] | None


@dataclass(eq=False)
class WindowUnit:
    """The parameters that share a window.

    Attributes:
        name: Name of the unit.
        params: Its parameters.
        window: The window of their gradients.
        group: Options that the unit follows: those of its first parameter.
        inputs: The gradients of the next step, None if the unit has none.
        source: The vector that is preconditioned.
        a: Coefficients of the last direction.
        outside: Factor of ``source.r``, 0-dim or a number.
        norm: Length of the last gradient, 0-dim.
        lagged: Amplification of the last solves, on the host.
        arrivals: For each of them, when it arrives on the host.
        decayed: Weight decay that is preconditioned but kept out of the window.
        decay_dots: Dots of the rows with it ``[t]``.
        is_local: Whether this rank has the window, or a part of it; otherwise it is only laid out, on ``meta``.
        part: The part of this rank; None for the whole. ``window``, ``source`` and ``decayed`` are those of the part.
        dtypes: Dtypes of the stored rows of each parameter, by state key.
        signature: Properties of the parameters for which the window was created; it does not change with them.
    """

    #: Whether directions have a length that kl-clip does not change.
    sets_length: ClassVar[bool] = False

    name: str
    params: list[nn.Parameter]
    window: GradientWindow
    group: dict[str, Any]
    inputs: list[Tensor | None] | None = None
    source: Source | None = None
    a: Tensor | None = None
    outside: Tensor | float = 0.0
    norm: Tensor | float = 0.0
    lagged: Tensor = field(default_factory=lambda: torch.zeros(0))
    arrivals: dict[int, torch.Event] = field(default_factory=dict)
    decayed: list[Tensor | None] | None = None
    decay_dots: Tensor | None = None
    is_local: bool = True
    part: Slice | None = None
    dtypes: list[dict[str, torch.dtype]] = field(default_factory=list)
    signature: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        """Record the properties for which the window is created."""
        places = [(id(p), tuple(p.shape), p.dtype, p.device) for p in self.params]
        self.signature = self.name, tuple(places), self.window.form, self.is_local, self.part

    def place_of(self, p: nn.Parameter) -> int:
        """Return the position of a parameter in the unit."""
        return next(i for i, own in enumerate(self.params) if own is p)

    def own(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return this rank's part of one tensor per parameter."""
        if self.part is None:
            return list(tensors)
        return [None if x is None else self.part.slice(i, x) for i, x in enumerate(tensors)]


def real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers."""
    return torch.view_as_real(x) if x.is_complex() else x


def stored_otherwise(unit: WindowUnit, old: Sequence[WindowUnit]) -> bool:
    """Whether the rows of some units are stored in another dtype in a new one."""
    before = {p: dtypes for u in old for p, dtypes in zip(u.params, u.dtypes, strict=True)}
    now = zip(unit.params, unit.dtypes, strict=True)
    return any(before.get(p, own).get(key, dtype) != dtype for p, own in now for key, dtype in own.items())
