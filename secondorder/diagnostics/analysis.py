"""Analysis of a training run: rank of the curvature, trend of the gradient, error of few rows, and times of a step.

::

    forward, backward   separate hooks collect rows of examples               on steps that are due, for rank and error
    before the step     rank and error are measured from rows and gradient    (with a closure: after it has run)
    the step            is timed, and its directions are kept
    after the step      one line per event is appended to its file, and the taps are set for the next step

Nothing here changes a parameter, a gradient, a state or a random number generator.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.capture.statistics.examples import ExampleRows
from secondorder.curvature.block import Block
from secondorder.diagnostics.fewrows import SPECTRUM, FewRows, Line, Look
from secondorder.diagnostics.jsonl import EventFile, read_events
from secondorder.diagnostics.profiling import STAGES, Profile
from secondorder.diagnostics.rowtaps import RowCapture
from secondorder.diagnostics.trend import Trend
from secondorder.linalg import selection
from secondorder.preconditioners.layers import LayerPreconditioner

if TYPE_CHECKING:
    from secondorder.optimizer import SecondOrderOptimizer

SelfT = TypeVar("SelfT", bound="Analysis")

#: The columns of the file of each tool.
COLUMNS: dict[str, tuple[str, ...]] = {
    "rank": ("step", "layer", "m", "d_i", "d_o", *SPECTRUM, "process"),
    "trend": ("step", "epoch", "layer", "grad_norm", "update_norm", "rel_change", "mode", "process"),
    "error": ("step", "layer", "mode", "r", "rel_error", "cos", "kid_energy", "kis_ess", "process"),
    "profile": ("step", "rank", "world", *STAGES, "wire_bytes", "state_bytes", "peak_bytes", "process"),
}


class _Process(NamedTuple):
    rank: int
    world: int


class Analysis:
    """Observes the training of a layer method (K-FAC, EK-FAC, HyLo) and writes measurements to a folder.

    It only observes: with or without it, the parameters and the state of the optimizer are bit-for-bit the same. Files
    are only appended to, so another analysis may continue in the same folder, for example after a resume.

    ``rank.jsonl``
        For each layer, from the eigenvalues σ of the kernel of its m examples: ``rank90``, the number of largest
        eigenvalues that add up to nine tenths of the sum; ``eff_rank``, exp of the entropy; ``sigma_max``;
        ``sigma_sum``; and ``damping_over_sigma1``, λ divided by the largest. Groups of a convolution are combined.
    ``trend.jsonl``
        For each layer: ``grad_norm`` of the gradient that the optimizer gets; ``update_norm`` of the direction after
        clipping and grafting; ``rel_change`` of ``grad_norm`` since the last event; and the ``mode`` of the method (its
        name, if it has only one mode).
    ``error.jsonl``
        For each layer, and for all layers together as ``layer`` ``"all"``: the difference between the update from ``r``
        rows and the exact update from all rows, with the same λ and gradient, as the ratio ``rel_error`` and the
        cosine ``cos``. ``mode`` is ``"kid"``, ``"kis"``, or, for example, ``"uniform KIS"`` for another sampling.
        ``kid_energy`` is the share of the kernel's trace that the chosen rows explain, and ``kis_ess`` is their
        effective sample size.
    ``profile.jsonl``
        For each step: milliseconds of the stages, where ``refresh_ms`` includes the stages inside it; bytes sent; bytes
        held by the optimizer; and bytes by which the step has raised the peak memory of a CUDA device.

    ``step`` counts from 0, and ``process`` is the index of the process. A value that is not defined or not finite is
    null. Rank and error hold the rows of all examples during the measured steps, and compute in float64.

    Args:
        optimizer: The optimizer, which must have its module.
        out_dir: Folder for the files; it is created if it does not exist.
        tools: The files to write.
        every: Number of steps between measurements. The first step is measured too.
        rank_fraction: ρ, the number of kept rows per example, for the error.
        max_rank: Largest number of rows to keep.
        damping: λ for rank and error. If None, it is the optimizer's λ of each layer. A relative λ is computed only
            from this batch, as a multiple of the mean eigenvalue of the kernel for HyLo, and of the Fisher for the
            other methods.
        epoch_steps: Number of steps of an epoch, for the column ``epoch``. If None, the column is null.
        approx: ``"reduce"`` uses one row per example, and ``"expand"`` uses the rows of all positions, which is exact.
        kis_sampling: One or several ways to draw rows for the error: ``"systematic"``, ``"replacement"``,
            ``"unweighted"``, ``"uniform"``.
        seed: Seed of these draws.

    Attributes:
        refused: The reason why a layer has no rows, by the name of the layer.

    Raises:
        TypeError: If the optimizer is not a layer method, or an option has the wrong type.
        ValueError: If an option is out of range, or the rows of the optimizer are those of an observed Fisher.
        RuntimeError: If the stages of the optimizer are already timed, or it has no module.

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
        optimizer: SecondOrderOptimizer,
        out_dir: str | os.PathLike[str],
        tools: str | Sequence[str] = ("rank", "trend", "error", "profile"),
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
        per_kernel = _layers_of(optimizer).damps_kernel
        self._tools = _several("tools", tools, tuple(COLUMNS))
        samplings = _several("kis_sampling", kis_sampling, selection.SAMPLINGS)
        options.whole(1)("every", every)
        options.number(0.0, 1.0, low_open=True)("rank_fraction", rank_fraction)
        options.whole(1)("max_rank", max_rank)
        options.number(0.0, low_open=True, optional=True)("damping", damping)
        options.optional_whole(1)("epoch_steps", epoch_steps)
        options.choice("reduce", "expand")("approx", approx)
        options.whole(0)("seed", seed)
        self._every, self._approx = every, approx
        self._method: Any = optimizer
        self._few_rows = FewRows(self._tools, rank_fraction, max_rank, damping, per_kernel, samplings, seed)
        self.refused: dict[str, str] = {}
        self._observe(Path(out_dir), epoch_steps)
        self._attach()

    # ------------------------------------------------------------------ life
    def _observe(self, folder: Path, epoch_steps: int | None) -> None:
        """Create the observers and open the files, to which new events are appended."""
        comm = self._method.comm  # a strategy of one process has no rank and no world
        self._process = _Process(getattr(comm, "rank", 0), getattr(comm, "world", 1))
        self._profile = Profile(self._method, self._device, *self._process) if "profile" in self._tools else None
        folder.mkdir(parents=True, exist_ok=True)
        paths = {tool: folder / f"{tool}.jsonl" for tool in self._tools}
        #: Whether there are events already. Without any, the next step is measured.
        self._begun = any(path.exists() and path.stat().st_size > 0 for path in paths.values())
        last = _last_norms(paths["trend"], self._process.rank) if "trend" in paths else {}
        self._trend = Trend(self._method, epoch_steps, last) if "trend" in paths else None
        self._files = {tool: EventFile(path, COLUMNS[tool]) for tool, path in paths.items()}

    def _attach(self) -> None:
        self._closed = False
        self._capture: RowCapture | None = None
        self._followed: tuple[object, ...] = ()
        #: The step that is measured now; None outside of a step.
        self._step: int | None = None
        self._lines: list[Line] = []
        if self._profile is not None:
            self._profile.attach()
        self._handles = [
            self._method.register_step_pre_hook(self._before_step),
            self._method.register_step_post_hook(self._after_step),
        ]
        self._follow()

    def close(self) -> None:
        """Remove all hooks and close the files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if self._profile is not None:
            self._profile.close()
        if self._trend is not None:
            self._trend.end()
        if self._capture is not None:
            self._capture.capture.close()
            self._capture = None
        for file in self._files.values():
            file.close()

    def __enter__(self: SelfT) -> SelfT:
        """Return the analysis. Leaving the block closes it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the analysis."""
        self.close()

    @property
    def events(self) -> dict[str, int]:
        """Number of events written so far, by tool."""
        return {tool: file.count for tool, file in self._files.items()}

    # ------------------------------------------------------------------ which steps
    @property
    def _blocks(self) -> list[Block]:
        return list(self._method.blocks.values())

    @property
    def _device(self) -> torch.device:
        return next((b.owner.device for b in self._blocks), torch.device("cpu"))

    def _is_due(self) -> bool:
        return not self._begun or self._method.steps % self._every == 0

    def _follow(self) -> None:
        """Prepare the measurements of the next step. Called before each forward pass and after each step."""
        if self._step is not None or self._closed or self._method.module is None:
            return
        due = self._is_due()
        if self._profile is not None:
            self._profile.run(due)
        if {"rank", "error"} & set(self._tools):
            self._tap(due)

    def _tap(self, due: bool) -> None:
        method, blocks = self._method, self._blocks
        if self._capture is None or self._capture.root is not method.module:
            self._capture = self._new_capture(method.module)
        self._capture.follow(method.capture)
        wanted = method.steps, due, *blocks
        if wanted == self._followed:
            return
        if list(self._followed[2:]) != blocks:
            self._capture.watch(blocks)
        self._followed = wanted
        self._capture.capture.arm(range(len(blocks)) if due else ())

    def _new_capture(self, root: nn.Module) -> RowCapture:
        if self._capture is not None:
            self._capture.capture.close()
        self._followed = ()
        return RowCapture(root, self._approx, self._method.capture, weakref.WeakMethod(self._follow))

    # ------------------------------------------------------------------ around a step
    def _before_step(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure the gradient, or wrap the closure that computes it so that it is measured afterwards."""
        if not self._is_due():
            return None
        self._step, self._lines = self._method.steps, []
        if self._trend is not None:
            self._trend.begin()
        if self._profile is not None:
            self._profile.begin()
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._watched(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._watched(kwargs["closure"])}
        self._look()
        return None

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure to measure after its first evaluation, since later evaluations are at other parameters."""
        seen = False

        def evaluate() -> Any:
            nonlocal seen
            returned = closure()
            if not seen:
                seen = True
                self._look()
            return returned

        return evaluate

    @torch.no_grad()
    def _look(self) -> None:
        """Measure rows and gradients before the parameters change."""
        owned = {b: [p.grad.detach() for p in b.params if p.grad is not None] for b in self._blocks}
        gradients = {b: [g if g.layout == torch.strided else g.to_dense() for g in own] for b, own in owned.items()}
        if self._trend is not None:
            self._trend.look(gradients)
        if self._capture is not None and self._step is not None:
            self._lines += self._few_rows.lines(self._looks(self._capture, gradients), self._step)

    def _looks(self, rows: RowCapture, gradients: dict[Block, list[Tensor]]) -> Iterator[Look]:
        """Yield the layers with complete rows and gradients, and release the rows that were used."""
        self._method.loss_scale.infer(self._method.capture.statistics, self._method.comm.averages)
        capture = rows.capture
        capture.leave_out_replaced()
        taken = capture.take()
        statistics = capture.statistics
        capture.arm(())  # a step may evaluate the model again at other parameters
        self._followed = (None, None, *self._followed[2:])
        self.refused.update({statistics.sites[i].name: reason for i, reason in statistics.refused.items()})
        for index in sorted(taken.statistics):
            block, statistic = rows.blocks[index], cast("ExampleRows", taken.statistics.pop(index))
            found = gradients.get(block, [])  # empty if the plan has changed since
            if statistic.nbytes and len(found) == len(block.params):
                yield Look(block, statistic.finish(), taken.examples[index], found)

    def _after_step(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the measurements, and set the taps for the next step."""
        step, self._step = self._step, None
        if step is not None and self._method.steps > step:  # a step without gradients does not count
            self._begun = True
            if self._trend is not None:
                reported = self._method.diagnostics()
                mode = reported.get("mode", type(self._method).__name__.lower())
                events = self._trend.events(step, mode, reported.get("mode_by_layer", {}))
                self._lines += [("trend", event) for event in events]
            if self._profile is not None:
                self._lines.append(("profile", self._profile.event()))
            for tool, event in self._lines:
                self._files[tool].write(event | {"step": step, "process": self._process.rank})
        elif self._trend is not None:
            self._trend.end()
        self._lines = []
        self._follow()


def _layers_of(optimizer: Any) -> LayerPreconditioner[Any]:
    """Return the preconditioner if it has layers, whose rows, if it uses rows, are gradients of the loss."""
    curvature = getattr(optimizer, "preconditioner", None)
    if not isinstance(curvature, LayerPreconditioner):
        found = type(optimizer).__name__
        raise TypeError(f"Analysis needs an optimizer with layers, such as KFAC, EKFAC or HyLo, got {found}")
    if optimizer.capture.observes and curvature.damps_kernel:
        raise ValueError(
            "the rows of an analysis are gradients of the loss, but those of the optimizer are for "
            f"fisher={optimizer.fisher!r}"
        )
    return curvature


def _several(name: str, given: str | Sequence[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Check one or several of some strings, and return each once."""
    values = (given,) if isinstance(given, str) else tuple(given)
    for value in values:
        options.choice(*allowed)(name, value)
    return tuple(dict.fromkeys(values))


def _last_norms(path: Path, process: int) -> dict[str, float]:
    """Read the norm of the gradient by layer from the last events of a process."""
    own = [e for e in read_events(path) if e.get("process") == process] if path.exists() else []
    return {e["layer"]: e["grad_norm"] for e in own if e.get("grad_norm") is not None}
