"""Events in files with one JSON object per line."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

log: logging.Logger = logging.getLogger("secondorder")


class EventFile:
    """A file to which events are appended. Each event is on disk as soon as it is written.

    The existing content of the file is kept. Several processes may append to one file.

    Args:
        path: Path of the file, whose folder must exist.
        columns: Names of the values of an event, in order.

    Attributes:
        count: Number of events written by this object.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.columns: tuple[str, ...] = tuple(columns)
        self.count = 0
        broken = _ends_in_mid_line(path)
        self._file = path.open("a", encoding="utf-8", newline="\n")
        if broken:  # a program was stopped while it was writing
            self._file.write("\n")

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event.

        Raises:
            ValueError: If the event has other columns.
        """
        if event.keys() != set(self.columns):
            raise ValueError(f"an event has the columns {self.columns}, got {tuple(event)}")
        row = {name: _plain(event[name]) for name in self.columns}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        self.count += 1

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    r"""Read the events of a file, in the order in which they were written.

    An incomplete line is left out, and is logged unless it is the last line.

    Args:
        path: Path of a file with one JSON object per line.

    Returns:
        One dict per event, from column to value. None is a value that is not defined or not finite.

    Example:
        >>> import tempfile, pathlib
        >>> from secondorder.diagnostics import read_events
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "rank.jsonl"
        >>> _ = path.write_text('{"step": 0, "layer": "fc", "rank90": 7}\n')
        >>> read_events(path)[0]["rank90"]
        7
    """
    return list(_events(Path(path)))


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                yield event
            elif line.strip() and line.endswith("\n"):  # the last line may not be complete yet
                log.warning("%s, line %d is not an event and is left out", path, number)


def _ends_in_mid_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    """Replace a number that is not finite by None, since JSON does not support it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
