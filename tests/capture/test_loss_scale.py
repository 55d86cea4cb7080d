"""The loss scale of float16 training: given, set late, found while a scaler steps, or impossible to find.

Every run keeps its parameters fixed (``lr=0``) and repeats one batch, so that the curvature of any number of steps is
that of the batch in float32, whichever steps were left out.
"""

import copy
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secondorder.capture.loss_scale
from secondorder import EKFAC, KFAC, MFAC, HyLo
from secondorder.diagnostics import Analysis, read_events
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.kfac import labels, noise
from tests.support.models import Net
from tests.support.warned import silent, warned

EVERY = {"lr": 0.0, "damping": 0.1, "factor_update_steps": 1, "inv_update_steps": 1}
METHODS = {
    "kfac": partial(built, KFAC, **EVERY),
    "ekfac": partial(built, EKFAC, **EVERY),
    "hylo": partial(built, HyLo, lr=0.0, update_steps=1, mode="sngd"),
}
make_kfac = METHODS["kfac"]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(seed=0):
    return noise(8, 5, dtype=torch.float32, seed=seed), labels(8, 3, seed)


def assert_counted(method, opt, steps, tolerance=2e-2):
    """The curvature is that after so many steps in float32.

    A wrong scale would be off by a factor of 2^10 or more; float16 rounds by half a thousandth.
    """
    model, (x, y) = make_model(), batch()
    plain = method(model)
    for _ in range(steps):
        plain.zero_grad()
        F.cross_entropy(model(x), y).backward()
        plain.step()
    assert opt.blocks.keys() == plain.blocks.keys()
    for name in opt.blocks:
        expected = plain.dense_curvature(name)
        assert float((opt.dense_curvature(name) - expected).norm() / expected.norm()) < tolerance, name


def scaled_step(opt, model, scaler, treatment="plain", half=True, factor=1.0, step=None):
    x, y = batch()
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        loss = F.cross_entropy(model(x), y) * factor
    scaler.scale(loss).backward()
    if treatment != "plain":
        scaler.unscale_(opt)
    if treatment == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    (step or scaler.step)(opt)
    scaler.update()


def make_scaler(**keywords):
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, **keywords)


@pytest.fixture(autouse=True)
def silence():
    """No test of this file may warn unless it catches the warning."""
    with silent():
        yield


def taken_at_once(opt, model, scaler, **keywords):
    scaled_step(opt, model, make_scaler(enabled=False), half=False, step=lambda o: o.step())


half, single = scaled_step, partial(scaled_step, half=False)


def overflow(opt, model, scaler, **keywords):
    scaled_step(opt, model, scaler, factor=float("inf"))  # the scaler leaves the step out


def by_hand(opt, model, scaler, **keywords):
    def unscale_and_step(optimizer):
        scaler.unscale_(optimizer)
        optimizer.step()

    scaled_step(opt, model, scaler, half=False, step=unscale_and_step)


def between_backward_and_step(opt, model, scaler, **keywords):
    """A step for which the scaler is set late."""

    def set_and_step(optimizer):
        optimizer.grad_scaler = scaler
        scaler.step(optimizer)

    scaled_step(opt, model, scaler, half=False, step=set_and_step)


def given(opt, model, scaler, **keywords):
    opt.grad_scaler = scaler


#: The steps, the number of those whose statistics count, and whether the optimizer knows the scaler in the end.
RUNS = {
    "given": ([given, half, half, half], 3, True),
    "found": ([half, half, half], 2, True),  # float32 gradients of the same scaler count, too
    "found in float32": ([single, single], 1, True),
    "given in the middle of training": ([taken_at_once, taken_at_once, given, half, half, half], 5, True),
    "found in the middle of training": ([taken_at_once, taken_at_once, half, half, half], 4, True),
    "an overflow before it is found": ([overflow], 0, False),
    "an overflow before it is found, and after": ([overflow, half, half, overflow, half], 2, True),
    "set between backward and step": ([between_backward_and_step], 0, True),
    "set between backward and step, and used": ([between_backward_and_step, single], 1, True),
    # statistics of an unscaled loss, divided by the scale, would be too small by its square
    "found, and then not stepping any more": ([half, half, taken_at_once], 1, False),
    "found in float32, and then not stepping any more": ([single, single, *[taken_at_once] * 4], 4, False),
    "given, and stepped by hand": ([given, by_hand, by_hand, by_hand], 3, True),
    "given after it was found, and stepped by hand": ([single, single, given, by_hand, by_hand, by_hand], 4, True),
}


@pairs(method=METHODS, run=RUNS, treatment=["plain", "unscale", "clip"], by_keyword=[False, True])
def test_statistics_are_those_of_float32_or_left_out(method, run, treatment, by_keyword):
    """Statistics of a step that finds a scaler, or that finds it gone, are left out."""
    steps, counted, knows = run
    model, scaler = make_model(), make_scaler()
    if by_keyword and steps[0] is given:
        opt, steps = built(method, model, grad_scaler=scaler), steps[1:]
    else:
        opt = method(model)
    for step in steps:
        step(opt, model, scaler, treatment=treatment)
    assert opt.grad_scaler is (scaler if knows else None)
    assert {opt.state[b.owner].get("factor_updates", 0) for b in opt.blocks.values()} == {counted}
    if counted:
        assert_counted(method, opt, counted, 2e-2 if half in steps else 1e-5)
    else:
        assert {opt.state[b.owner]["refreshes"] for b in opt.blocks.values()} == {0}
    assert opt.diagnostics()["skipped_statistics"] == 0


