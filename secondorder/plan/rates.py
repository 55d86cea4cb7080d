"""The speed of a machine, and the time that operators take on it.

An operator takes the time of its dispatch plus the time of its FLOPs or of its bytes, whichever is longer. Times of
factorizations are measured by size. On an accelerator, the host dispatches while the device computes, so the longer of
the two sums counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder.linalg.dense import anywhere
from secondorder.plan.tally import MODEL, TORCH, Cost, Tally

#: Time between two operators in loops over parameters, divided by the time in modules and autograd; and the same ratio
#: for all other stages of a step.
_PYTHON, _PYTHON_OF_OTHERS = {TORCH: 0.4, "update": 0.15}, 0.75
#: The largest number of bytes that an operator on a CPU is assumed to find in the caches.
_CACHED = 2**20
#: Time of an operator that only makes a view, divided by the time of other operators.
VIEW = 1 / 3
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MachineRates:
    """The rates of a machine, from which ``secondorder.estimate`` computes how long a step takes.

    Each curve is a tuple of points ``(size, value)`` in ascending order of the size. Logarithms are interpolated
    between the points. Beyond the last point, rates are constant, and times of factorizations grow with the third power
    of the size.

    Attributes:
        device: Type of the device, such as ``"cpu"`` or ``"cuda"``.
        operator: Seconds that the host takes to reach and dispatch an operator. An operator that only makes a view or
            allocates takes a third of that.
        bandwidth: Bytes per second, by the number of bytes that an operator reads and writes.
        strided: Bytes per second of copies in another order, by the number of entries that stay next to each other.
        scattered: Bytes per second of operators that gather, scatter or select.
        matmul: FLOPs per second of matrix products, by the smallest side.
        conv: FLOPs per second of convolutions, forward and backward, by the number of channels.
        eigh: Seconds of the eigendecomposition of a symmetric matrix [n, n], by n.
        cholesky: Seconds of a Cholesky factorization with the inverse, by n.
    """

    device: str
    operator: float
    bandwidth: Curve
    strided: Curve
    scattered: float
    matmul: Curve
    conv: Curve
    eigh: Curve
    cholesky: Curve

    def __post_init__(self) -> None:
        """Check the values and convert lists to tuples.

        Raises:
            TypeError: If a value has the wrong type.
            ValueError: If a number is not positive, or a curve has no points or its points are not in ascending order.
        """
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a string, got {self.device!r}")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.type == "Curve":
                object.__setattr__(self, field.name, _checked_curve(field.name, value))
            else:
                _require_positive(field.name, value)

    def save(self, path: str | Path) -> None:
        """Write the rates to a JSON file.

        Args:
            path: Path of the file.
        """
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MachineRates:
        """Read rates from a JSON file.

        Args:
            path: Path of a file that :meth:`save` wrote.

        Returns:
            The rates.

        Raises:
            ValueError: If the file does not contain rates.
            OSError: If the file cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} does not contain the rates of a machine: {error}") from error

    def relative(self) -> tuple[float, float]:
        """Return the FLOPs of a large matrix product in the times of one byte moved and of one operator called."""
        flops = at(self.matmul, 128.0)
        return flops / at(self.bandwidth, 2.0**22), flops * self.operator

    def seconds(self, costs: Mapping[Cost, float], stage: str = MODEL) -> float:
        """Return the seconds that some operators take.

        Args:
            costs: The number of operators of each cost.
            stage: The stage of the step, which determines how much Python code runs between two operators.

        Returns:
            The time in seconds.
        """
        python = 1.0 if stage == MODEL else _PYTHON.get(stage, _PYTHON_OF_OTHERS)
        host = sum(
            python * number * self.operator * (VIEW if cost.kind == "view" else 1.0) for cost, number in costs.items()
        )
        device = sum(number * self._work(cost) for cost, number in costs.items())
        return host + device if self.device == "cpu" else max(host, device)

    def _work(self, cost: Cost) -> float:
        """Return the seconds of an operator without its dispatch."""
        if cost.kind == "view":
            return 0.0
        slower = max(1.0, cost.itemsize / 4)  # compared with float32
        if cost.kind in ("eigh", "cholesky"):
            curve = self.eigh if cost.kind == "eigh" else self.cholesky
            full = 9.0 if cost.kind == "eigh" else 1.0
            return slower * at(curve, cost.size, power=3) * cost.flops / (full * max(1, cost.size) ** 3)
        if cost.kind == "scattered":
            return cost.nbytes / self.scattered
        moved = cost.nbytes / at(self.bandwidth, cost.nbytes)
        if cost.kind == "entrywise":
            return moved
        if cost.kind == "strided":
            return max(moved, cost.nbytes / at(self.strided, cost.size))
        return max(moved, slower * cost.flops / at(self.matmul if cost.kind == "matmul" else self.conv, cost.size))


def at(curve: Curve, size: float, power: float = 0.0) -> float:
    """Return the value of a curve at a size, by interpolation of logarithms.

    Args:
        curve: Points ``(size, value)`` in ascending order.
        size: The size.
        power: The power of the size by which values grow beyond the last point.
    """
    sizes, values = np.log(curve).T
    inside = float(np.interp(math.log(size) if size else -math.inf, sizes, values))
    return math.exp(inside) * float(max(1.0, size / curve[-1][0]) ** power)


