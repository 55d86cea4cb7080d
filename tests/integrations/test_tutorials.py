"""The tutorial that needs a trainer prints what its page shows; the others are run by tests/test_tutorials.py."""

from pathlib import Path

from tests.support.code_blocks import DOCS
from tests.support.tutorials import reruns


def test_the_tutorial_of_the_trainer(tmp_path: Path) -> None:
    reruns(DOCS / "tutorials" / "hugging-face-trainer.py", tmp_path)
