"""Counts of the operations of a step, and reports of counts that have grown."""

import json

import pytest
import torch
from torch import nn

from benchmarks.cli import main
from benchmarks.commands import regress
from benchmarks.commands.regress import BASELINE
from benchmarks.counting import count, graph_breaks

ONE = ("--networks", "perceptron", "--methods", "kfac cholesky", "sparse_mfac")


def _run(folder, *words):
    return main(["regress", *ONE, "--out-dir", str(folder), *words])


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """A baseline of the installed version of torch; that in the repository is of the pinned version."""
    folder = tmp_path_factory.mktemp("baseline")
    assert _run(folder, "--baseline", str(folder / "mine.json"), "--update") == 0
    return folder / "mine.json"


@pytest.fixture
def counted(baseline, monkeypatch):
    """Replace new counts by those of the baseline, for tests of the reports."""
    known = json.loads(baseline.read_text())["counts"]

    def steps(network, method, plain):
        for name, counts in known.items():
            if name.startswith(f"{network}, {method}, "):
                yield name.rpartition(", ")[2], counts

    monkeypatch.setattr(regress, "_plain_step", lambda network: None)
    monkeypatch.setattr(regress, "_steps", steps)


def _changed(baseline, folder, change):
    """Write a copy of the baseline with changed counts of one step."""
    known = json.loads(baseline.read_text())
    change(known["counts"]["perceptron, kfac cholesky, plain"])
    path = folder / "other.json"
    path.write_text(json.dumps(known))
    return str(path)


def test_products_by_hand():
    a, b, out = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    assert count(lambda: a @ b).flops == 2 * 3 * 4 * 5
    found = count(lambda: out.addmm_(a, b))
    assert found.flops == 2 * 3 * 4 * 5
    assert (found.operators, found.tensors, found.allocated) == (1, 0, 0)
    assert found.moved == 4 * (12 + 20 + 2 * 15)  # the sum is read and written
    spd = a @ a.T + torch.eye(3)
    assert count(lambda: torch.linalg.eigh(spd)).flops == 27
    assert count(lambda: torch.linalg.cholesky_ex(spd)).flops == 27
    vector, lower = torch.randn(4), torch.linalg.cholesky(spd)
    assert count(lambda: a @ vector).flops == 2 * 12
    assert count(lambda: out[:, 0].addmv(a, vector)).flops == 2 * 12
    assert count(lambda: vector @ vector).flops == 2 * 4
    assert count(lambda: torch.linalg.solve_triangular(lower, out, upper=False)).flops == 9 * 5
    assert count(lambda: torch.cholesky_solve(out, lower)).flops == 2 * 9 * 5


def test_new_tensors_are_counted_and_views_are_not():
    x = torch.randn(4, 6)
    assert count(lambda: x.view(-1)[3:, None]).operators == 0
    found = count(lambda: (x + 1, x.clone()))
    assert (found.operators, found.tensors, found.allocated, found.moved) == (2, 2, 2 * 96, 4 * 96)
    assert (found - found).operators == 0


def test_graph_breaks_of_a_model():
    class Printing(nn.Module):
        def forward(self, x):
            x = x * 2
            torch._dynamo.graph_break()
            return x + 1

    assert graph_breaks(nn.Linear(2, 2), (torch.randn(1, 2),)) == 0
    assert graph_breaks(Printing(), (torch.randn(1, 2),)) == 1


def test_repeated_counts_are_equal(baseline, tmp_path):
    """``make counts`` compares with the baseline in the repository."""
    assert _run(tmp_path, "--baseline", str(baseline)) == 0
    saved = json.loads((tmp_path / "regress.json").read_text())
    assert saved["compared"]
    assert not saved["rows"]
    assert {step.split(", ")[-1] for step in saved["counts"]} == {"plain", "factor", "refresh"}


@pytest.mark.parametrize(
    ("factor", "status"), [(0.9, 1), (0.999, 0), (1.1, 0)], ids=["was less", "within tolerance", "was more"]
)
@pytest.mark.usefixtures("counted")
def test_a_count_that_grew_is_a_failure(factor, status, baseline, tmp_path, capsys):
    def change(counts):
        counts["flops"] = round(counts["flops"] * factor)

    assert _run(tmp_path, "--baseline", _changed(baseline, tmp_path, change)) == status
    row = json.loads((tmp_path / "regress.json").read_text())["rows"][0]
    assert (row["step"], row["quantity"], row["worse"]) == ("perceptron, kfac cholesky, plain", "flops", bool(status))
    printed = capsys.readouterr()
    assert ("!" in printed.out.split("Numbers beyond")[0]) is bool(status)
    message = f"grew: perceptron, kfac cholesky, plain: flops from {row['before']:,} to {row['now']:,}"
    assert (message in printed.err) is bool(status)


@pytest.mark.usefixtures("counted")
def test_small_counts_have_no_tolerance(baseline, tmp_path):
    def change(counts):
        counts["operators"] -= 1

    assert _run(tmp_path, "--baseline", _changed(baseline, tmp_path, change)) == 1


@pytest.mark.usefixtures("counted")
def test_a_baseline_of_another_torch_is_not_compared(tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"torch": "1.0", "counts": {}}))
    assert _run(tmp_path, "--baseline", str(path)) == 0
    assert "not judged: the baseline is of torch 1.0" in capsys.readouterr().err


@pytest.mark.usefixtures("counted")
def test_an_update_keeps_no_counts_of_another_torch(tmp_path):
    path = tmp_path / "old.json"
    for version, kept in (("1.0", False), (torch.__version__, True)):
        path.write_text(json.dumps({"torch": version, "counts": {"transformer, ggt, plain": {}}}))
        assert _run(tmp_path, "--baseline", str(path), "--update") == 0
        assert ("transformer, ggt, plain" in json.loads(path.read_text())["counts"]) is kept


@pytest.mark.usefixtures("counted")
def test_steps_without_a_counterpart_are_failures(baseline, tmp_path, capsys):
    known = json.loads(baseline.read_text())
    del known["counts"]["perceptron, sparse_mfac, plain"]
    known["counts"] |= {"perceptron, kfac cholesky, gone": {}, "transformer, ggt, plain": {}}  # the last was not chosen
    path = tmp_path / "other.json"
    path.write_text(json.dumps(known))
    assert _run(tmp_path, "--baseline", str(path)) == 1
    printed = capsys.readouterr().err
    assert "anew: perceptron, sparse_mfac, plain" in printed
    assert "anew: perceptron, kfac cholesky, gone" in printed
    assert "transformer" not in printed


def test_the_baseline_in_the_repository_has_every_step():
    known = json.loads(BASELINE.read_text())["counts"]
    assert len(known) == 3 * (4 * 3 + 2 * 2 + 3)


def test_a_run_after_an_update_finds_no_difference(tmp_path):
    path = str(tmp_path / "new.json")
    assert _run(tmp_path, "--baseline", path) == 2
    assert _run(tmp_path, "--baseline", path, "--update") == 0
    assert _run(tmp_path, "--baseline", path) == 0
    assert not json.loads((tmp_path / "regress.json").read_text())["rows"]


def test_invalid_arguments_of_regress(tmp_path, capsys):
    for words, text in [
        (("--networks", "resnet"), "networks must be of perceptron"),
        (("--methods", "adam"), "methods must be of kfac eigen"),
        (("--tolerance", "-1"), "tolerance must not be negative"),
    ]:
        assert main(["regress", *words, "--out-dir", str(tmp_path)]) == 2
        assert text in capsys.readouterr().err
