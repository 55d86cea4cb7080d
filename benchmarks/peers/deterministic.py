"""Methods for losses without noise: L-BFGS, and Gauss-Newton with Levenberg-Marquardt damping.

Both evaluate the loss several times per step, so they should be compared by time, not by steps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.optim import Optimizer

from benchmarks.peers.layers import trained
from benchmarks.peers.peer import Peer


class _LBFGS(Peer):
    """``torch.optim.LBFGS`` with a closure that returns more than a loss."""

    def step(self, closure: Any = None) -> Any:
        found = []

        def loss() -> Tensor:
            found.append(closure())
            value: Tensor = found[-1][0]
            return value

        optimizer: Any = self.parts[0]
        optimizer.step(loss)
        return found[0]


def lbfgs(model: nn.Module, lr: float = 1.0, history_size: int = 30, max_iter: int = 4, **settings: Any) -> Optimizer:
    """Return L-BFGS. A step has ``max_iter`` iterations, each with a line search."""
    keywords = {"history_size": history_size, "tolerance_grad": 0.0, "tolerance_change": 0.0, **settings}
    return _LBFGS(torch.optim.LBFGS(trained(model), lr, max_iter, **keywords))


class GaussNewton(Optimizer):
    """Gauss-Newton for a mean of squared residuals r over N examples, ``δ = -Jᵀ(JJᵀ + NλI)⁻¹ r``.

    λ decreases after a step that the linear model predicts well, and increases after one that it predicts badly. Steps
    that increase the loss are reverted (Levenberg 1944, Marquardt 1963; Nocedal & Wright 2006, algorithm 4.1).

    Args:
        model: The model, which maps each example independently to its outputs.
        damping: Initial λ.
        factor: Factor by which λ changes.
    """

    def __init__(self, model: nn.Module, damping: float = 1e-3, factor: float = 3.0) -> None:
        self._model = model
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        super().__init__(trained(model), {"lr": 1.0, "damping": damping})
        self._factor = factor
        self._inputs: Tensor | None = None
        model.register_forward_pre_hook(self._remember)

    def _remember(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._inputs = inputs[0].detach()

    def step(self, closure: Any = None) -> Any:
        evaluated: tuple[Tensor, Tensor, Tensor] = closure()
        loss, outputs, targets = evaluated
        residuals = (outputs - targets).detach().flatten()
        with torch.no_grad():
            self._move(float(loss), residuals, targets)
        return evaluated

    def _move(self, loss: float, residuals: Tensor, targets: Tensor) -> None:
        group = self.param_groups[0]
        inputs = self._inputs
        assert inputs is not None
        jacobian = self._jacobian(inputs)
        kernel, shift = jacobian @ jacobian.mT, len(targets) * group["damping"]
        kernel.diagonal().add_(shift)
        multipliers = torch.cholesky_solve(residuals[:, None], torch.linalg.cholesky(kernel))
        step = -(jacobian.mT @ multipliers).flatten()
        before = [parameter.clone() for parameter in group["params"]]
        sizes = [parameter.numel() for parameter in group["params"]]
        for parameter, part in zip(group["params"], step.split(sizes), strict=True):
            parameter.add_(part.view_as(parameter))
        expected = float((residuals + jacobian @ step).square().sum()) / len(targets)
        found = float((self._model(inputs) - targets).square().sum()) / len(targets)
        gain = (loss - found) / max(loss - expected, 1e-300)
        if not found < loss:  # also if it is not finite
            torch._foreach_copy_(group["params"], before)
        if gain > 0.75:
            group["damping"] /= self._factor
        elif not gain >= 0.25:
            group["damping"] *= self._factor

    def _jacobian(self, inputs: Tensor) -> Tensor:
        """Return J ``[N outputs, parameters]``."""
        known = dict(self._model.named_parameters())
        params = {name: known[name].detach() for name in self._names}

        def outputs(params: dict[str, Tensor], example: Tensor) -> Tensor:
            found: Tensor = functional_call(self._model, params, (example[None],))
            return found[0]

        rows = vmap(jacrev(outputs), (None, 0))(params, inputs)
        return torch.cat([rows[name].flatten(2) for name in self._names], 2).flatten(0, 1)
