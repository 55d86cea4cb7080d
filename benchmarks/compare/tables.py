"""Tables of a comparison, as Markdown for pages and for the terminal, and its report: a page with figures."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.markdown import Markdown

from benchmarks.compare import figures, statistics, wording
from benchmarks.compare.plan import end_loss
from benchmarks.compare.statistics import Reach, Results, Summary, Target
from benchmarks.compare.wording import NOTHING, number, seconds, share, verdict
from benchmarks.report import Table
from benchmarks.runner import WINDOW

_SENTENCE = 50  # columns with longer cells are text, and left-aligned


def printed(results: Results) -> Markdown:
    """Return all tables for the terminal."""
    return Markdown("\n\n".join(map(markdown_table, all_rows(results))))


def markdown_table(table: Table) -> str:
    """Return a table as Markdown, with its title in bold and its caption."""
    texts = {0, *(place for row in table.rows for place, cell in enumerate(row) if len(cell) > _SENTENCE)}
    sides = [" :--- " if place in texts else " ---: " for place in range(len(table.columns))]
    title = [f"**{escape_markdown(table.title)}**", ""] if table.title else []
    text = "\n".join([*title, _line(table.columns), "|" + "|".join(sides) + "|", *map(_line, table.rows)])
    return f"{text}\n\n{escape_markdown(table.caption)}" if table.caption else text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape_markdown, cells)) + " |"


def escape_markdown(text: str) -> str:
    for letter in ("\\", "|", "*", "_", "`", "<", "["):
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def all_rows(results: Results) -> list[Table]:
    reached = [reach_rows(results, target) for target in statistics.targets(results)]
    tables = [result_rows(results), *reached, sift_rows(results), failure_rows(results)]
    return [table for table in tables if table.rows]


def result_rows(results: Results) -> Table:
    found = statistics.summaries(results)
    qualities = list(
        dict.fromkeys(name for run in statistics.select(results, "final") for name in run.get("quality") or {})
    )
    low = "higher is better" if results["metric_better"] == "higher" else "lower is better"
    columns = ("optimizer", "kind", "rate", "loss", "std", "min–max", results["metric"], *qualities)
    rows = tuple((*_result(s), *(_quality(results, s.optimizer, q) for q in qualities), *_cost(s)) for s in found)
    return Table(
        f"Full runs: {results['workload']} ({results['size']}), {results['steps']} steps",
        (*columns, "s", "÷ SGD", "MB", "runs"),
        rows,
        f"Loss is the {results['loss']} at the end, with its mean, standard deviation and range over the seeds. "
        f"The {results['metric']} is a mean over the seeds ({low}). Rate is a multiple of the recipe's learning rate. "
        f"The column s has {statistics.clock_name(results)} seconds, and ÷ SGD is the time of a step relative to SGD. "
        "MB is the size of the optimizer's state. Runs counts those that finished, of all. Kind: methods that use the "
        "curvature of the loss are second order; Muon, Shampoo, SOAP and others that use gradients only are first "
        "order.",
    )


def _result(found: Summary) -> tuple[str, ...]:
    loss, deviation = found.loss, found.loss.deviation if found.loss else None
    return (
        found.label, "ours" if found.ours else found.order, NOTHING if found.factor is None else f"{found.factor:.3g}",
        number(loss.mean if loss else None), number(deviation, 2), wording.interval(loss),
        number(found.metric.mean if found.metric else None),
    )  # fmt: skip


def _cost(found: Summary) -> tuple[str, ...]:
    megabytes = NOTHING if found.megabytes is None else f"{found.megabytes:.3g}"
    done = found.loss.count if found.loss else 0
    time = seconds(found.seconds.mean if found.seconds else None)
    return time, share(found.step_cost), megabytes, f"{done}/{found.seeds}"


def _quality(results: Results, optimizer: str, name: str) -> str:
    runs = statistics.select(results, "final", optimizer)
    found = statistics.spread((run.get("quality") or {}).get(name) for run in runs if not statistics.flaw(run))
    return number(found.mean if found else None)


_REACHED = (
    "optimizer", "runs", "seeds", "loss at end", "steps", "share of steps", "seconds", "relative seconds", "target",
)  # fmt: skip


def reach_rows(results: Results, target: Target) -> Table:
    found, aim = statistics.reaches(results, target), results["share_target"]
    return Table(
        f"Reaching the final loss of {target.label}: {number(target.loss)}",
        _REACHED,
        tuple(_reach(item, aim) for item in found),
        f"The share of steps is relative to a full run of {target.label}, {target.steps:.0f} steps and "
        f"{seconds(target.seconds)} s. Relative seconds are relative to the {seconds(target.crossing)} s in which its "
        "own curves first get there. "
        f"A full run has reached the loss at the first of two consecutive points of its curve (or at its last point) "
        f"whose mean of {WINDOW} steps is at most that loss. A short run has reached it if it ends at most there, and "
        "it counts with all of its steps. Steps and seconds are means over the seeds that reached the loss. The target "
        f"for our methods: every seed reaches the loss within {aim:g} of the steps.",
    )


def _reach(item: Reach, aim: float) -> tuple[str, ...]:
    steps = NOTHING if item.steps is None else f"{item.steps:.0f}"
    return (
        item.label, "short" if item.phase == "short" else "full", f"{item.reached} of {item.seeds}", number(item.loss),
        steps, share(item.steps_share), seconds(item.seconds), share(item.seconds_share),
        verdict(item.met(aim)) if item.ours else NOTHING,
    )  # fmt: skip


def sift_rows(results: Results) -> Table:
    names = [name for name in statistics.optimizers(results) if statistics.select(results, "sift", name)]
    tried = {name: statistics.sift_losses(results, name) for name in names}
    factors = sorted({factor for losses in tried.values() for factor in losses})
    rows = []
    for name in names:
        best = statistics.best_factor(results, name)
        cells = [_trial(tried[name].get(factor), factor == best) for factor in factors]
        edge = NOTHING if len(tried[name]) == 1 else "yes" if statistics.at_edge(results, name) else "no"
        rows.append((statistics.label_of(results, name), *cells, str(len(tried[name])), edge))
    steps = sorted({run["steps"] for run in statistics.select(results, "sift")})
    return Table(
        "Learning rates tried",
        ("optimizer", *(f"× {factor:.3g}" for factor in factors), "tried", "best is last"),
        tuple(rows),
        f"Loss after {', '.join(map(str, steps))} steps, by multiple of the recipe's learning rate. An asterisk marks "
        "the best one, which full runs use. Best is last: no rate beyond the best one was tried.",
    )


def _trial(loss: float | None, best: bool) -> str:
    if loss is None:
        return NOTHING
    return f"{number(loss)}{' *' * best}" if math.isfinite(loss) else "unfinished"


def failure_rows(results: Results) -> Table:
    """Return all runs that did not finish, with the reasons."""
    broken = statistics.unfinished(results)
    return Table(
        "Runs that did not finish",
        ("optimizer", "phase", "rate ×", "seed", "reason"),
        tuple((r["label"], r["phase"], f"{r['factor']:.3g}", str(r["seed"]), why) for r, why in broken),
        "These runs count among the seeds as runs that never reached the target. A run has diverged if a loss is not "
        "finite, or if the mean at the end is above twice the first loss.",
    )


NAME = "report.md"
_FIGURE = "report-losses.svg"
_MADE_UP = "The data was generated at random in the real format: the code ran, but the numbers below mean nothing."


def write_report(results: Results, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = page(results)
    if any(math.isfinite(end_loss(run)) for run in statistics.select(results, "final")):
        figures.draw_losses(results, folder / _FIGURE)
        text += f"\n![Training loss against steps and seconds, with the range of the seeds]({_FIGURE})\n"
    (folder / NAME).write_text(text, encoding="utf-8")
    return folder / NAME


def page(results: Results) -> str:
    settings = {run["label"]: json.dumps(run["settings"], ensure_ascii=False) for run in results["runs"]}
    sources = wording.sources(results)
    rows = [(label, sources.get(label, NOTHING), text) for label, text in settings.items()]
    parts = [
        f"# {escape_markdown(results['workload'])} ({results['size']}): optimizers compared",
        f"**{_MADE_UP}**" if results.get("made_up_data") else "",
        "\n".join(f"* {escape_markdown(sentence)}" for sentence in wording.summary(results)),
        *map(escape_markdown, wording.budget(results)),
        f"```console\n$ {results['command']}\n```",
        *map(markdown_table, all_rows(results)),
        markdown_table(Table("Settings", ("optimizer", "source", "settings"), rows)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
