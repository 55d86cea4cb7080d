"""Runs go on to the bit where they were stopped: rows, draws, modes and what policies remember; or are refused."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import HyLo, ParamScheduler
from secondorder.switching import Always, EpochList, GradNormChange, LRChange, ProbeError
from tests.support.grid import pairs
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.hylo import flat, plain_hylo, step
from tests.support.saving import through_a_file

STEPS = 17
RUNS = {
    "auto": lambda: {"mode": "auto", "switch": GradNormChange(eta=0.5, period_steps=2)},
    "kis": lambda: {"mode": "kis"},
    "kis with replacement": lambda: {"mode": "kis", "kis_sampling": "replacement"},
    "kid": lambda: {"mode": "kid"},
    "sngd": lambda: {"mode": "sngd"},
    "learning rate": lambda: {"mode": "auto", "switch": LRChange(hold=1, period_steps=3)},
    "epochs": lambda: {"mode": "auto", "switch": EpochList([(0, 1), (3, 4)], steps_per_epoch=3)},
    "probe": lambda: {"mode": "auto", "switch": ProbeError(layers=2, threshold=0.3)},
    "always": lambda: {"mode": "auto", "switch": Always("kis")},
    "cheaper": lambda: {"mode": "kid", "kfac_when_cheaper": True},
    "relative": lambda: {"mode": "kis", "damping": 0.5, "damping_mode": "relative"},
    "energy": lambda: {"mode": "kid", "rank_energy": 0.9, "rank_fraction": 1.0},
}


def new(run, **keywords):
    model = convnet()
    made = {"lr": 0.05, "damping": 0.05, "rank_fraction": 0.3, "update_steps": 4, **RUNS[run](), **keywords}
    return model, HyLo(model, **made)


def go_on(model, opt, begin, end):
    for number in range(begin, end):
        if number == 9:
            opt.param_groups[0]["lr"] = 0.01
        step(opt, model, *images(12, seed=number), F.cross_entropy)


def train(opt, model, begin, end, n=12):
    for seed in range(begin, end):
        step(opt, model, *vectors(n, seed=seed), F.cross_entropy)


def assert_equal(found, expected, path="state"):
    if isinstance(expected, Tensor):
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


def assert_alike(opt, model, second, other):
    assert torch.equal(flat(dict(other.named_parameters())), flat(dict(model.named_parameters())))
    assert_equal(second.state_dict(), opt.state_dict())
    assert second.diagnostics()["mode"] == opt.diagnostics()["mode"]


def assert_goes_on(opt, model, second, other, steps=6):
    """Two optimizers on equal models do the same, to the bit."""
    other.load_state_dict(model.state_dict())
    for o, m in ((opt, model), (second, other)):
        train(o, m, 100, 100 + steps)
    assert_alike(opt, model, second, other)


def tensors_of(opt):
    return copy.deepcopy({i: dict(state) for i, state in enumerate(opt.state.values())})


# ---------------------------------------------------------------------------------------------------------------------
# Resume
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS)
def test_a_stopped_run_goes_on_to_the_bit(run):
    """From before the first step, from the middle of a refresh interval and from that of a period of the policy."""
    (model, opt), saved, modes = new(run), {}, set()
    for number in range(STEPS):
        if number in (0, 1, 7):
            saved[number] = through_a_file([model.state_dict(), opt.state_dict()])
        go_on(model, opt, number, number + 1)
        modes.add(opt.diagnostics()["mode"])
    assert run not in ("auto", "learning rate", "epochs") or modes == {"kid", "kis"}
    for middle, (weights, state) in saved.items():
        other, second = new(run)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1)
        other.load_state_dict(weights)
        second.load_state_dict(state)
        assert_equal(second.state_dict(), state)
        go_on(other, second, middle, STEPS)
        assert_alike(opt, model, second, other)


@pytest.mark.parametrize("run", RUNS)
def test_a_copy_goes_on_as_the_original(run):
    (model, opt), copies = new(run), []
    go_on(model, opt, 0, 5)
    for other, second in (copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))):
        second.attach(other)
        copies.append((other, second))
    go_on(model, opt, 5, 12)
    for other, second in copies:
        go_on(other, second, 5, 12)
        assert_alike(opt, model, second, other)


@pytest.mark.parametrize("run", ["auto", "kis", "cheaper"])
def test_looking_changes_nothing(run):
    (model, opt), (other, second) = new(run), new(run)
    for number in range(6):
        go_on(model, opt, number, number + 1)
        go_on(other, second, number, number + 1)
        opt.dense_curvature("second")
        opt.diagnostics()
        opt.describe()
        opt.memory_usage()
    assert_alike(opt, model, second, other)


def test_a_checkpoint_without_curvature_starts_anew():
    """Momentum, draws and what the policy remembers go on; rows come with the next refresh."""
    found = {}
    for kind in ("all", "none"):
        model, opt = new("auto", **({"checkpoint_curvature": "none"} if kind == "none" else {}))
        go_on(model, opt, 0, 5)
        saved = through_a_file(opt.state_dict())
        found[kind] = sum(t.numel() for s in saved["state"].values() for t in s.values() if isinstance(t, Tensor))
    assert found["none"] < found["all"]
    other, second = new("auto", checkpoint_curvature="none")
    other.load_state_dict(model.state_dict())
    second.load_state_dict(saved)
    assert second.switch.state_dict() == pytest.approx(opt.switch.state_dict(), rel=0, abs=0, nan_ok=True)
    assert second.diagnostics()["mode"] == opt.diagnostics()["mode"]
    go_on(other, second, 5, 10)
    assert torch.isfinite(flat(dict(other.named_parameters()))).all()


@pytest.mark.parametrize("run", ["kid", "kis", "sngd"])
def test_rows_survive_a_change_of_batch_size(run):
    """The checkpoint of 12 examples, loaded by a run whose batches have 5 or 20."""
    model, opt = new(run)
    go_on(model, opt, 0, 6)
    for n in (5, 20):
        other, second = new(run)
        step(second, other, *images(n, seed=50), F.cross_entropy)
        other.load_state_dict(through_a_file(model.state_dict()))
        second.load_state_dict(through_a_file(opt.state_dict()))
        assert torch.equal(second.dense_curvature("second"), opt.dense_curvature("second"))
        for seed in range(8):
            assert torch.isfinite(flat(step(second, other, *images(n, seed=seed), F.cross_entropy))).all()


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


# ---------------------------------------------------------------------------------------------------------------------
# Modes, factors and policies of the checkpoint and of the optimizer that loads it
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("auto", "kid"), ("kid", "auto"), ("kis", "sngd"), ("sngd", "kis"), ("auto", "sngd"), ("kis", "kid")],
)
def test_a_checkpoint_decides_the_mode(ours, theirs):
    model, other = mlp(), mlp()
    opt, second = (plain_hylo(m, lr=0.01, mode=k, rank_fraction=0.4) for m, k in ((model, theirs), (other, ours)))
    train(opt, model, 0, 2)
    train(second, other, 5, 6)
    second.load_state_dict(opt.state_dict())
    assert second.param_groups[0]["mode"] == theirs
    assert_goes_on(opt, model, second, other, 3)


@pairs(
    change={"auto-kid": ("auto", "kid"), "kid-auto": ("kid", "auto"), "sngd-auto": ("sngd", "auto")},
    how=["set", "scheduled"],
    stepped=[False, True],
)
def test_a_mode_that_changed_goes_with_the_checkpoint(change, how, stepped):
    """Before and after the first step with it."""
    before, after = change
    for built in (before, after):
        model, other = mlp(), mlp()
        opt, second = (plain_hylo(m, lr=0.01, mode=mode) for m, mode in ((model, before), (other, built)))
        schedule = ParamScheduler(opt, mode={0: before, 3: after}) if how == "scheduled" else None
        for seed in range(3):
            train(opt, model, seed, seed + 1)
            if schedule is not None:
                schedule.step()
        if schedule is None:
            opt.param_groups[0]["mode"] = after
        train(opt, model, 3, 3 + stepped)
        second.load_state_dict(opt.state_dict())
        assert second.param_groups[0]["mode"] == after
        assert_goes_on(opt, model, second, other, 3)


def test_substituted_factors_load_where_nothing_is_substituted_and_stay_when_nothing_is_any_more():
    for switched_off in (False, True):
        model, other = mlp(), mlp()
        options = {"lr": 0.01, "mode": "kid", "rank_fraction": 1.0, "update_steps": 2}
        opt, second = plain_hylo(model, kfac_when_cheaper=True, **options), plain_hylo(other, **options)
        train(opt, model, 0, 3, 64)
        if switched_off:
            opt.param_groups[0]["kfac_when_cheaper"] = False
            train(opt, model, 3, 5, 64)
        train(second, other, 5, 6, 64)
        second.load_state_dict(opt.state_dict())
        assert all(b.is_factored for o in (opt, second) for b in o.blocks.values())
        assert_goes_on(opt, model, second, other)


def frozen_first() -> nn.Sequential:
    model = mlp((4, 5, 6, 3))
    model[0].requires_grad_(False)
    return model


def test_what_a_policy_remembers_is_kept_where_the_first_layer_is_frozen():
    """In the middle of a period, with a decision taken before."""
    built = {"lr": 0.05, "mode": "auto", "switch": GradNormChange(eta=0.5, period_steps=3), "rank_fraction": 0.3}
    model, other = frozen_first(), frozen_first()
    opt, second = plain_hylo(model, **built), plain_hylo(other, **built)
    train(opt, model, 0, 10)
    second.load_state_dict(opt.state_dict())
    assert second.switch.state_dict() == pytest.approx(opt.switch.state_dict(), rel=0, abs=0, nan_ok=True)
    assert not math.isnan(second.switch.state_dict()["last_norm"])
    assert_goes_on(opt, model, second, other)


def test_a_state_of_another_policy_is_refused_and_may_be_left_out():
    model, other = mlp(), mlp()
    opt = plain_hylo(model, lr=0.01, mode="auto", switch=EpochList([(0, 1)], steps_per_epoch=3), rank_fraction=0.3)
    ours = LRChange(hold=2, period_steps=4)
    second = plain_hylo(other, lr=0.02, mode="auto", switch=ours, rank_fraction=0.3)
    train(opt, model, 0, 5)
    train(second, other, 5, 7)
    saved = copy.deepcopy(opt.state_dict())
    before, told = tensors_of(second), second.diagnostics()
    with pytest.raises(ValueError, match=r"switch_state.*LRChange"):
        second.load_state_dict(saved)
    assert_equal(tensors_of(second), before)
    assert second.diagnostics() == told
    assert second.param_groups[0]["lr"] == 0.02
    for found in saved["state"].values():
        found.pop("switch_state", None)
    second.load_state_dict(saved)
    assert second.diagnostics()["step"] == 5
    fresh = LRChange(hold=2, period_steps=4).state_dict()
    assert second.switch.state_dict() == pytest.approx(fresh, nan_ok=True)
    train(second, other, 7, 9)
    third = plain_hylo(mlp(), mode="auto", switch=Always("kis"))  # neither remembers anything
    with pytest.raises(ValueError, match=r"switch_state.*Always"):
        third.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("thawed", [True, False])
def test_rows_of_another_bias_are_refused(thawed):
    model, other = mlp((4, 3)), mlp((4, 3))
    (model if thawed else other)[0].bias.requires_grad_(False)
    opt, second = plain_hylo(model), plain_hylo(other)
    train(opt, model, 0, 2)
    train(second, other, 5, 7)
    before = tensors_of(second)
    with pytest.raises(ValueError, match="rows_a"):
        second.load_state_dict(opt.state_dict())
    assert_equal(tensors_of(second), before)


def test_the_log_of_switches_ends_at_the_loaded_step():
    model, policy = mlp(), EpochList([(0, 2), (4, 5)], steps_per_epoch=2)
    opt = plain_hylo(model, mode="auto", switch=policy, rank_fraction=0.3)
    train(opt, model, 0, 5)
    saved = copy.deepcopy(opt.state_dict())
    train(opt, model, 5, 12)
    logged = opt.diagnostics()["switches"]
    assert [list(switch) for switch in logged] == [[0, "kid"], [4, "kis"], [8, "kid"], [10, "kis"]]
    assert copy.deepcopy(opt).diagnostics()["switches"] == logged
    opt.load_state_dict(saved)
    assert opt.diagnostics()["switches"] == logged[:2]
    train(opt, model, 5, 12)
    assert opt.diagnostics()["switches"] == logged


def test_a_policy_survives_a_load_while_nobody_asks_it():
    """Modes are scheduled: the policy rests, and goes on with what it remembers."""

    def run(loads: bool) -> list[str]:
        model = mlp((4, 3))
        opt = HyLo(model, lr=0.0, update_steps=1, switch=GradNormChange(eta=10.0, period_steps=2))
        schedule, modes = ParamScheduler(opt, mode={0: "auto", 8: "sngd", 10: "auto"}), []
        for number in range(14):
            if loads and number == 9:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            train(opt, model, number, number + 1, 8)
            modes.append(opt.diagnostics()["mode"])
            schedule.step()
        return modes

    assert run(loads=True) == run(loads=False)


@pairs(mode=["auto", "kid", "kis", "sngd", "energy", "cheaper"], approx=["reduce", "expand"])
def test_a_state_holds_nothing_but_itself(mode, approx):
    """No parts of stacks or of the batch: they would be kept whole in memory, and written whole to files."""
    options = {"energy": {"mode": "kid", "rank_energy": 0.5}, "cheaper": {"mode": "kid", "kfac_when_cheaper": True}}
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    opt = plain_hylo(model, approx=approx, **options.get(mode, {"mode": mode, "rank_fraction": 0.3}))
    for seed, n in enumerate((12, 12, 8)):
        x = torch.randint(9, (n, 6), generator=torch.Generator().manual_seed(seed))
        step(opt, model, x, torch.zeros(n, 6, 5, dtype=torch.float64), F.mse_loss)
    for p in opt.state:
        for key, value in opt.state[p].items():
            if isinstance(value, Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes, key
