"""Mode "auto": when the policy is asked, what it observes, and that refreshes follow its answer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import HyLo
from secondorder.diagnostics import Analysis, read_events
from secondorder.switching import Always, EpochList, GradNormChange, LRChange, ProbeError, SwitchPolicy
from tests.support.grid import pairs
from tests.support.kfac import assert_close, noise
from tests.support.models import mlp, vectors
from tests.support.networks import squares
from tests.support.oracles.hylo import flat, greedy, kid_operator, layer_rows, plain_hylo, shares, step, vectors_of


def train(opt: HyLo, model: nn.Module, steps: range | int, n: int = 12) -> list[str]:
    """The mode after every step."""
    found = []
    for number in range(steps) if isinstance(steps, int) else steps:
        step(opt, model, *vectors(n, seed=number), F.cross_entropy)
        found.append(opt.diagnostics()["mode"])
    return found


def two_groups(model: nn.Module, first: dict, second: dict, **keywords) -> HyLo:
    groups = [{"params": list(model[0].parameters()), **first}, {"params": list(model[2].parameters()), **second}]
    return plain_hylo(groups, module=model, **keywords)


def test_a_constant_policy_equals_a_fixed_mode_and_the_default_policy_starts_with_kid():
    for mode in ("kid", "kis", "sngd"):
        found = []
        for keywords in ({"mode": mode}, {"mode": "auto", "switch": Always(mode)}):
            model = mlp()
            opt = plain_hylo(model, lr=0.05, rank_fraction=0.3, update_steps=2, **keywords)
            assert set(train(opt, model, 6)) == {mode}
            found.append(flat(dict(model.named_parameters())))
        assert torch.equal(*found)
    model = mlp()
    assert set(train(plain_hylo(model, mode="auto"), model, 3)) == {"kid"}


def test_each_refresh_follows_the_mode_it_reports():
    model, plain, seen = mlp((4, 3)), mlp((4, 3)), set()
    opt = plain_hylo(model, mode="auto", switch=EpochList([(0, 1)], steps_per_epoch=2), rank_fraction=0.5)
    for seed in range(6):
        x, y = vectors(8, seed=seed)
        kept = step(opt, model, x, y, F.cross_entropy)
        (U,), mode = layer_rows(plain, "0", x, y, F.cross_entropy), opt.diagnostics()["mode"]
        seen.add(mode)
        if mode == "kid":
            V, moved = vectors_of(model, "0", kept)
            assert_close(moved[0], kid_operator(U, greedy(U @ U.mT, 4), 1e-2) @ V[0], 1e-7)
        else:
            assert int((shares(opt.dense_curvature("0"), U).abs() > 1e-7).sum()) == 4
    assert seen == {"kid", "kis"}


@pytest.mark.parametrize("fixed", [False, True])
def test_groups_in_mode_auto_notice_a_change_of_the_learning_rate(fixed):
    """They do so even if a group of a fixed mode refreshes first."""
    model = mlp()
    first = {"mode": "kid", "update_steps": 1} if fixed else {"mode": "auto"}
    switch = LRChange(hold=1, period_steps=1)
    opt = two_groups(model, first, {"mode": "auto"}, lr=0.1, switch=switch, update_steps=5, rank_fraction=0.3)
    for seed in range(11):
        if seed == 2:
            for group in opt.param_groups:
                group["lr"] = 0.01
        train(opt, model, range(seed, seed + 1))
    assert [list(switch) for switch in opt.diagnostics()["switches"]] == [[0, "kis"], [5, "kid"], [10, "kis"]]


def test_a_probe_compares_samples_with_the_exact_update():
    """The number of probed layers does not change the updates."""
    for threshold, mode in ((1e-9, "kid"), (1e9, "kis")):
        found = []
        for layers in (1, 2):
            model, switch = mlp(), ProbeError(layers=layers, threshold=threshold)
            opt = plain_hylo(model, lr=0.05, mode="auto", switch=switch, rank_fraction=0.3)
            assert train(opt, model, 5)[-1] == mode
            found.append(flat(dict(model.named_parameters())))
        assert torch.equal(*found)


def test_a_probe_measures_the_rank_that_an_energy_keeps():
    found = []
    for keywords in ({"rank_fraction": 0.25}, {"rank_energy": 0.05}):
        model = mlp((6, 8, 4))
        opt = plain_hylo(model, mode="auto", switch=ProbeError(layers=2), **keywords)
        step(opt, model, noise(32, 6), noise(32, 4, seed=50), squares)
        assert opt.diagnostics()["rank"] == {"0": 8, "2": 8}
        found.append(opt.switch.state_dict()["error"])
    assert found[0] == found[1] > 1e-3


def test_a_learning_rate_that_changes_at_a_dropped_batch_changed_at_its_step():
    for bad, expected in ((False, 5), (True, 6)):
        model = mlp()
        opt = plain_hylo(model, lr=0.1, mode="auto", switch=LRChange(hold=1, period_steps=3), rank_fraction=0.3)
        for seed in range(12):
            if seed == 5:
                opt.param_groups[0]["lr"] = 0.01
            x, y = vectors(12, seed=seed)
            step(opt, model, x * float("nan") if bad and seed == 5 else x, y, F.cross_entropy)
        assert opt.diagnostics()["skipped_steps"] == int(bad)
        assert opt.switch.state_dict()["changed_at"] == 5
        assert [list(switch) for switch in opt.diagnostics()["switches"]] == [[0, "kis"], [expected, "kid"], [8, "kis"]]


# ---------------------------------------------------------------------------------------------------- Asking the policy
class Listening(SwitchPolicy):
    """Records the steps at which it was asked and the errors that it received."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.heard: list[float] = []

    @property
    def probes(self) -> int:
        return 1

    def probe(self, error: Tensor) -> None:
        self.heard.append(float(error))

    def decide(self, step: int) -> str:
        self.asked.append(step)
        return "kis"


