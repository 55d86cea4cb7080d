"""A `torch.compile`d model, and a compiled step, train as they are without a compiler.

`tests/capture/test_compile.py` looks at factors, graph breaks and recompilations; here is every method.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo as dynamo
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.methods import Method
from tests.support.tasks import Task, assert_all_close, assert_identical, backward, train, values


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def test_compiled_model(method: Method, mlp: Task) -> None:
    alone, model = mlp.model(), mlp.model()
    train(alone, method.build(alone), mlp, 6)
    optimizer = method.build(model)
    compiled = torch.compile(model, backend="eager")
    for step in range(6):
        backward(compiled, optimizer, mlp, step)
        optimizer.step()
    assert not dynamo.utils.counters["graph_break"]
    expected = values(alone)
    assert_all_close(values(model), expected, rtol=1e-7, atol=1e-10)


def test_compiled_step(method: Method, mlp: Task) -> None:
    """Run as it is, and never compiled anew: not when the learning rate changes either."""
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


@pytest.mark.option("inverse_method")  # one method is enough: the step is that of all
def test_a_compiled_model_stays_compiled_in_a_closure(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    compiled = torch.compile(model, backend="eager")
    inputs, targets = mlp.batch(0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(inputs), targets)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not dynamo.utils.counters["graph_break"]
