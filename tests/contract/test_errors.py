"""Bad input is refused at construction: the value in the text, before any warning, and nothing is left behind."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import secondorder
from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, snapshot, train

BAD_VALUES: list[tuple[str, Any]] = [
    ("lr", -0.1),
    ("lr", math.nan),
    ("momentum", -0.5),
    ("weight_decay", -0.01),
    ("damping", -0.001),
    ("damping", 0.0),
    ("damping", math.nan),
    ("damping_mode", "loud"),
    ("damping_split", "half"),
    ("inverse_method", "lu"),
    ("factor_decay", -0.1),
    ("factor_decay", 1.5),
    ("factor_update_steps", 0),
    ("factor_update_steps", -3),
    ("inv_update_steps", -4),
    ("approx", "reduced"),
    ("loss_reduction", "none"),
    ("loss_terms", 0),
    ("kl_clip", -0.001),
    ("kl_clip", 0.0),
    ("fallback", "lion"),
    ("fallback_lr", -0.25),
    ("fallback_betas", (1.0, 0.999)),
    ("fallback_betas", (0.9, -0.5)),
    ("fallback_eps", -1e-8),
    ("inner", "lion"),
    ("graft", "lion"),
    ("clip_norm", -1.0),
    ("clip_norm", 0.0),
    ("clip_value", -2.0),
    ("clip_value", 0.0),
    ("checkpoint_curvature", "some"),
    ("max_failures", 0),
    ("skip_layers", ("nowhere",)),
    ("fisher", "true"),
    ("fisher_samples", 0),
    ("batch_dim", -1),
    ("batch_input", "nothing_that_forward_takes"),
    ("norm_curvature", "full"),
    ("tied", "both"),
    ("max_factor_dim", 0),
    ("weighting", "tokens"),
    ("burnin_steps", -1),
    ("factor_batch_size", 0),
    ("factor_positions", -2),
    ("power", 0.0),
    ("power", 1.5),
    ("damping_interval", 0),
    ("min_damping", -1.0),
    ("max_damping", 0.0),
    ("likelihood", "poisson"),
    ("estimator", "mean"),
    ("scale_decay", 1.5),
    ("scale_update_steps", 0),
    ("scale_batch_size", 0),
    ("transport", "copy"),
    ("basis_update", "svd"),
    ("full_every", 0),
    ("deterministic_seed", -1),
    ("mode", "both"),
    ("update_steps", -4),
    ("rank_fraction", 0.0),
    ("rank_fraction", 1.25),
    ("rank_fraction", math.nan),
    ("max_rank", 0),
    ("rank_energy", 0.0),
    ("rank_energy", 1.5),
    ("kis_sampling", "greedy"),
    ("kid_pivoting", "lu"),
    ("kid_residual", "half"),
    ("conv_scale", "mean"),
    ("batch_size", 0),
    ("window_size", 0),
    ("window_size", -7),
    ("scale", "mean"),
    ("partition", "tensor"),
    ("solver", "lu"),
    ("momentum_mode", "after"),
    ("weight_decay_mode", "l2"),
    ("betas", (1.0, 1.0)),
    ("betas", (0.5, 1.5)),
    ("betas", (-0.5, 0.9)),
    ("eps", 0.0),
    ("eps", -0.25),
    ("eps", math.nan),
    ("sgd_weight", -0.5),
    ("sgd_weight", math.inf),
    ("window_dtype", torch.float16),
]

WRONG_KINDS: list[tuple[str, Any]] = [
    ("lr", "fast"),
    ("lr", None),
    ("momentum", "0.9"),
    ("weight_decay", "0.1"),
    ("damping", "small"),
    ("factor_decay", "0.95"),
    ("factor_update_steps", 1.5),
    ("factor_update_steps", "10"),
    ("inv_update_steps", 2.5),
    ("loss_terms", "2"),
    ("kl_clip", "0.001"),
    ("fallback_lr", "0.1"),
    ("fallback_betas", 0.9),
    ("fallback_betas", (0.75,)),
    ("fallback_eps", "tiny"),
    ("clip_norm", "1"),
    ("clip_value", "1"),
    ("max_failures", 1.5),
    ("stagger", 1),
    ("refresh_warmup", "often"),
    ("fisher", 1),
    ("fisher_samples", 2.5),
    ("batch_dim", "first"),
    ("batch_input", 2),
    ("norm_curvature", 1),
    ("tied", 1),
    ("max_factor_dim", 2.5),
    ("weighting", 1),
    ("burnin_steps", 1.5),
    ("decay_per_step", 1),
    ("factor_batch_size", "4"),
    ("factor_positions", 0.5),
    ("weight_decay_in_curvature", 0),
    ("power", "half"),
    ("adaptive_damping", 1),
    ("damping_interval", 2.5),
    ("min_damping", "small"),
    ("max_damping", None),
    ("include_damping_in_model", "yes"),
    ("reject_steps", None),
    ("quadratic_model", 1),
    ("likelihood", 3),
    ("calibrate_damping", "first"),
    ("scale_decay", "0.95"),
    ("scale_update_steps", 1.5),
    ("scale_batch_size", 0.5),
    ("token_is_example", "no"),
    ("full_every", None),
    ("deterministic_seed", "0"),
    ("module", "model"),
    ("comm", "ring"),
    ("grad_scaler", 1024.0),
    ("skip_layers", 3),
    ("mode", 1),
    ("switch", "kid"),
    ("update_steps", 2.5),
    ("update_steps", None),
    ("rank_fraction", "half"),
    ("rank_fraction", None),
    ("max_rank", 2.5),
    ("max_rank", None),
    ("rank_energy", "0.9"),
    ("kis_sampling", 1),
    ("kid_pivoting", 1),
    ("kid_residual", 1),
    ("conv_scale", 1),
    ("normalize_damping", 1),
    ("kfac_when_cheaper", "auto"),
    ("batch_size", 2.5),
    ("batch_size", "6"),
    ("window_size", 2.5),
    ("window_size", "1024"),
    ("scale", 1),
    ("eps", "small"),
    ("betas", 0.9),
    ("betas", (0.9,)),
    ("sgd_weight", "all"),
    ("window_dtype", "bfloat16"),
    ("window_dtype", 32),
    ("compression", "topk"),
    ("compression", 0.01),
]


def rules(cases: list[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{keyword}={value}": {keyword: value} for keyword, value in cases}


def only_of_ggt(rules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What to choose methods by: GGT's own betas and ε have other bounds than Adam's."""
    return {
        name: rule | ({"sgd_weight": None} if {"betas", "eps"} & rule.keys() else {}) for name, rule in rules.items()
    }


