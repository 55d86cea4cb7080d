"""One forward pass of a model: how many examples it has, and how its layers lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from secondorder.curvature.kronecker import Call
from secondorder.curvature.layers import Adapter
from secondorder.curvature.taps import Seen


def order_of(roots: Iterable[nn.Module]) -> str | None:
    """Where attention and recurrent layers of some modules want the examples, ``"first"`` or ``"second"``.

    Returns:
        That, or None if they do not agree, or there is none.
    """
    told = (getattr(module, "batch_first", None) for root in roots for module in root.modules())
    known = {value for value in told if isinstance(value, bool)}
    return None if len(known) != 1 else "first" if known.pop() else "second"


@dataclass
class _Layouts:
    """What the layers of a pass tell of their inputs.

    Attributes:
        sequences: Length and number of the sequences that attention saw.
        lengths: Of the second axes of inputs with the examples first.
        one_sequence: Whether attention saw one sequence, as if the input to the model had no batch.
        input_as_one: Whether that is as long as the input to the model, or by a class token longer.
        many_sequences: Whether it saw as many sequences as there would be examples.
        one_input: Whether another layer saw an input without a batch.
        many_inputs: Whether one saw as many inputs as there would be examples.
    """

    sequences: set[tuple[int, int]] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    one_sequence: bool = False
    input_as_one: bool = False
    many_sequences: bool = False
    one_input: bool = False
    many_inputs: bool = False

    @property
    def is_one_example(self) -> bool:
        """Whether the whole model has an input without a batch, and nothing speaks against it."""
        alone = self.one_sequence and not self.many_sequences and (self.input_as_one or not self.many_inputs)
        return alone or (self.one_input and not self.many_inputs)


class Pass:
    """One forward of a root module.

    Args:
        shape: Shape of the first input tensor.
        batch_dim: The dimension that counts examples.
        keep: ``[N, S]``, True for real and False for padded positions, or None.
        holds_indices: Whether the first input is of integers.
        root: Number of the root module.
        order: What :func:`order_of` says of the model.

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
        order: str | None = None,
    ) -> None:
        self.examples = shape[batch_dim] if -len(shape) <= batch_dim < len(shape) else None
        self._counted_by_input = self.examples
        self._layouts, self._order = _Layouts(), order
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
            length, count = x.shape[axes[1]], x.shape[axes[0]]
            seen.sequences.add((length, count))
            # Words of several examples are indices [N, T], so they are never [T, d] of one.
            alone = count == 1 and len(self._shape) == x.dim() - 1 and not self._holds_indices
            seen.one_sequence |= alone
            seen.input_as_one |= alone and n is not None and length in (n, n + 1)
            seen.many_sequences |= count == n
        elif x.dim() == len(self._shape) and adapter.is_unbatched(x):
            seen.one_input = True
        elif x.dim() and len(x) == n and not adapter.is_unbatched(x):
            seen.many_inputs = True
            if not adapter.one_hot and x.dim() > 1 + adapter.feature_axes:
                seen.lengths.add(x.shape[1])
        self.examples = 1 if seen.is_one_example else n

    def is_unclear(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> bool:
        """Whether nothing tells if the first dimension of an output counts examples (or rows of them) or the second."""
        return self._place(x, g, adapter) is None

    def _place(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> str | None:
        """Which dimension of an output counts examples.

        Returns:
            ``"first"``; ``"second"``; ``"rows"``, if the first counts rows of examples although the second is as long
            as there are examples; or None where nothing tells.
        """
        n, lead = self.examples, g.shape[: g.dim() - adapter.feature_axes]
        decided = n is None or n < 2 or self._batch_dim == 1 or adapter.channels_first
        if decided or adapter.sequence_axes(g) is not None or len(lead) < 2 or lead[1] != n:
            return "first"
        if lead[0] == n:  # as many positions as examples
            words = adapter.one_hot and x is not None and x.shape == self._shape  # the input itself
            return None if self._order == "second" and not words else "first"
        if lead[0] % n or self._order == "second":
            return "second"
        if self._order == "first":
            return "rows"
        seen, long = self._layouts, lead[0]
        as_input = len(self._shape) > 1 and long == self._shape[1] and long not in seen.lengths
        return "second" if as_input or (long, n) in seen.sequences else None

    def lay_out(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> tuple[Tensor | None, Tensor]:
        """Input and output gradient with examples first, where the model has them second, or rows of them first."""
        if self._batch_dim != 1:
            if self._place(x, g, adapter) != "rows":
                return x, g
            return x if x is None else x.flatten(0, 1), g.flatten(0, 1)
        if adapter.sequence_axes(g) is not None:
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
        if not adapter.one_hot or x is None or len(self._shape) < 2 or not self.examples:
            return False
        positions = self._shape[1 - self._batch_dim]
        if x.shape == (positions, positions) and positions != self.examples:
            return True  # of pairs of positions
        if x.dim() != 1:
            return False
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
