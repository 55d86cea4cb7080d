"""The documentation is complete, its links lead somewhere, its Python examples run and its commands exist.

What a comment before a block may say stands in :mod:`tests.support.code_blocks`. Blocks that need other libraries
are run by ``tests/integrations``.
"""

import ast
import importlib.util
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
    SHELL,
    blocks,
    commands,
    name_of,
    pages_with,
    run,
    words_of,
)

LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
#: Languages of blocks, and what is done with them: run, parsed, or only shown.
LANGUAGES = {"python", "diff", *SHELL, "text", "yaml", "toml", "json", "bibtex"}
#: What stands for a value that a sentence leaves open.
OPEN = {
    "--workload": "digits",
    "--optimizer": "kfac",
    "--optimizers": "kfac",
    "--method": "kfac",
    "--steps": "10",
    "--comm": "mem_opt",
    "--data-dir": "data",
    "--results": "results",
}


@pytest.mark.parametrize("page", pages_with(set()), ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, set())


@pytest.mark.slow
def test_slow_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page in pages_with({"slow"}):
        run(page, {"slow"})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_escapes(page: Path) -> None:
    """A fence that is not recognised would not be run either."""
    fences = re.findall(r"^ *(?:`{3,}|~{3,}).*$", page.read_text(encoding="utf-8"), re.M)
    found = list(blocks(page))
    assert len(fences) == 2 * len(found), f"{name_of(page)}: a fence that does not end, or ends another"
    unknown = [
        f"{name_of(page)}:{block.line}: {block.language!r}" for block in found if block.language not in LANGUAGES
    ]
    assert not unknown, f"languages of fences must be among {sorted(LANGUAGES)}: {unknown}"
    python = [
        block.line for block in found if block.language == "text" and re.search(r"^(import|from) \w", block.code, re.M)
    ]
    assert not python, f"{name_of(page)}: Python as text in lines {python}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_both_sides_of_a_diff_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "diff":
            for taken, left_out in ("+-", "-+"):
                lines = [line for line in block.code.splitlines() if not line.startswith(left_out)]
                ast.parse(
                    "\n".join(line.removeprefix(taken).removeprefix(" " * line.startswith(" ")) for line in lines)
                )


# ---------------------------------------------------------------------- commands
def _benchmarks(words: list[str]) -> None:
    """The command line accepts the words; an ellipsis stands for any value."""
    filled = []
    for before, word in zip(["", *words], words, strict=False):
        if word in ("…", "...", "NAME"):
            assert before in OPEN, f"say in tests/test_docs.py what may stand for the value of {before!r}"
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
    """A script of the repository, which knows every option that it is given."""
    places = [folder / name for folder in (ROOT, DOCS / "multinode", DOCS) if (folder / name).exists()]
    assert places, f"there is no {name}"
    source = (DOCS / "multinode" / "train.py" if places[0].suffix in (".sh", ".sbatch") else places[0]).read_text(
        "utf-8"
    )
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in source]
    assert not unknown, f"{name} knows nothing of {unknown}"


def _torchrun(words: list[str]) -> None:
    program = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    _python(words[program:])


def _sbatch(words: list[str]) -> None:
    script = next(i for i, word in enumerate(words) if not word.startswith("-"))
    _script(words[script], words[script + 1 :])


def _let_through(words: list[str]) -> None:
    """A program of somebody else."""


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "make": _make,
    "python": _python,
    "torchrun": _torchrun,
    "sbatch": _sbatch,
    "./node.sh": lambda words: _script("node.sh", words),
    **dict.fromkeys(("pip", "uv", "echo", "git", "tensorboard"), _let_through),
}


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name_of)
def test_commands_exist(page: Path) -> None:
    for line, command in commands(page):
        _, words = words_of(command)
        if not words:
            continue  # only variables, or a comment
        assert words[0] in PROGRAMS, f"{name_of(page)}:{line}: say in tests/test_docs.py how to check {words[0]!r}"
        try:
            PROGRAMS[words[0]](words[1:])
        except (AssertionError, StopIteration) as error:
            pytest.fail(f"{name_of(page)}:{line}: {command}: {error!r}")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("make", "nothing"),
        ("sbatch", "job.sbatch --unheard-of"),
        ("torchrun", "train.py --unheard-of"),
        ("python", "no.py"),
    ],
)
def test_a_command_that_does_not_exist_is_found(program: str, words: str) -> None:
    with pytest.raises(AssertionError):
        PROGRAMS[program](words.split())


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(pytest.fail.Exception):
        _benchmarks(["train", "--unheard-of"])


# ---------------------------------------------------------------------- links
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
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
    assert hooks.everything_undocumented(hooks.API_PAGE.read_text(encoding="utf-8")) == []


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


@pytest.mark.parametrize("module", ["secondorder.comm", "secondorder.diagnostics", "secondorder.schedule"])
def test_the_modules_of_the_package_are_looked_at(
    hooks: ModuleType, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unheard_of() -> None: ...

    target = importlib.import_module(module)
    unheard_of.__module__ = module
    monkeypatch.setattr(target, "unheard_of", unheard_of, raising=False)
    if hasattr(target, "__all__"):
        monkeypatch.setattr(target, "__all__", [*target.__all__, "unheard_of"])
    found = hooks.everything_undocumented(hooks.API_PAGE.read_text(encoding="utf-8"))
    assert f"{module}: unheard_of has no '::: {module}.unheard_of' in docs/api.md" in found
    assert f"{module}: unheard_of has no docstring" in found


def test_a_module_that_is_only_read_is_looked_at(hooks: ModuleType) -> None:
    source = "class A:\n    def f(self): ...\n    def _g(self): ...\nclass B(Protocol): ...\ndef _c(): ...\n"
    assert hooks.undocumented_source("secondorder.integrations.x", source, "::: secondorder.integrations.x.A\n") == [
        "A has no docstring",
        "A.f has no docstring",
    ]


def test_names_in_docstrings_become_links(hooks: ModuleType) -> None:
    page = '<h3 id="secondorder.KFAC.observe"></h3> by :meth:<code>observe</code>, :class:<code>~torch.nn.Linear</code>'
    found = hooks.on_page_content(page, page=None)
    assert 'by <a href="#secondorder.KFAC.observe"><code>observe</code></a>, <code>Linear</code>' in found


def test_a_prompt_is_not_copied(hooks: ModuleType) -> None:
    found = hooks.on_page_content('<code><span class="gp">$ </span>make test</code>', page=None)
    assert re.sub("<[^>]+>", "", found) == "make test"


def test_no_page_waits_for_a_server_of_others() -> None:
    """Fonts and scripts come with the site: it reads the same without a network."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "extra_javascript" not in settings
