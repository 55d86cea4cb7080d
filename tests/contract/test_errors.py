"""Bad input is refused at construction: the value in the text, before any warning, and nothing is left behind."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import secondorder
from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, snapshot, train

BAD_VALUES: dict[str, list[Any]] = {
    "lr": [-0.1, math.nan],
    "momentum": [-0.5],
    "weight_decay": [-0.01],
    "damping": [-0.001, 0.0, math.nan],
    "damping_mode": ["loud"],
    "damping_split": ["half"],
    "inverse_method": ["lu"],
    "factor_decay": [-0.1, 1.5],
    "factor_update_steps": [0, -3],
    "inv_update_steps": [-4],
    "approx": ["reduced"],
    "loss_reduction": ["none"],
    "loss_terms": [0],
    "kl_clip": [-0.001, 0.0],
    "fallback": ["lion"],
    "fallback_lr": [-0.25],
    "fallback_betas": [(1.0, 0.999), (0.9, -0.5)],
    "fallback_eps": [-1e-8],
    "inner": ["lion"],
    "graft": ["lion"],
    "clip_norm": [-1.0, 0.0],
    "clip_value": [-2.0, 0.0],
    "checkpoint_curvature": ["some"],
    "max_failures": [0],
    "skip_layers": [("nowhere",)],
    "fisher": ["true"],
    "fisher_samples": [0],
    "batch_dim": [-1],
    "batch_input": ["nothing_that_forward_takes"],
    "norm_curvature": ["full"],
    "tied": ["both"],
    "max_factor_dim": [0],
    "weighting": ["tokens"],
    "burnin_steps": [-1],
    "factor_batch_size": [0],
    "factor_positions": [-2],
    "power": [0.0, 1.5],
    "damping_interval": [0],
    "min_damping": [-1.0],
    "max_damping": [0.0],
    "likelihood": ["poisson"],
    "estimator": ["mean"],
    "scale_decay": [1.5],
    "scale_update_steps": [0],
    "scale_batch_size": [0],
    "transport": ["copy"],
    "basis_update": ["svd"],
    "full_every": [0],
    "deterministic_seed": [-1],
    "mode": ["both"],
    "update_steps": [-4],
    "rank_fraction": [0.0, 1.25, math.nan],
    "max_rank": [0],
    "rank_energy": [0.0, 1.5],
    "kis_sampling": ["greedy"],
    "kid_pivoting": ["lu"],
    "kid_residual": ["half"],
    "conv_scale": ["mean"],
    "batch_size": [0],
    "window_size": [0, -7],
    "scale": ["mean"],
    "partition": ["tensor"],
    "solver": ["lu"],
    "momentum_mode": ["after"],
    "weight_decay_mode": ["l2"],
    "betas": [(1.0, 1.0), (0.5, 1.5), (-0.5, 0.9)],
    "eps": [0.0, -0.25, math.nan],
    "sgd_weight": [-0.5, math.inf],
    "window_dtype": [torch.float16],
}

WRONG_KINDS: dict[str, list[Any]] = {
    "lr": ["fast", None],
    "momentum": ["0.9"],
    "weight_decay": ["0.1"],
    "damping": ["small"],
    "factor_decay": ["0.95"],
    "factor_update_steps": [1.5, "10"],
    "inv_update_steps": [2.5],
    "loss_terms": ["2"],
    "kl_clip": ["0.001"],
    "fallback_lr": ["0.1"],
    "fallback_betas": [0.9, (0.75,)],
    "fallback_eps": ["tiny"],
    "clip_norm": ["1"],
    "clip_value": ["1"],
    "max_failures": [1.5],
    "stagger": [1],
    "refresh_warmup": ["often"],
    "fisher": [1],
    "fisher_samples": [2.5],
    "batch_dim": ["first"],
    "batch_input": [2],
    "norm_curvature": [1],
    "tied": [1],
    "max_factor_dim": [2.5],
    "weighting": [1],
    "burnin_steps": [1.5],
    "decay_per_step": [1],
    "factor_batch_size": ["4"],
    "factor_positions": [0.5],
    "weight_decay_in_curvature": [0],
    "power": ["half"],
    "adaptive_damping": [1],
    "damping_interval": [2.5],
    "min_damping": ["small"],
    "max_damping": [None],
    "include_damping_in_model": ["yes"],
    "reject_steps": [None],
    "quadratic_model": [1],
    "likelihood": [3],
    "calibrate_damping": ["first"],
    "scale_decay": ["0.95"],
    "scale_update_steps": [1.5],
    "scale_batch_size": [0.5],
    "token_is_example": ["no"],
    "full_every": [None],
    "deterministic_seed": ["0"],
    "module": ["model"],
    "comm": ["ring"],
    "grad_scaler": [1024.0],
    "skip_layers": [3],
    "mode": [1],
    "switch": ["kid"],
    "update_steps": [2.5, None],
    "rank_fraction": ["half", None],
    "max_rank": [2.5, None],
    "rank_energy": ["0.9"],
    "kis_sampling": [1],
    "kid_pivoting": [1],
    "kid_residual": [1],
    "conv_scale": [1],
    "normalize_damping": [1],
    "kfac_when_cheaper": ["auto"],
    "batch_size": [2.5, "6"],
    "window_size": [2.5, "1024"],
    "scale": [1],
    "eps": ["small"],
    "betas": [0.9, (0.9,)],
    "sgd_weight": ["all"],
    "window_dtype": ["bfloat16", 32],
    "compression": ["topk", 0.01],
}


def known(method: Method, table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """The cases of a method: of its own betas and ε GGT has other bounds than Adam's rule."""
    own = {"betas", "eps"} if not method.accepts("sgd_weight") else set()
    cases = [(keyword, value) for keyword, given in table.items() for value in given]
    return [(keyword, value) for keyword, value in cases if method.accepts(keyword) and keyword not in own]


