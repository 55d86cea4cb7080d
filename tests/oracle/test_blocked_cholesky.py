"""Cholesky in halves: the factor of LAPACK, the lower triangle alone is read, failures are reported."""

from __future__ import annotations

import pytest
import torch

from secondorder.linalg import cholesky_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 600])
def test_factor_is_that_of_one_call(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, n, n, generator=torch.Generator().manual_seed(n), dtype=dtype)
    x = x @ x.mT / n + torch.eye(n, dtype=dtype)
    garbage_above = x.tril() + torch.full_like(x, torch.nan).triu(1)
    info = cholesky_(garbage_above)
    assert not info.any()
    torch.testing.assert_close(garbage_above.tril(), torch.linalg.cholesky(x))


@pytest.mark.parametrize("bad", [0, 100, 300, 511])
def test_a_matrix_that_is_not_positive_definite_is_reported_alone(bad: int) -> None:
    x = torch.eye(512, dtype=torch.float64).repeat(2, 1, 1)
    x[1, bad, bad] = -1.0
    info = cholesky_(x)
    assert [bool(i) for i in info] == [False, True]
    torch.testing.assert_close(x[0].tril(), torch.eye(512, dtype=torch.float64))
