"""EK-FAC's quantities computed from their definitions: per-example gradients in a loop, dense matrices, no shortcut.

The model sees one example at a time, and autograd computes the gradient of *that example's* loss with respect to the
layer's own parameters, without rows, patches or scaling rules. The rest is dense linear algebra.

    symbol    shape               meaning
    G         [N, Γ, n_g, n_a]    per-example gradients of a layer as matrices [W | b], Γ groups of a convolution
    F         [Γ n_g n_a, ...]    (1/N) Σ_n vec(G_n) vec(G_n)ᵀ, block-diagonal over the groups
    Q_B, Q_A  [Γ, n, n]           orthonormal bases of the two sides; the identity where a factor is kept as a diagonal
    s         [Γ, n_g, n_a]       diagonal of QᵀFQ, Q = Q_B ⊗ Q_A
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.support.oracles.kfac import expected_factors, grouped

Loss = Callable[[Tensor, Tensor], Tensor]
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


# ------------------------------------------------------------------------------------------------ Per-example gradients


def example_gradients(model: nn.Module, inputs: Tensor | Sequence[Tensor], y: Tensor, loss: Loss) -> dict[str, Tensor]:
    """``[N, *shape]`` by parameter name: the gradients of every example's own loss, one backward each."""
    model, inputs = copy.deepcopy(model), (inputs,) if isinstance(inputs, Tensor) else inputs
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    rows = []
    for n in range(len(y)):
        value = loss(model(*(x[n : n + 1] for x in inputs)), y[n : n + 1])
        rows.append(torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True))
    return {name: torch.stack(parts) for name, parts in zip(names, zip(*rows, strict=True), strict=True)}


