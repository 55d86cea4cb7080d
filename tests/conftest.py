"""Settings of every test: one thread per process, one seed, a GPU only where there is one."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; processes × threads would crawl otherwise

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

if TYPE_CHECKING:
    from tests.distributed.pool import Pool

# The same examples in every run: a failure that one run finds is there for the next one too. No deadline: the first
# example of a property pays for whatever torch sets up lazily.
settings.register_profile("secondorder", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("secondorder")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--backend nccl` runs the distributed tests on as many ranks as there are devices."""
    parser.addoption("--backend", default="gloo", choices=("gloo", "nccl"), help="of the process groups of tests")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> "Iterator[Pool]":
    """Processes that play the ranks of a process group; started by the first test that wants them."""
    from tests.distributed.pool import Pool

    processes = Pool(backend=request.config.getoption("--backend"))
    yield processes
    processes.close()


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
