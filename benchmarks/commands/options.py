"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Common:
    """What every command takes."""

    seed: int = 0
    """Seed of the initial weights and of the batches."""
    threads: int = 2
    """Threads that torch computes with."""
    data_dir: Path = Path("data")
    """Folder with one folder per data set: mnist, cifar10, cifar100, imagenet, shakespeare, multi30k, membrane."""
    out_dir: Path = Path("bench-output")
    """Folder for tables, pictures and results."""


@dataclass
class Alone:
    """What commands take that need no data."""

    device: str = "cpu"
    """Where to run."""
    seed: int = 0
    """Seed of the random numbers that are worked on."""
    threads: int = 2
    """Threads that torch computes with."""
    out_dir: Path = Path("bench-output")
    """Folder for the tables and the results."""
