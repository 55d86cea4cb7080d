"""Ambiguous shapes: as many positions as examples, one set of latents for all examples, inputs of one dimension.

The oracle is per-example autograd, or the number of examples. A layer whose layout remains unknown is left out.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo
from tests.support.building import built
from tests.support.kfac import plain_kfac, train_step
from tests.support.models import Net, seeded_build
from tests.support.networks import squares
from tests.support.oracles.kfac import expected_factors

DAMPING = 0.1


def in_windows(net: Any, x: Tensor) -> Tensor:
    """A layer on windows of 4 × 4 pixels, ``[4 N, 16, 5]``."""
    n = len(x)
    windows = x.view(n, 2, 4, 2, 4, 5).transpose(2, 3).reshape(n * 4, 16, 5)
    return torch.tanh(net.layer(windows)).reshape(n, -1)


def in_turn(net: Any, x: Tensor) -> Tensor:
    """A layer on ``[T, N, 5]`` inside a model whose input is ``[N, T, 5]``."""
    return torch.tanh(net.layer(x.transpose(0, 1))).transpose(0, 1).flatten(1)


def in_patches(net: Any, x: Tensor) -> Tensor:
    """The patches of a picture, ``[S, N, 5]``, go through attention and a layer."""
    patches = x.flatten(1, 2).transpose(0, 1)
    patches = patches + net.attention(patches, patches, patches, need_weights=False)[0]
    return torch.tanh(net.layer(patches)).transpose(0, 1).flatten(1)


def using(function: Callable[[Any, Tensor], Tensor], layer: nn.Module) -> Net:
    others = {"attention": nn.MultiheadAttention(5, 1)} if function is in_patches else {}
    return Net(function, layer=layer, **others)


def solved(model: nn.Module, layer: nn.Module, x: Tensor, weights: Tensor, alone: bool = True) -> tuple[Tensor, Tensor]:
    """Directions of a norm's scale and shift by per-example gradients, of examples alone or within the batch."""
    rows = []
    for i in range(len(x)):
        one = slice(i, i + 1)
        loss = (model(x[one]) * weights[one] if alone else (model(x) * weights)[one]).sum()
        rows.append(torch.stack(torch.autograd.grad(loss, (layer.weight, layer.bias)), 1))
    u = torch.stack(rows)
    blocks = torch.einsum("nci,ncj->cij", u, u) / len(x) + DAMPING * torch.eye(2, dtype=x.dtype)
    found = torch.linalg.solve(blocks, u.mean(0))
    return found[:, 0], found[:, 1]


def assert_solved(model: nn.Module, layer: nn.Module, x: Tensor, alone: bool = True) -> None:
    weights = torch.randn(len(x), x[0].numel()).double()
    optimizer = KFAC(model, lr=0.0, damping=DAMPING, kl_clip=None)
    kept = step(optimizer, model, x, weights)
    with optimizer.pause_capture():
        expected = solved(model, layer, x, weights, alone)
    for name, direction in zip(("weight", "bias"), expected, strict=True):
        torch.testing.assert_close(kept[f"layer.{name}"], direction, rtol=1e-8, atol=1e-10)


