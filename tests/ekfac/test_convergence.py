"""On small problems EK-FAC is no slower than K-FAC, each at the damping that suits it best."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, KFAC
from tests.oracle.driver import noise
from tests.oracle.models import ConvNet, mlp, seeded_build

DAMPINGS = (1e-3, 1e-2, 1e-1)
STEPS = 25


def dense_problem():
    x = noise(64, 6, seed=1) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    teacher = mlp((6, 5, 4), seed=7)
    y = (4 * teacher(x)).argmax(1)
    return lambda: mlp((6, 8, 4)), x, y


def image_problem():
    x = noise(48, 2, 6, 5, seed=1)
    teacher = seeded_build(ConvNet, 7)
    y = teacher(x).detach()
    y = (y - y.mean(0)).argmax(1)
    return lambda: seeded_build(lambda: ConvNet(nn.ReLU())), x, y


def final_loss(cls, build, x, y, damping, **keywords):
    model = build()
    settings = {"factor_update_steps": 1, "inv_update_steps": 5, "kl_clip": 1e-2, "momentum": 0.9}
    opt = cls(model, lr=0.1, damping=damping, **settings, **keywords)
    for t in range(STEPS):
        part = slice(16 * (t % 3), 16 * (t % 3) + 16)  # mini-batches, so that the average matters
        opt.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        opt.step()
    return float(F.cross_entropy(model(x), y))


@pytest.mark.parametrize("problem", [dense_problem, image_problem], ids=["MLP", "convolutions"])
def test_no_slower_than_kfac_at_the_best_damping_of_each(problem):
    build, x, y = problem()
    start = float(F.cross_entropy(build()(x), y))
    kfac = min(final_loss(KFAC, build, x, y, damping, inverse_method="eigen") for damping in DAMPINGS)
    ekfac = min(final_loss(EKFAC, build, x, y, damping) for damping in DAMPINGS)
    assert math.isfinite(ekfac)
    assert ekfac < 0.8 * start
    assert ekfac <= 1.05 * kfac


def test_whitening_trains():
    build, x, y = dense_problem()
    model = build()
    start = float(F.cross_entropy(model(x), y).detach())
    opt = EKFAC(
        model,
        lr=0.02,
        estimator="running",
        power=0.5,
        momentum_mode="pre",
        factor_update_steps=1,
        inv_update_steps=5,
        kl_clip=None,
    )
    for _ in range(STEPS):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    assert float(F.cross_entropy(model(x), y)) < 0.7 * start
