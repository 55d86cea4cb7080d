"""One adapter per module type: how a layer's input and output gradient become rows, and its gradients a matrix.

The identity that every adapter keeps: with rows ``a`` of :meth:`Adapter.input_rows` (1 appended last for a bias) and
rows ``g`` of :meth:`Adapter.output_rows` in the same order, ``Σ g aᵀ`` is the gradient of ``[W | b]``.

**A new layer type** is one subclass of :class:`Adapter`, registered with ``register_layer``. An adapter holds numbers,
never the module: it is used inside backward hooks, where reading a module's parameters is unsafe under sharding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder.linalg import Workspace, empty_aligned

#: Patches are gathered for so many bytes of examples at a time: they stay in cache and the peak memory stays flat.
CHUNK_BYTES = 16 * 2**20


class Adapter(ABC):
    """Shapes and rows of one layer.

    Args:
        module: The layer.
        has_weight: Whether its weight is trained.
        has_bias: Whether its bias is trained.

    Attributes:
        groups: Γ independent blocks of equal shape (grouped convolutions); with Γ > 1 tensors lead with ``[Γ, …]``.
        d_in: Input features per group, without the appended 1 (0 when the weight is frozen).
        d_out: Output features per group.
        has_weight: Whether the weight is trained.
        has_bias: Whether the bias is trained; it is the last column of the matrix.
        one_hot: Whether rows a have one entry that is not 0: A is then diagonal, and only :meth:`input_squares` is
            asked for.
        is_exact: Whether the block is no approximation, so that damping has no factors to be split over.
        channels_first: Whether the second axis of input and output counts channels.
        positions_are_tokens: Whether positions of an example may be taken as data of their own.
    """

    groups: int = 1
    d_in: int
    d_out: int
    one_hot: bool = False
    positions_are_tokens: bool = False
    channels_first: bool = False
    is_exact: bool = False
    #: Names of the parameters that the layer applies, None for none.
    weight_name: str = "weight"
    bias_name: str | None = "bias"

    def __init__(self, module: nn.Module, has_weight: bool, has_bias: bool) -> None:
        self.has_weight = has_weight
        self.has_bias = has_bias

    @staticmethod
    def refusal(module: nn.Module) -> str:
        """Why a module of the registered type cannot be covered, in words; empty if it can."""
        return ""

    def of_part(self, part: int) -> Adapter:
        """The adapter of calls that apply one of the Γ blocks alone; ``part`` is -1 for calls that apply all."""
        return self

    def sequence_axes(self, x: Tensor) -> tuple[int, int] | None:
        """Axes of examples and of positions, for an input that always has the same layout; None if it may vary."""
        return None

    @property
    def n_a(self) -> int:
        """Size of the input factor A."""
        return (self.d_in if self.has_weight else 0) + self.has_bias

    @property
    def n_g(self) -> int:
        """Size of the output factor G."""
        return self.d_out

    @property
    def constant_input(self) -> bool:
        """Whether a is the constant 1, so that no input rows are needed."""
        return not self.has_weight

    @property
    def needs_input(self) -> bool:
        """Whether the layer's input must be kept until backward."""
        return self.has_weight

    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and G."""
        lead = (self.groups,) if self.groups > 1 else ()
        return (*lead, self.n_a, self.n_a), (*lead, self.n_g, self.n_g)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The one tensor of a call that backward needs, from the arguments of ``forward``."""
        x: Tensor = args[0] if args else kwargs["input"]
        return x

    @abstractmethod
    def is_unbatched(self, x: Tensor) -> bool:
        """Whether ``x`` is a single example without a batch dimension."""

    @abstractmethod
    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        """Rows a, in chunks ``[rows, d_in]`` or ``[Γ, rows, d_in]``."""

    @abstractmethod
    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        """Rows g, ``[rows, d_out]`` or ``[Γ, rows, d_out]``; ``x`` is given if :attr:`needs_input`."""

    def masked(self, x: Tensor, keep: Tensor) -> Tensor:
        """``x`` with padded rows at 0; ``keep`` has the leading dimensions of the layer's output."""
        return torch.where(keep.reshape(*keep.shape, *[1] * (x.dim() - keep.dim())), x, 0.0)

    def squared_means(self, inputs: list[Tensor], examples: int) -> Tensor:
        """Diagonal of ``Σ_n ā āᵀ`` ``[(Γ,) d_in]``, ā being an example's mean over its calls; for one-hot rows."""
        raise NotImplementedError(f"{type(self).__name__} has one-hot rows and does not say what their means are")

    def pick_examples(
        self, x: Tensor, g: Tensor, kept: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, int, float]:
        """Input and output gradient of some examples drawn at random, where they can be told apart.

        Args:
            x: What :meth:`prepare` returned.
            g: Gradient at the output.
            kept: Examples to keep.
            examples: N.
            generator: CPU generator.

        Returns:
            ``x`` and ``g`` of those examples, their number, and the ratio of all examples to them.
        """
        if g.shape[0] % examples or x.shape[0] % examples:
            return x, g, examples, 1.0
        chosen = draw(examples, kept, generator, g.device)
        x = x.unflatten(0, (examples, -1))[chosen].flatten(0, 1)
        return x, g.unflatten(0, (examples, -1))[chosen].flatten(0, 1), kept, examples / kept

    def sample_rows(
        self, x: Tensor, g: Tensor, positions: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, float] | None:
        """Rows at positions drawn at random, where the layer has more than are to be kept.

        Args:
            x: What :meth:`prepare` returned.
            g: Gradient at the output.
            positions: Positions to keep per example.
            examples: N.
            generator: CPU generator.

        Returns:
            Rows a and g ``[(Γ,) rows, d]`` and the ratio of all rows to them, or None to use all.
        """
        return None

    @abstractmethod
    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        """Rows a by example, ``[(Γ,) N, S, d_in]``, or a ``ValueError`` if they cannot be told apart."""

    @abstractmethod
    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        """Rows g by example, ``[(Γ,) N, S, d_out]``, or a ``ValueError`` if they cannot be told apart."""

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        """Per-example sums over positions ``[(Γ,) N, d_in]`` and the number of positions S, or a ``ValueError``."""
        rows = self.example_inputs(x, examples)
        return rows.sum(-2), rows.shape[-2]

    def output_sums(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        """Per-example sums of g over positions ``[(Γ,) N, d_out]``."""
        return self.example_outputs(g, x, examples).sum(-2)

    def input_squares(self, x: Tensor) -> tuple[Tensor, int | Tensor]:
        """``Σ a∘a`` over the rows ``[(Γ,) d_in]``, for a diagonal A, and the number of rows."""
        total, count = None, 0
        for rows in self.input_rows(x):
            squares = rows.square().sum(-2)
            total = squares if total is None else total + squares
            count += rows.shape[-2]
        assert total is not None
        return total, count

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace: Workspace | None = None) -> Tensor:
        """Gradients in the shapes of the parameters as one matrix ``[(Γ,) n_g, n_a]``."""
        lead = (self.groups,) if self.groups > 1 else ()
        shape = (*lead, self.d_out, self.d_in)
        if weight is not None and bias is None:
            return weight.reshape(shape)
        assert bias is not None
        if weight is None:
            return bias.reshape(*lead, self.d_out, 1)
        matrix = empty_aligned((*lead, self.d_out, self.n_a), weight, workspace)
        matrix[..., :-1] = weight.reshape(shape)
        matrix[..., -1:] = bias.reshape(*lead, self.d_out, 1)
        return matrix

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Split a matrix ``[(Γ,) n_g, n_a]`` into weight and bias parts; ``like`` gives the weight's shape."""
        weight = matrix[..., : self.d_in].reshape(like.shape).contiguous() if like is not None else None
        bias = matrix[..., -1].reshape(-1).contiguous() if self.has_bias else None
        return weight, bias

    def natural_order(self, dense: Tensor) -> Tensor:
        """A matrix ``[n, n]`` over ``vec`` of :meth:`to_matrix`, in the order in which it is shown to the user."""
        return dense


