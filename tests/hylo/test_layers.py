"""Every layer type, in both approximations, against the dense solve with per-example gradients.

``expand`` is exact, whatever the layer. ``reduce`` is the mean of the inputs times the sum of the gradients; where an
example has one position, or the layer's parameters have no positions, it is exact too.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.building import built
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise, twin
from tests.support.layer_cases import Attends, Pair
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
    Sometimes,
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
    fisher,
    gradients,
    layer_rows,
    plain_hylo,
    sngd,
    step,
    taken,
    vectors_of,
)
from tests.support.oracles.layers import follows_fallback, rows_by_example, singles

APPROX = ["expand", "reduce"]
approximations = pytest.mark.parametrize("approx", APPROX)


def check_against(plain, model, inputs, y, loss, names, approx="expand", given=None, **keywords):
    """A step of ``model``, fed with ``given``, against rows of another model that computes the same from ``inputs``."""
    opt = plain_hylo(model, approx=approx, **keywords)
    kept = step(opt, model, inputs if given is None else given, y, loss)
    for name in names:
        check_block(opt, model, name, layer_rows(plain, name, inputs, y, loss, approx), kept, 1e-2)


# --------------------------------------------------------------------------------------------------------------- Linear


@each(positions=[(), (1,), (4,), (2, 3)], sizes=[(2, 2), (12, 9)], bias=[True, False], approx=APPROX)
def test_linear_with_leading_dimensions(positions, sizes, bias, approx):
    d_in, d_out = sizes
    x, y = noise(4, *positions, d_in), noise(4, *positions, d_out, seed=1)
    check(lambda: nn.Sequential(seeded_build(lambda: nn.Linear(d_in, d_out, bias=bias))), x, y, squares, ["0"], approx)


def test_both_sides_of_the_cost_rule():
    """L²(d_i + d_o) exceeds d_i d_o = 80 from 3 positions on."""
    for positions in (2, 3, 30):
        x, y = noise(5, positions, 9), noise(5, positions, 8, seed=1)
        check(lambda: nn.Sequential(seeded_build(lambda: nn.Linear(9, 8))), x, y, squares, ["0"])


@approximations
def test_tokens_in_the_batch_axis_still_belong_to_their_example(approx):
    """Reduced rows are those of the layer that sees ``[N, S]``."""
    model = seeded_build(Flattened)
    plain = nn.Sequential()
    for name, layer in twin(model).named_children():
        plain.add_module(name, layer)
        if name == "inner":
            plain.add_module("act", nn.Tanh())
    check_against(plain, model, noise(4, 5, 3), noise(4, 5, 2, seed=1), squares, ["inner", "outer"], approx)


@approximations
def test_tokens(approx):
    x = noise(4, 5, 3)
    for read, y in (("positions", labels(20, 3).view(4, 5)), ("mean", labels(4, 3))):
        check(lambda r=read: seeded_build(lambda: Tokens(read=r)), x, y, F.cross_entropy, ["inner"], approx)


def test_examples_on_the_second_axis():
    model, plain = seeded_build(lambda: Sequence(True)), seeded_build(lambda: Sequence(False))
    x, names = noise(5, 4, 3), ["inner", "outer"]
    check_against(plain, model, x, labels(5, 3), F.cross_entropy, names, given=x.transpose(0, 1), batch_dim=1)


@approximations
def test_masked_positions_make_no_rows(approx):
    """Reduced rows have the mean over the real positions of each example."""
    x, y, lengths = noise(4, 5, 3), labels(20, 3).view(4, 5), [5, 3, 4, 2]
    keep = torch.arange(5) < torch.tensor(lengths)[:, None]

    def loss(output, target):
        """The loss of targets that come with their mask."""
        return (F.cross_entropy(output, target[..., 0], reduction="none") * target[..., 1]).sum(1).mean()

    model, plain, targets = seeded_build(Tokens), seeded_build(Tokens), torch.stack([y, keep.long()], -1)
    opt = plain_hylo(model, approx=approx)
    with opt.mask(keep):
        output = model(x)
    loss(output, targets).backward()
    kept = taken(opt)
    for name in ("inner", "outer"):
        singles_ = [(x[n : n + 1, :length], targets[n : n + 1, :length]) for n, length in enumerate(lengths)]
        U = torch.cat([layer_rows(plain, name, *example, loss, approx) for example in singles_], 1)
        check_block(opt, model, name, U, kept, 1e-2)


# --------------------------------------------------------------------------------------------------------- Convolutions

# Class, channels, image size and keywords.
CONVOLUTIONS = {
    **{f"{a}-d": (CONVS[a], (2, 3), SIZES[a], {"padding": a % 2}) for a in (1, 2, 3)},
    **{f"{a}-d same": (CONVS[a], (2, 3), SIZES[a], {"padding": "same", "kernel_size": 3}) for a in (1, 2, 3)},
    "other padding": (nn.Conv2d, (2, 3), (5, 4), {"padding": 1, "padding_mode": "circular"}),
    "stride": (nn.Conv1d, (4, 4), (7,), {"stride": 3, "padding": 1, "bias": False}),
    "dilation": (nn.Conv1d, (4, 4), (7,), {"dilation": 2, "groups": 2, "padding": 1, "bias": False}),
    "strides by axis": (nn.Conv2d, (4, 4), (5, 4), {"stride": (2, 1), "dilation": (1, 2), "padding": 1}),
    "strides and groups": (nn.Conv2d, (4, 4), (5, 4), {"stride": (1, 3), "dilation": 2, "groups": 2, "padding": 1}),
    "3-d groups": (nn.Conv3d, (4, 4), (3, 4, 3), {"stride": (1, 2, 1), "groups": 2, "padding": 1}),
    "depthwise": (nn.Conv2d, (4, 4), (5, 4), {"groups": 4, "kernel_size": 3}),
    "depthwise, two each": (nn.Conv2d, (4, 8), (5, 4), {"groups": 4, "kernel_size": 3, "bias": False}),
    # 54 · 14 = 756 against L² · 69 of 1, 3 and 9 positions, and a layer with more positions than features.
    "more positions than features": (nn.Conv2d, (1, 2), (5, 4), {"kernel_size": 3}),
    **{f"{s} pixels": (nn.Conv2d, (6, 14), s, {"kernel_size": 3}) for s in ((3, 3), (3, 5), (5, 5))},
    **{f"{a}-d transposed": (TRANSPOSED[a], (2, 4), SIZES[a], {"groups": 1 + a % 2}) for a in (1, 2, 3)},
    "strided, transposed": (nn.ConvTranspose2d, (2, 4), (5, 4), {"stride": 2, "padding": 1, "output_padding": 1}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case):
    kind, channels, size, keywords = CONVOLUTIONS[case]

    def build():
        return nn.Sequential(seeded_build(lambda: built(kind, *channels, **{"kernel_size": 2, **keywords})))

    x = noise(3, channels[0], *size)
    for approx in APPROX:
        check(build, x, noise(*build()(x).shape, seed=1), squares, ["0"], approx)


@each(frozen=["weight", "bias"], kind=["linear", "conv", "groups", "norm"], approx=APPROX)
def test_frozen_parts(frozen, kind, approx):
    def build():
        if kind == "norm":
            model = seeded_build(NORMED["LayerNorm tokens"][0])
        elif kind == "linear":
            model = nn.Sequential(seeded_build(lambda: nn.Linear(3, 5)))
        else:
            model = nn.Sequential(seeded_build(lambda: nn.Conv2d(2, 4, 2, groups=1 + (kind == "groups"))))
        getattr(model.norm if kind == "norm" else model[0], frozen).requires_grad_(False)
        return model

    if kind == "norm":
        check(build, noise(6, 3, 4), labels(6, 3), F.cross_entropy, ["norm"], damping=1e-4)
        return
    x = noise(3, 2, 4, 3)
    check(build, x, noise(*build()(x).shape, seed=1), squares, ["0"], approx)


@approximations
def test_a_network_of_convolutions(approx):
    check(lambda: convnet(stride=2, padding=1), *images(), F.cross_entropy, ["first", "second", "head"], approx)


# ------------------------------------------------------------------------------------------ Several calls, tied weights


@each(times=[2, 3], tied=[False, True], tokens=[False, True], approx=APPROX)
def test_calls_of_one_module_and_two_modules_with_one_weight(times, tied, tokens, approx):
    model, plain = (seeded_build(lambda t=t: Repeated(t, times)) for t in (tied, False))
    plain.load_state_dict(model.state_dict())
    x = noise(5, 3, 4) if tokens else noise(5, 4)
    check_against(plain, model, x, labels(5, 3), F.cross_entropy, ["layer", "head"], approx)


@approximations
def test_calls_with_unequal_numbers_of_positions(approx):
    check(lambda: seeded_build(RepeatedConv), *images(), F.cross_entropy, ["conv", "head"], approx)


def test_a_layer_that_a_step_does_not_reach():
    """It keeps its last rows, and the other layers are updated."""
    x, y = vectors()
    model, plain = seeded_build(Sometimes), seeded_build(Sometimes)
    opt = plain_hylo(model)
    step(opt, model, x, y, F.cross_entropy)
    before = opt.dense_curvature("second")
    model.both = plain.both = False
    kept = step(opt, model, x, y, F.cross_entropy)
    for name in ("first", "head"):
        check_block(opt, model, name, layer_rows(plain, name, x, y, F.cross_entropy), kept, 1e-2)
    assert_close(opt.dense_curvature("second"), before, 1e-12)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.always = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, through):
        return self.always(self.sometimes(x) if through else x)


@each(mode=["kid", "kis", "sngd"], fraction=[0.1, 1.0])
def test_a_layer_that_only_some_micro_batches_use(mode, fraction):
    """Its rows are those of the examples that used it, but F is the mean over all examples of the step."""
    model = Branching().double()
    opt = plain_hylo(model, mode=mode, rank_fraction=fraction, damping=0.1)
    x, _ = vectors(16)
    for part, through in zip(x.chunk(2), (True, False), strict=True):
        (model(part, through).square().sum(1).mean() / 2).backward()
    kept = taken(opt)
    assert opt.diagnostics()["rank"]["sometimes"] == (2 if fraction == 0.1 and mode != "sngd" else 8)
    if mode == "sngd" or fraction == 1.0:
        with torch.no_grad():
            g = 2 * model(x[:8], True) @ model.always.weight
        u = (g[:, :, None] * torch.cat([x[:8], torch.ones(8, 1).double()], 1)[:, None, :]).flatten(1)
        expected = torch.linalg.solve(u.T @ u / 16 + 0.1 * torch.eye(20).double(), u.sum(0) / 16).view(4, 5)
        assert_close(kept["sometimes.weight"], expected[:, :4])


# ----------------------------------------------------------------------------------------------------------- Embeddings


def test_embedding():
    """Gradients of a word that occurs twice in an example are added before they are squared; padding has none."""
    for padding_idx in (None, 0, 3):
        build = lambda p=padding_idx: seeded_build(lambda: Words(p))  # noqa: E731
        opt, _ = check(build, TOKENS, labels(5, 3), F.cross_entropy, ["words", "head"], at_once=False)
        if padding_idx is not None:
            assert not opt.dense_curvature("words").view(6, 3, 6, 3)[padding_idx].any()
        assert "fallback" not in opt.describe()
    check(lambda: seeded_build(Words), TOKENS[:, 0], labels(5, 3), F.cross_entropy, ["words", "head"], at_once=False)


def output_gradients(model, index, y):
    """Gradient of one example's loss at the output of the table, ``[S, d]`` or, for a bag, ``[1, d]``."""
    seen = []
    handle = model.words.register_forward_hook(lambda _, args, z: seen.append(z))
    value = F.cross_entropy(model(index[None]), y[None])
    handle.remove()
    return torch.autograd.grad(value, seen[0])[0].reshape(-1, 3)


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_reduced_rows_of_an_embedding(padding_idx):
    """They are the frequencies of an example's words times the sum of the gradients; padding counts in neither."""
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


