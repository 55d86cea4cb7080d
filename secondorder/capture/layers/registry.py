"""The adapter for each module type, and the function that adds one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from secondorder.capture.layers import embedding, norms, others
from secondorder.capture.layers.adapter import Adapter, LinearAdapter
from secondorder.capture.layers.conv import ConvAdapter, ConvTransposeAdapter

#: Adapters by module type; subclasses count as long as they keep the ``forward`` of the type that is listed.
ADAPTERS: dict[type[nn.Module], type[Adapter]] = {
    nn.Linear: LinearAdapter,
    nn.Conv1d: ConvAdapter,
    nn.Conv2d: ConvAdapter,
    nn.Conv3d: ConvAdapter,
    nn.ConvTranspose1d: ConvTransposeAdapter,
    nn.ConvTranspose2d: ConvTransposeAdapter,
    nn.ConvTranspose3d: ConvTransposeAdapter,
    nn.Embedding: embedding.EmbeddingAdapter,
    nn.EmbeddingBag: embedding.EmbeddingBagAdapter,
    nn.Bilinear: others.BilinearAdapter,
    nn.BatchNorm1d: norms.BatchNormAdapter,
    nn.BatchNorm2d: norms.BatchNormAdapter,
    nn.BatchNorm3d: norms.BatchNormAdapter,
    nn.SyncBatchNorm: norms.BatchNormAdapter,
    nn.LayerNorm: norms.LayerNormAdapter,
    nn.RMSNorm: norms.RMSNormAdapter,
    nn.GroupNorm: norms.GroupNormAdapter,
    nn.InstanceNorm1d: norms.InstanceNormAdapter,
    nn.InstanceNorm2d: norms.InstanceNormAdapter,
    nn.InstanceNorm3d: norms.InstanceNormAdapter,
}


def register_layer(module_type: type[nn.Module], adapter: type[Adapter]) -> None:
    """Register an adapter for a custom module type, which all layer methods then cover.

    Optimizers that are constructed afterwards use it. An existing entry for the type is replaced. Subclasses of the
    type are covered too, as long as they do not override ``forward``.

    Args:
        module_type: Subclass of ``nn.Module`` that applies one weight and optionally a bias.
        adapter: Subclass of :class:`Adapter` with the shapes and rows of the module type.

    Raises:
        TypeError: If an argument is not such a class.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(f"module_type must be a subclass of nn.Module, got {module_type!r}")
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise TypeError(f"adapter must be a subclass of secondorder.Adapter, got {adapter!r}")
    ADAPTERS[module_type] = adapter


def find_adapter(module: nn.Module) -> tuple[type[Adapter] | None, str]:
    """Return the adapter class for a module, or None and the reason as text."""
    name = type(module).__name__
    for kind, adapter in _candidates(type(module)):
        if type(module).forward is not kind.forward:
            return None, f"{name} overrides {kind.__name__}.forward"
        reason = adapter.refusal(module)
        return (None, reason) if reason else (adapter, "")
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return None, (
            f"fused kernels hide the gates of {name}: call secondorder.nn.expose(model) before making the optimizer"
        )
    if isinstance(module, ParametrizationList):
        return None, "a parametrized weight is computed from it"
    return None, f"{name} has no adapter (see register_layer)"


def _candidates(kind: type[nn.Module]) -> Iterator[tuple[type[nn.Module], type[Adapter]]]:
    """Yield registered types that a class is or derives from, the nearest first."""
    conv1d = others.hugging_face_conv1d()
    for base in kind.__mro__:
        if base in ADAPTERS:
            yield base, ADAPTERS[base]
        elif conv1d is not None and base is conv1d:
            yield base, others.TransposedLinearAdapter
