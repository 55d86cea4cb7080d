"""Values that are written into a group while training: what the constructor would refuse, the next step refuses."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, snapshot, train, values

BAD = [
    ("lr", -0.1, ValueError),
    ("weight_decay", float("nan"), ValueError),
    ("momentum", "0.9", TypeError),
    ("clip_norm", 0.0, ValueError),
    ("graft", "adamax", ValueError),
]


def test_a_bad_value_is_refused_before_anything_changes(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    optimizer, other = method.build(model), method.build(twin)
    train(model, optimizer, mlp, 3)
    train(twin, other, mlp, 5)
    (group,) = optimizer.param_groups
    for key, value, error in [*BAD, ("damping" if "damping" in group else "eps", -1.0, ValueError)]:
        good, before, state = group[key], values(model), snapshot(optimizer)
        group[key] = value
        with pytest.raises(error, match=key):
            train(model, optimizer, mlp, 1, start=3)
        assert_identical(values(model), before)
        group[key] = good
        assert_identical(snapshot(optimizer), state)
    train(model, optimizer, mlp, 2, start=3)
    assert_identical(values(model), values(twin))


@pytest.mark.option("factor_update_steps")
def test_an_interval_of_zero_is_refused_in_the_forward(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 1)
    optimizer.param_groups[0]["factor_update_steps"] = 0
    with pytest.raises(ValueError, match="factor_update_steps must be >= 1, got 0"):
        model(mlp.batch(1)[0])


def test_options_that_exclude_each_other_are_refused(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 1)
    optimizer.param_groups[0].update(graft="sgd", inner="adam")
    with pytest.raises(ValueError, match="both set the step size"):
        train(model, optimizer, mlp, 1, start=1)


def test_numbers_of_numpy_are_numbers(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    optimizer.param_groups[0].update(lr=np.float32(0.125), weight_decay=np.float64(0.5))
    twin, other = method.start(mlp)
    other.param_groups[0].update(lr=0.125, weight_decay=0.5)
    train(model, optimizer, mlp, 2)
    train(twin, other, mlp, 2)
    assert_identical(values(model), values(twin))


def warned_of(method: Method, task: Task, **keywords: Any) -> list[str]:
    """Texts of the warnings of a constructor about options without effect."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.build(task.model(), **keywords)
    return [str(w.message) for w in caught if "no effect" in str(w.message)]


def test_options_that_no_rule_reads_are_named_once(method: Method, mlp: Task) -> None:
    own = "fallback_betas" if "sgd_weight" in method.build(mlp.model()).param_groups[0] else "betas"
    quiet: list[dict[str, Any]] = [
        {"momentum": 0.9, "nesterov": True, "graft": None},
        {"momentum": 0.0, "graft": "adamw"},
        {"momentum": 0.5, "graft": "adamw", "fallback": "sgd"},
        {own: (0.8, 0.9), "fallback": "adamw"},
    ]
    assert [warned_of(method, mlp, **keywords) for keywords in quiet] == [[]] * len(quiet)
    (text,) = warned_of(method, mlp, momentum=0.5, nesterov=True, graft="adamw")
    assert f"momentum=0.5 and nesterov=True have no effect, because Adam's rule sets every step: use {own}" in text
    (text,) = warned_of(method, mlp, momentum=0.9, **{own: (0.8, 0.9)})
    assert f"{own}=(0.8, 0.9) has no effect, because only Adam's rule reads it" in text


@pytest.mark.option("momentum_mode", "window_size")
def test_momentum_before_the_preconditioner_acts_under_a_graft(method: Method, mlp: Task) -> None:
    assert not warned_of(method, mlp, momentum=0.5, momentum_mode="pre", graft="adamw")
