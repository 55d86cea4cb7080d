"""The text of a comparison: formatted numbers, and the sentences around its tables."""

from collections.abc import Iterable, Sequence

from benchmarks.compare import statistics
from benchmarks.compare.plan import Run, end_loss
from benchmarks.compare.runs import find
from benchmarks.compare.statistics import Results, Spread, Target
from benchmarks.recipes.tuned import TUNED

NOTHING = "–"
_DIFFERENT = 1.1  # rates of matrix products with a larger ratio count as different


def number(value: float | None, digits: int = 4) -> str:
    return NOTHING if value is None else f"{value:#.{digits}g}".rstrip(".")


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """Format seconds with three significant digits, or without decimals if they are at least 100."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def interval(values: Spread | None) -> str:
    return NOTHING if values is None or values.count == 1 else f"{number(values.low)}–{number(values.high)}"


def joined(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    between, last = ("; ", "; and ") if any("," in word for word in words) else (", ", " and ")
    return last.join([between.join(words[:-1]), words[-1]])


def summary(results: Results) -> list[str]:
    targets = statistics.targets(results)
    if not targets:
        return [
            "No first-order optimizer has a full run that finished, so there is no reference yet.",
            _broken(results),
        ]
    first, *others = targets
    sentences = [_reference(results, first), _passage(results, first), _verdict(results, first)]
    for target in others:
        ended = f"{target.label} ended at {number(target.loss)} ({seconds(target.seconds)} s)."
        sentences += [ended, _passage(results, target)]
    return [*sentences, _broken(results)]


def _reference(results: Results, target: Target) -> str:
    found = statistics.summarize(results, target.optimizer).loss
    assert found is not None  # a target is a full run that finished
    seeds = "one seed" if found.count == 1 else f"mean of {found.count} seeds, {interval(found)}"
    return (
        f"The best first-order optimizer is {target.label}: final loss {number(target.loss)} "
        f"({seeds}) after {target.steps:.0f} steps and {seconds(target.seconds)} s."
    )


def _passage(results: Results, target: Target) -> str:
    best = statistics.best_of_ours(results, target)
    if best is None:
        return "No method of this package took part."
    if not best.reached:
        return f"None of our methods reached that loss; the nearest, {best.label}, ended at {number(best.loss)}."
    how = "in runs with a short schedule" if best.phase == "short" else "within full runs"
    return (
        f"Of our methods, {best.label} is the best: it reached that loss in {share(best.steps_share)} of "
        f"{target.label}'s steps and {share(best.seconds_share)} of the seconds in which {target.label} gets there "
        f"itself, {how} ({best.reached} of {_seeds(best.seeds)})."
    )


def _verdict(results: Results, target: Target) -> str:
    best, aim = statistics.best_of_ours(results, target), results["share_target"]
    why = ", because every seed has to reach the loss" if best and 0 < best.reached < best.seeds else ""
    return f"The target of {aim:g} of the steps is {verdict(best is not None and best.met(aim))}{why}."


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def _broken(results: Results) -> str:
    """Return a sentence with the number of runs of all phases that did not finish, by optimizer."""
    broken = statistics.unfinished(results)
    if not broken:
        return f"All {len(results['runs'])} runs finished."
    labels = [run["label"] for run, _ in broken]
    counts = [f"{label} {labels.count(label)}" for label in dict.fromkeys(labels)]
    return f"{len(broken)} of {len(results['runs'])} runs did not finish: {', '.join(counts)}."


def budget(results: Results) -> list[str]:
    limits = [*_trials(results), *_shorter(results), *_edges(results), *_machines(results)]
    return [*limits, *notes(results["runs"])]


def _trials(results: Results) -> list[str]:
    low, high = statistics.trials(results)
    sifted = statistics.select(results, "sift")
    seeds = max((s.seeds for s in statistics.summaries(results)), default=0)
    least = min((s.seeds for s in statistics.summaries(results) if s.seeds), default=0)
    after = f"The best rate then ran for all {results['steps']} steps with {_seeds(least)}"
    if not sifted or high <= 1:
        return [f"No learning rates were tried: each optimizer ran with that of its recipe, with {_seeds(seeds)}."]
    rates = f"{low} learning rates" if low == high else f"{low} to {high} learning rates"
    more = "" if low == high else " (the same ones for all, and more where the best one was the last of them)"
    head = f"Every optimizer tried {rates}{more}, each for {sifted[0]['steps']} steps."
    return [f"{head} {after}.", *_second_rates(results, seeds)]


def _second_rates(results: Results, seeds: int) -> list[str]:
    shown = []
    for run in statistics.select(results, "long"):
        counted = next(
            (r for r in statistics.select(results, "final", run["optimizer"]) if r["seed"] == run["seed"]), None
        )
        found = [f"{number(end_loss(r))} at × {r['factor']:.3g}" for r in (counted, run) if r]
        shown.append(f"{run['label']} {' and '.join(found)}")
    if not shown:
        return []
    return [
        f"The leaders also completed a run at the next lower rate. The better rate then ran with {_seeds(seeds)}. "
        f"Losses of the first seed, by multiple of the recipe's rate: {'; '.join(shown)}."
    ]


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _shorter(results: Results) -> list[str]:
    runs = statistics.select(results, "short")
    if not runs:
        return []
    labels = list(dict.fromkeys(run["label"] for run in runs))
    others = any(run["order"] == "first" for run in runs)
    alone = "" if others else " No first-order optimizer had such runs."
    return [f"{joined(labels)} also ran with a schedule that ends after {runs[0]['steps']} steps.{alone}"]


def _edges(results: Results) -> list[str]:
    named = statistics.optimizers(results)
    labels = [statistics.label_of(results, name) for name in named if statistics.at_edge(results, name)]
    if not labels:
        return []
    return [f"For {joined(labels)}, the best learning rate is the last one tried, so a wider search might do better."]


def _machines(results: Results) -> list[str]:
    used = sorted({run["machine"] for run in results["runs"]})
    machines = [results["machines"][index] for index in used]
    if len({machine["processor"] for machine in machines}) > 1:
        return ["The runs used different processors, so their seconds are not comparable."]
    rates = [machine["gemm_gflops"]["median"] for machine in machines]
    if rates and max(rates) > _DIFFERENT * min(rates):
        return [
            f"The speed of the machine varied: matrix products ran at {min(rates):g} to {max(rates):g} GFLOP/s at "
            "different times. Seconds are only as comparable as that."
        ]
    return []


def sources(results: Results) -> dict[str, str]:
    """Return the source of each optimizer's settings other than the learning rate."""
    found = {run["label"]: _source(results, run) for run in results["runs"]}  # uses the last run of each
    tuned = "tuned here, for each workload"
    return {label: tuned if source.startswith(TUNED) else source for label, source in found.items() if source}


def _source(results: Results, run: Run) -> str:
    """Return the source of the settings of a run. Older files do not contain it, but the recipe does."""
    if run.get("source"):
        return str(run["source"])
    try:
        return find(run["optimizer"]).recipe(results["workload"], results["size"]).source
    except ValueError:  # the optimizer or its recipe no longer exists
        return TUNED if run["ours"] else ""


def notes(runs: Iterable[Run]) -> list[str]:
    """Return each note on an optimizer once, with the labels of the optimizers that have it."""
    labels: dict[str, dict[str, None]] = {}
    for run in runs:
        if run.get("note"):
            labels.setdefault(run["note"], {})[run["label"]] = None
    return [f"{joined(list(found))}: {note}." for note, found in labels.items()]
