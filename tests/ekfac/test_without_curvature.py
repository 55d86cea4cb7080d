"""Orthogonalized steps in groups with ``inv_update_steps=0``, which have no curvature, against a loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import secondorder
from secondorder import EKFAC, KFAC, HyLo, MemOpt
from tests.ekfac.test_orthogonal import Net, batches, expected_step
from tests.support.building import built
from tests.support.models import seeded_build
from tests.support.tasks import assert_identical, values

OFF = {"lr": 0.01, "kl_clip": None, "orthogonalize": True, "inv_update_steps": 0}
HIDDEN = ("inner", "conv", "head")
KINDS = ("factors", "second_order", "scale")


def trained(opt: torch.optim.Optimizer, model: nn.Module, steps: int) -> list[dict[str, Tensor]]:
    """Train and return the gradients of each step."""
    gradients = []
    for x, y in batches(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        opt.step()
    return gradients


def matrix(values: dict[str, Tensor], layer: str) -> Tensor:
    return torch.cat([values[f"{layer}.weight"].flatten(1), values[f"{layer}.bias"][:, None]], 1)


def followed(opt: torch.optim.Optimizer, model: nn.Module, steps: int) -> tuple[Any, dict[str, Tensor]]:
    """Train, and return the gradients of each step and the change of each parameter over the learning rate."""
    start, gradients = values(model), trained(opt, model, steps)
    return gradients, {name: (start[name] - x) / opt.param_groups[0]["lr"] for name, x in values(model).items()}


def sum_of_steps(gradients: Any, layer: str, *, pre: bool, start: Any = None, decay: float = 0.0) -> Tensor:
    """Steps of a layer along the polar factor: of gradients, with momentum, or of their mean with Nesterov momentum."""
    buffer, total = torch.zeros(()), torch.zeros(())
    for t, step in enumerate(gradients, 1):
        gradient = matrix(step, layer)
        decayed = decay * (matrix(start, layer) - 0.01 * total) if decay else 0.0
        if pre:
            buffer = 0.8 * buffer + 0.2 * gradient
            total = total + expected_step(0.2 * gradient + 0.8 * buffer / (1 - 0.8**t)) + decayed
        else:
            buffer = 0.8 * buffer + expected_step(gradient) + decayed
            total = total + buffer
    return total


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("pre", [False, True])
def test_the_polar_factor_of_the_gradient_or_of_its_mean_is_the_direction(pre: bool, decay: float) -> None:
    model = seeded_build(Net)
    own = {"momentum_mode": "pre", "nesterov": True} if pre else {}
    opt = built(EKFAC if pre else KFAC, model, momentum=0.8, weight_decay=decay, **OFF, **own)
    start = values(model)
    gradients, moved = followed(opt, model, 4)
    for layer in HIDDEN:
        total = sum_of_steps(gradients, layer, pre=pre, start=start, decay=decay)
        torch.testing.assert_close(matrix(moved, layer), total, rtol=1e-7, atol=1e-9)
    buffer, total = torch.zeros(()), torch.zeros(())
    for step in gradients:  # an embedding is not orthogonalized, and follows SGD
        gradient = step["words.weight"] + decay * (start["words.weight"] - 0.01 * total)
        buffer = 0.8 * buffer + gradient
        total = total + (gradient + 0.8 * buffer if pre else buffer)
    torch.testing.assert_close(moved["words.weight"], total, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_there_is_no_curvature_to_keep_compute_or_send(kind: type) -> None:
    model = seeded_build(Net)
    opt = built(kind, model, momentum=0.0, **OFF)
    for _ in range(2):
        assert not any(opt.memory_usage().get(kind) for kind in KINDS)
        trained(opt, model, 2)
    for rule, parameters in (("orthogonalized", 6), ("sgd", 3)):
        assert opt.describe().count(f", {rule} without curvature: inv_update_steps=0\n") == parameters
    for rank in opt.plan(4, MemOpt(), batch_size=6).ranks:
        assert not {"statistics", "curvature", "refresh"} & (rank.sent.keys() | rank.flops.keys())
        assert not any(rank.stored.get(kind) for kind in KINDS)
    linear = built(kind, nn.Linear(9, 4), momentum=0.0, **OFF)
    flops = linear.plan(batch_size=8).ranks[0].flops["precondition"]
    assert flops == 5 * (2 * 4 * 4 * 10 + 2 * 4 * 4 * 4 + 2 * 4 * 4 * 10)  # those of the polar factor


def test_hylo_keeps_no_rows_without_curvature() -> None:
    model = seeded_build(Net)
    opt = built(HyLo, model, lr=0.01, update_steps=0, batch_size=8)
    trained(opt, model, 2)
    for found in (opt.memory_usage(), opt.plan(batch_size=8).ranks[0].stored):
        assert not any(found.get(kind) for kind in ("rows", "kernel", *KINDS))


def test_graft_determines_the_length_of_the_polar_factor() -> None:
    model = seeded_build(Net)
    (gradient,), moved = followed(built(KFAC, model, graft="adam", **OFF), model, 1)
    for layer in HIDDEN:
        g = matrix(gradient, layer)
        wanted = expected_step(g)
        length = (g / (g.abs() + 1e-8)).norm()  # of Adam's first step
        torch.testing.assert_close(matrix(moved, layer), wanted * (length / wanted.norm()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_curvature_that_is_turned_on_starts_with_the_next_batch(kind: type) -> None:
    keywords = {**OFF, "momentum": 0.0, "damping": 0.01, "factor_update_steps": 1}
    model, twin = seeded_build(Net), seeded_build(Net)
    opt, on = built(kind, model, **keywords), built(kind, twin, **{**keywords, "inv_update_steps": 1})
    trained(opt, model, 1)
    twin.load_state_dict(model.state_dict())
    opt.param_groups[0]["inv_update_steps"] = 1
    trained(opt, model, 1)
    trained(on, twin, 1)
    for layer in HIDDEN:
        torch.testing.assert_close(opt.dense_curvature(layer), on.dense_curvature(layer))
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    held, other = opt.memory_usage(), on.memory_usage()
    assert all(held[key] == other[key] for key in ("factors", "second_order"))
    opt.param_groups[0]["inv_update_steps"] = 0  # existing curvature is kept for later
    trained(opt, model, 1)
    assert opt.memory_usage()["factors"] == held["factors"]


@pytest.mark.filterwarnings("ignore:.*is not a multiple of factor_update_steps")
@pytest.mark.parametrize("interval", [0, 2])
def test_a_state_without_curvature_continues(interval: int) -> None:
    """It does so in a new optimizer, even one that had curvature, and with an interval that is set later."""
    keywords = {**OFF, "momentum": 0.8, "momentum_mode": "pre", "damping": 0.01}
    model = seeded_build(Net)
    opt = built(EKFAC, model, **keywords)
    trained(opt, model, 2)
    saved, weights = opt.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    ends = []
    for constructed in (0, 2):
        again = seeded_build(Net)
        other = built(EKFAC, again, **{**keywords, "inv_update_steps": constructed})
        trained(other, again, 1)
        again.load_state_dict(weights)
        other.load_state_dict(saved)
        other.param_groups[0]["inv_update_steps"] = interval
        trained(other, again, 3)
        ends.append(values(again))
    opt.param_groups[0]["inv_update_steps"] = interval
    trained(opt, model, 3)
    for end in ends:
        assert_identical(values(model), end)


def test_the_preset_is_a_variant_of_muon_with_adamw(recwarn: pytest.WarningsRecorder) -> None:
    """Hidden matrices follow the loop, and every other parameter ``torch.optim.AdamW``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(16, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    opt = secondorder.create("orthogonal_momentum", model, lr=0.02)
    assert not recwarn
    others = {name: nn.Parameter(x) for name, x in values(model).items() if not name.startswith("2.")}
    gradients, moved = followed(opt, model, 4)
    torch.testing.assert_close(matrix(moved, "2"), sum_of_steps(gradients, "2", pre=True), rtol=1e-7, atol=1e-9)
    adamw = torch.optim.AdamW(others.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in gradients:
        for name, p in others.items():
            p.grad = step[name]
        adamw.step()
    for name, p in others.items():
        torch.testing.assert_close(model.get_parameter(name), p)
    hidden, rest = model[2].weight.numel() + model[2].bias.numel(), sum(p.numel() for p in others.values())
    assert opt.memory_usage()["momentum"] == 8 * (hidden + 2 * rest)


def test_curvature_of_a_checkpoint_that_never_used_it_is_dropped() -> None:
    """Earlier versions allocated factors even if a group was off from the beginning."""
    model, twin = seeded_build(Net), seeded_build(Net)
    old = built(KFAC, model, **{**OFF, "inv_update_steps": 10})
    saved = old.state_dict()
    for group in saved["param_groups"]:
        group["inv_update_steps"] = 0
    opt, new = built(KFAC, model, **OFF), built(KFAC, twin, **OFF)
    opt.load_state_dict(saved)
    for fresh, parameters in ((opt, model), (new, twin)):
        trained(fresh, parameters, 2)
    assert old.memory_usage()["factors"] > opt.memory_usage()["factors"] == 0
    assert_identical(values(model), values(twin))


@pytest.mark.parametrize("kind", [KFAC, EKFAC, HyLo])
def test_a_state_that_is_saved_when_curvature_is_turned_on_continues(kind: type) -> None:
    interval = "update_steps" if kind is HyLo else "inv_update_steps"
    model, twin = seeded_build(Net), seeded_build(Net)
    opt, other = (built(kind, m, lr=0.01, **{interval: 0}) for m in (model, twin))
    trained(opt, model, 2)
    opt.param_groups[0][interval] = 2  # by a scheduler, after the step
    other.load_state_dict(opt.state_dict())
    twin.load_state_dict(model.state_dict())
    for optimizer, parameters in ((opt, model), (other, twin)):
        trained(optimizer, parameters, 3)
    assert_identical(values(model), values(twin))


def test_hidden_matrices_stay_orthogonal_until_there_is_curvature() -> None:
    """This includes a step in which curvature is turned on after the forward pass."""
    model = seeded_build(Net)
    opt = built(KFAC, model, momentum=0.0, damping=0.01, **OFF)
    opt.register_step_pre_hook(lambda opt, *_: opt.param_groups[0].update(inv_update_steps=1))
    (gradient,), moved = followed(opt, model, 1)
    for layer in HIDDEN:
        torch.testing.assert_close(matrix(moved, layer), expected_step(matrix(gradient, layer)), rtol=1e-7, atol=1e-9)
