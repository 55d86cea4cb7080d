"""Layer methods: the stages of a step over the blocks of a module."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options, update
from secondorder.capture.backwards import REPLACED
from secondorder.capture.capture import Capture
from secondorder.capture.coverage import NO_HOOKS, REPEATED, advice, kind_of, verdict
from secondorder.capture.layers.projections import Projection
from secondorder.capture.loss_scale import UNKNOWN
from secondorder.capture.sites import Captured
from secondorder.capture.statistics.measurement import Measured
from secondorder.comm import CommStrategy, Parcel
from secondorder.comm.layout import local
from secondorder.curvature.block import Block
from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.extremes import Extremes, numbers
from secondorder.curvature.layer import LayerOptions, find_name
from secondorder.frames import depth_of_caller
from secondorder.lifecycle import Directions, Group, module_of, some_of
from secondorder.linalg.dense import all_true_on_cpu, full_precision
from secondorder.optimizer import SecondOrderOptimizer, rate
from secondorder.parallel.roles import Serving
from secondorder.parallel.shards import zeros_like_shard
from secondorder.preconditioners.base import Preconditioner, Proposal

#: Bytes of directions that are sent together: what the ranks of a row compute between two messages.
_PORTION = 32 * 2**20


#: Refreshes of every block before λ is compared with the curvature.
_REFRESHES_BEFORE_WATCH = 3


class LayerOptimizer(Serving, SecondOrderOptimizer):
    """Base of the methods that capture statistics per layer.

    The verbs of a method: :meth:`schema` (state of a block), :meth:`new_statistic`, :meth:`measure`, :meth:`sums`,
    :meth:`fold`, :meth:`refresh`, :meth:`precondition`, :meth:`block_curvature`.

    Args:
        params: What ``torch.optim`` takes, or a module, or a list of modules that are the parts of one model.
        defaults: Group options.
        module: Module, or list of modules, to hook when ``params`` is not one.
        comm: Communication strategy; None: ``CommOpt()`` in a process group of more than one rank.
        layer_options: What is chosen for all layers.
        grad_scaler: Loss scaler of float16 training.

    Raises:
        ValueError: Without a module, or for a bad option.
        RuntimeError: If the ranks of a process group do not all construct it; ``ValueError`` on all if they differ.
    """

    _sizes_are = "factors A, G"
    #: Whether relative damping is that of the kernel of the examples, instead of the Fisher's of the parameters.
    damps_kernel: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        defaults: dict[str, Any],
        *,
        module: nn.Module | Sequence[nn.Module] | None,
        comm: CommStrategy | None,
        layer_options: LayerOptions,
        grad_scaler: Any,
    ) -> None:
        root, given = _module_to_hook(type(self).__name__, params, module)
        self._begin_life(comm)
        self._begin_capture(layer_options)
        super().__init__(given, defaults, module=root, grad_scaler=grad_scaler)

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def fold(self, block: Block, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold what was measured into the running estimate; returns whether it was finite (0-dim bool)."""

    @abstractmethod
    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """Apply the inverse curvature of a block to a gradient matrix ``[(Γ,) n_g, n_a]``."""

    @abstractmethod
    def block_curvature(self, block: Block) -> Tensor:
        """The undamped curvature of a block as a dense matrix."""

    # ------------------------------------------------------------------ stages 1 to 3: statistics
    @property
    def preconditioner(self) -> Preconditioner:
        """The optimizer itself."""
        return self

    @property
    def capture(self) -> Capture:
        """What captures the statistics of the blocks.

        Raises:
            RuntimeError: If the optimizer was closed, or is a copy without a module.
        """
        if self._capture is None:
            if self._closed:
                raise RuntimeError(f"this {type(self).__name__} was closed; call attach(module) to train on")
            raise RuntimeError(self._is_a_copy())
        return self._capture

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self._runtime.stage(name)

    def _prepare(self) -> None:
        _ = self.capture  # which raises without a module
        self._runtime.renew(self.state, self.param_groups)

    def collect(self) -> Captured:
        """Take what was captured since the last step, combined over the ranks."""
        return self._reduce(self._take())

    def drop(self) -> None:
        """Leave out a batch: its statistics have been taken."""

    def discard(self) -> None:
        """Forget what was captured since the last step."""
        if self._capture is not None:
            self._capture.discard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and with them the statistics captured since the last step.

        Between ``observe`` and the backward of the same forward there are no gradients of it yet: what was observed
        stays.
        """
        super().zero_grad(set_to_none)
        if self._capture is not None and self._capture.awaits_backward:
            self._capture.spare()
        elif self._capture is not None:
            self._capture.give_up()

    def check_gradients(self) -> None:
        """Leave out what was captured of a backward whose gradients others have replaced."""
        capture = self._capture
        if capture is not None and capture.leave_out_replaced() and REPLACED not in self._warned:
            self._warned.add(REPLACED)
            warnings.warn(f"{type(self).__name__}: {REPLACED}", stacklevel=depth_of_caller())

    def _take(self) -> Captured:
        capture = self.capture
        self.loss_scale.infer(capture, self.comm.averages)
        taken = capture.take()
        self._warn_of_doubts(capture)
        return taken

    def _update_estimates(self, captured: Captured, gate: Tensor | None) -> None:
        for index, measured in cast("dict[int, Measured]", captured.statistics).items():
            block = self._blocks[index]
            if measured.parts or not self.comm.combines:
                finite = self.fold(block, measured, gate)
                on_cpu = finite.device.type == "cpu"
                dropped = not all_true_on_cpu(finite) if on_cpu else (~finite).to(torch.int64)
                if dropped is not False:
                    self._skipped_statistics[block.name] = self._skipped_statistics.get(block.name, 0) + dropped
                if dropped is True and not self.comm.combines:
                    continue
            self.count_update(block, measured)

    def count_update(self, block: Block, measured: Measured) -> None:
        """Count a statistic that was folded in, on whatever rank."""
        self.state[block.owner]["factor_updates"] += 1
        self._learned_at[block.name] = self._t

    def _warn_of_doubts(self, capture: Capture) -> None:
        """Say once that the number of examples of a forward pass is a guess."""
        doubts, key = sorted(capture.doubts), "number of examples"
        capture.doubts.clear()
        if not doubts or key in self._warned:
            return
        self._warned.add(key)
        warnings.warn(
            f"{type(self).__name__}: it is not certain how many examples a forward pass of {doubts[0]}. The scale of "
            "the curvature depends on that number. Name the argument of forward that counts the examples with "
            "batch_input=, or pass a function of its arguments that returns their number. If the script calls parts "
            "of the model instead of its forward, call them from one forward.",
            stacklevel=depth_of_caller(),
        )

    def _warn_uncaptured(self, captured: Captured, gradients: Directions) -> None:
        """Say once, by name, which layers have a gradient but nothing captured though it was due."""
        assert self._capture is not None
        if self._capture.was_paused:
            self._capture.was_paused = False
            return
        due = self._capture.due | set(self._capture.refused)
        wanted = [self._blocks[i] for i in due if self._blocks[i].owner in gradients]
        blocks = [b for b in wanted if b.index not in captured.statistics and b.index not in captured.idle]
        if not blocks or self._is_repeated(captured):
            return
        missed, names = dict[str, str](), set[str]()
        for block in blocks:
            reason = self._capture.refused.setdefault(block.index, self._why_missing(block))  # describe() says so too
            own = {block.name, reason, f"{kind_of(block.name)}: {kind_of(reason)}"}
            if not own & self._warned:
                missed[block.label] = reason
                names.add(block.name)
        if not missed:
            return
        self._warned |= names | ({UNKNOWN} & set(missed.values()))  # that holds for every layer, also if due later
        # Other experts of a mixture have other shapes in every batch: once for all of them.
        self._warned |= {f"{kind_of(name)}: {kind_of(why)}" for name, why in missed.items() if kind_of(why) != why}
        todo = advice(missed, bool(captured.statistics or captured.idle), self._layer_options.batch_dim)
        text = verdict(missed, len(wanted))
        warnings.warn(f"{type(self).__name__}: {text}{todo}", stacklevel=depth_of_caller())

    def _is_repeated(self, captured: Captured) -> bool:
        """Whether this step has the gradients of the last one, which is said once."""
        before, version = self._last_gradient
        gradient = None if before is None else before()
        held = (block.owner.grad for block in self._blocks)
        if (
            captured.statistics
            or gradient is None
            or gradient._version != version
            or all(g is not gradient for g in held)
        ):
            return False
        if REPEATED not in self._warned:
            self._warned.add(REPEATED)
            warnings.warn(f"{type(self).__name__}: {REPEATED}", stacklevel=depth_of_caller())
        return True

    def _why_missing(self, block: Block) -> str:
        assert self._capture is not None
        if self._capture.observes:
            return "observe() was not called for it"
        if isinstance(block.layer.taps[0].module, Projection):
            return f"{NO_HOOKS}; in a compiled model call secondorder.nn.expose(model) first"
        return NO_HOOKS

    def _advance(self) -> None:
        super()._advance()
        gradient = next((b.owner.grad for b in self._blocks if b.owner.grad is not None), None)
        self._last_gradient = (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)
        self._arm()

    def _is_on(self, p: nn.Parameter, group: Group) -> bool:
        return bool(group[self.refresh_interval])

    # ------------------------------------------------------------------ stages 5 and 6: directions
    def _active(self, block: Block, gradients: Directions) -> bool:
        """Whether a block preconditions in this step."""
        return self._is_ready(block) and all(p in gradients for p in block.params)

    def _is_ready(self, block: Block) -> bool:
        return bool(block.group[self.refresh_interval] > 0 and self._is_refreshed(block))

    def propose(self, gradients: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions of the parameters of active blocks."""
        ready = [b for b in self._blocks if self._is_ready(b)]
        active = [b for b in ready if all(p in gradients for p in b.params)]
        if not ready:
            return Proposal({}, {}, [])
        source = self._sources(active, gradients, gate)
        with full_precision(ready[0].owner.device):
            found = self._cut_directions(ready, source) if self._is_cut else self._whole_directions(ready, source)
        directions = {p: found[p] for b in active for p in b.params}
        if not active:
            return Proposal({}, {}, [])
        products = self._guard(active, directions, source)
        del source  # as large as the model, where it is no gradient
        self._kl_clip(directions, products)
        return Proposal(directions, gradients, [(b.group["graft"], b.params) for b in active])

    def _whole_directions(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """Directions of all blocks on every rank."""
        found: Directions = {}
        posted = []
        for some in self._portions(blocks):  # those that are done travel while the next ones are computed
            parcels = [Parcel(b.index, self._directions_of(b, source)) for b in some]
            posted.append(self.comm.post_directions(parcels))
            for block, parcel in zip(some, parcels, strict=True):
                found.update(zip(block.params, parcel.tensors, strict=True))
        for pending in posted:
            pending.wait()
        return found

    def _cut_directions(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """This rank's pieces of the directions of all blocks."""
        found: Directions = {}
        for some in self._portions(blocks):
            params = [p for b in some for p in b.params]
            wholes = self._whole_gradients(some, source)
            ours = [b for b in some if self.comm.preconditions(b.index)]
            done = {p: d for b in ours for p, d in zip(b.params, self._directions_of(b, wholes), strict=True)}
            found |= self._table.shards.scatter(params, done, self._ranks_of(some))
        return found

    def _whole_gradients(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """What to precondition of some blocks, whole on the ranks that precondition them."""
        params = [p for b in blocks for p in b.params]
        pieces = {p: source[p] if p in source else zeros_like_shard(p) for p in params}
        return self._table.shards.gather(params, pieces, self._ranks_of(blocks))

    def _ranks_of(self, blocks: Sequence[Block]) -> list[Sequence[int]]:
        """Where the parameters of some blocks are preconditioned."""
        return [self.comm.preconditioners(b.index) for b in blocks for _ in b.params]

    def _portions(self, blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
        """Blocks whose directions make messages worth sending before the others are known."""
        start = size = 0
        for i, block in enumerate(blocks):
            size += sum(p.numel() * self._precision(p).itemsize for p in block.params)
            if size >= _PORTION:
                yield blocks[start : i + 1]
                start, size = i + 1, 0
        if start < len(blocks):
            yield blocks[start:]

    def _directions_of(self, block: Block, source: Directions) -> list[Tensor]:
        """Directions of the parameters of a block; room for them where another rank finds them."""
        if not self.comm.preconditions(block.index) or any(p not in source for p in block.params):
            return [torch.zeros(p.shape, dtype=self._precision(p), device=p.device) for p in block.params]
        self._runtime.workspace.reset()
        tensors = [source[p].to(self._precision(p)) for p in block.params]
        matrix = block.layer.matrix(tensors, self._runtime.workspace)
        return block.layer.split(self.shape_direction(block, self.precondition(block, matrix)))

    def shape_direction(self, block: Block, direction: Tensor) -> Tensor:
        """What becomes of a preconditioned matrix ``[(Γ,) n_g, n_a]``: itself."""
        return direction

    def _sets_length(self, p: nn.Parameter) -> bool:
        """Whether the method gives directions of this parameter a length that no clip shall change."""
        return False

    def _sources(self, blocks: Sequence[Block], gradients: Directions, gate: Tensor | None) -> Directions:
        """What to precondition: the gradient, or Adam's bias-corrected first moment where Adam gives the size."""
        source = {p: gradients[p] for b in blocks for p in b.params}
        grafted = [p for p in source if options.is_adam(self._options(p)["graft"])]
        self._count_moments(grafted, gradients, gate)
        for p in grafted:
            beta1 = self._adam_options(self._group[p])[0][0]
            source[p] = local(self.state[p]["exp_avg"]) / (1 - beta1 ** self._steps_of(p))
        return source

    def _guard(self, blocks: Sequence[Block], directions: Directions, source: Directions) -> Directions:
        """A block whose direction is not finite takes its gradient for this step.

        Returns:
            ``⟨direction, source⟩`` by parameter: they are not finite where a direction is not, and kl-clip needs them.
        """
        products = {p: update.inner_product(d, source[p].to(d.dtype)) for p, d in directions.items()}
        squares: Directions = {}
        if self._is_cut:  # in one message: where a device computes, both are wanted
            squares = {
                p: update.inner_product(x, x) for p, x in ((p, source[p].to(d.dtype)) for p, d in directions.items())
            }
            found = torch.stack([x.to(torch.float64) for x in (*products.values(), *squares.values())])
            sums = self._table.shards.sum(found, [*products, *products]).chunk(2)
            products, squares = (dict(zip(products, own.unbind(), strict=True)) for own in sums)
        finite = torch.isfinite(torch.stack([x.to(torch.float32) for x in products.values()]))
        if finite.device.type == "cpu" and all_true_on_cpu(finite):
            return products
        for block in blocks:
            good = torch.isfinite(torch.stack([products[p] for p in block.params])).all()
            for p in block.params:
                plain = source[p].to(directions[p].dtype)
                directions[p] = torch.where(good, directions[p], plain)
                own = squares[p] if squares else update.inner_product(plain, plain)
                products[p] = torch.where(good, products[p], own)
        return products

    def _kl_clip(self, directions: Directions, products: Directions) -> None:
        clipped = [p for p in directions if self._group[p].get("kl_clip") and self._options(p)["graft"] is None]
        clipped = [p for p in clipped if not self._sets_length(p)]
        if not clipped:
            return
        terms, lrs = [products[p] for p in clipped], [rate(self._group[p]["lr"]) for p in clipped]
        for limit in {self._group[p]["kl_clip"] for p in clipped}:
            self._kl_factor = factor = update.kl_clip_factor(terms, lrs, limit)
            torch._foreach_mul_([directions[p] for p in clipped if self._group[p]["kl_clip"] == limit], factor)

    # ------------------------------------------------------------------ checkpoints
    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[nn.Parameter, dict[str, Any]]:
        for group in groups:
            self._check_group(group)
        return self._without_spread_curvature(super()._checked_state(found, groups))

    def _without_spread_curvature(
        self, loaded: Mapping[nn.Parameter, dict[str, Any]]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Loaded state without the curvature of frozen layers that is, or may be, on other ranks.

        Nobody has it whole, so the ranks could not agree on it when the layer is unfrozen.

        Args:
            loaded: Checked state by parameter.

        Returns:
            The state to load.
        """
        world = self.comm.world
        everywhere = all(len(self.comm.preconditioners(b.index)) == world for b in self._blocks)
        complete = not self.comm.combines or (self.comm.replicates and everywhere)
        kept, dropped = dict(loaded), list[str]()
        for p, state in loaded.items():
            own = (state.keys() & self.entries.keys()) - self._common
            if p.requires_grad or not own or (complete and any(isinstance(state[k], Tensor) for k in own)):
                continue
            kept[p] = {k: v for k, v in state.items() if k not in own}
            dropped.append(self._names[p])
        if dropped:
            warnings.warn(
                f"{type(self).__name__}: the curvature of frozen parameters was spread over several ranks when it was "
                f"saved, or is to be, and is not loaded ({some_of(dropped)}); it is estimated anew when they are "
                "unfrozen.",
                stacklevel=depth_of_caller(),
            )
        return kept

    def _finish_load(self) -> None:
        """Complete what a checkpoint may leave out, and follow the loaded options."""
        self._refreshed_at.clear()
        self._learned_at.clear()
        complete = {b: set(self.state[b.owner]) for b in self._blocks}
        refreshes = {b: self.state[b.owner].get("refreshes", 0) for b in self._blocks}
        changed = self._rebuild()
        derived = {key for key, entry in self.entries.items() if entry.derived}
        renewed = [
            b
            for b, found in complete.items()
            if self.state[b.owner]["factor_updates"] > 0
            and any(key in derived and key not in found for key in self.state[b.owner])
        ]
        self._to_renew.clear()
        if self.comm.combines:  # with the other ranks, at the next step: loading sends nothing
            for block in self._blocks:
                lean = block.group["checkpoint_curvature"] == "factors"
                if lean and self.state[block.owner]["factor_updates"] > 0 and refreshes[block]:
                    self.state[block.owner]["refreshes"] = refreshes[block]
                    self._to_renew.add(block.name)
        elif renewed:
            with torch.no_grad(), full_precision(renewed[0].owner.device):
                ok = self.refresh(renewed, True)
            for block, good in zip(renewed, ok.cpu().numpy(), strict=True):
                self.state[block.owner]["refreshes"] = refreshes[block] if good else 0
        if self._capture is not None:
            if changed:
                self._hook()
            self._capture.discard()
            self._arm()

    def _join_ranks(self) -> None:
        super()._join_ranks()
        if self._to_renew:
            blocks = [b for b in self._blocks if b.name in self._to_renew]
            for block, good in zip(blocks, self._renew_loaded(blocks).tolist(), strict=True):
                if not good:
                    self.state[block.owner]["refreshes"] = 0
            self._to_renew.clear()

    def _renew_loaded(self, blocks: list[Block]) -> Tensor:
        """Find what a checkpoint left out."""
        return self._renew(blocks)

    def _is_refreshed(self, block: Block) -> bool:
        """Whether what a refresh finds is there."""
        return bool(self.state[block.owner]["refreshes"] > 0) and block.name not in self._to_renew

    # ------------------------------------------------------------------ what it tells
    def _summary(self) -> str:
        return f"{len(self._blocks)} blocks"

    def _pending_bytes(self) -> int:
        pending = self._capture.pending.values() if self._capture is not None else ()
        return sum(int(getattr(s, "nbytes", 0)) for s in pending)

    def _coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        block = self._block_of.get(p)
        if block is None:
            return "", "", ""
        refused = self._capture.refused.get(block.index) if self._capture is not None else None
        treatment = f"block '{block.name}' ({block.layer.kind})" if block.name else f"block {block.layer.kind}"
        if block.layer.other_uses:
            treatment += f", tied; its use in {some_of(block.layer.other_uses)} has no statistics"
        if refused and self.state[p].get("refreshes", 0) == 0:
            treatment = f"{self._group[p]['fallback']} fallback: {refused}"
        lead = f"{block.adapter.groups}×" if block.adapter.groups > 1 else ""
        return treatment, f"{lead}{block.adapter.n_a}, {block.adapter.n_g}", f"rank {self.comm.owner(block.index)}"

    def dense_curvature(self, name: str) -> Tensor:
        """The undamped curvature of a block as a dense ``[n, n]`` matrix over row-major ``vec([W | b])``.

        Args:
            name: Module name as in ``named_modules()``; wrapper prefixes may be left out.

        Returns:
            The matrix, ``n`` being the number of parameters of the layer.

        Raises:
            ValueError: If no block has this name.
            RuntimeError: If nothing was captured for it yet.
        """
        self._runtime.renew(self.state, self.param_groups)
        found = find_name(name, self.blocks)
        if found is None:
            known = ", ".join(b.name or f"'' (the {b.layer.kind} itself)" for b in self._blocks)
            raise ValueError(f"no block is named '{name}'; there are: {known or 'none'}")
        block = self.blocks[found]
        if not (self.comm.estimates(block.index) and self.comm.preconditions(block.index)):
            raise RuntimeError(
                f"the curvature of layer '{name}' is on rank {self.comm.owner(block.index)}: ask there, or use "
                "comm=CommOpt(), which keeps it on every rank"
            )
        if not self._has_estimate(block):
            raise RuntimeError(f"nothing was captured for layer '{name}' yet: take a step first")
        return self.block_curvature(block)

    def _has_estimate(self, block: Block) -> bool:
        return bool(self.state[block.owner]["factor_updates"] > 0)

    def extremes(self, block: Block) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of its damped curvature, from what a refresh left on this rank."""
        return block.extremes()  # bridge

    def bounds(self, block: Block) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        return self.extremes(block)

    def _moves_damping(self) -> bool:
        """Whether λ is being adapted to the loss, and may begin far too large."""
        return False

    def damped(self) -> list[Damped] | None:
        """The damping of all blocks that this rank keeps, when each was refreshed three times; None before."""
        counts = [(b, self.state[b.owner]["refreshes"]) for b in self._blocks if self._is_refreshed(b)]
        if min((count for _, count in counts), default=0) != _REFRESHES_BEFORE_WATCH or self._moves_damping():
            return None
        blocks = [b for b, _ in counts]
        found = ((b, self.bounds(b)) for b in blocks)
        return [Damped(b.name, b.group, "damping", e) for b, e in found if e is not None]

    def diagnostics(self) -> dict[str, Any]:
        """What is going on, as plain numbers; layers whose curvature is on other ranks are left out of those by layer.

        Reading may wait for the device, never for another rank, and changes nothing.

        Returns:
            A dict that ``json.dumps`` takes; every key is explained on the page "Diagnostics" of the documentation.
        """
        self._runtime.renew(self.state, self.param_groups)
        refreshed = {b.name: b for b in self._blocks if self._is_refreshed(b)}
        found = {name: e for name, b in refreshed.items() if (e := self.extremes(b)) is not None}
        dampings, conditions = numbers(found)
        return super().diagnostics() | {
            "damping_by_layer": dampings,
            "condition_number": conditions,
            "staleness": {n: self._t - 1 - at for n, at in self._refreshed_at.items() if n in found},
            "statistics_age": {n: self._t - 1 - at for n, at in self._learned_at.items() if n in found},
            "graft_factor": {
                b.name: float(self._graft_factors[b.owner]) for b in self._blocks if b.owner in self._graft_factors
            },
            "skipped_statistics": sum(int(n) for n in self._skipped_statistics.values()),
            "skipped_statistics_by_layer": {name: int(n) for name, n in self._skipped_statistics.items()},
            "refresh_failures": self._failed_refreshes,
            "kl_clip_factor": None if self._kl_factor is None else float(self._kl_factor),
        }


def _module_to_hook(method: str, params: Any, module: nn.Module | Sequence[nn.Module] | None) -> tuple[nn.Module, Any]:
    params_given = params
    root, params = module_of(method, params, module)
    if root is None:
        raise ValueError(
            f"{method} needs the module whose layers it covers: pass the module first, {method}(model, lr=...), "
            f"or name it beside the groups, {method}(params, module=model)"
        )
    given = params_given if module is None else module
    for part in [given] if isinstance(given, nn.Module) else cast("Sequence[nn.Module]", given):
        _refuse_several_devices(method, part)
    return root, params


def _refuse_several_devices(method: str, module: nn.Module) -> None:
    """Refuse ``nn.DataParallel`` where it copies the model; on one device, or on none, it calls the model itself."""
    copied = (m for m in module.modules() if isinstance(m, nn.DataParallel) and len(m.device_ids) > 1)
    if (found := next(copied, None)) is not None:
        raise NotImplementedError(
            f"{method}: nn.DataParallel copies the model to {len(found.device_ids)} devices in one process, where "
            "nothing can be captured. Use nn.DataParallel(model, device_ids=[0]) or no wrapper at all, or run one "
            "process per device with DistributedDataParallel"
        )
