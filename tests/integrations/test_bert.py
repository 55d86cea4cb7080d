"""Every method trains and covers BERT and its relatives, for question answering and for classification.

Data files and tokenizers are part of the page on BERT, whose examples `test_docs_blocks.py` runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations import bert_sizes
from tests.integrations.bert_models import (
    DENSITY,
    LANGUAGE,
    METHODS,
    QUESTIONS,
    SENTENCES,
    WINDOW,
    Batch,
    N,
    S,
    batch,
    linear_layers,
    new_model,
    on_fallback,
    optimizer_of,
    step,
    steps,
    treatment,
)
from tests.support.warned import warned

#: Number of linear layers below the head in the two layers of each family.
LINEAR = {"Bert": 12, "DistilBert": 12, "Roberta": 12, "GPT2": 8}
#: Family, head and number of labels; three labels are for pairs of sentences.
CASES = [(family, head, 2) for family in LINEAR for head in (QUESTIONS, SENTENCES)] + [("Bert", SENTENCES, 3)]
every_method = pytest.mark.parametrize("method", METHODS)


def expected_bytes(method: str, shapes: bert_sizes.Shapes) -> dict[str, int]:
    if method in {"kfac", "ekfac"}:
        return bert_sizes.kronecker(shapes, scale=method == "ekfac")
    if method == "hylo":
        return bert_sizes.rows(shapes, N, S)
    return bert_sizes.window(shapes, WINDOW, density=DENSITY, moments=2)


@every_method
@pytest.mark.parametrize(("family", "head", "labels"), CASES)
def test_the_loss_falls_and_everything_is_covered(family: str, head: str, labels: int, method: str) -> None:
    """No warning is given. BERT has batches of different lengths and a state of the size that the formulas give."""
    model = new_model(family, head, labels)
    optimizer = optimizer_of(method, model)
    if family == "Bert":
        losses = steps(model, optimizer, [batch(family, head, labels, length) for length in (S, S - 3)], 8)
        assert sum(losses[-2:]) < 0.7 * sum(losses[:2])
    else:
        losses = steps(model, optimizer, [batch(family, head, labels)], 8)
        assert losses[-1] < losses[0]
    found, layers = treatment(optimizer), linear_layers(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not on_fallback(optimizer)
    assert len(layers) > LINEAR[family]
    if method != "sparse_mfac":  # a window covers parameters regardless of their layers
        covered = {name: how for name, how in found.items() if name.rpartition(".")[0] in layers}
        assert covered == {name: f"block '{(n := name.rpartition('.')[0])}' ({layers[n]})" for name in covered}
        assert {f"{name}.weight" for name in layers} <= covered.keys()
    if family == "Bert":
        answers = head == QUESTIONS
        assert len(layers) == LINEAR[family] + (1 if answers else 2)
        shapes = bert_sizes.shapes_of(model.config, outputs=labels, pooler=not answers)
        assert shapes.entries == sum(p.numel() for p in model.parameters())
        assert bert_sizes.differences(optimizer.memory_usage(), expected_bytes(method, shapes), shapes.blocks) == {}


@every_method
def test_positions_looked_up_once_per_batch_fall_back_in_methods_that_need_examples(method: str) -> None:
    """The models look positions up once for the whole batch by default."""
    model, data = new_model("Bert", SENTENCES), batch("Bert", SENTENCES)
    del data["position_ids"]
    optimizer = optimizer_of(method, model)
    with warned() as caught:
        for _ in range(3):
            step(model, optimizer, data)
    needs_examples = method in {"ekfac", "hylo"}
    assert on_fallback(optimizer) == ["bert.embeddings.position_embeddings.weight"] * needs_examples
    assert ["position_embeddings" in warning for warning in caught] == [True] * needs_examples


@pytest.mark.parametrize("tied", [None, "embedding", "head"])
def test_a_word_embedding_that_is_the_head_too_may_have_either_block(tied: str | None) -> None:
    model = new_model("GPT2", LANGUAGE)
    with warned() as caught:
        optimizer = optimizer_of("kfac", model, tied=tied)
    assert ["tied='embedding') or tied='head'" in warning for warning in caught] == [True] * (tied is None)
    losses = steps(model, optimizer, [batch("GPT2", LANGUAGE)], 8)
    assert losses[-1] < losses[0]
    how = treatment(optimizer)["transformer.wte.weight"]
    expected = {"embedding": "block 'transformer.wte' (Embedding), tied", "head": "block 'lm_head' (Linear), tied"}
    assert how.startswith(expected[tied] if tied else "adam fallback: tied across layers")


def padded(data: Batch, to: int) -> Batch:
    """Return the same sentences with more padding."""
    more = to - data["input_ids"].shape[1]
    longer = {name: nn.functional.pad(rows, (0, more)) for name, rows in data.items() if rows.dim() == 2}
    return data | longer | {"position_ids": torch.arange(to).expand(len(data["input_ids"]), -1)}


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
    """Without `mask`, padding counts as input in all layers before the pooler."""
    short = batch("Bert", SENTENCES, length=10)
    short |= {"attention_mask": torch.ones(N, 10).long(), "token_type_ids": torch.tensor([0, 1]).repeat(N, 5)}
    found = []
    for data in (short, padded(short, 16)):
        model = new_model("Bert", SENTENCES).double()
        optimizer = optimizer_of("kfac", model)
        step(model, optimizer, data, masked=masked)
        found.append(factors(optimizer))
    assert len(found[0]) == 2 * (14 + 3 + 5)
    differ = {
        name for name, value in found[0].items() if not torch.allclose(value, found[1][name], rtol=1e-9, atol=1e-14)
    }
    inputs = {name for name in found[0] if name.endswith(".weight factor_a")}
    after = {"bert.pooler.dense.weight factor_a", "classifier.weight factor_a"}
    norms = {name for name in inputs if "LayerNorm" in name}  # their A is the number 1
    words_only = {"bert.embeddings.word_embeddings.weight factor_a"}  # which leaves out its padding_idx
    assert differ == (set() if masked else inputs - after - norms - words_only)
