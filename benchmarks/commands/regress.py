"""``regress``: compares counts of the operations in the steps of every method with earlier counts.

It counts every class of steps of every method on three small networks, and subtracts the counts of a step of SGD, so
that the rest belongs to the optimizer. Nothing is timed.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import secondorder
from benchmarks import report
from benchmarks.commands.options import Output
from benchmarks.commands.step_time import Intervals, StepClass
from benchmarks.counting import Counts, count, graph_breaks
from benchmarks.filling import fill_windows, windows_of
from benchmarks.recipes.building import from_flat
from benchmarks.report import Table, value
from secondorder.methods.names import METHODS, resolve

BASELINE = Path(__file__).parent.parent / "baseline.json"  # stored counts of an earlier version of the code
INTERVALS = Intervals(2, 4)
_TOLERANCE = 0.005
"""Share by which a count may grow. Counts below 1000 may not grow."""
ROWS = 64
"""Rows of a window. With as many, small networks exceed the size up to which products are computed in float64."""

_LAYERED: dict[str, Any] = {"factor_update_steps": INTERVALS.factor, "inv_update_steps": INTERVALS.refresh}
_LAYERED["refresh_warmup"] = False
_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "kfac eigen": ("kfac", {**_LAYERED, "inverse_method": "eigen"}),
    "kfac cholesky": ("kfac", {**_LAYERED, "inverse_method": "cholesky"}),
    "ekfac intra": ("ekfac", {**_LAYERED, "estimator": "intra"}),
    "ekfac running": ("ekfac", {**_LAYERED, "estimator": "running"}),
    "hylo kid": ("hylo", {"update_steps": INTERVALS.refresh, "rank_fraction": 0.5, "mode": "kid"}),
    "hylo kis": ("hylo", {"update_steps": INTERVALS.refresh, "rank_fraction": 0.5, "mode": "kis"}),
    "mfac": ("mfac", {"window_size": ROWS}),
    "sparse_mfac": ("sparse_mfac", {"window_size": ROWS}),
    "ggt": ("ggt", {"window_size": ROWS}),
}


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.words(x)))
        return out


def _perceptron() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, torch.randn(64, 64), torch.randint(10, (64,))


def _convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    tail = [nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*body, *tail), torch.randn(32, 3, 16, 16), torch.randint(10, (32,))


def _transformer() -> tuple[nn.Module, Tensor, Tensor]:
    return _Tokens(), torch.randint(50, (8, 16)), torch.randint(50, (8, 16))


NETWORKS = {"perceptron": _perceptron, "convolutions": _convolutions, "transformer": _transformer}


@dataclass
class Regress(Output):
    """Count operators, FLOPs and bytes of the steps of every method, and compare them with stored counts."""

    update: bool = False
    """Store the current counts, instead of comparing them."""

    def run(self) -> int:
        """Run the command. Return 1 if a count has grown, and 0 otherwise."""
        torch.set_num_threads(1)
        found: dict[str, dict[str, int]] = {}
        for network in NETWORKS:
            plain = _plain_step(network)
            for method in report.tracked(network, tuple(_METHODS)):
                for kind, counts in _steps(network, method, plain):
                    found[f"{network}, {method}, {kind}"] = counts
        if self.update:
            lines = ",\n".join(f'  "{key}": {json.dumps(counts)}' for key, counts in found.items())
            BASELINE.write_text(f'{{"torch": "{torch.__version__}", "counts": {{\n{lines}\n}}}}\n', encoding="utf-8")
        known: dict[str, Any] = json.loads(BASELINE.read_text(encoding="utf-8"))
        rows = list(_compared(found, known["counts"]))
        same = known["torch"] == torch.__version__
        data = {"torch": torch.__version__, "counts": found, "rows": rows, "compared": same}
        report.save(self.out_dir, "regress", [_table(found)], data)
        if not same:
            print(f"not judged: the baseline is of torch {known['torch']}", file=sys.stderr)
            return 0
        return _judged(rows, found, known["counts"])


def _stepper(network: str, method: str | None) -> tuple[Any, Optimizer, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x, y = NETWORKS[network]()
    optimizer: Optimizer
    if method is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    else:
        name, keywords = _METHODS[method]
        optimizer = secondorder.create(
            name, model, **from_flat(METHODS[resolve(name).method], {"lr": 1e-4, **keywords})
        )
        if windows_of(optimizer):
            fill_windows(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return step, optimizer, model, x


def _plain_step(network: str) -> Counts:
    step, *_ = _stepper(network, None)
    for _ in range(2):
        step()
    return count(step)


def _steps(network: str, method: str, plain: Counts) -> Iterator[tuple[StepClass, dict[str, int]]]:
    """Count the classes of a method's steps after all of its buffers have been allocated."""
    step, optimizer, model, x = _stepper(network, method)
    windowed = bool(windows_of(optimizer))
    intervals = Intervals(1, 1) if windowed else INTERVALS
    for _ in range(3 * INTERVALS.refresh):  # the third refresh also checks the damping, only once
        step()
    counts: dict[StepClass, Counts] = {}
    for index in range(INTERVALS.refresh):
        kind: StepClass = "plain" if windowed else intervals.step_class(index)
        if kind == "factor" and method.startswith("hylo"):
            kind = "plain"
        if kind not in counts:
            counts[kind] = count(step)
        else:
            step()
    for kind, found in counts.items():
        own = asdict(found - plain)
        if kind == "plain":
            own["graph_breaks"] = graph_breaks(model, (x,))
        yield kind, own
    getattr(optimizer, "close", lambda: None)()


def _compared(
    found: Mapping[str, Mapping[str, int]], known: Mapping[str, Mapping[str, int]]
) -> Iterator[dict[str, Any]]:
    for step, counts in found.items():
        for quantity, now in counts.items():
            old = known.get(step, {}).get(quantity)
            if old is not None and old != now:
                allowed = old + (abs(old) * _TOLERANCE if abs(old) >= 1000 else 0)
                yield {"step": step, "quantity": quantity, "before": old, "now": now, "worse": now > allowed}


def _judged(
    rows: Sequence[Mapping[str, Any]], found: Mapping[str, Mapping[str, int]], known: Mapping[str, Mapping[str, int]]
) -> int:
    """Print the counts that grew and the steps that exist only now or only in the baseline; return 1 if any do."""
    worse = [row for row in rows if row["worse"]]
    steps = sorted(found.keys() | known.keys())
    lost = [step for step in steps if found.get(step, {}).keys() != known.get(step, {}).keys()]
    for row in worse:
        print("grew: {step}: {quantity} from {before:,} to {now:,}".format(**row), file=sys.stderr)
    for step in lost:
        print(f"not on both sides, write the baseline anew: {step}", file=sys.stderr)
    return int(bool(worse or lost))


def _table(found: Mapping[str, Mapping[str, int]]) -> Table:
    names = [*(field.name for field in fields(Counts)), "graph_breaks"]
    columns = {"step": value("step"), **{name.replace("_", " "): value(name, ",") for name in names}}
    caption = (
        "Numbers beyond those of a step of SGD with momentum; memory in bytes. moved: arguments and results of all "
        "operators."
    )
    return report.table_of("What steps do", [{"step": step, **own} for step, own in found.items()], columns, caption)
