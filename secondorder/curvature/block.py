"""Blocks: the curvature of one layer, with its state and its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from secondorder.capture.sites import Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.measurement import Measured
from secondorder.config import FisherOptions
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.factorization import Task
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.schema import Place, Schema, keys
from secondorder.linalg import polar
from secondorder.runtime import Runtime


class Due(NamedTuple):
    """The measurements of a step for a block.

    Attributes:
        factors: Whether the step captures statistics for the running estimate.
        scale: Whether it measures the scale example by example, in the bases that exist when it begins.
        late: Whether it measures the scale in the bases that its own refresh computes.
        keeps_calls: Whether it stores captured calls, since the bases are not on this rank yet.
    """

    factors: bool
    scale: bool = False
    late: bool = False
    keeps_calls: bool = False


#: A step that measures only the running estimate of a block.
ESTIMATE_ALONE = Due(factors=True)


BlockT = TypeVar("BlockT", bound="Block")


class Block(ABC):
    """The curvature of one layer.

    Everything that is kept between steps is in ``state``. Options are read from ``group`` when they are used.

    Args:
        layer: The layer.
        index: Position among the blocks of the optimizer.
        group: The parameter group of the owner, whose options the block follows.
        runtime: The values that all parts of the optimizer share.
        options: The options that are the same for all layers.
        fisher: The Fisher estimate.

    Attributes:
        name: Module name as in ``named_modules()``.
        label: Name of the block in messages.
        adapter: Shapes of the layer.
        owner: The parameter whose state holds the curvature.
        params: Weight and bias, as far as they are trained.
        weight: Trained weight, or None when it is frozen.
        bias: Trained bias, or None.
        kind: Type of the module that holds the parameters, as text.
    """

    def __init__(
        self,
        layer: Layer,
        index: int,
        group: dict[str, Any],
        runtime: Runtime,
        options: LayerOptions | None = None,
        fisher: FisherOptions | None = None,
    ) -> None:
        self.options, self.fisher = options or LayerOptions(), fisher or FisherOptions()
        self.layer, self.index, self.group, self.runtime = layer, index, group, runtime
        # These attributes of the layer never change, and are read many times in a step.
        self.name, self.label, self.adapter = layer.name, layer.label, layer.adapter
        self.owner, self.params = layer.owner, layer.params
        self.weight, self.bias, self.kind = layer.weight, layer.bias, layer.kind

    @property
    def state(self) -> dict[str, Any]:
        """The current state of the owner."""
        return self.runtime.states[self.owner]

    @property
    def uses_estimate(self) -> bool:
        """Whether preconditioning uses the running estimate itself."""
        return False

    @property
    def refresh_size(self) -> int:
        """Number of elements that a refresh factorizes."""
        return 0

    @property
    def sets_length(self) -> bool:
        """Whether directions get a uniform spectrum, as for layers that mix all inputs into all outputs."""
        return bool(self.group.get("orthogonalize")) and self.adapter.is_matrix

    def step_of(self, direction: Tensor) -> Tensor:
        """Return a preconditioned matrix ``[(Γ,) n_g, n_a]``, or with ``orthogonalize`` its polar factor."""
        return polar.step_of(direction, self.options.storage.orthogonal_dtype) if self.sets_length else direction

    def data(self, examples: int) -> Tensor | float:
        """Return the number of data behind the statistics of a batch: observed loss terms, or else examples."""
        is_mean_of_terms = self.fisher.is_observed and self.group["loss_reduction"] == "mean"
        return self.runtime.observed_terms.clamp(min=1) if is_mean_of_terms else float(examples)

    def gradient_scale(self, examples: int) -> Any:
        """Return the factor from sums of ``g° g°ᵀ`` over captured gradients to means over data. It may be a tensor."""
        if not self.fisher.is_observed:
            return averages.gradient_scale(examples, self.group["loss_reduction"], self.group["loss_terms"])
        data = self.data(examples)  # observed vectors have unit scale
        return 1.0 / (float(data.numpy()) if isinstance(data, Tensor) and data.device.type == "cpu" else data)

    def translated(self, theirs: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a loaded state to the form in which this optimizer stores it."""
        return theirs

    @classmethod
    def without_block(
        cls, theirs: Mapping[str, Any], options: LayerOptions, known: Container[str]
    ) -> Mapping[str, Any]:
        """Convert the loaded state of a parameter that owns no block; ``known`` are the keys of curvature."""
        return theirs

    # ------------------------------------------------------------------ what a method supplies
    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the block is new, and nothing has been folded into its estimate."""

    @property
    @abstractmethod
    def has_estimate(self) -> bool:
        """Whether something was folded into the estimate."""

    @abstractmethod
    def described(self) -> tuple[str, str]:
        """Return the text that ``describe()`` adds to the treatment of the layer, and the sizes of its curvature."""

    @abstractmethod
    def schema(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return the entries of the state.

        Args:
            group: The options.
            state: The state, current or loaded, which determines sizes that depend only on data.
        """

    def momentum_schema(self, p: nn.Parameter, group: Mapping[str, Any]) -> Schema:
        """Return additional entries of the state of one of the parameters."""
        return {}

    @abstractmethod
    def statistic(self, due: Due = ESTIMATE_ALONE) -> Statistic:
        """Return empty sums for the statistics of a batch."""

    @abstractmethod
    def sums(self, due: Due = ESTIMATE_ALONE) -> Schema:
        """Return the entries for the measurements of this step, in the form in which ranks sum them."""

    @abstractmethod
    def is_finite(self, measured: Measured) -> Tensor:
        """Return whether what was measured is finite, a 0-dim bool tensor."""

    @abstractmethod
    def measure(self, statistic: Statistic, examples: int) -> Measured:
        """Return the measurements of this rank's batch, scaled per datum."""

    @abstractmethod
    def fold(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Update the running estimate with the measurements, and return whether they were finite."""

    def count_update(self, measured: Measured, due: Due) -> None:
        """Count an update of the estimate, on whichever rank it took place."""
        self.state["factor_updates"] += 1

    @abstractmethod
    def tasks(self, begun: bool = False) -> dict[str, Task]:
        """Return the matrices that a refresh factorizes, by side.

        Args:
            begun: Whether to use the copies with which a refresh in the background was begun.
        """

    @abstractmethod
    def adopt(self, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt the results of a refresh for each task where ``good`` is True."""

    def restore(self, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt curvature that a checkpoint left out and a refresh of the loaded estimate has recomputed."""
        self.adopt(found, good)

    @abstractmethod
    def precondition(self, gradient: Tensor) -> Tensor:
        """Apply the inverse of the damped curvature to a gradient matrix ``[(Γ,) n_g, n_a]``."""

    @abstractmethod
    def extremes(self) -> Extremes | None:
        """λ and the extreme eigenvalues of the damped curvature; None if they are on other ranks."""

    def bounds(self) -> Extremes | None:
        """λ and upper bounds of the largest eigenvalues, without waiting for the device."""
        return self.extremes()

    @abstractmethod
    def product(self, matrix: Tensor) -> Tensor:
        """Apply the undamped curvature to a matrix ``[(Γ,) n_g, n_a]`` for the quadratic model."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the undamped curvature as a dense matrix, block-diagonal over the groups of a convolution."""


class EstimatedBlock(Block):
    """Base class of blocks with a running estimate, whose state has the entries of ``schema.COUNTERS``."""

    @property
    def is_empty(self) -> bool:
        """Whether the block is new, and nothing has been folded into its estimate."""
        return self.state["refreshes"] == 0 and not float(self.state.get("factor_weight", 1.0))

    @property
    def has_estimate(self) -> bool:
        """Whether something was folded into the estimate."""
        return bool(self.state["factor_updates"] > 0)

    def is_finite(self, measured: Measured) -> Tensor:
        """Return whether what was measured is finite, a 0-dim bool tensor."""
        totals = [part.total for part in measured.parts.values()]
        return averages.all_finite(totals) if totals else torch.tensor(True)


class PlainBlock(EstimatedBlock):
    """Base class of blocks with one running estimate and no factorization in a refresh.

    Custom methods derive from it. They have the option ``factor_decay``, and their measured parts have the keys of the
    estimate in the schema.
    """

    def described(self) -> tuple[str, str]:
        """Return an empty text for ``describe()``, and the sizes of the layer."""
        lead = f"{self.adapter.groups}×" if self.adapter.groups > 1 else ""
        return "", f"{lead}{self.adapter.n_a}, {self.adapter.n_g}"

    def sums(self, due: Due = ESTIMATE_ALONE) -> Schema:
        """Return the entries of the estimate."""
        schema = self.schema(self.group, self.state)
        return {key: schema[key] for key in keys(schema, Place.ESTIMATE) if schema[key].kind != "buffers"}

    def fold(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Update each running mean with its measured part, and return whether all were finite."""
        parts, state, finite = measured.parts, self.state, self.is_finite(measured)
        good = finite if gate is None else finite & gate  # without a gate, the gradients have been checked
        totals, scales = [part.total for part in parts.values()], [cast(float, part.scale) for part in parts.values()]
        running, weight, decay = [state[key] for key in parts], state["factor_weight"], self.group["factor_decay"]
        averages.ratio_ema_(running, weight, totals, scales, float(measured.examples), decay, good)
        return finite

    def tasks(self, begun: bool = False) -> dict[str, Task]:
        """Return no tasks."""
        return {}

    def extremes(self) -> Extremes | None:
        """Return None, because eigenvalues are not known."""
        return None

    def product(self, matrix: Tensor) -> Tensor:
        """Raise an error, since only the quadratic model needs a product with the undamped curvature.

        Raises:
            NotImplementedError: If the method does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define product(), which the quadratic model needs")
