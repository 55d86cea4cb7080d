"""The pictures of the rank grid are those that the script draws from the grid of the package."""

import importlib.util
from xml.etree import ElementTree

import pytest

from tests.test_docs import DOCS


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw_grids", DOCS / "draw_grids.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_current(drawing):
    stale = [name for name, drawn in drawing.pictures().items() if (drawing.FOLDER / name).read_text("utf-8") != drawn]
    assert not stale, f"run `python docs/draw_grids.py`: {stale}"


def test_pictures_are_well_formed(drawing):
    for name, drawn in drawing.pictures().items():
        assert ElementTree.fromstring(drawn).tag.endswith("svg"), name
