"""Static M-FAC against the d×d matrix written out and inverted in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from secondorder.linalg import inverse_fisher
from secondorder.linalg.inverse_fisher import inverse_fisher_diagonal, inverse_fisher_vector_product

SIZES = [(1, 1), (1, 7), (7, 1), (3, 20), (20, 3), (33, 33), (31, 60)]


def fisher(grads: Tensor, damping: float) -> Tensor:
    """``λI + 1/m Σ g gᵀ``, one gradient after the other."""
    total = torch.zeros(grads.shape[1], grads.shape[1], dtype=torch.float64)
    for row in grads.double():
        total += torch.outer(row, row)
    return total / len(grads) + damping * torch.eye(grads.shape[1], dtype=torch.float64)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_product_and_diagonal_are_those_of_the_explicit_inverse(size: tuple[int, int]) -> None:
    for damping in (10.0, 1e-3, 1e-6):
        grads, x = draw(*size), draw(size[1])
        matrix = fisher(grads, damping)
        assert error(inverse_fisher_vector_product(grads, x, damping), torch.linalg.solve(matrix, x)) < 1e-9
        assert error(inverse_fisher_diagonal(grads, damping), torch.linalg.inv(matrix).diagonal()) < 1e-8


def test_several_vectors_are_several_products() -> None:
    grads, x = draw(5, 30), draw(4, 30)
    found = inverse_fisher_vector_product(grads, x, 0.01)
    assert found.shape == x.shape
    for row, vector in zip(found, x, strict=True):
        torch.testing.assert_close(row, inverse_fisher_vector_product(grads, vector, 0.01), rtol=1e-12, atol=0)


def test_a_vector_outside_the_span_is_divided_by_the_damping() -> None:
    grads, x = torch.zeros(3, 8), torch.zeros(8)
    grads[:, :4], x[5] = torch.randn(3, 4), 2.0
    torch.testing.assert_close(inverse_fisher_vector_product(grads, x, 0.5), x / 0.5)


@pytest.mark.parametrize("tile", [1, 7, 64, 10_000])
def test_the_width_of_the_tiles_does_not_matter(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grads, x = draw(5, 43), draw(3, 43)
    wanted = inverse_fisher_vector_product(grads, x, 0.02), inverse_fisher_diagonal(grads, 0.02)
    monkeypatch.setattr(inverse_fisher, "_TILE", tile)
    found = inverse_fisher_vector_product(grads, x, 0.02), inverse_fisher_diagonal(grads, 0.02)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_only_rounded_at_the_end(dtype: torch.dtype) -> None:
    grads, x = draw(6, 40, dtype=dtype), draw(40, dtype=dtype)
    matrix = fisher(grads, 0.05)
    found, diagonal = inverse_fisher_vector_product(grads, x, 0.05), inverse_fisher_diagonal(grads, 0.05)
    assert found.dtype == diagonal.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.double(), torch.linalg.solve(matrix, x.double()), rtol=rounding, atol=1e-10, check_dtype=False
    )
    torch.testing.assert_close(diagonal.double(), torch.linalg.inv(matrix).diagonal(), rtol=rounding, atol=0)


def test_the_result_has_the_dtype_of_the_vector_not_of_the_gradients() -> None:
    grads, x = draw(3, 9, dtype=torch.bfloat16), draw(9)
    found = inverse_fisher_vector_product(grads, x, 0.1)
    assert found.dtype == torch.float64
    assert error(found, torch.linalg.solve(fisher(grads, 0.1), x)) < 1e-12


def test_repeated_gradients_and_a_damping_below_rounding() -> None:
    """29 eigenvalues of the Gram matrix are mλ = 3e-17 beside 1e5: Cholesky sees zeros."""
    row = draw(40)
    row[20:] = 0
    grads, outside = row.expand(30, 40) * 30, torch.zeros(40, dtype=torch.float64)
    outside[33] = 1.0
    torch.testing.assert_close(inverse_fisher_vector_product(grads, outside, 1e-18), outside / 1e-18)
    diagonal = inverse_fisher_diagonal(grads, 1e-18)
    torch.testing.assert_close(diagonal[20:], torch.full((20,), 1e18, dtype=torch.float64))
    assert bool((diagonal > 0).all())


def test_the_eigenvalues_give_the_same_when_cholesky_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    grads, x = draw(5, 20), draw(20)
    wanted = inverse_fisher_vector_product(grads, x, 0.02), inverse_fisher_diagonal(grads, 0.02)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: (a, torch.tensor(1, dtype=torch.int32)))
    found = inverse_fisher_vector_product(grads, x, 0.02), inverse_fisher_diagonal(grads, 0.02)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_two_failed_factorisations_are_an_error_that_says_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Tensor) -> None:
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: (a, torch.tensor(1, dtype=torch.int32)))
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(RuntimeError, match=r"\[5, 5\] of grads cannot be factorised: raise damping"):
        inverse_fisher_vector_product(draw(5, 20), draw(20), 0.02)


@pytest.mark.parametrize("damping", [1e-12, 1e-16])
def test_the_diagonal_stays_positive_where_the_difference_cancels(damping: float) -> None:
    grads = draw(40, 10) * 100
    diagonal = inverse_fisher_diagonal(grads, damping)
    assert bool((diagonal * fisher(grads, damping).diagonal() >= 1 - 1e-12).all())


def test_nothing_is_changed_and_no_graph_is_built() -> None:
    grads, x = draw(4, 11).requires_grad_(), draw(11).requires_grad_()
    before = grads.detach().clone(), x.detach().clone()
    found, diagonal = inverse_fisher_vector_product(grads, x, 0.1), inverse_fisher_diagonal(grads, 0.1)
    assert not found.requires_grad
    assert not diagonal.requires_grad
    assert torch.equal(grads, before[0])
    assert torch.equal(x, before[1])
    assert found.data_ptr() != x.data_ptr()


def test_strided_inputs() -> None:
    grads, x = draw(30, 8).T, draw(30, 4).T
    torch.testing.assert_close(
        inverse_fisher_vector_product(grads, x[::2], 0.1),
        inverse_fisher_vector_product(grads.contiguous(), x[::2].contiguous(), 0.1),
        rtol=1e-12,
        atol=1e-12,
    )


def test_nothing_to_multiply() -> None:
    grads = draw(3, 9)
    assert inverse_fisher_vector_product(grads, draw(0, 9), 0.1).shape == (0, 9)
    assert inverse_fisher_vector_product(draw(3, 0), draw(0), 0.1).shape == (0,)
    assert inverse_fisher_vector_product(draw(3, 0), draw(2, 0), 0.1).shape == (2, 0)
    assert inverse_fisher_diagonal(draw(3, 0), 0.1).shape == (0,)


class LargestResult(TorchDispatchMode):
    """Records the most elements that any operation returned in memory of its own."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.most = known, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("shape", [(), (3,)])
