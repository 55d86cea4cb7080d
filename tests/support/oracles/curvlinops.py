"""Results of curvlinops, in the package's order of parameters and scale."""

import warnings

import torch
from curvlinops import GGNLinearOperator, KFACLinearOperator
from torch import Tensor, nn

from tests.support.oracles.kfac import Objective, covered_names


def operator(
    model: nn.Module, x: Tensor, y: Tensor, loss: Objective, approx: str, fisher: str, kind=KFACLinearOperator
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(
            model, loss.module, list(model.parameters()), [(x, y)], fisher_type=fisher, kfac_approx=approx,
            separate_weight_and_bias=False, check_deterministic=False,
        )  # fmt: skip


def curvlinops_blocks(
    model: nn.Module, x: Tensor, y: Tensor, loss: Objective, approx: str, fisher: str = "empirical"
) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of every layer, per datum: for a ``sum`` loss, B of curvlinops is divided by the number of examples."""
    op = operator(model, x, y, loss, approx, fisher)
    op.compute_kronecker_factors()
    per_datum = len(x) if loss.module.reduction == "sum" else 1
    A, B = op._input_covariances, op._gradient_covariances
    return {name: (A[name], B[name] / per_datum) for name in covered_names(model)}


def block_order(model: nn.Module, name: str) -> Tensor:
    """Indices of the flat parameter vector that make up row-major vec([W | b]) of one layer."""
    starts, start = {}, 0
    for key, p in model.named_parameters():
        starts[key] = start
        start += p.numel()
    layer = model.get_submodule(name)
    prefix = f"{name}." if name else ""
    n_out = layer.weight.shape[0]
    index = torch.arange(layer.weight.numel()).reshape(n_out, -1) + starts[prefix + "weight"]
    if layer.bias is not None:
        index = torch.cat([index, torch.arange(n_out)[:, None] + starts[prefix + "bias"]], dim=1)
    return index.reshape(-1)


def dense_blocks(op, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The blocks of an operator over vec([W | b]) of each layer."""
    dense = op @ torch.eye(sum(p.numel() for p in model.parameters()), dtype=dtype)
    orders = {name: block_order(model, name) for name in covered_names(model)}
    return {name: dense[order][:, order] for name, order in orders.items()}


def gauss_newton_blocks(model: nn.Module, x: Tensor, y: Tensor, loss: Objective) -> dict[str, Tensor]:
    """Blocks of the exact Gauss-Newton matrix over vec([W | b])."""
    op = GGNLinearOperator(model, loss.module, list(model.parameters()), [(x, y)], check_deterministic=False)
    return dense_blocks(op, model, x.dtype)
