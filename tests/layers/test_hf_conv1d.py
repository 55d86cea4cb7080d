"""Hugging Face's `Conv1D`: a linear layer whose weight lies transposed, `[in, out]`.

The package of that name is not needed: a stand-in with the same module name and semantics takes its place.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.kfac import assert_close, labels, noise, plain_kfac, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import solve_exact, solve_pi
from tests.support.oracles.layers import (
    Tape,
    attention,
    block_state,
    check_block,
    expected_pairs,
    follows_fallback,
    singles,
    step_of,
    train,
)

N, S, D = 4, 3, 4


class Conv1D(nn.Module):
    """``x @ weight + bias`` on any leading dimensions."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 2), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    package, utils = types.ModuleType("transformers"), types.ModuleType("transformers.pytorch_utils")
    package.pytorch_utils, utils.Conv1D = utils, Conv1D
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", utils)
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")


class Attention(nn.Module):
    """GPT-2's block: one product for q, k and v, another behind."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.head = Conv1D(3 * D, D), Conv1D(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return self.head(self.c_proj(attention(q, k, v, 2)).mean(1))

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        q, k, v = tape.product("c_attn", x, self.c_attn.weight.mT, self.c_attn.bias).chunk(3, -1)
        z = tape.product("c_proj", attention(q, k, v, 2), self.c_proj.weight.mT, self.c_proj.bias)
        return tape.linear("head", self.head, z.mean(1))


def joined(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight.mT, bias[:, None]], 1)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_factors(approx):
    model, x, y = seeded_build(Attention), noise(N, S, D), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy, approx)
    opt = plain_kfac(model, approx=approx)
    assert "fallback" not in opt.describe()
    train(opt, model, (x,), y, F.cross_entropy)
    for name, pair in expected.items():
        check_block(opt, name, pair)


@pytest.mark.parametrize(("method", "solve"), [("eigen", solve_exact), ("cholesky", solve_pi)])
def test_direction_is_the_dense_solve(method, solve):
    model, x, y = seeded_build(Attention), noise(N, S, D), labels(N, 3)
    A, B = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)["c_attn"]
    opt = plain_kfac(model, damping=0.02, inverse_method=method)
    F.cross_entropy(model(x), y).backward()
    (dw, vw), (db, vb) = step_of(opt, [model.c_attn.weight, model.c_attn.bias])
    assert_close(joined(vw, vb), solve(B, A, joined(dw, db), 0.02), 1e-8)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_part(frozen):
    model, x, y = seeded_build(Attention), noise(N, S, D), labels(N, 3)
    getattr(model.c_attn, frozen).requires_grad_(False)
    plain = twin(model)

    def by_hand(tape, x):
        q, k, v = tape.product("c_attn", x, plain.c_attn.weight.mT, plain.c_attn.bias).chunk(3, -1)
        return plain.head(plain.c_proj(attention(q, k, v, 2)).mean(1))

    expected = expected_pairs(by_hand, singles(x), y.split(1), F.cross_entropy)["c_attn"]
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    assert_close(opt.dense_curvature("c_attn"), torch.kron(expected[1], expected[0]))


def test_it_is_the_linear_layer_of_the_same_numbers():
    class Linear(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    theirs, ours = seeded_build(Linear), seeded_build(Attention)
    with torch.no_grad():
        for name in ("c_attn", "c_proj"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            mine.weight.copy_(other.weight.mT)
            mine.bias.copy_(other.bias)
        ours.head.load_state_dict(theirs.head.state_dict())
    x, y = noise(N, S, D), labels(N, 3)
    options = {"damping": 0.03, "momentum": 0.9, "lr": 0.1, "weight_decay": 0.01}
    optimizers = plain_kfac(ours, **options), plain_kfac(theirs, **options)
    for _ in range(3):
        for opt, model in zip(optimizers, (ours, theirs), strict=True):
            train(opt, model, (x,), y, F.cross_entropy)
    for name in ("c_attn", "c_proj"):
        assert_close(getattr(ours, name).weight.mT.detach(), getattr(theirs, name).weight.detach())
        assert_close(getattr(ours, name).bias.detach(), getattr(theirs, name).bias.detach())
        for side in ("factor_a", "factor_g"):
            assert_close(block_state(optimizers[0], name)[side], block_state(optimizers[1], name)[side])


def test_a_module_that_merely_has_the_same_name_is_not_taken_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.pytorch_utils")
    monkeypatch.setattr(Conv1D, "__module__", "somewhere.layers")

    class Other(Conv1D):
        def forward(self, x):
            return super().forward(x).square()

    Other.__name__ = "Conv1D"
    model = seeded_build(lambda: nn.Sequential(Other(3, D)))
    opt = plain_kfac(model)
    assert follows_fallback(opt, "0.weight", "Conv1D")
    train(opt, model, (noise(N, D),), labels(N, 3), F.cross_entropy)
