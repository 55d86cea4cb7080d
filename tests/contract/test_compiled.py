"""A compiled model and a compiled step have the same results as without `torch.compile`, for every method.

`tests/capture/test_compile.py` tests factors, graph breaks and recompilations.
"""

import pytest
import torch
import torch._dynamo as dynamo
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.methods import Method
from tests.support.tasks import Task, assert_all_close, assert_identical, backward, values

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("given", ["the model", "the compiled model"])
def test_compiled_model(method: Method, mlp: Task, given: str) -> None:
    """With and without a closure."""
    model = mlp.model()
    compiled = torch.compile(model, backend="eager")
    optimizer = method.build(model if given == "the model" else compiled)
    for step in range(6):
        if step % 2:
            optimizer.step(lambda: backward(compiled, optimizer, mlp, step))  # noqa: B023
        else:
            backward(compiled, optimizer, mlp, step)
            optimizer.step()
    assert dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not dynamo.utils.counters["graph_break"]
    assert_all_close(values(model), method.trained(mlp, 6), rtol=1e-7, atol=1e-10)


def test_compiled_step(method: Method, mlp: Task) -> None:
    """`step` is excluded from compilation, so that a change of the learning rate does not recompile it."""
    results = []
    for is_compiled in (False, True):
        model, optimizer = method.start(mlp)
        schedule = ExponentialLR(optimizer, 0.9)

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        update = torch.compile(step, backend="eager") if is_compiled else step
        for number in range(5):
            backward(model, optimizer, mlp, number)
            update()
            schedule.step()
        results.append((values(model), optimizer.state_dict()))
    assert_identical(results[1], results[0])
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 0
