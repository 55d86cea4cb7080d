"""``presets``: compares each line of the page on methods with the optimizer that it replaces.

The replaced optimizer has the learning rate of its recipe. The new line gets this rate, or the multiple that the page
specifies, and no other tuned setting. Both runs have the same steps, initial weights and batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from benchmarks import evidence, report
from benchmarks.checkpoints import Pause
from benchmarks.commands.swap import build
from benchmarks.compare.runs import find
from benchmarks.compare.wording import NOTHING, number, seconds
from benchmarks.evidence import Cells, Figures, Identity, Repeated, Shown
from benchmarks.recipes import METHODS
from benchmarks.recipes.types import CONSTANT, Schedule, make_schedule
from benchmarks.report import value
from benchmarks.runner import WINDOW, History, MakeOptimizer, Trainer
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder.methods.presets import PRESETS

_ADAM = partial(build, "torch.optim.Adam(model.parameters(), lr=lr)")
REPLACED = {"adam": replace(METHODS["adamw"], label="Adam", construct=_ADAM)} | {
    name: find(name) for name in ("adamw", "sgd", "muon")
}


@dataclass(frozen=True)
class Choice:
    """A line of the page, with the optimizer that it replaces."""

    name: str
    replaces: str
    line: str
    """The line, which may use ``name`` and the settings of the replaced optimizer, such as ``lr``."""
    workloads: tuple[WorkloadName, ...]

    @property
    def closure(self) -> bool:
        """Whether a step needs a closure. Such presets use the quadratic model, and have no rate to tune."""
        return self.name in PRESETS and "closure" in PRESETS[self.name].needs


_SAME, _OWN = "create(name, model, lr=lr)", "create(name, model)"
# The rate of the benchmarks' Muon has the default scale of torch.optim.Muon.
_MUON = "create(name, model, lr=lr, adjust_lr_fn='original')"
# The loss of the autoencoder is the binary cross entropy.
_BERNOULLI = "create(name, model, adaptation=AdaptationOptions(quadratic_model=True, likelihood='bernoulli'))"
_ADAM_LIKE = "estimator='running', power=0.5, momentum_mode='pre', kl_clip=None"
_EKFAC = f"EKFAC(model, lr=3 * lr, fallback=FallbackOptions('adamw', lr=lr), {_ADAM_LIKE})"
_ALL = (
    Choice("from_adamw", "adamw", _SAME, ("autoencoder", "resnet20", "chargpt", "multi30k")),
    Choice("from_adam", "adam", _SAME, ("autoencoder", "chargpt")),
    Choice("from_sgd", "sgd", _SAME, ("autoencoder", "resnet20", "chargpt")),
    Choice("from_muon", "muon", _MUON, ("chargpt", "multi30k", "resnet20", "unet")),
    Choice("orthogonal_momentum", "muon", _MUON, ("chargpt", "multi30k", "resnet20", "unet")),
    Choice("large_batch", "adamw", _BERNOULLI, ("autoencoder",)),
    Choice("least_squares", "adamw", _OWN, ("poisson",)),
    Choice("physics_informed", "adamw", _OWN, ("poisson",)),
    Choice("low_memory", "adamw", _SAME, ("chargpt",)),
    Choice("EKFAC", "adamw", _EKFAC, ("multi30k", "resnet20")),
    Choice("HyLo", "adamw", "HyLo(model, lr=lr, graft='adamw')", ("autoencoder",)),
    Choice("SparseMFAC", "adamw", "SparseMFAC(model.parameters(), lr=lr / 3, graft='adamw')", ("autoencoder",)),
    Choice("GGT", "adamw", "GGT(model.parameters(), lr=lr, graft='adamw')", ("autoencoder",)),
)
CHOICES = {choice.name: choice for choice in _ALL}
_SHORT = {
    ("from_adamw", "multi30k"), ("from_sgd", "resnet20"), ("from_muon", "chargpt"), ("large_batch", "autoencoder"),
    ("physics_informed", "poisson"), ("low_memory", "chargpt"),
}  # fmt: skip
"""The rows of the short table: presets on workloads that suit them."""


@dataclass
class Presets(Repeated):
    """Train with presets, and with the optimizers that they replace, on the workloads of the page on methods."""

    choices: tuple[str, ...] = tuple(CHOICES)
    """Presets and methods to run."""
    share: float = 1.0
    """Share of each workload's steps."""

    @property
    def stem(self) -> str:
        return "presets"

    def check_options(self) -> None:
        self.check(positive=("seeds",), shares=("share",))
        if unknown := set(self.choices) - set(CHOICES):
            raise ValueError(f"choices must be of {', '.join(CHOICES)}, got {', '.join(sorted(unknown))}")

    def rows(self, cells: Cells) -> list[Figures]:
        pairs = [(CHOICES[name], kind) for name in self.choices for kind in CHOICES[name].workloads]
        workloads = {kind: make_workload(kind, self.data_dir, self.size) for _, kind in pairs}
        return [self._row(cells, choice, workloads[kind]) for choice, kind in pairs]

    def show(self, rows: list[Figures]) -> Shown:
        short = [row for row in rows if (row["choice"], row["workload"]) in _SHORT]
        tables = [
            report.table_of("Cost and result of each choice", rows, _COLUMNS, _CAPTION),
            report.table_of("Presets", short, _COLUMNS, _CAPTION),
        ]
        failed = any(row[side]["failed"] or row[side]["diverged"] for row in rows for side in ("before", "after"))
        return Shown(tables, {"share": self.share, "seeds": self.seeds}, int(failed))

    def _row(self, cells: Cells, choice: Choice, workload: Workload) -> Figures:
        method = REPLACED[choice.replaces]
        settings: dict[str, Any] = dict(method.settings(workload.name, size=self.size))
        make = partial(build, choice.line, name=choice.name, **settings)
        own = {"optimizer": choice.name, "line": choice.line, "preset": str(PRESETS.get(choice.name, ""))}
        steps = max(WINDOW, round(self.share * workload.steps[self.size]))
        before, after = [], []
        for seed in self.seeds_to_run:
            identity = self.about(workload, choice.replaces, settings, steps=steps, seed=seed)
            before.append(_run(cells, workload, identity, partial(method.construct, **settings), method.label))
            identity = {**identity, **own, "limit": before[-1].get("processor_seconds")}
            after.append(_run(cells, workload, identity, make, choice.name, choice.closure))
        # The label of Muon contains its precision, which each process chooses by a new timing.
        label = next((run["label"] for run in before if "label" in run), method.label)
        row = {"choice": choice.name, "replaces": label, "workload": workload.name, "steps": steps}
        return {**row, "metric": workload.metric, "before": _medians(before), "after": _medians(after)}


