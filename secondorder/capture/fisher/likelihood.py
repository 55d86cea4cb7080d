r"""Likelihoods: the curvature of a loss at the outputs f of the model, as a square root and as samples.

Per loss term, ``H = ∂²ℓ/∂f² = S Sᵀ`` is the Fisher information of the predicted distribution. A vector ``v = S z`` with
``E[z zᵀ] = I``, pushed back through the model, samples the Fisher of the parameters; all columns of S give it exactly.

============================  ===========================  =======================================
``ℓ``                         ``S``                        sampled ``v``
============================  ===========================  =======================================
cross entropy, p = softmax f  ``diag(√p) − p √pᵀ``         ``p − onehot(ŷ)``, ŷ ~ Cat(p)
``‖f − y‖² / 2σ²``            ``I / σ``                    ``ε / σ``, ε ~ N(0, I)
BCE with logits, s = σ(f)     ``diag √(s (1 − s))``        ``s − ŷ``, ŷ ~ Bernoulli(s)
============================  ===========================  =======================================

A loss averaged over the C outputs of an example has ``H / C`` and ``S / √C``. Martens 2014 (arXiv 1412.1193).

Nothing here is scaled by the number of terms, and nothing waits for the device. Random numbers come from the generator
that is passed in. Everything is computed in float32 or better for every dtype of the outputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Likelihood(ABC):
    """The distribution of targets that a loss implies, given the outputs of the model.

    For a custom loss, define :meth:`sample`. The other methods are needed for the kinds of Fisher that their error
    messages name, and :meth:`terms` is needed if the loss averages over more than the examples.
    """

    def terms(self, outputs: Tensor, targets: Tensor | None = None) -> int | Tensor:
        """Return the number of loss terms that a mean over the batch averages.

        Args:
            outputs: Outputs of the model ``[N, …]``.
            targets: Targets in the form that the loss takes; None counts every term.

        Returns:
            The number, as a 0-dim tensor on the device if it depends on the targets. The base class returns N.

        Raises:
            ValueError: If the outputs have no batch dimension.
        """
        if outputs.dim() < 1:
            raise ValueError("outputs need a batch dimension, got a 0-dim tensor")
        return outputs.shape[0]

    @abstractmethod
    def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return the gradient of each loss term at the outputs, for targets sampled from the model's own distribution.

        Args:
            outputs: Outputs of the model ``[N, …]``.
            targets: Targets in the form that the loss takes; they only determine which terms are ignored.
            generator: Source of all random numbers.

        Returns:
            ``v = S z``, with the shape and dtype of the outputs.
        """

    def rademacher(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return ``S r`` with independent signs r; the arguments are those of :meth:`sample`.

        Returns:
            A vector with the shape and dtype of the outputs.

        Raises:
            NotImplementedError: If the likelihood does not define it.
        """
        raise NotImplementedError(self._missing("rademacher()", "fisher='curvature_prop'", "use fisher='mc'"))

    def columns(self, outputs: Tensor) -> int:
        """Return the number of columns of S per example. Each term of an example has separate columns.

        Raises:
            NotImplementedError: If the likelihood does not define it.
        """
        raise NotImplementedError(self._missing("columns() and column()", "fisher='exact'", "use fisher='mc'"))

    def column(self, outputs: Tensor, targets: Tensor | None, index: int) -> Tensor:
        """Return one column of S for every example.

        Args:
            outputs: Outputs of the model ``[N, …]``.
            targets: Targets, as in :meth:`sample`.
            index: Index of the column, below :meth:`columns`.

        Returns:
            A vector with the shape and dtype of the outputs, zero outside the term that the column belongs to.

        Raises:
            NotImplementedError: If the likelihood does not define it.
        """
        raise NotImplementedError(self._missing("columns() and column()", "fisher='exact'", "use fisher='mc'"))

    def hessian_product(self, outputs: Tensor, targets: Tensor | None, tangent: Tensor) -> Tensor:
        """Return ``S Sᵀ`` times a tangent, which applies the Hessian of the sum of all loss terms.

        Args:
            outputs: Outputs of the model ``[N, …]``.
            targets: Targets, as in :meth:`sample`.
            tangent: Change of the outputs, of the same shape.

        Returns:
            A vector with the shape and dtype of the tangent.

        Raises:
            NotImplementedError: If the likelihood does not define it.
        """
        raise NotImplementedError(self._missing("hessian_product()", "the quadratic model", "leave that model off"))

    def _missing(self, methods: str, user: str, otherwise: str) -> str:
        return f"{type(self).__name__} has no {methods}, needed for {user}: define the missing methods, or {otherwise}"


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classes by logits, as in ``F.cross_entropy``. Every position of an output is a separate term.

    Label smoothing does not change the curvature, which is that of the plain cross entropy. Class weights are not
    supported. Targets that are probabilities ``[N, …]`` instead of classes ignore nothing.

    Args:
        ignore_index: Class that marks positions without a loss; None if there is none.
        class_dim: Dimension of the logits: -1 for ``[N, …, C]``, or 1 for ``[N, C, …]`` as in ``F.cross_entropy``.

    Raises:
        TypeError: If a value is not an integer.
    """

    ignore_index: int | None = -100
    class_dim: int = -1

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in (("ignore_index", self.ignore_index), ("class_dim", self.class_dim)):
            if (value is not None or name == "class_dim") and type(value) is not int:
                raise TypeError(f"{name} must be an integer, got {value!r}")

    def terms(self, outputs: Tensor, targets: Tensor | None = None) -> int | Tensor:
        axis = self._axis(outputs)
        ignored = self._ignored(outputs, targets, axis)
        return math.prod(_without(outputs.shape, axis)) if ignored is None else (~ignored).sum()

    @torch.no_grad()
    def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        axis = self._axis(outputs)
        p = _softmax(outputs, axis)
        # The sample inverts the cumulative distribution. It takes one random number per term and, unlike
        # torch.multinomial, it causes no error and no wait if logits are not finite (the step drops the NaN there).
        cumulative = p.movedim(axis, -1).cumsum(-1).contiguous()  # [N, …, C]
        u = _uniform((*cumulative.shape[:-1], 1), cumulative, generator)
        drawn = torch.searchsorted(cumulative, u * cumulative[..., -1:], right=True)
        drawn = drawn.clamp_(max=cumulative.shape[-1] - 1).movedim(-1, axis)  # size 1 along the classes
        v = p.scatter_(axis, drawn, p.gather(axis, drawn) - 1)
        return self._masked(v, outputs, targets, axis).to(outputs.dtype)

    @torch.no_grad()
    def rademacher(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        axis = self._axis(outputs)
        p = _softmax(outputs, axis)
        scaled = p.sqrt().mul_(_signs(p, generator))
        v = scaled - p * scaled.sum(axis, keepdim=True)
        return self._masked(v, outputs, targets, axis).to(outputs.dtype)

    def columns(self, outputs: Tensor) -> int:
        """Return the number of columns: classes times positions of an example."""
        self._axis(outputs)
        return math.prod(outputs.shape[1:])

    @torch.no_grad()
    def column(self, outputs: Tensor, targets: Tensor | None, index: int) -> Tensor:
        axis = self._axis(outputs)
        place = list(_coordinates(index, outputs.shape[1:]))
        c, place[axis - 1] = place[axis - 1], slice(None)
        here = (slice(None), *place)  # the logits [N, C] of one position
        p = _softmax(outputs[here], -1)
        root = p[:, c].sqrt()
        found = -root[:, None] * p
        found[:, c] += root
        v = torch.zeros_like(outputs)
        v[here] = found.to(v.dtype)
        return self._masked(v, outputs, targets, axis)

    @torch.no_grad()
    def hessian_product(self, outputs: Tensor, targets: Tensor | None, tangent: Tensor) -> Tensor:
        axis = self._axis(outputs)
        p = _softmax(outputs, axis)
        scaled = p * tangent.to(torch.promote_types(p.dtype, tangent.dtype))
        product = scaled - p * scaled.sum(axis, keepdim=True)
        return self._masked(product, outputs, targets, axis).to(tangent.dtype)

    def _axis(self, outputs: Tensor) -> int:
        """Return the dimension of the classes, counted from the front."""
        _require_floating(outputs)
        axis = self.class_dim + outputs.dim() if self.class_dim < 0 else self.class_dim
        if not 0 < axis < outputs.dim():
            raise ValueError(
                f"class_dim={self.class_dim} must be a dimension after the batch, got outputs of shape "
                f"{tuple(outputs.shape)}; for a single example use unsqueeze(0)"
            )
        return axis

    def _ignored(self, outputs: Tensor, targets: Tensor | None, axis: int) -> Tensor | None:
        """Return a mask of positions without a loss, in the shape of the outputs without the classes; None for none."""
        if targets is None:
            return None
        rows = _without(outputs.shape, axis)
        soft = targets.is_floating_point()
        if tuple(targets.shape) != (tuple(outputs.shape) if soft else rows):
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)} with "
                f"class_dim={self.class_dim}: expected classes {rows}"
            )
        return None if soft or self.ignore_index is None else targets == self.ignore_index

    def _masked(self, v: Tensor, outputs: Tensor, targets: Tensor | None, axis: int) -> Tensor:
        """Set entries without a loss to zero in place."""
        ignored = self._ignored(outputs, targets, axis)
        return v if ignored is None else v.masked_fill_(ignored.unsqueeze(axis), 0)


