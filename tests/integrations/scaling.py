"""A loss scaler for Accelerate, which makes none on a CPU."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator


def give_a_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every accelerator that is made from now on has one; all else is its own doing."""
    made = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings)
        self.scaler, self.native_amp = torch.amp.GradScaler("cpu", init_scale=2.0**10), True

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
