"""`diagnostics()` of every method: plain numbers, of which those of the curvature are those of the dense matrix."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, MemOpt, RefreshOptions, SparseMFAC, StorageOptions, TopK
from secondorder.diagnostics import StageClock, flat
from tests.support.building import built
from tests.support.pool import Pool

ROWS, WINDOW = {"damping": 0.1, "update_steps": 3}, {"damping": 0.1, "window_size": 4, "partition": "layer"}
METHODS = {
    "eigen": (KFAC, {"damping": 0.1}),
    "relative": (KFAC, {"damping": 3.0, "damping_mode": "relative"}),
    "pi": (KFAC, {"damping": 0.1, "damping_split": "pi"}),
    "cholesky": (KFAC, {"damping": 0.1, "inverse_method": "cholesky"}),
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


def make(method, model, **options):
    cls, own = METHODS[method]
    return built(cls, model, lr=0.01, **own, **options)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


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
    model = make_model()
    opt = make(method, model, graft="sgd")
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
    """The condition number is that of the damped matrix, except for a split damping."""
    model = make_model()
    opt = make(method, model)
    train(model, opt)
    conditions = by_layer(opt, "condition_number")
    dampings = by_layer(opt, "damping" if method in WINDOWS else "damping_by_layer")
    for name in ("0", "2"):
        dense = opt.dense_curvature(name)
        values = torch.linalg.eigvalsh(dense).clamp(min=0)
        damping = 3.0 * float(values.mean()) if method == "relative" else 0.1
        assert dampings[name] == pytest.approx(damping, rel=1e-6)
        if method == "cholesky":
            assert not conditions
        elif method != "pi":
            expected = float((values[-1] + damping) / (values[0] + damping))
            assert conditions[name] == pytest.approx(expected, rel=1e-6)
            assert conditions[name] > 1.05
        if method not in WINDOWS:
            layer = model.get_submodule(name)
            x = torch.randn(layer.out_features, layer.in_features + 1, dtype=torch.float64)
            product = opt.blocks[name].product(x)
            torch.testing.assert_close(product.flatten(), dense @ x.flatten(), rtol=1e-9, atol=1e-9)


def test_condition_numbers_with_split_damping_are_those_of_the_product_of_damped_factors():
    model = make_model()
    opt = make("pi", model)
    train(model, opt)
    for name, block in opt.blocks.items():
        a, g = opt.state[block.owner]["factor_a"], opt.state[block.owner]["factor_g"]
        pi = float((a.trace() / len(a) / (g.trace() / len(g))).sqrt())
        damped = torch.kron(g + 0.1**0.5 / pi * torch.eye(len(g)), a + 0.1**0.5 * pi * torch.eye(len(a)))
        expected = float(torch.linalg.cond(damped))
        # The factors have changed since the last refresh, and the figure is that of the older bases.
        opt.param_groups[0]["inv_update_steps"] = 1
        assert opt.diagnostics()["condition_number"][name] == pytest.approx(expected, rel=0.2)


def test_diagonal_factors_have_a_condition_number_without_eigenvalues():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(0), nn.Unflatten(0, (-1, 4)), nn.Linear(4, 2)).double()
    opt = KFAC(model, lr=0.01, damping=0.1, inverse_method="cholesky", storage=StorageOptions(max_factor_dim=1))
    for _ in range(2):
        opt.zero_grad()
        model(torch.arange(10) % 5).square().sum(1).mean().backward()
        opt.step()
    values = torch.linalg.eigvalsh(opt.dense_curvature("3"))
    expected = float((values[-1] + 0.1) / (values[0] + 0.1))
    assert opt.diagnostics()["condition_number"]["3"] == pytest.approx(expected, rel=1e-6)


def test_groups_of_a_convolution_report_the_mean_damping_and_the_worst_condition():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten()).double()
    opt = make("relative", model)
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
    model = make_model()
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
    model = make_model()
    opt = make("eigen", model)
    train(model, opt, 4)  # the warm-up refreshes at steps 0, 1 and 2
    other_model, other = copy.deepcopy((model, opt))
    other.attach(other_model)
    assert other.diagnostics()["staleness"] == {"0": 1, "2": 1} == opt.diagnostics()["staleness"]
    fresh_model = make_model()
    fresh = make("eigen", fresh_model)
    train(fresh_model, fresh, 1)
    fresh.load_state_dict(opt.state_dict())
    found = fresh.diagnostics()
    assert found["staleness"] == {}
    assert found["condition_number"] == opt.diagnostics()["condition_number"]


def test_directions_were_multiplied_by_the_graft_factor():
    optimizers, kept = [], []
    for options in ({}, {"graft": "sgd"}):
        model = make_model()
        optimizers.append(make("eigen", model, kl_clip=None, **options))
        with optimizers[-1].keep_directions() as directions:
            train(model, optimizers[-1], 1)
        kept.append(directions)
    plain, grafted = optimizers
    for name, factor in grafted.diagnostics()["graft_factor"].items():
        assert float(kept[1][f"{name}.weight"].norm() / kept[0][f"{name}.weight"].norm()) == pytest.approx(factor)
    assert plain.diagnostics()["graft_factor"] == {}


def test_factors_are_those_of_the_last_step():
    model = make_model()
    opt = KFAC(model, lr=0.1, graft="sgd", kl_clip=1e-6, refresh=RefreshOptions(precondition_steps=2))
    train(model, opt, 1)
    assert opt.diagnostics()["graft_factor"].keys() == {"0", "2"}
    train(model, opt, 1)
    assert opt.diagnostics()["graft_factor"] == {}
    opt = KFAC(make_model(), lr=0.1, kl_clip=1e-6)
    train(opt.module, opt, 1)
    assert opt.diagnostics()["kl_clip_factor"] < 1
    opt.param_groups[0]["kl_clip"] = None
    train(opt.module, opt, 1)
    assert opt.diagnostics()["kl_clip_factor"] is None


@every_method
def test_a_clock_reports_the_stages_of_the_last_step(method):
    model = make_model()
    opt = make(method, model)
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
        model = make_model()
        opt = make(method, model, comm=MemOpt(average_gradients=True))
        train(model, opt, 2, seed=10 * rank)
        figures = opt.diagnostics()
        json.dumps(figures, allow_nan=False)
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
