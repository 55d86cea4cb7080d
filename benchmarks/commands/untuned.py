"""``robustness``: the defaults of every method on every workload, without tuning, compared with those of AdamW.

Every optimizer is built with the defaults of its constructor, including the learning rate, and trains every workload
for a part of its usual steps. To evaluate a change of a default, the table shows how often a method reaches the loss of
AdamW with lr 1e-3, the decrease of the loss relative to AdamW, and whether a run diverges.

``presets``: compares each line of the page on methods with the optimizer that it replaces.

The replaced optimizer has the learning rate of its recipe. The new line gets this rate, or the multiple that the page
specifies, and no other tuned setting. Both runs have the same steps, initial weights and batches.
"""

import hashlib
import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, get_args

import torch
from torch import nn

from benchmarks import evidence, report
from benchmarks.checkpoints import Pause
from benchmarks.commands.swap import build
from benchmarks.compare.runs import find
from benchmarks.compare.wording import NOTHING, number, seconds
from benchmarks.evidence import Cells, Figures, Identity, Repeated, Shown
from benchmarks.plot import Row
from benchmarks.recipes import METHODS, OWN
from benchmarks.recipes.building import parse_settings
from benchmarks.recipes.types import CONSTANT, Schedule, Settings, make_schedule
from benchmarks.report import Table, value
from benchmarks.runner import WINDOW, History, MakeOptimizer, Trainer, trainer_of
from benchmarks.workloads import DataMissingError, Size, Workload, WorkloadName, make_workload
from secondorder.methods.presets import PRESETS

SHARES: dict[Size, float] = {"smoke": 1.0, "cpu": 1 / 3, "paper": 1.0}  # share of a workload's steps that a run takes
TOLERANCE = 0.02  # tolerance of "at least as good", as a share of the decrease of AdamW's loss
REFERENCE = "adamw"  # the reference, with torch's defaults: lr 1e-3, weight decay 1e-2


@dataclass
class Robustness(Repeated):
    """Train every workload with every method's defaults, and count how often they are at least as good as AdamW's."""

    workloads: tuple[WorkloadName, ...] = get_args(WorkloadName)
    """Workloads to train. Those whose data is missing are reported and left out."""
    optimizers: tuple[str, ...] = OWN
    """Optimizers to compare. AdamW is always included."""
    set: tuple[str, ...] = ()
    """Settings to try as defaults of our methods that accept them, such as graft=adam."""
    share: float | None = None
    """Share of each workload's steps. Default: all at size smoke, otherwise a third."""
    seeds: int = 1

    @property
    def stem(self) -> str:
        share = "" if self.share is None else f"-{self.share:g}"
        return f"robustness-{self.workloads[0] if len(self.workloads) == 1 else 'all'}{share}"

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((REFERENCE, *self.optimizers)))

    def check_options(self) -> None:
        if not self.workloads:
            raise ValueError("workloads must name at least one, got none")
        self.check(positive=("seeds",), shares=("share",))
        for name in self.optimizers:
            find(name)

    def rows(self, cells: Cells) -> list[Figures]:
        rows: list[Figures] = []
        missing: list[DataMissingError] = []
        for kind in self.workloads:
            try:
                workload = make_workload(kind, self.data_dir, self.size)
                found = {name: self._runs(cells, workload, name) for name in self.names}
            except DataMissingError as err:
                missing.append(err)
                continue
            rows += _rows(kind, found)
        if missing and not rows:
            raise missing[0]
        for gap in missing:
            print(f"left out: {gap}")
        return rows

    def show(self, rows: list[Figures]) -> Shown:
        about = {"reference": REFERENCE, "tolerance": TOLERANCE, "share": self._share()}
        return Shown(_tables(self.names, rows), about)

    def _share(self) -> float:
        return SHARES[self.size] if self.share is None else self.share

    def _runs(self, cells: Cells, workload: Workload, name: str) -> list[Figures]:
        settings = parse_settings(self.set) if find(name).ours else {}
        steps = max(WINDOW, round(self._share() * workload.steps[self.size]))
        runs = []
        for seed in self.seeds_to_run:
            more = {"defaults": _defaults(name, settings), "steps": steps, "seed": seed}
            identity = self.about(workload, name, settings, **more)
            runs.append(cells.run(identity, evidence.attempted(partial(_train, name, settings, workload, seed, steps))))
        return runs


def _train(name: str, settings: Settings, workload: Workload, seed: int, steps: int, pause: Pause) -> Figures:
    trainer = trainer_of(find(name), workload, settings, seed)
    return evidence.figures_of(trainer, evidence.train_until(trainer, steps, pause=pause))


