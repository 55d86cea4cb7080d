"""Checkpoints of second-order optimizers, which are checked completely before anything is changed.

Saved state has the same form for every number of ranks and every strategy: for each parameter, it has tensors whose
shapes depend on the model and the options. A rank loads the part that it holds. If a rank holds only a part, so does
its ``state_dict()``, which is marked as ``"partial"``; ``consolidate_state_dict`` completes that of one rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.checkpoint import comparison
from secondorder.checkpoint.consolidate import GatheredState
from secondorder.comm.layout import cut_equally, is_cut
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.schema import Entry, Place, Schema, known, stored_at
from secondorder.curvature.window.shards import base_key
from secondorder.frames import depth_of_caller, filled_in_by_torch, is_saved_in_parts
from secondorder.parameters import Group, ParameterTable
from secondorder.preconditioners.base import CurvatureState, DividedState, SavedStates
from secondorder.preconditioners.group_options import GroupOptions
from secondorder.runtime import Runtime, some_of

_REMEDY = (
    "Call consolidate_state_dict() on all ranks before state_dict() on the one that saves, or save and load the "
    "state_dict() of every rank on that rank."
)
#: Counters of every parameter.
_STEP = Entry(torch.zeros(()), "buffers", Place.OWN, always=True)


class Loaded(NamedTuple):
    """A checked checkpoint, copied.

    Attributes:
        groups: Options of the groups.
        states: State by parameter.
    """

    groups: Sequence[Group]
    states: Mapping[nn.Parameter, dict[str, Any]]


class Checkpoint:
    """Completes the state that an optimizer saves, and checks a state before it is loaded.

    Args:
        comm: Communication strategy.
        table: The parameters.
        runtime: The step counter.
        curvature: The curvature in the state of the parameters.
        keys: Returns the keys of the state of the first-order rule that a parameter usually follows.
        group_options: The options of the groups.
        defaults: Their default values.
        divided: The curvature again if its tensors may be divided between ranks.
    """

    def __init__(
        self,
        comm: CommStrategy,
        table: ParameterTable,
        runtime: Runtime,
        curvature: CurvatureState,
        keys: Callable[[nn.Parameter, Mapping[str, Any]], tuple[str, ...]],
        group_options: GroupOptions,
        defaults: Mapping[str, Any],
        divided: DividedState | None = None,
    ) -> None:
        self._comm, self._table, self._runtime = comm, table, runtime
        self.curvature, self._keys, self._divided = curvature, keys, divided
        self._group_options, self._defaults = group_options, defaults
        self.gathered = GatheredState(comm, table, curvature, divided)
        #: Whether the user knows that the saved state is partial.
        self.warned_of_partial = False

    def require_module(self) -> None:
        """Raise an error if this is a copy that cannot judge a state without a module."""
        if self._table.root is None and (advice := self.curvature.is_a_copy()):
            raise RuntimeError(advice)

    # ------------------------------------------------------------------ save
    def completed(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Return a state that ``torch.optim.Optimizer.state_dict`` has packed, completed in a copy.

        It has names and gathered tensors, but not what ``checkpoint_curvature`` leaves out, and ``"partial"`` if it
        lacks what other ranks hold.
        """
        for names, group in zip(self._table.names_of_groups(), packed["param_groups"], strict=True):
            if names is not None:
                group.setdefault("param_names", names)
        if self.gathered.step != self._runtime.step:
            self.gathered.tensors.clear()
        states = packed["state"]
        for p, i, group in self._numbered(packed["param_groups"]):
            if p in self.gathered.tensors:
                states[i] = self.gathered.completed(p, states[i])
            if (kept := group["checkpoint_curvature"]) != "all":
                found, entries = states.get(i, {}), self._table.entries
                left_out = {k for k in found if (entry := known(entries, k)) is not None and entry.may_lack(kept)}
                states[i] = {k: v for k, v in found.items() if k not in left_out}
        if self._is_partial(packed):
            # As a key of an empty dict, which torch's distributed checkpoints neither save nor miss: there all ranks
            # write into one checkpoint, and words that differ would be replaced by those of one rank.
            packed["partial"] = {self._comm.identity: {}}
            self._warn_of_partial()
        return packed

    def _is_partial(self, packed: Mapping[str, Any]) -> bool:
        """Whether state that belongs into a checkpoint is on other ranks."""
        found = packed["state"]
        return self._comm.combines and any(
            any(is_cut(value) for value in found[i].values())
            or any(
                key not in found[i] and not entry.may_lack(group["checkpoint_curvature"])
                for key, entry in self.curvature.schema_of(p, group, self._table.state.get(p, {})).items()
            )
            for p, i, group in self._numbered(packed["param_groups"])
        )

    def _numbered(self, groups: Sequence[Group]) -> Iterator[tuple[nn.Parameter, int, Group]]:
        """Parameters, their numbers in a state dict, and their groups there."""
        for live, group in zip(self._table.groups, groups, strict=True):
            for p, i in zip(live["params"], group["params"], strict=True):
                yield p, i, group

    def _warn_of_partial(self) -> None:
        step = self._runtime.step
        if step == 0 or self.warned_of_partial:  # before training, wrappers of optimizers look at the state too
            return
        if self.gathered.step == step:  # another rank has everything, and trainers ask all ranks for their state
            return
        if is_saved_in_parts():
            return
        self.warned_of_partial = True
        warnings.warn(
            f"{self._table.method}: this state_dict() is partial, {self._comm.identity} holds a part of the curvature "
            "only. To save everything on one rank, first call consolidate_state_dict() on all ranks, as the callbacks "
            "of secondorder.integrations do in trainers. If every rank saves its state_dict() instead, the same ranks "
            "can load them again.",
            stacklevel=depth_of_caller(),
        )

    # ------------------------------------------------------------------ load
    def read(self, state_dict: dict[str, Any], rebuild: Callable[[], bool]) -> Loaded:
        """Return what to install of a state dict, which is checked first; nothing is changed.

        Args:
            state_dict: The state dict.
            rebuild: Makes a new plan and allocates what is missing; returns whether the blocks changed.

        Raises:
            ValueError: If the dict does not fit, with the list of what differs.
            RuntimeError: If it has a part of the curvature only and that of other ranks.
        """
        if isinstance(state_dict.get("param_groups"), list) and isinstance(state_dict.get("state"), Mapping):
            state_dict = comparison.matched_by_name(state_dict, self._table.names_of_groups())
        groups = self._options(state_dict)
        self._require_own(state_dict.get("partial"))
        found, curvature = comparison.by_number(state_dict["state"]), self.curvature
        numbered = list(self._numbered(groups))
        states = {p: found.get(i, {}) for p, i, _ in numbered}
        group_of = {p: group for p, _, group in numbered}
        _refuse(curvature.misfits(states))
        for group in groups:
            self._group_options.rules.check_saved(group, self._table.groups)
        with curvature.while_loading(states, rebuild):
            return Loaded(groups, self._checked(curvature.translated(states, group_of), group_of, groups))

    def install(self, loaded: Loaded) -> None:
        """Replace the options and the state by a checkpoint that :meth:`read` has checked."""
        self.gathered.tensors.clear()
        for live, given in zip(self._table.groups, loaded.groups, strict=True):
            kept = {"params": live["params"], **{key: live[key] for key in self.curvature.structural_options}}
            if "param_names" in live:
                kept["param_names"] = live["param_names"]
            live.clear()
            live.update({k: comparison.copied(v) for k, v in given.items() if k != "param_names"}, **kept)
        if self._divided is None:
            self._table.state.update(loaded.states)
        else:
            self._divided.install(loaded.states)

    def _options(self, state_dict: dict[str, Any]) -> list[Group]:
        """Complete options of the saved groups."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("not an optimizer state_dict: it needs 'state' and 'param_groups'")
        given, groups = state_dict["param_groups"], self._table.groups
        _refuse(comparison.compare_groups(given, groups))
        return [
            {
                "betas": self._group_options.betas,
                **self._defaults,
                "fallback_base_lr": live["fallback_base_lr"],
                **self._renamed(theirs),
            }
            for live, theirs in zip(groups, given, strict=True)
        ]

    def _renamed(self, given: Group) -> Group:
        """Options of a checkpoint under their current names. Adam's size once came with AdamW's decoupled decay."""
        found = options.renamed(given, self._group_options.checks)
        if found.keys() != given.keys() and found.get("graft") == "adam":
            found["graft"] = "adamw"
        return found

    def _require_own(self, mark: Any) -> None:
        """Reject a partial state that another rank saved, or this one in another world or under another strategy."""
        saved_by = str(next(iter(mark), "")) if isinstance(mark, Mapping) else str(mark or "")
        if saved_by and saved_by != self._comm.identity:
            raise RuntimeError(
                f"this state_dict is partial: it was saved by {saved_by}, and this is {self._comm.identity}. {_REMEDY}"
            )

    def _checked(
        self, states: SavedStates, group_of: Mapping[nn.Parameter, Group], groups: Sequence[Group]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return copies of saved states, all of which fit."""
        for group in groups:
            options.validate(group, self._group_options.checks)
        lines: list[str] = []
        elsewhere: list[str] = []
        loaded: dict[nn.Parameter, dict[str, Any]] = {}
        filled_in = filled_in_by_torch()
        for p, group in group_of.items():
            theirs = self._own_values(states[p], filled_in)
            schema = self._expected(p, group, theirs)
            here = stored_at(schema, self.curvature.places_here(p))
            missing, wrong = self._differences(p, theirs, schema, here, group["checkpoint_curvature"], filled_in)
            elsewhere += missing
            lines += wrong
            if not lines and not elsewhere:
                loaded[p] = self._copied(p, {k: v for k, v in theirs.items() if k not in schema or k in here}, schema)
        if elsewhere and not lines:
            raise RuntimeError(
                f"this state_dict has only a part of the curvature, and {self._comm.identity} needs another "
                f"({'; '.join(elsewhere[:3])}, …): it was saved on one rank of several. {_REMEDY}"
            )
        _refuse(lines + elsewhere)
        return self._without_spread_curvature(loaded)

    def _differences(
        self, p: nn.Parameter, theirs: Mapping[str, Any], schema: Schema, here: Schema, kept: str, filled_in: set[int]
    ) -> tuple[list[str], list[str]]:
        """Return a line for each tensor that only another rank has saved, and one for each other difference."""
        # ``schema`` describes the state on all ranks and ``here`` that on this rank. Torch has filled in some tensors.
        label = f"parameter '{self._table.names[p]}'"
        required = {k: entry for k, entry in here.items() if not entry.may_lack(kept)}
        lacking = comparison.absent(theirs, required)
        lacking += [k for k in theirs if id(theirs[k]) in filled_in and self._is_needed(k, schema, kept)]
        shapes = {k: entry.shape for k, entry in required.items() if k not in lacking}
        shapes.update({k: entry.shape for k, entry in schema.items() if k in theirs})
        wrong = comparison.compare_states(theirs, shapes, tuple(p.shape), label)
        wrong += [
            f"{label}: {key} is sharded over the ranks in another way than the parameter: save with "
            "consolidate_state_dict() or with torch.distributed.checkpoint"
            for key, value in theirs.items()
            if is_cut(value) and not cut_equally(value, p)
        ]
        return [f"{label}: {key} is missing" for key in lacking], wrong

    def _is_needed(self, key: str, schema: Schema, kept: str) -> bool:
        """Whether a saved key is curvature that a checkpoint must have."""
        entry = known(self._table.entries, key)
        return entry is not None and not schema.get(key, entry).may_lack(kept)

    def _copied(self, p: nn.Parameter, theirs: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
        """Copy the saved values of a parameter, apart from those that installing them copies."""
        late = frozenset[str]()
        if self._divided is not None:
            _refuse(self._divided.bad_values(p, theirs))
            late = self._divided.keys
        return {
            k: v if base_key(k) in late else comparison.adopt_value(k, v, schema[k].like if k in schema else None, p)
            for k, v in theirs.items()
        }

    def _expected(self, p: nn.Parameter, group: Group, theirs: Mapping[str, Any]) -> Schema:
        """Return what the state of a parameter should be if a checkpoint has ``theirs`` for it."""
        schema = {"step": _STEP}
        if p is self._table.first:
            schema["global_step"] = _STEP._replace(like=0)
        schema |= self.curvature.schema_of(p, group, theirs)
        if p.requires_grad:
            rule = Entry(p, "momentum", Place.OWN, always=True)
            schema |= dict.fromkeys(self._keys(p, group), rule)
        elif not self.curvature.covers(p):  # keep the state of a frozen parameter until it is unfrozen
            entries = self._table.entries
            schema |= {k: entries[k]._replace(like=v) for k, v in theirs.items() if k in entries}
        schema = self.curvature.expected(p, schema, theirs)
        if comparison.was_never_trained(theirs, self.curvature.common_keys):  # it was frozen, and begins again
            return {k: entry for k, entry in schema.items() if k in theirs or k in ("step", "global_step")}
        return schema

    def _own_values(self, theirs: Mapping[str, Any], filled_in: set[int]) -> dict[str, Any]:
        """Return saved values of a parameter, without the empty dicts that torch's flattened checkpoints put into gaps.

        torch may also have filled the gaps of a parameter that was never trained from the optimizer that loads it: with
        tensors of the ids ``filled_in``.
        """
        given = {k: v for k, v in theirs.items() if not (isinstance(v, dict) and not v)}
        own = {k: v for k, v in given.items() if id(v) not in filled_in}
        return own if comparison.was_never_trained(own, self.curvature.common_keys) else given

    def _without_spread_curvature(
        self, loaded: dict[nn.Parameter, dict[str, Any]]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return a loaded state without the curvature of frozen layers that is, or may be, on other ranks.

        Nobody has it whole, so the ranks could not agree on it when the layer is unfrozen.
        """
        comm, placed = self._comm, self.curvature.placed()
        if placed is None:
            return loaded
        everywhere = all(len(comm.preconditioners(index)) == comm.world for index, _ in placed)
        complete = not comm.combines or (comm.replicates and everywhere)
        kept, dropped = dict(loaded), list[str]()
        common = {"global_step", *self.curvature.common_keys}
        for p, state in loaded.items():
            own = (state.keys() & self._table.entries.keys()) - common
            if p.requires_grad or not own or (complete and any(isinstance(state[k], Tensor) for k in own)):
                continue
            kept[p] = {k: v for k, v in state.items() if k not in own}
            dropped.append(self._table.names[p])
        if dropped:
            warnings.warn(
                f"{self._table.method}: the curvature of frozen parameters was spread over several ranks when it was "
                f"saved, or will be, and is not loaded ({some_of(dropped)}); it is estimated again when they are "
                "unfrozen.",
                stacklevel=depth_of_caller(),
            )
        return kept


def _refuse(lines: list[str]) -> None:
    """Raise an error with a list of what does not fit, if there is something."""
    if lines:
        shown = "\n  ".join(lines[:20])
        more = f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise ValueError(f"this state_dict does not fit the optimizer; nothing was loaded:\n  {shown}{more}")
