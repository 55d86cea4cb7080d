"""The interface of `torch.optim`: every method is an `Optimizer`, with all keywords in the constructor's signature."""

import inspect
import typing

import pytest
import torch

import secondorder
from secondorder.preconditioners.keywords import OBJECTS, flat_names
from tests.support.methods import Method
from tests.support.tasks import Task

#: Defaults of options, of which a method may have a part: tuning changes numbers, but not the meaning of defaults.
CHOICES: dict[str, typing.Any] = {
    **dict.fromkeys((
        "lr", "clip_norm", "clip_value", "fallback", "module", "comm", "grad_scaler", "foreach", "compression",
        "window_dtype", "sgd_weight", "batch_input", "factor_batch_size", "factor_positions", "likelihood",
        "scale_decay", "scale_batch_size", "damping", "damping_mode",
    )),
    **dict.fromkeys((
        "nesterov", "decoupled_weight_decay", "maximize", "bias_correction", "skip_norm_layers", "skip_biases",
        "decay_per_step", "weight_decay_in_curvature", "adaptive_damping", "include_damping_in_model", "reject_steps",
        "quadratic_model", "calibrate_damping", "token_is_example",
    ), False),
    "inner": "sgd", "loss_reduction": "mean", "loss_terms": 1, "weight_decay": 0.0, "scale": "count",
    "partition": "global", "solver": "auto", "momentum_mode": "heavy_ball", "weight_decay_mode": "standard",
    "betas": (0.9, 0.999), "deterministic_seed": 0, "checkpoint_curvature": "all", "graft": "auto",
}  # fmt: skip
LAYERWISE_CHOICES = {
    "fisher": "empirical", "fisher_samples": 1, "approx": "expand", "power": 1.0, "norm_curvature": "unit",
    "tied": "head", "batch_dim": 0, "weighting": "samples", "burnin_steps": 0, "estimator": "intra",
    "scale_update_steps": 1, "transport": "project", "basis_update": "eigh", "momentum_mode": "post",
}  # fmt: skip
WITH_ROWS = {
    **dict.fromkeys(("switch", "rank_energy", "batch_size")),
    "approx": "reduce", "mode": "auto", "kis_sampling": "systematic", "kid_pivoting": "cholesky",
    "kid_residual": "diag", "conv_scale": "exact", "normalize_damping": False, "kfac_when_cheaper": False,
    "update_steps": 10, "rank_fraction": 0.1,
}  # fmt: skip


#: Options of the constructor that groups do not have.
ONCE = {
    "module", "comm", "fisher", "fisher_samples", "norm_curvature", "tied", "batch_dim", "batch_input",
    "stagger", "refresh_warmup", "overlap", "rates", "skip_layers", "max_failures", "adaptive_damping",
    "damping_interval", "min_damping", "max_damping", "reject_steps", "include_damping_in_model", "quadratic_model",
    "likelihood", "calibrate_damping", "batch_size", "factor_dtype", "factor_storage", "inv_dtype", "orthogonal_dtype",
    "compression", "partition", "skip_biases", "skip_norm_layers", "window_dtype",
}  # fmt: skip


def parameters(method: Method) -> list[inspect.Parameter]:
    return list(inspect.signature(method.cls).parameters.values())


def test_is_an_optimizer_of_the_public_api(method: Method, mlp: Task) -> None:
    assert isinstance(method.build(mlp.model()), (torch.optim.Optimizer, secondorder.SecondOrderOptimizer))
    assert issubclass(method.cls, torch.optim.Optimizer)
    assert getattr(secondorder, method.cls.__name__) is method.cls
    assert method.cls.__name__ in secondorder.__all__


def test_a_star_import_does_not_replace_torch_nn() -> None:
    names: dict[str, typing.Any] = {}
    exec("from torch import nn\nfrom secondorder import *", names)
    assert names["nn"] is torch.nn
    assert names["KFAC"] is secondorder.KFAC
    assert secondorder.nn.LSTM is not torch.nn.LSTM


def test_every_keyword_has_a_type_and_a_default(method: Method) -> None:
    """Only the first arguments of torch's SGD may be positional."""
    given = parameters(method)
    hints = typing.get_type_hints(method.cls.__init__)
    assert given[0].name == "params"
    for parameter in given:
        positional = parameter.name in ("params", "lr", "momentum")
        assert parameter.kind is (parameter.POSITIONAL_OR_KEYWORD if positional else parameter.KEYWORD_ONLY)
        assert parameter.name in hints
        assert parameter.name == "params" or parameter.default is not inspect.Parameter.empty
    assert list(inspect.signature(method.cls.step).parameters) == ["self", "closure"]