BAD, WRONG = rules(BAD_VALUES), rules(WRONG_KINDS)


def shown(value: Any) -> str:
    """What of the value must stand in the text: of a pair, the number that is wrong."""
    if isinstance(value, tuple):
        strange = [item for item in value if isinstance(item, str) or not 0 <= item <= 1]
        value = strange[0] if strange else max(value)
    return re.escape(str(value))


@pytest.mark.rules(only_of_ggt(BAD))
def test_bad_value_is_named(method: Method, mlp: Task, rule: str) -> None:
    ((keyword, value),) = BAD[rule].items()
    with pytest.raises(ValueError, match=shown(value)) as refusal:
        method.build(mlp.model(), **{keyword: value})
    assert keyword in str(refusal.value)


@pytest.mark.rules(only_of_ggt(WRONG))
def test_wrong_kind_is_a_type_error(method: Method, mlp: Task, rule: str) -> None:
    ((keyword, value),) = WRONG[rule].items()
    model = mlp.model()
    params = model.parameters() if keyword == "module" else model
    with pytest.raises(TypeError, match=keyword):
        method.cls(params, **{**method.keywords, keyword: value})


@pytest.mark.rules(only_of_ggt(BAD))
def test_bad_value_in_a_group_is_refused_too(method: Method, mlp: Task, rule: str) -> None:
    ((keyword, value),) = BAD[rule].items()
    model = mlp.model()
    optimizer = method.build(model, model.first.parameters())
    if keyword not in optimizer.param_groups[0] and not keyword.startswith("fallback_"):
        return  # a constructor-only option
    group = {"params": list(model.second.parameters()), keyword: value}
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=shown(value)):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == set(model.first.parameters())
    assert_identical(snapshot(optimizer), before)
    with pytest.raises(ValueError, match=shown(value)):
        method.build(mlp.model(), [{**group, "params": [nn.Parameter(torch.ones(2, 2))]}])
    train(model, optimizer, mlp, 1)


def test_nesterov_needs_momentum(method: Method, mlp: Task) -> None:
    with pytest.raises(ValueError, match="(?i)nesterov"):
        method.build(mlp.model(), nesterov=True, momentum=0.0)


@pytest.mark.option("inverse_method", "damping_split")
def test_cholesky_with_exact_damping_names_the_mend(method: Method, mlp: Task) -> None:
    with pytest.raises((ValueError, RuntimeError), match="eigen|pi") as refusal:
        method.build(mlp.model(), inverse_method="cholesky", damping_split="exact")
    assert "cholesky" in str(refusal.value)


def test_unknown_keyword_is_a_type_error(method: Method, mlp: Task) -> None:
    with pytest.raises(TypeError, match="dampening"):
        method.build(mlp.model(), dampening=0.1)


