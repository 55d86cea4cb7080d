"""K-FAC's quantities computed from their definitions, in plain loops and without code of the package.

The model sees one example at a time, and autograd computes the gradient of *that example's* loss at the layer's output.
Patches of convolutions are gathered by index arithmetic, one kernel offset at a time. No code here is vectorized over
examples, so it cannot share scaling errors with vectorized code.

    symbol          shape               meaning
    a               [n_a]               one homogeneous input row of the layer (the 1 last, iff its bias is trained)
    g               [n_g]               gradient of the per-example loss at the matching output row
    A, B            [Γ, n_a, n_a], ...  the two Kronecker factors, one pair per group Γ of a convolution
    N, S            int                 examples, rows per example (positions and calls)
    vec             [n_g · n_a]         row-major over [W | b]
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


# ---------------------------------------------------------------------------------------------------- Rows of one layer


@dataclass
class Rows:
    """The rows of every example at one layer: ``a[n]`` is ``[Γ, S_n, n_a]``, ``g[n]`` is ``[Γ, S_n, n_g]``.

    For K columns of an output Hessian in place of one loss, ``g[n]`` is ``[K, Γ, S_n, n_g]``, and sums include K.
    """

    a: list[Tensor]
    g: list[Tensor]

    def gradient(self, n: int, approx: str = "expand") -> Tensor:
        """Σ_s g aᵀ of example n: the gradient of its loss, ``[Γ, n_g, n_a]``, or of each column.

        With "reduce", it is (Σ_s g)(mean a)ᵀ.
        """
        a, g = self.a[n], self.g[n]
        if approx == "reduce":
            a, g = a.sum(-2, True) / max(a.shape[-2], 1), g.sum(-2, True)
        return g.mT @ a

    def mean_gradient(self) -> Tensor:
        return sum(self.gradient(n) for n in range(len(self.a))) / len(self.a)


def source_index(i: int, size: int, mode: str) -> int | None:
    """The index of the source of element ``i`` of the padded axis; ``None`` for a zero."""
    if 0 <= i < size:
        return i
    reflected = -i if i < 0 else 2 * (size - 1) - i
    return {"zeros": None, "circular": i % size, "replicate": min(max(i, 0), size - 1), "reflect": reflected}[mode]


def paddings(layer: nn.Module) -> list[tuple[int, int]]:
    """(before, after) of every spatial axis."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(t // 2, t - t // 2) for t in totals]
    return [(p, p) for p in layer.padding]


