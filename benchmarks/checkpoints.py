"""One file from which a run goes on as if it had never stopped.

The stream of batches is not saved but drawn again up to where it was, so that a file depends on no workload's insides.
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
SECONDS = 60.0
"""Between two checkpoints of a run that a command keeps going by itself."""


def save(path: Path, trainer: Trainer, ranks: Ranks, run: dict[str, Any], more: Any = None) -> None:
    """Write a checkpoint; every rank calls it, the first one writes. One killed here leaves the file before."""
    state = trainer.state_dict()
    if not ranks.first:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".tmp")
    torch.save({"version": _VERSION, "run": run, "trainer": state, "more": more}, new)
    os.replace(new, path)


def load(path: Path, trainer: Trainer, run: dict[str, Any], trusted: bool = False) -> Any:
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
    return saved.get("more")


@dataclass
class Pause:
    """Where one run of many is kept while it runs: the same command again goes on with it, to the bit."""

    path: Path
    run: dict[str, Any]
    """Everything that the run depends on: a checkpoint of another one does not count."""
    seconds: float = field(default_factory=lambda: SECONDS)
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.run = {**self.run, "torch": str(torch.__version__), "threads": torch.get_num_threads()}

    def resume(self, trainer: Trainer) -> Any:
        """Go on where an interrupted run was, and return what else was kept; None where there is nothing of use."""
        if not self.path.is_file():
            return None
        try:
            return load(self.path, trainer, self.run)
        except FAILURES as err:
            self.done()
            if trainer.history.losses or not isinstance(err, ValueError):
                raise
            return None  # of another run, or of an optimizer whose state is more than tensors: from the start

    def after_step(self, trainer: Trainer, more: Any = None) -> None:
        if time.monotonic() - self._last >= self.seconds:
            self.keep(trainer, more)

    def keep(self, trainer: Trainer, more: Any = None) -> None:
        save(self.path, trainer, Ranks(), self.run, more)
        self._last = time.monotonic()

    def done(self) -> None:
        """Take the checkpoint away: the run has ended, and its figures are kept elsewhere."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are under way
            self.path.parent.rmdir()