class Table(nn.Module):
    def __init__(self, entries=8193, d=2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(entries, d), nn.Linear(d, 3)

    def forward(self, index):
        return self.head(torch.tanh(self.words(index)).mean(1))


@approximations
def test_the_rows_of_a_large_table_are_exact(approx):
    """Beyond 8192 entries no vector is as long as the table, so nothing is reduced."""
    model, plain, y = seeded_build(Table), seeded_build(Table), labels(5, 3)
    kept = step(plain_hylo(model, approx=approx), model, TOKENS, y, F.cross_entropy)
    U = one_by_one(plain, TOKENS, y, F.cross_entropy)["words.weight"][:, :6].flatten(1)[None]
    V, moved = (values["words.weight"].detach()[:6].reshape(1, -1) for values in (gradients(model), kept))
    assert_close(moved, sngd(U, V, 1e-2), 1e-8)
    assert not kept["words.weight"][6:].any()


@each(lengths={"5-7": (5, 7), "7-5": (7, 5), "7-3-9": (7, 3, 9)}, cheaper=[False, True])
def test_a_table_of_six_and_micro_batches_of_different_lengths(lengths, cheaper):
    """Rows are indices with fewer positions than the table has columns, and per-example gradients with more."""
    model, plain = (seeded_build(lambda: Table(6, 4)) for _ in range(2))
    opt = plain_hylo(model, kfac_when_cheaper=cheaper)
    found = []
    for seed, length in enumerate(lengths):
        x, y = labels(4 * length, 6, seed).reshape(4, length), labels(4, 3, seed)
        (F.cross_entropy(model(x), y) / len(lengths)).backward()
        found.append(layer_rows(plain, "words", x, y, F.cross_entropy, at_once=False))
    V, moved = vectors_of(model, "words", taken(opt))
    assert_close(moved, sngd(torch.cat(found, 1), V, 1e-2), 1e-8)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_is_one_row_and_is_not_expanded(mode):
    """Reduced, it is exact. Expanded, it follows the fallback rule, with a reason, and other layers stay exact."""
    (first, second, plain), y = (seeded_build(lambda: Words(bag=mode)) for _ in range(3)), labels(5, 3)
    opt = plain_hylo(first, approx="reduce")
    kept = step(opt, first, TOKENS, y, F.cross_entropy)
    found = one_by_one(plain, TOKENS, y, F.cross_entropy)
    for name in ("words", "head"):
        check_block(opt, first, name, as_rows(plain, name, found), kept, 1e-2)
    opt = plain_hylo(second, lr=1.0)
    with pytest.warns(UserWarning, match="words: .*bags .* approx='reduce'"):
        kept = step(opt, second, TOKENS, y, F.cross_entropy)
    check_block(opt, second, "head", as_rows(plain, "head", found), kept, 1e-2)
    assert follows_fallback(opt, "words.weight", "bags")
    assert_close(plain.words.weight.detach() - second.words.weight.detach(), second.words.weight.grad, 1e-9)


def test_a_batch_of_padding_only():
    model = seeded_build(lambda: Words(0))
    opt = plain_hylo(model, lr=0.1)
    for _ in range(2):
        kept = step(opt, model, torch.zeros(5, 4, dtype=torch.int64), labels(5, 3), F.cross_entropy)
        assert not kept["words.weight"].any()
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ------------------------------------------------------------------------------------ Attention, products of two inputs


def from_tape(rows, approx):
    """``[1, N, k]`` from the rows of one product of a model that is written by hand."""
    found = []
    for n in range(len(rows.a)):
        a, g = rows.a[n][0], rows.g[n][0]
        found.append(torch.outer(g.sum(0), a.mean(0)) if approx == "reduce" else g.mT @ a)
    return torch.stack(found).flatten(1)[None]


def product(values, weight, bias, parts=1):
    """``[parts, k]`` from a weight and a bias."""
    found = [values[weight].detach()]
    if bias in values:
        found.append(values[bias].detach()[:, None])
    return torch.cat(found, 1).reshape(parts, -1)


@each(batch_first=[True, False], bias=[True, False], approx=APPROX)
def test_each_projection_of_attention_is_a_block_of_its_own(batch_first, bias, approx):
    model = seeded_build(lambda: Attends(batch_first=batch_first, bias=bias))
    plain, x, y = twin(model), noise(4, 3, 4), labels(4, 3)
    rows = rows_by_example(plain.by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_hylo(model, approx=approx, batch_dim=0 if batch_first else 1)
    kept = step(opt, model, x if batch_first else x.transpose(0, 1), y, F.cross_entropy)
    U = torch.cat([from_tape(rows[f"attn.{part}"], approx) for part in "qkv"])
    V, moved = (product(v, "attn.in_proj_weight", "attn.in_proj_bias", 3) for v in (gradients(model), kept))
    compare(opt, "attn.in_proj", U, V, moved, 1e-2)
    check_block(opt, model, "attn.out_proj", from_tape(rows["attn.out"], approx), kept, 1e-2)
    check_block(opt, model, "head", from_tape(rows["head"], approx), kept, 1e-2)


@approximations
def test_bilinear(approx):
    names = ["left", "both", "head"]
    for lead in ((), (4,)):
        inputs = noise(5, *lead, 3), noise(5, *lead, 2, seed=1)
        check(lambda: seeded_build(lambda: Pair(True)), inputs, labels(5, 3), F.cross_entropy, names, approx, False)


# ---------------------------------------------------------------------------------------------------------- Norm layers


@approximations
def test_a_norm_layer_is_one_dense_block(approx):
    """It holds all units and is exact in both approximations."""
    for build, data in NORMED.values():
        check(lambda b=build: seeded_build(b), data(), labels(6, 3), F.cross_entropy, ["norm"], approx, damping=1e-4)


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
    V, moved = vectors_of(model, "norm", kept)
    assert_close(moved, sngd(U, V, 1e-4), 1e-7)
    assert_close(opt.dense_curvature("norm"), dense(fisher(U)), 1e-8)


# ---------------------------------------------------------------- Memory layouts and what models do around their layers

CHANGES = {
    "in place": ({"inplace": True}, lambda x: x),
    "in place and views": ({"inplace": True, "odd": True}, lambda x: x),
    "channels last": ({}, lambda x: x.contiguous(memory_format=torch.channels_last)),
    "transposed": ({}, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    "strided": ({}, lambda x: torch.stack([x, x], -1)[..., 0]),
    "expanded": ({}, lambda x: x[:, :, :1].expand_as(x)),
}


@approximations
def test_in_place_activations_views_and_memory_layouts_change_nothing(approx):
    for change, (options, layout) in CHANGES.items():
        (x, y), model, names = images(), around(**options), ["conv", "mid", "head"]
        if change == "channels last":
            model = model.to(memory_format=torch.channels_last)
        given = layout(x)
        check_against(around(), model, given.contiguous(), y, F.cross_entropy, names, approx, given)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_count_once(reentrant):
    (x, y), model = vectors(), mlp((4, 5, 5, 3))
    plain = copy.deepcopy(model)
    opt = plain_hylo(model)
    z = checkpoint(model[1:3], model[0](x), use_reentrant=reentrant)
    F.cross_entropy(model[3:](z), y).backward()
    kept = taken(opt)
    for name in ("0", "2", "4"):
        check_block(opt, model, name, layer_rows(plain, name, x, y, F.cross_entropy), kept, 1e-2)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(x + self.place(torch.arange(4)))).mean(1)


def test_position_embeddings_that_all_examples_share_follow_the_fallback():
    """They are looked up once for the batch; only that layer follows the fallback rule, with a reason."""
    model, plain = seeded_build(Positions), seeded_build(Positions)
    x, y = noise(5, 4, 3), labels(5, 3)
    opt = plain_hylo(model, lr=1.0)
    with pytest.warns(UserWarning, match="place: .* shared by the whole batch"):
        kept = step(opt, model, x, y, F.cross_entropy)
    check_block(opt, model, "head", layer_rows(plain, "head", x, y, F.cross_entropy, at_once=False), kept, 1e-2)
    assert_close(plain.place.weight.detach() - model.place.weight.detach(), model.place.weight.grad, 1e-9)
    assert follows_fallback(opt, "place.weight")
