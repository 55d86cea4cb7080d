"""On small noisy problems EK-FAC is no slower than K-FAC, each at the damping that suits it best.

Without momentum, without a clip and on the whole batch, so that the curvature alone makes the difference.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, KFAC
from tests.support.grid import each
from tests.support.kfac import noise
from tests.support.models import ConvNet, mlp, seeded_build

DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)
STEPS = 25


def relabelled(y, classes):
    """One label in five is drawn anew: a loss that cannot be brought to zero."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(len(y), generator=generator) < 0.2
    return torch.where(chosen, torch.randint(classes, y.shape, generator=generator), y)


def dense_problem(seed=0):
    x = noise(64, 6, seed=1) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    y = mlp((6, 5, 4), seed=7)(x).detach()
    return mlp((6, 8, 4), seed=seed), x, relabelled((y - y.mean(0)).argmax(1), 4)


def image_problem(seed=0):
    x = noise(48, 2, 6, 5, seed=1)
    y = seeded_build(ConvNet, 7)(x).detach()
    return seeded_build(lambda: ConvNet(nn.ReLU()), seed), x, relabelled((y - y.mean(0)).argmax(1), 3)


def final_loss(cls, problem, seed, damping, **keywords):
    model, x, y = problem(seed)
    settings = {"factor_update_steps": 1, "inv_update_steps": 5, "kl_clip": None, "momentum": 0.0}
    opt = cls(model, lr=0.3, damping=damping, **settings, **keywords)
    for _ in range(STEPS):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return F.cross_entropy(model(x), y).item()


@each(problem={"MLP": dense_problem, "convolutions": image_problem}, seed=[0, 1])
def test_no_slower_than_kfac_at_the_best_damping_of_each(problem, seed):
    model, x, y = problem(seed)
    start = F.cross_entropy(model(x), y).item()
    kfac = min(final_loss(KFAC, problem, seed, damping, inverse_method="eigen") for damping in DAMPINGS)
    ekfac = min(final_loss(EKFAC, problem, seed, damping) for damping in DAMPINGS)
    assert math.isfinite(ekfac)
    assert ekfac < 0.5 * start
    assert ekfac <= 1.05 * kfac
