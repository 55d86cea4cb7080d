"""Numbers for the tables and plots of an analysis, computed from its event files alone.

The files are those of :class:`secondorder.diagnostics.Analysis`, and ``train.jsonl`` of the command ``analyse``.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from secondorder.diagnostics import read_events

Event = dict[str, Any]

TRAIN = "train"
FILES = ("rank", "trend", "error", "profile", TRAIN)
"""File names without their suffix."""
TRAIN_COLUMNS = ("step", "epoch", "loss", "lr", "damping", "mode", "elapsed_s")
ALL = "all"
"""Value of the column ``layer`` that represents all layers together."""
STAGES = {
    "capture": "capture_ms",
    "exchange": "exchange_ms",
    "statistics": "statistics_ms",
    "select": "select_ms",
    "kernel": "kernel_ms",
    "invert": "invert_ms",
    "rest of refresh": "",
    "share": "share_ms",
    "precondition": "precondition_ms",
    "update": "update_ms",
}
"""Consecutive stages of a step, with their columns."""
_WITHIN_REFRESH = ("select", "kernel", "invert")
KINDS = ("plain", "capture", "refresh")
"""Kinds of steps: those that only use the curvature, those that gather statistics, and those that refresh it."""
_IDLE_MS = 0.05  # upper bound of the refresh stage in a step without a refresh


def load(folder: Path) -> dict[str, list[Event]]:
    paths = {name: folder / f"{name}.jsonl" for name in FILES}
    return {name: read_events(path) if path.exists() else [] for name, path in paths.items()}


def layers(events: Iterable[Event]) -> list[str]:
    return [name for name in dict.fromkeys(event["layer"] for event in events) if name != ALL]


def series(events: Iterable[Event], x: str, y: str | Callable[[Event], float | None]) -> tuple[list[Any], list[float]]:
    values = ((event[x], event[y] if isinstance(y, str) else y(event)) for event in events)
    points = [(at, value) for at, value in values if value is not None]
    return [at for at, _ in points], [value for _, value in points]


def where(events: Iterable[Event], **values: object) -> list[Event]:
    return [event for event in events if all(event[key] == value for key, value in values.items())]


def rank_share(event: Event) -> float | None:
    return None if event["rank90"] is None else event["rank90"] / event["m"]


def median(events: Iterable[Event], y: str | Callable[[Event], float | None]) -> float | None:
    found = series(events, "step", y)[1]
    return statistics.median(found) if found else None


def spans(events: Sequence[Event], mode: str) -> list[tuple[int, int]]:
    modes: dict[int, set[str]] = {}
    for event in events:
        modes.setdefault(event["step"], set()).add(event["mode"])
    found: list[tuple[int, int]] = []
    for step, following in zip(modes, [*list(modes)[1:], max(modes, default=0) + 1], strict=True):
        if mode not in modes[step]:
            continue
        if found and found[-1][1] == step:
            found[-1] = found[-1][0], following
        else:
            found.append((step, following))
    return found


def stage_times(profile: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Return the median time of every stage by kind of step. Step 0, which allocates, is used only as a fallback."""
    steps: dict[str, list[Event]] = {kind: [] for kind in KINDS}
    for kind, event in zip(_kinds(profile), profile, strict=True):
        steps[kind].append(event)
    found = {}
    for kind, own in steps.items():
        counted = [event for event in own if event["step"] > 0] or own
        if counted:
            found[kind] = {stage: statistics.median(_stage(event, stage) for event in counted) for stage in STAGES}
    return found


def _kinds(profile: Sequence[Event]) -> list[str]:
    times = [event["refresh_ms"] for event in profile]
    # Even on a busy machine, that stage takes much less time in steps without a refresh than in the others.
    shortest, longest = min(times, default=0.0), max(times, default=0.0)
    least = max(_IDLE_MS, min(longest / 10, math.sqrt(shortest * longest)))
    return [
        "refresh" if event["refresh_ms"] >= least else "capture" if event["capture_ms"] > 0 else "plain"
        for event in profile
    ]


def _stage(event: Event, stage: str) -> float:
    if STAGES[stage]:
        return float(event[STAGES[stage]])
    rest: float = event["refresh_ms"] - sum(event[STAGES[part]] for part in _WITHIN_REFRESH)
    return max(0.0, rest)
