"""Dense linear algebra of curvature factors, as pure functions of tensors.

Matrices may carry leading batch dimensions ``[..., n, n]``. Nothing here reads a module, a parameter group or a rank.

The two factorizations (``eigh`` and the Cholesky inverse) have a failure ladder, which each matrix climbs only if it
failed: working precision → jitter → float64 → float64 on the CPU → failure (``ok`` is False, and the caller keeps its
last result). A function that a device does not support, or that fails on it, runs on the CPU (:func:`anywhere`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

#: Rung 2 adds this multiple of the mean diagonal: above float32 rounding, far below any useful damping.
_JITTER = 1e-6
#: Largest accepted error of ``Q Qᵀ v = v`` for a probe vector of unit entries, by precision.
_ORTHOGONALITY = {torch.float32: 1e-3, torch.float64: 1e-8}
#: Columns of one strip of a blocked Gram product on a CPU, below and above a width; two strips are the minimum.
_STRIP, _WIDE_STRIP, _WIDE = 64, 128, 1024
#: The same on other devices, where a product has to be large to be fast.
_DEVICE_STRIP = 1024
#: Elements to which rows are aligned.
_ALIGNMENT = 16

Factorisation = Callable[[Tensor], tuple[tuple[Tensor, ...], Tensor]]

log: logging.Logger = logging.getLogger("secondorder")
#: Functions that a type of device did not support, each of which is logged once.
_elsewhere: set[tuple[str, str]] = set()


@contextmanager
def full_precision(device: torch.device, *, is_half: bool = False) -> Iterator[None]:
    """Turn TF32 and autocast off, because factors and bases need the full precision of float32.

    Args:
        device: Device of the products.
        is_half: Whether all factors of the products are numbers of bfloat16 or float16. TF32, which is several times as
            fast, keeps all of their digits, so it is turned on.
    """
    is_available = torch.amp.is_autocast_available(device.type)
    if not is_available or (device.type == "cpu" and not torch.is_autocast_enabled("cpu")):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        name, values, parts = _tf32_switches()
        known = [getattr(part, name) for part in parts]
        try:
            for part in parts:
                setattr(part, name, values[is_half])
            yield
        finally:
            for part, value in zip(parts, known, strict=True):
                setattr(part, name, value)


def _tf32_switches() -> tuple[str, tuple[Any, Any], list[Any]]:
    """Find the switches of TF32. torch has old and new ones, and rejects reading the old after using the new.

    Returns:
        Name of an attribute, its values without and with TF32, and the objects that have it, for products and for
        convolutions.
    """
    if hasattr(torch.backends.cudnn, "conv"):
        return "fp32_precision", ("ieee", "tf32"), [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    return "allow_tf32", (False, True), [torch.backends.cuda.matmul, torch.backends.cudnn]


def solve_each(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve ``X A = B``, one matrix after the other.

    torch 2.13 with MKL breaks down in the LU factorization of a batch on the CPU ("Pivots given to lu_solve must all be
    greater or equal to 1") if it has two threads or more and the matrices have about 192 rows or more.

    Args:
        matrix: A ``[..., n, n]``, not singular.
        right: B ``[..., m, n]``.

    Returns:
        X ``[..., m, n]``.
    """
    pairs = zip(
        matrix.flatten(0, -3) if matrix.dim() > 2 else [matrix], right.reshape(-1, *right.shape[-2:]), strict=True
    )
    solved = [anywhere(torch.linalg.solve, a, b, left=False) for a, b in pairs]
    return torch.stack(solved).view(right.shape)


def anywhere(function: Callable[..., Any], *tensors: Tensor, **keywords: Any) -> Any:
    """Return ``function(*tensors)``, computed on the CPU if the device does not support it or fails.

    Matrices that cannot be factorized (``LinAlgError``) and a lack of memory are not such cases.

    Args:
        function: A function such as those of ``torch.linalg``, which takes tensors and returns a tensor or a tuple.
        *tensors: The arguments, all on one device.
        **keywords: Further arguments, which are not tensors.

    Returns:
        The result of the function, on the device of the arguments.

    Raises:
        LinAlgError: If the function raises it.
        OutOfMemoryError: If the function raises it.
        RuntimeError: If the function raises it on the CPU, including ``NotImplementedError``.
    """
    try:
        return function(*tensors, **keywords)
    except (LinAlgError, torch.OutOfMemoryError):
        raise
    except (NotImplementedError, RuntimeError) as error:
        if all(_is_on_host(x) for x in tensors):
            raise
        device, name = tensors[0].device, getattr(function, "__name__", str(function))
        if (name, device.type) not in _elsewhere:
            _elsewhere.add((name, device.type))
            log.info("%s is done on the CPU, as %s does not do it: %s", name, device.type, error)
        found = function(*map(Tensor.cpu, tensors), **keywords)
        return found.to(device) if isinstance(found, Tensor) else tuple(part.to(device) for part in found)


