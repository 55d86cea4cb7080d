"""Counts of the operations of a step, and reports of counts that have grown."""

import json

import pytest
import torch
from torch import nn

from benchmarks.cli import main
from benchmarks.commands import regress
from benchmarks.commands.regress import BASELINE
from benchmarks.counting import count, graph_breaks

STEP = "perceptron, kfac cholesky, refresh"


def _run(folder, *words):
    return main(["regress", "--out-dir", str(folder), *words])


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Counts of a part with the installed version of torch; those in the repository are of the pinned version."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("baseline")
        _choose(patch, folder / "mine.json")
        assert _run(folder, "--update") == 0
        return (folder / "mine.json").read_text()


def _choose(patch, path):
    patch.setattr(regress, "BASELINE", path)
    patch.setattr(regress, "NETWORKS", {"perceptron": regress.NETWORKS["perceptron"]})
    patch.setattr(regress, "_METHODS", {name: regress._METHODS[name] for name in ("kfac cholesky", "sparse_mfac")})


@pytest.fixture
def baseline(counts, tmp_path, monkeypatch):
    _choose(monkeypatch, tmp_path / "mine.json")
    (tmp_path / "mine.json").write_text(counts)
    return tmp_path / "mine.json"


@pytest.fixture
def counted(baseline, tmp_path, monkeypatch):
    """Replace new counts by those of the baseline, and return a function that compares them with changed ones."""
    known = json.loads(baseline.read_text())["counts"]

    def steps(network, method, plain):
        for name, counts in known.items():
            if name.startswith(f"{network}, {method}, "):
                yield name.rpartition(", ")[2], counts

    def compare(change):
        data = json.loads(baseline.read_text())
        change(data["counts"])
        baseline.write_text(json.dumps(data))
        return _run(tmp_path)

    monkeypatch.setattr(regress, "_plain_step", lambda network: None)
    monkeypatch.setattr(regress, "_steps", steps)
    return compare


def test_products_by_hand():
    a, b, out = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    spd = a @ a.T + torch.eye(3)
    lower = torch.linalg.cholesky(spd)
    for work, flops in [
        (lambda: a @ b, 2 * 3 * 4 * 5),
        (lambda: torch.linalg.eigh(spd), 9 * 27),
        (lambda: torch.linalg.cholesky_ex(spd), 27 / 3),
        (lambda: torch.linalg.solve_triangular(lower, out, upper=False), 9 * 5),
        (lambda: torch.cholesky_solve(out, lower), 9 * 5),
    ]:
        assert count(work).flops == flops
    found = count(lambda: out.addmm_(a, b))
    assert (found.flops, found.operators, found.tensors, found.allocated) == (2 * 3 * 4 * 5, 1, 0, 0)
    assert found.moved == 4 * (12 + 20 + 2 * 15)  # the sum is read and written


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


@pytest.mark.usefixtures("baseline")
def test_repeated_counts_are_equal(tmp_path):
    """``make counts`` compares with the baseline in the repository."""
    assert _run(tmp_path) == 0
    saved = json.loads((tmp_path / "regress.json").read_text())
    assert saved["compared"]
    assert not saved["rows"]
    assert {step.split(", ")[-1] for step in saved["counts"]} == {"plain", "factor", "refresh"}


@pytest.mark.parametrize(
    ("quantity", "factor", "status"),
    [("flops", 0.9, 1), ("flops", 0.999, 0), ("flops", 1.1, 0), ("operators", 0.999, 1)],
    ids=["was less", "within tolerance", "was more", "small counts have no tolerance"],
)
def test_a_count_that_grew_is_a_failure(quantity, factor, status, counted, tmp_path, capsys):
    def change(counts):
        before = counts[STEP][quantity]
        counts[STEP][quantity] = min(before - 1, round(before * factor)) if factor < 1 else round(before * factor)

    assert counted(change) == status
    row = json.loads((tmp_path / "regress.json").read_text())["rows"][0]
    assert (row["step"], row["quantity"], row["worse"]) == (STEP, quantity, bool(status))
    grew = f"grew: {STEP}: {quantity} from {row['before']:,} to {row['now']:,}"
    assert (grew in capsys.readouterr().err) is bool(status)


@pytest.mark.usefixtures("counted")
def test_a_baseline_of_another_torch_is_not_compared(baseline, tmp_path, capsys):
    baseline.write_text(json.dumps({"torch": "1.0", "counts": {"transformer, ggt, plain": {}}}))
    assert _run(tmp_path) == 0
    assert "not judged: the baseline is of torch 1.0" in capsys.readouterr().err
    assert _run(tmp_path, "--update") == 0
    assert json.loads(baseline.read_text())["torch"] == torch.__version__


def test_steps_without_a_counterpart_are_failures(counted, capsys):
    def change(counts):
        del counts["perceptron, sparse_mfac, plain"]
        counts["perceptron, kfac cholesky, gone"] = {"flops": 1}

    assert counted(change) == 1
    printed = capsys.readouterr().err
    assert "anew: perceptron, sparse_mfac, plain" in printed
    assert "anew: perceptron, kfac cholesky, gone" in printed


def test_the_baseline_in_the_repository_has_every_step():
    known = json.loads(BASELINE.read_text())["counts"]
    assert len(known) == 3 * (4 * 3 + 2 * 2 + 3)
