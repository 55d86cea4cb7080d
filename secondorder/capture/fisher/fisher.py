"""Fishers of the model's own predictions: loss curvature is pulled back to the layers in separate backward passes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondorder.capture.fisher.heads import Head
from secondorder.capture.fisher.likelihood import Likelihood, resolve
from secondorder.config import FisherOptions
from secondorder.runtime import Runtime

if TYPE_CHECKING:
    from secondorder.capture.capture import Capture

#: Number of backward passes that the exact Fisher may take for one ``observe``.
_MAX_COLUMNS = 1000


class ModelFisher:
    """Pulls vectors of the loss curvature back to the layers.

    Args:
        options: The Fisher estimate.
        runtime: The values that all parts of the optimizer share.
        most_rows: The largest number of rows of each example that the method can use, or None for no limit.
    """

    def __init__(self, options: FisherOptions, runtime: Runtime, most_rows: int | None = None) -> None:
        self.options, self._runtime, self._most_rows = options, runtime, most_rows
        #: Number of calls of :meth:`observe` since the last step.
        self._observations = 0

    def observe(
        self,
        capture: Capture,
        heads: Sequence[Tensor],
        kinds: Sequence[Likelihood],
        targets: Sequence[Tensor | None],
        *,
        is_sum: bool,
        rank: int | None,
    ) -> None:
        """Estimate the Fisher of the model's own predictions from the outputs of a forward pass.

        Args:
            capture: Capture that has seen the forward pass.
            heads: Outputs of the model, logits ``[N, …]`` of each head.
            kinds: Their likelihoods.
            targets: Targets, which are only used to find entries that the loss ignores.
            is_sum: Whether the loss is a sum over examples.
            rank: This rank among those that read data, if there are several.

        Raises:
            ValueError: If the exact Fisher needs too many passes.
            RuntimeError: If the outputs do not come from a captured forward pass, or their graph was freed.
        """
        waiting = capture.forwards.waiting()  # in a model in parts, the last part returned the outputs
        own = [current.evidence for current in waiting if current.root == waiting[-1].root]
        batches, dim = [evidence.examples or 0 for evidence in own], max((evidence.dim for evidence in own), default=0)
        laid = [Head.of(*head, batches, dim) for head in zip(heads, kinds, targets, strict=True)]
        # The mean over loss terms is taken when all micro-batches are complete. Heads are weighted by their terms.
        terms = [head.terms for head in laid]
        most = torch.stack([t.to(terms[0].device) for t in terms]).max()  # not 0 where any head has terms
        by_head = [
            torch.ones_like(t) if is_sum else torch.where(t > 0, (most.to(t.device) / t.clamp(min=1)).sqrt(), 0)
            for t in terms
        ]
        if self.options.kind == "exact":
            vectors = self._exact_vectors(laid, by_head, self._columns(laid))
        else:
            vectors = self._drawn_vectors(laid, by_head, rank)
        capture.observation.observe(list(heads), vectors, most)
        self._observations += 1

    def end_step(self) -> None:
        """Reset the count of calls."""
        self._observations = 0

    def _drawn_vectors(
        self, heads: Sequence[Head], by_head: Sequence[Tensor], rank: int | None
    ) -> Iterator[list[Tensor]]:
        """Yield random vectors whose second moment is the loss curvature of one example."""
        # Each rank has other examples, whose vectors must differ from those of the examples of other ranks.
        stream = -1 - self._observations
        if rank is not None:
            stream = zlib.crc32(f"observation {self._observations} on rank {rank}".encode())
        device = heads[0].outputs.device
        source = torch.Generator("cpu" if device.type == "meta" else device)  # there is none for shapes alone
        generator = source.manual_seed(self._runtime.seed(stream))
        fisher, samples = self.options.kind, self.options.samples
        for _ in range(samples):
            yield [h.draw(fisher, generator, f / samples**0.5) for h, f in zip(heads, by_head, strict=True)]

    def _columns(self, heads: Sequence[Head]) -> list[int]:
        """Return the number of columns of a square root of the loss curvature, by head."""
        counts = [head.kind.columns(head.outputs) for head in heads]
        if self._most_rows is not None and sum(counts) > self._most_rows:
            raise ValueError(
                f"fisher='exact' would make {sum(counts)} rows of each example, of which HyLo keeps one: use "
                "fisher='mc' or 'curvature_prop'"
            )
        return counts

    def _exact_vectors(
        self, heads: Sequence[Head], by_head: Sequence[Tensor], counts: Sequence[int]
    ) -> Iterator[list[Tensor]]:
        """Yield the columns of a square root of the loss curvature, one head after another."""
        if sum(counts) > _MAX_COLUMNS:
            raise ValueError(
                f"fisher='exact' would take {sum(counts)} backward passes, more than {_MAX_COLUMNS}: use fisher='mc' "
                "or 'curvature_prop', which take one"
            )
        for head, count, factor in zip(heads, counts, by_head, strict=True):
            for column in range(count):
                yield [head.column(column, factor) if other is head else other.nothing() for other in heads]


def resolved(
    outputs: Any, likelihood: Any, targets: Any = None
) -> tuple[list[Tensor], list[Likelihood], list[Tensor | None]]:
    """Return outputs, likelihoods and targets by head, from the arguments of ``observe``.

    Raises:
        ValueError: If a likelihood is unknown, or their number does not match the number of outputs.
        TypeError: If an argument is of the wrong type.
    """
    if not isinstance(outputs, (Tensor, list, tuple)):
        raise TypeError(f"observe takes outputs of the model, a tensor or a sequence of tensors, got {outputs!r}")
    heads: list[Tensor] = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    kinds, given = _one_each(likelihood, len(heads)), _one_each(targets, len(heads))
    if not heads or not all(isinstance(head, Tensor) for head in heads):
        raise TypeError("observe takes the output of the model, a tensor or a sequence of tensors")
    if not len(heads) == len(kinds) == len(given):
        raise ValueError(f"observe: {len(heads)} outputs, {len(kinds)} likelihoods and {len(given)} targets")
    return heads, [resolve(kind) for kind in kinds], given


def _one_each(given: Any, heads: int) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given] * heads
