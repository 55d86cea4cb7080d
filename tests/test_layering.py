"""Who may import whom inside the package, read from the syntax trees.

    methods ──► optimizer ──► {comm, curvature, update}
    methods ──► {curvature, linalg}

and nothing below imports anything above; ``MAY_IMPORT`` has the whole table.

Only ``comm/`` may know ``torch.distributed``. The modules of ``PURE`` take and return tensors or numbers: no network,
no parameter group. A file that belongs to no part named in ``MAY_IMPORT`` fails the test until it is given a row there.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "secondorder"
FILES = sorted(PACKAGE.rglob("*.py"))

# part → parts it may import (itself always)
MAY_IMPORT = {
    # of comm only the name, see below
    "methods": {
        "scaling", "rebasing", "factored", "factorising", "observing", "switched", "rowwise", "switching", "trial",
        "layerwise", "capturing", "windowed", "units", "optimizer", "lifecycle", "overdamping",
        "curvature", "linalg", "options", "comm",
    },
    "factory": {"methods", "optimizer", "comm", "curvature"},
    # callbacks for trainers and loggers: see an optimizer from outside
    "integrations": {"diagnostics", "optimizer"},
    # layer methods with Kronecker factors, with damping that is judged by trial steps, with a quadratic model of them
    "factored": {
        "overlapping", "factorising", "observing", "capturing", "trial", "frames", "lifecycle",
        "curvature", "linalg", "options",
    },
    "overlapping": {"keeping", "capturing", "background", "factorising", "lifecycle", "curvature"},
    "factorising": {"linalg"},
    "background": set(),
    "keeping": {"observing", "lifecycle", "curvature", "triangles"},
    # layer methods with rows of examples
    "switched": {"rehearsing_rows", "gathering", "switching", "lifecycle", "curvature", "options"},
    "gathering": {"substituting", "rowwise", "comm", "curvature", "linalg"},
    "substituting": {"rowwise", "factorising", "lifecycle", "curvature", "linalg"},
    "rowwise": {"observing", "layerwise", "lifecycle", "comm", "curvature", "linalg"},
    "observing": {"adaptive", "layerwise", "lifecycle", "curvature", "options"},
    "scaling": {"rebasing", "lifecycle", "curvature", "linalg", "options"},
    "rebasing": {"factored", "factorising", "lifecycle", "curvature", "linalg", "options"},
    "adaptive": {"modelled", "trial", "optimizer", "lifecycle", "curvature", "linalg"},
    "modelled": {"trial", "layerwise", "optimizer", "lifecycle", "curvature", "update", "options"},
    "trial": {"curvature", "options"},
    # the two families: stages of the step over the blocks of a module, and over a window of gradients
    "missing": {"lifecycle", "curvature"},
    "layerwise": {
        "missing", "overdamping", "optimizer", "serving", "capturing", "frames", "lifecycle",
        "comm", "curvature", "update", "linalg", "options",
    },
    "serving": {"refreshing", "comm", "curvature", "linalg"},
    "refreshing": {"reducing", "curvature", "linalg"},
    "reducing": {"capturing", "lifecycle", "comm", "curvature", "linalg"},
    "capturing": {"frames", "lifecycle", "comm", "curvature", "options"},
    "windowed": {
        "overdamping", "optimizer", "sharding", "units", "lifecycle",
        "comm", "curvature", "update", "linalg", "options",
    },
    "sharding": {"recutting", "windowing", "units", "lifecycle", "comm", "curvature"},
    "windowing": {"partitioning", "units", "comm", "diagnostics", "lifecycle", "curvature", "options"},
    "partitioning": {"checkpoint", "curvature"},
    "units": {"lifecycle", "curvature"},
    # SecondOrderOptimizer: its step, and the mix-ins it is made of
    "optimizer": {
        "checkpoint", "planner", "pieces", "overdamping", "frames",
        "comm", "diagnostics", "lifecycle", "curvature", "update", "linalg", "options",
    },
    # parameters that are cut over ranks, and windows of their gradients
    "pieces": {"comm", "lifecycle", "update"},
    "recutting": {"pieces", "windowing", "units", "comm", "lifecycle", "curvature"},
    # a dry run plays the steps of both families
    "planner": {"rehearsing", "windowing", "comm", "curvature", "lifecycle", "options"},
    "rehearsing_rows": {"rehearsing", "gathering", "rowwise", "comm", "lifecycle", "curvature"},
    "rehearsing": {"refreshing", "reducing", "sharding", "windowing", "comm", "lifecycle", "curvature"},
    "diagnostics": {"lifecycle", "comm", "curvature", "linalg", "options"},
    "checkpoint": {"saved", "frames", "lifecycle", "comm", "curvature", "options"},
    "saved": {"lifecycle", "comm", "options"},
    "schedule": {"lifecycle", "options"},
    "signals": set(),
    "switching": {"options", "signals"},
    "lifecycle": {"overdamping", "frames", "comm", "curvature", "linalg", "options"},
    # what is read from the frames of callers
    "frames": {"comm"},
    # a warning of damping that hides the curvature
    "overdamping": {"curvature"},
    "nn": {"curvature"},
    "curvature": {"linalg"},
    "comm": {"triangles"},
    "triangles": set(),
    "linalg": set(),
    "options": set(),
    "update": set(),
}  # fmt: skip
# A constructor's signature names the type of `comm=` so that tools can resolve it; what a strategy does is for
# optimizer.py alone.
METHODS_MAY_NAME = {"secondorder.comm.CommStrategy"}
PURE = {
    "update.py": set(),
    "linalg.py": set(),
    "triangles.py": set(),
    "curvature/statistics.py": {"linalg"},
    "curvature/gram.py": {"linalg"},
    "curvature/rows.py": set(),
    "curvature/schema.py": {"curvature"},
    "curvature/shards.py": set(),
    "curvature/inverse_fisher.py": {"linalg"},
    "curvature/kernel.py": {"linalg"},
    "curvature/woodbury.py": {"linalg", "curvature"},
    "curvature/stacks.py": set(),
    "curvature/likelihood.py": set(),
    "curvature/quadratic.py": set(),
    "curvature/scale.py": {"linalg"},
    "curvature/orthogonal.py": set(),
    "curvature/selection.py": {"linalg"},
    "curvature/extremes.py": {"linalg"},
    "comm/placement.py": set(),
}
PURE_FORBIDDEN = {"Module", "Parameter", "Optimizer", "param_groups"}
#: What reads the frames of callers, which depend on code that is not ours.
OF_FRAMES = {
    "_getframe", "_current_frames", "currentframe", "getouterframes", "getinnerframes", "walk_stack", "extract_stack",
    "f_back", "f_code", "f_globals", "f_locals", "tb_frame", "gi_frame",
}  # fmt: skip
OF_STACKS = {"inspect.stack", "inspect.trace"}


def part(path: Path) -> str:
    """Part that a file belongs to: its folder below the package, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


