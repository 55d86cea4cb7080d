"""Options as objects: signatures are short, errors explain old keywords, and keys of groups are equivalent."""

import copy
import inspect
import re
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import nn

import secondorder as so
from benchmarks.recipes.building import from_flat
from secondorder.methods.documentation import EXPERT, USUAL
from secondorder.preconditioners.keywords import OBJECTS, flat_names
from secondorder.switching import EpochList
from tests.support.models import fit, seeded_build

#: Maximum number of keyword-only arguments of each constructor.
LIMITS = {so.KFAC: 35, so.EKFAC: 38, so.HyLo: 30, so.MFAC: 26, so.SparseMFAC: 26, so.GGT: 26}
METHODS = pytest.mark.parametrize("method", LIMITS, ids=lambda method: method.__name__)


def net():
    return seeded_build(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)))


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
    assert getattr(so, kind.__name__) is kind
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
        so.RefreshOptions: {
            "stagger": True, "warmup": True, "basis_update": "qr", "full_every": 3, "precondition_steps": 3,
        },
        so.StatisticsOptions: {
            "batch_size": 3, "positions": 3, "weighting": "update", "burnin_steps": 3, "decay_per_step": True,
            "weight_decay": True, "norm_curvature": "diagonal",
        },
        so.BatchOptions: {"size": 3},
        so.FallbackOptions: {"betas": (0.5, 0.5), "eps": 1e-3},
        so.WindowOptions: {"divisor": "window", "solver": "eigh"},
    }.items()
    for name, value in values.items()
} | {(so.FisherOptions, "samples"): {"kind": "mc", "samples": 3}}  # fmt: skip


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
        so.KFAC(net(), stagger=True, factor_storage="packed", adaptive_damping=True, damping_interval=3)
    assert str(found.value) == (
        "KFAC: instead of stagger=True, factor_storage='packed', adaptive_damping=True, damping_interval=3, write "
        "refresh=RefreshOptions(stagger=True), storage=StorageOptions(packed=True), "
        "adaptation=AdaptationOptions(adaptive_damping=True, damping_interval=3)"
    )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: so.MFAC(net(), grad_scaler=None), TypeError, r"grad_scaler: .*set optimizer.grad_scaler"),
        (lambda: so.HyLo(net(), switch=None), TypeError, "switch: write mode=policy"),
        (lambda: so.KFAC(net(), staggered=True), TypeError, "unexpected keyword argument 'staggered'"),
        # `tests/contract/test_errors.py` checks single options; these are checks of several at once and of classes
        (lambda: so.FisherOptions("exact", samples=2), ValueError, "samples=2 needs"),
        (lambda: so.RefreshOptions(warmup="often"), TypeError, "must be True or False or 'doubling', got 'often'"),
        (lambda: so.AdaptationOptions(min_damping=2.0, max_damping=1.0), ValueError, "must not be above"),
        (lambda: so.WindowOptions(dtype=torch.int8), ValueError, "dtype of a window"),
    ],
)
def test_other_keywords_and_wrong_values_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("keyword", ["refresh", "storage", "statistics", "batch", "adaptation"])
def test_anything_but_the_object_is_refused(keyword):
    with pytest.raises(TypeError, match=rf"{keyword} must be \w+Options\(\.\.\.\), got True"):
        so.KFAC(net(), **{keyword: True})


# ---------------------------------------------------------------------- effects of the objects
#: Methods with objects that change their steps.
PAIRS = {
    so.KFAC: {
        "statistics": so.StatisticsOptions(batch_size=8, weighting="update", burnin_steps=2, decay_per_step=True),
        "inverse_method": so.InverseOptions("eigen", damping_split="pi"),
        "storage": so.StorageOptions(max_factor_dim=7),
        "clip": so.ClipOptions(norm=0.5, value=0.1),
        "fallback": so.FallbackOptions("adamw", lr=0.02),
    },
    so.EKFAC: {
        "refresh": so.RefreshOptions(basis_update="qr", full_every=2),
        "scale": so.ScaleOptions(decay=0.5, update_steps=2, batch_size=8, transport="kfac"),
    },
    so.HyLo: {"rows": so.RowOptions(max_rank=3, sampling="uniform", normalize_damping=True), "mode": "kis"},
    so.MFAC: {"window": so.WindowOptions(divisor="window", solver="eigh"), "window_size": 3},
    so.GGT: {
        "fallback": so.FallbackOptions("adamw", lr=0.02, betas=(0.5, 0.6), eps=1e-3), "window_size": 3,
        "graft": "adamw",
    },
}  # fmt: skip