def conv_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """Patches of one example ``x`` of shape ``[C, *spatial]`` as ``[Γ, S, C/Γ · k]``, a row ordered (c, k...)."""
    axes = list(zip(x.shape[1:], paddings(layer), layer.dilation, layer.kernel_size, layer.stride, strict=True))
    counts = [(size + sum(pads) - d * (k - 1) - 1) // stride + 1 for size, pads, d, k, stride in axes]
    rows = []
    for position in itertools.product(*map(range, counts)):
        columns = []
        for offset in itertools.product(*map(range, layer.kernel_size)):
            index = [
                source_index(at * stride + j * d - before, size, layer.padding_mode)
                for at, j, (size, (before, _), d, _, stride) in zip(position, offset, axes, strict=True)
            ]
            outside = any(i is None for i in index)
            columns.append(x.new_zeros(x.shape[0]) if outside else x[(slice(None), *index)])
        rows.append(torch.stack(columns, dim=-1))  # [C, k]
    patches = torch.stack(rows)  # [S, C, k]
    grouped = patches.reshape(len(rows), layer.groups, -1)  # channels of a group are neighbours
    return grouped.transpose(0, 1)


def input_rows(layer: nn.Module, x: Tensor, example: bool = True) -> Tensor:
    """Rows of one example's layer input ``x`` (batch axis of 1 iff ``example``), without the homogeneous 1."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    return conv_rows(layer, x[0] if example else x)


def output_rows(layer: nn.Module, g: Tensor, example: bool = True) -> Tensor:
    """Rows ``[Γ, S, n_g]`` of the gradient at one example's layer output."""
    if isinstance(layer, nn.Linear):
        return g.reshape(1, -1, g.shape[-1])
    g = g[0] if example else g
    return g.reshape(layer.groups, g.shape[0] // layer.groups, -1).mT


def homogeneous(layer: nn.Module, rows: Tensor) -> Tensor:
    """Append the 1 iff the bias is trained; if the weight is frozen, return only the 1."""
    ones = rows.new_ones(*rows.shape[:-1], 1)
    trained_bias = layer.bias is not None and layer.bias.requires_grad
    if not layer.weight.requires_grad:
        return ones
    return torch.cat([rows, ones], dim=-1) if trained_bias else rows


def recorded(model: nn.Module, names: Iterable[str]) -> list[tuple[str, Tensor, Tensor]]:
    """A list to which every call of these layers from now on adds its name, its input and its output."""
    calls: list[tuple[str, Tensor, Tensor]] = []
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: calls.append((name, args[0].detach().clone(), output))
        )
    return calls


Columns = Callable[[Any, Any], list[tuple[Tensor, ...]]]


def example_rows(
    model: nn.Module, names: Iterable[str], x: Tensor, y: Any, loss: Loss | None, batched: bool = True,
    columns: Columns | None = None,
) -> dict[str, Rows]:  # fmt: skip
    """Run a copy of ``model`` on one example after the other, and collect rows and gradients of the named layers.

    ``loss(output, target)`` of a batch of one is that example's loss ℓ_n, whatever the reduction is. With
    ``batched=False`` all of ``x`` is one example without a batch axis. If ``columns`` is given, the gradients that it
    returns for the outputs and targets of an example replace that of the loss.
    """
    model = copy.deepcopy(model)
    calls = recorded(model, names)
    collected = {name: Rows([], []) for name in names}
    for x_n, y_n in [(x[n : n + 1], one_example(y, n)) for n in range(len(x))] if batched else [(x, y)]:
        calls.clear()
        outputs = model(x_n)
        taps = [output for _, _, output in calls]
        starts = (
            [(loss(outputs, y_n), None)] if columns is None else [(heads(outputs), v) for v in columns(outputs, y_n)]
        )
        every = [
            torch.autograd.grad(of, taps, v, retain_graph=True, allow_unused=True, materialize_grads=True)
            for of, v in starts
        ]
        for name, rows in collected.items():
            layer = model.get_submodule(name)
            mine = [i for i, (called, _, _) in enumerate(calls) if called == name]
            rows.a.append(torch.cat([homogeneous(layer, input_rows(layer, calls[i][1], batched)) for i in mine], 1))
            g = torch.stack([torch.cat([output_rows(layer, of[i], batched) for i in mine], 1) for of in every])
            rows.g.append(g[0] if columns is None else g)
    return collected


def heads(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def one_example(y: Any, n: int) -> Any:
    return tuple(part[n : n + 1] for part in y) if isinstance(y, tuple) else y[n : n + 1]


# --------------------------------------------------------------------------------------------- Factors and dense blocks


def factors(rows: Rows, approx: str = "expand", loss_terms: int = 1) -> tuple[Tensor, Tensor]:
    """(A, B) of per-example rows; ``loss_terms`` multiplies B (mean-reduced losses only)."""
    n = len(rows.a)
    if approx == "expand":
        total = sum(a.shape[1] for a in rows.a)
        A = sum(a.mT @ a for a in rows.a) / total
        products = [g.mT @ g for g in rows.g]
    else:
        means = [a.sum(1) / max(a.shape[1], 1) for a in rows.a]  # an example without a row adds nothing
        A = sum(a[:, :, None] * a[:, None, :] for a in means) / n
        products = [g.sum(-2)[..., None] * g.sum(-2)[..., None, :] for g in rows.g]
    B = sum(product.sum(0) if product.ndim == 4 else product for product in products) / n
    return A, loss_terms * B


def without_groups(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the axis of groups if there is only one group."""
    return (A[0], B[0]) if len(A) == 1 else (A, B)


def expected_factors(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, names: list[str] | None = None, approx: str = "expand",
    loss_terms: int = 1,
) -> dict[str, tuple[Tensor, Tensor]]:  # fmt: skip
    """(A, B) of every Linear and Conv layer; the group axis is dropped where there is one group."""
    names = covered_names(model) if names is None else names
    found = example_rows(model, names, x, y, loss)
    return {name: without_groups(*factors(rows, approx, loss_terms)) for name, rows in found.items()}


def covered_names(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def grouped(matrix: Tensor) -> Tensor:
    """``[n, n]`` as ``[1, n, n]``; a stack of groups stays as it is."""
    return matrix if matrix.ndim == 3 else matrix[None]


def kron(B: Tensor, A: Tensor) -> Tensor:
    """Dense ``[n, n]`` curvature over row-major vec([W | b]): Γ Kronecker products along the diagonal."""
    return torch.block_diag(*(torch.kron(b, a) for b, a in zip(grouped(B), grouped(A), strict=True)))


# --------------------------------------------------- Gradients of a layer as [n_g, n_a], and their expected directions


def joined(weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``[W | b]``: the weight flattened behind its first axis, the bias as last column."""
    parts = [] if weight is None else [weight.flatten(1)]
    if bias is not None:
        parts.append(bias[:, None])
    return torch.cat(parts, dim=1)


def layer_gradient(layer: nn.Module) -> Tensor:
    """∇ over [W | b] of the trained parameters, from ``.grad``."""
    return joined(*(None if p is None or not p.requires_grad else p.grad for p in (layer.weight, layer.bias)))


def layer_values(layer: nn.Module) -> Tensor:
    """The trained parameters [W | b] themselves."""
    chosen = (None if p is None or not p.requires_grad else p.detach().clone() for p in (layer.weight, layer.bias))
    return joined(*chosen)


def solve(F: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """(F + λI)⁻¹ vec(∇)."""
    identity = torch.eye(len(F), dtype=F.dtype)
    return torch.linalg.solve(F + damping * identity, gradient.reshape(-1)).view_as(gradient)


def solve_exact(B: Tensor, A: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """(B ⊗ A + λI)⁻¹ vec(∇)."""
    return solve(kron(B, A), gradient, damping)


def pi_factors(B: Tensor, A: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The damped pair of one group: B + (√λ/π)I and A + π√λ I."""
    mean_a, mean_b = (float(X.trace()) / len(X) for X in (A, B))
    usable = mean_a > 0 and mean_b > 0 and math.isfinite(mean_a) and math.isfinite(mean_b)
    pi = min(max(math.sqrt(mean_a / mean_b), 1e-6), 1e6) if usable else 1.0
    root = math.sqrt(damping)
    eye_a, eye_b = (torch.eye(len(X), dtype=X.dtype) for X in (A, B))
    return B + root / pi * eye_b, A + pi * root * eye_a


def solve_pi(B: Tensor, A: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """The inverse of the product of the two damped factors, by a dense solve."""
    pairs = [pi_factors(b, a, damping) for b, a in zip(grouped(B), grouped(A), strict=True)]
    return solve(torch.block_diag(*(torch.kron(b, a) for b, a in pairs)), gradient, 0.0)


# --------------------------------------------------------------------------------------------------------------- Losses


@dataclass(frozen=True)
class Objective:
    """A torch loss, and the options under which the library agrees with curvlinops."""

    module: nn.Module
    loss_reduction: str
    loss_terms: int
    classes: bool

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.module(output, target)

    def targets(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Targets for outputs of ``shape``, classes on the last axis for MSE, on axis 1 for cross entropy."""
        if not self.classes:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)
        return torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)


def objective(kind: str, reduction: str, outputs: int) -> Objective:
    """``kind`` of "ce" or "mse" for ``outputs`` output features."""
    if kind == "ce":
        return Objective(nn.CrossEntropyLoss(reduction=reduction), reduction, 1, True)
    return Objective(nn.MSELoss(reduction=reduction), reduction, outputs if reduction == "mean" else 1, False)