def inside(names: Iterator[str]) -> set[str]:
    """Parts of the package among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("secondorder.")}


def identifiers(module: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno


def looks_at_frames(path: Path) -> list[str]:
    """What a file uses to read the frames of its callers."""
    module = tree(path)
    names = [(n, 0) for n in imports(module)] + list(identifiers(module))
    return [f"{n} (line {line})" for n, line in names if n in OF_STACKS or n.rsplit(".", 1)[-1] in OF_FRAMES]


def ids(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_package_is_there() -> None:
    assert FILES, "no Python files found: every other test here would pass by finding nothing"


@pytest.mark.parametrize("path", [f for f in FILES if f.parent != PACKAGE or f.stem != "__init__"], ids=ids)
def test_dependencies_point_one_way(path: Path) -> None:
    own = part(path)
    assert own in MAY_IMPORT, f"{ids(path)} belongs to no known part: give {own!r} a row in MAY_IMPORT"
    wrong = inside(imports(tree(path), with_types=False)) - MAY_IMPORT[own] - {own}
    assert not wrong, f"{ids(path)} imports {sorted(wrong)}; {own} may import only {sorted(MAY_IMPORT[own])}"


@pytest.mark.parametrize("path", [f for f in FILES if part(f) == "methods"], ids=ids)
def test_methods_leave_communication_to_the_optimizer(path: Path) -> None:
    named = {n for n in imports(tree(path)) if n.startswith("secondorder.comm")}
    assert named <= METHODS_MAY_NAME, f"{ids(path)} imports {sorted(named - METHODS_MAY_NAME)}"


def test_no_part_imports_another_in_a_circle() -> None:
    needs = {name: set(others) for name, others in MAY_IMPORT.items()}
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"circle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


@pytest.mark.parametrize("path", [f for f in FILES if part(f) != "comm"], ids=ids)
def test_only_comm_knows_torch_distributed(path: Path) -> None:
    module = tree(path)
    named = [n for n in imports(module) if n.startswith("torch.distributed")]
    used = [f"{n} (line {line})" for n, line in identifiers(module) if n.startswith("torch.distributed")]
    assert not named + used, f"{ids(path)}: {named + used}; ask the communication strategy instead"


@pytest.mark.parametrize("path", [f for f in FILES if part(f) != "frames"], ids=ids)
def test_only_one_module_looks_at_frames(path: Path) -> None:
    found = looks_at_frames(path)
    assert not found, f"{ids(path)}: {found}; put what reads frames into frames.py"


def test_the_module_of_frames_would_be_found() -> None:
    assert looks_at_frames(PACKAGE / "frames.py")


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_only_tensors(name: str) -> None:
    path = PACKAGE / name
    if not path.exists():
        assert name == "comm/placement.py", f"{name} is gone: mend PURE"  # comes with the strategies that need it
        return
    module = tree(path)
    outside = {n.split(".")[0] for n in imports(module)} - {"torch", "secondorder"} - sys.stdlib_module_names
    assert not outside, f"{name} imports {sorted(outside)}; it may import torch and the standard library only"
    assert inside(imports(module)) <= PURE[name], f"{name} may import only {sorted(PURE[name])} of the package"
    parts = [(n.rsplit(".", 1)[-1], line) for n, line in identifiers(module)]
    parts += [(n.rsplit(".", 1)[-1], 0) for n in imports(module)]
    found = [f"{n} (line {line})" for n, line in parts if n in PURE_FORBIDDEN]
    assert not found, f"{name} mentions {found}; it takes and returns tensors or numbers"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_the_library_does_not_print(path: Path) -> None:
    calls = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    lines = [call.lineno for call in calls if call.func.id == "print"]
    assert not lines, f"{ids(path)} prints in lines {lines}: use logging, warnings or a returned text"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_path_leads_out_of_the_repository(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "../" not in text
    assert str(ROOT) not in text
