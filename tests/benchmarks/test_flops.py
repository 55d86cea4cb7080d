"""FLOP formulas against torch's counter, against arithmetic by hand, and against published figures."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.flops import (
    LayerShape,
    counted_flops,
    factor_bytes,
    factor_flops,
    layer_shapes,
    precondition_flops,
    refresh_flops,
    scale_flops,
)
from benchmarks.timing import Intervals, Work
from benchmarks.workloads import make_workload
from secondorder import KFAC


def _dense_work(shapes):
    """The factors, preconditioning by inverses and by eigenbases, as plain products for torch's counter."""
    results = []
    for s in shapes:
        x, g = torch.randn(s.rows, s.n_a), torch.randn(s.rows, s.n_g)
        grad, a, b = torch.randn(s.n_g, s.n_a), torch.randn(s.n_a, s.n_a), torch.randn(s.n_g, s.n_g)
        results.append(
            (
                counted_flops(lambda x=x, g=g: (x.T @ x, g.T @ g)),
                counted_flops(lambda a=a, b=b, grad=grad: b @ grad @ a),
                counted_flops(lambda a=a, b=b, grad=grad: b @ (b.T @ grad @ a) @ a.T),
            )
        )
    return [sum(column) for column in zip(*results, strict=True)]


def test_formulas_equal_torchs_counter():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 6 * 6, 5, bias=False))
    shapes = layer_shapes(model, lambda: model(torch.randn(4, 3, 6, 6)))
    by_lags = 13 * 4 * 36 * 3**2  # of 25 lags those that are not another one's negative
    assert shapes == [LayerShape("0", 28, 8, 4 * 36, lag_products=by_lags), LayerShape("2", 288, 5, 4)]
    factors, inverse, eigen = _dense_work(shapes)
    assert factor_flops([replace(s, lag_products=None) for s in shapes]) == factors
    assert factor_flops(shapes) == factors - 2 * (4 * 36 * 28**2 - by_lags)
    rows = 4 * 36 * 8 * 9 // 2 + 4 * (288 * 289 + 5 * 6) // 2
    assert factor_flops(shapes, triangle=True) == 2 * (by_lags + rows)  # lags are of one triangle already
    assert precondition_flops(shapes, "cholesky") == inverse
    assert precondition_flops(shapes, "eigen") == eigen


def test_shapes_of_shared_positions_and_groups():
    model = nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (4, 5)), nn.Conv2d(4, 8, 1, groups=2))
    shapes = layer_shapes(model[0], lambda: model[0](torch.randn(2, 7, 6)))
    assert shapes == [LayerShape("", 7, 4, 14)]
    shapes = layer_shapes(model[2], lambda: model[2](torch.randn(3, 4, 5, 5)))
    assert shapes == [LayerShape("", 3, 4, 75, groups=2)]
    assert factor_flops(shapes) == 2 * 2 * 75 * (9 + 16)
    assert factor_flops(shapes, triangle=True) == 2 * 2 * 75 * (6 + 10)
    assert factor_bytes(shapes) == 4 * 2 * (9 + 16)
    assert refresh_flops(shapes, "cholesky") == 2 * (27 + 64)
    assert refresh_flops(shapes, "eigen") == 9 * 2 * (27 + 64)


