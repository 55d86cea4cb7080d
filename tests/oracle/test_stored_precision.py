"""Factors and their inverses stored in bfloat16: what is rounded, when, and the effect on directions.

Factors that are stored as triangles change only the number of bytes.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, KFAC
from tests.support import kfac
from tests.support.building import built
from tests.support.grid import each
from tests.support.kfac import all_factors, assert_close, labels, layer_state, noise, plain_kfac, train_step
from tests.support.models import mlp, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact, solve_pi
from tests.support.saving import through_a_file

LOW = {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16}
PACKED = {"factor_storage": "packed"}
METHODS = {
    "kfac eigen": (KFAC, {"inverse_method": "eigen"}),
    "kfac cholesky": (KFAC, {"inverse_method": "cholesky"}),
    "ekfac intra": (EKFAC, {}),
    "ekfac running": (EKFAC, {"estimator": "running"}),
    "ekfac qr": (EKFAC, {"estimator": "running", "basis_update": "qr"}),
}
OPTIONS = {"lr": 0.05, "factor_update_steps": 1, "inv_update_steps": 2, "damping": 0.1}


def batches(count):
    return [(noise(16, 12, seed=seed).float(), labels(16, 4, seed)) for seed in range(count)]


def start(name, **keywords):
    (cls, own), model = METHODS[name], mlp((12, 10, 4)).float()
    return model, built(cls, model, **OPTIONS, **own, **keywords)


def train(model, opt, on):
    for x, y in on:
        train_step(opt, model, x, y, F.cross_entropy)
    return model, opt


def same(model, other):
    return all(p.equal(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_the_running_mean_is_rounded_once_per_update():
    low, full = mlp((12, 10, 4)).float(), mlp((12, 10, 4)).float()
    opt = built(KFAC, low, **{**OPTIONS, "lr": 0.0}, factor_dtype=torch.bfloat16)
    expected, total = {}, 0.0
    for x, y in batches(4):
        train_step(opt, low, x, y, F.cross_entropy)
        total = 0.95 * total + 16
        share = 16 / total
        for key, factors in expected_factors(full, x, y, F.cross_entropy).items():
            kept = expected.get(key, [torch.zeros_like(f) for f in factors])
            expected[key] = [
                (k.float() * (1 - share) + share * f.float()).bfloat16() for k, f in zip(kept, factors, strict=True)
            ]
    for key, held in all_factors(opt, low).items():
        for found, wanted in zip(held, expected[key], strict=True):
            assert found.dtype == torch.bfloat16
            # the sums of the products differ by float32 rounding, which may change the last bit
            assert (found.float() - wanted.float()).abs().max() <= wanted.float().abs().max() / 128
            assert (found == wanted).double().mean() > 0.95


@each(method={"eigen": solve_exact, "cholesky": solve_pi}, which=["factor_dtype", "inv_dtype"])
def test_the_error_of_a_direction_is_rounding_times_the_condition_number(method, which):
    model, (x, y) = mlp().float(), vectors()
    inverse = "eigen" if method is solve_exact else "cholesky"
    opt = plain_kfac(model, damping=0.1, inverse_method=inverse, **{which: torch.bfloat16})
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    for name, (gradient, found) in kfac.next_directions(opt, model, x.float(), y, F.cross_entropy).items():
        A, G = expected[name]
        wanted = method(G, A, gradient.double(), 0.1)
        largest = float(torch.linalg.eigvalsh(A)[-1] * torch.linalg.eigvalsh(G)[-1])
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert 1e-6 < error < 2**-8 * (1 + largest / 0.1) * 2, name


@pytest.mark.parametrize("name", METHODS)
def test_training_with_half_the_bytes_is_similar_and_with_triangles_identical(name):
    on = batches(6) * 2

    def loss_of(model):
        with torch.no_grad():
            return float(F.cross_entropy(model(on[0][0]), on[0][1]))

    stored = {"whole": {}, "low": LOW, "packed": PACKED, "both": {**LOW, **PACKED}}
    models, opts = {}, {}
    for kind, keywords in stored.items():
        models[kind], opts[kind] = train(*start(name, **keywords), on)
    first, losses = loss_of(mlp((12, 10, 4)).float()), [loss_of(models["whole"]), loss_of(models["low"])]
    assert losses[0] < first
    assert abs(losses[1] - losses[0]) < 0.1 * (first - losses[0])
    assert same(models["whole"], models["packed"])
    assert same(models["low"], models["both"])
    assert opts["packed"].dense_curvature("0").equal(opts["whole"].dense_curvature("0"))
    assert opts["packed"].diagnostics()["damping_by_layer"] == opts["whole"].diagnostics()["damping_by_layer"]
    usage = {kind: opt.memory_usage() for kind, opt in opts.items()}
    squares, triangles = 13**2 + 10**2 + 11**2 + 4**2, (13 * 14 + 10 * 11 + 11 * 12 + 4 * 5) // 2
    bytes_of_factors = {"whole": 4 * squares, "low": 2 * squares, "packed": 4 * triangles, "both": 2 * triangles}
    assert {kind: found["factors"] for kind, found in usage.items()} == bytes_of_factors
    values = 0 if name == "kfac cholesky" else 4 * (13 + 10 + 11 + 4)  # eigenvalues stay as they are
    whole = usage["whole"]["second_order"]
    assert usage["low"]["second_order"] - values == (whole - values) / 2
    assert usage["packed"]["second_order"] == whole
    assert usage["low"].get("scale") == usage["whole"].get("scale")
    for kind, opt in opts.items():
        assert opt.plan(world_size=1).ranks[0].stored["factors"] == bytes_of_factors[kind]
    flops = [opts[kind].plan(batch_size=16).ranks[0].flops for kind in ("whole", "packed")]
    assert flops[0] == flops[1]


STORED = {"rounded": (LOW, LOW), "to packed": ({}, PACKED), "to dense": (PACKED, {})}


@each(name=list(METHODS), ways=STORED)
def test_a_checkpoint_continues_bit_for_bit_in_either_storage(name, ways):
    (first, then), on = ways, batches(7)
    model, opt = train(*start(name, **first), on[:3])
    other, second = start(name, **then)
    other.load_state_dict(through_a_file(model.state_dict()))
    second.load_state_dict(through_a_file(opt.state_dict()))
    train(model, opt, on[3:])
    train(other, second, on[3:])
    assert same(model, other)


def test_a_checkpoint_of_another_precision_is_converted():
    model, opt = train(*start("kfac eigen"), batches(3))
    other, low = start("kfac eigen", **LOW)
    low.load_state_dict(opt.state_dict())
    for key in ("factor_a", "basis_g"):
        found, kept = (layer_state(o, m, "0")[key] for o, m in ((low, other), (opt, model)))
        assert found.dtype == torch.bfloat16
        assert found.equal(kept.bfloat16())


def test_float32_means_float64_for_float64_parameters():
    model = mlp()
    opt = plain_kfac(model, factor_dtype=torch.float32, inv_dtype=torch.float32)
    train_step(opt, model, *vectors(), F.cross_entropy)
    state = layer_state(opt, model, "0")
    assert state["factor_a"].dtype == state["basis_a"].dtype == torch.float64


def test_diagonal_factors_are_stored_in_bfloat16_too():
    model, opt = train(*start("kfac cholesky", **LOW, max_factor_dim=5), batches(3))
    state = layer_state(opt, model, "0")
    assert state["factor_a"].shape == (13,)
    assert state["factor_a"].dtype == torch.bfloat16
    expected = state["factor_g"].float() * state["factor_a"][0].float()
    assert_close(opt.dense_curvature("0").diagonal().view(10, 13)[:, 0], expected)


@each(
    groups=[1, 2],
    extra={
        "plain": {},
        "diagonal": {"max_factor_dim": 5},
        "cholesky": {"inverse_method": "cholesky"},
        "model": {"quadratic_model": True},
    },
)
def test_packed_factors_of_convolutions_and_in_addition_to_diagonal_ones(groups, extra):
    (dense, _), (packed, opt) = (trained_convolution(groups, **extra, **stored) for stored in ({}, PACKED))
    assert same(dense, packed)
    keys = set(opt.state[packed[0].weight])
    assert ("packed_a" in keys) is ("max_factor_dim" not in extra)
    assert ("factor_a" in keys) is ("max_factor_dim" in extra)


def trained_convolution(groups, **keywords):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=groups), nn.Flatten(), nn.Linear(16, 3))
    opt = built(KFAC, model, **OPTIONS, **keywords)
    for seed in range(5):
        x, y = noise(8, 2, 4, 4, seed=seed).float(), labels(8, 3)
        opt.zero_grad()
        opt.step(partial(kfac.backward, model, x, y, F.cross_entropy))
    return model, opt
