"""Checks that all ranks agree, before the first message whose size depends on it.

Texts are compared by digests of fixed size, so nothing from another rank is unpickled. A difference is reported by
name; otherwise, it could abort the process in a collective with unequal sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.comm.collectives import Collectives

#: The largest number of facts that can be compared.
_MOST = 16


def digest(text: str) -> int:
    """Return a number of 63 bits for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def fingerprint(tensor: Tensor) -> str:
    """Return a short text that identifies the bits of a tensor."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()


def require_equal(collectives: Collectives, facts: Mapping[str, Sequence[str]], group: Any) -> None:
    """Compare facts over the ranks of a group; this is a collective.

    Args:
        collectives: The collectives that send the digests.
        facts: Texts by their subject. Every rank passes the same names in the same order.
        group: The ranks to compare.

    Raises:
        ValueError: On every rank, if a text differs. The message names the first one.
    """
    heads = [[len(texts), digest("\n".join(texts))] for texts in facts.values()]
    # The size is fixed, even if optimizers of two families have different facts.
    heads += [[0, 0]] * (_MOST - len(heads))
    gathered = _gathered(collectives, torch.tensor(heads, dtype=torch.int64), group)
    for i, (name, texts) in enumerate(facts.items()):
        differing = (gathered[:, i] != gathered[0, i]).any(-1)
        if differing.any():
            other = int(differing.long().argmax())
            raise ValueError(_difference(collectives, name, texts, gathered[:, i, 0], other, group))


def _difference(
    collectives: Collectives, name: str, texts: Sequence[str], counts: Tensor, other: int, group: Any
) -> str:
    """Describe the first entry in which some rank differs from rank 0."""
    longest = int(counts.max())
    own = [digest(text) for text in texts] + [-1] * (longest - len(texts))
    digests = _gathered(collectives, torch.tensor(own, dtype=torch.int64), group)
    entries = (digests[other] != digests[0]).long()
    place = int(entries.argmax())
    here = texts[place] if place < len(texts) else "nothing"
    first, second = int(counts[0]), int(counts[other])
    sizes = "" if first == second else f" (rank 0 has {first} of them, rank {other} {second})"
    return (
        f"the optimizers of rank 0 and rank {other} differ in {name}{sizes}; this rank has {here!r} there. All ranks "
        "must build the same model and the same optimizer."
    )


def _gathered(collectives: Collectives, values: Tensor, group: Any) -> Tensor:
    """Gather a vector from all ranks as ``[ranks, ...]`` on the CPU."""
    (found,) = collectives.all_gather([values.to(collectives.device)], group=group, stage="agreement").wait()
    return found.cpu()  # type: ignore[no-any-return]
