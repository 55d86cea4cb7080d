"""Every method trains and covers BERT and its relatives, for question answering and for classification.

Data files and tokenizers are part of the page on BERT, whose examples `test_docs_blocks.py` runs.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations import bert_models as bert
from tests.integrations import bert_sizes
from tests.integrations.bert_models import METHODS, QUESTIONS, SENTENCES, N, S, batch, optimizer_of
from tests.support.grid import pairs
from tests.support.tasks import covered_layers
from tests.support.warned import warned

#: Number of linear layers below the head in the two layers of each family.
LINEAR = {"Bert": 12, "DistilBert": 12, "Roberta": 12, "GPT2": 8}
#: The head and the number of labels; three labels are for pairs of sentences, which BERT alone distinguishes.
TASKS = {"questions": (QUESTIONS, 2), "sentences": (SENTENCES, 2), "pairs of sentences": (SENTENCES, 3)}
every_method = pytest.mark.parametrize("method", METHODS)


@pairs(
    lambda family, task, method: task[1] == 2 or family == "Bert",
    family=list(LINEAR), task=TASKS, method=list(METHODS),
)  # fmt: skip
def test_the_loss_falls_and_everything_is_covered(family: str, task: tuple[str, int], method: str) -> None:
    """No warning is given. BERT has batches of different lengths and a state of the size that the formulas give."""
    head, labels = task
    model = bert.new_model(family, head, labels)
    optimizer = optimizer_of(method, model)
    if family == "Bert":
        losses = bert.steps(model, optimizer, [batch(family, head, labels, length) for length in (S, S - 3)], 8)
        assert sum(losses[-2:]) < 0.7 * sum(losses[:2])
    else:
        losses = bert.steps(model, optimizer, [batch(family, head, labels)], 8)
        assert losses[-1] < losses[0]
    found, layers = bert.treatment(optimizer), bert.linear_layers(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not bert.on_fallback(optimizer)
    assert len(layers) > LINEAR[family]
    if method != "sparse_mfac":  # a window covers parameters regardless of their layers
        covered = {name: how for name, how in found.items() if name.rpartition(".")[0] in layers}
        assert covered == {name: f"block '{(n := name.rpartition('.')[0])}' ({layers[n]})" for name in covered}
        assert {f"{name}.weight" for name in layers} <= covered.keys()
    if family == "Bert":
        assert len(layers) == LINEAR[family] + (1 if head == QUESTIONS else 2)
        sizes = {"examples": N, "length": S, "window": bert.WINDOW, "density": bert.DENSITY}
        expected = bert_sizes.expected(method, model, **sizes)
        assert bert_sizes.differences(optimizer.memory_usage(), expected, len(covered_layers(model))) == {}


@every_method
def test_positions_looked_up_once_per_batch_fall_back_in_methods_that_need_examples(method: str) -> None:
    """The models look positions up once for the whole batch by default."""
    model, data = bert.new_model("Bert", SENTENCES), batch("Bert", SENTENCES)
    del data["position_ids"]
    optimizer = optimizer_of(method, model)
    with warned() as caught:
        for _ in range(3):
            bert.step(model, optimizer, data)
    needs_examples = method in {"ekfac", "hylo"}
    assert bert.on_fallback(optimizer) == ["bert.embeddings.position_embeddings.weight"] * needs_examples
    assert ["position_embeddings" in warning for warning in caught] == [True] * needs_examples


@pytest.mark.parametrize("tied", [None, "embedding", "head"])
def test_a_word_embedding_that_is_the_head_too_may_have_either_block(tied: str | None) -> None:
    model = bert.new_model("GPT2", bert.LANGUAGE)
    with warned() as caught:
        optimizer = optimizer_of("kfac", model, tied=tied)
    assert ["tied='embedding') or tied='head'" in warning for warning in caught] == [True] * (tied is None)
    losses = bert.steps(model, optimizer, [batch("GPT2", bert.LANGUAGE)], 8)
    assert losses[-1] < losses[0]
    how = bert.treatment(optimizer)["transformer.wte.weight"]
    expected = {"embedding": "block 'transformer.wte' (Embedding), tied", "head": "block 'lm_head' (Linear), tied"}
    assert how.startswith(expected[tied] if tied else "adam fallback: tied across layers")


def padded(data: bert.Batch, to: int) -> bert.Batch:
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
        model = bert.new_model("Bert", SENTENCES).double()
        optimizer = optimizer_of("kfac", model)
        bert.step(model, optimizer, data, masked=masked)
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
