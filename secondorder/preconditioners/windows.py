"""Window methods: the stages of a step over a window of past gradients, with or without a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm import CommStrategy
from secondorder.comm.layout import local
from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.window.form import Compression
from secondorder.curvature.window.lowrank import LowRank
from secondorder.curvature.window.rows import gated
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.window.unit import Source, Unit, real
from secondorder.curvature.window.window import Push
from secondorder.lifecycle import Directions, Group, module_of
from secondorder.linalg import gram
from secondorder.linalg.dense import full_precision
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.parallel.windows import ShardedWindows
from secondorder.preconditioners.base import Preconditioner, Proposal

#: Norm of a gradient above which its products overflow, by working precision.
#: Steps after which the damping is compared with the curvature.
_STEPS_BEFORE_WATCH = 20
_LARGEST_NORM = {torch.float32: 1e15, torch.float64: 1e150}
#: Entries of the matrices that are factorised in one batch.
_BATCH = 1 << 20


def window_betas(name: str, value: Any) -> None:
    """A check for β₁ in [0, 1) and β₂ in (0, 1]."""
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


class WindowOptimizer(ShardedWindows, SecondOrderOptimizer):
    """Base of the methods that precondition with a window of past gradients.

    A method supplies its ``solver``, a :class:`secondorder.curvature.solvers.WindowSolver`.

    Args:
        params: What ``torch.optim`` takes, or a module, or a list of modules that are the parts of one model.
        defaults: Group options.
        module: The module, for names, layers and types of layers; not needed.
        comm: Communication strategy; None: every rank has every window whole.
        compression: Of the rows.
        window_dtype: Of dense rows.
        partition: Which parameters share a window.
        skip_norm_layers: Whether the parameters of normalisation layers follow the fallback.
        skip_biases: Whether biases do.
        grad_scaler: Loss scaler of float16 training.
        seed: Of the first warm starts of low-rank rows.

    Raises:
        ValueError: For a bad option.
        TypeError: For one of a wrong kind.
        RuntimeError: If the window does not fit into free memory.
    """

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
        self._begin_windows((compression, window_dtype, partition, skip_norm_layers, skip_biases, seed), {})
        super().__init__(given, defaults, module=root, grad_scaler=grad_scaler)

    # ------------------------------------------------------------------ stages 1 to 3: the window
    def damped(self) -> list[Damped] | None:
        """The damping of all windows that this rank keeps, after a number of steps; None before and later."""
        if self._t + 1 != _STEPS_BEFORE_WATCH:
            return None
        held = (unit for unit in self._units if unit.held and unit.part is None and unit.a is not None)
        return [found for unit in held if (found := self.solver.bounds(unit)) is not None]

    # ------------------------------------------------------------------ stages 1 to 3: the window
    @property
    def preconditioner(self) -> Preconditioner:
        """The optimizer itself."""
        return self

    def require_ready(self) -> None:
        """Follow parameters that have changed since the last step."""
        self._synchronize()  # a parameter may have been frozen, unfrozen or moved since the last step
        for group in self.param_groups[1:]:
            self._require_agreement(group)

    def _acceptable(self, gradients: Directions) -> Tensor:
        norms = self._norms(list(gradients), list(gradients.values()))
        self._gradient_norms = dict(zip(gradients, norms.unbind(), strict=True))
        precise = all(self._working(p) == torch.float64 for p in self._unit_of)
        limit = _LARGEST_NORM[torch.float64 if precise else torch.float32]
        small: Tensor = torch.linalg.vector_norm(norms) < limit
        return small

    def check_gradients(self) -> None:
        """Nothing was captured."""

    def collect(self) -> None:
        """Nothing was captured."""

    def discard(self) -> None:
        """Nothing was captured."""

    def drop(self) -> None:
        """Count a batch that is left out."""
        for unit in self._units:
            if unit.held:
                unit.window.counters["skipped"].add_(1)

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Store the gradients as the newest rows."""
        self._refresh_stale()
        pushes: dict[Unit, Push] = {}
        betas = {unit: self._momentum_if_wanted(unit) for unit in self._units}
        for unit in self._units:
            self._find_inputs(unit, gradients)
        decays = self._own([self._decay_in_direction(unit) for unit in self._units]) if self._decays_anywhere else None
        for unit, own in zip(self._units, self._own([unit.inputs for unit in self._units]), strict=True):
            decayed = None if decays is None else next(decays)
            if own is None:
                continue
            with full_precision(unit.window.device):
                pushes[unit] = unit.window.push(own, gate, betas[unit])
                unit.decayed = None if decayed is None else self._scaled_decay(unit, decayed)
                unit.decay_dots = None if unit.decayed is None else unit.window.dots(unit.decayed)
        self._sum_dots(pushes)
        for unit, push in pushes.items():
            unit.window.finish(push)
        self._gradient_norms = {}

    def _find_inputs(self, unit: Unit, gradients: Directions) -> None:
        """What enters a window, and how long it is."""
        inputs = [self._input(p, gradients) for p in unit.params]
        unit.inputs = inputs if any(x is not None for x in inputs) else None
        if unit.inputs is not None:
            there = [self._gradient_norms[p] for p in unit.params if p in self._gradient_norms]
            unit.norm = torch.linalg.vector_norm(torch.stack(there))

    def _input(self, p: nn.Parameter, gradients: Directions) -> Tensor | None:
        """What enters the window: the gradient, with coupled weight decay."""
        gradient = gradients.get(p)
        if gradient is None:
            return None
        group = self._group[p]
        rule = self._options(p)["graft"] or group["inner"]
        coupled = group["weight_decay_mode"] == "standard" and not options.is_decoupled(rule, group)
        if group["weight_decay"] and coupled:
            gradient = gradient.add(local(p), alpha=group["weight_decay"])
        return real(gradient)

    # ------------------------------------------------------------------ stage 4: coefficients
    def refresh_due(self) -> list[int]:
        """Solve for the coefficients of all directions."""
        alike: dict[tuple[object, ...], list[Unit]] = {}
        for unit in self._units:
            if unit.inputs is not None and unit.held:
                unit.source = self._source(unit)
                alike.setdefault(self.solver.key(unit, self._t), []).append(unit)
        for units in _batches(alike.values()):
            parts = [unit.window.lower() for unit in units]
            lower = parts[0][None] if len(parts) == 1 else torch.stack(parts)
            for unit, a in zip(units, self.solver.coefficients(units, lower, self._t), strict=True):
                unit.a = a
        return []

    def share(self, refreshed: list[int]) -> None:
        """Every rank that holds rows has solved for their coefficients."""

    def _source(self, unit: Unit) -> Source:
        window, group, t = unit.window, unit.group, unit.window.filled
        b, q = window.unit_vector(), None
        r: list[Tensor | None] | None = None
        if window.outside is not None:
            b, q, r = window.outside.b[:t], window.outside.q[:t], list(window.outside.r)
            if self.solver.corrects_bias(group):
                weight = window.outside.weight
                b, q, r = b / weight, q / weight, [x / weight.to(x.device, x.dtype) for x in window.outside.r]
        elif options.is_adam(group["graft"]):
            # The direction of Adam's first moment, as far as the window remembers it: only the direction is wanted, and
            # what has left the window would be multiplied with f(0), which is huge.
            b = gram.decay(self.solver.adam_beta(group), window.counters["pos"], window.m, t)
            b = b / b.sum()
        decayed, dots = unit.decayed, unit.decay_dots
        if decayed is not None and dots is not None:
            q = dots if q is None else q + dots
            r = decayed if r is None else [_sum(x, d) for x, d in zip(r, decayed, strict=True)]
        return Source(b, q, r)

    def _decay_in_direction(self, unit: Unit) -> list[Tensor | None] | None:
        """The parameters whose decay is preconditioned but kept out of the window (``"reg"``, ``"both"``)."""
        if not self._decays_outside(unit) or unit.inputs is None:
            return None
        pairs = zip(unit.params, unit.inputs, strict=True)
        found = [real(local(p.detach())) if x is not None and self._decay_of(p) else None for p, x in pairs]
        return found if any(x is not None for x in found) else None

    def _scaled_decay(self, unit: Unit, own: Sequence[Tensor | None]) -> list[Tensor | None]:
        """``wd·p`` of this rank's part of a window, in its precision."""
        pairs = zip(unit.params, own, strict=True)
        return [None if x is None else x.to(self._working(p)) * self._decay_of(p) for p, x in pairs]

    # ------------------------------------------------------------------ stages 5 and 6: directions
    def propose(self, gradients: Directions, gate: Tensor | None) -> Proposal:
        """Directions of all windows."""
        directions: Directions = {}
        adam = [p for p in gradients if p in self._unit_of and options.is_adam(self._options(p)["graft"])]
        self._count_moments(adam, gradients, gate)
        shared = self._exchange([self._combined(unit) for unit in self._units])
        raw: Directions = {}
        sizes: list[tuple[str | None, list[nn.Parameter]]] = []
        for unit, found in zip(self._units, shared, strict=True):
            if unit.inputs is None or found is None:
                continue
            there = [(p, u, x) for p, u, x in zip(unit.params, found, unit.inputs, strict=True) if x is not None]
            directions |= {p: u for p, u, _ in there}
            raw |= {p: x for p, _, x in there}
            sizes.append((unit.group["graft"], [p for p, _, _ in there]))
            unit.inputs = unit.source = unit.decayed = unit.decay_dots = None
        return Proposal(directions, raw, sizes)

    def _combined(self, unit: Unit) -> list[Tensor] | None:
        """This rank's part of the direction of a unit: ``Gᵀa + c·r``; None without gradients."""
        if unit.inputs is None or unit.a is None or unit.source is None:
            return None
        with full_precision(unit.window.device):
            found = unit.window.combine(unit.a)
        for u, r in zip(found, unit.source.r or [None] * len(found), strict=True):
            if r is not None:
                u.addcmul_(r.to(u.dtype), torch.as_tensor(unit.outside, dtype=u.dtype, device=u.device))
        return found

    # ------------------------------------------------------------------ stage 7: update
    def _apply_rule(
        self, rule: str, params: list[nn.Parameter], group: Group, directions: list[Tensor], gate: Tensor | None
    ) -> None:
        if rule == "adam" and self._covers(params[0]):
            group = {**group, "weight_decay": 0.0}  # it is in the window
        if rule in ("sgd", "sized_adam", "sized_adamw") and self._covers(params[0]):
            mode = group["weight_decay_mode"]
            if mode in ("legacy", "both") and group["weight_decay"]:
                kept = 1 - group["weight_decay"]
                for p in params:
                    local(p).mul_(gated(gate, kept, 1.0))
            in_window = mode != "standard" or (rule == "sgd" and not group["decoupled_weight_decay"])
            momentum, factor = self.solver.momentum_after(group)
            if factor != 1 and rule == "sgd":
                directions = list(torch._foreach_mul(directions, factor))
            group = {**group, "momentum": momentum, "weight_decay": 0.0 if in_window else group["weight_decay"]}
        super()._apply_rule(rule, params, group, directions, gate)

    def state_dict(self) -> dict[str, Any]:
        """State by parameter and group options, as ``torch.optim``; each parameter shows its part of the window."""
        self._synchronize()
        for unit in self._units:
            self._momentum_if_wanted(unit)
            for event in unit.arrivals.values():
                event.synchronize()
        return super().state_dict()

    # ------------------------------------------------------------------ what it tells
    def _summary(self) -> str:
        return f"{len(self._units)} window{'s' if len(self._units) != 1 else ''}"

    _sizes_are = "rows × entries"

    def _coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        unit = self._unit_of.get(p)
        if unit is None:
            return "", "", ""
        form = unit.window.form.describe(self._working(p))
        part = unit.part
        owner = f"rank {self.comm.owner(self._units.index(unit))}" if part is None else f"in {part.size} parts"
        return f"window '{unit.name}' ({form})", f"{unit.window.m} × {real(p).numel()}", owner

    def dense_curvature(self, name: str) -> Tensor:
        """The undamped curvature of a layer or a parameter as a dense ``[n, n]`` matrix, float64.

        Args:
            name: Module name (over row-major ``vec([W | b])``) or parameter name; wrapper prefixes may be left out.

        Returns:
            The matrix, ``n`` being the number of parameters.

        Raises:
            ValueError: If nothing covered has this name.
            RuntimeError: If no step was taken yet, or if the rows are not all on this rank.
        """
        chosen = self._named(name)
        unit = self._unit_of[chosen[0]]
        if unit.part is not None or not unit.held:
            raise RuntimeError(
                f"the rows of '{name}' are not all on rank {self.comm.rank}: use comm=CommOpt(), or load what "
                "consolidate_state_dict() has gathered into an optimizer of one process"
            )
        if not unit.window.filled:
            raise RuntimeError(f"the window of '{name}' is empty: take a step first")
        places = [next(i for i, p in enumerate(unit.params) if p is q) for q in chosen]
        rows = []
        for slot in range(unit.window.filled):
            out = [torch.zeros(p.shape, dtype=p.working, device=p.device) for p in unit.window.places]
            unit.window.add_row(out, torch.tensor([slot], device=unit.window.device), torch.ones(()))
            parts = [out[i].double() for i in places]
            if len(parts) > 1:  # [W | b]
                parts = [torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], 1)]
            rows.append(parts[0].flatten())
        return self.solver.curvature_of_rows(unit, torch.stack(rows))

    def _named(self, name: str) -> list[nn.Parameter]:
        """Covered parameters of one window that a module or parameter name means."""
        by_name = {self._names[p]: p for p in self._unit_of}
        while True:
            wanted = [name] if name in by_name else [f"{name}.{own}" if name else own for own in ("weight", "bias")]
            found = [by_name[own] for own in wanted if own in by_name]
            if found:
                return [p for p in found if self._unit_of[p] is self._unit_of[found[0]]]
            if not name.startswith("module."):
                raise ValueError(
                    f"no parameter in a window is named '{name}'; there are: {', '.join(by_name) or 'none'}"
                )
            name = name.removeprefix("module.")

    def diagnostics(self) -> dict[str, Any]:
        """Counters as plain numbers and, by window, how its last direction relates to the gradient.

        Everything comes from the Gram matrix: no pass over the parameters, but one eigendecomposition ``[m, m]`` per
        window. Reading waits for the device, and never for another rank: windows that are on other ranks only are left
        out, and so is what is not sent of windows in parts.

        Returns:
            ``step``, ``skipped_steps``, ``stage_ms``, ``damping``, ``graft_factor``, ``solve_failures``, and ``units``:
            by name of the window a dict of ``rows``, ``count`` (rows ever stored) and, once a step was taken,
            ``damping``, ``condition_number`` and the entries of
            :func:`secondorder.linalg.gram.metrics` (cosine, angle in degrees, norm ratio, amplification, effective
            rank, ...) and for compressed rows ``sent_energy``, ``residual_norm`` and ``residual_ratio`` (to the norm of
            the gradient).
        """
        found, held = super().diagnostics(), [unit for unit in self._units if unit.held]
        if held:  # counted in the state, so that copies and checkpoints keep it
            found["skipped_steps"] = max(int(unit.window.counters["skipped"]) for unit in held)
        found["solve_failures"] = sum(int(unit.window.counters["solve_failures"]) for unit in held)
        found["damping"] = [g.get("damping", g.get("eps")) for g in self.param_groups]
        first = {unit.name: next((p for p in unit.params if p in self._graft_factors), None) for unit in held}
        found["graft_factor"] = {name: float(self._graft_factors[p]) for name, p in first.items() if p is not None}
        found["units"] = {unit.name: dict(self._unit_metrics(unit)) for unit in held}
        return found

    def _unit_metrics(self, unit: Unit) -> Iterator[tuple[str, float | int]]:
        window = unit.window
        yield "rows", window.filled
        yield "count", int(window.counters["count"])
        if unit.a is None:
            return
        if (known := self.solver.extremes(unit)) is not None:
            damping, largest = map(float, known)
            yield "damping", damping
            yield "condition_number", (largest + damping) / damping
        numbers = gram.metrics(window.lower(), unit.a, window.newest)
        square = window.residual_square() if unit.part is None else None
        if square is not None:
            sent = numbers["gradient_norm"] ** 2
            numbers["sent_energy"] = sent / (sent + square).clamp(min=torch.finfo(torch.float64).tiny)
            numbers["residual_norm"] = square.sqrt()
            numbers["residual_ratio"] = square.sqrt() / unit.norm
        yield from ((key, float(value)) for key, value in numbers.items())


def _batches(alike: Iterable[list[Unit]]) -> Iterator[list[Unit]]:
    """Units to solve together: of one size, and few enough that their matrices stay a bounded temporary."""
    for units in alike:
        count = max(1, _BATCH // max(units[0].window.filled, 1) ** 2)
        yield from (units[i : i + count] for i in range(0, len(units), count))


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else x + y
