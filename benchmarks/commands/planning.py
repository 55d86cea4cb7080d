"""The options of ``train`` that define a run: workload, optimizer, recipe and changes to it."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from benchmarks import report
from benchmarks.commands.options import OnWorkload
from benchmarks.peers import PEERS, set_paths
from benchmarks.precision import Amp, DeviceName
from benchmarks.recipes import METHODS, find_method, printing
from benchmarks.recipes.building import parse_settings
from benchmarks.recipes.types import Method, Recipe, Schedule, Shape
from benchmarks.workloads import DataMissingError, Size, Workload, make_workload
from secondorder.methods.names import ALIASES

_OPTIMIZERS = tyro.extras.literal_type_from_choices([*METHODS, *ALIASES, *PEERS])


@dataclass(frozen=True)
class Plan:
    """The settings of a run, before anything is built."""

    method: Method
    recipe: Recipe  # the recipe with the settings and the schedule of the command line
    workload: Workload
    own_batch_size: int  # the workload's default batch size, which recipes without a batch size assume
    steps: int | None
    """Number of steps. It is None if the recipe specifies epochs and the data is missing."""


@dataclass
class Planned(OnWorkload):
    optimizer: Annotated[str, tyro.conf.arg(aliases=["--optim"], constructor=_OPTIMIZERS)] = "kfac"
    """Optimizer, whose recipe is the starting point. Names of other programs use the recipe of their method."""
    peer_path: tuple[str, ...] = ()
    """Checkouts of third-party optimizers that are not packages, as NAME=FOLDER, for --optimizer."""
    comm: str | None = None
    """Strategy under torchrun, such as mem_opt, hybrid_opt:0.5 or chief_only:deliver=inverses. Default: comm_opt."""
    set: tuple[str, ...] = ()
    """Settings that replace those of the recipe, such as lr=0.3 graft=none adaptive_damping=true. Layer methods also
    take skip_layers=LayerNorm,Embedding,head. Window methods also take density=0.01 block_size=4096
    value_dtype=bfloat16 error_bits=4, or rank=4."""
    recipe: bool = True
    """Start from the recipe. --no-recipe starts from the defaults of the constructor."""
    scale_recipe: bool = False
    """Adapt the learning rates to the number of ranks and the batch size by the recipe's rule. Without this option,
    they do not change, and a note reports the rule."""
    print_recipe: bool = False
    """Print the recipe, its learning rates for other numbers of ranks, and commands that use it. Do not train."""
    world: int = 1
    """For --print-recipe: number of ranks. A run takes it from torchrun."""
    steps: int | None = None
    """Number of optimizer steps. Default: the epochs of the recipe, or the number of the workload."""
    schedule: Literal["recipe"] | Shape = "recipe"
    """Schedule of the learning rate."""
    warmup: float | None = None
    """Share of the run with a linear warm-up. Default: that of the recipe, or none with a --schedule."""
    milestones: tuple[float, ...] = ()
    """For --schedule steps: shares of the run after which the learning rate falls to a tenth. Default: the recipe's."""
    size: Size = "cpu"
    """Size of the model and of the batch. paper uses published recipes, if there are any; smoke generates missing
    data."""
    batch_size: int | None = None
    """Batch size of all ranks together. Default: that of the recipe for each rank, or that of the workload for all
    ranks."""
    device: DeviceName = "cpu"
    """Device to train on. Under torchrun, each rank uses its own device."""
    amp: Amp | None = None
    """Data type of autocast. float16 also uses a GradScaler."""

    def plan(self, world: int) -> Plan:
        if self.peer_path:
            set_paths(self.peer_path)
        method = PEERS[self.optimizer] if self.optimizer in PEERS else find_method(self.optimizer)
        if self.comm is not None and not method.ours:
            raise ValueError(f"--comm {self.comm}: {self.optimizer} has no curvature to place, leave it out")
        changes = {**parse_settings(self.set), **({} if self.comm is None else {"comm": self.comm})}
        recipe = method.recipe(self.workload, self.size) if self.recipe else Recipe({}, "the constructor's defaults")
        fields = {**recipe.workload, **parse_settings(self.workload_set)}
        own = make_workload(self.workload, self.data_dir, self.size, None, fields)
        per_step = self.batch_size or (recipe.batch_size * world if recipe.batch_size else own.batch_size)
        workload = make_workload(self.workload, self.data_dir, self.size, per_step, fields)
        if self.scale_recipe:
            recipe = recipe.at(world, _share(per_step, world), own.batch_size)
        recipe = replace(recipe, settings={**recipe.settings, **changes}, schedule=self._schedule(recipe.schedule))
        return Plan(method, recipe, workload, own.batch_size, self._steps(recipe, workload, per_step))

    def _schedule(self, own: Schedule) -> Schedule:
        chosen = own
        if self.schedule != "recipe":
            chosen = Schedule(self.schedule, 0.0, self.milestones or own.milestones, own.gamma)
            if self.schedule == "steps" and not chosen.milestones:
                raise ValueError("--schedule steps: the recipe has none, say --milestones 0.5 0.75")
        return chosen if self.warmup is None else replace(chosen, warmup=self.warmup)

    def _steps(self, recipe: Recipe, workload: Workload, per_step: int) -> int | None:
        if self.steps is not None or recipe.epochs is None:
            return self.steps or workload.steps[self.size]
        try:
            return math.ceil(recipe.epochs * workload.examples / per_step)
        except DataMissingError:
            if self.print_recipe:
                return None
            raise

    def show_recipe(self) -> int:
        """Print the recipe, its learning rates for other numbers of ranks, and commands that use it."""
        per_rank = None if self.batch_size is None else _share(self.batch_size, self.world)
        plan = replace(self, scale_recipe=False).plan(1)
        recipe, own = plan.recipe, plan.own_batch_size
        per_rank = per_rank or recipe.batch_size or own
        per_step = per_rank * self.world
        steps = self._steps(recipe, plan.workload, per_step)
        length = [f"{recipe.epochs:g} epochs"] if recipe.epochs and self.steps is None else []
        length += [f"{steps:,} steps of {per_step}"] if steps else []
        title = f"{plan.method.label} on {self.workload}, size {self.size}"
        chosen = parse_settings(self.set)
        for table in (
            printing.recipe_table(title, recipe, own, ", ".join(length)),
            printing.scaled_table(recipe, self.world, per_rank, own, tuple(chosen)),
        ):
            report.console().print(table)
        scaled = {**recipe.at(self.world, per_rank, own).settings, **chosen}
        print(printing.shell_line(self._words(per_step), self.world))
        print(printing.python_line(plan.method, scaled) or f"{plan.method.label}: built by benchmarks.peers")
        return 0

    def _words(self, per_step: int) -> list[str]:
        words = ["train", "--workload", self.workload, "--optimizer", self.optimizer, "--size", self.size]
        words += ["--batch-size", str(per_step), "--scale-recipe" if self.recipe else "--no-recipe"]
        for name in ("comm", "steps", "warmup", "amp"):
            value = getattr(self, name)
            words += [] if value is None else [f"--{name}", str(value)]
        words += [] if self.schedule == "recipe" else ["--schedule", self.schedule]
        words += [] if self.device == "cpu" else ["--device", self.device]
        for name in ("set", "workload_set", "milestones", "peer_path"):
            value = getattr(self, name)
            words += [f"--{name.replace('_', '-')}", *map(str, value)] if value else []
        return words

    def say_what_is_not_scaled(self, plan: Plan) -> None:
        """Print a note if the rates are those of another batch size."""
        recipe, per_step = plan.recipe, plan.workload.batch_size
        held = recipe.world * (recipe.batch_size or plan.own_batch_size)
        if self.recipe and held != per_step and recipe.rule != "constant":
            print(
                f"note: the recipe holds for {held} examples of a step, this run takes {per_step}; its rates stay, "
                f"--scale-recipe applies its rule: {printing.RULES[recipe.rule]}"
            )


def _share(per_step: int, world: int) -> int:
    if per_step % world:
        raise ValueError(f"{per_step} examples cannot be divided evenly among {world} ranks: use another --batch-size")
    return per_step // world
