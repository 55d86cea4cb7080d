"""`keep_directions()` returns what each method subtracts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.grid import each
from tests.support.methods import METHODS, Method
from tests.support.tasks import CNN, MLP, Task, assert_identical, backward, train, values

CASES = {
    f"{method.name}-{variant.name}": (method, variant.keywords) for method in METHODS for variant in method.variants
}
every_method = pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])


def step(model: nn.Module, optimizer: Any, task: Task, number: int) -> dict[str, Tensor]:
    """Take a step and return the directions."""
    optimizer.zero_grad()
    task.loss(model, number).backward()
    with optimizer.keep_directions() as kept:
        optimizer.step()
    return kept


@each(case=CASES, task=[MLP, CNN])
def test_a_plain_step_subtracts_the_directions(case: tuple[Method, dict[str, Any]], task: Task) -> None:
    method, keywords = case
    model = task.model()
    rate = 1e-3  # a whole step without any bound would diverge
    optimizer = method.build(model, **method.bare(lr=rate, **keywords))
    for number in range(6):
        before = values(model)
        kept = step(model, optimizer, task, number)
        assert set(kept) == method.covered(model)
        for name, p in model.named_parameters():
            if name in kept:
                assert kept[name].shape == p.shape
                torch.testing.assert_close(rate * kept[name], before[name] - p.detach(), rtol=1e-9, atol=1e-13)


@every_method
def test_directions_are_without_momentum_learning_rate_and_decoupled_decay(method: Method) -> None:
    plain, busy = MLP.model(), MLP.model()
    first = method.build(plain, **method.bare(lr=1e-3))
    unbound = {"kl_clip": None} if method.accepts("kl_clip") else {}
    second = method.build(busy, lr=0.1, momentum=0.9, weight_decay=0.3, decoupled_weight_decay=True, **unbound)
    for number in range(5):
        busy.load_state_dict(plain.state_dict())  # so that both see the same gradients
        kept, wanted = step(busy, second, MLP, number), step(plain, first, MLP, number)
        for name in wanted:
            torch.testing.assert_close(kept[name], wanted[name], rtol=1e-9, atol=1e-12)


@every_method
def test_directions_are_copies_and_blocks_may_be_left_in_any_order(method: Method) -> None:
    """Nothing is kept outside of the block, even after an error, and no direction of a parameter without a gradient."""
    model = MLP.model()
    optimizer = method.build(model)
    with pytest.raises(KeyError, match="stop"), optimizer.keep_directions() as kept:
        raise KeyError("stop")
    outer, inner = optimizer.keep_directions(), optimizer.keep_directions()
    first, second = outer.__enter__(), inner.__enter__()
    train(model, optimizer, MLP, 1)
    assert kept == {}
    assert set(first) == method.covered(model)
    assert_identical(first, second)
    assert first is not second
    outer.__exit__(None, None, None)
    before, frozen = dict(first), copy.deepcopy(first)
    train(model, optimizer, MLP, 1, start=1)
    inner.__exit__(None, None, None)
    assert first.keys() == second.keys() == before.keys()
    for name in before:
        assert first[name] is before[name]
        assert torch.equal(before[name], frozen[name])
        assert not torch.equal(second[name], first[name])
    backward(model, optimizer, MLP, 2)
    model.get_submodule("first").zero_grad()
    with optimizer.keep_directions() as kept:
        optimizer.step()
    assert set(kept) == {name for name in method.covered(model) if not name.startswith("first")}
