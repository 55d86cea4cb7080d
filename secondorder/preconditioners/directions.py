"""Directions of blocks on the ranks that apply them, either complete on every rank or as the shards of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic

from torch import Tensor

from secondorder.comm.strategy import CommStrategy, Parcel
from secondorder.curvature.block import Block, BlockT
from secondorder.curvature.refresh import Refresher
from secondorder.linalg.dense import full_precision, precision_of
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parallel.shards import Shards, zeros_like_shard
from secondorder.parameters import Directions, ParameterTable
from secondorder.preconditioners.base import Proposal
from secondorder.preconditioners.block_stacks import StackRule, directions_of_stacks

if TYPE_CHECKING:
    from secondorder.preconditioners.block_plan import BlockPlan

#: Bytes of directions that are sent together, which the ranks of a row compute between two messages.
_PORTION = 32 * 2**20

#: Computes the directions of the parameters of a block.
DirectionsOf = Callable[[Block, Directions], list[Tensor]]
#: Gathers the gradients to precondition for some blocks, complete on the ranks that precondition them.
WholesOf = Callable[[Sequence[Block], Directions], Directions]


class WholeGradients:
    """Gathers the gradients of sharded parameters for preconditioning, each gradient at most once per step."""

    def __init__(self, comm: CommStrategy, table: ParameterTable) -> None:
        self._comm, self._table = comm, table
        #: Gradients of this step that were sent, and the gathered tensors.
        self._sent: Directions = {}
        self._kept: Directions = {}

    def gather(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """Return the gradients to precondition for some blocks, complete on the ranks that precondition them."""
        here = [b for b in blocks if all(p in source and self._sent.get(p) is source[p] for p in b.params)]
        rest = [b for b in blocks if b not in here]
        found = {p: self._kept[p] for b in here for p in b.params if p in self._kept}
        return found | (self._gather(rest, source) if rest else {})

    def _gather(self, blocks: Sequence[Block], source: Directions) -> Directions:
        params = [p for b in blocks for p in b.params]
        pieces = {p: source[p] if p in source else zeros_like_shard(p) for p in params}
        return self._table.shards.gather(params, pieces, _ranks_of(self._comm, blocks))

    def keep(self, blocks: Sequence[Block], gradients: Directions) -> Directions:
        """Gather the gradients of some blocks and keep them for the directions of this step."""
        self._sent = {p: gradients[p] for b in blocks for p in b.params}
        self._kept = self._gather(blocks, gradients)
        return self._kept

    def forget(self) -> None:
        """Discard the gradients of this step."""
        self._sent, self._kept = {}, {}


class LayerDirections(Generic[BlockT]):
    """Computes the directions of the blocks that precondition.

    Args:
        plan: The blocks.
        refresher: Knows which blocks are refreshed.
        exchange: Allocates the directions of blocks that other ranks precondition.
        stack_rule: The rule by which small blocks precondition together.

    Attributes:
        wholes: The complete gradients of sharded parameters.
    """

    def __init__(
        self, plan: BlockPlan[BlockT], refresher: Refresher, exchange: StatisticsExchange, stack_rule: StackRule
    ) -> None:
        self._plan, self._refresher, self._exchange, self._stack_rule = plan, refresher, exchange, stack_rule
        self.wholes = WholeGradients(plan.comm, plan.table)

    def has_curvature(self, block: Block) -> bool:
        """Return whether a block can precondition."""
        return self._plan.is_on(block.group) and self._refresher.is_refreshed(block)

    def is_ready(self, block: BlockT) -> bool:
        """Return whether a block supplies the direction of its parameters in this step."""
        if not self.has_curvature(block):  # hidden matrices are orthogonalized without curvature, too
            return block.sets_length
        return block.runtime.step % int(block.group.get("precondition_steps", 1)) == 0

    def active(self, gradients: Directions) -> list[BlockT]:
        """Return the blocks that precondition in a step with these gradients."""
        return [b for b in self._plan.blocks if self.is_ready(b) and all(map(gradients.__contains__, b.params))]

    def propose(self, gradients: Directions, source: Directions) -> Proposal:
        """Return the preconditioned directions of the parameters of active blocks."""
        plan = self._plan
        ready = [b for b in plan.blocks if self.is_ready(b)]
        if not ready:
            return Proposal({}, {}, [])
        products: Directions = {}
        with full_precision(ready[0].owner.device):
            if plan.table.shards.is_sharded:
                found = resharded(plan.comm, plan.table.shards, ready, source, self.wholes.gather, self._directions_of)
            else:
                mine = [b for b in ready if plan.comm.preconditions(b.index)]
                stacked = directions_of_stacks(mine, source, self._stack_rule, self.has_curvature)
                found = replicated(plan.comm, ready, source, partial(self._directions_of, known=stacked.directions))
                products = {} if plan.comm.combines else stacked.products  # all ranks have to round in the same way
        active = [b for b in ready if all(map(gradients.__contains__, b.params))]
        directions = {p: found[p] for b in active for p in b.params}
        if products:  # parameters of different groups may have different rates
            group_of = plan.table.group_of
            joint = {b.params[0] for b in active if len({id(group_of[p]) for p in b.params}) == 1}
            products = {p: product for p, product in products.items() if p in joint}
        return Proposal(directions, gradients, [(b.group["graft"], b.params) for b in active], products)

    def _directions_of(
        self, block: Block, source: Directions, known: Mapping[int, list[Tensor]] = MappingProxyType({})
    ) -> list[Tensor]:
        """Directions of the parameters of a block, or empty tensors for them if another rank computes them."""
        if block.index in known:
            return known[block.index]
        if not self._plan.comm.preconditions(block.index) or not all(map(source.__contains__, block.params)):
            return self._exchange.room(block)
        gradient = self.matrix_of(block, source)
        direction = block.precondition(gradient) if self.has_curvature(block) else gradient
        return block.layer.split(block.step_of(direction))

    def matrix_of(self, block: Block, source: Directions) -> Tensor:
        """Return the gradients of a block as a matrix ``[(Γ,) n_g, n_a]`` in temporary memory."""
        workspace = self._plan.runtime.workspace
        workspace.reset()
        return block.layer.matrix([source[p].to(precision_of(p)) for p in block.params], workspace)


def replicated(
    comm: CommStrategy, blocks: Sequence[Block], source: Directions, directions_of: DirectionsOf
) -> Directions:
    """Directions of all blocks on every rank."""
    found: Directions = {}
    posted = []
    for some in _portions(blocks):  # finished directions are sent while the next ones are computed
        parcels = [Parcel(b.index, directions_of(b, source)) for b in some]
        posted.append(comm.post_directions(parcels))
        for block, parcel in zip(some, parcels, strict=True):
            found.update(zip(block.params, parcel.tensors, strict=True))
    for pending in posted:
        pending.wait()
    return found


def resharded(
    comm: CommStrategy,
    shards: Shards,
    blocks: Sequence[Block],
    source: Directions,
    wholes_of: WholesOf,
    directions_of: DirectionsOf,
) -> Directions:
    """This rank's shards of the directions of all blocks."""
    found: Directions = {}
    for some in _portions(blocks):
        params = [p for b in some for p in b.params]
        wholes = wholes_of(some, source)
        ours = [b for b in some if comm.preconditions(b.index)]
        done = {p: d for b in ours for p, d in zip(b.params, directions_of(b, wholes), strict=True)}
        found |= shards.scatter(params, done, _ranks_of(comm, some))
    return found


def _ranks_of(comm: CommStrategy, blocks: Sequence[Block]) -> list[Sequence[int]]:
    """The ranks that precondition each parameter of some blocks."""
    return [comm.preconditioners(b.index) for b in blocks for _ in b.params]


def _portions(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Yield blocks whose directions are large enough together to be sent before the others are computed."""
    start = size = 0
    for i, block in enumerate(blocks):
        size += sum(p.numel() * precision_of(p).itemsize for p in block.params)
        if size >= _PORTION:
            yield blocks[start : i + 1]
            start, size = i + 1, 0
    if start < len(blocks):
        yield blocks[start:]
