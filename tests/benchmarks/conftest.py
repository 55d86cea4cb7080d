import pytest

from benchmarks.workloads.tiny import write_tiny_data


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A data folder with tiny files in the standard formats."""
    folder = tmp_path_factory.mktemp("data")
    write_tiny_data(folder)
    return folder
