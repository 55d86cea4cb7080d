"""Curvature of observed outputs: exact, drawn, of micro-batches and of heads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import KFAC
from tests.support.ekfac import (
    held_bases,
    held_scales,
    plain_ekfac,
    standing,
    train_step,
)
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import curvature_gradients, exact_fisher, scales
from tests.support.oracles.kfac import covered_names


def observed_step(opt, model, batches, likelihood="categorical"):
    opt.zero_grad()
    for x, y in batches:
        outputs = model(x)
        opt.observe(outputs, likelihood)
        (F.cross_entropy(outputs, y) / len(batches)).backward()
    opt.step()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_observed_micro_batches_are_one_batch(parts):
    model, (x, y) = mlp(), vectors(8)
    opt = plain_ekfac(model, fisher="exact")
    with standing(opt):
        for _ in range(2):
            observed_step(opt, model, list(zip(x.chunk(parts), y.chunk(parts), strict=True)))
    G = curvature_gradients(mlp(), "0", x, "categorical")
    assert_close(held_scales(opt, model[0]), scales(G, *held_bases(opt, model[0])), 1e-9)


def test_a_step_without_observation_keeps_the_scales_and_still_moves():
    model = mlp()
    opt = plain_ekfac(model, lr=0.1, fisher="exact")
    for seed in range(3):
        observed_step(opt, model, [vectors(seed=seed)])
    held, weight = held_scales(opt, model[0]), model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="observe"):
        train_step(opt, model, *vectors(seed=3), F.cross_entropy)
    assert torch.equal(held_scales(opt, model[0]), held)
    assert not torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("fisher", ["mc", "curvature_prop"])
def test_sampled_curvature_converges_to_the_exact_one(fisher):
    """816 draws per example: the trace within 5 %, every entry within 15 % of the largest one."""
    model, (x, y) = mlp((3, 2, 3)), (noise(4, 3), labels(4, 3))
    opt = plain_ekfac(model, fisher=fisher, fisher_samples=16, factor_decay=1.0, deterministic_seed=3)
    with standing(opt):
        for _ in range(52):
            observed_step(opt, model, [(x, y)])
    for name in ("0", "2"):
        layer = model.get_submodule(name)
        G = curvature_gradients(mlp((3, 2, 3)), name, x, "categorical")
        expected, held = scales(G, *held_bases(opt, layer)), held_scales(opt, layer)
        assert float(held.sum()) == pytest.approx(float(exact_fisher(G).trace()), rel=0.05)
        assert_close(held, expected, 0.15, name)


@pytest.mark.parametrize("fisher", ["mc", "curvature_prop", "exact"])
def test_the_loss_s_own_gradients_do_not_enter_observed_scales(fisher):
    found = []
    for factor in (1.0, 100.0):
        model, (x, y) = mlp(), vectors()
        opt = plain_ekfac(model, fisher=fisher)
        with standing(opt):
            for _ in range(2):
                opt.zero_grad()
                outputs = model(x)
                opt.observe(outputs, "categorical")
                (factor * F.cross_entropy(outputs, y)).backward()
                opt.step()
        found.append(held_scales(opt, model[0]))
    assert torch.equal(*found)


@each(likelihood=["categorical", "bernoulli", "gaussian"], kind=["mlp", "convnet"])
def test_exact_fisher_against_columns_of_the_loss_hessian(kind, likelihood):
    model, (x, y) = (mlp(), vectors()) if kind == "mlp" else (convnet(), images())
    opt = plain_ekfac(model, fisher="exact")
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            outputs = model(x)
            opt.observe(outputs, likelihood)
            F.cross_entropy(outputs, y).backward()  # only what was observed enters
            opt.step()
    for name in covered_names(model):
        s = held_scales(opt, model.get_submodule(name))
        G = curvature_gradients(model, name, x, likelihood)
        assert_close(s, scales(G, *held_bases(opt, model.get_submodule(name))), 1e-9, name)


def test_forwards_are_observed_though_only_what_was_made_of_their_outputs_is_kept():
    def factor(keep: bool) -> torch.Tensor:
        model = mlp()
        optimizer = KFAC(model, fisher="exact", factor_update_steps=1)
        raw, made = [], []
        for seed in range(3):
            output = model(noise(5, 4, seed=seed))
            made.append(output * 2.0)
            if keep:
                raw.append(output)
            del output
        optimizer.observe(made, "gaussian")
        sum(part.square().sum() for part in made).backward()
        optimizer.step()
        return optimizer.state[model[0].weight]["factor_g"]

    assert torch.equal(factor(keep=False), factor(keep=True))


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
