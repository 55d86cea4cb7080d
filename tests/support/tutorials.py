"""Tutorials and their pages."""

import re
from pathlib import Path

from tests.support.code_blocks import script
from tests.support.outputs import difference

gallery = script("gallery")
SCRIPTS: list[Path] = gallery.SCRIPTS
OUTPUT = re.compile(r"<!-- output -->\n```text\n(.*?)^```$", re.M | re.S)
TOLERANCE = 0.25  # training amplifies rounding differences between processors, but curves keep their shape


def page_of(path: Path) -> str:
    return path.with_suffix(".md").read_text(encoding="utf-8")


def outputs(text: str) -> list[str]:
    return OUTPUT.findall(text)


def reruns(path: Path, images: Path) -> None:
    """Run a tutorial, and compare its output and pictures with the page."""
    shown, printed = outputs(page_of(path)), outputs("".join(gallery.run(path, images)))
    assert len(shown) == len(printed), printed
    for one, other in zip(shown, printed, strict=True):
        assert (found := difference(one, other, TOLERANCE)) is None, found
    assert {file.name for file in images.glob("*.svg")} == {
        file.name for file in (path.parent / "images").glob(f"{path.stem}-*.svg")
    }
