"""Each argument of a constructor is described once, and ``help()``, the signature and the site agree."""

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from secondorder import comm
from secondorder.methods import documentation
from secondorder.methods.names import METHODS
from secondorder.options import complete_docstring
from tests.support.code_blocks import ROOT, script

STRATEGIES = [
    comm.RankGrid, comm.CommOpt, comm.HybridOpt, comm.MemOpt, comm.LocalFactors, comm.ChiefOnly, comm.DedicatedWorkers,
]  # fmt: skip
CLASSES: list[type] = [*METHODS.values(), *STRATEGIES]
FRAGMENTS = {name: text for name, text in vars(documentation).items() if name.isupper() and isinstance(text, str)}


def described(text: str) -> dict[str, str]:
    """Return the arguments in the order of a docstring, with each description on one line."""
    sections = re.findall(r"^Args:.*\n((?: .*\n)+)", inspect.cleandoc(text) + "\n", re.MULTILINE) or [text]
    entries = re.findall(r"^    (\S+): ((?:.*\n)(?:     .*\n)*)", "".join(sections), re.MULTILINE)
    assert len({name for name, _ in entries}) == len(entries), f"described twice: {[name for name, _ in entries]}"
    return {name: " ".join(words.split()) for name, words in entries}


def in_the_source(cls: type) -> str:
    module = ast.parse(Path(inspect.getfile(cls)).read_text(encoding="utf-8"))
    node = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    return ast.get_docstring(node) or ""


def test_every_argument_is_described_once_in_the_order_of_the_signature() -> None:
    found = {cls: list(described(inspect.getdoc(cls) or "")) for cls in CLASSES}
    assert found == {cls: list(inspect.signature(cls).parameters) for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_descriptions_are_those_of_the_source_in_whole_sentences(cls: type) -> None:
    """``help()`` shows the docstring of the class, with all of its descriptions of arguments."""
    shown, written = inspect.getdoc(cls) or "", in_the_source(cls)
    assert set(described(written).items()) <= set(described(shown).items())
    assert [text.split("Args:\n")[0] for text in (shown, written)] == [written.split("Args:\n")[0]] * 2
    assert shown.partition("\n\nRaises:")[2] == written.partition("\n\nRaises:")[2]
    for name, words in described(shown).items():
        assert words.endswith("."), name
        assert words[0].isupper() or words[0] in "`mpcβκλρεFKT", f"{name}: {words}"
        assert not re.search(r"[{}]|%\(|Of the|[Uu]nset:", words), f"{name}: {words}"


def test_no_description_is_a_copy() -> None:
    """A class describes an argument itself only if no base class or fragment has the same description."""
    copies = []
    for cls in CLASSES:
        sources = [*FRAGMENTS.values(), *(base.__doc__ or "" for base in cls.__mro__[1:] if base in CLASSES)]
        shared = {item for text in sources for item in described(text).items()}
        copies += [f"{cls.__name__}: {name}" for name, _ in described(in_the_source(cls)).items() & shared]
    assert not copies


def test_every_fragment_is_used() -> None:
    for name, text in FRAGMENTS.items():
        for argument, words in described(text).items():
            users = [cls for cls in METHODS.values() if described(inspect.getdoc(cls) or "").get(argument) == words]
            assert len(users) > 1, f"{argument} of {name} has {len(users)} users: describe it in the class"


def test_the_site_shows_the_same_arguments() -> None:
    griffe = pytest.importorskip("griffe")  # part of the extra "docs"
    extensions = griffe.load_extensions(str(ROOT / "docs" / "docstrings.py"))
    package = griffe.load("secondorder", search_paths=[ROOT], extensions=extensions)
    for cls in CLASSES:
        docstring = package[f"{cls.__module__.removeprefix('secondorder.')}.{cls.__name__}"].docstring
        parameters = [part.value for part in docstring.parse("google") if part.kind.value == "parameters"]
        shown = [(item.name, " ".join(item.description.split())) for items in parameters for item in items]
        assert shown == list(described(inspect.getdoc(cls) or "").items()), cls.__name__


# ---------------------------------------------------------------------- the decorator
def example() -> type:
    class Example:
        """A sentence.

        Args:
            b: Its own.
        """

        def __init__(self, a: int, b: int, *, c: int) -> None: ...

    return Example


def test_descriptions_come_from_the_class_first_then_from_its_sources_in_up_to_three_sections() -> None:
    fragment, docstring = "\n    a: Shared,\n        on two lines.\n    b: Not used.\n", "Args:\n    c: Third.\n"
    assert inspect.getdoc(complete_docstring(fragment, docstring)(example())) == (
        "A sentence.\n\nArgs:\n    a: Shared,\n        on two lines.\n    b: Its own.\n    c: Third."
    )
    fragment = "    a: First.\n    c: Third.\n"
    assert inspect.getdoc(complete_docstring(fragment, usual=("c",), expert=("a",))(example())) == (
        "A sentence.\n\nArgs:\n    c: Third.\n\nArgs: Less common\n    b: Its own.\n\nArgs: For experts\n    a: First."
    )
    with pytest.raises(KeyError, match="c"):  # without a description
        complete_docstring("    a: Shared.\n")(example())
    bare = example()
    bare.__doc__ = None  # as `python -OO` leaves it
    assert complete_docstring(None)(bare) is bare
    assert bare.__doc__ is None


# ---------------------------------------------------------------------- the language of the pages
@pytest.fixture(scope="module")
def prose() -> ModuleType:
    """The part of the site build that checks the language."""
    return script("prose")


def test_poor_phrases_are_found_with_page_and_line(prose: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """# What it costs

All ranks are told. What a rank
holds is a part, 0.5 of it.
Normalisation `x`
| a | What is b |
"""
    assert [str(finding).partition(": write")[0] for finding in prose.findings("docs/x.md", text)] == [
        "docs/x.md:3: 'told'", "docs/x.md:5: 'Normalisation'", "docs/x.md:1: 'What it costs'",
        "docs/x.md:3: 'What a rank holds is a part, 0.5 of it'", "docs/x.md:6: 'What is b'",
    ]  # fmt: skip
    monkeypatch.setattr(prose, "ALLOWED", ("as told", "docs/x.md: my dear"))
    text = "It is as told.\n\nYes, my dear.\n"
    assert not list(prose.findings("docs/x.md", text))
    assert [finding.found for finding in prose.findings("docs/y.md", text)] == ["dear"]


def test_the_pages_contain_no_poor_phrases(prose: ModuleType) -> None:
    found = prose.everything_found(prose.pages())
    assert not found, "\n".join(found)


def test_questions_code_formulas_and_generated_blocks_pass(prose: ModuleType) -> None:
    text = """# What does it cost?

Besides, `told` is code, "What if?" a question, $beside$ a formula, and [this](told.md) a target.

<!-- results: x -->
What was told.
<!-- end of results -->

```text
What was told.
```
"""
    assert list(prose.findings("docs/x.md", text)) == []
