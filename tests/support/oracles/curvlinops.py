"""Kronecker factors of curvlinops, in the scale of the package."""

import warnings

from curvlinops import KFACLinearOperator
from torch import Tensor, nn

from tests.support.oracles.kfac import Objective, covered_names


def curvlinops_blocks(
    model: nn.Module, x: Tensor, y: Tensor, loss: Objective, approx: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of every layer, per datum: for a ``sum`` loss, B of curvlinops is divided by the number of examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op = KFACLinearOperator(
            model, loss.module, list(model.parameters()), [(x, y)], fisher_type="empirical", kfac_approx=approx,
            separate_weight_and_bias=False, check_deterministic=False,
        )  # fmt: skip
    op.compute_kronecker_factors()
    per_datum = len(x) if loss.module.reduction == "sum" else 1
    A, B = op._input_covariances, op._gradient_covariances
    return {name: (A[name], B[name] / per_datum) for name in covered_names(model)}
