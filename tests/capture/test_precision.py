"""Autocast, low-precision parameters and the loss scale of float16 training."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.grid import each
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    directions,
    held_factors,
    plain_kfac,
    train_step,
)
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact
from tests.support.tasks import assert_changed, values

MODELS = {"mlp": (mlp, vectors), "convnet": (convnet, images)}


UNSCALED = torch.amp.GradScaler("cpu", enabled=False)  # declares float16 gradients to be unscaled


def relative(actual, expected) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@each(
    lambda kind, compiled, **_: kind == "mlp" or not compiled,
    kind=MODELS.keys(),
    dtype=[torch.bfloat16, torch.float16],
    inside=[False, True],
    compiled=[False, True],
)
def test_autocast_gives_float32_factors_of_the_right_size(kind, dtype, inside, compiled):
    """Some loops keep backward (and the step) under autocast; statistics must still be float32 products."""
    torch.compiler.reset()
    build, data = MODELS[kind]
    x, y = data()
    expected = expected_factors(build(), x, y, F.cross_entropy)
    model = build().float()
    opt = plain_kfac(model, grad_scaler=UNSCALED)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    low = torch.autocast("cpu", dtype=dtype)
    with low:
        value = F.cross_entropy(forward(x.float()), y)
    with low if inside else nullcontext():
        value.backward()
        moved = directions(opt, model)
    for name, (gradient, V) in moved.items():
        A, B = held_factors(opt, model, name)
        assert A.dtype == B.dtype == torch.float32
        assert relative(A, expected[name][0]) < 2e-2, name
        assert relative(B, expected[name][1]) < 4e-2, name
        assert_close(V.double(), solve_exact(B.double(), A.double(), gradient.double(), 1e-2), 1e-3, name)


def test_statistics_of_bfloat16_activations_are_accumulated_in_float32():
    """A bfloat16 sum of 4096 rows of ones would stop at 256."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False)).to(torch.bfloat16)
    opt = plain_kfac(model)
    model(torch.ones(4096, 2, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    A, B = held_factors(opt, model, "0")
    assert A.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert_close(B, torch.full((2, 2), 4096.0**2))


def test_bias_of_another_dtype_under_autocast():
    model, (x, y) = mlp().float(), vectors()
    model[0].bias = nn.Parameter(model[0].bias.detach().to(torch.bfloat16))
    opt = plain_kfac(model, lr=0.1)
    for _ in range(2):
        before = values(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train_step(opt, model, x.float(), y, F.cross_entropy)
        assert_changed(model, before)
        assert [p.dtype for p in model.parameters()] == [p.dtype for p in before.values()]


@each(
    dtype=[torch.float64, torch.bfloat16],
    when=["before the first step", "after a step"],
    keywords={"eigen": {}, "cholesky": {"inverse_method": "cholesky"}, "graft": {"graft": "adam"}},
)
def test_a_model_cast_after_the_optimizer_was_made(dtype, when, keywords):
    x, y = vectors()
    model, plain = mlp().float(), mlp()
    opt = plain_kfac(model, lr=0.01, momentum=0.9, damping=0.1, factor_decay=0.0, **keywords)
    if when == "after a step":
        train_step(opt, model, x.float(), y, F.cross_entropy)
    model.to(dtype)
    plain.load_state_dict(model.state_dict())
    expected = expected_factors(plain, x, y, F.cross_entropy)
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        train_step(opt, model, x.to(dtype), y, lambda o, t: F.cross_entropy(o.double(), t))
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        if dtype == torch.float64 and expected:
            assert_factors(all_factors(opt, model), expected)
        expected = None
    factors = torch.float32 if dtype == torch.bfloat16 else dtype
    assert {X.dtype for pair in all_factors(opt, model).values() for X in pair} == {factors}
    for p in model.parameters():
        assert torch.isfinite(p).all()
        assert opt.state[p].get("momentum_buffer", p).dtype == dtype
        held = {k: v.dtype for k, v in opt.state[p].items() if isinstance(v, Tensor) and k != "step"}
        assert dtype != torch.float64 or set(held.values()) == {torch.float64}
