"""The log of a run: one line of JSON per step."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.runner import Trainer
from secondorder.diagnostics import read_events

COLUMNS = ("step", "loss", "lr", "seconds", "processor_seconds")  # columns of every line


class Journal:
    """Writes one line of JSON per step. A resumed run keeps the lines up to its checkpoint.

    Columns are ``step``, ``loss``, ``lr``, and the total ``seconds`` and ``processor_seconds`` of training. The metric
    is added after the steps at which it was measured. With several ranks, the loss is that of the first rank.
    """

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self._trainer, self._written = trainer, len(trainer.history.losses)
        self._rate = self._next_rate()
        known = read_events(path) if self._written and path.is_file() else []
        kept = [row for row in known if row["step"] <= self._written]
        self.measured = [_measured(row) for row in kept if set(row) > set(COLUMNS)]
        """Metrics on held-out data, with their steps."""
        self._seconds = sum(trainer.history.step_seconds)
        self._worked = sum(trainer.history.processor_seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(json.dumps(row) + "\n" for row in kept)

    def close(self) -> None:
        self._file.close()

    @property
    def behind(self) -> bool:
        """Whether the last step has not been written yet."""
        return len(self._trainer.history.losses) > self._written

    def write(self, measured: Mapping[str, float] | None = None) -> None:
        """Write the last step, unless it was written before."""
        history = self._trainer.history
        if not self.behind:
            return
        step = self._written = len(history.losses)
        self._seconds += history.step_seconds[-1]
        self._worked += history.processor_seconds[-1]
        figures = (step, history.losses[-1], self._rate, self._seconds, self._worked)
        row = {**dict(zip(COLUMNS, figures, strict=True)), **(measured or {})}
        self._rate = self._next_rate()
        if measured:
            self.measured.append(_measured(row))
        line = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def _next_rate(self) -> float:
        return float(self._trainer.optimizer.param_groups[0]["lr"])


def _measured(row: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key not in COLUMNS[1:]}
