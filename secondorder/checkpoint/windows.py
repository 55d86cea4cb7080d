"""What checkpoints hold of windows: slices, rows of another number, and windows that other ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secondorder.comm import CommStrategy, Parcel
from secondorder.curvature.schema import Schema, shaped, tensors
from secondorder.curvature.window.shards import Slice, join, plain
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.window.unit import Unit, real
from secondorder.curvature.window.window import LAG, SHARED, SLOT_DIM
from secondorder.preconditioners.base import Group, ParameterTable
from secondorder.preconditioners.window_plan import CATALOG, MOMENTUM_KEYS, WindowPlan

if TYPE_CHECKING:
    from secondorder.parallel.windows import WindowExchange

_MEND = "Call optimizer.consolidate_state_dict() on all ranks before saving: what is saved then loads anywhere."


class WindowCheckpoint:
    """Says what a state holds of windows, and brings what was saved into those that are here.

    Args:
        plan: The windows.
        exchange: Brings together what the ranks hold.
        comm: Who holds what.
        table: The parameters.
    """

    def __init__(self, plan: WindowPlan, exchange: WindowExchange, comm: CommStrategy, table: ParameterTable) -> None:
        self._plan, self._exchange, self._comm, self._table = plan, exchange, comm, table

    def schema(self, p: nn.Parameter, group: Mapping[str, Any]) -> Schema:
        """What the state of a parameter holds of its window."""
        unit = self._plan.unit_of.get(p)
        if unit is None:
            return {}
        form = self._plan.options.form(group["window_size"])
        window = self._plan.meta_window([p], form, True)
        likes: dict[str, Tensor | int] = {**window.state(0)}
        if p is unit.params[0]:
            likes |= {**window.shared_state(), "amplification": torch.zeros(LAG, dtype=torch.float64, device="meta")}
        found = shaped(CATALOG, likes)
        if not self._plan.solver.momentum_of_gradients(group):  # it is there if it was ever turned on
            found |= {key: found[key]._replace(optional=True) for key in MOMENTUM_KEYS if key in found}
        return found

    def expected(self, p: nn.Parameter, schema: Schema, theirs: Mapping[str, Any]) -> Schema:
        """Whole tensors, or the slices of this rank; nothing of a window that is elsewhere, if nothing is given."""
        unit = self._plan.unit_of.get(p)
        if unit is None or any(k in CATALOG and k not in SHARED for k in theirs):
            return schema
        rest = {k: entry for k, entry in schema.items() if k not in CATALOG or k in SHARED}
        if unit.part is None:
            elsewhere = not unit.held and not any(k in CATALOG for k in theirs)
            return {k: entry for k, entry in rest.items() if k not in SHARED} if elsewhere else schema
        i = unit.place_of(p)
        start, stop = unit.part.span(i)
        if start < stop and not any("@" in k for k in theirs):
            return schema
        whole = tensors({k: entry for k, entry in schema.items() if k not in rest})
        slices = unit.part.cutting.cut_state(whole, unit.part.bounds[i][-1], (start, stop))
        own = {k: schema[k]._replace(like=v) for k, v in slices.items() if v.numel()}
        return rest | {f"{k}{unit.part.suffix}": entry for k, entry in own.items()}

    # ------------------------------------------------------------------ load
    def led_by_first(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> dict[nn.Parameter, Mapping[str, Any]]:
        """Saved states, where what a window's parameters share is with the one that comes first here."""
        found = dict(states)
        for unit in self._plan.units:
            found |= self._led_by_its_first(unit, found)
        return found

    def require_fitting(
        self,
        states: Mapping[nn.Parameter, Mapping[str, Any]],
        groups: Sequence[Group],
        untrained: set[nn.Parameter],
    ) -> None:
        """Refuse slices of other ranks, and a state that lacks windows which this rank holds.

        Args:
            states: Saved states by parameter.
            groups: Saved groups.
            untrained: Parameters that were never trained.
        """
        for p, state in states.items():
            self._require_own_part(p, state)
        self._require_all_windows(states, groups, untrained)

    def _led_by_its_first(self, unit: Unit, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> dict[Any, Any]:
        """Saved states of a unit's parameters, where another one than its first here had what they share."""
        first = unit.params[0]
        leader = next((p for p in unit.params if "gram" in states[p]), first)
        if leader is first or "gram" in states[first]:
            return {}
        shared = {k: v for k, v in states[leader].items() if k in SHARED}
        return {
            first: {**states[first], **shared},
            leader: {k: v for k, v in states[leader].items() if k not in shared},
        }

    def _require_own_part(self, p: nn.Parameter, theirs: Iterable[str]) -> None:
        """Refuse slices of a window that another rank saved, or this one in another world."""
        part = self._plan.unit_of[p].part if p in self._plan.unit_of else None
        for key in theirs:
            name, _, saved = key.partition("@")
            if saved and (part is None or f"@{saved}" != part.suffix):
                own = "all of it" if part is None else f"part {part.rank} of {part.size}"
                raise RuntimeError(
                    f"this state_dict holds part {saved.replace('of', ' of ')} of the window ('{name}' of parameter "
                    f"'{self._table.names[p]}'), and rank {self._comm.rank} under {self._comm!r} holds {own}. {_MEND}"
                )

    def _require_all_windows(
        self,
        states: Mapping[nn.Parameter, Mapping[str, Any]],
        groups: Sequence[Group],
        untrained: set[nn.Parameter],
    ) -> None:
        there = {p for p, state in states.items() if any(plain(k) in CATALOG for k in state)}
        lacking = [
            unit.name
            for unit in self._plan.units
            if unit.held and there.isdisjoint(unit.params) and not untrained.issuperset(unit.params)
        ]
        if self._plan.options.partition == "layer" and there and lacking and groups[0]["checkpoint_curvature"] == "all":
            raise RuntimeError(
                f"this state_dict has some windows only, and rank {self._comm.rank} under {self._comm!r} needs others "
                f"(that of '{lacking[0]}'): it was saved on one rank of several. {_MEND}"
            )

    def misfits(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """What of a parameter's saved window cannot be loaded, a line each."""
        return self._bad_offsets(p, theirs) + self._bad_slices(p, theirs)

    def _bad_offsets(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Offsets of sparse rows that point out of their block: a damaged file must not be read past its end."""
        if not isinstance(self._plan.options.compression, TopK):
            return []
        block = self._plan.options.compression.block_size
        lengths = {"window_idx": block, "tail_idx": real(p).numel() % block}
        lines = []
        for key, idx in theirs.items():
            length = lengths.get(plain(key))
            if length is None or not isinstance(idx, Tensor) or not idx.numel():
                continue
            if not (idx.min() >= 0 and idx.max() < length):
                lines.append(
                    f"parameter '{self._table.names[p]}': {key} points outside of its block of {length} entries"
                )
        return lines

    def _bad_slices(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Slices of another dtype: to round rows takes a new Gram matrix, and other ranks might not know of it."""
        unit = self._plan.unit_of.get(p)
        if unit is None or unit.part is None:
            return []
        expected, name = unit.dtypes[unit.place_of(p)], self._table.names[p]
        return [
            f"parameter '{name}': {key} is {value.dtype}, expected {expected[plain(key)]}: slices are not "
            "converted, save with consolidate_state_dict()"
            for key, value in theirs.items()
            if "@" in key and plain(key) in expected and value.dtype != expected[plain(key)]
        ]

    def install(self, loaded: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Bring checked values into the windows."""
        for p, found in loaded.items():
            live = {k: v for k, v in self._table.state[p].items() if plain(k) in CATALOG}
            self._table.state[p] = {k: v for k, v in found.items() if plain(k) not in CATALOG} | live
        for unit in self._plan.units:
            for event in unit.arrivals.values():
                event.synchronize()
            unit.arrivals.clear()
            unit.a = None
            if unit.held:
                states = [loaded[p] for p in unit.params]
                own = [self._plan.own_state(unit, i, state) for i, state in enumerate(states)]
                self._plan.take_over(unit, own, loaded[unit.params[0]], _is_rounded(unit, states))
                self._plan.expose(unit)

    # ------------------------------------------------------------------ save
    def gather(self, asks: bool) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Whole tensors of what a rank holds in part or not at all; all ranks call it.

        Args:
            asks: Whether this rank wants them.

        Returns:
            The tensors, on the CPU.
        """
        for unit in self._plan.units:
            self._plan.momentum_if_wanted(unit)
        self._exchange.refresh_stale()
        needed, momentum = self._agreed_units(asks)
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        for index, unit in enumerate(self._plan.units):
            if unit.part is not None:
                states = self._joined(unit, unit.part)
            elif needed[index]:
                states = self._spread(index, unit, momentum[index])
            else:
                continue
            for p, state in zip(unit.params, states, strict=True):
                if asks:
                    found[p] = {key: value.cpu() for key, value in state.items()}
        return found

    def _agreed_units(self, asks: bool) -> tuple[list[bool], list[bool]]:
        """Which windows a rank lacks, and which have momentum where they are."""
        count, mine = len(self._plan.units), self._comm.rank
        words = torch.zeros(2, count, dtype=torch.float64)
        for i, unit in enumerate(self._plan.units):
            words[0, i] = asks and not unit.held
            words[1, i] = self._comm.owner(i) == mine and unit.window.outside is not None
        lacks, has = self._comm.agree(words.flatten()).reshape(2, count).bool().tolist()
        return lacks, has

    def _joined(self, unit: Unit, part: Slice) -> list[dict[str, Tensor]]:
        """Whole tensors of a window in parts, from the ranks of a row."""
        whole = self._plan.meta_window(unit.params, unit.window.form, unit.window.outside is not None)
        states = []
        for i in range(len(unit.params)):
            spec, own = whole.state(i), unit.window.state(i)
            spans = [part.span(i, rank) for rank in range(part.size)]
            cuts = [part.cutting.cut_state(spec, part.bounds[i][-1], span) for span in spans]
            sizes = {key: [cut[key].nbytes if key in cut else 0 for cut in cuts] for key in spec}
            none = torch.zeros(0, dtype=torch.uint8, device=unit.params[i].device)
            pieces = [_bytes(own[key]) if key in own else none for key in spec]
            gathered = zip(spec, self._comm.gather_shards(pieces, list(sizes.values())), strict=True)
            states.append({
                key: join(key, [own.view(spec[key].dtype) for own in raw.split(sizes[key])], spec[key].shape)
                for key, raw in gathered
            })  # fmt: skip
        return states

    def _spread(self, index: int, unit: Unit, momentum: bool) -> list[dict[str, Tensor]]:
        """Copies of a window that is whole, from its owner to all ranks."""
        whole = self._plan.meta_window(unit.params, unit.window.form, momentum)
        mine, states = self._comm.owner(index) == self._comm.rank, []
        for i, p in enumerate(unit.params):
            spec = whole.state(i)
            if i == 0:
                spec |= {**whole.shared_state(), "amplification": torch.zeros(LAG, dtype=torch.float64, device="meta")}
            live = self._table.state[p] if mine else {k: torch.empty_like(v, device=p.device) for k, v in spec.items()}
            states.append({key: live[key].to(p.device) for key in spec})
        # As bytes: not every backend knows 16-bit integers. The owner's are views of what is sent, not written to.
        flat = [_bytes(value) for state in states for value in state.values()]
        self._comm.spread([Parcel(index, flat)])
        received = iter(flat)
        return [
            {key: next(received).view(value.dtype).reshape(value.shape) for key, value in state.items()}
            for state in states
        ]


def _bytes(x: Tensor) -> Tensor:
    """A tensor as flat bytes, a view where it is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def _is_rounded(unit: Unit, states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether loaded rows of a window in parts are stored in another dtype here; whole ones tell it by themselves."""
    pairs = zip(states, unit.dtypes, strict=True)
    return unit.part is not None and any(
        key in SLOT_DIM and key in state and state[key].dtype != dtype
        for state, dtypes in pairs
        for key, dtype in dtypes.items()
    )
