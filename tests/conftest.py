"""Settings of all tests: one thread per process unless `OMP_NUM_THREADS` is set, and one seed."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# torch and the processes that tests start read this on import. Many processes with many threads each would be slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)

if TYPE_CHECKING:
    from tests.support.pool import Pool

# Only the environment of `make test-integrations` has the trainers and loggers whose tests are in this folder.
collect_ignore = [] if importlib.util.find_spec("transformers") else ["integrations"]

# Examples are the same in every run, so that failures are reproducible. There is no deadline, because the first example
# of a property includes the lazy initialization of torch.
settings.register_profile("secondorder", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("secondorder")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--backend nccl` runs the distributed tests on as many ranks as there are devices."""
    parser.addoption("--backend", default="gloo", choices=("gloo", "nccl"), help="of the process groups of tests")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> "Iterator[Pool]":
    """Processes that act as the ranks of a process group; the first test that uses them starts them."""
    from tests.support.pool import Pool

    processes = Pool(backend=request.config.getoption("--backend"))
    yield processes
    processes.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, and exempt the million resulting objects from later collections."""
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
    """Start every test with the same random state and number of threads.

    ``torch.manual_seed`` is slower: it records a stack trace for every device type that is not initialized yet.
    """
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    if torch.get_num_threads() != THREADS:  # commands of the benchmarks set their own number
        torch.set_num_threads(THREADS)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Start with an empty cache and counters of `torch.compile`, and leave none behind."""
    from torch import _dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default process group whose only rank is this process."""
    from torch import distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
