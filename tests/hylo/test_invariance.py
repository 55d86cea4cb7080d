"""The direction does not depend on how a batch is split, ordered, repeated or scaled, nor on the precision."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, backward, noise
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import squares
from tests.support.oracles import hylo as oracle
from tests.support.oracles.fisher import cross_entropy
from tests.support.oracles.hylo import check_block, error, flat, layer_rows, plain_hylo, sngd, step, taken, vectors_of

BUILDS = {
    "mlp": (lambda: mlp((4, 5, 3)), vectors),
    "convnet": (lambda: convnet(stride=2, padding=1), images),
    "tokens": (lambda: seeded_build(lambda: Tokens(read="mean")), lambda n: (noise(n, 5, 3), vectors(n)[1])),
}
APPROX = ["expand", "reduce"]
# Modes whose direction is a function of the set of rows; KID keeps the same rows in any order, up to ties.
ORDERLESS = {
    "sngd": {"mode": "sngd"},
    "kid": {"mode": "kid", "rank_fraction": 0.5},
    "kid-full": {"mode": "kid", "rank_fraction": 0.4, "kid_residual": "full"},
    "kis-all": {"mode": "kis", "rank_fraction": 1.0},
}


def result(model, batches, **keywords):
    """Directions of one step over ``batches`` of (x, y, loss)."""
    opt = plain_hylo(model, **keywords)
    for x, y, loss in batches:
        backward(model, x, y, loss)
    return flat(taken(opt))


@pairs(kind=list(BUILDS), approx=APPROX, mode=ORDERLESS)
def test_order_micro_batches_repetition_and_a_summed_loss_do_not_matter(kind, approx, mode):
    """Losses of micro-batches are weighted by their examples; a sum has the curvature of the mean."""
    build, data = BUILDS[kind]
    x, y = data(8)
    whole = result(build(), [(x, y, F.cross_entropy)], approx=approx, **mode)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    for sizes in ([8], [4, 4], [2, 2, 2, 2], [1, 7], [3, 1, 4]):
        parts = list(zip(x[order].split(sizes), y[order].split(sizes), strict=True))
        cut = [(a, b, lambda out, target: cross_entropy(out, target) / 8) for a, b in parts]
        assert_close(result(build(), cut, approx=approx, **mode), whole, 1e-8, str(sizes))
        summed = [(a, b, cross_entropy) for a, b in parts]
        assert_close(result(build(), summed, loss_reduction="sum", approx=approx, **mode), 8 * whole, 1e-8, str(sizes))
    exact = result(build(), [(x, y, F.cross_entropy)], approx=approx)
    for times in (2, 5):
        repeated = (x.repeat(times, *[1] * (x.ndim - 1)), y.repeat(times), F.cross_entropy)
        assert_close(result(build(), [repeated], approx=approx), exact, 1e-8, f"{times} times")


@pairs(approx=APPROX, mode=["sngd", "kis-all"])
def test_micro_batches_whose_images_have_unequal_sizes(approx, mode):
    """Rows have 20 and 12 positions."""
    parts = images(4), images(3, size=(5, 4), seed=1)
    model, plain = convnet(), convnet()
    opt = plain_hylo(model, approx=approx, **ORDERLESS[mode])
    for x, y in parts:
        backward(model, x, y, lambda out, t: cross_entropy(out, t) / 7)
    kept = taken(opt)
    for name in ("first", "second", "head"):
        U = torch.cat([layer_rows(plain, name, x, y, F.cross_entropy, approx) for x, y in parts], 1)
        check_block(opt, model, name, U, kept, 1e-2)


@each(loss={"mse": F.mse_loss, "bce": F.binary_cross_entropy_with_logits}, outputs=[2, 3])
def test_a_mean_over_outputs_multiplies_by_their_number(loss, outputs):
    """As everywhere in the package, the curvature is that of the summed loss, divided by the number of terms."""
    x, y = noise(6, 4), (noise(6, outputs, seed=1) > 0).double()
    model, plain = mlp((4, 3, outputs)), mlp((4, 3, outputs))
    opt = plain_hylo(model, loss_terms=outputs)
    kept = step(opt, model, x, y, loss)
    for name in ("0", "2"):
        check_block(opt, model, name, outputs**0.5 * layer_rows(plain, name, x, y, loss), kept, 1e-2)


def test_the_published_scale_of_convolutions_divides_by_the_positions():
    """F is that of ``reduce`` divided by L²; nothing changes at one position or in other layers."""

    def build():
        return nn.Sequential(seeded_build(lambda: nn.Conv2d(2, 3, 3)), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    for size, count in (((3, 3), 1), ((4, 3), 2), ((6, 5), 12)):
        (x, y), model, plain = images(4, size=size), build(), build()
        opt = plain_hylo(model, approx="reduce", conv_scale="hylo")
        kept = step(opt, model, x, y, F.cross_entropy)
        U = layer_rows(plain, "0", x, y, F.cross_entropy, "reduce") / count
        V, moved = vectors_of(model, "0", kept)
        assert_close(moved, sngd(U, V, 1e-2), 1e-8)
        assert_close(opt.dense_curvature("0"), oracle.fisher(U)[0], 1e-8)
    build, data = BUILDS["tokens"]
    batch = (*data(4), F.cross_entropy)
    assert torch.equal(*(result(build(), [batch], approx="reduce", conv_scale=scale) for scale in ("exact", "hylo")))


# ------------------------------------------------------------------------------------------------------------ Precision
@pairs(noise_level=[1e-3, 0.01, 0.05, 0.3], relative=[1e-3, 1e-2, 1.0], mode=["kid", "sngd"])
def test_single_precision_agrees_with_double_precision(noise_level, relative, mode):
    """λ goes down to a thousandth of the largest eigenvalue; inputs have rank 2 and gradients rank 1, both with noise.

    Once the residual is below 1e-6 of the kernel, float32 chooses no more rows, but float64 does.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a = normal(64, 2) @ normal(2, 12) / 2**0.5 + noise_level * normal(64, 12)
    g = normal(64, 1) @ normal(1, 8) + noise_level * normal(64, 8)
    U = (g[:, :, None] * a[:, None]).flatten(1)
    damping, found = relative * oracle.steepest(U[None]), []
    for dtype in (torch.float32, torch.float64):
        model = nn.Linear(12, 8, bias=False).to(dtype)
        opt = plain_hylo(model, damping=damping, rank_fraction=0.1, mode=mode)
        kept = step(opt, model, a.to(dtype), g.to(dtype), lambda out, t: (out * t).sum(1).mean())
        assert kept["weight"].dtype == dtype
        found.append(kept["weight"].double().flatten())
    single, double = found
    if noise_level == 1e-3 and mode == "kid":
        exact = sngd(U[None], U.mean(0)[None], damping)[0]
        assert error(single, exact) <= 1.5 * error(double, exact)
    else:
        assert error(single, double) <= 1e-3


