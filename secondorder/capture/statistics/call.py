"""One use of a layer in a forward pass, as seen by its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from secondorder.capture.layers.adapter import Adapter

#: A sum counts as a rounding error if its norm, divided by that of all its terms, is at most so many units in the last
#: place, and at most this share. At the keys of attention, it is up to 150 units (0.02 in half precision), the more the
#: softmax is saturated; other sums are about as large as their terms.
_ERROR, _LARGEST_ERROR = 4096, 0.05


class Call(NamedTuple):
    """A use of a layer, with the gradient at its output.

    Attributes:
        x: The tensor that the adapter prepared from the layer's input; None if it needs none.
        g: Gradient of the accumulated objective at the layer output.
        adapter: Adapter of the called module. Another module that shares its weight may have another one.
        unscale: Factor that converts g to the gradient of the objective (the reciprocal of a loss scale), or None.
        keep: 1 for real and 0 for padded rows, shaped like the leading dimensions of ``g``, or None.
        part: Which of the Γ blocks the call fills; -1 for all.
        again: Whether the input was already added (another vector pushed back through the same forward pass).
        shared: Whether its rows belong to the whole batch instead of to examples.
        unclear: Whether it is unclear which of its first two dimensions counts examples.
    """

    x: Tensor | None
    g: Tensor
    adapter: Adapter
    unscale: Tensor | None = None
    keep: Tensor | None = None
    part: int = -1
    again: bool = False
    shared: bool = False
    unclear: bool = False

    @property
    def own(self) -> Adapter:
        """The adapter of the blocks that the call fills."""
        return self.adapter.of_part(self.part)

    def as_computed(self) -> Call:
        """The call with its input in the dtype of its output, to which autocast converts the input of a layer."""
        x = self.x
        return self._replace(x=x.to(self.g.dtype)) if x is not None and x.is_floating_point() else self

    def require_examples(self) -> None:
        """Raise a ``ValueError`` if rows belong to no example, or it is unclear to which."""
        if self.unclear:
            raise ValueError(
                f"its values of shape {tuple(self.g.shape)} may have the examples of the batch in their second "
                "dimension or several rows of each in the first: another batch size avoids this ambiguity"
            )
        if self.shared:
            raise ValueError(
                f"its {len(self.g)} rows may be shared by the whole batch, so they do not belong to single examples"
            )

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """``g`` unscaled and without padded rows, in the precision of the factor."""
        g = self.g.to(dtype)  # before any product, because the square of a scaled gradient would overflow float16
        if self.unscale is not None:
            g = g * self.unscale.to(g.device, dtype)
        if self.keep is None:
            return g
        keep = self.keep.reshape(*self.keep.shape, *[1] * (g.dim() - self.keep.dim()))
        return torch.where(keep, g, 0.0)

    def output_sums(self, dtype: torch.dtype, examples: int) -> Tensor:
        """Return ``Σ_s g [(Γ,) n, d_o]`` over the positions of each example, or 0 if it is only a rounding error of 0.

        A softmax ignores what all of its inputs have in common, so gradients at the keys of attention sum to 0.
        """
        own, g = self.own, self.gradient(dtype)
        sums = own.output_sums(g, self.x, examples)
        if own.sums_may_vanish and sums.numel() < g.numel():
            size = torch.linalg.vector_norm(g.unflatten(-1, (own.groups, -1)), dim=(*range(g.dim() - 1), -1))
            error = min(_ERROR * torch.finfo(self.g.dtype).eps, _LARGEST_ERROR)
            found = torch.linalg.vector_norm(sums, dim=(-2, -1), keepdim=True)
            sums = sums * (found > error * size.view_as(found))
        return self.whole(sums)

    def whole(self, values: Tensor) -> Tensor:
        """Values ``[N, …]`` of the one block that the call fills among those of all Γ, ``[Γ, N, …]``."""
        if self.part < 0:
            return values
        full = values.new_zeros(self.adapter.groups, *values.shape)
        full[self.part] = values
        return full
