"""``overview``: what the comparisons that are kept say together, as tables for the documentation.

A page holds such tables between two comments, ``<!-- results: NAME -->`` and ``<!-- end of results -->``, NAME being
that of a file of results without its ending, or ``all``; ``--page`` renews them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare import wording
from benchmarks.compare.overview import overview
from benchmarks.compare.statistics import Results, targets
from benchmarks.compare.tables import markdown_table, plain, reach_rows, result_rows

_BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end of results -->)", re.DOTALL)


@dataclass
class Overview:
    """Print what all kept comparisons say together as Markdown, or write it into a page."""

    results: Path = Path("benchmarks/results")
    """Folder of results; files of other commands are passed over."""
    page: Path | None = None
    """Page whose tables are renewed; unset: print."""

    def run(self) -> int:
        comparisons = load(self.results)
        if self.page is None:
            print(overview(list(comparisons.values())), end="")
        else:
            self.page.write_text(renewed(self.page.read_text(encoding="utf-8"), comparisons), encoding="utf-8")
        return 0


def load(folder: Path) -> dict[str, Results]:
    """Read all comparisons of a folder."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    comparisons = {name: results for name, results in found.items() if "runs" in results}
    if not comparisons:
        raise ValueError(f"{folder} holds no results of compare")
    return comparisons


def renewed(text: str, comparisons: Mapping[str, Results]) -> str:
    """Return a page with the tables that belong to the results."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name != "all" and name not in comparisons:
            raise ValueError(f"the page wants results of {name}, there are {', '.join(comparisons)}")
        body = overview(list(comparisons.values())) if name == "all" else section(comparisons[name])
        return f"{match[1]}\n{body.strip()}\n\n{match[4]}"

    return _BLOCK.sub(block, text)


def section(results: Results) -> str:
    """Return what a page says of one comparison."""
    tables = [result_rows(results), *(reach_rows(results, target) for target in targets(results)[:1])]
    sentences = [plain(" ".join(found)) for found in (wording.summary(results), wording.fairness(results))]
    parts = [*sentences, *map(markdown_table, tables)]
    return "\n\n".join(part for part in parts if part) + "\n"
