"""The documentation is complete, its links lead somewhere, and its Python examples run.

The examples of one page run in order and share their names, as a reader would type them. A comment in the line before
the fence changes that: ``<!-- example: slow -->`` leaves it to the slow tests, ``<!-- example: fragment -->`` marks a
piece that cannot run alone.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import secondorder

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md") if p.exists()]
PAGES += sorted(DOCS.rglob("*.md"))

FENCE = re.compile(
    r"^(?:<!-- example: (?P<mark>\w+) -->\n)?(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples(page: Path) -> Iterator[tuple[str, int, str]]:
    """Mark, line number in the page and code of every Python example."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)
        yield match["mark"] or "", text[: match.start("code")].count("\n"), code


def run(page: Path, *, slow: bool) -> None:
    namespace = {"__name__": f"example_{page.stem}"}
    for mark, line, code in examples(page):
        assert mark in {"", "slow", "fragment"}, f"{name_of(page)}:{line}: unknown mark {mark!r}"
        if mark == "" or (slow and mark == "slow"):
            # Empty lines before the code make a traceback name the line of the page.
            exec(compile("\n" * line + code, name_of(page), "exec"), namespace)


WITH_EXAMPLES = [p for p in PAGES if any(mark != "fragment" for mark, _, _ in examples(p))]
WITH_SLOW_EXAMPLES = [p for p in PAGES if any(mark == "slow" for mark, _, _ in examples(p))]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, slow=False)


@pytest.mark.slow
def test_slow_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page in WITH_SLOW_EXAMPLES:
        run(page, slow=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = [a or b for a, b in LINK.findall(text)]
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:", t) and not t.startswith("#")]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert not missing, f"{name_of(page)} links to {missing}"


@pytest.fixture
def hooks() -> ModuleType:
    """The part of the site build that looks for undocumented names; lies outside any package."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_documented(hooks: ModuleType) -> None:
    assert hooks.undocumented(secondorder, hooks.API_PAGE.read_text(encoding="utf-8")) == []


def test_an_undocumented_name_is_found(hooks: ModuleType) -> None:
    class Public:
        def method(self) -> None: ...

    Public.__module__ = "secondorder.fake"
    package = SimpleNamespace(__name__="secondorder", __all__=["Public", "__version__"], Public=Public, __version__="0")
    assert hooks.undocumented(package, "::: secondorder.Publicity") == [
        "Public has no '::: secondorder.Public' in docs/api.md",
        "Public has no docstring",
        "Public.method has no docstring",
        "__version__ is not mentioned in docs/api.md",
    ]
