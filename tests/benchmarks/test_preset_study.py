"""The study of presets: optimizers as users build them, shared runs, and failures in the table."""

import pytest
from torch import nn

from benchmarks.commands import untuned
from benchmarks.commands.swap import build
from benchmarks.commands.untuned import CHOICES, Presets, loss_after
from benchmarks.recipes import METHODS
from benchmarks.runner import History, Trainer
from secondorder import KFAC, AdaptationOptions, create
from secondorder.methods.presets import PRESETS

SETTINGS = {"lr": 0.07, "adamw_lr": 0.01}


@pytest.fixture
def trainers(monkeypatch):
    """Labels, optimizers and closures of all runs."""
    made = []

    class Seen(Trainer):
        def __init__(self, label, workload, make, seed, schedule, closure):
            super().__init__(label, workload, make, seed, schedule, closure)
            made.append((label, self.optimizer, closure))

    monkeypatch.setattr(untuned, "Trainer", Seen)
    return made


@pytest.fixture
def presets_of(study):
    return lambda *choices: study(Presets, choices=choices, share=0.05, seeds=2)


def test_runs_of_the_same_optimizer_are_shared_and_kept(presets_of, trainers):
    data = presets_of("large_batch", "HyLo")
    assert [label for label, _, _ in trainers] == ["AdamW", "large_batch"] * 2 + ["HyLo"] * 2
    assert [closure for _, _, closure in trainers] == [False, True] * 2 + [False] * 2
    large, hylo = data["rows"]
    assert large["before"] == hylo["before"]
    assert large["after"]["optimizer_bytes"] > large["before"]["optimizer_bytes"]
    assert large["after"]["runs"] == 2
    assert next(cell["of"]["preset"] for cell in data["cells"] if "preset" in cell["of"]) == str(PRESETS["large_batch"])
    rates = {cell["of"]["optimizer"]: cell["figures"]["lr"] for cell in data["cells"]}
    assert rates == pytest.approx({"adamw": 0.0, "large_batch": 1.0, "HyLo": 0.0})  # there is nothing to decay
    table, short = data["tables"]
    assert short["rows"] == table["rows"][:1]
    assert table["rows"][1][:4] == ["HyLo", "AdamW", "autoencoder", "10"]
    assert all(" -> " in row[column] for row in table["rows"] for column in (4, 6, 7, 8))
    trainers.clear()
    assert presets_of("large_batch", "HyLo")["rows"] == data["rows"]
    assert not trainers


def test_the_preset_uses_the_rate_of_adam(presets_of, trainers):
    presets_of("from_adam")
    rate = METHODS["adamw"].settings("autoencoder")["lr"]
    (_, adam, _), (_, ours, closure) = trainers[:2]
    assert (type(adam).__name__, type(ours), closure) == ("Adam", KFAC, False)
    assert [group["initial_lr"] for group in (*adam.param_groups, *ours.param_groups)] == [rate, rate]
    assert ours.param_groups[0]["graft"] == "adam"


@pytest.mark.parametrize("name", PRESETS)
def test_a_line_builds_the_preset(name):
    models = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(2)]
    own = name in {"large_batch", "least_squares", "physics_informed"}
    muon = {"lr": 0.07, "adjust_lr_fn": "original"}
    special = {
        "from_muon": muon,
        "orthogonal_momentum": muon,
        "large_batch": {"adaptation": AdaptationOptions(quadratic_model=True, likelihood="bernoulli")},
    }
    keywords = special.get(name, {} if own else {"lr": 0.07})
    built = build(CHOICES[name].line, models[0], name=name, **SETTINGS)
    wanted = create(name, models[1], **keywords)
    with built, wanted:
        assert type(built) is type(wanted)
        assert repr(built) == repr(wanted)


def test_the_loss_after_equal_seconds():
    history = History("", [4.0, 2.0, 0.0], [1.0] * 3, [1.0, 2.0, 3.0])
    assert [loss_after(history, limit) for limit in (0.5, 3.0, 5.9, 60.0)] == [None, 3.0, 3.0, 2.0]
    assert loss_after(history, None) is None


def test_a_failure_is_in_the_table():
    run = {"failed": None, "diverged": False, "timed_loss": 3.0}
    run |= dict.fromkeys(("loss", "metric", "processor_seconds", "optimizer_bytes"), 2.0)
    for lost, why in (({**run, "diverged": True}, "diverged"), ({"failed": "ValueError: no"}, "failed")):
        row = {"before": untuned._medians([run]), "after": untuned._medians([run, lost]), "metric": "accuracy"}
        shown = {name: untuned._COLUMNS[name](row) for name in ("loss", "loss in equal seconds", "held-out metric")}
        assert list(shown.values()) == [f"2.000 -> {why}", "–", "accuracy –"]
