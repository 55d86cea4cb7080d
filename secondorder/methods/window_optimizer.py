"""The base of the window methods: their options, and an optimizer that uses a :class:`WindowPreconditioner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.checkpoint.windows import WindowCheckpoint
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.schema import Schema
from secondorder.curvature.solvers import WindowSolver
from secondorder.curvature.window.form import Compression
from secondorder.curvature.window.lowrank import LowRank
from secondorder.curvature.window.shards import plain
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.wrappers import unwrap
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.parameters import Directions, Group, module_of
from secondorder.preconditioners.window_plan import CATALOG, WindowOptions
from secondorder.preconditioners.windows import WindowPreconditioner
from secondorder.update import Update


def window_betas(name: str, value: Any) -> None:
    """Check that β₁ is in [0, 1) and β₂ in (0, 1]."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(options.is_number(b) for b in value):
        raise TypeError(f"{name} must be a pair of numbers, got {value!r}")
    if not 0.0 <= value[0] < 1.0:
        raise ValueError(f"{name}[0] must be in [0, 1), got {value[0]}")
    if not 0.0 < value[1] <= 1.0:
        raise ValueError(f"{name}[1] must be in (0, 1], got {value[1]}")


#: Checks of the options that all window methods have.
WINDOW_CHECKS: dict[str, options.Check] = {
    "window_size": options.whole(1),
    "weight_decay_mode": options.choice("standard", "legacy", "reg", "both"),
    "checkpoint_curvature": options.choice("all", "none"),
}


class WindowRules(options.GroupRules):
    """Rules about the options of a group with windows.

    Args:
        shared: Options on which all groups agree if they have one window.
        partition: Which parameters share a window.
        exclusions: What excludes each other.
    """

    def __init__(self, shared: Sequence[str], partition: str, *exclusions: Callable[..., None]) -> None:
        super().__init__(_exclude, *exclusions)
        self.shared = tuple(shared) if partition == "global" else ()

    def complete(self, given: dict[str, Any], defaults: Mapping[str, Any], groups: list[Group]) -> dict[str, Any]:
        """Return an added group with the current options of the common window, which a schedule may have changed."""
        return {key: groups[0][key] for key in self.shared} | given if groups else given

    def check(self, group: Mapping[str, Any], groups: list[Group]) -> None:
        """Raise ``ValueError`` if options of a group cannot be combined, or do not agree with the first group."""
        super().check(group, groups)
        for key in self.shared if groups else ():
            if group[key] != groups[0][key]:
                raise ValueError(
                    f"all groups share one window and must agree on {key}, got {groups[0][key]!r} and {group[key]!r}; "
                    "use partition='group' for one window per group"
                )


def _exclude(group: Mapping[str, Any], groups: list[Group]) -> None:
    """Refuse options that exclude each other in all window methods."""
    mode, decay = group["weight_decay_mode"], group["decoupled_weight_decay"]
    if mode != "standard" and decay:
        raise ValueError(f"weight_decay_mode={mode!r} and decoupled_weight_decay=True exclude each other")
    if mode != "standard" and options.is_adam(group["graft"] or group["inner"]):
        raise ValueError(f"weight_decay_mode={mode!r} is for SGD's rule and not for Adam's: drop it")


