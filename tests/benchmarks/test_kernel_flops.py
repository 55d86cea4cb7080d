"""FLOPs of methods that keep rows: against torch's counter, and against the sizes of rows that HyLo really keeps."""

import pytest
import torch
from torch import nn

from benchmarks.flops import LayerShape, counted_flops, layer_shapes
from benchmarks.kernel_flops import kernel_work
from benchmarks.workloads import make_workload
from secondorder import HyLo

N, R, D_A, D_G = 24, 5, 11, 7
LAYER = LayerShape("", D_A, D_G, N)


def _counted():
    """Kernels, and the products with a gradient, as plain products."""
    a, g, matrix, z = torch.randn(N, D_A), torch.randn(N, D_G), torch.randn(D_G, D_A), torch.randn(R, 1)

    def kernel(rows):
        return (a[:rows] @ a[:rows].T) * (g[:rows] @ g[:rows].T)

    def precondition():
        j = ((a[:R] @ matrix.T) * g[:R]).sum(1, keepdim=True)
        return matrix - (g[:R] * (torch.eye(R) @ j) * z).T @ a[:R]

    return counted_flops(lambda: kernel(N)), counted_flops(lambda: kernel(R)), counted_flops(precondition)


def test_linear_layers_equal_torchs_counter():
    all_rows, kept_rows, precondition = _counted()
    works = {scheme: kernel_work([LAYER], 1000, N, R, scheme) for scheme in ("kis", "kid", "sngd")}
    assert works["kis"].precondition == works["kid"].precondition == precondition
    assert works["sngd"].precondition == 4 * N * D_A * D_G + 2 * N * N
    norms = 2 * N * (D_A + D_G)
    assert works["kis"].refresh == norms + kept_rows + R**3
    assert works["kid"].refresh == all_rows + 4 * N * R**2 + 2 * R**3
    assert works["sngd"].refresh == all_rows + N**3
    assert all(work.factor == work.scale == 0 for work in works.values())


def test_positions_are_summed_or_kept_or_made_gradients_of():
    few, many = (LayerShape("", 40, 30, N * s) for s in (2, 9))
    for shape in (few, many):
        summed = kernel_work([shape], 1000, N, R, "sngd")
        assert summed.refresh == 2 * N**2 * 70 + N**3 + shape.rows * 70
    kept = kernel_work([few], 1000, N, R, "sngd", "expand")
    assert kept.refresh == 2 * N**2 * 4 * 70 + N**3
    assert kept.precondition == 4 * N * 2 * 1200 + 2 * N**2
    gradients = kernel_work([many], 1000, N, R, "sngd", "expand")
    assert gradients.refresh == 2 * N**2 * 1200 + N**3 + 2 * many.rows * 1200
    assert gradients.precondition == 4 * N * 1200 + 2 * N**2


def test_norms_are_one_block_and_embeddings_a_few_columns():
    norm, lookup = LayerShape("", 1, 2, N, groups=8, full_a=False), LayerShape("", 50, 8, 3 * N, full_a=False)
    assert kernel_work([norm], 1000, N, R, "sngd").refresh == 2 * N**2 * 16 + N**3
    assert kernel_work([norm], 1000, N, R, "kid").precondition == 4 * R * 16 + 2 * R**2
    assert kernel_work([lookup], 1000, N, R, "sngd").refresh == 2 * N**2 * 9 * 8 + N**3
    assert kernel_work([lookup], 1000, N, R, "kid").precondition == 4 * R * 3 * 8 + 2 * R**2


def test_groups_are_blocks_of_their_own():
    one = kernel_work([LAYER], 1000, N, R, "kid")
    three = kernel_work([LayerShape("", D_A, D_G, N, groups=3)], 1000, N, R, "kid")
    assert (three.refresh, three.precondition) == (3 * one.refresh, 3 * one.precondition)


@pytest.mark.parametrize("approx", ["reduce", "expand"])
def test_the_rows_are_those_that_are_kept(approx, data_dir):
    """What multiplies a gradient is every number of the rows that the optimizer holds, appended ones counted."""
    workload = make_workload("unet", data_dir, "smoke")
    model, batch = workload.build_model(0), next(workload.batches(0))
    shapes = layer_shapes(model, lambda: workload.loss(model, batch))
    optimizer = HyLo(model, approx=approx, mode="sngd")
    workload.loss(model, batch).backward()
    optimizer.step()
    assert {s.name for s in shapes} == set(optimizer.blocks)
    for shape in shapes:
        n, block = workload.batch_size, optimizer.blocks[shape.name]
        rows_a, rows_g = (optimizer.state[block.owner][key] for key in ("rows_a", "rows_g"))
        d_a = rows_a.shape[-1] or 1
        products = rows_g.numel() // n * d_a
        assert kernel_work([shape], 1000, n, n, "sngd", approx).precondition == 4 * n * products + 2 * n**2


def test_the_floor_of_a_layer_by_hand():
    """A linear layer of 100 x 50 at 64 examples, 6 of them kept: a tenth of a refresh and all of each application."""
    layer = nn.Linear(99, 50)
    shapes = layer_shapes(layer, lambda: layer(torch.randn(64, 99)))
    work = kernel_work(shapes, 1_000_000, 64, 6, "kis")
    refresh = 2 * (64 + 36) * 150 + 216
    assert work.precondition == 4 * 6 * 5000 + 72
    assert work.refresh == refresh
