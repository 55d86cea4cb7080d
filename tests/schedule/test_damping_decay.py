"""`damping_decay` is the rule of a step-by-step recurrence, at whatever steps it is evaluated."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secondorder import KFAC
from secondorder.schedule import DampingDecay, ParamScheduler, damping_decay
from tests.support.tasks import MLP, assert_identical, train, values

CASES = {
    "published": (4.0, 0.04, 600, 0),
    "short": (1.5, 0.1, 13, 0),
    "warm-up": (1.0, 1e-3, 200, 37),
    "at once": (1.0, 1e-6, 3, 2),
    "constant": (0.3, 0.3, 50, 5),
    "whole numbers": (2, 1, 10, 1),
}


def recurrence(initial: float, final: float, decay_steps: int, warmup_steps: int, steps: int) -> list[float]:
    """λ of each step from the one before it: the gap to λ_T shrinks by 1 − α per step of the decay."""
    alpha = min(1.0, 2 * (math.log(initial) - math.log(final)) / math.log(10) / decay_steps)
    values = [float(initial)]
    for step in range(1, steps):
        before = values[-1]
        values.append(before if step <= warmup_steps else final + (1 - alpha) * (before - final))
    return values


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_recurrence_and_never_rise(case: str) -> None:
    initial, final, decay_steps, warmup_steps = CASES[case]
    rule = damping_decay(initial, final, decay_steps, warmup_steps)
    values = [rule(t) for t in range(3 * decay_steps + warmup_steps)]
    assert values == pytest.approx(recurrence(*CASES[case], len(values)), rel=1e-11)
    assert values[: warmup_steps + 1] == [initial] * (warmup_steps + 1)
    assert values == sorted(values, reverse=True)
    assert min(values) >= final
    assert all(type(value) is float for value in values)
    assert rule(10**9) == pytest.approx(final, rel=1e-12)


def test_values_by_hand() -> None:
    """With λ₀ = 10, λ_T = 1 and N = 4, α = 2 · 1 / 4, so the difference of 9 to λ_T is halved at each step."""
    rule = damping_decay(10.0, 1.0, 4, warmup_steps=2)
    assert [rule(t) for t in range(7)] == pytest.approx([10, 10, 10, 5.5, 3.25, 2.125, 1.5625], rel=1e-14)


positive = st.floats(1e-12, 1e6)


@given(positive, positive, st.integers(1, 10**6), st.integers(0, 1000), st.integers(0, 10**7))
def test_values_stay_between_the_ends(one: float, two: float, decay_steps: int, warmup_steps: int, step: int) -> None:
    initial, final = max(one, two), min(one, two)
    rule = damping_decay(initial, final, decay_steps, warmup_steps)
    assert final <= rule(step + 1) <= rule(step) <= initial
    assert rule(min(step, warmup_steps)) == initial


def test_training_reads_the_scheduled_damping_from_the_groups() -> None:
    rule, found = damping_decay(1.0, 1e-2, 6, warmup_steps=1), {}
    for how in ("scheduled", "by hand", "constant"):
        model = MLP.model()
        optimizer = KFAC(model, lr=0.05, damping=1.0, factor_update_steps=1, inv_update_steps=2)
        schedule = ParamScheduler(optimizer, **({"damping": rule} if how == "scheduled" else {}))
        for step in range(5):
            optimizer.param_groups[0].update({"damping": rule(step)} if how == "by hand" else {})
            train(model, optimizer, MLP, 1, start=step)
            schedule.step()
        found[how] = values(model)
    assert_identical(found["scheduled"], found["by hand"])
    assert not torch.equal(found["scheduled"]["first.weight"], found["constant"]["first.weight"])


def test_rules_compare_by_value_and_can_be_copied() -> None:
    rule = damping_decay(1, 0.25, decay_steps=8, warmup_steps=3)
    assert repr(rule) == "DampingDecay(initial=1.0, final=0.25, decay_steps=8, warmup_steps=3)"
    for other in (eval(repr(rule)), copy.deepcopy(rule), pickle.loads(pickle.dumps(rule)), DampingDecay(1, 0.25, 8, 3)):
        assert other == rule
        assert [other(t) for t in range(20)] == [rule(t) for t in range(20)]
    assert rule != damping_decay(1, 0.25, decay_steps=9, warmup_steps=3)


REFUSED: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((0.0, 0.0, 10), ValueError, "initial must be finite, > 0.0, got 0.0"),
    ((1.0, 0.0, 10), ValueError, "final must be finite, > 0.0, got 0.0"),
    ((math.inf, 0.1, 10), ValueError, "initial must be finite, > 0.0, got inf"),
    ((1.0, math.nan, 10), ValueError, "final must be finite, > 0.0, got nan"),
    (("1", 0.1, 10), TypeError, "initial must be a number, got '1'"),
    ((1.0, True, 10), TypeError, "final must be a number, got True"),
    ((1.0, 0.1, 0), ValueError, "decay_steps must be >= 1, got 0"),
    ((1.0, 0.1, 10.0), TypeError, "decay_steps must be an integer, got 10.0"),
    ((1.0, 0.1, 10, -1), ValueError, "warmup_steps must be >= 0, got -1"),
    ((1.0, 0.1, 10, None), TypeError, "warmup_steps must be an integer, got None"),
    ((0.1, 1.0, 10), ValueError, "final=1.0 must not be above initial=0.1.*milestones"),
]


def test_bad_values_are_refused() -> None:
    for arguments, error, match in REFUSED:
        with pytest.raises(error, match=match):
            damping_decay(*arguments)
