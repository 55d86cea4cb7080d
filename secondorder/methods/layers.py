"""The recipe of the methods that capture statistics layer by layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from secondorder.adaptation.no_trust import NoTrust
from secondorder.config import BudgetOptions, FisherOptions, StorageOptions
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.schema import Schema
from secondorder.parallel.roles import RoleWorker
from secondorder.parameters import module_of
from secondorder.preconditioners.group_options import GroupRules
from secondorder.preconditioners.layer_checkpoint import LayerCheckpoint
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.parts import Setting, Shared
from secondorder.preconditioners.recipe import Recipe
from secondorder.update import Update

if TYPE_CHECKING:
    from secondorder.adaptation.trust_region import TrustRegion


class LayerRules(GroupRules):
    """Rules about the options of a group of a layer method."""

    def reason_against_roles(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Return why ranks of several roles cannot run the method, or None if they can."""
        return (
            "its preconditioner depends on more than running sums over examples, and cannot be passed from rank to "
            "rank. Use KFAC, or comm=MemOpt()"
        )


@dataclass(frozen=True)
class LayerRecipe(Recipe):
    """The recipe of a method with one block per layer.

    Attributes:
        curvature: The class of the preconditioner.
        rules: Rules about several options of a group.
        layers: The options that apply to all layers.
        fisher: The Fisher estimate.
        own: Arguments that only this preconditioner has.
    """

    curvature: type[LayerPreconditioner[Any]]
    rules: GroupRules = field(default_factory=LayerRules)
    layers: LayerOptions = field(default_factory=LayerOptions)
    fisher: FisherOptions = field(default_factory=FisherOptions)
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def catalog(self) -> Schema:
        """Entries of the states of blocks by key, as far as they are the same in every state."""
        return self.curvature.catalog

    @property
    def allocating(self) -> tuple[str, ...]:
        """Options of a group that determine how much state its parameters have."""
        return self.curvature.allocating

    def find_module(self, method: str, params: Any, module: Any) -> tuple[nn.Module, Any]:
        """Return the module to hook and the parameters to train.

        Raises:
            ValueError: If there is no module.
            NotImplementedError: If ``nn.DataParallel`` copies the module to several devices, or it is scripted.
        """
        root, given = module_of(method, params, module)
        if root is None:
            raise ValueError(
                f"{method} needs the module whose layers it preconditions: pass the module first, {method}(model, "
                f"lr=...), or pass it together with the groups, {method}(params, module=model)"
            )
        hooked = params if module is None else module
        for part in [hooked] if isinstance(hooked, nn.Module) else cast("Sequence[nn.Module]", hooked):
            _refuse_several_devices(method, part)
            if isinstance(part, torch.jit.ScriptModule):
                raise NotImplementedError(f"{method} cannot hook a scripted module: use torch.compile instead")
        return root, given

    def precondition(self, shared: Shared, kept: Mapping[str, Any] | None) -> LayerPreconditioner[Any]:
        """Return a preconditioner without blocks."""
        setting = Setting(**vars(shared), layers=self.layers, fisher=self.fisher)
        found = self.curvature(setting, **self.own)
        if kept is not None:
            found.restore(kept)
        return found

    def judge(self, preconditioner: LayerPreconditioner[Any], update: Update) -> NoTrust | TrustRegion:
        """Return an object that accepts every step."""
        return NoTrust()

    def checkpoint_adapters(self, preconditioner: LayerPreconditioner[Any]) -> tuple[LayerCheckpoint, None]:
        """Return the adapters that save and load the blocks in checkpoints."""
        return preconditioner.checkpoint_type(preconditioner), None

    def worker(
        self, preconditioner: LayerPreconditioner[Any], advance: weakref.WeakMethod[Callable[[], None]]
    ) -> RoleWorker:
        """Return the worker for ranks of several roles."""
        return RoleWorker(preconditioner, advance)

    def copied(self, preconditioner: LayerPreconditioner[Any]) -> Recipe:
        """Return the recipe for a copy, in which rules about layers refer to them by name."""
        layers = replace(self.layers, skip_layers=preconditioner.plan.portable_rules())
        return replace(self, layers=layers, own=preconditioner.own())


def _refuse_several_devices(method: str, module: nn.Module) -> None:
    """Reject ``nn.DataParallel`` if it copies the model. With one device or none, it calls the model itself."""
    copied = (m for m in module.modules() if isinstance(m, nn.DataParallel) and len(m.device_ids) > 1)
    if (found := next(copied, None)) is not None:
        raise NotImplementedError(
            f"{method}: nn.DataParallel copies the model to {len(found.device_ids)} devices in one process, and "
            "nothing can be captured in these copies. Use nn.DataParallel(model, device_ids=[0]) or no wrapper at all, "
            "or run one process per device with DistributedDataParallel"
        )


def layer_options(given: Mapping[str, Any], warms_up: bool | str = False) -> LayerOptions:
    """Return the options that apply to all layers.

    Args:
        given: The arguments of a constructor by name, with objects in place of their short forms.
        warms_up: Whether and how refreshes are frequent at the start, see :class:`RefreshOptions`.

    Returns:
        The options.
    """
    return LayerOptions(
        given["skip_layers"],
        given.get("overlap", False),
        replace(given["refresh"], warmup=warms_up),
        given.get("storage", StorageOptions()),
        given["statistics"],
        given["batch"],
        given["objects"].get("budget", BudgetOptions()),
    )
