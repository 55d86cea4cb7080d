"""Names of layers, and the wrappers that put a prefix before them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, snapshot, train, values


class Namesake(nn.Module):
    """A child that is called as data-parallel wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.module = nn.Module()
        self.module.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.module.fc(torch.tanh(self.fc(x)))


def namesake() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Namesake().double()


@pytest.mark.option("module", "skip_layers")
def test_a_child_called_module_keeps_its_name(method: Method) -> None:
    model = namesake()
    optimizer = method.build(model)
    assert list(optimizer.blocks) == ["fc", "module.fc"]
    x = torch.randn(6, 4, dtype=torch.float64)
    F.cross_entropy(model(x), torch.arange(6) % 3).backward()
    optimizer.step()
    assert optimizer.dense_curvature("fc").shape == (25, 25)
    assert optimizer.dense_curvature("module.fc").shape == (18, 18)
    saved, other = snapshot(optimizer), namesake()
    second = method.build(other)
    second.load_state_dict(saved)
    assert_identical(snapshot(second), saved)


@pytest.mark.option("module", "skip_layers")
@pytest.mark.parametrize(("rule", "left"), [("fc", "module.fc"), ("module.fc", "fc")])
def test_a_name_leaves_out_the_layer_of_that_name_alone(method: Method, rule: str, left: str) -> None:
    optimizer = method.build(namesake(), skip_layers=rule)
    assert list(optimizer.blocks) == [left]


@pytest.mark.option("module", "skip_layers")
@pytest.mark.cover(
    wrapped={"bare": False, "compiled": True},
    prefix=["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."],
)
def test_wrapper_prefixes_may_be_given_or_left_out(method: Method, mlp: Task, prefix: str, wrapped: bool) -> None:
    model = mlp.model()
    outer = torch.compile(model, backend="eager") if wrapped else model
    optimizer = method.build(outer, skip_layers=f"{prefix}second")
    assert list(optimizer.blocks) == ["first"]
    train(model, optimizer, mlp, 1)
    assert_identical(optimizer.dense_curvature(f"{prefix}first"), optimizer.dense_curvature("first"))
    with pytest.raises(ValueError, match="no block is named"):
        optimizer.dense_curvature(f"{prefix}second")


@pytest.mark.option("module", "skip_layers")
@pytest.mark.cover(inside={"root": False, "inside": True})
def test_data_parallel_on_several_devices_is_refused_by_name(method: Method, mlp: Task, inside: bool) -> None:
    model = mlp.model()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    wrapper = nn.DataParallel(model)
    wrapper.device_ids = [0, 1]  # as on a machine with two
    wrapped = nn.Sequential(wrapper) if inside else wrapper
    with pytest.raises(NotImplementedError, match=r"DataParallel.*2 devices"):
        method.build(wrapped)
    with pytest.raises(NotImplementedError, match="DataParallel"):
        method.cls(model.parameters(), module=wrapped)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


def test_data_parallel_without_a_choice_of_devices_changes_nothing(method: Method, mlp: Task) -> None:
    bare, model = mlp.model(), mlp.model()
    wrapped = nn.DataParallel(model)
    wrapped.device_ids = [0]
    method.build(wrapped).close()  # on one device it calls the model itself, as it does on none
    wrapped.device_ids = []
    first, second = method.build(bare), method.build(wrapped)
    train(bare, first, mlp, 4)
    train(wrapped, second, mlp, 4)
    assert_identical(values(model), values(bare))