def test_single_precision_does_not_get_worse_beyond_1024_rows():
    errors = {}
    for n in (1024, 1025, 1500):
        model, x, y = mlp((16, 8)), noise(n, 16), noise(n, 8, seed=50)
        U = layer_rows(model, "0", x, y, squares)
        damping = 4e-4 * float(torch.linalg.eigvalsh(U[0].T @ U[0] / n)[-1])
        single = mlp((16, 8)).float()
        kept = step(plain_hylo(single, damping=damping), single, x.float(), y.float(), squares)
        V, moved = (v.double() for v in vectors_of(single, "0", kept))
        errors[n] = error(moved, sngd(U, U.mean(1), damping))
    assert errors[1024] < 2e-3
    assert max(errors.values()) < 5 * errors[1024]


@each(approx=APPROX, mode=["sngd", "kid", "kis"])
def test_autocast_to_bfloat16(approx, mode):
    """Rows have half the digits, but the kernel and the direction are float32."""
    x, y = images(12)
    found = []
    for enabled in (False, True):
        model = convnet().float()
        opt = plain_hylo(model, approx=approx, mode=mode, rank_fraction=1.0, damping=0.1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = model(x.float())
        F.cross_entropy(output.float(), y).backward()
        kept = taken(opt)
        assert all(value.dtype == torch.float32 for value in kept.values())
        found.append(flat(kept))
    assert error(found[1], found[0]) < 0.1
