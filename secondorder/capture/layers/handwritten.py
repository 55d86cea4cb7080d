"""Third-party normalization layers, which are recognized by the function that they compute.

Many models define their own LayerNorm or RMSNorm: nanoGPT's without a bias, Llama's, T5's, CLIP's, and that of the
Annotated Transformer. A module is one of them if it has no children, no buffers, one or two vectors of the same
length as its parameters and a ``forward`` of one argument, and if a trial shows that its output is ``y = y₀ + w x̂ +
b``, where x̂ is the input normalized over its last axis in one of the forms below. Such a layer has the exact block of
torch's own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from secondorder.capture.layers.adapter import Adapter, widened
from secondorder.capture.layers.norms import LayerNormAdapter, RMSNormAdapter

#: Values of ε to try in addition to the numbers that are attributes of the module.
_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 0.0)
#: Largest difference from a form: modules that compute in float32 internally differ by rounding.
_TOLERANCE = 1e-4
#: A difference at which no other form is tried.
_ROUNDING = 1e-10


class _OwnLayerNorm(LayerNormAdapter):
    """``(x − mean) / √(var + ε)``."""


class _OwnRMSNorm(RMSNormAdapter):
    """``x / √(mean of squares + ε)``."""


class _DeviationNorm(LayerNormAdapter):
    """``(x − mean) / (std + ε)``."""

    correction = 0

    def normalized(self, x: Tensor) -> Tensor:
        x = widened(x)
        assert self.eps is not None
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=self.correction) + self.eps)


class _UnbiasedDeviationNorm(_DeviationNorm):
    """``(x − mean) / (std + ε)`` with Bessel's correction, as in the Annotated Transformer."""

    correction = 1


class HandwrittenNorm(NamedTuple):
    """A normalization layer that was recognized.

    Attributes:
        form: Class of its adapter.
        size: Length of the last axis.
        eps: Value that it adds.
        scale: Name of the parameter that multiplies.
        shift: Name of the parameter that is added, or None.
    """

    form: type[LayerNormAdapter]
    size: int
    eps: float
    scale: str
    shift: str | None

    def adapter(self, has_weight: bool, has_bias: bool, norm_curvature: str) -> Adapter:
        """Return the adapter of the layer."""
        like = nn.LayerNorm(self.size, self.eps, elementwise_affine=False)
        return self.form(like, has_weight, has_bias, norm_curvature)


def recognise(module: nn.Module) -> HandwrittenNorm | None:
    """Recognize a module that normalizes over its last axis, or return None; the module is not changed."""
    names = _vectors(module)
    if not names:
        return None
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        # A forward that converts its input may need parameters of that dtype.
        for dtype in (torch.float64, torch.float32):
            for scale in names:
                shift = next((name for name in names if name != scale), None)
                if (found := _tried(module, scale, shift, dtype)) is not None:
                    return found
    return None


def _tried(module: nn.Module, scale: str, shift: str | None, dtype: torch.dtype) -> HandwrittenNorm | None:
    vector = module._parameters[scale]
    assert vector is not None
    rows = [x.to(dtype) for x in _probes(len(vector))]
    try:
        found = _affine_in(module, rows, scale, shift)
    except Exception:  # a forward that is not made for one tensor [..., size] may raise anything
        return None
    best = None if found is None else _nearest_form(module, found, rows, len(vector))
    return None if best is None else HandwrittenNorm(best[0], len(vector), best[1], scale, shift)


def _vectors(module: nn.Module) -> list[str]:
    """Return the names of one or two vectors of equal length, if the module has nothing else and takes one argument."""
    found = {name: p for name, p in module._parameters.items() if p is not None}
    plain = not any(True for _ in module.children()) and not any(True for _ in module.buffers(recurse=False))
    if not plain or not 1 <= len(found) <= 2 or any(map(nn.parameter.is_lazy, found.values())):
        return []
    shapes = {tuple(p.shape) for p in found.values()}
    if len(shapes) > 1 or any(p.dim() != 1 or len(p) < 2 or not p.is_floating_point() for p in found.values()):
        return []
    *_, last = inspect.signature(type(module).forward).parameters.values()
    takes_one = len(inspect.signature(type(module).forward).parameters) == 2
    return list(found) if takes_one and last.kind is last.POSITIONAL_OR_KEYWORD else []


def _probes(size: int) -> list[Tensor]:
    """Return inputs with and without a sequence axis; some rows are small enough to reveal what is added to them."""
    noise = torch.randn(6, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) + 0.3
    rows = noise * torch.tensor([1.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-3], dtype=torch.float64)[:, None]
    return [rows, rows.view(2, 3, size)]


def _affine_in(module: nn.Module, rows: list[Tensor], scale: str, shift: str | None) -> list[Tensor] | None:
    """Return x̂ for each input, if the output is ``y₀ + w x̂ + b`` for a scale w and a shift b, else None."""
    size, dtype = rows[0].shape[-1], rows[0].dtype
    w, b = torch.randn(2, size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    zero, one = torch.zeros_like(w), torch.ones_like(w)

    def output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values = {scale: weight} if shift is None else {scale: weight, shift: bias}
        y: Tensor = type(module).forward(_with_parameters(module, values), x.clone())
        return y

    found = []
    for x in rows:
        start = output(x, zero, zero)
        hat = output(x, one, zero) - start
        wanted = start + w * hat + (0 if shift is None else b)
        full = output(x, w, b)
        if not hat.shape == x.shape == full.shape or not torch.allclose(full, wanted, rtol=0, atol=_TOLERANCE):
            return None
        found.append(hat)
    return found


def _with_parameters(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Return a shell of the module around other values on the CPU, which shares no parameter and no hook with it."""
    shell: nn.Module = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    parameters = {name: None if p is None else nn.Parameter(values[name]) for name, p in module._parameters.items()}
    shell.__dict__.update(_parameters=parameters, training=True)
    return shell


def _nearest_form(
    module: nn.Module, found: list[Tensor], rows: list[Tensor], size: int
) -> tuple[type[LayerNormAdapter], float] | None:
    """Return the form and the ε that are nearest to x̂, if they are near enough."""
    best: tuple[float, type[LayerNormAdapter], float] | None = None
    for form, eps in _candidates(module):
        adapter = HandwrittenNorm(form, size, eps, "", None).adapter(True, False, "unit")
        assert isinstance(adapter, LayerNormAdapter)
        error = max(float((adapter.normalized(x) - hat).abs().max()) for x, hat in zip(rows, found, strict=True))
        if error < _TOLERANCE and (best is None or error < best[0]):
            best = error, form, eps
        if error < _ROUNDING:
            break
    return None if best is None else best[1:]


def _candidates(module: nn.Module) -> Iterator[tuple[type[LayerNormAdapter], float]]:
    own = (v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1)
    for eps in dict.fromkeys((*own, *_EPS)):
        for form in (_OwnLayerNorm, _OwnRMSNorm, _UnbiasedDeviationNorm, _DeviationNorm):
            yield form, eps
