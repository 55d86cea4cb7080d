"""The base of the layer methods: an optimizer that uses a :class:`LayerPreconditioner`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder.capture.capture import Capture
from secondorder.capture.fisher.likelihood import Likelihood
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.block import Block
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.schema import Schema
from secondorder.curvature.wrappers import unwrap
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.options import FisherOptions
from secondorder.parallel.roles import RoleWorker
from secondorder.parameters import module_of
from secondorder.preconditioners.layer_capture import Setting
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.runtime import Clock
from secondorder.update import Update


class LayerOptimizer(SecondOrderOptimizer):
    """Base of the methods that capture statistics per layer.

    A method sets ``curvature`` to the class of its :class:`LayerPreconditioner`.

    Args:
        params: What ``torch.optim`` takes, or a module, or a list of modules that are the parts of one model.
        defaults: Group options.
        module: Module, or list of modules, to hook when ``params`` is not one.
        comm: Communication strategy; None: ``CommOpt()`` in a process group of more than one rank.
        layer_options: What is chosen for all layers.
        grad_scaler: Loss scaler of float16 training.
        fisher: Which Fisher is estimated.

    Raises:
        ValueError: Without a module, or for a bad option.
        RuntimeError: If the ranks of a process group do not all construct it; ``ValueError`` on all if they differ.
    """

    #: The curvature of the method.
    curvature: ClassVar[type[LayerPreconditioner]]

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        defaults: dict[str, Any],
        *,
        module: nn.Module | Sequence[nn.Module] | None,
        comm: CommStrategy | None,
        layer_options: LayerOptions,
        grad_scaler: Any,
        fisher: FisherOptions,
    ) -> None:
        root, given = _module_to_hook(type(self).__name__, params, module)
        self._begin_life(comm)
        self._layer_options, self._fisher = layer_options, fisher
        super().__init__(given, defaults, module=root, grad_scaler=grad_scaler)

    # ------------------------------------------------------------------ the blocks
    @property
    def preconditioner(self) -> LayerPreconditioner:
        """The blocks."""
        return self._curvature

    @property
    def catalog(self) -> Schema:
        """Entries of the states of blocks, by key, as far as they are the same in every state."""
        return self.curvature.catalog

    def _allocating(self) -> tuple[str, ...]:
        return self.curvature.allocating

    def _own_arguments(self) -> dict[str, Any]:
        """Arguments of the preconditioner that only this method has."""
        return {}

    def _make_curvature(self, own: Mapping[str, Any]) -> None:
        setting = Setting(
            type(self).__name__,
            self.comm,
            self._table,
            self._runtime,
            self.loss_scale,
            self._layer_options,
            self._fisher,
            weakref.WeakMethod(self._follow_schedule),
        )
        self._curvature = self.curvature(setting, **own)
        self._update = Update(self._table, self._curvature)
        self._make_checkpoint(self._curvature.checkpoint_type(self._curvature), self.rules)
        self.role_worker = RoleWorker(self._curvature, weakref.WeakMethod(self._advance))

    def _connect(self, root: nn.Module | None) -> None:
        """Plan the blocks of a module and hook them."""
        assert root is not None
        if not hasattr(self, "_curvature"):  # not before the strategy is known
            self._make_curvature(self._own_arguments())
        self._trust.check_module(root)
        self._table.root = unwrap(root)
        self._curvature.plan.blocks = []
        self._rebuild()
        self._curvature.hooks.hook()
        self._table.is_followed = True

    def _plan(self) -> bool:
        return self._curvature.follow(self._place)

    def _rebuild(self) -> bool:
        """As in the base class; a copy without its module waits for :meth:`attach`."""
        if self._table.root is None:
            return False
        changed = super()._rebuild()
        self._curvature.rebuilt()
        return changed

    def _follow(self, replanned: bool) -> None:
        if replanned and self._curvature.hooks.is_hooked:
            self._curvature.hooks.hook()
        self._curvature.hooks.arm()

    def _prepare(self) -> None:
        _ = self.capture  # which raises without a module
        self._tabulate()

    def _follow_schedule(self) -> None:
        """Let intervals and frozen layers that changed since the last step act on the forward that begins."""
        self._check_changed_options()
        self._tabulate()
        if not self._table.is_gathered():
            self._synchronize()
        self._curvature.hooks.follow_schedule()

    def _allocate(self, p: nn.Parameter) -> None:
        self._curvature.plan.allocate(p)

    def _advance(self) -> None:
        super()._advance()
        self._curvature.end_step()

    def reason_against_roles(self) -> str | None:
        """Return why ranks of several roles cannot serve this method, or None if they can."""
        return (
            "what preconditions is found from more than running sums over examples, and could not be passed on from "
            "rank to rank. Use KFAC, or comm=MemOpt()"
        )

    def detach(self) -> None:
        """Remove every hook of this optimizer; another one on the same module keeps its own. Idempotent."""
        if hasattr(self, "_curvature"):
            self._table.is_followed &= not self._curvature.hooks.is_hooked
            self._curvature.detach()

    # ------------------------------------------------------------------ capture
    @property
    def capture(self) -> Capture:
        """What captures the statistics of the blocks.

        Raises:
            RuntimeError: If the optimizer was closed, or is a copy without a module.
        """
        return self._curvature.hooks.capture

    @property
    def blocks(self) -> dict[str, Block]:
        """Blocks by module name."""
        return self._curvature.plan.by_name

    @property
    def damps_kernel(self) -> bool:
        """Whether relative damping is that of the kernel of the examples, instead of the Fisher's of the parameters."""
        return self.curvature.damps_kernel

    @property
    def fisher(self) -> str:
        """Which Fisher is estimated: the argument of this name."""
        return self._fisher.fisher

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and with them the statistics captured since the last step.

        Between ``observe`` and the backward of the same forward there are no gradients of it yet: what was observed
        stays.
        """
        super().zero_grad(set_to_none)
        self._curvature.hooks.spare()

    def time_stages(self, clock: Clock | None) -> None:
        """Have a clock time the stages of the steps to come, such as a ``secondorder.diagnostics.StageClock``.

        Args:
            clock: The clock, or None to stop.
        """
        super().time_stages(clock)
        self._curvature.hooks.time_stages(clock)

    @contextmanager
    def pause_capture(self) -> Iterator[None]:
        """Capture nothing of the forwards that run inside the ``with`` block."""
        with self._curvature.hooks.pause():
            yield

    def mask(self, keep: Tensor | None) -> AbstractContextManager[None]:
        """Keep padding out of the statistics of the forwards that run inside the ``with`` block.

        Rows of layers whose input has the leading dimensions of the mask (or its transpose, or both in one) are left
        out where it is False; other layers, such as those after pooling, are not touched.

        Args:
            keep: ``[N, S]``, True (or 1, as attention masks have it) for real positions; None for no mask.

        Raises:
            TypeError: If it is no tensor of bools or integers; a mask of floats is one to be added to scores.
            ValueError: If its shape is another.

        Returns:
            The context manager.
        """
        return self._curvature.hooks.mask(keep)

    def observe(
        self,
        outputs: Tensor | Sequence[Tensor],
        likelihood: str | Likelihood | Sequence[str | Likelihood],
        targets: Tensor | None | Sequence[Tensor | None] = None,
    ) -> None:
        """Estimate the Fisher of the model's own predictions, for ``fisher`` other than ``"empirical"``.

        To be called between the forward and ``loss.backward()``, for every micro-batch. It pulls vectors of the loss
        curvature back to the layers in passes of its own, which leave ``.grad``, the graph and the random state of
        the program as they were. Where the Fisher needs no such pass, or nothing is due, it does nothing.

        Args:
            outputs: What the model returned, logits ``[N, …]``; a sequence for a model with several heads.
            likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` (a summed squared error) or an object, such
                as ``Categorical(class_dim=1)``; one per head.
            targets: Only to find entries that the loss ignores; one per head.

        Raises:
            ValueError: If a likelihood is unknown, or the exact Fisher needs too many passes.
            TypeError: If an argument is of a wrong kind.
            RuntimeError: If the outputs do not come from a forward that was captured, or their graph is gone.
        """
        self._curvature.hooks.observe(outputs, likelihood, targets)

    # ------------------------------------------------------------------ copies
    def _kept_by_copies(self) -> dict[str, Any]:
        return {**super()._kept_by_copies(), "fisher": self._fisher, "curvature": self._curvature.kept()}

    def _restore(self, kept: dict[str, Any]) -> None:
        super()._restore(kept)
        self._layer_options, self._fisher = kept["curvature"]["layer_options"], kept["fisher"]
        self._make_curvature(kept["curvature"]["own"])
        self._curvature.restore(kept["curvature"])

    # ------------------------------------------------------------------ reading
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
        self._tabulate()
        return self._curvature.report.dense(name)

    def diagnostics(self) -> dict[str, Any]:
        """What is going on, as plain numbers; layers whose curvature is on other ranks are left out of those by layer.

        Reading may wait for the device, never for another rank, and changes nothing.

        Returns:
            A dict that ``json.dumps`` takes; every key is explained on the page "Diagnostics" of the documentation.
        """
        self._tabulate()
        update = self._update
        found = ((b, update.graft_factors.get(b.owner)) for b in self.blocks.values())
        return {
            **super().diagnostics(),
            **self._curvature.report.diagnostics(),
            "graft_factor": {b.name: float(factor) for b, factor in found if factor is not None},
            "kl_clip_factor": None if update.kl_factor is None else float(update.kl_factor),
            **self._trust.diagnostics(),
        }


def _module_to_hook(method: str, params: Any, module: nn.Module | Sequence[nn.Module] | None) -> tuple[nn.Module, Any]:
    params_given = params
    root, params = module_of(method, params, module)
    if root is None:
        raise ValueError(
            f"{method} needs the module whose layers it covers: pass the module first, {method}(model, lr=...), "
            f"or name it together with the groups, {method}(params, module=model)"
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
