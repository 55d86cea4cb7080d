"""``basis``: figures against matrices whose eigenvectors are known, and the command at tiny size."""

import json
import math

import pytest
import torch

from benchmarks.cli import main
from benchmarks.commands.basis import drifted, judge, updates


@pytest.fixture(autouse=True)
def _keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_turned_basis_by_hand():
    """Eigenvalues 1 and 3, seen from a basis turned by an angle t: 2 ± cos 2t, and sin 2t beside the diagonal."""
    t = 0.3
    basis = torch.tensor([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]], dtype=torch.float64)
    found = judge(torch.tensor([1.0, 3.0], dtype=torch.float64).diag(), basis)
    error = 1 - math.cos(2 * t)
    assert found.off_diagonal == pytest.approx(math.sin(2 * t) * math.sqrt(2) / math.sqrt(10))
    assert found.scale_error == pytest.approx(error * math.sqrt(2) / math.sqrt(10))
    assert found.median_error == pytest.approx(error / 3)  # torch's median is the lower of two


def test_the_order_of_eigenvectors_does_not_matter():
    found = judge(torch.tensor([1.0, 3.0], dtype=torch.float64).diag(), torch.eye(2, dtype=torch.float64).flip(1))
    assert found.off_diagonal == found.scale_error == found.median_error == 0


def test_a_factor_drifts_by_its_share():
    old, new = drifted(30, 0.05, 0)
    assert drifted(30, 0.0, 0)[1].equal(old)
    whole = drifted(30, 1.0, 0)[1]
    torch.testing.assert_close(new, 0.95 * old + 0.05 * whole)
    for factor in (old, new):
        assert float(factor.trace()) == pytest.approx(30)
        assert float(torch.linalg.eigvalsh(factor)[0]) > 0
    assert float((whole - old).norm() / old.norm()) > 0.1


def test_every_update_is_better_than_none():
    old, new = drifted(40, 0.05, 1)
    basis = torch.linalg.eigh(old).eigenvectors[None]
    found = {name: judge(new, way()[0]) for name, way in updates(new[None], basis).items()}
    errors = [found[name].off_diagonal for name in ("none", "qr", "qr, 2 sweeps", "eigh")]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.5 * errors[0]
    assert errors[-1] < 1e-12


def test_basis_command(tmp_path, capsys):
    words = ["basis", "--sizes", "8", "24", "--trials", "2", "--threads", "1", "--out-dir", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "basis.json").read_text())["results"]
    assert [(r["n"], r["update"]) for r in results] == [
        (n, update) for n in (8, 24) for update in ("none", "eigh", "qr", "qr, 2 sweeps")
    ]
    for result in results:
        assert result["update"] in printed
        assert len(result["times"]) == 2
        assert result["speed"] is None if result["update"] == "none" else result["speed"] > 0
    assert "5% of it new" in printed


def test_basis_refuses_a_drift_beyond_all(capsys):
    assert main(["basis", "--drift", "1.5"]) == 2
    assert "drift must be from 0 to 1, got 1.5" in capsys.readouterr().err
