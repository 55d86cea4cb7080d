"""Whole runs: networks that learn with a tenth of the rows, and runs that go on to the bit where they were stopped."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import HyLo
from secondorder.switching import EpochList, GradNormChange, LRChange, ProbeError
from tests.support.models import convnet, images, seeded_build, vectors
from tests.support.oracles.hylo import (
    as_rows,
    error,
    example_gradients,
    flat,
    gradients,
    greedy,
    one,
    published_operator,
    sngd,
    step,
)

# ---------------------------------------------------------------------------------------------------------------------
# Learning
# ---------------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8 * 16, classes)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(x.flatten(1))


def patterns(n, seed, classes=4):
    """Noisy copies of one 8 × 8 pattern per class, shifted by up to one pixel."""
    generator = torch.Generator().manual_seed(1234)
    base = torch.randn(classes, 8, 8, generator=generator)
    generator.manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    shift = torch.randint(-1, 2, (n, 2), generator=generator).tolist()
    x = torch.stack([base[c].roll(s, (0, 1)) for c, s in zip(y.tolist(), shift, strict=True)])
    return (x + 0.5 * torch.randn(n, 8, 8, generator=generator))[:, None], y


def losses(model, opt, steps, n=64):
    found = []
    for seed in range(steps):
        x, y = patterns(n, seed)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("approx", ["reduce", "expand"])
@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_a_small_network_of_convolutions_learns(mode, approx):
    """ρ = .1: 7 of 64 rows."""
    torch.manual_seed(0)
    model = Small()
    opt = HyLo(model, lr=0.003, mode=mode, approx=approx, damping=0.1, rank_fraction=0.1, update_steps=5)
    found = losses(model, opt, 80)
    assert found[0] > 1.2
    assert sum(found[-10:]) / 10 < 0.1


def test_normalised_damping_takes_larger_rates():
    """lr · λ is what the plain form has for lr."""
    torch.manual_seed(0)
    model = Small()
    opt = HyLo(model, lr=0.03, mode="auto", damping=0.1, normalize_damping=True, update_steps=5)
    assert sum(losses(model, opt, 80)[-10:]) / 10 < 0.1


def test_the_published_algebra_on_the_same_network():
    """Update errors of more than 1 against the exact method: a longer way off than standing still."""
    torch.manual_seed(0)
    model = Small()
    opt = HyLo(model, lr=0.003, mode="kid", damping=0.1, update_steps=5)
    losses(model, opt, 3)
    x, y = patterns(64, 99)
    double = copy.deepcopy(model).double()
    opt.close()
    found = example_gradients(double, (x.double(),), y, F.cross_entropy)
    F.cross_entropy(double(x.double()), y).backward()
    ratios = []
    for name in ("first", "second", "head"):
        U, V = as_rows(double, name, found)[0], as_rows(double, name, one(gradients(double)))[0]
        exact = sngd(U[None], V, 0.1)[0]
        chosen = greedy(U @ U.mT, 7)
        ratios.append(error(published_operator(U, chosen, 0.1) @ V[0], exact))
    assert max(ratios) > 1


def test_the_published_algebra_diverges_where_ours_learns():
    """The settings of the runs above: the same rate, momentum, damping, pivots and interval."""
    torch.manual_seed(0)
    model, operators, momentum, found = Small().double(), {}, {}, []
    for seed in range(60):
        x, y = patterns(64, seed)
        model.zero_grad()
        loss = F.cross_entropy(model(x.double()), y)
        loss.backward()
        found.append(float(loss.detach()))
        gradient = one(gradients(model))
        for name in ("first", "second", "head"):
            if seed % 5 == 0:
                U = as_rows(model, name, example_gradients(model, (x.double(),), y, F.cross_entropy))[0]
                operators[name] = published_operator(U, greedy(U @ U.mT, 7), 0.1)
            direction = operators[name] @ as_rows(model, name, gradient)[0][0]
            momentum[name] = 0.9 * momentum.get(name, 0.0) + direction
            layer = model.get_submodule(name)
            weight, bias = momentum[name].view(len(layer.bias), -1).split([layer.weight[0].numel(), 1], 1)
            with torch.no_grad():
                layer.weight -= 0.003 * weight.reshape(layer.weight.shape)
                layer.bias -= 0.003 * bias[:, 0]
    assert not found[-1] < 100 * found[0]


# ---------------------------------------------------------------------------------------------------------------------
# Resume
# ---------------------------------------------------------------------------------------------------------------------


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


RUNS = {
    "auto": lambda: {"mode": "auto", "switch": GradNormChange(eta=0.5, period_steps=2)},
    "kis": lambda: {"mode": "kis"},
    "kis with replacement": lambda: {"mode": "kis", "kis_sampling": "replacement"},
    "kid": lambda: {"mode": "kid"},
    "sngd": lambda: {"mode": "sngd"},
    "learning rate": lambda: {"mode": "auto", "switch": LRChange(hold=1, period_steps=3)},
    "epochs": lambda: {"mode": "auto", "switch": EpochList([(0, 1), (3, 4)], steps_per_epoch=3)},
    "probe": lambda: {"mode": "auto", "switch": ProbeError(layers=2, threshold=0.3)},
    "cheaper": lambda: {"mode": "kid", "kfac_when_cheaper": True},
    "relative": lambda: {"mode": "kis", "damping": 0.5, "damping_mode": "relative"},
    "energy": lambda: {"mode": "kid", "rank_energy": 0.9, "rank_fraction": 1.0},
}
STEPS = 17


def new(run, **keywords):
    model = convnet()
    made = {"lr": 0.05, "damping": 0.05, "rank_fraction": 0.3, "update_steps": 4, **RUNS[run](), **keywords}
    return model, HyLo(model, **made)


def go_on(model, opt, begin, end):
    for number in range(begin, end):
        if number == 9:
            opt.param_groups[0]["lr"] = 0.01
        step(opt, model, *images(12, seed=number), F.cross_entropy)


def assert_equal(found, expected, path="state"):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=path)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_equal(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_equal(a, b, f"{path}/{i}")
    else:
        assert found == expected or found != found and expected != expected, path


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("middle", [0, 1, 5, 7, 8])
def test_resume_is_exact(run, middle):
    """In the middle of a refresh interval and of a period of the policy, draws and switches included."""
    model, opt = new(run)
    go_on(model, opt, 0, middle)
    other, second = new(run)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    other.load_state_dict(through_a_file(model.state_dict()))
    second.load_state_dict(through_a_file(opt.state_dict()))
    assert_equal(second.state_dict(), opt.state_dict())
    go_on(model, opt, middle, STEPS)
    go_on(other, second, middle, STEPS)
    assert torch.equal(flat(dict(other.named_parameters())), flat(dict(model.named_parameters())))
    assert_equal(second.state_dict(), opt.state_dict())
    assert second.diagnostics()["mode"] == opt.diagnostics()["mode"]


def test_the_run_that_is_resumed_does_switch():
    model, opt = new("auto")
    modes = []
    for number in range(STEPS):
        go_on(model, opt, number, number + 1)
        modes.append(opt.diagnostics()["mode"])
    assert set(modes) == {"kid", "kis"}


@pytest.mark.parametrize("run", ["kis", "auto"])
def test_a_copy_goes_on_as_the_original(run):
    model, opt = new(run)
    go_on(model, opt, 0, 5)
    other, second = copy.deepcopy((model, opt))
    second.attach(other)
    go_on(model, opt, 5, 12)
    go_on(other, second, 5, 12)
    assert torch.equal(flat(dict(other.named_parameters())), flat(dict(model.named_parameters())))


def test_a_checkpoint_without_curvature_starts_anew():
    """Momentum and draws go on; rows come with the next refresh."""
    model, opt = new("kid", checkpoint_curvature="none")
    go_on(model, opt, 0, 5)
    saved = through_a_file(opt.state_dict())
    whole = new("kid")
    go_on(*whole, 0, 5)
    assert sum(t.numel() for s in saved["state"].values() for t in s.values() if isinstance(t, torch.Tensor)) < sum(
        t.numel() for s in whole[1].state_dict()["state"].values() for t in s.values() if isinstance(t, torch.Tensor)
    )
    other, second = new("kid", checkpoint_curvature="none")
    other.load_state_dict(model.state_dict())
    second.load_state_dict(saved)
    go_on(other, second, 5, 10)
    assert torch.isfinite(flat(dict(other.named_parameters()))).all()


@pytest.mark.parametrize("run", ["kid", "kis", "sngd"])
def test_rows_survive_a_change_of_batch_size(run):
    """The checkpoint of 12 examples, loaded by a run whose batches have 5 or 20."""
    model, opt = new(run)
    go_on(model, opt, 0, 6)
    for n in (5, 20):
        other, second = new(run)
        go_on_with = images(n, seed=50)
        step(second, other, *go_on_with, F.cross_entropy)
        other.load_state_dict(through_a_file(model.state_dict()))
        second.load_state_dict(through_a_file(opt.state_dict()))
        assert_equal(second.dense_curvature("second"), opt.dense_curvature("second"))
        for seed in range(8):
            kept = step(second, other, *images(n, seed=seed), F.cross_entropy)
            assert torch.isfinite(flat(kept)).all()


def test_runs_repeat():
    found = []
    for _ in range(2):
        model, opt = new("auto")
        go_on(model, opt, 0, STEPS)
        found.append(flat(dict(model.named_parameters())))
    assert torch.equal(*found)


def test_the_examples_per_step_may_be_told_in_advance():
    """Rows are then allocated at construction, and the run is the same."""
    found = []
    for keywords in ({}, {"batch_size": 12}):
        model, opt = new("kid", **keywords)
        held = opt.memory_usage()["rows"]
        assert (held > 0) == bool(keywords)
        go_on(model, opt, 0, 9)
        found.append(flat(dict(model.named_parameters())))
        if keywords:
            assert opt.memory_usage()["rows"] == held
    assert torch.equal(*found)


def test_a_closure():
    (x, y), model = vectors(12), seeded_build(lambda: nn.Linear(4, 3))
    opt = HyLo(model, mode="kid", damping=0.1)

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    values = [float(opt.step(closure).detach()) for _ in range(10)]
    assert values[-1] < values[0]
