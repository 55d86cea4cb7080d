"""The command ``analyse``: its files and plots, and statistics of files that are written by hand."""

import json

import pytest

from benchmarks import analysis
from benchmarks.analysis import plot_analysis
from benchmarks.commands import analyse
from secondorder.diagnostics import read_events

COLUMNS = {
    "rank": {
        "step", "layer", "m", "d_i", "d_o", "rank90", "eff_rank", "sigma_max", "sigma_sum", "damping_over_sigma1",
    },
    "trend": {"step", "epoch", "layer", "grad_norm", "update_norm", "rel_change", "mode"},
    "error": {"step", "layer", "mode", "r", "rel_error", "cos", "kid_energy", "kis_ess"},
    "profile": {
        "step", "rank", "world", "capture_ms", "select_ms", "exchange_ms", "kernel_ms", "invert_ms", "share_ms",
        "precondition_ms", "update_ms", "wire_bytes", "state_bytes", "peak_bytes",
    },
    "train": {"step", "epoch", "loss", "lr", "damping", "mode", "elapsed_s"},
}  # fmt: skip
PNG = b"\x89PNG"


@pytest.fixture
def _no_plots(monkeypatch):
    """Replace plots in tests of other things, because a plot takes longer than the run."""
    monkeypatch.setattr(analyse, "plot_analysis", lambda folder, suffix: [])


WORDS = "analyse --workload digits --threads 1"


def test_analyse(run, tmp_path, capsys):
    words = f"{WORDS} --method hylo --steps 3 --every 2 --batch-size 24 --batch-sizes 16 --set update_steps=2 mode=kis"
    saved = run(words)["analyse"]
    printed = capsys.readouterr().out
    found = analysis.load(tmp_path)
    for name, columns in COLUMNS.items():
        assert all(columns <= event.keys() for event in found[name])
        assert f"events: {tmp_path / name}.jsonl\n" in printed
    for name in ("rank", "trend", "error", "profile"):
        assert f"plot: {tmp_path / name}.png\n" in printed
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    assert {(e["step"], e["layer"], e["m"]) for e in found["rank"]} == {
        (step, layer, m) for step in (0, 2) for layer in "0257" for m in (16, 24)
    }
    assert {(e["step"], e["layer"], e["mode"], e["r"]) for e in found["error"] if e["layer"] != "all"} == {
        (step, layer, mode, 3) for step in (0, 2) for layer in "0257" for mode in ("kid", "kis")
    }
    for name in ("profile", "train"):
        assert [event["step"] for event in found[name]] == [0, 1, 2]
    assert [(e["step"], e["layer"], e["mode"]) for e in found["trend"]] == [
        (step, layer, "kis") for step in range(3) for layer in "0257"
    ]
    assert saved["losses"] == [event["loss"] for event in found["train"]]
    assert saved["modes"] == {"kis": [[0, 3]]}
    assert list(saved["stages_ms"]) == ["plain", "refresh"]
    assert {layer["layer"] for layer in saved["layers"]} == {*"0257", "all"}


@pytest.mark.usefixtures("_no_plots")
@pytest.mark.parametrize("method", ["kfac", "ekfac_natural", "kfac_adaptive"])
def test_analyse_supports_other_methods_and_does_not_change_training(run, tmp_path, method):
    more = "--steps 3 --batch-size 16"
    run(f"{WORDS} --method {method} --every 5 {more}")
    found = analysis.load(tmp_path)
    for name, columns in COLUMNS.items():
        assert found[name]
        assert all(columns <= event.keys() for event in found[name])
    assert {event["mode"] for event in found["trend"]} == {method.split("_")[0]}
    saved = run(f"train --workload digits --threads 1 --optimizer {method} {more}")[f"train-digits-{method}"]
    assert saved["losses"] == [event["loss"] for event in found["train"]]


