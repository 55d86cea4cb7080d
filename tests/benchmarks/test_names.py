"""Names of optimizers in other programs."""

from torch import nn

from benchmarks.recipes import METHODS, find_method
from secondorder import LocalFactors
from secondorder.methods.names import ALIASES


def test_no_alias_is_the_name_of_a_method():
    assert not set(ALIASES) & set(METHODS)


def test_an_alias_replaces_settings_of_the_recipe():
    assert METHODS["kfac"].settings("digits")["inverse_method"] == "cholesky"
    assert "inverse_method" not in find_method("eigen").settings("digits")
    rest = {key: value for key, value in METHODS["kfac"].settings("digits").items() if key != "inverse_method"}
    assert find_method("eigen").settings("digits") == rest


TRAIN = "train --workload digits --size smoke --steps 3 --threads 1"


def test_train_accepts_aliases_and_a_strategy(run):
    for name, more in [("kis", "--set update_steps=2"), ("kgmfac", "--set window_size=4"), ("kfac", "--comm mem_opt")]:
        saved = run(f"{TRAIN} --optim {name} {more}")[f"train-digits-{name}"]
        assert len(saved["losses"]) == 3
        assert [rank["rank"] for rank in saved["ranks"]] == [0]
    assert saved["settings"]["comm"] == "mem_opt"
    assert isinstance(find_method("eigen_dp").build(nn.Linear(3, 2), "digits").comm, LocalFactors)


def test_a_bad_strategy_is_one_line_and_status_2(run):
    run(f"{TRAIN} --optimizer sgd --comm mem_opt", error="sgd has no curvature to place")
    run(f"{TRAIN} --optimizer kfac --comm fast", error="unknown strategy 'fast': choose from local, comm_opt")
