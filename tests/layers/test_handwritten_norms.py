"""Norm layers of a model's own are recognized by what they compute, and have the block of torch's norm layers.

The expected second moments come from autograd through the module itself, one example at a time.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo
from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step
from tests.support.models import Net, seeded_build
from tests.support.oracles.layers import follows_fallback
from tests.support.warned import silent

N, S, WIDTH = 6, 5, 256


class NanoGPTNorm(nn.Module):
    def __init__(self, size: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class LlamaNorm(nn.Module):
    """Computes in float32, whatever the input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 3e-3

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class Own(nn.Module):
    """Parameters by their names, and a function of the module and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], size: int, *names: str, eps: float = 1e-5) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.ones(size)))
        self.function, self.eps = function, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def annotated(m: nn.Module, x: Tensor) -> Tensor:
    """That of the Annotated Transformer: eps is outside of the root, and the deviation is unbiased."""
    return m.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + m.eps) + m.b_2


def gemma(m: nn.Module, x: Tensor) -> Tensor:
    """Its scale is 1 + w."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.eps) * (1 + m.weight)


def bias_first(m: nn.Module, x: Tensor) -> Tensor:
    """The shift is the first parameter, and the names reveal nothing."""
    x = x - x.mean(-1, keepdim=True)
    return m.two * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() + m.one


class ConvertingNorm(nn.LayerNorm):
    """That of CLIP, which overrides the forward of torch's layer to compute in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).type(x.dtype)


NORMS = {
    "nanoGPT": (NanoGPTNorm, ("weight", "bias")),
    "nanoGPT without bias": (lambda size: NanoGPTNorm(size, bias=False), ("weight",)),
    "annotated": (lambda size: Own(annotated, size, "a_2", "b_2", eps=1e-2), ("a_2", "b_2")),
    "Llama": (LlamaNorm, ("weight",)),
    "Gemma": (lambda size: Own(gemma, size, "weight", eps=3e-3), ("weight",)),
    "bias first": (lambda size: Own(bias_first, size, "one", "two"), ("two", "one")),
    "CLIP": (ConvertingNorm, ("weight", "bias")),
}


def forward(net: Net, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.norm(net.body(x)))).mean(1)


def built(make, size: int = WIDTH) -> Net:
    def build() -> Net:
        model = Net(forward, body=nn.Linear(3, size), norm=make(size), head=nn.Linear(size, 4))
        for p in model.norm.parameters():
            nn.init.uniform_(p, -0.5, 1.5)  # near 0, an output does not determine its x̂
        return model

    return seeded_build(build)


@pytest.mark.parametrize("case", NORMS)
def test_the_block_is_the_second_moment_of_each_unit(case):
    make, names = NORMS[case]
    model, x, y = built(make), noise(N, S, 3), labels(N, 4)
    with silent():
        opt = plain_kfac(model, lr=0.0)
    assert list(opt.blocks) == ["body", "norm", "head"]
    params = [getattr(model.norm, name) for name in names]
    losses = (F.cross_entropy(model(a), b) for a, b in zip(x.split(1), y.split(1), strict=True))
    u = torch.stack([torch.stack(torch.autograd.grad(loss, params), -1) for loss in losses])  # [N, units, k]
    train_step(opt, model, x, y, F.cross_entropy)
    assert_close(opt.state[params[0]]["factor_g"], torch.einsum("nci,ncj->cij", u, u) / N, 1e-5)


def test_the_argument_may_be_given_by_name():
    layers = {"body": nn.Linear(3, 8), "norm": LlamaNorm(8), "head": nn.Linear(8, 4)}
    model = Net(lambda net, x: net.head(net.norm(hidden_states=net.body(x))).mean(1), **layers).double()
    opt = plain_kfac(model, lr=0.0)
    train_step(opt, model, noise(N, S, 3), labels(N, 4), F.cross_entropy)
    assert opt.state[model.norm.weight]["factor_g"].abs().sum() > 0


@pytest.mark.parametrize(("method", "bias"), [(KFAC, False), (EKFAC, True), (HyLo, False)])
def test_a_model_trains_as_with_torchs_own(method, bias):
    models = [built(lambda size, kind=kind: kind(size, bias=bias), 16) for kind in (NanoGPTNorm, nn.LayerNorm)]
    x, y = noise(N, S, 3), labels(N, 4)
    for model in models:
        opt = method(model, lr=0.05)
        for _ in range(4):
            train_step(opt, model, x, y, F.cross_entropy)
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, theirs)


def test_a_trial_leaves_the_module_as_it_is():
    class Counting(NanoGPTNorm):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x + 0 * torch.rand(()))

    norm = Counting(8).eval()
    norm.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    model, before = nn.Sequential(nn.Linear(3, 8), norm), torch.get_rng_state()
    assert list(KFAC(model).blocks) == ["0", "1"]
    assert torch.equal(torch.get_rng_state(), before)
    assert (norm.calls, norm.training) == (0, False)
    assert torch.equal(norm.weight, torch.ones(8))


class TwoInputs(NanoGPTNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x if residual is None else x + residual)


def layer_norm(m: nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, m.weight.shape, m.weight, m.bias)


OTHERS = {
    "scale": lambda m, x: m.weight * x + m.bias,
    "over the examples": lambda m, x: m.weight * (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt() + m.bias,
    "channels second": lambda m, x: layer_norm(m, x.transpose(1, -1)).transpose(1, -1),
    "dropout": lambda m, x: F.dropout(layer_norm(m, x), 0.3, m.training),
    "square of the scale": lambda m, x: F.layer_norm(x, m.weight.shape, m.weight**2, m.bias),
    "error": lambda m, x: x @ x.new_zeros(3),  # of another size,
}


def test_modules_that_compute_something_else_are_left_out_by_name():
    for norm in (TwoInputs(8), *(Own(function, 8, "weight", "bias") for function in OTHERS.values())):
        model = nn.Sequential(nn.Linear(3, 8), norm)
        with pytest.warns(UserWarning, match=f"{type(norm).__name__} has no adapter"):
            opt = KFAC(model)
        assert list(opt.blocks) == ["0"]
        assert follows_fallback(opt, "1.weight", "no adapter")
