"""Optimizers by the names of other programs."""

import json
from typing import get_args

import pytest
from torch import nn

from benchmarks.cli import main
from benchmarks.recipes import METHODS, AliasName, find_method
from secondorder import LocalFactors
from secondorder.factory import ALIASES


def test_the_command_line_knows_every_name():
    assert set(get_args(AliasName)) == set(ALIASES)
    assert not set(ALIASES) & set(METHODS)


def test_an_alias_replaces_what_the_recipe_says_about_it():
    assert METHODS["kfac"].settings("digits")["inverse_method"] == "cholesky"
    assert "inverse_method" not in find_method("eigen").settings("digits")
    rest = {key: value for key, value in METHODS["kfac"].settings("digits").items() if key != "inverse_method"}
    assert find_method("eigen").settings("digits") == rest


@pytest.mark.parametrize(
    ("option", "name", "setting"),
    [("--optim", "kis", "update_steps=2"), ("--optim", "kgmfac", "window_size=4"), ("--optimizer", "sngd", "lr=0.01")],
)
def test_train_takes_the_names_of_other_programs(tmp_path, option, name, setting):
    words = ["train", "--workload", "digits", option, name, "--size", "smoke", "--steps", "3", "--threads", "1"]
    assert main([*words, "--set", setting, "--out-dir", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / f"train-digits-{name}.json").read_text())
    assert len(saved["losses"]) == 3


def test_train_takes_a_strategy_on_one_process(tmp_path, data_dir):
    assert isinstance(find_method("eigen_dp").build(nn.Linear(3, 2), "digits").comm, LocalFactors)
    words = ["train", "--workload", "digits", "--optim", "kfac", "--comm", "mem_opt", "--size", "smoke", "--steps", "3"]
    assert main([*words, "--threads", "1", "--out-dir", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "train-digits-kfac.json").read_text())
    assert saved["settings"]["comm"] == "mem_opt"
    assert [rank["rank"] for rank in saved["ranks"]] == [0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--optimizer", "sgd", "--comm", "mem_opt"], "sgd has no curvature to place"),
        (["--optimizer", "kfac", "--comm", "fast"], "unknown strategy 'fast': choose from local, comm_opt"),
    ],
)
def test_a_bad_strategy_is_one_line_and_status_2(tmp_path, capsys, words, why):
    assert main(["train", "--workload", "digits", "--size", "smoke", *words, "--out-dir", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err
