"""The documented formulas for the state keys and bytes of blocks and windows, independent of the package."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.support.oracles.window import kept_entries
from tests.support.tasks import LENGTH, Attention, Cnn, covered_layers

Sizes = Callable[[nn.Module, torch.dtype], Mapping[str, set[int]]]


def compute_bytes(dtype: torch.dtype) -> int:
    """Bytes of a number in the precision of the computation, which is at least single precision."""
    return 8 if dtype is torch.float64 else 4


# ---------------------------------------------------------------------------------------------------- Kronecker factors


class Shape(NamedTuple):
    """Sizes of a block: its factors, the number of their pairs, and whether that of the inputs is diagonal."""

    n_a: int
    n_g: int
    pairs: int = 1
    diagonal: bool = False


def shape_of(layer: nn.Module) -> Shape:
    """The shape of a Linear, ungrouped Conv, Embedding or LayerNorm layer whose parameters are all trained."""
    if isinstance(layer, nn.Embedding):
        return Shape(layer.num_embeddings, layer.embedding_dim, diagonal=True)
    if isinstance(layer, nn.LayerNorm):  # a pair per unit, over the gradients of gain and shift
        return Shape(1, 1 + (layer.bias is not None), pairs=layer.weight.numel())
    return Shape(layer.weight[0].numel() + (layer.bias is not None), layer.weight.shape[0])


def shapes(model: nn.Module) -> list[Shape]:
    """The shapes of all blocks."""
    return [shape_of(model.get_submodule(name)) for name in covered_layers(model)]


def squares(block: Shape) -> int:
    """Number of entries of both factors, or of their inverses."""
    return block.pairs * (block.n_a ** (1 if block.diagonal else 2) + block.n_g**2)


def bases(block: Shape) -> int:
    """Number of entries of eigenvectors and eigenvalues; a diagonal factor has no eigenvectors."""
    eigenvectors = squares(block) - (block.n_a if block.diagonal else 0)
    return eigenvectors + block.pairs * (block.n_a + block.n_g)


def leading(block: Shape, rank: int) -> int:
    """Number of entries of the leading eigenvectors of wide factors, their eigenvalues and the mean of the others."""
    a = block.n_a if block.diagonal else _leading(block.n_a, rank)
    return block.pairs * (a + _leading(block.n_g, rank))


def _leading(n: int, rank: int) -> int:
    return n * rank + rank + 1 if n > 2 * rank else n * n + n


def entries(block: Shape) -> int:
    """Number of entries of a tensor with the shape of the gradient."""
    return block.pairs * block.n_a * block.n_g


def kronecker(numbers: Mapping[str, Callable[[Shape], int]]) -> Sizes:
    """The bytes of all blocks by kind of `memory_usage()`, from the number of entries of a block."""

    def sizes(model: nn.Module, dtype: torch.dtype) -> dict[str, set[int]]:
        found = shapes(model)
        expected = {kind: {compute_bytes(dtype) * sum(map(of, found))} for kind, of in numbers.items()}
        # one float64 count of samples per block may be reported with the factors
        expected["factors"] |= {size + 8 * len(found) for size in expected["factors"]}
        return expected

    return sizes


# ----------------------------------------------------------------------------------------------------- Rows of examples


def positions_of(model: nn.Module, name: str) -> int:
    """Positions per example in a layer of the tasks."""
    if isinstance(model, Attention):
        return LENGTH
    return {"first": 4 * 4, "second": 2 * 2}.get(name, 1) if isinstance(model, Cnn) else 1


@dataclass(frozen=True)
class Kept:
    """Rows of a block, and their kernel."""

    rows: int
    substitutes: bool = False  # whether a block has factors if those are cheaper
    at_once: bool = True  # whether sizes are known before the first batch: `batch_size`, and a mean over positions

    def factors_for(self, layer: nn.Module) -> bool:
        """Whether factors replace the rows of a layer because they take less memory or time."""
        if not self.substitutes or isinstance(layer, (nn.Embedding, nn.LayerNorm)):
            return False
        block = shape_of(layer)
        memory = self.rows * (block.n_a + block.n_g) >= block.n_a**2 + block.n_g**2
        return memory or self.rows**3 >= block.n_a**3 + block.n_g**3

    def bytes_of(self, layer: nn.Module, positions: int, number: int) -> int:
        """The bytes of the rows of a layer with this number of positions per example."""
        if isinstance(layer, nn.LayerNorm):  # gradients of all units at once
            return self.rows * number * sum(p.numel() for p in layer.parameters())
        block = shape_of(layer)
        if self.at_once or positions == 1:
            return self.rows * number * (block.n_a + block.n_g)
        if block.diagonal and block.n_a > positions:  # an index instead of a one-hot vector
            return self.rows * positions * (8 + number * block.n_g)
        by_gradients = block.diagonal or positions**2 * (block.n_a + block.n_g) >= block.n_a * block.n_g
        numbers = block.n_a * block.n_g if by_gradients else positions * (block.n_a + block.n_g)
        return self.rows * number * numbers


def kept_rows(kept: Kept) -> Sizes:
    """The bytes of the rows and kernels by kind of `memory_usage()`, before and after the first batch."""

    def sizes(model: nn.Module, dtype: torch.dtype) -> dict[str, set[int]]:
        number = compute_bytes(dtype)
        layers = {name: model.get_submodule(name) for name in covered_layers(model)}
        factored = [shape_of(layer) for layer in layers.values() if kept.factors_for(layer)]
        with_rows = {name: layer for name, layer in layers.items() if not kept.factors_for(layer)}

        rows = sum(kept.bytes_of(layer, positions_of(model, name), number) for name, layer in with_rows.items())
        dampings = 8 * len(with_rows)  # reported with the kernels
        expected = {"rows": {rows}, "kernel": {dampings * (kept.rows**2 + 1) + 8 * len(factored)}}
        if not kept.at_once:
            expected = {kind: found | {dampings if kind == "kernel" else 0} for kind, found in expected.items()}
        if factored:
            expected["factors"] = {number * sum(map(squares, factored))}
            expected["second_order"] = {number * sum(map(bases, factored))}
        return expected

    return sizes


# ----------------------------------------------------------------------------------------------------- Gradient windows

UNIT_STATE = frozenset({"gram", "pos", "count", "skipped", "solve_failures", "amplification"})
MOMENTUM_STATE = frozenset({"momentum_coefficients", "dots_momentum", "momentum_weight"})  # of gradients, per unit
UNIT_DTYPES = dict.fromkeys(UNIT_STATE | MOMENTUM_STATE, torch.float64)
UNIT_DTYPES |= dict.fromkeys(("pos", "count", "skipped", "solve_failures"), torch.int64)


@dataclass(frozen=True)
class Storage:
    """Rows of a window without compression."""

    rows: torch.dtype | None = None  # of the stored values; None for that of the computation

    def keys(self, parameter: Tensor) -> set[str]:
        return {"window"}

    def dtypes(self, compute: torch.dtype) -> dict[str, torch.dtype]:
        """The dtypes of all keys that any parameter may have."""
        return {"window": self.rows or compute, "gradient_momentum": compute, **UNIT_DTYPES}

    def window_bytes(self, parameter: Tensor, rows: int, number: int) -> int:
        return rows * parameter.numel() * (self.rows.itemsize if self.rows else number)

    def error_bytes(self, parameter: Tensor, number: int) -> int:
        return 0


@dataclass(frozen=True)
class Sparse(Storage):
    """The largest entries of every block of a parameter, and the error feedback."""

    density: float = 0.01
    block: int = 4096
    bits: int | None = None

    def blocks(self, parameter: Tensor) -> list[tuple[str, int]]:
        """The prefix of the keys, and the length, of every block."""
        full, rest = divmod(parameter.numel(), self.block)
        return [("window", self.block)] * full + [("tail", rest)] * bool(rest)

    def keys(self, parameter: Tensor) -> set[str]:
        found = set()
        for prefix, _ in self.blocks(parameter):
            error = "error" if prefix == "window" else "tail_error"
            found |= {f"{prefix}_idx", f"{prefix}_val", error} | ({f"{error}_range"} if self.bits else set())
        return found

    def dtypes(self, compute: torch.dtype) -> dict[str, torch.dtype]:
        values, index = self.rows or compute, torch.int16 if self.block <= 32768 else torch.int32
        error = torch.uint8 if self.bits else compute
        ranges = {"error_range": torch.bfloat16, "tail_error_range": torch.bfloat16}
        sparse = {"window_idx": index, "tail_idx": index, "window_val": values, "tail_val": values}
        return {**super().dtypes(compute), **sparse, "error": error, "tail_error": error, **ranges}

    def window_bytes(self, parameter: Tensor, rows: int, number: int) -> int:
        index = 2 if self.block <= 32768 else 4
        each = (self.rows.itemsize if self.rows else number) + index
        return rows * each * sum(kept_entries(length, self.density, self.block) for _, length in self.blocks(parameter))

    def error_bytes(self, parameter: Tensor, number: int) -> int:
        lengths = [length for _, length in self.blocks(parameter)]
        if self.bits is None:
            return number * sum(lengths)
        return sum(math.ceil(length * self.bits / 8) + math.ceil(length / 128) * 2 * 2 for length in lengths)


@dataclass(frozen=True)
class Factored(Storage):
    """Matrices as products of two thin ones, if this makes them smaller."""

    rank: int = 4

    def shape(self, parameter: Tensor) -> tuple[int, int, int] | None:
        """`(r, n0, n1)`, or None for a parameter that is not factored."""
        if parameter.ndim < 2:
            return None
        n0, n1 = parameter.shape[0], parameter[0].numel()
        rank = min(self.rank, n0, n1)
        return None if rank * (n0 + n1) >= n0 * n1 else (rank, n0, n1)

    def keys(self, parameter: Tensor) -> set[str]:
        factors = {"window_p", "window_q", "q_prev", "error"}
        return {"window"} if self.shape(parameter) is None else factors

    def dtypes(self, compute: torch.dtype) -> dict[str, torch.dtype]:
        return {**super().dtypes(compute), **dict.fromkeys(("window_p", "window_q", "q_prev", "error"), compute)}

    def window_bytes(self, parameter: Tensor, rows: int, number: int) -> int:
        found = self.shape(parameter)
        if found is None:
            return super().window_bytes(parameter, rows, number)
        rank, n0, n1 = found
        return rows * rank * (n0 + n1) * number

    def error_bytes(self, parameter: Tensor, number: int) -> int:
        return 0 if self.shape(parameter) is None else number * parameter.numel()

    def basis_bytes(self, model: nn.Module, number: int) -> int:
        """The bytes of the bases from which the next power step starts."""
        found = [self.shape(parameter) for parameter in model.parameters()]
        return sum(number * shape[0] * shape[2] for shape in found if shape is not None)


def window_sizes(storage: Storage, rows: int, units: Callable[[nn.Module], Mapping[str, list[str]]]) -> Sizes:
    """The bytes of the windows, the residuals and the Gram matrices, by kind of `memory_usage()`."""

    def sizes(model: nn.Module, dtype: torch.dtype) -> dict[str, set[int]]:
        number = compute_bytes(dtype)
        window = sum(storage.window_bytes(parameter, rows, number) for parameter in model.parameters())
        error = sum(storage.error_bytes(parameter, number) for parameter in model.parameters())
        expected = {"window": {window}, "gram": {8 * (rows * (rows + 1) // 2) * len(units(model))}}
        if error:
            # the bases of the power step may be reported together with the residual
            bases_too = storage.basis_bytes(model, number) if isinstance(storage, Factored) else 0
            expected["error"] = {error, error + bases_too}
        return expected

    return sizes


# ---------------------------------------------------------------------------------------------------------------- Units


def one_unit(model: nn.Module) -> dict[str, list[str]]:
    """All parameters together."""
    return {"": [name for name, _ in model.named_parameters()]}


def unit_per_module(model: nn.Module) -> dict[str, list[str]]:
    """The direct parameters of every module that has some."""
    found: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found
