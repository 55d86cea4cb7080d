"""``overview``: what results that are kept say, as tables for the documentation.

A page holds such tables between two comments, ``<!-- results: NAME -->`` and ``<!-- end of results -->``. NAME is that
of a file of results without its ending, or ``all`` or ``losses`` for what all comparisons say together; ``NAME 2``
is the second table of a file alone. ``--page`` renews them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare import wording
from benchmarks.compare.overview import losses, overview
from benchmarks.compare.statistics import Results, targets
from benchmarks.compare.tables import Rows, markdown_table, plain, reach_rows, result_rows

_BLOCK = re.compile(
    r"(<!-- results: (?P<name>[\w-]+)(?: (?P<table>\d+))? -->\n).*?(?P<end><!-- end of results -->)", re.S
)
_TOGETHER = {"all": overview, "losses": losses}


@dataclass
class Overview:
    """Print what all kept comparisons say together as Markdown, or write what is kept into pages."""

    results: Path = Path("benchmarks/results")
    """Folder of results."""
    page: tuple[Path, ...] = ()
    """Pages whose tables are renewed; none: print."""

    def run(self) -> int:
        found = load(self.results)
        if not self.page:
            print(_body(found, "all", None), end="")
        for page in self.page:
            page.write_text(renewed(page.read_text(encoding="utf-8"), found), encoding="utf-8")
        return 0


def load(folder: Path) -> dict[str, Results]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def renewed(text: str, results: Mapping[str, Results]) -> str:
    def block(match: re.Match[str]) -> str:
        number = None if match["table"] is None else int(match["table"])
        return f"{match[1]}\n{_body(results, match['name'], number).strip()}\n\n{match['end']}"

    return _BLOCK.sub(block, text)


def _body(results: Mapping[str, Results], name: str, number: int | None) -> str:
    if name in _TOGETHER:
        comparisons = [found for found in results.values() if "runs" in found]
        if not comparisons:
            raise ValueError("the folder holds no results of compare")
        return _TOGETHER[name](comparisons)
    if name not in results:
        raise ValueError(f"the page wants results of {name}, there are {', '.join(results)}")
    if "runs" in results[name]:
        return section(results[name])
    if "tables" not in results[name]:
        raise ValueError(f"the results of {name} have no tables: run the command that made them again")
    tables = [Rows(**table) for table in results[name]["tables"]]
    return "\n\n".join(map(markdown_table, tables if number is None else tables[number - 1 : number]))


def section(results: Results) -> str:
    tables = [result_rows(results), *(reach_rows(results, target) for target in targets(results)[:1])]
    sentences = [plain(" ".join(found)) for found in (wording.summary(results), wording.fairness(results))]
    parts = [*sentences, *map(markdown_table, tables)]
    return "\n\n".join(part for part in parts if part) + "\n"
