"""The public face of `torch.optim`: a real `Optimizer`, every keyword in the constructor's own signature."""

from __future__ import annotations

import inspect
import typing

import pytest
import torch

import secondorder
from tests.support.methods import Method
from tests.support.tasks import Task

POSITIONAL = ("params", "lr", "momentum")


LAYERWISE_CHOICES = {
    "fisher": "empirical",
    "fisher_samples": 1,
    "approx": "expand",
    "power": 1.0,
    "norm_curvature": "unit",
    "tied": "head",
    "batch_dim": 0,
    "batch_input": None,
    "weighting": "samples",
    "burnin_steps": 0,
    "decay_per_step": False,
    "factor_batch_size": None,
    "factor_positions": None,
    "weight_decay_in_curvature": False,
    "adaptive_damping": False,
    "include_damping_in_model": False,
    "reject_steps": False,
    "quadratic_model": False,
    "likelihood": None,
    "calibrate_damping": False,
    "estimator": "intra",
    "scale_decay": None,
    "scale_update_steps": 1,
    "scale_batch_size": None,
    "token_is_example": False,
    "transport": "project",
    "basis_update": "eigh",
    "momentum_mode": "post",
}
WITH_ROWS = {
    "approx": "reduce",
    "mode": "auto",
    "switch": None,
    "rank_energy": None,
    "kis_sampling": "systematic",
    "kid_pivoting": "cholesky",
    "kid_residual": "diag",
    "conv_scale": "exact",
    "normalize_damping": False,
    "kfac_when_cheaper": False,
    "batch_size": None,
}


def parameters(method: Method) -> list[inspect.Parameter]:
    return list(inspect.signature(method.cls).parameters.values())


def test_is_an_optimizer_of_the_public_api(method: Method, mlp: Task) -> None:
    assert isinstance(method.build(mlp.model()), (torch.optim.Optimizer, secondorder.SecondOrderOptimizer))
    assert issubclass(method.cls, torch.optim.Optimizer)
    assert getattr(secondorder, method.cls.__name__) is method.cls
    assert method.cls.__name__ in secondorder.__all__


def test_a_star_import_keeps_the_name_of_torchs_modules() -> None:
    """``nn`` stays ``torch.nn``, which a script imports under that name; ours is ``secondorder.nn``."""
    names: dict[str, typing.Any] = {}
    exec("from torch import nn\nfrom secondorder import *", names)
    assert names["nn"] is torch.nn
    assert names["KFAC"] is secondorder.KFAC
    assert secondorder.nn.LSTM is not torch.nn.LSTM


def test_every_keyword_has_a_type_and_a_default(method: Method) -> None:
    given = parameters(method)
    hints = typing.get_type_hints(method.cls.__init__)
    assert given[0].name == "params"
    for parameter in given:
        assert parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        assert parameter.name in hints
        assert parameter.name == "params" or parameter.default is not inspect.Parameter.empty


