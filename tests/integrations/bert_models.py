"""Tiny models of the BERT family from their configurations, batches for them, and what an optimizer does with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor, nn
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification
from transformers.pytorch_utils import Conv1D

from secondorder import EKFAC, KFAC, HyLo, SparseMFAC, TopK

BATCH, WINDOW, DENSITY = 8, 1024, 0.1
#: Adam says how long each step is, so learning rates are those of Adam.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kfac": (KFAC, {"lr": 3e-3, "graft": "adam"}),
    "ekfac": (EKFAC, {"lr": 3e-3, "graft": "adam"}),
    "hylo": (HyLo, {"lr": 1e-3, "graft": "adam"}),
    # of matrices that are smaller than one block, so more than the usual hundredth
    "sparse_mfac": (SparseMFAC, {"lr": 1e-3, "graft": "adam", "compression": TopK(DENSITY), "window_size": WINDOW}),
}
Batch = dict[str, Tensor]


def config(vocabulary: int, **changed: Any) -> BertConfig:
    """Two layers of width 32, without dropout, and weights as large as that width wants them."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 40, "initializer_range": 0.2,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return BertConfig(**sizes | changed)


def bert_for(features: Dataset, vocabulary: int, **changed: Any) -> nn.Module:
    """The model with the head that features are for, from random weights."""
    torch.manual_seed(0)
    if "labels" not in features.column_names:
        return BertForQuestionAnswering(config(vocabulary, **changed))
    return BertForSequenceClassification(config(vocabulary, num_labels=1 + max(features["labels"]), **changed))


def optimizer_of(method: str, model: nn.Module, **changed: Any) -> Any:
    cls, keywords = METHODS[method]
    return cls(model, **keywords | changed)


def batches(features: Dataset, tokenizer: Any) -> Iterator[Batch]:
    """All features once, in their order; each batch is as long as its longest row."""
    collate = transformers.DataCollatorWithPadding(tokenizer)
    for i in range(0, len(features), BATCH):
        batch = dict(collate([features[j] for j in range(i, min(i + BATCH, len(features)))]))
        # Positions by example, not looked up once for all: then what each example does to them can be told.
        yield batch | {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}


def mean_loss(model: nn.Module, data: list[Batch]) -> float:
    """Over all examples, as in evaluation."""
    model.eval()
    with torch.no_grad():
        losses = [float(model(**batch).loss) * len(batch["input_ids"]) for batch in data]
    model.train()
    return sum(losses) / sum(len(batch["input_ids"]) for batch in data)


def step(model: nn.Module, optimizer: Any, batch: Batch) -> float:
    """One step, padding left out; its loss."""
    optimizer.zero_grad()
    keep = batch["attention_mask"].bool()
    with optimizer.mask(keep) if hasattr(optimizer, "mask") else nullcontext():  # windows know no positions
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def linear_layers(model: nn.Module) -> dict[str, str]:
    """Kind of every linear layer by its name: `Linear`, or the `Conv1D` of GPT-2."""
    return {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}


def treatment(optimizer: Any) -> dict[str, str]:
    """By parameter: the block that covers it, or the fallback and why."""
    words = ("block ", "window ", "sgd fallback", "adam fallback")
    lines = optimizer.describe().splitlines()
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    found = {line.split()[0]: line for line in lines if line.split() and line.split()[0] in names}
    return {name: line[min(i for w in words if (i := line.find(w)) >= 0) :] for name, line in found.items()}
