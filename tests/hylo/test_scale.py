"""What the direction must not depend on: how a batch is cut, ordered, repeated or scaled, and how large images are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.kfac import assert_close, backward, noise
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.hylo import (
    LATER,
    as_rows,
    check,
    check_block,
    error,
    example_gradients,
    fisher,
    flat,
    gradients,
    greedy,
    one,
    plain_hylo,
    reduced_gradients,
    sngd,
    steepest,
    step,
    taken,
)

BUILDS = {
    "mlp": (lambda: mlp((4, 5, 3)), vectors),
    "convnet": (lambda: convnet(stride=2, padding=1), images),
    "tokens": (lambda: seeded_build(lambda: Tokens(read="mean")), lambda n: (noise(n, 5, 3), vectors(n)[1])),
}
kinds = pytest.mark.parametrize("kind", BUILDS)
approximations = pytest.mark.parametrize("approx", ["expand", "reduce"])
# Modes whose direction is a function of the set of rows; KID keeps the same rows in any order, up to ties.
ORDERLESS = {
    "sngd": {"mode": "sngd"},
    "kid": {"mode": "kid", "rank_fraction": 0.5},
    "kid full residual": {"mode": "kid", "rank_fraction": 0.4, "kid_residual": "full"},
    "kis of all": {"mode": "kis", "rank_fraction": 1.0},
}
orderless = pytest.mark.parametrize("mode", ORDERLESS)


def cross_entropy_sum(out, target):
    return F.cross_entropy(out, target, reduction="sum")


def result(model, batches, **keywords):
    """Directions of one step over ``batches`` of (x, y, loss)."""
    opt = plain_hylo(model, **keywords)
    for x, y, loss in batches:
        backward(model, x, y, loss)
    return flat(taken(opt))


@kinds
@approximations
@orderless
@pytest.mark.parametrize("parts", [2, 4])
def test_equal_micro_batches_with_the_loss_over_their_number(kind, parts, approx, mode):
    build, data = BUILDS[kind]
    x, y = data(8)
    whole = result(build(), [(x, y, F.cross_entropy)], approx=approx, **ORDERLESS[mode])
    cut = [
        (a, b, lambda out, target: F.cross_entropy(out, target) / parts)
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
    ]
    assert_close(result(build(), cut, approx=approx, **ORDERLESS[mode]), whole, 1e-8)


@kinds
@orderless
@pytest.mark.parametrize("sizes", [[1, 7], [3, 1, 4], [5, 3]], ids=str)
def test_unequal_micro_batches_with_properly_weighted_losses(kind, sizes, mode):
    build, data = BUILDS[kind]
    x, y = data(8)
    whole = result(build(), [(x, y, F.cross_entropy)], **ORDERLESS[mode])
    cut = [
        (a, b, lambda out, target: cross_entropy_sum(out, target) / 8)
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True)
    ]
    assert_close(result(build(), cut, **ORDERLESS[mode]), whole, 1e-8)


@orderless
def test_micro_batches_of_a_summed_loss(mode):
    x, y = images(8)
    keywords = {"loss_reduction": "sum", **ORDERLESS[mode]}
    whole = result(convnet(), [(x, y, cross_entropy_sum)], **keywords)
    cut = [(a, b, cross_entropy_sum) for a, b in zip(x.split([3, 5]), y.split([3, 5]), strict=True)]
    assert_close(result(convnet(), cut, **keywords), whole, 1e-8)


@approximations
@orderless
def test_micro_batches_whose_images_have_unequal_sizes(approx, mode):
    """Rows of 20 and of 12 positions, or their means, side by side."""
    (x, y), (small, target) = images(4), images(3, size=(5, 4), seed=1)
    keywords = {"approx": approx, **ORDERLESS[mode]}
    model, plain = convnet(), convnet()
    opt = plain_hylo(model, **keywords)
    for a, b in ((x, y), (small, target)):
        backward(model, a, b, lambda out, t: cross_entropy_sum(out, t) / 7)
    kept = taken(opt)
    for name in ("first", "second", "head"):
        parts = []
        for a, b in ((x, y), (small, target)):
            found = (
                reduced_gradients(plain, name, (a,), b, F.cross_entropy)
                if approx == "reduce"
                else example_gradients(plain, (a,), b, F.cross_entropy)
            )
            parts.append(as_rows(plain, name, found))
        if mode in ("sngd", "kis of all"):
            check_block(opt, model, name, torch.cat(parts, 1), kept, 1e-2)
        else:
            assert torch.isfinite(flat(kept)).all()


@kinds
@approximations
@orderless
def test_permutation_of_the_examples(kind, approx, mode):
    build, data = BUILDS[kind]
    x, y = data(8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    keywords = {"approx": approx, **ORDERLESS[mode]}
    whole = result(build(), [(x, y, F.cross_entropy)], **keywords)
    assert_close(result(build(), [(x[order], y[order], F.cross_entropy)], **keywords), whole, 1e-8)


@kinds
@approximations
@pytest.mark.parametrize("times", [2, 5])
def test_replication_of_the_batch(kind, approx, times):
    build, data = BUILDS[kind]
    x, y = data(3)
    whole = result(build(), [(x, y, F.cross_entropy)], approx=approx)
    repeated = (x.repeat(times, *[1] * (x.ndim - 1)), y.repeat(times), F.cross_entropy)
    assert_close(result(build(), [repeated], approx=approx), whole, 1e-8)


@kinds
@approximations
@orderless
def test_mean_and_summed_loss_have_one_curvature(kind, approx, mode):
    build, data = BUILDS[kind]
    x, y = data(7)
    keywords = {"approx": approx, **ORDERLESS[mode]}
    mean = result(build(), [(x, y, F.cross_entropy)], **keywords)
    total = result(build(), [(x, y, cross_entropy_sum)], loss_reduction="sum", **keywords)
    assert_close(total, 7 * mean, 1e-8)


@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits], ids=["mse", "bce"])
def test_a_mean_over_outputs_multiplies_by_their_number(loss, outputs):
    """As everywhere in the package: the curvature is that of the summed loss over the number of terms."""
    x, y = noise(6, 4), (noise(6, outputs, seed=1) > 0).double()
    model, plain = mlp((4, 3, outputs)), mlp((4, 3, outputs))
    opt = plain_hylo(model, loss_terms=outputs)
    kept = step(opt, model, x, y, loss)
    found = example_gradients(plain, (x,), y, loss)
    for name in ("0", "2"):
        check_block(opt, model, name, outputs**0.5 * as_rows(plain, name, found), kept, 1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
@pytest.mark.parametrize("exponent", [0, 7, 16])
@pytest.mark.parametrize("unscale", [False, True], ids=["as it is", "unscaled first"])
def test_loss_scale_of_a_grad_scaler(kind, mode, exponent, unscale):
    build, data = BUILDS[kind]
    x, y = data(8)
    keywords = {"mode": mode, "rank_fraction": 0.4}
    whole = result(build(), [(x, y, F.cross_entropy)], **keywords)
    model = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**exponent)
    opt = plain_hylo(model, grad_scaler=scaler, **keywords)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if unscale:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    with opt.keep_directions() as kept:
        scaler.step(opt)
    scaler.update()
    assert_close(flat(kept), whole, 1e-9)


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_a_batch_that_overflows_is_dropped(mode):
    """The rows of the last good batch stay, whatever came after them."""
    x, y = vectors(8)
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = plain_hylo(model, mode=mode, rank_fraction=0.4, grad_scaler=scaler)
    for scale in (1.0, float("inf")):
        opt.zero_grad()
        (scaler.scale(F.cross_entropy(model(x), y)) * scale).backward()
        scaler.step(opt)
        scaler.update()
    held = opt.dense_curvature("0")
    assert torch.isfinite(held).all()
    assert held.any()


@pytest.mark.parametrize("alpha", [1e-3, 8.0])
@pytest.mark.parametrize("mode", ORDERLESS)
def test_with_relative_damping_the_update_is_as_long_as_the_loss_is_small(mode, alpha):
    """F and λ go with α², V with α."""
    x, y = images()
    keywords = {"damping": 0.5, "damping_mode": "relative", **ORDERLESS[mode]}
    base = result(convnet(), [(x, y, F.cross_entropy)], **keywords)
    scaled = result(convnet(), [(x, y, lambda out, t: alpha * F.cross_entropy(out, t))], **keywords)
    assert_close(alpha * scaled, base, 1e-8)


@pytest.mark.parametrize("damping", [1e-3, 1e-1, 10.0])
def test_a_damping_means_the_same_for_one_batch_of_64_and_four_of_16(damping):
    x, y = vectors(64)
    whole = result(mlp(), [(x, y, F.cross_entropy)], damping=damping)
    cut = [(a, b, lambda o, t: F.cross_entropy(o, t) / 4) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    assert_close(result(mlp(), cut, damping=damping), whole, 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# The size of images
# ---------------------------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Circular padding and a mean over pixels: a tiled image has the gradients of one tile."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).mean((2, 3)))


@approximations
def test_a_tiled_image_is_the_same_example(approx):
    x, y = images(4, size=(3, 4))
    found = []
    for tiles in ((1, 1), (2, 3)):
        model = seeded_build(Pooled)
        found.append(result(model, [(x.repeat(1, 1, *tiles), y, F.cross_entropy)], approx=approx))
    assert_close(found[1], found[0], 1e-8)


@pytest.mark.parametrize("size", [(3, 3), (4, 3), (6, 5)], ids=str)
def test_the_published_scale_of_convolutions_divides_by_the_positions(size):
    """F is that of ``reduce`` over L²; at one position there is nothing to divide."""
    x, y = images(4, size=size)

    def build():
        return nn.Sequential(seeded_build(lambda: nn.Conv2d(2, 3, 3)), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    model, plain = build(), build()
    opt = plain_hylo(model, approx="reduce", conv_scale="hylo")
    kept = step(opt, model, x, y, F.cross_entropy)
    count = (size[0] - 2) * (size[1] - 2)
    U = as_rows(plain, "0", reduced_gradients(plain, "0", (x,), y, F.cross_entropy, per_position=True))
    whole = as_rows(plain, "0", reduced_gradients(plain, "0", (x,), y, F.cross_entropy))
    assert_close(U, whole / count, 1e-12)
    V, moved = (as_rows(model, "0", one(values))[:, 0] for values in (gradients(model), kept))
    assert_close(moved, sngd(U, V, 1e-2), 1e-8)
    assert_close(opt.dense_curvature("0"), fisher(whole)[0] / count**2, 1e-8)


def test_the_published_scale_is_for_convolutions_alone():
    x, y = noise(4, 5, 3), vectors(4)[1]
    build = BUILDS["tokens"][0]
    found = [
        result(build(), [(x, y, F.cross_entropy)], approx="reduce", conv_scale=scale) for scale in ("exact", "hylo")
    ]
    assert torch.equal(*found)


# ---------------------------------------------------------------------------------------------------------------------
# Precision
# ---------------------------------------------------------------------------------------------------------------------


def linear_rows(n, noise_level, d_in=12, d_out=8, seed=0):
    """Inputs of rank 2 and gradients of rank 1, both with noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a = normal(n, 2) @ normal(2, d_in) / 2**0.5 + noise_level * normal(n, d_in)
    g = normal(n, 1) @ normal(1, d_out) + noise_level * normal(n, d_out)
    return a, g


