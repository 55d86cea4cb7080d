"""What several comparisons say together: a row for each workload, and how far the defaults of ours carry."""

from collections.abc import Sequence

from benchmarks.compare import statistics, wording
from benchmarks.compare.statistics import Default, Results
from benchmarks.compare.tables import Rows, markdown_table
from benchmarks.compare.wording import NOTHING, number, share

_NONE = (NOTHING,) * 4


def overview(comparisons: Sequence[Results]) -> str:
    """Return tables over several workloads as Markdown.

    Args:
        comparisons: Results, one for each workload and size.

    Returns:
        Best of ours against the best first-order optimizer; and, where runs with the constructors' defaults are there,
        how often each of ours is at least as good as AdamW with its own.
    """
    tables = [best_rows(comparisons), default_rows(comparisons)]
    return "\n\n".join(markdown_table(table) for table in tables if table.rows) + "\n"


def best_rows(comparisons: Sequence[Results]) -> Rows:
    """Return for each workload how the best of ours reached the loss of the best first-order optimizer.

    Args:
        comparisons: Results, one for each workload and size.

    Returns:
        One row each.
    """
    return Rows(
        "Best of ours against the best first-order optimizer",
        (
            "workload", "best first-order", "its loss", "best of ours", "runs", "seeds", "share of steps",
            "share of seconds", "aim", "target",
        ),
        tuple(_best(results) for results in comparisons),
        "Shares are of the best first-order optimizer's full run, means over the seeds that reached its final loss. "
        "Best of ours: most seeds, then nearest to the target. Met: every seed, within both shares of the aim.",
    )  # fmt: skip


def _name(results: Results) -> str:
    return f"{results['workload']} ({results['size']}){', made-up data' * bool(results.get('made_up_data'))}"


def _best(results: Results) -> tuple[str, ...]:
    name = _name(results)
    aims = results["share_target"]
    aim = f"{aims[0]:g}, {aims[1]:g}"
    target = statistics.target_of(results, statistics.best_first(results))
    if target is None:
        return (name, NOTHING, NOTHING, *_NONE, NOTHING, aim, "no reference")
    best = statistics.best_of_ours(results, target)
    if best is None:
        return (name, target.label, number(target.loss), *_NONE, NOTHING, aim, "none of ours")
    return (
        name,
        target.label,
        number(target.loss),
        best.label,
        "short" if best.phase == "short" else "full",
        f"{best.reached} of {best.seeds}",
        share(best.steps_share),
        share(best.seconds_share),
        aim,
        wording.verdict(best.met(aims)),
    )


def default_rows(comparisons: Sequence[Results]) -> Rows:
    """Return the losses with the constructors' defaults, and how often ours are at least as good as AdamW's.

    Args:
        comparisons: Results, one for each workload and size.

    Returns:
        One row for AdamW and one for each of ours; none where no such runs are there.
    """
    every = {_name(results): {item.optimizer: item for item in statistics.defaults(results)} for results in comparisons}
    found = {workload: items for workload, items in every.items() if "adamw" in items}
    known = {name: item for items in found.values() for name, item in items.items()}
    labels = {name: item.label for name, item in known.items() if item.ours or name == "adamw"}
    return Rows(
        "Defaults of the constructors",
        ("optimizer", "at least as good as AdamW", *found),
        tuple(
            (
                label,
                "" if name == "adamw" else _wins(name, found),
                *(_loss(items.get(name)) for items in found.values()),
            )
            for name, label in sorted(labels.items(), key=lambda pair: pair[0] != "adamw")
        ),
        "Final loss on each workload, nothing searched. At least as good: a loss not above AdamW's, which has its "
        "defaults, too; a run that did not finish is not.",
    )


def _wins(name: str, found: dict[str, dict[str, Default]]) -> str:
    """Return on how many of the workloads that one of ours ran on it is at least as good as AdamW."""
    if name == "adamw":
        return ""
    ran = [items[name] for items in found.values() if name in items]
    wins = sum(bool(item.as_good) for item in ran)
    return f"{wins} of {len(ran)}"


def _loss(item: Default | None) -> str:
    if item is None:
        return NOTHING
    return "unfinished" if item.flaws else number(item.loss)
