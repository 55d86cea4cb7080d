"""Made-up files in the same format, which replace missing data in the size ``smoke``."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.workloads import DataMissingError, Size, WorkloadName, make_workload
from benchmarks.workloads.tiny import write_tiny_data


@contextmanager
def found_or_made_up(
    name: WorkloadName, data_dir: Path, size: Size, changes: Mapping[str, Any] | None = None, talk: bool = True
) -> Iterator[tuple[Path, bool]]:
    """Yield the folder to read, and whether its data is made up because files for the size ``smoke`` are missing."""
    missing = _missing(name, data_dir, size, changes) if size == "smoke" else None
    if missing is None:
        yield data_dir, False
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_data(Path(folder))
        if _missing(name, Path(folder), size, changes):
            raise missing
        if talk:
            print(f"{name}: no data in {data_dir}, so made-up data of the same format is used")
        yield Path(folder), True


def _missing(
    name: WorkloadName, data_dir: Path, size: Size, changes: Mapping[str, Any] | None
) -> DataMissingError | None:
    try:
        next(make_workload(name, data_dir, size, changes=changes).batches(0))
    except DataMissingError as err:
        return err
    return None
