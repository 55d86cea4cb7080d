"""Transposed convolutions against index arithmetic: which input meets which kernel offset at an output pixel."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.kfac import assert_close, labels, noise, plain_kfac, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import Rows, empirical_block, factors, kron, solve_exact, solve_pi
from tests.support.oracles.layers import row_of, step_of, train

N = 4


def patches(layer: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Rows ``[Γ, S, C/Γ · k]`` of one example ``[C, *spatial]`` for outputs of ``sizes``, a row ordered (c, k...).

    Element ``l`` of the input reaches, through kernel offset ``j``, the pixel ``l·stride + j·dilation − padding``.
    """
    rows = []
    for pixel in itertools.product(*map(range, sizes)):
        columns = []
        for offset in itertools.product(*map(range, layer.kernel_size)):
            index = []
            for o, j, stride, dilation, padding, size in zip(
                pixel, offset, layer.stride, layer.dilation, layer.padding, x.shape[1:], strict=True
            ):
                source, rest = divmod(o + padding - j * dilation, stride)
                index.append(source if rest == 0 and 0 <= source < size else None)
            missing = any(i is None for i in index)
            columns.append(x.new_zeros(len(x)) if missing else x[(slice(None), *index)])
        rows.append(torch.stack(columns, -1))  # [C, k]
    return torch.stack(rows).reshape(len(rows), layer.groups, -1).transpose(0, 1)


