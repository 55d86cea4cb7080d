"""Analysis: rank of the curvature, trend of the gradient, error of few rows and times of a step, beside any training.

::

    forward, backward   taps of its own collect rows of examples              on steps that are due, for rank and error
    before the step     rank and error, from rows and gradient                (with a closure: once that has run)
    the step            is timed, its directions are kept
    after the step      one line per event is appended to its file, and the taps are set for the next step

Nothing here moves a parameter, a gradient, a state or a stream of random numbers.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from secondorder import options
from secondorder.curvature import kernel, selection, statistics
from secondorder.curvature.block import Block
from secondorder.curvature.examples import ExampleRows, as_rows_matrix
from secondorder.diagnostics import approximation
from secondorder.diagnostics.approximation import Kept, Sums, System
from secondorder.diagnostics.jsonl import EventFile, read_events
from secondorder.diagnostics.report import Reporting
from secondorder.diagnostics.rowtaps import RowCapture
from secondorder.diagnostics.timing import StageClock

SelfT = TypeVar("SelfT", bound="Analysis")
Event = dict[str, Any]

#: Stages of a step by column of the profile; exchange is whatever brings statistics to where they are needed.
STAGES = {
    "capture_ms": ("capture",),
    "select_ms": ("select",),
    "exchange_ms": ("reduce", "exchange"),
    "kernel_ms": ("kernel",),
    "invert_ms": ("invert",),
    "statistics_ms": ("statistics",),
    "refresh_ms": ("refresh",),
    "share_ms": ("share",),
    "precondition_ms": ("precondition",),
    "update_ms": ("update",),
}
_SPECTRUM = "rank90", "eff_rank", "sigma_max", "sigma_sum", "damping_over_sigma1"
_ERROR = "mode", "r", "rel_error", "cos", "kid_energy", "kis_ess"
#: Columns of the file of each tool.
COLUMNS: dict[str, tuple[str, ...]] = {
    "rank": ("step", "layer", "m", "d_i", "d_o", *_SPECTRUM, "process"),
    "trend": ("step", "epoch", "layer", "grad_norm", "update_norm", "rel_change", "mode", "process"),
    "error": ("step", "layer", *_ERROR, "process"),
    "profile": ("step", "rank", "world", *STAGES, "wire_bytes", "state_bytes", "peak_bytes", "process"),
}


class _Process(NamedTuple):
    rank: int
    world: int


class Analysis:
    """Observes the training of a layer method (K-FAC, EK-FAC, HyLo) and writes what it sees into a folder.

    A pure observer: with and without it, parameters and state of the optimizer are the same to the last bit. It may be
    closed and opened again, also after a resume: files are only ever appended to.

    ``rank.jsonl``
        of each layer, from the eigenvalues σ of the kernel of its m examples: ``rank90``, how many of the largest make
        up nine tenths of their sum; ``eff_rank``, exp of their entropy; ``sigma_max``, ``sigma_sum``, and
        ``damping_over_sigma1``, λ over the largest. Groups of a convolution are taken together.
    ``trend.jsonl``
        of each layer: ``grad_norm`` as the optimizer gets it, ``update_norm`` of its preconditioned direction,
        ``rel_change`` of the former since the last time, and the ``mode`` of the method (its name, if it has one only).
    ``error.jsonl``
        of each layer, and of all together in ``layer`` ``"all"``: how far the update from ``r`` rows is from the exact
        one from all rows, with the same λ and gradient: ``rel_error``, and ``cos`` between the two. ``mode`` is
        ``"kid"``, ``"kis"``, or ``"uniform KIS"`` and so on for another sampling; ``kid_energy`` is the share of the
        trace of the kernel that the chosen rows explain, ``kis_ess`` their effective sample size.
    ``profile.jsonl``
        of each step: milliseconds of its stages, ``refresh_ms`` with those inside it; bytes sent, held by the
        optimizer, and by which the step has raised the peak of the memory of a CUDA device.

    ``step`` counts from 0; what is not defined is null. ``process`` is the index of the process.

    Args:
        optimizer: The optimizer, with its module.
        out_dir: Folder for the files; made if it is not there.
        tools: Which files to write.
        every: Interval in steps; the first step is looked at too.
        rank_fraction: ρ, kept rows per example, for the error.
        max_rank: Most rows to keep.
        damping: λ of rank and error; None: the optimizer's own of each layer, a relative one being times the mean
            eigenvalue of the kernel.
        epoch_steps: Steps of an epoch, for the column ``epoch``; None leaves it null.
        approx: ``"reduce"`` takes one row per example, ``"expand"`` the rows of all positions, which is exact.
        kis_sampling: How rows are drawn for the error, one way or several: ``"systematic"``, ``"replacement"``,
            ``"unweighted"``, ``"uniform"``.
        seed: Seed of those draws.

    Attributes:
        refused: Why there are no rows of a layer, by its name.

    Raises:
        TypeError: If the optimizer is no layer method, or an option is of a wrong kind.
        ValueError: For an option out of range.
        RuntimeError: If the stages of the optimizer are being timed already, or it has no module.

    Example:
        >>> import tempfile, torch, secondorder
        >>> from secondorder.diagnostics import Analysis
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.KFAC(model, lr=0.1)
        >>> with Analysis(optimizer, tempfile.mkdtemp(), every=2) as analysis:
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(8, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> analysis.events
        {'rank': 2, 'trend': 2, 'error': 8, 'profile': 2}
    """

    def __init__(
        self,
        optimizer: Reporting,
        out_dir: str | os.PathLike[str],
        tools: Sequence[str] = ("rank", "trend", "error", "profile"),
        *,
        every: int = 10,
        rank_fraction: float = 0.1,
        max_rank: int = 1024,
        damping: float | None = None,
        epoch_steps: int | None = None,
        approx: str = "reduce",
        kis_sampling: str | Sequence[str] = "systematic",
        seed: int = 0,
    ) -> None:
        _require_layers(optimizer)
        self._tools = _several("tools", tools, tuple(COLUMNS))
        self._samplings = _several("kis_sampling", kis_sampling, selection.SAMPLINGS)
        options.whole(1)("every", every)
        options.number(0.0, 1.0, low_open=True)("rank_fraction", rank_fraction)
        options.whole(1)("max_rank", max_rank)
        options.number(0.0, low_open=True, optional=True)("damping", damping)
        options.optional_whole(1)("epoch_steps", epoch_steps)
        options.choice("reduce", "expand")("approx", approx)
        options.whole(0)("seed", seed)
        self._every, self._rank_fraction, self._max_rank = every, rank_fraction, max_rank
        self._damping, self._epoch_steps, self._approx, self._seed = damping, epoch_steps, approx, seed
        # The classes of layer methods are above this one, so their members are not known to a type checker here.
        self._method: Any = optimizer
        self._method._require_capture()
        if "profile" in self._tools and self._method._clock is not None:
            raise RuntimeError("the stages of this optimizer are timed already: close the other Analysis first")
        self.refused: dict[str, str] = {}
        self._open(Path(out_dir))
        self._attach()

    # ------------------------------------------------------------------ life
    def _open(self, folder: Path) -> None:
        """Open the files, and go on where earlier events end."""
        folder.mkdir(parents=True, exist_ok=True)
        comm = self._method.comm  # a strategy of one process says neither
        self._process = _Process(getattr(comm, "rank", 0), getattr(comm, "world", 1))
        paths = {tool: folder / f"{tool}.jsonl" for tool in self._tools}
        #: Whether there is any event yet: the first step is looked at whatever its number.
        self._begun = any(path.exists() and path.stat().st_size > 0 for path in paths.values())
        self._last_norms: dict[str, float] = {}
        if "trend" in paths and paths["trend"].exists():
            own = [e for e in read_events(paths["trend"]) if e.get("process") == self._process.rank]
            self._last_norms = {e["layer"]: e["grad_norm"] for e in own if e["grad_norm"] is not None}
        self._files = {tool: EventFile(path, COLUMNS[tool]) for tool, path in paths.items()}

    def _attach(self) -> None:
        self._closed = False
        self._capture: RowCapture | None = None
        self._followed: tuple[object, ...] = ()
        #: Step that is being looked at, None outside of one.
        self._step: int | None = None
        self._lines: list[tuple[str, Event]] = []
        self._norms: dict[Block, float] = {}
        self._lent: dict[str, Tensor] | None = None
        self._kept: dict[str, Tensor] = {}
        self._stale: dict[str, Tensor] = {}
        self._before = 0, 0
        self._clock = StageClock(self._device)
        if "profile" in self._tools:
            self._method._time_stages(self._clock)
        self._handles = [
            self._method.register_step_pre_hook(self._before_step),
            self._method.register_step_post_hook(self._after_step),
        ]
        self._follow()

    def close(self) -> None:
        """Remove every hook and close the files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if self._method._clock is self._clock:
            self._method._time_stages(None)
        self._take_directions_back()
        if self._capture is not None:
            self._capture.close()
            self._capture = None
        for file in self._files.values():
            file.close()

    def __enter__(self: SelfT) -> SelfT:
        """The analysis itself; leaving the block closes it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    @property
    def events(self) -> dict[str, int]:
        """Number of events written so far, by tool."""
        return {tool: file.count for tool, file in self._files.items()}

    # ------------------------------------------------------------------ which steps
    @property
    def _device(self) -> torch.device:
        return next((b.owner.device for b in self._blocks), torch.device("cpu"))

    @property
    def _blocks(self) -> list[Block]:
        return list(self._method.blocks.values())

    def _is_due(self) -> bool:
        return not self._begun or self._method._t % self._every == 0

    def _follow(self) -> None:
        """Tap what the coming step will be judged by; asked before each forward, and after each step."""
        if self._step is not None or self._method._root is None:
            return
        due = self._is_due()
        if due != self._clock.running:
            self._clock.take()
            self._clock.running = due
        if {"rank", "error"} & set(self._tools):
            self._follow_blocks(due)

    def _follow_blocks(self, due: bool) -> None:
        method, blocks = self._method, self._blocks
        if self._capture is None or self._capture.root is not method._root:
            self._tap(method._root)
        assert self._capture is not None
        self._capture.grad_scaler = method._scaler
        wanted = method._t, due, *blocks
        if wanted == self._followed:
            return
        if list(self._followed[2:]) != blocks:
            self._capture.watch(blocks)
        self._followed = wanted
        self._capture.arm(range(len(blocks)) if due else ())

    def _tap(self, root: nn.Module) -> None:
        if self._capture is not None:
            self._capture.close()
        reference = weakref.ref(self._method)
        self._capture = RowCapture(root, self._approx, lambda: getattr(reference(), "_capture", None))
        self._capture.batch_dim = self._method._layer_options.batch_dim
        self._capture.before_forward = weakref.WeakMethod(self._follow)
        self._followed = ()

    # ------------------------------------------------------------------ around a step
    def _before_step(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at the gradient, or have the closure that computes it followed by a look."""
        if not self._is_due():
            return None
        self._step, self._lines = self._method._t, []
        self._lend_directions()
        self._before = self._peak(), self._wire_bytes()
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._watched(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._watched(kwargs["closure"])}
        self._look()
        return None

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, its first evaluation followed by a look: others are at other parameters."""
        seen = False

        def evaluate() -> Any:
            nonlocal seen
            returned = closure()
            if not seen:
                seen = True
                self._look()
            return returned

        return evaluate

    def _after_step(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write what was seen, and tap what the next step needs."""
        step, self._step = self._step, None
        directions = self._take_directions_back()
        if step is not None and self._method._t > step:  # without any gradient there is no step
            self._begun = True
            self._lines += [("trend", event) for event in self._trend(step, directions)]
            self._lines += [("profile", self._profile(step))]
            for tool, event in self._lines:
                if tool in self._files:
                    self._files[tool].write(event | {"step": step, "process": self._process.rank})
        self._lines = []
        self._follow()

    @torch.no_grad()
    def _look(self) -> None:
        """Measure what is there before the parameters move: rows and gradients."""
        gradients = {b: [_dense(p.grad) for p in b.params if p.grad is not None] for b in self._blocks}
        self._norms = {b: _norm(found) for b, found in gradients.items() if found}
        capture = self._capture
        if capture is None:
            return
        taken = capture.take()
        capture.arm(())  # what a step evaluates again is of no interest
        self._followed = ()
        self.refused.update({capture.sites[i].name: reason for i, reason in capture.refused.items()})
        blocks = self._blocks
        totals: dict[str, Sums] = {}
        for index, statistic in sorted(taken.statistics.items()):
            block, m = blocks[index], taken.examples[index]
            if m and len(gradients[block]) == len(block.params):
                self._measure(block, cast(ExampleRows, statistic), m, gradients[block], totals)
        r = selection.planned_rank(taken.total, self._rank_fraction, self._max_rank) if taken.total else None
        for mode, sums in totals.items():
            self._lines.append(("error", _error_line("all", mode, r, sums)))

    # ------------------------------------------------------------------ rank and error
    def _measure(
        self, block: Block, statistic: ExampleRows, m: int, gradients: list[Tensor], totals: dict[str, Sums]
    ) -> None:
        """Rank and error of a layer.

        Args:
            block: The layer.
            statistic: Its rows, as captured.
            m: Examples of the step.
            gradients: Of its parameters.
            totals: By mode, the sums of all layers, to which those of this one are added.
        """
        system = self._system(block, statistic, m, gradients)
        finite = bool(torch.isfinite(system.kernel).all() and torch.isfinite(system.matrix).all())
        if "rank" in self._tools:
            adapter = block.adapter
            line = {"layer": block.name, "m": m, "d_i": adapter.n_a, "d_o": adapter.n_g, **dict.fromkeys(_SPECTRUM)}
            self._lines.append(("rank", line | (_spectrum(system) if finite else {})))
        if "error" in self._tools:
            self._measure_errors(block, system if finite else None, totals)

    def _system(self, block: Block, statistic: ExampleRows, m: int, gradients: list[Tensor]) -> System:
        group = block.group
        scale = statistics.gradient_scale(m, group["loss_reduction"], group["loss_terms"])
        rows = kernel.scaled(approximation.in_float64(statistic.finish()), scale**0.5)
        found = kernel.gram(rows)
        mean = found.diagonal(dim1=-2, dim2=-1).mean(-1)
        if self._damping is None:
            damping = statistics.effective_damping(group["damping"], group["damping_mode"], mean)
        else:
            damping = torch.full_like(mean, self._damping)
        return System(rows, found, damping, as_rows_matrix(rows, block.matrix([g.double() for g in gradients])))

    def _measure_errors(self, block: Block, system: System | None, totals: dict[str, Sums]) -> None:
        """One line for each way to keep few rows; without numbers if there is no system of finite ones."""
        reference = None if system is None else approximation.exact(system)
        for mode, keep in self._ways(block):
            if system is None or reference is None:
                self._lines.append(("error", _error_line(block.name, mode, None, None)))
                continue
            rank = selection.planned_rank(system.rows.n, self._rank_fraction, self._max_rank)
            kept = keep(system, rank)
            sums = approximation.compare(kept.update, reference)
            totals[mode] = totals.get(mode, Sums()).plus(sums)
            self._lines.append(("error", _error_line(block.name, mode, rank, sums) | dict([kept.measure])))

    def _ways(self, block: Block) -> Iterator[tuple[str, Callable[[System, int], Kept]]]:
        yield "kid", approximation.interpolated
        for sampling in self._samplings:
            generator = torch.Generator().manual_seed(
                _mixed(self._seed, self._method._t, block.index, selection.SAMPLINGS.index(sampling))
            )

            def keep(system: System, rank: int, how: str = sampling, of: torch.Generator = generator) -> Kept:
                return approximation.sampled(system, rank, how, of)

            yield "kis" if sampling == "systematic" else f"{sampling} KIS", keep

    # ------------------------------------------------------------------ trend
    def _lend_directions(self) -> None:
        """Have the directions of the step kept: in the user's own dict, if there is one."""
        self._lent = None
        if "trend" not in self._tools:
            return
        if self._method._kept_directions is None:
            self._method._kept_directions = self._lent = {}
        self._kept = self._method._kept_directions
        self._stale = dict(self._kept)

    def _take_directions_back(self) -> dict[str, Tensor]:
        """The directions that were kept since, by name of the parameter."""
        if self._lent is not None and self._method._kept_directions is self._lent:
            self._method._kept_directions = None
        found = {name: d for name, d in self._kept.items() if self._stale.get(name) is not d}
        self._lent, self._kept, self._stale = None, {}, {}
        return found

    def _trend(self, step: int, directions: dict[str, Tensor]) -> Iterator[Event]:
        if "trend" not in self._tools:
            return
        method = self._method
        mode = method.diagnostics().get("mode", type(method).__name__.lower())
        epoch = None if self._epoch_steps is None else step // self._epoch_steps
        for block, norm in self._norms.items():
            before = self._last_norms.get(block.name)
            kept = [directions[name] for p in block.params if (name := method._names[p]) in directions]
            self._last_norms[block.name] = norm
            yield {
                "epoch": epoch,
                "layer": block.name,
                "grad_norm": norm,
                "update_norm": _norm(kept) if len(kept) == len(block.params) else None,
                "rel_change": (norm - before) / before if before else None,
                "mode": mode,
            }

    # ------------------------------------------------------------------ profile
    def _profile(self, step: int) -> Event:
        times, peak, wire = self._clock.take(), self._peak(), self._wire_bytes()
        return {
            "rank": self._process.rank,
            "world": self._process.world,
            **{column: sum(times.get(name, 0.0) for name in names) for column, names in STAGES.items()},
            "wire_bytes": wire - self._before[1],
            "state_bytes": self._method.memory_usage()["total"],
            "peak_bytes": peak - self._before[0] if self._device.type == "cuda" else None,
        }

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _wire_bytes(self) -> int:
        """Bytes that the strategy has sent so far; one of a single process sends none."""
        return int(getattr(self._method.comm, "wire_bytes", 0))


def _require_layers(optimizer: object) -> None:
    if not isinstance(optimizer, Reporting) or not hasattr(optimizer, "blocks"):
        raise TypeError(
            f"Analysis looks at the layers of a layer method such as KFAC, EKFAC or HyLo, got {type(optimizer).__name__}"
        )


def _several(name: str, given: str | Sequence[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """One or several of some strings, each once."""
    values = (given,) if isinstance(given, str) else tuple(given)
    for value in values:
        options.choice(*allowed)(name, value)
    return tuple(dict.fromkeys(values))


def _spectrum(system: System) -> Event:
    try:
        return approximation.spectrum(system.kernel, system.damping)
    except LinAlgError:  # it did not converge; an observer must not end a training
        return {}


def _error_line(layer: str, mode: str, r: int | None, sums: Sums | None) -> Event:
    measures = {"rel_error": None, "cos": None} if sums is None else sums.measures()
    return {"layer": layer, "mode": mode, "r": r, **measures, "kid_energy": None, "kis_ess": None}


def _dense(grad: Tensor) -> Tensor:
    return grad.detach() if grad.layout == torch.strided else grad.detach().to_dense()


def _norm(tensors: Sequence[Tensor]) -> float:
    """Frobenius norm of several tensors together."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % (1 << 62)
    return mixed
