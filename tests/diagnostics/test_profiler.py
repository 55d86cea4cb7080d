"""Traces of `torch.profiler` contain the stages of a step of every method."""

from collections import Counter

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.support.methods import METHODS, Method
from tests.support.tasks import MLP, train

STAGES = ("reduce", "statistics", "refresh", "share", "precondition", "update")


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_a_trace_of_one_step_has_its_stages(method: Method) -> None:
    model = MLP.model()
    with method.build(model) as optimizer, profile(activities=[ProfilerActivity.CPU]) as trace:
        train(model, optimizer, MLP, 1)
    seen = Counter(e.name.removeprefix("secondorder.") for e in trace.events() if e.name.startswith("secondorder."))
    assert {stage: seen[stage] for stage in STAGES} == dict.fromkeys(STAGES, 1)
    assert seen["capture"] == 2 * method.layerwise
    assert {bool(seen[stage]) for stage in ("select", "kernel", "invert")} == {method.name == "hylo"}
