"""Torch's own machinery for tests of optimizers (`torch.testing._internal.common_optimizers`), run over the methods.

The promises are those of torch's `test_optim.py`, which is not part of the wheel, expressed with its `OptimizerInfo`.
Its parameters are bare: a layer method gets a `module=` without them, so they use the fallback. `CoveredInfo` runs the
same tests on a layer whose parameters have a block. A window method covers the parameters in both cases.
"""

import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from tests.support.building import built
from tests.support.methods import METHODS, Method


@contextmanager
def without_traces() -> Iterator[None]:
    """Undo two effects of importing torch's test helpers: a hypothesis profile, and locked `torch.backends` flags."""
    profile, flag = settings.get_current_profile_name(), "__allow_nonbracketed_mutation_flag"
    allowed = getattr(torch.backends, flag)
    try:
        yield
    finally:
        settings.load_profile(profile)
        setattr(torch.backends, flag, allowed)


import_module("expecttest")  # fail if this test dependency is missing; only torch's private API may be missing

try:
    with without_traces():
        from torch.testing._internal.common_device_type import instantiate_device_type_tests
        from torch.testing._internal.common_optimizers import (
            OptimizerErrorEnum,
            OptimizerInfo,
            OptimizerInput,
            get_error_inputs_for_all_optims,
            optims,
        )
        from torch.testing._internal.common_utils import TestCase
except ImportError as error:
    pytest.skip(f"torch {torch.__version__} has no private OptimizerInfo here: {error}", allow_module_level=True)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "non-default lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.01)},
    "no momentum": {"momentum": 0.0},
    "weight decay": {"weight_decay": 0.1},
    "decoupled weight decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "maximize": {"maximize": True},
    "adamw": {"fallback": "adamw", "inner": "adamw", "lr": 0.01, "fallback_lr": 0.01},
    "graft": {"graft": "adam", "lr": 0.01},
}


def inputs_of(method: Method) -> Callable[..., list[OptimizerInput]]:
    def inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
        variants = {variant.name: variant.keywords for variant in method.variants}
        return [
            OptimizerInput(params=None, kwargs={**method.keywords, **method.steep, **keywords}, desc=name)
            for name, keywords in {**CONFIGURATIONS, **variants}.items()
        ]

    return inputs


class Info(OptimizerInfo):
    """Bare parameters that do not belong to the module that a layer method needs."""

    suffix = "bare"

    def __init__(self, method: Method) -> None:
        super().__init__(
            method.cls,
            optim_inputs_func=inputs_of(method),
            optim_error_inputs_func=get_error_inputs_for_all_optims,
            supported_impls=("foreach",),
            supports_sparse=False,
            supports_complex=True,
        )
        self.method = method
        self.keywords = {**method.keywords, **method.steep}

    @property
    def name(self) -> str:
        return f"{self.optim_cls.__name__}_{self.suffix}"

    def problem(self, device: str, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Parameter], Callable[[], Tensor]]:
        """A module, the parameters to train and their loss: here, least squares in a matrix and a vector."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        weight, bias, inputs = nn.Parameter(draw(6, 5)), nn.Parameter(draw(6)), draw(4, 5)

        def loss() -> Tensor:
            return (inputs @ weight.mT + bias).abs().square().sum(-1).mean()

        return nn.Linear(2, 2, device=device), [weight, bias], loss

    def build(self, module: nn.Module, params: Any, **keywords: Any) -> Any:
        extra = {"module": module} if self.method.layerwise else {}
        return built(self.optim_cls, params, **extra, **keywords)

    def start(self, device: str, dtype: torch.dtype, **keywords: Any) -> tuple[Any, list[nn.Parameter], Any]:
        """An optimizer of the problem, the parameters, and their loss."""
        module, params, loss = self.problem(device, dtype)
        return self.build(module, params, **keywords), params, loss


class CoveredInfo(Info):
    """Least squares in the weight and bias of a layer, over more examples than either side has dimensions."""

    suffix = "covered"

    def problem(self, device: str, dtype: torch.dtype) -> tuple[nn.Module, list[nn.Parameter], Callable[[], Tensor]]:
        _, (weight, bias), _ = super().problem(device, dtype)
        layer = nn.Linear(5, 6, device=device, dtype=dtype)
        layer.weight, layer.bias = weight, bias
        inputs = torch.randn(32, 5, generator=torch.Generator(device).manual_seed(1), dtype=dtype, device=device)
        return layer, [weight, bias], lambda: layer(inputs).square().sum(-1).mean()


OPTIMS = [info(method) for method in METHODS for info in ((Info, CoveredInfo) if method.layerwise else (Info,))]


def run(optimizer: Any, loss: Callable[[], Tensor], steps: int, maximize: bool = False) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        objective = -loss() if maximize else loss()
        objective.backward()
        return objective

    for _ in range(steps):
        optimizer.step(closure)


class TestOptimizerInfo(TestCase):
    @optims(OPTIMS, dtypes=[torch.float64])
    def test_loss_goes_in_the_right_direction(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """The value of `foreach` alternates, because `test_equal_options.py` tests that both values agree."""
        for index, config in enumerate(optim_info.optim_inputs_func(device, dtype)):
            foreach = index % 2 == 1 and not isinstance(config.kwargs.get("lr"), Tensor)
            optimizer, _, loss = optim_info.start(device, dtype, **{**config.kwargs, "foreach": foreach})
            before = float(loss().detach())
            run(optimizer, loss, 20, maximize=bool(config.kwargs.get("maximize")))
            assert float(loss().detach()) < before, config.desc

    @optims(OPTIMS, dtypes=[torch.float32])
    def test_errors(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for case in optim_info.optim_error_inputs_func(device, dtype):
            config = case.optimizer_error_input
            assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
            module, params, _ = optim_info.problem(device, dtype)
            given = params if config.params is None else config.params
            expected = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
            with expected(case.error_type, match=case.error_regex):
                optim_info.build(module, given, **config.kwargs)


instantiate_device_type_tests(TestOptimizerInfo, globals(), only_for="cpu")
assert issubclass(TestOptimizerInfoCPU, unittest.TestCase)  # noqa: F821 - made by the line above
