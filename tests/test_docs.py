"""The documentation is complete, its examples run, and its links, commands and tests exist.

:mod:`tests.support.code_blocks` describes the comments that may precede a block. ``tests/integrations`` runs the
blocks that need other libraries.
"""

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tyro

from benchmarks.cli import Command
from tests.support.code_blocks import (
    DOCS,
    FENCE,
    PAGES,
    ROOT,
    blocks,
    commands,
    name_of,
    pages_with,
    run,
    script,
    words_of,
)

LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
# A path begins with ``tests/``, or, as in long tables, with the folder inside it.
NAMED_TEST = re.compile(r"`(?:tests/)?((?<=tests/)test_\w+\.py|(?!tests/)[a-z_]+/test_\w+\.py)(?:::(test_\w+))?`")
LANGUAGES = {"python", "diff", "console", "bash", "text", "yaml", "toml", "json", "bibtex"}  # languages of blocks
#: Values for the options whose value a page leaves open.
OPEN = dict.fromkeys(("--optimizer", "--optimizers", "--method"), "kfac")
OPEN |= {"--workload": "digits", "--steps": "10", "--comm": "mem_opt", "--data-dir": "data", "--results": "results"}


@pytest.mark.parametrize("page", pages_with(set()), ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, set())


@pytest.mark.slow
def test_slow_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page in pages_with({"slow"}):
        run(page, {"slow"})


def test_every_fence_is_recognized_as_a_block() -> None:
    """A fence that is not recognized would not be run either, and output elsewhere would not be compared."""
    wrong = []
    for page in PAGES:
        fences = re.findall(r"^ *(?:`{3,}|~{3,}).*$", page.read_text(encoding="utf-8"), re.M)
        found = list(blocks(page))
        if len(fences) != 2 * len(found):
            wrong.append(f"{name_of(page)}: a fence is not closed, or closes another one")
        for before, block in zip([None, *found], found, strict=False):
            if block.language not in LANGUAGES:
                wrong.append(f"{name_of(page)}:{block.line}: {block.language!r} is not among {sorted(LANGUAGES)}")
            if block.is_output and (block.language != "text" or not before or before.language != "python"):
                wrong.append(f"{name_of(page)}:{block.line}: output in {block.language!r}, or of another block")
            if block.language == "text" and re.search(r"^(import|from) \w", block.code, re.M):
                wrong.append(f"{name_of(page)}:{block.line}: Python as text")
    assert not wrong, "\n".join(wrong)


def test_both_sides_of_a_diff_compile() -> None:
    for name, block in [(name_of(page), b) for page in PAGES for b in blocks(page) if b.language == "diff"]:
        for taken, left_out in ("+-", "-+"):
            lines = [line for line in block.code.splitlines() if not line.startswith(left_out)]
            side = (line.removeprefix(taken).removeprefix(" " * line.startswith(" ")) for line in lines)
            ast.parse("\n".join(side), f"{name}:{block.line}, {taken}")


# ---------------------------------------------------------------------- commands
def _benchmarks(words: list[str]) -> None:
    """Check that the command line accepts the words. An ellipsis stands for any value."""
    filled = []
    for before, word in zip(["", *words], words, strict=False):
        if word in ("…", "...", "NAME"):
            assert before in OPEN, f"add a value for {before!r} to OPEN in tests/test_docs.py"
            word = OPEN[before]
        filled.append(word.replace("…", "1"))
    if not filled or filled == ["--help"]:
        return
    try:
        tyro.cli(Command, args=filled)  # type: ignore[call-overload]
    except SystemExit as end:
        pytest.fail(f"python -m benchmarks does not accept {filled}: exit status {end.code}")


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    unknown = [word for word in words if "=" not in word and word not in targets]
    assert not unknown, f"the Makefile has no {unknown}"


def _python(words: list[str]) -> None:
    if words[:2] == ["-m", "benchmarks"]:
        _benchmarks(words[2:])
    elif words[0] not in ("-m", "-c"):
        _script(words[0], words[1:])


def _script(name: str, words: list[str]) -> None:
    """Check that a script of the repository exists and has every given option."""
    folders = (ROOT, DOCS / "multinode", DOCS / "tutorials", DOCS)
    place = next((folder / name for folder in folders if (folder / name).exists()), None)
    assert place, f"there is no {name}"
    source = DOCS / "multinode" / "train.py" if place.suffix in (".sh", ".sbatch") else place
    unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in source.read_text("utf-8")]
    assert not unknown, f"{name} has no {unknown}"


