"""The structure of the package in numbers that may only fall, read from the syntax trees.

``NUMBERS`` has each number as it is now, and what it is to become. A number above its ceiling fails: the change that
made it grow needs another shape. A number well below its ceiling fails, too, so that the ceiling follows it down: write
the new number into the table. "Methods" are the six optimizers with all that they inherit. "Others" are all remaining
classes except strategies, real or imagined, and adapters of layer types, which keep hierarchies of their own.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "secondorder"
METHODS = ("KFAC", "EKFAC", "HyLo", "MFAC", "SparseMFAC", "GGT")
#: Files named by a participle or a gerund: public names, and words of the field.
NAMED_BY_A_VERB = {
    "switching", "capture/layers/embedding",
    "diagnostics/preconditioning", "diagnostics/profiling", "diagnostics/timing", "integrations/lightning",
}  # fmt: skip
#: Folders whose ``__init__.py`` exports public names. All others have a docstring and nothing else.
EXPORTING = {"", "comm", "diagnostics"}
#: Classes that keep an optimizer: they watch or schedule one from outside, or torch hands them one.
MAY_HOLD_AN_OPTIMIZER: set[str] = {
    "comm.join._Shadow",
    "comm.rank_grid.RankGrid",
    "diagnostics.profiling.Profile",
    "diagnostics.trend.Trend",
    "integrations.transformers.SecondOrderCallback",
    "schedule.ParamScheduler",
}
#: Private names of torch that have no public counterpart, and what they are used for.
PRIVATE_IN_TORCH = {
    "_base": "to find the tensor that an output is a view of",
    "_canonical_mask": "to compute attention as torch does",
    "_forward_hooks": "to see whether another hook runs before a tap",
    "_get_no_batch_dim": "to recognize an input of an instance norm without a batch dimension",
    "_is_view": "to see whether an output is a view",
    "_join_config": "to leave Join, which sets it",
    "_mha_shape_check": "to compute attention as torch does",
    "_none_or_dtype": "to compute attention as torch does",
    "_schema": "to see which of its arguments an operator writes",
    "_parameters": "to tell a parameter that is registered as None from one that is not registered",
    "_version": "to see whether a tensor was written",
}
LONG_MODULE, LONG_FUNCTION, MANY_METHODS, MANY_ATTRIBUTES = 400, 35, 25, 15


class Number(NamedTuple):
    """What a number may be at most now, and what it is to become."""

    ceiling: int
    target: int


# fmt: off
NUMBERS = {
    "KFAC: classes":                                      Number(2, 2),
    "EKFAC: classes":                                     Number(2, 2),
    "HyLo: classes":                                      Number(2, 2),
    "MFAC: classes":                                      Number(2, 2),
    "SparseMFAC: classes":                                Number(3, 3),
    "GGT: classes":                                       Number(2, 2),
    "KFAC: names on self":                                Number(65, 65),
    "EKFAC: names on self":                               Number(65, 65),
    "HyLo: names on self":                                Number(66, 65),
    "MFAC: names on self":                                Number(65, 65),
    "SparseMFAC: names on self":                          Number(65, 65),
    "GGT: names on self":                                 Number(65, 65),
    "KFAC: attributes written":                           Number(15, 15),
    "EKFAC: attributes written":                          Number(15, 15),
    "HyLo: attributes written":                           Number(15, 15),
    "MFAC: attributes written":                           Number(15, 15),
    "SparseMFAC: attributes written":                     Number(15, 15),
    "GGT: attributes written":                            Number(15, 15),
    "methods: bodies in chains of 2 or more":             Number(0, 8),
    "methods: bodies in chains of 3 or more":             Number(0, 0),
    "others: bodies in chains of 2 or more":              Number(196, 80),
    "others: bodies in chains of 3 or more":              Number(12, 0),
    "others: most names on one object":                   Number(72, 75),
    "SecondOrderOptimizer: its own methods":              Number(50, 38),
    "largest other class: its own methods":               Number(30, 25),
    "classes with more than 25 methods":                  Number(3, 0),
    "classes that write more than 15 attributes":         Number(1, 0),
    "accesses to underscore attributes of others":        Number(0, 0),
    "height of imports":                                  Number(14, 14),
    "modules at the top level":                           Number(12, 10),  # one more: `python -m` wants __main__.py
    "folders at the top level":                           Number(12, 12),
    "modules named by a verb, without reason":            Number(0, 0),
    "modules of more than 400 lines":                     Number(7, 0),
    "functions of more than 35 lines":                    Number(12, 0),
    "rows of the layering table":                         Number(17, 17),
    "lines":                                              Number(37640, 28500),
}
# fmt: on

Key = tuple[str, str]  # module, class


# ---------------------------------------------------------------------- modules
@cache
def trees() -> dict[str, ast.Module]:
    """Syntax trees by dotted name below the package; the package itself is ``""``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without what only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _running(child)


