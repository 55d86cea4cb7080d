"""Measures how preconditioning scales the coordinates of a gradient, rotates its direction and changes its length.

The measures are those of EFCP (Modoranu et al. 2023, arXiv 2306.06098). For the gradient g and the preconditioned
direction u, over d coordinates::

    scaling    quantiles of |u_i| / |g_i| over the coordinates with g_i ≠ 0      qp_q25 … qp_mean, qp_n
    rotation   cos = ⟨g, u⟩ / (‖g‖ ‖u‖), its angle in degrees                    qp_cos, qp_angle
               share of the coordinates with u_i g_i > 0                         qp_sign_agree
    size       ‖g‖, ‖u‖, ‖u‖ / ‖g‖                                               qp_norm_g, qp_norm_u, qp_norm_ratio_u_g

Every tensor is read tile by tile in float64, which keeps temporaries small. The host waits for the device once per
call to read the number of coordinates with a gradient, because ``qp_n`` is a plain int and the quantiles depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

#: Gradients or directions: one tensor, a sequence, or a mapping from names. None is a missing gradient.
Tensors: TypeAlias = Tensor | Sequence[Tensor | None] | Mapping[str, Tensor | None]

#: Number of entries that are read at once.
_TILE = 1 << 20
#: Number of bins of the histogram.
_BINS = 64


class _Tile(NamedTuple):
    """A section of one flat layer: views of both vectors, and sums over the section."""

    g: Tensor  # [n]
    u: Tensor  # [n]
    sums: Tensor  # [5] float64: entries with a gradient, entries of equal sign, ⟨g, u⟩, ‖g‖², ‖u‖²


@torch.no_grad()
def quantify_preconditioning(
    g: Tensors, u: Tensors, *, signed: bool = False, histogram: bool = False, sample: int = 1_000_000, seed: int = 0
) -> dict[str, Any]:
    """Compare a direction with its gradient, per coordinate and as a vector.

    The comparison is computed on the device of the tensors, and the host waits for it once. Values that are not
    defined, such as the cosine with a zero vector or a quantile of no coordinates, are NaN.

    Args:
        g: Gradients: one tensor, a sequence, or a mapping from names. A None is left out, together with its direction.
        u: Directions in the same form, with the same names and shapes. For a method with momentum, you may pass the
            momentum buffers instead.
        signed: Whether the quantiles are those of ``u_i / g_i`` instead of ``|u_i| / |g_i|``.
        histogram: Whether to add the histogram of ``log10(|u_i| / |g_i|)``, 64 bins from the smallest to the largest.
        sample: Largest number of ratios from which the quantiles, the mean and the histogram are computed. They are
            exact up to this number of coordinates. If there are more, evenly spread coordinates are drawn at random.
            Everything else is always exact.
        seed: Seed of the draw.

    Returns:
        0-dim float64 tensors on the device of the (first) input tensor, for all coordinates together: ``qp_q25``,
        ``qp_q50``, ``qp_q75`` (interpolated linearly), ``qp_min``, ``qp_max`` and ``qp_mean`` of the ratios; ``qp_n``,
        an int, the number of ratios for these values; ``qp_zero_grad_frac``, the share of coordinates with a zero
        gradient, which have no ratio; ``qp_cos``; ``qp_angle`` in degrees; ``qp_sign_agree``; ``qp_norm_g``,
        ``qp_norm_u`` and ``qp_norm_ratio_u_g``. With ``histogram``, also ``qp_hist [64]``, int64 counts without ratios
        of zero, and ``qp_hist_edges [65]`` in decades. For sequences and mappings, also ``"layers"``, which has the
        same values by name, or by the index as a string.

    Raises:
        ValueError: If shapes, devices, names or lengths differ, or ``sample`` is below 1.
        TypeError: If ``g`` and ``u`` do not have the same form.
    """
    if sample < 1:
        raise ValueError(f"sample must be >= 1, got {sample}")
    layers = {name: list(_tiles(name, *pair)) for name, pair in _pairs(g, u).items()}
    tiles = [tile for layer in layers.values() for tile in layer]
    filled = _filled(tiles)

    def measure(part: list[_Tile], counts: list[int]) -> dict[str, Any]:
        ratios = _ratios(part, counts, sample, seed)
        sums = _total(part)
        n = sum(tile.g.numel() for tile in part)
        report = {**_scaling(ratios if signed else ratios.abs()), **_rotation_and_size(sums, n)}
        return {**report, **_histogram(ratios.abs())} if histogram else report

    whole = measure(tiles, filled)
    if isinstance(g, Tensor):
        return whole
    counts = iter(filled)
    return {**whole, "layers": {name: measure(part, [next(counts) for _ in part]) for name, part in layers.items()}}


def _pairs(g: Tensors, u: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Return gradients and directions by name, without those that have no gradient."""
    named_g, named_u = _named("g", g), _named("u", u)
    if isinstance(g, Tensor) != isinstance(u, Tensor) or isinstance(g, Mapping) != isinstance(u, Mapping):
        raise TypeError(
            f"g and u must both be tensors, sequences or mappings, got {type(g).__name__} and {type(u).__name__}"
        )
    if not isinstance(g, Mapping) and len(named_g) != len(named_u):
        raise ValueError(f"g has {len(named_g)} tensors and u has {len(named_u)}")
    missing = [name for name, value in named_g.items() if value is not None and named_u.get(name) is None]
    if missing:
        raise ValueError(f"u lacks {missing}, which g has; leave entries with no direction out of g")
    unknown = [name for name, value in named_u.items() if value is not None and name not in named_g]
    if unknown:
        raise ValueError(f"g lacks {unknown}, which u has; remove it from u, or pass None in g")
    return {name: (value, named_u[name]) for name, value in named_g.items() if value is not None}  # type: ignore[misc]


