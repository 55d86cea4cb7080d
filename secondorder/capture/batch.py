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
    """

    n: int | None
    doubt: str = ""


def count_examples(inputs: Sequence[Input], outputs: Sequence[tuple[int, ...]], uses: Sequence[Use], dim: int) -> Count:
    """Determine the number of examples of a forward pass. ``outputs`` are the known shapes of its outputs."""
    sized = [x for x in inputs if len(x.shape) > dim]
    heads = [shape for shape in outputs if len(shape) > 1 or (shape and shape[0] != 1)]
    if not sized:
        return _from_layers(heads, uses, dim)
    n = sized[0].shape[dim]
    sequences = None if dim else _sequences_first(sized[0].shape, uses, heads)
    if (other := sequences or _listed(sized, n, uses, dim)) is not None:
        return Count(other)
    if n == 0 or any(n in _leading(shape, dim, n) for shape in heads):
        return Count(n if dim else _unless_shared(n, sized, uses, heads))
    others = {x.shape[dim] for x in sized[1:]} - {n}
    if not heads:
        return _by_layers_alone(sized[0], n, others, uses, dim)
    supported = any(use.counts(n, dim) for use in uses)
    flat = _prefixes(sized[0].shape)
    if _are_multiples(n, [shape[0] for shape in heads]) and (supported or all(s[0] in flat for s in heads)):
        return Count(n)  # the model returns rows of several positions of each example
    fitting = [m for m in others if all(m in _leading(shape, dim, m) for shape in heads)]
    if len(fitting) == 1:
        return Count(fitting[0])
    firsts = {shape[0] for shape in heads}
    if len(firsts) == 1 and any(use.rows in firsts for use in uses):
        (m,) = firsts
        if not supported and not _explains_all(sized[0], n, uses, heads):
            return Count(m)
        if supported and m < n:
            return Count(m)  # such as graphs, of which nodes were the input
    return _by_majority(sized[0], n, others, uses, dim, heads)


def _sequences_first(shape: tuple[int, ...], uses: Sequence[Use], heads: Sequence[tuple[int, ...]]) -> int | None:
    """Return the second size of the first input if all attention and recurrent layers have it as their batch."""
    known = {(use.shape[use.axes[1]], use.shape[use.axes[0]]) for use in uses if use.axes is not None}
    if shape[:2] not in known or {count for _, count in known} != {shape[1]} or min(shape[:2]) < 2:
        return None
    return None if any(len(s) == 2 and s[0] == shape[0] for s in heads) else shape[1]


def _listed(sized: Sequence[Input], n: int, uses: Sequence[Use], dim: int) -> int | None:
    """Return the number of inputs if they form a list, and all layers have one row or several rows for each of them."""
    alike = sum((len(x.shape), x.holds_indices) == (len(sized[0].shape), sized[0].holds_indices) for x in sized)
    fits = [use.counts(alike, dim) for use in uses]
    if alike < 2 or not any(fits) or all(use.counts(n, dim) for use in uses):
        return None
    is_cut = not any(use.counts(n, dim) for use in uses) and _are_multiples(alike, [use.rows for use in uses])
    return alike if all(fits) or is_cut else None


def _unless_shared(n: int, sized: Sequence[Input], uses: Sequence[Use], heads: Sequence[tuple[int, ...]]) -> int:
    """Return n, or the size of another input if the first one, such as a mask or a time, is shared by all examples.

    The other input then has n second, the outputs have its size first, and at least as many layers do as have n.
    """
    others = {x.shape[0] for x in sized[1:] if x.shape[1:2] == (n,)} & {shape[0] for shape in heads}
    for m in others if all(shape[0] != n for shape in heads) else ():
        if sum(use.counts(m, 0) for use in uses) >= sum(use.counts(n, 0) for use in uses):
            return m
    return n


def _by_layers_alone(first: Input, n: int, others: set[int], uses: Sequence[Use], dim: int) -> Count:
    """Like :func:`count_examples` if the outputs are not known, for example a loss or objects without tensors."""
    if n > 1 and any(use.counts(n, dim) for use in uses):
        return Count(n)
    return _by_majority(first, n, others, uses, dim, ())


def _by_majority(
    first: Input, n: int, others: set[int], uses: Sequence[Use], dim: int, heads: Sequence[tuple[int, ...]]
) -> Count:
    if not uses or _explains_all(first, n, uses, heads):
        return Count(n)
    votes = {m: len({use.site for use in uses if use.counts(m, dim)}) for m in (n, *others)}
    best = max(votes, key=lambda m: (votes[m], m == n))
    agreeing = {use.site for use in uses if use.counts(n, dim) or _are_multiples(n, [use.rows])}
    if best != n and not heads or best == n and 2 * len(agreeing) >= len({use.site for use in uses}):
        return Count(best)
    rows, found = Counter(use.rows for use in uses).most_common(1)[0][0], [shape[0] for shape in heads]
    outputs = f", its outputs have {found[0]}" if found else ""
    return Count(best, f"its first input has {n}, most of its layers have {rows}{outputs}")


def _from_layers(heads: Sequence[tuple[int, ...]], uses: Sequence[Use], dim: int) -> Count:
    """Like :func:`count_examples` if the inputs are not known. It is the largest number that explains most layers."""
    rows = Counter[int]()
    for use in {(use.site, use.shape): use for use in uses}.values():
        rows[use.shape[1] if dim == 1 and use.axes is None and len(use.shape) > 2 else use.rows] += 1
    if not rows:
        return Count(heads[0][0] if heads else None)
    firsts = {shape[0] for shape in heads}
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


def _explains_all(first: Input, n: int, uses: Sequence[Use], heads: Sequence[tuple[int, ...]]) -> bool:
    """Whether n examples, flattened with some of their positions, give the rows of all layers and outputs."""
    rows = [*(use.rows for use in uses), *(shape[0] for shape in heads)]
    if all(r in _prefixes(first.shape) for r in rows):
        return True
    # Two rows of indices may be the two ends of edges, so even numbers are weak evidence.
    return _are_multiples(n, rows) and not (n == 2 and first.holds_indices)


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
