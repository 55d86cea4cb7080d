"""Where K-FAC is exact in theory, it must be exact.

The gradients of the empirical Fisher come from the residuals r = f − y, so the blocks of a linear network are *exactly*
Kronecker products if residuals are independent of the inputs. Here they are independent by design: every input is
paired with every residual of a fixed set.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.support.kfac import assert_close, noise, plain_kfac, train_step, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import Rows, example_rows


def summed_square(output: Tensor, target: Tensor) -> Tensor:
    """(1/N) Σ_n ‖f_n − y_n‖², summed over everything but the examples."""
    return ((output - target) ** 2).sum() / len(output)


def crossed(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Pair every input with the residuals √(J/2)·e_j, j = 1..J, J entries of one output."""
    with torch.no_grad():
        outputs = model(inputs)
    J = outputs[0].numel()
    residuals = math.sqrt(J / 2) * torch.eye(J, dtype=inputs.dtype).reshape(J, *outputs.shape[1:])
    x = inputs.repeat_interleave(J, 0)
    y = outputs.repeat_interleave(J, 0) - residuals.repeat(len(inputs), *[1] * (outputs.ndim - 1))
    return x, y


def empirical_block(rows: Rows) -> Tensor:
    """The exact block (1/N) Σ_n vec(∇ℓ_n) vec(∇ℓ_n)ᵀ, without any Kronecker approximation."""
    vectors = [rows.gradient(n).reshape(-1) for n in range(len(rows.a))]
    return sum(torch.outer(v, v) for v in vectors) / len(vectors)


class Shared(nn.Module):
    """A linear network that uses its weights at several positions; its output is per position or their mean."""

    def __init__(self, kind: str, read: str) -> None:
        super().__init__()
        self.kind, self.read = kind, read
        self.layer = nn.Conv2d(2, 3, 2) if kind == "convolution" else nn.Linear(3, 2)

    def forward(self, x):
        if self.kind == "calls":
            z = torch.stack([self.layer(x[:, s]) for s in range(x.shape[1])], 1)
        else:
            z = self.layer(x).flatten(2).mT if self.kind == "convolution" else self.layer(x)
        return z.mean(1) if self.read == "mean" else z


@pytest.mark.parametrize("kind", ["tokens", "convolution", "calls"])
@pytest.mark.parametrize(("approx", "read"), [("expand", "positions"), ("reduce", "mean")])
def test_weight_sharing_cases_that_are_exact(approx, read, kind):
    """Expand is exact with a loss term per position, reduce with positions averaged before the loss."""
    model = seeded_build(lambda: Shared(kind, read))
    x, y = crossed(model, noise(2, 2, 3, 3) if kind == "convolution" else noise(3, 5, 3))
    exact = empirical_block(example_rows(twin(model), ["layer"], x, y, summed_square)["layer"])
    opt = plain_kfac(model, approx=approx)
    train_step(opt, model, x, y, summed_square)
    assert_close(opt.dense_curvature("layer"), exact, 1e-9)
