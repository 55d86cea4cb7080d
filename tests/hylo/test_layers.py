"""Every layer type, in both approximations, against the dense solve with per-example gradients.

``expand`` is exact, whatever the layer. ``reduce`` is the mean of the inputs times the sum of the gradients; where an
example has one position, or the layer's parameters have no positions, it is exact too.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import secondorder.nn
from tests.support.kfac import assert_close, labels, noise, twin
from tests.support.layer_cases import Attends, Pair, Sequences
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import (
    CONVS,
    NORMED,
    SIZES,
    TOKENS,
    TRANSPOSED,
    Flattened,
    Normed,
    Repeated,
    RepeatedConv,
    Sequence,
    Words,
    around,
    squares,
)
from tests.support.oracles.ekfac import example_gradients as one_by_one
from tests.support.oracles.hylo import (
    as_rows,
    check,
    check_block,
    compare,
    dense,
    example_gradients,
    fisher,
    gradients,
    one,
    plain_hylo,
    reduced_gradients,
    sngd,
    step,
)
from tests.support.oracles.layers import follows_fallback, rows_by_example, singles

approximations = pytest.mark.parametrize("approx", ["expand", "reduce"])
biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


# ---------------------------------------------------------------------------------------------------------------------
# Linear
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [(), (1,), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 2), (12, 9)], ids=["few features", "many features"])
@biases
@approximations
def test_linear_with_leading_dimensions(positions, sizes, bias, approx):
    """Sizes on both sides of the rule that chooses between Gram matrices and per-example gradients."""
    d_in, d_out = sizes
    x, y = noise(4, *positions, d_in), noise(4, *positions, d_out, seed=1)
    check(lambda: nn.Sequential(seeded_build(lambda: nn.Linear(d_in, d_out, bias=bias))), x, y, squares, ["0"], approx)


@pytest.mark.parametrize("positions", [1, 2, 3, 4, 5, 30])
def test_both_sides_of_the_cost_rule(positions):
    """L²(d_i + d_o) against d_i d_o = 80: the border is between 2 and 3 positions."""
    x, y = noise(5, positions, 9), noise(5, positions, 8, seed=1)
    check(lambda: nn.Sequential(seeded_build(lambda: nn.Linear(9, 8))), x, y, squares, ["0"])


@approximations
def test_one_position_is_a_matrix(approx):
    x, y, found = noise(5, 4), labels(5, 3), []
    for inputs in (x, x[:, None]):
        model = mlp()
        opt = plain_hylo(model, approx=approx)
        kept = step(opt, model, inputs, y, lambda out, t: F.cross_entropy(out.view(5, 3), t))
        found.append(torch.cat([kept[name].flatten() for name in kept]))
    assert_close(found[1], found[0], 1e-10)


@approximations
def test_tokens_in_the_batch_axis_still_belong_to_their_example(approx):
    """Reduced rows are those of the layer that sees ``[N, S]``."""
    x, y = noise(4, 5, 3), noise(4, 5, 2, seed=1)
    model = seeded_build(Flattened)
    plain = nn.Sequential()
    for name, layer in twin(model).named_children():
        plain.add_module(name, layer)
        if name == "inner":
            plain.add_module("act", nn.Tanh())
    opt = plain_hylo(model, approx=approx)
    kept = step(opt, model, x, y, squares)
    for name in ("inner", "outer"):
        reduced = approx == "reduce"
        found = (reduced_gradients if reduced else example_gradients)(
            plain, *([name] if reduced else []), (x,), y, squares
        )
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


@approximations
@pytest.mark.parametrize("read", ["positions", "mean"])
def test_tokens(read, approx):
    """A mean over tokens is the loss of the example itself."""
    x = noise(4, 5, 3)
    y = labels(20, 3).view(4, 5) if read == "positions" else labels(4, 3)
    check(lambda: seeded_build(lambda: Tokens(read=read)), x, y, F.cross_entropy, ["inner", "outer"], approx)


def test_examples_on_the_second_axis():
    model, plain = seeded_build(lambda: Sequence(True)), seeded_build(lambda: Sequence(False))
    x, y = noise(5, 4, 3), labels(5, 3)
    opt = plain_hylo(model, batch_dim=1)
    kept = step(opt, model, x.transpose(0, 1), y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in ("inner", "outer"):
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


def test_padding_without_a_gradient_leaves_no_trace():
    """Positions that the loss does not see add nothing to any row."""

    def loss(output, target):
        return F.cross_entropy(output, target, ignore_index=-1, reduction="sum") / len(output)

    x, y = noise(4, 3, 3), labels(12, 3).view(4, 3)
    longer = torch.cat([x, noise(4, 2, 3, seed=9)], 1)
    found = []
    for inputs, targets in ((x, y), (longer, F.pad(y, (0, 2), value=-1))):
        model = seeded_build(Tokens)
        opt = plain_hylo(model)
        step(opt, model, inputs, targets, loss)
        found.append(torch.block_diag(opt.dense_curvature("inner"), opt.dense_curvature("outer")))
    assert_close(found[1], found[0], 1e-10)


@approximations
def test_masked_positions_are_no_rows(approx):
    """Reduced rows have the mean over the real positions of each example."""
    x, y, lengths = noise(4, 5, 3), labels(20, 3).view(4, 5), [5, 3, 4, 2]
    keep = torch.arange(5) < torch.tensor(lengths)[:, None]

    def loss(output, target):
        """Of targets with their own mask beside them."""
        return (F.cross_entropy(output, target[..., 0], reduction="none") * target[..., 1]).sum(1).mean()

    model, plain, targets = seeded_build(Tokens), seeded_build(Tokens), torch.stack([y, keep.long()], -1)
    opt = plain_hylo(model, approx=approx)
    with opt.mask(keep):
        output = model(x)
    loss(output, targets).backward()
    with opt.keep_directions() as kept:
        opt.step()
    for name in ("inner", "outer"):
        parts = []
        for n, length in enumerate(lengths):
            single = (x[n : n + 1, :length],), targets[n : n + 1, :length], loss
            found = reduced_gradients(plain, name, *single) if approx == "reduce" else example_gradients(plain, *single)
            parts.append(as_rows(plain, name, found))
        check_block(opt, model, name, torch.cat(parts, 1), kept, 1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Convolutions
# ---------------------------------------------------------------------------------------------------------------------


def conv_case(kind, axes, channels=(4, 4), approx="expand", sizes=None, **keywords):
    def build():
        return nn.Sequential(seeded_build(lambda: kind(*channels, **{"kernel_size": 2, **keywords})))

    x = noise(3, channels[0], *(sizes or SIZES[axes]))
    return check(build, x, noise(*build()(x).shape, seed=1), squares, ["0"], approx)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, "same"])
@approximations
def test_padding(axes, padding, approx):
    conv_case(CONVS[axes], axes, (2, 3), approx, padding=padding, kernel_size=3 if padding == "same" else 2)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@approximations
def test_padding_modes(mode, approx):
    conv_case(nn.Conv2d, 2, (2, 3), approx, padding=1, padding_mode=mode)


@pytest.mark.parametrize(
    ("axes", "stride", "dilation", "groups", "bias"),
    [
        *itertools.product([1], [1, 3], [1, 2], [1, 2], [True, False]),
        (2, (2, 1), (1, 2), 1, True),
        (2, (1, 3), 2, 2, False),
        (2, 2, 1, 4, True),
        (2, 1, 1, 2, True),
        (3, (1, 2, 1), (1, 2, 1), 2, True),
    ],
)
@approximations
def test_stride_dilation_and_groups(axes, stride, dilation, groups, bias, approx):
    conv_case(CONVS[axes], axes, approx=approx, stride=stride, dilation=dilation, groups=groups, bias=bias, padding=1)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("channels", [(4, 4), (4, 8)])
@approximations
def test_depthwise(channels, bias, approx):
    conv_case(nn.Conv2d, 2, channels, approx, groups=4, kernel_size=3, bias=bias)


@pytest.mark.parametrize(
    ("channels", "sizes"), [((1, 2), (5, 4)), ((6, 14), (3, 3)), ((6, 14), (3, 5)), ((6, 14), (5, 5))], ids=str
)
@approximations
def test_both_sides_of_the_cost_rule_of_convolutions(channels, sizes, approx):
    """54 · 14 = 756 against L² · 69 of 1, 3 and 9 positions, and a layer with more positions than features."""
    conv_case(nn.Conv2d, 2, channels, approx, sizes, kernel_size=3)


@approximations
def test_one_pixel_is_a_linear_layer(approx):
    """L = 1: a convolution over the whole image and the linear layer with its weights."""
    x, y = noise(5, 2, 3, 2), noise(5, 4, seed=1)
    conv = nn.Sequential(seeded_build(lambda: nn.Conv2d(2, 4, (3, 2))), nn.Flatten())
    linear = nn.Sequential(nn.Flatten(), nn.Linear(12, 4).double())
    with torch.no_grad():
        linear[1].weight.copy_(conv[0].weight.flatten(1))
        linear[1].bias.copy_(conv[0].bias)
    one_, other = plain_hylo(conv, approx=approx), plain_hylo(linear, approx=approx)
    moved, expected = step(one_, conv, x, y, squares), step(other, linear, x, y, squares)
    assert_close(moved["0.weight"].flatten(1), expected["1.weight"], 1e-10)
    assert_close(moved["0.bias"], expected["1.bias"], 1e-10)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("groups", [1, 2])
@approximations
def test_frozen_parts_of_convolutions(frozen, groups, approx):
    def build():
        model = nn.Sequential(seeded_build(lambda: nn.Conv2d(2, 4, 2, groups=groups)))
        getattr(model[0], frozen).requires_grad_(False)
        return model

    x = noise(3, 2, 4, 3)
    check(build, x, noise(*build()(x).shape, seed=1), squares, ["0"], approx)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "output_padding": 1}], ids=["plain", "strided"])
@approximations
def test_transposed(axes, groups, options, approx):
    conv_case(TRANSPOSED[axes], axes, (2, 4), approx, groups=groups, **options)


@approximations
def test_a_network_of_convolutions(approx):
    check(lambda: convnet(stride=2, padding=1), *images(), F.cross_entropy, ["first", "second", "head"], approx)


@approximations
def test_a_summed_loss(approx):
    """The rows are those of the mean, the gradient is m times as long."""
    x, y = images()
    model, plain = convnet(), convnet()
    opt = plain_hylo(model, approx=approx, loss_reduction="sum")
    kept = step(opt, model, x, y, lambda out, t: F.cross_entropy(out, t, reduction="sum"))
    for name in ("first", "second", "head"):
        found = (
            reduced_gradients(plain, name, (x,), y, F.cross_entropy)
            if approx == "reduce"
            else example_gradients(plain, (x,), y, F.cross_entropy)
        )
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Several calls, tied weights
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("tokens", [False, True], ids=["vectors", "tokens"])
@approximations
def test_calls_of_one_module(times, tokens, approx):
    x = noise(5, 3, 4) if tokens else noise(5, 4)
    check(
        lambda: seeded_build(lambda: Repeated(False, times)),
        x,
        labels(5, 3),
        F.cross_entropy,
        ["layer", "head"],
        approx,
    )


@pytest.mark.parametrize("times", [2, 3])
@approximations
def test_two_modules_with_one_weight(times, approx):
    x, y = noise(5, 3, 4), labels(5, 3)
    model, plain = (seeded_build(lambda tied=tied: Repeated(tied, times)) for tied in (True, False))
    plain.load_state_dict(model.state_dict())
    opt = plain_hylo(model, approx=approx)
    kept = step(opt, model, x, y, F.cross_entropy)
    for name in ("layer", "head"):
        found = (
            reduced_gradients(plain, name, (x,), y, F.cross_entropy)
            if approx == "reduce"
            else example_gradients(plain, (x,), y, F.cross_entropy)
        )
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


@approximations
def test_calls_with_unequal_numbers_of_positions(approx):
    check(lambda: seeded_build(RepeatedConv), *images(), F.cross_entropy, ["conv", "head"], approx)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.both = True

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.second(x)) if self.both else x)


def test_a_layer_that_a_step_does_not_reach():
    """Its last rows stay; the other layers go on."""
    x, y = vectors()
    model, plain = seeded_build(Sometimes), seeded_build(Sometimes)
    opt = plain_hylo(model)
    step(opt, model, x, y, F.cross_entropy)
    before = opt.dense_curvature("second")
    model.both = plain.both = False
    kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in ("first", "head"):
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)
    assert_close(opt.dense_curvature("second"), before, 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_embedding(padding_idx):
    """Words that occur twice in an example are added before anything is squared; the padding has no gradient at all."""

    def build():
        return seeded_build(lambda: Words(padding_idx))

    opt, model = check(build, TOKENS, labels(5, 3), F.cross_entropy, ["words", "head"], at_once=False)
    if padding_idx is not None:
        held = opt.dense_curvature("words").view(6, 3, 6, 3)
        assert not held[padding_idx].any()
    assert "fallback" not in opt.describe()


def output_gradients(model, index, y):
    """Gradient of one example's loss at the output of the table, ``[S, d]`` or, for a bag, ``[1, d]``."""
    seen = []
    handle = model.words.register_forward_hook(lambda _, args, z: seen.append(z))
    value = F.cross_entropy(model(index[None]), y[None])
    handle.remove()
    return torch.autograd.grad(value, seen[0])[0].reshape(-1, 3)


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_reduced_rows_of_an_embedding(padding_idx):
    """The frequencies of an example's words, and the sum of the gradients; padding counts neither here nor there."""
    y, plain = labels(5, 3), seeded_build(lambda: Words(padding_idx))
    rows = []
    for index, target in zip(TOKENS, y, strict=True):
        real = torch.full((4,), True) if padding_idx is None else index != padding_idx
        a = F.one_hot(index[real], 6).double().mean(0)
        rows.append(torch.outer(a, output_gradients(plain, index, target)[real].sum(0)))
    model = seeded_build(lambda: Words(padding_idx))
    opt = plain_hylo(model, approx="reduce")
    kept = step(opt, model, TOKENS, y, F.cross_entropy)
    check_block(opt, model, "words", torch.stack(rows).flatten(1)[None], kept, 1e-2)


