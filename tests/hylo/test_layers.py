"""Every layer type, in both approximations, against the dense solve with per-example gradients.

``expand`` is exact, whatever the layer. ``reduce`` is the mean of the inputs times the sum of the gradients; where an
example has one position, or the layer's parameters have no positions, it is exact too.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise
from tests.support.layer_cases import CASES, ONE_OF_EACH
from tests.support.models import Net, Tokens, images, seeded_build, vectors
from tests.support.networks import NORMED, TOKENS, Normed, Sometimes, Words, around, squares
from tests.support.oracles import hylo as oracle
from tests.support.oracles.ekfac import example_gradients
from tests.support.oracles.hylo import check, check_block, compare, layer_rows, plain_hylo, sngd, step, taken
from tests.support.oracles.layers import follows_fallback

APPROX = ["expand", "reduce"]
approximations = pytest.mark.parametrize("approx", APPROX)

# ------------------------------------------------------------------------------------------------- Every type of layer
#: Layers that do not know which rows belong to which example have no gradients of examples.
KINDS = [name for name, case in CASES.items() if not case.expand_only]
#: Lookup tables have rows of their own kind, and patches are formed in several ways.
DEFAULT = {
    *ONE_OF_EACH, "linear-no-bias", "conv1d", "conv2d-depthwise", "conv3d", "embedding-called-twice",
    "embedding-one-index", "bag-mean-padding", "attention-no-bias", "attention-positions-first", "bilinear",
    "attention-checkpointed",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in KINDS])
def test_every_kind_of_layer(name):
    """Rows are those of networks that are written by hand."""
    case = CASES[name]
    (inputs, y), is_bag = case.data(), "bag" in name
    for approx in APPROX[is_bag:]:  # bags are one row and are not expanded
        model = case.ready(case.model())
        opt = plain_hylo(model, approx=approx, damping=1e-3, **case.keywords)
        kept = step(opt, model, inputs, y, case.loss)
        moved = {p: kept[name] for name, p in model.named_parameters() if name in kept}
        for block, groups in case.rows(case.model()).items():
            of_examples = (torch.cat([rows.gradient(n, approx) for rows in groups]) for n in range(case.number))
            U = torch.stack([*of_examples], 1)
            V, u = (case.matrix(model, block, read) for read in (lambda p: p.grad, moved.get))
            if block in case.tables:  # the dense curvature has the order of the weight, which is transposed
                U, V, u = U.mT, V.mT, u.mT
            compare(opt, block, U.flatten(2), V.flatten(1), u.flatten(1), 1e-3)


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


@approximations
def test_both_sides_of_the_cost_rule(approx):
    """Pairs of positions cost L² · 69, whole gradients 54 · 14 = 756."""

    def build():
        return nn.Sequential(seeded_build(lambda: nn.Conv2d(6, 14, 3)))

    for size in ((3, 3), (3, 5), (5, 5)):
        x = noise(3, 6, *size)
        check(build, x, noise(*build()(x).shape, seed=1), squares, ["0"], approx)


@each(frozen=["weight", "bias"], kind=["linear", "conv", "groups", "norm"], approx=APPROX)
def test_frozen_parts(frozen, kind, approx):
    layer, shape = {
        "linear": (lambda: nn.Linear(3, 5), (3, 2, 4, 3)),
        "conv": (lambda: nn.Conv2d(2, 4, 2), (3, 2, 4, 3)),
        "groups": (lambda: nn.Conv2d(2, 4, 2, groups=2), (3, 2, 4, 3)),
        "norm": (lambda: nn.LayerNorm(4), (6, 3, 4)),
    }[kind]

    def build():
        model = nn.Sequential(seeded_build(layer))
        getattr(model[0], frozen).requires_grad_(False)
        return model

    x = noise(*shape)
    check(build, x, noise(*build()(x).shape, seed=1), squares, ["0"], approx)


# --------------------------------------------------------------- Layers that only some steps and micro-batches reach
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


def branching() -> Net:
    layers = {"sometimes": nn.Linear(4, 4), "always": nn.Linear(4, 2)}
    return Net(lambda net, x, through: net.always(net.sometimes(x) if through else x), **layers)


@each(mode=["kid", "kis", "sngd"], fraction=[0.1, 1.0])
def test_a_layer_that_only_some_micro_batches_use(mode, fraction):
    """Its rows are those of the examples that used it, but F is the mean over all examples of the step."""
    model = branching().double()
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
def table(entries: int = 8193, d: int = 2) -> Net:
    layers = {"words": nn.Embedding(entries, d), "head": nn.Linear(d, 3)}
    return Net(lambda net, index: net.head(torch.tanh(net.words(index)).mean(1)), **layers)


@approximations
def test_the_rows_of_a_large_table_are_exact(approx):
    """Beyond 8192 entries no vector is as long as the table, so nothing is reduced."""
    model, plain, y = seeded_build(table), seeded_build(table), labels(5, 3)
    kept = step(plain_hylo(model, approx=approx), model, TOKENS, y, F.cross_entropy)
    U = example_gradients(plain, TOKENS, y, F.cross_entropy)["words.weight"][:, :6].flatten(1)[None]
    V, moved = (values["words.weight"].detach()[:6].reshape(1, -1) for values in (oracle.gradients(model), kept))
    assert_close(moved, sngd(U, V, 1e-2), 1e-8)
    assert not kept["words.weight"][6:].any()


@each(lengths={"5-7": (5, 7), "7-5": (7, 5), "7-3-9": (7, 3, 9)}, cheaper=[False, True])
def test_a_table_of_six_and_micro_batches_of_different_lengths(lengths, cheaper):
    """Rows are indices with fewer positions than the table has columns, and per-example gradients with more."""
    model, plain = (seeded_build(lambda: table(6, 4)) for _ in range(2))
    opt = plain_hylo(model, kfac_when_cheaper=cheaper)
    found = []
    for seed, length in enumerate(lengths):
        x, y = labels(4 * length, 6, seed).reshape(4, length), labels(4, 3, seed)
        (F.cross_entropy(model(x), y) / len(lengths)).backward()
        found.append(layer_rows(plain, "words", x, y, F.cross_entropy))
    V, moved = oracle.vectors_of(model, "words", taken(opt))
    assert_close(moved, sngd(torch.cat(found, 1), V, 1e-2), 1e-8)


def positions() -> Net:
    layers = {"words": nn.Embedding(4, 3), "head": nn.Linear(3, 3)}
    return Net(lambda net, x: net.head(torch.tanh(x + net.words(torch.arange(4)))).mean(1), **layers)


@pytest.mark.parametrize(
    ("build", "x", "reason"),
    [
        (lambda: Words(bag="sum"), TOKENS, "words: .*bags .* approx='reduce'"),
        (positions, noise(5, 4, 3), "words: .* shared by the whole batch"),  # they are looked up once
    ],
    ids=["bag", "positions"],
)
def test_only_a_table_without_rows_of_examples_follows_the_fallback(build, x, reason):
    (model, plain), y = (seeded_build(build) for _ in range(2)), labels(5, 3)
    opt = plain_hylo(model, lr=1.0)
    with pytest.warns(UserWarning, match=reason):
        kept = step(opt, model, x, y, F.cross_entropy)
    check_block(opt, model, "head", layer_rows(plain, "head", x, y, F.cross_entropy), kept, 1e-2)
    assert follows_fallback(opt, "words.weight", "bags" if "bags" in reason else "")
    assert_close(plain.words.weight.detach() - model.words.weight.detach(), model.words.weight.grad, 1e-9)


def test_a_batch_of_padding_only():
    model = seeded_build(lambda: Words(0))
    opt = plain_hylo(model, lr=0.1)
    for _ in range(2):
        kept = step(opt, model, torch.zeros(5, 4, dtype=torch.int64), labels(5, 3), F.cross_entropy)
        assert not kept["words.weight"].any()
    assert all(torch.isfinite(p).all() for p in model.parameters())


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
    check_block(opt, model, "norm", layer_rows(plain, "norm", x, y, F.cross_entropy), kept, 1e-4)


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
        (x, y), model, plain = images(), around(**options), around()
        if change == "channels last":
            model = model.to(memory_format=torch.channels_last)
        given, opt = layout(x), plain_hylo(model, approx=approx)
        kept = step(opt, model, given, y, F.cross_entropy)
        for name in ("conv", "mid", "head"):
            U = layer_rows(plain, name, given.contiguous(), y, F.cross_entropy, approx)
            check_block(opt, model, name, U, kept, 1e-2)
