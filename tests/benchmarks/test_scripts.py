"""Twenty small scripts, in which the line that builds AdamW is replaced."""

import json
import math

import pytest
import torch

from benchmarks.commands.swap import BUDGETS, compare, figures, totals_of
from benchmarks.runner import History
from benchmarks.scripts import SCRIPTS, Data

pytestmark = pytest.mark.filterwarnings("ignore:KFAC. of factors with more than 2048 rows:UserWarning")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains(name, data_dir):
    assert len(SCRIPTS) == 20
    line = "KFAC, budget 2"
    found = compare(SCRIPTS[name], Data(data_dir, data_dir), {line: BUDGETS[line]}, steps=2)
    row = found["lines"][line]
    assert found["steps"] == 2
    assert row["cost"] > 0
    assert row["median_cost"] > 0
    assert math.isfinite(found["adamw"]["loss"])
    assert math.isfinite(row["equal_steps"])


def test_batches_depend_on_the_seed_only(data_dir):
    for build in (SCRIPTS[name].build for name in ("siamese", "tcn", "rnn")):
        first, again, other = (next(build(Data(data_dir, data_dir, seed))[1]) for seed in (0, 0, 1))
        assert all(map(torch.equal, first, again))
        assert not all(map(torch.equal, first, other))


def test_costs_and_losses_are_relative_to_adamw():
    before = History("AdamW", losses=[3.0, 2.0, 1.0, 1.0], processor_seconds=[1.0] * 4)
    after = History("KFAC", losses=[3.0, 1.5, 0.5, 0.25], processor_seconds=[2.5, 1.0, 1.0, 1.0])
    assert figures(after, before) == {
        "cost": 5.5 / 4, "median_cost": 1.0, "steps_that_fit": 2, "equal_steps": 0.25, "equal_seconds": 1.5,
        "equal_steps_lower": True, "equal_seconds_lower": False,
    }  # fmt: skip
    slow = figures(History("KFAC", losses=[0.5] * 4, processor_seconds=[5.0] * 4), before)
    assert slow["steps_that_fit"] == 0
    assert slow["equal_seconds"] is None
    assert not slow["equal_seconds_lower"]
    assert figures(before, before)["steps_that_fit"] == 4


def test_totals_contain_geometric_means_of_the_ratios():
    row = {"cost": 2.0, "equal_steps_lower": True, "equal_seconds_lower": False, "equal_seconds": None}
    results = {
        name: {"steps": 4, "adamw": {"loss": 2.0}, "lines": {"KFAC": {**row, "equal_steps": loss}}}
        for name, loss in [("mlp", 1.0), ("vae", 0.25)]
    }
    assert totals_of(results, ["KFAC"]).rows == [["KFAC", "2 of 2", "0.25", "0 of 2", "-", "2.00", "2.00"]]


def test_the_command(run, tmp_path, capsys):
    lines = "KFAC, budget 2", "torch.optim.SGD(model.parameters(), lr=LR)"
    words = ["--data-dir", tmp_path, "--only", "tabular", "--lines", *lines]
    saved = run("measure scripts --size smoke", *words)["scripts-smoke"]
    assert "made-up data" in capsys.readouterr().out
    assert str(tmp_path) not in json.dumps(saved)
    assert saved["lines"]["KFAC, budget 2"] == BUDGETS["KFAC, budget 2"]
    totals, table = saved["tables"]
    assert [row[:3] for row in table["rows"]] == [["tabular", "4", line] for line in lines]
    assert [row[0] for row in totals["rows"]] == list(lines)
    for words, why in [
        ("--only mlp poems", "there is no script poems"),
        ("--length 0", "length must be positive"),
        ("--only tabular --length 0.01 --lines KFAC(net)", "does not build an optimizer: name 'net'"),
        ("--only mlp --length 0.01", "missing data"),
    ]:
        run(f"measure scripts {words} --data-dir", tmp_path, error=why)