@approximations
def test_the_rows_of_a_large_table_are_exact(approx):
    """Beyond 8192 entries no vector is as long as the table, so there is nothing to reduce."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(8193, 2), nn.Linear(2, 3)

        def forward(self, index):
            return self.head(torch.tanh(self.words(index))).mean(1)

    model, plain, y = seeded_build(Table), seeded_build(Table), labels(5, 3)
    opt = plain_hylo(model, approx=approx)
    kept = step(opt, model, TOKENS, y, F.cross_entropy)
    U = one_by_one(plain, TOKENS, y, F.cross_entropy)["words.weight"][:, :6].flatten(1)[None]
    V, moved = (values["words.weight"].detach()[:6].reshape(1, -1) for values in (gradients(model), kept))
    assert_close(moved, sngd(U, V, 1e-2), 1e-8)
    assert not kept["words.weight"][6:].any()


def test_embedding_of_one_token_per_example():
    check(lambda: seeded_build(Words), TOKENS[:, 0], labels(5, 3), F.cross_entropy, ["words", "head"], at_once=False)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_is_one_row(mode):
    """Then the reduced form is exact."""

    def build():
        return seeded_build(lambda: Words(bag=mode))

    model, plain, y = build(), build(), labels(5, 3)
    opt = plain_hylo(model, approx="reduce")
    kept = step(opt, model, TOKENS, y, F.cross_entropy)
    found = one_by_one(plain, TOKENS, y, F.cross_entropy)
    for name in ("words", "head"):
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_not_expanded(mode):
    """They follow the fallback, with a reason; the other layers are exact all the same."""

    def build():
        return seeded_build(lambda: Words(bag=mode))

    with pytest.warns(UserWarning, match="words: .*bags .* approx='reduce'"):
        opt, model = check(build, TOKENS, labels(5, 3), F.cross_entropy, ["head"], at_once=False, lr=1.0)
    assert follows_fallback(opt, "words.weight", "bags")
    plain = build()
    F.cross_entropy(plain(TOKENS), labels(5, 3)).backward()
    assert_close(plain.words.weight.detach() - model.words.weight.detach(), plain.words.weight.grad, 1e-9)


def test_a_batch_of_nothing_but_padding():
    model = seeded_build(lambda: Words(0))
    opt = plain_hylo(model, lr=0.1)
    for _ in range(2):
        kept = step(opt, model, torch.zeros(5, 4, dtype=torch.int64), labels(5, 3), F.cross_entropy)
        assert not kept["words.weight"].any()
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Attention, recurrent layers, products of two inputs
# ---------------------------------------------------------------------------------------------------------------------


def from_tape(rows, approx):
    """``[1, N, k]`` of the rows of one product of a model that was written by hand."""
    found = []
    for n in range(len(rows.a)):
        a, g = rows.a[n][0], rows.g[n][0]
        found.append(torch.outer(g.sum(0), a.mean(0)) if approx == "reduce" else g.mT @ a)
    return torch.stack(found).flatten(1)[None]


def product(values, weight, bias):
    """``[1, 1, k]`` of a named weight and bias."""
    parts = [values[weight].detach()]
    if bias in values:
        parts.append(values[bias].detach()[:, None])
    return torch.cat(parts, 1).reshape(1, -1)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "positions first"])
@biases
@approximations
def test_each_projection_of_attention_is_a_block_of_its_own(batch_first, bias, approx):
    model = seeded_build(lambda: Attends(batch_first=batch_first, bias=bias))
    plain, x, y = twin(model), noise(4, 3, 4), labels(4, 3)
    rows = rows_by_example(plain.by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_hylo(model, approx=approx, batch_dim=0 if batch_first else 1)
    kept = step(opt, model, x if batch_first else x.transpose(0, 1), y, F.cross_entropy)
    U = torch.cat([from_tape(rows[f"attn.{part}"], approx) for part in "qkv"])

    def in_projection(values):
        parts = [values["attn.in_proj_weight"].detach()]
        if bias:
            parts.append(values["attn.in_proj_bias"].detach()[:, None])
        return torch.cat(parts, 1).view(3, -1)

    compare(opt, "attn.in_proj", U, in_projection(gradients(model)), in_projection(kept), 1e-2)
    check_block(opt, model, "attn.out_proj", from_tape(rows["attn.out"], approx), kept, 1e-2)
    check_block(opt, model, "head", from_tape(rows["head"], approx), kept, 1e-2)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@approximations
def test_exposed_recurrent_layers(kind, approx):
    model = seeded_build(lambda: Sequences(kind))
    plain, x, y = twin(model), noise(4, 3, 3), labels(4, 3)
    rows = rows_by_example(plain.by_hand, singles(x), y.split(1), F.cross_entropy)
    exact = one_by_one(plain, x, y, F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_hylo(model, approx=approx, damping=1e-4)
    kept = step(opt, model, x, y, F.cross_entropy)
    for part in ("ih_l0", "hh_l0"):
        names = [f"rnn.{kind_}_{part}" for kind_ in ("weight", "bias")]
        U = from_tape(rows[f"rnn.{part}"], approx)
        if approx == "expand":
            whole = torch.cat([exact[names[0]], exact[names[1]][..., None]], -1)
            assert_close(U, whole.flatten(1)[None], 1e-12, "the definition")
        compare(opt, f"rnn.{part}", U, product(gradients(model), *names), product(kept, *names), 1e-4)


@pytest.mark.parametrize("lead", [(), (4,)], ids=str)
@biases
@approximations
def test_bilinear(lead, bias, approx):
    inputs = noise(5, *lead, 3), noise(5, *lead, 2, seed=1)
    check(
        lambda: seeded_build(lambda: Pair(bias)),
        inputs,
        labels(5, 3),
        F.cross_entropy,
        ["left", "both", "head"],
        approx,
        at_once=False,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Norm layers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NORMED)
@approximations
def test_a_norm_layer_is_one_dense_block(kind, approx):
    """All units together, exact in both approximations."""
    build, data = NORMED[kind]
    check(lambda: seeded_build(build), data(), labels(6, 3), F.cross_entropy, ["norm"], approx, damping=1e-4)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parts_of_norm_layers(frozen):
    def build():
        model = seeded_build(NORMED["LayerNorm tokens"][0])
        getattr(model.norm, frozen).requires_grad_(False)
        return model

    check(build, noise(6, 3, 4), labels(6, 3), F.cross_entropy, ["norm"], damping=1e-4)


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
    opt = plain_hylo(model, damping=1e-4)
    kept = step(opt, model, x, y, F.cross_entropy)
    U = as_rows(plain, "norm", one_by_one(plain, x, y, F.cross_entropy))
    V, moved = (as_rows(model, "norm", one(values))[:, 0] for values in (gradients(model), kept))
    assert_close(moved, sngd(U, V, 1e-4), 1e-7)
    assert_close(opt.dense_curvature("norm"), dense(fisher(U)), 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Memory layouts and what models do around their layers
# ---------------------------------------------------------------------------------------------------------------------


AROUND = ["conv", "mid", "head"]


def check_around(model, given, plain_x, y, approx):
    plain = around()
    opt = plain_hylo(model, approx=approx)
    kept = step(opt, model, given, y, F.cross_entropy)
    found = example_gradients(plain, (plain_x,), y, F.cross_entropy)
    for name in AROUND:
        if approx == "reduce":
            found = reduced_gradients(plain, name, (plain_x,), y, F.cross_entropy)
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


@pytest.mark.parametrize("options", [{"inplace": True}, {"inplace": True, "odd": True}], ids=["in place", "and views"])
@approximations
def test_in_place_activations_and_views_change_nothing(options, approx):
    x, y = images()
    check_around(around(**options), x, x, y, approx)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided", "expanded"])
@approximations
def test_memory_layouts_of_the_input(layout, approx):
    x, y = images()
    changed = {
        "channels_last": lambda: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(2, 3).contiguous().transpose(2, 3),
        "strided": lambda: torch.stack([x, x], -1)[..., 0],
        "expanded": lambda: x[:, :, :1].expand_as(x),
    }[layout]()
    model = around()
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    check_around(model, changed, changed.contiguous(), y, approx)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_count_once(reentrant):
    x, y = vectors()
    model, plain = mlp((4, 5, 5, 3)), mlp((4, 5, 5, 3))
    opt = plain_hylo(model)
    z = checkpoint(model[1:3], model[0](x), use_reentrant=reentrant)
    F.cross_entropy(model[3:](z), y).backward()
    with opt.keep_directions() as kept:
        opt.step()
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in ("0", "2", "4"):
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


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
    opt = plain_hylo(model, lr=1.0)
    before = model.place.weight.detach().clone()
    with pytest.warns(UserWarning, match="place: .* shared by the whole batch"):
        kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy, at_once=False)
    check_block(opt, model, "head", as_rows(plain, "head", found), kept, 1e-2)
    assert_close(before - model.place.weight.detach(), model.place.weight.grad, 1e-9)
    assert follows_fallback(opt, "place.weight")
