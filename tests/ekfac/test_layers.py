"""The intra estimate of one batch equals its definition, whatever the layer and however the batch came in.

Every case is one layer in a small network; expected scales are per-example gradients of autograd, rotated by the bases
that the optimizer holds.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from secondorder import EKFAC
from tests.support.ekfac import (
    held,
    held_bases,
    held_scales,
    measured,
    next_directions,
    plain_ekfac,
    standing,
    state_of,
    train_step,
)
from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, labels, noise, twin
from tests.support.layer_cases import BAGS, CASES, ONE_OF_EACH, TABLES
from tests.support.models import Tokens, images, mlp, seeded_build, vectors
from tests.support.networks import (
    CONVS,
    NORMED,
    SIZES,
    TOKENS,
    Flattened,
    Normed,
    Repeated,
    RepeatedConv,
    Words,
    around,
    squares,
)
from tests.support.oracles.ekfac import (
    exact_blocks,
    exact_fisher,
    layer_gradients,
    operator,
    over_null_spaces,
    scales,
    solve,
)
from tests.support.oracles.kfac import covered_names

BIAS = {"bias": True, "no bias": False}


def assert_definition(opt, model, plain, x, y, loss, names=None, tolerance=1e-9, factor=1.0):
    for name in covered_names(model) if names is None else names:
        layer = model.get_submodule(name)
        G = layer_gradients(plain, name, x, y, loss)
        assert_close(held_scales(opt, layer), factor * scales(G, *held_bases(opt, layer)), tolerance, name)


def check(build, x, y, loss=squares, names=None, **keywords):
    """Scales, and the dense solve with them, of a model that is built twice."""
    model, plain = build(), build()
    opt = measured(model, x, y, loss, **keywords)
    assert_definition(opt, model, plain, x, y, loss, names)
    names = covered_names(model) if names is None else names
    for name, (gradient, V) in next_directions(opt, model, x, y, loss, names).items():
        Q_B, Q_A = held_bases(opt, model.get_submodule(name))
        fisher = operator(Q_B, scales(layer_gradients(plain, name, x, y, loss), Q_B, Q_A), Q_A)
        assert_close(V, solve(fisher, gradient, 1e-2), 1e-8, name)
    return opt, model


# ---------------------------------------------------------------------------------------------------------------------
# Linear
# ---------------------------------------------------------------------------------------------------------------------


POSITIONS = {"vectors": (), "one": (1,), "four": (4,), "grid": (2, 3), "nine": (9,)}


@pairs(positions=POSITIONS, bias=BIAS, sizes={"few features": (2, 2), "many features": (7, 6)})
def test_linear_with_leading_dimensions(positions, bias, sizes):
    """Sizes on both sides of the rule that chooses how the squares are formed."""
    d_in, d_out = sizes
    x, y = noise(4, *positions, d_in), noise(4, *positions, d_out, seed=1)
    check(lambda: nn.Sequential(seeded_build(lambda: nn.Linear(d_in, d_out, bias=bias))), x, y)


SMALL = {  # model, inputs, targets, loss, layers
    "tokens in the batch axis": (Flattened, noise(4, 5, 3), noise(4, 5, 2, seed=1), squares, ["inner", "outer"]),
    # loss_terms is the business of the factors: the loss of an example is the mean over its tokens
    "a loss per token": (Tokens, noise(4, 5, 3), labels(20, 3).view(4, 5), F.cross_entropy, ["inner", "outer"]),
    "a mean of tokens": (
        lambda: Tokens(read="mean"), noise(4, 5, 3), labels(4, 3), F.cross_entropy, ["inner", "outer"],
    ),
    "calls of unequal sizes": (RepeatedConv, *images(), F.cross_entropy, ["conv", "head"]),
    "a token per example": (Words, TOKENS[:, 0], labels(5, 3), F.cross_entropy, ["words", "head"]),
    "three calls under two names": (
        lambda: Repeated(True, 3), noise(5, 3, 4), labels(5, 3), F.cross_entropy, ["layer", "head"],
    ),
    "two calls of one": (lambda: Repeated(False), noise(5, 4), labels(5, 3), F.cross_entropy, ["layer", "head"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SMALL)
def test_what_belongs_to_an_example_is_summed_before_squaring(case):
    build, x, y, loss, names = SMALL[case]
    check(lambda: seeded_build(build), x, y, loss, names)


def test_tokens_as_examples():
    """s as if every token were a datum of its own: that of the flattened batch."""
    x, y = noise(4, 5, 3), labels(20, 3).view(4, 5)
    model, plain = seeded_build(Tokens), seeded_build(Tokens)
    opt = measured(model, x, y, F.cross_entropy, token_is_example=True)
    assert_definition(opt, model, plain, x.reshape(20, 1, 3), y.reshape(20, 1), F.cross_entropy)


#: A layer that does not know which rows are whose has no squares of examples.
KINDS = [name for name, case in CASES.items() if not case.expand_only]
DEFAULT = {*ONE_OF_EACH, *TABLES, *BAGS}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in KINDS])
def test_every_kind_of_layer(name):
    """Scales and direction, of per-example gradients that are written by hand."""
    case = CASES[name]
    model, (inputs, y) = case.ready(case.model()), case.data()
    opt = plain_ekfac(model, damping=0.02, **case.keywords)
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            case.loss(model(*inputs), y).backward()
            opt.step()
    expected, before, gradients = {}, {}, {}
    opt.zero_grad()
    case.loss(model(*inputs), y).backward()
    for block, groups in case.rows(case.model()).items():
        state = opt.state[opt.blocks[block].owner]
        s, (Q_B, Q_A) = held(state)
        G = torch.stack([torch.cat([rows.gradient(n) for rows in groups]) for n in range(case.number)])
        A = torch.eye(s.shape[-1]) if block in case.tables else state["factor_a"]  # a diagonal has no null space
        assert_close(s, over_null_spaces(scales(G, Q_B, Q_A), state["factor_g"], A), 1e-9, block)
        expected[block] = operator(Q_B, s, Q_A)
        gradients[block] = case.matrix(model, block, lambda p: p.grad.clone())
        before[block] = case.matrix(model, block)
    opt.step()
    for block, fisher in expected.items():
        moved = before[block] - case.matrix(model, block)
        assert_close(moved, solve(fisher, gradients[block], 0.02), 1e-8, block)


@pytest.mark.parametrize("frozen", ["bias", "weight"])
def test_frozen_parts(frozen):
    def build():
        model = mlp()
        getattr(model[0], frozen).requires_grad_(False)
        return model

    opt, model = check(build, *vectors(), F.cross_entropy)
    n_a = {"bias": 4, "weight": 1}[frozen]
    assert held_scales(opt, model[0]).shape == (1, 5, n_a)


# ---------------------------------------------------------------------------------------------------------------------
# Convolutions
# ---------------------------------------------------------------------------------------------------------------------


def conv_case(kind, axes, channels=(4, 4), limit=None, **keywords):
    def build():
        return nn.Sequential(seeded_build(lambda: kind(*channels, **{"kernel_size": 2, **keywords})))

    x = noise(3, channels[0], *SIZES[axes])
    check(build, x, noise(*build()(x).shape, seed=1), max_factor_dim=limit)


SHAPES = {  # (channels in, channels out, groups), kernel: on both sides of the rule that chooses how squares are formed
    "few": (2, 3, 1, 2),
    "many": (12, 12, 1, 2),
    "groups": (4, 4, 2, 2),
    "depthwise": (4, 8, 4, 2),
    "pixel": (2, 3, 1, 1),
}


@pairs(
    lambda padding, stride, **_: not (padding == "same" and stride > 1),
    axes=[1, 2, 3],
    padding=[0, 1, "same", "valid"],
    mode=["zeros", "reflect", "replicate", "circular"],
    shape=SHAPES,
    stride=[1, 2],
    dilation=[1, 2],
    bias=BIAS,
    limit={"dense": None, "diagonal": 3},
)
def test_convolutions(axes, padding, mode, shape, stride, dilation, bias, limit):
    """A side above the limit has no basis."""
    c_in, c_out, groups, kernel = shape
    options = {"padding": padding, "padding_mode": mode, "stride": stride, "dilation": dilation, "bias": bias}
    conv_case(CONVS[axes], axes, (c_in, c_out), limit, kernel_size=kernel, groups=groups, **options)


def test_a_kernel_of_the_whole_image():
    conv_case(nn.Conv2d, 2, (2, 3), kernel_size=(5, 4))


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------------------------------------------------


def test_dense_curvature_of_an_embedding_is_in_the_order_of_its_weight():
    model, y = seeded_build(Words), labels(5, 3)
    plain = seeded_build(Words)
    opt = measured(model, TOKENS, y, F.cross_entropy)
    Q_B, Q_A = held_bases(opt, model.words)
    assert_close(Q_A[0], torch.eye(6, dtype=Q_A.dtype), 0.0)
    s = scales(layer_gradients(plain, "words", TOKENS, y, F.cross_entropy), Q_B, Q_A)
    dense = operator(Q_B, s, Q_A)  # over vec of [D, V]
    swap = torch.arange(18).view(3, 6).T.reshape(-1)
    assert_close(opt.dense_curvature("words"), dense[swap][:, swap], 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Norm layers
# ---------------------------------------------------------------------------------------------------------------------


@each(kind=NORMED.keys(), curvature=["unit", "diagonal"])
def test_norm_layers_have_the_exact_block_of_a_unit(kind, curvature):
    """K-FAC's block of a unit is exact already, so EK-FAC's is the same one."""
    build, data = NORMED[kind]
    model, plain, x, y = seeded_build(build), seeded_build(build), data(), labels(6, 3)
    opt = measured(model, x, y, F.cross_entropy, norm_curvature=curvature)
    G = layer_gradients(plain, "norm", x, y, F.cross_entropy)
    expected = exact_fisher(G) if curvature == "unit" else torch.diag(exact_fisher(G).diagonal())
    assert_close(opt.dense_curvature("norm"), expected, 1e-9)
    gradient, V = next_directions(opt, model, x, y, F.cross_entropy, ["norm"])["norm"]
    assert_close(V, solve(expected, gradient, 1e-2), 1e-8)


@pytest.mark.parametrize("image", [False, True])
def test_batch_norm_takes_the_statistics_of_the_batch_as_constants(image):
    def build():
        return Normed(lambda: nn.BatchNorm2d(4) if image else nn.BatchNorm1d(4), image)

    model, plain = seeded_build(build), seeded_build(build)
    x, y = images(6)[0] if image else noise(6, 4), labels(6, 3)
    with torch.no_grad():
        z = plain.first(x)
        axes = (0, 2, 3) if image else (0,)
        plain.norm.running_mean.copy_(z.mean(axes))
        plain.norm.running_var.copy_(z.var(axes, unbiased=False))
    plain.norm.eval()
    opt = measured(model, x, y, F.cross_entropy)
    expected = exact_blocks(layer_gradients(plain, "norm", x, y, F.cross_entropy))
    assert_close(opt.dense_curvature("norm"), torch.block_diag(*expected), 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Large sides, and part of the batch
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "sides"), [(1, "ag"), (4, "a"), (5, "")])
def test_a_side_above_the_limit_has_the_identity_for_a_basis(limit, sides):
    """d_in + 1 = 5 and d_out = 3: s is measured all the same; both sides diagonal: squares of plain gradients."""
    model, (x, y) = mlp((4, 3)), vectors()
    plain = twin(model)
    opt = measured(model, x, y, F.cross_entropy, max_factor_dim=limit)
    state = state_of(opt, model[0])
    for side in "ag":
        assert (f"basis_{side}" in state) == (side not in sides)
        assert state[f"factor_{side}"].ndim == (1 if side in sides else 2)
    assert_definition(opt, model, plain, x, y, F.cross_entropy)
    if sides == "ag":
        G = layer_gradients(plain, "0", x, y, F.cross_entropy)
        assert_close(held_scales(opt, model[0]), G.square().mean(0), 1e-10)
        gradient, V = next_directions(opt, model, x, y, F.cross_entropy, ["0"])["0"]
        assert_close(V, gradient / (G.square().mean(0) + 1e-2), 1e-9)


@pytest.mark.parametrize("kept", [1, 3, 5, 6, 99])
def test_a_part_of_the_examples_is_a_mean_over_distinct_ones(kept):
    model, (x, y) = mlp((4, 3)), vectors(6)
    plain = twin(model)
    opt = measured(model, x, y, F.cross_entropy, scale_batch_size=kept)
    G = layer_gradients(plain, "0", x, y, F.cross_entropy)
    squared = torch.stack([scales(g[None], *held_bases(opt, model[0])) for g in G])
    held = held_scales(opt, model[0])
    means = [squared[list(c)].mean(0) for c in itertools.combinations(range(6), min(kept, 6))]
    assert min(float((held - mean).abs().max()) for mean in means) < 1e-12


def test_parts_of_the_examples_are_unbiased():
    """Drawn anew at every step: pooled over steps they become the whole batch."""
    model, (x, y) = mlp((4, 3)), vectors(6)
    plain = twin(model)
    opt = plain_ekfac(model, scale_batch_size=2, factor_decay=1.0)
    with standing(opt):
        for _ in range(150):
            train_step(opt, model, x, y, F.cross_entropy)
    expected = scales(layer_gradients(plain, "0", x, y, F.cross_entropy), *held_bases(opt, model[0]))
    assert_close(held_scales(opt, model[0]), expected, 0.2)  # the standard error of the largest entry is about 6 %


# ---------------------------------------------------------------------------------------------------------------------
# How the batch came in
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_a_mean_over_outputs_multiplies_by_their_number(loss, outputs):
    """T = C makes it the block of the summed loss over C, in the unit of the factors."""
    x, y = noise(6, 4), (noise(6, outputs, seed=1) > 0).double()
    function = F.mse_loss if loss == "mse" else F.binary_cross_entropy_with_logits
    model, plain = mlp((4, 3, outputs)), mlp((4, 3, outputs))
    opt = measured(model, x, y, function, loss_terms=outputs)
    assert_definition(opt, model, plain, x, y, function, factor=outputs)
    total = mlp((4, 3, outputs))
    other = measured(total, x, y, lambda o, t: function(o, t, reduction="sum"), loss_reduction="sum")
    for name in ("0", "2"):
        assert_close(opt.dense_curvature(name), other.dense_curvature(name) / outputs, 1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# Memory layouts and what models do around their layers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"inplace": True}, {"odd": True}, {"inplace": True, "odd": True}])
def test_in_place_activations_and_views_change_nothing(options):
    x, y = images()
    model = around(**options)
    opt = measured(model, x, y, F.cross_entropy)
    assert_definition(opt, model, around(), x, y, F.cross_entropy)


LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts_of_the_input(layout):
    x, y = images()
    changed, model = LAYOUTS[layout](x), around()
    if layout == "channels last":
        model = model.to(memory_format=torch.channels_last)
    opt = measured(model, changed, y, F.cross_entropy)
    assert_definition(opt, model, around(), changed.contiguous(), y, F.cross_entropy)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_count_once(reentrant):
    x, y = vectors()
    model, plain = mlp((4, 5, 5, 3)), mlp((4, 5, 5, 3))
    opt = plain_ekfac(model)
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            z = checkpoint(model[1:3], model[0](x), use_reentrant=reentrant)
            F.cross_entropy(model[3:](z), y).backward()
            opt.step()
    assert_definition(opt, model, plain, x, y, F.cross_entropy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_low_precision_parameters_are_float32(dtype):
    x, y = vectors()
    model, plain = mlp().to(dtype), mlp()
    opt = measured(model, x.to(dtype), y, lambda o, t: F.cross_entropy(o.float(), t))
    held = held_scales(opt, model[0])
    assert held.dtype == torch.float32
    bases = (Q.double() for Q in held_bases(opt, model[0]))
    expected = scales(layer_gradients(plain, "0", x, y, F.cross_entropy), *bases)
    assert_close(held.double(), expected, 1e-5 if dtype == torch.float32 else 5e-2)


def test_positions_that_all_examples_share_cannot_be_told_apart():
    """A position embedding is looked up once for the batch: that layer alone takes the fallback, and says why."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.head = nn.Embedding(4, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(torch.tanh(x + self.place(torch.arange(4)))).mean(1)

    model, plain = seeded_build(Positions), seeded_build(Positions)
    x, y = noise(5, 4, 3), labels(5, 3)
    with pytest.warns(UserWarning, match="place: .* shared by the whole batch"):
        opt = measured(model, x, y, F.cross_entropy)
    assert_definition(opt, model, plain, x, y, F.cross_entropy, ["head"])
    before = copy.deepcopy(model.place.weight.detach())
    train_step(opt, model, x, y, F.cross_entropy)
    assert_close(before - model.place.weight.detach(), model.place.weight.grad, 1e-9)
    row = next(line for line in opt.describe().splitlines() if line.lstrip("| ").startswith("place.weight"))
    assert "fallback" in row


