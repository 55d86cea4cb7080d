"""``memory``: the bytes that every method stores in addition to parameters and gradients, measured and planned.

For one process, each optimizer takes a few steps, so that its state is complete. Its bytes are counted by kind and
compared with ``plan()``. For several ranks, the bytes are those of ``plan()``. The tests of the package check that they
are equal to the bytes of runs with 2 to 4 processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import report
from benchmarks.checkpoints import Pause
from benchmarks.compare.runs import find, recipe_on
from benchmarks.evidence import Cells, Evidence, Figures, Shown, notes_text
from benchmarks.peers import PEERS, PeerMissingError
from benchmarks.recipes import OWN
from benchmarks.recipes.types import Recipe
from benchmarks.report import Table, value
from benchmarks.runner import memory_usage, trainer_of
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder import CommOpt, HybridOpt, MemOpt, SecondOrderOptimizer
from secondorder.comm import CommStrategy

TEMPORARY = ("workspace", "pending")
"""Kinds of temporary memory, which contain no state between steps."""
COUNTERS = "buffers"
UNPLANNED = 256
"""Bytes of counters of a whole method, such as those of HyLo's policy, that plans do not count."""
_FRACTION = 0.5  # share of the ranks that precondition a layer
_MOMENTUM = ("momentum", "fallback")


@dataclass
class Memory(Evidence):
    """Count the bytes of every method, by kind and by rank. The status is 1 if they differ from its plan."""

    workload: WorkloadName = "autoencoder"
    """Workload whose model to use."""
    optimizers: tuple[str, ...] = (*OWN, "ekfac_whiten", *PEERS)
    """Optimizers, including third-party ones. Those that are not installed or have no recipe are left out."""
    batch_size: int | None = None
    """Batch size of a rank. Default: that of the workload."""
    steps: int = 12
    """Number of steps before bytes are counted."""
    world: int = 4
    """Number of ranks of the plans."""

    @property
    def stem(self) -> str:
        return f"memory-{self.workload}"

    def check_options(self) -> None:
        self.check(positive=("steps", "world"))
        for name in self.optimizers:
            find(name)  # an unknown name is an error, unlike an optimizer that cannot be built

    def rows(self, cells: Cells) -> list[Figures]:
        workload = self._make_workload()
        more = {"steps": self.steps, "world": self.world, "worker_fraction": _FRACTION}
        found: list[Figures] = []
        for name in self.optimizers:
            try:
                recipe = recipe_on(name, workload, self.size, self.data_dir)
                identity = self.about(workload, name, recipe.settings, **more, beside="plan")
                found.append(cells.run(identity, partial(self._measure, name, recipe, workload)))
            except (PeerMissingError, ValueError) as err:
                print(f"left out: {err}")
        return found

    def show(self, rows: list[Figures]) -> Shown:
        tables = [_table(self.workload, self._make_workload().batch_size, rows), _spread_table(self.world, rows)]
        wrong = any(abs(difference(figures) or 0) > UNPLANNED for figures in rows)
        return Shown(tables, {"workload": self.workload, "optimizers": list(self.optimizers)}, int(wrong))

    def _make_workload(self) -> Workload:
        return make_workload(self.workload, self.data_dir, self.size, self.batch_size)

    def _measure(self, name: str, recipe: Recipe, workload: Workload, pause: Pause) -> Figures:
        trainer = trainer_of(find(name), workload, recipe.settings, self.seed)
        for _ in range(self.steps):
            trainer.step()
        model, optimizer = trainer.model, trainer.optimizer
        figures = {
            "label": trainer.history.label,
            "note": recipe.note,
            "parameter_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "memory": memory_usage(optimizer),
            "planned": None,
            "plans": {},
        }
        if isinstance(optimizer, SecondOrderOptimizer):
            (alone,) = optimizer.plan(1, batch_size=workload.batch_size).ranks
            figures["planned"] = _sum(alone.stored)
            figures["plans"] = self._plans(optimizer, workload.batch_size)
            optimizer.close()
        return figures

    def _plans(self, optimizer: SecondOrderOptimizer, examples: int) -> dict[str, list[int]]:
        hybrid = f"HybridOpt({_FRACTION:g})"
        strategies: dict[str, CommStrategy] = {"CommOpt": CommOpt(), hybrid: HybridOpt(_FRACTION), "MemOpt": MemOpt()}
        return {
            name: [_sum(rank.stored, COUNTERS) for rank in optimizer.plan(self.world, comm, batch_size=examples).ranks]
            for name, comm in strategies.items()
        }


def _sum(kinds: Mapping[str, int], *left_out: str) -> int:
    """Return the bytes of the state, without workspace."""
    return sum(n for kind, n in kinds.items() if kind not in (*TEMPORARY, *left_out))


def state_bytes(figures: Figures) -> int:
    memory: dict[str, int] = figures["memory"]
    return memory["total"] - sum(memory.get(kind, 0) for kind in TEMPORARY)


def difference(figures: Figures) -> int | None:
    """Return the bytes of the state of one process minus those of its plan."""
    return None if figures["planned"] is None else state_bytes(figures) - int(figures["planned"])


def _table(workload: str, batch_size: int, found: Sequence[Figures]) -> Table:
    rows = [_row(figures) for figures in found]
    size = f"{found[0]['parameter_bytes'] / 1e6:.2f} MB of parameters" if found else "nothing measured"
    caption = (
        "All columns are in MB, except for the difference from plan(), which is in bytes. Rest: counters. Workspace is "
        "kept from step to step and is not part of checkpoints. Total: everything that is kept between steps. The plan "
        "is that of the state, without workspace. Third-party optimizers are counted tensor by tensor and have no plan."
    ) + notes_text(found)
    columns = {
        "optimizer": value("label"),
        **{part: value(part, ".3f", 1e-6) for part in ("curvature", "momentum", "rest", "workspace", "total")},
        "× parameters": value("multiple", ".2f"),
        "difference": value("difference", "+,"),
    }
    title = f"{workload}, batch {batch_size}, {size}: state of one process"
    return report.table_of(title, rows, columns, caption)


def _row(figures: Figures) -> Figures:
    memory, state = figures["memory"], state_bytes(figures)
    momentum, rest = sum(memory.get(kind, 0) for kind in _MOMENTUM), memory.get(COUNTERS, 0)
    parts = {"curvature": state - momentum - rest, "momentum": momentum, "rest": rest}
    return {
        "label": figures["label"],
        # Of third-party optimizers, only the total is known.
        **(parts | {"workspace": memory["total"] - state} if len(memory) > 1 else {}),
        "total": memory["total"],
        "multiple": memory["total"] / figures["parameter_bytes"],
        "difference": difference(figures),
    }


def _spread_table(world: int, found: Sequence[Figures]) -> Table:
    rows = [
        {
            "label": figures["label"],
            "strategy": name,
            "mean": sum(ranks) / len(ranks),
            "most": max(ranks),
            "multiple": max(ranks) / figures["parameter_bytes"],
        }
        for figures in found
        for name, ranks in figures["plans"].items()
    ]
    caption = "Planned MB of a rank, without counters. × parameters: for the fullest rank."
    columns = {
        "optimizer": value("label"),
        "strategy": value("strategy"),
        "mean of ranks": value("mean", ".3f", 1e-6),
        "fullest": value("most", ".3f", 1e-6),
        "× parameters": value("multiple", ".2f"),
    }
    return report.table_of(f"{world} ranks", rows, columns, caption)
