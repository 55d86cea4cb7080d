import pytest

from benchmarks import machine
from benchmarks.workloads.tiny import write_tiny_data


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A data folder with tiny files in the standard formats."""
    folder = tmp_path_factory.mktemp("data")
    write_tiny_data(folder)
    return folder


@pytest.fixture
def known_machine(monkeypatch):
    """Rates that nobody measures, which takes a second each time."""
    monkeypatch.setattr(machine, "gemm_gflops", lambda: machine.Rate(1.0, 2.0))
    monkeypatch.setattr(machine, "copy_gbytes", lambda: machine.Rate(3.0, 4.0))
