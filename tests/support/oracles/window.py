"""The directions of the window methods from d × d matrices and plain loops, without code of the package.

    rows [t, d]   the gradients in the window as they were stored, in any order
    x    [d]      the vector that is preconditioned
    M-FAC         u = (λI + rowsᵀ rows / n)⁻¹ x                         n = t, or m for scale="window"
    GGT           u = ((Rᵀ R)^½ + εI)⁻¹ x, R = diag(β₂^age) rows

Systems are solved in extended precision where the machine supports it, so that the oracle is the more accurate one.
"""

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor


def solve(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Gaussian elimination with partial pivoting."""
    n = len(vector)
    A = np.concatenate([matrix, vector[:, None]], axis=1).astype(np.longdouble)
    for k in range(n):
        pivot = k + int(np.argmax(np.abs(A[k:, k])))
        A[[k, pivot]] = A[[pivot, k]]
        A[k + 1 :, k:] -= np.outer(A[k + 1 :, k] / A[k, k], A[k, k:])
    x = np.zeros(n, dtype=np.longdouble)
    for k in reversed(range(n)):
        x[k] = (A[k, n] - A[k, k + 1 : n] @ x[k + 1 :]) / A[k, k]
    return x


def extended(x: Tensor | np.ndarray) -> np.ndarray:
    return (x.double().numpy() if isinstance(x, Tensor) else x).astype(np.longdouble)


class Average:
    """v ← βv + (1−β)g in extended precision: rounding outside the span of the gradients is amplified by 1/λ."""

    def __init__(self, d: int, beta: float) -> None:
        self.beta, self.steps, self.v = np.longdouble(beta), 0, np.zeros(d, dtype=np.longdouble)

    def add(self, g: Tensor, *, correct: bool = False) -> np.ndarray:
        self.steps += 1
        self.v = self.beta * self.v + (1 - self.beta) * extended(g)
        return self.v / (1 - self.beta**self.steps) if correct else self.v


def fisher_direction(
    rows: Tensor, x: Tensor | np.ndarray, damping: float, n: int | None = None, *, relative: bool = False
) -> Tensor:
    """M-FAC: F⁻¹x with F = λI + rowsᵀ rows / n (n: the number of rows unless given)."""
    G = extended(rows)
    n = n or len(G)
    if relative:
        damping = damping * float((G * G).sum() / n)
    F = damping * np.eye(G.shape[1], dtype=np.longdouble) + G.T @ G / n
    return torch.from_numpy(solve(F, extended(x)).astype(np.float64))


def root_direction(
    rows: Tensor, x: Tensor | np.ndarray, eps: float, beta2: float = 1.0, complement: float | None = None
) -> Tensor:
    """GGT: H⁻¹x with H = (RᵀR)^½ + εI, rows given from the oldest to the newest.

    ``complement`` replaces H⁻¹ outside the span of the rows, where it is 1/ε. Singular values at rounding level are set
    to zero before the root, because √1e-16 is not small compared with ε.
    """
    ages = torch.arange(len(rows) - 1, -1, -1, dtype=torch.float64)
    R = beta2 ** ages[:, None] * rows.double()
    _, values, V = torch.linalg.svd(R, full_matrices=False)
    kept = values**2 > 1e-13 * values.max() ** 2
    values, V = values[kept], V[kept]
    H = V.mT @ torch.diag(values) @ V + eps * torch.eye(R.shape[1], dtype=torch.float64)
    u = torch.from_numpy(solve(H.numpy(), extended(x)).astype(np.float64))
    if complement is not None:
        inside = torch.from_numpy(extended(x).astype(np.float64))
        u = u + (complement - 1 / eps) * (inside - V.mT @ (V @ inside))
    return u


def woodbury(rows: Tensor, x: Tensor, damping: float, n: int) -> Tensor:
    """The same F⁻¹x by the matrix inversion lemma."""
    S = n * damping * torch.eye(len(rows), dtype=torch.float64) + rows @ rows.mT
    return (x - rows.mT @ torch.linalg.solve(S, rows @ x)) / damping


def recursion(rows: Tensor, x: Tensor, damping: float, n: int) -> Tensor:
    """The same F⁻¹x by rank-one updates, one row after the other (2107.03356, the static algorithm)."""

    def inverse_times(vector: Tensor, done: list[tuple[Tensor, Tensor]]) -> Tensor:
        result = vector / damping
        for v, q in done:
            result = result - v * (v @ vector) / q
        return result

    done: list[tuple[Tensor, Tensor]] = []
    for g in rows:
        v = inverse_times(g, done)
        done.append((v, n + g @ v))
    return inverse_times(x, done)


class PublishedDynamic:
    """The dynamic algorithm of 2107.03356: a ring of m gradients that starts as zeros, dots, and two triangles.

    With F_i = λI + (1/m) Σ_{k≤i} g_k g_kᵀ over the slots of the ring:
    D[i, k] = g_iᵀ F_{i-1}⁻¹ g_k for k ≥ i (an LU factorization of mI + S/λ without its diagonal m), and
    F_{i-1}⁻¹ g_i = Σ_k B[i, k] g_k.
    """

    def __init__(self, m: int, d: int, damping: float) -> None:
        self.m, self.damping, self.slot = m, damping, 0
        self.rows, self.dots = np.zeros((m, d)), np.zeros((m, m))

    def step(self, g: np.ndarray) -> np.ndarray:
        """Put ``g`` into the ring and return F_m⁻¹ g."""
        m, j = self.m, self.slot
        self.rows[j] = g
        self.dots[j, :] = self.dots[:, j] = self.rows @ g
        D, B, y = self.dots / self.damping, np.zeros((m, m)), self.dots[:, j] / self.damping
        for i in range(m):
            for k in range(i + 1, m):
                for n in range(i + 1, m):
                    D[k, n] -= D[i, k] * D[i, n] / (m + D[i, i])
                y[k] -= D[i, k] * y[i] / (m + D[i, i])
        for i in range(m):
            B[i, i] = 1 / self.damping
            for k in range(i):
                B[i, k] = -sum(D[n, i] / (m + D[n, n]) * B[n, k] for n in range(k, i))
        direction = g / self.damping
        for i in range(m):
            for k in range(i + 1):
                direction = direction - y[i] / (m + D[i, i]) * B[i, k] * self.rows[k]
        self.slot = (j + 1) % m
        return direction


# ------------------------------------------------------------------------------------------------------- Stored entries
def kept_entries(length: int, density: float, block_size: int) -> int:
    """k of a block of ``length`` entries."""
    share = Fraction(str(density)) * length  # exact, because 0.1 · 30 is 3.0000000000000004 in floating point
    if share >= length:
        return length
    if length == block_size and block_size >= 64:
        return min(max(8 * int(share / 8 + Fraction(1, 2)), 8), block_size)
    return max(1, -int(-share // 1))


class DenseRows:
    """Stores a gradient in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def send(self, gradient: Tensor, lr: float = 1.0) -> Tensor:
        return gradient.to(self.dtype).double()


class TopKRows:
    """Stores the k largest entries of every block of one parameter, and adds the rest to the next gradient."""

    def __init__(self, numel: int, spec: dict, dtype: torch.dtype) -> None:
        self.density, self.block_size = spec["density"], spec.get("block_size", 4096)
        self.value_dtype = spec.get("value_dtype", torch.float32)
        if self.value_dtype == torch.float32:
            self.value_dtype = dtype  # float32 is the default, which means the precision of the computation
        self.feedback, self.lr_weighted = spec.get("error_feedback", True), spec.get("lr_weighted", False)
        self.error = torch.zeros(numel, dtype=dtype)
        self.accumulated = self.error

    def blocks(self) -> list[tuple[slice, int]]:
        """Ranges of the flat parameter, and the number of stored entries of each."""
        N, B = len(self.error), self.block_size
        ranges = [(start, min(start + B, N)) for start in range(0, N, B)]
        return [(slice(a, b), kept_entries(b - a, self.density, B)) for a, b in ranges]

    def send(self, gradient: Tensor, lr: float = 1.0) -> Tensor:
        acc = gradient.to(self.error.dtype) * (lr if self.lr_weighted else 1.0)
        if self.feedback:
            acc = self.error + acc
        row = torch.zeros_like(acc)
        for block, k in self.blocks():
            part = acc[block]
            chosen = part.abs().argsort(descending=True, stable=True)[:k]
            row[block][chosen] = part[chosen].to(self.value_dtype).to(acc.dtype)
        self.accumulated = acc
        if self.feedback:
            self.error = acc - row
        return row.double()


class LowRankRows:
    """Stores the result of a warm-started power step, and adds the rest to the next gradient."""

    def __init__(self, shape: tuple[int, int], q: Tensor) -> None:
        self.shape, self.q = shape, q.double().clone()
        self.error = torch.zeros(shape, dtype=torch.float64)

    def send(self, gradient: Tensor, lr: float = 1.0) -> Tensor:
        acc = self.error + gradient.double().reshape(self.shape)
        P, _ = torch.linalg.qr(acc @ self.q)
        self.q = acc.mT @ P
        row = P @ self.q.mT
        self.error = acc - row
        return row.reshape(-1)
