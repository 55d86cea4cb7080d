"""Determines the number of examples of a forward pass from its inputs, its outputs and the inputs of its layers.

The first dimension of the first tensor usually counts the examples, but not in ``model(t, x)`` with one time for all
examples, or in ``model(edge_index, x)``. The number is used only if no evidence contradicts it.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Name of the argument of ``forward`` whose size counts examples, or a function of all arguments that returns N.
BatchInput = str | Callable[..., int]


class Input(NamedTuple):
    """An input tensor of a model or of a part of it.

    Attributes:
        shape: Shape of the tensor.
        holds_indices: Whether the tensor has integers.
    """

    shape: tuple[int, ...]
    holds_indices: bool

    @classmethod
    def of(cls, x: Tensor) -> Input:
        """The shape of a tensor, and whether it may hold indices."""
        return cls(tuple(x.shape), not (x.is_floating_point() or x.is_complex()))


class Use(NamedTuple):
    """The input of a layer.

    Attributes:
        site: Index of the layer.
        shape: Shape of the input.
        axes: Axes of examples and of positions, if they are always the same for the layer.
        is_unbatched: Whether it is a single example without a batch dimension.
        one_hot: Whether it holds indices into a table.
        feature_axes: Last axes that count features.
        channels_first: Whether the second axis counts channels.
    """

    site: int
    shape: tuple[int, ...]
    axes: tuple[int, int] | None
    is_unbatched: bool
    one_hot: bool
    feature_axes: int
    channels_first: bool

    def counts(self, n: int, dim: int) -> bool:
        """Whether an axis that may count examples has length n."""
        if self.axes is not None:
            return self.shape[self.axes[0]] == n
        if self.is_unbatched:
            return n == 1
        return n in _leading(self.shape, 0 if self.channels_first else dim, n, second=not self.channels_first)

    @property
    def rows(self) -> int:
        """Size of the axis of examples or, if this is not known, of the first axis; 1 without a batch."""
        if self.axes is not None:
            return self.shape[self.axes[0]]
        return 1 if self.is_unbatched or not self.shape else self.shape[0]


class Count(NamedTuple):
    """A number of examples.

    Attributes:
        n: The number, or None if it cannot be determined.
        doubt: The evidence against it as text; an empty string if there is none.
        is_second: Whether the second dimension of the first input counts the examples.
    """

    n: int | None
    doubt: str = ""
    is_second: bool = False


@dataclass(frozen=True)
class _Shapes:
    """The shapes of a forward pass.

    Attributes:
        inputs: The inputs of the model that have the dimension of examples.
        heads: The known shapes of its outputs, without scalars.
        uses: The inputs of its layers.
        dim: The dimension of the first input that counts examples.
    """

    inputs: Sequence[Input]
    heads: Sequence[tuple[int, ...]]
    uses: Sequence[Use]
    dim: int

    @property
    def n(self) -> int:
        """The number of examples according to the first input."""
        return self.inputs[0].shape[self.dim]

    @property
    def others(self) -> set[int]:
        """The numbers of examples according to the other inputs."""
        return {x.shape[self.dim] for x in self.inputs[1:]} - {self.n}

    @property
    def rows(self) -> list[int]:
        """The numbers of rows of all layers and outputs."""
        return [*(use.rows for use in self.uses), *(shape[0] for shape in self.heads)]

    def counting(self, n: int) -> list[Use]:
        """Return the inputs of layers with an axis of n examples."""
        return [use for use in self.uses if use.counts(n, self.dim)]

    def explain_all(self) -> bool:
        """Return whether n examples, flattened with some of their positions, give all rows."""
        if all(r in _prefixes(self.inputs[0].shape) for r in self.rows):
            return True
        # Two rows of indices may be the two ends of edges, so even numbers are weak evidence.
        return _are_multiples(self.n, self.rows) and not (self.n == 2 and self.inputs[0].holds_indices)


def count_examples(inputs: Sequence[Input], outputs: Sequence[tuple[int, ...]], uses: Sequence[Use], dim: int) -> Count:
    """Return the number of examples of a forward pass according to the first of ``_RULES`` that applies.

    ``outputs`` are the known shapes of its outputs.
    """
    heads = [shape for shape in outputs if len(shape) > 1 or (shape and shape[0] != 1)]
    shapes = _Shapes([x for x in inputs if len(x.shape) > dim], heads, uses, dim)
    return next(count for rule in _RULES if (count := rule(shapes)) is not None)


def _unknown_input(shapes: _Shapes) -> Count | None:
    """Without an input, N is the largest number that explains most layers."""
    if shapes.inputs:
        return None
    rows = Counter[int]()
    for use in {(use.site, use.shape): use for use in shapes.uses}.values():
        rows[use.shape[1] if shapes.dim == 1 and use.axes is None and len(use.shape) > 2 else use.rows] += 1
    firsts = {shape[0] for shape in shapes.heads}
    if not rows:
        return Count(shapes.heads[0][0] if firsts else None)
    if len(firsts) == 1 and min(firsts) in rows:
        return Count(firsts.pop())
    several = {r: count for r, count in rows.items() if r > 1}
    if not several or sum(several.values()) < rows[1]:
        return Count(1)
    for n in sorted(several):  # others may be experts, which see some of the rows
        if 2 * sum(count for r, count in rows.items() if r % n == 0) >= sum(rows.values()):
            return Count(n)
    found = ", ".join(str(r) for r in sorted(rows))
    return Count(None, f"its layers have {found} rows, which are not multiples of one number")


def _sequences_first(shapes: _Shapes) -> Count | None:
    """The input ``[T, N]`` has the examples second if all attention and recurrent layers have them there."""
    first = shapes.inputs[0].shape[:2]
    known = {(use.shape[use.axes[1]], use.shape[use.axes[0]]) for use in shapes.uses if use.axes is not None}
    if shapes.dim or first not in known or {count for _, count in known} != {first[1]} or min(first) < 2:
        return None
    if any(len(s) == 2 and s[0] == first[0] for s in shapes.heads):
        return None
    return Count(first[1], is_second=first[0] != first[1])


def _list_of_inputs(shapes: _Shapes) -> Count | None:
    """A list of images has one example per image if all layers have one row or several rows for each of them."""
    kinds = [(len(x.shape), x.holds_indices) for x in shapes.inputs]
    alike = kinds.count(kinds[0])
    whole, fits = shapes.counting(shapes.n), shapes.counting(alike)
    if alike < 2 or not fits or len(whole) == len(shapes.uses):
        return None
    is_cut = not whole and _are_multiples(alike, [use.rows for use in shapes.uses])
    return Count(alike) if len(fits) == len(shapes.uses) or is_cut else None


def _first_input(shapes: _Shapes) -> Count | None:
    """The first input counts the examples if an output has as many, unless it is shared by all examples."""
    n = shapes.n
    if n and not any(n in _leading(shape, shapes.dim, n) for shape in shapes.heads):
        return None
    return Count(n if shapes.dim else _unless_shared(shapes))


def _unless_shared(shapes: _Shapes) -> int:
    """Return n, or the size of another input if the first one, such as a mask or a time, is shared by all examples.

    The other input then has n second, the outputs have its size first, and at least as many layers do as have n.
    """
    n, firsts = shapes.n, {shape[0] for shape in shapes.heads}
    others = {x.shape[0] for x in shapes.inputs[1:] if x.shape[1:2] == (n,)} & firsts
    for m in others if n not in firsts else ():
        if len(shapes.counting(m)) >= len(shapes.counting(n)):
            return m
    return n


def _unknown_output(shapes: _Shapes) -> Count | None:
    """If the outputs are not known, such as a loss or objects without tensors, one layer with n examples is enough."""
    return Count(shapes.n) if not shapes.heads and shapes.n > 1 and shapes.counting(shapes.n) else None


def _rows_of_positions(shapes: _Shapes) -> Count | None:
    """The outputs may be rows of several positions of each example."""
    firsts, flat = [shape[0] for shape in shapes.heads], _prefixes(shapes.inputs[0].shape)
    known = firsts and _are_multiples(shapes.n, firsts)
    return Count(shapes.n) if known and (shapes.counting(shapes.n) or flat.issuperset(firsts)) else None


def _other_input(shapes: _Shapes) -> Count | None:
    """The only other input whose size all outputs have counts the examples."""
    dim, heads = shapes.dim, shapes.heads
    fitting = [m for m in shapes.others if heads and all(m in _leading(shape, dim, m) for shape in heads)]
    return Count(fitting[0]) if len(fitting) == 1 else None


def _outputs(shapes: _Shapes) -> Count | None:
    """The outputs count the examples, with some layers, such as graphs of whose nodes the input consists."""
    firsts = {shape[0] for shape in shapes.heads}
    if len(firsts) != 1 or not any(use.rows in firsts for use in shapes.uses):
        return None
    (m,) = firsts
    decided = m < shapes.n if shapes.counting(shapes.n) else not shapes.explain_all()
    return Count(m) if decided else None


def _majority(shapes: _Shapes) -> Count:
    """Most of the layers decide, and there is doubt if they contradict the first input."""
    n, uses = shapes.n, shapes.uses
    if not uses or shapes.explain_all():
        return Count(n)
    votes = {m: len({use.site for use in shapes.counting(m)}) for m in (n, *shapes.others)}
    best = max(votes, key=lambda m: (votes[m], m == n))
    agreeing = {use.site for use in uses if use.counts(n, shapes.dim) or _are_multiples(n, [use.rows])}
    if best != n and not shapes.heads or best == n and 2 * len(agreeing) >= len({use.site for use in uses}):
        return Count(best)
    rows = Counter(use.rows for use in uses).most_common(1)[0][0]
    outputs = f", its outputs have {shapes.heads[0][0]}" if shapes.heads else ""
    return Count(best, f"its first input has {n}, most of its layers have {rows}{outputs}")


#: The rules for the number of examples. The first one that returns a number decides, and the last one always does.
_RULES: tuple[Callable[[_Shapes], Count | None], ...] = (
    _unknown_input,
    _sequences_first,
    _list_of_inputs,
    _first_input,
    _unknown_output,
    _rows_of_positions,
    _other_input,
    _outputs,
    _majority,
)


def several_batches(uses: Iterable[Use], n: int | None) -> str:
    """Return why the calls of a layer cannot all have the same n examples, as text; an empty string if they can."""
    rows: dict[int, set[int]] = {}
    for use in uses:
        rows.setdefault(use.site, set()).add(use.rows)
    for found in rows.values():
        if n and len(found) > 1 and any(r % n for r in found):
            return f"a layer of it was called with {' and with '.join(map(str, sorted(found)))} rows"
    return ""


def _leading(shape: tuple[int, ...], dim: int, n: int, second: bool = True) -> tuple[int, ...]:
    """Sizes of the axes that may count n examples: the first for rows, the first two for sequences."""
    if dim == 1:
        return shape[:2] if len(shape) > 2 else shape[:1]
    return shape[:2] if second and len(shape) > 2 and n > 1 else shape[:1]


def _prefixes(shape: tuple[int, ...]) -> set[int]:
    """Possible numbers of rows after flattening some of the leading axes."""
    return set(itertools.accumulate(shape, operator.mul))


def _are_multiples(n: int, rows: Iterable[int]) -> bool:
    return n > 1 and all(r % n == 0 for r in rows)


class Rule:
    """The user's rule for the number of examples, from the arguments of a module's ``forward``.

    Args:
        batch_input: Name of the argument whose size counts them, or a function of the arguments of ``forward``.
        dim: The dimension of this argument.
        position: Position of the argument if it is not passed by name; None if it has to be passed by name.
    """

    def __init__(self, batch_input: BatchInput, dim: int, position: int | None) -> None:
        self._batch_input, self._dim, self._position = batch_input, dim, position

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of examples of a call.

        Raises:
            TypeError: If the argument is not a tensor with this dimension, or the function does not return an integer.
        """
        if not isinstance(self._batch_input, str):
            found = self._batch_input(*args, **kwargs)
            if not torch.compiler.is_compiling() and (isinstance(found, bool) or not isinstance(found, int)):
                raise TypeError(f"the batch input must return an int, got {found!r}")
            return found
        x = kwargs.get(self._batch_input)
        if x is None and self._position is not None and self._position < len(args):
            x = args[self._position]
        if not isinstance(x, Tensor) or x.dim() <= self._dim:
            raise TypeError(
                f"the batch input {self._batch_input!r} must name an argument of forward that is a tensor with a "
                f"dimension {self._dim}, got {type(x).__name__}"
            )
        return x.shape[self._dim]


def rules(batch_input: BatchInput | None, roots: Sequence[nn.Module], dim: int) -> list[Rule | None]:
    """Return the user's rule for each root, or None if the number is determined from the forward pass.

    Raises:
        ValueError: If no root has an argument of this name.
    """
    if not isinstance(batch_input, str):
        return [None if batch_input is None else Rule(batch_input, dim, None) for _ in roots]
    found = [_position(batch_input, root) for root in roots]
    if all(position is _ABSENT for position in found):
        names = ", ".join(type(root).__name__ for root in roots)
        raise ValueError(f"the batch input {batch_input!r} is no argument of the forward of {names}")
    return [None if at is _ABSENT else Rule(batch_input, dim, at) for at in found]


_ABSENT: Any = object()


def _position(name: str, root: nn.Module) -> int | None:
    """Position of an argument of a module's ``forward``; None if it is passed by name."""
    parameters = inspect.signature(root.forward).parameters
    if name in parameters:
        by_name = parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        return None if by_name else list(parameters).index(name)
    return None if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()) else _ABSENT