def _is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def precision_of(p: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's curvature: float64 for float64 and complex128, otherwise float32."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


class Workspace:
    """Memory for the temporaries of one block at a time, on a CPU kept between steps.

    Fresh memory costs a page fault per 4 KiB there, several percent of a step; :meth:`reset` makes all of it available
    again. Torch keeps the memory of other devices itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._used: dict[tuple[torch.dtype, torch.device], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reset(self) -> None:
        """Make all returned memory available again."""
        self._used.clear()

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialized tensor of the dtype and device of ``like``, valid until :meth:`reset`."""
        if not is_on_host(like):
            return like.new_empty(tuple(shape))
        key, size = (like.dtype, like.device), math.prod(shape)
        start = self._used.get(key, 0)
        self._used[key] = start + size
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < start + size:
            # Tensors that were returned before keep the old buffer alive. The next block gets a buffer that fits all.
            buffer = self._buffers[key] = like.new_empty(start + size)
        return buffer[start : start + size].view(tuple(shape))


def empty_aligned(shape: Sequence[int], like: Tensor, workspace: Workspace | None = None) -> Tensor:
    """Return an uninitialized tensor whose rows start at multiples of 64 bytes (for float32).

    The homogeneous column makes most factors odd-sized, and a matrix product over rows that start anywhere is a fifth
    slower than over aligned ones; a padded copy costs a hundredth.

    Returns:
        The tensor, of ``shape``, on the device and in the dtype of ``like``, from the workspace if one is given.
    """
    n = shape[-1]
    padded = (*shape[:-1], -(-n // _ALIGNMENT) * _ALIGNMENT)
    return (like.new_empty(padded) if workspace is None else workspace.empty(padded, like))[..., :n]


def stacked(tensors: Sequence[Tensor], workspace: Workspace) -> Tensor:
    """Return tensors of equal shape as one tensor ``[k, ...]`` in memory of the workspace."""
    return torch.stack(list(tensors), out=workspace.empty((len(tensors), *tensors[0].shape), tensors[0]))


def aligned(x: Tensor, workspace: Workspace) -> Tensor:
    """Return ``x [..., n]`` itself if its rows are aligned or too short to matter, and otherwise an aligned copy."""
    if x.shape[-1] % _ALIGNMENT == 0 or x.shape[-1] < 4 * _ALIGNMENT or x.stride(-2) % _ALIGNMENT == 0:
        return x
    return empty_aligned(x.shape, x, workspace).copy_(x)


def product(x: Tensor, y: Tensor, workspace: Workspace | None = None) -> Tensor:
    """Return ``x @ y`` of ``[..., n, k]`` and ``[..., k, m]`` in aligned rows."""
    if x.dim() > 2 or y.shape[1] < 4 * _ALIGNMENT:
        return x @ y
    return torch.mm(x, y, out=empty_aligned((x.shape[0], y.shape[1]), x, workspace))


def add_gram_(out: Tensor, rows: Tensor) -> None:
    """Add ``rowsᵀ rows`` to ``out``, on and above its diagonal (:func:`mirror_upper_` completes it).

    A wide product is done in strips that stop at the diagonal, which saves up to half of the work.

    Args:
        out: Accumulator ``[d, d]`` or ``[groups, d, d]``, changed in place; below the diagonal it is undefined.
        rows: ``[rows, d]`` or ``[groups, rows, d]``, of the dtype of ``out``.
    """
    if rows.dim() == 3:
        out.baddbmm_(rows.mT, rows)
        return
    d = rows.shape[1]
    strip = (_STRIP if d < _WIDE else _WIDE_STRIP) if _is_on_host(rows) else _DEVICE_STRIP
    strip = strip if d >= 2 * strip else d
    for start in range(0, d, strip):
        stop = min(start + strip, d)
        out[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])


def mirror_upper_(x: Tensor) -> Tensor:
    """Copy the upper triangle of ``[..., n, n]`` onto the lower one, in place."""
    n = x.shape[-1]
    if n > 1:
        strip = _WIDE_STRIP if _is_on_host(x) else _DEVICE_STRIP
        # The copy goes strip by strip, so that the temporary stays small compared with the matrix.
        for start in range(0, n, strip):
            stop = min(start + strip, n)
            diagonal, upper = x[..., start:stop, start:stop], x[..., start:stop, stop:]
            lower = diagonal.mT.tril(-1)
            diagonal.triu_().add_(lower)
            if stop < n:
                x[..., stop:, start:stop] = upper.mT
    return x


def add_outer_rows_(out: Tensor, rows: Tensor, homogeneous: bool) -> None:
    """Add ``Σ a aᵀ`` over rows ``a`` to ``out``, with a 1 appended to each row if ``homogeneous``.

    The appended column needs only the sum of the rows, so no row is copied to make room for it.

    Args:
        out: ``[n, n]`` or ``[groups, n, n]``, changed in place on and above the diagonal.
        rows: ``[rows, d]`` or ``[groups, rows, d]``, ``n = d + homogeneous``.
        homogeneous: Whether a constant 1 follows the features.
    """
    d = rows.shape[-1]
    if not homogeneous:
        add_gram_(out, rows)
        return
    if d:
        add_gram_(out[..., :d, :d], rows)
        out[..., :d, d] += rows.sum(-2)
    out[..., d, d] += rows.shape[-2]


def eigh_psd(x: Tensor, host_checks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the eigendecomposition of symmetric positive semi-definite matrices, using the failure ladder.

    Args:
        x: Matrices ``[k, n, n]``, float32 or float64.
        host_checks: Whether the host may check the outcome and climb the ladder, as on a CPU or after a failure.

    Returns:
        Eigenvalues ``[k, n]`` clamped at 0, eigenvectors ``[k, n, n]`` in columns, and ``ok [k]``.
    """
    if x.shape[-1] == 1:
        return x[..., 0].clamp(min=0), torch.ones_like(x), torch.isfinite(x[..., 0, 0])
    (values, vectors), ok = _with_ladder(x, _eigh, host_checks)
    return values, vectors, ok


def inverse_pd(x: Tensor, host_checks: bool) -> tuple[Tensor, Tensor]:
    """Return the inverses of symmetric positive definite matrices by Cholesky, using the failure ladder.

    Args:
        x: Damped matrices ``[k, n, n]``, float32 or float64.
        host_checks: The same as in :func:`eigh_psd`.

    Returns:
        Inverses ``[k, n, n]`` and ``ok [k]``.
    """
    if x.shape[-1] == 1:
        return x.reciprocal(), torch.isfinite(x[..., 0, 0]) & (x[..., 0, 0] > 0)
    (inverse,), ok = _with_ladder(x, _cholesky_inverse, host_checks)
    return inverse, ok


def is_on_host(x: Tensor) -> bool:
    """Whether the host can look at a tensor without waiting: on the CPU, or on ``meta``, where there are no values."""
    return x.device.type in ("cpu", "meta")


def all_true_on_cpu(flags: Tensor) -> bool:
    """Whether every flag of a CPU tensor is set; it is read without a dispatched operator."""
    return bool(flags.numpy().all())


def _eigh(x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    values, vectors = anywhere(torch.linalg.eigh, x)
    # Rotating a vector there and back detects a basis that is not orthogonal at n² instead of n³ cost.
    probe = torch.ones_like(x[..., :1])
    if x.device.type == "cpu":
        error = (vectors @ (vectors.mT @ probe) - probe).abs().amax((-2, -1))
    else:  # not as products of matrices, since other threads may switch their precision
        error = ((vectors * vectors.sum(-2, keepdim=True)).sum(-1) - 1).abs().amax(-1)
    ok = (error < _ORTHOGONALITY[x.dtype] * max(1.0, x.shape[-1] / 1000)) & torch.isfinite(values).all(-1)
    return (values.clamp_(min=0), vectors), ok


def _cholesky_inverse(x: Tensor) -> tuple[tuple[Tensor], Tensor]:
    lower, info = anywhere(torch.linalg.cholesky_ex, x)
    inverse = anywhere(torch.cholesky_inverse, lower)
    return (inverse,), (info == 0) & torch.isfinite(inverse.sum((-2, -1)))


def _with_ladder(x: Tensor, factorise: Factorisation, host_checks: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    x = (x + x.mT) / 2  # both functions assume symmetry
    try:
        results, ok = factorise(x)
    except LinAlgError:
        results, ok = _nothing(x, factorise), x.new_zeros(len(x)).bool()
        host_checks = True  # LAPACK raised, so the host knows anyway
    if host_checks:
        flags = ok.cpu()
        if not all_true_on_cpu(flags):
            return _climb_failed(x, factorise, results, flags)
    return results, ok


def _climb_failed(
    x: Tensor, factorise: Factorisation, results: tuple[Tensor, ...], flags: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Climb the ladder with the matrices whose flag is False; the others keep their result."""
    results, flags = tuple(part.clone() for part in results), flags.clone()
    for i, good in enumerate(flags.numpy().tolist()):
        if not good:
            found, reached = _climb(x[i], factorise)
            for part, value in zip(results, found, strict=True):
                part[i] = value
            flags[i] = reached
    return results, flags.to(x.device)


def _climb(x: Tensor, factorise: Factorisation) -> tuple[tuple[Tensor, ...], bool]:
    """Try each rung on one matrix ``[n, n]``; the last resort returns zeros and False."""
    for rung in _rungs(x):
        try:
            results, ok = factorise(rung)
        except LinAlgError:
            continue
        if all_true_on_cpu(ok.cpu()):
            return tuple(part[0].to(x.device, x.dtype) for part in results), True
    return tuple(part[0] for part in _nothing(x[None], factorise)), False


def _rungs(x: Tensor) -> Iterator[Tensor]:
    yield x[None]
    jitter = _JITTER * x.diagonal().mean()
    jittered = x + jitter * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    yield jittered[None]
    yield jittered[None].double()
    if x.device.type != "cpu":
        yield jittered[None].double().cpu()


def _nothing(x: Tensor, factorise: Factorisation) -> tuple[Tensor, ...]:
    """Return zeros in the shapes that a factorization of ``[k, n, n]`` returns."""
    return (torch.zeros_like(x[..., 0]), torch.zeros_like(x)) if factorise is _eigh else (torch.zeros_like(x),)
