"""Stored results: JSON files of a comparison or of the cells of a study, which later runs extend."""

import datetime
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from benchmarks import machine, report
from benchmarks.checkpoints import Pause
from benchmarks.report import to_json

VERSION = 1
CELLS_VERSION = 2  # version of the format of files of cells

Identity = Mapping[str, Any]  # everything that the results of a cell depend on, except for the code and the machine
Figures = dict[str, Any]
Machine = dict[str, Any]


def load(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Read results, or return new ones if there is no file."""
    if not path.exists():
        return {"version": VERSION, **head, "machines": [], "runs": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        other = {key: found[key] for key in head if found[key] != head[key]}
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"{path} holds no results of a comparison: {err!r}") from err
    if found.get("version") != VERSION or other:
        changes = ", ".join(f"{key} {value!r} instead of {head[key]!r}" for key, value in other.items())
        raise ValueError(f"{path} is of another comparison ({changes or 'another version'}): give another --results")
    return dict(found)


def save(path: Path, results: Mapping[str, Any]) -> None:
    write(path, {key: found for key, found in results.items() if key != "runs"}, "runs", results["runs"])


def write(path: Path, head: Mapping[str, Any], name: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write a file atomically, with one entry per line, so that a diff shows the new entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(to_json(entry), allow_nan=False) for entry in entries)
    text = json.dumps(to_json(head), indent=1, allow_nan=False)[:-2] + f',\n "{name}": [\n' + lines + "\n]}\n"
    draft = path.with_suffix(f".{os.getpid()}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def limits(threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    gemm, copying = machine.gemm_gflops(), machine.copy_gbytes()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "processor": processor(),
        "threads": threads, "python": platform.python_version(), "torch": torch.__version__,
        "gemm_gflops": {"median": round(gemm.median, 1), "best": round(gemm.best, 1)},
        "copy_gbytes": {"median": round(copying.median, 1), "best": round(copying.best, 1)},
    }  # fmt: skip


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.machine()


@dataclass
class Cells:
    """The finished runs of one experiment, which are stored in a file."""

    path: Path
    budget: float | None = None  # seconds after which no further run starts
    summary: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    @cached_property
    def _found(self) -> dict[str, tuple[Identity, Figures, Machine]]:
        if not self.path.is_file():
            return {}
        data = json.loads(self.path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("version") != CELLS_VERSION or "cells" not in data:
            raise ValueError(f"{self.path} is no file of finished runs of this version: move it to another folder")
        machines = data["machines"]
        return {_key(cell["of"]): (cell["of"], cell["figures"], machines[cell["machine"]]) for cell in data["cells"]}

    def get(self, identity: Identity) -> Figures | None:
        return self._found.get(_key(_timed(identity)), (None, None, None))[1]

    def run(
        self,
        identity: Identity,
        measure: Callable[[Pause], Figures],
        counts: Callable[[Figures], bool] = lambda _: True,
    ) -> Figures:
        """Return the results of a cell, after running it if necessary.

        The measurement gets a checkpoint, from which it can resume an interrupted run.

        Raises:
            TimeoutError: If there is no time left to run it.
        """
        found = self.get(identity)
        if found is not None and counts(found):
            return found
        if self.budget is not None and time.monotonic() - self._started > self.budget:
            raise TimeoutError
        identity = _timed(identity)  # before the measurement, which may change the number of threads
        pause = self.pause(identity)
        with report.status(_title(identity)):
            figures: Figures = to_json(measure(pause))
        self._found[_key(identity)] = to_json(identity), figures, {**report.environment(), "processor": processor()}
        self.write()
        pause.done()
        return figures

    def pause(self, identity: Identity) -> Pause:
        digest = hashlib.sha256(_key(_timed(identity)).encode()).hexdigest()[:16]
        return Pause(self.path.with_suffix(".runs") / f"{digest}.pt", dict(to_json(identity)))

    def write(self) -> None:
        head = self.payload()
        write(self.path, head, "cells", head.pop("cells"))

    def payload(self) -> dict[str, Any]:
        found = list(self._found.values())
        machines = [used for index, (_, _, used) in enumerate(found) if used not in [m for _, _, m in found[:index]]]
        cells = [{"of": of, "figures": figures, "machine": machines.index(used)} for of, figures, used in found]
        return {"version": CELLS_VERSION, "machines": machines, **self.summary, "cells": cells}


def _timed(identity: Identity) -> Identity:
    return {**identity, "threads": torch.get_num_threads()}


def _title(identity: Identity) -> str:
    named = [str(identity[key]) for key in ("workload", "optimizer", "what") if key in identity]
    return ", ".join([*named, *([f"seed {identity['seed']}"] if "seed" in identity else [])])


def _key(identity: Identity) -> str:
    return json.dumps(to_json(identity), sort_keys=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as err:
        raise ValueError(f"{path} is being written by another process: wait for it, or pass another file") from err
    try:
        yield
    finally:
        lock.release()
