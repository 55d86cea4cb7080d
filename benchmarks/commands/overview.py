"""``overview``: stored results as tables for the documentation.

A page contains such tables between two comments, ``<!-- results: NAME -->`` and ``<!-- end of results -->``. NAME is
one of

* the name of a results file without its suffix. ``NAME 2`` is only the second table of that file,
  ``NAME COLUMN=VALUE`` has only the rows with this value, and ``NAME best`` is a short table of a comparison;
* ``all``, ``losses`` or ``sources``: a table over all comparisons;
* ``step-times`` or ``memory``: a summary of all measured step times, or of the bytes of all optimizers.

``--page`` updates the tables of a page.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare import statistics, wording
from benchmarks.compare.statistics import Results, Summary, targets
from benchmarks.compare.tables import escape_markdown, markdown_table, reach_rows, result_rows
from benchmarks.compare.wording import NOTHING, number, seconds, share
from benchmarks.report import Table

_FEW = 6  # maximum number of rows in a short table
_PRESETS: Mapping[str, Mapping[str, str]] = {
    "autoencoder": {"kfac_adaptive": "large_batch"},
    "poisson": {"hylo": "physics_informed", "ekfac_adaptive": "least_squares"},
}
"""The presets that optimizers correspond to, by workload."""


def overview(comparisons: Sequence[Results]) -> str:
    table = best_rows(comparisons)
    return (markdown_table(table) if table.rows else "") + "\n"


def best_rows(comparisons: Sequence[Results]) -> Table:
    return Table(
        "Best of our methods and best first-order optimizer",
        (
            "workload", "best first-order", "its loss", "best of ours", "runs", "seeds", "share of steps",
            "target", "verdict", "relative seconds", "complete run, seconds",
        ),
        tuple(_best(results) for results in comparisons),
        "The share of steps counts up to the point where our run reaches the final loss of the best first-order "
        "optimizer, relative to all steps of that optimizer, as a mean over the seeds that reach it. A target is met "
        "if every seed stays within this share. Relative seconds are our seconds to that loss, divided by those in "
        "which the curves of the best first-order optimizer first get there. The last column is the time of our "
        "complete run, divided by that of the other complete run. The best of ours is the method that reaches the loss "
        "with the most seeds, then in the fewest steps.",
    )  # fmt: skip


def losses(comparisons: Sequence[Results]) -> str:
    rows = tuple(_losses(results) for results in comparisons)
    columns = ("workload", "steps", "AdamW", "best first-order optimizer", "best of these methods")
    caption = (
        "Final training loss, as a mean over the seeds. Each optimizer uses the best of its learning rates. In "
        "parentheses: the time of a step divided by that of a step of SGD."
    )
    return markdown_table(Table("Final losses", columns, rows, caption)) + "\n"


def _losses(results: Results) -> tuple[str, ...]:
    found = [(item.loss.mean, item) for item in statistics.summaries(results) if item.loss is not None]
    adamw = [pair for pair in found if pair[1].optimizer == "adamw"]
    first = [pair for pair in found if pair[1].order == "first"]
    ours = [pair for pair in found if pair[1].ours]
    cells = [results["workload"], str(results["steps"])]
    for group in (adamw, first, ours):
        loss, item = min(group, key=lambda pair: pair[0], default=(None, None))
        label = "" if item is None or item.optimizer == "adamw" else f"{item.label}: "
        cells.append(NOTHING if item is None else f"{label}{number(loss)} ({share(item.step_cost)})")
    return tuple(cells)


def sources(comparisons: Sequence[Results]) -> str:
    """Return a table with the source of each optimizer's settings other than the learning rate."""
    found: dict[str, dict[str, None]] = {}
    for results in comparisons:
        for label, source in wording.sources(results).items():
            found.setdefault(label, {})[source] = None
    rows = tuple((label, "; ".join(kept)) for label, kept in found.items())
    caption = "In every comparison, the learning rate is searched as well, in the same way for all."
    return markdown_table(Table("Settings of the optimizers", ("optimizer", "settings"), rows, caption)) + "\n"


