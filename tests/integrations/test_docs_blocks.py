"""Run the documentation's examples that need trainers and loggers; tests/test_docs.py runs the others."""

from pathlib import Path

import pytest

from tests.support.code_blocks import name_of, pages_with, run

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
