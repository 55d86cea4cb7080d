"""The table ``choices``: the result and the cost of each choice of the page on methods, from the stored results."""

from collections.abc import Mapping

from benchmarks.compare import statistics
from benchmarks.compare.statistics import Results, Summary
from benchmarks.compare.tables import Rows, markdown_table
from benchmarks.compare.wording import NOTHING, number, seconds

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
    """Return a table of each choice next to the optimizer that it replaces."""
    rows = [*_choices_of_the_demo(results), *_choices_of_one_line(results)]
    for choice, name, ours, other in _CHOICES:
        of = {item.optimizer: item for item in statistics.summaries(results[name])}
        rows.append(_choice(choice, results[name], of[other], of[ours]))
    columns = ("choice", "replaces", "workload", "steps", "loss", "held-out metric", "seconds", "state, MB")
    caption = (
        "Training loss and held-out metric at the end of the run, mean over the seeds, seconds of the whole run, and "
        "the memory that the optimizer keeps between steps: of the optimizer that is replaced -> of the choice."
    )
    return markdown_table(Rows("Cost and result of each choice", columns, tuple(rows), caption)) + "\n"


def presets(name: str) -> dict[str, str]:
    """Return the preset of each optimizer that is one in a comparison."""
    return {ours: choice for choice, file, ours, _ in _CHOICES if file == name and choice.islower()}


def _choice(choice: str, results: Results, before: Summary, after: Summary) -> tuple[str, ...]:
    pair = (before, after)
    return (
        choice,
        before.label,
        results["workload"],
        str(results["steps"]),
        " -> ".join(number(item.loss.mean if item.loss else None) for item in pair),
        f"{results['metric']} {' -> '.join(number(item.metric.mean if item.metric else None) for item in pair)}",
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
            f"test accuracy {' -> '.join(number(item['metric']) for item in pair)}",
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
            NOTHING,
        )
        for found in sorted(results["swap-cpu"]["outcomes"], key=lambda found: found["base"])
        if found["workload"] != "digits"
    ]
