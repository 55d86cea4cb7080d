"""Tests of the kernels of sparse windows, which `test_triton.py` runs in the interpreter of triton."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import GGT, SparseMFAC, TopK
from secondorder.curvature.window.form import Form, Place
from secondorder.curvature.window.topk import TopKRows
from secondorder.curvature.window.topk_triton import TritonTopKRows


def _rows(rule: TopK, shapes: list[tuple[int, ...]], m: int, dtype: torch.dtype) -> Any:
    return Form(m, rule).rows([Place(torch.Size(shape), dtype, torch.device("cpu")) for shape in shapes])


def _gradients(shapes: list[tuple[int, ...]], count: int, dtype: torch.dtype) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [[torch.randn(s, generator=generator, dtype=dtype) for s in shapes] for _ in range(count)]


def _matrix(rows: TopKRows, t: int) -> Tensor:
    """The first ``t`` rows as a dense matrix, entry by entry."""
    sizes = [shape.numel() for shape in rows.shapes]
    found = torch.zeros(t, sum(sizes), dtype=torch.float64)
    for panel in rows.panels:
        for tensor, start, first, count in panel.members:
            for b in range(count):
                at = sum(sizes[:tensor]) + start + b * panel.length
                for r in range(t):
                    columns = at + panel.idx[first + b, r].long()
                    found[r].index_add_(0, columns, panel.val[first + b, r].double())
    return found


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one short block": [(5,)],
    "many blocks and tails": [(7, 9), (64,), (3,), (130,)],
    "more blocks than a program": [(16 * 20 + 1,)],
    "more entries than a program": [(2600,)],
}


@pytest.mark.parametrize(
    ("name", "m", "filled", "density", "block", "dtype", "value"),
    [
        ("many blocks and tails", 1, 1, 0.3, 16, torch.float32, torch.float32),
        ("many blocks and tails", 3, 2, 0.3, 16, torch.float32, torch.bfloat16),
        ("more blocks than a program", 31, 31, 0.1, 16, torch.float64, torch.float32),
        ("one short block", 96, 40, 0.2, 16, torch.float32, torch.float32),
        ("many blocks and tails", 3, 3, 0.9, 65536, torch.float32, torch.float32),  # offsets of 32 bits
        ("more entries than a program", 2, 2, 0.8, 2600, torch.float64, torch.float32),
    ],
)
def test_products_agree_with_the_dense_matrix(
    name: str, m: int, filled: int, density: float, block: int, dtype: torch.dtype,
    value: torch.dtype,
) -> None:  # fmt: skip
    shapes = SHAPES[name]
    rows, plain = (
        _rows(TopK(density, block, value, kernels=kernels), shapes, m, dtype) for kernels in ("triton", "torch")
    )
    assert type(rows) is TritonTopKRows
    assert type(plain) is TopKRows
    for i, gradient in enumerate(_gradients(shapes, filled, dtype)):
        for kept in (rows, plain):
            kept.write([g.clone() for g in gradient], torch.tensor([i]), None)
    matrix, (x,) = _matrix(plain, filled), _gradients(shapes, 1, dtype)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    flat = torch.cat([part.reshape(-1) for part in x]).double()
    torch.testing.assert_close(rows.dots(x, filled), matrix @ flat, **tolerance)
    newest = torch.tensor([filled - 1])
    torch.testing.assert_close(rows.newest_dots(newest, filled), matrix @ matrix[filled - 1], **tolerance)
    a = torch.linspace(-1, 1, filled, dtype=torch.float64)
    combined = [part.reshape(-1).double() for part in rows.combine(a)]
    torch.testing.assert_close(torch.cat(combined), a @ matrix, **tolerance)
    assert [part.shape for part in rows.combine(a)] == [torch.Size(shape) for shape in shapes]
    torch.testing.assert_close(rows.dots(x, filled), plain.dots(x, filled), **tolerance)


@pytest.mark.parametrize("m", [160, 1024])
def test_windows_of_many_rows(m: int) -> None:
    rows, plain = (_rows(TopK(0.25, 16, kernels=kernels), [(16,)], m, torch.float64) for kernels in ("triton", "torch"))
    generator = torch.Generator().manual_seed(0)
    for kept in (rows, plain):
        kept.panels[0].idx.copy_(torch.rand(1, m, 16, generator=generator.manual_seed(0)).argsort(-1)[..., :4])
        kept.panels[0].val.normal_(generator=generator.manual_seed(1))
    (x,) = _gradients([(16,)], 1, torch.float64)
    torch.testing.assert_close(rows.dots(x, m), plain.dots(x, m))
    a = torch.randn(m, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(rows.combine(a), plain.combine(a))
    assert torch.equal(rows.combine(a)[0], rows.combine(a)[0])


@pytest.mark.parametrize("kind", [SparseMFAC, GGT])
def test_methods_train_alike_with_either_kernels(kind: Any) -> None:
    ends = []
    for kernels in ("triton", "torch"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        opt = kind(model, lr=0.05, window_size=3, compression=TopK(0.3, 8, kernels=kernels))
        for t in range(5):
            generator = torch.Generator().manual_seed(t)
            opt.zero_grad()
            model(torch.randn(6, 4, dtype=torch.float64, generator=generator)).square().mean().backward()
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)
