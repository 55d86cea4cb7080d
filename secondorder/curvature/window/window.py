"""A window of past gradients: a ring of m rows, and the Gram matrix of the stored rows.

::

    push(x)        x ─► rows[pos]      dots = G ĝ
    finish(dots)   dots ─► row and column pos of S      pos ─► pos + 1
    combine(a)     Gᵀ a ─► one tensor per parameter

In between, dot products of slices are summed over all of them if several ranks hold a part of the window each.
Rows are flat per device and precision; each parameter sees its own part as views. S, the ring pointer and the counters
live on the device of the first parameter and never make the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secondorder.curvature.window.form import Form, Place
from secondorder.curvature.window.rows import Parts, Rows, gated, row_dots
from secondorder.linalg import gram

#: The dimension of an entry of the state, by key, along which its slots lie.
SLOT_DIM = {
    "window": 0, "window_p": 0, "window_q": 0, "window_idx": 1, "window_val": 1, "tail_idx": 1, "tail_val": 1,
}  # fmt: skip
#: Keys of the state that all tensors of a window have in common.
SHARED = (
    "gram", "pos", "count", "skipped", "solve_failures", "amplification", "momentum_coefficients", "dots_momentum",
    "momentum_weight",
)  # fmt: skip
#: Number of steps between the measurement of the amplification and its use: by then a device has long delivered it.
LAG = 10


@dataclass
class Outside:
    """Momentum on gradients, ``x = Gᵀ b + r``: the part inside the window as coefficients, the rest as a vector.

    Attributes:
        b: Coefficients ``[m]``, float64.
        q: Dots ``G r`` ``[m]``, float64.
        weight: Total weight of all gradients in x, 0-dim.
        r: The part that has left the window, one tensor per parameter.
    """

    b: Tensor
    q: Tensor
    weight: Tensor
    r: list[Tensor]


@dataclass
class Push:
    """A row that is stored, but is not in the Gram matrix yet.

    Attributes:
        slot: Its slot, 0-dim.
        gate: None, or a tensor; where it is False nothing changes.
        beta: β of the momentum on gradients.
        dots: Dot products with the rows, this one included ``[t]``.
        inside: Dot product with the momentum's rest ``[1]``; None without momentum.
    """

    slot: Tensor
    gate: Tensor | None
    beta: float
    dots: Tensor
    inside: Tensor | None


@dataclass
class _Part:
    rows: Rows
    members: list[int] = field(default_factory=list)


class GradientWindow:
    """The last m gradients of some tensors.

    Args:
        places: The tensors.
        form: The form in which rows are stored.
        momentum: Whether momentum on gradients is kept in addition to the rows.
    """

    def __init__(self, places: Sequence[Place], form: Form, momentum: bool = False) -> None:
        self.places: list[Place] = list(places)
        self.form: Form = form
        self.m: int = form.m
        self.device: torch.device = places[0].device
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, place in enumerate(places):
            kinds.setdefault((place.device, place.working), []).append(i)
        self._parts = [_Part(form.rows([places[i] for i in members]), members) for members in kinds.values()]
        self._home = {i: (part.rows, k) for part in self._parts for k, i in enumerate(part.members)}
        self.gram: Tensor = torch.zeros(gram.packed_size(self.m), dtype=torch.float64, device=self.device)
        self.counters: dict[str, Tensor] = {
            key: torch.zeros((), dtype=torch.int64, device=self.device)
            for key in ("pos", "count", "skipped", "solve_failures")
        }
        self.outside: Outside | None = None
        if momentum:
            self.keep_outside()
        #: Largest number of rows that can be filled, as far as the host knows.
        self.filled = 0
        self.noise: float = max(part.rows.noise for part in self._parts)
        #: Whether some tensors are slices; dot products are then a part of the full sum.
        self.sliced: bool = any(place.whole is not None for place in places)
        #: Whether the Gram matrix waits for sums over all slices; until then it holds NaN.
        self.stale = False

    # ------------------------------------------------------------------ state
    def keep_outside(self) -> Outside:
        """Return the momentum on gradients, which is allocated at the first call."""
        if self.outside is None:
            b, q = (torch.zeros(self.m, dtype=torch.float64, device=self.device) for _ in range(2))
            r = [torch.zeros(p.shape, dtype=p.working, device=p.device) for p in self.places]
            self.outside = Outside(b, q, torch.zeros((), dtype=torch.float64, device=self.device), r)
        return self.outside

    def state(self, i: int) -> dict[str, Tensor]:
        """Return views of the storage for tensor i, by state key."""
        rows, k = self._home[i]
        found = rows.state(k)
        if self.outside is not None:
            found["gradient_momentum"] = self.outside.r[i]
        return found

    def shared_state(self) -> dict[str, Tensor]:
        """Return the state that the tensors have in common, by key."""
        found = {"gram": self.gram, **self.counters}
        if self.outside is not None:
            found["momentum_coefficients"], found["dots_momentum"] = self.outside.b, self.outside.q
            found["momentum_weight"] = self.outside.weight
        return found

    def recompute_gram(self) -> None:
        """Compute the Gram matrix again from the stored rows, with a pass over the window per row.

        The matrix of a window of slices is marked as stale, since it needs a sum.
        """
        if self.sliced:
            self.stale = True
            self.gram.fill_(torch.nan)
        else:
            self.refresh(self.own_products())

    def own_products(self) -> Tensor:
        """Return the products that :meth:`refresh` needs summed over all slices ``[m(m + 1)/2 (+ m)]``."""
        products = torch.zeros_like(self.gram)
        for j in range(self.filled):
            slot = torch.tensor(j, device=self.device)
            products.index_copy_(0, gram.packed_row(slot, self.m)[: self.filled], self._dots_with(slot, self.filled))
        if self.outside is None:
            return products
        return torch.cat([products, padded(self.dots(self.outside.r), self.m)])

    def refresh(self, products: Tensor) -> None:
        """Adopt all dot products of the rows with each other and with the momentum's rest."""
        size, self.stale = len(self.gram), False
        self.gram.copy_(products[:size])
        if self.outside is not None:
            self.outside.q.copy_(products[size:])

    def _dots_with(self, slot: Tensor, t: int) -> Tensor:
        slot = slot.reshape(1)
        return self._sum(part.rows.newest_dots(slot.to(part.rows.device), t) for part in self._parts)

    def adopt(
        self, states: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor], rounded: bool = False
    ) -> None:
        """Adopt the state of a window of the same form; missing entries become zeros, except for warm starts.

        The state may be this window's own. For rows that are rounded to a narrower dtype, the Gram matrix is that of
        the stored rows.

        Args:
            states: State of each tensor.
            shared: State that the tensors have in common.
            rounded: Whether rows are rounded, which slices cannot find out.
        """
        if not any("q_prev" in state for state in states):
            for part in self._parts:
                part.rows.restart()
        for i, state in enumerate(states):
            for key, value in self.state(i).items():
                if key in state:
                    rounded |= key in SLOT_DIM and state[key].dtype != value.dtype
                    value.copy_(state[key])
                elif key != "q_prev":
                    value.zero_()
        for key, value in self.shared_state().items():
            if key in shared:
                value.copy_(shared[key])
            else:
                value.zero_()
        self.recount()
        if rounded or (self._has_numbers and bool(self.gram.isnan().any())):
            self.recompute_gram()

    def adopt_resized(self, old: GradientWindow) -> None:
        """Adopt the newest rows of a window of another size; older rows stay in the momentum."""
        kept = min(old.filled, self.m)
        order = (old.counters["pos"] - kept + torch.arange(kept, device=self.device)) % old.m
        for i in range(len(self.places)):
            mine, theirs = self.state(i), old.state(i)
            for key, value in theirs.items():
                dim = SLOT_DIM.get(key)
                if dim is None:
                    mine[key].copy_(value)
                else:
                    mine[key].narrow(dim, 0, kept).copy_(value.index_select(dim, order.to(value.device)))
        full = gram.symmetric(gram.unpack_lower(old.gram, old.m))
        self.gram[: gram.packed_size(kept)] = gram.pack_lower(full[order][:, order])
        self.counters["pos"].fill_(kept % self.m)
        self.counters["count"].fill_(kept)
        for key in ("skipped", "solve_failures"):
            self.counters[key].copy_(old.counters[key])
        if old.outside is not None:
            self._adopt_outside(old, old.outside, order, full)
        self.filled, self.stale = kept, old.stale

    def _adopt_outside(self, old: GradientWindow, theirs: Outside, order: Tensor, full: Tensor) -> None:
        mine, kept = self.keep_outside(), len(order)
        dropped = torch.ones(old.m, dtype=torch.bool, device=self.device).index_fill_(0, order, False)
        lost = torch.where(dropped, theirs.b, 0.0)
        for slot in range(old.filled):
            index = torch.tensor([slot], device=self.device)
            old.add_row(mine.r, index, lost[slot])
        mine.b[:kept] = theirs.b[order]
        mine.q[:kept] = (theirs.q + full @ lost)[order]
        mine.weight.copy_(theirs.weight)

    @property
    def _has_numbers(self) -> bool:
        return self.device.type != "meta"

    def recount(self) -> None:
        """Update the host's count of filled rows, waiting for the device."""
        self.filled = min(int(self.counters["count"]), self.m) if self._has_numbers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored."""
        own = [value for i in range(len(self.places)) for value in self.state(i).values()]
        return sum(value.nbytes for value in (*own, *self.shared_state().values()))

    @property
    def flops(self) -> float:
        """FLOPs of a step over a full window, without its solve."""
        return sum(part.rows.flops for part in self._parts)

    @property
    def newest(self) -> Tensor:
        """Return the slot of the newest row, 0-dim."""
        return gram.newest(self.counters["pos"], self.m)

    # ------------------------------------------------------------------ the verbs
    def push(self, x: Parts, gate: Tensor | None, beta: float = 0.0) -> Push:
        """Store a gradient as the newest row, in place of the oldest one; :meth:`finish` completes this.

        Args:
            x: One tensor per tensor of the window; None means zeros.
            gate: None, or a 0-dim bool tensor; where it is False nothing changes.
            beta: β of the momentum on gradients ``v ← βv + (1−β)ĝ``, if that is kept.

        Returns:
            The values for the Gram matrix, which are linear in the rows.
        """
        slot = self.counters["pos"].clone()
        gate = None if gate is None else gate.to(self.device)
        if self.outside is not None:
            self._let_go(self.outside, slot, gate, beta)
        for part in self._parts:
            there = None if gate is None else gate.to(part.rows.device)
            part.rows.write([x[i] for i in part.members], slot.reshape(1).to(part.rows.device), there)
        self.filled = min(self.filled + 1, self.m)
        inside = None if self.outside is None else self.unit_dots(self.outside.r, slot.reshape(1))
        return Push(slot, gate, beta, self._dots_with(slot, self.filled), inside)

    def finish(self, push: Push) -> None:
        """Fill in the row of the Gram matrix for a pushed row, with dot products that are summed over all slices."""
        slot, gate, dots = push.slot, push.gate, push.dots
        where = gram.packed_row(slot, self.m)[: len(dots)]
        if gate is not None:
            dots = torch.where(gate, dots, self.gram.index_select(0, where))
        self.gram.index_copy_(0, where, dots)
        if self.outside is not None and push.inside is not None:
            self._take_in(self.outside, push, push.inside)
        one = 1 if gate is None else gate.to(torch.int64)
        self.counters["pos"].copy_((slot + one) % self.m)
        self.counters["count"].add_(one)
        if gate is not None:
            self.counters["skipped"].add_(1 - one)

    def dots(self, x: Parts) -> Tensor:
        """Return ``G x`` ``[t]`` for any x, in float64."""
        return self._sum(part.rows.dots([x[i] for i in part.members], self.filled) for part in self._parts)

    def combine(self, a: Tensor) -> list[Tensor]:
        """Return ``Gᵀ a`` for coefficients ``[t]``, one tensor per tensor of the window."""
        found: dict[int, Tensor] = {}
        for part in self._parts:
            found.update(zip(part.members, part.rows.combine(a.to(part.rows.device)), strict=True))
        return [found[i] for i in range(len(self.places))]

    def dtype_of(self, i: int) -> torch.dtype:
        """Return the precision of a combination of the rows of the whole tensor i."""
        rows, k = self._home[i]
        return rows.dtype_of(k)

    def add_row(self, out: Sequence[Tensor], slot: Tensor, scale: Tensor) -> None:
        """Add ``scale`` times the row at a slot ``[1]`` to tensors, in place."""
        for part in self._parts:
            device = part.rows.device
            part.rows.add_row([out[i] for i in part.members], slot.to(device), scale.to(device))

    def lower(self) -> Tensor:
        """Return the lower triangle of S over the filled rows ``[t, t]``."""
        return gram.unpack_lower(self.gram, self.filled)

    def residual_square(self) -> Tensor | None:
        """Return the squared norm of the residual of error feedback."""
        found = [square for part in self._parts if (square := part.rows.residual_square()) is not None]
        return self._sum(found) if found else None

    def _sum(self, terms: Iterable[Tensor]) -> Tensor:
        first, *others = (term.to(self.device) for term in terms)
        for term in others:
            first = first + term
        return first

    # ------------------------------------------------------------------ momentum on gradients
    def _let_go(self, outside: Outside, slot: Tensor, gate: Tensor | None, beta: float) -> None:
        """Move the row that will be overwritten out of the window, and decay everything."""
        if self.filled == self.m:
            leaving = outside.b.index_select(0, slot.reshape(1))[0]
            if gate is not None:
                leaving = torch.where(gate, leaving, 0.0)
            self.add_row(outside.r, slot.reshape(1), leaving)
            outside.q.add_(self.gram.index_select(0, gram.packed_row(slot, self.m)) * leaving)
        kept = gated(gate, beta, 1.0)
        for value in (outside.b, outside.q, outside.weight):
            value.mul_(kept)
        for r in outside.r:
            r.mul_(kept.to(r.device) if isinstance(kept, Tensor) else kept)

    def _take_in(self, outside: Outside, push: Push, inside: Tensor) -> None:
        """Give the new row its share, and add its dot product with the part outside of the window."""
        index, gate, beta = push.slot.reshape(1), push.gate, push.beta
        share = torch.full((1,), 1 - beta, dtype=torch.float64, device=self.device)
        for target, value in ((outside.b, share), (outside.q, inside)):
            if gate is not None:
                value = torch.where(gate, value, target.index_select(0, index))
            target.index_copy_(0, index, value)
        outside.weight.add_(gated(gate, 1 - beta, 0.0))

    def unit_dots(self, x: Parts, slot: Tensor) -> Tensor:
        """Return the dot product of x with the row at a slot, ``[1]`` float64."""
        row = [torch.zeros(p.shape, dtype=p.working, device=p.device) for p in self.places]
        self.add_row(row, slot, torch.ones((), dtype=torch.float64, device=self.device))
        pairs = [(mine.view(1, -1), theirs) for mine, theirs in zip(row, x, strict=True) if theirs is not None]
        return self._sum(row_dots(mine, theirs.reshape(-1)) for mine, theirs in pairs)


def padded(x: Tensor, size: int) -> Tensor:
    """Return a vector followed by zeros ``[size]``."""
    return torch.cat([x, x.new_zeros(size - len(x))])
