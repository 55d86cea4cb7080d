"""The Fisher of a model's own output distribution, computed from its definition in plain loops.

Let ``f`` be the outputs of one example and ``ℓ(f)`` its loss. With ``H = ∂²ℓ/∂f²`` and any ``S`` with ``S Sᵀ = H``, the
exact Fisher sums over the columns ``v`` of S, each backpropagated through the network as if it were the gradient of ℓ.
All compared quantities are quadratic in ``v`` and summed over the columns, so they depend on H only. S comes from an
eigendecomposition of the Hessian that autograd computes from the loss, without any explicit formula for S.

    symbol      shape                  meaning
    a           [Γ, S, n_a]            rows of one example at a layer's input (the 1 last, iff the bias is trained)
    g           [K, Γ, S, n_g]         ``v_k`` backpropagated to the layer's output, for every column k
    G           [K, Γ, n_g, n_a]       Σ_s g aᵀ
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import secondorder
from secondorder import EKFAC, KFAC
from tests.support.building import built
from tests.support.kfac import PLAIN, assert_close, held_factors
from tests.support.oracles.kfac import Rows, example_rows, factors, heads, one_example, without_groups

Loss = Callable[[Any, Any], Tensor]  # loss of one example from its outputs (batch of one) and its targets


# ------------------------------------------------------------------------------------------------ Losses of one example


cross_entropy = partial(F.cross_entropy, reduction="sum")
summed_square, mean_square = partial(F.mse_loss, reduction="sum"), F.mse_loss
summed_bce, mean_bce = partial(F.binary_cross_entropy_with_logits, reduction="sum"), F.binary_cross_entropy_with_logits

#: The likelihood that `observe` receives, and the loss of one example.
LOSSES: dict[str, tuple[Any, Loss]] = {
    "categorical": ("categorical", cross_entropy),
    "Categorical": (secondorder.Categorical(), cross_entropy),
    "gaussian": ("gaussian", summed_square),
    "Gaussian": (secondorder.Gaussian(), summed_square),
    "gaussian mean": (secondorder.Gaussian(mean=True), mean_square),
    "gaussian variance": (secondorder.Gaussian(variance=0.3), lambda f, y: summed_square(f, y) / 0.6),
    "bernoulli": ("bernoulli", summed_bce),
    "Bernoulli": (secondorder.Bernoulli(), summed_bce),
    "bernoulli mean": (secondorder.Bernoulli(mean=True), mean_bce),
}


# ---------------------------------------------------------------------------------------- Columns of the output Hessian


def columns(outputs: Any, loss: Callable[[Any], Tensor]) -> list[tuple[Tensor, ...]]:
    """Every column of a root of the Hessian of ``loss`` at ``outputs``, in the form of the outputs."""
    parts = heads(outputs)
    sizes = [part.numel() for part in parts]

    def restored(flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(piece.reshape(part.shape) for piece, part in zip(flat.split(sizes), parts, strict=True))

    def value(flat: Tensor) -> Tensor:
        found = restored(flat)
        return loss(found if isinstance(outputs, tuple) else found[0])

    here = torch.cat([part.detach().reshape(-1) for part in parts])
    curvature = torch.autograd.functional.hessian(value, here)
    values, vectors = torch.linalg.eigh(curvature)
    kept = values > 1e-14 * values.max()
    kept[-1] = True  # where there is no curvature at all, a column of zeros
    return [restored(v) for v in (vectors[:, kept] * values[kept].clamp(min=0).sqrt()).T]


# --------------------------------------------------------------------------------------- Rows of Linear and Conv layers


class Observed(Rows):
    """The rows of every example at one layer, with the columns of the Hessian: ``g[n]`` is ``[K, Γ, S, n_g]``."""

    def factors(self, approx: str = "expand") -> tuple[Tensor, Tensor]:
        return without_groups(*factors(self, approx))

    def gradients(self) -> list[Tensor]:
        return [self.gradient(n) for n in range(len(self.a))]

    def scale(self, basis_a: Tensor, basis_g: Tensor) -> Tensor:
        """Second moments in a basis: (1/N) Σ_n Σ_k (Q_gᵀ G Q_a)²."""
        total = sum((basis_g.mT @ G @ basis_a).square().sum(0) for G in self.gradients()) / len(self.a)
        return total[0] if basis_a.ndim == 2 else total

    def block(self) -> Tensor:
        """The exact block (1/N) Σ_n Σ_k vec(G) vec(G)ᵀ."""
        vectors = torch.cat([G.flatten(1) for G in self.gradients()])
        return vectors.T @ vectors / len(self.a)


def observed(model: nn.Module, names: Sequence[str], x: Tensor, y: Any, loss: Loss) -> dict[str, Observed]:
    """Run a copy of the model on one example at a time, and backpropagate every column to the layers' outputs."""
    found = example_rows(model, names, x, y, None, columns=lambda f, y: columns(f, lambda f: loss(f, y)))
    return {name: Observed(rows.a, rows.g) for name, rows in found.items()}


