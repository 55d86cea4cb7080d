"""What a comparison says in words: numbers as text, and the sentences above its tables."""

from collections.abc import Sequence

from benchmarks.compare import statistics
from benchmarks.compare.runs import find
from benchmarks.compare.statistics import Reach, Results, Run, Spread, Summary, Target
from benchmarks.recipes.tuned import TUNED

NOTHING = "–"
_DIFFERENT = 1.1  # ratio of measured rates from which on two machines do not count as alike


def number(value: float | None, digits: int = 4) -> str:
    return NOTHING if value is None else f"{value:#.{digits}g}".rstrip(".")


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """Return seconds with three significant digits, whole ones from a hundred on."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def interval(values: Spread | None) -> str:
    return NOTHING if values is None or values.count == 1 else f"{number(values.low)}–{number(values.high)}"


def kind(ours: bool, order: str) -> str:
    return "ours" if ours else order


def joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def summary(results: Results) -> list[str]:
    targets = statistics.targets(results)
    first = targets[0] if targets and targets[0].optimizer == statistics.best_first(results) else None
    if first is None:
        said = ["No first-order optimizer has a full run that finished, so there is no reference yet."]
    else:
        said = [*_reference(results, first), *_verdict(results, first)]
    said += [sentence for target in targets if target is not first for sentence in _second(results, target)]
    return [*said, *_lowest(results), *_broken(results)]


def _reference(results: Results, target: Target) -> list[str]:
    found = statistics.summarize(results, target.optimizer).loss
    assert found is not None  # a target is a full run that finished
    said = [
        f"The best first-order optimizer is {target.label}: final loss {number(target.loss)} "
        f"({_over_seeds(found)}) after {target.steps:.0f} steps and {seconds(target.seconds)} s."
    ]
    if lower := statistics.passed_over(results):
        said.append(f"{joined(lower)} ended lower where all went well, but not every seed finished.")
    return said


def _over_seeds(values: Spread) -> str:
    return "one seed" if values.count == 1 else f"mean of {values.count} seeds, {interval(values)}"


def _verdict(results: Results, target: Target) -> list[str]:
    share_of_steps, best = results["share_target"], statistics.best_of_ours(results, target)
    if best is None:
        return ["None of ours took part."]
    aim = f"Target: {share_of_steps:g} of the steps"
    if not best.reached:
        return [f"None of ours reached that loss{_nearest(best)}.", f"{aim}: missed."]
    why = "" if best.everywhere else ", because every seed has to get there"
    count = len({run["optimizer"] for run in statistics.select(results, "final") if run["ours"]})
    head = "Best of ours" if count <= 1 else f"Best of {count} of ours"
    return [f"{head}: {_passage(best, target)}.", f"{aim}: {verdict(best.met(share_of_steps))}{why}."]


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def _nearest(best: Reach) -> str:
    if best.loss is None:
        return f": no run of {best.label} finished"
    return f"; the nearest, {best.label}, ended at {number(best.loss)}"


def _passage(best: Reach, target: Target) -> str:
    how = "in runs with a short schedule" if best.phase == "short" else "on the way of full runs"
    return (
        f"{best.label} reached that loss in {share(best.steps_share)} of {target.label}'s steps and "
        f"{share(best.seconds_share)} of its seconds, {how} ({best.reached} of {_seeds(best.seeds)})"
    )


def _second(results: Results, target: Target) -> list[str]:
    best = statistics.best_of_ours(results, target)
    head = f"{target.label} ended at {number(target.loss)} ({seconds(target.seconds)} s)"
    if best is None or not best.reached:
        return [f"{head}, which none of ours reached{_nearest(best) if best else ''}."]
    return [f"{head}: {_passage(best, target)}."]


def _lowest(results: Results) -> list[str]:
    known: list[tuple[Summary, Spread]] = [(s, s.loss) for s in statistics.summaries(results) if s.loss]
    if not known:
        return []
    winner, loss = known[0]
    whose = "one of ours" if winner.ours else f"{winner.order} order"
    return [f"Lowest final loss of all: {winner.label} ({whose}), {number(loss.mean)}."]


def _broken(results: Results) -> list[str]:
    """Return one sentence that counts the runs that did not finish by optimizer, over all phases."""
    broken = statistics.unfinished(results)
    if not broken:
        return [f"All {len(results['runs'])} runs finished."]
    labels = [run["label"] for run, _ in broken]
    counts = [f"{label} {labels.count(label)}" for label in dict.fromkeys(labels)]
    return [f"{len(broken)} of {len(results['runs'])} runs did not finish: {', '.join(counts)}."]


def fairness(results: Results) -> list[str]:
    budget = [*_trials(results), *_fewer(results), *_shorter(results)]
    told = [*_keywords(results), *_notes(results)]
    return [*budget, *_edges(results), *_strayed(results), *_machines(results), *told]


def _trials(results: Results) -> list[str]:
    low, high = statistics.trials(results)
    sifted = statistics.select(results, "sift")
    seeds = max((s.seeds for s in statistics.summaries(results)), default=0)
    least = min((s.seeds for s in statistics.summaries(results) if s.seeds), default=0)
    after = f"the best rate then ran for all {results['steps']} steps with {_seeds(least)}"
    if not sifted or high <= 1:
        return [f"No learning rates were sifted: each optimizer ran with that of its recipe, {_seeds(seeds)}."]
    rates = f"{low} learning rates" if low == high else f"{low} to {high} learning rates"
    more = "" if low == high else " (the same row for all, and more where the best one was the last of its row)"
    head = f"Equal budgets: every optimizer had {rates}{more}, each for {sifted[0]['steps']} steps; "
    return [f"{head}{after}.", *_second_rates(results, seeds)]


def _second_rates(results: Results, seeds: int) -> list[str]:
    told = []
    for run in statistics.select(results, "long"):
        counted = next(
            (r for r in statistics.select(results, "final", run["optimizer"]) if r["seed"] == run["seed"]), None
        )
        found = [f"{number(statistics.final_loss(r))} at × {r['factor']:.3g}" for r in (counted, run) if r]
        told.append(f"{run['label']} {' and '.join(found)}")
    if not told:
        return []
    return [
        f"These also ran whole at the next lower rate, and with {_seeds(seeds)} at the better one: {'; '.join(told)}."
    ]


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _fewer(results: Results) -> list[str]:
    found = statistics.summaries(results)
    most = max((s.seeds for s in found), default=0)
    expected = {1} if statistics.select(results, "long") else set()  # of those that did not lead
    fewer = [f"{s.label} {s.seeds}" for s in found if s.seeds < most and s.seeds not in expected]
    return [f"Fewer full runs than {most}: {', '.join(fewer)}."] if fewer else []


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
    return [f"The best learning rate is the last one tried for {joined(labels)}: a wider row might do better."]


def _strayed(results: Results) -> list[str]:
    pairs = [(s.label, s.factor, statistics.best_factor(results, s.optimizer)) for s in statistics.summaries(results)]
    two = {run["label"] for run in statistics.select(results, "long")}
    labels = [label for label, ran, best in pairs if ran and best and statistics.rounded(ran) != best]
    labels = [label for label in labels if label not in two]
    return [f"Full runs of {joined(labels)} took another rate than the best of the trials."] if labels else []


def _machines(results: Results) -> list[str]:
    used = sorted({run["machine"] for run in results["runs"]})
    machines = [results["machines"][index] for index in used]
    if len({machine["processor"] for machine in machines}) > 1:
        return ["The runs are of different processors: their seconds are not comparable."]
    rates = [machine["gemm_gflops"]["median"] for machine in machines]
    if rates and max(rates) > _DIFFERENT * min(rates):
        return [
            f"Matrix products ran at {min(rates):g} to {max(rates):g} GFLOP/s on different days or hours: "
            "seconds compare only that well."
        ]
    return []


def _keywords(results: Results) -> list[str]:
    """Return whose keywords beyond the rate were tuned by workload, and whose are those of its authors."""
    sources = {run["label"]: _source(results, run) for run in results["runs"]}  # the last run of each
    tuned = [label for label, source in sources.items() if source.startswith(TUNED)]
    others = [f"{label} ({source})" if source else label for label, source in sources.items() if label not in tuned]
    said = [f"Keywords beyond the rate were tuned here, workload by workload, for {'; '.join(tuned)}."] if tuned else []
    return said + ([f"These have those of their authors: {'; '.join(others)}."] if others else [])


def _source(results: Results, run: Run) -> str:
    """Return who found the keywords of a run; files of an earlier time do not say, the recipe does."""
    if run.get("source"):
        return str(run["source"])
    try:
        return find(run["optimizer"]).recipe(results["workload"], results["size"]).source
    except ValueError:  # one that is no more
        return TUNED if run["ours"] else ""


def _notes(results: Results) -> list[str]:
    """Return what has to be known of single optimizers, each note once, such as at which point losses were taken."""
    labels: dict[str, dict[str, None]] = {}
    for run in results["runs"]:
        if run.get("note"):
            labels.setdefault(run["note"], {})[run["label"]] = None
    return [f"{joined(list(found))}: {note}." for note, found in labels.items()]