def test_no_temporary_is_larger_than_a_tile_beside_the_result(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inverse_fisher, "_TILE", 4096)
    grads, x = draw(16, 5000, dtype=torch.float32), draw(*shape, 5000, dtype=torch.float32)
    with LargestResult({grads.untyped_storage().data_ptr(), x.untyped_storage().data_ptr()}) as record:
        inverse_fisher_vector_product(grads, x, 0.1)
    assert record.most == max(x.numel(), 16 * (4096 // (16 + max(1, *shape, 1))))
    with LargestResult({grads.untyped_storage().data_ptr()}) as record:
        inverse_fisher_diagonal(grads, 0.1)
    assert record.most == 5000


def test_damping_must_be_positive() -> None:
    for damping in (0, 0.0, -1e-3, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"damping must be finite and > 0, got"):
            inverse_fisher_vector_product(draw(2, 3), draw(3), damping)
        with pytest.raises(ValueError, match=r"damping must be finite and > 0, got"):
            inverse_fisher_diagonal(draw(2, 3), damping)


def test_damping_must_be_a_number() -> None:
    for damping in ("1", None, True):
        with pytest.raises(TypeError, match="damping must be a number"):
            inverse_fisher_diagonal(draw(2, 3), damping)  # type: ignore[arg-type]


def test_gradients_must_be_a_matrix_with_rows() -> None:
    for shape in ((3,), (0, 3), (2, 3, 4), ()):
        with pytest.raises(ValueError, match=r"grads must have shape \[m, d\] with at least one row, got \["):
            inverse_fisher_vector_product(draw(*shape), draw(3), 0.1)
        with pytest.raises(ValueError, match=r"grads must have shape \[m, d\] with at least one row, got \["):
            inverse_fisher_diagonal(draw(*shape), 0.1)


def test_the_vector_must_fit_the_gradients() -> None:
    for shape in ((4,), (2, 4), (3, 1), (1, 2, 3), ()):
        with pytest.raises(ValueError, match=r"x must have shape \[3\] or \[k, 3\] for grads \[2, 3\], got \["):
            inverse_fisher_vector_product(draw(2, 3), draw(*shape), 0.1)


def test_kinds_of_numbers_that_have_no_meaning_here_are_refused() -> None:
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=r"grads must have a real floating dtype, got torch\."):
            inverse_fisher_diagonal(torch.zeros(2, 3, dtype=dtype), 0.1)
        with pytest.raises(TypeError, match=r"x must have a real floating dtype, got torch\."):
            inverse_fisher_vector_product(draw(2, 3), torch.zeros(3, dtype=dtype), 0.1)


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="grads must be a tensor, got list"):
        inverse_fisher_diagonal([[1.0, 2.0]], 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="grads must be dense"):
        inverse_fisher_diagonal(draw(2, 3).to_sparse(), 0.1)


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="x is on meta and grads on cpu"):
        inverse_fisher_vector_product(draw(2, 3), draw(3).to("meta"), 0.1)


def test_undefined_numbers_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        grads, x = draw(2, 3), draw(3)
        grads[1, 2] = bad
        with pytest.raises(ValueError, match="grads must be finite"):
            inverse_fisher_vector_product(grads, x, 0.1)
        with pytest.raises(ValueError, match="grads must be finite"):
            inverse_fisher_diagonal(grads, 0.1)
        x[0] = bad
        with pytest.raises(ValueError, match="x must be finite"):
            inverse_fisher_vector_product(draw(2, 3), x, 0.1)
