"""Hugging Face's `Conv1D`: a linear layer whose weight lies transposed, `[in, out]`.

The package of that name is not needed: a stand-in with the same module name and semantics takes its place.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.kfac import assert_close, labels, noise, plain_kfac
from tests.support.layer_cases import Conv1D, GPT2Attention, LayerCase
from tests.support.models import seeded_build
from tests.support.oracles.kfac import solve_exact
from tests.support.oracles.layers import follows_fallback, train

CASE = LayerCase(GPT2Attention, lambda: (noise(4, 3, 4),))


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    package, utils = types.ModuleType("transformers"), types.ModuleType("transformers.pytorch_utils")
    package.pytorch_utils, utils.Conv1D = utils, Conv1D
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", utils)
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")


def frozen(part: str) -> nn.Module:
    model = CASE.model()
    if part:
        getattr(model.c_attn, part).requires_grad_(False)
    return model


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("part", ["", "weight", "bias"], ids=["whole", "weight frozen", "bias frozen"])
def test_factors_and_direction_are_those_of_the_product(part, approx):
    model, (inputs, y) = frozen(part), CASE.data()
    expected = CASE.factors(frozen(part), approx)
    opt = plain_kfac(model, approx=approx)
    F.cross_entropy(model(*inputs), y).backward()
    before, gradients = ({n: CASE.matrix(model, n, read) for n in expected} for read in (copied, gradient_of))
    opt.step()
    CASE.check(opt, expected)
    for name, (A, B) in expected.items():
        moved = before[name] - CASE.matrix(model, name)
        assert_close(moved, solve_exact(B, A, gradients[name], 1e-2), 1e-8, name)


def copied(p: nn.Parameter) -> torch.Tensor:
    return p.detach().clone()


def gradient_of(p: nn.Parameter) -> torch.Tensor:
    return p.grad.clone()


def test_a_module_that_merely_has_the_same_name_is_not_taken_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.pytorch_utils")
    monkeypatch.setattr(Conv1D, "__module__", "somewhere.layers")

    class Other(Conv1D):
        def forward(self, x):
            return super().forward(x).square()

    Other.__name__ = "Conv1D"
    model = seeded_build(lambda: nn.Sequential(Other(3, 4)))
    opt = plain_kfac(model)
    assert follows_fallback(opt, "0.weight", "Conv1D")
    train(opt, model, (noise(4, 4),), labels(4, 3), F.cross_entropy)
