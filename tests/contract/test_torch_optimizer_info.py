"""Torch's own checks of optimizers (`torch.testing._internal.common_optimizers`), run over the methods.

The promises are those of torch's `test_optim.py`, which is not part of the wheel.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

from tests.support.methods import Method


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
            method.build(layer, layer.parameters() if config.params is None else config.params, **config.kwargs)