def _below(name: str | None) -> str | None:
    """A dotted name below the package, or None for one of elsewhere."""
    if name == "secondorder":
        return ""
    return name.removeprefix("secondorder.") if name and name.startswith("secondorder.") else None


@cache
def imported() -> dict[str, set[str]]:
    """Modules that each module imports, inside functions too."""
    edges: dict[str, set[str]] = {}
    for module, tree in trees().items():
        found = set()
        for node in _running(tree):
            if isinstance(node, ast.ImportFrom) and (base := _below(node.module)) is not None:
                inner = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
                found |= (inner & trees().keys()) | ({base} & trees().keys() if inner - trees().keys() else set())
            elif isinstance(node, ast.Import):
                found |= {name for alias in node.names if (name := _below(alias.name)) in trees() and name is not None}
        edges[module] = found - {module}
    return edges


def import_height() -> int:
    """Modules in the longest chain of imports; a circle counts once."""
    heights: dict[str, int] = {}

    def height(module: str, chain: tuple[str, ...]) -> int:
        if module in chain:
            return 0
        if module not in heights:
            heights[module] = 1 + max((height(m, (*chain, module)) for m in imported()[module]), default=0)
        return heights[module]

    return max(height(module, ()) for module in trees())


# ---------------------------------------------------------------------- classes
@cache
def classes() -> dict[Key, ast.ClassDef]:
    return {(m, n.name): n for m, tree in trees().items() for n in tree.body if isinstance(n, ast.ClassDef)}


def _bases(key: Key) -> list[Key]:
    """Bases of the package, found through the imports of the module."""
    module = key[0]
    known = {name: (m, name) for m, name in classes() if m == module}
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom) and (base := _below(node.module)) is not None:
            known |= {a.asname or a.name: (base, a.name) for a in node.names if (base, a.name) in classes()}
    plain = (n.value if isinstance(n, ast.Subscript) else n for n in classes()[key].bases)
    found = [known[n.id] for n in plain if isinstance(n, ast.Name) and n.id in known]
    return [base for base in found if base != key]


@cache
def mro(key: Key) -> tuple[Key, ...]:
    """Classes of the package in the order of Python's method resolution."""
    bases = _bases(key)
    waiting, order = [[*mro(base)] for base in bases] + [bases], [key]
    while waiting := [chain for chain in waiting if chain]:
        first = next(c[0] for c in waiting if not any(c[0] in other[1:] for other in waiting))
        order.append(first)
        waiting = [[k for k in chain if k != first] for chain in waiting]
    return tuple(order)


def method(name: str) -> Key:
    return next(key for key in classes() if key[1] == name and key[0].startswith("methods."))


def _is_apart(key: Key) -> bool:
    return key[0].startswith(("comm", "capture.layers", "plan.rehearsal", "plan.roles"))


@cache
def others() -> list[Key]:
    """Classes without subclasses that no method is made of."""
    tower = {key for name in METHODS for key in mro(method(name))}
    inner = {base for key in classes() for base in _bases(key)}
    return [key for key in classes() if key not in tower | inner and not _is_apart(key)]


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}


@cache
def methods_of(key: Key) -> dict[str, bool]:
    """Methods and properties that a class defines, and whether each has a body of its own."""
    nodes = [n for n in classes()[key].body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {n.name: "abstractmethod" not in _decorators(n) for n in nodes if "overload" not in _decorators(n)}


@cache
def written_by(key: Key) -> frozenset[str]:
    """Attributes that a class assigns on ``self``."""
    stored = (n for n in ast.walk(classes()[key]) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return frozenset(n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self")


def names_on(key: Key) -> set[str]:
    return {name for base in mro(key) for name in (*methods_of(base), *written_by(base))}


def written_on(key: Key) -> set[str]:
    return {name for base in mro(key) for name in written_by(base)}


def in_chains(keys: Iterable[Key], length: int) -> int:
    """Bodies of names that so many classes of one object define, special methods left out."""
    found: set[tuple[Key, str]] = set()
    for key in keys:
        bodies: defaultdict[str, list[Key]] = defaultdict(list)
        for base in mro(key):
            for name, has_body in methods_of(base).items():
                if has_body and not name.startswith("__"):
                    bodies[name].append(base)
        found |= {(base, name) for name, bases in bodies.items() if len(bases) >= length for base in bases}
    return len(found)


# ---------------------------------------------------------------------- accesses and sizes
@cache
def foreign_underscores() -> Counter[str]:
    """Accesses to an underscore attribute of another object, by module; torch's own do not count."""
    count: Counter[str] = Counter()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            owner, root = ast.unparse(node.value), node.value
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            torchs = isinstance(root, ast.Name) and root.id in {"torch", "dist", "distributed_c10d", "c10d", "sys"}
            public = node.attr in {"_replace", "_asdict"} or node.attr in PRIVATE_IN_TORCH
            if not public and owner not in {"self", "cls", "super()"} and not torchs:
                count[module] += 1
    return count


@cache
def lengths() -> dict[str, int]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {p.relative_to(PACKAGE).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in paths}


def long_functions() -> int:
    """Functions of more than 35 lines, their docstrings left out."""
    count = 0
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            told = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
            count += (node.end_lineno or 0) - node.lineno + 1 - told > LONG_FUNCTION
    return count


def top_modules() -> list[str]:
    return [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]


def folders() -> list[str]:
    return [path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))]


def named_by_a_verb() -> set[str]:
    return {name.removesuffix(".py") for name in lengths() if name.removesuffix(".py").endswith(("ing", "ed"))}


def holders() -> set[str]:
    """Classes that keep an optimizer in an attribute of theirs."""
    return {
        f"{m}.{name}" for m, name in classes() if written_by((m, name)) & {"optimizer", "_optimizer", "opt", "_opt"}
    }


def layering_rows() -> int:
    """Rows of the table of test_layering.py."""
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text(encoding="utf-8"))
    (table,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "MAY_IMPORT")
    assert isinstance(table, ast.Dict)
    return len(table.keys)


