"""The parts of a step that is judged by the loss: the evaluation of the closure, and a snapshot to undo the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.adaptation.replay import Evaluated, Forward, Moment
from secondorder.capture.fisher.likelihood import Likelihood, resolve
from secondorder.config import AdaptationOptions


def loss_model(adaptation: AdaptationOptions) -> Likelihood | None:
    """Return the likelihood that the options name, or None."""
    return None if adaptation.likelihood is None else resolve(adaptation.likelihood)


class Evaluation(NamedTuple):
    """The evaluation of the closure of a step.

    Attributes:
        closure: The closure.
        loss: The objective that it returned, detached, 0-dim.
        start: Generators and buffers before the evaluation.
        eager: Whether its forward passes were recorded, for which compiled models ran eagerly.
        examples: Number of examples of its forward passes; 0 if they were not counted.
        exact: Its forward passes with their outputs if the model is exact; otherwise empty.
    """

    closure: Callable[[], Any]
    loss: Tensor
    start: Moment
    eager: bool
    examples: int
    exact: list[Evaluated]


@dataclass
class Snapshot:
    """The parameters and part of their state before a step.

    Attributes:
        values: The parameters' values before the step.
        state: Dict, key and former value of each entry of that part; tensors are copies.
    """

    values: dict[nn.Parameter, Tensor]
    state: list[tuple[dict[str, Any], str, Any]]

    @classmethod
    def of(cls, states: Mapping[nn.Parameter, dict[str, Any]], keeps: Callable[[str], bool]) -> Snapshot:
        """Copy some parameters, and the entries of their state whose keys ``keeps`` accepts."""
        kept = [
            (state, key, value.clone() if isinstance(value, Tensor) else value)
            for state in states.values()
            for key, value in state.items()
            if keeps(key)
        ]
        return cls({p: p.detach().clone() for p in states}, kept)

    def undo(self) -> None:
        """Restore everything, bit for bit."""
        with torch.no_grad():
            for p, value in self.values.items():
                p.copy_(value)
            for state, key, before in self.state:
                if isinstance(before, Tensor):
                    state[key].copy_(before)
                else:
                    state[key] = before

    def moved(self) -> dict[nn.Parameter, Tensor]:
        """Return the changes of the step, in float32 or better."""
        wide = {p: torch.promote_types(p.dtype, torch.float32) for p in self.values}
        return {p: p.detach().to(wide[p]) - value.to(wide[p]) for p, value in self.values.items()}


def parts_of(returned: Any) -> tuple[Tensor, Any, Any]:
    """Return loss, outputs and targets from the result of a closure. The last two are None if they are missing.

    Raises:
        TypeError: If it is not a loss, ``(loss, outputs)`` or ``(loss, outputs, targets)``.
    """
    loss, outputs, targets = returned, None, None
    if isinstance(returned, (tuple, list)) and len(returned) in (2, 3):
        loss, outputs, targets = (*returned, None)[:3]
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach().clone().reshape(()), outputs, targets
    if options.is_number(loss):
        return torch.tensor(loss, dtype=torch.float64), outputs, targets
    raise TypeError(
        "options that judge a step by the loss need a closure that returns the loss, (loss, outputs) or (loss, "
        f"outputs, targets), with a loss of one element; got {_shown(returned)}"
    )


def match_outputs(forwards: Sequence[Forward], outputs: Any, targets: Any) -> list[Evaluated]:
    """Return an entry for each recorded forward, with its outputs and targets.

    Raises:
        TypeError: If the outputs are not tensors.
        RuntimeError: If their number is not that of the forwards.
    """
    found = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    given = list(targets) if isinstance(targets, (tuple, list)) else [targets] * len(found)
    if not all(isinstance(x, Tensor) for x in found):
        raise TypeError(
            "with a likelihood, the closure must return (loss, outputs), with one tensor of outputs for each forward; "
            f"got outputs of type {_shown(outputs)}"
        )
    if not len(found) == len(forwards) == len(given):
        raise RuntimeError(
            f"the closure returned {len(found)} outputs and {len(given)} targets, but ran {len(forwards)} forwards of "
            "the model with gradients enabled: return one tensor for each, as a list, and run forwards that do not "
            "contribute to the loss under torch.no_grad()"
        )
    return [Evaluated(f, o, t) for f, o, t in zip(forwards, found, given, strict=True)]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {', '.join(map(_shown, value))}"
    return type(value).__name__
