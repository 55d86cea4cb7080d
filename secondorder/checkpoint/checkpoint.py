"""Checkpoints of second-order optimizers: what a state must hold, checked whole before anything is changed.

Saved state has one form, whatever the number of ranks and the strategy: for every parameter tensors whose shapes follow
from the model and the options. A rank loads the part of it that it holds. Where a rank holds a part only, so does its
``state_dict()``, which says so under ``"partial"``; ``consolidate_state_dict`` completes that of one rank.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.checkpoint.comparison import adopt_value, by_number, compare_groups, compare_states, copied
from secondorder.comm.layout import cut_equally, is_cut, whole
from secondorder.curvature.layer import clean_name
from secondorder.curvature.schema import Entry, Place, Schema, held, known, of_kinds
from secondorder.frames import depth_of_caller, filled_in_by_torch, is_saved_in_parts
from secondorder.lifecycle import Lifecycle
from secondorder.parameters import Group

if TYPE_CHECKING:
    from secondorder.comm import CommStrategy

Tensors = dict[nn.Parameter, dict[str, Tensor]]

_MEND = (
    "Call consolidate_state_dict() on all ranks before state_dict() on the one that saves, or save and load the "
    "state_dict() of every rank on that rank."
)

#: Places whose tensors are on the same ranks: of what estimates, and of what preconditions.
_TOGETHER = ({Place.ESTIMATE}, {Place.CURVATURE, Place.MEASURED})
#: Dtypes by the number that stands for each in a message.
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_MOST_DIMS = 8
#: What every parameter counts.
_STEP = Entry(torch.zeros(()), "buffers", Place.OWN, always=True)


class Checkpointing(Lifecycle):
    """``state_dict`` and ``load_state_dict``: by parameter, in full precision, all or nothing."""

    #: Options that decide how much is allocated: those of the optimizer stay, whatever a checkpoint says.
    _structural: ClassVar[tuple[str, ...]] = ()
    #: State that one parameter holds for others, too.
    _common: ClassVar[frozenset[str]] = frozenset({"global_step"})

    def _require_loadable(self) -> None:
        """Refuse to load into an optimizer that cannot judge a state yet."""

    @abstractmethod
    def _finish_load(self) -> None:
        """Complete what a checkpoint may leave out, and follow the loaded options."""

    def _placed(self) -> Sequence[tuple[int, nn.Parameter]]:
        """Units whose state may be on another rank, and the parameter whose state it is."""
        return ()

    # ------------------------------------------------------------------ life
    def _begin_life(self, comm: CommStrategy | None) -> None:
        super()._begin_life(comm)
        #: What other ranks hold, and the step after which it was gathered.
        self._gathered: Tensors = {}
        self._gathered_at = 0
        #: Whether the user knows that `state_dict` is partial, of which it warns once; set it where that is meant.
        self.warned_of_partial = False

    def _place(self, units: Sequence[Any]) -> None:
        self._gathered.clear()
        super()._place(units)

    # ------------------------------------------------------------------ save
    def state_dict(self) -> dict[str, Any]:
        """State by parameter and group options, as ``torch.optim``; curvature as ``checkpoint_curvature`` says.

        No message is sent, so one rank may call it alone. Where curvature is spread over the ranks, the dict has what
        this rank holds, and says so under ``"partial"``: the same rank of an equal world can load it again. Call
        :meth:`consolidate_state_dict` on all ranks first to save everything on one.

        Returns:
            The state.
        """
        self._follow_replaced()
        for p, group in self._table.group_of.items():
            if p.requires_grad and self._table.signature:  # a copy without its module does not know its rules
                self._update.allocate(p, group)
        packed = super().state_dict()
        for names, group in zip(self._table.names_of_groups(), packed["param_groups"], strict=True):
            if names is not None:
                group.setdefault("param_names", names)
        if self._gathered_at != self._t:
            self._gathered.clear()
        for p, i, group in self._numbered(packed):
            if p in self._gathered:
                packed["state"][i] = {**packed["state"][i], **self._gathered[p]}
            if group["checkpoint_curvature"] != "all":
                found, kept = packed["state"].get(i, {}), group["checkpoint_curvature"]
                left_out = {k for k in found if (entry := known(self.entries, k)) is not None and entry.may_lack(kept)}
                packed["state"][i] = {k: v for k, v in found.items() if k not in left_out}
        if self._is_partial(packed):
            # As a key of an empty dict, which torch's distributed checkpoints neither save nor miss: there all ranks
            # write into one checkpoint, and words that differ would be replaced by those of one rank.
            packed["partial"] = {self.comm.standing: {}}
            self._warn_of_partial()
        return packed

    def _is_partial(self, packed: Mapping[str, Any]) -> bool:
        """Whether state that belongs into a checkpoint is on other ranks."""
        found = packed["state"]
        return self.comm.combines and any(
            any(is_cut(value) for value in found[i].values())
            or any(
                key not in found[i] and not entry.may_lack(group["checkpoint_curvature"])
                for key, entry in self._curvature_schema(p, group, self.state.get(p, {})).items()
            )
            for p, i, group in self._numbered(packed)
        )

    def _numbered(self, packed: Mapping[str, Any]) -> Iterator[tuple[nn.Parameter, int, Group]]:
        """Parameters, their number in a state dict, and their group there."""
        for live, group in zip(self.param_groups, packed["param_groups"], strict=True):
            for p, i in zip(live["params"], group["params"], strict=True):
                yield p, i, group

    def _warn_of_partial(self) -> None:
        if self._t == 0 or self.warned_of_partial:  # before training, wrappers of optimizers look at the state too
            return
        if self._gathered_at == self._t:  # another rank has everything, and trainers ask all ranks for their state
            return
        if is_saved_in_parts():
            return
        self.warned_of_partial = True
        warnings.warn(
            f"{type(self).__name__}: this state_dict() is partial, {self.comm.standing} holds a part of the curvature "
            "only. To save on one rank for all, call consolidate_state_dict() on all ranks before, which the callbacks "
            "of secondorder.integrations do in trainers; the state_dict() of every rank, saved by each, can be loaded "
            "by the same ranks again.",
            stacklevel=depth_of_caller(),
        )

    def consolidate_state_dict(self, to: int | None = 0, *, pieces: bool = True) -> None:
        """Gather the curvature of all ranks on one, whose ``state_dict()`` is complete until the next step.

        To be called on all ranks. The copies are kept on the CPU, and only on the rank that asked for them.

        Args:
            to: The rank; None for all of them. Checkpoints that all ranks write and read together need that for windows
                in parts, if they are to be read in another world: there before the state dict to read into is made too.
            pieces: Of parameters that ``fully_shard`` has cut, gather momentum and moments too. False before the
                functions of ``torch.distributed.checkpoint``, which all ranks call and which gather these themselves.

        Raises:
            ValueError: If there is no such rank.
            RuntimeError: If not all ranks call it, after the timeout of the process group.
        """
        self._require_loadable()
        world = self.comm.world
        if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < world):
            raise ValueError(f"to must be a rank below {world}, or None for all, got {to!r}")
        if not self.comm.combines:
            return
        self.comm.meet("consolidate_state_dict()")
        self._join_ranks()
        with torch.no_grad():
            self._gathered, self._gathered_at = self._collect(to), self._t
            if pieces:
                self._collect_pieces(to)

    def _collect_pieces(self, to: int | None) -> None:
        """Add what is cut as its parameter is; all ranks call it."""
        for p in self._table.group_of:
            for key in sorted(key for key, value in self.state[p].items() if is_cut(value)):
                found = whole(cast(Tensor, self.state[p][key]))
                if self._asks(to):
                    self._gathered.setdefault(p, {})[key] = found.cpu()

    def _asks(self, to: int | None) -> bool:
        """Whether this rank is one of those on which state is gathered."""
        return to is None or to == self.comm.rank

    def _collect(self, to: int | None) -> Tensors:
        """What a rank lacks, on that rank; all ranks call it."""
        placed, found = self._placed(), Tensors()
        keys = sorted(self.entries.keys() - of_kinds(self.entries, "momentum"))
        agreed = self.comm.agree(self._headers(placed, keys, to)).reshape(len(placed), len(keys), 3 + _MOST_DIMS)
        for (index, p), headers in zip(placed, agreed.long().tolist(), strict=True):
            owner = self.comm.owner(index)
            for key, (needed, code, dims, *shape) in zip(keys, headers, strict=True):
                if not (needed and code):
                    continue
                if owner == self.comm.rank:
                    tensor = self.state[p][key]
                    assert isinstance(tensor, Tensor)
                else:
                    tensor = torch.empty(shape[:dims], dtype=_DTYPES[code - 1], device=p.device)
                self.comm.copy_from(owner, [tensor])
                if self._asks(to) and key not in self.state[p]:
                    found.setdefault(p, {})[key] = tensor.cpu()
        return found

    def _headers(self, placed: Sequence[tuple[int, nn.Parameter]], keys: Sequence[str], to: int | None) -> Tensor:
        """``[units, keys, …]``: how many ranks need it, and its dtype and shape where it is; to be summed."""
        words = torch.zeros(len(placed), len(keys), 3 + _MOST_DIMS, dtype=torch.float64)
        for row, (index, p) in zip(words, placed, strict=True):
            for word, key in zip(row, keys, strict=True):
                tensor = self.state[p].get(key)
                word[0] = float(tensor is None and self._asks(to))
                if isinstance(tensor, Tensor) and self.comm.owner(index) == self.comm.rank:
                    dims = [*tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())]
                    word[1:] = torch.tensor([_DTYPES.index(tensor.dtype) + 1, tensor.dim(), *dims], dtype=torch.float64)
        return words.flatten()

    # ------------------------------------------------------------------ load

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; everything is checked before anything is changed, and every tensor is copied.

        A complete one loads under any number of ranks and any strategy: every rank takes the part that it holds. No
        message is sent.

        Raises:
            ValueError: If the dict does not fit, with the list of what differs.
            RuntimeError: If it has a part of the curvature only and that of other ranks, or if this is a copy of a
                layer method that was not attached to a module yet.
        """
        self._require_loadable()
        self._follow_replaced()
        state_dict = dict(state_dict)
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        if isinstance(state_dict.get("param_groups"), list) and isinstance(state_dict.get("state"), Mapping):
            state_dict = self._matched_by_name(state_dict)
        groups = [{**self._group_defaults(live), **self._translated(given)} for live, given in self._paired(state_dict)]
        self._require_own(state_dict.get("partial"))
        loaded = self._checked_state(by_number(state_dict["state"]), groups)
        self._gathered.clear()
        self._session.has_compared = False  # every rank must have loaded the same step
        for live, given in zip(self.param_groups, groups, strict=True):
            kept = {"params": live["params"], **{key: live[key] for key in self._structural}}
            if "param_names" in live:
                kept["param_names"] = live["param_names"]
            live.clear()
            live.update({k: copied(v) for k, v in given.items() if k != "param_names"}, **kept)
        self._install(loaded)
        self._t = 0 if self._table.first is None else int(self.state[self._table.first].get("global_step", 0))
        self._finish_load()
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def _paired(self, state_dict: dict[str, Any]) -> Iterator[tuple[Group, Group]]:
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("not an optimizer state_dict: it needs 'state' and 'param_groups'")
        self._refuse(compare_groups(state_dict["param_groups"], self.param_groups))
        return zip(self.param_groups, state_dict["param_groups"], strict=True)

    def _require_own(self, mark: Any) -> None:
        """Refuse a partial state that another rank saved, or this one in another world or under another strategy."""
        saved_by = str(next(iter(mark), "")) if isinstance(mark, Mapping) else str(mark or "")
        if saved_by and saved_by != self.comm.standing:
            raise RuntimeError(
                f"this state_dict is partial: it was saved by {saved_by}, and this is {self.comm.standing}. {_MEND}"
            )

    def _matched_by_name(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state whose groups list their parameters in the order of this optimizer, where both sides have names.

        Args:
            state_dict: As saved.

        Returns:
            The state in this order, or as it is where names are not known, are the same, or do not fit.
        """
        given: list[Group] = state_dict["param_groups"]
        ours, theirs = self._table.names_of_groups(), [group.get("param_names") for group in given]
        if None in ours or None in theirs or len(ours) != len(given):
            return state_dict
        by_names = {
            frozenset(map(clean_name, cast("list[str]", names))): g for names, g in zip(theirs, given, strict=True)
        }
        wanted = [list(map(clean_name, cast("list[str]", names))) for names in ours]
        if any(frozenset(names) not in by_names for names in wanted) or len(by_names) != len(given):
            return state_dict  # it is refused, with a list of what differs
        groups = []
        for live, names in zip(ours, wanted, strict=True):
            group = by_names[frozenset(names)]
            numbers = dict(zip(map(clean_name, group["param_names"]), group["params"], strict=True))
            groups.append({**group, "params": [numbers[name] for name in names], "param_names": live})
        before, after = ([i for g in some for i in g["params"]] for some in (given, groups))
        state = dict(state_dict["state"])
        if before and before[0] != after[0] and before[0] in state and after[0] in state:
            common = {k: v for k, v in state[before[0]].items() if k in ("global_step", "switch_state")}
            state[before[0]] = {k: v for k, v in state[before[0]].items() if k not in common}
            state[after[0]] = {**state[after[0]], **common}
        return {**state_dict, "state": state, "param_groups": groups}

    def _group_defaults(self, live: Group) -> Group:
        return {"betas": self._default_betas, **self.defaults, "fallback_base_lr": live["fallback_base_lr"]}

    def _translated(self, given: Group) -> Group:
        """Options of a checkpoint in the words of now: Adam's size once came with the decoupled decay of AdamW."""
        found = options.renamed(given, self.checks)
        if found.keys() != given.keys() and found.get("graft") == "adam":
            found["graft"] = "adamw"
        return found

    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[nn.Parameter, dict[str, Any]]:
        """The loaded state by parameter, copied; nothing of the optimizer is touched."""
        for group in groups:
            options.validate(group, {**options.COMMON, **self.checks})
        lines: list[str] = []
        elsewhere: list[str] = []
        loaded: dict[nn.Parameter, dict[str, Any]] = {}
        filled_in = filled_in_by_torch()
        for p, i, given in self._numbered({"param_groups": groups}):
            theirs, label = self._own_values(found.get(i, {}), filled_in), f"parameter '{self._table.names[p]}'"
            schema, kept = self._expected_state(p, given, theirs), given["checkpoint_curvature"]
            if self._was_never_trained(theirs):  # it was frozen, and begins anew
                schema = {k: entry for k, entry in schema.items() if k in theirs or k in ("step", "global_step")}
            here = held(schema, self._places_here(p))
            required = {k: entry for k, entry in here.items() if not entry.may_lack(kept)}
            absent = self._absent(theirs, required)
            absent += [k for k in theirs if id(theirs[k]) in filled_in and self._is_needed(k, schema, kept)]
            elsewhere += [f"{label}: {key} is missing" for key in absent]
            shapes = {k: entry.shape for k, entry in required.items() if k not in absent}
            shapes.update({k: entry.shape for k, entry in schema.items() if k in theirs})
            lines += compare_states(theirs, shapes, tuple(p.shape), label)
            lines += [
                f"{label}: {key} is cut over the ranks in another way than the parameter: save with "
                "consolidate_state_dict() or with torch.distributed.checkpoint"
                for key, value in theirs.items()
                if is_cut(value) and not cut_equally(value, p)
            ]
            if not lines and not elsewhere:
                mine = {k: v for k, v in theirs.items() if k not in schema or k in here}
                loaded[p] = self._private(p, mine, schema)
        if elsewhere and not lines:
            raise RuntimeError(
                f"this state_dict has a part of the curvature only, and {self.comm.standing} needs another "
                f"({'; '.join(elsewhere[:3])}, …): it was saved on one rank of several. {_MEND}"
            )
        self._refuse(lines + elsewhere)
        return loaded

    def _is_needed(self, key: str, schema: Schema, kept: str) -> bool:
        """Whether a saved key is curvature that a checkpoint must have."""
        entry = known(self.entries, key)
        return entry is not None and not schema.get(key, entry).may_lack(kept)

    def _absent(self, theirs: Mapping[str, Any], required: Schema) -> list[str]:
        """Tensors that a rank without them left out: all of a sort, while the numbers, which all have, are there."""
        curvature = {k: entry for k, entry in required.items() if not entry.always}
        numbers = [k for k, entry in curvature.items() if not isinstance(entry.like, Tensor)]
        if not numbers or any(k not in theirs for k in numbers):
            return []
        large = {k: entry.place for k, entry in curvature.items() if k not in numbers and entry.kind != "buffers"}
        sorts = [[k for k, place in large.items() if place in places] for places in _TOGETHER]
        absent = [key for keys in sorts if theirs.keys().isdisjoint(keys) for key in keys]
        return absent and [
            k for k, entry in curvature.items() if k not in theirs and (k in absent or entry.kind == "buffers")
        ]

    def _private(self, p: nn.Parameter, theirs: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
        """Copies of one parameter's loaded values."""
        return {k: adopt_value(k, v, schema[k].like if k in schema else None, p) for k, v in theirs.items()}

    def _install(self, loaded: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Make checked values the state."""
        for p, found in loaded.items():
            self.state[p] = found

    def _expected_state(self, p: nn.Parameter, group: Group, theirs: Mapping[str, Any]) -> Schema:
        """What the state of a parameter should be; ``theirs`` is what a checkpoint has for it."""
        expected = {"step": _STEP}
        if p is self._table.first:
            expected["global_step"] = _STEP._replace(like=0)
        expected |= self._curvature_schema(p, group, theirs)
        if p.requires_grad:
            rule = Entry(p, "momentum", Place.OWN, always=True)
            expected |= dict.fromkeys(self._update.keys(p, group), rule)
        elif not self.preconditioner.covers(p):  # what a frozen parameter has is kept as it is, for when it is unfrozen
            expected |= {k: self.entries[k]._replace(like=v) for k, v in theirs.items() if k in self.entries}
        return expected

    def _was_never_trained(self, theirs: Mapping[str, Any]) -> bool:
        """Whether a saved state is that of a parameter which was frozen from the beginning."""
        step = theirs.get("step")
        is_zero = isinstance(step, (int, float, Tensor)) and not bool(torch.as_tensor(step).any())
        return is_zero and theirs.keys() <= {"step"} | self._common

    def _own_values(self, theirs: Mapping[str, Any], filled_in: set[int]) -> dict[str, Any]:
        """Saved values of a parameter, without the empty dicts that torch's flattened checkpoints put into gaps.

        torch may also have filled the gaps of a parameter that was never trained from the optimizer that loads it.

        Args:
            theirs: Saved state of the parameter.
            filled_in: Ids of the tensors that torch has filled in.

        Returns:
            The values.
        """
        given = {k: v for k, v in theirs.items() if not (isinstance(v, dict) and not v)}
        own = {k: v for k, v in given.items() if id(v) not in filled_in}
        return own if self._was_never_trained(own) else given

    def _refuse(self, lines: list[str]) -> None:
        if lines:
            shown = "\n  ".join(lines[:20])
            more = f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
            raise ValueError(f"this state_dict does not fit the optimizer; nothing was loaded:\n  {shown}{more}")
