"""Examples of the documentation that need trainers and loggers; those that do not are run by tests/test_docs.py."""

from pathlib import Path

import pytest

from tests.support.code_blocks import name_of, pages_with, run

INTEGRATIONS = {"integrations"}


def test_there_are_pages_to_run() -> None:
    assert pages_with(INTEGRATIONS)


@pytest.mark.parametrize("page", pages_with(INTEGRATIONS), ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, INTEGRATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with({*INTEGRATIONS, "slow"}), ids=name_of)
def test_slow_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(page, {*INTEGRATIONS, "slow"})
