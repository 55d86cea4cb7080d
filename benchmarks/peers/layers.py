"""The hidden matrices of a model, and the layers that hooks can observe."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

HEADS = ("head", "lm_head", "classifier", "fc")  # names of modules that contain the output layer


@dataclass(frozen=True)
class Matrix:
    """A weight as one matrix, or as several stacked matrices."""

    parameter: nn.Parameter
    pieces: int = 1  # number of matrices, which is 3 if queries, keys and values share a parameter

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices ``[d_out, rest]`` of the parameter or of its gradient."""
        return list(tensor.reshape(tensor.shape[0], -1).chunk(self.pieces))


def hidden_matrices(model: nn.Module) -> list[Matrix]:
    """Return the weights that an optimizer for hidden matrices trains.

    They are the weights of linear layers, convolutions and attention, except for weights that are shared with an
    embedding, the first layer if it is a convolution, and the output layer. The output layer is the one with a name in
    :data:`HEADS`, or else the last one. The only weight of a model is always included.
    """
    found = _weights(model)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = {name for name in found if not set(HEADS).isdisjoint(name.split("."))}
    names = list(found)
    outside = named or set(names[-1:])
    if names and found[names[0]].parameter.dim() > 2:
        outside.add(names[0])
    inside = {
        name: matrix
        for name, matrix in found.items()
        if matrix.parameter.requires_grad and id(matrix.parameter) not in embeddings
    }
    if len(inside) == 1:
        return list(inside.values())
    return [matrix for name, matrix in inside.items() if name not in outside]


def _weights(model: nn.Module) -> dict[str, Matrix]:
    found: dict[str, Matrix] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for part in ("in_proj", "q_proj", "k_proj", "v_proj"):
                weight = getattr(module, f"{part}_weight")
                if weight is not None:
                    found[f"{name}.{part}"] = Matrix(weight, 3 if part == "in_proj" else 1)
        elif isinstance(module, nn.Linear | _ConvNd):
            found[name] = Matrix(cast("nn.Parameter", module.weight))
    once = {id(matrix.parameter): name for name, matrix in reversed(found.items())}
    return {name: matrix for name, matrix in found.items() if once[id(matrix.parameter)] == name}


def heard_layers(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers whose inputs and output gradients hooks can observe."""
    hidden = unheard_layers(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and name not in hidden
        and all(parameter.requires_grad for parameter in module.parameters())
    }


def unheard_layers(model: nn.Module) -> list[str]:
    """Return linear layers that are never called, because ``nn.MultiheadAttention`` applies their weights itself."""
    found = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    return [name for name, module in model.named_modules() if id(module) in found]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw_for_others(model: nn.Module, taken: list[nn.Parameter], **settings: Any) -> list[Optimizer]:
    """Return AdamW for the parameters that no other optimizer trains, or an empty list if there are none."""
    known = {id(parameter) for parameter in taken}
    rest = [parameter for parameter in trained(model) if id(parameter) not in known]
    return [torch.optim.AdamW(rest, **settings)] if rest else []
