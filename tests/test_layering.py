"""Who may import whom inside the package, read from the syntax trees.

    methods ──► preconditioners ──► parallel ──► curvature ──► capture ──► linalg

and nothing below imports anything above; ``MAY_IMPORT`` has the whole table, one row for each folder and for each group
of modules at the top level. ``INSIDE`` orders the folders inside a folder. Imports that point upwards are listed in
``KNOWN_EXCEPTIONS`` with the reason; that list may only become shorter.

Only ``comm/`` may know ``torch.distributed``. The modules of ``PURE`` take and return tensors or numbers: no
network and no parameter group. A file that belongs to no row of ``MAY_IMPORT`` fails the test until it is given one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "secondorder"
FILES = sorted(PACKAGE.rglob("*.py"))

#: Modules at the top level that share a row.
TOP = {
    "factory": "entry", "schedule": "entry", "__main__": "entry",
    "optimizer": "optimizer",
    "parameters": "preconditioners", "update": "preconditioners", "switching": "policy", "signals": "policy",
    "options": "base", "frames": "base", "runtime": "base",
    "nn": "nn",
}  # fmt: skip

# row → rows it may import (itself always)
MAY_IMPORT = {
    "entry": {"methods", "optimizer", "plan", "comm", "curvature", "base"},
    # callbacks for trainers and loggers: see an optimizer from outside
    "integrations": {"diagnostics", "optimizer"},
    # recipes make the parts that differ between methods; of comm only the name, see below
    "methods": {
        "optimizer", "preconditioners", "adaptation", "checkpoint",
        "parallel", "curvature", "capture", "comm", "linalg", "policy", "base",
    },
    # SecondOrderOptimizer owns all others
    "optimizer": {
        "preconditioners", "adaptation", "checkpoint", "plan", "diagnostics",
        "parallel", "curvature", "capture", "comm", "linalg", "base",
    },
    "plan": {"preconditioners", "parallel", "curvature", "capture", "comm", "base"},
    "checkpoint": {"preconditioners", "curvature", "comm", "base"},
    "adaptation": {"preconditioners", "curvature", "capture", "comm", "linalg", "base"},
    "diagnostics": {"preconditioners", "curvature", "capture", "comm", "linalg", "base"},
    "preconditioners": {"parallel", "curvature", "capture", "comm", "linalg", "base"},
    "parallel": {"curvature", "capture", "comm", "linalg", "base"},
    "curvature": {"capture", "linalg", "policy", "base"},
    "capture": {"linalg", "base"},
    "nn": {"capture"},
    "comm": {"linalg", "base"},
    "policy": {"base"},
    "linalg": set(),
    "base": {"linalg"},
}  # fmt: skip

# folder inside a folder → folders inside the same one that it may import ("" is the folder itself)
INSIDE = {
    "curvature": {"": {"window"}, "window": set()},
    "capture": {
        "": {"layers", "fisher", "statistics"},
        "fisher": {"statistics", "layers", ""},
        "statistics": {"layers"},
        "layers": set(),
    },
    "comm": {"": {"dedicated"}, "dedicated": {""}},
}

#: Imports that point upwards, by the reason: module → modules. None may be added, and one that is gone is deleted here.
KNOWN_EXCEPTIONS: dict[str, dict[str, set[str]]] = {
    "Copies of a model must come without the hooks of attention": {
        "capture.layers.projections": {"capture.copies"},
    },
    "Plan and RankPlan are public names of secondorder.comm": {
        "comm": {"plan.plan"},
    },
    "What the functions of torch's checkpoints have read may be sharded": {
        "frames": {"comm.layout"},
    },
    "Each mix-in adds its own rows to describe()": {
        "preconditioners.window_plan": {"diagnostics.describe"},
    },
}

# A constructor's signature names the type of `comm=` so that tools can resolve it; what a strategy does is for
# optimizer.py alone.
METHODS_MAY_NAME = {"secondorder.comm.strategy.CommStrategy"}
PURE = {
    "capture/fisher/likelihood.py": set(),
    "capture/statistics/averages.py": {"linalg"},
    "comm/placement.py": set(),
    "curvature/extremes.py": {"linalg"},
    "curvature/refresh_schedule.py": set(),
    "curvature/window/rows.py": set(),
    "curvature/window/shards.py": set(),
    "curvature/schema.py": {"curvature"},
} | {path.relative_to(PACKAGE).as_posix(): {"linalg"} for path in FILES if path.parent == PACKAGE / "linalg"}
PURE_FORBIDDEN = {"Module", "Parameter", "Optimizer", "param_groups"}


def name_of(path: Path) -> str:
    """Dotted name below the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def row_of(name: str) -> str:
    """Row of a dotted name below the package: its folder, or the group of a module at the top level."""
    first = name.split(".")[0]
    return first if (PACKAGE / first).is_dir() else TOP.get(first, first)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def for_types_only(module: ast.Module) -> set[ast.AST]:
    """Nodes under ``if TYPE_CHECKING:``, which never run."""
    blocks = [n for n in ast.walk(module) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports(module: ast.Module, *, with_types: bool = True) -> Iterator[str]:
    """Dotted names that a file imports; ``from a import b`` counts as ``a.b``."""
    skipped = set() if with_types else for_types_only(module)
    for node in ast.walk(module):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {name_of(path) for path in FILES}


def inside(names: Iterator[str]) -> set[str]:
    """Modules of the package among imported names, below the package."""
    found = {name.removeprefix("secondorder.") for name in names if name.startswith("secondorder.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in found}


def excepted(name: str) -> set[str]:
    return set().union(*(modules.get(name, set()) for modules in KNOWN_EXCEPTIONS.values()))


def is_upward(name: str, other: str) -> bool:
    """Whether the tables forbid that one module imports the other."""
    own, theirs = row_of(name), row_of(other)
    if own != theirs:
        return theirs not in MAY_IMPORT[own]
    if own not in INSIDE:
        return False
    place, at = (_folder_inside(n) for n in (name, other))
    return place != at and at not in INSIDE[own][place]


def _folder_inside(name: str) -> str:
    first, *rest = name.split(".")
    return rest[0] if rest and (PACKAGE / first / rest[0]).is_dir() else ""


def identifiers(module: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno


def ids(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_package_is_there() -> None:
    assert FILES, "no Python files found: every other test here would pass by finding nothing"


@pytest.mark.parametrize("path", [f for f in FILES if f.parent != PACKAGE or f.stem != "__init__"], ids=ids)
def test_dependencies_point_one_way(path: Path) -> None:
    name = name_of(path)
    own = row_of(name)
    assert own in MAY_IMPORT, f"{ids(path)} belongs to no known part: give {own!r} a row in MAY_IMPORT or TOP"
    upward = {other for other in inside(imports(tree(path), with_types=False)) if is_upward(name, other)}
    wrong, gone = upward - excepted(name), excepted(name) - upward
    assert not wrong, f"{ids(path)} imports {sorted(wrong)}; {own} may import only {sorted(MAY_IMPORT[own])}"
    assert not gone, f"{ids(path)} no longer imports {sorted(gone)}: delete that from KNOWN_EXCEPTIONS"


def test_exceptions_name_modules_that_exist() -> None:
    named = {name for modules in KNOWN_EXCEPTIONS.values() for name in modules}
    assert named <= MODULES, f"delete {sorted(named - MODULES)} from KNOWN_EXCEPTIONS"


_METHODS = [f for f in FILES if f.parent == PACKAGE / "methods" and not f.stem.endswith("_optimizer")]


@pytest.mark.parametrize("path", _METHODS, ids=ids)
def test_methods_leave_communication_to_the_optimizer(path: Path) -> None:
    named = {n for n in imports(tree(path)) if n.startswith("secondorder.comm")}
    assert named <= METHODS_MAY_NAME, f"{ids(path)} imports {sorted(named - METHODS_MAY_NAME)}"


def test_no_part_imports_another_in_a_circle() -> None:
    needs = {name: set(others) for name, others in MAY_IMPORT.items()}
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"circle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


@pytest.mark.parametrize("path", [f for f in FILES if PACKAGE / "comm" not in f.parents], ids=ids)
def test_only_comm_knows_torch_distributed(path: Path) -> None:
    module = tree(path)
    named = [n for n in imports(module) if n.startswith("torch.distributed")]
    used = [f"{n} (line {line})" for n, line in identifiers(module) if n.startswith("torch.distributed")]
    assert not named + used, f"{ids(path)}: {named + used}; ask the communication strategy instead"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_only_tensors(name: str) -> None:
    path = PACKAGE / name
    assert path.exists(), f"{name} is gone: delete its row in PURE"
    module = tree(path)
    outside = {n.split(".")[0] for n in imports(module)} - {"torch", "secondorder"} - sys.stdlib_module_names
    assert not outside, f"{name} imports {sorted(outside)}; it may import torch and the standard library only"
    assert {row_of(n) for n in inside(imports(module))} <= PURE[name], f"{name} may import only {sorted(PURE[name])}"
    parts = [(n.rsplit(".", 1)[-1], line) for n, line in identifiers(module)]
    parts += [(n.rsplit(".", 1)[-1], 0) for n in imports(module)]
    found = [f"{n} (line {line})" for n, line in parts if n in PURE_FORBIDDEN]
    assert not found, f"{name} mentions {found}; it takes and returns tensors or numbers"


@pytest.mark.parametrize("path", [f for f in FILES if f.stem != "__main__"], ids=ids)
def test_the_library_does_not_print(path: Path) -> None:
    calls = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    lines = [call.lineno for call in calls if call.func.id == "print"]
    assert not lines, f"{ids(path)} prints in lines {lines}: use logging, warnings or a returned text"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_path_leads_out_of_the_repository(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "../" not in text
    assert str(ROOT) not in text


#: What reads the frames of callers, which depend on code that is not ours.
OF_FRAMES = {
    "_getframe", "_current_frames", "currentframe", "getouterframes", "getinnerframes", "walk_stack", "extract_stack",
    "f_back", "f_code", "f_globals", "f_locals", "tb_frame", "gi_frame",
}  # fmt: skip


OF_STACKS = {"inspect.stack", "inspect.trace"}


def looks_at_frames(path: Path) -> list[str]:
    """What a file uses to read the frames of its callers."""
    module = tree(path)
    names = [(n, 0) for n in imports(module)] + list(identifiers(module))
    return [f"{n} (line {line})" for n, line in names if n in OF_STACKS or n.rsplit(".", 1)[-1] in OF_FRAMES]


@pytest.mark.parametrize("path", [f for f in FILES if name_of(f).split(".")[0] != "frames"], ids=ids)
def test_only_one_module_looks_at_frames(path: Path) -> None:
    found = looks_at_frames(path)
    assert not found, f"{ids(path)}: {found}; put what reads frames into frames.py"


def test_the_module_of_frames_would_be_found() -> None:
    assert looks_at_frames(PACKAGE / "frames.py")
