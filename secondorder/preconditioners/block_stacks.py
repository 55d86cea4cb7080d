"""Preconditions blocks of equal shape together, in one batched product instead of one product each.

On a CPU, the time of a product of matrices with a few thousand entries is mostly the overhead of calling it, and the
curvature of such blocks is copied into stacks. On other devices, calls are slower than most products, so blocks of
nearly any size are stacked, and the stacks replace the entries of the states, which become views of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.curvature.block import Block, BlockT
from secondorder.linalg.dense import is_on_host, precision_of, stacked
from secondorder.parameters import Directions


class Limits(NamedTuple):
    """Largest numbers of entries of stacks.

    Attributes:
        block: Of the matrix of a block.
        curvature: Of the curvature of a block.
        stack: Of the matrices of a stack.
    """

    block: int
    curvature: float
    stack: int


#: Limits on a CPU and on other devices.
_HOST, _DEVICE = Limits(2**16, 2**15, 2**20), Limits(2**24, math.inf, 2**25)
#: Smallest number of blocks for which a stack is worth it.
_FEW = 2


class StackRule(NamedTuple):
    """The rule by which blocks are processed together.

    Attributes:
        reads: Returns the state entries and the options that a block reads; none if it does not support stacks.
        precondition: Returns the preconditioned matrices ``[k, (Γ,) n_g, n_a]`` of blocks that agree in both.
        fold: Updates estimates with measured parts, which it removes from the measurements by index of the block; its
            arguments are those of :func:`secondorder.preconditioners.estimate_stacks.fold_factors`.
    """

    reads: Callable[[Any], tuple[Sequence[str], Sequence[str]]]
    precondition: Callable[[Sequence[Any], Tensor], Tensor]
    fold: Callable[[Any, Sequence[Any], Any, Tensor | None], None]


#: The rule under which every block is processed separately.
NO_STACKS = StackRule(lambda _: ((), ()), lambda _, gradients: gradients, lambda *_: None)


class Stacked(NamedTuple):
    """Directions that were computed in stacks.

    Attributes:
        directions: Those of the parameters of each block, by its index.
        products: ``⟨direction, gradient⟩`` by the first parameter of a block, 0-dim, if the directions of a block have
            been replaced by its gradients where they were not finite.
    """

    directions: dict[int, list[Tensor]]
    products: Directions


def stacked_state(blocks: Sequence[Block], keys: Sequence[str]) -> dict[str, Tensor]:
    """Return entries of the states of blocks as stacks ``[k, ...]``, as far as the blocks have them.

    On a CPU, a stack is kept until the entries change, because they are the same in most steps.
    """
    first, states = blocks[0], [block.state for block in blocks]
    stacks, known = first.runtime.stacks, [key for key in keys if key in states[0]]
    if not is_on_host(first.owner):
        indices = tuple(block.index for block in blocks)
        return {key: stacks.shared((indices, key), key, states) for key in known}
    refreshes = [state["refreshes"] for state in states]
    return {key: stacks.of((first.index, key), [state[key] for state in states], *refreshes) for key in known}


def write_back(blocks: Sequence[Block], changed: Mapping[str, Tensor]) -> None:
    """Store results of :func:`stacked_state` on a device that were changed in place."""
    indices, states = tuple(block.index for block in blocks), [block.state for block in blocks]
    for key, stack in changed.items():
        blocks[0].runtime.stacks.write_back((indices, key), key, states, stack)


def entries_of(block: Block) -> int:
    """Return the number of entries of the matrix of a block."""
    return block.adapter.groups * block.adapter.n_g * block.adapter.n_a


def stacks_of(
    blocks: Sequence[BlockT], key_of: Callable[[BlockT], Hashable | None], size_of: Callable[[BlockT], int] = entries_of
) -> Iterator[list[BlockT]]:
    """Yield blocks with equal keys and shapes, in stacks of a bounded size.

    Args:
        blocks: The blocks.
        key_of: Returns a key that is equal for blocks that are processed together, and None for those that are not.
        size_of: Returns the number of entries of a block that are stacked.
    """
    alike: dict[tuple[int, ...], list[BlockT]] = {}
    for block in blocks:
        if entries_of(block) <= _limits(block).block:
            alike.setdefault((block.adapter.groups, block.adapter.n_g, block.adapter.n_a), []).append(block)
    for same_size in alike.values():
        most = max(_limits(same_size[0]).stack // size_of(same_size[0]), 1)
        for members in _divided(same_size, key_of) if len(same_size) >= _FEW else ():
            for start in range(0, len(members), most):
                some = members[start : start + most]
                if len(some) >= _FEW:
                    yield some


def directions_of_stacks(
    blocks: Sequence[Block], source: Directions, rule: StackRule, has_curvature: Callable[[Block], bool]
) -> Stacked:
    """Return the directions of the parameters of blocks that have gradients, as far as they are computed in stacks.

    Args:
        blocks: The blocks that supply directions.
        source: The gradients to precondition.
        rule: How blocks precondition together.
        has_curvature: Whether a block preconditions. The gradients of others are orthogonalized as they are.
    """
    found = Stacked({}, {})
    able = [block for block in blocks if all(map(source.__contains__, block.params))]
    for some in stacks_of(able, lambda block: _key(block, rule, has_curvature(block))):
        first, on_host = some[0], is_on_host(some[0].owner)
        first.runtime.workspace.reset()
        gradients = matrices_of(some, source)
        direction = first.step_of(rule.precondition(some, gradients) if has_curvature(first) else gradients)
        if not on_host:  # on the host, a check of all directions together is faster
            direction, products = _finite(direction, gradients)
            found.products.update(zip((b.params[0] for b in some), products.unbind(), strict=True))
        found.directions.update(zip((b.index for b in some), _split(some, direction), strict=True))
    return found


def _limits(block: Block) -> Limits:
    return _HOST if is_on_host(block.owner) else _DEVICE


def _finite(directions: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the directions ``[k, ...]`` of a block by its gradients unless all are finite.

    Returns:
        The directions, and their products with the gradients ``[k]``.
    """
    flat, own = directions.flatten(1), gradients.flatten(1)
    products = torch.linalg.vecdot(flat, own)
    good = torch.isfinite(products)
    found = torch.where(good[:, None], flat, own).view_as(directions)
    return found, torch.where(good, products, torch.linalg.vecdot(own, own))


