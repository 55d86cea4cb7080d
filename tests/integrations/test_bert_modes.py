"""Activation checkpointing, compilation, eager attention and evaluation do not change the steps of a BERT."""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations import bert_models
from tests.integrations.bert_models import METHODS, QUESTIONS, batch, on_fallback, optimizer_of, step

STEPS = 4


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def new_model(attention: str = "sdpa") -> Any:
    return bert_models.new_model("Bert", QUESTIONS, attn_implementation=attention).double().train()


def train(model: nn.Module, run: nn.Module, method: str, *, evaluate: bool = False) -> tuple[list[float], list[Tensor]]:
    """Take some steps through `run` and return their losses and the resulting weights."""
    optimizer, data = optimizer_of(method, model), batch("Bert", QUESTIONS)
    losses = []
    for _ in range(STEPS):
        losses.append(step(run, optimizer, data))
        if evaluate:
            model.eval()
            with torch.no_grad():
                run(**data)
            run(**data).loss.item()  # with a graph that is never used
            model.train()
    assert not on_fallback(optimizer)
    return losses, [p.detach() for p in model.parameters()]


@cache
def plain(method: str) -> tuple[list[float], list[Tensor]]:
    model = new_model()
    return train(model, model, method)


PLAIN = ["eager attention", "checkpoints", "reentrant checkpoints", "evaluated"]
COMPILED = ["compiled", "compiled checkpoints", "compiled, evaluated", "compiled by inductor"]
CASES = [(mode, method) for mode in PLAIN for method in METHODS]
CASES += [  # compiling takes seconds, so only one case runs by default
    pytest.param(mode, method, marks=[] if (mode, method) == ("compiled", "kfac") else pytest.mark.slow)
    for mode in COMPILED
    for method in METHODS
]


@pytest.mark.parametrize(("mode", "method"), CASES)
def test_the_steps_are_the_same(mode: str, method: str) -> None:
    model = new_model("eager" if mode == "eager attention" else "sdpa")
    if "checkpoints" in mode:
        model.activation_checkpointing_enable({"use_reentrant": mode.startswith("reentrant")})
    backend = "inductor" if "inductor" in mode else "aot_eager"
    run = torch.compile(model, backend=backend) if "compiled" in mode else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(model, run, method, evaluate="evaluated" in mode)
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert not ours or "inductor" in mode
    expected = plain(method)
    # If the forward pass rounds differently, eigenvectors of equal eigenvalues may differ, and so the scale of EKFAC.
    loose = mode in ("eager attention", "compiled by inductor") and method == "ekfac"
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3 if loose else 1e-9, atol=0)
    if not loose:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_model_that_was_compiled_and_run_before_is_named() -> None:
    """Its graphs do not include the hooks of the optimizer. One warning contains the remedy."""
    model = new_model()
    run = torch.compile(model, backend="aot_eager")
    data = batch("Bert", QUESTIONS)
    run(**data).loss.backward()
    optimizer = optimizer_of("kfac", model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(run, optimizer, data)
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert ["torch.compiler.reset" in text for text in ours] == [True]