@pytest.mark.parametrize(("method", "chosen"), PAIRS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_an_object_is_equivalent_to_the_keys_of_a_group(method, chosen):
    """The steps are bitwise equal, and differ from those without options."""
    often = {"factor_update_steps": 1, "inv_update_steps": 2} if method in (so.KFAC, so.EKFAC) else {}
    often |= {"update_steps": 1} if method is so.HyLo else {}
    models = [net(), net(), net()]
    by_objects = method(models[0], lr=0.1, **often, **chosen)
    keys = {key: value for key, value in by_objects.param_groups[0].items() if key in flat_names(method)}
    rest = {key: value for key, value in chosen.items() if key not in OBJECTS}
    keys.pop("tied", None)
    by_keys = method([{"params": list(models[1].parameters()), **keys}], module=models[1], lr=0.1, **often, **rest)
    made = by_objects, by_keys, method(models[2], lr=0.1, **often, **rest)
    found = [fit(*pair, 16, 6, steps=4) for pair in zip(models, made, strict=True)]
    assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))


def test_short_forms_are_equivalent_to_objects():
    for short, full in [
        ({"fisher": "mc"}, {"fisher": so.FisherOptions("mc")}),
        ({"inverse_method": "cholesky"}, {"inverse_method": so.InverseOptions("cholesky")}),
        ({"fallback": "adamw"}, {"fallback": so.FallbackOptions("adamw")}),
        ({"clip": 2.0}, {"clip": so.ClipOptions(norm=2.0)}),
    ]:
        one, other = so.KFAC(net(), lr=0.1, **short), so.KFAC(net(), lr=0.1, **full)
        assert repr(one) == repr(other)
        assert one.fisher == other.fisher
    policy = EpochList([(0, 1)], steps_per_epoch=1)
    optimizer = so.HyLo(net(), mode=policy)
    assert optimizer.param_groups[0]["mode"] == "auto"
    assert isinstance(optimizer.switch, EpochList)


def test_flat_settings_become_objects():
    flat = {"lr": 0.1, "stagger": True, "fisher": "mc", "fisher_samples": 2, "fallback": "adamw", "fallback_lr": 0.01}
    assert from_flat(so.KFAC, flat) == {
        "lr": 0.1,
        "refresh": so.RefreshOptions(stagger=True),
        "fisher": so.FisherOptions("mc", samples=2),
        "fallback": so.FallbackOptions("adamw", lr=0.01),
    }
    assert from_flat(so.MFAC, {"scale": "window"}) == {"window": so.WindowOptions(divisor="window")}


def test_groups_have_flat_keys():
    model = net()
    with pytest.raises(ValueError, match="groups have the keys clip_norm, clip_value"):
        so.KFAC([{"params": list(model.parameters()), "clip": 1.0}], module=model)
    for key in ("stagger", "adaptation", "factor_dtype", "adaptive_damping"):
        with pytest.raises(ValueError, match=f"{key}: set once for all groups"):
            so.KFAC([{"params": list(model.parameters()), key: True}], module=model)


def test_repr_shows_objects_with_the_values_of_each_group():
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "factor_batch_size": 4}]
    optimizer = so.KFAC(groups, module=model, statistics=so.StatisticsOptions(positions=2), overlap=True)
    first, second = repr(optimizer).split("Parameter Group 1")
    assert "statistics: StatisticsOptions(positions=2)\n" in first
    assert "statistics: StatisticsOptions(batch_size=4, positions=2)\n" in second
    assert "overlap: True" in first
    assert "storage" not in repr(optimizer)
    assert repr(copy.deepcopy(optimizer)) == repr(optimizer)


@pytest.mark.parametrize(
    ("method", "keywords", "named"),
    [
        (
            so.KFAC,
            {"statistics": so.StatisticsOptions(batch_size=-1)},
            "StatisticsOptions.batch_size must be >= 1, got -1",
        ),
        (so.EKFAC, {"scale": so.ScaleOptions(update_steps=0)}, "ScaleOptions.update_steps must be >= 1, got 0"),
        (so.HyLo, {"fallback": so.FallbackOptions("adagrad")}, "FallbackOptions.rule must be one of"),
        (so.KFAC, {"fallback": "adagrad"}, "fallback must be one of"),
        (so.MFAC, {"clip": so.ClipOptions(norm=-1.0)}, "ClipOptions.norm must be finite"),
    ],
    ids=str,
)
def test_an_error_names_the_field_that_was_written(method, keywords, named):
    with pytest.raises(ValueError, match=f"^{re.escape(named)}"):
        method(torch.nn.Linear(4, 2), **keywords)
