"""Output of the commands: tables on the terminal, the same text in a file, and the data as JSON next to it."""

import json
import math
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import rich.table
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status

_WIDTH = 120  # of saved tables, and of printed ones if the output is not a terminal


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def status(text: str) -> Status:
    """Return a context that shows what is running. It shows nothing outside a terminal."""
    return Console(stderr=True).status(text)


def progress_bar() -> Progress:
    """Return a progress bar with the current item. It shows nothing outside a terminal."""
    terminal = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)


T = TypeVar("T")


def tracked(title: str, items: Sequence[T]) -> Iterable[T]:
    with progress_bar() as progress:
        yield from progress.track(items, description=title)


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(title=self.title, caption=self.caption or None)
        table.title_justify = table.caption_justify = "left"
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


Column = Callable[[Mapping[str, Any]], str]  # a function that returns the text of a cell, given its row


def value(key: str, spec: str = "", scale: float = 1.0) -> Column:
    """Return a column that formats ``row[key]``, or shows "-" if the row has no such value."""

    def shown(row: Mapping[str, Any]) -> str:
        found = row.get(key)
        if found is None:
            return "-"
        return format(found * scale if spec and scale != 1 else found, spec)

    return shown


def grouped(rows: Sequence[Mapping[str, Any]], line: str, column: str) -> list[dict[Any, Any]]:
    """Return one mapping for each value of ``row[line]``, with its rows by ``row[column]``."""
    found: dict[Any, dict[Any, Any]] = {}
    for row in rows:
        found.setdefault(row[line], {})[row[column]] = row
    return list(found.values())


_UNITS = {"ms": 1e3, "MB": 1e-6}


def columns(text: str) -> dict[str, Column]:
    """Return columns by title from a text such as ``runs; optimizer = label; step ms = seconds .1f ms``.

    Each part is a title, followed by the key of its values, their format and their unit. A key alone is also its title.
    """
    found = {}
    for part in text.split("; "):
        title, _, rest = part.partition(" = ")
        key, spec, unit = [*(rest or title).split(), "", ""][:3]
        found[title] = value(key, spec, _UNITS.get(unit, 1.0))
    return found


def table_of(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Column], caption: str = "") -> Table:
    cells = [[column(row) for column in columns.values()] for row in rows]
    return Table(title, list(columns), cells, caption)


def save(out_dir: Path, name: str, tables: Sequence[Table], data: Mapping[str, Any]) -> None:
    """Print tables, and write them and the data to ``<out_dir>/<name>.txt`` and ``.json``."""
    out_dir.mkdir(parents=True, exist_ok=True)
    text = StringIO()
    for target in (console(), Console(file=text, width=_WIDTH)):
        for table in tables:
            target.print(table)
    (out_dir / f"{name}.txt").write_text(text.getvalue(), encoding="utf-8")
    payload = to_json({"environment": environment(), **data, "tables": list(map(asdict, tables))})
    (out_dir / f"{name}.json").write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print_path("results", out_dir / f"{name}.json")


def print_path(what: str, path: Path) -> None:
    print(f"{what}: {path.resolve()}")


def environment() -> dict[str, str | int]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def to_json(value: Any) -> Any:
    """Convert a value to JSON types: a number that is not finite becomes None, a path its text, and a tuple a list."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | bool | None) else str(value)