def _defaults(name: str, settings: Settings) -> str | None:
    """Return a hash of the defaults of a constructor, so that runs are repeated if the defaults change."""
    try:
        optimizer = find(name).construct(nn.Linear(4, 3), **settings)
    except (TypeError, ValueError, RuntimeError):
        return None  # a run will report the error
    kind: type = type(optimizer)
    options = {key: value for key, value in optimizer.param_groups[0].items() if not key.startswith("param")}
    known = inspect.signature(kind).parameters.values()
    text = repr((sorted(options.items()), [(found.name, found.default) for found in known]))
    if close := getattr(optimizer, "close", None):
        close()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rows(kind: str, found: Mapping[str, Sequence[Figures]]) -> list[Figures]:
    rows = [
        {
            "workload": kind,
            "optimizer": name,
            "label": find(name).label,
            **evidence.over_seeds(runs, ("loss", "first", "processor_seconds")),
        }
        for name, runs in found.items()
    ]
    reference = next(row for row in rows if row["optimizer"] == REFERENCE)
    for row in rows:
        row["as_good"], row["progress"] = _judged(row, reference)
    return rows


def _judged(row: Figures, reference: Figures) -> tuple[bool | None, float | None]:
    """Return whether a loss is at least as good as the reference's, and its decrease relative to the reference's."""
    if reference["loss"] is None:
        return None, None
    if row["loss"] is None:
        return False, None
    way = reference["first"] - reference["loss"]
    as_good = row["loss"] <= reference["loss"] + TOLERANCE * max(0.0, way)
    return as_good, (row["first"] - row["loss"]) / way if way > 0 else None


def _tables(names: Sequence[str], rows: Sequence[Row]) -> list[Table]:
    columns: dict[str, report.Column] = {
        "workload": lambda own: str(own[REFERENCE]["workload"]),
        "initial loss": lambda own: value("first", ".4g")(own[REFERENCE]),
        **{find(name).label: partial(_cell, name) for name in names},
    }
    caption = (
        f"Final training loss, as a mean of {WINDOW} steps, with the defaults of every constructor. Initial loss: that "
        "of the first batch. +: at least as good as AdamW's defaults (lr 1e-3)."
    )
    untuned = report.table_of("Untuned", report.grouped(rows, "workload", "optimizer"), columns, caption)
    caption = (
        f"As good: the final loss is at most AdamW's plus {TOLERANCE:g} of AdamW's decrease. Decrease: how far the "
        "loss falls relative to AdamW, as a median over the workloads. Smallest: the worst workload."
    )
    verdicts = [_verdict(name, rows) for name in names]
    heads = ("optimizer", "as good", "decrease", "smallest", "diverged on", "failed on")
    title = "How often at least as good as AdamW's defaults"
    return [untuned, report.table_of(title, verdicts, {head: value(head) for head in heads}, caption)]


def _cell(name: str, own: Mapping[str, Row]) -> str:
    row = own[name]
    if row["loss"] is None:
        return evidence.why_lost(row)
    return f"{row['loss']:.4g}" + (" +" if row["as_good"] and name != REFERENCE else "")


def _verdict(name: str, rows: Sequence[Row]) -> Row:
    own = [row for row in rows if row["optimizer"] == name and row["as_good"] is not None]
    ways = [row["progress"] for row in own if row["progress"] is not None]
    return {
        "optimizer": find(name).label,
        "as good": f"{sum(bool(row['as_good']) for row in own)} of {len(own)}",
        "decrease": f"{statistics.median(ways):.2f}" if ways else None,
        "smallest": f"{min(ways):.2f}" if ways else None,
        "diverged on": ", ".join(row["workload"] for row in own if row["diverged"]) or "none",
        "failed on": "; ".join(f"{row['workload']}: {row['failed'][0]}" for row in own if row["failed"]) or "none",
    }


_ADAM = partial(build, "torch.optim.Adam(model.parameters(), lr=lr)")
REPLACED = {"adam": replace(METHODS["adamw"], label="Adam", construct=_ADAM)} | {
    name: find(name) for name in ("adamw", "sgd", "muon")
}


@dataclass(frozen=True)
class Choice:
    """A line of the page, with the optimizer that it replaces."""

    name: str
    replaces: str
    line: str  # the line, which may use `name` and the settings of the replaced optimizer, such as `lr`
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
    **report.columns("choice; replaces; workload; steps"),
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
