"""Tests that the documentation names are there, under that name."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# With the folder of all tests before it, or with its own folder alone as in long tables.
NAMED = re.compile(r"`(?:tests/)?((?<=tests/)test_\w+\.py|(?!tests/)[a-z_]+/test_\w+\.py)(?:::(test_\w+))?`")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCES = {page.relative_to(ROOT).as_posix(): NAMED.findall(page.read_text(encoding="utf-8")) for page in PAGES}


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", [page for page, found in REFERENCES.items() if found])
def test_named_tests_exist(page: str) -> None:
    missing = []
    for file, name in REFERENCES[page]:
        path = ROOT / "tests" / file
        if not path.exists() or (name and name not in functions(path)):
            missing.append(f"{file}::{name}" if name else file)
    assert not missing, f"{page} names {missing}"


def test_the_pages_that_name_tests_are_read() -> None:
    assert len(REFERENCES["docs/reliability.md"]) > 40
    assert REFERENCES["docs/migrating/kfac-pytorch.md"]
