"""Byte pairs as GPT-2 has them: from a text to numbers, by the files ``vocab.json`` and ``merges.txt``.

The text is cut into words, each with the blank in front of it. The bytes of a word are written as printable characters,
and neighbours are merged as long as a pair of them stands in the list of merges, the one that stands first going first.
"""

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.workloads.base import DataMissingError

FILES = ("vocab.json", "merges.txt")
ORIGIN = "https://huggingface.co/openai-community/gpt2 (vocab.json and merges.txt)"
_PRINTABLE = (range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), ord("ÿ") + 1))
"""Bytes that are written as the character of the same number; the others follow from number 256 on."""


def byte_characters() -> dict[int, str]:
    shown = {byte for span in _PRINTABLE for byte in span}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + index) for index, byte in enumerate(hidden)}}


def split_words(text: str) -> list[str]:
    """Cut a text into what merges may not cross: endings such as 's, letters, numbers, signs, blanks."""
    letters, numbers = (_of_category(text, first, kind) for first, kind in (("a", "L"), ("0", "N")))
    endings = "'(?:s|t|re|ve|m|ll|d)"
    rest = rf"[^\s{letters}{numbers}]"
    return re.findall(rf"{endings}| ?[{letters}]+| ?[{numbers}]+| ?{rest}+|\s+(?!\S)|\s+", text)


def _of_category(text: str, first: str, kind: str) -> str:
    """Return the characters of a Unicode category that a text has, as the inside of a class of a pattern."""
    return "".join(sorted({first, *(c for c in set(text) if unicodedata.category(c)[0] == kind)}))


@dataclass(frozen=True)
class BytePairs:
    """A vocabulary with its merges."""

    numbers: dict[str, int]
    """Number of each token."""
    ranks: dict[tuple[str, str], int]
    """Place of each pair in the list of merges."""
    _known: dict[str, list[int]] = field(default_factory=dict)
    _characters: dict[int, str] = field(default_factory=byte_characters)

    def __len__(self) -> int:
        return max(self.numbers.values()) + 1

    @classmethod
    def read(cls, folder: Path) -> "BytePairs":
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise DataMissingError(folder, missing, ORIGIN)
        vocabulary, merges = (folder / name for name in FILES)
        try:
            numbers = json.loads(vocabulary.read_text(encoding="utf-8"))
            lines = merges.read_text(encoding="utf-8").splitlines()
        except ValueError as err:
            raise ValueError(f"{folder} must hold a vocabulary of GPT-2: {err}") from err
        if not isinstance(numbers, dict) or not numbers or not all(type(value) is int for value in numbers.values()):
            raise ValueError(f"{vocabulary} must hold the number of each token")
        return cls(numbers, _ranks(merges, lines))

    def encode(self, text: str) -> list[int]:
        return [number for word in split_words(text) for number in self._word(word)]

    def _word(self, word: str) -> list[int]:
        if word not in self._known:
            parts = self._merged([self._characters[byte] for byte in word.encode("utf-8")])
            if unknown := [part for part in parts if part not in self.numbers]:
                raise ValueError(f"the vocabulary lacks {unknown[0]!r}, of {word!r}")
            self._known[word] = [self.numbers[part] for part in parts]
        return self._known[word]

    def _merged(self, parts: list[str]) -> list[str]:
        last = len(self.ranks)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self.ranks.get(pair, last))
            if best not in self.ranks:
                break
            parts = _joined(parts, best)
        return parts


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    index = 0
    while index < len(parts):
        met = tuple(parts[index : index + 2]) == pair
        out.append("".join(pair) if met else parts[index])
        index += 2 if met else 1
    return out


def _ranks(path: Path, lines: Iterable[str]) -> dict[tuple[str, str], int]:
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if damaged := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"{path} must hold two tokens a line, got {' '.join(damaged[0])!r}")
    return {(pair[0], pair[1]): rank for rank, pair in enumerate(pairs)}