def _torchrun(words: list[str]) -> None:
    program = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    _python(words[program:])


def _sbatch(words: list[str]) -> None:
    script = next(i for i, word in enumerate(words) if not word.startswith("-"))
    _script(words[script], words[script + 1 :])


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "make": _make,
    "python": _python,
    "torchrun": _torchrun,
    "sbatch": _sbatch,
    "./node.sh": lambda words: _script("node.sh", words),
    # no part of the repository
    **dict.fromkeys(("pip", "uv", "echo", "git", "tensorboard"), lambda words: None),
}


def test_commands_exist() -> None:
    wrong = []
    for name, line, command in [(name_of(page), *found) for page in PAGES for found in commands(page)]:
        _, words = words_of(command)
        try:
            if words:  # not only variables, or a comment
                PROGRAMS[words[0]](words[1:])  # an unknown program needs a row there
        except (AssertionError, StopIteration, KeyError, pytest.fail.Exception) as error:
            wrong.append(f"{name}:{line}: {command}: {error!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("make", "nothing"),
        ("sbatch", "job.sbatch --unheard-of"),
        ("torchrun", "train.py --unheard-of"),
        ("python", "no.py"),
        ("python", "-m benchmarks train --unheard-of"),
    ],
)
def test_a_command_that_does_not_exist_is_found(program: str, words: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        PROGRAMS[program](words.split())


# ---------------------------------------------------------------------- links and names
def test_links_lead_to_files() -> None:
    missing = []
    for page in PAGES:
        targets = [a or b for a, b in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))]
        local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:", t) and not t.startswith("#")]
        missing += [f"{name_of(page)} links to {t}" for t in local if not (page.parent / t).exists()]
    assert not missing, "\n".join(missing)


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_named_tests_exist() -> None:
    pages = [page for page in PAGES if page.name == "README.md" or DOCS in page.parents]
    named = [(name_of(page), *found) for page in pages for found in NAMED_TEST.findall(page.read_text("utf-8"))]
    assert sum(page == "docs/reliability.md" for page, _, _ in named) > 40
    assert any(page == "docs/migrating/kfac-pytorch.md" for page, _, _ in named)
    files = {file: functions(path) if (path := ROOT / "tests" / file).exists() else None for _, file, _ in named}
    missing = [row for row in named if files[row[1]] is None or (row[2] and row[2] not in files[row[1]])]
    assert not missing, missing


@pytest.fixture
def hooks() -> ModuleType:
    """The part of the site build that searches for undocumented names."""
    return script("hooks")


def test_every_public_name_is_documented(hooks: ModuleType) -> None:
    assert hooks.everything_undocumented(hooks.api_pages()) == []


def test_an_undocumented_name_is_found(hooks: ModuleType) -> None:
    class Public:
        def method(self) -> None: ...

    Public.__module__ = "secondorder.fake"
    package = SimpleNamespace(__name__="secondorder", __all__=["Public", "__version__"], Public=Public, __version__="0")
    assert hooks.undocumented(package, "::: secondorder.Publicity") == [
        "Public has no '::: secondorder.Public' in docs/api",
        "Public has no docstring",
        "Public.method has no docstring",
        "__version__ is not mentioned in docs/api",
    ]
    # source that is not imported is searched, too
    source = "class A:\n    def f(self): ...\n    def _g(self): ...\nclass B(Protocol): ...\ndef _c(): ...\n"
    found = hooks.undocumented_source("secondorder.integrations.x", source, "::: secondorder.integrations.x.A\n")
    assert found == ["A has no docstring", "A.f has no docstring"]


