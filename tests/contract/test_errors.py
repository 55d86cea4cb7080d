"""Invalid input is refused at construction, with the value in the message, before any warning and without effects."""

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import secondorder
from secondorder.preconditioners.keywords import flat_names
from tests.support.building import built
from tests.support.kfac import hook_counts
from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, snapshot, train
from tests.support.warned import messages_of, warned

Refused = tuple[list[Any], list[Any]]
#: Invalid values and values of a wrong type, by keyword.
REFUSED: dict[str, Refused] = {
    **dict.fromkeys(
        (
            "damping_mode", "damping_split", "inverse_method", "approx", "loss_reduction", "fallback", "inner", "graft",
            "checkpoint_curvature", "estimator", "transport", "basis_update", "partition", "solver", "momentum_mode",
            "weight_decay_mode",
        ),
        (["another"], []),
    ),
    **dict.fromkeys(
        ("fisher", "weighting", "mode", "kis_sampling", "kid_pivoting", "kid_residual", "conv_scale", "scale"),
        (["another"], [1]),
    ),
    **dict.fromkeys(
        (
            "stagger", "decay_per_step", "weight_decay_in_curvature", "adaptive_damping", "include_damping_in_model",
            "reject_steps", "quadratic_model", "calibrate_damping", "token_is_example", "normalize_damping",
            "kfac_when_cheaper", "factor_storage",
        ),
        ([], [1, "often", None]),
    ),
    **dict.fromkeys(
        (
            "factor_update_steps", "max_failures", "fisher_samples", "factor_batch_size",
            "factor_positions", "damping_interval", "scale_update_steps", "scale_batch_size", "full_every", "max_rank",
            "batch_size", "window_size",
        ),
        ([0, -3], [1.5, "10"]),
    ),
    **dict.fromkeys(("factor_dtype", "inv_dtype", "window_dtype"), ([torch.float16], ["bfloat16", 32])),
    **dict.fromkeys(("clip_norm", "clip_value"), ([-1.0, 0.0], ["1"])),
    "loss_terms": ([0], ["2"]), "refresh_warmup": ([], ["often"]), "lr": ([-0.1, math.nan], ["fast"]),
    "momentum": ([-0.5], ["0.9"]), "weight_decay": ([-0.01], ["0.1"]),
    "damping": ([-0.001, 0.0, math.nan], ["small"]), "factor_decay": ([-0.1, 1.5], ["0.95"]),
    "inv_update_steps": ([-4], [2.5]), "update_steps": ([-4], [2.5, None]), "kl_clip": ([-0.001, 0.0], ["0.001"]),
    "fallback_lr": ([-0.25], ["0.1"]), "fallback_eps": ([-1e-8], ["tiny"]),
    "fallback_betas": ([(1.0, 0.999), (0.9, -0.5)], [0.9, (0.75,)]),
    "skip_layers": ([("nowhere",)], [3]), "batch_dim": ([-1], ["first"]),
    "batch_input": (["nothing_that_forward_takes"], [2]), "norm_curvature": (["full", None], [1]),
    "tied": (["both"], [1, True]), "max_factor_dim": ([0, -1], [2.5, "wide", True]), "burnin_steps": ([-1], [1.5]),
    "power": ([0.0, -1.0, 1.5, math.nan, math.inf], ["half"]),
    "min_damping": ([-1.0], ["small"]), "max_damping": ([0.0, math.nan], [None]), "likelihood": (["poisson"], [3]),
    "scale_decay": ([1.5], ["0.95"]), "deterministic_seed": ([-1], ["0"]),
    "rank_fraction": ([0.0, 1.25, math.nan], ["half", None]), "rank_energy": ([0.0, 1.5], ["0.9"]),
    "betas": ([(1.0, 1.0), (0.5, 1.5), (-0.5, 0.9)], [0.9, (0.9,)]), "eps": ([0.0, -0.25, math.nan], ["small"]),
    "sgd_weight": ([-0.5, math.inf], ["all"]), "module": ([], ["model"]), "comm": ([], ["ring"]),
    "compression": ([], ["topk", 0.01]),
}  # fmt: skip


