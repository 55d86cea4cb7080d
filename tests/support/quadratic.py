"""Small problems and dense oracles for tests of damping and of the quadratic model."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import KFAC
from tests.support.kfac import plain_kfac


def kfac(model: Any, **options: Any) -> KFAC:
    """K-FAC with settings that make the results of a test easy to predict."""
    return plain_kfac(model, **{"damping": 0.1, **options})


def mlp(dropout: float = 0.0) -> nn.Sequential:
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 4)]
    return nn.Sequential(*layers).double()


def batch(n: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, dtype=torch.float64, generator=made), torch.randint(0, 4, (n,), generator=made)


class Loop:
    """A closure over one batch that counts its calls and may return outputs in addition to the loss."""

    def __init__(
        self, model: nn.Module, optimizer: KFAC | None, x: Tensor, y: Tensor,
        loss: Callable[..., Tensor] = F.cross_entropy, outputs: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.x, self.y, self.loss, self.outputs = model, optimizer, x, y, loss, outputs
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        self.model.zero_grad()
        outputs = self.model(self.x)
        loss = self.loss(outputs, self.y)
        loss.backward()
        return (loss, outputs) if self.outputs else loss

    def rising(self) -> float:
        """A replacement of the closure whose loss is higher with every call."""
        self()
        return float(self.calls)

    def value(self) -> float:
        """The current loss, without gradients and without counting the call."""
        with torch.no_grad():
            return float(self.loss(self.model(self.x), self.y))


def problem(*, outputs: bool = False, dropout: float = 0.0, **options: Any) -> tuple[nn.Sequential, KFAC, Loop]:
    """A classifier, K-FAC with these options, and the closure of one batch."""
    model, (x, y) = mlp(dropout), batch()
    optimizer = kfac(model, **options)
    return model, optimizer, Loop(model, optimizer, x, y, outputs=outputs)


def of_two_groups(
    first: dict[str, Any], last: dict[str, Any], *, outputs: bool = False, **options: Any
) -> tuple[nn.Sequential, KFAC, Loop]:
    """The same with a parameter group per layer."""
    model, (x, y) = mlp(), batch()
    groups = [{"params": list(model[i].parameters()), **own} for i, own in ((0, first), (3, last))]
    optimizer = kfac(groups, module=model, **options)
    return model, optimizer, Loop(model, optimizer, x, y, outputs=outputs)


def regression(*, outputs: bool = False, **options: Any) -> tuple[nn.Linear, KFAC, Loop]:
    """The same for a linear layer and a squared loss, which is equal to its quadratic model."""
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    optimizer = kfac(model, **options)
    return model, optimizer, Loop(model, optimizer, x, y, lambda f, y: (f - y).square().sum() / len(f), outputs)


def repeat(optimizer: KFAC, closure: Callable[[], Any], times: int) -> list[float]:
    """The losses of ``times`` steps."""
    returned = [optimizer.step(closure) for _ in range(times)]
    return [float(torch.as_tensor(found[0] if isinstance(found, tuple) else found).detach()) for found in returned]


def damping(optimizer: KFAC) -> float:
    return float(optimizer.param_groups[0]["damping"])


def ratio(optimizer: KFAC) -> float:
    return float(optimizer.diagnostics()["reduction_ratio"])


def momenta(optimizer: KFAC, key: str = "momentum_buffer") -> Tensor:
    return flat(state[key] for state in optimizer.state.values() if key in state)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def output_hessian(loss: Callable[..., Tensor], outputs: Tensor, y: Tensor) -> Tensor:
    """Hessian of the loss with respect to the outputs ``[outputs, outputs]``."""

    def of(entries: Tensor) -> Tensor:
        return loss(entries.view(outputs.shape), y)

    found = torch.autograd.functional.hessian(of, outputs.detach().reshape(-1))
    assert isinstance(found, Tensor)
    return found


def gauss_newton(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """``Jᵀ H J`` as a dense matrix ``[P, P]``, with the Jacobian J of all outputs, row by row with reverse mode."""
    model = copy.deepcopy(model)  # a copy has no hooks, which would reject these backward passes
    entries = model(x).reshape(-1)
    J = torch.stack([flat(torch.autograd.grad(e, list(model.parameters()), retain_graph=True)) for e in entries])
    return J.mT @ output_hessian(F.cross_entropy, model(x), y) @ J


def in_order(model: nn.Module, blocks: list[Tensor]) -> Tensor:
    """The block-diagonal matrix in the order of the parameters."""
    found, layers = [], [m for m in model.modules() if isinstance(m, nn.Linear)]
    for layer, block in zip(layers, blocks, strict=True):
        n, d = layer.out_features, layer.in_features
        rows = torch.arange(n * (d + 1)).view(n, d + 1)
        order = torch.cat([rows[:, :d].reshape(-1), rows[:, d]])
        found.append(block[order][:, order])
    return torch.block_diag(*found)
