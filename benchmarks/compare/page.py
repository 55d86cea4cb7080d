"""The report of a comparison: one page of Markdown, and its figures as files next to it."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare import figures, statistics, wording
from benchmarks.compare.statistics import Results
from benchmarks.compare.tables import Rows, all_rows, markdown_table, plain

NAME = "report.md"
_ELSEWHERE = ("version", "command", "machines", "runs")
"""Entries of results that are not among the facts."""
_MADE_UP = "The data was generated at random in the real format: the code ran, but the numbers below mean nothing."


def write_report(results: Results, folder: Path) -> Path:
    """Write the page and its figures to a folder, and return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(page(results, _draw(results, folder)), encoding="utf-8")
    return folder / NAME


def page(results: Results, drawn: Iterable[str] = ()) -> str:
    parts = [
        f"# {plain(results['workload'])} ({results['size']}): optimizers compared",
        f"**{_MADE_UP}**" if results.get("made_up_data") else "",
        "\n".join(f"* {plain(sentence)}" for sentence in wording.summary(results)),
        *map(plain, wording.fairness(results)),
        markdown_table(Rows("", ("", "this comparison"), tuple(_facts(results)))),
        f"```console\n$ {command(results)}\n```",
        *map(markdown_table, all_rows(results)),
        *drawn,
        *map(markdown_table, _settings(results)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _draw(results: Results, folder: Path) -> list[str]:
    """Draw the figures for which there are results, and return the paragraphs that show them."""
    finals = statistics.select(results, "final")
    drawn = []
    if any(math.isfinite(statistics.final_loss(run)) for run in finals):
        figures.draw_losses(results, folder / "report-losses.svg")
        drawn.append(
            "![Training loss against steps and seconds](report-losses.svg)\n\n"
            "Lines are means over the seeds, and bands show their range."
        )
    return drawn


def _facts(results: Results) -> Iterable[tuple[str, str]]:
    """Yield what all runs have in common, the machines, and the versions of other packages."""
    for name, found in results.items():
        if name not in _ELSEWHERE and found not in (None, {}, ""):
            yield name.replace("_", " "), str(found)
    for index in sorted({run["machine"] for run in results["runs"]}):
        yield f"machine {index + 1}", str(results["machines"][index])
    versions = {f"{name} {v}" for run in results["runs"] for name, v in (run.get("versions") or {}).items()}
    yield "versions", ", ".join(sorted(versions)) or "no other packages"


def command(results: Mapping[str, Any]) -> str:
    """Return the command line that produced the results, or one that produces such results."""
    made = f"python -m benchmarks compare --workload {results['workload']} --size {results['size']}"
    return str(results.get("command") or f"{made} --steps {results['steps']} --batch-size {results['batch_size']}")


def _settings(results: Results) -> list[Rows]:
    rows = tuple(_setting(results, name) for name in statistics.optimizers(results))
    return [Rows("Settings", ("optimizer", "runs", "settings", "notes"), rows)] if rows else []


def _setting(results: Results, optimizer: str) -> tuple[str, ...]:
    runs = statistics.select(results, optimizer=optimizer)
    phases = {run["phase"]: run for run in runs}  # the last run of each phase
    name, run = ("full runs", phases["final"]) if "final" in phases else ("a trial", runs[0])
    notes = dict.fromkeys(run["note"] for run in runs if run.get("note"))
    return runs[0]["label"], name, json.dumps(run["settings"], ensure_ascii=False, default=str), "; ".join(notes)
