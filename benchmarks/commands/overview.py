"""``overview``: what results that are kept say, as tables for the documentation.

A page holds such tables between two comments, ``<!-- results: NAME -->`` and ``<!-- end of results -->``. NAME is that
of a file of results without its ending, or ``all`` or ``losses`` for what all comparisons say together; ``NAME 2``
is the second table of a file alone. ``--page`` renews them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands.choices import choices
from benchmarks.compare import statistics, wording
from benchmarks.compare.statistics import Results, Summary, targets
from benchmarks.compare.tables import Rows, markdown_table, plain, reach_rows, result_rows
from benchmarks.compare.wording import NOTHING, number, share

_NONE = (NOTHING,) * 4


def overview(comparisons: Sequence[Results]) -> str:
    table = best_rows(comparisons)
    return (markdown_table(table) if table.rows else "") + "\n"


def best_rows(comparisons: Sequence[Results]) -> Rows:
    return Rows(
        "Best of ours against the best first-order optimizer",
        (
            "workload", "best first-order", "its loss", "best of ours", "runs", "seeds", "share of steps",
            "aim", "aim of steps", "share of seconds", "whole run, seconds",
        ),
        tuple(_best(results) for results in comparisons),
        "Shares are of the best first-order optimizer's full run. Those of steps and seconds end where our run reaches "
        "that optimizer's final loss, means over the seeds that did; the last column is the whole of our run. Best of "
        "ours: most seeds, then fewest steps. The aim is met when every seed is within this share of the steps. "
        "Seconds are not judged, because part of one run is compared with the whole of another.",
    )  # fmt: skip


def losses(comparisons: Sequence[Results]) -> str:
    rows = tuple(_losses(results) for results in comparisons)
    columns = ("workload", "steps", "AdamW", "best first-order optimizer", "best of these methods")
    caption = (
        "Training loss at the end, mean over the seeds, each optimizer at the best of its learning rates; in brackets, "
        "the time of a step divided by that of a step of SGD."
    )
    return markdown_table(Rows("Final losses", columns, rows, caption)) + "\n"


def _losses(results: Results) -> tuple[str, ...]:
    found = [(item.loss.mean, item) for item in statistics.summaries(results) if item.loss is not None]
    adamw = [pair for pair in found if pair[1].optimizer == "adamw"]
    first = [pair for pair in found if pair[1].order == "first"]
    ours = [pair for pair in found if pair[1].ours]
    best = [min(group, key=lambda pair: pair[0], default=None) for group in (adamw, first, ours)]
    return (
        results["workload"],
        str(results["steps"]),
        *(
            NOTHING if pair is None else f"{_label(pair[1])}{number(pair[0])} ({share(pair[1].step_cost)})"
            for pair in best
        ),
    )


def _label(item: Summary) -> str:
    return "" if item.optimizer == "adamw" else f"{item.label}: "


def _name(results: Results) -> str:
    return f"{results['workload']} ({results['size']}){', made-up data' * bool(results.get('made_up_data'))}"


def _best(results: Results) -> tuple[str, ...]:
    name = _name(results)
    aim = results["share_target"]
    target = statistics.target_of(results, statistics.best_first(results))
    if target is None:
        return (name, NOTHING, NOTHING, *_NONE, f"{aim:g}", "no reference", NOTHING, NOTHING)
    best = statistics.best_of_ours(results, target)
    if best is None:
        return (name, target.label, number(target.loss), *_NONE, f"{aim:g}", "none of ours", NOTHING, NOTHING)
    return (
        name,
        target.label,
        number(target.loss),
        best.label,
        "short" if best.phase == "short" else "full",
        f"{best.reached} of {best.seeds}",
        share(best.steps_share),
        f"{aim:g}",
        wording.verdict(best.met(aim)),
        share(best.seconds_share),
        share(statistics.whole_share(results, best, target)),
    )


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
    if name == "choices":
        return choices(results)
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
