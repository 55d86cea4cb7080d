"""The tutorial that needs a trainer prints what its page shows; tests/test_tutorials.py runs the others."""

from pathlib import Path

from tests.support.code_blocks import DOCS
from tests.support.tutorials import reruns


def test_the_tutorial_of_the_trainer_prints_what_its_page_shows(tmp_path: Path) -> None:
    reruns(DOCS / "tutorials" / "hugging-face-trainer.py", tmp_path)
