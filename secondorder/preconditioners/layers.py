"""Layer methods: the stages of a step over the blocks of a module."""

from __future__ import annotations

import warnings
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from secondorder.capture.backwards import REPLACED
from secondorder.capture.capture import Capture
from secondorder.capture.coverage import NO_HOOKS, REPEATED, advice, kind_of, verdict
from secondorder.capture.layers.projections import Projection
from secondorder.capture.loss_scale import UNKNOWN
from secondorder.capture.sites import Captured, Statistic
from secondorder.capture.statistics.measurement import Measured
from secondorder.comm import CommStrategy, Parcel
from secondorder.curvature.block import Block
from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.extremes import Extremes, numbers
from secondorder.curvature.layer import find_name
from secondorder.curvature.schema import Place, Schema, keys
from secondorder.frames import depth_of_caller
from secondorder.linalg.dense import all_true_on_cpu, full_precision, precision_of
from secondorder.parallel.exchange import parcel_of
from secondorder.parallel.session import words_of_options
from secondorder.parallel.shards import zeros_like_shard
from secondorder.parameters import Directions, Group
from secondorder.preconditioners.base import Proposal, SavedStates
from secondorder.preconditioners.blocks import Capturing
from secondorder.runtime import some_of

#: Bytes of directions that are sent together: what the ranks of a row compute between two messages.
_PORTION = 32 * 2**20


#: Refreshes of every block before λ is compared with the curvature.
_REFRESHES_BEFORE_WATCH = 3


