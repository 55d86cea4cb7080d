"""Adaptation with models that are compiled, in bfloat16, partly frozen, with attention, or observed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from secondorder import KFAC
from tests.support.building import built
from tests.support.quadratic import Loop, batch, damping, flat, gauss_newton, kfac, mlp, problem, repeat

ALL: dict[str, Any] = {
    "adaptive_damping": True, "damping_interval": 2, "reject_steps": True, "quadratic_model": True,
    "likelihood": "categorical", "calibrate_damping": True, "lr": 1.0, "kl_clip": None,
}  # fmt: skip


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_trains_as_in_eager_mode(in_place: bool) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, (x, y) = mlp(), batch()
        run: Any = model
        if compiled and in_place:
            model.compile(backend="eager")
        elif compiled:
            run = torch.compile(model, backend="eager")
        optimizer = built(KFAC, run, damping=0.1, **ALL)
        repeat(optimizer, Loop(run, optimizer, x, y, outputs=True), 5)
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("cast", [False, True])
def test_models_learn_in_bfloat16_and_under_autocast(cast: bool) -> None:
    x, y = batch()
    model, inputs = (mlp().bfloat16(), x.bfloat16()) if cast else (mlp().float(), x.float())
    optimizer = built(KFAC, model, damping=0.1, **ALL)
    loop = Loop(model, optimizer, inputs, y, outputs=True)

    def closure() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            return loop()

    losses = repeat(optimizer, closure, 6)
    assert losses[-1] < 0.8 * losses[0]


def test_frozen_parameters_do_not_move_in_the_model() -> None:
    model, (x, y) = mlp(), batch()
    C = gauss_newton(model, x, y)[20:, 20:]
    model[0].requires_grad_(False)
    optimizer, theta = kfac(model, quadratic_model=True, likelihood="categorical"), flat(model[3].parameters())
    with optimizer.keep_directions() as kept:
        optimizer.step(Loop(model, optimizer, x, y, outputs=True))
    V = flat([kept["3.weight"], kept["3.bias"]])
    alpha = -(flat(p.grad for p in model[3].parameters()) @ V) / (V @ C @ V + 0.1 * V @ V)
    torch.testing.assert_close(flat(model[3].parameters()) - theta, alpha * V)


@pytest.mark.parametrize("fisher", ["mc", "exact", "curvature_prop"])
def test_observing_in_the_closure_counts_once(fisher: str) -> None:
    """Observations of the second evaluation are dropped: the factors are those of a run without it."""
    factors = []
    for adaptive in (False, True):
        torch.manual_seed(0)
        _, optimizer, loop = problem(fisher=fisher, adaptive_damping=adaptive, damping_interval=1, lr=0.0)
        loop.loss = lambda f, y, opt=optimizer: (opt.observe(f, "categorical"), F.cross_entropy(f, y))[1]
        repeat(optimizer, loop, 3)
        factors.append([optimizer.dense_curvature(name) for name in optimizer.blocks])
    torch.testing.assert_close(*factors, rtol=0, atol=0)


def test_the_warning_about_layers_that_are_not_captured_remains() -> None:
    """A second evaluation pauses capture and must not be mistaken for the user's pause, which silences the warning."""
    model, optimizer, loop = problem(adaptive_damping=True, damping_interval=1)
    optimizer.step(loop)
    model.eval()
    with pytest.warns(UserWarning, match="nothing was captured"):
        optimizer.step(loop)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_device_trains_as_the_cpu_and_its_generator_is_restored(dropout: float) -> None:
    found, states = [], []
    for device, adaptive in (("cpu", True), ("cuda", True), ("cuda", False)):
        torch.manual_seed(0)
        model, (x, y) = mlp(dropout), batch()
        model, x, y = model.to(device), x.to(device), y.to(device)
        torch.cuda.manual_seed(0)
        optimizer = built(KFAC, model, damping=0.1, **ALL if adaptive else {})
        repeat(optimizer, Loop(model, optimizer, x, y, outputs=True), 6)
        found.append((flat(model.parameters()).cpu(), damping(optimizer)))
        states.append(torch.cuda.get_rng_state())
    assert torch.equal(states[1], states[2])  # second evaluations do not affect it
    if not dropout:  # dropout masks differ
        torch.testing.assert_close(*found[:2])
