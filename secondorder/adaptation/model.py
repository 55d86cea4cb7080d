"""The quadratic model of the loss around the parameters, exact or by the curvature of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from secondorder.adaptation.replay import exact_products
from secondorder.adaptation.trial import Evaluation
from secondorder.capture.fisher.likelihood import Likelihood
from secondorder.curvature.block import Block
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.linalg.dense import precision_of
from secondorder.linalg.quadratic import QuadraticModel
from secondorder.parameters import Directions
from secondorder.preconditioners.layers import LayerPreconditioner


class LocalModel:
    """The quadratic model of the loss along directions of the parameters.

    Args:
        curvature: The blocks.
        likelihood: The likelihood whose curvature the exact model uses, or None to use the curvature of the blocks.
    """

    def __init__(self, curvature: LayerPreconditioner[Any], likelihood: Likelihood | None) -> None:
        self._curvature, self._likelihood = curvature, likelihood
        self._table, self._comm = curvature.table, curvature.comm

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a mean over examples."""
        return all(group.get("loss_reduction", "mean") == "mean" for group in self._table.groups)

    def coupled_decay(self, p: nn.Parameter) -> float:
        """Return the weight decay of a parameter that is part of the objective."""
        group = self._table.group_of[p]
        return 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"])

    def along(
        self, directions: Sequence[Directions], gradients: Directions, at: Directions, evaluation: Evaluation | None
    ) -> QuadraticModel:
        """Return the model of the objective along some directions, in float64.

        Args:
            directions: ``d_i`` by parameter.
            gradients: ∇.
            at: Values of parameters that have moved since the gradient was taken.
            evaluation: The evaluation of this step's closure.
        """
        device = next(iter(gradients.values())).device
        wide = [{p: d.to(torch.promote_types(d.dtype, torch.float32)) for p, d in one.items()} for one in directions]
        decayed = [{p: w * d for p, d in one.items() if (w := self.coupled_decay(p))} for one in wide]
        values = {p: at.get(p, p.detach()) for p in decayed[0]}
        products = {
            "gradient": [_inner(gradients, d, device) for d in wide],
            "decay_gradient": [_inner(values, w, device) for w in decayed],
            "decay": [torch.stack([_inner(d, w, device) for d in wide]) for w in decayed],
        }
        return QuadraticModel(
            curvature=self._curvature_products(wide, at, evaluation).to(device),
            damping=self._block_products(wide, self._damping_product, evaluation).to(device),
            **{name: torch.stack(found) for name, found in products.items()},
        )

    def _curvature_products(
        self, directions: Sequence[Directions], at: Directions, evaluation: Evaluation | None
    ) -> Tensor:
        """Return ``⟨d_i, C d_j⟩ [k, k]`` of the loss if the closure returned its outputs, otherwise of the blocks."""
        if evaluation is None or self._likelihood is None or not evaluation.exact:
            return self._block_products(directions, lambda block, matrix: block.product(matrix), evaluation)
        assert self._table.root is not None
        with self._curvature.hooks.pause(by_user=False):
            own = exact_products(
                self._table.root, evaluation.exact, self._likelihood, directions, at, mean=self.is_mean
            )
        return self.of_all_ranks(own)

    def of_all_ranks(self, values: Tensor) -> Tensor:
        """Return the mean over the ranks, as for gradients. The bits are equal, so all ranks make the same decision."""
        if not self._comm.combines:
            return values
        total = self._comm.agree(values.detach().to(torch.float64).flatten()) / self._comm.data_world
        return total.reshape(values.shape).to(values.device)

    def _block_products(
        self, directions: Sequence[Directions], product: Callable[[Block, Tensor], Tensor],
        evaluation: Evaluation | None,
    ) -> Tensor:  # fmt: skip
        """Return ``Σ ⟨D_i, product(D_j)⟩ [k, k]`` over the blocks that precondition, with ``D [(Γ,) n_g, n_a]``."""
        k, first = len(directions), next(iter(directions[0].values()))
        total = torch.zeros(k, k, dtype=torch.float64, device=first.device)
        for block in self._curvature.directions.active(directions[0]):
            matrices = [block.layer.matrix([d[p].to(precision_of(p)) for p in block.params]) for d in directions]
            images = [product(block, m) for m in matrices]
            rows = [torch.stack([(m * image).sum() for image in images]) for m in matrices]
            total += torch.stack(rows).to(total)
        # Blocks and their damping are per example, while a summed loss has the curvature of all examples.
        return (total + total.mT) * (0.5 if self.is_mean else 0.5 * self._examples(evaluation))

    def _examples(self, evaluation: Evaluation | None) -> float:
        """Return the number of examples in this step's gradient, which scales the curvature of a summed loss."""
        own = 0.0 if evaluation is None else float(evaluation.examples)
        found = float(self.of_all_ranks(torch.tensor(own, dtype=torch.float64)))
        if not found:
            raise RuntimeError(
                "with loss_reduction='sum' the quadratic model needs the number of examples, which it counts in the "
                "forwards of a closure, in the first tensor argument of the model: call step(closure), or average the "
                "loss and use loss_reduction='mean'"
            )
        return found

    def _damping_product(self, block: Block, matrix: Tensor) -> Tensor:
        damping: Tensor | float = cast(FactoredBlock, block).damping()
        return matrix * (damping[..., None, None] if isinstance(damping, Tensor) else damping)


def _inner(x: Directions, y: Directions, device: torch.device) -> Tensor:
    """Return ``Σ ⟨x, y⟩`` over the parameters of y, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for p, b in y.items():
        a = x[p].to(b.dtype)
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        total = total + (a * b).sum().to(total)
    return total
