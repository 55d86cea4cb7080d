"""Fishers of the model's own predictions: loss curvature pulled back to the layers by passes of their own."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.capture.fisher.heads import Head
from secondorder.capture.fisher.likelihood import Likelihood, resolve
from secondorder.capture.sites import Captured
from secondorder.curvature.layer import forwarded
from secondorder.preconditioners.layers import LayerPreconditioner

#: Backward passes that the exact Fisher may take for one ``observe``.
_MAX_COLUMNS = 1000


class Observing(LayerPreconditioner):
    """A layer method with a choice of Fishers."""

    #: Calls of `observe` since the last step.
    _observations = 0

    def hook(self) -> None:
        """Hook the layers of the blocks."""
        super().hook()
        assert self._capture is not None
        self._capture.observes = self._fisher.is_observed

    def observe(
        self,
        outputs: Tensor | Sequence[Tensor],
        likelihood: str | Likelihood | Sequence[str | Likelihood],
        targets: Tensor | None | Sequence[Tensor | None] = None,
    ) -> None:
        """Estimate the Fisher of the model's own predictions, for ``fisher`` other than ``"empirical"``.

        To be called between the forward and ``loss.backward()``, for every micro-batch. It pulls vectors of the loss
        curvature back to the layers in passes of its own, which leave ``.grad``, the graph and the random state of
        the program as they were. Where the Fisher needs no such pass, or nothing is due, it does nothing.

        Args:
            outputs: What the model returned, logits ``[N, …]``; a sequence for a model with several heads.
            likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` (a summed squared error) or an object, such
                as ``Categorical(class_dim=1)``; one per head.
            targets: Only to find entries that the loss ignores; one per head.

        Raises:
            ValueError: If a likelihood is unknown, or the exact Fisher needs too many passes.
            TypeError: If an argument is of a wrong kind.
            RuntimeError: If the outputs do not come from a forward that was captured, or their graph is gone.
        """
        if not isinstance(outputs, (Tensor, list, tuple)):
            raise TypeError(f"observe takes outputs of the model, a tensor or a sequence of them, got {outputs!r}")
        heads: list[Tensor] = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        kinds, given = _one_each(likelihood, len(heads)), _one_each(targets, len(heads))
        if not heads or not all(isinstance(head, Tensor) for head in heads):
            raise TypeError("observe takes the output of the model, a tensor or a sequence of tensors")
        if not len(heads) == len(kinds) == len(given):
            raise ValueError(f"observe: {len(heads)} outputs, {len(kinds)} likelihoods and {len(given)} targets")
        resolved = [resolve(kind) for kind in kinds]
        if not self._fisher.is_observed:
            return
        capture = self.capture
        if capture.is_paused or not capture.due or not self._trains():
            return
        waiting = capture.observable()  # of a model in parts, the last one returned the outputs
        batches = [current.examples or 0 for current in waiting if current.root == waiting[-1].root]
        batch_dim = self._layer_options.batch_dim
        laid = [Head.of(*head, batches, batch_dim) for head in zip(heads, resolved, given, strict=True)]
        # The mean over loss terms is taken when all micro-batches are there; heads weigh by their own numbers of terms.
        terms = [head.terms for head in laid]
        most = torch.stack([t.to(terms[0].device) for t in terms]).max()  # not 0 where any head has terms
        by_head = [
            torch.ones_like(t) if self._is_sum() else torch.where(t > 0, (most.to(t.device) / t.clamp(min=1)).sqrt(), 0)
            for t in terms
        ]
        draw = self._exact_vectors if self._fisher.fisher == "exact" else self._drawn_vectors
        capture.observe(heads, draw(laid, by_head), most)
        self._observations += 1

    def _trains(self) -> bool:
        root = self.table.root
        return root is None or any(part.training for part in forwarded(root))

    def _is_sum(self) -> bool:
        return bool(self.param_groups[0]["loss_reduction"] == "sum")

    def _drawn_vectors(self, heads: Sequence[Head], by_head: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Random vectors whose second moment is the loss curvature of one example."""
        # Each rank has other examples, whose vectors must not be those of the examples of another.
        stream = -1 - self._observations
        if self.comm.combines:
            stream = zlib.crc32(f"observation {self._observations} on rank {self.comm.data_rank}".encode())
        generator = torch.Generator(heads[0].outputs.device).manual_seed(self._runtime.seed(stream))
        samples = self._fisher.fisher_samples
        for _ in range(samples):
            yield [
                h.draw(self._fisher.fisher, generator, f / samples**0.5) for h, f in zip(heads, by_head, strict=True)
            ]

    def _exact_vectors(self, heads: Sequence[Head], by_head: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Columns of a square root of the loss curvature, those of one head after those of another."""
        counts = [head.kind.columns(head.outputs) for head in heads]
        if sum(counts) > _MAX_COLUMNS:
            raise ValueError(
                f"fisher='exact' would take {sum(counts)} backward passes, more than {_MAX_COLUMNS}: use fisher='mc' "
                "or 'curvature_prop', which take one"
            )
        for head, count, factor in zip(heads, counts, by_head, strict=True):
            for column in range(count):
                yield [head.column(column, factor) if other is head else other.nothing() for other in heads]

    def reduce(self, statistics: Captured) -> Captured:
        if statistics.terms is not None:
            self._runtime.observed_terms = statistics.terms
        return super().reduce(statistics)

    def end_step(self) -> None:
        """Prepare for the coming step."""
        self._observations = 0
        super().end_step()


def _one_each(given: Any, heads: int) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given] * heads
