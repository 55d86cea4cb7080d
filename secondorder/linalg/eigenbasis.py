r"""Second moments of per-example gradients in a Kronecker eigenbasis: the mathematics of EK-FAC.

Let ``G_n = Σ_s g_{n,s} a_{n,s}ᵀ`` be the gradient of example n, summed over positions *before* it is squared, and
``Q_A``, ``Q_G`` orthogonal bases of the two factors::

    s     = (1/N) Σ_n (Q_Gᵀ G_n Q_A)²                         elementwise square, [n_g, n_a]
    F_EK  = (Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ              over row-major vec([W | b])
    V     = Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s + λ)^p] Q_Aᵀ               p = 1: (F_EK + λI)⁻¹ ∇

s is the diagonal of the exact block in this basis, so ``F_EK`` is the closest of all operators that are diagonal there
(George et al. 2018, arXiv 1806.03884). The refresh by QR is that of SOAP (Vyas et al. 2024, arXiv 2409.11321).

Where a factor is singular, as after a batch with fewer rows than columns, any basis of its null space consists of
eigenvectors, and rounding decides which one a factorization returns. s is therefore averaged over the null space
(:func:`pool`): ``F_EK`` then depends on the space and not on the basis, and is the closest of all such operators.

Every tensor may lead with a group dimension ``[Γ, ...]``. A basis may be None, which means the identity (a diagonal
factor). Products belong in :func:`secondorder.linalg.dense.full_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from secondorder.linalg.dense import Workspace, aligned, anywhere, empty_aligned, product

#: Bytes that the temporaries of :func:`scale_intra` may take together.
CHUNK_BYTES = 16 * 2**20
#: Flops in the time that one element takes to or from memory: 4 bytes at 5 flops per byte, a lower end of today's
#: processors. It decides only between many flops on rows and few on per-example gradients.
_FLOPS_PER_MOVE = 20
#: This jitter makes the orthonormal completion of a null space reproducible; it is a multiple of the mean eigenvalue.
_JITTER = 1e-6
#: An eigenvalue counts as 0 below this many times ``√n ε`` of the largest. At widths of 256 to 1024, rounding gives up
#: to a tenth of this instead of 0, and the smallest nonzero eigenvalues were at least five times as large.
_NULL = 2.0
#: Bounds of the error of a rotated gradient, as multiples of ε: of each coordinate relative to the gradient's norm, and
#: of the angle ``ε s_max / s_j`` by which rounding turns a null space towards an eigenvector of another eigenvalue s_j.
#: At the same widths, rounding gives up to a twentieth of each.
_ROTATION, _TURN = 8.0, 4.0
#: Largest accepted error of ``Q Qᵀ v = v`` for a probe vector of unit entries, as for eigenvectors.
_ORTHOGONALITY = 1e-4

# Maps the routes that form per-example gradients to whether (a, g) are rotated late: as gradients, not as rows.
_LATE = {
    "gradient": (False, False),
    "unprojected": (True, True),
    "unprojected_a": (True, False),
    "unprojected_g": (False, True),
}


class RouteCost(NamedTuple):
    """The cost of a route per example and group.

    Attributes:
        flops: Floating-point operations of its matrix products.
        moved: Elements read and written in addition.
        held: Elements of temporaries alive at the same time.
    """

    flops: int
    moved: int
    held: int


def route_costs(
    positions: int, n_a: int, n_g: int, rotate_a: bool = True, rotate_g: bool = True
) -> dict[str, RouteCost]:
    """Return the costs of every exact way to compute ``(Q_Gᵀ G_n Q_A)²``.

    * ``"gramian"`` multiplies pairs of rows, ``Σ_{s,t} (g̃_s ∘ g̃_t)(ã_s ∘ ã_t)ᵀ``, by symmetry those of t ≥ s only. With
      one position this is the product of the squared rows.
    * ``"gradient"`` rotates rows, forms the gradient and squares it.
    * ``"unprojected"`` forms the gradient and rotates that; ``"unprojected_a"`` and ``"unprojected_g"``, on one side.

    Args:
        positions: S, positions of an example.
        n_a: Number of columns of the gradient matrix.
        n_g: Number of its rows.
        rotate_a: Whether there is a basis on the side of a.
        rotate_g: Whether there is a basis on the side of g.

    Returns:
        Costs by name of the route.
    """
    size, width, pairs = n_a * n_g, n_a + n_g, positions * (positions + 1) // 2
    # The costs of rotating rows, and of rotating gradients.
    early = 2 * positions * n_a**2 * rotate_a, 2 * positions * n_g**2 * rotate_g
    late = 2 * n_g * n_a**2 * rotate_a, 2 * n_a * n_g**2 * rotate_g
    rows = 3 * positions * (_padded(n_a) + _padded(n_g))  # the rotated ones, and copies before or after the rotation
    costs = {"gramian": RouteCost(sum(early) + 2 * pairs * size, 4 * pairs * width, rows)}
    for name, (late_a, late_g) in _LATE.items():
        late_a, late_g = late_a and rotate_a, late_g and rotate_g
        flops = (late if late_a else early)[0] + (late if late_g else early)[1] + 2 * positions * size
        held = rows + n_g * _padded(n_a) + (n_g * _padded(n_a) if late_a or late_g else 0)
        costs[name] = RouteCost(flops, (4 + 2 * late_a + 4 * late_g) * size, held)
    return costs


def choose_route(positions: int, n_a: int, n_g: int, rotate_a: bool = True, rotate_g: bool = True) -> str:
    """Return the name of the cheapest route; arguments are those of :func:`route_costs`, and N does not matter."""
    if positions == 1:
        return "gramian"
    costs = route_costs(positions, n_a, n_g, rotate_a, rotate_g)
    # Pairs of rows are worth it only while they are smaller than the gradient that they represent.
    if positions**2 * (n_a + n_g) >= n_a * n_g:
        del costs["gramian"]
    return min(costs, key=lambda name: costs[name].flops + _FLOPS_PER_MOVE * costs[name].moved)


def scale_intra(
    a: Tensor | None,
    g: Tensor,
    basis_a: Tensor | None,
    basis_g: Tensor | None,
    route: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    homogeneous: bool = False,
) -> Tensor:
    """Return ``Σ_n (Q_Gᵀ G_n Q_A)²``, which is exact for every number of positions.

    Args:
        a: Inputs ``[(Γ,) N, S, n_a]``, or None for a constant 1 (``n_a = 1``).
        g: Output gradients ``[(Γ,) N, S, n_g]``.
        basis_a: ``Q_A [(Γ,) n_a, n_a]`` or None.
        basis_g: ``Q_G [(Γ,) n_g, n_g]`` or None.
        route: A key of :func:`route_costs`; None for the cheapest.
        chunk_bytes: Bound on temporaries, unless those of a single example do not fit.
        homogeneous: Whether to append a 1 to every row of ``a`` (without copying), which has ``n_a − 1`` columns.

    Returns:
        The sum ``[(Γ,) n_g, n_a]``, in the precision of the bases, without them in that of g but at least float32.
        Of captured gradients, s is the sum times ``N / captured`` times the ``gradient_scale`` of N examples.

    Raises:
        ValueError: If there is no such route.
    """
    dtype = next((basis.dtype for basis in (basis_a, basis_g) if basis is not None), g.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    groups = g.shape[0] if g.dim() == 4 else 1
    budget = chunk_bytes // (dtype.itemsize * groups)
    basis_g = _aligned(basis_g, Workspace())
    if a is None:  # then Q_A = ±1, and the square does not depend on its sign
        return _scale_bias(g, basis_g, dtype, budget)
    positions, n_a, n_g = g.shape[-2], a.shape[-1] + homogeneous, g.shape[-1]
    rotated = basis_a is not None, basis_g is not None
    route = choose_route(positions, n_a, n_g, *rotated) if route is None else route
    costs = route_costs(positions, n_a, n_g, *rotated)
    if route not in costs:
        raise ValueError(f"route must be one of {sorted(costs)} or None, got {route!r}")
    basis_a = _aligned(basis_a, Workspace())
    total = g.new_zeros((*g.shape[:-3], n_g, n_a), dtype=dtype)
    late_a, late_g = _LATE.get(route, (False, False))
    # In addition to the memory of an example, the sum of a chunk's squares is held.
    spare = 0 if route == "gramian" else n_g * n_a
    for part in _chunks(g.shape[-3], budget - spare, costs[route].held):
        rows_a = _rows(a[..., part, :, :].to(dtype), None if late_a else basis_a, homogeneous)
        rows_g = _rows(g[..., part, :, :].to(dtype), None if late_g else basis_g)
        if route == "gramian":
            _add_gramian_(total, rows_a, rows_g)
        else:
            total += _squared_gradients(rows_a, rows_g, basis_a if late_a else None, basis_g if late_g else None)
    return total.clamp_(min=0)  # differences of pairs may be rounded below it


def rotate(x: Tensor, basis_a: Tensor | None, basis_g: Tensor | None, workspace: Workspace | None = None) -> Tensor:
    """Return ``Q_Gᵀ X Q_A [..., n_g, n_a]``, the coordinates in the eigenbasis; X itself if both bases are None."""
    basis_a, basis_g = _aligned(basis_a, workspace), _aligned(basis_g, workspace)
    if basis_g is not None:
        x = product(basis_g.mT, x, workspace)
    return x if basis_a is None else product(x, basis_a, workspace)


def rotate_back(
    x: Tensor, basis_a: Tensor | None, basis_g: Tensor | None, workspace: Workspace | None = None
) -> Tensor:
    """Return ``Q_G X Q_Aᵀ [..., n_g, n_a]``, the inverse of :func:`rotate`, in memory outside of the workspace."""
    basis_a, basis_g = _aligned(basis_a, workspace), _aligned(basis_g, workspace)
    if basis_g is not None:
        x = product(basis_g, x, None if basis_a is None else workspace)
    return x if basis_a is None else product(x, basis_a.mT)


def precondition(
    grad: Tensor,
    basis_a: Tensor | None,
    basis_g: Tensor | None,
    scale: Tensor,
    damping: Tensor | None,
    power: float = 1.0,
    workspace: Workspace | None = None,
    damp_root: bool = False,
    is_rotated: bool = False,
    silent: Tensor | None = None,
) -> Tensor:
    """Return ``Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s + λ)^p] Q_Aᵀ``; for p = 1 it solves ``(F_EK + λI) vec(V) = vec(∇)``.

    Args:
        grad: Gradient matrix ``[..., n_g, n_a]``.
        basis_a: ``Q_A [..., n_a, n_a]`` or None.
        basis_g: ``Q_G [..., n_g, n_g]`` or None.
        scale: s ``[..., n_g, n_a]``.
        damping: λ ``[...]``, used no smaller than the rounding error of the largest entry of s; None if s contains it.
        power: p, 1 for the natural gradient, 0.5 to whiten.
        workspace: Memory for temporaries.
        is_rotated: Whether ``grad`` is in the basis already.
        damp_root: Whether to divide by ``s^p + λ`` instead, as Adam does for p = 0.5, with λ unchanged.
        silent: Coordinates ``[..., n_g, n_a]`` in the basis along which V is 0.

    Returns:
        V, in the shape of ``grad`` and in separate memory.
    """
    rotated = grad if is_rotated else rotate(grad, basis_a, basis_g, workspace)
    # Without a basis the quotient is the result, which must outlive the workspace.
    memory = None if basis_a is None and basis_g is None else workspace
    divisor = empty_aligned(scale.shape, scale, memory)
    if damping is None:
        _power_(divisor.copy_(scale), power)
    elif damp_root:
        _power_(divisor.copy_(scale), power).add_(damping[..., None, None])
    else:
        # Below rounding of the largest entry there is no curvature to divide by, only noise.
        floor = torch.maximum(damping, torch.finfo(scale.dtype).eps * scale.amax((-2, -1)))
        _power_(torch.add(scale, floor[..., None, None], out=divisor), power)
    if silent is not None:
        divisor.masked_fill_(silent, torch.inf)
    return rotate_back(torch.div(rotated, divisor, out=divisor), basis_a, basis_g, workspace)


def dense(scale: Tensor, basis_a: Tensor | None, basis_g: Tensor | None) -> Tensor:
    """Return ``(Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ [..., n_g·n_a, n_g·n_a]`` from s ``[..., n_g, n_a]``."""
    n_g, n_a = scale.shape[-2:]
    q_a = scale.new_ones(n_a).diag() if basis_a is None else basis_a
    q_g = scale.new_ones(n_g).diag() if basis_g is None else basis_g
    vectors = (q_g[..., :, None, :, None] * q_a[..., None, :, None, :]).flatten(-2).flatten(-3, -2)
    return (vectors * scale.flatten(-2)[..., None, :]) @ vectors.mT


def overlap(old_basis: Tensor | None, new_basis: Tensor | None) -> Tensor | None:
    """Return ``R = Q'ᵀ Q [..., n, n]``, which maps coordinates from the old to the new basis; None is the identity."""
    if old_basis is None:
        return None if new_basis is None else new_basis.mT
    return old_basis if new_basis is None else new_basis.mT @ old_basis


def transport(scale: Tensor, r_a: Tensor | None, r_g: Tensor | None) -> Tensor:
    """Return ``(R_G ∘ R_G) s (R_A ∘ R_A)ᵀ``, the diagonal of the old operator in the new basis.

    Rows and columns of ``R ∘ R`` sum to 1, so the entries stay nonnegative and keep their sum.

    Args:
        scale: s ``[..., n_g, n_a]`` in the old basis.
        r_a: :func:`overlap` of the bases of A ``[..., n_a, n_a]``; None if it did not change.
        r_g: The same for G ``[..., n_g, n_g]``.

    Returns:
        s in the new basis; ``scale`` itself if both are None.
    """
    if r_g is not None:
        scale = product(r_g.square(), scale)
    return scale if r_a is None else product(scale, r_a.square().mT)


def without_rounding(values: Tensor, kept: torch.dtype) -> Tensor:
    """Return eigenvalues ``[..., n]`` with 0 in place of those that cannot be distinguished from 0.

    Args:
        values: Eigenvalues of a positive semi-definite matrix.
        kept: The dtype in which the matrix is kept.

    Returns:
        The eigenvalues, in a new tensor.
    """
    tolerance = max(_NULL * values.shape[-1] ** 0.5 * torch.finfo(values.dtype).eps, _error_of(kept, values.dtype))
    return torch.where(values > tolerance * values.amax(-1, keepdim=True), values, 0.0)


def pool(scale: Tensor, null_a: Tensor | None, null_g: Tensor | None) -> Tensor:
    """Return scales averaged over the null spaces of both factors, which no rotation of their bases changes.

    Args:
        scale: s ``[..., n_g, n_a]``.
        null_a: Which eigenvectors of A span its null space, ``[..., n_a]`` of bool; None for none.
        null_g: The same for G, ``[..., n_g]``.

    s with the mean of each row over the null space of A in all its columns, and in the same way for the rows of the
    null space of G; ``scale`` itself if both are None. The sum does not change.
    """
    for inside, axis in ((_across(null_a, -1), -1), (_across(null_g, -2), -2)):
        if inside is not None:
            total = torch.where(inside, scale, 0.0).sum(axis, keepdim=True)
            scale = torch.where(inside, total / inside.sum(axis, keepdim=True).clamp(min=1), scale)
    return scale


def is_rounding(
    scale: Tensor, values_a: Tensor | None, values_g: Tensor | None, kept: tuple[torch.dtype, torch.dtype]
) -> Tensor | None:
    """Return a mask of squares of a rotated gradient that are rounding errors of 0, which a root must not amplify.

    Along a null space, the gradient of the batches that a factor was estimated from is 0. The numbers there are errors
    of the rotation, and parts of other coordinates that the rounded eigenvectors let through.

    Args:
        scale: Means of the squares ``[..., n_g, n_a]``, pooled.
        values_a: Eigenvalues of A ``[..., n_a]``, 0 in its null space; None without one.
        values_g: The same for G ``[..., n_g]``.
        kept: The dtypes in which factors and bases are kept.

    Returns:
        Coordinates in a null space with a square within these errors, ``[..., n_g, n_a]`` of bool; None without one.
    """
    error = _ROTATION * torch.finfo(scale.dtype).eps + _error_of(kept[1], scale.dtype) / min(scale.shape[-2:]) ** 0.5
    bound, found = error**2 * scale.sum((-2, -1), keepdim=True), None
    for values, axis in ((values_a, -1), (values_g, -2)):
        if values is None:
            continue
        turn = _TURN * torch.finfo(scale.dtype).eps + _error_of(kept[0], scale.dtype)
        angle = torch.where(values > 0, turn * values.amax(-1, keepdim=True) / values, 0.0).clamp(max=1)
        let_through = (scale * _across(angle.square(), axis)).sum(axis, keepdim=True)
        small = (scale <= bound + let_through) & _across(values == 0, axis)
        found = small if found is None else found | small
    return found


def _error_of(kept: torch.dtype, dtype: torch.dtype) -> float:
    """Return the relative error of numbers that are kept in fewer bits than those of ``dtype``."""
    return torch.finfo(kept).eps / 2 if torch.finfo(kept).eps > torch.finfo(dtype).eps else 0.0


def _across(x: Any, axis: int) -> Any:
    """Reshape ``[..., n]`` to ``[..., 1, n]`` or, along axis -2, to ``[..., n, 1]``; None stays None."""
    return None if x is None else x[..., None, :] if axis == -1 else x[..., :, None]


def qr_refresh(factor: Tensor, basis: Tensor, sweeps: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring a basis closer to the eigenvectors of a matrix that changed a little: ``Q ← qr(X Q)``, repeated.

    Columns come out in ascending order of the Rayleigh quotients that they had before, the order of ``linalg.eigh``, so
    that both kinds of refresh can take turns. Inside they are iterated in descending order: each column is cleared of
    those before it, and would otherwise turn towards larger eigenvalues. Nothing waits for a device.

    Args:
        factor: X, symmetric positive semi-definite ``[k, n, n]``, float32 or float64.
        basis: Q, orthogonal ``[k, n, n]``.
        sweeps: Number of iterations, at least 1.

    Returns:
        Rayleigh quotients ``diag(QᵀXQ) [k, n]`` of the new basis, clamped at 0; the new basis ``[k, n, n]``; the column
        of the old basis that each new one continues ``[k, n]``; ``‖X̃ − diag X̃‖/‖X̃‖ [k]`` with ``X̃ = QᵀXQ`` of the new
        basis; and whether that is finite and orthogonal ``[k]``.
    """
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    unit = torch.where(mean > 0, mean, torch.ones_like(mean))  # in this unit no square under- or overflows
    x = (factor + factor.mT) / (2 * unit[..., None])
    x.diagonal(dim1=-2, dim2=-1).add_(_JITTER)
    image = x @ basis
    permutation = (basis * image).sum(-2).argsort(dim=-1, stable=True)
    descending = permutation.flip(-1)[:, None, :].expand_as(basis)
    image = image.gather(-1, descending)
    for _ in range(sweeps):
        q, r = anywhere(torch.linalg.qr, image)
        # A positive diagonal of R makes the result unique, and each column continues its predecessor.
        q = torch.where(r.diagonal(dim1=-2, dim2=-1)[:, None, :] < 0, -q, q)
        image = x @ q
    q, image = q.flip(-1), image.flip(-1)
    values = (q * image).sum(-2)
    # ‖XQ − Q diag‖ is ‖QᵀXQ − diag‖, without another product and without cancellation.
    offdiag = torch.linalg.vector_norm(image - q * values[:, None, :], dim=(-2, -1))
    probe = torch.ones_like(q[..., :1])
    error = (q @ (q.mT @ probe) - probe).abs().amax((-2, -1))
    ok = (error < _ORTHOGONALITY * max(1.0, q.shape[-1] / 1000)) & torch.isfinite(values).all(-1)
    values = (values - _JITTER).clamp_(min=0) * unit
    return values, q, permutation, offdiag / torch.linalg.vector_norm(image, dim=(-2, -1)), ok


def _aligned(basis: Tensor | None, workspace: Workspace | None) -> Tensor | None:
    return basis if basis is None or workspace is None else aligned(basis, workspace)


def _padded(n: int) -> int:
    """Return an upper bound on the elements that a row takes in aligned memory."""
    return n + 15 if n >= 64 else n


def _chunks(examples: int, room: int, held: int) -> Iterator[slice]:
    """Yield slices of as many examples as fit into the room, but of at least one."""
    size = max(1, room // max(held, 1))
    return (slice(start, min(start + size, examples)) for start in range(0, examples, size))


def _power_(x: Tensor, power: float) -> Tensor:
    """Compute ``x^power`` in place; the two powers in use need no logarithm."""
    return x if power == 1 else x.sqrt_() if power == 0.5 else x.pow_(power)


def _rows(x: Tensor, basis: Tensor | None, homogeneous: bool = False) -> Tensor:
    """Rotate rows ``x [..., N, S, d]`` by ``[..., n, n]`` to ``[..., N, S, n]``; ``homogeneous`` appends a 1."""
    if basis is None:
        return F.pad(x, (0, 1), value=1.0) if homogeneous else x
    d = x.shape[-1]
    flat = product(x.flatten(-3, -2), basis[..., :d, :])
    if homogeneous:
        flat += basis[..., d:, :]
    rotated: Tensor = flat.unflatten(-2, x.shape[-3:-1])
    return rotated


def _add_gramian_(total: Tensor, rows_a: Tensor, rows_g: Tensor) -> None:
    """Add ``Σ_n Σ_{s,t} (g_s ∘ g_t)(a_s ∘ a_t)ᵀ``, pairs of equal distance t − s ≥ 0 at a time.

    Views of the rows make the pairs, so that no row is gathered and memory grows with S, not with S².
    """
    for distance in range(rows_g.shape[-2]):
        left, right = (
            (rows[..., : rows.shape[-2] - distance, :] * rows[..., distance:, :]).flatten(-3, -2)
            for rows in (rows_g, rows_a)
        )
        add = total.addmm_ if total.dim() == 2 else total.baddbmm_
        add(left.mT, right, alpha=2 if distance else 1)


def _squared_gradients(rows_a: Tensor, rows_g: Tensor, basis_a: Tensor | None, basis_g: Tensor | None) -> Tensor:
    """Return ``Σ_n (Q_Gᵀ G_n Q_A)² [..., n_g, n_a]`` with ``G_n = Σ_s g aᵀ`` of rows ``[..., N, S, n]``."""
    gradients, examples = rows_g.mT @ rows_a, -3
    if basis_g is not None:
        # The layout [..., n_g, N, n_a] makes the rotation of all examples one product on either side.
        gradients, examples = gradients.transpose(-3, -2).contiguous(), -2
        gradients = (basis_g.mT @ gradients.flatten(-2)).view_as(gradients)
    if basis_a is not None:
        rotated = product(gradients.flatten(-3, -2), basis_a)
        gradients = rotated.unflatten(-2, gradients.shape[-3:-1])
    total: Tensor = gradients.square_().sum(examples)
    return total


def _scale_bias(g: Tensor, basis_g: Tensor | None, dtype: torch.dtype, budget: int) -> Tensor:
    """Compute :func:`scale_intra` for a constant input: squares of sums over positions ``[..., n_g, 1]``."""
    total = g.new_zeros((*g.shape[:-3], g.shape[-1]), dtype=dtype)
    for part in _chunks(g.shape[-3], budget, 3 * _padded(g.shape[-1])):
        sums = g[..., part, :, :].sum(-2, dtype=dtype)
        total += (sums if basis_g is None else product(sums, basis_g)).square_().sum(-2)
    return total[..., None]