class _Independent(Likelihood):
    """Base class for independent outputs, with a diagonal S that is stored as an array like the outputs."""

    mean: bool

    @abstractmethod
    def _diagonal(self, outputs: Tensor) -> Tensor:
        """Return the diagonal of S for a loss that sums, from outputs of any shape."""

    def _share(self, outputs: Tensor) -> float:
        """Return the square root of the factor by which a mean over the outputs of an example scales its loss."""
        _require_floating(outputs)
        self.terms(outputs)
        return 1 / math.sqrt(max(math.prod(outputs.shape[1:]), 1)) if self.mean else 1.0

    @torch.no_grad()
    def rademacher(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        share, v = self._share(outputs), self._diagonal(outputs)
        return v.mul_(_signs(v, generator)).mul_(share).to(outputs.dtype)

    def columns(self, outputs: Tensor) -> int:
        """Return the number of columns: the outputs of an example."""
        self._share(outputs)
        return math.prod(outputs.shape[1:])

    @torch.no_grad()
    def column(self, outputs: Tensor, targets: Tensor | None, index: int) -> Tensor:
        share, here = self._share(outputs), (slice(None), *_coordinates(index, outputs.shape[1:]))
        v = torch.zeros_like(outputs)
        v[here] = self._diagonal(outputs[here]).mul_(share).to(v.dtype)
        return v

    @torch.no_grad()
    def hessian_product(self, outputs: Tensor, targets: Tensor | None, tangent: Tensor) -> Tensor:
        share = self._share(outputs)
        return (self._diagonal(outputs).mul_(share).square_() * tangent).to(tangent.dtype)


@dataclass(frozen=True)
class Bernoulli(_Independent):
    """Independent binary targets by logits, as in ``F.binary_cross_entropy_with_logits``.

    Args:
        mean: Whether the loss of an example is the mean over its outputs instead of their sum.

    Raises:
        TypeError: If ``mean`` is not a bool.
    """

    mean: bool = False

    def __post_init__(self) -> None:
        """Check the value."""
        _require_flag("mean", self.mean)

    @torch.no_grad()
    def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        share, p = self._share(outputs), torch.sigmoid(outputs.detach().to(_accurate(outputs.dtype)))
        drawn = _uniform(p.shape, p, generator) < p
        return p.sub_(drawn.to(p.dtype)).mul_(share).to(outputs.dtype)

    def _diagonal(self, outputs: Tensor) -> Tensor:
        logits = outputs.detach().to(_accurate(outputs.dtype))
        # √(s (1 − s)) is computed with 1 − s = sigmoid(−f), so that nothing cancels where s is near 1.
        return torch.sigmoid(logits).mul_(torch.sigmoid(-logits)).sqrt_()


@dataclass(frozen=True)
class Gaussian(_Independent):
    """Real numbers with noise of a fixed variance σ²: a squared error ``‖f − y‖² / 2σ²``.

    Args:
        variance: σ². With 0.5 the loss of an example is ``‖f − y‖²``, and its Hessian 2I.
        mean: Whether the loss of an example is the mean over its outputs instead of their sum, as in ``F.mse_loss``.

    Raises:
        ValueError: If the variance is not positive and finite.
        TypeError: If a value has the wrong type.
    """

    variance: float = 0.5
    mean: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if not isinstance(self.variance, (int, float)) or isinstance(self.variance, bool):
            raise TypeError(f"variance must be a number, got {self.variance!r}")
        if not 0 < self.variance < math.inf:
            raise ValueError(f"variance must be > 0 and finite, got {self.variance}")
        _require_flag("mean", self.mean)

    @torch.no_grad()
    def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        share, dtype, device = self._share(outputs), _accurate(outputs.dtype), generator.device
        noise = torch.randn(outputs.shape, dtype=dtype, device=device, generator=generator).to(outputs.device)
        return noise.mul_(share / math.sqrt(self.variance)).to(outputs.dtype)

    def _diagonal(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / math.sqrt(self.variance), dtype=_accurate(outputs.dtype))


_NAMES: dict[str, type[Likelihood]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def resolve(value: str | Likelihood) -> Likelihood:
    """Return the likelihood with a name.

    Args:
        value: ``"categorical"``, ``"bernoulli"``, ``"gaussian"``, or a likelihood.

    Returns:
        A likelihood with its defaults for a name, and the object itself otherwise.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If the value is neither a name nor a likelihood.
    """
    known = ", ".join(repr(name) for name in _NAMES)
    if isinstance(value, str):
        if value not in _NAMES:
            raise ValueError(f"likelihood must be one of {known} or a Likelihood, got {value!r}")
        return _NAMES[value]()
    if not isinstance(value, Likelihood):
        raise TypeError(f"likelihood must be one of {known} or a Likelihood object, got {value!r}")
    return value


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _softmax(logits: Tensor, axis: int) -> Tensor:
    return torch.softmax(logits.detach(), axis, dtype=_accurate(logits.dtype))


def _uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers in [0, 1), drawn on the device of the generator."""
    drawn = torch.rand(tuple(shape), dtype=like.dtype, device=generator.device, generator=generator)
    return drawn.to(like.device)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return independent signs ±1."""
    drawn = torch.randint(0, 2, like.shape, dtype=torch.int8, device=generator.device, generator=generator)
    return drawn.to(like.device, like.dtype).mul_(2).sub_(1)


def _coordinates(index: int, shape: Sequence[int]) -> list[int | slice]:
    """Return the position of entry ``index`` of an array, row by row."""
    if not 0 <= index < math.prod(shape):
        raise IndexError(f"column {index} of {math.prod(shape)}")
    found: list[int | slice] = []
    for size in reversed(shape):
        index, offset = divmod(index, size)
        found.insert(0, offset)
    return found


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _require_floating(outputs: Tensor) -> None:
    if not outputs.is_floating_point():
        raise TypeError(f"outputs must be real floating point, got {outputs.dtype}")


def _require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