def test_the_stack_is_not_searched_at_every_step(monkeypatch):
    search, model = Mock(return_value=None), make_model()
    monkeypatch.setattr(secondorder.capture.loss_scale, "calling_scaler", search)
    opt = make_kfac(model)
    for half_precision in (False, True):  # the latter warns, because no scaler is found
        with warned() if half_precision else silent():
            for _ in range(5):
                scaled_step(opt, model, make_scaler(enabled=False), half=half_precision)
        assert search.call_count == 1 + half_precision


def test_the_scaler_is_found_through_wrappers_of_the_step_and_again_by_a_copy():
    """A scheduler wraps ``step``, and so does a trainer that counts the steps that a scaler skips."""
    model, scaler, other = make_model(), make_scaler(), make_scaler()
    opt = make_kfac(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 0.0)
    patched, counted = opt.step, Mock(wraps=opt.step)
    for _ in range(2):
        opt.step = counted
        scaled_step(opt, model, scaler)
        opt.step = patched
        scheduler.step()
    assert opt.grad_scaler is scaler
    assert counted.call_count == 2
    assert_counted(make_kfac, opt, 1)
    model, opt = copy.deepcopy((model, make_kfac(model, grad_scaler=scaler)))
    opt.attach(model)
    assert opt.grad_scaler is None
    for _ in range(2):
        scaled_step(opt, model, other)
    assert opt.grad_scaler is other
    assert_counted(make_kfac, opt, 1)


def test_a_disabled_scaler_that_steps_costs_no_statistics():
    model, scaler = make_model(), make_scaler(enabled=False)
    opt = make_kfac(model)
    for half_precision, tolerance in ((False, 1e-5), (True, 2e-2)):  # the latter is float16, but not scaled
        scaled_step(opt, model, scaler, half=half_precision)
        assert opt.grad_scaler is scaler
        assert_counted(make_kfac, opt, 1, tolerance)


def mixed(net, x):
    """A layer in float16 under autocast, and one that stays in float32."""
    with torch.autocast("cpu", dtype=torch.float16):
        half = net.narrow(x)
    return net.single(half.float())


@each(method=METHODS)
def test_float16_gradients_with_no_scaler_to_be_found_warn_once_and_leave_all_layers_out(method):
    """The loop scales by itself, so the float32 layer has the same unknown scale as the float16 one."""
    model = Net(mixed, narrow=nn.Linear(5, 6), single=nn.Linear(6, 3))
    opt, (x, y) = method(model), batch()

    def step(scale):
        opt.zero_grad()
        (F.cross_entropy(model(x), y) * scale).backward()
        for p in model.parameters():
            p.grad.div_(scale)
        opt.step()
        return {opt.state[b.owner]["refreshes"] for b in opt.blocks.values()}

    with warned() as caught:
        assert [step(1024) for _ in range(4)] == [{0}] * 4
    (message,) = caught
    assert "narrow, single: the gradients of this batch are float16" in message
    for remedy in ("scaler.step(optimizer)", "optimizer.grad_scaler", "GradScaler(enabled=False)"):
        assert remedy in message
    assert "float16" in opt.describe()
    opt.grad_scaler = make_scaler(enabled=False)
    assert step(1) == {1}
    assert "float16" not in opt.describe()


def test_window_methods_need_no_scaler():
    """Their rows are gradients, which the scaler divides before the step."""
    models = make_model(), make_model()
    for model, scaled in zip(models, (False, True), strict=True):
        opt = MFAC(model, lr=0.1, window_size=4, damping=1e-2)
        scaler = make_scaler(enabled=scaled)
        for _ in range(3):
            scaled_step(opt, model, scaler, half=False)
    torch.testing.assert_close(*(list(model.parameters()) for model in models), rtol=1e-4, atol=1e-6)


def test_an_observer_never_sees_rows_that_carry_the_scale(tmp_path):
    """Its own taps are informed of the scaler in the step that finds it."""
    found = {}
    for scaled in (False, True):
        model, scaler, folder = make_model(), make_scaler(enabled=scaled), tmp_path / str(scaled)
        opt = make_kfac(model)
        with Analysis(opt, folder, ("rank",), every=1):
            for _ in range(3):
                scaled_step(opt, model, scaler, half=False)
        events = read_events(folder / "rank.jsonl")
        found[scaled] = {(event["step"], event["layer"]): event["sigma_max"] for event in events}
    assert {step for step, _ in found[False]} == {0, 1, 2}
    assert {step for step, _ in found[True]} == {1, 2}
    assert found[True] == pytest.approx({key: found[False][key] for key in found[True]}, rel=1e-4)
