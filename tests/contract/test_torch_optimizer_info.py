"""Torch's own checks of optimizers (`torch.testing._internal.common_optimizers`), run over the methods.

The promises are those of torch's `test_optim.py`, which is not part of the wheel.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

from tests.support.building import built
from tests.support.methods import Method

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


def build(method: Method, module: nn.Module, params: Any, **keywords: Any) -> Any:
    extra = {"module": module} if method.layerwise else {}
    return built(method.cls, params, **extra, **{**method.keywords, **method.steep, **keywords})


@pytest.mark.parametrize("bare", [False, True])
def test_loss_goes_in_the_right_direction(method: Method, bare: bool) -> None:
    """Least squares in a matrix and a vector, which belong to a layer or, if they are bare, to no module.

    A layer method uses the fallback for bare parameters. The value of `foreach` alternates, because
    `test_equal_options.py` tests that both values agree.
    """
    configurations = CONFIGURATIONS | {variant.name: variant.keywords for variant in method.variants}
    for index, (name, keywords) in enumerate(configurations.items()):
        generator = torch.Generator().manual_seed(0)
        layer = nn.Linear(5, 6, dtype=torch.float64)
        nn.init.normal_(layer.weight, generator=generator)
        nn.init.normal_(layer.bias, generator=generator)
        inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
        module = nn.Linear(2, 2) if bare else layer
        optimizer = build(
            method, module, layer.parameters(), **keywords, foreach=index % 2 == 1 and "tensor" not in name
        )
        sign = -1 if "maximize" in keywords else 1
        losses = []
        for _ in range(21):
            optimizer.zero_grad()
            losses.append(layer(inputs).square().sum(-1).mean())
            (sign * losses[-1]).backward()
            optimizer.step()
        assert losses[-1] < losses[0], name


def errors_of_torch() -> list[Any]:
    """Arguments that torch's optimizers refuse, with the errors.

    Importing torch's test helpers loads a profile of hypothesis and locks flags of `torch.backends`, which is undone.
    """
    import_module("expecttest")  # fail if this test dependency is missing; only torch's private API may be missing
    profile, flag = settings.get_current_profile_name(), "__allow_nonbracketed_mutation_flag"
    allowed = getattr(torch.backends, flag)
    try:
        private = import_module("torch.testing._internal.common_optimizers")
    except ImportError as error:
        pytest.skip(f"torch {torch.__version__} has no private OptimizerInfo here: {error}")
    finally:
        settings.load_profile(profile)
        setattr(torch.backends, flag, allowed)
    return private.get_error_inputs_for_all_optims("cpu", torch.float32)


def test_errors(method: Method) -> None:
    for case in errors_of_torch():
        layer, config = nn.Linear(5, 6), case.optimizer_error_input
        expected = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
        with expected(case.error_type, match=case.error_regex):
            build(method, layer, layer.parameters() if config.params is None else config.params, **config.kwargs)
