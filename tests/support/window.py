"""Helpers that drive the window methods with gradients set by hand, and read their state."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

Shapes = Sequence[tuple[int, ...]]


def parameters(shapes: Shapes, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that every dtype from float32 up represents."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.float().to(dtype)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in (t.detach() for t in tensors)]
    return torch.cat([part.reshape(-1).double() for part in parts])


def put(params: Sequence[nn.Parameter], vector: Tensor) -> None:
    """Set the values of the parameters."""
    with torch.no_grad():
        for p, part in zip(params, vector.split([p.numel() for p in params]), strict=True):
            p.copy_(part.reshape(p.shape))


def give(params: Sequence[nn.Parameter], gradient: Tensor) -> None:
    for p, part in zip(params, gradient.split([p.numel() for p in params]), strict=True):
        p.grad = part.reshape(p.shape).to(p.dtype)


def push(
    opt: torch.optim.Optimizer, params: Sequence[nn.Parameter], gradient: Tensor, missing: Iterable[int] = ()
) -> Tensor:
    """Return what a step subtracts; the missing parameters have no gradient. All start at zero, so no digit is lost."""
    put(params, torch.zeros(len(gradient)))
    give(params, gradient)
    for i in missing:
        params[i].grad = None
    opt.step()
    return -flat(params)


def spans(params: Sequence[nn.Parameter]) -> list[list[int]]:
    """Columns of every parameter in the flat vector of all."""
    ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
    return [list(range(end - p.numel(), end)) for p, end in zip(params, ends, strict=True)]


def columns_of(params: Sequence[nn.Parameter], unit: Sequence[int]) -> list[int]:
    every = spans(params)
    return [column for index in unit for column in every[index]]


# --------------------------------------------------------------------------------------------- Contents of state_dict()
def states(opt: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return opt.state_dict()["state"]


def _rows(value: Tensor, index: Tensor | None, length: int) -> Tensor:
    """Panels ``[n, m, w]`` to rows ``[m, n · length]``; without an index, they contain whole blocks."""
    value = value.double()
    if index is not None:
        value = value.new_zeros(*value.shape[:2], length).scatter_(2, index.long(), value)
    return value.transpose(0, 1).flatten(1)


def stored_rows(state: dict[str, Any], numel: int, block_size: int = 0) -> Tensor:
    """The ring of one parameter as float64 ``[m, numel]``, from the entries of its state."""
    if "window_p" in state:
        product = torch.einsum("mra,mrb->mab", state["window_p"].double(), state["window_q"].double())
        return product.reshape(len(product), -1)
    if "window" in state:
        return state["window"].double().reshape(len(state["window"]), -1)
    parts = []
    for kind, length in (("window", block_size), ("tail", numel % block_size if block_size else 0)):
        if f"{kind}_val" in state:
            parts.append(_rows(state[f"{kind}_val"], state.get(f"{kind}_idx"), length))
    rows = torch.cat(parts, dim=1)
    assert rows.shape[1] == numel
    return rows


def ring(
    opt: torch.optim.Optimizer, params: Sequence[nn.Parameter], unit: Sequence[int], block_size: int = 0
) -> Tensor:
    """The ring of a unit ``[m, d]``, in the order of its slots."""
    state = states(opt)
    return torch.cat([stored_rows(state[i], params[i].numel(), block_size) for i in unit], dim=1)


def slots(opt: torch.optim.Optimizer, unit: Sequence[int]) -> list[int]:
    """The filled slots, from the oldest to the newest row."""
    state = states(opt)[unit[0]]
    m, pos, count = window_size(state), int(state["pos"]), int(state["count"])
    t = min(count, m)
    return [(pos - t + i) % m for i in range(t)]


def window_size(state: dict[str, Any]) -> int:
    entries = state["gram"].numel()
    return int((2 * entries + 0.25) ** 0.5)


def history(
    opt: torch.optim.Optimizer, params: Sequence[nn.Parameter], unit: Sequence[int], block_size: int = 0
) -> Tensor:
    """The filled rows of a unit from the oldest to the newest."""
    return ring(opt, params, unit, block_size)[slots(opt, unit)]


def gram(state: dict[str, Any]) -> Tensor:
    """The packed lower triangle as a full matrix."""
    m = window_size(state)
    full = torch.zeros(m, m, dtype=torch.float64)
    row, column = torch.tril_indices(m, m)
    full[row, column] = state["gram"]
    return full + full.tril(-1).mT


def residual(state: dict[str, Any], numel: int) -> Tensor:
    """The error feedback of one parameter, ``[numel]``."""
    parts = [state[key].double().reshape(-1) for key in ("error", "tail_error") if key in state]
    found = torch.cat(parts) if parts else torch.zeros(numel, dtype=torch.float64)
    assert found.numel() == numel
    return found


# ---------------------------------------------------------------------------------------------------------- Comparisons
def error_of(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    expected = expected.double()
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / (expected.norm() or 1.0))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9, what: Any = "") -> None:
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    error = error_of(actual, expected)
    assert error <= tolerance, f"{what}: relative error {error:.3g} > {tolerance:g}"


def differences(one: dict[str, Any], two: dict[str, Any]) -> set[str]:
    """Keys of the state that are not bitwise equal."""
    found = set()
    assert one["state"].keys() == two["state"].keys()
    for index, a in one["state"].items():
        b = two["state"][index]
        assert a.keys() == b.keys()
        found |= {k for k in a if not (same(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k])}
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def size(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes)
