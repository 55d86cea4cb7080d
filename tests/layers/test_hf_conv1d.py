"""Hugging Face's `Conv1D`: a linear layer whose weight lies transposed, `[in, out]`.

The package of that name is not needed: a stand-in with the same module name and semantics takes its place.
"""

import sys
import types

import pytest
import torch.nn.functional as F
from torch import nn

from secondorder.capture.layers.others import hugging_face_conv1d
from tests.support.kfac import assert_close, noise, plain_kfac
from tests.support.layer_cases import Conv1D, GPT2Attention, LayerCase
from tests.support.models import seeded_build
from tests.support.oracles.kfac import solve_exact
from tests.support.oracles.layers import follows_fallback

CASE = LayerCase(GPT2Attention, lambda: (noise(4, 3, 4),))
MODULE = "transformers.pytorch_utils"


def frozen(part: str) -> nn.Module:
    model = CASE.model()
    if part:
        getattr(model.c_attn, part).requires_grad_(False)
    return model


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("part", ["", "weight", "bias"], ids=["whole", "weight frozen", "bias frozen"])
def test_factors_and_direction_are_those_of_the_product(part, approx, monkeypatch):
    package, utils = types.ModuleType("transformers"), types.ModuleType(MODULE)
    package.pytorch_utils, utils.Conv1D = utils, Conv1D
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, MODULE, utils)
    monkeypatch.setattr(Conv1D, "__module__", MODULE)
    model, (inputs, y) = frozen(part), CASE.data()
    expected = CASE.factors(frozen(part), approx)
    opt = plain_kfac(model, approx=approx)
    F.cross_entropy(model(*inputs), y).backward()
    before = {name: CASE.matrix(model, name) for name in expected}
    gradients = {name: CASE.matrix(model, name, lambda p: p.grad.clone()) for name in expected}
    opt.step()
    CASE.check(opt, expected)
    for name, (A, B) in expected.items():
        moved = before[name] - CASE.matrix(model, name)
        assert_close(moved, solve_exact(B, A, gradients[name], 1e-2), 1e-8, name)


def test_it_is_found_once_it_is_imported_and_nothing_that_merely_has_its_name(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert hugging_face_conv1d() is None
    library = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, library)
    assert hugging_face_conv1d() is None
    model = seeded_build(lambda: nn.Sequential(Conv1D(3, 4)))  # of the same name
    assert follows_fallback(plain_kfac(model), "0.weight", "Conv1D")
    library.Conv1D = Conv1D
    assert hugging_face_conv1d() is Conv1D
