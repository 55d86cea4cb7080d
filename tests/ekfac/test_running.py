"""``estimator="running"``: squares of the projected mean gradient, and, with an exponent of 1/2, Adam in that basis."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC
from tests.support import ekfac
from tests.support.ekfac import HELD, branches, measured, plain_ekfac, train_step
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.networks import TwoHeads, applied
from tests.support.oracles.kfac import solve

BUILDS = {"mlp": (mlp, vectors), "convnet": (lambda: convnet(stride=2, padding=1), images)}
WHITE = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.9, "factor_update_steps": 1}


def running(params, **keywords):
    return plain_ekfac(params, estimator="running", **keywords)


# `test_schedule.py` compares the average over steps with a reference, and `test_null_spaces.py` the rule of Adam.
# -------------------------------------------------------------------------------------- Adam in the factors' eigenbasis


@each(kind=BUILDS, intervals=[(1, HELD), (1, 1), (3, 6)])
def test_diagonal_factors_make_it_adam(kind, intervals):
    """With Q = I on both sides it is torch's Adam with β₂ = scale_decay, up to rounding, from the first step on."""
    build, data = kind
    model, reference = build(), build()
    own = {"lr": 0.01, "scale_decay": 0.99, "fallback_eps": 1e-8, "max_factor_dim": 1}
    opt = plain_ekfac(model, **{**WHITE, **own, "factor_update_steps": intervals[0], "inv_update_steps": intervals[1]})
    adam = torch.optim.Adam(reference.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    for t in range(12):
        x, y = data(4 + t % 3, seed=t)  # sizes must not matter
        train_step(opt, model, x, y, F.cross_entropy)
        train_step(adam, reference, x, y, F.cross_entropy)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(p.detach(), q.detach(), 1e-10, f"{name} at {t}")


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_momentum_before_the_preconditioner_is_a_mean_of_gradients(estimator):
    """V = (F + λ)⁻¹ m / (1 − β₁^t), where m is the running mean of gradients in parameter space.

    It counts its own updates, which begin when curvature is turned on.
    """
    model, beta = mlp(), 0.8
    options = {"momentum": beta, "momentum_mode": "pre", "estimator": estimator, "inv_update_steps": 0}
    opt = plain_ekfac(model, lr=0.1, **options)
    for seed in range(30):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    opt.param_groups[0]["inv_update_steps"] = 2
    m = 0.0
    for t in range(1, 6):
        gradient, change = ekfac.next_directions(opt, model, *vectors(seed=t), F.cross_entropy, ["0"])["0"]
        m = beta * m + (1 - beta) * gradient
        expected = solve(opt.dense_curvature("0"), m / (1 - beta**t), 1e-2)
        assert_close(change, 0.1 * expected, 1e-8, f"at {t}")


class Mixed(nn.Module):
    """Token and position embeddings, a norm, a grouped convolution, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(6, 4), nn.Embedding(5, 4)
        self.norm, self.conv, self.head = nn.LayerNorm(4), nn.Conv1d(4, 4, 2, groups=2), nn.Linear(4, 3)

    def forward(self, index):
        z = self.norm(self.words(index) + self.place(torch.arange(index.shape[1])))
        return self.head(torch.tanh(self.conv(z.mT)).mean(-1))


def test_the_running_estimate_covers_every_layer():
    """It needs no rows of single examples, so layers whose input all examples share are covered, too."""
    model, y = seeded_build(Mixed), labels(7, 3)
    index = torch.randint(6, (7, 5), generator=torch.Generator().manual_seed(3))
    opt = measured(model, index, y, F.cross_entropy, estimator="running")
    names = ["words", "place", "norm", "conv", "head"]
    ekfac.assert_scales(opt, model, seeded_build(Mixed), index, y, F.cross_entropy, names, estimator="running")


REFUSED = [{"transport": "recompute"}, {"token_is_example": True}, {"scale_batch_size": 4}]


def test_the_running_estimate_refuses_options_that_need_rows():
    for options in REFUSED:
        plain_ekfac(mlp(), **options)
    for options in REFUSED + [{"fisher": fisher} for fisher in ("mc", "exact", "curvature_prop")]:
        with pytest.raises((ValueError, RuntimeError), match="running"):
            running(mlp(), **options)


class ChangesItsInput(nn.Module):
    """Its first layer cannot be captured: under autocast nothing forbids the change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        x = x.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x)
        x.mul_(2.0)
        return self.second(torch.tanh(h.float()))


def with_a_gradient_of_inputs(net, x):
    """The gradient of the inputs counts no examples."""
    z = noise(8, 4, seed=1).requires_grad_()
    torch.autograd.grad(net(z).square().mean(), z)
    return net(x)


def without_its_first_layer(model, x):
    outputs = model(x)
    model.both = False  # from the second step on
    return outputs


FORWARDS = {  # model, its outputs of a batch, the layers whose scales count every step
    "outputs of an unknown class": lambda: (
        m := applied(mlp(), lambda net, x: SimpleNamespace(logits=net(x))),
        lambda x: m(x).logits,
        [m.model[0], m.model[2]],
    ),
    "unused head first": lambda: (m := seeded_build(TwoHeads), lambda x: m(x)[1], [m.trunk, m.right]),
    "compiled": lambda: (m := mlp(), torch.compile(m, backend="aot_eager"), [m[0], m[2]]),
    "with a gradient of inputs": lambda: (m := mlp(), partial(with_a_gradient_of_inputs, m), [m[0], m[2]]),
    "first layer used once": lambda: (m := seeded_build(branches), partial(without_its_first_layer, m), [m.used]),
    "first layer refused": lambda: (m := seeded_build(ChangesItsInput).float(), m, [m.second]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:EKFAC")
@pytest.mark.parametrize("kind", FORWARDS)
def test_a_running_scale_counts_the_examples_of_every_step_whatever_the_model_does(kind):
    model, forward, layers = FORWARDS[kind]()
    optimizer = EKFAC(model, lr=0.01, estimator="running", factor_update_steps=3, inv_update_steps=3)
    weight = 0.0
    for step in range(6):
        optimizer.zero_grad()
        forward(noise(8, 4, seed=step)).square().mean().backward()
        optimizer.step()
        weight = 0.95 * weight + 8
    for layer in layers:
        assert optimizer.state[layer.weight]["scale_updates"] == 6
        assert float(optimizer.state[layer.weight]["scale_weight"]) == pytest.approx(weight)
