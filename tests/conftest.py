"""Settings of every test: one thread per process, one seed, a GPU only where there is one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; processes × threads would crawl otherwise

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples in every run: a failure that one run finds is there for the next one too. No deadline: the first
# example of a property pays for whatever torch sets up lazily.
settings.register_profile("secondorder", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("secondorder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it in the same process."""
    torch.manual_seed(0)
