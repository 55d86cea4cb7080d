"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Common:
    """Options of every command."""

    seed: int = 0
    """Seed of the initial weights and of the batches."""
    threads: int = 2
    """Number of threads that torch uses."""
    data_dir: Path = Path("data")
    """Folder that contains the data sets: mnist, cifar10, cifar100, imagenet, shakespeare, multi30k, membrane."""
    out_dir: Path = Path("bench-output")
    """Folder to write tables, figures and results to."""


@dataclass
class Alone:
    """Options of commands that need no data."""

    device: str = "cpu"
    """Device to run on."""
    seed: int = 0
    """Seed of the random numbers."""
    threads: int = 2
    """Number of threads that torch uses."""
    out_dir: Path = Path("bench-output")
    """Folder to write tables and results to."""
