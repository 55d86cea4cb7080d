"""What several comparisons say together: a row for each workload."""

from collections.abc import Sequence

from benchmarks.compare import statistics, wording
from benchmarks.compare.statistics import Results, Summary
from benchmarks.compare.tables import Rows, markdown_table
from benchmarks.compare.wording import NOTHING, number, share

_NONE = (NOTHING,) * 4


def overview(comparisons: Sequence[Results]) -> str:
    table = best_rows(comparisons)
    return (markdown_table(table) if table.rows else "") + "\n"


def best_rows(comparisons: Sequence[Results]) -> Rows:
    """Return for each workload how the best of ours reached the loss of the best first-order optimizer."""
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
    """Return a table of final losses over several workloads as Markdown: AdamW's, and the lowest of either kind."""
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
