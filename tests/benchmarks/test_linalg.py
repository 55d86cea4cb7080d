"""The command ``linalg``: errors for matrices with known eigenvectors and inverses, and a run at tiny size."""

import math

import pytest
import torch

from benchmarks.commands.linalg import drifted, inversions, judge, judge_inverse, newton_schulz, updates


def test_a_rotated_basis_by_hand():
    """In a basis that is rotated by t, eigenvalues 1 and 3 become 2 ± cos 2t, with sin 2t off the diagonal."""
    t = 0.3
    basis = torch.tensor([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]], dtype=torch.float64)
    found = judge(torch.tensor([1.0, 3.0], dtype=torch.float64).diag(), basis)
    error = 1 - math.cos(2 * t)
    assert found["off_diagonal"] == pytest.approx(math.sin(2 * t) * math.sqrt(2) / math.sqrt(10))
    assert found["scale_error"] == pytest.approx(error * math.sqrt(2) / math.sqrt(10))
    assert found["median_error"] == pytest.approx(error / 3)  # torch's median of two numbers is the lower one


def test_the_order_of_eigenvectors_does_not_matter():
    found = judge(torch.tensor([1.0, 3.0], dtype=torch.float64).diag(), torch.eye(2, dtype=torch.float64).flip(1))
    assert found["off_diagonal"] == found["scale_error"] == found["median_error"] == 0


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
    errors = [found[name]["off_diagonal"] for name in ("none", "qr", "qr, 2 sweeps", "eigh")]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.5 * errors[0]
    assert errors[-1] < 1e-12


def test_a_wrong_inverse_by_hand():
    """With 1.1 x⁻¹, the residual is 0.1 of the identity, and every direction is 10 % too long."""
    x = torch.tensor([1.0, 4.0], dtype=torch.float64).diag()
    found = judge_inverse(x, 1.1 * torch.linalg.inv(x))
    assert (found["residual"], found["norm"], found["direction_error"]) == pytest.approx((0.1, 0.1, 0.1))
    found = judge_inverse(x, 0.5 * x.inverse() + torch.tensor([[0.5, 0.0], [0.0, 0.0]], dtype=torch.float64))
    assert (found["residual"], found["norm"]) == pytest.approx((0.5 / 2**0.5, 0.5))


def test_a_round_of_newton_and_schulz_squares_the_residual():
    x = torch.tensor([1.0, 4.0], dtype=torch.float64).diag()
    y = 1.1 * torch.linalg.inv(x)
    for rounds, left in ((1, 0.01), (2, 0.0001)):
        assert judge_inverse(x, newton_schulz(x, y, rounds))["norm"] == pytest.approx(left)


def test_every_inversion_is_better_than_none():
    old, new = (x + 0.1 * torch.eye(40, dtype=torch.float64) for x in drifted(40, 0.01, 1))
    found = {name: judge_inverse(new, way()) for name, way in inversions(new, torch.linalg.inv(old)).items()}
    errors = [found[name]["residual"] for name in ("none", "newton", "newton, 2 rounds", "cholesky")]
    assert errors == sorted(errors, reverse=True)
    assert max(found["cholesky"]["residual"], found["eigh"]["residual"]) < 1e-12


def test_linalg_command(run, capsys):
    found = run("measure linalg --sizes 8 24 --trials 2 --threads 1")["linalg"]
    printed = capsys.readouterr().out
    for part, names in {
        "results": ("none", "eigh", "qr", "qr, 2 sweeps"),
        "inverses": ("none", "cholesky", "eigh", "newton", "newton, 2 rounds"),
        "polars": ("float32", "bfloat16"),
    }.items():
        assert [(r["n"], r["update"]) for r in found[part]] == [(n, name) for n in (8, 24) for name in names]
        for result in found[part]:
            assert result["update"] in printed
            assert len(result["times"]) == 2
            assert result["speed"] is None if result["update"] == "none" else result["speed"] > 0
    assert "of which 5% is new" in printed
    assert all(r["full"] < 1e-3 and r["low"] < 1e-3 for r in found["polars"])  # both are float32 at these sizes
    run("measure linalg --drift 1.5", error="drift must be from 0 to 1, got 1.5")
    run("measure linalg --damping 0", error="damping must be")


def test_kernel_measures_kernel_and_projection(run, capsys):
    (result,) = run("measure kernel --ranks 8 --layers 6 4 --trials 1 --threads 1")["kernel"]["results"]
    assert "6 × 4" in capsys.readouterr().out
    assert (result["rank"], result["d_i"], result["d_o"]) == (8, 6, 4)
    assert min(result["kernel_seconds"], result["kernel_ratio"], result["projection_ratio"]) > 0
