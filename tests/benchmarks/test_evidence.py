"""Experiments of the evidence: saved cells, stored and planned bytes, and the commands at tiny size."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import evidence
from benchmarks.commands import batch_size, density, predictions
from benchmarks.commands.batch_size import BatchSize
from benchmarks.commands.density import PUBLISHED, Density
from benchmarks.commands.predictions import UNPLANNED, Estimates, Memory, difference
from benchmarks.commands.untuned import Presets, Robustness, _defaults, _judged
from benchmarks.evidence import Cells, attempted, train_until
from benchmarks.runner import Trainer
from benchmarks.workloads import DataMissingError, make_workload
from secondorder import KFAC

HELD = ("kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt", "ekfac_natural")


def saved(path):
    return json.loads(path.read_text())


# ---------------------------------------------------------------------- cells
def test_a_cell_runs_once(tmp_path):
    path, calls = tmp_path / "some" / "cells.json", []

    def measure(pause):
        calls.append(1)
        return {"loss": float("nan"), "pair": (1, 2.5)}

    identity = {"optimizer": "sgd", "settings": {"lr": 0.1}, "seed": 0}
    first = Cells(path).run(identity, measure)
    again = Cells(path).run({"seed": 0, "settings": {"lr": 0.1}, "optimizer": "sgd"}, measure)
    assert first == again == {"loss": None, "pair": [1, 2.5]}
    assert len(calls) == 1
    Cells(path).run({**identity, "seed": 1}, measure)
    assert len(calls) == 2
    assert [cell["of"]["seed"] for cell in saved(path)["cells"]] == [0, 1]
    assert not list(tmp_path.rglob("*.part"))


def test_no_cell_starts_after_the_time_limit(tmp_path):
    cells = Cells(tmp_path / "cells.json", budget=-1.0)
    with pytest.raises(TimeoutError):
        cells.run({"seed": 0}, lambda _: {"loss": 1.0})
    Cells(tmp_path / "cells.json").run({"seed": 0}, lambda _: {"loss": 1.0})
    assert Cells(tmp_path / "cells.json", budget=-1.0).run({"seed": 0}, None) == {"loss": 1.0}
    (tmp_path / "other.json").write_text('{"version": 7}')
    with pytest.raises(ValueError, match=r"other\.json is no file of finished runs"):
        Cells(tmp_path / "other.json").run({"seed": 0}, None)
    assert (tmp_path / "other.json").read_text() == '{"version": 7}'


def test_results_are_kept_in_a_separate_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    words = {"workload": "digits", "size": "smoke", "optimizers": ("sgd",), "out_dir": tmp_path / "out"}
    assert Memory(keep=True, **words).run() == 0
    kept, reported = (saved(tmp_path / folder / "memory-digits.json") for folder in ("results", "out"))
    assert reported == {**kept, "environment": reported["environment"]}
    assert all(cell["of"]["threads"] == 1 for cell in kept["cells"])
    assert [kept["machines"][cell["machine"]]["torch"] for cell in kept["cells"]] == [torch.__version__]


class _Losses:
    """A run with given losses."""

    def __init__(self, losses):
        self.losses = iter(losses)
        self.trainer = Trainer("", make_workload("digits", None, "smoke"), lambda m: torch.optim.SGD(m.parameters()))
        self.trainer.step = self.step

    def step(self):
        self.trainer.history.losses.append(next(self.losses))
        self.trainer.history.processor_seconds.append(1.0)


def test_targets_limits_and_divergence_end_a_run():
    for losses, keywords, end, taken in [
        ([5.0] * 10 + [1.0] * 20, {"target": 2.0}, "target", 18),
        ([5.0] * 30, {"target": 2.0}, "steps", 25),
        ([5.0] * 30, {"seconds": 12.5}, "seconds", 13),
        ([5.0] * 4 + [float("nan")], {}, "diverged", 5),
        ([5.0, *[11.0] * 20], {}, "diverged", 10),
    ]:
        run = _Losses(losses).trainer
        assert train_until(run, 25, **keywords) == end
        assert len(run.history.losses) == taken


def test_an_interrupted_cell_continues_exactly_without_repeated_steps(tmp_path, killed_after):
    words = {"workload": "digits", "size": "smoke", "optimizers": ("sgd",), "target": 0.0, "steps": 12}

    def losses(folder):
        assert BatchSize(batch_sizes=(64,), factors=(1.0,), out_dir=tmp_path / folder, **words).run() == 0
        (cell,) = saved(tmp_path / folder / "batch-size-digits.json")["cells"]
        return [point[:2] for point in cell["figures"]["curve"]]

    killed_after(5)
    with pytest.raises(KeyboardInterrupt):
        losses("part")
    taken = killed_after(None)
    again = losses("part")
    assert taken == list(range(12))
    assert not (tmp_path / "part" / "batch-size-digits.runs").exists()
    assert again == losses("whole")


def test_failures_are_results_but_missing_data_is_not():
    def fail(err):
        raise err

    assert attempted(lambda _: {})(None) == {"failed": None}
    assert attempted(lambda _: fail(RuntimeError("no")))(None) == {"failed": "RuntimeError: no"}
    with pytest.raises(DataMissingError):
        attempted(lambda _: fail(DataMissingError(None, ["x"], "y")))(None)


# ---------------------------------------------------------------------- bytes
def test_stored_bytes_are_those_of_the_plan(study):
    """This covers one process; the tests of the package compare plans with runs on several."""
    cells = study(Memory, workload="digits", steps=2, optimizers=HELD)["cells"]
    assert [cell["of"]["optimizer"] for cell in cells] == list(HELD)
    assert all(0 <= difference(cell["figures"]) <= UNPLANNED for cell in cells)


def test_memory_table(study, capsys):
    names = ("adamw", "hylo", "ekfac_natural", "kfac_adaptive")
    cells = study(Memory, workload="chargpt", steps=2, optimizers=names)["cells"]
    assert "KFAC, quadratic model has no recipe for chargpt" in " ".join(capsys.readouterr().out.split())
    adamw, hylo, ekfac = (cell["figures"] for cell in cells)
    assert (adamw["planned"], adamw["plans"], difference(adamw)) == (None, {}, None)
    assert all(len(ranks) == 4 for ranks in hylo["plans"].values())
    assert sum(ekfac["plans"]["CommOpt"]) > sum(ekfac["plans"]["HybridOpt(0.5)"]) > sum(ekfac["plans"]["MemOpt"])
    hylo["planned"] -= 1000
    assert difference(hylo) > UNPLANNED


# ---------------------------------------------------------------------- runs
def test_batch_size(study, capsys):
    words = {"workload": "digits", "optimizers": ("adamw", "kfac"), "batch_sizes": (128, 64)}
    words |= {"target": 1.5, "factors": (1.0, 0.01), "steps": 40}
    data = study(BatchSize, **words)
    assert [(row["optimizer"], row["batch_size"]) for row in data["rows"]] == [
        ("adamw", 64), ("adamw", 128), ("kfac", 64), ("kfac", 128),
    ]  # fmt: skip
    own = data["rows"][3]
    assert own["factor"] == 1.0
    assert own["at_edge"]
    assert own["lr"] == pytest.approx(0.02 * 2**0.5, rel=1e-4)
    assert own["examples"] == 128 * own["steps"]
    assert own["ends"] == {"0.01": "slower", "1": "target"}
    slow = next(cell["figures"] for cell in data["cells"] if cell["figures"]["end"] == "slower")
    assert slow["taken"] <= 40
    assert study(BatchSize, **words)["cells"] == data["cells"]
    assert "128" in capsys.readouterr().out


def test_seeds_that_did_not_reach_the_target_count_as_infinite():
    ends = iter([("target", 20), ("target", 30), ("steps", 40), ("steps", 40)])

    def trial(factor, seed, limit):
        end, taken = next(ends)
        return {"end": end, "taken": taken, "lr": 0.1, "processor_seconds": 1.0}

    command = BatchSize(workload="digits", optimizers=("sgd",), factors=(1.0,), seeds=3, steps=40)
    row = command.search("sgd", make_workload("digits", None, "smoke"), trial)
    assert (row["steps"], row["reached"]) == (30, [2, 3])
    ends = iter([("target", 20), ("steps", 20), ("diverged", 20)])
    row = command.search("sgd", make_workload("digits", None, "smoke"), trial)
    assert (row["steps"], row["examples"], row["processor_seconds"], row["reached"]) == (None, None, None, [1, 3])
    shown = [column(row) for column in batch_size._columns([row], "sgd").values()]
    assert shown[4:9] == ["> 20", "-", "-", "-", "1 of 3"]


def test_a_trial_that_was_stopped_early_continues_with_a_higher_limit(tmp_path, data_dir):
    words = {"workload": "digits", "size": "smoke", "target": 0.0, "steps": 30, "data_dir": data_dir}
    command, cells = BatchSize(**words), Cells(tmp_path / "cells.json")
    workload = make_workload("digits", data_dir, "smoke")

    def trial(limit):
        found = command.trial(cells, "sgd", workload, 1.0, 0, limit)
        return found["end"], found["taken"], found["limit"]

    assert trial(12) == ("slower", 12, 12)
    assert trial(11) == ("slower", 12, 12)  # already slower
    assert trial(20) == ("slower", 20, 20)
    assert trial(30) == ("steps", 30, 30)
    assert trial(12) == ("steps", 30, 30)
    assert len(saved(tmp_path / "cells.json")["cells"]) == 1


def test_values_that_are_refused():
    for command, message in [
        (BatchSize(batch_sizes=(0,)), r"batch_sizes must be positive, got \(0,\)"),
        (Memory(minutes=0.0), r"minutes must be positive, got 0"),
        (BatchSize(factors=(1.0, 1.0)), "factors must be different"),
        (BatchSize(optimizers=("adams",)), "optimizers must be of .* got 'adams'"),
        (Density(densities=(2.0,)), r"densities must be in \(0, 1\], got \(2\.0,\)"),
        (Density(seeds=0), "seeds must be positive, got 0"),
        (Memory(world=0), "world must be positive, got 0"),
        (Robustness(share=1.5), r"share must be in \(0, 1\], got 1\.5"),
        (Robustness(workloads=()), "workloads must name at least one"),
        (Presets(choices=("from_adams",)), "choices must be of from_adamw, .* got from_adams"),
    ]:
        with pytest.raises(ValueError, match=message):
            command.run()


def test_density(study, capsys):
    words = {"workload": "digits", "steps": 12, "seeds": 2, "references": ("sgd",), "factor": 3.16, "window_size": 4}
    rows = {row["label"]: row for row in study(Density, densities=(0.1, 0.01), **words)["rows"]}
    assert list(rows) == ["SGD", "1 %", "10 %", "dense"]
    assert rows["1 %"]["window_bytes"] < rows["10 %"]["window_bytes"] < rows["dense"]["window_bytes"]
    assert rows["1 %"]["share"] == pytest.approx(95 / 9242)
    assert rows["dense"]["settings"] == {**PUBLISHED, "lr": 3.16e-3, "window_size": 4}
    assert rows["1 %"]["settings"] == {**rows["dense"]["settings"], "density": 0.01}
    assert {row["runs"] for row in rows.values()} == {2}
    assert "README and scripts of" in capsys.readouterr().out


def test_a_window_with_a_failed_run_has_bytes_but_no_loss(monkeypatch):
    run = {"failed": None, "diverged": False, "loss": 1.0, "metric": 0.5, "processor_seconds": 2.0}
    run["memory"] = {"window": 3_000_000, "total": 4_000_000}
    entry = density._entry("1 %", "sparse_mfac", {}, 0.01)
    row = entry | density._summary([run, {**run, "diverged": True}, {"failed": "ValueError: no"}])
    assert (row["loss"], row["runs"], row["diverged"], row["window_bytes"]) == (None, 3, 1, 3_000_000)
    dense = {"share": 1.0, "window_bytes": 6_000_000}
    shown = [column(row) for column in density._columns([row, dense], "accuracy").values()]
    assert shown[2:] == ["ValueError: no (2 of 3 lost)", *"----", "3.00", "4.00", "2.0"]
    assert density._summary([run, run])["loss"] == 1.0
    drawn = []

    def record(figure, path, **keywords):
        drawn.extend(len(axes.lines[0].get_xdata()) for axes in figure.axes)

    monkeypatch.setattr(Figure, "savefig", record)
    density.draw_densities([row, entry | density._summary([run, run])], "", Path("density.png"))
    assert drawn == [1, 2]


def test_robustness(study, tmp_path, capsys):
    words = {"size": "cpu", "share": 0.06, "optimizers": ("kfac", "sgd"), "data_dir": tmp_path}
    rows = study(Robustness, workloads=("digits", "autoencoder"), **words)["rows"]
    assert "left out: missing data" in " ".join(capsys.readouterr().out.split())
    assert [row["optimizer"] for row in rows] == ["adamw", "kfac", "sgd"]
    assert rows[0]["as_good"]
    assert rows[1]["as_good"]
    assert rows[1]["loss"] < rows[0]["loss"]


def test_estimated_and_measured_slowdowns(study):
    methods = ("adamw", "kfac", "from_adamw", "hylo", "ggt")
    data = study(Estimates, workloads=("digits",), methods=methods, steps=10, window_size=4)
    assert [row["method"] for row in data["rows"]] == list(methods)
    assert all(row["failed"] is None and row["measured"] > 0 and row["estimated"] > 0 for row in data["rows"])
    assert all(cell["figures"]["rates"]["device"] == "cpu" for cell in data["cells"])


def test_estimates_that_are_far_off_are_marked():
    rows = [
        {"workload": "digits", "method": "kfac", "failed": None, "estimated": 1.2, "measured": 1.0},
        {"workload": "digits", "method": "ggt", "failed": None, "estimated": 0.7, "measured": 1.0},
        {"workload": "digits", "method": "mfac", "failed": "RuntimeError: no"},
    ]
    table = predictions._slowdown_table(rows, ("kfac", "ggt", "mfac", "hylo"), 0.25)
    assert list(table.rows[0][1:]) == ["1.20 / 1.00", "0.70 / 1.00 *", "failed", "–"]
    assert "1 of 2" in table.caption


def test_a_default_that_changes_is_run_again(monkeypatch):
    before = {name: _defaults(name, {}) for name in ("adamw", "kfac", "sparse_mfac")}
    assert len(set(before.values())) == 3
    assert before == {name: _defaults(name, {}) for name in before}
    assert _defaults("kfac", {"lr": 0.3}) != before["kfac"]
    assert _defaults("kfac", {"nonsense": 1}) is None
    construct = KFAC.__init__.__wrapped__
    monkeypatch.setattr(construct, "__kwdefaults__", {**construct.__kwdefaults__, "damping": 0.7})
    assert _defaults("kfac", {}) != before["kfac"]


def test_verdicts():
    reference = {"loss": 1.0, "first": 3.0, "runs": 1}
    assert _judged({"loss": 1.03, "first": 3.0, "runs": 1}, reference) == (True, pytest.approx(0.985))
    assert _judged({"loss": 1.05, "first": 3.0, "runs": 1}, reference)[0] is False
    assert _judged({"loss": None, "first": None, "runs": 1}, reference) == (False, None)
    assert _judged({"loss": 1.0, "first": 3.0, "runs": 1}, {**reference, "loss": None}) == (None, None)


def test_failed_methods_are_named(study, capsys, monkeypatch):
    def refuse(*args, **keywords):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(KFAC, "step", refuse)
    words = {"share": 0.4, "workloads": ("digits",), "optimizers": ("kfac",)}
    own = study(Robustness, set=("nonsense=1",), **words)["rows"][1]
    assert own["failed"][0].startswith("TypeError")
    own = study(Robustness, **words)["rows"][1]
    assert "out of luck" in capsys.readouterr().out
    assert own["failed"] == ["RuntimeError: out of luck"]
    assert own["as_good"] is False
