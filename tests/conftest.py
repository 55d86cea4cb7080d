"""Settings of every test: one thread per process unless `OMP_NUM_THREADS` is set, one seed, a GPU if there is one."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Read when torch is imported, and by the processes that tests start; processes × threads would crawl otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)

if TYPE_CHECKING:
    from tests.support.pool import Pool

# Trainers and loggers are in the environment of `make test-integrations` only; elsewhere their tests are not looked at.
collect_ignore = [] if importlib.util.find_spec("transformers") else ["integrations"]

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
    from tests.support.pool import Pool

    processes = Pool(backend=request.config.getoption("--backend"))
    yield processes
    processes.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, and spare it the million objects that collection made, in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state and number of threads, whatever ran before it in the same process.

    ``torch.manual_seed`` would note, for each kind of device that may come later, the stack that it was called from.
    """
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    if torch.get_num_threads() != THREADS:  # commands of the benchmarks set their own number
        torch.set_num_threads(THREADS)
