"""Bytes of an optimizer's state for a BERT, from the formulas of the contract tests for each type of layer."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from tests.support.storages import Kept, Sparse, bases, entries, kronecker, squares
from tests.support.tasks import covered_layers

Sizes = dict[str, set[int]]


def expected(
    method: str, model: nn.Module, *, examples: int, length: int, window: int, density: float = 0.01, moments: int = 2
) -> Sizes:
    """Return the possible bytes by kind, where the update rule has `moments` numbers per parameter."""
    parameters = list(model.parameters())
    found = {"momentum": {4 * moments * sum(p.numel() for p in parameters)}}
    if method == "sparse_mfac":
        rule = Sparse(density=density)
        found["window"] = {sum(rule.window_bytes(p, window, 4) for p in parameters)}
        found["error"] = {sum(rule.error_bytes(p, 4) for p in parameters)}
        return found | {"gram": {8 * window * (window + 1) // 2}}
    if method == "hylo":
        layers = [model.get_submodule(name) for name in covered_layers(model)]
        r = math.ceil(0.1 * examples)
        # Rows are means over positions, except that large tables keep the indices of all positions.
        large = [isinstance(layer, nn.Embedding) and layer.num_embeddings > 8192 for layer in layers]
        sizes = [Kept(r, at_once=not big).bytes_of(own, length, 4) for own, big in zip(layers, large, strict=True)]
        return found | {"rows": {sum(sizes)}, "kernel": {len(layers) * 8 * (r * r + 1)}}  # and λ
    numbers = {"factors": squares, "second_order": bases} | ({"scale": entries} if method == "ekfac" else {})
    return found | dict(kronecker(numbers)(model, torch.float32))


def differences(held: Mapping[str, int], sizes: Sizes, blocks: int) -> dict[str, int]:
    """Return the kinds of memory whose bytes are not among the expected ones.

    The state may also contain counts (a few numbers per block) and the workspace that temporaries reuse.
    """
    allowed = {**sizes, "buffers": range(32 * blocks + 129), "workspace": range(2**63), "total": range(2**63)}
    found = {kind: held.get(kind, 0) for kind in held.keys() | sizes.keys()}
    return {kind: size for kind, size in found.items() if size and size not in allowed.get(kind, ())}
