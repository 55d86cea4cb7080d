"""`diagnostics()` of every method: plain numbers, of which those of the curvature are those of the dense matrix."""

import copy
import json
import math
import re

import pytest
import torch
from torch import nn

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, MemOpt, RefreshOptions, SparseMFAC, TopK
from secondorder.diagnostics import StageClock, flat
from tests.support.building import built
from tests.support.models import mlp
from tests.support.oracles.kfac import pi_factors
from tests.support.pool import Pool

ROWS, WINDOW = {"damping": 0.1, "update_steps": 3}, {"damping": 0.1, "window_size": 4, "partition": "layer"}
METHODS = {
    "eigen": (KFAC, {"damping": 0.1}),
    "relative": (KFAC, {"damping": 3.0, "damping_mode": "relative"}),
    "pi": (KFAC, {"damping": 0.1, "damping_split": "pi"}),
    "cholesky": (KFAC, {"damping": 0.1, "inverse_method": "cholesky"}),
    "diagonal": (KFAC, {"damping": 0.1, "inverse_method": "cholesky", "max_factor_dim": 1}),
    "ekfac": (EKFAC, {"damping": 0.1}),
    "sngd": (HyLo, {**ROWS, "mode": "sngd"}),
    "kis": (HyLo, {**ROWS, "mode": "kis", "rank_fraction": 0.5}),
    "kid": (HyLo, {**ROWS, "mode": "kid", "rank_fraction": 0.5}),
    "cheaper": (HyLo, {**ROWS, "kfac_when_cheaper": True, "rank_fraction": 0.8}),
    "mfac": (MFAC, WINDOW),
    "sparse_mfac": (SparseMFAC, {**WINDOW, "compression": TopK(density=0.5, block_size=32)}),
    "ggt": (GGT, {"eps": 0.1, "betas": (0.0, 0.9), "window_size": 4, "partition": "layer"}),
}
WINDOWS = ["mfac", "sparse_mfac", "ggt"]
every_method = pytest.mark.parametrize("method", METHODS)


def start(method, **options):
    """A model and its optimizer."""
    (cls, own), model = METHODS[method], mlp((3, 4, 2))
    return model, built(cls, model, lr=0.01, **own, **options)


def train(model, opt, steps=3, seed=0, examples=40):
    for step in range(steps):
        x = torch.randn(examples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
        opt.zero_grad()
        model(x).square().sum(1).mean().backward()
        opt.step()


def by_layer(opt, key):
    found = opt.diagnostics()
    return found[key] if "units" not in found else {name: unit[key] for name, unit in found["units"].items()}


@every_method
def test_numbers_are_plain_before_and_after_training(method):
    model, opt = start(method, graft="sgd")
    for steps in (0, 2):
        train(model, opt, steps)
        found = opt.diagnostics()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["step"] == steps
        assert len(found["damping"]) == 1
        assert all(isinstance(value, float) and math.isfinite(value) for value in flat(found).values())
    assert found["graft_factor"].keys() == {"0", "2"}


@every_method
def test_condition_numbers_and_products_are_those_of_the_dense_matrix(method):
    """The condition number is that of the damped matrix, or of the product of two damped factors."""
    model, opt = start(method)
    train(model, opt)
    conditions = by_layer(opt, "condition_number")
    dampings = by_layer(opt, "damping" if method in WINDOWS else "damping_by_layer")
    for name in ("0", "2"):
        dense = opt.dense_curvature(name)
        damping = 3.0 * float(dense.diagonal().mean()) if method == "relative" else 0.1
        assert dampings[name] == pytest.approx(damping, rel=1e-6)
        if method == "cholesky":
            assert not conditions
        else:
            damped = dense + damping * torch.eye(len(dense), dtype=dense.dtype)
            if method == "pi":
                state = opt.state[opt.blocks[name].owner]
                damped = torch.kron(*pi_factors(state["factor_g"], state["factor_a"], damping))
            assert conditions[name] == pytest.approx(float(torch.linalg.cond(damped)), rel=1e-6)
            assert conditions[name] > 1.05
        if method not in WINDOWS:
            layer = model.get_submodule(name)
            x = torch.randn(layer.out_features, layer.in_features + 1, dtype=torch.float64)
            product = opt.blocks[name].product(x)
            torch.testing.assert_close(product.flatten(), dense @ x.flatten(), rtol=1e-9, atol=1e-9)


def test_groups_of_a_convolution_report_the_mean_damping_and_the_worst_condition():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten()).double()
    opt = KFAC(model, lr=0.01, damping=3.0, damping_mode="relative")
    x = torch.randn(16, 2, 3, 3, dtype=torch.float64) * torch.tensor([1.0, 3.0])[:, None, None]
    model(x).square().mean().backward()
    opt.step()
    blocks = opt.dense_curvature("0").unflatten(0, (2, -1)).unflatten(2, (2, -1)).diagonal(dim1=0, dim2=2)
    values = torch.linalg.eigvalsh(blocks.movedim(-1, 0))
    damping, found = 3.0 * values.mean(-1), opt.diagnostics()
    assert found["damping_by_layer"]["0"] == pytest.approx(float(damping.mean()), rel=1e-6)
    expected = (values[:, -1] + damping) / (values[:, 0] + damping)
    assert found["condition_number"]["0"] == pytest.approx(float(expected.max()), rel=1e-6)


