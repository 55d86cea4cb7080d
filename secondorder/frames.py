"""Who is calling: all that the library reads from the frames of its callers, which depend on how others are written.

::

    warnings       the first frame that is neither of this library nor of PyTorch
    loss scale     a ``torch.amp.GradScaler`` whose ``step`` is running
    checkpoints    the functions of ``torch.distributed.checkpoint.state_dict``, and what they have read

No other module looks at a frame. Where nothing is found, the answer is that of an ordinary call.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from secondorder.comm.layout import is_cut

#: Frames between the step of an optimizer and the scaler that calls it: torch's own wrappers, those of schedulers and
#: of trainers.
_DEPTH = 32
#: Where torch collects and distributes the state of optimizers.
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def depth_of_caller() -> int:
    """``stacklevel`` of the first frame that is neither ours nor torch's, for a warning where this is called."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "secondorder",
        "torch",
    ):
        frame, depth = frame.f_back, depth + 1
    return depth


def calling_scaler() -> torch.amp.GradScaler | None:
    """The loss scaler whose ``step`` is running further up the stack, through the wrappers of any trainer.

    Returns:
        The innermost scaler, or None if no scaler is stepping.
    """
    frame, depth = sys._getframe(1).f_back, 0
    while frame is not None and depth < _DEPTH:
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            found = frame.f_locals.get("self")
            if isinstance(found, torch.amp.GradScaler):
                return found
        frame, depth = frame.f_back, depth + 1
    return None


def is_saved_in_parts() -> bool:
    """Whether torch's distributed checkpoints ask, into which every rank writes its part."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINTS and "info" in frame.f_locals:
            return getattr(frame.f_locals["info"], "full_state_dict", True) is False
        frame = frame.f_back
    return False


def filled_in_by_torch() -> set[int]:
    """Ids of the tensors that ``set_optimizer_state_dict``, if it calls, has not from the file but from the optimizer.

    With ``full_state_dict=True`` it takes what a file lacks from the state of the optimizer that loads it, and drops
    the mark of a partial state: the file of one rank of several would be taken for whole.

    Returns:
        The ids, none where something else calls.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINTS and "flatten_local_osd" in frame.f_locals:
            own = frame.f_locals.get("local_state_dict", {}).get("state", {})
            tensors = [v for state in own.values() for v in state.values() if isinstance(v, Tensor)]
            return {id(v) for v in tensors if not is_cut(v)}  # into those that are cut, it copies the file's
        frame = frame.f_back
    return set()
