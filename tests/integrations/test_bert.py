"""BERT for question answering and for sequences of words: every method trains it, and covers all of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import BertForSequenceClassification

from tests.integrations import bert_data, bert_sizes
from tests.integrations.bert_models import (
    BATCH,
    DENSITY,
    METHODS,
    WINDOW,
    Batch,
    batches,
    bert_for,
    config,
    linear_layers,
    mean_loss,
    optimizer_of,
    step,
    treatment,
)

#: Tasks, and how often their features are gone through.
TASKS = {"squad1": 3, "squad2": 3, "sst2": 9, "mrpc": 12, "mnli": 8}
every_method = pytest.mark.parametrize("method", METHODS)


class Task:
    """Features of a task, in batches."""

    def __init__(self, features: Dataset, tokenizer: Any) -> None:
        self.features, self.vocabulary = features, len(tokenizer)
        self.batches = list(batches(features, tokenizer))

    def model(self) -> nn.Module:
        return bert_for(self.features, self.vocabulary)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Task]]:
    datasets.disable_progress_bars()
    yield {name: Task(*bert_data.features_of(name, tmp_path_factory.mktemp(name))) for name in TASKS}
    datasets.enable_progress_bars()


def shapes_of(model: nn.Module) -> bert_sizes.Shapes:
    answers = not isinstance(model, BertForSequenceClassification)
    return bert_sizes.shapes_of(model.config, outputs=2 if answers else model.config.num_labels, pooler=not answers)


def expected_bytes(method: str, shapes: bert_sizes.Shapes) -> dict[str, int]:
    if method in {"kfac", "ekfac"}:
        return bert_sizes.kronecker(shapes, scale=method == "ekfac")
    if method == "hylo":
        return bert_sizes.rows(shapes, BATCH, bert_data.LENGTH)
    return bert_sizes.window(shapes, WINDOW, density=DENSITY, moments=2)


@every_method
@pytest.mark.parametrize("task", TASKS)
def test_the_loss_falls_and_everything_is_covered(task: str, method: str, tasks: dict[str, Task]) -> None:
    model, data = tasks[task].model(), tasks[task].batches
    optimizer = optimizer_of(method, model)
    before = mean_loss(model, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(TASKS[task]):
            for batch in data:
                step(model, optimizer, batch)
    assert mean_loss(model, data) < 0.7 * before

    found = treatment(optimizer)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not [name for name, how in found.items() if "fallback" in how]
    if method != "sparse_mfac":  # a window holds parameters, whatever layer they belong to
        layers = {
            f"{name}.{own}": f"block '{name}' (Linear)" for name in linear_layers(model) for own in ("weight", "bias")
        }
        assert {name: found[name] for name in layers} == layers
        assert len(layers) == 2 * (6 * 2 + (1 if task.startswith("squad") else 2))
    shapes = shapes_of(model)
    assert shapes.entries == sum(p.numel() for p in model.parameters())
    assert bert_sizes.differences(optimizer.memory_usage(), expected_bytes(method, shapes), shapes.blocks) == {}


@every_method
def test_positions_that_are_looked_up_once_for_all(method: str, tasks: dict[str, Task]) -> None:
    """As the models do it by themselves: then nothing is known of examples there, which not every method needs."""
    model = tasks["sst2"].model()
    batch = {name: value for name, value in tasks["sst2"].batches[0].items() if name != "position_ids"}
    optimizer = optimizer_of(method, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(model, optimizer, batch)
    left = [name for name, how in treatment(optimizer).items() if "fallback" in how]
    if method in {"kfac", "sparse_mfac"}:
        assert not left
        assert not caught
    else:
        assert left == ["bert.embeddings.position_embeddings.weight"]
        assert ["position_embeddings" in str(warning.message) for warning in caught] == [True]


def padded(batch: Batch, to: int) -> Batch:
    """The same sentences with more padding."""
    more = to - batch["input_ids"].shape[1]
    longer = {name: nn.functional.pad(rows, (0, more)) for name, rows in batch.items() if rows.dim() == 2}
    return batch | longer | {"position_ids": torch.arange(to).expand(len(batch["input_ids"]), -1)}


def factors(optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name} {side}": optimizer.state[p][side]
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
        for side in ("factor_a", "factor_g")
        if side in optimizer.state[p]
    }


@pytest.mark.parametrize("masked", [True, False])
def test_statistics_are_those_without_padding(masked: bool) -> None:
    """Under `mask`. Without it the padding counts as inputs, in all layers before the pooler."""
    torch.manual_seed(1)
    words = torch.randint(5, 60, (4, 10))
    short: Batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.tensor([0, 1, 1, 0])}
    short |= {"position_ids": torch.arange(10).expand(4, -1), "token_type_ids": torch.tensor([0, 1]).repeat(4, 5)}
    found = []
    for batch in (short, padded(short, 16)):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config(60, num_labels=2)).double()
        optimizer = optimizer_of("kfac", model)
        if masked:
            step(model, optimizer, batch)
        else:
            model(**batch).loss.backward()
            optimizer.step()
        found.append(factors(optimizer))
    assert len(found[0]) == 2 * (14 + 3 + 5)
    differ = {
        name for name, value in found[0].items() if not torch.allclose(value, found[1][name], rtol=1e-9, atol=1e-14)
    }
    inputs = {name for name in found[0] if name.endswith(".weight factor_a")}
    after = {"bert.pooler.dense.weight factor_a", "classifier.weight factor_a"}
    norms = {name for name in inputs if "LayerNorm" in name}  # their A is the number 1
    words_only = {"bert.embeddings.word_embeddings.weight factor_a"}  # whose padding_idx tells
    assert differ == (set() if masked else inputs - after - norms - words_only)
