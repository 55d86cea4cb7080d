"""Pure mathematics: the minimum of a quadratic in one or two variables, the ratio, and the rule for λ."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secondorder.linalg.quadratic import QuadraticModel, bounded, damping_factor, is_rounding, minimise, reduction_ratio

numbers = st.floats(-2, 2)


@given(st.lists(numbers, min_size=4, max_size=4), numbers, numbers)
def test_two_coefficients_solve_the_dense_system(entries: list[float], c1: float, c2: float) -> None:
    root = np.array(entries).reshape(2, 2)
    M, c = root @ root.T + 0.1 * np.eye(2), np.array([c1, c2])
    found = minimise(torch.tensor(M), torch.tensor(c), 1e-8)
    np.testing.assert_allclose(found.numpy(), -np.linalg.solve(M, c), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("second", [0.0, 1e-9, 1.0, 1e9])
def test_a_parallel_second_direction_is_ignored(second: float) -> None:
    d1 = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    D = torch.stack([d1, second * d1])
    found = minimise(D @ D.mT, D @ torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), 1e-8)
    assert found.tolist() == [pytest.approx(-4 / 14), 0.0]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_tiny_or_huge_second_direction_is_used(scale: float) -> None:
    made = torch.Generator().manual_seed(0)
    D, c = torch.randn(2, 5, dtype=torch.float64, generator=made), torch.tensor([0.3, -1.0], dtype=torch.float64)
    plain = minimise(D @ D.mT, c, 1e-8)
    E, units = D.clone(), torch.tensor([1.0, scale], dtype=torch.float64)
    E[1] *= scale
    torch.testing.assert_close(minimise(E @ E.mT, c * units, 1e-8) * units, plain)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_without_curvature_the_step_is_not_changed(bad: float) -> None:
    matrix = torch.tensor([[bad, 0.0], [0.0, 1.0]], dtype=torch.float64)
    found = minimise(matrix, torch.tensor([1.0, 1.0], dtype=torch.float64), 1e-8)
    assert found.tolist() == [-1.0, 0.0]


def test_damping_and_decay_enter_the_change_and_the_minimum() -> None:
    x, g, w = np.array([0.7, -0.4]), np.array([1.0, -2.0]), np.array([0.2, 0.3])
    C, D, W = np.array([[3.0, 1.0], [1.0, 2.0]]), np.array([[0.5, 0.1], [0.1, 0.7]]), np.diag([0.4, 0.6])
    pieces = {"gradient": g, "curvature": C, "damping": D, "decay_gradient": w, "decay": W}
    model = QuadraticModel(**{name: torch.tensor(piece) for name, piece in pieces.items()})
    assert float(model.change(torch.tensor(x), damped=False)) == pytest.approx(g @ x + 0.5 * x @ C @ x)
    assert float(model.change(torch.tensor(x), damped=True)) == pytest.approx(g @ x + 0.5 * x @ (C + D) @ x)
    np.testing.assert_allclose(model.minimum(1e-8).numpy(), -np.linalg.solve(C + D + W, g + w))


@pytest.mark.parametrize(
    ("actual", "predicted", "direction"),
    [
        (-1.0, -1.0, -1),  # as predicted
        (-2.0, -1.0, -1),  # better than predicted
        (-0.76, -1.0, -1),
        (-0.75, -1.0, 0),  # the bounds themselves do not change λ
        (-0.5, -1.0, 0),
        (-0.25, -1.0, 0),
        (-0.24, -1.0, 1),
        (0.5, -1.0, 1),  # a rise against a predicted fall
        (-0.5, 1.0, -1),  # a fall against a predicted rise
        (math.nan, -1.0, 1),
        (math.inf, -1.0, 1),
        (-1.0, math.nan, 1),
        (1.0, 0.0, 1),
        (-1.0, -math.inf, 1),  # ρ = 0
    ],
)
@pytest.mark.parametrize("interval", [1, 5, 20])
def test_the_rule_for_damping(actual: float, predicted: float, direction: int, interval: int) -> None:
    expected = {-1: 0.95**interval, 0: 1.0, 1: 1 / 0.95**interval}[direction]
    assert damping_factor(actual, predicted, interval) == pytest.approx(expected, rel=1e-15)


def test_the_ratio_to_a_prediction_of_zero_is_nan() -> None:
    assert math.isnan(reduction_ratio(0.0, 0.0))
    assert math.isnan(reduction_ratio(1.0, 0.0))
    assert reduction_ratio(-1.0, -2.0) == 0.5


def test_products_are_bounded() -> None:
    found = [bounded(1.0, 0.5, 0.1, 10.0), bounded(1.0, 0.01, 0.1, 10.0), bounded(1.0, 100.0, 0.1, 10.0)]
    assert found == [0.5, 0.1, 10.0]
    assert math.isfinite(bounded(1e300, 1e300, 0.0, math.inf))


def test_only_tiny_finite_changes_are_rounding() -> None:
    for loss, actual, predicted in [(1.0, 1e-16, -1e-16), (0.0, 0.0, 0.0)]:
        assert is_rounding(loss, actual, predicted, 2e-16)
    for loss, actual, predicted in [
        (1.0, 1e-3, -1e-16),
        (1.0, 1e-16, -1e-3),
        (1.0, 1e-16, math.nan),
        (math.inf, math.nan, -1e-16),
        (math.inf, -math.inf, -1e-16),
        (math.nan, math.nan, -1e-16),
    ]:
        assert not is_rounding(loss, actual, predicted, 2e-16)