@pytest.mark.parametrize("build", [KFAC, EKFAC])
def test_staleness_counts_the_steps_since_a_refresh_and_since_statistics(build):
    model = mlp((3, 4, 2))
    keywords = {"estimator": "intra", "scale_update_steps": 3} if build is EKFAC else {}
    opt = built(build, model, lr=0.01, factor_update_steps=3, inv_update_steps=6, refresh_warmup=False, **keywords)
    assert opt.diagnostics()["staleness"] == {}
    seen = []
    for _ in range(14):
        train(model, opt, 1)
        found = opt.diagnostics()
        assert found["staleness"].keys() == found["statistics_age"].keys() == {"0", "2"}
        seen.append((found["staleness"]["0"], found["statistics_age"]["2"]))
    assert seen == [(t % 6, t % 3) for t in range(14)]


def test_staleness_survives_copies_and_is_unknown_after_loading():
    model, opt = start("eigen")
    train(model, opt, 4)  # the warm-up refreshes at steps 0, 1 and 2
    other_model, other = copy.deepcopy((model, opt))
    other.attach(other_model)
    assert other.diagnostics()["staleness"] == {"0": 1, "2": 1} == opt.diagnostics()["staleness"]
    fresh_model, fresh = start("eigen")
    train(fresh_model, fresh, 1)
    fresh.load_state_dict(opt.state_dict())
    found = fresh.diagnostics()
    assert found["staleness"] == {}
    assert found["condition_number"] == opt.diagnostics()["condition_number"]


def test_a_description_has_the_bytes_of_the_state_of_each_parameter_and_of_each_kind():
    model = mlp((3, 4, 2, 2))
    model[4].requires_grad_(False)
    opt = KFAC(model, lr=0.01, damping=0.1, skip_layers="2")
    opt.preconditioner.table.reasons.pop(model[2].bias)
    rows = [re.split("  +", line) for line in opt.describe().splitlines()]
    assert rows[0] == ["KFAC · 1 blocks"]
    assert rows[3:] == [
        ["0.weight", "4×3", "4, 4", "rank 0", "684 B", "block '0' (Linear)"],
        ["0.bias", "4", "4, 4", "rank 0", "36 B", "block '0' (Linear)"],
        ["2.weight", "2×4", "68 B", "sgd fallback: left out by skip_layers"],
        ["2.bias", "2", "20 B", "sgd fallback: not covered"],
        ["4.weight", "2×2", "4 B", "frozen"],
        ["4.bias", "2", "4 B", "frozen"],
        ["state: factors 256 B, buffers 32 B, second_order 320 B, momentum 208 B, total 816 B"],
    ]