def test_a_transposed_convolution_is_one_over_a_larger_input():
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)
    shapes = layer_shapes(layer, lambda: layer(torch.randn(5, 4, 7, 7)))
    assert shapes == [LayerShape("", 2 * 9 + 1, 3, 5 * 15 * 15, groups=2)]
    optimizer = KFAC(layer, lr=0.1, factor_update_steps=1)
    layer(torch.randn(5, 4, 7, 7)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["factor_a"].shape == (2, 19, 19)
    assert state["factor_g"].shape == (2, 3, 3)


def _shapes(name, data_dir):
    """Shapes at the published size, from a batch of one example: rows grow with the batch."""
    workload = make_workload(name, data_dir, batch_size=1)
    model, batch = workload.build_model(0), next(workload.batches(0))
    model.eval()
    scale = make_workload(name, data_dir).batch_size
    shapes = [s for s in layer_shapes(model, lambda: workload.loss(model, batch)) if s.full_a]  # as was published
    training = scale * counted_flops(lambda: workload.loss(model, batch).backward())
    return [LayerShape(s.name, s.n_a, s.n_g, s.rows * scale) for s in shapes], training


# GFLOP: training step, factors, preconditioning by inverses, sum of n³; MB of all factors
@pytest.mark.parametrize(
    ("name", "training", "factors", "precondition", "cubes", "megabytes"),
    [("autoencoder", 8.7, 6.6, 9.0, 5.5, 26.0), ("resnet20", 31.1, 91.2, 0.3, 1.1, 9.4)],
)
def test_published_work(name, training, factors, precondition, cubes, megabytes, data_dir):
    shapes, counted = _shapes(name, data_dir)
    first = shapes[0]  # the published figure has the gradient for the data, too, which no training step computes
    to_the_data = 2 * first.rows * (first.n_a - (name == "autoencoder")) * first.n_g
    assert (counted + to_the_data) / 1e9 == pytest.approx(training, rel=0.01)
    assert factor_flops(shapes) / 1e9 == pytest.approx(factors, rel=0.01)
    assert precondition_flops(shapes, "cholesky") / 1e9 == pytest.approx(precondition, abs=0.05)
    assert precondition_flops(shapes, "eigen") == 2 * precondition_flops(shapes, "cholesky")
    assert refresh_flops(shapes, "cholesky") / 1e9 == pytest.approx(cubes, abs=0.05)
    assert factor_bytes(shapes) / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_published_work_of_the_transformer_with_one_layer_for_query_key_and_value():
    """19.6 GFLOP of training, 24.9 of factors and 12.2 MB were published for that layout and 65 characters."""
    tokens = 32 * 128
    layer = [(129, 384), (129, 128), (129, 512), (513, 128)]
    shapes = [LayerShape("", n_a, n_g, tokens) for n_a, n_g in (*4 * layer, (129, 65))]
    assert factor_flops(shapes) / 1e9 == pytest.approx(24.9, rel=0.01)
    assert precondition_flops(shapes, "cholesky") / 1e9 == pytest.approx(0.9, abs=0.05)
    assert refresh_flops(shapes, "cholesky") / 1e9 == pytest.approx(1.3, abs=0.05)
    assert factor_bytes(shapes) / 1e6 == pytest.approx(12.2, rel=0.01)


def test_shapes_of_lookups_norms_and_attention():
    """Five positions of three examples; queries, keys and values come from inputs of different length."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=4)
            self.plain = nn.LayerNorm(8, elementwise_affine=False)

        def forward(self, x, key, value):
            return self.plain(self.attention(self.norm(self.words(x)), key, value)[0])

    model, batch = Model(), (torch.zeros(3, 5, dtype=torch.long), torch.randn(3, 7, 6), torch.randn(3, 7, 4))
    maps = [("query", 8, 15), ("key", 6, 21), ("value", 4, 21), ("out", 8, 15)]
    assert layer_shapes(model, lambda: model(*batch)) == [
        LayerShape("words", 11, 8, 15, full_a=False),
        LayerShape("norm", 1, 2, 3, groups=8, full_a=False),
        *(LayerShape(f"attention.{part}", d_in + 1, 8, rows) for part, d_in, rows in maps),
    ]


def test_nothing_is_counted_for_an_input_side_without_a_matrix():
    lookup, norm = LayerShape("", 11, 8, 15, full_a=False), LayerShape("", 1, 2, 3, groups=8, full_a=False)
    assert factor_flops([lookup]) == 2 * 15 * 64
    assert factor_bytes([lookup]) == 4 * (11 + 64)
    assert refresh_flops([lookup], "eigen") == 9 * 512
    assert precondition_flops([lookup], "cholesky") == 2 * 64 * 11
    assert precondition_flops([lookup], "eigen") == 4 * 64 * 11
    assert scale_flops([lookup], "intra", examples=3) == 2 * 15 * 64
    assert factor_flops([norm]) == 8 * 2 * 3 * 4
    assert scale_flops([norm], "intra", examples=3) == 8 * 2 * 3 * 4


def _ways_to_the_scale(n, s, n_a, n_g):
    """FLOPs of every exact way to the squares of rotated per-example gradients, counted by torch; all give the same."""
    a, g = torch.randn(n, s, n_a, dtype=torch.float64), torch.randn(n, s, n_g, dtype=torch.float64)
    q_a, q_g = (torch.linalg.qr(torch.randn(k, k, dtype=torch.float64))[0] for k in (n_a, n_g))

    def gradients(early_a, early_g):
        x = ((g @ q_g) if early_g else g).mT @ ((a @ q_a) if early_a else a)
        x = x if early_a else x @ q_a
        return (x if early_g else q_g.mT @ x).square().sum(0)

    def pairs():
        rows_a, rows_g, total = a @ q_a, g @ q_g, 0
        for i in range(s):
            for j in range(i, s):
                total = total + (1 + (j > i)) * (rows_g[:, i] * rows_g[:, j]).mT @ (rows_a[:, i] * rows_a[:, j])
        return total

    ways = [pairs, *(lambda i=i: gradients(i % 2 == 0, i < 2) for i in range(4))]
    for way in ways:
        torch.testing.assert_close(way(), ways[0]())
    return [counted_flops(way) for way in ways]


def test_scale_takes_the_least_of_all_exact_ways():
    for sizes in [(4, 1, 5, 3), (4, 2, 9, 8), (4, 9, 5, 3), (3, 9, 5, 40), (3, 9, 40, 5)]:
        n, s, n_a, n_g = sizes
        shapes = [LayerShape("", n_a, n_g, n * s), LayerShape("", n_a, n_g, n * s, groups=2)]
        assert scale_flops(shapes, "intra", n) == 3 * min(_ways_to_the_scale(*sizes))
        assert scale_flops(shapes, "running", n) == scale_flops(shapes, "eigen", n) == 0


def test_ekfac_costs_what_eigenbases_cost_and_the_way_of_its_scale_into_a_new_one():
    shapes = [LayerShape("", 6, 4, 10)]
    assert precondition_flops(shapes, "running") == precondition_flops(shapes, "eigen")
    q = {n: torch.randn(n, n) for n in (6, 4)}
    scale = torch.randn(4, 6)
    transport = counted_flops(lambda: (q[4].mT @ q[4]).square() @ scale @ (q[6].mT @ q[6]).square().mT)
    for scheme in ("intra", "running"):
        assert refresh_flops(shapes, scheme) == refresh_flops(shapes, "eigen") + transport


def test_the_scale_is_part_of_every_step():
    work = Work(training=1000, precondition=100, factor=0, refresh=0, scale=300)
    assert work.floor(Intervals(10, 100)) == pytest.approx(1.4)


def test_floor_of_the_autoencoder():
    """About 2.0 with inverses, 3.07 with eigenbases, from the published GFLOPs at intervals 10/100."""
    assert Work(8_700, 9_000, 0, 0).floor(Intervals(10, 100)) == pytest.approx(2.03, abs=0.01)
    assert Work(8_700, 18_000, 0, 0).floor(Intervals(10, 100)) == pytest.approx(3.07, abs=0.01)
    assert Work(8_700, 9_000, 6_600, 5_500).floor(Intervals(10, 100)) == pytest.approx(2.12, abs=0.01)
