"""The outputs of a model, arranged by example, from which ``observe`` pulls back the loss curvature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secondorder.capture.fisher.likelihood import Categorical, Likelihood


@dataclass(frozen=True)
class Head:
    """One output of a model whose loss curvature is pulled back, with its examples first.

    Attributes:
        kind: Likelihood.
        outputs: ``[N, …]``, detached.
        targets: Targets in the same layout, or None.
        restore: Function that converts a tensor back to the layout of the model.
    """

    kind: Likelihood
    outputs: Tensor
    targets: Tensor | None
    restore: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls, outputs: Tensor, kind: Likelihood, targets: Tensor | None, batches: Sequence[int], batch_dim: int
    ) -> Head:
        """Return an output arranged by example, since each term of an example needs a separate vector.

        Args:
            outputs: Output as the model returned it.
            kind: Its likelihood.
            targets: Its targets, or None.
            batches: Numbers of examples of the forward passes to which it may belong.
            batch_dim: Dimension of the model's input that counts examples.

        Raises:
            ValueError: If no axis of the output counts the examples.
        """
        plain, shape = outputs.detach(), outputs.shape
        sizes = [size for size in (*batches, sum(batches)) if size]
        if batch_dim == 1 and outputs.dim() > 2 and shape[1] in sizes:
            swapped = targets.transpose(0, 1) if targets is not None and targets.dim() > 1 else targets
            return cls(kind, plain.transpose(0, 1), swapped, lambda v: v.transpose(0, 1))
        if not sizes or (outputs.dim() > 0 and shape[0] in sizes):
            return cls(kind, plain, targets, lambda v: v)
        if batch_dim == 1 and outputs.dim() == 2:
            raise ValueError(
                f"observe: outputs of shape {tuple(shape)} do not say which rows belong to each of {sizes[-1]} "
                "examples; pass them as [S, N, C]"
            )
        examples = next((size for size in sizes if outputs.dim() > 0 and shape[0] % size == 0), None)
        if examples is None:
            raise ValueError(f"observe: outputs of shape {tuple(shape)} do not split into {sizes[-1]} examples")
        if isinstance(kind, Categorical) and outputs.dim() == 2:
            kind = replace(kind, class_dim=-1)
        if targets is not None:
            targets = targets.unflatten(0, (examples, -1))
        return cls(kind, plain.unflatten(0, (examples, -1)), targets, lambda v: v.flatten(0, 1))

    @property
    def terms(self) -> Tensor:
        """Number of loss terms in the output, 0-dim float64."""
        found = self.kind.terms(self.outputs, self.targets)
        if isinstance(found, Tensor):
            return found.to(self.outputs.device, torch.float64)
        return torch.full((), found, dtype=torch.float64, device=self.outputs.device)

    def draw(self, fisher: str, generator: torch.Generator, factor: Tensor) -> Tensor:
        """Return a random vector of unit scale times a factor, sampled (``"mc"``) or of random signs."""
        sample = self.kind.sample if fisher == "mc" else self.kind.rademacher
        return self._scaled(sample(self.outputs, self.targets, generator), factor)

    def column(self, index: int, factor: Tensor) -> Tensor:
        """Return a column of the square root of the curvature, times a factor."""
        return self._scaled(self.kind.column(self.outputs, self.targets, index), factor)

    def nothing(self) -> Tensor:
        """Return zeros."""
        return self.restore(torch.zeros_like(self.outputs))

    def _scaled(self, vector: Tensor, factor: Tensor) -> Tensor:
        return self.restore((vector * factor.to(vector.device)).to(vector.dtype))
