"""Factors that stand for rows are those of KFAC, which sums them in another way: call by call, and keeps no row."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from secondorder import KFAC, HyLo
from tests.support.kfac import assert_close, noise


class Attention(nn.Module):
    """Three calls fill one block of three groups; keys and queries differ in length."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.attention(query, key, key, need_weights=False)[0]


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 4, 2))


BATCHES = {
    "tokens": (linear, [(noise(40, 6, 4),)]),
    "sequences of two lengths": (linear, [(noise(40, 6, 4),), (noise(30, 9, 4, seed=1),)]),
    "groups": (convolutions, [(noise(60, 4, 6, 6),)]),
    "attention": (Attention, [(noise(60, 5, 4), noise(60, 7, 4, seed=1))]),
}


def blocks(
    cls: type[KFAC | HyLo], model: nn.Module, batches: list[tuple[Tensor, ...]], keep: Tensor | None, **keywords: object
) -> dict[str, Tensor]:
    opt = cls(model, lr=0.0, **keywords)
    for batch in batches:
        with nullcontext() if keep is None else opt.mask(keep):
            out = model(*batch)
        out = out if keep is None else out * keep[..., None]
        (out.square().sum() + out.sum()).backward()
    opt.step()
    if isinstance(opt, HyLo):
        assert all(block.is_factored for block in opt.blocks.values())
    return {name: opt.dense_curvature(name) for name in opt.blocks}


def assert_same_factors(
    build: type, batches: list[tuple[Tensor, ...]], keep: Tensor | None = None, **keywords: object
) -> None:
    torch.manual_seed(0)
    model = build().double()
    expected = blocks(KFAC, copy.deepcopy(model), batches, keep, **keywords)
    found = blocks(HyLo, model, batches, keep, kfac_when_cheaper=True, mode="sngd", **keywords)
    assert found.keys() == expected.keys()
    for name, block in expected.items():
        assert_close(found[name], block)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("kind", BATCHES)
def test_factors_are_those_of_kfac(kind: str, approx: str) -> None:
    assert_same_factors(*BATCHES[kind], approx=approx)


def test_padding_is_in_neither_factor() -> None:
    keep = torch.rand(40, 6, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[:, 0] = True
    assert_same_factors(linear, [(noise(40, 6, 4),)], keep, approx="expand")
