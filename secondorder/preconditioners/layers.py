"""The preconditioner of the layer methods: the stages of a step over the blocks of a module."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from secondorder.capture.fisher.fisher import ModelFisher, resolved
from secondorder.capture.sites import Captured
from secondorder.capture.statistics.measurement import Measured
from secondorder.comm.strategy import Parcel, Unit
from secondorder.curvature.block import ESTIMATE_ALONE, Block, Due
from secondorder.curvature.factorization import joint_ok
from secondorder.curvature.refresh import Refresher
from secondorder.curvature.schema import Place, Schema
from secondorder.curvature.wrappers import forwarded
from secondorder.linalg.dense import all_true_on_cpu, full_precision, precision_of
from secondorder.parallel.exchange import StatisticsExchange, parcel_of
from secondorder.parallel.session import words_of_options
from secondorder.parameters import Directions, Group
from secondorder.preconditioners.base import Preconditioner, Proposal
from secondorder.preconditioners.block_plan import BlockPlan
from secondorder.preconditioners.directions import replicated, resharded, whole_gradients
from secondorder.preconditioners.layer_capture import LayerCapture, Setting
from secondorder.preconditioners.layer_checkpoint import LayerCheckpoint
from secondorder.preconditioners.layer_report import LayerReport

#: Numbers of the factors that a refresh works on at a time, more only if one layer has more.
REFRESH_PORTION = 1 << 24


class LayerPreconditioner(Preconditioner):
    """The stages of a step over the blocks of a module. A method sets ``block_type``, and what follows from it.

    Args:
        setting: What it shares with the optimizer.

    Attributes:
        plan: The blocks.
        hooks: What captures their statistics.
        exchange: What they exchange with other ranks.
        refresher: When they are refreshed.
    """

    hooks: LayerCapture
    #: The class of the blocks.
    block_type: ClassVar[type[Block]]
    #: The class of what they report.
    report_type: ClassVar[type[LayerReport]] = LayerReport
    #: The class of their half of checkpoints.
    checkpoint_type: ClassVar[type[LayerCheckpoint]] = LayerCheckpoint
    #: The class of what refreshes them.
    refresher_type: ClassVar[type[Refresher]] = Refresher
    #: Entries of the states of blocks, by key, as far as they are the same in every state.
    catalog: ClassVar[Schema] = {}
    #: Options that decide what the state of a block holds.
    allocating: ClassVar[tuple[str, ...]] = ()
    needs_module = True
    #: Options that say how many steps lie between two updates of the estimates, and between two refreshes.
    capture_interval: ClassVar[str] = "factor_update_steps"
    refresh_interval: ClassVar[str] = "inv_update_steps"
    #: Whether relative damping is that of the kernel of the examples, instead of the Fisher's of the parameters.
    damps_kernel: ClassVar[bool] = False
    #: The largest number of rows of each example that a method can use, or None for no limit.
    rows_per_example: ClassVar[int | None] = None

    def __init__(self, setting: Setting) -> None:
        self.setting, self.comm, self.table, self.runtime = setting, setting.comm, setting.table, setting.runtime
        self.options = setting.layers
        self.exchange = StatisticsExchange(setting.comm)
        self.plan = self.new_plan()
        self.hooks = LayerCapture(setting, self.plan)
        self.refresher = self.refresher_type(self.options.schedule, self.refresh_interval, self.options.max_failures)
        dim = self.options.batch_dim
        self.fisher = ModelFisher(setting.fisher, setting.runtime, dim, self.rows_per_example)
        self.report = self.report_type(self.plan, self.hooks, self.exchange, self.refresher)
        #: Intervals that decided what the coming step uses.
        self._armed_for: list[tuple[Any, ...]] = []

    # ------------------------------------------------------------------ blocks
    def new_plan(self) -> BlockPlan:
        """Return a plan without blocks."""
        chosen = self.setting
        make = partial(self.block_type, runtime=chosen.runtime, options=chosen.layers, fisher=chosen.fisher)
        places, interval = self.exchange.places_here, self.refresh_interval
        return BlockPlan(make, chosen.layers, chosen.comm, chosen.table, chosen.runtime, interval, places)

    @property
    def blocks(self) -> dict[str, Block]:
        """Blocks by module name."""
        return self.plan.by_name

    def covered(self) -> Iterator[tuple[str, Sequence[nn.Parameter]]]:
        """Return the name and the parameters of each block."""
        return ((b.name, b.params) for b in self.plan.blocks)

    def forget_plan(self, params: Collection[nn.Parameter]) -> None:
        """Forget the blocks of another module."""
        self.plan.blocks = []

    def allocate(self, p: nn.Parameter) -> None:
        """Allocate the curvature in the state of a parameter; what is there and still fits is kept."""
        self.plan.allocate(p)

    def follow(self, place: Callable[[Sequence[Unit]], None]) -> bool:
        """Find the blocks for the current parameters; see :meth:`BlockPlan.follow`."""
        changed = self.plan.follow(place)
        # Bases are sent only while gradients are measured in them.
        self.exchange.unsent |= {b.name for b in self.plan.blocks if b.group.get("estimator") != "intra"}
        return changed

    def covers(self, p: nn.Parameter) -> bool:
        """Return whether a block covers a parameter."""
        return p in self.plan.block_of

    def options_of(self, p: nn.Parameter) -> Group:
        """Return the group whose options the block of a covered parameter follows."""
        group: Group = self.plan.block_of[p].group
        return group

    def rebuilt(self) -> None:
        """Act on a new plan, whose state has been allocated."""
        self.refresher.forget_jobs()  # parameters may have moved, or be of another dtype

    def facts(self) -> dict[str, list[str]]:
        """Return what must be equal on all ranks, in words."""
        return self.plan.facts()

    # ------------------------------------------------------------------ capture
    def hook(self) -> None:
        """Hook the layers of the blocks."""
        self.hooks.hook()
        self.arm()

    def replanned(self, changed: bool) -> None:
        """Hook the layers of new blocks, if there are any, and have captured what the coming step will use."""
        if changed and self.hooks.is_hooked:
            self.hook()
        self.arm()

    def arm(self) -> None:
        """Have captured what the coming step will use."""
        if self.hooks.is_hooked:
            self._armed_for = self.chosen_intervals()
            self.hooks.arm(self.find_due())

    def find_due(self) -> dict[int, Due]:
        """What the coming step measures of the blocks whose statistics it uses, on any rank."""
        learns = self.comm.learns
        found = ((b.index, self.due_of(b)) for b in self.plan.blocks)
        return {i: due for i, due in found if due is not None and learns(i)}

    def due_of(self, block: Any) -> Due | None:
        """What the coming step measures of a block; None for nothing."""
        return Due(factors=True) if self.captures(block) else None

    def captures(self, block: Any) -> bool:
        """Whether the coming step updates the running estimate of a block."""
        every, interval = block.group[self.capture_interval], block.group[self.refresh_interval]
        updates = block.state.get("factor_updates", 0)
        return self.options.schedule.captures(self.runtime.step, every, interval, updates)

    def chosen_intervals(self) -> list[tuple[Any, ...]]:
        """Return the options by group that decide what a step uses."""
        names = (self.refresh_interval, self.capture_interval, "scale_update_steps", "estimator")
        return [tuple(g.get(name) for name in names) for g in self.table.groups]

    def follow_schedule(self) -> None:
        """Let intervals that changed since the last step act on the forward that begins."""
        if self.chosen_intervals() != self._armed_for:
            self.arm()

    def observe(self, outputs: Any, likelihood: Any, targets: Any = None) -> None:
        """Pull vectors of the loss curvature back to the layers, where the Fisher is that of the model."""
        heads, kinds, given = resolved(outputs, likelihood, targets)
        if not self.setting.fisher.is_observed:
            return
        capture, root = self.hooks.capture, self.table.root
        trains = root is None or any(part.training for part in forwarded(root))
        if capture.gate.is_paused or not capture.statistics.due or not trains:
            return
        rank = self.comm.data_rank if self.comm.combines else None
        is_sum = self.table.groups[0]["loss_reduction"] == "sum"
        self.fisher.observe(capture, heads, kinds, given, is_sum=is_sum, rank=rank)

    def begin_step(self, synchronize: Callable[[], None]) -> None:
        """Refuse a step without a module."""
        _ = self.hooks.capture

    def check_gradients(self) -> None:
        """Leave out what was captured of a backward whose gradients others have replaced."""
        self.hooks.check_gradients()

    def discard(self) -> None:
        """Forget what was captured since the last step."""
        self.hooks.discard()

    def drop(self) -> None:
        """Leave out a batch: its statistics have been taken."""

    # ------------------------------------------------------------------ stages 1 to 3: statistics
    def collect(self) -> Captured:
        """Take what was captured since the last step, combined over the ranks."""
        return self.reduce(self.hooks.take())

    def reduce(self, statistics: Captured) -> Captured:
        """Measure what was captured, and combine it over the ranks."""
        if statistics.terms is not None:
            self.runtime.observed_terms = statistics.terms
        blocks = self.plan.blocks
        measured = {
            i: self.measure(blocks[i], s, statistics.examples[i])
            for i, s in statistics.statistics.items()
            if statistics.examples[i]
        }
        if self.comm.combines:
            return self._combine(statistics, measured)
        for i, m in measured.items():
            if "factor_a" in m.parts:
                self.exchange.rows_seen[blocks[i].name] = m.examples, m.parts["factor_a"].number
        return statistics._replace(statistics=measured)  # type: ignore[arg-type]

    def measure(self, block: Any, statistic: Any, examples: int) -> Measured:
        """Return what this rank's batch says about the estimate of a block."""
        found: Measured = block.measure(statistic, examples)
        return found

    def _combine(self, captured: Captured, measured: dict[int, Measured]) -> Captured:
        """Counts to everybody, sums to whoever holds the estimates."""
        blocks = self.plan.blocks
        schemas = {blocks[i]: blocks[i].sums(due) for i, due in sorted(self.hooks.due.items())}
        if not schemas:
            return captured._replace(statistics={})
        # A number of 20 bits for the options of the groups: its square and sums of them are exact.
        word = float(zlib.crc32("\n".join(words_of_options(self.table.groups)).encode()) & 0xFFFFF)
        tail = [float(captured.total), float(captured.total > 0), 1.0, word, word * word]
        found, agreed = self.exchange.combine(schemas, measured, tail)
        examples = {i: m.examples for i, m in found.items()}
        total, ranks, everyone, words, squares = agreed.tolist()
        if everyone * squares != words * words:  # not one and the same word
            rates = [float(group["lr"]) for group in self.table.groups]
            raise RuntimeError(
                f"step {self.runtime.step}: the options of the parameter groups differ between ranks (lr here: "
                f"{rates}), so their parameters would drift apart. Schedules must see the same numbers on every rank: "
                "average a validation loss over the ranks before it goes into one."
            )
        # A rank that captures no layer has as many examples as the others.
        total = round(total * self.comm.data_world / ranks) if ranks else 0
        return captured._replace(statistics=found, examples=examples, total=total)  # type: ignore[arg-type]

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Fold what was measured into the running estimates."""
        self.fold(statistics, gate)
        if self.hooks.is_hooked:
            self.hooks.warn_uncaptured(statistics, gradients)

    def fold(self, captured: Captured, gate: Tensor | None) -> None:
        """Fold what was measured into the running estimates, and count the updates."""
        combines, step = self.comm.combines, self.runtime.step
        for index, measured in cast("dict[int, Measured]", captured.statistics).items():
            block = self.plan.blocks[index]
            if measured.parts or not combines:
                finite = block.fold(measured, gate)
                on_cpu = finite.device.type == "cpu"
                dropped = not all_true_on_cpu(finite) if on_cpu else (~finite).to(torch.int64)
                if dropped is not False:
                    self.exchange.skip(block, dropped)
                if dropped is True and not combines:
                    continue
            due = self.hooks.due.get(index, ESTIMATE_ALONE)
            block.count_update(measured, due)
            if due.factors:
                self.exchange.learned_at[block.name] = step

    # ------------------------------------------------------------------ stage 4: refresh and share
    def refresh_due(self) -> list[int]:
        """Refresh the blocks that are due, here or on their owners, and return the indices of the refreshed ones.

        With ``overlap`` it adopts what was begun, and begins what is due.

        Returns:
            The indices.
        """
        if not self.options.overlap:
            return self._refresh_due()
        blocks, count, comm = self.plan.blocks, len(self.plan.blocks), self.comm
        with self.refresher.adopting(blocks) as adopted:
            refreshed = set(self._refresh_due())
        at_once = {b for b in blocks if b.index in refreshed and b not in adopted}
        self.refresher.forget(at_once)
        begun = [b for b in blocks if comm.renews(b.index) and self.refresher.begins(b, count) and b not in at_once]
        self.refresher.begin(begun, lambda b: not comm.combines or comm.refreshes(b.index), comm.combines)
        return sorted(refreshed)

    def _refresh_due(self) -> list[int]:
        due = [b for b in self.plan.blocks if self.is_due(b) and self.comm.renews(b.index)]
        if not due:
            return []
        if self.comm.combines:
            due, fine = self.exchange.refresh_together(due, self.refresh)
            self.refresher.judge(due, fine)
            return self.refresher.count(due)
        self.refresher.settle()
        due, look = self.with_estimates(due)
        return self.refresher.run(due, self.refresh, look) if due else []

    def is_due(self, block: Any) -> bool:
        """Whether this step refreshes a block."""
        return self.refresher.is_due(block, len(self.plan.blocks))

    def with_estimates(self, due: list[Any]) -> tuple[list[Any], bool]:
        """Return the blocks that have an estimate, and whether the host looks at how their refresh ends."""
        return self.refresher.with_estimates(due)

    def refresh(self, blocks: Sequence[Any], host_checks: bool, *, restores: bool = False) -> Tensor:
        """Refresh some blocks, a portion at a time, so that temporaries do not grow with the model.

        Args:
            blocks: The blocks.
            host_checks: Whether the host may look at results.
            restores: Whether this finds only what a checkpoint has left out.

        Returns:
            Whether each went well, ``[len(blocks)]``. One that fails keeps its last good result.
        """
        return torch.cat([self._refresh_some(some, host_checks, restores) for some in _refresh_portions(blocks)])

    def _refresh_some(self, blocks: Sequence[Any], host_checks: bool, restores: bool) -> Tensor:
        found = self.refresher.find(blocks, host_checks, self.comm.combines, restores)
        ok = joint_ok(found, blocks)
        for block, good in zip(blocks, ok.unbind(), strict=True):
            adopt = block.restore if restores else block.adopt
            adopt({side: found[block, side][0] for side in "ag" if (block, side) in found}, good)
        return ok

    def share(self, refreshed: list[int]) -> None:
        """Bring what was refreshed to the ranks that precondition with it."""
        if self.comm.combines and refreshed:
            blocks = [self.plan.blocks[i] for i in refreshed]
            self.exchange.share({b: self.plan.live_schema(b) for b in blocks})

    def parcel_of(self, block: Block, *places: Place) -> Parcel:
        """The tensors of a block's state that are at some places, as far as they are here."""
        return parcel_of(block, self.plan.live_schema(block), *places)

    def renew(self, blocks: list[Any], *, restores: bool = False) -> Tensor:
        """Refresh and share some blocks outside of their schedule.

        Args:
            blocks: The blocks.
            restores: Whether this finds only what a checkpoint has left out. What was begun is newer, then.

        Returns:
            Whether each went well.
        """
        refresh = partial(self.refresh, restores=True) if restores else self.refresh
        if self.comm.combines:
            kept, fine = self.exchange.refresh_together(blocks, refresh)
            good = dict(zip(kept, fine.tolist(), strict=True))
            ok = torch.tensor([good.get(b, False) for b in blocks])
        else:
            kept = blocks
            with full_precision(blocks[0].owner.device):
                ok = refresh(blocks, True)
        self.share([b.index for b in kept])
        if not restores:
            self.refresher.forget(blocks)
        return ok

    # ------------------------------------------------------------------ stages 5 and 6: directions
    def is_ready(self, block: Any) -> bool:
        """Whether a block preconditions."""
        return block.group[self.refresh_interval] > 0 and self.refresher.is_refreshed(block)

    def active(self, gradients: Directions) -> list[Any]:
        """Return the blocks that precondition in a step with these gradients."""
        return [b for b in self.plan.blocks if self.is_ready(b) and all(map(gradients.__contains__, b.params))]

    def preconditioned(self, gradients: Directions) -> list[nn.Parameter]:
        """Return the parameters of the blocks that precondition in a step with these gradients."""
        return [p for b in self.active(gradients) for p in b.params]

    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions of the parameters of active blocks."""
        ready, comm, shards = [b for b in self.plan.blocks if self.is_ready(b)], self.comm, self.table.shards
        if not ready:
            return Proposal({}, {}, [])
        with full_precision(ready[0].owner.device):
            if shards.is_sharded:
                found = resharded(comm, shards, ready, source, self.whole_gradients, self.directions_of)
            else:
                found = replicated(comm, ready, source, self.directions_of)
        active = [b for b in ready if all(map(gradients.__contains__, b.params))]
        directions = {p: found[p] for b in active for p in b.params}
        return Proposal(directions, gradients, [(b.group["graft"], b.params) for b in active])

    def whole_gradients(self, blocks: Sequence[Any], source: Directions) -> Directions:
        """What to precondition of some blocks, whole on the ranks that precondition them."""
        return whole_gradients(self.comm, self.table.shards, blocks, source)

    def directions_of(self, block: Any, source: Directions) -> list[Tensor]:
        """Directions of the parameters of a block; room for them where another rank finds them."""
        if not self.comm.preconditions(block.index) or not all(map(source.__contains__, block.params)):
            return self.exchange.room(block)
        workspace = self.runtime.workspace
        workspace.reset()
        tensors = [source[p].to(precision_of(p)) for p in block.params]
        direction = block.precondition(block.layer.matrix(tensors, workspace))
        found: list[Tensor] = block.layer.split(block.shape(direction))
        return found

    def sets_length(self, p: nn.Parameter) -> bool:
        """Whether directions of a parameter have a length that no clip shall change."""
        return bool(self.plan.block_of[p].sets_length)

    def forget_step(self) -> None:
        """Forget what only the current step uses."""

    def end_step(self) -> None:
        """Prepare for the coming step."""
        self.forget_step()
        self.fisher.end_step()
        self.hooks.end_step()
        self.arm()

    # ------------------------------------------------------------------ copies and ends
    def recover(self) -> None:
        """Find what a checkpoint left out together with the other ranks, which have met."""
        if self.refresher.missing:
            blocks = [b for b in self.plan.blocks if b.name in self.refresher.missing]
            ok = self.renew(blocks, restores=True)
            for block, good in zip(blocks, ok.tolist(), strict=True):
                if not good:
                    block.state["refreshes"] = 0
            self.refresher.missing.clear()

    def kept(self) -> dict[str, Any]:
        """Return what copies and pickles keep, apart from the state."""
        return {
            "to_renew": set(self.refresher.missing),
            "bases_to_send": set(self.exchange.unsent),
            "refreshed_at": dict(self.refresher.refreshed_at),
            "learned_at": dict(self.exchange.learned_at),
        }

    def own(self) -> dict[str, Any]:
        """Return the arguments of a copy that only this preconditioner has."""
        return {}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take what :meth:`kept` returned for the original."""
        self.refresher.missing = set(kept["to_renew"])
        self.refresher.refreshed_at.update(kept["refreshed_at"])
        self.exchange.learned_at = dict(kept["learned_at"])
        self.exchange.unsent = set(kept["bases_to_send"])

    def detach(self) -> None:
        """Remove all hooks, and end refreshes in the background. Idempotent."""
        try:
            self.hooks.detach()
        finally:
            self.refresher.close()


def _refresh_portions(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    start = size = 0
    for i, block in enumerate(blocks):
        own = block.refresh_size
        if size and size + own > REFRESH_PORTION:
            yield blocks[start:i]
            start, size = i, 0
        size += own
    yield blocks[start:]
