"""The source of the package as syntax trees, and what its modules import, for the tests of its structure."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "secondorder"


@cache
def trees() -> dict[str, ast.Module]:
    """Syntax trees by dotted name below the package; the package itself is ``""``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def file_of(name: str) -> Path:
    path = PACKAGE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all nodes below it, without code that only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _running(child)


def imports(tree: ast.Module, *, with_types: bool = True) -> Iterator[str]:
    """Dotted names that a module imports, inside functions too; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(tree) if with_types else _running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(names: Iterable[str]) -> set[str]:
    """The modules of the package that imported names refer to, by their dotted names below the package."""
    found = {name.removeprefix("secondorder").lstrip(".") for name in names if name.split(".")[0] == "secondorder"}
    return {name if name in trees() else name.rpartition(".")[0] for name in found}


def dotted(node: ast.AST) -> str:
    """The dotted name of nested attributes; it starts with a dot if the innermost value is not a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])
