"""One forward pass of a model: how many examples it has, and how its layers lay them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from secondorder.curvature.kronecker import Call
from secondorder.curvature.layers import Adapter
from secondorder.curvature.taps import Seen


@dataclass
class _Layouts:
    """What the layers of a pass tell of their inputs.

    Attributes:
        sequences: Length and number of the sequences that attention saw.
        lengths: Of the second axes of inputs with the examples first.
        one_sequence: Whether attention saw the input to the model as one sequence.
        many_sequences: Whether it saw as many sequences as there would be examples.
        one_input: Whether another layer saw an input without a batch.
        many_inputs: Whether one saw as many inputs as there would be examples.
    """

    sequences: set[tuple[int, int]] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    one_sequence: bool = False
    many_sequences: bool = False
    one_input: bool = False
    many_inputs: bool = False

    @property
    def is_one_example(self) -> bool:
        """Whether the whole model has an input without a batch, and nothing speaks against it."""
        alone = self.one_sequence and not self.many_sequences
        return alone or (self.one_input and not self.many_inputs)


class Pass:
    """One forward of a root module.

    Args:
        shape: Shape of the first input tensor.
        batch_dim: The dimension that counts examples.
        keep: ``[N, S]``, True for real and False for padded positions, or None.
        holds_indices: Whether the first input is of integers.
        root: Number of the root module.

    Attributes:
        examples: N, or None if it could not be read (then each layer counts its own).
        edges: Where the gradients of layer outputs can be asked for, if they are to be observed.
    """

    def __init__(
        self,
        shape: torch.Size,
        batch_dim: int,
        keep: Tensor | None = None,
        holds_indices: bool = False,
        root: int = 0,
    ) -> None:
        self.examples = shape[batch_dim] if -len(shape) <= batch_dim < len(shape) else None
        self._counted_by_input = self.examples
        self._layouts = _Layouts()
        self.keep, self.root = keep, root
        self.counted = False
        self._shape, self._batch_dim = shape, batch_dim
        self._holds_indices = holds_indices
        #: Weak references to the outputs of the model.
        self.outputs: list[Callable[[], object | None]] = []
        self.calls: dict[int, int] = {}
        self.fired: dict[int, list[Call]] = {}
        self.done: dict[int, int] = {}
        self.edges: list[tuple[GradientEdge, Seen]] = []
        self.observed = False

    def join(self, other: Pass) -> None:
        """Belong to the same batch as the forward of another root: a layer may be used by both."""
        self.calls, self.fired, self.done = other.calls, other.fired, other.done

    def see(self, index: int, adapter: Adapter, x: Tensor) -> None:
        """Note a call of a layer; an unbatched input to the whole model is one example."""
        self.calls[index] = self.calls.get(index, 0) + 1
        n, seen, axes = self._counted_by_input, self._layouts, adapter.sequence_axes(x)
        if axes is not None:
            seen.sequences.add((x.shape[axes[1]], x.shape[axes[0]]))
            # Words of several examples are indices [N, T], so they are never [T, d] of one.
            alone = x.shape[axes[0]] == 1 and len(self._shape) == x.dim() - 1 and not self._holds_indices
            seen.one_sequence |= alone
            seen.many_sequences |= x.shape[axes[0]] == n
        elif x.dim() == len(self._shape) and adapter.is_unbatched(x):
            seen.one_sequence |= adapter.sequence_axes(x[None]) is not None
            seen.one_input |= adapter.sequence_axes(x[None]) is None
        elif x.dim() and len(x) == n:
            seen.many_inputs = True
            if not adapter.one_hot and x.dim() > 1 + adapter.feature_axes:
                seen.lengths.add(x.shape[1])
        self.examples = 1 if seen.is_one_example else n

    def is_unclear(self, g: Tensor, adapter: Adapter) -> bool:
        """Whether an output ``[kN, N, …]`` may be rows of N examples as well as have the examples second."""
        n = self.examples
        if n is None or n < 2 or self._batch_dim == 1 or adapter.channels_first:
            return False
        lead = g.shape[: g.dim() - adapter.feature_axes]
        if adapter.sequence_axes(g) is not None or len(lead) < 2 or lead[1] != n or lead[0] == n or lead[0] % n:
            return False
        positions = lead[0]
        as_long_as_input = (
            len(self._shape) > 1 and positions == self._shape[1] and positions not in self._layouts.lengths
        )
        return not as_long_as_input and (positions, n) not in self._layouts.sequences

    def lay_out(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> tuple[Tensor | None, Tensor]:
        """Input and output gradient with examples first, where the model has them second."""
        if self._batch_dim != 1 or adapter.sequence_axes(g) is not None:
            return x, g
        if adapter.channels_first:
            flat = len(g) == self._shape[0] * self._shape[1] and (x is None or len(x) == len(g))
            return (x if x is None else self._examples_first(x), self._examples_first(g)) if flat else (x, g)
        if g.dim() > 2 and g.shape[1] == self.examples:
            return x if x is None else x.transpose(0, 1), g.transpose(0, 1)
        if g.dim() == 2 and len(g) == self._shape[0] * self._shape[1] and (x is None or len(x) == len(g)):
            two = self._shape[:2]
            return x if x is None else x.unflatten(0, two).transpose(0, 1), g.unflatten(0, two).transpose(0, 1)
        return x, g

    def _examples_first(self, x: Tensor) -> Tensor:
        """Rows flattened from (position, example) as rows flattened from (example, position)."""
        rows: Tensor = x.unflatten(0, self._shape[:2])
        return rows.transpose(0, 1).flatten(0, 1)

    @property
    def is_dropped(self) -> bool:
        """Whether all outputs are gone while the pass still waits to be observed."""
        return bool(self.edges and self.outputs) and all(output() is None for output in self.outputs)

    def is_shared(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> bool:
        """Whether a table is looked up once for the whole batch: one row per position, none per example."""
        single = adapter.one_hot and x is not None and x.dim() == 1
        if not single or len(self._shape) < 2 or not self.examples:
            return False
        positions = self._shape[1 - self._batch_dim]
        if len(g) != positions or self.examples == 1:
            return False
        # As many positions as examples: nobody can tell, where the input is one of positions at all.
        return len(g) != self.examples or len(self._shape) == 3 or (len(self._shape) == 2 and self._holds_indices)

    def mask_for(self, g: Tensor, adapter: Adapter) -> Tensor | None:
        """``keep`` shaped like the leading dimensions of a gradient, if its positions are those of the mask."""
        keep = self.keep
        if keep is None:
            return None
        if adapter.channels_first:
            return None  # its second axis counts channels
        if g.dim() > 2 and adapter.sequence_axes(g) is None and g.shape[:2] == keep.shape:
            return keep
        if g.dim() > 2 and g.shape[:2] == keep.shape[::-1]:
            return keep.T
        return keep.reshape(-1) if g.dim() == 2 and len(g) == keep.numel() else None
