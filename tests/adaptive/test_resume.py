"""A resumed run goes on to the bit, whatever is adapted; copies do, too."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from secondorder import EKFAC, KFAC
from tests.support.quadratic import Loop, batch, flat, mlp

OPTIONS: dict[str, dict[str, Any]] = {
    "damping": {"adaptive_damping": True, "damping_interval": 3},
    "all": {
        "adaptive_damping": True, "damping_interval": 2, "reject_steps": True, "calibrate_damping": True,
        "quadratic_model": True, "likelihood": "categorical",
    },
    "rejection": {"reject_steps": True, "lr": 3.0},
    "relative": {"adaptive_damping": True, "damping_interval": 1, "damping_mode": "relative", "damping": 3.0},
}  # fmt: skip


def build(method: type[KFAC], model: torch.nn.Module, name: str) -> KFAC:
    plain: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "damping": 0.1, "kl_clip": None}
    return method(model, factor_update_steps=2, inv_update_steps=4, **{**plain, **OPTIONS[name]})


def run(loop: Loop, optimizer: KFAC, steps: int) -> list[Tensor]:
    for _ in range(steps):
        optimizer.step(loop)
    return [flat(loop.model.parameters()), torch.tensor([g["damping"] for g in optimizer.param_groups])]


@pytest.mark.parametrize("method", [KFAC, EKFAC])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_resume_is_exact(method: type[KFAC], name: str, stop: int) -> None:
    model, (x, y) = mlp(), batch()
    optimizer = build(method, model, name)
    loop = Loop(model, optimizer, x, y, outputs=True)
    run(loop, optimizer, stop)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    calls = loop.calls
    expected, calls = run(loop, optimizer, 7), loop.calls - calls
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    again = mlp()
    again.load_state_dict(loaded["model"])
    other = build(method, again, name)
    other.load_state_dict(loaded["optimizer"])
    loop = Loop(again, other, x, y, outputs=True)
    for a, b in zip(run(loop, other, 7), expected, strict=True):
        assert torch.equal(a, b)
    assert loop.calls == calls


def test_a_checkpoint_without_adaptation_loads_into_one_with_it_and_back() -> None:
    x, y = batch()
    plain, adaptive = mlp(), mlp()
    a = KFAC(plain, damping=0.1, lr=0.1)
    b = KFAC(adaptive, damping=0.3, lr=0.1, adaptive_damping=True, reject_steps=True, calibrate_damping=True)
    a.step(Loop(plain, a, x, y))
    b.load_state_dict(a.state_dict())
    loop = Loop(adaptive, b, x, y)
    for _ in range(2):
        b.step(loop)
    assert loop.calls == 4  # rejection looks twice; damping that training began with is not calibrated again
    a.load_state_dict(b.state_dict())
    a.step(Loop(plain, a, x, y))


@pytest.mark.parametrize("name", OPTIONS)
def test_copies_adapt_on(name: str) -> None:
    model, (x, y) = mlp(), batch()
    optimizer = build(KFAC, model, name)
    run(Loop(model, optimizer, x, y, outputs=True), optimizer, 3)
    twin, other = copy.deepcopy((model, optimizer))
    other.attach(twin)
    third, last = pickle.loads(pickle.dumps((model, optimizer)))
    last.attach(third)
    expected = run(Loop(model, optimizer, x, y, outputs=True), optimizer, 4)
    for m, o in ((twin, other), (third, last)):
        for a, b in zip(run(Loop(m, o, x, y, outputs=True), o, 4), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("flat_form", [False, True])
def test_distributed_checkpoints_hold_what_is_adapted(flat_form: bool) -> None:
    form = StateDictOptions(flatten_optimizer_state_dict=flat_form)
    model, (x, y) = mlp(), batch()
    optimizer = build(KFAC, model, "all")
    loop = Loop(model, optimizer, x, y, outputs=True)
    run(loop, optimizer, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=form))
    again = copy.deepcopy(model)
    expected = run(loop, optimizer, 4)
    other = build(KFAC, again, "all")
    set_optimizer_state_dict(again, other, saved, options=form)
    found = Loop(again, other, x, y, outputs=True)
    for a, b in zip(run(found, other, 4), expected, strict=True):
        assert torch.equal(a, b)
    assert found.calls == 8
