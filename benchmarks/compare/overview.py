"""What several comparisons say together: a row for each workload."""

from collections.abc import Sequence

from benchmarks.compare import statistics, wording
from benchmarks.compare.statistics import Results
from benchmarks.compare.tables import Rows, markdown_table
from benchmarks.compare.wording import NOTHING, number, share

_NONE = (NOTHING,) * 4


def overview(comparisons: Sequence[Results]) -> str:
    """Return a table over several workloads as Markdown."""
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
