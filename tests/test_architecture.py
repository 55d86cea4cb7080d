"""Metrics of the package's structure, computed from the syntax trees, that may only decrease.

``NUMBERS`` contains a ceiling and a target for each metric. A value above its ceiling fails: the change that increased
it needs another design. A value well below its ceiling fails, too, so that the ceiling is lowered to the new value.
``METHODS`` limits the six optimizers including everything that they inherit. "Others" are all remaining classes except
strategies, real or simulated, and adapters of layer types, which have their own hierarchies.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache

from tests.support.source import PACKAGE, file_of, imports, inside, trees
from tests.test_layering import MAY_IMPORT

#: Files named by a participle or a gerund that are public names or standard terms.
NAMED_BY_A_VERB = {
    "switching", "capture.layers.embedding",
    "diagnostics.preconditioning", "diagnostics.profiling", "diagnostics.timing", "integrations.lightning",
}  # fmt: skip
#: Folders whose ``__init__.py`` exports public names. All others contain only a docstring.
EXPORTING = {"", "comm", "diagnostics"}
#: Classes that store an optimizer: they observe or schedule one from outside, or torch passes them one.
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
#: For each method: the number of its classes, of the names on ``self``, and of the attributes assigned there.
METHODS = {
    "KFAC": (2, 65, 15), "EKFAC": (2, 65, 15), "HyLo": (2, 66, 15), "MFAC": (2, 65, 15), "SparseMFAC": (3, 65, 15),
    "GGT": (2, 65, 15),
}  # fmt: skip
Key = tuple[str, str]  # module, class


def import_height() -> int:
    """Return the number of modules in the longest chain of imports (also in functions); a cycle counts once."""
    imported = {name: inside(imports(tree, with_types=False)) - {name} for name, tree in trees().items()}
    heights: dict[str, int] = {}

    def height(module: str, chain: tuple[str, ...]) -> int:
        if module in chain:
            return 0
        if module not in heights:
            heights[module] = 1 + max((height(m, (*chain, module)) for m in imported[module]), default=0)
        return heights[module]

    return max(height(module, ()) for module in trees())


# ---------------------------------------------------------------------- classes
@cache
def classes() -> dict[Key, ast.ClassDef]:
    return {(m, n.name): n for m, tree in trees().items() for n in tree.body if isinstance(n, ast.ClassDef)}


def _bases(key: Key) -> list[Key]:
    """Return the bases that belong to the package, resolved through the imports of the module."""
    module = key[0]
    known = {name: (m, name) for m, name in classes() if m == module}
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").removeprefix("secondorder.")
            known |= {a.asname or a.name: (base, a.name) for a in node.names if (base, a.name) in classes()}
    plain = (n.value if isinstance(n, ast.Subscript) else n for n in classes()[key].bases)
    found = [known[n.id] for n in plain if isinstance(n, ast.Name) and n.id in known]
    return [base for base in found if base != key]


@cache
def mro(key: Key) -> tuple[Key, ...]:
    """Return the classes of the package in Python's method resolution order."""
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
    """Return the classes without subclasses that no method inherits from."""
    tower = {key for name in METHODS for key in mro(method(name))}
    inner = {base for key in classes() for base in _bases(key)}
    return [key for key in classes() if key not in tower | inner and not _is_apart(key)]


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}


