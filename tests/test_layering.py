"""The layers of the package: which parts may import which, checked with the syntax trees.

    methods ──► preconditioners ──► parallel ──► curvature ──► capture ──► linalg

No layer imports a layer to its left. ``MAY_IMPORT`` contains the whole table with one row for each folder and for each
group of modules at the top level. ``INSIDE`` orders the folders inside a folder. ``KNOWN_EXCEPTIONS`` lists imports
that point upwards, with the reason; that list may only become shorter.

Only ``comm/`` may use ``torch.distributed``. The modules of ``PURE`` take and return tensors or numbers, and no network
or parameter group. A file that belongs to no row of ``MAY_IMPORT`` fails the test until it is added to one.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache

from tests.support.source import PACKAGE, ROOT, dotted, file_of, imports, inside, trees

#: Modules at the top level that share a row.
TOP = {
    "factory": "entry", "schedule": "entry", "__main__": "entry",
    "optimizer": "optimizer",
    "parameters": "preconditioners", "update": "preconditioners", "switching": "policy", "signals": "policy",
    "options": "base", "config": "base", "frames": "base", "runtime": "base",
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
    "plan": {"preconditioners", "parallel", "curvature", "capture", "comm", "linalg", "base"},
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

#: Imports that point upwards, by reason: module → modules. No import may be added, and removed ones are deleted here.
KNOWN_EXCEPTIONS: dict[str, dict[str, set[str]]] = {
    "Copies of a model must come without the hooks of attention": {"capture.layers.attention": {"capture.copies"}},
    "Plan and RankPlan are public names of secondorder.comm": {"comm": {"plan.plan"}},
    "Tensors that functions of torch's checkpoints have read may be sharded": {"frames": {"comm.layout"}},
    "Each mix-in adds its own rows to describe()": {"preconditioners.window_plan": {"diagnostics.describe"}},
}

# A constructor's signature names the type of `comm=` so that tools can resolve it; only optimizer.py uses a strategy.
METHODS_MAY_NAME = {"secondorder.comm.strategy.CommStrategy"}
#: Modules that take and return tensors or numbers, and the rows of the table that each may import.
PURE: dict[str, set[str]] = {
    "capture.fisher.likelihood": set(),
    "capture.statistics.averages": {"linalg"},
    "comm.placement": set(),
    "curvature.extremes": {"linalg"},
    "curvature.refresh_schedule": set(),
    "curvature.window.rows": set(),
    "curvature.window.shards": set(),
    "curvature.schema": {"curvature"},
} | {name: {"linalg"} for name in trees() if name.split(".")[0] == "linalg"}
PURE_FORBIDDEN = {"Module", "Parameter", "Optimizer", "param_groups"}
#: Names that give access to the frames of callers, which depend on other libraries.
OF_FRAMES = {
    "_getframe", "_current_frames", "currentframe", "getouterframes", "getinnerframes", "walk_stack", "extract_stack",
    "f_back", "f_code", "f_globals", "f_locals", "tb_frame", "gi_frame",
}  # fmt: skip
OF_STACKS = {"inspect.stack", "inspect.trace"}


def row_of(name: str) -> str:
    """Return the row of a dotted name in the package: its folder, or the group of a module at the top level."""
    first = name.split(".")[0]
    return first if (PACKAGE / first).is_dir() else TOP.get(first, first)


def excepted(name: str) -> set[str]:
    return set().union(*(modules.get(name, set()) for modules in KNOWN_EXCEPTIONS.values()))


def is_upward(name: str, other: str) -> bool:
    """Return whether the tables forbid that one module imports the other."""
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


@cache
def identifiers(name: str) -> list[tuple[str, int]]:
    """Return the dotted names that a module uses, and their lines; imported names have line 0."""
    nodes = (node for node in ast.walk(trees()[name]) if isinstance(node, ast.Name | ast.Attribute))
    return [(n, 0) for n in imports(trees()[name])] + [(dotted(node), node.lineno) for node in nodes]


def assert_none(offenders: Iterable[str]) -> None:
    """Fail with every offender at once."""
    assert not (found := list(offenders)), "\n".join(["", *found])


def test_dependencies_point_one_way() -> None:
    assert trees(), "no Python files found, so every test here would pass"
    found = []
    for name, tree in trees().items():
        own = row_of(name)
        if name and own not in MAY_IMPORT:
            found.append(f"{name} belongs to no known part: add {own!r} to MAY_IMPORT or TOP")
        elif name:
            upward = {other for other in inside(imports(tree, with_types=False)) if is_upward(name, other)}
            if wrong := upward - excepted(name):
                found.append(f"{name} imports {sorted(wrong)}; {own} may import only {sorted(MAY_IMPORT[own])}")
            if gone := excepted(name) - upward:
                found.append(f"{name} no longer imports {sorted(gone)}: delete that from KNOWN_EXCEPTIONS")
    assert_none(found)


def test_exceptions_name_modules_that_exist() -> None:
    named = {name for modules in KNOWN_EXCEPTIONS.values() for name in modules} | PURE.keys()
    assert named <= trees().keys(), f"delete {sorted(named - trees().keys())}"


def test_methods_leave_communication_to_the_optimizer() -> None:
    methods = {n: t for n, t in trees().items() if n.count(".") == 1 and n.startswith("methods.")}
    named = {n: {i for i in imports(t) if i.startswith("secondorder.comm")} for n, t in methods.items()}
    assert_none(
        f"{name} imports {sorted(found - METHODS_MAY_NAME)}"
        for name, found in named.items()
        if not name.endswith("_optimizer") and found - METHODS_MAY_NAME
    )


def test_the_table_has_no_cycles() -> None:
    needs = {name: set(others) for name, others in MAY_IMPORT.items()}
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"cycle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


def test_only_comm_uses_torch_distributed() -> None:
    assert_none(
        f"{name}, line {line}: {used}; ask the communication strategy instead"
        for name in trees()
        if name.split(".")[0] != "comm"
        for used, line in identifiers(name)
        if used.startswith("torch.distributed")
    )


def test_pure_modules_use_only_tensors() -> None:
    known = {"torch", "secondorder"} | sys.stdlib_module_names
    for name, allowed in PURE.items():
        tree = trees()[name]
        outside = {n.split(".")[0] for n in imports(tree)} - known
        assert not outside, f"{name} imports {sorted(outside)}; it may import torch and the standard library only"
        assert {row_of(n) for n in inside(imports(tree))} <= allowed, f"{name} may import only {sorted(allowed)}"
        found = [f"{n} (line {line})" for n, line in identifiers(name) if n.rpartition(".")[2] in PURE_FORBIDDEN]
        assert not found, f"{name} mentions {found}; it takes and returns tensors or numbers"


def test_the_library_does_not_print() -> None:
    assert_none(
        f"{name} prints in line {node.lineno}: use logging, warnings or a returned text"
        for name, tree in trees().items()
        if name != "__main__"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


def test_no_path_leads_out_of_the_repository() -> None:
    texts = {name: file_of(name).read_text(encoding="utf-8") for name in trees()}
    assert_none(name for name, text in texts.items() if "../" in text or str(ROOT) in text)


def test_only_one_module_reads_frames() -> None:
    used = [(name, n, line) for name in trees() for n, line in identifiers(name)]
    found = [(name, n, line) for name, n, line in used if n in OF_STACKS or n.rpartition(".")[2] in OF_FRAMES]
    assert "frames" in {name for name, *_ in found}, "the search does not find the names that read frames"
    assert_none(f"{name}, line {line}: {n}; move it to frames.py" for name, n, line in found if name != "frames")
