"""Methods with rows of examples: which of them a layer keeps, where they stand, and how often they are renewed.

Unlike factors, rows have sizes that only the first batch tells: R rows of S positions each. State is allocated then,
or at construction where the number of examples of a step is given.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from secondorder.capture.fisher.fisher import Observing
from secondorder.capture.layers.embedding import EmbeddingAdapter
from secondorder.capture.sites import Captured, Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.examples import ExampleRows, keeps_indices
from secondorder.capture.statistics.measurement import Measured
from secondorder.comm import Unit
from secondorder.curvature.block import Block
from secondorder.curvature.schema import COUNTER, Entry, Place, Schema, shaped
from secondorder.linalg import kernel, woodbury
from secondorder.linalg.dense import all_true_on_cpu, precision_of
from secondorder.linalg.kernel import Rows, scaled
from secondorder.preconditioners.base import Directions, Group
from secondorder.preconditioners.blocks import Setting

#: Kernels of more rows are kept in the precision of the rows: in float64 they would outgrow everything else.
DOUBLE_ROWS = 4096
#: Examples that costs of layers are compared for, where nobody said how many there are.
_EXAMPLES = 32


class Raw(NamedTuple):
    """Rows of a block as captured on this rank.

    Attributes:
        rows: Neither scaled nor divided by anything.
        real: Rows that are not padding.
        finite: Whether all numbers are, a 0-dim bool tensor; None where it was not asked.
    """

    rows: Rows
    real: float | Tensor
    finite: Tensor | None = None


class Fresh(NamedTuple):
    """What a step captured for a block.

    Attributes:
        rows: Rows of all examples of this rank, scaled per datum: the Fisher's block is ``Σ_n u_n u_nᵀ`` over those of
            all ranks.
        examples: n, of this rank.
        real: Rows that are not padding.
        ok: Whether they may be used, a 0-dim bool tensor.
        share: n as a part of the examples of all ranks.
        damping: λ ``[(Γ)]``, where it follows from the examples of several ranks.
    """

    rows: Rows
    examples: int
    real: float | Tensor
    ok: Tensor
    share: float = 1.0
    damping: Tensor | None = None


class Batch(NamedTuple):
    """What a refresh has seen of a block, on the rank with the most of it.

    Attributes:
        examples: n.
        rows: Rows: not every example need pass a layer.
        positions: S.
        whole: Whether they were per-example gradients where they may be pairs of rows.
    """

    examples: int
    rows: int
    positions: int
    whole: bool


class Kept(NamedTuple):
    """Rows that a refresh keeps of a block, and what makes their M.

    Attributes:
        rows: Rows ``[(Γ,) R, S, …]``.
        damping: λ ``[(Γ)]``.
        core: S of the interpolation ``[(Γ,) R, R]``, or None.
    """

    rows: Rows
    damping: Tensor
    core: Tensor | None = None


class Sizes(NamedTuple):
    """Sizes of the kept rows.

    Attributes:
        rows: R.
        positions: S.
        d_a: Numbers in a row a with its 1, 0 where there is none.
        d_g: Numbers in a row g.
        by_index: Whether rows a are indices.
    """

    rows: int
    positions: int
    d_a: int
    d_g: int
    by_index: bool = False


class RowOptimizer(Observing):
    """Base of the methods that keep rows of examples instead of factors."""

    capture_interval = refresh_interval = "update_steps"
    damps_kernel = True
    #: λ is known to every rank that has the rows, as is whether they were interpolated.
    catalog: ClassVar[Schema] = {
        "rows_a": Entry(0, "rows", Place.CURVATURE),
        "rows_g": Entry(0, "rows", Place.CURVATURE),
        "kernel": Entry(0, "kernel", Place.CURVATURE),
        "kernel_damping": Entry(0, "kernel", Place.CURVATURE, known=True),
        "interpolated": Entry(0, "buffers", Place.CURVATURE, known=True),
        "factor_updates": COUNTER,
        "refreshes": COUNTER,
    }
    #: Examples of a step, if they were told at construction.
    _batch_size: int | None = None

    def __init__(self, setting: Setting, batch_size: int | None) -> None:
        super().__init__(setting)
        self._batch_size = batch_size
        self._fresh: dict[Block, Fresh] = {}
        self._gradients_now: Directions = {}
        #: What the last refresh has seen, by block: a plan supposes as much.
        self._last_batch: dict[str, Batch] = {}

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def rank_of(self, group: Mapping[str, Any], examples: int, ranks: int = 1) -> int:
        """r, the rows to keep of so many examples on each of some ranks."""

    # ------------------------------------------------------------------ state
    def schema(self, block: Block, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Rows, their kernel and counters; of the sizes that are held, where there are rows."""
        return self.sized_schema(block, self._sizes(block, group, held))

    def sums(self, block: Block) -> Schema:
        """Nothing: rows stay what they are."""
        return {}

    def lead_of(self, block: Block) -> tuple[int, ...]:
        """Leading shape of the tensors of a block: Γ where it has groups."""
        return () if block.adapter.is_exact or block.adapter.groups == 1 else (block.adapter.groups,)

    def sized_schema(self, block: Block, sizes: Sizes) -> Schema:
        """The same for rows of given sizes."""
        lead, r, single = self.lead_of(block), sizes.rows, precision_of(block.owner)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((*lead, *shape), dtype=dtype, device="meta")

        if sizes.by_index:
            rows_a = empty(r, sizes.positions, dtype=torch.int64)
        else:
            rows_a = empty(r, sizes.positions, sizes.d_a, dtype=single)
        likes: dict[str, Tensor | int] = {
            "rows_a": rows_a,
            "rows_g": empty(r, sizes.positions, sizes.d_g, dtype=single),
            "kernel": empty(r, r, dtype=torch.float64 if r <= DOUBLE_ROWS else single),
            "kernel_damping": empty(dtype=torch.float64),
            "interpolated": torch.empty((), dtype=torch.int64, device="meta"),
            "factor_updates": 0,
            "refreshes": 0,
        }
        found = shaped(self.catalog, likes, ["kernel"])
        rows = {key: found[key]._replace(known=self.comm.replicates) for key in ("rows_a", "rows_g")}
        return found | rows

    def _sizes(self, block: Block, group: Mapping[str, Any], held: Mapping[str, Any]) -> Sizes:
        adapter, a, g = block.adapter, held.get("rows_a"), held.get("rows_g")
        d_a = 0 if adapter.constant_input else adapter.n_a
        d_g = adapter.n_g * adapter.groups if adapter.is_exact else adapter.n_g
        if not (isinstance(a, Tensor) and isinstance(g, Tensor) and g.dim() >= 3):
            rows = self.planned_rows(block, group, self._batch_size) if self._batch_size else 0
            return Sizes(rows, 1, d_a, d_g, keeps_indices(adapter, group["approx"]))
        # As held, if that is something this block can have: a checkpoint may be of another model.
        by_index = isinstance(adapter, EmbeddingAdapter) and not a.is_floating_point()
        whole = not by_index and a.shape[-1] == 0
        d_g = adapter.n_g * adapter.n_a if whole and not adapter.is_exact else d_g
        return Sizes(g.shape[-3], g.shape[-2], 0 if whole else d_a, d_g, by_index)

    def planned_rows(self, block: Block, group: Mapping[str, Any], examples: int) -> int:
        """R, the rows of a block if every rank has so many examples."""
        ranks = self.comm.sources(block.index)
        return ranks * self.rank_of(group, examples, ranks)

    def _unit(self, block: Block) -> Unit:
        """What a strategy needs to know of a block; the sizes of rows, which change, are not compared."""
        adapter, group = block.adapter, block.group
        blocks, wide = (1, adapter.groups * adapter.n_g) if adapter.is_exact else (adapter.groups, adapter.n_g)
        r, batch = self.rank_of(group, self._batch_size or _EXAMPLES), self._batch_size or "of any size"
        return (
            super()
            ._unit(block)
            ._replace(
                signature=f"{blocks}×{wide}×{adapter.n_a} {block.layer.kind} {block.layer.precision}, batch {batch}",
                refresh_flops=float(blocks * (r**3 + r * r * (adapter.n_a + wide))),
                step_flops=4.0 * blocks * r * adapter.n_a * wide,
                nbytes=blocks * r * (precision_of(block.owner).itemsize * (adapter.n_a + wide) + 8 * r),
            )
        )

    def kept_rows(self, block: Block) -> Rows:
        """The rows that precondition a block."""
        state = self.state[block.owner]
        a, g = state["rows_a"], state["rows_g"]
        if not a.is_floating_point():
            return Rows(a, g, columns=block.adapter.d_in)
        return Rows(a if a.shape[-1] else None, g)

    def keep_rows(
        self, block: Block, rows: Rows, inverse: Tensor, damping: Tensor, interpolated: bool, good: Tensor
    ) -> None:
        """Take rows and their kernel over, all together, if they are good."""
        state = self.state[block.owner]
        found = {
            "rows_a": inputs_of(rows),
            "rows_g": rows.g,
            "kernel": inverse.to(torch.float64 if rows.n <= DOUBLE_ROWS else rows.g.dtype),
            "kernel_damping": damping,
            "interpolated": torch.full((), int(interpolated), device=rows.g.device),
        }
        same = all(state[key].shape == new.shape and state[key].dtype == new.dtype for key, new in found.items())
        if good.device.type == "cpu" or not same:  # the host looked, see _changes_layout
            if all_true_on_cpu(good.cpu()):
                state.update({key: _owned(new) for key, new in found.items()})
            return
        for key, new in found.items():
            state[key].copy_(torch.where(good, new, state[key]))

    def _changes_layout(self, block: Block) -> bool:
        """Whether the rows of this step are of other sizes than those that are kept."""
        fresh, held = self._fresh[block], self.state[block.owner].get("rows_g")
        if held is None:
            return False
        rows = self.rank_of(block.group, self._batch_size or fresh.examples)
        return (rows, *fresh.rows.g.shape[-2:]) != tuple(held.shape[-3:])

    # ------------------------------------------------------------------ stages 1 to 3: rows
    def _take(self) -> Captured:
        self._forget_step()
        return super()._take()

    def _forget_step(self) -> None:
        """Drop what was captured for a step."""
        self._fresh.clear()

    def new_statistic(self, block: Block, group: Group) -> Statistic:
        """Nothing but what the backward pass will bring."""
        return ExampleRows(block.adapter, group["approx"], precision_of(block.owner), conv_scale=group["conv_scale"])

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        self._gradients_now = gradients
        super().learn(statistics, gradients, gate)

    def measure(self, block: Block, statistic: Statistic, examples: int) -> Measured:
        """Rows are not summed: they stay what they are."""
        pending = cast(ExampleRows, statistic)
        if not pending.nbytes:
            return Measured({}, examples)
        rows = pending.finish()
        return Measured({}, examples, Raw(rows, pending.real, all_finite(rows) if self.comm.combines else None))

    def _is_finite(self, measured: Measured) -> Tensor:
        return torch.tensor(True) if measured.rest is None else cast(Raw, measured.rest).finite  # type: ignore[return-value]

    def fold(self, block: Block, measured: Measured, gate: Tensor | None) -> Tensor:
        """Scale rows per datum, and hold them for the refresh of this step."""
        if measured.rest is None:
            return torch.ones((), dtype=torch.bool, device=block.owner.device)
        raw, examples = cast(Raw, measured.rest), measured.examples
        rows = scaled(raw.rows, self.gradient_scale(block, examples) ** 0.5)
        finite = all_finite(rows)
        if finite.device.type != "cpu" or finite.numpy():
            ok = finite if gate is None else finite & gate
            self._fresh[block] = Fresh(rows, examples, raw.real, ok)
        return finite

    def gradient_scale(self, block: Block, examples: int) -> Any:
        """Factor of ``‖u‖²`` from captured rows of so many examples to rows scaled per datum; on a device a tensor."""
        group = block.group
        if self._fisher.is_observed:  # rows are of unit scale
            terms = self._runtime.observed_terms.clamp(min=1)
            return 1.0 / (examples if group["loss_reduction"] == "sum" else terms if terms.is_cuda else float(terms))
        return averages.gradient_scale(examples, group["loss_reduction"], group["loss_terms"])

    def _has_estimate(self, block: Block) -> bool:
        return bool(self.state[block.owner]["refreshes"] > 0)

    # ------------------------------------------------------------------ stage 4: refresh
    def _refresh_is_due(self, block: Block) -> bool:
        return block in self._fresh

    def _capture_is_due(self, block: Block) -> bool:
        steps: int = block.group["update_steps"]
        return self._layer_options.schedule.captures(self._t, steps, steps, self.state[block.owner].get("refreshes", 0))

    def _with_estimates(self, due: list[Block]) -> tuple[list[Block], bool]:
        on_host = all(b.owner.device.type == "cpu" for b in due)
        first = any(self.state[b.owner]["refreshes"] == 0 for b in due)
        failing = any(b.name in self.refresher.failures for b in due)
        return due, on_host or first or failing or any(self._changes_layout(b) for b in due)

    def damping_of(self, block: Block, trace: Tensor, rows: int) -> Tensor:
        """λ of a block ``[(Γ)]``, float64, from the trace of its kernel over so many rows."""
        mean = trace.double() / max(rows, 1)
        return averages.effective_damping(block.group["damping"], block.group["damping_mode"], mean)

    def end_step(self) -> None:
        """Prepare for the coming step."""
        self._forget_step()
        self._gradients_now = {}
        super().end_step()

    # ------------------------------------------------------------------ what it tells
    def pending_bytes(self) -> int:
        return super().pending_bytes() + sum(fresh.rows.nbytes for fresh in self._fresh.values())


def all_finite(rows: Rows) -> Tensor:
    """Whether all numbers of some rows are finite, a 0-dim bool tensor."""
    return averages.all_finite([t for t in (rows.a, rows.g) if t is not None and t.is_floating_point()])


def inputs_of(rows: Rows) -> Tensor:
    """Inputs as state keeps them: with their 1, so that a bias that is frozen or trained later shows in the shape."""
    if rows.a is None:
        return rows.g.new_zeros(*rows.g.shape[:-1], 0)
    return F.pad(rows.a, (0, 1), value=1.0) if rows.homogeneous else rows.a


def filled(kept: Kept, rows: int) -> Kept:
    """Zero rows up to a fixed number of them, which change nothing."""
    missing = rows - kept.rows.g.shape[-3]
    if missing <= 0:
        return kept
    core = kept.core
    if core is not None:
        core = woodbury.block_diagonal(
            [core, torch.eye(missing, dtype=core.dtype, device=core.device).expand(*core.shape[:-2], -1, -1)]
        )
    return Kept(kernel.padded(kept.rows, rows), kept.damping, core)


def _owned(x: Tensor) -> Tensor:
    """``x`` itself, or a copy if it is a part of something larger."""
    return x if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes else x.clone()