def step(optimizer: Any, model: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    optimizer.zero_grad()
    ((model(x) * weights).sum() / len(x)).backward()
    with optimizer.keep_directions() as kept:
        optimizer.step()
    return dict(kept)


#: What the model does, number of examples, shape of the input.
DETERMINED = [
    *((function, n, (n, 8, 8, 5)) for function in (in_windows, in_patches) for n in (15, 17)),
    *((in_patches, n, (n, 8, 8, 5)) for n in (8, 16)),  # attention knows its own layout
    *((in_turn, n, (n, 30, 5)) for n in (15, 17)),
    *((in_turn, n, (n, 2 * n, 5)) for n in (8, 16)),  # the input has the same number of positions
]


@pytest.mark.parametrize(("function", "n", "shape"), DETERMINED)
def test_layouts_that_can_be_inferred(
    function: Callable[[Any, Tensor], Tensor], n: int, shape: tuple[int, ...]
) -> None:
    layer = nn.LayerNorm(5)
    assert_solved(using(function, layer).double(), layer, torch.randn(shape).double())


def test_expanded_factors_do_not_need_the_layout(recwarn: pytest.WarningsRecorder) -> None:
    model = using(in_windows, nn.Linear(5, 5)).double()
    optimizer = KFAC(model, lr=0.0, damping=DAMPING, kl_clip=None)
    x = torch.randn(16, 8, 8, 5).double()
    step(optimizer, model, x, torch.randn(16, 320).double())
    rows = torch.cat([x.reshape(-1, 5), torch.ones(1024, 1).double()], 1)
    torch.testing.assert_close(optimizer.state[model.layer.weight]["factor_a"], rows.T @ rows / len(rows))
    assert not [w for w in recwarn if "left out" in str(w.message)]


def among_latents(net: Any, x: Tensor) -> Tensor:
    """Latents that all examples share go through attention before they are combined with the examples."""
    h = net.first(x)
    h = h if h.dim() == 3 else h[:, None]
    z = net.among(net.latents, net.latents, net.latents, need_weights=False)[0].expand(len(x), -1, -1)
    return net.out(net.across(z, h, h, need_weights=False)[0].mean(1))


def latents(first: nn.Module) -> Net:
    among, across = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
    shared = nn.Parameter(torch.randn(1, 4, 8))
    return Net(among_latents, first=first, latents=shared, among=among, across=across, out=nn.Linear(8, 3))


def conditioned() -> Net:
    """A layer is applied to one vector for all examples."""
    return Net(
        lambda net, x: net.out(torch.tanh(net.words(x) * net.film(net.vector))),
        words=nn.Embedding(20, 6), vector=nn.Parameter(torch.randn(6)), film=nn.Linear(6, 6), out=nn.Linear(6, 3),
    )  # fmt: skip


def prototypes() -> Net:
    """Features are compared with learned vectors, which attend to each other."""
    forward = lambda net, x: net.out(x) @ net.among(*[net.vectors] * 3, need_weights=False)[0][0].T  # noqa: E731
    vectors, among = nn.Parameter(torch.randn(1, 5, 8)), nn.MultiheadAttention(8, 2, batch_first=True)
    return Net(forward, out=nn.Linear(3, 8), vectors=vectors, among=among)


N = 32
WORDS, FEATURES = torch.arange(N * 7).view(N, 7) % 20, torch.linspace(-1, 1, N * 3).view(N, 3).sin().double()
SHARED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "latents, words": (lambda: latents(nn.Embedding(20, 8)), WORDS),
    "latents, features": (lambda: latents(nn.Linear(3, 8)), FEATURES),
    "one vector": (conditioned, WORDS[:, 0]),
    "prototypes": (prototypes, FEATURES),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", SHARED)
def test_parameters_that_all_examples_share_do_not_count_as_one_example(case: str) -> None:
    build, x = SHARED[case]
    model = seeded_build(build)
    y = torch.zeros_like(model(x))
    _, B = expected_factors(model, x, y, squares, ["out"])["out"]
    optimizer = plain_kfac(model, lr=0.0)
    train_step(optimizer, model, x, y, squares)
    torch.testing.assert_close(optimizer.state[model.out.weight]["factor_g"], B)
    assert optimizer.state[model.out.weight]["factor_weight"] == N


def known(neighbor: nn.Module, windows: bool) -> Net:
    """A norm on ``[T, N, 5]`` or on windows ``[kN, N, 5]``, next to a layer whose options define its layout."""

    def in_windows(net: Any, x: Tensor) -> Tensor:
        n, h = len(x), net.first(x)
        h = h + net.neighbor(h, h, h, need_weights=False)[0]
        return torch.tanh(net.layer(h.reshape(-1, n, 5) if n in (4, 8) else h)).reshape(n, -1)

    def in_turn(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).transpose(0, 1)
        inputs = (net.layer(h), h, h) if isinstance(net.neighbor, nn.MultiheadAttention) else (net.layer(h),)
        return torch.tanh(net.neighbor(*inputs)[0]).transpose(0, 1).flatten(1)

    forward = in_windows if windows else in_turn
    return Net(forward, first=nn.Linear(5, 5), neighbor=neighbor, layer=nn.LayerNorm(5))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize("case", ["LSTM", "attention", "frozen attention", "windows"])
def test_modules_with_a_defined_layout_determine_that_of_others(case: str, n: int) -> None:
    windows = case == "windows"
    neighbor = nn.LSTM(5, 5) if case == "LSTM" else nn.MultiheadAttention(5, 1, batch_first=windows)
    model = known(neighbor.requires_grad_("frozen" not in case), windows).double()
    # windows of as many positions as the batch has examples: one example alone cannot be cut into them.
    assert_solved(model, model.layer, torch.randn(n, 16, 5).double(), alone=not windows)


def relative(net: Any, x: Tensor) -> Tensor:
    """A table is looked up for each pair of positions, once for all examples."""
    places = torch.arange(x.shape[1])
    bias = net.table((places[None] - places[:, None]).clamp(-4, 4) + 4)[..., 0]
    h = net.words(x)
    return net.out((torch.softmax(h @ h.mT + bias, -1) @ h).mean(1))


def of_pairs() -> Net:
    return Net(relative, words=nn.Embedding(9, 4), table=nn.Embedding(9, 1), out=nn.Linear(4, 3))


UNKNOWN = "may have the examples of the batch in their second dimension or"
WINDOWS = torch.linspace(-9, 9, 16 * 320).view(16, 8, 8, 5).sin().double()
#: Method, its keywords, a model, its input, and a part of the warning.
LEFT_OUT: dict[str, tuple[Any, dict[str, Any], Callable[[], nn.Module], Tensor, str]] = {
    "norm": (KFAC, {}, lambda: using(in_windows, nn.LayerNorm(5)), WINDOWS, UNKNOWN),
    "reduce": (KFAC, {"approx": "reduce"}, lambda: using(in_windows, nn.Linear(5, 5)), WINDOWS, UNKNOWN),
    "scale": (EKFAC, {}, lambda: using(in_windows, nn.Linear(5, 5)), WINDOWS, UNKNOWN),
    "rows": (HyLo, {"mode": "sngd", "approx": "expand"}, lambda: using(in_windows, nn.Linear(5, 5)), WINDOWS, UNKNOWN),
    "observed norm": (KFAC, {"fisher": "exact"}, lambda: using(in_windows, nn.LayerNorm(5)), WINDOWS, UNKNOWN),
    "observed, EKFAC": (EKFAC, {"fisher": "exact"}, lambda: using(in_windows, nn.LayerNorm(5)), WINDOWS, UNKNOWN),
    "as many positions as examples": (
        KFAC, {}, lambda: known(nn.MultiheadAttention(5, 1), False), WINDOWS.view(16, -1, 5)[:, :16], UNKNOWN,
    ),
    "table of pairs": (EKFAC, {}, of_pairs, torch.arange(32).view(4, 8) % 9, "table"),
    "table of pairs, odd": (EKFAC, {}, of_pairs, torch.arange(40).view(5, 8) % 9, "table"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_layer_of_unknown_layout_is_left_out_with_a_warning(case: str) -> None:
    kind, keywords, build, x, message = LEFT_OUT[case]
    model = build().double()
    optimizer = built(kind, model, lr=0.0, damping=DAMPING, kl_clip=None, **keywords)

    def train() -> None:
        for _ in range(2):  # the second measures a scale
            outputs = model(x)
            optimizer.observe(outputs, "gaussian")
            (outputs.square().sum() / len(x)).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=message):
        train()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_without_a_batch_is_one_example() -> None:
    """A convolution is as wide as its input, and a layer sees the means of its channels."""
    pooled = nn.Sequential(nn.Flatten(-2), nn.AdaptiveAvgPool1d(1), nn.Flatten(-2))
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), pooled, nn.Linear(3, 4))
    optimizer = KFAC(model, lr=0.0, damping=DAMPING, kl_clip=None)
    model(torch.randn(3, 6, 6)).square().sum().backward()
    optimizer.step()
    assert [float(s["factor_weight"]) for s in optimizer.state.values() if "factor_weight" in s] == [1.0, 1.0]
