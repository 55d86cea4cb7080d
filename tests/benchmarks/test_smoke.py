"""The small size runs anywhere: without data, it uses random data and reports this."""

import json

import pytest

from benchmarks.cli import main
from benchmarks.workloads import DataMissingError
from benchmarks.workloads.tiny import found_or_made_up
from tests.support.workloads import WITHOUT_BERT, check_made_up_data

CASES = [pytest.param(name, marks=() if name == "resnet18" else pytest.mark.slow) for name in WITHOUT_BERT]


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("workload", CASES)
def test_compare_needs_no_data(workload, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # has no folder of data
    check_made_up_data(workload, tmp_path, capsys)


def test_train_needs_no_data_in_the_small_size(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--workload", "autoencoder", "--optimizer", "sgd", "--steps", "2", "--threads", "1"]
    assert main([*words, "--size", "smoke"]) == 0
    assert "autoencoder: no data in data, so made-up data" in capsys.readouterr().out
    assert json.loads((tmp_path / "bench-output" / "train-autoencoder-sgd.json").read_text())["made_up_data"]
    assert main(words) == 2
    assert "missing data" in capsys.readouterr().err


def test_a_missing_file_of_the_user_is_not_replaced(tmp_path):
    own = found_or_made_up("chargpt", tmp_path, "smoke", {"text": str(tmp_path / "mine.txt")})
    with pytest.raises(DataMissingError, match=r"mine\.txt"), own:
        pass


def test_existing_data_is_used_and_made_up_data_is_removed(data_dir, tmp_path, capsys):
    with found_or_made_up("chargpt", data_dir, "smoke") as found:
        assert found == (data_dir, False)
    assert capsys.readouterr().out == ""
    with found_or_made_up("chargpt", tmp_path, "smoke", talk=False) as (folder, made_up):
        assert made_up
        assert (folder / "shakespeare").is_dir()
    assert not folder.exists()
