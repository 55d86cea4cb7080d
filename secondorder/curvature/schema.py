"""The content of a state by key: shape and dtype, kind, place and symmetry of every tensor, each defined once.

::

    catalog      key ─► properties that all states share      kind, place, whether a checkpoint may lack it
    schema       key ─► these and properties of the layer     shape and dtype, symmetry

Allocation, ``memory_usage()``, plans, checkpoints and messages between ranks all follow the schema.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.curvature.window.shards import base_key


class Place(Enum):
    """The ranks that store a tensor of the state of a block or a window. Numbers are stored on all ranks."""

    #: The ranks that store the running estimate.
    ESTIMATE = "estimate"
    #: The ranks that precondition with the tensor.
    CURVATURE = "curvature"
    #: The ranks that capture the tensor or precondition with it.
    MEASURED = "measured"
    #: All ranks, with equal values.
    EVERYWHERE = "everywhere"
    #: All ranks, each with separate values.
    OWN = "own"


class Entry(NamedTuple):
    """Description of one key of a state.

    Attributes:
        like: A ``meta`` tensor like the one to allocate, or the initial value of a number. In a catalog it is 0.
        kind: Category under which ``memory_usage()`` counts the entry.
        place: The ranks that store the tensor.
        symmetric: Whether the tensor consists of symmetric matrices, of which only triangles are sent.
        derived: Whether it can be recomputed from the running estimate; ``checkpoint_curvature="factors"`` omits it.
        known: Whether every rank that stores the tensor computes it, so that it is not sent after a refresh.
        optional: Whether a checkpoint may lack the entry.
        always: Whether every checkpoint has the entry for all values of ``checkpoint_curvature``.
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
    def is_curvature(self) -> bool:
        """Whether it is an estimate or the result of a refresh, and neither a counter nor momentum."""
        return self.kind not in ("buffers", "momentum")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, 0 for a number."""
        return self.like.numel() * self.like.element_size() if isinstance(self.like, Tensor) else 0

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the tensor, None for a number."""
        return tuple(self.like.shape) if isinstance(self.like, Tensor) else None

    def may_lack(self, kept: str) -> bool:
        """Whether a checkpoint that was saved with ``checkpoint_curvature=kept`` may lack this entry."""
        return not self.always and (self.optional or kept == "none" or (kept == "factors" and self.derived))


Schema = dict[str, Entry]

#: Entries for a running estimate, its weight, the results of a refresh, and counters, which every rank maintains.
ESTIMATE = Entry(0, "factors", Place.ESTIMATE)
WEIGHT = Entry(0, "buffers", Place.ESTIMATE)
FOUND = Entry(0, "second_order", Place.CURVATURE, derived=True)
COUNTER = Entry(0, "buffers", Place.EVERYWHERE)

#: Entries of every block with a running mean: its weight, and the numbers of its updates and refreshes.
COUNTERS: Schema = {
    "factor_weight": WEIGHT._replace(like=torch.empty((), dtype=torch.float64, device="meta")),
    "factor_updates": COUNTER,
    "refreshes": COUNTER,
}


def shaped(catalog: Mapping[str, Entry], likes: Mapping[str, Tensor | int], symmetric: Container[str] = ()) -> Schema:
    """Return entries of a catalog with the tensors of one state, in the order of ``likes``.

    Args:
        catalog: The properties that all states share.
        likes: By key, a ``meta`` tensor or the initial value of a number.
        symmetric: Keys of the tensors that are symmetric matrices.
    """
    return {key: catalog[key]._replace(like=like, symmetric=key in symmetric) for key, like in likes.items()}


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor, and None for anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def likes(schema: Schema) -> dict[str, Tensor | int]:
    """Return the initial contents of a state by key."""
    return {key: entry.like for key, entry in schema.items()}


def tensors(schema: Schema) -> dict[str, Tensor]:
    """Return the ``meta`` tensors by key, without the numbers."""
    return {key: entry.like for key, entry in schema.items() if isinstance(entry.like, Tensor)}


def stored_at(schema: Schema, places: Container[Place]) -> Schema:
    """Return the entries of a rank at some places: the tensors of these places, and all numbers."""
    return {k: entry for k, entry in schema.items() if not isinstance(entry.like, Tensor) or entry.place in places}


def keys(schema: Schema, place: Place, *, known: bool = True) -> list[str]:
    """Return the sorted keys of the tensors at a place, since the order of a loaded state may differ between ranks.

    Tensors that every rank of the place computes itself are included if ``known``.
    """
    return sorted(k for k in tensors(schema) if schema[k].place is place and (known or not schema[k].known))


def known(catalog: Mapping[str, Entry], key: str) -> Entry | None:
    """Return the entry of a state key, which may name a part of a window; None if it is not curvature."""
    return catalog.get(base_key(key))


def kinds(schema: Mapping[str, Entry]) -> list[str]:
    """Return the kinds of the entries, each once."""
    return list(dict.fromkeys(entry.kind for entry in schema.values()))


def of_kinds(schema: Mapping[str, Entry], *wanted: str) -> set[str]:
    """Return the keys of the entries of some kinds."""
    return {key for key, entry in schema.items() if entry.kind in wanted}


def nbytes(schema: Schema) -> dict[str, int]:
    """Return the number of bytes by kind."""
    found = dict.fromkeys((entry.kind for entry in schema.values()), 0)
    for entry in schema.values():
        found[entry.kind] += entry.nbytes
    return found
