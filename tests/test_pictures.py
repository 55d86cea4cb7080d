"""The pictures of the documentation show what their scripts compute with the package."""

from xml.etree import ElementTree

import pytest

from tests.support.code_blocks import DOCS, script


@pytest.fixture(scope="module")
def drawing():
    return script("draw_grids")


def test_pictures_are_current_and_well_formed(drawing):
    drawn = drawing.pictures()
    stale = [name for name, text in drawn.items() if (drawing.FOLDER / name).read_text("utf-8") != text]
    assert not stale, f"run `python docs/draw_grids.py`: {stale}"
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for text in drawn.values())


@pytest.fixture(scope="module")
def curvature():
    return script("draw_curvature").pictures()


@pytest.mark.slow
def test_pages_contain_the_values_of_their_picture(curvature):
    for name in ("kfac", "ekfac", "hylo", "mfac", "ggt"):
        page = (DOCS / "methods" / f"{name}.md").read_text("utf-8")
        assert f"curvature-{name}.svg" in page
        assert f"{curvature[name].error:.2f} of" in page or f"by {curvature[name].error:.2f}" in page, name
        assert f"{curvature[name].cosine:.2f}" in page, name
        assert name == "ggt" or f"{curvature['sngd'].error:.2f}" in page, name


@pytest.mark.slow
def test_finer_approximations_have_smaller_errors(curvature):
    error = {name: picture.error for name, picture in curvature.items()}
    assert error["sngd"] < error["hylo"] < error["ekfac"] < error["kfac"]
    assert error["sngd"] < error["mfac"] < error["ekfac"]