def test_single_tensor_as_params_is_a_type_error(method: Method, mlp: Task) -> None:
    model = mlp.model()
    with pytest.raises(TypeError, match="params argument given to the optimizer should be an iterable"):
        method.build(model, model.first.weight)


def test_no_parameters_is_a_value_error(method: Method, mlp: Task) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        method.build(mlp.model(), [])
    with pytest.raises(ValueError, match="no parameters|empty parameter list"):
        method.build(nn.Sequential(nn.ReLU()))


def test_non_leaf_tensor_is_refused(method: Method, mlp: Task) -> None:
    model = mlp.model()
    with pytest.raises(ValueError, match="non-leaf"):
        method.build(model, [model.first.weight * 2])


def test_something_else_among_the_parameters_is_a_type_error(method: Method, mlp: Task) -> None:
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        method.build(mlp.model(), ["first.weight"])


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
@pytest.mark.parametrize("bad", BAD_COMPRESSORS)
def test_a_compressor_that_cannot_work_is_refused(method: Method, mlp: Task, bad: str) -> None:
    """Where it is made or where it is given."""
    keyword, _, value = bad.partition("=")
    with pytest.raises(ValueError, match=re.escape(value)) as refusal:
        method.build(mlp.model(), compression=BAD_COMPRESSORS[bad]())
    assert keyword in str(refusal.value)


SHARED: dict[str, Any] = {
    "window_size": 6, "damping": 0.75, "damping_mode": "relative", "scale": "window", "solver": "eigh",
    "momentum_mode": "ema", "betas": (0.5, 0.75), "eps": 0.75, "bias_correction": True, "sgd_weight": 0.5,
    "weight_decay_mode": "legacy", "graft": "sgd",
}  # fmt: skip


@pytest.mark.option("window_size")
@pytest.mark.rules(only_of_ggt({keyword: {keyword: value} for keyword, value in SHARED.items()}))
def test_groups_of_one_window_must_agree(method: Method, mlp: Task, rule: str) -> None:
    model = mlp.model()
    first, second = list(model.first.parameters()), list(model.second.parameters())
    with pytest.raises(ValueError, match=rule):
        method.build(model, [{"params": first}, {"params": second, rule: SHARED[rule]}])
    optimizer = method.build(model, first)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rule):
        optimizer.add_param_group({"params": second, rule: SHARED[rule]})
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == set(first)
    assert_identical(snapshot(optimizer), before)
    train(model, optimizer, mlp, 1)
    apart = [{"params": first}, {"params": second, rule: SHARED[rule]}]
    train(model, method.build(model, apart, **method.apart), mlp, 6)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.option("window_size")
@pytest.mark.parametrize("rows", [2**22, 2**44], ids=["large", "absurd"])
def test_a_window_that_cannot_fit_says_how_large_it_is_and_what_to_do(method: Method, rows: int) -> None:
    for compression in (None, secondorder.TopK(), secondorder.LowRank(rank=1)):
        with pytest.raises(RuntimeError, match=f"window_size={rows}") as refusal:
            method.cls([nn.Parameter(torch.zeros(8, 8))], window_size=rows, compression=compression)
        assert re.search(r"\d [KMGTPEZY]?i?B", str(refusal.value))


@pytest.mark.option("factor_update_steps", "inv_update_steps")
def test_uneven_intervals_warn(method: Method, mlp: Task) -> None:
    with pytest.warns(UserWarning, match="inv_update_steps"):
        method.build(mlp.model(), factor_update_steps=10, inv_update_steps=15)


@pytest.mark.option("factor_update_steps", "inv_update_steps")
@pytest.mark.parametrize(
    "bad", [{"damping": -1.0}, {"clip_norm": -1.0}, {"skip_layers": ("nowhere",)}, {"lr": "fast"}], ids=str
)
def test_nothing_warns_before_everything_is_validated(method: Method, mlp: Task, bad: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises((ValueError, TypeError)):
            method.build(mlp.model(), factor_update_steps=10, inv_update_steps=15, **bad)
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"skip_layers": ("nowhere",)}, {"max_failures": 0}], ids=str)
def test_refused_construction_leaves_no_hook(method: Method, mlp: Task, bad: dict[str, Any]) -> None:
    if not method.accepts(next(iter(bad))):
        return
    model = mlp.model()
    with pytest.raises(ValueError):
        method.build(model, **bad)
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
    model = mlp.model()
    optimizer = method.build(model, lr=0.125)
    for steps in (0, 1):
        train(model, optimizer, mlp, steps)
        text = repr(optimizer)
        assert text.startswith(method.cls.__name__)
        assert "lr: 0.125" in text
        assert "weight_decay: 0" in text
