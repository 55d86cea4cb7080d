"""Runs of a script with several optimizers, which take turns step by step.

Each optimizer has its own copy of the model, and all get the same batches. The processor seconds of a step cover
``zero_grad``, forward, loss, backward and ``step``. Those of the first steps count as well.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import accumulate, islice
from typing import Any

from torch import Tensor, nn

from benchmarks.commands.swap import LINES, build
from benchmarks.runner import History
from benchmarks.scripts import Data, Script
from benchmarks.workloads.base import seeded

ADAMW = LINES["adamw"]


class Run:
    """One optimizer with its copy of the model."""

    def __init__(self, line: str, script: Script, model: nn.Module) -> None:
        self.model, self.history = deepcopy(model), History(line)
        try:
            self.optimizer = build(line, self.model, LR=script.lr, WD=script.weight_decay)
        except (NameError, SyntaxError, TypeError) as err:
            raise ValueError(f"the line {line!r} does not build an optimizer: {err}") from err

    def step(self, loss: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> None:
        start = time.process_time()
        self.optimizer.zero_grad()
        found = loss(self.model, *batch)
        found.backward()
        self.optimizer.step()
        self.history.processor_seconds.append(time.process_time() - start)
        self.history.losses.append(float(found.detach()))


def compare(script: Script, data: Data, lines: Mapping[str, str], steps: int) -> dict[str, Any]:
    """Train with AdamW and with each line, in turns, and return the results of all of them."""
    with seeded(data.seed):
        model, batches, loss = script.build(data)
    Run(ADAMW, script, model).step(loss, next(batches))  # warms up torch before the measured runs
    before, *others = (Run(line, script, model) for line in (ADAMW, *lines.values()))
    for batch in islice(batches, steps):
        for run in (before, *others):
            run.step(loss, batch)
    found = {line: figures(run.history, before.history) for line, run in zip(lines, others, strict=True)}
    own = {"seconds": sum(before.history.processor_seconds), "loss": last_loss(before.history, steps)}
    return {"steps": steps, "adamw": own, "lines": found}


def figures(history: History, before: History) -> dict[str, Any]:
    """Return the cost and the losses of a run relative to AdamW."""
    seconds, steps = sum(before.processor_seconds), len(before.losses)
    fit = sum(total <= seconds for total in accumulate(history.processor_seconds))
    losses = {"equal_steps": last_loss(history, steps), "equal_seconds": last_loss(history, fit) if fit else None}
    return {
        "cost": sum(history.processor_seconds) / seconds,
        "median_cost": statistics.median(history.processor_seconds) / statistics.median(before.processor_seconds),
        "steps_that_fit": fit,
        **losses,
        **{f"{key}_lower": loss is not None and loss < last_loss(before, steps) for key, loss in losses.items()},
    }


def last_loss(history: History, steps: int) -> float:
    """Return the mean loss of the last tenth of the first ``steps`` steps."""
    return history.loss_at(steps, max(1, steps // 10))
