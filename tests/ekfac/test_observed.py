"""Curvature of observed outputs: exact, drawn, of micro-batches and of heads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import KFAC
from tests.support.ekfac import held_bases, held_scales, plain_ekfac, standing
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import curvature_gradients, scales
from tests.support.oracles.kfac import covered_names


def observed(model, x, y, likelihood, factor=1.0, **keywords):
    """Two steps without moving, on a multiple of the loss: only what was observed enters."""
    opt = plain_ekfac(model, **keywords)
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            outputs = model(x)
            opt.observe(outputs, likelihood)
            (factor * F.cross_entropy(outputs, y)).backward()
            opt.step()
    return opt


@pytest.mark.parametrize("fisher", ["mc", "curvature_prop", "exact"])
def test_the_loss_s_own_gradients_do_not_enter_observed_scales(fisher):
    found = []
    for factor in (1.0, 100.0):
        model = mlp()
        found.append(held_scales(observed(model, *vectors(), "categorical", factor, fisher=fisher), model[0]))
    assert torch.equal(*found)


@each(likelihood=["categorical", "bernoulli", "gaussian"], kind=["mlp", "convnet"])
def test_exact_fisher_against_columns_of_the_loss_hessian(kind, likelihood):
    model, (x, y) = (mlp(), vectors()) if kind == "mlp" else (convnet(), images())
    opt = observed(model, x, y, likelihood, fisher="exact")
    for name in covered_names(model):
        s = held_scales(opt, model.get_submodule(name))
        G = curvature_gradients(model, name, x, likelihood)
        assert_close(s, scales(G, *held_bases(opt, model.get_submodule(name))), 1e-9, name)


def test_a_head_without_a_term_takes_nothing_from_the_others():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = (nn.Linear(4, n) for n in (4, 3, 3))

        def forward(self, x: torch.Tensor):
            z = torch.tanh(self.body(x))
            return self.one(z), self.two(z)

    def factors(ignored: int) -> dict[str, torch.Tensor]:
        model = seeded_build(Heads)
        optimizer = KFAC(model, fisher="exact")
        outputs, y = model(noise(6, 4)), labels(6, 3)
        targets = [torch.full_like(y, -100) if i == ignored else y for i in range(2)]
        optimizer.observe(outputs, ["categorical", "categorical"], targets)
        F.cross_entropy(outputs[1 - ignored], y).backward()
        optimizer.step()
        return {name: optimizer.state[getattr(model, name).weight]["factor_g"] for name in ("body", "one", "two")}

    for ignored, used in ((0, "two"), (1, "one")):
        found = factors(ignored)
        assert all(value.isfinite().all() for value in found.values())
        assert found["body"].trace() > 0
        assert found[used].trace() > 0