def as_matrices(layer: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Gradients ``[N, *shape]`` of a layer's parameters as ``[N, Γ, n_g, n_a]``."""
    parts = []
    groups = getattr(layer, "groups", 1)
    if isinstance(layer, NORMS):
        return torch.stack([p.flatten(1) for p in (weight, bias) if p is not None], dim=-1)[..., None]
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return weight.mT[:, None]
    if weight is not None and isinstance(layer, nn.modules.conv._ConvTransposeNd):
        split = weight.unflatten(1, (groups, -1)).transpose(2, 3)  # [N, Γ, d_o/Γ, d_i/Γ, k...]
        parts.append(split.flatten(3))
    elif weight is not None:
        parts.append(weight.unflatten(1, (groups, -1)).flatten(3))
    if bias is not None:
        parts.append(bias.unflatten(1, (groups, -1))[..., None])
    return torch.cat(parts, dim=-1)


def layer_gradients(model: nn.Module, name: str, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """G of one layer, ``[N, Γ, n_g, n_a]``."""
    found = example_gradients(model, x, y, loss)
    prefix = f"{name}." if name else ""
    return as_matrices(model.get_submodule(name), found.get(prefix + "weight"), found.get(prefix + "bias"))


def values(layer: nn.Module, read: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
    """The trained parameters of a layer, ``[Γ, n_g, n_a]``."""
    both = (getattr(layer, key, None) for key in ("weight", "bias"))
    parts = [None if p is None or not p.requires_grad else read(p)[None] for p in both]
    return as_matrices(layer, *parts)[0].clone()


def mean_gradient(layer: nn.Module) -> Tensor:
    """∇ of a layer from ``.grad``, in the same layout."""
    return values(layer, lambda p: p.grad.detach())


# --------------------------------------------------------------------------------------------------------- Dense blocks


def exact_blocks(G: Tensor) -> Tensor:
    """(1/N) Σ_n vec(G_n) vec(G_n)ᵀ of every group, ``[Γ, n_g n_a, n_g n_a]``."""
    vectors = G.flatten(2)
    return sum(v[:, :, None] * v[:, None, :] for v in vectors) / len(vectors)


def exact_fisher(G: Tensor) -> Tensor:
    return torch.block_diag(*exact_blocks(G))


def joint_basis(Q_B: Tensor, Q_A: Tensor) -> Tensor:
    """Q_B ⊗ Q_A of every group along the diagonal."""
    return torch.block_diag(
        *(torch.kron(b.contiguous(), a.contiguous()) for b, a in zip(grouped(Q_B), grouped(Q_A), strict=True))
    )


def scales(G: Tensor, Q_B: Tensor, Q_A: Tensor) -> Tensor:
    """(1/N) Σ_n (Q_Bᵀ G_n Q_A)², example by example."""
    return sum((grouped(Q_B).mT @ g @ grouped(Q_A)) ** 2 for g in G) / len(G)


def operator(Q_B: Tensor, s: Tensor, Q_A: Tensor) -> Tensor:
    """(Q_B ⊗ Q_A) diag(s) (Q_B ⊗ Q_A)ᵀ."""
    Q = joint_basis(Q_B, Q_A)
    return Q @ torch.diag(s.reshape(-1)) @ Q.mT


def over_null_spaces(s: Tensor, B: Tensor, A: Tensor) -> Tensor:
    """s in eigenbases of ascending order, averaged over the null space of A in each row, and of B in each column."""
    s = s.clone()
    for own, b, a in zip(s, grouped(B), grouped(A), strict=True):
        nulls = [torch.linalg.eigvalsh(X) < 1e-13 * X.trace() for X in (b, a)]
        if nulls[1].any():
            own[:, nulls[1]] = own[:, nulls[1]].mean(1, keepdim=True)
        if nulls[0].any():
            own[nulls[0]] = own[nulls[0]].mean(0, keepdim=True)
    return s


def diagonal_in(F: Tensor, Q_B: Tensor, Q_A: Tensor, like: Tensor) -> Tensor:
    """Diagonal of a dense block in a basis, in the layout of s."""
    Q = joint_basis(Q_B, Q_A)
    return (Q.mT @ F @ Q).diagonal().view_as(like)


def damped_power(F: Tensor, damping: float, power: float, gradient: Tensor) -> Tensor:
    """(F + λI)^(-p) vec(∇) by the dense eigendecomposition."""
    values, vectors = torch.linalg.eigh(F + damping * torch.eye(len(F), dtype=F.dtype))
    return (vectors @ ((vectors.mT @ gradient.reshape(-1)) * values**-power)).view_as(gradient)


# ------------------------------------------------------------------------------------------------------------ Schedules


def eigenbasis(X: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; of a matrix larger than the limit, those of its diagonal, in the order of axes."""
    X = grouped(X)
    if limit is not None and X.shape[-1] > limit:
        return X.diagonal(dim1=-2, dim2=-1), torch.eye(X.shape[-1], dtype=X.dtype).expand_as(X)
    values, vectors = torch.linalg.eigh(X)
    return values.clamp(min=0), vectors


class Reference:
    """The estimate of one layer after any sequence of updates; ``operator()`` does not depend on signs.

    Rows are projected as soon as they are captured, so ``"intra"`` measures in the basis at the start of a step. The
    mean gradient is projected together with the direction, so ``"running"`` measures in the basis at the end.
    """

    def __init__(
        self, name: str, factor_decay: float = 0.95, scale_decay: float | None = None, estimator: str = "intra",
        weighting: str = "samples", limit: int | None = None,
    ) -> None:  # fmt: skip
        self.limit = limit  # size above which a side keeps the diagonal of its factor
        self.name, self.factor_decay, self.estimator, self.weighting = name, factor_decay, estimator, weighting
        self.scale_decay = factor_decay if scale_decay is None else scale_decay
        self.A = self.B = self.Q_A = self.Q_B = self.s = None
        self.W = self.W_s = 0.0

    def step(self, plain: nn.Module, x: Tensor, y: Tensor, loss: Loss, due: str = "fsr") -> None:
        """``due`` contains a letter for each update: f(actors), s(cales), r(efresh)."""
        weight = len(x) if self.weighting == "samples" else 1
        if "f" in due:
            A, B = expected_factors(plain, x, y, loss, names=[self.name])[self.name]
            self.W = self.factor_decay * self.W + weight
            self.A = A if self.A is None else self.A + weight / self.W * (A - self.A)
            self.B = B if self.B is None else self.B + weight / self.W * (B - self.B)
        for what in "sr" if self.estimator == "intra" else "rs":
            if what in due:
                self.refresh() if what == "r" else self.measure(plain, x, y, loss, weight)

    def measure(self, plain: nn.Module, x: Tensor, y: Tensor, loss: Loss, weight: float) -> None:
        if self.Q_A is not None:
            found = measured_scales(plain, self.name, x, y, (self.Q_B, self.Q_A), self.estimator, loss)
            self.W_s = self.scale_decay * self.W_s + weight
            # the first measurement has a share of 1, which removes the placeholder
            self.s = self.s + weight / self.W_s * (found - self.s)

    def refresh(self) -> None:
        old = None if self.Q_A is None else self.operator()
        values_a, self.Q_A = eigenbasis(self.A, self.limit)
        values_b, self.Q_B = eigenbasis(self.B, self.limit)
        start = values_b[..., :, None] * values_a[..., None, :]
        self.s = start if old is None else diagonal_in(old, self.Q_B, self.Q_A, start)

    def operator(self) -> Tensor:
        return operator(self.Q_B, self.s, self.Q_A)


def measured_scales(
    model: nn.Module, name: str, x: Tensor, y: Tensor, bases: tuple[Tensor, Tensor], estimator: str, loss: Loss
) -> Tensor:
    """s of one batch: from its examples (``"intra"``), or N times that of their mean (``"running"``)."""
    G = layer_gradients(model, name, x, y, loss)
    return scales(G if estimator == "intra" else len(x) ** 0.5 * G.mean(0, keepdim=True), *bases)
