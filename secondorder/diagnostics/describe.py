"""The table that ``describe()`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One parameter of the table.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the parameter.
        treatment: The curvature that covers the parameter, or the fallback and its reason.
        sizes: Sizes of the curvature, or an empty string.
        owner: Rank that owns the curvature, or an empty string.
        nbytes: Bytes of optimizer state for the parameter on this rank.
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    sizes: str
    owner: str
    nbytes: int


def human_bytes(n: int) -> str:
    """Format bytes in the largest unit with at least one digit before the decimal point."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def render(title: str, sizes: str, rows: Sequence[Row], footer: Sequence[str]) -> str:
    """Align the columns under a title. A row starts with the name of its parameter."""
    head = ("parameter", "shape", sizes, "owner", "state", "treatment")
    cells = [
        (r.name, "×".join(map(str, r.shape)) or "scalar", r.sizes, r.owner, human_bytes(r.nbytes), r.treatment)
        for r in rows
    ]
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head) - 1)]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        return "  ".join((*padded, row[-1])).rstrip()

    rule = "  ".join("-" * width for width in (*widths, len(head[-1])))
    return "\n".join((title, line(head), rule, *map(line, cells), *footer))
