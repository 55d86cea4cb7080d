"""HyLo's quantities from their definitions: per-example gradients, dense matrices, explicit inverses.

No product of small matrices replaces a large one: the curvature of a block is a dense matrix over all entries of its
parameters, and every low-rank form is converted to the dense operator that it represents.

    symbol  shape           meaning
    U       [Γ, m, k]       gradients of the examples' own losses in the parameters of a block, one set per group
    F       [Γ, k, k]       UᵀU / m
    K       [m, m]          U Uᵀ of one group, not divided by anything
    V       [Γ, k]          what is preconditioned
    I       [r]             indices of the rows that a method keeps
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from secondorder import HyLo
from tests.support.building import built
from tests.support.kfac import assert_close
from tests.support.oracles.ekfac import NORMS, as_matrices, example_gradients
from tests.support.oracles.kfac import example_rows

Loss = Callable[[Tensor, Tensor], Tensor]
Found = dict[str, Tensor]

# Defaults of the tests: the exact method, with a refresh at every step, on a model whose parameters stay fixed.
PLAIN = {"lr": 0.0, "momentum": 0.0, "damping": 1e-2, "mode": "sngd", "approx": "expand", "update_steps": 1}
LATER = 10**6  # an interval that no test reaches

#: All ways to choose rows, some of which keep only one row or all of them.
MODES = {
    "sngd": {"mode": "sngd"},
    "auto": {"mode": "auto", "rank_fraction": 0.4},
    **{f"kid {r}": {"mode": "kid", "rank_fraction": 0.4, "kid_residual": r} for r in ("none", "diag", "full")},
    **{f"kid {p}": {"mode": "kid", "rank_fraction": 0.4, "kid_pivoting": p} for p in ("qr", "score")},
    "kid of one": {"mode": "kid", "rank_fraction": 1e-3},
    "kid all": {"mode": "kid", "rank_fraction": 1.0},
    "kid all, no residual": {"mode": "kid", "rank_fraction": 1.0, "kid_residual": "none"},
    **{
        f"kis {s}": {"mode": "kis", "rank_fraction": 0.4, "kis_sampling": s}
        for s in ("systematic", "replacement", "unweighted", "uniform")
    },
    "kis of one": {"mode": "kis", "rank_fraction": 1e-3},
    "kis all": {"mode": "kis", "rank_fraction": 1.0},
}


# ----------------------------------------------------------------------------------------------------------------- Rows


def as_rows(model: nn.Module, name: str, found: Found) -> Tensor:
    """``[Γ, N, k]`` of values ``[N, *shape]`` of a layer's parameters, in the order of ``dense_curvature``."""
    layer = model.get_submodule(name)
    prefix = f"{name}." if name else ""
    weight, bias = found.get(prefix + "weight"), found.get(prefix + "bias")
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return weight.flatten(1)[None]
    matrices = as_matrices(layer, weight, bias)
    if isinstance(layer, NORMS):  # one block for all units
        return matrices.flatten(1)[None]
    return matrices.transpose(0, 1).flatten(2)


def layer_rows(
    model: nn.Module, name: str, inputs: Sequence[Tensor] | Tensor, y: Tensor, loss: Loss, approx: str = "expand"
) -> Tensor:
    """U of a layer: from full gradients, or from those that ``reduce`` computes from several positions."""
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    if approx == "expand" or isinstance(model.get_submodule(name), (*NORMS, nn.Embedding, nn.EmbeddingBag)):
        return as_rows(model, name, example_gradients(model, inputs, y, loss))
    rows = example_rows(model, [name], *inputs, y, loss)[name]
    return torch.stack([rows.gradient(n, approx) for n in range(len(y))], 1).flatten(2)


def vectors_of(model: nn.Module, name: str, kept: Found) -> tuple[Tensor, Tensor]:
    """V ``[Γ, k]`` of a layer, and its direction."""
    gradient, moved = (as_rows(model, name, one(values))[:, 0] for values in (gradients(model), kept))
    return gradient, moved


def one(values: Found) -> Found:
    """As a batch of one."""
    return {name: value.detach()[None] for name, value in values.items()}


def gradients(model: nn.Module) -> Found:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ----------------------------------------------------------------------------------------------------- The exact method


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def fisher(U: Tensor) -> Tensor:
    """``[Γ, k, k]``."""
    return U.mT @ U / U.shape[-2]


def dense(blocks: Tensor) -> Tensor:
    return torch.block_diag(*blocks)


def solve(F: Tensor, V: Tensor, damping: float) -> Tensor:
    """(F + λI)⁻¹ V of every group."""
    return torch.linalg.solve(F + damping * eye(F.shape[-1]), V[..., None])[..., 0]


def sngd(U: Tensor, V: Tensor, damping: float) -> Tensor:
    return solve(fisher(U), V, damping)


def steepest(U: Tensor) -> float:
    """λ₁, the largest eigenvalue of all groups' F."""
    return float(torch.linalg.eigvalsh(U @ U.mT / U.shape[-2]).max())


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# -------------------------------------------------------------------------------------------------------- Interpolation


