"""Bytes that a method keeps between steps, from the shapes of layers: what ``memory_usage()`` is held against.

For a layer whose gradient is ``[n_g, n_a]``, with d parameters in P tensors, R rows kept of N, a window of m::

    K-FAC     factors       4 (n_a² + n_g²)         second order   4 (n_a² + n_g²), eigenvectors: + 4 (n_a + n_g)
    EK-FAC    as K-FAC      with eigenvectors       scale          4 n_a n_g
    HyLo      rows          4 R (n_a + n_g)         kernel         8 R² + 8
    windows   :mod:`benchmarks.footprint`
    any       momentum      4 d, with Adam's two averages 8 d
              counters      4 P, 8 or 16 per layer, and some hundred of a whole method

The factor A of an embedding is a diagonal. A normalisation layer has 2 x 2 blocks, or, with rows, rows of all its
gradients. Temporaries that are kept only to save the time of allocating them are not state, and have no formula here.

On W ranks of which ``w`` precondition a layer (all of them, some, or one), all ranks together keep W times the momentum
and the Gram matrix, w times what preconditions (second order, scale, rows, kernel, window), and the factors once, or W
times where every rank has them. HyLo's R is then W times the rows of a rank.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.filling import windows_of
from benchmarks.flops import LayerShape, factor_bytes
from benchmarks.footprint import footprint
from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo

_FLOAT = 4
_DOUBLE = 8
_WINDOW_COUNTERS = 14 * 8  # place in the ring, rows, skips, failures, ten sums of the solver
_SWITCH_COUNTERS = 21 * 8  # of the policy between two ways to keep rows

_BLOCKS = {"query": "in_proj", "key": "in_proj", "value": "in_proj", "out": "out_proj"}
"""Blocks of attention whose inputs are projected by one parameter."""

Formula = dict[str, int]
"""Bytes by kind, as ``memory_usage()`` names them."""


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are, and how many of them precondition a layer."""

    world: int = 1
    workers: int = 1
    factors: int = 1
    """Ranks that keep the factors of a layer."""


def kept_rows(examples: int, fraction: float, most: int) -> int:
    """Return how many rows HyLo keeps of those of one rank."""
    wanted = math.ceil(round(fraction * examples, 9))
    return max(1, min(wanted, examples, most))


def formula(
    optimizer: Optimizer, model: nn.Module, shapes: Sequence[LayerShape], examples: int, ranks: Ranks | None = None
) -> Formula | None:
    """Return what an optimizer keeps, all ranks together."""
    spread = ranks or Ranks()
    options = optimizer.param_groups[0]
    sizes = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    numbers = sum(math.prod(size) for size in sizes)
    if type(optimizer) is SGD:
        return {"momentum": _FLOAT * numbers if options["momentum"] else 0}
    if type(optimizer) is AdamW:
        return {"momentum": 2 * _FLOAT * numbers, "buffers": _FLOAT * len(sizes)}
    if isinstance(optimizer, MFAC | GGT):
        found = _of_window(optimizer, sizes, spread)
        covered = numbers
    elif isinstance(optimizer, KFAC | EKFAC | HyLo):
        names = {s.name: _block_of(s, optimizer.blocks) for s in shapes}
        layers = list({s.name: s for s in shapes if names[s.name] in optimizer.blocks}.values())
        blocks = len({names[s.name] for s in layers})
        found = _of_layers(optimizer, options, layers, blocks, examples, spread)
        covered = sum(s.groups * s.n_a * s.n_g for s in layers)
    else:
        return None
    if found is None:
        return None
    found["momentum"] = spread.world * _FLOAT * covered * _averages(options)
    found["fallback"] = spread.world * _FLOAT * (numbers - covered) * _fallback(options)
    found["buffers"] += spread.world * _FLOAT * len(sizes)
    return found


def _block_of(s: LayerShape, blocks: Container[str]) -> str:
    """Return the name of the block that a layer, or one of the maps of attention, is part of."""
    stem, _, part = s.name.rpartition(".")
    return s.name if s.name in blocks else f"{stem}.{_BLOCKS.get(part, part)}"


def _of_window(optimizer: MFAC | GGT, sizes: Sequence[tuple[int, ...]], ranks: Ranks) -> Formula | None:
    windows = windows_of(optimizer)
    if len(windows) != 1:
        return None  # of each layer one, say
    form = windows[0].form
    held = footprint(sizes, form.m, form.compression, form.dtype)
    return {
        "window": ranks.workers * held.window,
        "error": ranks.workers * held.error,
        "gram": ranks.world * held.gram,
        "buffers": ranks.world * _WINDOW_COUNTERS,
    }


def _of_layers(
    optimizer: KFAC | EKFAC | HyLo,
    options: Mapping[str, Any],
    layers: Sequence[LayerShape],
    blocks: int,
    examples: int,
    ranks: Ranks,
) -> Formula | None:
    if isinstance(optimizer, HyLo):
        return _of_rows(options, layers, blocks, examples, ranks)
    found = {"factors": ranks.factors * factor_bytes(layers), "buffers": _DOUBLE * ranks.factors * blocks}
    if isinstance(optimizer, KFAC) and options["inverse_method"] == "cholesky":
        found["second_order"] = ranks.workers * factor_bytes(layers)
        return found
    by_example = isinstance(optimizer, EKFAC) and options["estimator"] == "intra"
    holders = ranks.world if by_example else ranks.workers  # whoever has examples measures the scale in the bases
    found["second_order"] = _FLOAT * sum(
        s.groups * (holders * _eigenvectors(s) + ranks.workers * (s.n_a + s.n_g)) for s in layers
    )
    if isinstance(optimizer, EKFAC):
        found["scale"] = ranks.workers * _FLOAT * sum(s.groups * s.n_a * s.n_g for s in layers)
        found["buffers"] += _DOUBLE * ranks.workers * blocks
    return found


def _eigenvectors(s: LayerShape) -> int:
    """Return the numbers of both bases of one group; an embedding needs no basis of A."""
    of_a = s.n_a**2 if s.full_a or s.n_a == 1 else 0
    return of_a + s.n_g**2


def _of_rows(
    options: Mapping[str, Any], layers: Sequence[LayerShape], blocks: int, examples: int, ranks: Ranks
) -> Formula | None:
    if options["approx"] != "reduce":
        return None
    most = max(1, options["max_rank"] // ranks.world)
    own = examples if options["mode"] == "sngd" else kept_rows(examples, options["rank_fraction"], most)
    rows = ranks.world * own
    kernels = sum(1 if _is_norm(s) else s.groups for s in layers)
    numbers = sum(s.groups * (s.n_g if _is_norm(s) else s.n_a + s.n_g) for s in layers)
    return {
        "rows": ranks.workers * _FLOAT * rows * numbers,
        "kernel": ranks.workers * _DOUBLE * (rows**2 + 1) * kernels,
        "buffers": _DOUBLE * ranks.workers * blocks + ranks.world * _SWITCH_COUNTERS,
    }


def _is_norm(s: LayerShape) -> bool:
    return not s.full_a and s.n_a == 1


def _averages(options: Mapping[str, Any]) -> int:
    """Return how many averages of the size of the parameters the update keeps."""
    if options.get("graft") == "adam":
        return 2
    return int(options.get("momentum", 0.0) > 0)


def _fallback(options: Mapping[str, Any]) -> int:
    """Return the same for parameters without curvature."""
    rule = options.get("fallback") or ("adamw" if options.get("graft") == "adam" else "sgd")
    return 2 if rule == "adamw" else int(options.get("momentum", 0.0) > 0)
