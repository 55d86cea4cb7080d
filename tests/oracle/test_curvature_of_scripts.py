"""EK-FAC's scale and HyLo's rows where the number of examples, or their dimension, must be found out.

The oracle passes one example after the other through the model in float64, and takes the gradient of each.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo
from tests.support.building import built
from tests.support.kfac import held_factors, labels, noise
from tests.support.models import seeded_build
from tests.support.networks import Cell, applied, masked, scanned
from tests.support.oracles.ekfac import exact_fisher, layer_gradients, measured_scales, operator

EXAMPLES, TIMES, WIDTH, CLASSES = 8, 6, 4, 10


class TimesFirst(nn.Module):
    """Takes ``[T, N, d]``, which only its attention or recurrent layer shows."""

    def __init__(self, mixer: nn.Module, flat: bool) -> None:
        super().__init__()
        self.mixer, self.norm, self.outer, self.flat = mixer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES), flat

    def forward(self, x: Tensor) -> Tensor:
        given = (x, x, x) if isinstance(self.mixer, nn.MultiheadAttention) else (x,)
        h = self.mixer(*given)[0]
        return self.outer(self.norm(h.flatten(0, 1) if self.flat else h)).view(*x.shape[:2], CLASSES)


def transposed(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x.transpose(0, 1)).transpose(0, 1)


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], tuple[str, ...]]] = {
    "a loop over time": (Cell, lambda cell, x: transposed(partial(scanned, cell), x), ("inner", "outer")),
    "a mask first": (masked, lambda model, x: model(noise(TIMES, TIMES, seed=3), x), ("inner", "outer")),
    "attention": (lambda: TimesFirst(nn.MultiheadAttention(WIDTH, 2), False), transposed, ("norm", "outer")),
    "attention, flattened": (lambda: TimesFirst(nn.MultiheadAttention(WIDTH, 2), True), transposed, ("norm", "outer")),
    "a recurrent layer": (lambda: TimesFirst(nn.GRU(WIDTH, WIDTH), False), transposed, ("norm", "outer")),
    "a recurrent layer, flattened": (lambda: TimesFirst(nn.GRU(WIDTH, WIDTH), True), transposed, ("norm", "outer")),
}


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.filterwarnings("ignore:.*follow the fallback")
@pytest.mark.parametrize("method", [EKFAC, HyLo])
@pytest.mark.parametrize("script", SCRIPTS)
def test_curvature_is_that_of_single_examples(script: str, method: Any) -> None:
    build, function, names = SCRIPTS[script]
    model = seeded_build(build)
    x, y = noise(EXAMPLES, TIMES, WIDTH), labels(EXAMPLES * TIMES, CLASSES).view(EXAMPLES, TIMES)
    whole = applied(copy.deepcopy(model), function)
    rows = {"update_steps": 1, "rank_fraction": 1.0, "approx": "expand"}
    every_step = {"factor_update_steps": 1, "inv_update_steps": 1, "scale_decay": 0.0}
    opt = built(method, model, lr=0.0, damping=0.1, **(rows if method is HyLo else every_step))
    for _ in range(2):
        opt.zero_grad()
        loss(function(model, x), y).backward()
        opt.step()
    for name in names:
        gradients = layer_gradients(whole, f"model.{name}", x, y, loss)
        expected = exact_fisher(gradients)
        if method is EKFAC and name != "norm":  # the block of a norm is exact
            state = opt.state[model.get_submodule(name).weight]
            bases = state["basis_g"], state["basis_a"]
            expected = operator(bases[0], measured_scales(whole, f"model.{name}", x, y, bases, "intra", loss), bases[1])
        found = opt.dense_curvature(name)
        if name == "norm":  # one block for each unit
            found, expected = found.diagonal(), expected.diagonal()
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*follow the fallback")
@pytest.mark.parametrize("times", [8, 6])
def test_observed_factors_of_a_model_with_times_first(times: int) -> None:
    """The loss curvature is pulled back term by term, by the oracle with one backward pass for each."""
    model = seeded_build(lambda: TimesFirst(nn.MultiheadAttention(WIDTH, 1), False))
    x, y = noise(times, 4, WIDTH), labels(times * 4, CLASSES).view(times, 4)
    h = model.mixer(x, x, x)[0].detach().requires_grad_()
    normed = model.norm(h)
    logits = model.outer(normed)
    p = logits.detach().softmax(-1)
    root = torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]
    expected = sum(
        torch.autograd.grad(logits, normed, root[..., c], retain_graph=True)[0].flatten(0, 1).square().sum()
        for c in range(CLASSES)
    ) / (times * 4)
    opt = built(KFAC, model, lr=0.0, fisher="exact", factor_update_steps=1)
    outputs = model(x)
    opt.observe(outputs, "categorical", y)
    loss(outputs, y).backward()
    opt.step()
    _, G = held_factors(opt, model, "outer")
    W = model.outer.weight.detach()
    torch.testing.assert_close((W.T @ G @ W).trace(), expected.detach(), rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*follow the fallback")
def test_a_scale_of_one_drawn_example_with_times_first() -> None:
    """There are twice as many times as examples, so a part of the first dimension could be taken for examples."""
    model, examples = seeded_build(lambda: TimesFirst(nn.MultiheadAttention(WIDTH, 1), False)), 4
    x, y = noise(examples, 2 * examples, WIDTH), labels(2 * examples**2, CLASSES).view(examples, -1)
    gradients = layer_gradients(applied(copy.deepcopy(model), transposed), "model.outer", x, y, loss)
    opt = built(
        EKFAC, model, lr=0.0, damping=0.1, factor_update_steps=1, inv_update_steps=100, scale_decay=0.0,
        scale_batch_size=1, refresh_warmup=False,
    )  # fmt: skip
    drawn = set()
    for _ in range(9):
        opt.zero_grad()
        loss(transposed(model, x), y).backward()
        opt.step()
        state = opt.state[model.outer.weight]
        if not state["scale_updates"]:
            continue  # the scale is still that of the factors
        each = (state["basis_g"].mT @ gradients[:, 0] @ state["basis_a"]).square()
        distances = (each - state["scale"]).flatten(1).norm(dim=1) / each.flatten(1).norm(dim=1)
        assert float(distances.min()) < 1e-8
        drawn.add(int(distances.argmin()))
    assert len(drawn) > 1
