"""Information that the package reads from the frames of its callers.

::

    warnings       the first frame that is neither in this package nor in PyTorch
    loss scale     a ``torch.amp.GradScaler`` whose ``step`` is running
    checkpoints    the functions of ``torch.distributed.checkpoint.state_dict``, and the state that they have read

No other module inspects frames, since they depend on third-party code. If nothing is found, the call is ordinary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from secondorder.comm.layout import is_cut

#: Largest number of frames between the step of an optimizer and the scaler that calls it. These frames are wrappers of
#: torch, schedulers and trainers.
_DEPTH = 32
#: The module in which torch collects and distributes the state of optimizers.
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def depth_of_caller() -> int:
    """Return the ``stacklevel`` with which a warning by the caller points to the first frame of other code."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "secondorder",
        "torch",
    ):
        frame, depth = frame.f_back, depth + 1
    return depth


def calling_scaler() -> torch.amp.GradScaler | None:
    """Return the innermost loss scaler whose ``step`` runs further up the stack, behind wrappers of any trainer."""
    frame, depth = sys._getframe(1).f_back, 0
    while frame is not None and depth < _DEPTH:
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            found = frame.f_locals.get("self")
            if isinstance(found, torch.amp.GradScaler):
                return found
        frame, depth = frame.f_back, depth + 1
    return None


def is_saved_in_parts() -> bool:
    """Whether the caller is a distributed checkpoint of torch, in which every rank writes its part."""
    return getattr(_locals_of_torch("info").get("info"), "full_state_dict", True) is False


def filled_in_by_torch() -> set[int]:
    """Return the ids of tensors that ``set_optimizer_state_dict`` took from the optimizer and not from the file.

    With ``full_state_dict=True``, it fills in missing entries of a file from the state of the optimizer and drops the
    mark of a partial state, so the file of a single rank would look complete.
    """
    own = _locals_of_torch("flatten_local_osd").get("local_state_dict", {}).get("state", {})
    tensors = [v for state in own.values() for v in state.values() if isinstance(v, Tensor)]
    return {id(v) for v in tensors if not is_cut(v)}  # it copies the file into sharded tensors


def _locals_of_torch(name: str) -> Mapping[str, Any]:
    """Return the local variables of the innermost function of checkpoints that has one of this name, or nothing."""
    frame = sys._getframe(2).f_back
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINTS and name in frame.f_locals:
            return frame.f_locals
        frame = frame.f_back
    return {}
