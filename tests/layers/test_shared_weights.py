"""Two layers that share a weight and differ in what they do with it, each seen with its own stride, padding and so on.

The oracle knows no adapter. Layers are linear in their parameters, so what their own backward makes of a 1 at an output
is the input row of that output; gradients at outputs are autograd's, one example at a time.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from secondorder import KFAC
from tests.support.ekfac import held_bases, held_scales, measured, plain_ekfac, train_step
from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, labels, noise, plain_kfac
from tests.support.models import seeded_build
from tests.support.oracles.ekfac import NORMS, as_matrices, mean_gradient, scales
from tests.support.oracles.hylo import plain_hylo, taken
from tests.support.oracles.layers import Tape, attention_pairs, expected_pairs, held, multihead, singles

WIDTH, N, CLASSES, DAMPING = 64, 6, 3, 1e-2


class Case(NamedTuple):
    """Two layers of one weight, and the shape of an example."""

    first: Callable[[], nn.Module]
    second: Callable[[], nn.Module]
    shape: tuple[int, ...]
    indices: bool = False


def pair(kind: type, args: tuple, shape: tuple[int, ...], one: dict, other: dict, **common) -> Case:
    indices = kind in (nn.Embedding, nn.EmbeddingBag)
    return Case(lambda: kind(*args, **one, **common), lambda: kind(*args, **other, **common), shape, indices)


def conv1d(one: dict, other: dict, **common) -> Case:
    return pair(nn.Conv1d, (WIDTH, WIDTH, 3), (WIDTH, 9), one, other, **common)


def conv2d(one: dict, other: dict, **common) -> Case:
    return pair(nn.Conv2d, (WIDTH, WIDTH, 2), (WIDTH, 4, 5), one, other, **common)


def transposed(one: dict, other: dict, **common) -> Case:
    return pair(nn.ConvTranspose1d, (WIDTH, WIDTH, 3), (WIDTH, 5), one, other, **common)


PRODUCTS = {
    "stride": conv1d({}, {"stride": 2}),
    "padding": conv1d({}, {"padding": 2}),
    "same": conv1d({"padding": "same"}, {"padding": "valid"}),
    "dilation": conv1d({}, {"dilation": 2}),
    "circular": conv1d({"padding": 2}, {"padding": 2, "padding_mode": "circular"}),
    "reflect": conv1d({"padding": 1, "padding_mode": "replicate"}, {"padding": 1, "padding_mode": "reflect"}),
    "groups": conv1d({"dilation": 2}, {"stride": 2}, groups=4, bias=False),
    "2d": conv2d({"padding": 1}, {"dilation": (2, 1), "stride": (1, 2)}),
    "2d, same": conv2d({"padding": "same", "dilation": 2}, {"padding": "same"}),
    "3d": pair(
        nn.Conv3d, (16, WIDTH, (2, 1, 2)), (16, 3, 3, 3), {"padding": 1}, {"stride": (2, 1, 1), "dilation": (1, 1, 2)}
    ),
    "transposed, stride": transposed({}, {"stride": 2}),
    "transposed, padding": transposed({}, {"padding": 1}),
    "transposed, dilation": transposed({"dilation": 3}, {}, groups=2),
    "transposed, output_padding": transposed({"stride": 2}, {"stride": 2, "output_padding": 1}),
    "transposed, 2d": pair(
        nn.ConvTranspose2d, (WIDTH, WIDTH, 2), (WIDTH, 2, 3), {"stride": (1, 2)}, {"dilation": (2, 1), "padding": 1}
    ),
    "transposed, 3d": pair(
        nn.ConvTranspose3d, (16, WIDTH, (1, 2, 2)), (16, 2, 2, 2), {"stride": 2}, {"padding": (0, 1, 0)}
    ),
    "padding_idx": pair(nn.Embedding, (8, WIDTH), (5,), {"padding_idx": 3}, {}),
    "padding_idx, the other": pair(nn.Embedding, (8, WIDTH), (5,), {}, {"padding_idx": 0}),
    "two padding_idx": pair(nn.Embedding, (8, WIDTH), (5,), {"padding_idx": 0}, {"padding_idx": -1}),
}

SCALED = {
    "LayerNorm": pair(nn.LayerNorm, (WIDTH,), (3, WIDTH), {"eps": 1e-5}, {"eps": 1.0}),
    "RMSNorm": pair(nn.RMSNorm, (WIDTH,), (3, WIDTH), {"eps": None}, {"eps": 1.0}),
    "GroupNorm": pair(
        nn.GroupNorm, (), (WIDTH, 3), {"num_groups": 2, "eps": 1.0}, {"num_groups": 8}, num_channels=WIDTH
    ),
    "BatchNorm1d": pair(nn.BatchNorm1d, (WIDTH,), (WIDTH, 3), {}, {"eps": 1.0}),
    "BatchNorm2d": pair(nn.BatchNorm2d, (WIDTH,), (WIDTH, 2, 2), {"eps": 0.5}, {}),
    "InstanceNorm1d": pair(nn.InstanceNorm1d, (WIDTH,), (WIDTH, 4), {}, {"eps": 1.0}, affine=True),
}

BAGS = {
    "mode": pair(nn.EmbeddingBag, (8, WIDTH), (5,), {"mode": "sum"}, {"mode": "mean"}),
    "bag, padding_idx": pair(nn.EmbeddingBag, (8, WIDTH), (5,), {"padding_idx": 2}, {"padding_idx": 0}, mode="mean"),
}

CASES = {**PRODUCTS, **SCALED, **BAGS}


class Shared(nn.Module):
    """Both layers on one input, nonlinear before the mean over positions, so that these do not look alike."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first, self.second, self.head = case.first(), case.second(), nn.Linear(WIDTH, CLASSES)
        if case.indices or isinstance(self.first, NORMS):
            nn.init.normal_(self.first.weight)
        self.second.weight = self.first.weight
        if getattr(self.first, "bias", None) is not None:
            self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.summary(self.first(x)) - 0.5 * self.summary(self.second(x)))

    def summary(self, z: Tensor) -> Tensor:
        features = self.features(z)
        z = torch.tanh(z.movedim(features, -1))
        return z.reshape(len(z), -1, WIDTH).mean(1)

    def features(self, z: Tensor) -> int:
        return -1 if isinstance(self.first, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm | nn.RMSNorm) else 1

    @property
    def uses(self) -> tuple[nn.Module, nn.Module]:
        return self.first, self.second


