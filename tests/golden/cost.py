"""What a step costs the interpreter: operators, and calls of functions of the package, on a network of two layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import secondorder
from tests.contract.methods import METHODS
from tests.golden.runs import Run
from tests.golden.traces import watched

HOME = str(Path(secondorder.__file__).parent)
WARM, COUNTED = 8, 8  # two intervals each


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def calls(found: list[int]) -> Iterator[None]:
    """Count calls of functions whose file is in the package."""

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            found[0] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


@dataclass(frozen=True)
class Cost:
    """Costs of a method per step."""

    method: str

    def trace(self) -> dict[str, Any]:
        return watched(self._count)

    def _count(self, trace: dict[str, Any]) -> None:
        training = Run(self.method, task="mlp").training()
        for step in range(WARM):
            training.step(step)
        with _Operators() as operators:
            for step in range(COUNTED):
                training.step(step)
        found = [0]
        with calls(found):
            for step in range(COUNTED):
                training.step(step)
        trace |= {"operators per step": operators.count / COUNTED, "calls per step": found[0] / COUNTED}


def cost() -> Iterator[tuple[str, Cost]]:
    for method in METHODS:
        yield method.name, Cost(method.name)


SETS = {"cost": cost}
