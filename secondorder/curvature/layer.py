"""Layers: which parameters one piece of curvature covers, and why the others have none."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.capture.batch import BatchInput
from secondorder.capture.layers.adapter import Adapter, Tap
from secondorder.capture.layers.parts import WeightUse, inner_modules, parts_of
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


@dataclass
class Plan:
    """Layers of a model that get a block and, for every other parameter, the reason in words."""

    layers: list[Layer]
    reasons: dict[nn.Parameter, str]
    skipped_by_user: set[nn.Parameter]


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


class _Use(NamedTuple):
    """One layer that applies a weight."""

    module: str
    part: WeightUse
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @property
    def owner(self) -> nn.Parameter | None:
        return self.weight if self.weight is not None else self.bias

    @property
    def name(self) -> str:
        return ".".join(word for word in (self.module, self.part.suffix) if word)

    def adapter(self) -> Adapter:
        return self.part.make(self.weight is not None, self.bias is not None)

    def taps(self) -> list[Tap]:
        adapter = self.adapter()
        return [Tap(module, part, adapter) for module, part in self.part.taps]


def clean_name(name: str) -> str:
    """Name of a module or parameter without the parts that ``torch.compile`` inserts."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def find_name(name: str, names: Container[str]) -> str | None:
    """``name`` as the unwrapped module has it: itself, or without data-parallel prefixes."""
    name = clean_name(name)
    while name not in names:
        if not name.startswith("module."):
            return None
        name = name.removeprefix("module.")
    return name


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside ``torch.compile`` and data-parallel wrappers."""
    while True:
        inner = None
        if type(module).__name__ == "OptimizedModule":
            inner = getattr(module, "_orig_mod", None)
        elif type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class Parts(nn.ModuleList):
    """Several modules that are trained as one, such as the stages of a pipeline: each has a forward of its own."""


def as_root(module: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The user's own module inside its wrappers; of several parts, one module that holds them.

    Args:
        module: A module, or a list or tuple of them.

    Returns:
        The module, or :class:`Parts`, whose names begin with the number of the part.

    Raises:
        TypeError: If it is no module and no sequence of modules.
        ValueError: If there is no part, or one is inside another.
    """
    if isinstance(module, nn.Module):
        return unwrap(module)
    if not isinstance(module, (list, tuple)):
        raise TypeError(f"module= must be an nn.Module or a list of them, got {type(module).__name__}")
    if wrong := [part for part in module if not isinstance(part, nn.Module)]:
        raise TypeError(f"module= must be an nn.Module or a list of them, got a list with {type(wrong[0]).__name__}")
    if not module:
        raise ValueError("module= is an empty list")
    parts = [unwrap(part) for part in module]
    for i, part in enumerate(parts):
        for j, other in enumerate(parts):
            if i != j and any(part is inner for inner in other.modules()):
                raise ValueError(f"part {i} of the list of modules is part {j} or inside it: give each layer once")
    return Parts(parts)


def forwarded(root: nn.Module) -> list[nn.Module]:
    """The modules whose forwards are those of the model."""
    return list(root) if isinstance(root, Parts) else [root]


def plan_layers(root: nn.Module, trained: Iterable[nn.Parameter], choices: Choices) -> Plan:
    """Find the layers of a model that get a block.

    Args:
        root: The user's module, unwrapped.
        trained: Parameters of the optimizer that require a gradient.
        choices: What the user chose.

    Returns:
        Layers in the order of ``named_modules()`` and reasons for what is left.

    Raises:
        ValueError: If a rule of ``skip`` matches nothing.
        TypeError: If a rule is of a wrong kind.
    """
    wanted = set(trained)
    skipped = _skipped_modules(root, choices.skip)
    reasons: dict[nn.Parameter, str] = {}
    by_user: set[nn.Parameter] = set()
    uses: dict[nn.Parameter, list[_Use]] = {}
    inner = inner_modules(root)
    for name, module in root.named_modules():
        own = [p for p in module.parameters(recurse=_has_inner(module, inner)) if p in wanted]
        if not own or module in inner:
            continue
        parts, reason = parts_of(module, choices.norm_curvature)
        if any(part.holder in skipped for part in parts) or module in skipped:
            parts, reason = [p for p in parts if p.holder not in skipped], "left out by skip_layers"
            by_user.update(own)
        for part in parts:
            use = _Use(clean_name(name), part, _trained(part.weight, wanted), _trained(part.bias, wanted))
            if use.owner is not None:
                uses.setdefault(use.owner, []).append(use)
        covered = {p for part in parts for p in (part.weight, part.bias)}
        for p in own:
            if p not in covered:
                reasons.setdefault(p, reason)
    return Plan(list(_layers(uses, reasons, choices)), reasons, by_user)


