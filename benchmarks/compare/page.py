"""The report of a comparison: one page of Markdown, and its figures as files next to it."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare import figures, statistics, wording
from benchmarks.compare.statistics import Results, Run
from benchmarks.compare.tables import Rows, all_rows, markdown_table, plain

NAME = "report.md"
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
    if any(run["curve"] for run in finals):
        figures.draw_each(results, folder / "report-each.svg")
        drawn.append(
            "![Training loss of every optimizer, one panel each](report-each.svg)\n\n"
            "Optimizers are sorted by final loss, and bands show the range of the seeds. The other optimizers are "
            "gray. The thin line is the final loss of the best first-order optimizer. A cross marks a run that did not "
            "finish."
        )
    return drawn


def _facts(results: Results) -> Iterable[tuple[str, str]]:
    """Yield facts about the runs and the machines."""
    held_out = "all held-out data" if results.get("everything") else "the workload's sample of held-out data"
    scaled = ", scaled to its speed at the start by steps of SGD in between" if results.get("reference_seconds") else ""
    clock = f"{statistics.clock_name(results)} time{scaled}"
    yield "workload", f"{results['workload']}, size {results['size']}: {results['examples']} training examples"
    yield "full run", f"{results['steps']} steps of {results['batch_size']} examples"
    yield "loss", f"training loss, {results['loss']}"
    yield "metric", f"{results['metric']} on {held_out}; {results['metric_better']} is better"
    yield "schedule", f"{results['schedule']}; an optimizer with its own schedule keeps it"
    yield "seconds", f"{clock} of zero_grad, forward, backward and step, without drawing batches or evaluating"
    if changes := results.get("workload_settings"):
        yield "changed in the workload", ", ".join(f"{name}={value!r}" for name, value in changes.items())
    for index in sorted({run["machine"] for run in results["runs"]}):
        yield f"machine {index + 1}", _machine(results, index)
    yield "versions", _versions(results["runs"])


def _machine(results: Results, index: int) -> str:
    known = results["machines"][index]
    runs = sum(run["machine"] == index for run in results["runs"])
    gemm, copying = known["gemm_gflops"], known["copy_gbytes"]
    threads = f"{known['threads']} thread{'s' * (known['threads'] != 1)}"
    return (
        f"{known['processor']}, {threads}, {known['date']}, Python {known['python']}, "
        f"torch {known['torch']}; measured next to its {runs} runs: matrix products {gemm['median']:g} GFLOP/s "
        f"(best {gemm['best']:g}), copying {copying['median']:g} GB/s (best {copying['best']:g})"
    )


def _versions(runs: Iterable[Run]) -> str:
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, version in (run.get("versions") or {}).items():
            found.setdefault(name, {})[str(version)] = None
    return ", ".join(f"{name} {' and '.join(found[name])}" for name in sorted(found)) or "no other packages"


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
