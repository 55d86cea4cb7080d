"""``memory``: bytes that every method keeps beside parameters and gradients, against formulas, on one rank and several.

One process: each optimizer takes a few steps, so that all its state is there, and its bytes are counted by kind. Beside
them stands what the shapes of the layers make of the formulas (``benchmarks/formulas.py``), which knows nothing of how
an optimizer counts. Several ranks: what ``plan()`` says of all of them, against the same formulas; the tests of the
package hold ``plan()`` equal to the bytes of runs of 2 to 4 processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.table import Table
from torch import nn

from benchmarks import report
from benchmarks.compare.roster import find, recipe_on
from benchmarks.evidence import Evidence, Figures, notes_text, progress, trainer_of
from benchmarks.flops import LayerShape, layer_shapes
from benchmarks.formulas import Formula, Ranks, formula
from benchmarks.peers import PEERS, PeerMissingError
from benchmarks.recipes import METHODS as OURS
from benchmarks.recipes import VARIANTS, MethodName, Recipe
from benchmarks.report import value
from benchmarks.runner import memory_usage
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder import CommOpt, HybridOpt, MemOpt, SecondOrderOptimizer
from secondorder.comm import CommStrategy

TEMPORARY = ("workspace", "pending")
"""Kinds that hold nothing between steps but memory to compute in."""
COUNTERS = "buffers"
_MOMENTUM = ("momentum", "fallback")


_OWN: tuple[MethodName, ...] = tuple(name for name in OURS if name not in VARIANTS)


@dataclass
class Memory(Evidence):
    """Count the bytes of every method, by kind and by rank, and compare them with formulas."""

    workload: WorkloadName = "autoencoder"
    """Whose model."""
    optimizers: tuple[str, ...] = (*_OWN, "ekfac_whiten", *PEERS)
    """Which ones, of this package and of others; one without a recipe, or that is not installed, is left out."""
    batch_size: int | None = None
    """Examples per step and rank; unset: the workload's own number."""
    steps: int = 12
    """Steps after which bytes are counted."""
    world: int = 4
    """Ranks of the plans."""
    worker_fraction: float = 0.5
    """Of HybridOpt: share of the ranks that precondition a layer."""

    def run(self) -> int:
        """Run the command, and return 0, or 1 when bytes differ from the formula."""
        self.check(positive=("steps", "world"))
        for name in self.optimizers:
            find(name)  # a name that is not known is no optimizer that cannot be built
        cells = self.open_cells(f"memory-{self.workload}")
        workload = make_workload(self.workload, self.data_dir, self.size, self.batch_size)
        found: list[Figures] = []
        left_out: list[str] = []
        with progress(f"memory, {self.workload}", len(self.optimizers)) as advance:
            for name in self.optimizers:
                advance(name)
                try:
                    recipe = recipe_on(name, workload, self.size, self.data_dir)
                    more = {key: getattr(self, key) for key in ("steps", "world", "worker_fraction")}
                    measure = partial(self._measure, name, recipe, workload)
                    figures = cells.run(self.about(workload, name, recipe.settings, **more), measure)
                except (PeerMissingError, ValueError) as err:
                    left_out.append(str(err))
                    continue
                found += [figures] if figures else []
        for reason in left_out:
            print(f"left out: {reason}")
        tables = [_table(self.workload, workload.batch_size, found), _spread_table(self.world, found)]
        self.publish(cells, tables, {"workload": self.workload, "optimizers": list(self.optimizers)})
        return int(any(differences(figures) for figures in found))

    def _measure(self, name: str, recipe: Recipe, workload: Workload) -> Figures:
        """Train a little, and count."""
        trainer = trainer_of(name, recipe.settings, workload, self.seed)
        for _ in range(self.steps):
            trainer.step()
        model, optimizer = trainer.model, trainer.optimizer
        batch = next(workload.batches(self.seed))
        shapes = layer_shapes(model, lambda: workload.loss(model, batch))
        figures = {
            "label": trainer.history.label,
            "note": recipe.note,
            "parameter_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "memory": memory_usage(optimizer),
            "formula": formula(optimizer, model, shapes, workload.batch_size),
            "plans": self._plans(optimizer, model, shapes, workload.batch_size)
            if isinstance(optimizer, SecondOrderOptimizer)
            else {},
        }
        if isinstance(optimizer, SecondOrderOptimizer):
            optimizer.close()
        return figures

    def _plans(
        self, optimizer: SecondOrderOptimizer, model: nn.Module, shapes: Sequence[LayerShape], examples: int
    ) -> dict[str, Figures]:
        """Return what the ranks of a world keep."""
        workers = max(1, round(self.worker_fraction * self.world))
        strategies: dict[str, tuple[CommStrategy, Ranks]] = {
            "CommOpt": (CommOpt(), Ranks(self.world, self.world, self.world)),
            f"HybridOpt({self.worker_fraction:g})": (HybridOpt(self.worker_fraction), Ranks(self.world, workers)),
            "MemOpt": (MemOpt(), Ranks(self.world)),
        }
        plans: dict[str, Figures] = {}
        for name, (comm, ranks) in strategies.items():
            plan = optimizer.plan(self.world, comm, batch_size=examples)
            sums = [sum(n for kind, n in rank.stored.items() if kind != COUNTERS) for rank in plan.ranks]
            wanted = formula(optimizer, model, shapes, examples, ranks)
            plans[name] = {"ranks": sums, "formula": None if wanted is None else _sum(wanted, (COUNTERS,))}
        return plans


