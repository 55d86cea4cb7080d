"""Bytes of an optimizer's state for a BERT, computed from the configuration alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shapes:
    """Sizes of the layers of one BERT with its head.

    Args:
        linear: `(n_a, n_g)` of every linear layer: inputs including the 1 of the bias, and outputs.
        tables: `(rows, width)` of every embedding.
        norms: Width of every layer norm.
    """

    linear: list[tuple[int, int]] = field(default_factory=list)
    tables: list[tuple[int, int]] = field(default_factory=list)
    norms: list[int] = field(default_factory=list)

    @property
    def tensors(self) -> list[int]:
        """Number of entries of every parameter."""
        weights = [n for a, g in self.linear for n in ((a - 1) * g, g)]
        return weights + [n * h for n, h in self.tables] + [h for h in self.norms for _ in range(2)]

    @property
    def entries(self) -> int:
        """Number of all entries, d."""
        return sum(self.tensors)

    @property
    def blocks(self) -> int:
        """Layers with parameters."""
        return len(self.linear) + len(self.tables) + len(self.norms)


def shapes_of(config: Any, *, outputs: int, pooler: bool) -> Shapes:
    """Return the shapes of a `BertForQuestionAnswering` (2 outputs) or a `BertForSequenceClassification` (pooler)."""
    h, i = config.hidden_size, config.intermediate_size
    attention = [(h + 1, h)] * 4  # query, key, value and output
    linear = (attention + [(h + 1, i), (i + 1, h)]) * config.num_hidden_layers
    linear += [(h + 1, h)] * pooler + [(h + 1, outputs)]
    tables = [(n, h) for n in (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)]
    return Shapes(linear, tables, [h] * (1 + 2 * config.num_hidden_layers))


def kronecker(shapes: Shapes, *, scale: bool = False, moments: int = 2) -> dict[str, int]:
    """Return the bytes of KFAC with eigenvectors, or EKFAC with its `scale`; the update rule has `moments` per entry.

    An embedding's A is a diagonal, which is its own eigenvalues. A layer norm has a 2×2 block for gain and shift of
    each unit, next to an A of 1×1.
    """
    factors = sum(a * a + g * g for a, g in shapes.linear)
    factors += sum(n + h * h for n, h in shapes.tables) + sum(h * (1 + 4) for h in shapes.norms)
    bases = sum(a * a + a + g * g + g for a, g in shapes.linear)
    bases += sum(n + h * h + h for n, h in shapes.tables) + sum(h * (1 + 4 + 1 + 2) for h in shapes.norms)
    sizes = {"factors": 4 * factors, "second_order": 4 * bases, "momentum": 4 * moments * shapes.entries}
    return sizes | ({"scale": 4 * shapes.entries} if scale else {})


def rows(shapes: Shapes, examples: int, length: int, *, fraction: float = 0.1, moments: int = 2) -> dict[str, int]:
    """Return the bytes of HyLo with means over positions; it keeps the indices of tables of more than 8192 vectors."""
    r = math.ceil(fraction * examples)
    size = 4 * sum(a + g for a, g in shapes.linear) + 4 * sum(2 * h for h in shapes.norms)
    size += sum(4 * (n + h) if n <= 8192 else length * (8 + 4 * h) for n, h in shapes.tables)
    kernel = shapes.blocks * 8 * (r * r + 1)  # and λ
    return {"rows": r * size, "kernel": kernel, "momentum": 4 * moments * shapes.entries}


def window(shapes: Shapes, m: int, *, density: float = 0.01, block: int = 4096, moments: int = 0) -> dict[str, int]:
    """Return the bytes of SparseMFAC: m rows of the largest entries of each block, 4 for a value and 2 for an index."""
    kept = 0
    for entries in shapes.tensors:
        full, rest = divmod(entries, block)
        kept += full * 8 * round(density * block / 8) + math.ceil(density * rest)
    gram = 8 * m * (m + 1) // 2
    return {"window": 6 * m * kept, "error": 4 * shapes.entries, "gram": gram, "momentum": 4 * moments * shapes.entries}


def differences(held: Mapping[str, int], expected: Mapping[str, int], blocks: int) -> dict[str, tuple[int, int]]:
    """Return the kinds whose bytes differ from the expected ones, with both sizes.

    The state may also contain counts (a few numbers per block) and the workspace that temporaries reuse.
    """
    found = {kind: (held.get(kind, 0), size) for kind, size in expected.items() if held.get(kind, 0) != size}
    counts = held.get("buffers", 0)
    if counts > 32 * blocks + 128:
        found["buffers"] = (counts, 32 * blocks + 128)
    at_rest, total = held["total"] - held.get("workspace", 0) - counts, sum(expected.values())
    return found if at_rest == total else found | {"total": (at_rest, total)}
