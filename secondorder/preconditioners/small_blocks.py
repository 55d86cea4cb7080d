"""Preconditions small blocks of equal shape together, in one batched product instead of one product each.

For matrices of a few thousand entries, the time of a product is mostly the overhead of calling it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.curvature.block import Block
from secondorder.linalg.dense import precision_of, stacked
from secondorder.linalg.stacks import bounded
from secondorder.parameters import Directions

#: Largest number of entries of the matrix of a small block, and of a stack. The temporaries of a stack take a few MB.
_SMALL, _STACK = 2**14, 2**20
#: Smallest number of blocks for which a stack is worth it.
_FEW = 4


class StackRule(NamedTuple):
    """The rule by which blocks precondition together.

    Attributes:
        reads: Returns the state entries and the options that a block reads; none if it does not support stacks.
        precondition: Returns the preconditioned matrices ``[k, n_g, n_a]`` of blocks that agree in both.
    """

    reads: Callable[[Any], tuple[Sequence[str], Sequence[str]]]
    precondition: Callable[[Sequence[Any], Tensor], Tensor]


def _nothing(*_: Any) -> Any:
    return (), ()


#: The rule under which every block preconditions separately.
NO_STACKS = StackRule(_nothing, _nothing)


def directions_of_stacks(blocks: Sequence[Block], source: Directions, rule: StackRule) -> dict[int, list[Tensor]]:
    """Return the directions of the parameters of small blocks, by index of the block.

    Args:
        blocks: Blocks that this rank preconditions.
        source: The gradients to precondition, by parameter.
        rule: The rule by which blocks precondition together.

    Returns:
        The directions. Blocks are left out if they are not small, lack gradients or belong to too small a stack.
    """
    sizes = Counter((block.adapter.n_a, block.adapter.n_g) for block in blocks)
    stacks: dict[Hashable, list[Block]] = {}
    for block in blocks if max(sizes.values(), default=0) >= _FEW else ():
        is_one_of_few = sizes[block.adapter.n_a, block.adapter.n_g] < _FEW
        if not is_one_of_few and all(map(source.__contains__, block.params)) and (key := _key(block, rule)) is not None:
            stacks.setdefault(key, []).append(block)
    found: dict[int, list[Tensor]] = {}
    for members in stacks.values():
        for some in bounded(members, lambda block: block.adapter.n_a * block.adapter.n_g, _STACK):
            if len(some) < _FEW:
                continue  # copies into a stack would take as long as the calls
            some[0].runtime.workspace.reset()
            direction = rule.precondition(some, _matrices(some, source))
            found.update(zip((b.index for b in some), _split(some, direction), strict=True))
    return found


def _key(block: Block, rule: StackRule) -> Hashable | None:
    """Return a key that is equal for blocks that precondition together; None for a block that preconditions alone."""
    adapter = block.adapter
    is_small = adapter.n_a * adapter.n_g <= _SMALL and adapter.groups == 1 and not adapter.is_exact
    if not is_small or block.sets_length:
        return None
    entries, options = rule.reads(block)
    values = tuple(block.group[key] for key in options)
    if not entries or not all(isinstance(value, (float, int, str, type(None))) for value in values):
        return None  # for example, a number that is adapted on the device
    state = block.state
    kept = tuple((key, state[key].shape, state[key].dtype) for key in entries if key in state)
    shapes = tuple(p.shape for p in block.params)
    return type(adapter), shapes, block.weight is None, block.layer.precision, block.owner.device, values, kept


# ---------------------------------------------------------------------- gradients as matrices
def _is_plain(block: Block) -> bool:
    """Return whether the matrix of a block is its weight with the bias as the last column."""
    kind = type(block.adapter)
    overridden: Callable[..., object] = kind.to_matrix
    return overridden is Adapter.to_matrix and block.weight is not None and block.bias is not None


def _matrices(blocks: Sequence[Block], source: Directions) -> Tensor:
    """Return gradients as a stack of matrices ``[k, n_g, n_a]``."""
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
