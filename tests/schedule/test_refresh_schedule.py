"""Tables of `RefreshSchedule`: which steps capture, refresh, begin and adopt."""

from collections.abc import Callable

import pytest

from secondorder.curvature.refresh_schedule import Counters, RefreshSchedule

STEPS = range(40)
#: A block that has an estimate and was refreshed, and one that only has an estimate.
KNOWN, NEW = Counters(updates=3, refreshes=2), Counters(updates=3, refreshes=0)


def steps(answer: Callable[[int], bool]) -> list[int]:
    return [t for t in STEPS if answer(t)]


@pytest.mark.parametrize(
    ("schedule", "every", "interval", "updates", "expected"),
    [
        (RefreshSchedule(), 10, 20, 1, [0, 10, 20, 30]),
        (RefreshSchedule(), 10, 20, 0, [*STEPS]),  # until there is an estimate
        (RefreshSchedule(), 10, 0, 0, []),  # switched off
        (RefreshSchedule(warmup=True), 10, 5, 1, [0, 1, 2, 3, 4, 10, 20, 30]),
        (RefreshSchedule(warmup="doubling"), 10, 20, 1, [0, 1, 2, 4, 8, 10, 16, 20, 30]),
        (RefreshSchedule(stagger=True, overlap=True), 15, 20, 1, [0, 15, 30]),
    ],
)
def test_steps_that_capture(
    schedule: RefreshSchedule, every: int, interval: int, updates: int, expected: list[int]
) -> None:
    assert steps(lambda t: schedule.captures(t, every, interval, updates)) == expected


@pytest.mark.parametrize(
    ("schedule", "interval", "place", "expected"),
    [
        (RefreshSchedule(), 10, (2, 5), [0, 10, 20, 30]),
        (RefreshSchedule(), 0, (0, 5), []),
        (RefreshSchedule(stagger=True), 10, (0, 5), [0, 10, 20, 30]),
        (RefreshSchedule(stagger=True), 10, (2, 5), [4, 14, 24, 34]),
        (RefreshSchedule(stagger=True), 10, (1, 3), [3, 13, 23, 33]),  # a third of the interval, rounded down
        (RefreshSchedule(stagger=True), 2, (4, 5), [1, *range(3, 40, 2)]),  # more blocks than steps
        (RefreshSchedule(warmup=True), 10, (2, 5), [0, 1, 2, 4, 8, 10, 20, 30]),
        (RefreshSchedule(warmup=True), 16, (0, 1), [0, 1, 2, 4, 8, 16, 32]),
        (RefreshSchedule(warmup="doubling"), 10, (2, 5), [0, 1, 2, 4, 8, 10, 20, 30]),
        (RefreshSchedule(stagger=True, warmup=True), 10, (2, 5), [0, 1, 2, 4, 8, 14, 24, 34]),
        (RefreshSchedule(overlap=True), 10, (2, 5), []),  # nothing was begun
        (RefreshSchedule(overlap=True, warmup=True), 10, (2, 5), [0, 1, 2, 4, 8]),
    ],
)
def test_steps_that_refresh(
    schedule: RefreshSchedule, interval: int, place: tuple[int, int], expected: list[int]
) -> None:
    assert steps(lambda t: schedule.refreshes(t, interval, place, KNOWN)) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_first_refresh_waits_for_an_estimate_and_not_for_the_interval(overlap: bool) -> None:
    schedule = RefreshSchedule(stagger=True, overlap=overlap)
    assert schedule.refreshes(7, 10, (3, 5), NEW)
    assert not schedule.refreshes(7, 0, (3, 5), NEW)
    assert not schedule.refreshes(7, 10, (3, 5), Counters(updates=0, refreshes=0))


def test_a_first_refresh_that_failed_is_repeated_only_with_new_statistics() -> None:
    schedule = RefreshSchedule()
    assert not schedule.refreshes(10, 10, (0, 1), NEW._replace(failed_at=3))
    assert schedule.refreshes(11, 10, (0, 1), NEW._replace(updates=4, failed_at=3))
    assert schedule.refreshes(10, 10, (0, 1), KNOWN._replace(failed_at=3))  # a later one follows the interval


@pytest.mark.parametrize(("interval", "lag"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10)])
def test_lag_is_a_tenth_of_the_interval(interval: int, lag: int) -> None:
    assert RefreshSchedule.lag(interval) == lag


@pytest.mark.parametrize(
    ("schedule", "interval", "place", "begun", "adopted"),
    [
        (RefreshSchedule(), 10, (0, 1), [], []),
        (RefreshSchedule(overlap=True), 0, (0, 1), [], []),
        # Step 0 begins nothing that could be adopted: a first refresh is done at once.
        (RefreshSchedule(overlap=True), 10, (0, 1), [0, 10, 20, 30], [11, 21, 31]),
        (RefreshSchedule(overlap=True), 20, (0, 1), [0, 20], [22]),
        (RefreshSchedule(overlap=True, warmup=True), 10, (0, 1), [10, 20, 30], [11, 21, 31]),
        (RefreshSchedule(overlap=True, stagger=True), 20, (1, 4), [5, 25], [7, 27]),
        (RefreshSchedule(overlap=True, stagger=True, warmup=True), 20, (1, 4), [25], [27]),
    ],
)
def test_steps_that_begin_and_adopt(
    schedule: RefreshSchedule, interval: int, place: tuple[int, int], begun: list[int], adopted: list[int]
) -> None:
    assert steps(lambda t: schedule.begins(t, interval, place, 1)) == begun
    assert not steps(lambda t: schedule.begins(t, interval, place, 0))
    assert steps(lambda t: schedule.adoption(t, interval, place) == t > 0) == adopted


def test_a_refresh_that_was_begun_is_adopted_at_its_step_or_at_the_next_one_that_is_taken() -> None:
    schedule, counters = RefreshSchedule(overlap=True), KNOWN._replace(adopt_at=12)
    assert not schedule.adopts(11, 10, counters)
    assert schedule.adopts(12, 10, counters)
    assert schedule.adopts(15, 10, counters)
    assert schedule.refreshes(12, 10, (0, 1), counters)


@pytest.mark.parametrize(
    ("schedule", "interval", "counters"),
    [
        (RefreshSchedule(overlap=True), 10, KNOWN),  # nothing was begun
        (RefreshSchedule(overlap=True), 0, KNOWN._replace(adopt_at=12)),
        (RefreshSchedule(overlap=True), 10, NEW._replace(adopt_at=12)),  # it was discarded since
        (RefreshSchedule(), 10, KNOWN._replace(adopt_at=12)),
    ],
)
def test_nothing_is_adopted_without_a_valid_refresh(
    schedule: RefreshSchedule, interval: int, counters: Counters
) -> None:
    assert not schedule.adopts(12, interval, counters)
