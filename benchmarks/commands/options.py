"""Options that several commands share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recipes.building import parse_settings
from benchmarks.workloads import Size, Workload, WorkloadName, make_workload

TARGETS: dict[WorkloadName, float] = {
    "digits": 0.02, "autoencoder": 120.0, "resnet20": 1.4, "chargpt": 2.5, "logistic": 0.2, "multi30k": 4.5,
    "unet": 0.3,
}  # fmt: skip
"""Training loss to reach. The table shows the steps and seconds that each optimizer needs."""


@dataclass
class Output:
    out_dir: Path = Path("bench-output")
    """Folder to write tables, figures and results to."""


@dataclass
class Seeded(Output):
    seed: int = 0
    """Seed of the initial weights, of the batches and of other random numbers."""
    threads: int = 2
    """Number of threads that torch uses."""


@dataclass
class Common(Seeded):
    """Options of commands that train workloads."""

    data_dir: Path = Path("data")
    """Folder that contains the data sets: mnist, cifar10, cifar100, imagenet, shakespeare, multi30k, membrane."""


@dataclass
class OnWorkload(Common):
    workload: WorkloadName = "digits"
    """Workload to train."""
    workload_set: tuple[str, ...] = ()
    """Fields of the workload to change, such as dice=0.5 of unet."""
    size: Size = "cpu"
    """Size of the model and of the batch."""
    batch_size: int | None = None
    """Batch size. Default: that of the workload."""

    def make_workload(self, batch_size: int | None = None) -> Workload:
        changes = parse_settings(self.workload_set)
        return make_workload(self.workload, self.data_dir, self.size, batch_size or self.batch_size, changes)


@dataclass
class Alone(Seeded):
    """Options of commands that need no data."""

    device: str = "cpu"
    """Device to run on."""


def check_ranges(options: Any, positive: Sequence[str] = (), shares: Sequence[str] = ()) -> None:
    """Raise an error if options are out of range. Unset options are valid."""
    for names, most, words in ((positive, math.inf, "positive"), (shares, 1.0, "in (0, 1]")):
        for name in names:
            given = getattr(options, name)
            each = given if isinstance(given, tuple) else (given,)
            if any(number is not None and not 0 < number <= most for number in each):
                raise ValueError(f"{name} must be {words}, got {given}")