def test_defaults_have_the_documented_meaning(method: Method) -> None:
    defaults = {p.name: p.default for p in parameters(method)}
    expected = CHOICES | {"momentum": 0.9 if method.layerwise else 0.0}
    if method.accepts("sgd_weight"):
        expected["betas"] = (0.0, 1.0)
    if method.layerwise:
        expected |= LAYERWISE_CHOICES | (WITH_ROWS if method.accepts("rank_fraction") else {})
    if method.cls.__name__.startswith("Sparse"):
        del expected["compression"]
    known = {key for key in defaults.keys() & expected.keys() if method.accepts(key)}
    assert {key: defaults[key] for key in known} == {key: expected[key] for key in known}
    if method.accepts("rank_fraction"):
        assert method.cls(torch.nn.Linear(3, 2)).param_groups[0]["lr"] == 1e-3


def test_group_keys_that_schedulers_look_for(method: Method, mlp: Task) -> None:
    """`OneCycleLR` and `CyclicLR` cycle `betas` instead of `momentum` if the defaults contain them."""
    own = method.accepts("sgd_weight")  # the betas of GGT are those of its window
    for rule, cycles in (({}, own), ({"graft": "sgd"}, False), ({"graft": "adam"}, True), ({"graft": "adamw"}, True)):
        optimizer = method.build(mlp.model(), **rule)
        assert {"lr", "momentum", "betas"} <= optimizer.param_groups[0].keys()
        assert ("betas" in optimizer.defaults) == cycles


def test_groups_contain_every_option_that_can_be_scheduled(method: Method, mlp: Task) -> None:
    known = {p.name for p in parameters(method)} - OBJECTS.keys() | flat_names(method.cls).keys()
    once = ONCE if method.layerwise else ONCE | {"deterministic_seed"}
    assert known - method.build(mlp.model()).param_groups[0].keys() == known & once


@pytest.mark.option("window_size")
def test_default_values_of_window_methods(method: Method) -> None:
    group = method.cls([torch.nn.Parameter(torch.zeros(8))], lr=1e-3).param_groups[0]
    is_ggt = method.accepts("sgd_weight")
    keys = ("window_size", "eps") if is_ggt else ("window_size", "damping", "damping_mode")
    assert tuple(group[key] for key in keys) == ((100, 1e-4) if is_ggt else (1024, 1e-5, "absolute"))
    absent = ("kl_clip", "skip_layers", "factor_update_steps", "inv_update_steps", "stagger", "max_failures")
    assert not any(map(method.accepts, absent))
    assert method.accepts("damping") == method.accepts("scale") == method.accepts("solver") != is_ggt


@pytest.mark.option("window_size")
def test_sparse_rows_have_a_smaller_default_rate_if_adam_determines_the_size_of_a_step(method: Method) -> None:
    """Most of their entries arrive late. A rate that is passed, and that of the publication, do not change."""
    for compression, keywords, expected in (
        (secondorder.TopK(), {}, 3e-4),
        (secondorder.TopK(density=0.05), {"inner": "adam"}, 3e-4),
        (secondorder.TopK(), {"graft": None}, 1e-3),
        (secondorder.TopK(), {"lr": 2e-3, "graft": "adamw"}, 2e-3),
        (None, {}, 1e-3),
        (secondorder.LowRank(), {}, 1e-3),
    ):
        optimizer = method.cls([torch.nn.Parameter(torch.zeros(8))], compression=compression, **keywords)
        assert optimizer.param_groups[0]["lr"] == expected


def test_sparse_mfac_is_mfac_with_a_compressor() -> None:
    assert issubclass(secondorder.SparseMFAC, secondorder.MFAC)
    ours, theirs = (inspect.signature(cls).parameters for cls in (secondorder.SparseMFAC, secondorder.MFAC))
    assert list(ours) == list(theirs)
    different = [name for name in ours if ours[name].default != theirs[name].default]
    assert different in ([], ["compression"])
    optimizer = secondorder.SparseMFAC([torch.nn.Parameter(torch.zeros(5000))], window_size=3)
    state = next(iter(optimizer.state.values()))
    assert (state["window_idx"].shape, state["tail_idx"].shape) == ((1, 3, 40), (1, 3, 10))
