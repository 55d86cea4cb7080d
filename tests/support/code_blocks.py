"""Finds and runs the code blocks of the documentation.

Python blocks of one page run in order and share their names, as a reader would type them. A comment in the line before
the fence changes that, with one or more of these words::

    <!-- example: slow -->          only run by the slow tests
    <!-- example: fragment -->      cannot run alone, but has to compile
    <!-- example: integrations -->  only run in the environment of transformers, lightning and other trainers

The output of a block is shown in a separate block after it::

    <!-- output -->
    ```text
    loss 0.0123
    ```

:mod:`tests.support.outputs` compares the two. This command runs a page, and writes or renews the blocks that differ::

    python -m tests.support.code_blocks docs/quickstart.md
    python -m tests.support.code_blocks docs/trainers.md integrations   # with blocks that have this mark
"""

import importlib.util
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests.support.outputs import difference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [page for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG") if (page := ROOT / f"{name}.md").exists()]
PAGES += sorted(DOCS.rglob("*.md"))

MARKS = {"slow", "fragment", "integrations"}
FOREIGN = "integrations"  # a block with this mark need not show its output, because other libraries print it
SHELL = {"console", "bash"}  # languages of blocks that are commands for a shell

FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?:example: (?P<marks>[\w ]+)|(?P<output>output)) -->\n(?P=indent))?"
    r"(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence)[ \t]*$",
    re.M | re.S,
)
COMMAND = re.compile(r"`(python -m benchmarks[^`]*)`")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str  # the word after the fence
    marks: frozenset[str]  # the words of the comment before it
    line: int  # number of lines of the page before the code
    code: str  # its text, without the indentation of the fence
    is_output: bool  # whether it is the output of the block before it
    indent: str  # of the fence
    span: tuple[int, int]  # start and end of the block in the text of the page, including the comment


def script(name: str) -> ModuleType:
    """Load a script from the folder of the pages, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)
        marks = frozenset((match["marks"] or "").split())
        line = text[: match.start("code")].count("\n")
        assert marks <= MARKS, f"{name_of(page)}:{line}: unknown mark {sorted(marks - MARKS)}"
        yield Block(match["language"], marks, line, code, bool(match["output"]), match["indent"], match.span())


def examples(page: Path) -> Iterator[Block]:
    """The Python blocks of a page."""
    return (block for block in blocks(page) if block.language == "python")


class Printed(NamedTuple):
    """The text that a block printed, and the block that shows it."""

    block: Block
    text: str
    shown: Block | None


def printed(page: Path, allowed: set[str], namespace: dict[str, object]) -> Iterator[Printed]:
    """Run the Python blocks of a page whose marks are all allowed in this namespace; yield the output of each."""
    every = list(blocks(page))
    for block, after in zip(every, [*every[1:], None], strict=True):
        if block.language != "python":
            continue
        # Empty lines before the code make a traceback name the line of the page.
        code = compile("\n" * block.line + block.code, name_of(page), "exec")
        if block.marks <= allowed:
            with redirect_stdout(io.StringIO()) as stream:
                exec(code, namespace)
            text = "".join(f"{line.rstrip()}\n" for line in stream.getvalue().strip("\n").splitlines())
            yield Printed(block, text, after if after and after.is_output else None)


def run(page: Path, allowed: set[str]) -> dict[str, object]:
    """Run the Python blocks of a page whose marks are all allowed, and compare their output; return the namespace."""
    namespace: dict[str, object] = {"__name__": f"example_{page.stem}"}
    wrong = []
    for block, text, shown in printed(page, allowed, namespace):
        if shown and (found := difference(shown.code, text)):
            wrong.append(f"{name_of(page)}:{shown.line}: {found}")
        elif text and not shown and FOREIGN not in block.marks:
            wrong.append(f"{name_of(page)}:{block.line}: prints, but no output block follows")
    assert not wrong, "\n".join([*wrong, f"renew the output by `python -m tests.support.code_blocks {name_of(page)}`"])
    return namespace


def renew(page: Path, allowed: set[str]) -> None:
    """Write the output of blocks into a page. A block of output that already agrees stays unchanged."""
    text = page.read_text(encoding="utf-8")
    for block, output, shown in reversed(list(printed(page, allowed, {"__name__": f"example_{page.stem}"}))):
        if shown and not difference(shown.code, output):
            continue
        lines = ["<!-- output -->", "```text", *output.splitlines(), "```"] if output else []
        new = "\n".join(f"{block.indent}{line}".rstrip() for line in lines)
        start, end = shown.span if shown else (block.span[1], block.span[1])
        text = text[:start] + ("" if shown or not new else "\n\n") + new + text[end:]
    page.write_text(text, encoding="utf-8")


def pages_with(wanted: set[str]) -> list[Path]:
    """Pages with a Python block whose marks are exactly these.

    Tutorials are left out: tests/test_tutorials.py runs their scripts.
    """
    pages = [page for page in PAGES if page.parent != DOCS / "tutorials"]
    return [page for page in pages if any(block.marks == wanted for block in examples(page))]


def commands(page: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every shell command in a block, and of every benchmark command in a sentence."""
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
    """The variables that a command sets, and its words without comments."""
    words = shlex.split(command, comments=True)
    variables: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # examples write files
        renew(target, set(sys.argv[2:]))
