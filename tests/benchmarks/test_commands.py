"""The output, files and exit status of the commands at the smallest size."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks.cli import Command, main
from benchmarks.commands.step_time import WAYS, slowest
from benchmarks.commands.swap import LINES, REPLACEMENTS
from benchmarks.machine import peak_bytes
from benchmarks.recipes import METHODS
from benchmarks.recipes.building import parse_settings
from benchmarks.runner import optimizer_bytes
from benchmarks.workloads import WORKLOADS, cifar
from benchmarks.workloads.random_data import random_workload

ROOT = Path(__file__).parents[2]


def test_demo_as_a_process(tmp_path):
    chosen = ("sgd", "kfac", "mfac")
    words = ["--optimizers", *chosen, "--steps", "12", "--threads", "1", "--out-dir", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", "study", "demo", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    methods = [METHODS[name] for name in chosen]
    for method in methods:
        assert method.label in done.stdout
    plot = tmp_path / "demo.png"
    assert f"plot: {plot}\n" in done.stdout  # on one line, without a line break
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "demo.txt").read_text().splitlines()[0] in done.stdout
    results = json.loads((tmp_path / "demo.json").read_text())["results"]
    assert [len(result["losses"]) for result in results] == [12] * len(methods)
    assert len({result["losses"][0] for result in results}) == 1  # the same start
    assert results[0]["step_time_ratio"] == 1.0


def test_help_lists_commands_and_workloads(capsys):
    commands = [kind.__name__.lower() for kind in get_args(Command)]
    assert commands == ["analyse", "compare", "fetch", "measure", "regress", "scale", "study", "train"]
    for words, names in (["--help"], commands), (["train", "--help"], WORKLOADS):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        printed = re.sub(r"[\s│]", "", capsys.readouterr().out)  # lines are wrapped in a box
        assert f"{{{','.join(names)}}}" in printed


def test_random_batches_have_the_published_shapes():
    pictures, labels = next(random_workload("resnet50", "paper", batch_size=2).batches(0))
    assert pictures.shape == (2, 3, 224, 224)
    assert labels.shape == (2,)
    tokens, targets = next(random_workload("gpt2_small", "paper", batch_size=3).batches(0))
    assert tokens.shape == targets.shape == (3, 1024)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    with pytest.raises(ValueError, match="for resnet50 and gpt2_small only, not for digits"):
        random_workload("digits", "smoke")


@pytest.mark.parametrize(
    ("method", "settings", "kinds"),
    [
        ("sgd", "lr=0.05 nesterov=true", []),
        ("mfac", "window_size=8 window_dtype=bfloat16", ["window"]),
        ("sparse_mfac", "window_size=8 density=0.1 block_size=256 value_dtype=bfloat16 error_bits=4", ["window"]),
        ("ggt", "window_size=8 beta2=0.9 density=0.1 graft=none lr=1e-4", ["window"]),
        ("kfac", "skip_layers=Conv2d,7 fisher=mc", ["second_order"]),
        ("kfac", "adaptive_damping=true damping=0.1 damping_interval=2", ["second_order"]),
        ("ekfac", "basis_update=qr estimator=running factor_update_steps=2 inv_update_steps=2", ["second_order"]),
        ("hylo", "mode=kid kid_residual=none update_steps=5", ["rows", "kernel"]),
        ("hylo", "mode=kis graft=none lr=0.1 damping=1.0 update_steps=5", ["rows", "kernel"]),
    ],
)
def test_train_accepts_keywords_of_every_method(run, capsys, method, settings, kinds):
    words = f"train --workload digits --optimizer {method} --size smoke --steps 12 --threads 1 --set {settings}"
    saved = run(words)[f"train-digits-{method}"]
    assert saved["settings"].items() >= parse_settings(settings.split()).items()
    assert len(saved["losses"]) == 12
    assert saved["losses"][-1] < saved["losses"][0] or kinds == ["window"]  # most of the few steps fill the window
    assert saved["optimizer_bytes"] == saved["memory"]["total"] > 0
    assert all(saved["memory"][kind] > 0 for kind in kinds)
    assert f"{saved['optimizer_bytes']:,}" in capsys.readouterr().out


def test_train_names_the_workloads_that_have_a_recipe(run, data_dir):
    words = "train --workload chargpt --optimizer kfac_adaptive --size smoke --steps 1 --threads 1 --data-dir"
    run(words, data_dir, error="no recipe for chargpt, only for digits, autoencoder, poisson: take --no-recipe")
    run(words, data_dir, "--no-recipe")


def test_train_evaluates_on_all_held_out_data_if_asked(run, data_dir, monkeypatch):
    monkeypatch.setattr(cifar, "EVAL_EXAMPLES", 7)  # the made-up test set has 64 images
    words = "train --workload resnet20 --optimizer sgd --size smoke --steps 1 --threads 1 --data-dir"
    for option, count in (([], 7), (["--evaluate"], 64)):
        hits = run(words, data_dir, *option)["train-resnet20-sgd"]["test accuracy"] * count
        assert hits == pytest.approx(round(hits))


def test_train_changes_fields_of_the_workload(run, data_dir):
    words = "train --workload unet --optimizer sgd --size smoke --steps 2 --threads 1 --data-dir"
    plain, dice = (
        run(words, data_dir, "--workload-set", *change)["train-unet-sgd"]["losses"] for change in ([], ["dice=0.5"])
    )
    assert 0.2 < dice[0] - plain[0] < 0.5
    error = "unet has no field rice, only data_dir, batch_size, width, levels, dice, crop"
    run(words, data_dir, "--workload-set", "rice=1", error=error)


def test_parse_settings():
    parsed = parse_settings(["lr=3e-4", "steps=5", "graft=none", "inner=adamw", "foreach=False", "mode='x'"])
    assert parsed == {"lr": 3e-4, "steps": 5, "graft": None, "inner": "adamw", "foreach": False, "mode": "x"}
    for bad in ("lr", "=3", "a-b=1", "betas=(0.9, 0.99)"):
        with pytest.raises(ValueError, match="a setting must"):
            parse_settings([bad])


@pytest.mark.usefixtures("known_machine")
def test_step_time(run, capsys):
    words = "measure step-time --workload digits --batch-size 16 --threads 1 --steps"
    reference, *results = run(words, "10", "--optimizers", "kfac", "ekfac", "hylo")["step-time-digits"]["results"]
    assert "10/100" in capsys.readouterr().out
    ways = ["KFAC cholesky", "KFAC eigen", "EKFAC intra", "EKFAC running", "HyLo kis", "HyLo kid"]
    assert [result["label"] for result in results] == ways
    for result in results:
        counts = {kind: len(times) for kind, times in result["times"].items()}
        rows = result["label"].startswith("HyLo")
        assert counts == ({"plain": 9, "refresh": 1} if rows else {"plain": 5, "factor": 4, "refresh": 1})
        assert list(result["amortised"]) == (["10"] if rows else ["10/100", "1/10"])
        assert all(entry["floor"] > 1 for entry in result["amortised"].values())
    assert len(reference["times"]["plain"]) == 10 * len(results) // 3
    results = run(words, "10", "--optimizers", "sparse_mfac", "adamw")["step-time-digits"]["results"]
    assert [result["label"] for result in results] == ["SGD", "sparse M-FAC", "AdamW"]
    run(words, "5", error="steps must be at least 10, got 5")


def test_spikes(run):
    words = "measure spikes --workload digits --factor-update-steps 1 --inv-update-steps 3 --threads 1 --intervals"
    results = run(words, "1")["spikes-digits"]["results"]
    assert [row["way"] for row in results] == [*WAYS, *WAYS]
    assert all(len(row["times"]) == 3 for row in results)
    assert slowest([1.0, 1.0, 4.0], [1.0, 0.5, 1.5]) == (1.0, 4.0, 4.0, 2.0)
    run(words, "0", error="no step to time")


@pytest.mark.parametrize(
    "workload", [pytest.param("autoencoder", marks=pytest.mark.slow), "digits", "resnet20", "chargpt"]
)
def test_swap(workload, run, tmp_path, capsys):
    """The small size makes data up in the real format if there is none."""
    words = f"measure swap --workload {workload} --threads 1 --data-dir"
    outcomes = run(words, tmp_path)["swap-smoke"]["outcomes"]
    assert [(outcome["base"], outcome["passed"]) for outcome in outcomes] == [("adamw", True), ("sgd", True)]
    printed = capsys.readouterr().out
    assert printed.count("PASS") == 2
    if workload != "digits":
        assert "made-up data" in printed
        run(words, tmp_path, "--size", "cpu", error="error: missing data: ")


def test_swap_lines_are_those_of_the_readme():
    """The calls must agree, except that the README may have numbers in place of names."""
    for base in LINES:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        added = {_shape(code) for code in re.findall(r"^\+.*?=\s*(KFAC\(.*\))", readme, re.MULTILINE)}
        removed = {_shape(code) for code in re.findall(r"^-.*?=\s*(torch\.optim\.\w+\(.*\))", readme, re.MULTILINE)}
        before, after = LINES[base], REPLACEMENTS[base]
        assert _shape(before) in removed
        assert _shape(after) in added


def _shape(code):
    """A call without the values of its learning rate and weight decay."""
    call = ast.parse(code, mode="eval").body
    for keyword in call.keywords:
        if keyword.arg in {"lr", "weight_decay"}:
            keyword.value = ast.Name("VALUE")
    return ast.unparse(call)


def test_optimizer_bytes():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer_bytes(optimizer) == 4 * (3 * 2 + 2)


def test_peak_bytes_includes_memory_that_was_freed():
    x = torch.ones(1000, 1000)

    def work():
        y = x + 1
        z = y + 1
        del y
        return z + 1

    peak = peak_bytes(work)
    assert 8_000_000 <= peak <= 8_100_000