BAD, WRONG_KIND = ({keyword: lists[kind] for keyword, lists in REFUSED.items()} for kind in (0, 1))


def known(method: Method, table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """The cases of a method; the bounds of GGT's own betas and ε differ from those of Adam's rule."""
    own = {"betas", "eps"} if not method.accepts("sgd_weight") else set()
    cases = [(keyword, value) for keyword, given in table.items() for value in given]
    return [(keyword, value) for keyword, value in cases if method.accepts(keyword) and keyword not in own]


def refusal(call: Callable[[], object]) -> tuple[type[Exception] | None, str]:
    """Type and message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def shown(value: Any) -> str:
    """The part of the value that the message must contain: of a pair, the invalid number."""
    if isinstance(value, tuple):
        strange = [item for item in value if isinstance(item, str) or not 0 <= item <= 1]
        value = strange[0] if strange else max(value)
    return str(value)


def names(method: Method, keyword: str, text: str) -> bool:
    """Whether a message contains the name of an option, which is its key in a group or its field."""
    _, field = flat_names(method.cls).get(keyword, ("", None))
    return keyword in text or field is not None and field.name in text


def test_every_bad_value_and_wrong_type_is_named_and_leaves_no_hook(method: Method, mlp: Task) -> None:
    wrong = {}
    for table, error in ((BAD, ValueError), (WRONG_KIND, TypeError)):
        for keyword, value in known(method, table):
            model = mlp.model()
            params = model.parameters() if keyword == "module" else model
            kind, text = refusal(lambda: built(method.cls, params, **{**method.keywords, keyword: value}))  # noqa: B023
            is_named = names(method, keyword, text) and (error is TypeError or shown(value) in text)
            if kind is not error or not is_named or any(map(any, hook_counts(model).values())):
                wrong[keyword, value] = (kind, text)
    assert not wrong


def test_every_bad_value_in_a_group_is_refused_and_changes_nothing(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, params=lambda model: model.first.parameters())
    before, wrong = snapshot(optimizer), {}
    for keyword, value in known(method, BAD):
        if keyword not in optimizer.param_groups[0] and not keyword.startswith("fallback_"):
            continue  # a constructor-only option
        group = {"params": list(model.second.parameters()), keyword: value}
        stranger = {**group, "params": [nn.Parameter(torch.ones(2, 2))]}
        late = refusal(lambda: optimizer.add_param_group(dict(group)))  # noqa: B023
        at_once = refusal(lambda: method.build(mlp.model(), [stranger]))  # noqa: B023
        if {late[0], at_once[0]} != {ValueError} or not all(shown(value) in text for _, text in (late, at_once)):
            wrong[keyword, value] = (late, at_once)
        assert len(optimizer.param_groups) == 1
        assert set(optimizer.state) == set(model.first.parameters())
    assert not wrong
    assert_identical(snapshot(optimizer), before)
    train(model, optimizer, mlp, 1)


def test_invalid_parameters_are_refused_as_in_torch(method: Method, mlp: Task) -> None:
    model, empty = mlp.model(), nn.Sequential(nn.ReLU())
    cases: list[tuple[nn.Module, Any, type[Exception], str]] = [
        (model, [], ValueError, "empty parameter list"),
        (model, empty.parameters(), ValueError, "no parameters|empty parameter list"),
        (model, [model.first.weight * 2], ValueError, "non-leaf"),
        (model, ["first.weight"], TypeError, "optimizer can only optimize Tensors"),
        (empty, None, ValueError, "no parameters|empty parameter list"),
        (nn.Sequential(nn.LazyLinear(2)), None, ValueError, r"'0\.weight' has no shape yet; run a forward pass"),
    ]
    if method.layerwise:
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
        cases.append((scripted, None, NotImplementedError, r"cannot hook a scripted module: use torch\.compile"))
    for module, params, error, text in cases:
        with pytest.raises(error, match=text):
            method.build(module, params)
    with pytest.raises(TypeError, match="dampening"):
        method.build(model, dampening=0.1)


#: Options that cannot be combined, and patterns for the names of options or values in the message.
TOGETHER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nesterov without momentum": ({"nesterov": True, "momentum": 0.0}, ("(?i)nesterov",)),
    "cholesky": ({"inverse_method": "cholesky", "damping_split": "exact"}, ("cholesky", "eigen|pi")),
    **{
        f"decoupled {mode}": (
            {"decoupled_weight_decay": True, "weight_decay": 0.1, "weight_decay_mode": mode},
            (mode, "decoupled_weight_decay"),
        )
        for mode in ("legacy", "reg", "both")
    },
    "adam in the quadratic model": ({"quadratic_model": True, "inner": "adamw"}, ("quadratic_model",)),
    "graft in the quadratic model": ({"quadratic_model": True, "graft": "sgd"}, ("quadratic_model",)),
    "nesterov in the quadratic model": ({"quadratic_model": True, "nesterov": True}, ("quadratic_model",)),
    **{f"nesterov {mode}": ({"nesterov": True, "momentum_mode": mode}, ("(?i)nesterov",)) for mode in ("ema", "pre")},
}


def test_options_that_cannot_be_combined_are_refused(method: Method, mlp: Task) -> None:
    for name, (keywords, words) in TOGETHER.items():
        if not method.knows(keywords) or (name == "nesterov pre" and method.layerwise):
            continue  # EK-FAC supports Nesterov's rule with momentum over gradients
        with pytest.raises((ValueError, RuntimeError)) as found:
            method.build(mlp.model(), **keywords)
        for word in words:
            assert re.search(word, str(found.value)), name


BAD_COMPRESSORS: dict[type[Any], dict[str, tuple[Any, ...]]] = {
    secondorder.TopK: {"density": (0.0, -0.5), "block_size": (0,), "error_bits": (3,), "value_dtype": (torch.int32,)},
    secondorder.LowRank: {"rank": (0, -2)},
}


@pytest.mark.option("compression")
def test_invalid_compressors_are_refused(method: Method, mlp: Task) -> None:
    for kind, options in BAD_COMPRESSORS.items():
        for keyword, value in ((keyword, value) for keyword, given in options.items() for value in given):
            with pytest.raises(ValueError, match=f"{keyword}.*{re.escape(str(value))}"):
                method.build(mlp.model(), compression=kind(**{keyword: value}))


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
def test_the_error_of_a_window_that_cannot_fit_states_its_size(method: Method) -> None:
    for rows, compression in product((2**22, 2**44), (None, secondorder.TopK(), secondorder.LowRank(rank=1))):
        with pytest.raises(RuntimeError, match=f"window_size={rows}") as found:
            method.cls([nn.Parameter(torch.zeros(8, 8))], window_size=rows, compression=compression)
        assert re.search(r"\d [KMGTPEZY]?i?B", str(found.value))


@pytest.mark.option("factor_update_steps", "inv_update_steps")
def test_uneven_intervals_warn_once_for_all_groups_and_after_everything_is_validated(method: Method, mlp: Task) -> None:
    uneven, model = {"factor_update_steps": 10, "inv_update_steps": 15}, mlp.model()
    groups = [{"params": list(layer.parameters())} for layer in (model.first, model.second)]
    (text,) = messages_of(lambda: method.build(model, groups, **uneven))
    assert text.count("inv_update_steps=15 is not a multiple of factor_update_steps=10") == 1
    assert "Make it a multiple" in text
    for bad in ({"damping": -1.0}, {"clip_norm": -1.0}, {"skip_layers": ("nowhere",)}, {"lr": "fast"}):
        with warned() as caught, pytest.raises((ValueError, TypeError)):
            method.build(mlp.model(), **uneven, **bad)
        assert caught == [], bad