def assert_observed(
    opt: Any, model: nn.Module, rows: dict[str, Observed], approx: str = "expand", prefix: str = ""
) -> None:
    """Both factors of every layer agree with the definition."""
    for name, found in rows.items():
        for mine, theirs in zip(held_factors(opt, model, prefix + name), found.factors(approx), strict=True):
            assert_close(mine, theirs, 1e-9, name)


# ------------------------------------------------------------------------------------------------------- Any parameters


def parameter_gradients(model: nn.Module, names: Sequence[str], x: Tensor, y: Any, loss: Loss) -> list[Tensor]:
    """∇⟨f_n, v_k⟩ with respect to some parameters, flattened and joined: ``[K, P]`` per example."""
    model = copy.deepcopy(model)
    chosen = [dict(model.named_parameters())[name] for name in names]
    found = []
    for n in range(len(x)):
        outputs = model(x[n : n + 1])
        roots = columns(outputs, lambda f, n=n: loss(f, one_example(y, n)))
        rows = [torch.autograd.grad(heads(outputs), chosen, v, retain_graph=True) for v in roots]
        found.append(torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows]))
    return found


def hessian_block(model: nn.Module, name: str, objective: Callable[[Callable], Tensor]) -> Tensor:
    """Hessian of ``objective(forward)`` with respect to row-major vec([W | b]) of one layer, by autograd."""
    layer = model.get_submodule(name)
    rows, has_bias = layer.weight.shape[0], layer.bias is not None
    parts = [layer.weight.detach().flatten(1)] + ([layer.bias.detach()[:, None]] if has_bias else [])
    theta = torch.cat(parts, 1)

    def value(flat: Tensor) -> Tensor:
        matrix = flat.reshape(rows, -1)
        weight = matrix[:, : matrix.shape[1] - has_bias].reshape(layer.weight.shape)
        changed = {f"{name}.weight": weight} | ({f"{name}.bias": matrix[:, -1]} if has_bias else {})
        return objective(lambda x: functional_call(model, changed, (x,)))

    return torch.autograd.functional.hessian(value, theta.reshape(-1))


# ----------------------------------------------------------------------------------------------- Driving the optimizers

METHODS = {"kfac": KFAC, "ekfac": EKFAC}
#: Parameters stay fixed and averages have no memory, so that the estimate of every step is that of its own batch.
STILL = {**PLAIN, "lr": 0.0, "factor_decay": 0.0, "refresh_warmup": False}


def still(model: nn.Module, fisher: str, method: type = KFAC, **keywords: Any):
    return built(method, model, **{**STILL, "fisher": fisher, **keywords})


def observed_step(opt: Any, model: nn.Module, x: Any, likelihood: Any, targets: Any = None) -> None:
    """One training step with ``observe`` and an objective that is unrelated to the likelihood."""
    opt.zero_grad()
    outputs = model(x)
    opt.observe(outputs, likelihood, targets)
    unrelated(outputs).backward()
    opt.step()


def unrelated(outputs: Any) -> Tensor:
    """A loss whose gradients must not be found in any observed statistic."""
    return sum(3 * part.float().sin().mean() + part.float().mean() for part in heads(outputs))


def measured_scale(opt: Any, model: nn.Module, step: Callable[[], None]) -> None:
    """Take two equal steps of EK-FAC, because the first one has no basis in which to measure the scales."""
    step()
    step()


def quiet(make: Callable[[], Any]) -> Any:
    """Construct without the warning about intervals that are no multiples of each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def assert_mean(draws: Tensor, expected: Tensor, what: str, precision: float = 0.05) -> None:
    """The mean of independent draws ``[T, …]`` is within 5 standard errors, which must be small."""
    error = draws.std(0) / len(draws) ** 0.5
    size = float(expected.abs().max())
    assert float(error.max()) <= precision * size, f"{what}: the test is too weak ({float(error.max()) / size:.3g})"
    distance = (draws.mean(0) - expected).abs()
    worst = float((distance / (5 * error + 1e-10 * size)).max())
    assert worst <= 1, f"{what}: off by {5 * worst:.3g} standard errors"
