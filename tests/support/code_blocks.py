"""Code blocks of the documentation: found, sorted by language, and run.

Python blocks of one page run in order and share their names, as a reader would type them. A comment in the line before
the fence changes that, with one or more of these words::

    <!-- example: slow -->          left to the slow tests
    <!-- example: fragment -->      a piece that cannot run alone; it has to compile
    <!-- example: integrations -->  needs transformers, lightning and the like: run in their environment only
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [page for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG") if (page := ROOT / f"{name}.md").exists()]
PAGES += sorted(DOCS.rglob("*.md"))

MARKS = {"slow", "fragment", "integrations"}
#: Languages of blocks that are commands for a shell.
SHELL = {"console", "bash"}

FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- example: (?P<marks>[\w ]+) -->\n(?P=indent))?"
    r"(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence)[ \t]*$",
    re.M | re.S,
)
COMMAND = re.compile(r"`(python -m benchmarks[^`]*)`")


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        language: The word after the fence.
        marks: What the comment before it says.
        line: Lines of the page before the code.
        code: Its text, without the indentation of the fence.
    """

    language: str
    marks: frozenset[str]
    line: int
    code: str


def script(name: str) -> ModuleType:
    """A script beside the pages, which lie outside any package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)
        marks = frozenset((match["marks"] or "").split())
        line = text[: match.start("code")].count("\n")
        assert marks <= MARKS, f"{name_of(page)}:{line}: unknown mark {sorted(marks - MARKS)}"
        yield Block(match["language"], marks, line, code)


def examples(page: Path) -> Iterator[Block]:
    """The Python blocks of a page."""
    return (block for block in blocks(page) if block.language == "python")


def run(page: Path, allowed: set[str]) -> dict[str, object]:
    """Run the Python blocks of a page whose marks are all allowed; the names that they leave."""
    namespace: dict[str, object] = {"__name__": f"example_{page.stem}"}
    for block in examples(page):
        # Empty lines before the code make a traceback name the line of the page.
        code = compile("\n" * block.line + block.code, name_of(page), "exec")
        if block.marks <= allowed:
            exec(code, namespace)
    return namespace


def pages_with(wanted: set[str]) -> list[Path]:
    """Pages with a Python block that runs, and whose marks are these and no others.

    Tutorials are left out: tests/test_tutorials.py runs their scripts.
    """
    pages = [page for page in PAGES if page.parent != DOCS / "tutorials"]
    return [page for page in pages if any(block.marks == wanted for block in examples(page))]


def commands(page: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every command for a shell: in blocks of their own, or of the benchmarks in a sentence."""
    for block in blocks(page):
        if block.language in SHELL:
            prompt = any(line.startswith("$ ") for line in block.code.splitlines())
            for i, line in enumerate(block.code.replace("\\\n", "  ").splitlines()):
                if line.strip() and (line.startswith("$ ") or not prompt):
                    yield block.line + i + 1, line.removeprefix("$ ")
    text = page.read_text(encoding="utf-8")
    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in COMMAND.finditer(prose):
        yield prose[: match.start()].count("\n") + 1, match[1].replace("\n", " ")


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Variables that a command sets, and its words; comments are left out."""
    words = shlex.split(command, comments=True)
    variables: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words