def in_both_precisions(noise_level, relative, **keywords):
    """Direction in float32 and float64, and that of the exact method."""
    a, g = linear_rows(64, noise_level)
    U = (g[:, :, None] * a[:, None]).flatten(1)
    damping = relative * steepest(U[None])
    found = []
    for dtype in (torch.float32, torch.float64):
        model = nn.Linear(12, 8, bias=False).to(dtype)
        opt = plain_hylo(model, damping=damping, rank_fraction=0.1, **keywords)
        kept = step(opt, model, a.to(dtype), g.to(dtype), lambda out, t: (out * t).sum(1).mean())
        assert kept["weight"].dtype == dtype
        found.append(kept["weight"].double().flatten())
    return *found, sngd(U[None], U.mean(0)[None], damping)[0]


@pytest.mark.parametrize("noise_level", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("relative", [1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("mode", ["kid", "sngd"])
def test_single_precision(noise_level, relative, mode):
    """λ down to a thousandth of the largest eigenvalue."""
    single, double, _ = in_both_precisions(noise_level, relative, mode=mode)
    assert error(single, double) <= 1e-3


@pytest.mark.parametrize("relative", [1e-3, 1e-2, 1.0])
def test_single_precision_where_it_keeps_fewer_rows(relative):
    """What is left of the kernel falls below 1e-6 of it: float32 stops there, float64 goes on."""
    single, double, exact = in_both_precisions(1e-3, relative, mode="kid")
    assert error(single, exact) <= 1.5 * error(double, exact)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("mode", ["sngd", "kid"])
def test_single_precision_of_a_network(approx, mode):
    found = []
    for dtype in (torch.float32, torch.float64):
        (x, y), model = images(12), convnet().to(dtype)
        opt = plain_hylo(model, approx=approx, mode=mode, rank_fraction=0.6)
        found.append(flat(step(opt, model, x.to(dtype), y, F.cross_entropy)).double())
    assert error(*found) <= 1e-3


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_autocast_to_bfloat16(approx, mode):
    """Rows of half the digits; the kernel and the direction are float32 all the same."""
    x, y = images(12)
    found = []
    for enabled in (False, True):
        model = convnet().float()
        opt = plain_hylo(model, approx=approx, mode=mode, rank_fraction=1.0, damping=0.1)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = model(x.float())
        F.cross_entropy(output.float(), y).backward()
        kept = taken(opt)
        assert all(value.dtype == torch.float32 for value in kept.values())
        found.append(flat(kept))
    assert error(found[1], found[0]) < 0.1


def test_parameters_of_low_precision():
    (x, y), model, plain = vectors(12), mlp().bfloat16(), mlp().bfloat16().double()
    opt = plain_hylo(model, damping=0.1)
    step(opt, model, x.bfloat16(), y, lambda out, t: F.cross_entropy(out.float(), t))
    found = example_gradients(plain, (x.bfloat16().double(),), y, F.cross_entropy)
    for name in ("0", "2"):
        held = opt.dense_curvature(name).double()
        assert error(held, fisher(as_rows(plain, name, found))[0]) < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Size
# ---------------------------------------------------------------------------------------------------------------------


def test_more_rows_than_entries_and_more_entries_than_rows():
    for widths, n in (((2, 2), 50), ((40, 30), 5)):
        x, y = vectors(n, widths[0], widths[-1])
        check(lambda widths=widths: mlp(widths), x, y, F.cross_entropy, ["0"])


def test_greedy_pivots_do_not_depend_on_the_order_of_the_rows():
    """Checks the definition itself."""
    a, g = linear_rows(30, 0.3)
    U = (g[:, :, None] * a[:, None]).flatten(1)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    first, second = greedy(U @ U.mT, 6), greedy(U[order] @ U[order].mT, 6)
    assert [int(order[i]) for i in second] == first


def test_nothing_of_a_step_between_refreshes_enters_the_next_one():
    """Rows of a refresh are those of its own step."""
    (x, y), other = vectors(), vectors(9, seed=5)
    model, plain = mlp(), mlp()
    opt = plain_hylo(model, update_steps=2)
    for batch in (other, other, (x, y)):
        kept = step(opt, model, *batch, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in ("0", "2"):
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


def test_a_forward_without_backward_leaves_nothing():
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, update_steps=LATER)
    model(x * 3)
    model.eval()
    F.cross_entropy(model(x * 5), y).backward()
    model.train()
    with torch.no_grad():
        model(x * 7)
    kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in ("0", "2"):
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)
