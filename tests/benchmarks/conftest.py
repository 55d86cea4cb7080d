import pytest

from benchmarks import machine
from benchmarks.commands import step_time, window
from benchmarks.workloads.tiny import write_tiny_data


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A data folder with tiny files in the standard formats."""
    folder = tmp_path_factory.mktemp("data")
    write_tiny_data(folder)
    return folder


@pytest.fixture
def known_machine(monkeypatch):
    """Fixed rates, because a measurement takes a second each time."""
    for module in (machine, step_time, window):
        for name, rate in (("gemm_gflops", machine.Rate(1.0, 2.0)), ("copy_gbytes", machine.Rate(3.0, 4.0))):
            monkeypatch.setattr(module, name, lambda *_, rate=rate, **__: rate, raising=False)
    monkeypatch.setattr(window, "COPY_BYTES", 2**16)
