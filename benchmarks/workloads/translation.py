"""The encoder-decoder of the workload on translation, its likeliest word at each place, and BLEU of what comes out."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
PAD, BEGIN, END, UNKNOWN = range(len(SPECIAL))

Decoder = Callable[[Tensor], Tensor]
"""Takes the words so far ``[batch, T]`` and returns logits of the next one ``[batch, vocabulary]``."""


class _Side(nn.Module):
    """Word and position embeddings of one language."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width, PAD), nn.Embedding(length, width)

    def forward(self, words: Tensor) -> Tensor:
        # Positions are looked up for every sentence, so that each has gradients of its own there.
        positions = torch.arange(words.shape[1], device=words.device).expand_as(words)
        out: Tensor = self.words(words) + self.positions(positions)
        return out


class Translator(nn.Module):
    """``nn.Transformer`` with norms in front between embeddings and a head."""

    def __init__(
        self, vocabularies: Sequence[int], length: int, width: int, layers: int, heads: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.source, self.target = (_Side(vocabulary, length, width) for vocabulary in vocabularies)
        options: dict[str, Any] = {
            "dim_feedforward": hidden,
            "dropout": dropout,
            "batch_first": True,
            "norm_first": True,
        }
        # nn.Transformer would build the same encoder, and warn that its norms rule out nested tensors.
        layer = nn.TransformerEncoderLayer(width, heads, **options)
        encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.transformer = nn.Transformer(width, heads, num_decoder_layers=layers, custom_encoder=encoder, **options)
        self.head = nn.Linear(width, vocabularies[1])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        padding = source == PAD
        return self.transformer.encoder(self.source(source), src_key_padding_mask=padding), padding

    def decode(self, target: Tensor, memory: Tensor, padding: Tensor, last: bool = False) -> Tensor:
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        # The target's padding stands behind all that counts, where the causal mask hides it already.
        hidden = self.transformer.decoder(self.target(target), memory, tgt_mask=later, memory_key_padding_mask=padding)
        logits: Tensor = self.head(hidden[:, -1] if last else hidden)
        return logits


def greedy(next_word: Decoder, batch: int, length: int) -> list[list[int]]:
    words = torch.full((batch, 1), BEGIN)
    ended = torch.zeros(batch, dtype=torch.bool)
    for _ in range(length):
        chosen = next_word(words).argmax(-1).cpu()
        ended |= chosen == END
        words = torch.cat((words, chosen.masked_fill(ended, END)[:, None]), 1)
        if ended.all():
            break
    return [row[: row.index(END)] if END in row else row for row in words[:, 1:].tolist()]


def bleu(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Return BLEU of sentences that are cut into words already, as the words stand."""
    try:
        sacrebleu = import_module("sacrebleu")
    except ImportError as err:
        raise ValueError("BLEU needs sacrebleu: install the extra `bench`") from err
    texts, right = ([" ".join(words) for words in side] for side in (translations, references))
    return float(sacrebleu.corpus_bleu(texts, [right], tokenize="none", force=True).score)
