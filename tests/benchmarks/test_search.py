"""The search of settings brackets rates on both sides, tries choices, and only compares losses."""

import math

import pytest

from benchmarks.commands.seconds import STEP, Axis, search

RATE, BETA = Axis(("lr", "plain_lr")), Axis(("beta",), (0.9, 0.99))


class Losses:
    """A loss with one minimum in the rate, which depends on a choice; it records the settings that were tried."""

    def __init__(self, rate: float, shift: float = 1.0) -> None:
        self.rate, self.shift, self.tried = rate, shift, []

    def __call__(self, settings):
        if settings not in self.tried:
            self.tried.append(settings)
        best = self.rate * (self.shift if settings["beta"] == 0.99 else 1.0)
        return math.log(settings["lr"] / best) ** 2 - (settings["beta"] == 0.99)


@pytest.mark.parametrize("power", [-5, -1, 0, 1, 4])
def test_a_rate_is_bracketed_on_both_sides(power):
    losses = Losses(STEP**power)
    found = RATE.best({"lr": 1.0, "plain_lr": 0.5, "beta": 0.9}, losses)
    assert found["lr"] == pytest.approx(STEP**power, rel=1e-3)
    assert found["plain_lr"] == pytest.approx(0.5 * STEP**power, rel=1e-3)
    tried = {round(math.log(settings["lr"], STEP)) for settings in losses.tried}
    assert tried == set(range(min(power, 0) - 1, max(power, 0) + 2))


def test_choices_move_the_rate_which_is_searched_again():
    losses = Losses(1.0, shift=STEP)
    found = search({"lr": 1.0, "plain_lr": 1.0, "beta": 0.9}, [RATE, BETA], losses)
    assert found["beta"] == 0.99
    assert found["lr"] == pytest.approx(STEP, rel=1e-3)


def test_runs_that_fail_are_the_worst_ones():
    def loss_of(settings):
        return math.inf if settings["lr"] > 1.5 else -settings["lr"]

    assert RATE.best({"lr": 1.0}, loss_of)["lr"] == 1.0


def test_a_search_ends_if_every_run_fails():
    tried = []
    found = RATE.best({"lr": 1.0}, lambda settings: tried.append(settings["lr"]) or math.inf)
    assert found == {"lr": 1.0}
    assert len(tried) == 3


def test_a_search_without_an_optimum_ends():
    found = RATE.best({"lr": 1.0}, lambda settings: -settings["lr"])
    assert found["lr"] == pytest.approx(STEP**12, rel=1e-3)
