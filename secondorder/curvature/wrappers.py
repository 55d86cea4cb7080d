"""The user's modules inside the wrappers of torch, their names, and models that consist of several modules."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import nn


def clean_name(name: str) -> str:
    """Name of a module or parameter without the parts that ``torch.compile`` inserts."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def find_name(name: str, names: Container[str]) -> str | None:
    """``name`` in the unwrapped module, without data-parallel prefixes if it has any."""
    name = clean_name(name)
    while name not in names:
        if not name.startswith("module."):
            return None
        name = name.removeprefix("module.")
    return name


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside ``torch.compile`` and data-parallel wrappers."""
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
    """Several modules with separate forward passes that are trained as one, such as the stages of a pipeline."""


def as_root(module: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return the user's module inside its wrappers, or, for several parts, one module that contains them.

    The names in :class:`Parts` begin with the number of the part.

    Raises:
        TypeError: If the argument is neither a module nor a sequence of modules.
        ValueError: If there are no parts, or a part is inside another.
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
                raise ValueError(f"part {i} of the list of modules is part {j} or inside it: pass each layer only once")
    return Parts(parts)


def forwarded(root: nn.Module) -> list[nn.Module]:
    """The modules whose forwards are those of the model."""
    return list(root) if isinstance(root, Parts) else [root]
