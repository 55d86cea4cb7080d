"""Factors and what is found from them, kept in bfloat16: what is rounded, when, and what that does to a direction.
And factors kept as triangles, which changes nothing but their bytes."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, KFAC
from tests.support.grid import each
from tests.support.kfac import all_factors, assert_close, backward, directions, layer_state, plain_kfac, train_step
from tests.support.models import mlp, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact, solve_pi

LOW = {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16}
METHODS = {
    "kfac eigen": (KFAC, {"inverse_method": "eigen"}),
    "kfac cholesky": (KFAC, {"inverse_method": "cholesky"}),
    "ekfac intra": (EKFAC, {}),
    "ekfac running": (EKFAC, {"estimator": "running"}),
    "ekfac qr": (EKFAC, {"estimator": "running", "basis_update": "qr"}),
}
every_method = pytest.mark.parametrize("name", METHODS)
OPTIONS = {"lr": 0.05, "factor_update_steps": 1, "inv_update_steps": 2, "damping": 0.1}


def _batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(16, 12, generator=generator), torch.randint(4, (16,), generator=generator)) for _ in range(count)
    ]


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))


def _train(name, batches, model=None, opt=None, **keywords):
    cls, own = METHODS[name]
    model = _net() if model is None else model
    opt = cls(model, **OPTIONS, **own, **keywords) if opt is None else opt
    for x, y in batches:
        train_step(opt, model, x, y, F.cross_entropy)
    return model, opt


def test_the_running_mean_is_rounded_once_an_update():
    """The same factors as a second optimizer measures them in full, folded and rounded by hand."""
    low, full = _net(), _net()
    opt = KFAC(low, **{**OPTIONS, "lr": 0.0}, factor_dtype=torch.bfloat16)
    expected = {}
    for x, y in _batches(4):
        train_step(opt, low, x, y, F.cross_entropy)
        weight = 16.0
        for key, factors in expected_factors(full, x, y, F.cross_entropy).items():
            old, kept = expected.get(key, (0.0, [torch.zeros_like(f) for f in factors]))
            share = weight / (old * 0.95 + weight)
            kept = [
                (k.float() * (1 - share) + share * f.float()).bfloat16() for k, f in zip(kept, factors, strict=True)
            ]
            expected[key] = old * 0.95 + weight, kept
    for key, (A, G) in all_factors(opt, low).items():
        assert A.dtype == G.dtype == torch.bfloat16
        for found, wanted in zip((A, G), expected[key][1], strict=True):
            # the sums of the products differ by float32 rounding, which may turn a last bit
            assert (found.float() - wanted.float()).abs().max() <= wanted.float().abs().max() / 128
            assert (found == wanted).double().mean() > 0.95


@pytest.mark.parametrize(("method", "solve"), [("eigen", solve_exact), ("cholesky", solve_pi)])
@pytest.mark.parametrize("which", ["factor_dtype", "inv_dtype"])
def test_a_direction_is_off_by_rounding_times_the_condition_number(method, solve, which):
    model, (x, y) = mlp().float(), vectors()
    opt = plain_kfac(model, damping=0.1, inverse_method=method, **{which: torch.bfloat16})
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    backward(model, x.float(), y, F.cross_entropy)
    for name, (gradient, found) in directions(opt, model).items():
        A, G = expected[name]
        wanted = solve(G, A, gradient.double(), 0.1)
        largest = float(torch.linalg.eigvalsh(A)[-1] * torch.linalg.eigvalsh(G)[-1])
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert 1e-6 < error < 2**-8 * (1 + largest / 0.1) * 2, name


@every_method
def test_half_the_bytes(name):
    _, full = _train(name, _batches(2))
    _, low = _train(name, _batches(2), **LOW)
    whole, half = full.memory_usage(), low.memory_usage()
    assert 2 * half["factors"] == whole["factors"] == 4 * (13**2 + 10**2 + 11**2 + 4**2)
    values = 0 if name == "kfac cholesky" else 4 * (13 + 10 + 11 + 4)  # eigenvalues stay as they are
    assert half["second_order"] - values == (whole["second_order"] - values) / 2
    assert half.get("scale") == whole.get("scale")
    assert low.plan(world_size=1).ranks[0].stored["factors"] == half["factors"]


@every_method
def test_training_goes_the_same_way(name):
    batches = _batches(6) * 3

    def loss_of(model):
        with torch.no_grad():
            return float(F.cross_entropy(model(batches[0][0]), batches[0][1]))

    start, losses = loss_of(_net()), [loss_of(_train(name, batches, **keywords)[0]) for keywords in ({}, LOW)]
    assert losses[0] < start
    assert abs(losses[1] - losses[0]) < 0.1 * (start - losses[0])


@every_method
def test_a_checkpoint_goes_on_to_the_bit(name):
    batches = _batches(7)
    model, opt = _train(name, batches[:3], **LOW)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    cls, own = METHODS[name]
    other = _net()
    other.load_state_dict(saved["model"])
    second = cls(other, **OPTIONS, **own, **LOW)
    second.load_state_dict(saved["opt"])
    _train(name, batches[3:], model, opt)
    _train(name, batches[3:], other, second)
    assert all(p.equal(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_checkpoint_of_another_precision_is_converted():
    model, opt = _train("kfac eigen", _batches(3))
    other = _net()
    low = KFAC(other, **OPTIONS, **LOW)
    low.load_state_dict(opt.state_dict())
    for key in ("factor_a", "basis_g"):
        found, kept = (layer_state(o, m, "0")[key] for o, m in ((low, other), (opt, model)))
        assert found.dtype == torch.bfloat16
        assert found.equal(kept.bfloat16())


def test_float32_means_float64_for_float64_parameters():
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, factor_dtype=torch.float32, inv_dtype=torch.float32)
    train_step(opt, model, x, y, F.cross_entropy)
    state = layer_state(opt, model, "0")
    assert state["factor_a"].dtype == state["basis_a"].dtype == torch.float64


@each(keyword=["factor_dtype", "inv_dtype"], cls=[KFAC, EKFAC])
def test_other_types_are_refused(cls, keyword):
    with pytest.raises(ValueError, match=f"{keyword} must be torch.float32 or torch.bfloat16, got torch.float16"):
        cls(_net(), **{keyword: torch.float16})
    with pytest.raises(TypeError, match=f"{keyword} must be torch.float32 or torch.bfloat16, got 'bfloat16'"):
        cls(_net(), **{keyword: "bfloat16"})


def test_diagonal_factors_are_kept_so_too():
    model = _net()
    opt = KFAC(model, **OPTIONS, **LOW, max_factor_dim=5, inverse_method="cholesky")
    for x, y in _batches(3):
        train_step(opt, model, x, y, F.cross_entropy)
    state = layer_state(opt, model, "0")
    assert state["factor_a"].shape == (13,)
    assert state["factor_a"].dtype == torch.bfloat16
    assert_close(
        opt.dense_curvature("0").diagonal().view(10, 13)[:, 0], state["factor_g"].float() * state["factor_a"][0].float()
    )


# ---------------------------------------------------------------------------------------------------------------------
# Triangles
# ---------------------------------------------------------------------------------------------------------------------

PACKED = {"factor_storage": "packed"}


def _same(model, other):
    return all(p.equal(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@every_method
def test_packed_factors_are_the_same_to_the_bit(name):
    batches = _batches(9)
    (dense, opt), (packed, other) = (_train(name, batches, **keywords) for keywords in ({}, PACKED))
    assert _same(dense, packed)
    assert other.dense_curvature("0").equal(opt.dense_curvature("0"))
    assert other.diagnostics()["damping_by_layer"] == opt.diagnostics()["damping_by_layer"]
    whole, half = opt.memory_usage(), other.memory_usage()
    assert half["factors"] == 4 * (13 * 14 + 10 * 11 + 11 * 12 + 4 * 5) // 2
    assert half["second_order"] == whole["second_order"]
    assert other.plan(world_size=1).ranks[0].stored["factors"] == half["factors"]
    assert other.plan(batch_size=16).ranks[0].flops == opt.plan(batch_size=16).ranks[0].flops


@each(
    groups=[1, 2],
    extra={
        "plain": {},
        "diagonal": {"max_factor_dim": 5},
        "cholesky": {"inverse_method": "cholesky"},
        "model": {"quadratic_model": True},
    },
)
def test_packed_factors_of_convolutions_and_beside_diagonal_ones(groups, extra):
    def run(**keywords):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=groups), nn.Flatten(), nn.Linear(16, 3))
        opt = KFAC(model, **OPTIONS, **extra, **keywords)
        for seed in range(5):
            x = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(seed))

            def closure(x=x):
                opt.zero_grad()
                value = F.cross_entropy(model(x), torch.arange(8) % 3)
                value.backward()
                return value

            opt.step(closure)
        return model, opt

    (dense, _), (packed, opt) = run(), run(**PACKED)
    assert _same(dense, packed)
    keys = set(opt.state[packed[0].weight])
    assert ("packed_a" in keys) is (extra.get("max_factor_dim") is None)
    assert ("factor_a" in keys) is (extra.get("max_factor_dim") is not None)


@each(name=list(METHODS), ways={"to packed": ({}, PACKED), "to dense": (PACKED, {})})
def test_checkpoints_of_either_storage_are_taken(name, ways):
    first, then = ways
    batches = _batches(7)
    model, opt = _train(name, batches[:3], **first)
    cls, own = METHODS[name]
    other = _net()
    other.load_state_dict(model.state_dict())
    second = cls(other, **OPTIONS, **own, **then)
    second.load_state_dict(opt.state_dict())
    _train(name, batches[3:], model, opt)
    _train(name, batches[3:], other, second)
    assert _same(model, other)


def test_packed_and_rounded():
    batches = _batches(6)
    (low, _), (both, opt) = (_train("kfac eigen", batches, **LOW, **keywords) for keywords in ({}, PACKED))
    assert _same(low, both)
    assert opt.memory_usage()["factors"] == (13 * 14 + 10 * 11 + 11 * 12 + 4 * 5)


def test_another_storage_is_refused():
    with pytest.raises(ValueError, match="factor_storage must be one of \\('dense', 'packed'\\), got 'sparse'"):
        KFAC(_net(), factor_storage="sparse")
