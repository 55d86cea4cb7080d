"""Relatives of BERT: every linear layer has a block, the `Conv1D` of GPT-2 too, and no warning is given."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.integrations.bert_models import METHODS, Batch, linear_layers, optimizer_of, step, treatment

VOCABULARY, N, S = 60, 8, 12
SIZES: dict[str, dict[str, Any]] = {
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": S},
    "Roberta": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "max_position_embeddings": S + 2, "type_vocab_size": 1, "pad_token_id": 1,
    },
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": S, "pad_token_id": 0},
}  # fmt: skip
#: Linear layers below the head, in two layers of each.
LINEAR = {"DistilBert": 12, "Roberta": 12, "GPT2": 8}
every_method = pytest.mark.parametrize("method", METHODS)


def new_model(family: str, head: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(vocab_size=VOCABULARY, initializer_range=0.2, **SIZES[family])
    return getattr(hf, f"{family}{head}")(config)


def batch(family: str, head: str) -> Batch:
    torch.manual_seed(1)
    words = torch.randint(5, VOCABULARY, (N, S))
    keep = torch.arange(S) < torch.arange(5, 5 + N)[:, None].clamp(max=S)
    found = {"input_ids": words, "attention_mask": keep.long()}
    found["position_ids"] = torch.arange(S).expand(N, -1) + 2 * (family == "Roberta")
    if head == "ForQuestionAnswering":
        starts, ends = torch.randint(1, 5, (2, N))
        return found | {"start_positions": starts, "end_positions": ends}
    return found | {"labels": words if head == "LMHeadModel" else torch.arange(N) % 2}


def trained(model: nn.Module, optimizer: Any, data: Batch, steps: int = 8) -> list[float]:
    """Losses of steps on one batch, with whatever is warned of as an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [step(model, optimizer, data) for _ in range(steps)]


@every_method
@pytest.mark.parametrize("head", ["ForQuestionAnswering", "ForSequenceClassification"])
@pytest.mark.parametrize("family", SIZES)
def test_every_linear_layer_has_a_block(family: str, head: str, method: str) -> None:
    model = new_model(family, head)
    optimizer = optimizer_of(method, model)
    losses = trained(model, optimizer, batch(family, head))
    assert losses[-1] < losses[0]
    found = treatment(optimizer)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not [name for name, how in found.items() if "fallback" in how]
    layers = linear_layers(model)
    assert len(layers) > LINEAR[family]
    if method != "sparse_mfac":
        for name, kind in layers.items():
            assert found[f"{name}.weight"] == f"block '{name}' ({kind})"


@pytest.mark.parametrize("tied", [None, "embedding", "head"])
def test_a_word_embedding_that_is_the_head_too_may_have_either_block(tied: str | None) -> None:
    model = new_model("GPT2", "LMHeadModel")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = optimizer_of("kfac", model, tied=tied)
    assert ["tied='embedding' or 'head'" in str(warning.message) for warning in caught] == [True] * (tied is None)
    losses = trained(model, optimizer, batch("GPT2", "LMHeadModel"))
    assert losses[-1] < losses[0]
    how = treatment(optimizer)["transformer.wte.weight"]
    expected = {"embedding": "block 'transformer.wte' (Embedding), tied", "head": "block 'lm_head' (Linear), tied"}
    assert how.startswith(expected[tied] if tied else "adam fallback: tied across layers")
