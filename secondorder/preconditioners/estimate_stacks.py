"""Running estimates of blocks of equal shape, which are updated together on devices other than the CPU."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.capture.statistics.measurement import Estimate, Measured
from secondorder.curvature.block import Block
from secondorder.curvature.eigenbasis import (
    EigenbasisBlock,
    is_adam,
    preconditions_gradient,
    scale_decay,
    square_weights,
)
from secondorder.curvature.factors import STORAGES
from secondorder.curvature.kronecker import FactoredBlock, KroneckerBlock, factor_decay
from secondorder.linalg import eigenbasis
from secondorder.linalg.dense import full_precision, is_on_host, stacked
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parameters import Directions
from secondorder.preconditioners.block_stacks import (
    StackRule,
    key_of_state,
    matrices_of,
    stacked_state,
    stacks_of,
    write_back,
)

#: Entries of the state that preconditioning reads on a CPU, those that an update of the scale changes, and all entries
#: that either of them reads on a device.
_USED = "scale", "basis_a", "basis_g"
_CHANGED = "scale", "scale_weight", "scale_unit"
_UPDATED = (*_CHANGED, "basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g")
#: Entries that an update of the factors reads, and those that are measured for it.
_KEPT, _FACTORS = ("factor_a", "factor_g", "factor_weight"), ("factor_a", "factor_g")
#: Options that the preconditioning of stacks reads.
_READ = (
    "approx", "damping", "damping_mode", "eps", "estimator", "momentum_mode", "power", "weight_decay",
    "weight_decay_in_curvature",
)  # fmt: skip


def _read(block: EigenbasisBlock) -> tuple[Sequence[str], Sequence[str]]:
    """Return what a block reads; on a CPU nothing if its gradient is in the basis, or if it is Adam there."""
    if type(block) is not EigenbasisBlock:
        return (), ()
    if is_on_host(block.owner):
        return ((), ()) if block.rotated is not None or is_adam(block.group) else (_USED, _READ)
    return _UPDATED, _READ


def _precondition(blocks: Sequence[EigenbasisBlock], gradients: Tensor) -> Tensor:
    """Return the preconditioned matrices ``[k, (Γ,) n_g, n_a]``."""
    first = blocks[0]
    if is_on_host(first.owner):  # the scale changes in most steps
        scales = stacked([block.state["scale"] for block in blocks], first.runtime.workspace)
        return first.apply({"scale": scales, **stacked_state(blocks, _USED[1:])}, gradients, None)
    known = [block.rotated for block in blocks if block.rotated is not None]
    rotated = torch.stack(known) if len(known) == len(blocks) else None
    return first.apply(stacked_state(blocks, _UPDATED), gradients, rotated)


def _key_of_update(block: EigenbasisBlock, *further: Hashable) -> Hashable | None:
    """Return a key that is equal for blocks whose scales are updated together; None for one that is updated alone."""
    is_single = block.adapter.is_exact and block.adapter.groups == 1
    if is_on_host(block.owner) or type(block) is not EigenbasisBlock or is_single:
        return None
    key = key_of_state(block, _UPDATED, _READ)  # the stacks are those that precondition
    return None if key is None else (key, scale_decay(block), *further)


def _key_of_factors(block: FactoredBlock, measured: Measured) -> Hashable | None:
    """Return a key that is equal for blocks whose factors are updated together; None for one that is updated alone."""
    parts = [measured.parts.get(key) for key in _FACTORS]
    is_known = type(block) in (KroneckerBlock, EigenbasisBlock) and block.factors.storage is STORAGES["dense"]
    if is_on_host(block.owner) or not is_known or not all(parts):
        return None
    scales = tuple(part.scale for part in parts if part is not None)
    if any(isinstance(scale, Tensor) for scale in scales):
        return None
    key = key_of_state(block, _KEPT, ())
    return None if key is None else (key, scales, factor_decay(block), block.batch_weight(measured.examples))


def _size_of_factors(block: FactoredBlock) -> int:
    return block.adapter.groups * max(block.adapter.n_a, block.adapter.n_g) ** 2


def _take(measured: dict[int, Measured], block: Block, keys: Sequence[str]) -> list[Estimate]:
    """Remove parts of the measurements of a block, and return them."""
    own = measured[block.index]
    measured[block.index] = own._replace(parts={key: part for key, part in own.parts.items() if key not in keys})
    return [own.parts[key] for key in keys]


def fold_factors(
    exchange: StatisticsExchange, blocks: Sequence[Block], measured: dict[int, Measured], gate: Tensor | None
) -> None:
    """Update factors with measured parts, with the arguments of :func:`fold_scales`."""
    due = [block for i in sorted(measured) if isinstance(block := blocks[i], FactoredBlock)]
    for some in stacks_of(due, lambda b: _key_of_factors(b, measured[b.index]), _size_of_factors):
        first, parts = some[0], [_take(measured, block, _FACTORS) for block in some]
        batch, fine = dict[str, Estimate](), torch.ones((), dtype=torch.bool, device=first.owner.device)
        for side, found in zip("ag", zip(*parts, strict=True), strict=True):
            total = torch.stack([part.total for part in found])
            batch[side], fine = Estimate(total, found[0].scale), fine & torch.isfinite(total.flatten(1).sum(1))
        ok = fine if gate is None else fine & gate
        weight = first.batch_weight(measured[first.index].examples)
        state = stacked_state(some, _KEPT)
        first.factors.fold(state, first.group, batch, weight, factor_decay(first), ok)
        write_back(some, state)
        exchange.skip(some, (~fine).to(torch.int64))


def fold_scales(
    exchange: StatisticsExchange, blocks: Sequence[EigenbasisBlock], measured: dict[int, Measured], gate: Tensor | None
) -> None:
    """Update scales with measured parts, which are removed from the measurements.

    Args:
        exchange: Counts batches that are not finite.
        blocks: All blocks, by index.
        measured: Measurements by index of the block.
        gate: None, or a 0-dim bool tensor. If it is False, nothing changes.
    """
    due = [blocks[i] for i, m in sorted(measured.items()) if "scale" in m.parts and "scale" in blocks[i].state]
    for some in stacks_of(due, lambda b: _key_of_update(b, b.batch_weight(measured[b.index].examples))):
        weight = some[0].batch_weight(measured[some[0].index].examples)
        parts = [part for block in some for part in _take(measured, block, ("scale",))]
        total = Estimate(torch.stack([part.total * part.scale for part in parts]))
        fine = _update(some, stacked_state(some, _UPDATED), total, weight, gate)
        exchange.skip(some, (~fine).to(torch.int64))


def measure_scales(
    blocks: Sequence[EigenbasisBlock], gradients: Directions, examples: float, ranks: int, gate: Tensor | None
) -> Collection[EigenbasisBlock]:
    """Update scales with the squares of mean gradients.

    Args:
        blocks: Blocks that are due.
        gradients: Gradients by parameter.
        examples: Number of examples that the gradients average.
        ranks: Number of ranks over which a summed loss was averaged.
        gate: None, or a 0-dim bool tensor. If it is False, nothing changes.

    Returns:
        The blocks whose scale was updated.
    """
    done: set[EigenbasisBlock] = set()
    able = [b for b in blocks if all(map(gradients.__contains__, b.params))]
    for some in stacks_of(able, lambda b: _key_of_update(b, square_weights(b, examples, ranks))):
        first, state = some[0], stacked_state(some, _UPDATED)
        bases = first.eigen.basis(state, "a"), first.eigen.basis(state, "g")
        with full_precision(first.owner.device):
            rotated = eigenbasis.rotate(matrices_of(some, gradients), *bases, first.runtime.workspace)
        factor, weight = square_weights(first, examples, ranks)
        _update(some, state, Estimate(rotated.square(), factor), weight, gate)
        for block, own in zip(some, rotated.unbind(), strict=True):
            block.rotated = own if preconditions_gradient(block.group) else None
        done.update(some)
    return done


def _update(
    blocks: list[EigenbasisBlock], state: Mapping[str, Tensor], part: Estimate, weight: float, gate: Tensor | None
) -> Tensor:
    """Update the scales of blocks with squares ``[k, (Γ,) n_g, n_a]``, and return which of these are finite."""
    fine = torch.isfinite(part.total.flatten(1).sum(1))
    blocks[0].fold_scale(state, part, weight, fine if gate is None else fine & gate)
    write_back(blocks, {key: state[key] for key in _CHANGED if key in state})
    return fine


def _fold(
    exchange: StatisticsExchange, blocks: Sequence[Any], measured: dict[int, Measured], gate: Tensor | None
) -> None:
    fold_factors(exchange, blocks, measured, gate)
    fold_scales(exchange, blocks, measured, gate)


#: How blocks with a scale are processed together.
STACK_RULE = StackRule(_read, _precondition, _fold)
