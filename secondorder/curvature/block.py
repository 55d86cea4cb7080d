"""Blocks: which parameters one piece of curvature covers, and why the others have none."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from secondorder.curvature.layers import Adapter, find_adapter
from secondorder.linalg import Workspace

#: What ``skip_layers`` takes: a module name or shell-style pattern, a module type, or a module of the model.
SkipRule = str | type[nn.Module] | nn.Module


@dataclass(eq=False)
class Block:
    """One layer's parameters and the adapter that turns their layer into a Kronecker-factored block.

    Attributes:
        name: Module name as in ``named_modules()``, without wrapper prefixes.
        modules: The modules that share the parameters; more than one when weights are tied.
        adapter: Rows and shapes of the layer.
        weight: Trained weight, or None when it is frozen.
        bias: Trained bias, or None.
        owner: The parameter whose state holds the curvature: the weight, or the bias when the weight is frozen.
        index: Position among the blocks of the optimizer.
        group: The parameter group of the owner, whose options the block follows.
    """

    name: str
    modules: tuple[nn.Module, ...]
    adapter: Adapter
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    index: int = 0
    group: dict[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> tuple[object, ...]:
        """What makes two blocks the same one."""
        shapes = self.adapter.factor_shapes()
        return self.name, *map(id, self.modules), id(self.weight), id(self.bias), type(self.adapter), shapes

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
    """Blocks of a model and, for every other parameter, the reason in words."""

    blocks: list[Block]
    reasons: dict[nn.Parameter, str]
    skipped_by_user: set[nn.Parameter]


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


def plan_blocks(root: nn.Module, trained: Iterable[nn.Parameter], skip: Sequence[SkipRule]) -> Plan:
    """Find the blocks of a model.

    Args:
        root: The user's module, unwrapped.
        trained: Parameters of the optimizer that require a gradient.
        skip: ``skip_layers`` as the user gave it.

    Returns:
        Blocks in the order of ``named_modules()`` and reasons for what is left.

    Raises:
        ValueError: If a rule of ``skip`` matches nothing.
        TypeError: If a rule is of a wrong kind.
    """
    wanted = set(trained)
    skipped = _skipped_modules(root, skip)
    reasons: dict[nn.Parameter, str] = {}
    by_user: set[nn.Parameter] = set()
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, nn.Parameter | None, nn.Parameter | None]]] = {}
    attention = {child for m in root.modules() if isinstance(m, nn.MultiheadAttention) for child in m.modules()}
    for name, module in root.named_modules():
        own = [p for p in module._parameters.values() if p is not None and p in wanted]
        if not own:
            continue
        reason = _reason(module, skipped, attention)
        if reason:
            for p in own:
                reasons.setdefault(p, reason)
                if module in skipped:
                    by_user.add(p)
            continue
        weight = _trained(module, "weight", wanted)
        bias = _trained(module, "bias", wanted)
        uses.setdefault(weight if weight is not None else own[0], []).append((clean_name(name), module, weight, bias))
    blocks = list(_blocks(uses, reasons))
    for i, block in enumerate(blocks):
        block.index = i
    return Plan(blocks, reasons, by_user)


def _reason(module: nn.Module, skipped: set[nn.Module], attention: set[nn.Module]) -> str:
    if module in skipped:
        return "left out by skip_layers"
    if module in attention:
        return "MultiheadAttention computes its projections without calling the layers, so nothing can be captured"
    kind, reason = find_adapter(module)
    if kind is None:
        return reason
    if "weight" not in module._parameters:
        return f"{type(module).__name__}.weight is parametrized"
    if any(p is not None and p.is_complex() for p in module._parameters.values()):
        return "its parameters are complex"
    if {n for n, p in module._parameters.items() if p is not None} - {"weight", "bias"}:
        return f"{type(module).__name__} has parameters besides weight and bias"
    return ""


def _blocks(
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, nn.Parameter | None, nn.Parameter | None]]],
    reasons: dict[nn.Parameter, str],
) -> Iterator[Block]:
    """One block per distinct weight; tied weights share one when their layers agree, else none."""
    for owner, found in uses.items():
        name, module, weight, bias = found[0]
        conflict = ""
        if owner in reasons:
            conflict = f"tied to a parameter with another use ({reasons[owner]})"
        elif any(type(m) is not type(module) or b is not bias for _, m, _, b in found[1:]):
            conflict = f"tied across layers that differ: {', '.join(n for n, *_ in found)}"
        if conflict:
            for _, _, w, b in found:
                for p in (w, b):
                    if p is not None:
                        reasons[p] = conflict
            continue
        kind, _ = find_adapter(module)
        assert kind is not None
        adapter = kind(module, weight is not None, bias is not None)
        yield Block(name, tuple(m for _, m, _, _ in found), adapter, weight, bias)


def _trained(module: nn.Module, name: str, wanted: set[nn.Parameter]) -> nn.Parameter | None:
    parameter = module._parameters.get(name)
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
