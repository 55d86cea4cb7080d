"""Static M-FAC against the inverse of the explicit d×d matrix in float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from secondorder.linalg import inverse_fisher
from secondorder.linalg.inverse_fisher import inverse_fisher_diagonal, inverse_fisher_vector_product
from tests.support.operators import Operators
from tests.support.oracles.hylo import error

SIZES = [(1, 1), (1, 7), (7, 1), (3, 20), (20, 3), (33, 33), (31, 60)]


def fisher(grads: Tensor, damping: float) -> Tensor:
    """``λI + 1/m Σ g gᵀ``, one gradient after the other."""
    total = torch.zeros(grads.shape[1], grads.shape[1], dtype=torch.float64)
    for row in grads.double():
        total += torch.outer(row, row)
    return total / len(grads) + damping * torch.eye(grads.shape[1], dtype=torch.float64)


def both(grads: Tensor, x: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    return inverse_fisher_vector_product(grads, x, damping), inverse_fisher_diagonal(grads, damping)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def test_products_and_diagonal_are_those_of_the_explicit_inverse() -> None:
    """Of one vector or several, and of gradients in any order of memory."""
    for (m, d), damping in product(SIZES, (10.0, 1e-3, 1e-6)):
        grads, x = draw(m, d), draw(4, d)
        solutions = torch.linalg.solve(fisher(grads, damping), x.T).T
        for given, vectors in ((grads, x), (draw(d, m).T.copy_(grads), draw(d, 4).T.copy_(x))):
            assert error(inverse_fisher_vector_product(given, vectors, damping), solutions) < 1e-9
        assert error(inverse_fisher_vector_product(grads, x[1], damping), solutions[1]) < 1e-9
        assert error(inverse_fisher_diagonal(grads, damping), fisher(grads, damping).inverse().diagonal()) < 1e-8


def test_neither_the_width_of_the_tiles_nor_the_factorization_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Cholesky fails, eigenvalues take its place; if those fail, too, the error names a remedy."""
    grads, x = draw(5, 43), draw(3, 43)
    wanted = both(grads, x, 0.02)
    for tile in (1, 7, 64, 10_000):
        monkeypatch.setattr(inverse_fisher, "_TILE", tile)
        torch.testing.assert_close(both(grads, x, 0.02), wanted, rtol=1e-11, atol=1e-11)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: (a, torch.tensor(1, dtype=torch.int32)))
    torch.testing.assert_close(both(grads, x, 0.02), wanted, rtol=1e-11, atol=1e-11)

    def fail(_: Tensor) -> None:
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(RuntimeError, match=r"\[5, 5\] of grads cannot be factorized: raise damping"):
        inverse_fisher_vector_product(grads, x, 0.02)


