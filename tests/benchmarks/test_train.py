"""The command ``train``: runs that stop and continue, their files, and printed recipes."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import checkpoints
from benchmarks.cli import main
from benchmarks.commands.train import Train
from benchmarks.peers import PEERS
from benchmarks.ranks import Ranks
from benchmarks.recipes import METHODS, printing
from benchmarks.recipes.types import COSINE, Recipe, Schedule, factor, make_schedule
from benchmarks.runner import History, Trainer, mean_history, race, trainer_of
from benchmarks.workloads import make_workload

ROOT = Path(__file__).parents[2]
WORDS = ("train", "--workload", "digits", "--size", "smoke", "--threads", "1")


def _trainer(name, schedule=None, amp=None, steps=10):
    method, scheduler = METHODS[name], None if schedule is None else partial(make_schedule, schedule, steps)
    workload = make_workload("digits", Path(), "smoke")
    return trainer_of(method, workload, method.settings("digits"), make_scheduler=scheduler, amp=amp)


def _steps(trainer, count):
    race([trainer], count)
    return trainer


def _run(folder, *words):
    return main([*WORDS, *words, "--out-dir", str(folder)])


def _rows(folder, name="kfac"):
    return [json.loads(line) for line in (folder / f"train-digits-{name}.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------- continued runs


def test_a_longer_run_continues_with_the_rates_of_its_own_length():
    short, long = _steps(_trainer("adamw", COSINE), 5), _trainer("adamw", COSINE, steps=20)
    long.load_state_dict(short.state_dict())
    assert long.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * factor(COSINE, 5, 20))


def test_evaluation_does_not_change_training():
    seen, other = (_trainer("kfac", amp="bfloat16") for _ in range(2))
    for _ in range(3):
        seen.step()
        assert list(seen.evaluate()) == ["test accuracy"]
        other.step()
    assert seen.history.losses == other.history.losses


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    own = {"seed": 0, "amp": None}
    checkpoints.save(tmp_path / "run.pt", _steps(_trainer("adamw"), 1), Ranks(), own)
    torch.save([Trainer], tmp_path / "objects.pt")
    torch.save([1], tmp_path / "list.pt")
    for name, schedule, run, message in [
        ("run", None, {**own, "seed": 1}, r"run\.pt is of another run: seed 0 there, 1 here$"),
        ("run", COSINE, own, "the checkpoint has no scheduler, unlike this run"),
        ("none", None, own, "no checkpoint"),
        ("objects", None, own, r"objects\.pt holds more than tensors.*--trust-checkpoint, if you wrote it"),
        ("list", None, own, r"list\.pt is no checkpoint of this command"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpoints.load(tmp_path / f"{name}.pt", _trainer("adamw", schedule), run)


def test_a_run_that_is_killed_while_it_saves_keeps_its_last_checkpoint(tmp_path, monkeypatch):
    path, trainer = tmp_path / "run.pt", _steps(_trainer("adamw"), 1)
    checkpoints.save(path, trainer, Ranks(), {})
    before = path.read_bytes()

    def half(state, new):
        new.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(path, _steps(trainer, 1), Ranks(), {})
    assert path.read_bytes() == before


def test_another_number_of_ranks_continues_with_the_mean_history():
    histories = [History("a", [1.0, 2.0], [0.5, 0.5], [0.25, 0.25]), History("a", [3.0, 4.0]), History("a")]
    found = mean_history("b", histories)
    assert (found.label, found.losses, found.step_seconds) == ("b", [2.0, 3.0], [0.5, 0.5])


# ---------------------------------------------------------------------- precision
@pytest.mark.parametrize(("name", "amp"), [("adamw", "float16"), ("kfac", "bfloat16"), ("mfac", "float16")])
def test_mixed_precision_has_nearly_equal_losses(name, amp):
    plain, mixed = (_steps(_trainer(name, amp=kind), 5).history.losses for kind in (None, amp))
    assert plain != mixed
    assert mixed == pytest.approx(plain, rel=0.05)


def test_a_scaler_and_a_closure_are_refused():
    with pytest.raises(ValueError, match="float16: a GradScaler takes no closure"):
        _trainer("kfac_adaptive", amp="float16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error_of_one_line(tmp_path, capsys):
    assert _run(tmp_path, "--device", "cuda") == 2
    assert "sees no CUDA device here, take cpu" in capsys.readouterr().err


# ---------------------------------------------------------------------- the command
def test_an_interrupted_command_continues_and_keeps_its_journal(tmp_path, killed_after):
    """It is interrupted after step 5 and continues from its checkpoint of step 3."""
    words = ("--optimizer", "kfac", "--schedule", "linear", "--warmup", "0.2", "--steps", "8")
    words += ("--evaluate-every", "4", "--amp", "bfloat16")
    assert _run(tmp_path / "whole", *words) == 0
    words += ("--checkpoint-every", "3", "--resume", "auto")
    killed_after(5)
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path / "part", *words)
    taken = killed_after(None)
    assert _run(tmp_path / "part", *words) == 0
    assert taken == [*range(5), *range(3, 8)]
    rows = _rows(tmp_path / "part")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["loss"] for row in rows] == [row["loss"] for row in _rows(tmp_path / "whole")]
    assert [row["step"] for row in rows if "test accuracy" in row] == [4, 8]
    assert [row["lr"] for row in rows[:3]] == pytest.approx([0.01, 0.02, 0.02])  # two steps of warm-up, then decay
    assert rows[-1]["lr"] == pytest.approx(0.02 / 6)
    assert 0 < rows[0]["seconds"] < rows[-1]["seconds"]
    saved = json.loads((tmp_path / "part" / "train-digits-kfac.json").read_text())
    assert [entry["step"] for entry in saved["evaluations"]] == [4, 8]


def test_the_journal_is_truncated_to_the_checkpoint(tmp_path):
    words = ("--optimizer", "adamw", "--steps", "6", "--checkpoint-every", "6", "--evaluate-every", "3")
    assert _run(tmp_path, *words) == 0
    journal = tmp_path / "train-digits-adamw.jsonl"
    kept = journal.read_text()
    journal.write_text(kept + '{"step": 7, "loss": 9.0}\n{"step": 8, "lo')
    assert _run(tmp_path, *words[:2], "--steps", "8", "--resume", str(tmp_path / "train-digits-adamw.pt")) == 0
    assert journal.read_text().startswith(kept)
    saved = json.loads((tmp_path / "train-digits-adamw.json").read_text())
    assert [entry["step"] for entry in saved["evaluations"]] == [3, 6]
    assert [row["step"] for row in _rows(tmp_path, "adamw")] == list(range(1, 9))


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(tmp_path):
    words = ("--optimizer", "sgd", "--set", "lr=1e30", "--steps", "9", "--checkpoint-every", "1")
    assert _run(tmp_path, *words, "--evaluate-every", "1") == 1
    rows = _rows(tmp_path, "sgd")
    assert rows[-1]["loss"] is None
    assert len(rows) < 9
    saved = torch.load(tmp_path / "train-digits-sgd.pt", weights_only=True)["trainer"]
    assert saved["drawn"] == len(rows) - 1


def test_invalid_arguments_are_errors_of_one_line(tmp_path, capsys):
    saved = tmp_path / "train-digits-sgd.pt"
    assert _run(tmp_path, "--optimizer", "sgd", "--steps", "2", "--checkpoint-every", "2") == 0
    for words, why in [
        (("--steps", "0"), "steps must be positive, got 0"),
        (("--checkpoint-every", "-1"), "checkpoint_every must be positive, got -1"),
        (("--schedule", "steps"), "say --milestones 0.5 0.75"),
        (("--resume", "nowhere.pt"), "no checkpoint nowhere.pt"),
        (("--optimizer", "sgd", "--resume", str(saved), "--seed", "1"), "is of another run: seed 0 there, 1 here"),
        (("--optimizer", "sgd", "--resume", str(saved), "--warmup", "0.2"), "another run: schedule {'shape': 'const"),
    ]:
        assert _run(tmp_path, *words) == 2
        assert why in " ".join(capsys.readouterr().err.split())


def test_schedules_of_the_command_line():
    def course(**words):
        return Train(size="smoke", **words).plan(1).recipe.schedule

    assert Train(size="smoke", optimizer="soap").plan(1).method is PEERS["soap"]
    assert course() == Schedule()
    assert course(schedule="cosine") == Schedule("cosine")
    assert course(warmup=0.1) == Schedule("constant", 0.1)
    assert course(schedule="steps", milestones=(0.5,), warmup=0.2) == Schedule("steps", 0.2, (0.5,))


# ---------------------------------------------------------------------- recipes
def test_a_recipe_is_printed_with_its_scaling(tmp_path, capsys):
    words = ("--optimizer", "kfac", "--print-recipe", "--world", "8", "--set", "momentum=0.8")
    assert _run(tmp_path, *words) == 0
    printed = capsys.readouterr().out
    assert "KFAC on digits, size smoke" in printed
    assert "tuned here" in printed
    assert "1 × 64 = 64" in printed
    scaled = 0.02 * 8**0.5
    assert f"│ 8 ←   │                512 │ {scaled:.6g} │" in printed
    shell = "torchrun --standalone --nproc-per-node 8 -m benchmarks train --workload digits --optimizer kfac "
    assert f"{shell}--size smoke --batch-size 512 --scale-recipe --set momentum=0.8\n" in printed
    assert f"secondorder.KFAC(model, lr={scaled:.6g}, graft='adam', " in printed
    assert not list(tmp_path.iterdir())


def test_the_recipe_of_a_preset_is_printed_as_the_call_that_builds_it(tmp_path, capsys):
    assert _run(tmp_path, "--optimizer", "from_adamw", "--print-recipe") == 0
    assert 'secondorder.create("from_adamw", model, lr=0.01)' in capsys.readouterr().out


def test_the_printed_line_trains_what_was_printed(tmp_path, capsys):
    assert _run(tmp_path, "--optimizer", "adamw", "--print-recipe", "--batch-size", "16", "--steps", "2") == 0
    *_, shell, python = capsys.readouterr().out.splitlines()
    assert python == "torch.optim.AdamW(model.parameters(), lr=0.005)"  # a quarter of the batch size, half of the rate
    assert shell.startswith("python -m benchmarks train")
    assert main([*shell.split()[3:], "--threads", "1", "--out-dir", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "train-digits-adamw.json").read_text())
    assert saved["settings"]["lr"] == 0.005


def test_a_recipe_is_scaled_on_request_only(tmp_path, capsys):
    words = ("--optimizer", "sgd", "--batch-size", "128", "--steps", "1")
    assert _run(tmp_path, *words) == 0
    note = "note: the recipe holds for 64 examples of a step, this run takes 128; its rates stay"
    assert note in capsys.readouterr().out
    assert _run(tmp_path, *words, "--scale-recipe") == 0
    assert "note" not in capsys.readouterr().out
    assert json.loads((tmp_path / "train-digits-sgd.json").read_text())["settings"]["lr"] == 0.2  # linear
    scaled = Train(size="smoke", optimizer="sgd", batch_size=128, scale_recipe=True, set=("lr=0.5",)).plan(2)
    assert scaled.recipe.settings["lr"] == 0.5


def test_python_lines_build_the_optimizer_of_the_recipe():
    names = {"torch": torch, "secondorder": __import__("secondorder")}

    def options(optimizer):
        return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    names_of_methods = ("kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt", "adamw")
    for name, workload in product(names_of_methods, ("digits", "multi30k")):
        method = METHODS[name]
        settings = method.settings(workload)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        built = eval(printing.python_line(method, settings), {**names, "model": model})
        assert options(built) == options(method.build(model, None, settings))
    for name, settings, line in [
        (
            "sparse_mfac",
            {"density": 0.5, "value_dtype": "bfloat16"},
            "secondorder.SparseMFAC(model, compression=secondorder.TopK(density=0.5, value_dtype=torch.bfloat16))",
        ),
        (
            "kfac",
            {"skip_layers": "LayerNorm,head", "comm": "mem_opt"},
            "secondorder.create(\"kfac\", model, skip_layers=[torch.nn.LayerNorm, 'head'], comm='mem_opt')",
        ),
        ("adamw", {"lr": 0.5, "beta2": 0.95}, "torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.9, 0.95))"),
    ]:
        assert printing.python_line(METHODS[name], settings) == line
    assert printing.python_line(replace(METHODS["sgd"], construct=dict), {}) is None


def test_schedules_in_words():
    assert printing.schedule_text(Schedule()) == "constant"
    assert printing.schedule_text(COSINE) == "warm-up over 5 % of the run, then cosine to nothing"
    assert printing.schedule_text(Schedule("steps", 0, (0.5, 0.75), 0.2)) == "× 0.2 after 50, 75 % of the run"
    text = printing.schedule_text(Schedule("steps", 0.05, (0.35, 0.75)), 100)
    assert text == "warm-up over 5 epochs, then × 0.1 after epochs 35, 75"


def test_epochs_of_a_recipe_are_converted_to_steps(monkeypatch):
    recipe = Recipe({"lr": 0.1}, "a paper", COSINE, batch_size=100, epochs=2)
    monkeypatch.setitem(METHODS, "sgd", replace(METHODS["sgd"], recipes={"digits": recipe}))
    plan = Train(size="smoke", optimizer="sgd").plan(2)
    assert plan.workload.batch_size == 200  # 100 on each rank
    assert plan.steps == 15  # 2 · 1437 / 200 = 14.4
    assert Train(size="smoke", optimizer="sgd", steps=3).plan(1).steps == 3


@pytest.mark.slow
def test_two_ranks_continue_exactly(tmp_path):
    """The curvature, of which each rank has a part, is gathered for the checkpoint and distributed after loading."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*WORDS, "--optimizer", "kfac", "--comm", "mem_opt"]
    for folder, steps in (("whole", "8"), ("part", "5"), ("part", "8")):
        more = ["--steps", steps, "--checkpoint-every", "5", "--resume", "auto", "--out-dir", str(tmp_path / folder)]
        command = [*launcher, "-m", "benchmarks", *words, *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    whole, part = (json.loads((tmp_path / name / "train-digits-kfac.json").read_text()) for name in ("whole", "part"))
    assert whole["losses"] == part["losses"]
    assert [row["step"] for row in _rows(tmp_path / "part")] == list(range(1, 9))