@pytest.mark.parametrize("fixed", ["kid", "kis", "sngd"])
def test_a_fixed_mode_neither_asks_nor_is_probed(fixed):
    found = []
    for skipped in ([], ["0"]):
        model = mlp((6, 8, 4))
        first, second = {"mode": fixed, "update_steps": 1}, {"mode": "auto", "update_steps": 4}
        opt = two_groups(model, first, second, switch=Listening(), rank_fraction=0.25, skip_layers=skipped)
        for seed in range(9):
            step(opt, model, noise(32, 6, seed=seed), noise(32, 4, seed=seed + 50), squares)
        assert opt.switch.asked == [0, 4, 8]
        found.append(opt.switch.heard)
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert min(found[0]) > 1e-3


def test_optimizers_that_are_given_one_policy_have_copies_of_it():
    policy, models = GradNormChange(eta=0.5, period_steps=2), [mlp(), mlp()]
    before = str(policy.state_dict())
    first, second = (plain_hylo(m, lr=0.05, mode="auto", switch=policy, rank_fraction=0.3) for m in models)
    train(first, models[0], 8)
    assert str(first.switch.state_dict()) != before
    assert str(second.switch.state_dict()) == str(policy.state_dict()) == before


def test_a_policy_given_as_mode_means_auto_for_groups_without_a_mode():
    opt = two_groups(mlp(), {"mode": "kid"}, {}, mode=ProbeError())
    assert opt.diagnostics()["modes"][0] == "kid"
    assert [group["mode"] for group in opt.param_groups] == ["kid", "auto"]
    assert isinstance(opt.switch, ProbeError)


def test_an_answer_that_is_not_a_mode_is_refused(monkeypatch):
    for answer in ("KID", "auto", ""):
        monkeypatch.setattr(Listening, "decide", lambda self, step, answer=answer: answer)
        model = mlp()
        opt = plain_hylo(model, mode="auto", switch=Listening())
        with pytest.raises(ValueError, match=f"Listening.*got '{answer}'"):
            train(opt, model, 1)


def test_a_norm_in_half_precision_does_not_overflow():
    model = nn.Linear(300, 300, dtype=torch.float16)
    opt = HyLo(model, lr=0.0, mode=GradNormChange(period_steps=1))
    for p in model.parameters():
        p.grad = torch.full_like(p, 300.0)
    assert torch.isfinite(opt.preconditioner._norm({p: p.grad for p in model.parameters()}))


# -------------------------------------------------------------------------------------------------------------- Reports
@pytest.mark.parametrize("kind", ["factors", "rows"])
def test_trend_events_have_the_mode_of_each_layer(kind, tmp_path):
    model = mlp((4, 3, 3))
    first = {"mode": "kid", "kfac_when_cheaper": kind == "factors", "rank_fraction": 1.0}
    opt = two_groups(model, first, {"mode": "kis"})
    with Analysis(opt, tmp_path, every=1):
        train(opt, model, 2, 64)
    found = {(event["step"], event["layer"]): event["mode"] for event in read_events(tmp_path / "trend.jsonl")}
    modes = {"0": "kfac" if kind == "factors" else "kid", "2": "kis"}
    assert {key: mode for key, mode in found.items() if key[1] in modes} == {
        (t, name): mode for t in range(2) for name, mode in modes.items()
    }


def reachable(found: object, seen: dict[int, int]) -> dict[int, int]:
    """Bytes by storage of all tensors in containers and in the attributes of policies."""
    if isinstance(found, Tensor):
        seen[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    elif isinstance(found, dict | list | tuple | set):
        for value in found.values() if isinstance(found, dict) else found:
            reachable(value, seen)
    elif type(found).__module__.startswith("secondorder"):
        reachable(vars(found), seen)
    return seen


@pairs(
    switch={"norm": GradNormChange(period_steps=100), "rate": LRChange(), "probe": ProbeError(), "kis": Always("kis")},
    cheaper=[False, True],
)
def test_memory_usage_counts_tensors_of_policies(switch, cheaper):
    model = mlp((4, 9, 3))
    opt = plain_hylo(model, momentum=0.9, mode="auto", switch=switch, kfac_when_cheaper=cheaper)
    train(opt, model, 3, 16)
    held = reachable([dict(opt.state), opt.switch, opt._runtime.workspace], {})
    assert opt.memory_usage()["total"] == sum(held.values())
