"""Translation of Multi30k, German to English, by the encoder-decoder ``torch.nn.Transformer``.

No weights are shared: source and target have separate word and position embeddings, and the head has its own matrix.
The vocabulary contains the most frequent words of the training sentences, and one token for all other words.

BLEU is computed from greedy translations on tokenized, lower-case words. References keep the words that the model does
not know. The result is not comparable with BLEU on detokenized text or with beam search.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.workloads.base import (
    IGNORED,
    Batch,
    Classification,
    Size,
    cross_entropy,
    evaluating,
    find_folder,
    optional_package,
    shuffled_indices,
)

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
        # Positions are looked up for every sentence, so that each sentence has its own gradients.
        positions = torch.arange(words.shape[1], device=words.device).expand_as(words)
        out: Tensor = self.words(words) + self.positions(positions)
        return out


class Translator(nn.Module):
    """A pre-norm ``nn.Transformer`` with embeddings and a head."""

    def __init__(
        self, vocabularies: Sequence[int], length: int, width: int, layers: int, heads: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.source, self.target = (_Side(vocabulary, length, width) for vocabulary in vocabularies)
        options: dict[str, Any] = {"dim_feedforward": hidden, "dropout": dropout}
        options |= {"batch_first": True, "norm_first": True}
        # nn.Transformer would build the same encoder, but warn that pre-norm layers do not support nested tensors.
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
        # The target's padding needs no mask: it follows all words, and the causal mask hides it.
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
    sacrebleu = optional_package("sacrebleu", "bench")
    texts, right = ([" ".join(words) for words in side] for side in (translations, references))
    return float(sacrebleu.corpus_bleu(texts, [right], tokenize="none", force=True).score)


LANGUAGES = ("de", "en")  # source, target
TRAIN_FILES = tuple(f"train.{language}.gz" for language in LANGUAGES)
VALIDATION_FILES = tuple(f"val.{language}" for language in LANGUAGES)
TEST_FILES = tuple(f"test_2016_flickr.{language}" for language in LANGUAGES)
EVAL_SENTENCES = 256
POOL = 20  # number of batches that are drawn together and sorted by length, so that batches have little padding

Sentences = list[list[str]]


@dataclass(frozen=True)
class Multi30k(Classification):
    """Cross-entropy of the next English word, averaged over all words of the batch."""

    data_dir: Path
    batch_size: int = 128
    vocabulary: int = 2000  # number of words in each language, including special ones
    length: int = 40
    """Maximum number of words per sentence, including the marks of its ends. Longer sentences are truncated."""
    width: int = 256
    layers: int = 2
    heads: int = 4
    expansion: int = 2  # width inside the feed-forward layers, as a multiple of `width`
    dropout: float = 0.0  # dropout probability of the hidden states
    label_smoothing: float = 0.0  # share of the probability that the training loss spreads over all words

    name: ClassVar[str] = "multi30k"
    metric: ClassVar[str] = "validation loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 45_200}
    small: ClassVar[dict[str, Any]] = {
        "batch_size": 16, "vocabulary": 200, "length": 20, "width": 32, "layers": 1, "heads": 2,
    }  # fmt: skip
    # The base Transformer, as the code of DP-KFAC trains it for 200 epochs on these sentences:
    # examples/pytorch_multi30k_transformer.py and batch_multi30k.sh of lzhangbv/kfac_pytorch. That model shares all
    # embeddings, is post-norm and uses beam search. In German, 5,378 words occur three times or more.
    published: ClassVar[dict[str, Any]] = {
        "vocabulary": 5400, "length": 100, "width": 512, "layers": 6, "heads": 8, "expansion": 4, "dropout": 0.1,
        "label_smoothing": 0.1,
    }  # fmt: skip

    @property
    def examples(self) -> int:
        return len(self._train[0])

    def network(self) -> nn.Module:
        sizes, hidden = [len(words) for words in self._vocabularies], self.expansion * self.width
        return Translator(sizes, self.length, self.width, self.layers, self.heads, hidden, self.dropout)

    def batches(self, seed: int) -> Iterator[Batch]:
        pairs = self._numbered(self._train)
        generator = torch.Generator().manual_seed(seed)
        pool = max(1, min(POOL, len(pairs) // self.batch_size))
        for index in shuffled_indices(len(pairs), pool * self.batch_size, generator):
            by_length = sorted(index.tolist(), key=lambda i: (len(pairs[i][0]), len(pairs[i][1])))
            for start in torch.randperm(pool, generator=generator).mul(self.batch_size).tolist():
                yield _padded([pairs[i] for i in by_length[start : start + self.batch_size]])

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        source, target = batch
        logits: Tensor = model(source, target[:, :-1])
        return logits

    def targets(self, batch: Batch) -> Tensor:
        target = batch[1][:, 1:]
        return target.masked_fill(target == PAD, IGNORED)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the loss without smoothing on the first 256 pairs of the validation set, or on all pairs."""
        pairs = self._numbered(self._validation)
        pairs = pairs if everything else pairs[:EVAL_SENTENCES]
        total, words = 0.0, 0
        with evaluating(model):
            for start in range(0, len(pairs), EVAL_SENTENCES):
                batch = _padded(pairs[start : start + EVAL_SENTENCES])
                targets = self.targets(batch)
                count = int((targets != IGNORED).sum())
                loss = float(cross_entropy(self.outputs(model, batch), targets))
                total, words = total + count * loss, words + count
        return total / words

    def quality(self, model: nn.Module) -> dict[str, float]:
        """Return BLEU of greedy translations of the test set, or of the validation set if there is no test set."""
        tested = all((self._folder / name).is_file() for name in TEST_FILES)
        sentences = self._read(TEST_FILES) if tested else self._validation
        found = bleu(self.translate(model, sentences[0]), sentences[1])
        return {"BLEU, test_2016_flickr" if tested else "BLEU, validation": found}

    def translate(self, model: nn.Module, sentences: Sentences) -> Sentences:
        assert isinstance(model, Translator)
        words, device = list(self._vocabularies[1]), model.head.weight.device
        pairs = self._numbered([sentences, [[]] * len(sentences)])
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]))
        found: dict[int, list[str]] = {}
        with evaluating(model):
            for start in range(0, len(order), EVAL_SENTENCES):
                part = order[start : start + EVAL_SENTENCES]
                memory, padding = model.encode(_padded([pairs[i] for i in part])[0].to(device))
                next_word = partial(_next_word, model, memory, padding)
                numbers = greedy(next_word, len(part), self.length)
                found |= {i: [words[number] for number in row] for i, row in zip(part, numbers, strict=True)}
        return [found[i] for i in range(len(order))]

    def _numbered(self, sentences: Sequence[Sentences]) -> list[Batch]:
        source, target = self._vocabularies
        return [
            (_numbers([*de[: self.length - 1], SPECIAL[END]], source), _numbers(self._marked(en), target))
            for de, en in zip(*sentences, strict=True)
        ]

    def _marked(self, sentence: list[str]) -> list[str]:
        # The last word is only predicted, so the decoder reads one word less.
        return [SPECIAL[BEGIN], *sentence[: self.length - 1], SPECIAL[END]]

    @cached_property
    def _vocabularies(self) -> list[dict[str, int]]:
        return [number_words(sentences, self.vocabulary) for sentences in self._train]

    @cached_property
    def _train(self) -> list[Sentences]:
        return self._read(TRAIN_FILES)

    @cached_property
    def _validation(self) -> list[Sentences]:
        return self._read(VALIDATION_FILES)

    @cached_property
    def _folder(self) -> Path:
        candidates = (self.data_dir / "multi30k", self.data_dir)
        return find_folder(candidates, (*TRAIN_FILES, *VALIDATION_FILES), self.name)

    def _read(self, names: Sequence[str]) -> list[Sentences]:
        sides = [read_sentences(self._folder / name) for name in names]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(f"{names[0]} and {names[1]} must pair up, got {len(sides[0])} and {len(sides[1])} lines")
        return sides


def read_sentences(path: Path) -> Sentences:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as err:
        raise ValueError(f"{path} is truncated or no text: {err}") from err
    return [line.split() for line in text.removesuffix("\n").split("\n")]


def number_words(sentences: Iterable[Iterable[str]], size: int, special: Sequence[str] = SPECIAL) -> dict[str, int]:
    """Number the words by decreasing frequency. Ties are in alphabetical order."""
    counts = Counter(word for sentence in sentences for word in sentence)
    ranked = sorted(counts.keys() - set(special), key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate([*special, *ranked[: size - len(special)]])}


def _next_word(model: Translator, memory: Tensor, padding: Tensor, words: Tensor) -> Tensor:
    return model.decode(words.to(memory.device), memory, padding, last=True)


def _numbers(words: Iterable[str], vocabulary: dict[str, int]) -> Tensor:
    return torch.tensor([vocabulary.get(word, UNKNOWN) for word in words])


def _padded(pairs: Sequence[Batch]) -> Batch:
    source, target = (
        pad_sequence(list(side), batch_first=True, padding_value=PAD) for side in zip(*pairs, strict=True)
    )
    return source, target