def _run(
    cells: Cells, workload: Workload, identity: Identity, make: MakeOptimizer, label: str, closure: bool = False
) -> Figures:
    def train(pause: Pause) -> Figures:
        seed, steps = identity["seed"], identity["steps"]
        torch.manual_seed(seed)  # for example for dropout
        schedule = partial(make_schedule, CONSTANT if closure else Schedule("cosine"), steps)
        trainer = Trainer(label, workload, make, seed, schedule, closure)
        found = evidence.train_and_evaluate(trainer, steps, pause)
        return {**found, "timed_loss": loss_after(trainer.history, identity.get("limit"))}

    return cells.run(identity, evidence.attempted(train))


def loss_after(history: History, limit: float | None) -> float | None:
    """Return the loss of the last step that ended within ``limit`` processor seconds."""
    fit = 0 if limit is None else sum(total <= limit for total in accumulate(history.processor_seconds))
    return history.loss_at(fit) if fit else None


def _medians(runs: list[Figures]) -> Figures:
    keys = ("loss", "timed_loss", "metric", "processor_seconds", "optimizer_bytes")
    return evidence.over_seeds(runs, keys)


def _losses(row: Mapping[str, Any]) -> str:
    sides = (row["before"], row["after"])
    return " -> ".join(evidence.why_lost(side) if side["loss"] is None else number(side["loss"]) for side in sides)


def _pair(show: Callable[[float], str], before: str, after: str, row: Mapping[str, Any]) -> str:
    found = (row["before"][before], row["after"][after])
    return NOTHING if None in found else " -> ".join(map(show, found))


_COLUMNS: dict[str, report.Column] = {
    **{key: value(key) for key in ("choice", "replaces", "workload", "steps")},
    "loss": _losses,
    "loss in equal seconds": partial(_pair, number, "loss", "timed_loss"),
    "held-out metric": lambda row: f"{row['metric']} {_pair(number, 'metric', 'metric', row)}",
    "seconds": partial(_pair, seconds, "processor_seconds", "processor_seconds"),
    "state, MB": partial(_pair, lambda size: f"{size / 1e6:.3g}", "optimizer_bytes", "optimizer_bytes"),
}
_CAPTION = (
    "Each cell: the optimizer that is replaced -> the choice, with one seed or the median of several. Loss is the mean "
    f"training loss of the last {WINDOW} steps. Loss in equal seconds: that of the choice at the step at which it has "
    "taken the processor seconds of the complete run of the other optimizer; its schedule is not shortened for this. "
    "Seconds are processor seconds of the complete run. State is what the optimizer keeps between steps."
)