def greedy(K: Tensor, rank: int, floor: float = 1e-10) -> list[int]:
    """Pivots, each with the largest diagonal entry of the residual of K after the previous ones."""
    chosen: list[int] = []
    for _ in range(rank):
        left = K.diagonal() if not chosen else interpolation(K, chosen)[1].diagonal()
        if float(left.max()) <= floor * float(K.diagonal().max()):
            break
        chosen.append(int(left.argmax()))
    return chosen


def interpolation(K: Tensor, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """P with K ≈ Pᵀ K[I, I] P, and the residual of K."""
    P = torch.linalg.solve(K[chosen][:, chosen], K[chosen])
    return P, K - K[:, chosen] @ P


def kid_operator(U: Tensor, chosen: list[int], damping: float, residual: str = "diag") -> Tensor:
    """The dense matrix that maps V to the update, for one group ``[m, k]``."""
    m, K = len(U), U @ U.mT
    P, E = interpolation(K, chosen)
    D = damping * eye(m) + {"none": 0 * E, "diag": E.diagonal().diag(), "full": E}[residual] / m
    S = P @ torch.linalg.inv(D) @ P.mT
    M = torch.linalg.inv(torch.linalg.inv(S) + K[chosen][:, chosen] / m)
    return (eye(U.shape[1]) - U[chosen].mT @ M @ U[chosen] / m) / damping


def curvature_of(operator: Tensor, damping: float) -> Tensor:
    """F̂ of an update operator (F̂ + λI)⁻¹."""
    return torch.linalg.inv(operator) - damping * eye(len(operator))


# ------------------------------------------------------------------------------------------------------------- Sampling


def inclusion(q: Tensor, rank: int) -> Tensor:
    """π: proportional to q, at most 1, with the sum r (or the number of positive scores)."""
    wanted = min(rank, int((q > 0).sum()))
    certain = torch.zeros_like(q, dtype=torch.bool)
    while True:
        share = torch.where(certain, 0.0, q)
        left = wanted - int(certain.sum())
        pi = torch.where(certain, 1.0, left * share / share.sum() if left else share * 0)
        over = ~certain & (pi >= 1)
        if not bool(over.any()):
            return pi
        certain |= over


def shares(F: Tensor, U: Tensor) -> Tensor:
    """c with F = Σ c_s u_s u_sᵀ / m, of one group; u_s uₛᵀ are linearly independent where the u_s are."""
    products = torch.stack([torch.outer(u, u).reshape(-1) for u in U], -1) / len(U)
    found = torch.linalg.lstsq(products, F.reshape(-1, 1)).solution[:, 0]
    assert_close(products @ found, F.reshape(-1), 1e-8, "a sum over the rows")
    return found


# --------------------------------------------------------------------------------------------------------- Driving HyLo


def plain_hylo(params, **keywords) -> HyLo:
    return built(HyLo, params, **{**PLAIN, **keywords})


def taken(opt: HyLo) -> Found:
    """Take a step with the current gradients; return the directions by parameter name."""
    with opt.keep_directions() as kept:
        opt.step()
    return dict(kept)


def step(opt: HyLo, model: nn.Module, inputs: Sequence[Tensor] | Tensor, y: Tensor, loss: Loss) -> Found:
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    opt.zero_grad()
    loss(model(*inputs), y).backward()
    return taken(opt)


def with_gradient(opt: HyLo, model: nn.Module, seed: int) -> Found:
    """Directions of random gradients without a backward pass, which are sufficient between refreshes."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    return taken(opt)


def flat(values: Found) -> Tensor:
    return torch.cat([values[name].detach().flatten() for name in sorted(values)])


def check(
    build: Callable[[], nn.Module],
    inputs: Sequence[Tensor] | Tensor,
    y: Tensor,
    loss: Loss,
    names: Sequence[str],
    approx: str = "expand",
    tolerance: float = 1e-8,
    **keywords,
) -> tuple[HyLo, nn.Module]:
    """Direction and dense curvature of some layers, each under its name, against the dense solve."""
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    damping = keywords.get("damping", PLAIN["damping"])
    model, plain = build(), build()
    opt = plain_hylo(model, approx=approx, **keywords)
    kept = step(opt, model, inputs, y, loss)
    for name in names:
        U = layer_rows(plain, name, inputs, y, loss, approx)
        check_block(opt, model, name, U, kept, damping, tolerance)
    return opt, model


def check_block(
    opt: HyLo, model: nn.Module, name: str, U: Tensor, kept: Found, damping: float, tolerance: float = 1e-8
) -> None:
    compare(opt, name, U, *vectors_of(model, name, kept), damping, tolerance)


def compare(opt: HyLo, name: str, U: Tensor, V: Tensor, moved: Tensor, damping: float, tolerance: float = 1e-8) -> None:
    expected = sngd(U, V, damping)
    assert error(V / damping, expected) > 1e-3, f"{name}: the damping is too large for this test"
    assert_close(moved, expected, tolerance, f"direction of {name!r}")
    assert_close(opt.dense_curvature(name), dense(fisher(U)), tolerance, f"curvature of {name!r}")
