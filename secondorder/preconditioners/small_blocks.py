"""Preconditions small blocks of equal shape together, in one batched product instead of one product each.

For matrices of a few thousand entries, the time of a product is mostly the overhead of calling it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.curvature.block import Block
from secondorder.linalg.dense import precision_of, stacked
from secondorder.parameters import Directions

#: Largest number of entries of the matrix of a small block; of its curvature, which is copied; and of a stack.
_SMALL, _KEPT, _STACK = 2**16, 2**15, 2**20
#: Smallest number of blocks for which a stack is worth it.
_FEW = 2


class StackRule(NamedTuple):
    """The rule by which blocks precondition together.

    Attributes:
        reads: Returns the state entries and the options that a block reads; none if it does not support stacks.
        precondition: Returns the preconditioned matrices ``[k, (Γ,) n_g, n_a]`` of blocks that agree in both.
    """

    reads: Callable[[Any], tuple[Sequence[str], Sequence[str]]]
    precondition: Callable[[Sequence[Any], Tensor], Tensor]


#: The rule under which every block preconditions separately.
NO_STACKS = StackRule(lambda _: ((), ()), lambda _, gradients: gradients)


def stacked_state(blocks: Sequence[Block], keys: Sequence[str]) -> dict[str, Tensor]:
    """Return entries of the states of blocks as stacks ``[k, ...]``, as far as the blocks have them.

    A stack is kept until the entries change, because they are the same in most steps.
    """
    first, states = blocks[0], [block.state for block in blocks]
    stacks, refreshes = first.runtime.stacks, [state["refreshes"] for state in states]
    return {
        key: stacks.of((first.index, key), [state[key] for state in states], *refreshes)
        for key in keys
        if key in states[0]
    }


def directions_of_stacks(blocks: Sequence[Block], source: Directions, rule: StackRule) -> dict[int, list[Tensor]]:
    """Return the directions of the parameters of small blocks that have gradients, by index, in stacks of some size."""
    alike: dict[tuple[int, ...], list[Block]] = {}
    for block in blocks:
        size = block.adapter.groups, block.adapter.n_g, block.adapter.n_a
        if math.prod(size) <= _SMALL:
            alike.setdefault(size, []).append(block)
    found: dict[int, list[Tensor]] = {}
    for shape, same_size in alike.items():
        most = max(_STACK // math.prod(shape), 1)
        for members in _divided(same_size, source, rule) if len(same_size) >= _FEW else ():
            for start in range(0, len(members), most):
                some = members[start : start + most]
                if len(some) >= _FEW:
                    some[0].runtime.workspace.reset()
                    direction = rule.precondition(some, _matrices(some, source))
                    found.update(zip((b.index for b in some), _split(some, direction), strict=True))
    return found


def _divided(blocks: Sequence[Block], source: Directions, rule: StackRule) -> Collection[list[Block]]:
    """Divide blocks of one size into those that precondition together, without those that precondition alone."""
    found: dict[Hashable, list[Block]] = {}
    for block in blocks:
        if all(map(source.__contains__, block.params)) and (key := _key(block, rule)) is not None:
            found.setdefault(key, []).append(block)
    return found.values()


def _key(block: Block, rule: StackRule) -> Hashable | None:
    """Return a key that is equal for blocks that precondition together; None for a block that preconditions alone."""
    if block.sets_length or (block.adapter.is_exact and block.adapter.groups == 1):
        return None
    entries, options = rule.reads(block)
    values = tuple(block.group[key] for key in options)
    if not entries or not all(isinstance(value, (float, int, str, type(None))) for value in values):
        return None  # for example, a number that is adapted on the device
    state = block.state
    kept = tuple((key, state[key].shape, state[key].dtype) for key in entries if key in state)
    if sum(shape.numel() for _, shape, _ in kept) > _KEPT:
        return None
    shapes = tuple(p.shape for p in block.params)
    return type(block.adapter), shapes, block.weight is None, block.layer.precision, block.owner.device, values, kept


# ---------------------------------------------------------------------- gradients as matrices
def _is_plain(block: Block) -> bool:
    """Return whether the matrix of a block is its weight with the bias as the last column."""
    overridden: Callable[..., object] = type(block.adapter).to_matrix
    has_both = block.weight is not None and block.bias is not None
    return has_both and block.adapter.groups == 1 and overridden is Adapter.to_matrix


def _matrices(blocks: Sequence[Block], source: Directions) -> Tensor:
    """Return gradients as a stack of matrices ``[k, (Γ,) n_g, n_a]``."""
    first = blocks[0]
    precision, workspace = precision_of(first.owner), first.runtime.workspace
    grads = [[source[p].to(precision) for p in b.params] for b in blocks]
    if not _is_plain(first):
        return stacked([b.layer.matrix(own) for b, own in zip(blocks, grads, strict=True)], workspace)
    found = workspace.empty((len(blocks), first.adapter.n_g, first.adapter.n_a), grads[0][0])
    torch.stack([weight.flatten(1) for weight, _ in grads], out=found[..., :-1])
    torch.stack([bias for _, bias in grads], out=found[..., -1])
    return found


def _split(blocks: Sequence[Block], stack: Tensor) -> Iterator[list[Tensor]]:
    """Yield the directions of the parameters of each block."""
    first = blocks[0]
    if not _is_plain(first):
        yield from (b.layer.split(matrix) for b, matrix in zip(blocks, stack, strict=True))
        return
    assert first.weight is not None
    weights = stack[..., :-1].contiguous().view(len(blocks), *first.weight.shape)
    yield from map(list, zip(weights, stack[..., -1].contiguous(), strict=True))
