"""Classes of steps, and their amortized times."""

import math

import pytest

from benchmarks.commands.step_time import MEASURED, REPORTED, ROWS_REFRESHED, Intervals, ratio
from benchmarks.runner import History


def test_weights_are_the_shares_of_the_classes():
    for intervals in (*REPORTED, MEASURED, ROWS_REFRESHED):
        kinds = [intervals.step_class(step) for step in range(intervals.refresh)]
        shares = {kind: kinds.count(kind) / len(kinds) for kind in ("plain", "factor", "refresh")}
        assert intervals.weights() == pytest.approx(shares)


def test_published_row_is_reproduced():
    """Published medians in ms: the ratios 3.62, 4.86 and 12.05 give 3.82 at 10/100 and 5.58 at 1/10."""
    row = {"plain": [247.0], "factor": [332.0], "refresh": [831.0]}
    reference = {"plain": [68.3]}
    assert ratio(row, Intervals(10, 100), reference) == pytest.approx(3.82, abs=0.02)
    assert ratio(row, Intervals(1, 10), reference) == pytest.approx(5.58, abs=0.02)


def test_ratio_uses_medians_or_minima():
    row = {"plain": [2.0, 4.0, 90.0], "factor": [4.0, 6.0, 8.0], "refresh": [10.0, 20.0, 30.0]}
    reference = {"plain": [1.0, 2.0, 3.0]}
    assert ratio(row, Intervals(10, 100), reference) == pytest.approx((0.9 * 4 + 0.09 * 6 + 0.01 * 20) / 2)
    assert ratio(row, Intervals(10, 100), reference, min) == pytest.approx(0.9 * 2 + 0.09 * 4 + 0.01 * 10)
    assert ratio({"plain": [3.0]}, MEASURED, reference) == pytest.approx(1.5)


def test_history_smooths_and_finds_the_target():
    history = History("x", losses=[float(value) for value in range(30, 0, -1)], step_seconds=[0.5] * 30)
    assert history.loss_at(1) == 30
    assert history.loss_at(30) == pytest.approx(5.5)
    assert math.isnan(history.loss_at(31))
    assert history.steps_to(10.5) == 25
    assert history.steps_to(1.0) is None
    assert history.seconds[-1] == 15.0
    assert history.smoothed[9] == history.loss_at(10)
