"""The command line: ``python -m benchmarks COMMAND``."""

import sys
import warnings

import tyro

from benchmarks.commands.analyse import Analyse
from benchmarks.commands.batch_size import BatchSize
from benchmarks.commands.compare import Compare
from benchmarks.commands.demo import Demo
from benchmarks.commands.density import Density
from benchmarks.commands.features import Features
from benchmarks.commands.fetch import Fetch
from benchmarks.commands.gpu import Gpu
from benchmarks.commands.kernel import Kernel
from benchmarks.commands.linalg import Linalg
from benchmarks.commands.memory import Memory
from benchmarks.commands.overview import Overview
from benchmarks.commands.rank_fraction import RankFraction
from benchmarks.commands.ranks import Ranks
from benchmarks.commands.regress import Regress
from benchmarks.commands.robustness import Robustness
from benchmarks.commands.scaling import Scaling
from benchmarks.commands.spikes import Spikes
from benchmarks.commands.step_time import StepTime
from benchmarks.commands.swap import Swap
from benchmarks.commands.train import Train
from benchmarks.commands.window import Window
from benchmarks.commands.worlds import Worlds
from benchmarks.peers import PeerMissingError
from benchmarks.workloads import DataMissingError

Command = (
    Analyse
    | BatchSize
    | Compare
    | Demo
    | Density
    | Features
    | Fetch
    | Gpu
    | Kernel
    | Linalg
    | Memory
    | Overview
    | RankFraction
    | Ranks
    | Regress
    | Robustness
    | Scaling
    | Spikes
    | StepTime
    | Swap
    | Train
    | Window
    | Worlds
)


def main(args: list[str] | None = None) -> int:
    """Run one command.

    Args:
        args: Words after the program's name; unset: those of this process.

    Returns:
        Exit status: 0, 1 when a check did not pass, 2 when data is missing or a value is bad.
    """
    # Layers that a recipe leaves out are meant to follow the fallback rule.
    warnings.filterwarnings("ignore", message=".*follow the fallback rule")
    command = tyro.cli(Command, prog="python -m benchmarks", description=__doc__, args=args)
    try:
        return command.run()
    except (DataMissingError, PeerMissingError, ValueError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
