"""Names of layers, the wrappers that put a prefix before them, and other ways to call a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tests.support.kfac import hook_counts
from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, snapshot, train, values


def namesake() -> nn.ModuleDict:
    """A module with a child named ``module``, as in data-parallel wrappers."""
    return nn.ModuleDict({"fc": nn.Linear(4, 5), "module": nn.ModuleDict({"fc": nn.Linear(5, 3)})}).double()


@pytest.mark.option("module", "skip_layers")
def test_a_child_called_module_keeps_its_name(method: Method) -> None:
    """A name in `skip_layers` only skips the layer of exactly that name."""
    model = namesake()
    optimizer = method.build(model)
    assert {name: block.name for name, block in optimizer.blocks.items()} == {"fc": "fc", "module.fc": "module.fc"}
    assert optimizer.blocks["fc"].weight is model["fc"].weight
    hidden = torch.tanh(model["fc"](torch.randn(6, 4, dtype=torch.float64)))
    F.cross_entropy(model["module"]["fc"](hidden), torch.arange(6) % 3).backward()
    optimizer.step()
    assert optimizer.dense_curvature("fc").shape == (25, 25)
    assert optimizer.dense_curvature("module.fc").shape == (18, 18)
    saved, second = snapshot(optimizer), method.build(namesake())
    second.load_state_dict(saved)
    assert_identical(snapshot(second), saved)
    for rule, left in (("fc", "module.fc"), ("module.fc", "fc")):
        assert list(method.build(namesake(), skip_layers=rule).blocks) == [left]


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
    train(outer, optimizer, mlp, 1)
    assert_identical(optimizer.dense_curvature(f"{prefix}first"), optimizer.dense_curvature("first"))
    with pytest.raises(ValueError, match="no block is named"):
        optimizer.dense_curvature(f"{prefix}second")


@pytest.mark.option("module", "skip_layers")
@pytest.mark.parametrize("inside", [False, True])
def test_data_parallel_on_several_devices_is_refused_by_name(method: Method, mlp: Task, inside: bool) -> None:
    model = mlp.model()
    hooks, wrapper = hook_counts(model), nn.DataParallel(model)
    wrapper.device_ids = [0, 1]  # as on a machine with two devices
    wrapped = nn.Sequential(wrapper) if inside else wrapper
    with pytest.raises(NotImplementedError, match=r"DataParallel.*2 devices"):
        method.build(wrapped)
    with pytest.raises(NotImplementedError, match="DataParallel"):
        method.cls(model.parameters(), module=wrapped)
    assert hook_counts(model) == hooks


def data_parallel(model: nn.Module) -> nn.Module:
    """Without devices, the wrapper calls the model itself, as it does on one device."""
    wrapped = nn.DataParallel(model)
    wrapped.device_ids = []
    return wrapped


class ByFunction(nn.Module):
    """Calls a model by `torch.func.functional_call` with its own parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, inputs: Tensor) -> Tensor:
        return functional_call(self.module, dict(self.module.named_parameters()), (inputs,))


WRAPPERS: tuple[Callable[[nn.Module], Any], ...] = (AveragedModel, data_parallel, ByFunction)


def test_a_wrapper_that_calls_the_model_changes_nothing(method: Method, mlp: Task) -> None:
    expected = method.trained(mlp, 4)
    for wrap in WRAPPERS:
        wrapped = wrap(mlp.model())
        train(wrapped, method.build(wrapped), mlp, 4)
        assert_identical(values(wrapped.module), expected)