def test_low_precision_is_only_rounded_at_the_end() -> None:
    """The product has the dtype of the vector, not that of the gradients."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grads, x, rounding = draw(6, 40, dtype=dtype), draw(40, dtype=dtype), torch.finfo(dtype).eps
        matrix = fisher(grads, 0.05)
        found, diagonal = both(grads, x, 0.05)
        assert found.dtype == diagonal.dtype == dtype
        torch.testing.assert_close(found.double(), torch.linalg.solve(matrix, x.double()), rtol=rounding, atol=1e-10)
        torch.testing.assert_close(diagonal.double(), torch.linalg.inv(matrix).diagonal(), rtol=rounding, atol=0)
    double = inverse_fisher_vector_product(grads, x.double(), 0.05)
    assert double.dtype == torch.float64
    assert error(double, torch.linalg.solve(matrix, x.double())) < 1e-12


def test_repeated_gradients_and_a_damping_below_rounding() -> None:
    """29 eigenvalues of the Gram matrix are mλ = 3e-17, compared with 1e5, so they are zero for Cholesky."""
    row = draw(40)
    row[20:] = 0
    grads, outside = row.expand(30, 40) * 30, torch.zeros(40, dtype=torch.float64)
    outside[33] = 1.0
    torch.testing.assert_close(inverse_fisher_vector_product(grads, outside, 1e-18), outside / 1e-18)
    diagonal = inverse_fisher_diagonal(grads, 1e-18)
    torch.testing.assert_close(diagonal[20:], torch.full((20,), 1e18, dtype=torch.float64))
    assert bool((diagonal > 0).all())


def test_the_diagonal_stays_positive_where_the_difference_cancels() -> None:
    grads = draw(40, 10) * 100
    for damping in (1e-12, 1e-16):
        diagonal = inverse_fisher_diagonal(grads, damping)
        assert bool((diagonal * fisher(grads, damping).diagonal() >= 1 - 1e-12).all())


def test_arguments_are_not_changed_and_no_graph_is_built() -> None:
    grads, x = draw(4, 11).requires_grad_(), draw(11).requires_grad_()
    before = grads.detach().clone(), x.detach().clone()
    found, diagonal = both(grads, x, 0.1)
    assert not found.requires_grad
    assert not diagonal.requires_grad
    assert torch.equal(grads, before[0])
    assert torch.equal(x, before[1])
    assert found.data_ptr() != x.data_ptr()


def test_empty_arguments_have_empty_results() -> None:
    grads = draw(3, 9)
    assert inverse_fisher_vector_product(grads, draw(0, 9), 0.1).shape == (0, 9)
    assert inverse_fisher_vector_product(draw(3, 0), draw(0), 0.1).shape == (0,)
    assert inverse_fisher_vector_product(draw(3, 0), draw(2, 0), 0.1).shape == (2, 0)
    assert inverse_fisher_diagonal(draw(3, 0), 0.1).shape == (0,)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_no_temporary_is_larger_than_a_tile_or_the_result(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inverse_fisher, "_TILE", 4096)
    grads, x = draw(16, 5000, dtype=torch.float32), draw(*shape, 5000, dtype=torch.float32)
    with Operators(grads, x) as seen:
        inverse_fisher_vector_product(grads, x, 0.1)
    assert seen.numel == max(x.numel(), 16 * (4096 // (16 + max(1, *shape, 1))))
    with Operators(grads) as seen:
        inverse_fisher_diagonal(grads, 0.1)
    assert seen.numel == 5000


NO_NUMBERS = (float("nan"), float("inf"))
DTYPES = (torch.int64, torch.complex64, torch.bool)
A_MATRIX = r"grads must have shape \[m, d\] with at least one row, got \["
A_VECTOR = r"x must have shape \[3\] or \[k, 3\] for grads \[2, 3\], got \["


def test_invalid_arguments_are_refused() -> None:
    grads, x = draw(2, 3), draw(3)
    for damping, error_type, message in (
        *((value, ValueError, "damping must be finite and > 0, got") for value in (0, 0.0, -1e-3, *NO_NUMBERS)),
        *((value, TypeError, "damping must be a number") for value in ("1", None, True)),
    ):
        with pytest.raises(error_type, match=message):
            inverse_fisher_vector_product(grads, x, damping)  # type: ignore[arg-type]
        with pytest.raises(error_type, match=message):
            inverse_fisher_diagonal(grads, damping)  # type: ignore[arg-type]
    for wrong, error_type, message in (
        *((draw(*shape), ValueError, A_MATRIX) for shape in ((3,), (0, 3), (2, 3, 4), ())),
        *((grads.to(dtype), TypeError, r"grads must have a real floating dtype, got torch\.") for dtype in DTYPES),
        *((grads.masked_fill(grads == grads[1, 2], bad), ValueError, "grads must be finite") for bad in NO_NUMBERS),
        ([[1.0, 2.0]], TypeError, "grads must be a tensor, got list"),
        (grads.to_sparse(), TypeError, "grads must be dense"),
    ):
        with pytest.raises(error_type, match=message):
            inverse_fisher_vector_product(wrong, x, 0.1)  # type: ignore[arg-type]
        with pytest.raises(error_type, match=message):
            inverse_fisher_diagonal(wrong, 0.1)  # type: ignore[arg-type]
    for wrong, error_type, message in (
        *((draw(*shape), ValueError, A_VECTOR) for shape in ((4,), (2, 4), (3, 1), (1, 2, 3), ())),
        *((x.to(dtype), TypeError, r"x must have a real floating dtype, got torch\.") for dtype in DTYPES),
        *((x.masked_fill(x == x[0], bad), ValueError, "x must be finite") for bad in NO_NUMBERS),
        (x.to("meta"), ValueError, "x is on meta and grads on cpu"),
    ):
        with pytest.raises(error_type, match=message):
            inverse_fisher_vector_product(grads, wrong, 0.1)
