"""A layer: the parameters that one block covers, and what is chosen for all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.capture.batch import BatchInput
from secondorder.capture.layers.adapter import Adapter, Tap
from secondorder.curvature.refresh_schedule import RefreshSchedule
from secondorder.linalg.dense import Workspace, precision_of

#: What ``skip_layers`` takes: a module name or shell-style pattern, a module type, or a module of the model.
SkipRule = str | type[nn.Module] | nn.Module


@dataclass(eq=False)
class Layer:
    """One layer's parameters and the adapter that turns their layer into a Kronecker-factored block.

    Attributes:
        name: Module name as in ``named_modules()``, without wrapper prefixes.
        kind: Type of the module that holds the parameters, in words.
        taps: Modules whose calls are captured; more than one when weights are tied or a module applies its weight in
            pieces.
        adapter: Shapes of the layer, the same for all its taps; each tap has an adapter for the rows of its own calls.
        weight: Trained weight, or None when it is frozen.
        bias: Trained bias, or None.
        owner: The parameter whose state holds the curvature: the weight, or the bias when the weight is frozen.
        other_uses: Layers that apply the same weight in another way, whose statistics the block does not have.
    """

    name: str
    kind: str
    taps: tuple[Tap, ...]
    adapter: Adapter
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    other_uses: tuple[str, ...] = ()

    @property
    def signature(self) -> tuple[object, ...]:
        """What makes two layers the same one."""
        taps = [(id(tap.module), tap.part) for tap in self.taps]
        return self.name, *taps, id(self.weight), id(self.bias), type(self.adapter), self.adapter.factor_shapes()

    @property
    def label(self) -> str:
        """Its name in messages: a model that is a layer itself has none, and is called by its type."""
        return self.name or self.kind

    @property
    def owner(self) -> nn.Parameter:
        """The parameter whose state holds the curvature."""
        owner = self.weight if self.weight is not None else self.bias
        assert owner is not None
        return owner

    @property
    def params(self) -> list[nn.Parameter]:
        """Weight and bias, as far as they are trained."""
        return [p for p in (self.weight, self.bias) if p is not None]

    @property
    def precision(self) -> torch.dtype:
        """In which products with the curvature are taken: float32, or float64 where parameters are float64."""
        return precision_of(self.owner)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape ``[(Γ,) n_g, n_a]`` of a gradient as a matrix."""
        a, g = self.adapter.factor_shapes()
        return (*g[:-1], a[-1])

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A ``meta`` tensor, in the precision of products unless another is given."""
        return torch.empty(tuple(shape), dtype=dtype or self.precision, device="meta")

    def matrix(self, tensors: Sequence[Tensor], workspace: Workspace | None = None) -> Tensor:
        """Tensors shaped like :attr:`params` as one matrix ``[(Γ,) n_g, n_a]``."""
        given = iter(tensors)
        weight = next(given) if self.weight is not None else None
        bias = next(given) if self.bias is not None else None
        return self.adapter.to_matrix(weight, bias, workspace)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """A matrix ``[(Γ,) n_g, n_a]`` as tensors shaped like :attr:`params`."""
        return [part for part in self.adapter.from_matrix(matrix, self.weight) if part is not None]


class Choices(NamedTuple):
    """What a user may choose about the blocks of a model.

    Attributes:
        skip: ``skip_layers``.
        tied: Which use of a weight tied between an embedding and a head has the block: ``"head"``, ``"embedding"`` or
            None for neither.
        norm_curvature: ``"unit"`` or ``"diagonal"``.
    """

    skip: Sequence[SkipRule] = ()
    tied: str | None = "head"
    norm_curvature: str = "unit"


@dataclass(frozen=True)
class LayerOptions:
    """What is chosen once for all layers, at construction.

    Attributes:
        skip_layers: Layers to leave out.
        stagger: Spread refreshes over the interval.
        refresh_warmup: Refresh often at first.
        max_failures: Failed refreshes of a block in a row before an error.
        tied: Which use of a weight tied between an embedding and a head has the block; None for neither.
        norm_curvature: ``"unit"`` or ``"diagonal"``.
        batch_dim: Dimension of the model's input that counts examples.
        batch_input: The argument that counts them, or a function that does.
        factor_dtype: Precision in which factors are kept; float32 stands for float64 where parameters are float64.
        inv_dtype: Of what a refresh finds from them, likewise.
        factor_storage: ``"dense"``, or ``"packed"``: factors are kept as their triangles.
        overlap: Factorise while training goes on, and adopt the result a fixed number of steps later.
        orthogonal_dtype: Of the products that ``orthogonalize`` takes of large matrices.
    """

    skip_layers: Sequence[SkipRule] | SkipRule = ()
    stagger: bool = False
    refresh_warmup: bool = False
    max_failures: int = 10
    tied: str | None = "head"
    norm_curvature: str = "unit"
    batch_dim: int = 0
    batch_input: BatchInput | None = None
    factor_dtype: torch.dtype = torch.float32
    inv_dtype: torch.dtype = torch.float32
    factor_storage: str = "dense"
    overlap: bool = False
    orthogonal_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Check every value."""
        if not isinstance(self.skip_layers, (str, type, nn.Module, Iterable)):
            raise TypeError(f"skip_layers must be a rule or a sequence of rules, got {self.skip_layers!r}")
        options.flag("stagger", self.stagger)
        options.flag("refresh_warmup", self.refresh_warmup)
        options.flag("overlap", self.overlap)
        options.whole(1)("max_failures", self.max_failures)
        options.choice("head", "embedding", None)("tied", self.tied)
        options.choice("unit", "diagonal")("norm_curvature", self.norm_curvature)
        options.whole(0)("batch_dim", self.batch_dim)
        if not (self.batch_input is None or isinstance(self.batch_input, str) or callable(self.batch_input)):
            raise TypeError(
                f"batch_input must be the name of an argument of forward or a function, got {self.batch_input!r}"
            )
        options.stored_dtype("factor_dtype", self.factor_dtype)
        options.stored_dtype("inv_dtype", self.inv_dtype)
        options.choice("dense", "packed")("factor_storage", self.factor_storage)
        options.stored_dtype("orthogonal_dtype", self.orthogonal_dtype)

    @property
    def choices(self) -> Choices:
        """What the plan of blocks needs."""
        skip = self.skip_layers
        rules = [skip] if isinstance(skip, (str, type, nn.Module)) else list(skip)
        return Choices(rules, self.tied, self.norm_curvature)

    @cached_property
    def schedule(self) -> RefreshSchedule:
        """When layers are captured and refreshed."""
        return RefreshSchedule(self.stagger, self.refresh_warmup, self.overlap)