def test_directions_were_multiplied_by_the_graft_factor():
    optimizers, kept = [], []
    for options in ({}, {"graft": "sgd"}):
        model, opt = start("eigen", kl_clip=None, **options)
        optimizers.append(opt)
        with opt.keep_directions() as directions:
            train(model, opt, 1)
        kept.append(directions)
    plain, grafted = optimizers
    for name, factor in grafted.diagnostics()["graft_factor"].items():
        assert float(kept[1][f"{name}.weight"].norm() / kept[0][f"{name}.weight"].norm()) == pytest.approx(factor)
    assert plain.diagnostics()["graft_factor"] == {}


def test_factors_are_those_of_the_last_step():
    model = mlp((3, 4, 2))
    opt = KFAC(model, lr=0.1, graft="sgd", kl_clip=1e-6, refresh=RefreshOptions(precondition_steps=2))
    train(model, opt, 1)
    assert opt.diagnostics()["graft_factor"].keys() == {"0", "2"}
    train(model, opt, 1)
    assert opt.diagnostics()["graft_factor"] == {}
    opt = KFAC(mlp((3, 4, 2)), lr=0.1, kl_clip=1e-6)
    train(opt.module, opt, 1)
    assert opt.diagnostics()["kl_clip_factor"] < 1
    opt.param_groups[0]["kl_clip"] = None
    train(opt.module, opt, 1)
    assert opt.diagnostics()["kl_clip_factor"] is None


@every_method
def test_a_clock_reports_the_stages_of_the_last_step(method):
    model, opt = start(method)
    assert opt.diagnostics()["stage_ms"] == {}
    clock = StageClock()
    opt.time_stages(clock)
    assert opt.stage_clock is clock
    train(model, opt, 2)
    found = opt.diagnostics()["stage_ms"]
    assert found.keys() >= {"reduce", "statistics", "refresh", "share", "precondition", "update"}
    assert opt.diagnostics()["stage_ms"] == found
    both = clock.take()
    assert ("capture" in both) == (method not in WINDOWS)
    assert all(0 <= found[name] < both[name] for name in ("precondition", "update"))
    train(model, opt, 1)
    assert opt.diagnostics()["stage_ms"]["update"] == clock.take()["update"]
    opt.time_stages(None)
    assert opt.stage_clock is None
    train(model, opt, 1)
    assert clock.take() == opt.diagnostics()["stage_ms"] == {}


def reported_layers(rank, world):
    """Names of the layers that each figure reports, by method."""
    found = {}
    for method in ("eigen", "ekfac", "sngd"):
        model, opt = start(method, comm=MemOpt(average_gradients=True))
        train(model, opt, 2, seed=10 * rank)
        figures = opt.diagnostics()
        json.dumps(figures, allow_nan=False)
        assert f"ranks: this is {rank} of {world}, comm=MemOpt(" in opt.describe()
        opt.close()
        found |= {(method, key): list(figures[key]) for key in ("damping_by_layer", "staleness", "statistics_age")}
    return found


def test_layers_of_other_ranks_are_left_out(pool: Pool):
    ours, theirs = pool.run(reported_layers, world=2)
    for key in ours:
        assert len(ours[key]) == len(theirs[key]) == 1, key
        assert sorted([*ours[key], *theirs[key]]) == ["0", "2"], key


# -------------------------------------------------------------------------------------- the figures as one flat table
def test_flat_joins_inner_keys_by_slashes_and_lists_by_position_and_leaves_out_what_is_no_finite_number():
    found = flat({"step": 3, "damping": [0.1, 0.2], "rank": {"a.b": 4}, "units": {"all": {"rows": 2, "angle": 1.5}}})
    assert found == {"step": 3.0, "damping/0": 0.1, "damping/1": 0.2, "rank/a.b": 4.0, "units/all/rows": 2.0,
                     "units/all/angle": 1.5}  # fmt: skip
    assert all(type(value) is float for value in found.values())
    found = flat({"none": None, "nan": math.nan, "inf": [math.inf, -math.inf], "mode": "kid", "on": True, "off": False})
    assert found == {"on": 1.0, "off": 0.0}
    with pytest.raises(TypeError, match=r"flat takes the mapping that diagnostics\(\) returned"):
        flat([1.0])