def _named(argument: str, tensors: Tensors) -> dict[str, Tensor | None]:
    if isinstance(tensors, Tensor):
        return {"tensor": tensors}
    if isinstance(tensors, Mapping):
        named = dict(tensors)
    elif isinstance(tensors, Sequence) and not isinstance(tensors, str):
        named = {str(i): tensor for i, tensor in enumerate(tensors)}
    else:
        raise TypeError(f"{argument} must be a tensor, a sequence or a mapping, got {type(tensors).__name__}")
    for name, tensor in named.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{argument}['{name}'] must be a tensor or None, got {type(tensor).__name__}")
    return named


def _tiles(name: str, g: Tensor, u: Tensor) -> Iterator[_Tile]:
    if g.shape != u.shape:
        raise ValueError(f"'{name}': g has shape {tuple(g.shape)} and u {tuple(u.shape)}")
    if g.device != u.device:
        raise ValueError(f"'{name}': g is on {g.device} and u on {u.device}; move one of them")
    if g.is_complex() != u.is_complex():
        raise ValueError(f"'{name}': g is {g.dtype} and u {u.dtype}; both must be complex, or neither")
    flat_g, flat_u = _flat(g), _flat(u)
    # Even an empty tensor has one tile, which provides the device.
    for start in range(0, max(flat_g.numel(), 1), _TILE):
        tile_g, tile_u = flat_g[start : start + _TILE], flat_u[start : start + _TILE]
        yield _Tile(tile_g, tile_u, _sums(tile_g.double(), tile_u.double()))


def _flat(x: Tensor) -> Tensor:
    """Return the entries of a tensor in one row, with complex numbers as pairs and sparse gradients as dense ones."""
    if x.layout != torch.strided:
        x = x.to_dense()
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def _sums(g: Tensor, u: Tensor) -> Tensor:
    # Compare signs, because a product of tiny numbers may underflow to zero.
    counts = [(g != 0).sum(), (g.sign() * u.sign() > 0).sum()]
    return torch.stack([*(count.double() for count in counts), g.dot(u), g.dot(g), u.dot(u)])


def _filled(tiles: list[_Tile]) -> list[int]:
    """Count the coordinates with a gradient by tile. Only here does the host wait for the device."""
    if not tiles:
        return []
    device = tiles[0].sums.device
    return [int(n) for n in torch.stack([tile.sums[0].to(device) for tile in tiles]).tolist()]


def _total(tiles: list[_Tile]) -> Tensor:
    if not tiles:
        return torch.zeros(5, dtype=torch.float64)
    return torch.stack([tile.sums.to(tiles[0].sums.device) for tile in tiles]).sum(0)