@cache
def methods_of(key: Key) -> dict[str, bool]:
    """Return the methods and properties that a class defines, and whether each is concrete."""
    nodes = [n for n in classes()[key].body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {n.name: "abstractmethod" not in _decorators(n) for n in nodes if "overload" not in _decorators(n)}


@cache
def written_by(key: Key) -> frozenset[str]:
    """Return the attributes that a class assigns on ``self``."""
    stored = (n for n in ast.walk(classes()[key]) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return frozenset(n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self")


def written_on(key: Key) -> set[str]:
    return {name for base in mro(key) for name in written_by(base)}


def names_on(key: Key) -> set[str]:
    return written_on(key) | {name for base in mro(key) for name in methods_of(base)}


def in_chains(keys: Iterable[Key], length: int) -> int:
    """Count the bodies of names that at least `length` classes of one object define, without special methods."""
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
def foreign_underscores() -> int:
    """Count accesses to underscore attributes of other objects, except torch's own."""
    count = 0
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        owner, root = ast.unparse(node.value), node.value
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        torchs = isinstance(root, ast.Name) and root.id in {"torch", "dist", "distributed_c10d", "c10d", "sys"}
        public = node.attr in {"_replace", "_asdict"} or node.attr in PRIVATE_IN_TORCH
        count += not (public or torchs or owner in {"self", "cls", "super()"})
    return count


@cache
def lengths() -> dict[str, int]:
    return {name: len(file_of(name).read_text(encoding="utf-8").splitlines()) for name in trees()}


def long_functions() -> int:
    """Count functions of more than 35 lines without their docstrings."""
    count = 0
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
            count += (node.end_lineno or 0) - node.lineno + 1 - docstring > LONG_FUNCTION
    return count


def named_by_a_verb() -> set[str]:
    return {name for name in trees() if name.endswith(("ing", "ed")) and file_of(name).stem != "__init__"}


def method_roots() -> list[Key]:
    return [method(name) for name in METHODS]


BASE = ("optimizer", "SecondOrderOptimizer")


def sizes_of_the_rest() -> list[int]:
    """Return the number of methods of each class outside ``SecondOrderOptimizer``, strategies and adapters."""
    return [len(methods_of(key)) for key in classes() if key != BASE and not _is_apart(key)]


#: The ceiling and the target of each metric, and how it is computed.
NUMBERS: dict[str, tuple[int, int, Callable[[], int]]] = {
    "methods: bodies in chains of 2 or more": (0, 8, lambda: in_chains(method_roots(), 2)),
    "methods: bodies in chains of 3 or more": (0, 0, lambda: in_chains(method_roots(), 3)),
    "others: bodies in chains of 2 or more": (197, 80, lambda: in_chains(others(), 2)),
    "others: bodies in chains of 3 or more": (0, 0, lambda: in_chains(others(), 3)),
    "others: most names on one object": (71, 75, lambda: max(len(names_on(key)) for key in others())),
    "SecondOrderOptimizer: its own methods": (50, 38, lambda: len(methods_of(BASE))),
    "largest other class: its own methods": (29, 25, lambda: max(sizes_of_the_rest())),
    "classes with many methods": (2, 0, lambda: sum(size > MANY_METHODS for size in sizes_of_the_rest())),
    "classes that write many attributes": (1, 0, lambda: sum(
        len(written_by(key)) > MANY_ATTRIBUTES for key in classes() if not _is_apart(key)
    )),
    "accesses to underscore attributes of others": (0, 0, foreign_underscores),
    "height of imports": (15, 14, import_height),
    "modules at the top level": (13, 10, lambda: len([*PACKAGE.glob("*.py")]) - 1),
    "folders at the top level": (12, 12, lambda: len({path.parent for path in PACKAGE.glob("*/*.py")})),
    "modules named by a verb, without reason": (0, 0, lambda: len(named_by_a_verb() - NAMED_BY_A_VERB)),
    "long modules": (5, 0, lambda: sum(lines > LONG_MODULE for lines in lengths().values())),
    "long functions": (6, 0, long_functions),
    "rows of the layering table": (17, 17, lambda: len(MAY_IMPORT)),
    "lines": (39861, 28500, lambda: sum(lengths().values())),
}  # fmt: skip


# ---------------------------------------------------------------------- tests
def test_numbers_only_fall() -> None:
    wrong = []
    for name, (ceiling, target, count) in NUMBERS.items():
        value = count()
        if value > ceiling:
            wrong.append(f"{name}: {value}, but at most {ceiling} is allowed, and the target is {target}")
        if ceiling > target and value < ceiling - ceiling // 50:
            wrong.append(f"{name} fell to {value}: lower its ceiling in NUMBERS from {ceiling}")
    assert not wrong, "\n".join(wrong)


def test_methods_do_not_grow() -> None:
    keys = {name: method(name) for name in METHODS}
    found = {name: (len(mro(key)), len(names_on(key)), len(written_on(key))) for name, key in keys.items()}
    wrong = {
        name: now for name, now in found.items() if any(n > most for n, most in zip(now, METHODS[name], strict=True))
    }
    assert not wrong, f"{wrong}, where at most {METHODS} are allowed"


def test_reasons_are_not_left_over() -> None:
    used = {node.attr for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert used >= PRIVATE_IN_TORCH.keys(), f"delete {sorted(PRIVATE_IN_TORCH.keys() - used)}"
    assert named_by_a_verb() >= NAMED_BY_A_VERB, f"delete {sorted(NAMED_BY_A_VERB - named_by_a_verb())}"


def test_only_listed_classes_store_an_optimizer() -> None:
    names = {"optimizer", "_optimizer", "opt", "_opt"}
    assert {".".join(key) for key in classes() if written_by(key) & names} == MAY_HOLD_AN_OPTIMIZER


def test_folders_export_only_public_names() -> None:
    for name, tree in trees().items():
        if file_of(name).stem == "__init__":
            assert isinstance(tree.body[0], ast.Expr), f"{name}: its __init__.py needs a docstring"
            assert len(tree.body) == 1 or name in EXPORTING, f"{name} exports names that are not public"