@cache
def measured() -> dict[str, int]:
    """All numbers of the table, as they are now."""
    roots = [method(name) for name in METHODS]
    sizes = {key: len(methods_of(key)) for key in classes() if not _is_apart(key)}
    base = next(key for key in sizes if key[1] == "SecondOrderOptimizer")
    rest = {key: size for key, size in sizes.items() if key != base}
    found = {f"{name}: classes": len(mro(key)) for name, key in zip(METHODS, roots, strict=True)}
    found |= {f"{name}: names on self": len(names_on(key)) for name, key in zip(METHODS, roots, strict=True)}
    found |= {f"{name}: attributes written": len(written_on(key)) for name, key in zip(METHODS, roots, strict=True)}
    return found | {
        "methods: bodies in chains of 2 or more": in_chains(roots, 2),
        "methods: bodies in chains of 3 or more": in_chains(roots, 3),
        "others: bodies in chains of 2 or more": in_chains(others(), 2),
        "others: bodies in chains of 3 or more": in_chains(others(), 3),
        "others: most names on one object": max(len(names_on(key)) for key in others()),
        "SecondOrderOptimizer: its own methods": sizes[base],
        "largest other class: its own methods": max(rest.values()),
        "classes with more than 25 methods": sum(size > MANY_METHODS for size in rest.values()),
        "classes that write more than 15 attributes": sum(len(written_by(key)) > MANY_ATTRIBUTES for key in sizes),
        "accesses to underscore attributes of others": sum(foreign_underscores().values()),
        "height of imports": import_height(),
        "modules at the top level": len(top_modules()),
        "folders at the top level": len(folders()),
        "modules named by a verb, without reason": len(named_by_a_verb() - NAMED_BY_A_VERB),
        "modules of more than 400 lines": sum(lines > LONG_MODULE for lines in lengths().values()),
        "functions of more than 35 lines": long_functions(),
        "rows of the layering table": layering_rows(),
        "lines": sum(lengths().values()),
    }


# ---------------------------------------------------------------------- tests
def test_every_number_has_a_ceiling() -> None:
    assert measured().keys() == NUMBERS.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_only_fall(name: str) -> None:
    value, (ceiling, target) = measured()[name], NUMBERS[name]
    assert value <= ceiling, f"{name}: {value}, but it may be {ceiling} at most, and is to become {target}"
    fell = ceiling > target and value < ceiling - ceiling // 50
    assert not fell, f"{name} fell to {value}: lower its ceiling in NUMBERS from {ceiling}"


def test_reasons_for_names_of_files_are_not_left_over() -> None:
    assert named_by_a_verb() >= NAMED_BY_A_VERB, f"delete {sorted(NAMED_BY_A_VERB - named_by_a_verb())}"


def test_reasons_for_private_names_of_torch_are_not_left_over() -> None:
    used = {node.attr for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert used >= PRIVATE_IN_TORCH.keys(), f"delete {sorted(PRIVATE_IN_TORCH.keys() - used)}"


def test_no_part_holds_the_optimizer() -> None:
    assert holders() == MAY_HOLD_AN_OPTIMIZER


def test_folders_export_only_public_names() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        folder = path.parent.relative_to(PACKAGE).as_posix().removeprefix(".")
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert isinstance(body[0], ast.Expr), f"{folder}: its __init__.py needs a docstring"
        assert len(body) == 1 or folder in EXPORTING, f"{folder}: its __init__.py exports names that are not public"
