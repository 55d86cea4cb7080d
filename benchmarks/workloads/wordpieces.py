"""Word pieces as BERT's uncased models have them, each with its place in the text.

A text is cut at blanks and around every punctuation mark and every Chinese character, lower-cased and freed of accents.
A word becomes the longest piece of the vocabulary that it begins with, then the longest that goes on from there, and so
forth; pieces that go on begin with ``##``. A word of which any part is not in the vocabulary is one unknown word.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FILE = "vocab.txt"
_LONGEST = 100
"""Letters of a word; longer ones are unknown."""
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class Piece(NamedTuple):
    """A token, and where it stands in the text."""

    number: int
    start: int
    stop: int


class _Word(NamedTuple):
    """A word as the vocabulary has it, and the place of each of its letters in the text."""

    letters: str
    places: tuple[int, ...]


class WordPieces:
    """A vocabulary of pieces."""

    def __init__(self, numbers: dict[str, int]) -> None:
        if missing := [name for name in SPECIAL[:4] if name not in numbers]:
            raise ValueError(f"a vocabulary must hold {', '.join(SPECIAL[:4])}, it lacks {', '.join(missing)}")
        self.numbers = numbers
        self.padding, self.unknown, self.begin, self.separator = (numbers[name] for name in SPECIAL[:4])
        self._known: dict[str, list[Piece]] = {}

    def __len__(self) -> int:
        return max(self.numbers.values()) + 1

    @classmethod
    def read(cls, path: Path) -> "WordPieces":
        """Read a vocabulary in BERT's format, one piece a line."""
        try:
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            return cls({line.rstrip("\r"): number for number, line in enumerate(lines)})
        except ValueError as err:
            raise ValueError(f"{path} must be a vocabulary of BERT: {err}") from err

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "WordPieces":
        chunks = Counter(chunk for text in texts for chunk in text.split())
        words: Counter[str] = Counter()
        characters: Counter[str] = Counter()
        for chunk, count in chunks.items():
            for word in _words(chunk):
                words[word.letters] += count
                for character in word.letters:
                    characters[character] += count
        alphabet = _ranked(characters)[: (size - len(SPECIAL)) // 4]
        pieces = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
        known = set(pieces)
        pieces += [word for word in _ranked(words) if word not in known][: max(0, size - len(pieces))]
        return cls({piece: number for number, piece in enumerate(pieces)})

    def encode(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        for found in re.finditer(r"\S+", text):
            chunk, offset = found[0], found.start()
            if chunk not in self._known:
                self._known[chunk] = [piece for word in _words(chunk) for piece in self._pieces(word)]
            out += [Piece(number, start + offset, stop + offset) for number, start, stop in self._known[chunk]]
        return out

    def _pieces(self, word: _Word) -> list[Piece]:
        letters, places = word
        out: list[Piece] = []
        start = 0
        while start < len(letters) <= _LONGEST:
            prefix = "##" if start else ""
            ends = range(len(letters), start, -1)
            stop = next((end for end in ends if prefix + letters[start:end] in self.numbers), None)
            if stop is None:
                break
            out.append(Piece(self.numbers[prefix + letters[start:stop]], places[start], places[stop - 1] + 1))
            start = stop
        whole = start == len(letters)
        return out if whole else [Piece(self.unknown, places[0], places[-1] + 1)]


def find_pieces(data_dir: Path, texts: Iterable[str], size: int) -> WordPieces:
    path = data_dir / "bert" / FILE
    return WordPieces.read(path) if path.is_file() else WordPieces.learn(texts, size)


def _words(chunk: str) -> Iterator[_Word]:
    letters: list[tuple[str, int]] = []
    for place, character in enumerate(chunk):
        alone = _stands_alone(character)
        if alone and letters:
            yield _word(letters)
            letters = []
        letters += [(letter, place) for letter in _normalised(character)]
        if alone and letters:
            yield _word(letters)
            letters = []
    if letters:
        yield _word(letters)


def _word(letters: list[tuple[str, int]]) -> _Word:
    return _Word("".join(letter for letter, _ in letters), tuple(place for _, place in letters))


def _stands_alone(character: str) -> bool:
    """Return whether a character is a punctuation mark or Chinese: signs such as $ and ^ count as punctuation."""
    code = ord(character)
    if code < 128:
        return character.isprintable() and not character.isalnum()
    return unicodedata.category(character)[0] == "P" or any(low <= code <= high for low, high in _CHINESE)


def _normalised(character: str) -> str:
    if unicodedata.category(character)[0] == "C" or character == "\ufffd":
        return ""
    parts = unicodedata.normalize("NFD", character.lower())
    return "".join(part for part in parts if unicodedata.category(part) != "Mn")


def _ranked(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda entry: (-counts[entry], entry))
