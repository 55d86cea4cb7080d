"""Damping below rounding of the largest eigenvalue: the solve uses that rounding error instead."""

import torch

from secondorder.linalg.dense import Workspace
from secondorder.linalg.eigenbasis import precondition


def test_a_vanishing_damping_is_replaced_by_the_rounding_error_of_the_largest_eigenvalue() -> None:
    rows_a, rows_g = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    a, g, grad = rows_a.T @ rows_a, rows_g.T @ rows_g, torch.randn(4, 5, dtype=torch.float64)
    (values_a, basis_a), (values_g, basis_g) = torch.linalg.eigh(a), torch.linalg.eigh(g)
    values_a, values_g = values_a.clamp(min=0), values_g.clamp(min=0)
    vanishing = torch.tensor(1e-300, dtype=torch.float64)
    values = values_g[:, None] * values_a
    found = precondition(grad, basis_a, basis_g, values, vanishing, workspace=Workspace())
    floor = torch.finfo(torch.float64).eps * values_a.max() * values_g.max()
    # Independently: the dense matrix in the same basis, rebuilt from clamped eigenvalues, solved by its own spectrum.
    basis, spectrum = torch.kron(basis_g, basis_a), torch.kron(values_g, values_a)
    expected = (basis @ ((basis.T @ grad.reshape(-1)) / (spectrum + floor))).reshape(4, 5)
    assert torch.linalg.vector_norm(found - expected) <= 1e-9 * torch.linalg.vector_norm(expected)
