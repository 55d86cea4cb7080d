"""The plan of a comparison, its file of results, and the command at the smallest size."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import store
from benchmarks.cli import main
from benchmarks.commands.compare import Compare, _failed, command_line
from benchmarks.compare.plan import STEP, Budget, Job, current, leaders, pending, sift, winner
from benchmarks.compare.runs import Setting, curve, execute, find, key_of, recipe_of, schedule_of
from benchmarks.recipes import METHODS
from benchmarks.recipes.types import COSINE, Recipe, Schedule, factor
from benchmarks.runner import History


def _run(optimizer, phase, loss, factor=1.0, seed=0, steps=100, ours=True):
    return {
        "optimizer": optimizer, "phase": phase, "factor": factor, "seed": seed, "steps": steps, "failed": None,
        "diverged": loss is None, "curve": [[steps, loss, 1.0, 1.0]], "ours": ours,
        "order": "second" if ours else "first",
    }  # fmt: skip


WORDS = ("compare", "--workload", "digits", "--size", "smoke", "--steps", "12", "--optimizers", "sgd", "muon", "kfac")
BUDGET = Budget(60, seeds=2, short_share=0.5)


def test_trials_are_half_a_decade_apart_and_continue_if_the_best_rate_is_at_an_end():
    jobs = sift([], "kfac", BUDGET)
    assert [(job.factor, job.steps) for job in jobs] == [(1 / STEP, 10), (1.0, 10), (STEP, 10)]
    for losses, further in [
        ((3.0, 2.0, 3.0), []),
        ((1.0, 2.0, 3.0), [1 / STEP**2]),
        ((3.0, 2.0, 1.0), [STEP**2]),
        ((3.0, 2.0, None), []),
        ((None, None, None), [1 / STEP**2]),
    ]:
        runs = [_run("kfac", "sift", loss, f) for loss, f in zip(losses, BUDGET.factors, strict=True)]
        assert [job.factor for job in sift(runs, "kfac", BUDGET)] == pytest.approx(further)
    runs = [_run("kfac", "sift", 100.0 - f, f) for f in (1 / STEP, 1.0, STEP, STEP**2)]
    assert len(sift(runs, "kfac", BUDGET)) == 1
    runs.append(_run("kfac", "sift", 0.0, STEP**3))
    assert sift(runs, "kfac", BUDGET) == []  # at most two further trials
    assert winner(runs, "kfac") == STEP**3
    assert winner([_run("kfac", "sift", 1.0, f) for f in (1.0, STEP)], "kfac") == 1.0  # the smaller of equal ones
    assert winner([_run("kfac", "sift", None)], "kfac") is None
    budget = Budget(60, (0.5,), seeds=1)  # a single rate needs no trial
    assert sift([], "kfac", budget) == []
    assert [(job.phase, job.factor) for job in pending([], ["kfac"], (), budget)] == [("final", 0.5)]


def _work_through(budget, optimizers, short):
    runs, order = [], []
    while job := next(pending(runs, optimizers, short, budget), None):
        order.append((job.optimizer, job.phase, job.seed, job.steps))
        runs.append(_run(job.optimizer, job.phase, abs(math.log(job.factor)), job.factor, job.seed, job.steps))
    return order


def test_the_order_of_a_whole_comparison():
    order = _work_through(BUDGET, ["sgd", "kfac"], ["kfac"])
    assert order[:6] == [(name, "sift", 0, 10) for name in ("sgd", "kfac") for _ in range(3)]
    assert order[6:] == [
        run
        for seed in range(2)
        for run in (("sgd", "final", seed, 60), ("kfac", "final", seed, 60), ("kfac", "short", seed, 30))
    ]


WHOLE = {"kfac": 0.2, "hylo": 0.3, "ggt": 0.9, "adamw": 0.5, "muon": 0.6, "sgd": 0.8}
"""Final losses at the rate of the best trial."""


def _led(budget, lower):
    """Simulate a comparison whose best trials are at 1, with these losses of full runs at the next lower rate."""
    runs, order = [], []
    while job := next(pending(runs, list(WHOLE), ["kfac"], budget), None):
        whole = (WHOLE if job.factor == 1 else lower).get(job.optimizer)
        loss = abs(math.log(job.factor)) if job.phase == "sift" else whole
        order.append((job.optimizer, job.phase, round(job.factor, 3), job.seed))
        ours = job.optimizer in {"kfac", "hylo", "ggt"}
        runs.append(_run(job.optimizer, job.phase, loss, job.factor, job.seed, job.steps, ours))
        runs = current(runs, list(WHOLE), budget)
    return runs, order


def test_leaders_run_at_a_second_rate_and_with_all_seeds_at_the_better_one():
    runs, order = _led(replace(BUDGET, leaders=2), {"kfac": 0.1, "hylo": 0.4, "adamw": 0.55, "muon": 0.4})
    assert order[18:] == [
        *((name, "final", 1.0, 0) for name in WHOLE),
        *((name, "final", 0.316, 0) for name in ("kfac", "hylo", "adamw", "muon")),
        ("kfac", "short", 0.316, 0),
        *((name, "final", rate, 1) for name, rate in (("kfac", 0.316), ("hylo", 1.0), ("muon", 0.316), ("adamw", 1.0))),
        ("kfac", "short", 0.316, 1),
    ]
    full = {(run["optimizer"], run["phase"], round(run["factor"], 3)) for run in runs if run["phase"] != "sift"}
    assert {(name, "final", 1.0) for name in ("hylo", "adamw", "sgd", "ggt")} < full
    assert {("kfac", "final", 0.316), ("kfac", "long", 1.0), ("hylo", "long", 0.316), ("muon", "long", 1.0)} < full


def test_a_second_rate_that_diverged_changes_nothing():
    runs, order = _led(replace(BUDGET, leaders=1), {"kfac": None, "adamw": None})
    assert ("kfac", "final", 1.0, 1) in order
    assert ("adamw", "final", 1.0, 1) in order
    tried = [(run["optimizer"], run["factor"]) for run in runs if run["phase"] == "long"]
    assert tried == [("kfac", 1 / STEP), ("adamw", 1 / STEP)]


def test_adamw_has_a_second_rate_even_if_it_is_not_a_leader():
    names = {"adamw": 0.9, "muon": 0.1, "kfac": 0.2}
    runs = [_run(name, "final", loss, ours=name == "kfac") for name, loss in names.items()]
    assert leaders(runs, list(names), replace(BUDGET, leaders=1)) == ["kfac", "muon", "adamw"]
    assert leaders(runs[1:], ["muon", "kfac"], replace(BUDGET, leaders=1)) == ["kfac", "muon"]


def test_the_key_of_a_run_depends_on_its_settings_and_not_on_the_choice_of_its_rate():
    job = Job("kfac", "final", 1.0, 0, 60)
    same = [job.key({"lr": 1.0}), replace(job, phase="long").key({"lr": 1.0})]
    others = [replace(job, phase="short").key({"lr": 1.0}), replace(job, seed=1).key({"lr": 1.0}), job.key({"lr": 2.0})]
    assert same[0] == same[1] == job.key({"lr": 1.0})
    assert len({same[0], *others}) == 4


def test_the_schedule_of_an_optimizer_replaces_that_of_the_comparison():
    setting = Setting("digits", "cpu", Path("data"))
    own, common = (find(name).recipe("digits") for name in ("schedule_free", "muon"))
    assert schedule_of(own, setting) == Schedule("constant", 0.05)
    assert schedule_of(common, setting) == COSINE
    job = Job("schedule_free", "final", 1.0, 0, 10)
    assert key_of(job, own) != key_of(job, replace(own, schedule=COSINE))
    assert key_of(job, common) == key_of(job, replace(common, schedule=own.schedule))  # that of the comparison is used


def test_a_factor_only_multiplies_searched_settings():
    recipe = Recipe({"lr": 0.1, "fallback_lr": 0.01, "damping": 1.0}, "here", searched=("lr", "fallback_lr"))
    assert recipe.times(10).settings == {"lr": 1.0, "fallback_lr": 0.1, "damping": 1.0}
    recipe = replace(recipe, settings={"lr": 0.1, "fallback_lr": None})
    assert recipe.times(2).settings == {"lr": 0.2, "fallback_lr": None}


def test_schedules():
    cosine = Schedule("cosine", 0.1)
    assert [factor(cosine, step, 20) for step in (0, 1, 2, 11, 20)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    steps = Schedule("steps", milestones=(0.5, 0.75))
    assert [factor(steps, step, 8) for step in (0, 3, 4, 6, 7)] == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    assert factor(Schedule("linear"), 5, 10) == 0.5
    trapezoid = Schedule("trapezoid", 0.1)
    found = [factor(trapezoid, step, 100) for step in (0, 9, 10, 70, 85, 99)]
    assert found == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.5, 1 / 30])
    assert factor(Schedule(), 5, 10) == 1.0


def test_rates_follow_the_batch_size():
    for workload, size, batch_size, name, lr, note in [
        ("resnet32", "paper", None, "hylo", 1.8 / 32, ""),  # published for 32 ranks of 128 examples
        ("vgg16", "paper", None, "kfac", 0.4 / 4, "published with dataset=cifar100, which is not applied here"),
        ("resnet50", "paper", 640, "hylo", 4.0 / 8, "label_smoothing=0.1, which is not applied here"),
        ("resnet32", "paper", None, "adamw", 3e-3, ""),
        ("digits", "cpu", None, "sgd", 0.1, ""),
        ("digits", "cpu", 1024, "sgd", 0.4, ""),
        ("digits", "cpu", 1024, "kfac", 0.04, ""),
    ]:
        setting = Setting(workload, size, Path("data"), batch_size=batch_size)
        recipe = recipe_of(Job(name, "final", 1.0, 0, 10), setting)
        assert recipe.settings["lr"] == pytest.approx(lr, rel=1e-5)
        assert recipe.note.endswith(note)
        assert ("not applied" in recipe.note) == bool(note)
    setting = Setting("vgg16", "paper", Path("data"), workload_changes={"dataset": "cifar100"})
    assert "not applied" not in recipe_of(Job("kfac", "final", 1.0, 0, 10), setting).note  # applied to all runs


def test_a_run_that_ends_above_twice_its_first_loss_diverged(data_dir):
    assert not History("kfac", [1.0] + [3.0] * 8).risen  # too few steps
    assert not History("kfac", [1.0] + [2.0] * 20).risen
    assert History("kfac", [1.0] + [2.1] * 20).risen
    run = execute(Job("sgd", "final", 1e3, 0, 12), Setting("digits", "smoke", data_dir))
    assert math.isfinite(run["curve"][-1][1])
    assert run["diverged"]
    assert run["metric"] is None
    assert run["source"] == "tuned here"


def test_the_points_of_a_curve_end_with_the_run():
    history = History("kfac", [float(i) for i in range(95)], [0.5] * 95, [0.25] * 95)
    points = curve(history, 10)
    assert points[-1] == [95, 89.5, 23.75, 47.5]
    assert len(points) == 10
    assert curve(History("kfac"), 10) == []


def test_results_of_another_comparison_are_refused(tmp_path):
    path = tmp_path / "results.json"
    head = {"workload": "digits", "steps": 10}
    store.save(path, store.load(path, head))
    assert store.load(path, head)["runs"] == []
    with pytest.raises(ValueError, match="steps 10 instead of 12"):
        store.load(path, {**head, "steps": 12})
    path.write_text("{")
    with pytest.raises(ValueError, match="holds no results"):
        store.load(path, head)


def test_full_runs_at_a_rate_that_is_no_longer_the_best_do_not_count():
    runs = [_run("kfac", "sift", loss, f) for loss, f in zip((3.0, 1.0, 2.0), BUDGET.factors, strict=True)]
    runs += [_run("kfac", "final", 0.5, STEP), _run("kfac", "final", 0.4, 1.0), _run("sgd", "final", 0.3, STEP)]
    assert current(runs, ["kfac"], BUDGET) == [*runs[:3], runs[4], runs[5]]


def test_seconds_are_scaled_to_the_speed_at_the_start(data_dir):
    setting = Setting("digits", "smoke", data_dir, reference_seconds=1e6)
    run = execute(Job("kfac", "final", 1.0, 0, 11), setting)
    plain = execute(Job("kfac", "final", 1.0, 0, 11), replace(setting, reference_seconds=None))
    assert [point[:2] for point in run["curve"]] == [point[:2] for point in plain["curve"]]  # losses do not change
    assert "reference_seconds" not in plain
    assert 1e6 < run["curve"][-1][2] < 1e10  # some steps of SGD, at a million seconds each
    assert 0 < run["reference_seconds"] < 10


@pytest.mark.parametrize("name", ["kfac", "hylo", "sparse_mfac", "soap", "psgd_kron", "schedule_free"])
def test_a_killed_run_continues_exactly(name, data_dir, tmp_path, killed_after):
    """This includes dropout, which uses the global generator."""
    changes = {"dropout": 0.5}
    setting = Setting("chargpt", "smoke", data_dir, reference_seconds=1.0, workload_changes=changes, pauses=tmp_path)
    job = Job(name, "final", 1.0, 0, 8)
    killed_after(4)
    with pytest.raises(KeyboardInterrupt):
        execute(job, setting)
    (path,) = tmp_path.iterdir()
    assert torch.load(path, weights_only=True)["trainer"]["drawn"] == 4
    taken = killed_after(None)
    again = execute(job, setting)
    assert taken == list(range(8))  # no step was taken twice
    whole = execute(job, replace(setting, pauses=None))
    assert [point[:2] for point in again.pop("curve")] == [point[:2] for point in whole.pop("curve")]
    assert again.pop("optimizer_bytes") == pytest.approx(whole.pop("optimizer_bytes"), rel=1e-3)  # except for counters
    assert {**again, "reference_seconds": 0} == {**whole, "reference_seconds": 0}


def test_a_checkpoint_of_another_run_does_not_count(data_dir, tmp_path, killed_after):
    setting, job = Setting("digits", "smoke", data_dir, pauses=tmp_path), Job("sgd", "final", 1.0, 0, 8)
    killed_after(5)
    with pytest.raises(KeyboardInterrupt):
        execute(job, setting)
    killed_after(None)
    other = replace(setting, batch_size=16)
    expected = execute(job, replace(other, pauses=None))["curve"]
    assert [point[1] for point in execute(job, other)["curve"]] == [point[1] for point in expected]


@pytest.mark.parametrize("limit", [[], ["--minutes", "0.0001"]])
def test_an_interrupted_comparison_continues_in_the_middle_of_a_run(limit, tmp_path, killed_after, monkeypatch):
    """If it is killed or reaches its time limit, it ends with the same runs as an uninterrupted one."""
    monkeypatch.setattr(store, "limits", lambda threads: {})
    monkeypatch.setattr(Compare, "_report", lambda *_: None)
    found = {}
    for folder in ("part", "whole"):
        command = [*WORDS[:-2], "kfac", "--threads", "1", "--out-dir", str(tmp_path / folder)]
        if folder == "part":
            killed_after(7)
            with pytest.raises(KeyboardInterrupt):
                main(command)
            assert len(list((tmp_path / "part" / "compare-digits-smoke.runs").iterdir())) == 1
            taken = killed_after(None)
            assert main([*command, *limit]) == 0
            assert main(command) == 0
            assert taken == [*range(12), *range(12)]  # those of sgd and of kfac
        assert main(command) == 0
        assert not (tmp_path / folder / "compare-digits-smoke.runs").exists()
        runs = json.loads((tmp_path / folder / "compare-digits-smoke.json").read_text())["runs"]
        curves = [[point[:2] for point in run.pop("curve")] for run in runs]
        found[folder] = curves, [{key: value for key, value in run.items() if key != "machine"} for run in runs]
    assert found["part"] == found["whole"]


@pytest.mark.usefixtures("known_machine")
def test_a_continued_comparison_repeats_no_run(tmp_path, capsys):
    assert main([*WORDS, "--minutes", "0", "--out-dir", str(tmp_path)]) == 0
    path = tmp_path / "compare-digits-smoke.json"
    assert json.loads(path.read_text())["runs"] == []
    assert main([*WORDS, "--out-dir", str(tmp_path)]) == 0
    first = json.loads(path.read_text())
    runs = [(run["optimizer"], run["phase"]) for run in first["runs"]]
    assert runs == [(name, "final") for name in ("sgd", "muon", "kfac")]  # a single rate needs no trial
    assert all(run["taken"] == run["steps"] and run["failed"] is None for run in first["runs"])
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("# digits (smoke)")
    assert main([*WORDS, "--out-dir", str(tmp_path)]) == 0
    assert json.loads(path.read_text())["runs"] == first["runs"]
    assert f"report: {tmp_path / 'report.md'}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("change", [{"key": "that of another recipe"}, {"failed": "MemoryError: some other time"}])
def test_a_run_of_a_changed_recipe_or_that_failed_is_repeated(change, tmp_path):
    words = [*WORDS[:-3], "sgd", "muon", "--out-dir", str(tmp_path)]
    assert main(words) == 0
    path = tmp_path / "compare-digits-smoke.json"
    results = json.loads(path.read_text())
    before = dict(results["runs"][0])
    results["runs"][0] |= change
    path.write_text(json.dumps(results))
    assert main(words) == 0
    again = json.loads(path.read_text())["runs"]
    assert again[0] == results["runs"][1]
    assert [again[1][key] for key in ("optimizer", "key", "failed")] == ["sgd", before["key"], None]  # comes last


@pytest.mark.usefixtures("known_machine")
def test_a_method_that_cannot_run_is_reported_with_its_reason(tmp_path, monkeypatch):
    def refuse(model, **settings):
        raise RuntimeError("not on this <model>")

    monkeypatch.setitem(METHODS, "kfac", replace(METHODS["kfac"], construct=refuse))
    words = [*WORDS[:-3], "kfac", "sgd", "--out-dir", str(tmp_path)]
    assert main(words) == 1
    runs = json.loads((tmp_path / "compare-digits-smoke.json").read_text())["runs"]
    failures = [(run["optimizer"], run["failed"]) for run in runs]
    assert failures == [("kfac", "RuntimeError: not on this <model>"), ("sgd", None)]
    assert r"RuntimeError: not on this \<model>" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_failed_trial_is_no_failure_if_other_trials_succeed():
    broken = {**_run("kfac", "sift", None), "failed": "RuntimeError: no"}
    whole = {**_run("kfac", "final", None), "failed": "RuntimeError: no"}
    fine = _run("kfac", "sift", 1.0)
    assert not _failed([broken, fine, _run("kfac", "final", 1.0)])
    assert not _failed([_run("kfac", "final", None)])  # it diverged, which is a result
    assert _failed([broken, _run("sgd", "sift", 1.0)])
    assert _failed([fine, whole])


def test_the_saved_command_line_contains_no_folder():
    words = "compare --workload digits --data-dir /home/me --peer-path a=/x b=../y --factors 0.3 1 --out-dir there"
    assert command_line(words.split()) == (
        "python -m benchmarks compare --workload digits --data-dir … --peer-path a=… b=… --factors 0.3 1 --out-dir …"
    )


def test_an_optimizer_that_is_unknown_or_not_installed_is_named(tmp_path, capsys):
    for name, why in (("kfca", "got 'kfca'"), ("kfac_pytorch", "--peer-path kfac_pytorch=DIR")):
        assert main([*WORDS[:-3], name, "--out-dir", str(tmp_path)]) == 2  # before anything runs
        assert why in capsys.readouterr().err


def test_all_optimizers_that_need_no_path_are_compared_by_default():
    names = Compare()._everyone()
    assert {"sgd", "adamw", "muon", "soap", "kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt"} <= set(names)
    assert "kfac_pytorch" not in names
    assert "ekfac_natural" not in names  # has the same recipe as ekfac there
    assert "ekfac_whiten" in names
