"""Helpers that drive ``KFAC`` and read its state, shared by the oracle and the capture tests."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import KFAC
from tests.support.building import built
from tests.support.oracles.kfac import covered_names, expected_factors, layer_gradient, layer_values

# Defaults of the tests: plain steps along the preconditioned gradient, with every update due at every step.
PLAIN = {"lr": 1.0, "momentum": 0.0, "damping": 1e-2, "kl_clip": None, "factor_update_steps": 1, "inv_update_steps": 1}


def plain_kfac(params, **keywords) -> KFAC:
    return built(KFAC, params, **{**PLAIN, **keywords})


def owner(layer: nn.Module) -> nn.Parameter:
    """The parameter whose state contains the layer's curvature."""
    return layer.weight if layer.weight.requires_grad else layer.bias


def layer_state(opt: Any, model: nn.Module, name: str) -> dict[str, Any]:
    return opt.state[owner(model.get_submodule(name))]


def held_factors(opt: KFAC, model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Copies of the current (A, B)."""
    state = layer_state(opt, model, name)
    return state["factor_a"].detach().clone(), state["factor_g"].detach().clone()


def all_factors(opt: KFAC, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: held_factors(opt, model, name) for name in covered_names(model)}


def backward(model: nn.Module, x: Tensor | tuple, y: Tensor, loss: Callable, scale: float = 1.0) -> Tensor:
    """``x`` is the input, or a tuple of several."""
    value = loss(model(*x) if isinstance(x, tuple) else model(x), y)
    (value * scale).backward()
    return value.detach()


def train_step(opt: torch.optim.Optimizer, model: nn.Module, x: Tensor | tuple, y: Tensor, loss: Callable) -> None:
    opt.zero_grad()
    backward(model, x, y, loss)
    opt.step()


def accumulate(model: nn.Module, x: Tensor, y: Tensor, sizes: int | list[int]) -> None:
    """Backward passes of micro-batches of these sizes, whose losses add up to the mean over the whole batch."""
    for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
        (F.cross_entropy(model(a), b, reduction="sum") / len(x)).backward()


def assert_captures(
    model: nn.Module, plain: nn.Module, x: Tensor, y: Tensor, run: Callable[[nn.Module], object], approx: str = "expand"
) -> KFAC:
    """Factors after the backward passes of ``run`` agree with those of the plain model, one example after the other."""
    expected = expected_factors(plain, x, y, F.cross_entropy, approx=approx)
    opt = plain_kfac(model, approx=approx)
    run(model)
    opt.step()
    assert_factors(all_factors(opt, model), expected)
    return opt


def one_step(model: nn.Module, x: Tensor, y: Tensor, loss: Callable, **keywords) -> KFAC:
    """Build an optimizer, train one step, and return the optimizer."""
    opt = plain_kfac(model, **keywords)
    train_step(opt, model, x, y, loss)
    return opt


def directions(
    opt: Any, model: nn.Module, names: list[str] | None = None, values: Callable = layer_values,
    gradient: Callable = layer_gradient,
) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    """Take a step with the current gradients; (∇, V) of every layer, where V is the change of parameters (lr = 1)."""
    layers = {name: model.get_submodule(name) for name in (covered_names(model) if names is None else names)}
    before = {name: (gradient(layer).clone(), values(layer)) for name, layer in layers.items()}
    opt.step()
    return {name: (before[name][0], before[name][1] - values(layer)) for name, layer in layers.items()}


def next_directions(opt: KFAC, model: nn.Module, x: Tensor, y: Tensor, loss: Callable, scale: float = 1.0):
    """Take a step on one more batch, and return (∇, V) of every layer."""
    opt.zero_grad()
    backward(model, x, y, loss, scale)
    return directions(opt, model)


def assert_solves(
    found: dict[str, tuple[Tensor, Tensor]], factors: dict, solve: Callable, damping: float, lr=1.0, tolerance=1e-8
) -> None:
    """Every change is ``lr`` times the solution with its layer's factors."""
    for name, (gradient, step) in found.items():
        A, B = (X.to(torch.float64) for X in factors[name])
        assert_close(step.double(), lr * solve(B, A, gradient.double(), damping), tolerance, name)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9, what: str = "") -> None:
    """Compare relative to the largest entry of ``expected``, because small entries may result from cancellation."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    expected = expected.to(actual.dtype)
    scale = float(expected.abs().max()) or 1.0
    error = float((actual - expected).abs().max()) / scale
    assert error <= tolerance, f"{what}: relative error {error:.3g} > {tolerance:g}"


def assert_factors(
    held: dict[str, tuple[Tensor, Tensor]], expected: dict[str, tuple[Tensor, Tensor]], tolerance: float = 1e-9
) -> None:
    assert held.keys() >= expected.keys()
    for name, (A, B) in expected.items():
        assert_close(held[name][0], A, tolerance, f"A of {name!r}")
        assert_close(held[name][1], B, tolerance, f"B of {name!r}")


def assert_same_factors(opt: KFAC, model: nn.Module, held: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The factors of the optimizer are bitwise equal to these."""
    for name, factors in held.items():
        for now, before in zip(held_factors(opt, model, name), factors, strict=True):
            assert torch.equal(now, before), name


def twin(model: nn.Module) -> nn.Module:
    """An independent copy; make it before an optimizer registers hooks on the model."""
    return copy.deepcopy(model)


HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def hook_counts(model: nn.Module) -> dict[str, list[int]]:
    """Numbers of hooks of every kind on every module and on its own parameters."""
    found = {name: [len(getattr(module, kind)) for kind in HOOKS] for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found[name.rpartition(".")[0]].append(len(getattr(parameter, kind, None) or ()))
    return found


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def labels(n: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))
