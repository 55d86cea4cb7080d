"""The command ``spikes``: statistics of the times of steps, and a run at tiny size."""

import json

from benchmarks.cli import main
from benchmarks.commands.spikes import WAYS, summary


def test_summary_by_hand():
    assert summary([1.0, 1.0, 4.0], [1.0, 0.5, 1.5]) == (1.0, 4.0, 4.0, 2.0)


def test_every_way_trains(tmp_path):
    words = ["--workload", "digits", "--factor-update-steps", "1", "--inv-update-steps", "3", "--intervals", "1"]
    assert main(["measure", "spikes", *words, "--threads", "1", "--out-dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "spikes-digits.json").read_text())
    assert [row["way"] for row in found["results"]] == [*WAYS, *WAYS]
    assert all(len(row["times"]) == 3 for row in found["results"])


def test_nothing_to_time_is_an_error(capsys):
    assert main(["measure", "spikes", "--intervals", "0"]) == 2
    assert "no step to time" in capsys.readouterr().err
