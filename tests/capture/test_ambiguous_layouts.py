"""Shapes that coincide: as many positions as examples, one set of latents for all examples, inputs of one dimension.

Wanted are directions by per-example autograd, or the number of examples; where nothing tells, a layer is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo

DAMPING = 0.1


class Windows(nn.Module):
    """A layer on windows of 4 × 4 pixels, ``[4 N, 16, 5]``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        windows = x.view(n, 2, 4, 2, 4, 5).transpose(2, 3).reshape(n * 4, 16, 5)
        return torch.tanh(self.layer(windows)).reshape(n, -1)


class Turned(nn.Module):
    """A layer on ``[T, N, 5]`` inside a model whose input is ``[N, T, 5]``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.transpose(0, 1))).transpose(0, 1).flatten(1)


class Patches(nn.Module):
    """As many patches as there are of a picture, ``[S, N, 5]``, through attention and a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        patches = x.flatten(1, 2).transpose(0, 1)
        patches = patches + self.attention(patches, patches, patches, need_weights=False)[0]
        return torch.tanh(self.layer(patches)).transpose(0, 1).flatten(1)


def solved(model: nn.Module, layer: nn.Module, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Direction of a norm by its per-example gradients: blocks of scale and shift."""
    rows = []
    for i in range(len(x)):
        loss = (model(x[i : i + 1]) * weights[i : i + 1]).sum()
        rows.append(torch.stack(torch.autograd.grad(loss, (layer.weight, layer.bias)), 1))
    u = torch.stack(rows)
    blocks = torch.einsum("nci,ncj->cij", u, u) / len(x) + DAMPING * torch.eye(2, dtype=x.dtype)
    found = torch.linalg.solve(blocks, u.mean(0))
    return found[:, 0], found[:, 1]


def step(optimizer: Any, model: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    optimizer.zero_grad()
    ((model(x) * weights).sum() / len(x)).backward()
    with optimizer.keep_directions() as kept:
        optimizer.step()
    return dict(kept)


@pytest.mark.parametrize("n", [15, 17])
@pytest.mark.parametrize("kind", [Windows, Turned, Patches])
def test_where_the_shape_tells(kind: Callable[[nn.Module], nn.Module], n: int) -> None:
    agrees(kind, n, (n, 8, 8, 5) if kind is not Turned else (n, 30, 5))


@pytest.mark.parametrize("n", [8, 16])
def test_sequences_as_long_as_the_input(n: int) -> None:
    agrees(Turned, n, (n, 2 * n, 5))


@pytest.mark.parametrize("n", [8, 16])
def test_sequences_that_attention_knows(n: int) -> None:
    agrees(Patches, n, (n, 8, 8, 5))


def agrees(kind: Callable[[nn.Module], nn.Module], n: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.LayerNorm(5)
    model = kind(layer).double()
    x, weights = torch.randn(shape).double(), torch.randn(n, math.prod(shape[1:])).double()
    optimizer = KFAC(model, lr=0.0, damping=DAMPING, kl_clip=None)
    kept = step(optimizer, model, x, weights)
    with optimizer.pause_capture():
        weight, bias = solved(model, layer, x, weights)
    torch.testing.assert_close(kept["layer.weight"], weight, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(kept["layer.bias"], bias, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "keywords", "layer"),
    [
        (KFAC, {}, nn.LayerNorm(5)),
        (KFAC, {"approx": "reduce"}, nn.Linear(5, 5)),
        (EKFAC, {}, nn.Linear(5, 5)),
        (HyLo, {"mode": "sngd", "approx": "expand"}, nn.Linear(5, 5)),
    ],
    ids=["norm", "reduce", "scale", "rows"],
)
def test_where_nothing_tells_the_layer_is_left_out_aloud(kind: Any, keywords: dict[str, Any], layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = Windows(layer).double()
    optimizer = kind(model, lr=0.0, damping=DAMPING, kl_clip=None, **keywords)
    with pytest.warns(UserWarning, match="may have the examples of the batch in their second dimension or"):
        step(optimizer, model, torch.randn(16, 8, 8, 5).double(), torch.randn(16, 320).double())


def test_factors_of_all_rows_need_no_examples(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = Windows(nn.Linear(5, 5)).double()
    optimizer = KFAC(model, lr=0.0, damping=DAMPING, kl_clip=None)
    x = torch.randn(16, 8, 8, 5).double()
    step(optimizer, model, x, torch.randn(16, 320).double())
    rows = torch.cat([x.reshape(-1, 5), torch.ones(1024, 1).double()], 1)
    torch.testing.assert_close(optimizer.state[model.layer.weight]["factor_a"], rows.T @ rows / len(rows))
    assert not [w for w in recwarn if "left out" in str(w.message)]


class Latents(nn.Module):
    """Latents that all examples share go through attention before they meet the examples."""

    def __init__(self, words: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(20, 8) if words else nn.Linear(3, 8)
        self.latents = nn.Parameter(torch.randn(1, 4, 8))
        self.among = nn.MultiheadAttention(8, 2, batch_first=True)
        self.across = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h if h.dim() == 3 else h[:, None]
        z = self.among(self.latents, self.latents, self.latents, need_weights=False)[0].expand(len(x), -1, -1)
        found: Tensor = self.out(self.across(z, h, h, need_weights=False)[0].mean(1))
        return found


class Conditioned(nn.Module):
    """A layer is applied to one vector for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.vector = nn.Parameter(torch.randn(6))
        self.film = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.words(x) * self.film(self.vector)))
        return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", ["latents, words", "latents, features", "one vector"])
def test_what_all_examples_share_does_not_make_them_one(case: str) -> None:
    torch.manual_seed(0)
    n = 32
    model = (Conditioned() if case == "one vector" else Latents("words" in case)).double()
    x = {
        "latents, words": torch.randint(20, (n, 7)),
        "latents, features": torch.randn(n, 3).double(),
        "one vector": torch.randint(20, (n,)),
    }[case]
    optimizer = KFAC(model, lr=0.0, damping=DAMPING, kl_clip=None)
    outputs = model(x)
    outputs.retain_grad()
    ((outputs * torch.randn(n, 3).double()).sum() / n).backward()
    optimizer.step()
    assert outputs.grad is not None
    rows = outputs.grad * n
    state = optimizer.state[model.out.weight]
    torch.testing.assert_close(state["factor_g"], rows.T @ rows / n)
    assert state["factor_weight"] == n


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ["features", "sequence", "picture"])
def test_a_model_without_a_batch_is_one_example(what: str) -> None:
    torch.manual_seed(0)
    layers: dict[str, tuple[nn.Module, Tensor]] = {
        "features": (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6)),
        "sequence": (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), torch.randn(7, 6)),
        "picture": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3)), torch.randn(2, 7, 7)),
    }
    model, x = layers[what]
    optimizer = KFAC(model, lr=0.0, damping=DAMPING, kl_clip=None)
    model(x).square().sum().backward()
    optimizer.step()
    weights = [float(s["factor_weight"]) for s in optimizer.state.values() if "factor_weight" in s]
    assert weights
    assert set(weights) == {1.0}
