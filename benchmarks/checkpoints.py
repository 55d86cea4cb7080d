"""Checkpoints, from which a run continues as if it had never been interrupted.

The stream of batches is not saved. It is drawn again up to the last step, so that no workload needs a state of its own.
"""

import contextlib
import os
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import Ranks
from benchmarks.runner import FAILURES, Trainer

_VERSION = 1
SECONDS = 60.0  # seconds between two checkpoints of a run that a command resumes automatically


def save(path: Path, trainer: Trainer, ranks: Ranks, run: dict[str, Any], more: Any = None) -> None:
    """Write a checkpoint, atomically. Every rank has to call this function, but only the first one writes the file."""
    state = trainer.state_dict()
    if not ranks.first:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".tmp")
    torch.save({"version": _VERSION, "run": run, "trainer": state, "more": more}, new)
    os.replace(new, path)


def load(path: Path, trainer: Trainer, run: dict[str, Any], trusted: bool = False) -> Any:
    if not path.is_file():
        raise ValueError(f"no checkpoint {path}: --resume auto starts a new run if there is none")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as err:
        raise ValueError(
            f"{path} holds more than tensors, like the states of some peers: --trust-checkpoint, if you wrote it"
        ) from err
    if not isinstance(saved, dict) or saved.get("version") != _VERSION:
        raise ValueError(f"{path} is no checkpoint of this command")
    differing = [key for key in {**saved["run"], **run} if saved["run"].get(key) != run.get(key)]
    if differing:
        found = ", ".join(f"{key} {saved['run'].get(key)!r} there, {run.get(key)!r} here" for key in differing)
        raise ValueError(f"{path} is of another run: {found}")
    trainer.load_state_dict(saved["trainer"])
    return saved.get("more")


@dataclass
class Pause:
    """The checkpoint of one of many runs. The same command resumes an interrupted run with bitwise equal results."""

    path: Path
    run: dict[str, Any]
    """Everything that the run depends on. The checkpoint of a run with other values is ignored."""
    seconds: float = field(default_factory=lambda: SECONDS)
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.run = {**self.run, "torch": str(torch.__version__), "threads": torch.get_num_threads()}

    def resume(self, trainer: Trainer) -> Any:
        """Resume an interrupted run, and return the ``more`` that was saved with it; None if there is no such run."""
        if not self.path.is_file():
            return None
        try:
            return load(self.path, trainer, self.run)
        except FAILURES as err:
            self.done()
            if trainer.history.losses or not isinstance(err, ValueError):
                raise
            return None  # another run, or an optimizer whose state has more than tensors: start from the beginning

    def after_step(self, trainer: Trainer, more: Any = None) -> None:
        if time.monotonic() - self._last >= self.seconds:
            self.keep(trainer, more)

    def keep(self, trainer: Trainer, more: Any = None) -> None:
        save(self.path, trainer, Ranks(), self.run, more)
        self._last = time.monotonic()

    def done(self) -> None:
        """Delete the checkpoint after the end of the run, whose results are stored elsewhere."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # checkpoints of other runs are there
            self.path.parent.rmdir()
