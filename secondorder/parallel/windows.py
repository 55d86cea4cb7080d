"""Windows of which this rank holds a part, or none: what travels in a step, and checkpoints.

::

    window in parts    dots of the parts ──sum──► the same Gram row and solve on all ─► slices of u ──gather──► u
    whole windows      u on the ranks that hold it ──copy──► u on the others of their row

Every window is in every message, with zeros where a rank has no gradient: what is sent follows from the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.comm import Parcel
from secondorder.curvature.schema import Schema, shaped, tensors
from secondorder.curvature.window.form import Form
from secondorder.curvature.window.shards import Slice, join, plain
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.window.unit import Unit, real
from secondorder.curvature.window.window import LAG, SHARED, SLOT_DIM, Push, padded
from secondorder.lifecycle import Group
from secondorder.parallel.window_layout import RecutWindows
from secondorder.preconditioners.window_plan import MOMENTUM_KEYS

_MEND = "Call optimizer.consolidate_state_dict() on all ranks before saving: what is saved then loads anywhere."

Found = list[list[Tensor] | None]


class ShardedWindows(RecutWindows):
    """Exchanges what ranks hold of windows with those that hold the rest."""

    _common: ClassVar[frozenset[str]] = RecutWindows._common | {*SHARED}

    def _facts(self) -> dict[str, list[str]]:
        """Windows whose sums are due too: they are a message."""
        return {**super()._facts(), "windows to sum anew": [unit.name for unit in self._units if unit.window.stale]}

    # ------------------------------------------------------------------ stage 3: dots
    def _refresh_stale(self) -> None:
        """Sum Gram matrices that were made anew from rows of which each rank has a part."""
        stale = [unit for unit in self._units if unit.window.stale]
        if stale:
            products = [unit.window.own_products() for unit in stale]
            total = self.comm.sum_shards(torch.cat([own.to(products[0].device) for own in products]))
            for unit, part in zip(stale, total.split([len(own) for own in products]), strict=True):
                unit.window.refresh(part.to(unit.window.device))

    def _sum_dots(self, pushes: Mapping[Unit, Push]) -> None:
        """Sum what is linear in the rows over the parts of all windows, in one message."""
        units = [unit for unit in self._units if unit.part is not None]
        if not units:
            return
        device = units[0].window.device
        words = [self._words(unit, pushes.get(unit)).to(device) for unit in units]
        total = self.comm.sum_shards(torch.cat(words))
        for unit, part in zip(units, total.split([len(own) for own in words]), strict=True):
            if unit in pushes:
                self._read(unit, pushes[unit], part.to(unit.window.device))

    def _words(self, unit: Unit, push: Push | None) -> Tensor:
        """Dots of the new row with rows ``[m]`` and the momentum's rest ``[1]``, of weight decay with rows ``[m]``."""
        window, decays = unit.window, self._decays_outside(unit)
        if push is None:
            size = window.m * (2 if decays else 1) + (window.outside is not None)
            return torch.zeros(size, dtype=torch.float64, device=window.device)
        found = [padded(push.dots, window.m)]
        if push.inside is not None:
            found.append(push.inside)
        if decays:
            none = torch.zeros(0, dtype=torch.float64, device=window.device)
            found.append(padded(none if unit.decay_dots is None else unit.decay_dots, window.m))
        return torch.cat(found)

    def _read(self, unit: Unit, push: Push, words: Tensor) -> None:
        m, t = unit.window.m, len(push.dots)
        push.dots = words[:t]
        if push.inside is not None:
            push.inside = words[m : m + 1]
        if unit.decay_dots is not None:
            unit.decay_dots = words[-m:][:t]

    def _decay_of(self, p: nn.Parameter) -> float:
        """Weight decay of a parameter that is preconditioned but kept out of the window, as its options say."""
        group = self._group[p]
        return float(group["weight_decay"]) if group["weight_decay_mode"] in ("reg", "both") else 0.0

    def _decays_outside(self, unit: Unit) -> bool:
        """Whether any of a unit's does."""
        return any(self._decay_of(p) for p in unit.params)

    @property
    def _decays_anywhere(self) -> bool:
        return any(self._decays_outside(unit) for unit in self._units)

    # ------------------------------------------------------------------ stage 5: directions
    def _exchange(self, found: Found) -> Found:
        """Whole directions of all windows on every rank; of parameters that are cut this rank's pieces.

        Args:
            found: What this rank has: by window a tensor per parameter, slices where the window is in parts; None
                without gradients.

        Returns:
            The directions; None is left only in a world of one rank.
        """
        if self._is_cut:
            return self._directions_of_pieces(found)
        parts = [(i, unit.part) for i, unit in enumerate(self._units) if unit.part is not None]
        if parts:
            found = self._gathered_directions(found, parts)
        if self.comm.combines:
            whole = [i for i, unit in enumerate(self._units) if unit.part is None]
            parcels = [Parcel(i, found[i] or self._room(self._units[i])) for i in whole]
            if parcels:
                self.comm.share_directions(parcels)
            for parcel in parcels:
                found[parcel.index] = parcel.tensors
        return found

    def _gathered_directions(self, found: Found, parts: Sequence[tuple[int, Slice]]) -> Found:
        shards, sizes = [], []
        for i, part in parts:
            own = found[i]
            window = self._units[i].window
            for j, place in enumerate(window.places):
                piece = torch.zeros(place.shape, device=place.device) if own is None else own[j]
                shards.append(piece.reshape(-1).to(window.dtype_of(j)))
                sizes.append(part.sizes(j))
        wholes = iter(self.comm.gather_shards(shards, sizes))
        gathered = list(found)
        for i, _ in parts:
            gathered[i] = [next(wholes).view(real(p).shape) for p in self._units[i].params]
        return gathered

    def _room(self, unit: Unit) -> list[Tensor]:
        dtypes = [unit.window.dtype_of(i) for i in range(len(unit.params))]
        return [torch.zeros(real(p).shape, dtype=t, device=p.device) for p, t in zip(unit.params, dtypes, strict=True)]

    # ------------------------------------------------------------------ what a checkpoint holds
    def _curvature_schema(self, p: nn.Parameter, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        unit = self._unit_of.get(p)
        if unit is None:
            return {}
        form = Form(group["window_size"], self._compression, self._window_dtype, self._seed)
        window = self._meta_window([p], form, True)
        likes: dict[str, Tensor | int] = {**window.state(0)}
        if p is unit.params[0]:
            likes |= {**window.shared_state(), "amplification": torch.zeros(LAG, dtype=torch.float64, device="meta")}
        found = shaped(self.catalog, likes)
        if not self.solver.momentum_of_gradients(group):  # it is there if it was ever turned on
            found |= {key: found[key]._replace(optional=True) for key in MOMENTUM_KEYS if key in found}
        return found

    def _expected_state(self, p: nn.Parameter, group: Group, theirs: Mapping[str, Any]) -> Schema:
        """Whole tensors, or the slices of this rank; nothing of a window that is elsewhere, if nothing is given."""
        schema = super()._expected_state(p, group, theirs)
        unit = self._unit_of.get(p)
        if unit is None or any(k in self.catalog and k not in SHARED for k in theirs):
            return schema
        rest = {k: entry for k, entry in schema.items() if k not in self.catalog or k in SHARED}
        if unit.part is None:
            elsewhere = not unit.held and not any(k in self.catalog for k in theirs)
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
    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[nn.Parameter, dict[str, Any]]:
        numbers = {p: i for p, i, _ in self._numbered({"param_groups": groups})}
        states = {p: found.get(i, {}) for p, i in numbers.items()}
        with self._frozen_members({p for p, state in states.items() if any(plain(k) in SLOT_DIM for k in state)}):
            for unit in self._units:
                states |= self._led_by_its_first(unit, states)
            for p, state in states.items():
                self._require_own_part(p, state)
            self._require_all_windows(states, groups)
            return super()._checked_state({i: states[p] for p, i in numbers.items()}, groups)

    @contextmanager
    def _frozen_members(self, saved: Set[nn.Parameter]) -> Iterator[None]:
        """Let frozen parameters that are in a window of a checkpoint into those here; nothing stays if it is refused.

        Args:
            saved: Parameters with rows in the checkpoint.
        """
        joining = {p for p in saved if not (p.requires_grad or self._covers(p) or p in self._excluded)}
        if not joining:
            yield
            return
        before = self._units, self._unit_of, self._bounds
        try:
            self._copied = self._copied | joining
            self._rebuild()
            yield
        except BaseException:
            self._units, self._unit_of, self._bounds = before
            for p in joining:
                self.state[p] = {k: v for k, v in self.state[p].items() if plain(k) not in self.catalog}
            self._copied = set()
            self._rebuild()
            for unit in self._units:
                if unit.held:
                    self._expose(unit)
            raise

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
        part = self._unit_of[p].part if p in self._unit_of else None
        for key in theirs:
            name, _, saved = key.partition("@")
            if saved and (part is None or f"@{saved}" != part.suffix):
                own = "all of it" if part is None else f"part {part.rank} of {part.size}"
                raise RuntimeError(
                    f"this state_dict holds part {saved.replace('of', ' of ')} of the window ('{name}' of parameter "
                    f"'{self._names[p]}'), and rank {self.comm.rank} under {self.comm!r} holds {own}. {_MEND}"
                )

    def _require_all_windows(self, states: Mapping[nn.Parameter, Mapping[str, Any]], groups: Sequence[Group]) -> None:
        """Refuse a state that has some windows and lacks others which this rank holds."""
        there = {p for p, state in states.items() if any(plain(k) in self.catalog for k in state)}
        lacking = [
            unit.name
            for unit in self._units
            if unit.held
            and there.isdisjoint(unit.params)
            and not all(self._was_never_trained(states[p]) for p in unit.params)
        ]
        if self._partition == "layer" and there and lacking and groups[0]["checkpoint_curvature"] == "all":
            raise RuntimeError(
                f"this state_dict has some windows only, and rank {self.comm.rank} under {self.comm!r} needs others "
                f"(that of '{lacking[0]}'): it was saved on one rank of several. {_MEND}"
            )

    def _private(self, p: nn.Parameter, theirs: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
        self._refuse(self._bad_offsets(p, theirs) + self._bad_slices(p, theirs))
        rest = super()._private(p, {k: v for k, v in theirs.items() if plain(k) not in self.catalog}, schema)
        return {**theirs, **rest}  # curvature is copied straight into the window

    def _bad_offsets(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Offsets of sparse rows that point out of their block: a damaged file must not be read past its end."""
        if not isinstance(self._compression, TopK):
            return []
        block = self._compression.block_size
        lengths = {"window_idx": block, "tail_idx": real(p).numel() % block}
        lines = []
        for key, idx in theirs.items():
            length = lengths.get(plain(key))
            if length is None or not isinstance(idx, Tensor) or not idx.numel():
                continue
            if not (idx.min() >= 0 and idx.max() < length):
                lines.append(f"parameter '{self._names[p]}': {key} points outside of its block of {length} entries")
        return lines

    def _bad_slices(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Slices of another dtype: to round rows takes a new Gram matrix, and other ranks might not know of it."""
        unit = self._unit_of.get(p)
        if unit is None or unit.part is None:
            return []
        expected = unit.dtypes[unit.place_of(p)]
        return [
            f"parameter '{self._names[p]}': {key} is {value.dtype}, expected {expected[plain(key)]}: slices are not "
            "converted, save with consolidate_state_dict()"
            for key, value in theirs.items()
            if "@" in key and plain(key) in expected and value.dtype != expected[plain(key)]
        ]

    def _install(self, loaded: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        for p, found in loaded.items():
            live = {k: v for k, v in self.state[p].items() if plain(k) in self.catalog}
            self.state[p] = {k: v for k, v in found.items() if plain(k) not in self.catalog} | live
        for unit in self._units:
            for event in unit.arrivals.values():
                event.synchronize()
            unit.arrivals.clear()
            unit.a = None
            if unit.held:
                states = [loaded[p] for p in unit.params]
                own = [self._own_state(unit, i, state) for i, state in enumerate(states)]
                self._take_over(unit, own, loaded[unit.params[0]], _is_rounded(unit, states))
                self._expose(unit)

    def _finish_load(self) -> None:
        self._rebuild()

    # ------------------------------------------------------------------ save
    def state_dict(self) -> dict[str, Any]:
        """State by parameter and group options; whole tensors in place of slices where they have been gathered."""
        packed = super().state_dict()
        for live, group in zip(self.param_groups, packed["param_groups"], strict=True):
            for p, i in zip(live["params"], group["params"], strict=True):
                if self._gathered.get(p):
                    packed["state"][i] = {k: v for k, v in packed["state"][i].items() if "@" not in k}
        return packed

    def _collect(self, to: int | None) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Whole tensors of what a rank holds in part or not at all, on that rank; all ranks call it."""
        if all(group["checkpoint_curvature"] == "none" for group in self.param_groups):
            return {}
        for unit in self._units:
            self._momentum_if_wanted(unit)
        self._refresh_stale()
        needed, momentum = self._agreed_units(to)
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        for index, unit in enumerate(self._units):
            if unit.part is not None:
                states = self._joined(unit, unit.part)
            elif needed[index]:
                states = self._spread(index, unit, momentum[index])
            else:
                continue
            for p, state in zip(unit.params, states, strict=True):
                if self._asks(to):
                    found[p] = {key: value.cpu() for key, value in state.items()}
        return found

    def _agreed_units(self, to: int | None) -> tuple[list[bool], list[bool]]:
        """Which windows a rank lacks, and which have momentum where they are."""
        count, mine = len(self._units), self.comm.rank
        words = torch.zeros(2, count, dtype=torch.float64)
        for i, unit in enumerate(self._units):
            words[0, i] = self._asks(to) and not unit.held
            words[1, i] = self.comm.owner(i) == mine and unit.window.outside is not None
        lacks, has = self.comm.agree(words.flatten()).reshape(2, count).bool().tolist()
        return lacks, has

    def _joined(self, unit: Unit, part: Slice) -> list[dict[str, Tensor]]:
        """Whole tensors of a window in parts, from the ranks of a row."""
        whole = self._meta_window(unit.params, unit.window.form, unit.window.outside is not None)
        states = []
        for i in range(len(unit.params)):
            spec, own = whole.state(i), unit.window.state(i)
            spans = [part.span(i, rank) for rank in range(part.size)]
            cuts = [part.cutting.cut_state(spec, part.bounds[i][-1], span) for span in spans]
            sizes = {key: [cut[key].nbytes if key in cut else 0 for cut in cuts] for key in spec}
            none = torch.zeros(0, dtype=torch.uint8, device=unit.params[i].device)
            pieces = [_bytes(own[key]) if key in own else none for key in spec]
            gathered = zip(spec, self.comm.gather_shards(pieces, list(sizes.values())), strict=True)
            states.append({
                key: join(key, [own.view(spec[key].dtype) for own in raw.split(sizes[key])], spec[key].shape)
                for key, raw in gathered
            })  # fmt: skip
        return states

    def _spread(self, index: int, unit: Unit, momentum: bool) -> list[dict[str, Tensor]]:
        """Copies of a window that is whole, from its owner to all ranks."""
        whole = self._meta_window(unit.params, unit.window.form, momentum)
        mine, states = self.comm.owner(index) == self.comm.rank, []
        for i, p in enumerate(unit.params):
            spec = whole.state(i)
            if i == 0:
                spec |= {**whole.shared_state(), "amplification": torch.zeros(LAG, dtype=torch.float64, device="meta")}
            live = self.state[p] if mine else {k: torch.empty_like(v, device=p.device) for k, v in spec.items()}
            states.append({key: live[key].to(p.device) for key in spec})
        # As bytes: not every backend knows 16-bit integers. The owner's are views of what is sent, not written to.
        flat = [_bytes(value) for state in states for value in state.values()]
        self.comm.spread([Parcel(index, flat)])
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