@pytest.mark.parametrize("module", ["secondorder.comm", "secondorder.diagnostics", "secondorder.schedule"])
def test_every_module_is_searched(hooks: ModuleType, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unheard_of() -> None: ...

    target = importlib.import_module(module)
    unheard_of.__module__ = module
    monkeypatch.setattr(target, "unheard_of", unheard_of, raising=False)
    if hasattr(target, "__all__"):
        monkeypatch.setattr(target, "__all__", [*target.__all__, "unheard_of"])
    found = hooks.everything_undocumented(hooks.api_pages())
    assert f"{module}: unheard_of has no '::: {module}.unheard_of' in docs/api" in found
    assert f"{module}: unheard_of has no docstring" in found


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The part of the site build that links names of the API."""
    pytest.importorskip("griffe")  # part of the extra "docs"
    return script("reference")


def test_names_in_docstrings_become_links(reference: ModuleType) -> None:
    places = {
        "secondorder.KFAC": "api/a.html",
        "secondorder.HyLo.observe": "api/a.html",
        "secondorder.SecondOrderOptimizer.observe": "api/b.html",
        "secondorder.comm.Plan": "api/c.html",
    }
    page = (
        ":class:<code>~secondorder.comm.plan.Plan</code> :meth:<code>observe</code> :class:<code>~torch.nn.Plan</code>"
    )
    assert reference.linked(page, "api/b.html", places) == (
        '<a href="../api/c.html#secondorder.comm.Plan"><code>Plan</code></a> '
        '<a href="#secondorder.SecondOrderOptimizer.observe"><code>observe</code></a> <code>Plan</code>'
    )


def test_names_of_the_api_lead_to_their_source(reference: ModuleType) -> None:
    sources: set[str] = set()
    page = '<h2 id="secondorder.KFAC" class="doc doc-heading">KFAC</h2><h3 id="other">x</h3>'
    found = reference.with_sources(page, "api/a.html", sources)
    line = (ROOT / "secondorder/methods/kfac.py").read_text(encoding="utf-8").splitlines()
    number = int(re.search(r'href="../source/secondorder/methods/kfac.py.html#L-(\d+)"', found)[1])  # type: ignore[index]
    assert any("class KFAC" in text or "complete_docstring" in text for text in line[number - 1 : number])
    assert sources == {"secondorder/methods/kfac.py"}
    assert f'id="L-{number}"' in reference.highlighted("secondorder/methods/kfac.py")


def test_the_overview_of_the_api_has_every_entry_with_a_summary(reference: ModuleType, hooks: ModuleType) -> None:
    table = reference.overview()
    for path in re.findall(r"^::: ([\w.]+)$", hooks.api_pages(), re.M):
        assert re.search(rf"#{re.escape(path)}\) \| \S", table), path


def test_a_prompt_is_not_copied(hooks: ModuleType) -> None:
    found = hooks.on_page_content('<code><span class="gp">$ </span>make test</code>', page=None)
    assert re.sub("<[^>]+>", "", found) == "make test"


def test_no_page_loads_files_from_other_servers() -> None:
    """The site contains its fonts and scripts, so that it looks the same without a network."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "iframe-worker" in settings.partition("polyfills:")[2]  # or the plugin "offline" adds one from a server
    assert "//" not in settings
    for style in (DOCS / "assets").rglob("*.css"):
        assert not re.search(r"//|@import", re.sub(r"/\*.*?\*/", "", style.read_text(encoding="utf-8"), flags=re.S)), (
            style
        )


def test_files_of_the_settings_exist() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"assets/[\w./-]+\.\w+", settings))
    assert len(named) > 5
    assert not [name for name in named if not (DOCS / name).exists()]
    fonts = re.findall(r"url\((fonts/[^)]+)\)", (DOCS / "assets/katex/katex.min.css").read_text(encoding="utf-8"))
    assert len(fonts) == 20
    assert not [font for font in fonts if not (DOCS / "assets" / "katex" / font).exists()]


def test_formulas_are_marked_and_dollars_of_code_are_not() -> None:
    markdown = pytest.importorskip("markdown")  # part of the extra "docs"
    text = "Inline $x^2$, and `$HOME`.\n\n$$\n\\frac{a}{b}\n$$\n\n```console\n$ make demo\n$ echo $HOME\n```\n"
    extensions = ["pymdownx.arithmatex", "pymdownx.highlight", "pymdownx.superfences"]
    html = markdown.markdown(text, extensions=extensions, extension_configs={"pymdownx.arithmatex": {"generic": True}})
    found = re.findall(r'<(span|div) class="arithmatex">(.*?)</\1>', html, re.S)
    assert [(tag, body.strip()[:2]) for tag, body in found] == [("span", "\\("), ("div", "\\[")]


def test_the_changelog_is_a_page_of_the_site(hooks: ModuleType) -> None:
    text = hooks.changelog()
    assert text.startswith("# Changelog\n")
    local = [target.split("#")[0] for target, _ in LINK.findall(text) if "//" not in target]
    assert local
    assert not [target for target in local if not (DOCS / target).exists()]