class LayerPreconditioner(Capturing):
    """The stages of a step over the blocks of a module.

    The verbs of a method: :meth:`schema` (state of a block), :meth:`new_statistic`, :meth:`measure`, :meth:`sums`,
    :meth:`fold`, :meth:`refresh`, :meth:`precondition`, :meth:`block_curvature`.
    """

    #: Whether relative damping is that of the kernel of the examples, instead of the Fisher's of the parameters.
    damps_kernel: ClassVar[bool] = False

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def measure(self, block: Block, statistic: Statistic, examples: int) -> Measured:
        """What this rank captured, as parts that ranks can add up."""

    def sums(self, block: Block) -> Schema:
        """The parts that this step measures of a block, as ranks add them up: by default those of its estimate."""
        schema = self.live_schema(block)
        return {key: schema[key] for key in keys(schema, Place.ESTIMATE) if schema[key].kind != "buffers"}

    @abstractmethod
    def refresh(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        """Recompute what preconditioning needs from the estimates; returns ``ok [len(blocks)]``."""

    @abstractmethod
    def fold(self, block: Block, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold what was measured into the running estimate; returns whether it was finite (0-dim bool)."""

    @abstractmethod
    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """Apply the inverse curvature of a block to a gradient matrix ``[(Γ,) n_g, n_a]``."""

    @abstractmethod
    def block_curvature(self, block: Block) -> Tensor:
        """The undamped curvature of a block as a dense matrix."""

    def curvature_product(self, block: Block, matrix: Tensor) -> Tensor:
        """The undamped curvature of a block times a matrix ``[(Γ,) n_g, n_a]``."""
        raise NotImplementedError

    def block_damping(self, block: Block) -> Tensor | float:
        """λ of a block as preconditioning adds it: a number or ``[(Γ)]``."""
        return float(block.group["damping"])

    # ------------------------------------------------------------------ stages 1 to 3: statistics
    @property
    def capture(self) -> Capture:
        """What captures the statistics of the blocks.

        Raises:
            RuntimeError: If the optimizer was closed, or is a copy without a module.
        """
        if self._capture is None:
            if self.is_closed:
                raise RuntimeError(f"this {self.setting.method} was closed; call attach(module) to train on")
            raise RuntimeError(self.is_a_copy())
        return self._capture

    def collect(self) -> Captured:
        """Take what was captured since the last step, combined over the ranks."""
        return self.reduce(self._take())

    def drop(self) -> None:
        """Leave out a batch: its statistics have been taken."""

    def discard(self) -> None:
        """Forget what was captured since the last step."""
        if self._capture is not None:
            self._capture.discard()

    def spare(self) -> None:
        """Forget what was captured since the last step, unless its backward pass has yet to come."""
        if self._capture is not None and self._capture.awaits_backward:
            self._capture.spare()
        elif self._capture is not None:
            self._capture.give_up()

    def check_gradients(self) -> None:
        """Leave out what was captured of a backward whose gradients others have replaced."""
        capture = self._capture
        if capture is not None and capture.leave_out_replaced() and REPLACED not in self._warned:
            self._warned.add(REPLACED)
            warnings.warn(f"{self.setting.method}: {REPLACED}", stacklevel=depth_of_caller())

    def _take(self) -> Captured:
        capture = self.capture
        self.loss_scale.infer(capture, self.comm.averages)
        taken = capture.take()
        self._warn_of_doubts(capture)
        return taken

    def reduce(self, statistics: Captured) -> Captured:
        """Measure what was captured, and combine it over the ranks."""
        measured = {
            i: self.measure(self._blocks[i], s, statistics.examples[i])
            for i, s in statistics.statistics.items()
            if statistics.examples[i]
        }
        if self.comm.combines:
            return self._combine(statistics, measured)
        for i, m in measured.items():
            if "factor_a" in m.parts:
                self.exchange.rows_seen[self._blocks[i].name] = m.examples, m.parts["factor_a"].number
        return statistics._replace(statistics=measured)  # type: ignore[arg-type]

    def _combine(self, captured: Captured, measured: dict[int, Measured]) -> Captured:
        """Counts to everybody, sums to whoever holds the estimates."""
        schemas = {self._blocks[i]: self.sums(self._blocks[i]) for i in sorted(self._due)}
        if not schemas:
            return captured._replace(statistics={})
        word = self._options_word()
        tail = [float(captured.total), float(captured.total > 0), 1.0, word, word * word]
        found, agreed = self.exchange.combine(schemas, measured, tail)
        examples = {i: m.examples for i, m in found.items()}
        total, ranks, everyone, words, squares = agreed.tolist()
        if everyone * squares != words * words:  # not one and the same word
            self._refuse_options()
        # A rank that captures no layer has as many examples as the others.
        total = round(total * self.comm.data_world / ranks) if ranks else 0
        return captured._replace(statistics=found, examples=examples, total=total)  # type: ignore[arg-type]

    def _options_word(self) -> float:
        """A number of 20 bits for the options of the groups: its square and sums of them are exact."""
        return float(zlib.crc32("\n".join(words_of_options(self.param_groups)).encode()) & 0xFFFFF)

    def _refuse_options(self) -> None:
        rates = [float(group["lr"]) for group in self.param_groups]
        raise RuntimeError(
            f"step {self._t}: the options of the parameter groups differ between ranks (lr here: {rates}), so their "
            "parameters would drift apart. Schedules must see the same numbers on every rank: average a validation "
            "loss over the ranks before it goes into one."
        )

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Fold what was measured into the running estimates."""
        self._update_estimates(statistics, gate)
        self._warn_uncaptured(statistics, gradients)

    def _update_estimates(self, captured: Captured, gate: Tensor | None) -> None:
        for index, measured in cast("dict[int, Measured]", captured.statistics).items():
            block = self._blocks[index]
            if measured.parts or not self.comm.combines:
                finite = self.fold(block, measured, gate)
                on_cpu = finite.device.type == "cpu"
                dropped = not all_true_on_cpu(finite) if on_cpu else (~finite).to(torch.int64)
                if dropped is not False:
                    self.exchange.skip(block, dropped)
                if dropped is True and not self.comm.combines:
                    continue
            self.count_update(block, measured)

    def count_update(self, block: Block, measured: Measured) -> None:
        """Count a statistic that was folded in, on whatever rank."""
        self.state[block.owner]["factor_updates"] += 1
        self._learned_at[block.name] = self._t

    def _warn_of_doubts(self, capture: Capture) -> None:
        """Say once that the number of examples of a forward pass is a guess."""
        doubts, key = sorted(capture.doubts), "number of examples"
        capture.doubts.clear()
        if not doubts or key in self._warned:
            return
        self._warned.add(key)
        warnings.warn(
            f"{self.setting.method}: it is not certain how many examples a forward pass of {doubts[0]}. The scale of "
            "the curvature depends on that number. Name the argument of forward that counts the examples with "
            "batch_input=, or pass a function of its arguments that returns their number. If the script calls parts "
            "of the model instead of its forward, call them from one forward.",
            stacklevel=depth_of_caller(),
        )

    def _warn_uncaptured(self, captured: Captured, gradients: Directions) -> None:
        """Say once, by name, which layers have a gradient but nothing captured though it was due."""
        assert self._capture is not None
        if self._capture.was_paused:
            self._capture.was_paused = False
            return
        due = self._capture.due | set(self._capture.refused)
        wanted = [self._blocks[i] for i in due if self._blocks[i].owner in gradients]
        blocks = [b for b in wanted if b.index not in captured.statistics and b.index not in captured.idle]
        if not blocks or self._is_repeated(captured):
            return
        missed, names = dict[str, str](), set[str]()
        for block in blocks:
            reason = self._capture.refused.setdefault(
                block.index, _why_missing(self._capture, block)
            )  # describe() says so too
            own = {block.name, reason, f"{kind_of(block.name)}: {kind_of(reason)}"}
            if not own & self._warned:
                missed[block.label] = reason
                names.add(block.name)
        if not missed:
            return
        self._warned |= names | ({UNKNOWN} & set(missed.values()))  # that holds for every layer, also if due later
        # Other experts of a mixture have other shapes in every batch: once for all of them.
        self._warned |= {f"{kind_of(name)}: {kind_of(why)}" for name, why in missed.items() if kind_of(why) != why}
        todo = advice(missed, bool(captured.statistics or captured.idle), self._layer_options.batch_dim)
        text = verdict(missed, len(wanted))
        warnings.warn(f"{self.setting.method}: {text}{todo}", stacklevel=depth_of_caller())

    def _is_repeated(self, captured: Captured) -> bool:
        """Whether this step has the gradients of the last one, which is said once."""
        before, version = self._last_gradient
        gradient = None if before is None else before()
        held = (block.owner.grad for block in self._blocks)
        if (
            captured.statistics
            or gradient is None
            or gradient._version != version
            or all(g is not gradient for g in held)
        ):
            return False
        if REPEATED not in self._warned:
            self._warned.add(REPEATED)
            warnings.warn(f"{self.setting.method}: {REPEATED}", stacklevel=depth_of_caller())
        return True

    def end_step(self) -> None:
        """Prepare for the coming step."""
        gradient = next((b.owner.grad for b in self._blocks if b.owner.grad is not None), None)
        self._last_gradient = (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)
        self.arm()

    # ------------------------------------------------------------------ stage 4: refresh and share
    def refresh_due(self) -> list[int]:
        """Refresh the blocks that are due, here or on their owners; returns the indices of the refreshed ones."""
        due = [b for b in self._blocks if self._refresh_is_due(b) and self.comm.renews(b.index)]
        if not due:
            return []
        if self.comm.combines:
            due, fine = self.exchange.refresh_together(due, self.refresh)
            self.refresher.judge(due, fine)
            return self.refresher.count(due)
        self.refresher.settle()
        due, look = self._with_estimates(due)
        return self.refresher.run(due, self.refresh, look) if due else []

    def _refresh_is_due(self, block: Block) -> bool:
        return self.refresher.is_due(block, len(self._blocks))

    def _with_estimates(self, due: list[Block]) -> tuple[list[Block], bool]:
        return self.refresher.with_estimates(due)

    def share(self, refreshed: list[int]) -> None:
        """Bring what was refreshed to the ranks that precondition with it."""
        if self.comm.combines and refreshed:
            self.exchange.share({self._blocks[i]: self.live_schema(self._blocks[i]) for i in refreshed})

    def parcel_of(self, block: Block, *places: Place) -> Parcel:
        """The tensors of a block's state that are at some places, as far as they are here."""
        return parcel_of(block, self.live_schema(block), *places)

    def renew(self, blocks: list[Block]) -> Tensor:
        """Refresh and share some blocks outside of their schedule."""
        if not self.comm.combines:
            with full_precision(blocks[0].owner.device):
                return self.refresh(blocks, True)
        kept, ok = self.exchange.refresh_together(blocks, self.refresh)
        self.share([b.index for b in kept])
        good = dict(zip(kept, ok.tolist(), strict=True))
        return torch.tensor([good.get(b, False) for b in blocks])

    def placed(self) -> list[tuple[int, nn.Parameter]]:
        """Blocks, and the parameter whose state theirs is."""
        return [(b.index, b.owner) for b in self._blocks]

    # ------------------------------------------------------------------ stages 5 and 6: directions
    def active(self, gradients: Directions) -> list[Block]:
        """Return the blocks that precondition in a step with these gradients."""
        return [b for b in self._blocks if self._is_ready(b) and all(p in gradients for p in b.params)]

    def preconditioned(self, gradients: Directions) -> list[nn.Parameter]:
        """Return the parameters of the blocks that precondition in a step with these gradients."""
        return [p for b in self.active(gradients) for p in b.params]

    def _is_ready(self, block: Block) -> bool:
        return bool(block.group[self.refresh_interval] > 0 and self._is_refreshed(block))

    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions of the parameters of active blocks."""
        ready = [b for b in self._blocks if self._is_ready(b)]
        if not ready:
            return Proposal({}, {}, [])
        with full_precision(ready[0].owner.device):
            found = self._cut_directions(ready, source) if self._is_cut else self._whole_directions(ready, source)
        active = self.active(gradients)
        directions = {p: found[p] for b in active for p in b.params}
        return Proposal(directions, gradients, [(b.group["graft"], b.params) for b in active])

    def _whole_directions(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """Directions of all blocks on every rank."""
        found: Directions = {}
        posted = []
        for some in _portions(blocks):  # those that are done travel while the next ones are computed
            parcels = [Parcel(b.index, self._directions_of(b, source)) for b in some]
            posted.append(self.comm.post_directions(parcels))
            for block, parcel in zip(some, parcels, strict=True):
                found.update(zip(block.params, parcel.tensors, strict=True))
        for pending in posted:
            pending.wait()
        return found

    def _cut_directions(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """This rank's pieces of the directions of all blocks."""
        found: Directions = {}
        for some in _portions(blocks):
            params = [p for b in some for p in b.params]
            wholes = self._whole_gradients(some, source)
            ours = [b for b in some if self.comm.preconditions(b.index)]
            done = {p: d for b in ours for p, d in zip(b.params, self._directions_of(b, wholes), strict=True)}
            found |= self.table.shards.scatter(params, done, _ranks_of(self.comm, some))
        return found

    def _whole_gradients(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """What to precondition of some blocks, whole on the ranks that precondition them."""
        params = [p for b in blocks for p in b.params]
        pieces = {p: source[p] if p in source else zeros_like_shard(p) for p in params}
        return self.table.shards.gather(params, pieces, _ranks_of(self.comm, blocks))

    def _directions_of(self, block: Block, source: Directions) -> list[Tensor]:
        """Directions of the parameters of a block; room for them where another rank finds them."""
        if not self.comm.preconditions(block.index) or any(p not in source for p in block.params):
            return [torch.zeros(p.shape, dtype=precision_of(p), device=p.device) for p in block.params]
        self._runtime.workspace.reset()
        tensors = [source[p].to(precision_of(p)) for p in block.params]
        matrix = block.layer.matrix(tensors, self._runtime.workspace)
        return block.layer.split(self.shape_direction(block, self.precondition(block, matrix)))

    def shape_direction(self, block: Block, direction: Tensor) -> Tensor:
        """What becomes of a preconditioned matrix ``[(Γ,) n_g, n_a]``: itself."""
        return direction

    def observe(self, outputs: Any, likelihood: Any, targets: Any = None) -> None:
        """Pull vectors of the loss curvature back to the layers, where the Fisher is that of the model."""

    # ------------------------------------------------------------------ checkpoints
    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Complete what a checkpoint may leave out, and follow the loaded options.

        Args:
            rebuild: Makes a new plan and allocates what is missing; returns whether the blocks changed.
        """
        self.refresher.refreshed_at.clear()
        self._learned_at.clear()
        complete = {b: set(self.state[b.owner]) for b in self._blocks}
        refreshes = {b: self.state[b.owner].get("refreshes", 0) for b in self._blocks}
        changed = rebuild()
        derived = {key for key, entry in self.entries.items() if entry.derived}
        renewed = [
            b
            for b, found in complete.items()
            if self.state[b.owner]["factor_updates"] > 0
            and any(key in derived and key not in found for key in self.state[b.owner])
        ]
        self._to_renew.clear()
        if self.comm.combines:  # with the other ranks, at the next step: loading sends nothing
            for block in self._blocks:
                lean = block.group["checkpoint_curvature"] == "factors"
                if lean and self.state[block.owner]["factor_updates"] > 0 and refreshes[block]:
                    self.state[block.owner]["refreshes"] = refreshes[block]
                    self._to_renew.add(block.name)
        elif renewed:
            with torch.no_grad(), full_precision(renewed[0].owner.device):
                ok = self.refresh(renewed, True)
            for block, good in zip(renewed, ok.cpu().numpy(), strict=True):
                self.state[block.owner]["refreshes"] = refreshes[block] if good else 0
        if self._capture is not None:
            if changed:
                self.hook()
            self._capture.discard()
            self.arm()

    def recover(self) -> None:
        """Find what a checkpoint left out together with the other ranks, which have met."""
        if self._to_renew:
            blocks = [b for b in self._blocks if b.name in self._to_renew]
            for block, good in zip(blocks, self._renew_loaded(blocks).tolist(), strict=True):
                if not good:
                    self.state[block.owner]["refreshes"] = 0
            self._to_renew.clear()

    def translated(self, states: SavedStates, group_of: Mapping[nn.Parameter, Group]) -> SavedStates:
        """Return saved states in the form in which this optimizer stores them."""
        return states

    def misfits(self, states: SavedStates) -> list[str]:
        """Return why saved states do not fit, apart from keys and shapes."""
        return []

    def expected(self, p: nn.Parameter, schema: Schema, theirs: Mapping[str, Any]) -> Schema:
        """Return the schema with which the saved state of a parameter is compared."""
        return schema

    def while_loading(self, states: SavedStates, rebuild: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context in which saved states are compared with the schemas."""
        return nullcontext()

    def settle(self, follow: Callable[[], None]) -> None:
        """Bring the state up to date before it is saved."""

    def _renew_loaded(self, blocks: list[Block]) -> Tensor:
        """Find what a checkpoint left out."""
        return self.renew(blocks)

    def _is_refreshed(self, block: Block) -> bool:
        """Whether what a refresh finds is there."""
        return bool(self.state[block.owner]["refreshes"] > 0) and block.name not in self._to_renew

    # ------------------------------------------------------------------ what it tells
    def summary(self) -> str:
        """Return the number of blocks in words."""
        return f"{len(self._blocks)} blocks"

    def pending_bytes(self) -> int:
        """Return the bytes of statistics that wait for the next step."""
        pending = self._capture.pending.values() if self._capture is not None else ()
        return sum(int(getattr(s, "nbytes", 0)) for s in pending)

    def coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        """Return what covers a parameter, its size, and its owner; all are empty if nothing covers it."""
        block = self._block_of.get(p)
        if block is None:
            return "", "", ""
        refused = self._capture.refused.get(block.index) if self._capture is not None else None
        treatment = f"block '{block.name}' ({block.layer.kind})" if block.name else f"block {block.layer.kind}"
        if block.layer.other_uses:
            treatment += f", tied; its use in {some_of(block.layer.other_uses)} has no statistics"
        if refused and self.state[p].get("refreshes", 0) == 0:
            treatment = f"{self.table.group_of[p]['fallback']} fallback: {refused}"
        lead = f"{block.adapter.groups}×" if block.adapter.groups > 1 else ""
        return treatment, f"{lead}{block.adapter.n_a}, {block.adapter.n_g}", f"rank {self.comm.owner(block.index)}"

    def dense(self, name: str) -> Tensor:
        """The undamped curvature of a block as a dense ``[n, n]`` matrix over row-major ``vec([W | b])``.

        Args:
            name: Module name as in ``named_modules()``; wrapper prefixes may be left out.

        Returns:
            The matrix, ``n`` being the number of parameters of the layer.

        Raises:
            ValueError: If no block has this name.
            RuntimeError: If nothing was captured for it yet.
        """
        found = find_name(name, self.blocks)
        if found is None:
            known = ", ".join(b.name or f"'' (the {b.layer.kind} itself)" for b in self._blocks)
            raise ValueError(f"no block is named '{name}'; there are: {known or 'none'}")
        block = self.blocks[found]
        if not (self.comm.estimates(block.index) and self.comm.preconditions(block.index)):
            raise RuntimeError(
                f"the curvature of layer '{name}' is on rank {self.comm.owner(block.index)}: ask there, or use "
                "comm=CommOpt(), which keeps it on every rank"
            )
        if not self._has_estimate(block):
            raise RuntimeError(f"nothing was captured for layer '{name}' yet: take a step first")
        return self.block_curvature(block)

    def _has_estimate(self, block: Block) -> bool:
        return bool(self.state[block.owner]["factor_updates"] > 0)

    def extremes(self, block: Block) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of its damped curvature, from what a refresh left on this rank."""
        return block.extremes()  # bridge

    def bounds(self, block: Block) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        return block.bounds()

    def damped(self) -> list[Damped] | None:
        """The damping of all blocks that this rank keeps, when each was refreshed three times; None before."""
        counts = [(b, self.state[b.owner]["refreshes"]) for b in self._blocks if self._is_refreshed(b)]
        if min((count for _, count in counts), default=0) != _REFRESHES_BEFORE_WATCH:
            return None
        blocks = [b for b, _ in counts]
        found = ((b, self.bounds(b)) for b in blocks)
        return [Damped(b.name, b.group, "damping", e) for b, e in found if e is not None]

    def diagnostics(self) -> dict[str, Any]:
        """Return what is going on as plain numbers; reading them may wait for the device."""
        refreshed = {b.name: b for b in self._blocks if self._is_refreshed(b)}
        found = {name: e for name, b in refreshed.items() if (e := self.extremes(b)) is not None}
        dampings, conditions = numbers(found)
        return {
            "damping_by_layer": dampings,
            "condition_number": conditions,
            "staleness": {n: self._t - 1 - at for n, at in self.refresher.refreshed_at.items() if n in found},
            "statistics_age": {n: self._t - 1 - at for n, at in self._learned_at.items() if n in found},
            "skipped_statistics": sum(int(n) for n in self.exchange.skipped.values()),
            "skipped_statistics_by_layer": {name: int(n) for name, n in self.exchange.skipped.items()},
            "refresh_failures": self.refresher.failed,
        }


def _portions(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Blocks whose directions make messages worth sending before the others are known."""
    start = size = 0
    for i, block in enumerate(blocks):
        size += sum(p.numel() * precision_of(p).itemsize for p in block.params)
        if size >= _PORTION:
            yield blocks[start : i + 1]
            start, size = i + 1, 0
    if start < len(blocks):
        yield blocks[start:]


def _ranks_of(comm: CommStrategy, blocks: Sequence[Block]) -> list[Sequence[int]]:
    """Where the parameters of some blocks are preconditioned."""
    return [comm.preconditioners(b.index) for b in blocks for _ in b.params]


def _why_missing(capture: Capture, block: Block) -> str:
    """Why nothing was captured for a block."""
    if capture.observes:
        return "observe() was not called for it"
    if isinstance(block.layer.taps[0].module, Projection):
        return f"{NO_HOOKS}; in a compiled model call secondorder.nn.expose(model) first"
    return NO_HOOKS