class LinearAdapter(Adapter):
    """``nn.Linear`` on any leading dimensions; all but the last are positions or the batch."""

    positions_are_tokens = True

    def __init__(self, module: nn.Linear, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.d_in, self.d_out = module.in_features, module.out_features

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        yield x.reshape(-1, self.d_in)

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return g.reshape(-1, self.d_out)

    def sample_rows(
        self, x: Tensor, g: Tensor, positions: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, float] | None:
        rows, kept = g.numel() // self.d_out, positions * examples
        if rows <= kept:
            return None
        at = draw(rows, kept, generator, g.device)
        return x.reshape(-1, self.d_in)[at], g.reshape(-1, self.d_out)[at], rows / kept

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        return split_examples(x, examples)

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return split_examples(g, examples)


def draw(count: int, kept: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """``kept`` different indices below ``count``, at random."""
    chosen = torch.randperm(count, generator=generator)[:kept].sort().values
    if device.type == "cpu":
        return chosen
    return (chosen.pin_memory() if device.type == "cuda" else chosen).to(device, non_blocking=True)


def widened(x: Tensor) -> Tensor:
    """``x`` in at least float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def split_examples(x: Tensor, examples: int) -> Tensor:
    """View ``[..., d]`` as ``[N, S, d]``, for ``[N, …, d]``, ``[S, N, d]`` and rows flattened from N examples.

    Returns:
        The view or, where the examples come second, a copy.

    Raises:
        ValueError: If no dimension tells the examples apart.
    """
    if x.dim() > 2 and x.shape[0] != examples and x.shape[1] == examples:
        x = x.transpose(0, 1)
    if x.dim() == 1:
        x = x[None]
    positions = positions_of(x, examples) * math.prod(x.shape[1:-1])
    return x.reshape(examples, positions, x.shape[-1])


def positions_of(x: Tensor, examples: int) -> int:
    """How many entries of dim 0 belong to each example.

    Returns:
        The number.

    Raises:
        ValueError: If dim 0 is not a flattening of the examples.
    """
    if examples == 0 or x.shape[0] % examples:
        raise ValueError(f"its values of shape {tuple(x.shape)} do not split into the {examples} examples of the batch")
    return x.shape[0] // examples


class ConvAdapter(Adapter):
    """``nn.Conv1d``, ``Conv2d`` and ``Conv3d`` with any stride, padding, padding mode, dilation and groups.

    A row is a patch, ordered (channel, kernel…) as ``weight.flatten(1)`` is; positions are output pixels.
    """

    channels_first = True

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.groups = module.groups
        self.kernel: tuple[int, ...] = tuple(module.kernel_size)
        self.stride: tuple[int, ...] = tuple(module.stride)
        self.dilation: tuple[int, ...] = tuple(module.dilation)
        self.padding: list[tuple[int, int]] = [_padding(module, axis) for axis in range(len(self.kernel))]
        self.padding_mode = module.padding_mode
        self.d_in = module.in_channels // self.groups * math.prod(self.kernel)
        self.d_out = module.out_channels // self.groups

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.kernel) + 1

    def row_count(self, x: Tensor) -> int:
        """N·S, the number of rows that ``x`` yields."""
        x = self._batched(x)
        return x.shape[0] * math.prod(self.output_size(x))

    def output_size(self, x: Tensor) -> list[int]:
        """Size of the output image."""
        sizes = zip(x.shape[2:], self.padding, self.kernel, self.dilation, self.stride, strict=True)
        return [(n + lo + hi - d * (k - 1) - 1) // s + 1 for n, (lo, hi), k, d, s in sizes]

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        x = self._batched(x)
        bytes_per_example = self.row_count(x[:1]) * self.groups * self.d_in * x.element_size()
        for part in x.split(max(1, CHUNK_BYTES // max(bytes_per_example, 1))):
            patches = self._patches(part)
            # Feature-major: the copy then runs along image rows, and the Gram product takes either layout.
            order = (1, 2, *range(3 + self._axes, 3 + 2 * self._axes), 0, *range(3, 3 + self._axes))
            rows = patches.permute(order).reshape(self.groups, self.d_in, -1).mT
            yield rows if self.groups > 1 else rows[0]

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        g = self._batched(g)
        rows = g.transpose(0, 1).reshape(self.groups, self.d_out, -1).mT
        return rows if self.groups > 1 else rows[0]

    def sample_rows(
        self, x: Tensor, g: Tensor, positions: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, float] | None:
        g = self._batched(g)
        total = math.prod(g.shape[2:])
        if total <= positions:
            return None
        at = draw(total, positions, generator, g.device)
        patches = self._patches(self._batched(x))[(slice(None),) * 3 + torch.unravel_index(at, g.shape[2:])]
        order = (1, 2, *range(4, 4 + self._axes), 0, 3)
        a = patches.permute(order).reshape(self.groups, self.d_in, -1).mT
        b = g.flatten(2)[:, :, at].transpose(0, 1).reshape(self.groups, self.d_out, -1).mT
        return (a, b, total / positions) if self.groups > 1 else (a[0], b[0], total / positions)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        x = self._batched(x)
        folds = positions_of(x, examples)
        patches = self._patches(x)
        order = (0, 1, *range(3, 3 + self._axes), 2, *range(3 + self._axes, 3 + 2 * self._axes))
        rows = patches.permute(order).reshape(examples, folds, self.groups, -1, self.d_in)
        return self._group_major(rows.transpose(1, 2).flatten(2, 3))

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        g = self._batched(g)
        shape = (examples, positions_of(g, examples), self.groups, self.d_out, math.prod(g.shape[2:]))
        return self._group_major(g.reshape(shape).permute(0, 2, 1, 4, 3).flatten(2, 3))

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        x = self._batched(x)
        folds = positions_of(x, examples)
        # A sum over all windows is one along each axis after the other, of k shifted slices: no patch is made.
        sums = self._padded(x)
        for size, k, s, d in zip(self.output_size(x), self.kernel, self.stride, self.dilation, strict=True):
            slices = [sums[:, :, d * i : d * i + (size - 1) * s + 1 : s].sum(2) for i in range(k)]
            sums = torch.stack(slices, -1)
        sums = sums.reshape(examples, folds, self.groups, self.d_in).sum(1)
        return self._group_major(sums), self.row_count(x) // examples

    @property
    def _axes(self) -> int:
        return len(self.kernel)

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if self.is_unbatched(x) else x

    def _group_major(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.groups > 1 else x[:, 0]

    def _padded(self, x: Tensor) -> Tensor:
        flat = [side for pair in reversed(self.padding) for side in pair]
        if any(flat):
            x = F.pad(x, flat, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
        return x

    def _patches(self, x: Tensor) -> Tensor:
        """View ``[N, Γ, C/Γ, *out, *kernel]`` of the padded input."""
        x = self._padded(x)
        for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
        return x.reshape(x.shape[0], self.groups, x.shape[1] // self.groups, *x.shape[2:])


def _padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, axis: int) -> tuple[int, int]:
    """Padding before and after along one axis, as the module's own forward pads."""
    if module.padding == "valid":
        return 0, 0
    if module.padding == "same":
        total = module.dilation[axis] * (module.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    size = int(module.padding[axis])
    return size, size