def _has_inner(module: nn.Module, inner: set[nn.Module]) -> bool:
    return any(child in inner for child in module.children())


def _layers(
    uses: dict[nn.Parameter, list[_Use]], reasons: dict[nn.Parameter, str], choices: Choices
) -> Iterator[Layer]:
    """One per distinct weight; tied weights share one when their layers agree, else none."""
    for owner, found in uses.items():
        chosen, conflict = _agreeing(found, choices.tied)
        if owner in reasons:
            conflict = f"tied to a parameter with another use ({reasons[owner]})"
        if conflict:
            for use in found:
                reasons.update({p: conflict for p in (use.weight, use.bias) if p is not None})
            continue
        first = chosen[0]
        for use in found:
            if use.bias is not None and use.bias is not first.bias:
                reasons[use.bias] = "its weight is tied, and another use of the weight has the block"
        taps = tuple(tap for use in chosen for tap in use.taps())
        kind = first.part.suffix or _kind_of(first.part.taps[0][0])
        others = tuple(use.name for use in found if use not in chosen)
        yield Layer(first.name, kind, taps, first.adapter(), first.weight, first.bias, other_uses=others)


def _kind_of(module: nn.Module) -> str:
    """Type of a module in words; ``fully_shard`` replaces it by one of its own that derives from it."""
    return next(k.__name__ for k in type(module).__mro__ if not k.__module__.startswith("torch.distributed.fsdp"))


def _agreeing(found: list[_Use], tied: str | None) -> tuple[list[_Use], str]:
    """The uses of a weight that can share a block, or why there are none."""
    names = ", ".join(use.name for use in found)
    if _differ(found) and tied is not None:
        found = [use for use in found if use.adapter().one_hot == (tied == "embedding")]
    if found and not _differ(found):
        return found, ""
    hint = "" if tied is not None else "; tied='embedding' or 'head' chooses one"
    return [], f"tied across layers that differ ({names}{hint})"


def _differ(uses: list[_Use]) -> bool:
    kinds = {(type(use.adapter()), use.adapter().factor_shapes(), use.bias) for use in uses}
    return len(kinds) > 1


def _trained(parameter: nn.Parameter | None, wanted: set[nn.Parameter]) -> nn.Parameter | None:
    return parameter if parameter is not None and parameter in wanted else None


def _skipped_modules(root: nn.Module, skip: Sequence[SkipRule]) -> set[nn.Module]:
    names = {clean_name(name): module for name, module in root.named_modules()}
    skipped: set[nn.Module] = set()
    for rule in skip:
        if isinstance(rule, str):
            exact = find_name(rule, names)
            hits = [names[exact]] if exact is not None else []
            hits += [m for n, m in names.items() if fnmatch.fnmatchcase(n, rule)]
        elif isinstance(rule, type) and issubclass(rule, nn.Module):
            hits = [m for m in names.values() if isinstance(m, rule)]
        elif isinstance(rule, nn.Module):
            inner = unwrap(rule)
            hits = [m for m in names.values() if m is inner]
        else:
            raise TypeError(f"skip_layers takes names, patterns, module types or modules, got {rule!r}")
        if not hits:
            raise ValueError(f"skip_layers: {rule!r} matches no layer of the module")
        for hit in hits:
            skipped.update(hit.modules())
    return skipped
