"""A task for Hugging Face models that is generated within a second: sentences, their tokenizer and tiny models.

A sentence is about the last animal in it, and its label is that animal.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from secondorder import EKFAC, KFAC, HyLo, SparseMFAC

#: Adam sets the length of each step.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kfac": (KFAC, {"lr": 0.03, "graft": "adam", "factor_update_steps": 1, "inv_update_steps": 2}),
    "ekfac": (EKFAC, {"lr": 0.03, "graft": "adam", "factor_update_steps": 1, "inv_update_steps": 2}),
    "sparse_mfac": (SparseMFAC, {"lr": 0.01, "graft": "adam", "window_size": 4}),
    "hylo": (HyLo, {"lr": 0.03, "graft": "adam", "update_steps": 2}),
}
#: The position embedding is looked up once for the whole batch, so it has no statistics of single examples.
BY_FALLBACK = {name: {"bert.embeddings.position_embeddings.weight"} for name in ("ekfac", "hylo")}

ANIMALS = ("cat", "dog", "owl")
WORDS = ("a", "the", "small", "old", "grey", "saw", "met", "heard", "then", "and")
LONGEST = 12


def sentences(number: int, seed: int = 0) -> list[str]:
    """Generate sentences of 3 to 10 words."""
    draw = random.Random(seed)
    return [
        " ".join([*draw.choices(WORDS + ANIMALS, k=draw.randint(2, 9)), draw.choice(ANIMALS)]) for _ in range(number)
    ]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that was trained on such sentences."""
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(
        sentences(100), trainers.WordPieceTrainer(vocab_size=60, special_tokens=[*special.values()])
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


class Sentences(list[dict[str, Any]]):
    """Sentences as a ``Trainer`` takes them. If ``padded``, all have the same length."""

    def __init__(self, number: int, *, seed: int = 0, padded: bool = True) -> None:
        texts = sentences(number, seed)
        pad = {"padding": "max_length", "max_length": LONGEST} if padded else {}
        tokens = tokenizer()(texts, truncation=True, return_token_type_ids=False, **pad)
        labels = [ANIMALS.index(text.split()[-1]) for text in texts]
        names = [*tokens, "labels"]
        super().__init__(dict(zip(names, row, strict=True)) for row in zip(*tokens.values(), labels, strict=True))

    def batch(self, first: int, size: int) -> dict[str, Tensor]:
        """Stack ``size`` examples from ``first`` on."""
        rows = [self[i % len(self)] for i in range(first, first + size)]
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def classifier() -> BertForSequenceClassification:
    """Create a BERT of one layer without dropout, with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=LONGEST, type_vocab_size=1, num_labels=len(ANIMALS), pad_token_id=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def language_model() -> GPT2LMHeadModel:
    """Create a GPT-2 of one layer without dropout, with random weights; its embedding is tied to its head."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer()), n_embd=16, n_layer=1, n_head=2, n_positions=LONGEST,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "log_level": "error",
        "logging_steps": 1,
    }  # fmt: skip
    return TrainingArguments(**settings | changed)
