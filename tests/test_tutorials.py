"""Each tutorial is a self-contained script, and its page shows the results of that script."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import secondorder
from benchmarks.plot import look
from tests.support.code_blocks import DOCS
from tests.support.source import imports
from tests.support.tutorials import SCRIPTS, gallery, outputs, page_of, reruns

NAMES = [path.stem for path in SCRIPTS]


def test_the_gallery_contains_all_eight_tutorials() -> None:
    index = (DOCS / "tutorials" / "index.md").read_text(encoding="utf-8")
    assert len(NAMES) == 8
    assert all(f"({name}.md)" in index and f"(images/{name}-small.svg)" in index for name in NAMES)


@pytest.mark.parametrize("path", SCRIPTS, ids=NAMES)
def test_the_page_has_the_results_of_the_script(path: Path) -> None:
    assert gallery.is_current(path), f"run `python docs/gallery.py {path.stem}`"
    page = page_of(path)
    assert page == gallery.rendered(path, gallery.SHOWN.findall(page)), "run `python docs/gallery.py`"
    images = re.findall(r"\(images/([\w.-]+)\)", page)
    assert images
    assert all((path.parent / "images" / name).exists() for name in images)
    assert outputs(page)


@pytest.mark.parametrize("path", SCRIPTS, ids=NAMES)
def test_a_script_uses_public_names_only_a_seed_and_the_colors_of_the_optimizers(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    private = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and re.match(r"_(?!_)", n.attr)]
    imported = list(imports(tree))
    assert not private
    assert not [name for name in imported if name.split(".")[0] in ("benchmarks", "tests") or "._" in name]
    ours = {name.split(".")[1] for name in imported if re.fullmatch(r"secondorder\.\w+", name)}
    assert ours <= {*secondorder.__all__, "comm", "diagnostics"}
    assert "torch.manual_seed(" in source
    (looks,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "LOOK")
    for name, style in ast.literal_eval(looks).items():
        assert style["color"] == look(name.replace("EK-FAC", "EKFAC"), 0)["color"], name


# ---------------------------------------------------------------------- building the pages
TINY = "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1\n\n# %% [markdown]\n# More.\n\n# %%\nprint(x + 1.5)\n"


def test_a_changed_script_runs_and_changed_text_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.py"
    path.write_text(TINY, encoding="utf-8")
    (tmp_path / "images").mkdir()
    gallery.update(path)
    assert outputs(page_of(path)) == ["2.5\n"]
    assert gallery.is_current(path)

    monkeypatch.setattr(gallery, "run", lambda *_: pytest.fail("ran"))
    path.write_text(TINY.replace("More.", "Much more."), encoding="utf-8")
    gallery.update(path)
    assert "Much more." in page_of(path)
    assert outputs(page_of(path)) == ["2.5\n"]

    path.write_text(TINY.replace("x = 1", "x = 2"), encoding="utf-8")
    assert not gallery.is_current(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import unheard_of", "tiny.py has changed and cannot run: unheard_of not installed"),
        ("raise ValueError('no')", 'tiny.py", line 7'),  # the line of the script
    ],
)
def test_a_script_that_cannot_run_is_named_and_its_page_is_kept(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exceptions = pytest.importorskip("mkdocs.exceptions")  # part of the extra "docs"
    path = tmp_path / "tiny.py"
    path.write_text(TINY.replace("x = 1", line), encoding="utf-8")
    path.with_suffix(".md").write_text("old", encoding="utf-8")
    monkeypatch.setattr(gallery, "SCRIPTS", [path])
    gallery.on_pre_build(config=SimpleNamespace(strict=False))
    assert words in caplog.text
    with pytest.raises(exceptions.PluginError, match=re.escape(words)):
        gallery.on_pre_build(config=SimpleNamespace(strict=True))
    assert page_of(path) == "old"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if path.stem != "hugging-face-trainer"], ids=lambda p: p.stem
)
def test_a_tutorial_prints_what_its_page_shows(path: Path, tmp_path: Path) -> None:
    reruns(path, tmp_path)
