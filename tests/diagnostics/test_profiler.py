"""Traces of `torch.profiler` contain the stages of a step of every method."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, SparseMFAC

STAGES = ("reduce", "statistics", "refresh", "share", "precondition", "update")
LAYERS = 2
METHODS: dict[str, tuple[Any, dict[str, int]]] = {
    "KFAC": (KFAC, {"capture": LAYERS}),
    "EKFAC": (EKFAC, {"capture": LAYERS}),
    "HyLo": (HyLo, {"capture": LAYERS, "select": 1, "kernel": 1, "invert": 1}),
    "MFAC": (MFAC, {}),
    "SparseMFAC": (SparseMFAC, {}),
    "GGT": (GGT, {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_trace_of_one_step_has_its_stages(name: str) -> None:
    method, own = METHODS[name]
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    with method(model, lr=0.01) as optimizer, profile(activities=[ProfilerActivity.CPU]) as trace:
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    seen = Counter(e.name.removeprefix("secondorder.") for e in trace.events() if e.name.startswith("secondorder."))
    assert {stage: seen[stage] for stage in STAGES} == dict.fromkeys(STAGES, 1)
    assert {stage: bool(seen[stage]) for stage in own} == dict.fromkeys(own, True)
    assert seen["capture"] == own.get("capture", 0)
