"""Results of a comparison: one JSON file for each workload and size, which later runs extend."""

import datetime
import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

VERSION = 1


def load(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Read results, or begin new ones."""
    if not path.exists():
        return {"version": VERSION, **head, "machines": [], "runs": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        other = {key: found[key] for key in head if found[key] != head[key]}
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"{path} holds no results of a comparison: {err!r}") from err
    if found.get("version") != VERSION or other:
        told = ", ".join(f"{key} {value!r} instead of {head[key]!r}" for key, value in other.items())
        raise ValueError(f"{path} is of another comparison ({told or 'another version'}): give another --results")
    return dict(found)


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write results, whole or not at all: one run a line, so that a diff shows what came."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in results.items() if key != "runs"}
    lines = ",\n".join(json.dumps(_finite(run)) for run in results["runs"])
    text = json.dumps(_finite(head), indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n"
    spare = path.with_suffix(f".{os.getpid()}.part")
    spare.write_text(text, encoding="utf-8")
    spare.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def limits(threads: int) -> dict[str, Any]:
    """Measure what the machine can do, with as many threads as the runs have."""
    torch.set_num_threads(threads)
    gemm, copying = machine.gemm_gflops(), machine.copy_gbytes()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "processor": processor(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gemm_gflops": {"median": round(gemm.median, 1), "best": round(gemm.best, 1)},
        "copy_gbytes": {"median": round(copying.median, 1), "best": round(copying.best, 1)},
    }


def processor() -> str:
    """Return the name of the processor, or of its architecture."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.machine()
