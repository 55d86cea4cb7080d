"""One process at a time writes a file of results: another would erase what it has not read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as err:
        raise ValueError(f"{path} is being written by another process: wait for it, or give another file") from err
    try:
        yield
    finally:
        lock.release()