def refusal(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def shown(value: Any) -> str:
    """What of the value must stand in the text: of a pair, the number that is wrong."""
    if isinstance(value, tuple):
        strange = [item for item in value if isinstance(item, str) or not 0 <= item <= 1]
        value = strange[0] if strange else max(value)
    return str(value)


def test_every_bad_value_is_named(method: Method, mlp: Task) -> None:
    wrong = {}
    for keyword, value in known(method, BAD_VALUES):
        found = refusal(lambda: method.build(mlp.model(), **{keyword: value}))  # noqa: B023
        if not isinstance(found, ValueError) or shown(value) not in str(found) or keyword not in str(found):
            wrong[keyword, value] = found
    assert not wrong


def test_every_wrong_kind_is_a_type_error(method: Method, mlp: Task) -> None:
    wrong = {}
    for keyword, value in known(method, WRONG_KINDS):
        model = mlp.model()
        params = model.parameters() if keyword == "module" else model
        found = refusal(lambda: method.cls(params, **{**method.keywords, keyword: value}))  # noqa: B023
        if not isinstance(found, TypeError) or keyword not in str(found):
            wrong[keyword, value] = found
    assert not wrong


def test_every_bad_value_in_a_group_is_refused_and_changes_nothing(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer, wrong = method.build(model, model.first.parameters()), {}
    before = snapshot(optimizer)
    for keyword, value in known(method, BAD_VALUES):
        if keyword not in optimizer.param_groups[0] and not keyword.startswith("fallback_"):
            continue  # a constructor-only option
        group = {"params": list(model.second.parameters()), keyword: value}
        stranger = {**group, "params": [nn.Parameter(torch.ones(2, 2))]}
        late = refusal(lambda: optimizer.add_param_group(dict(group)))  # noqa: B023
        at_once = refusal(lambda: method.build(mlp.model(), [stranger]))  # noqa: B023
        for found in (late, at_once):
            if not isinstance(found, ValueError) or shown(value) not in str(found):
                wrong[keyword, value] = found
        assert len(optimizer.param_groups) == 1
        assert set(optimizer.state) == set(model.first.parameters())
    assert not wrong
    assert_identical(snapshot(optimizer), before)
    train(model, optimizer, mlp, 1)


def test_nesterov_needs_momentum(method: Method, mlp: Task) -> None:
    with pytest.raises(ValueError, match="(?i)nesterov"):
        method.build(mlp.model(), nesterov=True, momentum=0.0)


@pytest.mark.option("inverse_method", "damping_split")
def test_cholesky_with_exact_damping_names_the_mend(method: Method, mlp: Task) -> None:
    with pytest.raises((ValueError, RuntimeError), match="eigen|pi") as refusal:
        method.build(mlp.model(), inverse_method="cholesky", damping_split="exact")
    assert "cholesky" in str(refusal.value)


def test_parameters_that_are_none_are_refused_as_torch_does(method: Method, mlp: Task) -> None:
    model = mlp.model()
    with pytest.raises(TypeError, match="dampening"):
        method.build(model, dampening=0.1)
    with pytest.raises(TypeError, match="params argument given to the optimizer should be an iterable"):
        method.build(model, model.first.weight)
    with pytest.raises(ValueError, match="empty parameter list"):
        method.build(model, [])
    with pytest.raises(ValueError, match="no parameters|empty parameter list"):
        method.build(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="non-leaf"):
        method.build(model, [model.first.weight * 2])
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        method.build(model, ["first.weight"])


@pytest.mark.rules({mode: {"weight_decay_mode": mode} for mode in ("legacy", "reg", "both")})
def test_decoupled_decay_in_another_mode_than_the_standard_is_refused(method: Method, mlp: Task, rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as refusal:
        method.build(mlp.model(), decoupled_weight_decay=True, weight_decay=0.1, weight_decay_mode=rule)
    assert "decoupled_weight_decay" in str(refusal.value)


@pytest.mark.option("window_size")  # EK-FAC has it before preconditioning, too
@pytest.mark.rules({mode: {"momentum_mode": mode} for mode in ("ema", "pre")})
def test_nesterov_is_for_the_heavy_ball(method: Method, mlp: Task, rule: str) -> None:
    with pytest.raises(ValueError, match="(?i)nesterov"):
        method.build(mlp.model(), nesterov=True, momentum_mode=rule)


BAD_COMPRESSORS: dict[str, Callable[[], object]] = {
    "density=0": lambda: secondorder.TopK(density=0.0),
    "density=-0.5": lambda: secondorder.TopK(density=-0.5),
    "block_size=0": lambda: secondorder.TopK(block_size=0),
    "error_bits=3": lambda: secondorder.TopK(error_bits=3),
    "value_dtype=torch.int32": lambda: secondorder.TopK(value_dtype=torch.int32),
    "rank=0": lambda: secondorder.LowRank(rank=0),
    "rank=-2": lambda: secondorder.LowRank(rank=-2),
}


@pytest.mark.option("compression")
def test_a_compressor_that_cannot_work_is_refused(method: Method, mlp: Task) -> None:
    """Where it is made or where it is given."""
    for bad, make in BAD_COMPRESSORS.items():
        keyword, _, value = bad.partition("=")
        with pytest.raises(ValueError, match=re.escape(value)) as refusal:
            method.build(mlp.model(), compression=make())
        assert keyword in str(refusal.value)


SHARED: dict[str, Any] = {
    "window_size": 6, "damping": 0.75, "damping_mode": "relative", "scale": "window", "solver": "eigh",
    "momentum_mode": "ema", "betas": (0.5, 0.75), "eps": 0.75, "bias_correction": True, "sgd_weight": 0.5,
    "weight_decay_mode": "legacy", "graft": "sgd",
}  # fmt: skip


@pytest.mark.option("window_size")
def test_groups_of_one_window_must_agree(method: Method, mlp: Task) -> None:
    for keyword, value in known(method, {keyword: [value] for keyword, value in SHARED.items()}):
        model = mlp.model()
        first, second = list(model.first.parameters()), list(model.second.parameters())
        parted = [{"params": first}, {"params": second, keyword: value}]
        with pytest.raises(ValueError, match=keyword):
            method.build(model, parted)
        optimizer = method.build(model, first)
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match=keyword):
            optimizer.add_param_group({"params": second, keyword: value})
        assert len(optimizer.param_groups) == 1
        assert set(optimizer.state) == set(first)
        assert_identical(snapshot(optimizer), before)
        train(model, optimizer, mlp, 1)
        train(model, method.build(model, parted, **method.apart), mlp, 6)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.option("window_size")
def test_a_window_that_cannot_fit_says_how_large_it_is_and_what_to_do(method: Method) -> None:
    for rows, compression in product((2**22, 2**44), (None, secondorder.TopK(), secondorder.LowRank(rank=1))):
        with pytest.raises(RuntimeError, match=f"window_size={rows}") as refusal:
            method.cls([nn.Parameter(torch.zeros(8, 8))], window_size=rows, compression=compression)
        assert re.search(r"\d [KMGTPEZY]?i?B", str(refusal.value))


@pytest.mark.option("factor_update_steps", "inv_update_steps")
def test_uneven_intervals_warn(method: Method, mlp: Task) -> None:
    with pytest.warns(UserWarning, match="inv_update_steps"):
        method.build(mlp.model(), factor_update_steps=10, inv_update_steps=15)


@pytest.mark.option("factor_update_steps", "inv_update_steps")
def test_nothing_warns_before_everything_is_validated(method: Method, mlp: Task) -> None:
    for bad in ({"damping": -1.0}, {"clip_norm": -1.0}, {"skip_layers": ("nowhere",)}, {"lr": "fast"}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises((ValueError, TypeError)):
                method.build(mlp.model(), factor_update_steps=10, inv_update_steps=15, **bad)
        assert [str(warning.message) for warning in caught] == [], bad


def test_refused_construction_leaves_no_hook(method: Method, mlp: Task) -> None:
    for keyword, value in known(method, {"lr": [-1.0], "skip_layers": [("nowhere",)], "max_failures": [0]}):
        model = mlp.model()
        with pytest.raises(ValueError):
            method.build(model, **{keyword: value})
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not module._backward_hooks


def test_defaults_construct_silently_and_train(method: Method) -> None:
    """No keyword at all, on a model of covered layers only: see `test_defaults.py` for more."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = method.cls(model)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_repr_is_printable_at_any_time(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, lr=0.125)
    for steps in (0, 1):
        train(model, optimizer, mlp, steps)
        text = repr(optimizer)
        assert text.startswith(method.cls.__name__)
        assert "lr: 0.125" in text
        assert "weight_decay: 0" in text
