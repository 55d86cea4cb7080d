"""BERT in the ways in which it is run: checkpointed, compiled, with either attention, evaluated in between.

None of them may change what an optimizer does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForQuestionAnswering

from tests.integrations.bert_models import METHODS, Batch, config, optimizer_of, step, treatment

VOCABULARY, N, S, STEPS = 60, 4, 12, 4


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def questions() -> Batch:
    torch.manual_seed(1)
    words = torch.randint(5, VOCABULARY, (N, S))
    keep = torch.arange(S) < torch.tensor([[12], [9], [7], [10]])
    starts, ends = torch.randint(1, 7, (2, N))
    positions = torch.arange(S).expand(N, -1)
    spans = {"start_positions": starts, "end_positions": ends}
    return {"input_ids": words, "attention_mask": keep.long(), "position_ids": positions} | spans


def new_model(attention: str = "sdpa") -> BertForQuestionAnswering:
    torch.manual_seed(0)
    return BertForQuestionAnswering(config(VOCABULARY, attn_implementation=attention)).double().train()


def train(model: nn.Module, run: nn.Module, method: str, *, evaluate: bool = False) -> tuple[list[float], list[Tensor]]:
    """Losses of some steps through `run`, and the weights that they lead to."""
    optimizer = optimizer_of(method, model)
    losses = []
    for _ in range(STEPS):
        losses.append(step(run, optimizer, questions()))
        if evaluate:
            model.eval()
            with torch.no_grad():
                run(**questions())
            run(**questions()).loss.item()  # with a graph that nobody goes back through
            model.train()
    assert not [name for name, how in treatment(optimizer).items() if "fallback" in how]
    return losses, [p.detach() for p in model.parameters()]


PLAIN = ["eager attention", "checkpoints", "reentrant checkpoints", "evaluated"]
COMPILED = ["compiled", "compiled checkpoints", "compiled, evaluated"]
CASES = [(mode, method) for mode in PLAIN for method in METHODS]
CASES += [  # compiling takes seconds: one case of it is run by default
    pytest.param(mode, method, marks=[] if (mode, method) == ("compiled", "kfac") else pytest.mark.slow)
    for mode in COMPILED
    for method in METHODS
]


@pytest.mark.parametrize(("mode", "method"), CASES)
def test_the_steps_are_the_same(mode: str, method: str) -> None:
    plain = new_model()
    losses, weights = train(plain, plain, method)
    model: Any = new_model("eager" if mode == "eager attention" else "sdpa")
    if "checkpoints" in mode:
        model.activation_checkpointing_enable({"use_reentrant": mode.startswith("reentrant")})
    run = torch.compile(model, backend="aot_eager") if "compiled" in mode else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, others = train(model, run, method, evaluate="evaluated" in mode)
    assert not [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert_same((again, others), (losses, weights), mode, method)


def assert_same(found: Any, expected: Any, mode: str, method: str) -> None:
    """To rounding. Where the forward pass rounds differently, eigenvectors of equal eigenvalues are others, and with
    them what EK-FAC measures along them."""
    loose = mode == "eager attention" and method == "ekfac"
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3 if loose else 1e-9, atol=0)
    if not loose:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_steps_of_a_model_that_inductor_compiled_are_the_same(method: str) -> None:
    plain, model = new_model(), new_model()
    expected = train(plain, plain, method)
    assert_same(train(model, torch.compile(model, backend="inductor"), method), expected, "eager attention", method)


@pytest.mark.slow
def test_a_model_that_was_compiled_and_run_before_is_named() -> None:
    """Its graphs know nothing of the optimizer: one warning says so, and what to write."""
    model = new_model()
    run = torch.compile(model, backend="aot_eager")
    run(**questions()).loss.backward()
    optimizer = optimizer_of("kfac", model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(run, optimizer, questions())
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert ["torch.compiler.reset" in text for text in ours] == [True]
