"""One file from which a run goes on as if it had never stopped.

The stream of batches is not saved but drawn again up to where it was, so that a file depends on no workload's insides.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import Ranks
from benchmarks.runner import Trainer

_VERSION = 1


def save(path: Path, trainer: Trainer, ranks: Ranks, run: dict[str, Any]) -> None:
    """Write a checkpoint; every rank calls it, the first one writes. One killed here leaves the file before."""
    state = trainer.state_dict()
    if not ranks.first:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".tmp")
    torch.save({"version": _VERSION, "run": run, "trainer": state}, new)
    os.replace(new, path)


def load(path: Path, trainer: Trainer, run: dict[str, Any], trusted: bool = False) -> None:
    """Go on from a checkpoint."""
    if not path.is_file():
        raise ValueError(f"no checkpoint {path}: --resume auto starts anew where there is none")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as err:
        raise ValueError(
            f"{path} holds more than tensors, as states of some peers do: --trust-checkpoint, if you wrote it"
        ) from err
    if not isinstance(saved, dict) or saved.get("version") != _VERSION:
        raise ValueError(f"{path} is no checkpoint of this command")
    differing = [key for key in {**saved["run"], **run} if saved["run"].get(key) != run.get(key)]
    if differing:
        told = ", ".join(f"{key} {saved['run'].get(key)!r} there, {run.get(key)!r} here" for key in differing)
        raise ValueError(f"{path} is of another run: {told}")
    trainer.load_state_dict(saved["trainer"])
