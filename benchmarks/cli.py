"""The command line: ``python -m benchmarks COMMAND``."""

import sys
import warnings
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from benchmarks.commands.analyse import Analyse
from benchmarks.commands.batch_size import BatchSize
from benchmarks.commands.compare import Compare
from benchmarks.commands.demo import Demo, Drawn
from benchmarks.commands.density import Density
from benchmarks.commands.fetch import Fetch
from benchmarks.commands.length import Length
from benchmarks.commands.linalg import Kernel, Linalg
from benchmarks.commands.overview import Overview
from benchmarks.commands.predictions import Estimates, Memory
from benchmarks.commands.ranks import Ranks
from benchmarks.commands.regress import Regress
from benchmarks.commands.scaling import Scaling
from benchmarks.commands.seconds import Seconds
from benchmarks.commands.step_time import Spikes, StepTime
from benchmarks.commands.swap import Scripts, Swap
from benchmarks.commands.train import Train
from benchmarks.commands.untuned import Presets, Robustness
from benchmarks.commands.window import Window
from benchmarks.workloads import DataMissingError


@dataclass
class _Group:
    what: Any

    def run(self) -> int:
        status: int = self.what.run()
        return status


@dataclass
class Study(_Group):
    """Run a study whose results are stored, or show stored results as tables or figures."""

    what: OmitSubcommandPrefixes[
        OmitArgPrefixes[
            BatchSize
            | Demo
            | Density
            | Estimates
            | Annotated[Drawn, subcommand("figures")]
            | Length
            | Memory
            | Overview
            | Presets
            | Robustness
            | Seconds
        ]
    ]


@dataclass
class Measure(_Group):
    """Time steps and their parts on this machine."""

    what: OmitSubcommandPrefixes[OmitArgPrefixes[Kernel | Linalg | Scripts | Spikes | StepTime | Swap | Window]]


@dataclass
class Scale(_Group):
    """Show how memory, bytes and step time depend on the number of ranks: from plans, and from real processes."""

    what: OmitSubcommandPrefixes[OmitArgPrefixes[Annotated[Scaling, subcommand("plan")] | Ranks]]


Command = Analyse | Compare | Fetch | Measure | Regress | Scale | Study | Train


def main(args: list[str] | None = None) -> int:
    # Layers that a recipe leaves out are meant to follow the fallback rule.
    warnings.filterwarnings("ignore", message=".*follow the fallback rule")
    command = tyro.cli(Command, prog="python -m benchmarks", description=__doc__, args=args)
    try:
        return command.run()
    except (DataMissingError, ValueError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
