"""Long runs: evaluations during training, seconds to a target, interruptions, and the choice of the best rate."""

import pytest
import torch

from benchmarks.commands import length
from benchmarks.commands.length import Length
from benchmarks.compare import runs
from benchmarks.precision import moved


@pytest.fixture
def lengths(study):
    common = {"workload": "digits", "steps": 9, "evaluations": 3, "optimizers": ("sgd:momentum=0.5",)}
    return lambda **options: study(Length, **{**common, **options})


def test_the_best_rate_is_shown_with_its_evaluations(lengths):
    data = lengths(factors=(1.0, 1e-6))
    (row,) = data["rows"]
    tried = [cell["figures"] for cell in data["cells"][1:]]
    assert [cell["of"]["settings"]["momentum"] for cell in data["cells"][1:]] == [0.5, 0.5]
    assert row["tried"] == 2
    assert row["metric"] == max(figures["metric"] for figures in tried)
    assert [step for step, _, _ in row["evaluations"]] == [3, 6, 9]
    assert row["evaluations"][-1][1] == pytest.approx(row["curve"][-1][2], rel=1e-4)
    assert row["evaluations"][-1][2] == row["metric"]  # both on all held-out data


def test_labels_have_the_settings_in_which_rows_of_an_optimizer_differ(lengths):
    names = ("adamw", "sgd:momentum=0.5,lr=0.1", "sgd:momentum=0.5,lr=0.2", "sgd:momentum=0.5")
    assert [row["label"] for row in lengths(optimizers=names)["rows"]] == ["AdamW", "SGD, lr=0.1", "SGD, lr=0.2", "SGD"]


def test_an_interrupted_run_keeps_its_evaluations(lengths, tmp_path, monkeypatch):
    (whole,) = lengths(out_dir=tmp_path / "whole")["rows"]
    monkeypatch.setattr("benchmarks.checkpoints.SECONDS", 0.0)
    evaluate = runs.Trainer.evaluate

    def stops(trainer, *args, **keywords):
        if len(trainer.history.losses) == 6:
            raise KeyboardInterrupt
        return evaluate(trainer, *args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Trainer, "evaluate", stops)
        with pytest.raises(KeyboardInterrupt):
            lengths()
    steps = []
    step = runs.Trainer.step
    monkeypatch.setattr(runs.Trainer, "step", lambda trainer: (steps.append(trainer.history.label), step(trainer))[1])
    (found,) = lengths()["rows"]
    assert steps.count("SGD") == 4  # steps 6 to 9, because the checkpoint is that of step 5
    assert [point[::2] for point in found["evaluations"]] == [point[::2] for point in whole["evaluations"]]


def test_seconds_to_a_target():
    row = {"evaluations": [[3, 10.0, 0.7], [6, 20.0, 0.85], [9, 30.0, 0.84]]}
    assert [length._reached(target, 1, row) for target in (0.7, 0.8, 0.9)] == ["10", "20", "-"]
    assert [length._reached(target, -1, row) for target in (0.9, 0.7, 0.6)] == ["10", "10", "-"]
    assert length._reached(0.7, 1, {}) == "-"


def test_too_few_steps_are_refused(lengths):
    with pytest.raises(ValueError, match="evaluations must be at most steps=2, got 3"):
        lengths(steps=2)


def test_failures_and_divergence_are_shown(lengths):
    names = ("sgd:momentum=-1", "sgd:lr=1e30", "sgd")
    (table,) = lengths(optimizers=names)["tables"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [row["test accuracy"] for row in rows[:2]] == ["failed", "diverged"]
    assert [row["training loss"] for row in rows[:2]] == ["-", "-"]
    assert float(rows[2]["test accuracy"]) > 0


def test_results_of_a_device_have_a_name_of_their_own():
    assert Length(steps=10).stem == "length-resnet20-10-cpu"
    assert Length(steps=10, size="paper", device="cuda").stem == "length-resnet20-10-paper-cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused_before_anything_is_stored(lengths, tmp_path):
    with pytest.raises(ValueError, match="sees no CUDA device here"):
        lengths(device="cuda")
    assert not list(tmp_path.iterdir())


def test_tensors_are_on_the_cpu_before_anyone_reads_them(monkeypatch):
    seen, original = [], torch.Tensor.to

    def to(self, *args, **keywords):
        seen.append(keywords["non_blocking"])
        return original(self, *args, **keywords)

    monkeypatch.setattr(torch.Tensor, "to", to)
    for device in ("cpu", "meta"):
        moved((torch.ones(1),), torch.device(device))
    assert seen == [False, True]
