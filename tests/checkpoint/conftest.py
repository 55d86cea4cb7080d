"""Most tests in this folder are parametrized by the methods: see `tests.support.contract`."""

from pathlib import Path

import pytest

from tests.support.contract import mlp, pytest_configure, pytest_generate_tests

__all__ = ["mlp", "pytest_configure", "pytest_generate_tests"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore a warning: all models of the tasks have a parameter without a block on purpose."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*follow the fallback rule"))
