"""Formats numbers and tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], words: int = 1) -> Iterator[str]:
    """Yield the lines of a table, whose first columns are words and whose other columns are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def bytes_in_words(n: float) -> str:
    """Return a number of bytes with a binary unit."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops_in_words(n: float) -> str:
    """Return a number of FLOPs with a decimal prefix."""
    return _scaled(n, 1000, ("", "k", "M", "G", "T", "P"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    size, place = float(n), 0
    while size >= base and place < len(units) - 1:
        size, place = size / base, place + 1
    digits = 0 if place == 0 and size == int(size) else 1
    return f"{size:.{digits}f} {units[place]}".rstrip()
