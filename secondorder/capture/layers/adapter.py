"""One adapter per module type, which turns input and output gradient of a layer into rows, and gradients into a matrix.

Every adapter keeps this identity: with rows ``a`` of :meth:`Adapter.input_rows` (1 appended last for a bias) and rows
``g`` of :meth:`Adapter.output_rows` in the same order, ``Σ g aᵀ`` is the gradient of ``[W | b]``.

**A new layer type** needs one subclass of :class:`Adapter`, registered with ``register_layer``. An adapter holds
numbers and never the module, because it is used inside backward hooks, where sharded parameters cannot be read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secondorder.linalg.dense import Workspace, empty_aligned

#: Patches are gathered for this many bytes of examples at a time, which bounds memory and keeps them in cache.
CHUNK_BYTES = 16 * 2**20


class Adapter(ABC):
    """The shapes and rows of one layer.

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
        one_hot: Whether rows a have one nonzero entry: A is then diagonal, and only :meth:`input_squares` is called.
        is_exact: Whether the block is exact, so that damping has no factors over which it is split.
        channels_first: Whether the second axis of input and output counts channels.
        positions_are_tokens: Whether positions of an example may be treated as separate data.
        sums_may_vanish: Whether output gradients may always sum to 0 over the positions in some of the Γ blocks.
    """

    groups: int = 1
    d_in: int
    d_out: int
    one_hot: bool = False
    positions_are_tokens: bool = False
    channels_first: bool = False
    is_exact: bool = False
    sums_may_vanish: bool = False
    #: The names of the parameters that the layer applies; None if it has no such parameter.
    weight_name: str = "weight"
    bias_name: str | None = "bias"

    def __init__(self, module: nn.Module, has_weight: bool, has_bias: bool) -> None:
        self.has_weight = has_weight
        self.has_bias = has_bias

    @staticmethod
    def refusal(module: nn.Module) -> str:
        """Return why a module of the registered type cannot be covered, as text; empty if it can."""
        return ""

    @property
    def feature_axes(self) -> int:
        """Number of last axes of an output that count features; channels on the second axis are not among them."""
        return 1

    def of_part(self, part: int) -> Adapter:
        """Return the adapter of calls that apply one of the Γ blocks alone; ``part`` is -1 for calls that apply all."""
        return self

    def sequence_axes(self, x: Tensor) -> tuple[int, int] | None:
        """Return the axes of examples and of positions if an input always has the same layout; None if it may vary."""
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
    def row_groups(self) -> int:
        """Number of groups with separate rows of examples: Γ, or 1 for an exact block, whose units are one vector."""
        return 1 if self.is_exact else self.groups

    @property
    def row_width(self) -> int:
        """Size of a row of output gradients: that of G, or of all units together if the block is exact."""
        return self.n_g * self.groups // self.row_groups

    @property
    def is_matrix(self) -> bool:
        """Whether the parameters form matrices of several rows and columns, which map all inputs to all outputs."""
        return not (self.one_hot or self.is_exact) and min(self.n_a, self.n_g) > 1

    @property
    def constant_input(self) -> bool:
        """Whether a is the constant 1, so that no input rows are needed."""
        return not self.has_weight

    def damping_reference(self, mean_value: Tensor, approx: str) -> Tensor:
        """Return the mean eigenvalues to which relative damping refers, ``[(Γ)]``, from those of the blocks."""
        is_summed = self.sums_may_vanish and (approx == "reduce" or self.constant_input)
        if self.groups == 1 or not (self.is_exact or is_summed):
            return mean_value
        steepest = mean_value.amax(-1, keepdim=True).expand_as(mean_value)
        # A unit of a normalization layer may have little effect, and gradients at a bias may sum to a rounding error.
        if self.is_exact or self.constant_input:
            return steepest
        return torch.where(mean_value > 0, mean_value, steepest)

    @property
    def needs_input(self) -> bool:
        """Whether the layer's input must be kept until backward."""
        return self.has_weight

    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and G."""
        lead = (self.groups,) if self.groups > 1 else ()
        return (*lead, self.n_a, self.n_a), (*lead, self.n_g, self.n_g)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the one tensor of a call that backward needs: the argument ``input``, or the first one."""
        x: Tensor = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
        return x

    @abstractmethod
    def is_unbatched(self, x: Tensor) -> bool:
        """Whether ``x`` is a single example without a batch dimension."""

    @abstractmethod
    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        """Yield rows a, in chunks ``[rows, d_in]`` or ``[Γ, rows, d_in]``."""

    def add_gram_(self, out: Tensor, x: Tensor, weight: float) -> int | None:
        """Add ``weight · Σ a aᵀ``, with the appended 1, without forming the rows, if that is less work.

        Args:
            out: A ``[(Γ,) n_a, n_a]``, changed in place, on and above its diagonal at least.
            x: Result of :meth:`prepare`, with padded rows at 0.
            weight: Factor of the sum.

        Returns:
            The number of rows; None, with ``out`` unchanged, if :meth:`input_rows` is to be used instead.
        """
        return None

    @abstractmethod
    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        """Return rows g, ``[rows, d_out]`` or ``[Γ, rows, d_out]``; ``x`` is given if :attr:`needs_input`."""

    def masked(self, x: Tensor, keep: Tensor) -> Tensor:
        """Return ``x`` with padded rows at 0; ``keep`` has the leading dimensions of the layer's output."""
        return torch.where(keep.reshape(*keep.shape, *[1] * (x.dim() - keep.dim())), x, 0.0)

    def squared_means(self, inputs: list[Tensor], examples: int) -> Tensor:
        """Return the diagonal of ``Σ_n ā āᵀ`` ``[(Γ,) d_in]`` for one-hot rows; ā is an example's mean over calls."""
        raise NotImplementedError(f"{type(self).__name__} has one-hot rows and does not define their means")

    def pick_examples(
        self, x: Tensor, g: Tensor, kept: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, int, float]:
        """Draw the input and output gradient of some examples at random, if rows can be assigned to examples.

        Args:
            x: Result of :meth:`prepare`.
            g: Gradient at the output.
            kept: Number of examples to keep.
            examples: N, the number of examples.
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
        """Draw rows at random positions, if the layer has more positions than are kept.

        Args:
            x: Result of :meth:`prepare`.
            g: Gradient at the output.
            positions: Number of positions to keep per example.
            examples: N, the number of examples.
            generator: CPU generator.

        Returns:
            Rows a and g ``[(Γ,) rows, d]`` and the ratio of all rows to them, or None to use all.
        """
        return None

    @abstractmethod
    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        """Return rows a by example, ``[(Γ,) N, S, d_in]``, or raise ``ValueError`` if they cannot be assigned."""

    @abstractmethod
    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        """Return rows g by example, ``[(Γ,) N, S, d_out]``, or raise ``ValueError`` if they cannot be assigned."""

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        """Return per-example sums over positions ``[(Γ,) N, d_in]`` and their number S, or raise ``ValueError``."""
        rows = self.example_inputs(x, examples)
        return rows.sum(-2), rows.shape[-2]

    def output_sums(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        """Return per-example sums of g over positions ``[(Γ,) N, d_out]``."""
        return self.example_outputs(g, x, examples).sum(-2)

    def input_squares(self, x: Tensor) -> tuple[Tensor, int | Tensor]:
        """Return ``Σ a∘a`` over the rows ``[(Γ,) d_in]``, for a diagonal A, and the number of rows."""
        total, count = None, 0
        for rows in self.input_rows(x):
            squares = rows.square().sum(-2)
            total = squares if total is None else total + squares
            count += rows.shape[-2]
        assert total is not None
        return total, count

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace: Workspace | None = None) -> Tensor:
        """Return gradients in the shapes of the parameters as one matrix ``[(Γ,) n_g, n_a]``."""
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
        """Return a matrix ``[n, n]`` over ``vec`` of :meth:`to_matrix`, in the order that is shown to the user."""
        return dense


class Tap(NamedTuple):
    """A module whose calls are captured.

    Attributes:
        module: The module.
        part: Index of the block, of Γ, that its calls fill; -1 for all.
        adapter: The adapter of its calls. Modules that share a weight may differ in their use of it (the stride).
    """

    module: nn.Module
    part: int
    adapter: Adapter


class LinearAdapter(Adapter):
    """Covers ``nn.Linear`` on any leading dimensions; all but the last are positions or the batch."""

    positions_are_tokens = True
    sums_may_vanish = True

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
    """Return ``kept`` different random indices below ``count``."""
    chosen = torch.randperm(count, generator=generator)[:kept].sort().values
    if device.type == "cpu":
        return chosen
    return (chosen.pin_memory() if device.type == "cuda" else chosen).to(device, non_blocking=True)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in at least float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def split_examples(x: Tensor, examples: int) -> Tensor:
    """View ``[..., d]`` as ``[N, S, d]``, for ``[N, …, d]``, ``[S, N, d]`` and rows flattened from N examples.

    Returns:
        The view; if the examples are on the second axis, a copy.

    Raises:
        ValueError: If no dimension distinguishes the examples.
    """
    if x.dim() > 2 and x.shape[0] != examples and x.shape[1] == examples:
        x = x.transpose(0, 1)
    if x.dim() == 1:
        x = x[None]
    positions = positions_of(x, examples) * math.prod(x.shape[1:-1])
    return x.reshape(examples, positions, x.shape[-1])


def positions_of(x: Tensor, examples: int) -> int:
    """Return how many entries of dim 0 belong to each example.

    Returns:
        The number of entries.

    Raises:
        ValueError: If dim 0 is not a flattening of the examples.
    """
    if examples == 0 or x.shape[0] % examples:
        raise ValueError(f"its values of shape {tuple(x.shape)} do not split into the {examples} examples of the batch")
    return x.shape[0] // examples