def test_only_what_torch_has_first_may_be_positional(method: Method) -> None:
    positional = [p.name for p in parameters(method) if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == POSITIONAL


def test_defaults_of_torchs_own_keywords(method: Method) -> None:
    defaults = {p.name: p.default for p in parameters(method)}
    expected = {"nesterov": False, "weight_decay": 0.0, "decoupled_weight_decay": False, "maximize": False}
    assert {key: defaults[key] for key in expected} == expected
    assert defaults["foreach"] is None
    assert (defaults["lr"], defaults["momentum"]) == ((0.1, 0.9) if method.layerwise else (1e-3, 0.0))


def test_first_choices_are_the_defaults(method: Method) -> None:
    """Tuning changes numbers, not meanings (design 4.1)."""
    defaults = {p.name: p.default for p in parameters(method)}
    expected = {
        "graft": None,
        "clip_norm": None,
        "clip_value": None,
        "fallback": None,
        "inner": "sgd",
        "module": None,
        "comm": None,
        "grad_scaler": None,
        "loss_reduction": "mean",
        "loss_terms": 1,
        "scale": "count",
        "partition": "global",
        "compression": None,
        "window_dtype": None,
        "solver": "auto",
        "momentum_mode": "heavy_ball",
        "weight_decay_mode": "standard",
        "betas": (0.0, 1.0) if method.accepts("sgd_weight") else (0.9, 0.999),
        "sgd_weight": None,
        "bias_correction": False,
        "skip_norm_layers": False,
        "skip_biases": False,
        "deterministic_seed": 0,
        "checkpoint_curvature": "all",
    }
    if method.layerwise:
        expected |= LAYERWISE_CHOICES | (WITH_ROWS if method.accepts("rank_fraction") else {})
    else:
        expected["damping_mode"] = "absolute"
    if method.cls.__name__.startswith("Sparse"):
        expected["compression"] = defaults["compression"]
    assert {key: defaults[key] for key in expected if key in defaults} == {
        key: value for key, value in expected.items() if key in defaults
    }


def test_group_keys_that_schedulers_look_for(method: Method, mlp: Task) -> None:
    """`OneCycleLR` and `CyclicLR` cycle `betas` instead of `momentum` where the defaults have them."""
    own = method.accepts("sgd_weight")  # GGT's are those of its window
    for rule, cycles in (({}, own), ({"graft": "sgd"}, False), ({"graft": "adam"}, True), ({"graft": "adamw"}, True)):
        optimizer = method.build(mlp.model(), **rule)
        assert {"lr", "momentum", "betas"} <= optimizer.param_groups[0].keys()
        assert ("betas" in optimizer.defaults) == cycles


def test_every_scalar_option_stands_in_the_groups(method: Method, mlp: Task) -> None:
    """So that it can be scheduled."""
    group = method.build(mlp.model()).param_groups[0]
    changing = {
        "lr", "momentum", "nesterov", "weight_decay", "decoupled_weight_decay", "maximize", "damping", "factor_decay",
        "factor_update_steps", "inv_update_steps", "kl_clip", "fallback", "fallback_lr", "fallback_betas",
        "fallback_eps", "clip_norm", "clip_value", "window_size", "damping_mode", "scale", "solver", "momentum_mode",
        "weight_decay_mode", "eps", "betas", "sgd_weight", "bias_correction", "graft", "inner", "approx", "power",
        "loss_reduction", "loss_terms", "max_factor_dim", "weighting", "burnin_steps", "decay_per_step",
        "factor_batch_size", "factor_positions", "weight_decay_in_curvature", "estimator", "scale_decay",
        "scale_update_steps", "scale_batch_size", "token_is_example", "transport", "basis_update", "full_every", "mode",
        "update_steps", "rank_fraction", "max_rank", "rank_energy", "kis_sampling", "kid_pivoting", "kid_residual",
        "conv_scale", "normalize_damping", "kfac_when_cheaper",
    }  # fmt: skip
    once = {
        "fisher", "fisher_samples", "norm_curvature", "tied", "batch_dim", "batch_input", "stagger", "refresh_warmup",
        "skip_layers", "max_failures", "adaptive_damping", "damping_interval", "min_damping", "max_damping",
        "reject_steps", "include_damping_in_model", "quadratic_model", "likelihood", "calibrate_damping", "switch",
        "batch_size",
    }  # fmt: skip
    other_names = {"fallback_betas", "fallback_eps"} - group.keys()  # of betas and eps
    assert {key for key in changing if method.accepts(key)} - other_names <= group.keys()
    assert not once & group.keys()


def test_step_takes_a_closure_only(method: Method) -> None:
    names = list(inspect.signature(method.cls.step).parameters)
    assert names == ["self", "closure"]


@pytest.mark.option("window_size")
def test_numbers_that_window_methods_start_with(method: Method) -> None:
    defaults = {p.name: p.default for p in parameters(method)}
    is_ggt = method.accepts("sgd_weight")
    expected = {"window_size": 100, "eps": 1e-4} if is_ggt else {"window_size": 1024, "damping": 1e-5}
    assert {key: defaults[key] for key in expected} == expected
    absent = ("kl_clip", "skip_layers", "factor_update_steps", "inv_update_steps", "stagger", "max_failures")
    assert not any(map(method.accepts, absent))
    assert method.accepts("damping") == method.accepts("scale") == method.accepts("solver") != is_ggt


@pytest.mark.option("window_size")
def test_strategies_and_compressors_stay_out_of_groups_and_state(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    assert not {"compression", "comm", "window_dtype"} & optimizer.param_groups[0].keys()
    assert not {"compression", "comm"} & {key for state in optimizer.state.values() for key in state}


def test_sparse_mfac_is_mfac_with_a_compressor() -> None:
    assert issubclass(secondorder.SparseMFAC, secondorder.MFAC)
    ours, theirs = (inspect.signature(cls).parameters for cls in (secondorder.SparseMFAC, secondorder.MFAC))
    assert list(ours) == list(theirs)
    different = [name for name in ours if ours[name].default != theirs[name].default]
    assert different in ([], ["compression"])
    optimizer = secondorder.SparseMFAC([torch.nn.Parameter(torch.zeros(5000))], window_size=3)
    state = next(iter(optimizer.state.values()))
    assert (state["window_idx"].shape, state["tail_idx"].shape) == ((1, 3, 40), (1, 3, 10))