def matrix(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[Γ, d_o/Γ, d_i/Γ · k (+1)]`` of tensors shaped like the parameters."""
    grouped = weight.reshape(layer.groups, layer.in_channels // layer.groups, -1, math.prod(layer.kernel_size))
    parts = [grouped.transpose(1, 2).flatten(2)]
    if bias is not None:
        parts.append(bias.reshape(layer.groups, -1, 1))
    return torch.cat(parts, -1)


def with_one(layer: nn.Module, rows: Tensor) -> Tensor:
    ones = rows.new_ones(*rows.shape[:-1], 1)
    if not layer.weight.requires_grad:
        return ones
    has_bias = layer.bias is not None and layer.bias.requires_grad
    return torch.cat([rows, ones], -1) if has_bias else rows


class Net(nn.Module):
    """A transposed convolution, a nonlinearity, a pooled head."""

    def __init__(self, kind: type[nn.Module], *sizes: int, **options) -> None:
        super().__init__()
        self.conv, self.head = kind(*sizes, **options), nn.Linear(sizes[1], 3)

    def read(self, z: Tensor) -> Tensor:
        return self.head(torch.tanh(z).flatten(2).mean(2))

    def forward(self, x: Tensor, *output_size) -> Tensor:
        return self.read(self.conv(x, *output_size))


def conv_rows(net: Net, x: Tensor, y: Tensor, *output_size) -> Rows:
    layer, found = net.conv, Rows([], [])
    for x_n, y_n in zip(x.split(1), y.split(1), strict=True):
        z = layer(x_n, *output_size)
        (g,) = torch.autograd.grad(F.cross_entropy(net.read(z), y_n), z)
        found.a.append(with_one(layer, patches(layer, x_n[0], z.shape[2:])))
        found.g.append(g[0].reshape(layer.groups, z.shape[1] // layer.groups, -1).mT)
    return found


def squeezed(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tuple(x[0] if len(x) == 1 else x for x in pair)


def dense(pair: tuple[Tensor, Tensor]) -> Tensor:
    return kron(pair[1], pair[0])


CASES = {
    "1d": (nn.ConvTranspose1d, (2, 3, 3), {}, (4,)),
    "1d stride 2": (nn.ConvTranspose1d, (2, 3, 3), {"stride": 2}, (4,)),
    "1d stride 3 padding output_padding": (
        nn.ConvTranspose1d,
        (2, 3, 4),
        {"stride": 3, "padding": 1, "output_padding": 2},
        (3,),
    ),
    "1d dilation": (nn.ConvTranspose1d, (2, 3, 3), {"dilation": 2, "padding": 1, "stride": 2}, (3,)),
    "1d output_padding below dilation": (nn.ConvTranspose1d, (2, 3, 2), {"dilation": 3, "output_padding": 2}, (3,)),
    "1d groups": (nn.ConvTranspose1d, (4, 6, 3), {"groups": 2, "stride": 2}, (3,)),
    "1d no bias": (nn.ConvTranspose1d, (2, 3, 3), {"bias": False, "padding": 2}, (4,)),
    "1d padding beyond the kernel": (nn.ConvTranspose1d, (2, 3, 2), {"padding": 2, "stride": 2}, (4,)),
    "1d kernel below stride": (nn.ConvTranspose1d, (2, 3, 1), {"stride": 2, "output_padding": 1}, (3,)),
    "2d": (nn.ConvTranspose2d, (2, 3, (2, 3)), {"stride": (2, 1), "padding": (0, 1)}, (2, 3)),
    "2d stride 2": (nn.ConvTranspose2d, (2, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (2, 3)),
    "2d groups": (nn.ConvTranspose2d, (4, 4, 2), {"groups": 2, "stride": 2, "bias": False}, (2, 2)),
    "2d depthwise": (nn.ConvTranspose2d, (3, 3, 2), {"groups": 3}, (2, 2)),
    "3d": (nn.ConvTranspose3d, (2, 2, 2), {"stride": (1, 2, 1), "output_padding": (0, 1, 0)}, (2, 1, 2)),
}
cases = pytest.mark.parametrize("case", CASES)


def problem(case: str) -> tuple[Net, Tensor, Tensor]:
    kind, sizes, options, spatial = CASES[case]
    net = seeded_build(lambda: Net(kind, *sizes, **options))
    return net, noise(N, sizes[0], *spatial), labels(N, 3)


@cases
def test_the_definition_convolves_and_differentiates_as_torch_does(case):
    net, x, y = problem(case)
    layer, rows = net.conv, conv_rows(net, x, y)
    joined = matrix(layer, layer.weight, layer.bias).detach()
    z = torch.stack([(a @ joined.mT).mT.flatten(0, 1) for a in rows.a]).detach()
    assert_close(z, layer(x).flatten(2).detach(), 1e-12)
    F.cross_entropy(net(x), y).backward()
    gradient = matrix(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad)
    assert_close(rows.mean_gradient(), gradient, 1e-12)


@cases
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_factors_are_those_of_the_definition(case, approx):
    net, x, y = problem(case)
    expected = squeezed(factors(conv_rows(twin(net), x, y), approx))
    opt = plain_kfac(net, approx=approx)
    train(opt, net, (x,), y, F.cross_entropy)
    state = opt.state[net.conv.weight]
    assert_close(state["factor_a"], expected[0], 1e-9, "A")
    assert_close(state["factor_g"], expected[1], 1e-9, "B")
    assert_close(opt.dense_curvature("conv"), dense(expected), 1e-9)
    assert "fallback" not in opt.describe()


@pytest.mark.parametrize(("method", "solve"), [("eigen", solve_exact), ("cholesky", solve_pi)])
@pytest.mark.parametrize("case", ["1d stride 2", "1d groups", "2d stride 2", "1d no bias", "2d depthwise", "3d"])
def test_direction_is_the_dense_solve(case, method, solve):
    net, x, y = problem(case)
    layer = net.conv
    A, B = factors(conv_rows(twin(net), x, y))
    opt = plain_kfac(net, damping=0.02, inverse_method=method)
    F.cross_entropy(net(x), y).backward()
    found = step_of(opt, [p for p in (layer.weight, layer.bias) if p is not None])
    gradient, moved = (matrix(layer, *([pair[i] for pair in found] + [None])[:2]) for i in (0, 1))
    assert_close(moved, solve(B, A, gradient, 0.02), 1e-8)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_part(frozen):
    net, x, y = problem("1d groups")
    getattr(net.conv, frozen).requires_grad_(False)
    expected = factors(conv_rows(twin(net), x, y))
    opt = plain_kfac(net)
    train(opt, net, (x,), y, F.cross_entropy)
    assert_close(opt.dense_curvature("conv"), dense(expected), 1e-9)


@pytest.mark.parametrize("size", [(5, 5), (6, 5), (6, 6)], ids=str)
def test_an_output_size_given_in_the_call(size):
    """It decides the output padding at run time: the rows follow the output that there is."""
    net = seeded_build(lambda: Net(nn.ConvTranspose2d, 2, 3, 3, stride=2, padding=1))
    x, y = noise(N, 2, 3, 3), labels(N, 3)
    expected = squeezed(factors(conv_rows(twin(net), x, y, size)))
    opt = plain_kfac(net)
    train(opt, net, (x, size), y, F.cross_entropy)
    assert_close(opt.dense_curvature("conv"), dense(expected), 1e-9)


def test_an_example_without_a_batch_axis():
    net = seeded_build(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2))
    plain, x = twin(net), noise(2, 4)
    z = plain(x[None])
    (g,) = torch.autograd.grad(z.tanh().sum(), z)
    rows = Rows([with_one(plain, patches(plain, x, z.shape[2:]))], [g[0][None].mT])
    opt = plain_kfac(net)
    net(x).tanh().sum().backward()
    opt.step()
    assert_close(opt.dense_curvature(""), dense(squeezed(factors(rows))), 1e-9)


def test_micro_batches_do_not_matter():
    net, x, y = problem("2d stride 2")
    expected = squeezed(factors(conv_rows(twin(net), x, y)))
    opt = plain_kfac(net)
    for part, target in zip(x.split(1), y.split(1), strict=True):
        (F.cross_entropy(net(part), target) / N).backward()
    opt.step()
    assert_close(opt.dense_curvature("conv"), dense(expected), 1e-9)


@pytest.mark.parametrize(("approx", "pooled"), [("expand", False), ("reduce", True)])
@pytest.mark.parametrize("options", [{"stride": 2}, {"stride": 2, "padding": 1, "output_padding": 1}], ids=str)
def test_a_linear_network_with_squared_loss_is_exact(approx, pooled, options):
    """Every input paired with residuals √(J/2)·e_j: residuals do not depend on inputs, so blocks are Kronecker."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.ConvTranspose1d(2, 3, 3, **options)

        def forward(self, x):
            z = self.conv(x)
            return z.mean(2) if pooled else z

    net, inputs = seeded_build(Linear), noise(3, 2, 3)
    with torch.no_grad():
        outputs = net(inputs)
    J = outputs[0].numel()
    residuals = math.sqrt(J / 2) * torch.eye(J, dtype=torch.float64).reshape(J, *outputs.shape[1:])
    x = inputs.repeat_interleave(J, 0)
    y = outputs.repeat_interleave(J, 0) - residuals.repeat(len(inputs), *[1] * (outputs.ndim - 1))
    plain, rows = twin(net), Rows([], [])
    for x_n, y_n in zip(x.split(1), y.split(1), strict=True):
        z = plain.conv(x_n)
        (g,) = torch.autograd.grad(((z.mean(2) if pooled else z) - y_n).square().sum(), z)
        rows.a.append(with_one(plain.conv, patches(plain.conv, x_n[0], z.shape[2:])))
        rows.g.append(g[0][None].mT)
    opt = plain_kfac(net, approx=approx)
    train(opt, net, (x,), y, lambda z, target: (z - target).square().sum() / len(z))
    assert_close(opt.dense_curvature("conv"), empirical_block(rows), 1e-9)


def test_describe_names_the_block_and_its_sizes():
    net, *_ = problem("1d groups")
    opt = plain_kfac(net)
    assert "conv" in row_of(opt, "conv.weight")
    assert "2×7, 3" in row_of(opt, "conv.weight")
