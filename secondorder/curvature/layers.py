"""One adapter per module type: how a layer's input and output gradient become rows, and its gradients a matrix.

The identity that every adapter keeps: with rows ``a`` of :meth:`Adapter.input_rows` (1 appended last for a bias) and
rows ``g`` of :meth:`Adapter.output_rows` in the same order, ``Σ g aᵀ`` is the gradient of ``[W | b]``.

**A new layer type** is one class here plus its line in ``ADAPTERS``. An adapter holds numbers, never the module: it is
used inside backward hooks, where reading a module's parameters is unsafe under sharding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from secondorder.linalg import Workspace, empty_aligned

#: Patches are gathered for so many bytes of examples at a time: they stay in cache and the peak memory stays flat.
CHUNK_BYTES = 16 * 2**20


class Adapter(ABC):
    """Shapes and rows of one layer.

    Attributes:
        groups: Γ independent blocks of equal shape (grouped convolutions); with Γ > 1 tensors lead with ``[Γ, …]``.
        d_in: Input features per group, without the appended 1 (0 when the weight is frozen).
        d_out: Output features per group.
        has_weight: Whether the weight is trained.
        has_bias: Whether the bias is trained; it is the last column of the matrix.
    """

    groups: int = 1
    d_in: int
    d_out: int

    def __init__(self, module: nn.Module, has_weight: bool, has_bias: bool) -> None:
        self.has_weight = has_weight
        self.has_bias = has_bias

    @property
    def n_a(self) -> int:
        """Size of the input factor A."""
        return (self.d_in if self.has_weight else 0) + self.has_bias

    @property
    def n_g(self) -> int:
        """Size of the output factor G."""
        return self.d_out

    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and G."""
        lead = (self.groups,) if self.groups > 1 else ()
        return (*lead, self.n_a, self.n_a), (*lead, self.n_g, self.n_g)

    @abstractmethod
    def is_unbatched(self, x: Tensor) -> bool:
        """Whether ``x`` is a single example without a batch dimension."""

    @abstractmethod
    def row_count(self, x: Tensor) -> int:
        """N·S, the number of rows that ``x`` yields."""

    @abstractmethod
    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        """Rows a, in chunks ``[rows, d_in]`` or ``[Γ, rows, d_in]``."""

    @abstractmethod
    def output_rows(self, g: Tensor) -> Tensor:
        """Rows g, ``[rows, d_out]`` or ``[Γ, rows, d_out]``."""

    @abstractmethod
    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        """Per-example sums over positions ``[(Γ,) N, d_in]`` and the number of positions S.

        Raises:
            ValueError: If the rows cannot be told apart by example.
        """

    @abstractmethod
    def output_sums(self, g: Tensor, examples: int) -> Tensor:
        """Per-example sums of g over positions ``[(Γ,) N, d_out]``."""

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


class LinearAdapter(Adapter):
    """``nn.Linear`` on any leading dimensions; all but the last are positions or the batch."""

    def __init__(self, module: nn.Linear, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.d_in, self.d_out = module.in_features, module.out_features

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def row_count(self, x: Tensor) -> int:
        return x.numel() // max(self.d_in, 1)

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        yield x.reshape(-1, self.d_in)

    def output_rows(self, g: Tensor) -> Tensor:
        return g.reshape(-1, self.d_out)

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        by_example = _split_examples(x, examples)
        return by_example.sum(1), by_example.shape[1]

    def output_sums(self, g: Tensor, examples: int) -> Tensor:
        return _split_examples(g, examples).sum(1)


def _split_examples(x: Tensor, examples: int) -> Tensor:
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
    positions = _positions(x, examples) * math.prod(x.shape[1:-1])
    return x.reshape(examples, positions, x.shape[-1])


def _positions(x: Tensor, examples: int) -> int:
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

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.groups = module.groups
        self.kernel: tuple[int, ...] = tuple(module.kernel_size)
        self.stride: tuple[int, ...] = tuple(module.stride)
        self.dilation: tuple[int, ...] = tuple(module.dilation)
        self.padding = [_padding(module, axis) for axis in range(len(self.kernel))]
        self.padding_mode = module.padding_mode
        self.d_in = module.in_channels // self.groups * math.prod(self.kernel)
        self.d_out = module.out_channels // self.groups

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.kernel) + 1

    def row_count(self, x: Tensor) -> int:
        x = self._batched(x)
        sizes = zip(x.shape[2:], self.padding, self.kernel, self.dilation, self.stride, strict=True)
        return x.shape[0] * math.prod((n + lo + hi - d * (k - 1) - 1) // s + 1 for n, (lo, hi), k, d, s in sizes)

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        x = self._batched(x)
        bytes_per_example = self.row_count(x[:1]) * self.groups * self.d_in * x.element_size()
        for part in x.split(max(1, CHUNK_BYTES // max(bytes_per_example, 1))):
            patches = self._patches(part)
            # Feature-major: the copy then runs along image rows, and the Gram product takes either layout.
            order = (1, 2, *range(3 + self._axes, 3 + 2 * self._axes), 0, *range(3, 3 + self._axes))
            rows = patches.permute(order).reshape(self.groups, self.d_in, -1).mT
            yield rows if self.groups > 1 else rows[0]

    def output_rows(self, g: Tensor) -> Tensor:
        g = self._batched(g)
        rows = g.transpose(0, 1).reshape(self.groups, self.d_out, -1).mT
        return rows if self.groups > 1 else rows[0]

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        x = self._batched(x)
        folds = _positions(x, examples)
        patches = self._patches(x)
        sums = patches.sum(tuple(range(3, 3 + self._axes))).reshape(examples, folds, self.groups, self.d_in).sum(1)
        return self._group_major(sums), self.row_count(x) // examples

    def output_sums(self, g: Tensor, examples: int) -> Tensor:
        g = self._batched(g)
        shape = (examples, _positions(g, examples), self.groups, self.d_out, math.prod(g.shape[2:]))
        return self._group_major(g.reshape(shape).sum((1, 4)))

    @property
    def _axes(self) -> int:
        return len(self.kernel)

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if self.is_unbatched(x) else x

    def _group_major(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.groups > 1 else x[:, 0]

    def _patches(self, x: Tensor) -> Tensor:
        """View ``[N, Γ, C/Γ, *out, *kernel]`` of the padded input."""
        flat = [side for pair in reversed(self.padding) for side in pair]
        if any(flat):
            x = F.pad(x, flat, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
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


#: The one place to register a layer type; subclasses count as long as they keep their base's ``forward``.
ADAPTERS: dict[type[nn.Module], type[Adapter]] = {
    nn.Linear: LinearAdapter,
    nn.Conv1d: ConvAdapter,
    nn.Conv2d: ConvAdapter,
    nn.Conv3d: ConvAdapter,
}


def find_adapter(module: nn.Module) -> tuple[type[Adapter] | None, str]:
    """The adapter class for a module, or None and the reason in words."""
    name = type(module).__name__
    for kind, adapter in ADAPTERS.items():
        if not isinstance(module, kind):
            continue
        if type(module).forward is not kind.forward:
            return None, f"{name} overrides {kind.__name__}.forward"
        return adapter, ""
    return None, f"{name} has no adapter"
