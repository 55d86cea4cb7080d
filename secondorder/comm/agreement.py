"""A check that all ranks mean the same, before the first message whose size depends on it.

Texts are compared by digests of fixed size: nothing of another rank is unpickled, and a difference, which would end
a collective of unequal sizes with an abort of the process, is told by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.comm.collectives import Collectives

#: Facts that are compared, at the most.
_MOST = 16


def digest(text: str) -> int:
    """A number of 63 bits for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def fingerprint(tensor: Tensor) -> str:
    """The bits of a tensor in few letters."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()


def require_equal(collectives: Collectives, facts: Mapping[str, Sequence[str]], group: Any) -> None:
    """Compare facts over the ranks of a group; collective.

    Args:
        collectives: Sends the digests.
        facts: Texts by what they are about; the same names in the same order on every rank.
        group: The ranks.

    Raises:
        ValueError: On every rank, if a text differs, naming the first that does.
    """
    heads = [[len(texts), digest("\n".join(texts))] for texts in facts.values()]
    heads += [[0, 0]] * (_MOST - len(heads))  # of one size, even where optimizers of two families have other facts
    told = _gathered(collectives, torch.tensor(heads, dtype=torch.int64), group)
    for i, (name, texts) in enumerate(facts.items()):
        differing = (told[:, i] != told[0, i]).any(-1)
        if differing.any():
            other = int(differing.long().argmax())
            raise ValueError(_difference(collectives, name, texts, told[:, i, 0], other, group))


def _difference(
    collectives: Collectives, name: str, texts: Sequence[str], counts: Tensor, other: int, group: Any
) -> str:
    """In words, the first entry in which some rank differs from rank 0."""
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
    """``[ranks, ...]`` on the CPU."""
    (found,) = collectives.all_gather([values.to(collectives.device)], group=group, stage="agreement").wait()
    return found.cpu()  # type: ignore[no-any-return]