@pytest.mark.usefixtures("_no_plots")
def test_a_later_run_replaces_an_earlier_one_and_divergence_has_status_1(run, tmp_path):
    words = f"{WORDS} --size smoke --set lr=0.5 damping=3.0 --steps"
    run(words, "1")
    (first,) = read_events(tmp_path / "train.jsonl")
    assert (first["lr"], first["damping"]) == (0.5, 3.0)
    run(words, "2")
    assert [event["step"] for event in read_events(tmp_path / "train.jsonl")] == [0, 1]
    assert len({event["step"] for event in read_events(tmp_path / "rank.jsonl")}) == 1
    run(f"{WORDS} --size smoke --set lr=1e30 graft=none kl_clip=none --steps 6", status=1)
    assert read_events(tmp_path / "train.jsonl")[-1]["loss"] is None
    run(words, "0", error="steps must be positive, got 0")


def _profile(step, **stages):
    return {"step": step, **{column: stages.get(column, 0.0) for column in analysis.STAGES.values() if column}} | stages


def test_kinds_and_times_of_steps():
    """The first step only counts if there is no other of its kind; a refresh without work does not count as one."""
    steps = [
        _profile(0, capture_ms=90.0, refresh_ms=900.0),
        _profile(1, refresh_ms=0.01, update_ms=2.0),
        _profile(2, refresh_ms=0.02, update_ms=4.0),
        _profile(3, capture_ms=3.0, refresh_ms=0.01),
        _profile(4, capture_ms=3.0, refresh_ms=8.0, select_ms=1.0, kernel_ms=2.0, invert_ms=4.0),
    ]
    times = analysis.stage_times(steps)
    assert list(times) == ["plain", "capture", "refresh"]
    assert times["plain"]["update"] == 3.0
    assert times["refresh"]["rest of refresh"] == 1.0
    assert times["refresh"]["invert"] == 4.0
    assert analysis.stage_times(steps[:2])["refresh"]["capture"] == 90.0
    assert list(analysis.stage_times(steps[1:3])) == ["plain"]
    assert analysis.stage_times([]) == {}


def test_periods_of_a_mode():
    modes = ["kid", "kid", "kis", "kid", "kis", "kis", "kid"]
    trend = [{"step": step, "layer": layer, "mode": mode} for step, mode in enumerate(modes) for layer in "ab"]
    assert analysis.spans(trend, "kid") == [(0, 2), (3, 4), (6, 7)]
    assert analysis.spans(trend, "kis") == [(2, 3), (4, 6)]
    assert analysis.spans(trend, "sngd") == []


def _write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("layers", [2, 11])
def test_plots_of_files_that_are_written_by_hand(tmp_path, layers):
    names = [f"layer.{i}" for i in range(layers)]
    cells = [(step, name) for step in range(0, 40, 10) for name in names]
    _write(tmp_path / "rank.jsonl", [
        {"step": step, "layer": name, "m": m, "rank90": None if step == 10 else 3 + i}
        for i, (step, name) in enumerate(cells) for m in (64, 32)
    ])  # fmt: skip
    _write(tmp_path / "trend.jsonl", [
        {"step": step, "layer": name, "grad_norm": 1.0 / (step + 1), "mode": "kid" if step < 20 else "kis"}
        for step, name in cells
    ])  # fmt: skip
    _write(tmp_path / "error.jsonl", [
        {"step": step, "layer": layer, "mode": mode, "r": 7, "rel_error": 0.1 if step else None}
        for step in (0, 10, 20) for layer in [*names, "all"] for mode in ("kid", "kis", "uniform KIS")
    ])  # fmt: skip
    steps = [_profile(step, refresh_ms=5.0 * (step == 1), update_ms=1.0) for step in range(3)]
    _write(tmp_path / "profile.jsonl", steps)
    paths = plot_analysis(tmp_path)
    assert [path.name for path in paths] == ["rank.png", "trend.png", "error.png", "profile.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_missing_files_are_not_drawn(tmp_path):
    assert plot_analysis(tmp_path) == []
    _write(tmp_path / "error.jsonl", [{"step": 0, "layer": "a", "mode": "kid", "r": None, "rel_error": None}])
    _write(tmp_path / "trend.jsonl", [{"step": 0, "layer": "a", "grad_norm": 0.0, "mode": "kfac"}])
    (tmp_path / "rank.jsonl").touch()
    assert [path.name for path in plot_analysis(tmp_path)] == ["trend.png", "error.png"]
