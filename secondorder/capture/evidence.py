"""Evidence from a forward pass about its examples: their number, and their layout in the layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from secondorder.capture.batch import Count, Input, Use, count_examples, several_batches
from secondorder.capture.statistics.call import Call

if TYPE_CHECKING:
    from secondorder.capture.layers.adapter import Adapter
    from secondorder.capture.taps import Seen


def order_of(roots: Iterable[nn.Module]) -> str | None:
    """Return the dimension of examples in attention and recurrent layers, ``"first"``, ``"second"`` or None."""
    given = (getattr(module, "batch_first", None) for root in roots for module in root.modules())
    known = {value for value in given if isinstance(value, bool)}
    return None if len(known) != 1 else "first" if known.pop() else "second"


@dataclass
class _Layouts:
    """Evidence from the inputs of the layers of a pass.

    Attributes:
        sequences: Length and number of the sequences that attention saw.
        lengths: Lengths of the second axes of inputs with the examples first.
        one_sequence: Whether attention saw one sequence, as if the input to the model had no batch.
        input_as_one: Whether this sequence is as long as the input to the model, or longer by a class token.
        many_sequences: Whether attention saw as many sequences as there would be examples.
        one_input: Whether another layer saw an input without a batch.
        many_inputs: Whether another layer saw as many inputs as there would be examples.
    """

    sequences: set[tuple[int, int]] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    one_sequence: bool = False
    input_as_one: bool = False
    many_sequences: bool = False
    one_input: bool = False
    many_inputs: bool = False

    @classmethod
    def of(cls, uses: Iterable[Use], given: Input, n: int | None) -> _Layouts:
        """Compare the inputs of layers with the input of the model, which suggests n examples."""
        seen, shape = cls(), given.shape
        for use in uses:
            if use.site < 0:
                continue  # a recurrent layer without a block, which may have another input
            if use.axes is not None:
                length, count = use.shape[use.axes[1]], use.shape[use.axes[0]]
                seen.sequences.add((length, count))
                # Words of several examples are indices [N, T], so they are never [T, d] of one.
                alone = count == 1 and len(shape) == len(use.shape) - 1 and not given.holds_indices
                seen.one_sequence |= alone
                seen.input_as_one |= alone and n is not None and length in (n, n + 1)
                seen.many_sequences |= count == n
            elif len(use.shape) == len(shape) and use.is_unbatched:
                seen.one_input = True
            elif use.shape and use.shape[0] == n and not use.is_unbatched:
                seen.many_inputs = True
                if not use.one_hot and len(use.shape) > 1 + use.feature_axes:
                    seen.lengths.add(use.shape[1])
        return seen

    @property
    def is_one_example(self) -> bool:
        """Whether the model has an input without a batch, and no evidence contradicts this."""
        alone = self.one_sequence and not self.many_sequences and (self.input_as_one or not self.many_inputs)
        return alone or (self.one_input and not self.many_inputs)


class _Judged(NamedTuple):
    """The conclusions of a pass from all its evidence.

    Attributes:
        examples: The number of examples, None if it cannot be determined.
        doubt: The evidence against this number.
        given: The input that has this number.
        layouts: The layout of the examples in the layers.
        dim: The dimension of this input that counts examples.
    """

    examples: int | None
    doubt: str
    given: Input
    layouts: _Layouts
    dim: int


class Evidence:
    """The inputs and outputs of a forward pass and of its layers, and the conclusions from them.

    Args:
        batch_dim: The dimension of the first input that counts examples.
        keep: ``[N, S]``, True for real and False for padded positions, or None.
        order: The result of :func:`order_of` for the model.

    Attributes:
        is_stray: Whether the model's own forward has not been called.
    """

    def __init__(self, batch_dim: int, keep: Tensor | None, order: str | None) -> None:
        self._batch_dim, self.keep, self._order = batch_dim, keep, order
        self.is_stray = False
        self._inputs, self._heads = list[Input](), list[tuple[int, ...]]()
        self._uses: dict[tuple[int, tuple[int, ...]], Use] = {}
        self._given_examples: int | None = None
        self._judged: _Judged | None = None

    def renewed(self) -> Evidence:
        """Return one of another forward pass, with the same number of examples if the user gave it."""
        found = Evidence(self._batch_dim, self.keep, self._order)
        found.enter((), self._given_examples)
        return found

    # ------------------------------------------------------------------ what it sees
    def enter(self, inputs: Iterable[Input], examples: int | None = None) -> None:
        """Record the inputs of the model or a part of it, and the user's number of examples."""
        self._inputs += inputs
        self._given_examples = self._given_examples if examples is None else examples
        self._judged = None

    def is_alike(self, inputs: Iterable[Input]) -> bool:
        """Return whether inputs have the sizes of those of the model up to the dimension of examples."""
        end = self._batch_dim + 1
        return [x.shape[:end] for x in inputs] == [x.shape[:end] for x in self._inputs]

    def leave(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Record the shapes of the outputs of the model."""
        self._heads += shapes
        self._judged = None

    def note(self, use: Use) -> None:
        """Record the input of a layer."""
        self._uses[use.site, use.shape] = use
        self._judged = None

    def record_use(self, index: int, adapter: Adapter, x: Tensor) -> Use:
        """Record the input of a layer unless it is known, and return it."""
        known = self._uses.get((index, tuple(x.shape)))
        if known is None:
            self.note(known := _use_of(index, adapter, x))
        return known

    # ------------------------------------------------------------------ what it concludes
    @property
    def examples(self) -> int | None:
        """N, or None if it cannot be determined, in which case each layer counts its own examples."""
        return self.judge().examples

    @property
    def doubt(self) -> str:
        """The evidence against this number as text; an empty string if there is none."""
        return self.judge().doubt

    @property
    def dim(self) -> int:
        """The dimension of the first input that counts examples."""
        return self.judge().dim

    def judge(self) -> _Judged:
        if self._judged is None:
            uses, dim = list(self._uses.values()), self._batch_dim
            count = count_examples(self._inputs, self._heads, uses, dim)
            if self._given_examples is not None:
                count = Count(self._given_examples)
            elif self.is_stray and not count.doubt:
                count = count._replace(doubt=several_batches(uses, count.n))
            seen = self._inputs or [Input(use.shape, use.one_hot) for use in uses]
            fitting = [x for x in seen if len(x.shape) > dim and x.shape[dim] == count.n]
            given = seen[0] if count.is_second else next(iter(fitting or seen), Input((), False))
            layouts = _Layouts.of(uses, given, count.n)
            examples = 1 if count.n is not None and layouts.is_one_example else count.n
            doubt = count.doubt if examples == count.n else ""
            self._judged = _Judged(examples, doubt, given, layouts, 1 if count.is_second else dim)
        return self._judged

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.judge().given.shape

    # ------------------------------------------------------------------ layouts
    def is_unclear(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> bool:
        """Whether it is unclear if the first dimension of an output counts examples (or rows of them) or the second."""
        return self._place(x, g, adapter) is None

    def _place(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> str | None:
        """The dimension of an output that counts examples.

        Returns:
            ``"first"``; ``"second"``; ``"rows"``, if the first counts rows of examples although the second is as long
            as there are examples; or None where nothing tells.
        """
        n, lead = self.examples, g.shape[: g.dim() - adapter.feature_axes]
        decided = n is None or n < 2 or self.dim == 1 or adapter.channels_first
        if decided or adapter.sequence_axes(g) is not None or len(lead) < 2 or lead[1] != n:
            return "first"
        if lead[0] == n:  # as many positions as examples
            words = adapter.one_hot and x is not None and x.shape == self._shape  # the input itself
            return None if self._order == "second" and not words else "first"
        if lead[0] % n or self._order == "second":
            return "second"
        if self._order == "first":
            return "rows"
        seen, long = self.judge().layouts, lead[0]
        as_input = len(self._shape) > 1 and long == self._shape[1] and long not in seen.lengths
        return "second" if as_input or (long, n) in seen.sequences else None

    def lay_out(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> tuple[Tensor | None, Tensor]:
        """Input and output gradient with examples first, if the model has them second or has rows of them first."""
        if self.dim != 1:
            if self._place(x, g, adapter) != "rows":
                return x, g
            return x if x is None else x.flatten(0, 1), g.flatten(0, 1)
        if adapter.sequence_axes(g) is not None or len(self._shape) < 2:
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

    def call_of(self, seen: Seen, g: Tensor, unscale: Tensor | None = None, again: bool = False) -> Call:
        """Return the gradient at the output of a use of a layer in the form for its statistic; see :class:`Call`."""
        adapter = seen.adapter
        x, g = self.lay_out(seen.x, g, adapter)
        keep, shared = self.mask_for(g, adapter), self.is_shared(x, g, adapter)
        return Call(x, g, adapter, unscale, keep, seen.part, again, shared, self.is_unclear(x, g, adapter))

    def is_shared(self, x: Tensor | None, g: Tensor, adapter: Adapter) -> bool:
        """Whether a table is looked up once for the whole batch, with one row per position instead of per example."""
        if not adapter.one_hot or x is None or len(self._shape) < 2 or not self.examples:
            return False
        positions = self._shape[1 - self.dim]
        if x.shape == (positions, positions) and positions != self.examples:
            return True  # of pairs of positions
        if x.dim() != 1:
            return False
        if len(g) != positions or self.examples == 1:
            return False
        # With as many positions as examples, this is ambiguous if the input consists of positions at all.
        shape, holds_indices = self.judge().given
        return len(g) != self.examples or len(shape) == 3 or (len(shape) == 2 and holds_indices)

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


def _use_of(index: int, adapter: Adapter, x: Tensor) -> Use:
    return Use(
        index,
        tuple(x.shape),
        adapter.sequence_axes(x),
        adapter.is_unbatched(x),
        adapter.one_hot,
        adapter.feature_axes,
        adapter.channels_first,
    )
