"""Estimates and plans of groups with a budget, a rank, or steps that are not preconditioned."""

import pytest
import torch
from torch import nn

import secondorder
from secondorder import KFAC, InverseOptions, RefreshOptions
from tests.estimate.test_estimate import RATES


def network(width=64):
    return nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 3))


def estimated(width=64, **keywords):
    methods = {"it": lambda model: KFAC(model, lr=0.01, graft="adamw", **keywords)}
    return secondorder.estimate(network(width), batch_size=32, methods=methods, rates=RATES).methods["it"]


def test_a_device_that_this_machine_lacks_is_refused(monkeypatch):
    def refuse(device):
        raise AssertionError("Torch not compiled with CUDA enabled")  # as torch does without the device

    monkeypatch.setattr("secondorder.plan.estimate.measure_rates", refuse)
    with pytest.raises(ValueError, match=r"speed of 'cuda' cannot be measured .*device='cpu'"):
        secondorder.estimate(network(), batch_size=4, methods=["kfac"], device="cuda")


def test_estimates_and_plans_count_steps_that_are_not_preconditioned():
    every = {"factor_update_steps": 20, "inv_update_steps": 20}
    full, half = (estimated(**every, refresh=RefreshOptions(precondition_steps=k)).flops for k in (1, 2))
    assert half["precondition"] == pytest.approx(full["precondition"] / 2)
    assert half["refresh"] == pytest.approx(full["refresh"])
    optimizers = (KFAC(network(), graft="adamw", refresh=RefreshOptions(precondition_steps=k)) for k in (1, 2))
    full, half = (opt.plan(world_size=2, batch_size=8).ranks[0].flops["precondition"] for opt in optimizers)
    assert half == pytest.approx(full / 2)


def test_a_refresh_of_leading_eigenvectors_costs_products():
    """A factorization of ``[n, n]`` would be much more expensive than its products with a few vectors."""
    full = estimated(512, inverse_method="eigen").flops["refresh"]
    few = estimated(512, inverse_method=InverseOptions(rank=4)).flops["refresh"]
    assert few < full / 20


def test_the_estimate_shows_the_intervals_of_the_budget():
    small, large = (estimated(budget=limit) for limit in (1.1, 4.0))
    assert small.flops["precondition"] < large.flops["precondition"]
    assert small.slowdown < large.slowdown


def test_memory_of_a_preset_with_a_budget_is_exact():
    model = network(256)
    found = secondorder.estimate(model, batch_size=32, methods=["from_adamw"], rates=RATES).methods["from_adamw"]
    optimizer = secondorder.create("from_adamw", model)
    model(torch.randn(32, 40)).square().mean().backward()
    optimizer.step()
    usage = optimizer.memory_usage()
    assert {k: v for k, v in found.memory.items() if k != "workspace" and k != "total"} == {
        k: v for k, v in usage.items() if k not in ("workspace", "total")
    }
