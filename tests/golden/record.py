# ruff: noqa: T201 - it prints
"""Run everything, in processes of one thread each, and write one file per run."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

import secondorder
from tests.golden import checkpoints, cost, ranks, runs


def _table() -> dict[str, Any]:
    """All runs, by set and name."""
    sets = {**runs.SETS, **ranks.SETS, **checkpoints.SETS, **cost.SETS}
    return {f"{folder}/{name}": run for folder, made in sets.items() for name, run in made()}


_TABLE: dict[str, Any] = {}


def _start() -> None:
    torch.set_num_threads(1)
    _TABLE.update(_table())


def _trace(name: str, directory: Path) -> tuple[str, str, float]:
    """Record a run; what it raised, and the seconds that it took."""
    start = time.perf_counter()
    trace = _TABLE[name].trace()
    file = directory / f"{name.replace(' ', '_')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(trace, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    first = next(iter(trace.values()), None)
    error = trace.get("error") or (first.get("error") if isinstance(first, dict) else None)
    return name, error or "", time.perf_counter() - start


def record_all(directory: Path, only: str, jobs: int, checkout: str) -> int:
    """Record the runs whose names fit a pattern; the status of the command."""
    start, wanted = time.perf_counter(), [name for name in _table() if fnmatch(name, only)]
    assert secondorder.__file__ is not None
    assert Path(secondorder.__file__).resolve().is_relative_to(checkout)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    about = {"torch": torch.__version__, "python": sys.version.split()[0]}
    Path(directory, "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    order = sorted(wanted, key=lambda name: name.split("/")[0] not in ("ranks", "fsdp"))  # the long ones first
    context = multiprocessing.get_context("spawn")
    times: list[tuple[float, str]] = []
    with ProcessPoolExecutor(jobs, context, _start) as pool:
        for future in [pool.submit(_trace, name, directory) for name in order]:
            name, error, seconds = future.result()
            times.append((seconds, name))
            if error:
                print(f"{name}: {error[:160]}")
    print(f"{len(order)} runs in {time.perf_counter() - start:.0f} s; the longest: ", end="")
    print(", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(times, reverse=True)[:4]))
    return 0
