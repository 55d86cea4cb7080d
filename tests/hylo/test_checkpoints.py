"""A resumed run continues bit for bit (rows, draws, modes, the state of policies), or its checkpoint is refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import HyLo, ParamScheduler
from secondorder.switching import Always, EpochList, GradNormChange, LRChange, ProbeError
from tests.support.building import built
from tests.support.checkpoints import COPIES, assert_goes_on, assert_same_run, by_file
from tests.support.grid import each
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.hylo import flat, plain_hylo, step
from tests.support.tasks import assert_identical, snapshot

END = 17
RUNS = {  # `tests/checkpoint/` resumes fixed modes
    "auto": {"mode": "auto", "switch": GradNormChange(eta=0.5, period_steps=2)},
    "frozen first": {"mode": "auto", "switch": GradNormChange(eta=0.5, period_steps=3)},
    "kis with replacement": {"mode": "kis", "kis_sampling": "replacement"},
    "learning rate": {"mode": "auto", "switch": LRChange(hold=1, period_steps=3)},
    "epochs": {"mode": "auto", "switch": EpochList([(0, 1), (3, 4)], steps_per_epoch=3)},
    "probe": {"mode": "auto", "switch": ProbeError(layers=2, threshold=0.3)},
    "cheaper": {"mode": "kid", "kfac_when_cheaper": True},
    "relative": {"mode": "kis", "damping": 0.5, "damping_mode": "relative"},
    "energy": {"mode": "kid", "rank_energy": 0.9, "rank_fraction": 1.0},
}


def new(run, **keywords):
    model = convnet()
    if run == "frozen first":
        model.first.requires_grad_(False)
    made = {"lr": 0.05, "damping": 0.05, "rank_fraction": 0.3, "update_steps": 4, **RUNS[run], **keywords}
    return model, built(HyLo, model, **made)


def train_images(model, opt, begin, end):
    """Train with a learning rate that falls at step 9."""
    for number in range(begin, end):
        if number == 9:
            opt.param_groups[0]["lr"] = 0.01
        step(opt, model, *images(12, seed=number), F.cross_entropy)


def train(opt, model, begin, end, n=12):
    for seed in range(begin, end):
        step(opt, model, *vectors(n, seed=seed), F.cross_entropy)


def assert_loads(opt, model, second, other):
    """The second optimizer loads the state of the first, and both then train identically."""
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(opt.state_dict()))
    for o, m in ((opt, model), (second, other)):
        train(o, m, 100, 103)
    assert_same_run((other, second), (model, opt))
    assert second.diagnostics()["mode"] == opt.diagnostics()["mode"]


# --------------------------------------------------------------------------------------------------------------- Resume
@pytest.mark.parametrize("run", RUNS)
def test_a_stopped_or_copied_run_continues_bit_for_bit(run):
    """It stops after the first step, or in the middle of a refresh interval and of a period of the policy."""
    for stop, way in ((1, by_file), (7, by_file), (5, COPIES["deepcopy"])):
        model, opt = assert_goes_on(lambda: new(run), train_images, stop, END, way)
    if run in ("auto", "learning rate", "epochs"):
        assert {mode for _, mode in opt.diagnostics()["switches"]} == {"kid", "kis"}
    if run == "frozen first":
        assert not math.isnan(opt.switch.state_dict()["last_norm"])


# ------------------------------------------------------------------------ Loading into an optimizer with other settings
@each(
    change={f"{a}-{b}": (a, b) for a, b in (("auto", "kid"), ("kid", "auto"), ("sngd", "auto"), ("kis", "sngd"))},
    at_start=["kis", "kid", "auto"],
    how=["set", "scheduled"],
    stepped=[False, True],
)
def test_a_checkpoint_decides_the_mode(change, at_start, how, stepped):
    """This includes a mode that changed during the run, before and after the first step with it."""
    before, after = change
    model, other = mlp(), mlp()
    opt, second = (plain_hylo(m, lr=0.01, mode=mode) for m, mode in ((model, before), (other, at_start)))
    schedule = ParamScheduler(opt, mode={0: before, 3: after}) if how == "scheduled" else None
    for seed in range(3):
        train(opt, model, seed, seed + 1)
        if schedule is not None:
            schedule.step()
    if schedule is None:
        opt.param_groups[0]["mode"] = after
    train(opt, model, 3, 3 + stepped)
    train(second, other, 5, 6)
    second.load_state_dict(opt.state_dict())
    assert second.param_groups[0]["mode"] == after
    assert_loads(opt, model, second, other)


def test_substituted_factors_load_and_stay_without_kfac_when_cheaper():
    for switched_off in (False, True):
        model, other = mlp(), mlp()
        options = {"lr": 0.01, "mode": "kid", "rank_fraction": 1.0, "update_steps": 2}
        opt, second = plain_hylo(model, kfac_when_cheaper=True, **options), plain_hylo(other, **options)
        train(opt, model, 0, 3, 64)
        if switched_off:
            opt.param_groups[0]["kfac_when_cheaper"] = False
            train(opt, model, 3, 5, 64)
        train(second, other, 5, 6, 64)
        assert_loads(opt, model, second, other)
        assert all(b.is_factored for o in (opt, second) for b in o.blocks.values())


def test_the_state_of_another_policy_is_refused_but_may_be_left_out():
    model, other, ours = mlp(), mlp(), LRChange(hold=2, period_steps=4)
    opt = plain_hylo(model, lr=0.01, mode="auto", switch=EpochList([(0, 1)], steps_per_epoch=3), rank_fraction=0.3)
    second = plain_hylo(other, lr=0.02, mode="auto", switch=copy.deepcopy(ours), rank_fraction=0.3)
    train(opt, model, 0, 5)
    train(second, other, 5, 7)
    saved = snapshot(opt)
    for loading in (second, plain_hylo(mlp(), mode="auto", switch=Always("kis"))):
        before, reported = snapshot(loading), loading.diagnostics()
        with pytest.raises(ValueError, match=rf"switch_state.*{type(loading.switch).__name__}"):
            loading.load_state_dict(saved)
        assert_identical(snapshot(loading), before)
        assert loading.diagnostics() == reported
    for found in saved["state"].values():
        found.pop("switch_state", None)
    second.load_state_dict(saved)
    assert second.diagnostics()["step"] == 5
    assert second.switch.state_dict() == pytest.approx(ours.state_dict(), nan_ok=True)
    train(second, other, 7, 9)


def test_the_log_of_switches_ends_at_the_loaded_step():
    model, policy = mlp(), EpochList([(0, 2), (4, 5)], steps_per_epoch=2)
    opt = plain_hylo(model, mode="auto", switch=policy, rank_fraction=0.3)
    train(opt, model, 0, 5)
    saved = snapshot(opt)
    train(opt, model, 5, 12)
    logged = opt.diagnostics()["switches"]
    assert [list(switch) for switch in logged] == [[0, "kid"], [4, "kis"], [8, "kid"], [10, "kis"]]
    assert copy.deepcopy(opt).diagnostics()["switches"] == logged
    opt.load_state_dict(saved)
    assert opt.diagnostics()["switches"] == logged[:2]
    train(opt, model, 5, 12)
    assert opt.diagnostics()["switches"] == logged


def test_a_policy_that_is_not_in_use_survives_a_load():
    """The schedule sets a fixed mode for a while, after which the policy continues with its previous state."""

    def run(loads: bool) -> list[str]:
        model = mlp((4, 3))
        opt = HyLo(model, lr=0.0, update_steps=1, mode=GradNormChange(eta=10.0, period_steps=2))
        schedule, modes = ParamScheduler(opt, mode={0: "auto", 8: "sngd", 10: "auto"}), []
        for number in range(14):
            if loads and number == 9:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            train(opt, model, number, number + 1, 8)
            modes.append(opt.diagnostics()["mode"])
            schedule.step()
        return modes

    assert run(loads=True) == run(loads=False)


@each(run=["auto", "kis with replacement", "energy", "cheaper"], approx=["reduce", "expand"])
def test_tensors_of_the_state_own_all_of_their_storage(run, approx):
    """Views of stacks or of the batch would keep all of them in memory and write all of them to files."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    opt = plain_hylo(model, approx=approx, **{"rank_fraction": 0.3, **RUNS[run]})
    for seed, n in enumerate((12, 12, 8)):
        x = torch.randint(9, (n, 6), generator=torch.Generator().manual_seed(seed))
        step(opt, model, x, torch.zeros(n, 6, 5, dtype=torch.float64), F.mse_loss)
    for state in opt.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes, key


def test_a_checkpoint_without_curvature_keeps_the_state_of_a_policy():
    model, opt = new("auto", checkpoint_curvature="none")
    train_images(model, opt, 0, 5)
    _, second = by_file(lambda: new("auto", checkpoint_curvature="none"), model, opt)
    assert second.switch.state_dict() == pytest.approx(opt.switch.state_dict(), rel=0, abs=0, nan_ok=True)
    assert second.diagnostics()["mode"] == opt.diagnostics()["mode"]


def test_a_given_batch_size_allocates_rows_at_construction_and_changes_nothing_else():
    found = []
    for keywords in ({}, {"batch_size": 12}):
        model, opt = new("relative", **keywords)
        held = opt.memory_usage()["rows"]
        assert (held > 0) == bool(keywords)
        train_images(model, opt, 0, 9)
        found.append(flat(dict(model.named_parameters())))
        if keywords:
            assert opt.memory_usage()["rows"] == held
    assert torch.equal(*found)
