"""Whatever is adapted is in the checkpoint: damping, rejected steps, calibration, the quadratic model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from secondorder import EKFAC, KFAC
from tests.support.checkpoints import COPIES, DCP, Pair, Way, assert_goes_on, by_file
from tests.support.grid import pairs
from tests.support.quadratic import Loop, batch, mlp

OPTIONS: dict[str, dict[str, Any]] = {
    "damping": {"adaptive_damping": True, "damping_interval": 3},
    "all": {
        "adaptive_damping": True, "damping_interval": 2, "reject_steps": True, "calibrate_damping": True,
        "quadratic_model": True, "likelihood": "categorical",
    },
    "rejection": {"reject_steps": True, "lr": 3.0},
    "relative": {"adaptive_damping": True, "damping_interval": 1, "damping_mode": "relative", "damping": 3.0},
}  # fmt: skip
PLAIN = {"lr": 0.7, "momentum": 0.9, "damping": 0.1, "kl_clip": None, "factor_update_steps": 2, "inv_update_steps": 4}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pairs(kind=[KFAC, EKFAC], options=OPTIONS, stop=[1, 3, 6], way={"file": by_file, **DCP, **COPIES})
def test_resume_is_exact_whatever_is_adapted(kind: type[KFAC], options: dict[str, Any], stop: int, way: Way) -> None:
    """With as many looks at the loss, too."""
    x, y = batch()
    calls = []

    def build() -> Pair:
        model = mlp()
        return model, kind(model, **{**PLAIN, **options})

    def run(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        loop = Loop(model, optimizer, x, y, outputs=True)
        for _ in range(first, last):
            optimizer.step(loop)
        calls.append(loop.calls)

    assert_goes_on(build, run, stop, stop + 7, way)
    assert calls[1] == calls[2]


def test_a_checkpoint_without_adaptation_loads_into_one_with_it_and_back() -> None:
    x, y = batch()
    plain, adaptive = mlp(), mlp()
    a = KFAC(plain, damping=0.1, lr=0.1)
    b = KFAC(adaptive, damping=0.3, lr=0.1, adaptive_damping=True, reject_steps=True, calibrate_damping=True)
    a.step(Loop(plain, a, x, y))
    b.load_state_dict(a.state_dict())
    loop = Loop(adaptive, b, x, y)
    for _ in range(2):
        b.step(loop)
    assert loop.calls == 4  # rejection looks twice; damping that training began with is not calibrated again
    a.load_state_dict(b.state_dict())
    a.step(Loop(plain, a, x, y))