def test_a_column_of_categories_is_no_table_of_positions():
    """As many columns as examples: each row of the table still belongs to an example."""

    class Tabular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.rest = nn.Embedding(3, 2).double(), nn.Linear(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.kind(x[:, 0].long()) + self.rest(x[:, 1:])

    model = Tabular()
    optimizer = EKFAC(model, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        rows = noise(4, 4)
        rows[:, 0] = torch.tensor([0.0, 1.0, 2.0, 0.0])
        model(rows).square().mean().backward()
        optimizer.step()
    assert optimizer.state[model.kind.weight]["scale_updates"] == 1


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_frames_of_videos_that_lie_time_first(approx):
    class Video(nn.Module):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.conv, self.norm, self.first = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frames = self.norm(self.conv(x.flatten(0, 1)))
            return frames.unflatten(0, x.shape[:2]).mean(1 - self.first).flatten(1)

    clips = torch.randn(3, 5, 2, 4, 4, dtype=torch.float64)  # [N, T, …]
    found = []
    for first in (0, 1):
        torch.manual_seed(0)
        model = Video(first).double()
        optimizer = EKFAC(model, lr=0.0, approx=approx, batch_dim=first)
        for _ in range(2):
            optimizer.zero_grad()
            model(clips if first == 0 else clips.transpose(0, 1)).square().sum(1).mean().backward()
            optimizer.step()
        found.append([optimizer.dense_curvature(name) for name in ("conv", "norm")])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-10)