def _checked_curve(name: str, value: object) -> Curve:
    if not isinstance(value, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in value):
        raise TypeError(f"{name} must be a list of pairs, got {value!r}")
    for size, number in value:
        _require_positive(name, size)
        _require_positive(name, number)
    curve = tuple((float(size), float(number)) for size, number in value)
    if not curve or any(a[0] >= b[0] for a, b in zip(curve, curve[1:], strict=False)):
        raise ValueError(f"{name} must have points in ascending order, got {value!r}")
    return curve


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be > 0, got {value!r}")


# ---------------------------------------------------------------------- measuring
def measure_rates(device: torch.device | str = "cpu") -> MachineRates:
    """Measure the rates of this machine in about a second.

    Args:
        device: The device.

    Returns:
        The rates with the number of threads that torch uses now.
    """
    where = torch.device(device)
    with torch.no_grad():
        return MachineRates(
            device=where.type,
            operator=_operator_seconds(where),
            bandwidth=tuple((float(n), _bandwidth(n, where)) for n in (2**16, _CACHED, 2**23, 2**26)),
            strided=tuple((float(n), _strided(n, where)) for n in (1, 3, 8, 32)),
            scattered=_scattered(where),
            matmul=tuple((float(n), _matmul(n, where)) for n in (1, 8, 32, 128, 512)),
            conv=tuple((float(n), _conv(n, where)) for n in (4, 16, 64)),
            eigh=tuple((float(n), _factorize(torch.linalg.eigh, n, where)) for n in (16, 64, 256, 1024)),
            cholesky=tuple((float(n), _factorize(_inverse, n, where)) for n in (16, 64, 256, 512)),
        )


def _seconds(
    work: Callable[[], object], device: torch.device, least: float = 0.004, trials: int = 3, warm: bool = True
) -> float:
    """Return the shortest time of a task, which is repeated in each trial until it is long enough to be timed."""
    # The CPU time of one thread does not grow while other programs use the CPU.
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def trial(times: int) -> float:
        start = clock()
        for _ in range(times):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (clock() - start) / times

    if not warm:
        return trial(1)
    first = min(trial(1), trial(1))
    times = max(1, round(least / max(first, 1e-7)))
    return min(trial(times) for _ in range(trials))


def _operator_seconds(device: torch.device) -> float:
    """Return the time of an operator in the training of a tiny model, where Python takes most of the time."""
    layers = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    x = torch.ones(16, 16, device=device)

    def step() -> None:
        with torch.enable_grad():
            model(x).square().mean().backward()
        model.zero_grad()

    step()
    with Tally() as tally:
        step()
    number: float = sum(n * (VIEW if cost.kind == "view" else 1.0) for cost, n in tally.take()[MODEL].items())
    return _seconds_from_memory(step, device, 15) / number


def _seconds_from_memory(work: Callable[[], object], device: torch.device, trials: int = 5) -> float:
    """Return the shortest time of a task that finds neither its data nor the interpreter in the caches."""
    other = torch.ones(2**22, device=device)

    def trial() -> float:
        other.add_(1.0)
        return _seconds(work, device, warm=False)

    return min(trial() for _ in range(trials))


def _bandwidth(nbytes: int, device: torch.device) -> float:
    source = torch.ones(nbytes // 8, device=device)
    target = torch.empty_like(source)
    timed = _seconds_from_memory if device.type == "cpu" and nbytes > _CACHED else _seconds
    return nbytes / timed(lambda: torch.add(source, 1.0, out=target), device)


def _strided(run: int, device: torch.device) -> float:
    """Return the rate at which patches of images are copied, as the statistics of convolutions do."""
    images = torch.ones(8, 8, 18, run + 15, device=device)
    patches = images.unfold(2, 3, 1).unfold(3, run, 1).permute(0, 2, 3, 1, 4, 5)
    return 2 * patches.numel() * images.element_size() / _seconds(patches.contiguous, device)


def _scattered(device: torch.device) -> float:
    """Return the rate at which sorted entries of rows are gathered and added, as sparse windows do."""
    rows = torch.ones(64, 4096, device=device)
    index = torch.randint(4096, rows.shape, device=device).sort(1).values
    out = torch.empty_like(rows)

    def work() -> None:
        torch.gather(rows, 1, index, out=out)
        rows.scatter_add_(1, index, out)

    return 2 * (index.nbytes + 2 * out.nbytes) / _seconds(work, device)


def _matmul(side: int, device: torch.device) -> float:
    x, y = torch.ones(side, 512, device=device), torch.ones(512, 512, device=device)
    out = torch.empty(side, 512, device=device)
    return 2 * side * 512 * 512 / _seconds(lambda: torch.mm(x, y, out=out), device)


def _conv(channels: int, device: torch.device) -> float:
    x = torch.ones(8, channels, 32, 32, device=device)
    weight = torch.ones(channels, channels, 3, 3, device=device)
    grad = F.conv2d(x, weight, padding=1)

    def work() -> None:
        F.conv2d(x, weight, padding=1)
        torch.ops.aten.convolution_backward(
            grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )

    return 3 * 2 * grad.numel() * channels * 9 / _seconds(work, device)


def _factorize(factorise: Callable[[Tensor], object], n: int, device: torch.device) -> float:
    rows = torch.randn(2 * n, n, device=device)
    matrix = rows.mT @ rows / n + torch.eye(n, device=device)
    return _seconds(lambda: anywhere(factorise, matrix), device)


def _inverse(matrix: Tensor) -> Tensor:
    found: Tensor = anywhere(torch.cholesky_inverse, anywhere(torch.linalg.cholesky, matrix))
    return found
