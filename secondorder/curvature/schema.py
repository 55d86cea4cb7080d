"""What a state holds, by key: shape and dtype, kind, place and symmetry of every tensor, each stated once.

::

    catalog      key ─► what is the same in every state       kind, place, what a checkpoint may be without
    schema       key ─► that, and what one layer makes of it  shape and dtype, symmetry

Allocation, ``memory_usage()``, plans, checkpoints and messages between ranks are queries of it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from secondorder.curvature.window.shards import plain


class Place(Enum):
    """Ranks that have a tensor of the state of a block or a window; numbers are on all of them."""

    #: Those that hold its running estimate.
    ESTIMATE = "estimate"
    #: Those that precondition with it.
    CURVATURE = "curvature"
    #: Those that capture it or precondition with it.
    MEASURED = "measured"
    #: All of them, with the same in it.
    EVERYWHERE = "everywhere"
    #: All of them, each with its own.
    OWN = "own"


class Entry(NamedTuple):
    """What a state has under one key.

    Attributes:
        like: A ``meta`` tensor for what is allocated as zeros, or the first value of a number; in a catalog 0.
        kind: What ``memory_usage()`` counts it as.
        place: The ranks that have it.
        symmetric: Whether it is made of symmetric matrices, whose triangles are all that ranks send.
        derived: Whether it is found again from the running estimate: ``checkpoint_curvature="factors"`` leaves it out.
        known: Whether every rank that has it finds it by itself, so that it does not travel after a refresh.
        optional: Whether a checkpoint need not have it.
        always: Whether it is no curvature, and in every checkpoint whatever ``checkpoint_curvature`` is.
    """

    like: Tensor | int
    kind: str
    place: Place
    symmetric: bool = False
    derived: bool = False
    known: bool = False
    optional: bool = False
    always: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, 0 for a number."""
        return self.like.numel() * self.like.element_size() if isinstance(self.like, Tensor) else 0

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the tensor, None for a number."""
        return tuple(self.like.shape) if isinstance(self.like, Tensor) else None

    def may_lack(self, kept: str) -> bool:
        """Whether a checkpoint may be without it, ``checkpoint_curvature`` being ``kept``."""
        return not self.always and (self.optional or kept == "none" or (kept == "factors" and self.derived))


Schema = dict[str, Entry]

#: A running estimate, its weight, what a refresh finds from it, and what every rank counts by itself.
ESTIMATE = Entry(0, "factors", Place.ESTIMATE)
WEIGHT = Entry(0, "buffers", Place.ESTIMATE)
FOUND = Entry(0, "second_order", Place.CURVATURE, derived=True)
COUNTER = Entry(0, "buffers", Place.EVERYWHERE)

#: What the state of every block with a running mean has: its weight, and how often it was updated and refreshed.
COUNTERS: Schema = {
    "factor_weight": WEIGHT._replace(like=torch.empty((), dtype=torch.float64, device="meta")),
    "factor_updates": COUNTER,
    "refreshes": COUNTER,
}


def shaped(catalog: Mapping[str, Entry], likes: Mapping[str, Tensor | int], symmetric: Container[str] = ()) -> Schema:
    """Entries of a catalog as one state has them.

    Args:
        catalog: What is the same in every state.
        likes: A ``meta`` tensor or the first value of a number, by key.
        symmetric: Keys of the tensors that are symmetric matrices.

    Returns:
        The schema, in the order of ``likes``.
    """
    return {key: catalog[key]._replace(like=like, symmetric=key in symmetric) for key, like in likes.items()}


def likes(schema: Schema) -> dict[str, Tensor | int]:
    """What a state begins with, by key."""
    return {key: entry.like for key, entry in schema.items()}


def tensors(schema: Schema) -> dict[str, Tensor]:
    """``meta`` tensors by key, without the numbers."""
    return {key: entry.like for key, entry in schema.items() if isinstance(entry.like, Tensor)}


def held(schema: Schema, places: Container[Place]) -> Schema:
    """What a rank has that is at some places: the tensors of these, and all numbers."""
    return {k: entry for k, entry in schema.items() if not isinstance(entry.like, Tensor) or entry.place in places}


def keys(schema: Schema, place: Place, *, known: bool = True) -> list[str]:
    """Tensors at a place, sorted: a loaded state may have another order on each rank.

    Args:
        schema: Of a block.
        place: The place.
        known: Whether those too that every rank there finds by itself.

    Returns:
        Their keys.
    """
    return sorted(k for k in tensors(schema) if schema[k].place is place and (known or not schema[k].known))


def known(catalog: Mapping[str, Entry], key: str) -> Entry | None:
    """What is known of a state key, whose tensor may be a part of a window; None if it is no curvature."""
    return catalog.get(plain(key))


def kinds(schema: Mapping[str, Entry]) -> list[str]:
    """What ``memory_usage()`` counts entries as, each once."""
    return list(dict.fromkeys(entry.kind for entry in schema.values()))


def of_kinds(schema: Mapping[str, Entry], *wanted: str) -> set[str]:
    """Keys of the entries of some kinds."""
    return {key for key, entry in schema.items() if entry.kind in wanted}


def nbytes(schema: Schema) -> dict[str, int]:
    """Bytes by kind."""
    found = dict.fromkeys((entry.kind for entry in schema.values()), 0)
    for entry in schema.values():
        found[entry.kind] += entry.nbytes
    return found
