"""Run the documentation's examples and the tutorial that need trainers and loggers.

The others run in tests/test_docs.py and tests/test_tutorials.py.
"""

from pathlib import Path

import pytest

from tests.support.code_blocks import DOCS, name_of, pages_with, run
from tests.support.tutorials import reruns

MARKS = {"integrations"}
FAST, SLOW = pages_with(MARKS), pages_with({*MARKS, "slow"})
assert FAST


@pytest.mark.parametrize(
    ("page", "marks"),
    [
        *(pytest.param(page, MARKS, id=name_of(page)) for page in FAST),
        *(pytest.param(page, {*MARKS, "slow"}, id=f"{name_of(page)} slow", marks=pytest.mark.slow) for page in SLOW),
    ],
)
def test_examples_run(page: Path, marks: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, marks)


def test_the_tutorial_of_the_trainer_prints_what_its_page_shows(tmp_path: Path) -> None:
    reruns(DOCS / "tutorials" / "hugging-face-trainer.py", tmp_path)