def _sum(kinds: Mapping[str, int], leave_out: Sequence[str] = ()) -> int:
    return sum(n for kind, n in kinds.items() if kind not in leave_out)


def state_bytes(figures: Figures) -> int:
    """Return what an optimizer keeps between steps."""
    memory: dict[str, int] = figures["memory"]
    return memory["total"] - sum(memory.get(kind, 0) for kind in TEMPORARY)


def differences(figures: Figures) -> list[int]:
    """Return by how many bytes measured and planned state differ from the formulas."""
    wanted: Formula | None = figures["formula"]
    found = [] if wanted is None else [state_bytes(figures) - sum(wanted.values())]
    found += [sum(plan["ranks"]) - plan["formula"] for plan in figures["plans"].values() if plan["formula"] is not None]
    return [n for n in found if n]


def _table(workload: str, batch_size: int, found: Sequence[Figures]) -> Table:
    rows = [_row(figures) for figures in found]
    size = f"{found[0]['parameter_bytes'] / 1e6:.2f} MB of parameters" if found else "nothing measured"
    caption = (
        "MB, the difference in bytes. Rest: counters. Temporary: memory to compute in that is kept from step to step, "
        "which no formula is for. Optimizers of other projects are counted, tensor by tensor."
    ) + notes_text(found)
    columns = {
        "optimizer": value("label"),
        **{part: value(part, ".3f", 1e-6) for part in ("curvature", "momentum", "rest", "state")},
        "× parameters": value("multiple", ".2f"),
        "formula": value("wanted", ".3f", 1e-6),
        "difference": value("difference", "+,"),
        "temporary": value("temporary", ".3f", 1e-6),
    }
    title = f"{workload}, batch {batch_size}, {size}: state of one process"
    return report.table_of(title, rows, columns, caption)


def _row(figures: Figures) -> Figures:
    memory, total = figures["memory"], state_bytes(figures)
    momentum, rest = sum(memory.get(kind, 0) for kind in _MOMENTUM), memory.get(COUNTERS, 0)
    parts = {"curvature": total - momentum - rest, "momentum": momentum, "rest": rest}
    wanted = None if figures["formula"] is None else _sum(figures["formula"])
    return {
        "label": figures["label"],
        **(parts if len(memory) > 1 else {}),  # of others the total is all that is known
        "state": total,
        "multiple": total / figures["parameter_bytes"],
        "wanted": wanted,
        "difference": None if wanted is None else total - wanted,
        "temporary": memory["total"] - total if len(memory) > 1 else None,
    }


def _spread_table(world: int, found: Sequence[Figures]) -> Table:
    rows = []
    for figures in found:
        for name, plan in figures["plans"].items():
            ranks, wanted = plan["ranks"], plan["formula"]
            row = {"label": figures["label"], "strategy": name, "mean": sum(ranks) / len(ranks), "most": max(ranks)}
            row["multiple"] = max(ranks) / figures["parameter_bytes"]
            row["wanted"] = None if wanted is None else wanted / len(ranks)
            row["difference"] = None if wanted is None else sum(ranks) - wanted
            rows.append(row)
    caption = (
        "MB of a rank without counters, planned; the difference in bytes of all ranks. × parameters: of the fullest."
    )
    columns = {
        "optimizer": value("label"),
        "strategy": value("strategy"),
        "mean of ranks": value("mean", ".3f", 1e-6),
        "fullest": value("most", ".3f", 1e-6),
        "× parameters": value("multiple", ".2f"),
        "formula, mean": value("wanted", ".3f", 1e-6),
        "difference": value("difference", "+,"),
    }
    return report.table_of(f"{world} ranks", rows, columns, caption)