def _ratios(tiles: list[_Tile], filled: list[int], sample: int, seed: int) -> Tensor:
    """Return ``u_i / g_i [n]`` in float64 for at most ``sample`` coordinates with g_i ≠ 0, in their order.

    Each tile contributes in proportion to ``filled``, the number of these coordinates by tile.
    """
    total = sum(filled)
    wanted = min(sample, total)
    parts, seen = [], 0
    for tile, n in zip(tiles, filled, strict=True):
        # The sum over all tiles is exactly `wanted`.
        share = (seen + n) * wanted // max(total, 1) - seen * wanted // max(total, 1)
        parts.append(_tile_ratios(tile, n, share, seed + seen).to(tiles[0].g.device))
        seen += n
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _tile_ratios(tile: _Tile, filled: int, wanted: int, seed: int) -> Tensor:
    device = tile.g.device
    picked = torch.arange(wanted, device=device)
    if wanted < filled:  # draw one coordinate at random from each of `wanted` sections of equal length
        generator = torch.Generator(device).manual_seed(seed)
        offset = torch.rand(wanted, dtype=torch.float64, device=device, generator=generator)
        picked = ((picked + offset) * (filled / max(wanted, 1))).long().clamp_(max=filled - 1)
    if filled < tile.g.numel():
        # The r-th of them is where the running count reaches r + 1. Indexing by a mask would wait for the device.
        picked = torch.searchsorted((tile.g != 0).cumsum(0), picked + 1)
    return tile.u[picked].double() / tile.g[picked].double()


def _scaling(ratios: Tensor) -> dict[str, Any]:
    n = ratios.numel()
    ordered = ratios.sort().values if n else ratios.new_full((1,), math.nan)
    undefined = ordered[-1].isnan()  # a NaN sorts last and would otherwise count as a large ratio

    def quantile(q: float) -> Tensor:
        position = q * (len(ordered) - 1)
        low = math.floor(position)
        value = ordered[low] if low == position else ordered[low].lerp(ordered[low + 1], position - low)
        return value.where(~undefined, math.nan)

    named = {"qp_q25": 0.25, "qp_q50": 0.5, "qp_q75": 0.75, "qp_min": 0.0, "qp_max": 1.0}
    return {**{name: quantile(q) for name, q in named.items()}, "qp_mean": ratios.mean(), "qp_n": n}


def _rotation_and_size(sums: Tensor, n: int) -> dict[str, Tensor]:
    filled, agreeing, inner, square_g, square_u = sums
    norm_g, norm_u = square_g.sqrt(), square_u.sqrt()
    cos = (inner / (norm_g * norm_u)).clamp(-1.0, 1.0)
    return {
        "qp_zero_grad_frac": (n - filled) / n if n else filled * math.nan,
        "qp_cos": cos,
        "qp_angle": torch.rad2deg(torch.arccos(cos)),
        "qp_sign_agree": agreeing / n if n else agreeing * math.nan,
        "qp_norm_g": norm_g,
        "qp_norm_u": norm_u,
        "qp_norm_ratio_u_g": norm_u / norm_g,
    }


def _histogram(ratios: Tensor) -> dict[str, Tensor]:
    """Return counts and edges of ``log10`` of nonnegative ratios ``[n]``, without zero and infinite ones."""
    decades = ratios.log10()
    usable = decades.isfinite()
    none = ratios.new_zeros(1)  # so that the extremes of nothing exist
    low = torch.cat([decades.where(usable, math.inf), none + math.inf]).amin()
    high = torch.cat([decades.where(usable, -math.inf), none - math.inf]).amax()
    low, high = low.where(low <= high, 0.0), high.where(low <= high, 0.0)
    low, high = torch.where(low < high, low, low - 0.5), torch.where(low < high, high, high + 0.5)
    place = ((decades.where(usable, low) - low) / (high - low) * _BINS).long().clamp_(0, _BINS - 1)
    counts = torch.zeros(_BINS, dtype=torch.int64, device=ratios.device).scatter_add_(0, place, usable.long())
    steps = torch.arange(_BINS + 1, dtype=torch.float64, device=ratios.device) / _BINS
    return {"qp_hist": counts, "qp_hist_edges": low + (high - low) * steps}
