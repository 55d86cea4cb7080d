"""``overview``: what results that are kept say, as tables for the documentation.

A page holds such tables between two comments, ``<!-- results: NAME -->`` and ``<!-- end of results -->``. NAME is that
of a file of results without its ending, or ``all`` or ``losses`` for what all comparisons say together, or ``choices``
for what each choice of the documentation cost and reached; ``NAME 2`` is the second table of a file alone. ``--page``
renews them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare import statistics, wording
from benchmarks.compare.statistics import Results, Summary, targets
from benchmarks.compare.tables import Rows, markdown_table, plain, reach_rows, result_rows
from benchmarks.compare.wording import NOTHING, number, seconds, share

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


#: Presets and methods, the comparison that shows them, the optimizer there, and the one that it replaces.
_CHOICES = (
    ("from_muon", "chargpt-cpu", "ekfac_orthogonal", "muon_short"),
    ("from_muon", "multi30k-cpu", "ekfac_orthogonal", "muon_short"),
    ("from_muon", "resnet20-cpu", "ekfac_orthogonal", "muon_short"),
    ("from_muon", "unet-cpu", "ekfac_orthogonal", "muon_short"),
    ("EKFAC, power 1/2", "multi30k-cpu", "ekfac", "adamw"),
    ("EKFAC, power 1/2", "resnet20-cpu", "ekfac", "adamw"),
    ("large_batch", "autoencoder-cpu", "kfac_adaptive", "adamw"),
    ("physics_informed", "poisson-cpu", "hylo", "adamw"),
    ("least_squares", "poisson-cpu", "ekfac_adaptive", "adamw"),
    ("HyLo", "chargpt-cpu", "hylo", "adamw"),
    ("HyLo", "autoencoder-cpu", "hylo", "adamw"),
    ("SparseMFAC", "autoencoder-cpu", "sparse_mfac", "adamw"),
    ("GGT", "autoencoder-cpu", "ggt", "adamw"),
)


def choices(results: Mapping[str, Results]) -> str:
    """What each choice of the page on methods cost and reached, next to the optimizer that it replaces."""
    rows = [*_choices_of_the_demo(results), *_choices_of_one_line(results)]
    for choice, name, ours, other in _CHOICES:
        of = {item.optimizer: item for item in statistics.summaries(results[name])}
        rows.append(_choice(choice, results[name]["workload"], results[name]["steps"], of[other], of[ours]))
    columns = ("choice", "replaces", "workload", "steps", "loss", "seconds", "state, MB")
    caption = (
        "Training loss at the end of the run, mean over the seeds, seconds of the whole run, and the memory that the "
        "optimizer keeps between steps: of the optimizer that is replaced -> of the choice."
    )
    return markdown_table(Rows("Cost and result of each choice", columns, tuple(rows), caption)) + "\n"


def _choice(choice: str, workload: str, steps: int, before: Summary, after: Summary) -> tuple[str, ...]:
    pair = (before, after)
    return (
        choice,
        before.label,
        workload,
        str(steps),
        " -> ".join(number(item.loss.mean if item.loss else None) for item in pair),
        " -> ".join(seconds(item.seconds.mean if item.seconds else None) for item in pair),
        " -> ".join(NOTHING if item.megabytes is None else f"{item.megabytes:.3g}" for item in pair),
    )


def _choices_of_the_demo(results: Mapping[str, Results]) -> list[tuple[str, ...]]:
    found = {item["label"]: item for item in results["demo"]["results"]}
    pair = (found["AdamW"], found["KFAC (from_adamw)"])
    return [
        (
            "from_adamw",
            "AdamW",
            results["demo"]["workload"],
            str(len(pair[0]["losses"])),
            " -> ".join(number(item["final_loss"]) for item in pair),
            " -> ".join(seconds(sum(item["step_seconds"])) for item in pair),
            " -> ".join(f"{item['optimizer_bytes'] / 1e6:.3g}" for item in pair),
        )
    ]


def _choices_of_one_line(results: Mapping[str, Results]) -> list[tuple[str, ...]]:
    label = {"adamw": "AdamW", "sgd": "SGD"}
    return [
        (
            f"from_{found['base']}",
            label[found["base"]],
            found["workload"],
            str(found["steps"]),
            f"{number(found['before'][-1])} -> {number(found['after'][-1])}",
            NOTHING,
            NOTHING,
        )
        for found in sorted(results["swap-cpu"]["outcomes"], key=lambda found: found["base"])
        if found["workload"] != "digits"
    ]


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
    if name in _TOGETHER:
        comparisons = [found for found in results.values() if "runs" in found]
        if not comparisons:
            raise ValueError("the folder holds no results of compare")
        return _TOGETHER[name](comparisons)
    if name == "choices":
        return choices(results)
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
