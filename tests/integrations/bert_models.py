"""Tiny models of the BERT family, batches for them, and how an optimizer treats their parameters."""

from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secondorder import EKFAC, KFAC, HyLo, SparseMFAC, TopK
from tests.support.building import built
from tests.support.warned import silent

VOCABULARY, N, S = 60, 8, 12  # words, examples, positions
WINDOW, DENSITY = 1024, 0.1
#: Adam sets the length of each step, so learning rates are those of Adam.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kfac": (KFAC, {"lr": 3e-3, "graft": "adam"}),
    "ekfac": (EKFAC, {"lr": 3e-3, "graft": "adam"}),
    "hylo": (HyLo, {"lr": 1e-3, "graft": "adam", "damping": 1.0}),
    # The matrices are smaller than one block, so more than the usual hundredth is kept.
    "sparse_mfac": (SparseMFAC, {"lr": 1e-3, "graft": "adam", "compression": TopK(DENSITY), "window_size": WINDOW}),
}
#: Two layers of width 32, with weights scaled to that width. BERT has no dropout, because runs are compared.
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES: dict[str, dict[str, Any]] = {
    "Bert": {**SMALL, **NO_DROPOUT, "max_position_embeddings": 40},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": S},
    "Roberta": {**SMALL, "max_position_embeddings": S + 2, "type_vocab_size": 1, "pad_token_id": 1},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": S, "pad_token_id": 0},
}
QUESTIONS, SENTENCES, LANGUAGE = "ForQuestionAnswering", "ForSequenceClassification", "LMHeadModel"
Batch = dict[str, Tensor]


def new_model(family: str, head: str, labels: int = 2, **changed: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "num_labels": labels, **SIZES[family]}
    config = getattr(transformers, f"{family}Config")(**settings | changed)
    return getattr(transformers, f"{family}{head}")(config)


def batch(family: str, head: str, labels: int = 2, length: int = S, seed: int = 1) -> Batch:
    """Create sentences of different lengths. Position ids are given per example, so that EKFAC and HyLo cover them."""
    torch.manual_seed(seed)
    words = torch.randint(5, VOCABULARY, (N, length))
    keep = torch.arange(length) < torch.arange(5, 5 + N)[:, None].clamp(max=length)
    found = {"input_ids": words, "attention_mask": keep.long()}
    found["position_ids"] = torch.arange(length).expand(N, -1) + 2 * (family == "Roberta")
    if labels > 2:  # of pairs of sentences
        found["token_type_ids"] = (torch.arange(length) > 3).long().expand(N, -1)
    if head == QUESTIONS:
        starts, ends = torch.randint(0, 5, (2, N))  # 0 stands for a question without an answer
        return found | {"start_positions": starts, "end_positions": ends}
    return found | {"labels": words if head == LANGUAGE else torch.arange(N) % labels}


def optimizer_of(method: str, model: nn.Module, **changed: Any) -> Any:
    cls, keywords = METHODS[method]
    return built(cls, model, **keywords | changed)


def step(model: nn.Module, optimizer: Any, batch: Batch, *, masked: bool = True) -> float:
    """Take one step that leaves out padding and return its loss."""
    optimizer.zero_grad()
    masked = masked and hasattr(optimizer, "mask")  # SparseMFAC has no `mask`
    with optimizer.mask(batch["attention_mask"].bool()) if masked else nullcontext():
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def steps(model: nn.Module, optimizer: Any, batches: list[Batch], times: int) -> list[float]:
    """Return the losses of steps through the batches, repeated `times` times. Every warning is an error."""
    with silent():
        return [step(model, optimizer, batch) for _ in range(times) for batch in batches]


def linear_layers(model: nn.Module) -> dict[str, str]:
    """Return the kind of every linear layer by its name: `Linear`, or the `Conv1D` of GPT-2."""
    return {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}


def treatment(optimizer: Any) -> dict[str, str]:
    """Return, by parameter, the block that covers it, or the fallback and its reason."""
    words = ("block ", "window ", "sgd fallback", "adam fallback")
    lines = optimizer.describe().splitlines()
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    found = {line.split()[0]: line for line in lines if line.split() and line.split()[0] in names}
    return {name: line[min(i for w in words if (i := line.find(w)) >= 0) :] for name, line in found.items()}


def on_fallback(optimizer: Any) -> list[str]:
    return [name for name, how in treatment(optimizer).items() if "fallback" in how]
