"""Options as objects: signatures are short, errors explain old keywords, and keys of groups are equivalent."""

import copy
import inspect
import re
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import nn

import secondorder
from benchmarks.recipes.building import from_flat
from secondorder import (
    EKFAC,
    GGT,
    KFAC,
    MFAC,
    AdaptationOptions,
    BatchOptions,
    ClipOptions,
    FallbackOptions,
    FisherOptions,
    HyLo,
    InverseOptions,
    ParamScheduler,
    RefreshOptions,
    RowOptions,
    ScaleOptions,
    SparseMFAC,
    StatisticsOptions,
    StorageOptions,
    WindowOptions,
)
from secondorder.methods.documentation import EXPERT, USUAL
from secondorder.preconditioners.keywords import OBJECTS, flat_names
from secondorder.switching import EpochList

#: Maximum number of keyword-only arguments of each constructor.
LIMITS = {KFAC: 35, EKFAC: 38, HyLo: 30, MFAC: 26, SparseMFAC: 26, GGT: 26}
METHODS = pytest.mark.parametrize("method", LIMITS, ids=lambda method: method.__name__)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def steps(model, optimizer, count=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------------- signatures
@METHODS
def test_signatures_are_short(method):
    keyword_only = [p for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert len(keyword_only) <= LIMITS[method]


@METHODS
def test_help_groups_all_arguments(method):
    text = inspect.getdoc(method)
    usual, rest = text.split("\nArgs: Less common\n")
    common, expert = rest.split("\nArgs: For experts\n")
    for name in inspect.signature(method).parameters:
        place = usual if name in USUAL else expert if name in EXPERT else common
        assert f"    {name}: " in place, name


@pytest.mark.parametrize("kind", OBJECTS.values(), ids=lambda kind: kind.__name__)
def test_classes_are_public_frozen_and_documented(kind):
    assert getattr(secondorder, kind.__name__) is kind
    for field in fields(kind):
        assert f"\n    {field.name}: " in inspect.getdoc(kind)
    assert repr(kind()) == f"{kind.__name__}()"
    assert copy.deepcopy(kind()) == kind()
    with pytest.raises(FrozenInstanceError):
        setattr(kind(), fields(kind)[0].name, None)


#: Values, different from the default, of the fields that some method lacks.
NOT_DEFAULT = {
    (kind, name): {name: value}
    for kind, values in {
        RefreshOptions: {
            "stagger": True, "warmup": True, "basis_update": "qr", "full_every": 3, "precondition_steps": 3,
        },
        StatisticsOptions: {
            "batch_size": 3, "positions": 3, "weighting": "update", "burnin_steps": 3, "decay_per_step": True,
            "weight_decay": True, "norm_curvature": "diagonal",
        },
        BatchOptions: {"size": 3},
        FallbackOptions: {"betas": (0.5, 0.5), "eps": 1e-3},
        WindowOptions: {"divisor": "window", "solver": "eigh"},
    }.items()
    for name, value in values.items()
} | {(FisherOptions, "samples"): {"kind": "mc", "samples": 3}}  # fmt: skip


# ---------------------------------------------------------------------- old keywords and wrong values
@METHODS
def test_every_field_is_accepted_or_refused(method):
    """A field that a method lacks is refused by name. An object with only defaults is always accepted."""
    known = inspect.signature(method).parameters
    has = {(keyword, field.name) for keyword, field in flat_names(method).values()}
    for keyword, kind in OBJECTS.items():
        for field in fields(kind) if keyword in known else ():
            if (keyword, field.name) not in has:
                with pytest.raises(TypeError, match=f"{method.__name__} has no {field.name} in {keyword}"):
                    method(net(), **{keyword: kind(**NOT_DEFAULT[kind, field.name])})
        if keyword in known:
            method(net(), **{keyword: kind()})


@METHODS
def test_the_error_for_an_old_keyword_shows_the_new_call(method):
    known = inspect.signature(method).parameters
    for old, (keyword, field) in flat_names(method).items():
        if old not in known:
            with pytest.raises(TypeError) as found:
                method(net(), **{old: field.default})
            call = f"{keyword}={OBJECTS[keyword].__name__}({field.name}="
            assert str(found.value).startswith(f"{method.__name__}: instead of {old}=")
            assert call in str(found.value)


def test_several_old_keywords_become_one_call():
    with pytest.raises(TypeError) as found:
        KFAC(net(), stagger=True, factor_storage="packed", adaptive_damping=True, damping_interval=3)
    assert str(found.value) == (
        "KFAC: instead of stagger=True, factor_storage='packed', adaptive_damping=True, damping_interval=3, write "
        "refresh=RefreshOptions(stagger=True), storage=StorageOptions(packed=True), "
        "adaptation=AdaptationOptions(adaptive_damping=True, damping_interval=3)"
    )
    with pytest.raises(TypeError, match=r"grad_scaler: .*set optimizer.grad_scaler"):
        MFAC(net(), grad_scaler=None)
    with pytest.raises(TypeError, match="switch: write mode=policy"):
        HyLo(net(), switch=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'staggered'"):
        KFAC(net(), staggered=True)


@pytest.mark.parametrize("keyword", ["refresh", "storage", "statistics", "batch", "adaptation"])
def test_anything_but_the_object_is_refused(keyword):
    with pytest.raises(TypeError, match=rf"{keyword} must be \w+Options\(\.\.\.\), got True"):
        KFAC(net(), **{keyword: True})


def test_values_are_checked():
    """`tests/contract/test_errors.py` checks single options; these are checks of several at once and of classes."""
    for make, kind, text in [
        (lambda: FisherOptions("exact", samples=2), ValueError, "samples=2 needs"),
        (lambda: RefreshOptions(warmup="often"), TypeError, "warmup must be True or False or 'doubling', got 'often'"),
        (lambda: AdaptationOptions(min_damping=2.0, max_damping=1.0), ValueError, "must not be above"),
        (lambda: WindowOptions(dtype=torch.int8), ValueError, "dtype of a window"),
    ]:
        with pytest.raises(kind, match=text):
            make()


# ---------------------------------------------------------------------- effects of the objects
#: Methods with objects that change their steps.
PAIRS = {
    "kfac": (
        KFAC,
        {
            "statistics": StatisticsOptions(batch_size=8, weighting="update", burnin_steps=2, decay_per_step=True),
            "inverse_method": InverseOptions("eigen", damping_split="pi"),
            "storage": StorageOptions(max_factor_dim=7),
            "clip": ClipOptions(norm=0.5, value=0.1),
            "fallback": FallbackOptions("adamw", lr=0.02),
        },
    ),
    "ekfac": (
        EKFAC,
        {
            "refresh": RefreshOptions(basis_update="qr", full_every=2),
            "scale": ScaleOptions(decay=0.5, update_steps=2, batch_size=8, transport="kfac"),
        },
    ),
    "hylo": (HyLo, {"rows": RowOptions(max_rank=3, sampling="uniform", normalize_damping=True), "mode": "kis"}),
    "mfac": (MFAC, {"window": WindowOptions(divisor="window", solver="eigh"), "window_size": 3}),
    "ggt": (
        GGT,
        {"fallback": FallbackOptions("adamw", lr=0.02, betas=(0.5, 0.6), eps=1e-3), "window_size": 3, "graft": "adamw"},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_object_is_equivalent_to_the_keys_of_a_group(name):
    """The steps are bitwise equal, and differ from those without options."""
    method, chosen = PAIRS[name]
    often = {"factor_update_steps": 1, "inv_update_steps": 2} if method in (KFAC, EKFAC) else {}
    often |= {"update_steps": 1} if method is HyLo else {}
    models = [net(), net(), net()]
    by_objects = method(models[0], lr=0.1, **often, **chosen)
    keys = {key: value for key, value in by_objects.param_groups[0].items() if key in flat_names(method)}
    rest = {key: value for key, value in chosen.items() if key not in OBJECTS}
    group = {"params": list(models[1].parameters()), **{k: v for k, v in keys.items() if k not in ("tied",)}}
    by_keys = method([group], module=models[1], lr=0.1, **often, **rest)
    made = by_objects, by_keys, method(models[2], lr=0.1, **often, **rest)
    found = [steps(*pair) for pair in zip(models, made, strict=True)]
    assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))


def test_short_forms_are_equivalent_to_objects():
    for short, full in [
        ({"fisher": "mc"}, {"fisher": FisherOptions("mc")}),
        ({"inverse_method": "cholesky"}, {"inverse_method": InverseOptions("cholesky")}),
        ({"fallback": "adamw"}, {"fallback": FallbackOptions("adamw")}),
        ({"clip": 2.0}, {"clip": ClipOptions(norm=2.0)}),
    ]:
        one, other = KFAC(net(), lr=0.1, **short), KFAC(net(), lr=0.1, **full)
        assert repr(one) == repr(other)
        assert one.fisher == other.fisher
    policy = EpochList([(0, 1)], steps_per_epoch=1)
    optimizer = HyLo(net(), mode=policy)
    assert optimizer.param_groups[0]["mode"] == "auto"
    assert isinstance(optimizer.switch, EpochList)


def test_flat_settings_become_objects():
    flat = {"lr": 0.1, "stagger": True, "fisher": "mc", "fisher_samples": 2, "fallback": "adamw", "fallback_lr": 0.01}
    assert from_flat(KFAC, flat) == {
        "lr": 0.1,
        "refresh": RefreshOptions(stagger=True),
        "fisher": FisherOptions("mc", samples=2),
        "fallback": FallbackOptions("adamw", lr=0.01),
    }
    assert from_flat(MFAC, {"scale": "window"}) == {"window": WindowOptions(divisor="window")}


def test_groups_and_schedules_have_flat_keys():
    model = net()
    optimizer = KFAC(model, lr=0.1, storage=StorageOptions(max_factor_dim=64), clip=1.0)
    assert optimizer.param_groups[0]["max_factor_dim"] == 64
    assert optimizer.param_groups[0]["clip_norm"] == 1.0
    schedule = ParamScheduler(optimizer, clip_norm={0: 1.0, 1: 0.5})
    steps(model, optimizer, 1)
    schedule.step()
    assert optimizer.param_groups[0]["clip_norm"] == 0.5
    with pytest.raises(ValueError, match="groups have the keys clip_norm, clip_value"):
        KFAC([{"params": list(model.parameters()), "clip": 1.0}], module=model)
    for key in ("stagger", "adaptation", "factor_dtype", "adaptive_damping"):
        with pytest.raises(ValueError, match=f"{key}: set once for all groups"):
            KFAC([{"params": list(model.parameters()), key: True}], module=model)


def test_repr_shows_objects_with_the_values_of_each_group():
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "factor_batch_size": 4}]
    optimizer = KFAC(groups, module=model, statistics=StatisticsOptions(positions=2), overlap=True)
    first, second = repr(optimizer).split("Parameter Group 1")
    assert "statistics: StatisticsOptions(positions=2)\n" in first
    assert "statistics: StatisticsOptions(batch_size=4, positions=2)\n" in second
    assert "overlap: True" in first
    assert "storage" not in repr(optimizer)
    assert repr(copy.deepcopy(optimizer)) == repr(optimizer)


@pytest.mark.parametrize(
    ("method", "keywords", "named"),
    [
        (KFAC, {"statistics": StatisticsOptions(batch_size=-1)}, "StatisticsOptions.batch_size must be >= 1, got -1"),
        (EKFAC, {"scale": ScaleOptions(update_steps=0)}, "ScaleOptions.update_steps must be >= 1, got 0"),
        (HyLo, {"fallback": FallbackOptions("adagrad")}, "FallbackOptions.rule must be one of"),
        (KFAC, {"fallback": "adagrad"}, "fallback must be one of"),
        (MFAC, {"clip": ClipOptions(norm=-1.0)}, "ClipOptions.norm must be finite"),
    ],
    ids=str,
)
def test_an_error_names_the_field_that_was_written(method, keywords, named):
    with pytest.raises(ValueError, match=f"^{re.escape(named)}"):
        method(torch.nn.Linear(4, 2), **keywords)