def _divided(blocks: Sequence[BlockT], key_of: Callable[[BlockT], Hashable | None]) -> Collection[list[BlockT]]:
    """Divide blocks of one size into those that are processed together, without those that are processed alone."""
    found: dict[Hashable, list[BlockT]] = {}
    for block in blocks:
        if (key := key_of(block)) is not None:
            found.setdefault(key, []).append(block)
    return found.values()


def _key(block: Block, rule: StackRule, has_curvature: bool) -> Hashable | None:
    """Return a key that is equal for blocks that precondition together; None for a block that preconditions alone."""
    if (block.sets_length and is_on_host(block.owner)) or (block.adapter.is_exact and block.adapter.groups == 1):
        return None
    if not has_curvature:
        return key_of_state(block, (), ())
    entries, options = rule.reads(block)
    return key_of_state(block, entries, options) if entries else None


def key_of_state(block: Block, entries: Sequence[str], options: Sequence[str]) -> Hashable | None:
    """Return a key that is equal for blocks with the same shapes and options; None for a block that is not stacked."""
    values = tuple(block.group[key] for key in options)
    if not all(isinstance(value, (float, int, str, type(None))) for value in values):
        return None  # for example, a number that is adapted on the device
    state = block.state
    kept = tuple((key, state[key].shape, state[key].dtype) for key in entries if key in state)
    if sum(shape.numel() for _, shape, _ in kept) > _limits(block).curvature:
        return None
    shapes = tuple(p.shape for p in block.params)
    kind = type(block), type(block.adapter), shapes, block.weight is None, block.layer.precision, block.owner.device
    return *kind, block.sets_length, values, kept


# ---------------------------------------------------------------------- gradients as matrices
def _is_plain(block: Block) -> bool:
    """Return whether the matrix of a block is its weight with the bias as the last column."""
    overridden: Callable[..., object] = type(block.adapter).to_matrix
    has_both = block.weight is not None and block.bias is not None
    return has_both and block.adapter.groups == 1 and overridden is Adapter.to_matrix


def matrices_of(blocks: Sequence[Block], source: Directions) -> Tensor:
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
