"""Every test in this folder is parametrized by the methods: see `tests.support.contract`."""

from tests.support.contract import mlp, pytest_collection_modifyitems, pytest_configure, pytest_generate_tests

__all__ = ["mlp", "pytest_collection_modifyitems", "pytest_configure", "pytest_generate_tests"]
