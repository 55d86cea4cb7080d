"""`StageClock` adds up stages by name, including nested ones."""

import threading
from contextlib import suppress

import pytest
import torch

from secondorder.diagnostics import StageClock, timing


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(timing, "time", hands)
    return hands


def test_times_of_one_name_add_up_in_milliseconds_until_they_are_taken(hands: Hands) -> None:
    """A stage counts what runs inside it; a stage inside itself counts once, and one that raises counts, too."""
    clock = StageClock()
    for seconds in (0.25, 0.5):
        with suppress(KeyError), clock.stage("refresh"):
            hands.seconds += seconds
            with clock.stage("kernel"):
                hands.seconds += 2
            with clock.stage("refresh"):
                hands.seconds += 4
            raise KeyError("stop")
        hands.seconds += 100.0
    assert clock.take() == {"kernel": 4000.0, "refresh": 12750.0}
    assert clock.take() == {}


def test_a_clock_that_does_not_run_records_nothing(hands: Hands) -> None:
    clock = StageClock(torch.device("cpu"))
    clock.running = False
    with clock.stage("update"):
        hands.seconds += 1
        clock.running = True  # affects stages that begin now
    with clock.stage("share"):
        hands.seconds += 1
    assert clock.take() == {"share": 1000.0}


def test_a_clock_that_is_never_read_keeps_few_spans(hands: Hands) -> None:
    clock = StageClock()
    for _ in range(3000):
        for _ in range(5):
            with clock.stage("short"):
                hands.seconds += 1
        clock.end_step()
    assert len(clock._spans) <= 4096 + 5
    assert clock.last_step() == {"short": 5000.0}
    assert clock.take()["short"] > 5000.0
    assert clock.take() == {}


def test_threads_may_be_in_one_stage_together(hands: Hands) -> None:
    clock, inside = StageClock(), threading.Barrier(2)

    def capture(*others: threading.Thread) -> None:
        with clock.stage("capture"):
            inside.wait(timeout=60)
            for other in others:
                other.join()
                hands.seconds += 1

    other = threading.Thread(target=capture)
    other.start()
    capture(other)
    assert clock.take() == {"capture": 1000.0}


@pytest.mark.gpu
def test_a_device_times_itself() -> None:
    device = torch.device("cuda")
    x = torch.randn(512, 512, device=device)
    clock = StageClock(device)
    for _ in range(2):
        with clock.stage("refresh"):
            for _ in range(10):
                x = x @ x / 512
            with clock.stage("kernel"):
                x = x @ x / 512
    times = clock.take()
    assert 0 < times["kernel"] < times["refresh"]
