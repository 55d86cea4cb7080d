"""Products of a matrix with itself in strips, and their completion, at the sizes where the algorithm changes."""

import itertools

import pytest
import torch

from benchmarks.counting import count
from secondorder.linalg import dense

WIDTHS = (1, 3, 31, 33, 127, 128, 129, 160, 255, 256, 257, 300, 513)
ROWS = (1, 5, 1023, 1024, 1025, 2100)


def test_the_sum_of_outer_products() -> None:
    for width, feature_major in itertools.product(WIDTHS, (False, True)):
        out, wanted = torch.full((width, width), torch.nan, dtype=torch.float64), torch.zeros(width, width).double()
        out.triu_().zero_()
        for n in ROWS:
            rows = torch.randn(width, n, dtype=torch.float64).mT if feature_major else torch.randn(n, width).double()
            dense.add_gram_(out, rows)
            wanted += rows.T @ rows
        torch.testing.assert_close(dense.mirror_upper_(out), wanted, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("width", [2, 128, 300])
def test_the_sum_of_outer_products_of_rows_with_a_one_appended(width: int) -> None:
    for homogeneous, lead in itertools.product((False, True), ((), (3,))):
        side = width + homogeneous
        out, wanted = (torch.zeros(*lead, side, side, dtype=torch.float64) for _ in range(2))
        for n in (7, 1500):
            rows = torch.randn(*lead, n, width, dtype=torch.float64)
            dense.add_outer_rows_(out, rows, homogeneous)
            whole = torch.cat([rows, torch.ones(*lead, n, 1)], -1) if homogeneous else rows
            wanted += whole.mT @ whole
        torch.testing.assert_close(dense.mirror_upper_(out), wanted, rtol=1e-11, atol=1e-9)


def test_mirroring_completes_the_upper_triangle() -> None:
    for side, lead in itertools.product((1, 2, 127, 128, 129, 300), ((), (2,))):
        x = torch.randn(*lead, side, side)
        wanted = x.triu() + x.triu(1).mT
        assert torch.equal(dense.mirror_upper_(x), wanted)


def test_almost_half_of_the_work_is_saved() -> None:
    for width, share in ((128, 0.76), (256, 0.63), (512, 0.57), (1024, 0.57)):
        out, rows = torch.zeros(width, width), torch.zeros(2048, width)
        flops = count(lambda out=out, rows=rows: dense.add_gram_(out, rows)).flops
        assert 0.5 * 2 * 2048 * width**2 < flops <= share * 2 * 2048 * width**2
