"""Meetings of all ranks: a barrier that names the missing ranks, and the error if the first meeting fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

#: Number of barriers so far, by the store of the default group. A new group starts again from zero.
_barriers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def attempt() -> str:
    """Return a prefix for keys of the default store, which restarted ranks may share with the previous attempt."""
    # This applies only if torchrun shares its store with the ranks: otherwise, agents may count restarts differently.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"


def meet(what: str, timeout: timedelta | None = None) -> None:
    """Wait until all ranks of the default group have called this. Without a group, return at once.

    A collective that only some ranks enter may be matched with a different collective of the other ranks, which aborts
    the process with some backends and mixes up the data with others. Keys in the store of the group are unambiguous.

    Args:
        what: The function that all ranks must call, which must be the same text on all of them.
        timeout: How long to wait. If None, it is the timeout of the default group.

    Raises:
        RuntimeError: If not all ranks call this in time. The message names those that did.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if dist.get_backend() == "fake":  # torch's placeholder for ranks that do not exist
        return
    default: Any = distributed_c10d._get_default_store()
    number = _barriers.get(default, 0)
    store = distributed_c10d.PrefixStore(f"secondorder/{attempt()}/meeting {number}/{what}", default)
    rank, world = dist.get_rank(), dist.get_world_size()
    patience = default.timeout if timeout is None else timeout
    store.set(str(rank), "")
    try:
        store.wait([str(other) for other in range(world)], patience)
    except RuntimeError as error:
        came = [other for other in range(world) if store.check([str(other)])]
        store.delete_key(str(rank))  # so that a second attempt counts as a new one
        raise RuntimeError(
            f"{what} must be called on all ranks at the same time: within {patience.total_seconds():g} s "
            f"{_named(came)} of {world} came"
        ) from error
    _barriers[default] = number + 1


@contextmanager
def first_meeting(rank: int, world: int) -> Iterator[None]:
    """Explain an error of the ``with`` block, in which an optimizer creates groups, if only this rank may have it.

    Raises:
        RuntimeError: If messages of the block fail or time out.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's errors of stores, backends and connections are RuntimeErrors
        raise RuntimeError(
            f"rank {rank} could not meet all {world} ranks ({error}). Every rank of the process group must construct "
            "the optimizer, at the same place of the program."
        ) from error


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"only rank {shown}" if len(ranks) == 1 else f"only ranks {shown}"
