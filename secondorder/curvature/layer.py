"""A layer, which is the parameters that one block covers, and the options for all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.capture.layers.adapter import Adapter, Tap
from secondorder.config import BatchOptions, BudgetOptions, RefreshOptions, StatisticsOptions, StorageOptions
from secondorder.curvature.refresh_schedule import RefreshSchedule
from secondorder.linalg.dense import Workspace, precision_of

#: A rule of ``skip_layers``: a module name or shell-style pattern, a module type, or a module of the model.
SkipRule = str | type[nn.Module] | nn.Module


@dataclass(eq=False)
class Layer:
    """The parameters of one layer and the adapter that makes the layer a Kronecker-factored block.

    Attributes:
        name: Module name as in ``named_modules()``, without wrapper prefixes.
        kind: Type of the module that holds the parameters, as text.
        taps: Modules whose calls are captured, several if weights are tied or applied in pieces.
        adapter: Shapes of the layer, the same for all taps. Each tap has an adapter for the rows of its calls.
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
        """Key that is equal for equal layers."""
        taps = [(id(tap.module), tap.part) for tap in self.taps]
        return self.name, *taps, id(self.weight), id(self.bias), type(self.adapter), self.adapter.factor_shapes()

    @property
    def label(self) -> str:
        """Name of the layer in messages. A model that is itself a layer has no name and is called by its type."""
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
        """Dtype of products with the curvature: float32, or float64 if parameters are float64."""
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


@dataclass(frozen=True)
class LayerOptions:
    """The options that are set for all layers at construction.

    Attributes:
        skip_layers: Layers to leave out.
        overlap: Whether to factorize while training continues, and to adopt the result a fixed number of steps later.
        refresh: When and how bases and inverses are computed again; ``warmup`` is resolved.
        storage: How factors, bases and inverses are stored.
        statistics: Which examples and positions contribute to the factors.
        batch: How the examples of a batch are counted.
        budget: A limit on the mean cost of a step.
    """

    skip_layers: Sequence[SkipRule] | SkipRule = ()
    overlap: bool = False
    refresh: RefreshOptions = RefreshOptions(warmup=False)
    storage: StorageOptions = StorageOptions()
    statistics: StatisticsOptions = StatisticsOptions()
    batch: BatchOptions = BatchOptions()
    budget: BudgetOptions = BudgetOptions()

    def __post_init__(self) -> None:
        """Check every value."""
        if not isinstance(self.skip_layers, (str, type, nn.Module, Iterable)):
            raise TypeError(f"skip_layers must be a rule or a sequence of rules, got {self.skip_layers!r}")
        options.flag("overlap", self.overlap)

    @property
    def skip(self) -> list[SkipRule]:
        """``skip_layers`` as a list."""
        skip = self.skip_layers
        return [skip] if isinstance(skip, (str, type, nn.Module)) else list(skip)

    @cached_property
    def schedule(self) -> RefreshSchedule:
        """The schedule of captures and refreshes."""
        return RefreshSchedule(self.refresh.stagger, self.refresh.warmup or False, self.overlap)