class WindowOptimizer(SecondOrderOptimizer):
    """Base of the methods that precondition with a window of past gradients.

    A method sets ``solver`` to a :class:`secondorder.curvature.solvers.WindowSolver`.

    Args:
        params: Anything that ``torch.optim`` accepts, a module, or a list of modules that are the parts of one model.
        defaults: Default options of the groups.
        module: The module, which provides names, layers and types of layers. It is optional.
        comm: Communication strategy. If None, every rank stores every window as a whole.
        compression: Compression of the rows.
        window_dtype: Precision of dense rows and of low-rank factors.
        partition: Which parameters share a window.
        skip_norm_layers: Whether the parameters of normalization layers follow the fallback.
        skip_biases: Whether biases follow the fallback.
        grad_scaler: Loss scaler of float16 training.
        seed: Seed of the random bases from which low-rank rows start.
        exclusions: What else excludes each other in a group.

    Raises:
        ValueError: If an option has an invalid value.
        TypeError: If an option has an invalid type.
        RuntimeError: If the window does not fit into free memory.
    """

    #: The mathematics of the method.
    solver: ClassVar[WindowSolver]
    #: Options on which the groups of one window must agree.
    shared_options: ClassVar[tuple[str, ...]] = ("window_size", "graft", "weight_decay_mode")

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        defaults: dict[str, Any],
        *,
        module: nn.Module | Sequence[nn.Module] | None,
        comm: CommStrategy | None,
        compression: Compression,
        window_dtype: torch.dtype | None,
        partition: str,
        skip_norm_layers: bool,
        skip_biases: bool,
        grad_scaler: Any,
        seed: int,
        exclusions: Sequence[Callable[..., None]] = (),
    ) -> None:
        root, given = module_of(type(self).__name__, params, module)
        if compression is not None and not isinstance(compression, (TopK, LowRank)):
            raise TypeError(f"compression must be None, TopK(...) or LowRank(...), got {compression!r}")
        if window_dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
            kind = ValueError if isinstance(window_dtype, torch.dtype) else TypeError
            raise kind(f"window_dtype must be None, float32, float64 or bfloat16, got {window_dtype!r}")
        if isinstance(compression, TopK) and window_dtype is not None:
            raise ValueError("window_dtype is for dense and low-rank rows; TopK has its own value_dtype")
        options.choice("global", "group", "layer")("partition", partition)
        options.flag("skip_norm_layers", skip_norm_layers)
        options.flag("skip_biases", skip_biases)
        options.whole(0)("deterministic_seed", seed)
        self._begin_life(comm)
        self.rules = WindowRules(self.shared_options, partition, *exclusions)
        self._structure = WindowOptions(compression, window_dtype, partition, skip_norm_layers, skip_biases, seed)
        super().__init__(given, defaults, module=root, grad_scaler=grad_scaler)

    # ------------------------------------------------------------------ the windows
    @property
    def catalog(self) -> Schema:
        """Entries of the states of windows by key."""
        return CATALOG

    @property
    def preconditioner(self) -> WindowPreconditioner:
        """The windows."""
        return self._windows

    def _allocating(self) -> tuple[str, ...]:
        return ("window_size",)

    def _make_windows(self, kept: dict[str, Any] | None = None) -> None:
        self._windows = WindowPreconditioner(self.solver, self._structure, self.comm, self._table, kept)
        self._update = Update(self._table, self._windows, self.solver.adam_options)
        state = WindowCheckpoint(self._windows.plan, self._windows.exchange, self.comm, self._table)
        self._make_checkpoint(state, divided=state)
        self._tabulate()

    def _connect(self, root: nn.Module | None) -> None:
        self._table.root = None if root is None else unwrap(root)
        known = {p for group in self.param_groups for p in group["params"]}
        if not hasattr(self, "_windows"):  # not before the strategy is known
            self._make_windows()
        elif not self._windows.plan.unit_of.keys() <= known:
            self._windows.plan.units, self._windows.plan.unit_of = [], {}  # others replaced them, with their state
        self._table.is_followed = True
        self._rebuild()

    def _plan(self) -> bool:
        for group in self.param_groups:
            self.checks["window_size"]("window_size", group["window_size"])
        self._table.name_parameters()
        partition = self._windows.plan.partition
        changed = self._windows.follow(self._place)
        self._table.reasons = partition.reasons(self._windows.table)
        self._table.skipped_by_user = set(partition.excluded)
        return changed

    def _prepare(self) -> None:
        self._tabulate()
        self._synchronize()  # a parameter may have been frozen, unfrozen or moved since the last step
        self._windows.step = self._t

    def _acceptable(self, gradients: Directions) -> Tensor:
        return self._windows.acceptable(gradients, self._table.shards.norms(list(gradients), list(gradients.values())))

    # ------------------------------------------------------------------ life
    def _allocate(self, p: nn.Parameter) -> None:
        """Do nothing, since the plan allocates all parameters of a window at once."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose columns are zero in the existing rows.

        Raises:
            RuntimeError: If the larger window does not fit into free memory; the group is not added then.
        """
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
        except RuntimeError:
            if self._table.group_of and len(self.param_groups) > count:
                dropped = self.param_groups.pop()["params"]
                for p in dropped:
                    self._windows.plan.forget(p)
                self._table.forget(dropped)
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Contents of copies and pickles. Each parameter gets its part of the window, not a view of all of it."""
        kept = super().__getstate__()
        kept["state"] = type(self.state)(dict)
        for p, found in self.state.items():
            kept["state"][p] = {k: v.clone() if plain(k) in self.catalog else v for k, v in found.items()}
        return kept

    def _kept_by_copies(self) -> dict[str, Any]:
        return {**super()._kept_by_copies(), "windows": self._windows.plan.kept()}

    def _restore(self, kept: dict[str, Any]) -> None:
        super()._restore(kept)
        self._structure = kept["windows"]["options"]
        self._make_windows(kept["windows"])
        self._rebuild()

    # ------------------------------------------------------------------ reading
    def dense_curvature(self, name: str) -> Tensor:
        """The undamped curvature of a layer or a parameter as a dense ``[n, n]`` matrix, float64.

        Args:
            name: Module name (over row-major ``vec([W | b])``) or parameter name; wrapper prefixes may be left out.

        Returns:
            The matrix, ``n`` being the number of parameters.

        Raises:
            ValueError: If no covered layer or parameter has this name.
            RuntimeError: If no step was taken yet, or if some rows are on other ranks.
        """
        return self._windows.report.dense(name)

    def diagnostics(self) -> dict[str, Any]:
        """Return counters as plain numbers and, for each window, how its last direction relates to the gradient.

        Everything is computed from the Gram matrix, with one eigendecomposition ``[m, m]`` per window and no pass over
        the parameters. The call waits for the device, but never for another rank: windows that are only on other ranks
        are left out, and so are values of divided windows that ranks do not exchange.

        Returns:
            ``step``, ``skipped_steps``, ``stage_ms``, ``damping``, ``graft_factor``, ``solve_failures``, and ``units``:
            by name of the window a dict of ``rows``, ``count`` (rows ever stored) and, once a step was taken,
            ``damping``, ``condition_number`` and the entries of
            :func:`secondorder.linalg.gram.metrics` (cosine, angle in degrees, norm ratio, amplification, effective
            rank, ...) and for compressed rows ``sent_energy``, ``residual_norm`` and ``residual_ratio`` (to the norm of
            the gradient).
        """
        found, held = super().diagnostics(), [unit for unit in self._windows.units if unit.held]
        if held:  # counted in the state, so that copies and checkpoints keep it
            found["skipped_steps"] = max(int(unit.window.counters["skipped"]) for unit in held)
        found["solve_failures"] = sum(int(unit.window.counters["solve_failures"]) for unit in held)
        found["damping"] = [g.get("damping", g.get("eps")) for g in self.param_groups]
        first = {unit.name: next((p for p in unit.params if p in self._update.graft_factors), None) for unit in held}
        found["graft_factor"] = {
            name: float(self._update.graft_factors[p]) for name, p in first.items() if p is not None
        }
        found["units"] = {unit.name: dict(self._windows.report.metrics(unit)) for unit in held}
        return found