def build(case: Case) -> Shared:
    return seeded_build(lambda: Shared(case))


def data(case: Case, n: int = N) -> tuple[Tensor, Tensor]:
    x = torch.randint(8, (n, *case.shape), generator=torch.Generator().manual_seed(0))
    return x if case.indices else noise(n, *case.shape), labels(n, CLASSES)


class Expected(NamedTuple):
    """By example: gradients ``[N, Γ, n_g, n_a]``, and rows ``[Γ, S, n]`` of both layers one after the other."""

    gradients: Tensor
    a: list[Tensor]
    g: list[Tensor]


def empirical(outputs: Tensor, target: Tensor) -> list[Tensor]:
    return [F.cross_entropy(outputs, target)]


def squared_error(outputs: Tensor, target: Tensor) -> list[Tensor]:
    """Whose gradients are the columns of the square root of the curvature 2I of a summed squared error."""
    return [2**0.5 * value for value in outputs[0]]


def matrices(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[N, Γ, n_g, n_a]`` of values ``[N, *shape]``."""
    return as_matrices(layer, weight, bias)


def rows_of(model: Shared, x: Tensor, values: Callable[[Tensor], list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, rows a and rows g of the values of one example, values one after the other."""
    calls: list[tuple[nn.Module, Tensor]] = []
    handles = [layer.register_forward_hook(lambda m, _, z: calls.append((m, z))) for layer in model.uses]
    found = values(model(x))
    for handle in handles:
        handle.remove()
    parameters = list(model.first.parameters())

    def matrix(z: Tensor, at: Tensor) -> Tensor:
        parts = torch.autograd.grad(z, parameters, at, retain_graph=True)
        return matrices(model.first, *(p[None] for p in parts))[0]

    groups, a, g, gradients = getattr(model.first, "groups", 1), [], [[] for _ in found], 0
    for _, z in calls:
        last = z.movedim(model.features(z), -1)
        positions = last[..., 0].numel()
        for s in range(positions):
            one = torch.zeros_like(last).reshape(positions, groups, -1)
            one[s, :, 0] = 1
            a.append(matrix(z, one.view(last.shape).movedim(-1, model.features(z)))[:, 0])
        for rows, value in zip(g, found, strict=True):
            (at,) = torch.autograd.grad(value, z, retain_graph=True)
            rows.append(at.movedim(model.features(z), -1).reshape(positions, groups, -1).transpose(0, 1))
    A, G = torch.stack(a, 1), [torch.cat(rows, 1) for rows in g]
    real = A.abs().sum((0, 2)) > 0  # padding of a table is no row
    gradients = torch.stack([b.mT @ A for b in G])
    return gradients, A[:, real], torch.cat([b[:, real] for b in G], 1)


def scaled_rows(model: Shared, x: Tensor, y: Tensor) -> Tensor:
    """``(Σ g x̂, Σ g)`` ``[N, C, k, 1]`` of layers that normalise, from the whole batch with its statistics."""
    calls: list[tuple[nn.Module, Tensor]] = []
    handles = [layer.register_forward_hook(lambda m, _, z: calls.append((m, z))) for layer in model.uses]
    loss = F.cross_entropy(model(x), y, reduction="sum")
    for handle in handles:
        handle.remove()
    total = 0
    for layer, z in calls:
        plain = {n: torch.ones_like(p) if n == "weight" else torch.zeros_like(p) for n, p in layer.named_parameters()}
        (g,) = torch.autograd.grad(loss, z, retain_graph=True)
        parts = [g * functional_call(layer, plain, x), g][: len(plain)]
        last = [part.movedim(model.features(z), -1).reshape(len(x), -1, WIDTH).sum(1) for part in parts]
        total = total + torch.stack(last, -1)[..., None]
    return total


@functools.cache
def expected(name: str, values: Callable = empirical) -> Expected:
    case = CASES[name]
    model, (x, y) = build(case), data(case)
    if isinstance(model.first, NORMS):
        G = scaled_rows(model, x, y)
        return Expected(G, [G.new_ones(WIDTH, 1, 1)] * len(x), [u.mT for u in G])
    found = [rows_of(model, x[n : n + 1], lambda z, n=n: values(z, y[n : n + 1])) for n in range(len(x))]
    gradients, a, g = zip(*found, strict=True)
    return Expected(torch.stack(gradients)[:, 0], list(a), list(g))


def factors(name: str, approx: str, values: Callable = empirical) -> tuple[Tensor, Tensor]:
    """(A, B) by definition, the groups first where there are several."""
    _, a, g = expected(name, values)
    if approx == "expand":
        A, B = sum(r.mT @ r for r in a) / sum(r.shape[1] for r in a), sum(r.mT @ r for r in g) / len(g)
    else:
        means, sums = [r.mean(1) for r in a], [r.sum(1) for r in g]
        A, B = (sum(r[:, :, None] * r[:, None] for r in rows) / N for rows in (means, sums))
    if CASES[name].indices:  # A of a table is a diagonal
        A = A * torch.eye(A.shape[-1], dtype=A.dtype)
    return (A[0], B[0]) if len(A) == 1 else (A, B)


def check_factors(opt: KFAC, name: str, approx: str = "expand", values: Callable = empirical) -> None:
    for found, wanted, side in zip(held(opt, "first"), factors(name, approx, values), "AG", strict=True):
        assert_close(found, wanted, 1e-9, f"{side} of {name!r}")


def check_oracle(name: str) -> None:
    """What the rows of both layers sum up to is the gradient of the weight that they share."""
    model, (x, y) = build(CASES[name]), data(CASES[name])
    F.cross_entropy(model(x), y).backward()
    found = expected(name)
    wanted = mean_gradient(model.first)
    assert_close(sum(g.mT @ a for a, g in zip(found.a, found.g, strict=True)) / N, wanted)
    assert_close(found.gradients.mean(0), wanted)


@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_both_uses(name):
    """Factors of K-FAC, and the scale of EK-FAC in its own basis."""
    if name not in SCALED:
        check_oracle(name)
    for approx in ("expand", "reduce"):
        model = build(CASES[name])
        opt = plain_kfac(model, approx=approx, inverse_method="cholesky")
        train_step(opt, model, *data(CASES[name]), F.cross_entropy)
        assert set(opt.blocks) == {"first", "head"}
        check_factors(opt, name, approx)
    model = build(CASES[name])
    opt = measured(model, *data(CASES[name]), F.cross_entropy)
    assert_close(held_scales(opt, model.first), scales(expected(name).gradients, *held_bases(opt, model.first)))


class Attentions(nn.Module):
    """Two attentions of one set of weights, with other numbers of heads and other layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 8)
        self.second.in_proj_weight, self.second.in_proj_bias = self.first.in_proj_weight, self.first.in_proj_bias
        self.second.out_proj = self.first.out_proj
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x)[0]
        z = x.transpose(0, 1)
        return self.head((z + self.second(z, z, z, need_weights=False)[0]).mean(0))

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = x + multihead(tape, "first", layer, x, x, x)
        return self.head(x.mean(1))


def test_attentions_of_other_heads_and_layouts():
    x, y = noise(N, 4, WIDTH), labels(N, CLASSES)
    model, plain = seeded_build(Attentions), seeded_build(Attentions)
    wanted = attention_pairs(expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy), "first")
    opt = plain_kfac(model, inverse_method="cholesky")
    train_step(opt, model, x, y, F.cross_entropy)
    assert set(opt.blocks) == {"first.in_proj", "first.out_proj", "head"}
    for name, pair_of_factors in wanted.items():
        for found, factor in zip(held(opt, name), pair_of_factors, strict=True):
            assert_close(found, factor)


@each(
    name=["stride", "padding_idx", "LayerNorm"],
    options={t: {"transport": t} for t in ("project", "kfac", "none", "recompute")}
    | {"running": {"estimator": "running"}},
)
def test_transports_and_estimators_of_ekfac(name, options):
    """A second refresh on the same batch; where the scale is measured and not guessed, it is that of the definition."""
    model = build(CASES[name])
    opt = plain_ekfac(model, lr=0.0, inv_update_steps=2, **options)
    x, y = data(CASES[name])
    for _ in range(3):
        train_step(opt, model, x, y, F.cross_entropy)
    check_factors(opt, name)
    if options not in ({"estimator": "running"}, {"transport": "kfac"}):
        assert_close(
            held_scales(opt, model.first), scales(expected(name).gradients, *held_bases(opt, model.first)), 1e-6
        )


#: One of each kind; bags hold different numbers of indices, so HyLo covers them with "reduce" only.
FOR_HYLO = ["dilation", "groups", "2d", "transposed, stride", "padding_idx", "GroupNorm", "BatchNorm1d", "mode"]


@pairs(lambda name, approx: name not in BAGS or approx == "reduce", name=FOR_HYLO, approx=["expand", "reduce"])
def test_directions_of_hylo(name, approx):
    model, (x, y) = build(CASES[name]), data(CASES[name])
    opt = plain_hylo(model, approx=approx, damping=DAMPING)
    F.cross_entropy(model(x), y).backward()
    V = mean_gradient(model.first)
    kept = taken(opt)
    G, a, g = expected(name)
    if approx == "reduce" and name not in SCALED:
        G = torch.stack([g.sum(1)[..., None] * a.mean(1)[:, None] for a, g in zip(a, g, strict=True)])
    moved = matrices(model.first, *(kept[n][None] for n in ("first.weight", "first.bias") if n in kept))[0]
    # (UᵀU/N + λI)⁻¹V = (V − Uᵀ(UUᵀ + NλI)⁻¹UV)/λ; the units of a normalisation are one vector
    joined = name in SCALED
    U, v = (G.flatten(1)[None], V.reshape(1, -1)) if joined else (G.transpose(0, 1).flatten(2), V.flatten(1))
    K = U @ U.mT + N * DAMPING * torch.eye(N, dtype=U.dtype)
    wanted = (v - (U.mT @ torch.linalg.solve(K, U @ v[..., None]))[..., 0]) / DAMPING
    assert float((wanted - v / DAMPING).norm() / wanted.norm()) > 1e-4, "damping leaves nothing to see"
    assert_close(moved.reshape(wanted.shape), wanted, 1e-8)


@pytest.mark.parametrize("name", ["transposed, stride", "2d", "padding_idx"])
def test_observed_outputs(name):
    model, (x, y) = build(CASES[name]), data(CASES[name])
    opt = plain_kfac(model, fisher="exact", inverse_method="cholesky")
    outputs = model(x)
    opt.observe(outputs, "gaussian")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    check_factors(opt, name, values=squared_error)


def test_compiled():
    """Also where layers are frozen before the backward: its graph knows taps that are no longer there."""
    torch._dynamo.reset()
    name = "two padding_idx"
    model = build(CASES[name])
    opt = plain_kfac(model, inverse_method="cholesky")
    train_step(opt, torch.compile(model, backend="aot_eager"), *data(CASES[name]), F.cross_entropy)
    check_factors(opt, name)
    model, (x, y) = build(CASES["stride"]), data(CASES["stride"])
    opt = plain_kfac(model, lr=0.0)
    loss = F.cross_entropy(torch.compile(model, backend="aot_eager")(x), y)
    model.head.requires_grad_(False)
    model(x)  # another forward begins, and the optimizer looks at the model again
    assert set(opt.blocks) == {"first"}
    loss.backward()
    torch._dynamo.reset()
