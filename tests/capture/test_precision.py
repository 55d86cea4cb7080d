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
    assert_same_factors,
    directions,
    held_factors,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact
from tests.support.tasks import assert_changed, assert_identical, values

MODELS = {"mlp": (mlp, vectors), "convnet": (convnet, images)}


UNSCALED = torch.amp.GradScaler("cpu", enabled=False)  # declares float16 gradients to be unscaled


@each(
    lambda kind, compiled, **_: kind == "mlp" or not compiled, kind=MODELS.keys(),
    dtype=[torch.bfloat16, torch.float16], inside=[False, True], compiled=[False, True],
)  # fmt: skip
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
        for found, wanted, tolerance in zip((A, B), expected[name], (2e-2, 4e-2), strict=True):
            assert found.dtype == torch.float32
            assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance, name
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
    dtype=[torch.float64, torch.bfloat16], when=["before the first step", "after a step"],
    keywords={"eigen": {}, "cholesky": {"inverse_method": "cholesky"}, "graft": {"graft": "adam"}},
)  # fmt: skip
def test_a_model_cast_after_the_optimizer_was_made(dtype, when, keywords):
    (x, y), model, plain = vectors(), mlp().float(), mlp()
    opt = plain_kfac(model, lr=0.01, momentum=0.9, damping=0.1, factor_decay=0.0, **keywords)
    if when == "after a step":
        train_step(opt, model, x.float(), y, F.cross_entropy)
    model.to(dtype)
    plain.load_state_dict(model.state_dict())
    for step in range(3):
        before = values(model)
        train_step(opt, model, x.to(dtype), y, lambda o, t: F.cross_entropy(o.double(), t))
        assert_changed(model, before)
        if dtype == torch.float64 and step == 0:
            assert_factors(all_factors(opt, model), expected_factors(plain, x, y, F.cross_entropy))
    factors = torch.float32 if dtype == torch.bfloat16 else dtype
    assert {X.dtype for pair in all_factors(opt, model).values() for X in pair} == {factors}
    for p in model.parameters():
        assert opt.state[p].get("momentum_buffer", p).dtype == dtype
        held = {k: v.dtype for k, v in opt.state[p].items() if isinstance(v, Tensor) and k != "step"}
        assert dtype != torch.float64 or set(held.values()) == {torch.float64}


@each(treatment=["plain", "unscale", "clip"], accumulated=[1, 3])
def test_an_overflow_batch_is_dropped_whole(treatment, accumulated):
    """The scaler skips the step; nothing of that batch may remain, neither inf nor its finite micro-batches."""
    model, scaler = mlp().float(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    opt = plain_kfac(model, lr=0.1, factor_decay=0.0, grad_scaler=scaler)

    def step(*seeds, bad=None):
        opt.zero_grad()
        for seed in seeds:
            x, y = vectors(seed=seed)
            scaler.scale(F.cross_entropy(model(x.float()), y) * (float("inf") if seed == bad else 1.0)).backward()
        if treatment != "plain":
            scaler.unscale_(opt)
        if treatment == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        scaler.step(opt)
        scaler.update()

    step(0)
    held, before = all_factors(opt, model), values(model)
    step(*range(1, accumulated + 1), bad=1 + accumulated // 2)
    assert scaler.get_scale() == 2.0**9
    assert_same_factors(opt, model, held)
    assert_identical(values(model), before)
    expected = expected_factors(twin(model).double(), *vectors(seed=9), F.cross_entropy)
    step(9)
    assert_factors(all_factors(opt, model), expected, 1e-5)