def step_times(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of each optimizer's step time relative to SGD, on all measured workloads."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for results in measured:
        for row in results["results"]:
            for intervals, entry in row["amortised"].items():
                cells = found.setdefault((row["label"], intervals), {})
                cells[results["workload"]] = f"{entry['ratio']:.2f}"
    workloads = [results["workload"] for results in measured]
    rows = tuple((*key, *(cells.get(name, NOTHING) for name in workloads)) for key, cells in found.items())
    heads = [f"{results['workload']}, batch {results['batch_size']}" for results in measured]
    return markdown_table(Table("Step time relative to SGD", ("optimizer", "intervals", *heads), rows)) + "\n"


def memory(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the bytes that each optimizer stores between steps, also as a multiple of the parameters.

    The table excludes variants.
    """
    kept = {"total": ", MB", "× parameters": ", × parameters"}
    found: dict[str, dict[str, str]] = {}
    for results in measured:
        table = results["tables"][0]
        places = {table["columns"].index(column): results["workload"] + words for column, words in kept.items()}
        for row in (row for row in table["rows"] if "," not in row[0]):
            found.setdefault(row[0], {}).update((head, row[place]) for place, head in places.items())
    heads = [results["workload"] + words for results in measured for words in kept.values()]
    rows = tuple((label, *(cells.get(head, NOTHING) for head in heads)) for label, cells in found.items())
    return markdown_table(Table("", ("optimizer", *heads), rows)) + "\n"


def best_of(results: Results) -> str:
    """Return a short table of one comparison, with the presets that optimizers correspond to."""
    preset = _PRESETS.get(results["workload"], {})
    found = [item for item in statistics.summaries(results) if item.optimizer in _few(results, preset)]
    rows = tuple(_row(item, preset.get(item.optimizer)) for item in found)
    columns = ("optimizer", "loss", results["metric"], "seconds", "÷ SGD", "MB")
    return markdown_table(Table("", columns, rows)) + "\n"


def _few(results: Results, preset: Mapping[str, str]) -> list[str]:
    """Return our best method, presets, AdamW, two first-order optimizers, kfac-pytorch, and more of our methods."""
    ranked = [item for item in statistics.summaries(results) if item.loss]
    best = statistics.leaders(results)[1]
    first: dict[str, str] = {}
    for item in ranked:
        if item.order == "first":
            first.setdefault(item.label.split(",")[0], item.optimizer)  # only the best variant of each
    names = [best.optimizer] if best else []
    names += [*preset, "adamw", *list(first.values())[:2], "kfac_pytorch"]
    names += [item.optimizer for item in ranked if item.ours]
    known = statistics.optimizers(results)
    return [name for name in dict.fromkeys(names) if name in known][:_FEW]


def _row(item: Summary, preset: str | None) -> tuple[str, ...]:
    loss, metric, time = item.loss, item.metric, item.seconds
    deviation = f" ± {number(loss.deviation, 2)}" if loss and loss.deviation is not None else ""
    return (
        item.label + (f" ({preset})" if preset else ""),
        number(loss.mean if loss else None) + deviation,
        number(metric.mean if metric else None),
        seconds(time.mean if time else None),
        share(item.step_cost),
        NOTHING if item.megabytes is None else f"{item.megabytes:.3g}",
    )


def _best(results: Results) -> tuple[str, ...]:
    name = f"{results['workload']} ({results['size']}){', made-up data' * bool(results.get('made_up_data'))}"
    aim = results["share_target"]
    target, best = statistics.leaders(results)
    if target is None or best is None:
        return (name, *(NOTHING,) * 10)
    return (
        name, target.label, number(target.loss), best.label, "short" if best.phase == "short" else "full",
        f"{best.reached} of {best.seeds}", share(best.steps_share), f"{aim:g}", wording.verdict(best.met(aim)),
        share(best.seconds_share), share(statistics.whole_share(results, best, target)),
    )  # fmt: skip


_BLOCK = re.compile(
    r"(<!-- results: (?P<name>[\w-]+)(?: (?P<part>[^>\n]+))? -->\n).*?(?P<end><!-- end of results -->)", re.S
)
_TOGETHER = {"all": overview, "losses": losses, "sources": sources}
_MEASURED = {"step-times": ("step-time-", step_times), "memory": ("memory-", memory)}


@dataclass
class Overview:
    """Print a summary of all stored comparisons as Markdown, or update the tables of documentation pages."""

    results: Path = Path("benchmarks/results")
    """Folder that contains the results."""
    page: tuple[Path, ...] = ()
    """Pages whose tables to update. Without a page, the summary is printed."""

    def run(self) -> int:
        found = load(self.results)
        if not self.page:
            print(_body(found, "all"), end="")
        for page in self.page:
            page.write_text(renewed(page.read_text(encoding="utf-8"), found), encoding="utf-8")
        return 0


def load(folder: Path) -> dict[str, Results]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def renewed(text: str, results: Mapping[str, Results]) -> str:
    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_body(results, match['name'], match['part'] or '').strip()}\n\n{match['end']}"

    return _BLOCK.sub(block, text)


def _body(results: Mapping[str, Results], name: str, part: str = "") -> str:
    if name in _TOGETHER:
        comparisons = [found for found in results.values() if "runs" in found]
        if not comparisons:
            raise ValueError("the folder contains no results of compare")
        return _TOGETHER[name](comparisons)
    if name in _MEASURED:
        prefix, summary = _MEASURED[name]
        return summary([found for stem, found in results.items() if stem == prefix + found.get("workload", "")])
    if name not in results:
        raise ValueError(f"the page asks for results of {name!r}, but there are only {', '.join(results)}")
    if "runs" in results[name]:
        return best_of(results[name]) if part == "best" else section(results[name])
    if "tables" not in results[name]:
        raise ValueError(f"the results of {name} contain no tables: run the command that produces them again")
    return "\n\n".join(map(markdown_table, _part([Table(**table) for table in results[name]["tables"]], part)))


def _part(tables: Sequence[Table], part: str) -> Sequence[Table]:
    """Return all tables, the table with a number, or the rows with a value in a column, without that column."""
    column, equal, value = part.partition("=")
    if not equal:
        return tables[int(part) - 1 : int(part)] if part else tables
    return [_selected(table, table.columns.index(column), value) for table in tables if column in table.columns]


def _selected(table: Table, place: int, value: str) -> Table:
    rows = [row for row in table.rows if row[place] == value]
    columns, *kept = [(*row[:place], *row[place + 1 :]) for row in (table.columns, *rows)]
    return replace(table, title=f"{table.title} ({table.columns[place]}: {value})", columns=columns, rows=tuple(kept))


def section(results: Results) -> str:
    tables = [result_rows(results), *(reach_rows(results, target) for target in targets(results)[:1])]
    tables = [replace(table, caption="") for table in tables]  # the page explains the columns only once
    notes = "\n".join(f"* {escape_markdown(sentence)}" for sentence in wording.budget(results))
    parts = [
        escape_markdown(" ".join(wording.summary(results))),
        *map(markdown_table, tables),
        f"Notes on these runs:\n\n{notes}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
