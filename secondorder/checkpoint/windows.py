"""Windows in checkpoints, including slices, other numbers of rows, and windows of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.checkpoint.comparison import was_never_trained
from secondorder.comm.strategy import Parcel
from secondorder.curvature.schema import Place, Schema, shaped, tensors
from secondorder.curvature.window.shards import Slice, base_key, join
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.window.unit import WindowUnit, real
from secondorder.curvature.window.window import LAG, SHARED, SLOT_DIM
from secondorder.parameters import Group
from secondorder.preconditioners.base import SavedStates
from secondorder.preconditioners.window_plan import CATALOG, MOMENTUM_KEYS, WindowPlan

if TYPE_CHECKING:
    from secondorder.parallel.windows import WindowExchange

_REMEDY = "Call optimizer.consolidate_state_dict() on all ranks before saving, so that the checkpoint loads anywhere."


class WindowCheckpoint:
    """Describes the windows in a state, loads them and gathers them.

    Args:
        plan: The windows.
        exchange: Exchanges values of windows between ranks.
    """

    common_keys: ClassVar[frozenset[str]] = frozenset(SHARED)
    structural_options: ClassVar[tuple[str, ...]] = ("window_size",)
    keys: ClassVar[frozenset[str]] = frozenset(CATALOG)

    def __init__(self, plan: WindowPlan, exchange: WindowExchange) -> None:
        self._plan, self._exchange, self._comm, self._table = plan, exchange, plan.comm, plan.table

    def covers(self, p: nn.Parameter) -> bool:
        """Whether a window contains a parameter."""
        return p in self._plan.unit_of

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        """All places, since :meth:`expected` leaves out what is on other ranks."""
        return frozenset(Place)

    def placed(self) -> None:
        """None, since windows may be divided between ranks."""

    def schema_of(self, p: nn.Parameter, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return the entries of a window in the state of a parameter."""
        unit = self._plan.unit_of.get(p)
        if unit is None:
            return {}
        form = self._plan.options.form(group["window_size"])
        window = self._plan.meta_window([p], form, True)
        likes: dict[str, Tensor | int] = {**window.state(0)}
        if p is unit.params[0]:
            likes |= {**window.shared_state(), "amplification": torch.zeros(LAG, dtype=torch.float64, device="meta")}
        found = shaped(CATALOG, likes)
        if not self._plan.solver.momentum_of_gradients(group):  # only states that have used it contain it
            found |= {key: found[key]._replace(optional=True) for key in MOMENTUM_KEYS if key in found}
        return found

    def expected(self, p: nn.Parameter, schema: Schema, theirs: Mapping[str, Any]) -> Schema:
        """Entries for whole tensors or this rank's slices; none if the window is elsewhere and not in the state."""
        unit = self._plan.unit_of.get(p)
        if unit is None or any(k in CATALOG and k not in SHARED for k in theirs):
            return schema
        rest = {k: entry for k, entry in schema.items() if k not in CATALOG or k in SHARED}
        if unit.part is None:
            elsewhere = not unit.is_local and not any(k in CATALOG for k in theirs)
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
    def misfits(self, states: SavedStates) -> list[str]:
        """Return an empty list, since values are checked by :meth:`bad_values`."""
        return []

    @contextmanager
    def while_loading(self, states: SavedStates, rebuild: Callable[[], bool]) -> Iterator[None]:
        """Cover frozen parameters that are in a window of a checkpoint, and undo this if the load fails."""
        plan, covered = self._plan, self._plan.unit_of.keys() | self._plan.partition.excluded
        saved = {p for p, state in states.items() if any(base_key(k) in SLOT_DIM for k in state)}
        joining = {p for p in saved - covered if not p.requires_grad}
        if not joining:
            yield
            return
        before = plan.units, plan.bounds
        try:
            plan.copied = plan.copied | joining
            rebuild()
            yield
        except BaseException:
            plan.retreat(*before, joining)
            rebuild()
            for unit in plan.units:
                if unit.is_local:
                    plan.expose(unit)
            raise

    def translated(self, states: SavedStates, group_of: Mapping[nn.Parameter, Group]) -> SavedStates:
        """Return saved states in which the first parameter of each window holds the shared tensors.

        Raises:
            RuntimeError: If they have slices of another rank, or lack windows of this rank.
        """
        found = dict(states)
        for unit in self._plan.units:
            found |= self._led_by_its_first(unit, found)
        for p, state in found.items():
            self._require_own_part(p, state)
        self._require_all_windows(found, group_of)
        return found

    def _led_by_its_first(self, unit: WindowUnit, states: SavedStates) -> dict[Any, Any]:
        """Saved states that change because a parameter of the unit other than the first held the shared tensors."""
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
        """Raise an error for slices that were saved by another rank, or by this one in another world."""
        part = self._plan.unit_of[p].part if p in self._plan.unit_of else None
        for key in theirs:
            name, _, saved = key.partition("@")
            if saved and (part is None or f"@{saved}" != part.suffix):
                own = "all of it" if part is None else f"part {part.rank} of {part.size}"
                raise RuntimeError(
                    f"this state_dict holds part {saved.replace('of', ' of ')} of the window ('{name}' of parameter "
                    f"'{self._table.names[p]}'), and rank {self._comm.rank} under {self._comm!r} holds {own}. {_REMEDY}"
                )

    def _require_all_windows(self, states: SavedStates, group_of: Mapping[nn.Parameter, Group]) -> None:
        untrained = {p for p, state in states.items() if was_never_trained(state, self.common_keys)}
        kept = next((group["checkpoint_curvature"] for group in group_of.values()), "all")
        there = {p for p, state in states.items() if any(base_key(k) in CATALOG for k in state)}
        lacking = [
            unit.name
            for unit in self._plan.units
            if unit.is_local and there.isdisjoint(unit.params) and not untrained.issuperset(unit.params)
        ]
        if self._plan.options.partition == "layer" and there and lacking and kept == "all":
            raise RuntimeError(
                f"this state_dict has only some windows, and rank {self._comm.rank} under {self._comm!r} needs others "
                f"(that of '{lacking[0]}'): it was saved on one rank of several. {_REMEDY}"
            )

    def bad_values(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Return one line for each part of the saved window of a parameter that cannot be loaded."""
        return self._bad_offsets(p, theirs) + self._bad_slices(p, theirs)

    def _bad_offsets(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Offsets of sparse rows that are outside their block, which would cause reads out of bounds."""
        if not isinstance(self._plan.options.compression, TopK):
            return []
        block = self._plan.options.compression.block_size
        lengths = {"window_idx": block, "tail_idx": real(p).numel() % block}
        lines = []
        for key, idx in theirs.items():
            length = lengths.get(base_key(key))
            if length is None or not isinstance(idx, Tensor) or not idx.numel():
                continue
            if not (idx.min() >= 0 and idx.max() < length):
                lines.append(
                    f"parameter '{self._table.names[p]}': {key} points outside of its block of {length} entries"
                )
        return lines

    def _bad_slices(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Slices of another dtype. Rounding changes the Gram matrix, and other ranks might not notice."""
        unit = self._plan.unit_of.get(p)
        if unit is None or unit.part is None:
            return []
        expected, name = unit.dtypes[unit.place_of(p)], self._table.names[p]
        return [
            f"parameter '{name}': {key} is {value.dtype}, expected {expected[base_key(key)]}: slices are not "
            "converted, save with consolidate_state_dict()"
            for key, value in theirs.items()
            if "@" in key and base_key(key) in expected and value.dtype != expected[base_key(key)]
        ]

    def install(self, loaded: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Copy checked values into the windows."""
        for p, found in loaded.items():
            live = {k: v for k, v in self._table.state[p].items() if base_key(k) in CATALOG}
            self._table.state[p] = {k: v for k, v in found.items() if base_key(k) not in CATALOG} | live
        for unit in self._plan.units:
            for event in unit.arrivals.values():
                event.synchronize()
            unit.arrivals.clear()
            unit.a = None
            if unit.is_local:
                states = [loaded[p] for p in unit.params]
                own = [self._plan.own_state(unit, i, state) for i, state in enumerate(states)]
                self._plan.take_over(unit, own, loaded[unit.params[0]], _is_rounded(unit, states))
                self._plan.expose(unit)

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Follow the loaded options."""
        rebuild()

    # ------------------------------------------------------------------ save
    def is_a_copy(self) -> str:
        """Return an empty string, since windows need no module."""
        return ""

    def settle(self, follow: Callable[[], None]) -> None:
        """Make a new plan if necessary, and wait for all copies whose results are in the state."""
        follow()
        for unit in self._plan.units:
            self._plan.momentum_if_wanted(unit)
            for event in unit.arrivals.values():
                event.synchronize()

    def gather(self, asks: bool) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Gather complete tensors of windows on the CPU for ranks that request them. All ranks must call this."""
        if all(group["checkpoint_curvature"] == "none" for group in self._table.groups):
            return {}
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
        """Agree on the windows that any rank lacks, and on those that have momentum on the ranks that store them."""
        count, mine = len(self._plan.units), self._comm.rank
        words = torch.zeros(2, count, dtype=torch.float64)
        for i, unit in enumerate(self._plan.units):
            words[0, i] = asks and not unit.is_local
            words[1, i] = self._comm.owner(i) == mine and unit.window.outside is not None
        lacks, has = self._comm.agree(words.flatten()).reshape(2, count).bool().tolist()
        return lacks, has

    def _joined(self, unit: WindowUnit, part: Slice) -> list[dict[str, Tensor]]:
        """Gather whole tensors of a divided window from the ranks of a row."""
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

    def _spread(self, index: int, unit: WindowUnit, momentum: bool) -> list[dict[str, Tensor]]:
        """Copy a whole window from its owner to all ranks."""
        whole = self._plan.meta_window(unit.params, unit.window.form, momentum)
        mine, states = self._comm.owner(index) == self._comm.rank, []
        for i, p in enumerate(unit.params):
            spec = whole.state(i)
            if i == 0:
                spec |= {**whole.shared_state(), "amplification": torch.zeros(LAG, dtype=torch.float64, device="meta")}
            live = self._table.state[p] if mine else {k: torch.empty_like(v, device=p.device) for k, v in spec.items()}
            states.append({key: live[key].to(p.device) for key in spec})
        # Bytes are sent because not all backends support 16-bit integers. The owner sends views, which are only read.
        flat = [_bytes(value) for state in states for value in state.values()]
        self._comm.spread([Parcel(index, flat)])
        received = iter(flat)
        return [
            {key: next(received).view(value.dtype).reshape(value.shape) for key, value in state.items()}
            for state in states
        ]


def _bytes(x: Tensor) -> Tensor:
    """Return a tensor as flat bytes, which are a view if it is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def _is_rounded(unit: WindowUnit, states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether loaded rows of a divided window are stored in another dtype here. Whole windows check it themselves."""
    pairs = zip(states, unit.dtypes, strict=True)
    return unit.part is not None and any(
        key in SLOT_DIM and key in state and state[key].dtype != dtype
        for state, dtypes in pairs
        for key, dtype in dtypes.items()
    )
