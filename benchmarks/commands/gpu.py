"""``gpu``: everything that is to be known of a GPU, in one call: what holds there, and what steps cost.

Parts, in this order: checks against the CPU and for waiting; windows of ResNet-18 and ResNet-50 with 1,024 rows;
steps of ResNet-50 and of GPT-2 beside SGD's; factorisations, alone and of many matrices at once. A part that fails says
why, and the others go on. All batches are random numbers: no data has to be there.
"""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import report
from benchmarks.commands.linalg import Linalg
from benchmarks.commands.options import Alone
from benchmarks.commands.step_time import StepTime
from benchmarks.commands.window import Window
from benchmarks.device_checks import Check, checks
from benchmarks.machine import seconds
from benchmarks.runner import FAILURES
from benchmarks.timing import MEASURED
from secondorder.linalg import dense

Part = Literal["checks", "windows", "resnet50", "gpt2_small", "factorisations", "stacks"]
_VERDICTS = {True: "yes", False: "NO", None: "not asked"}


@dataclass
class Gpu(Alone):
    """Check every method on a GPU and measure what its steps cost there: one call, under ten minutes."""

    device: str = "cuda"
    """Where to run; cpu tries the command itself out, with ``--size smoke``."""
    threads: int = 8
    """Threads that torch computes with on the host."""
    parts: tuple[Part, ...] = get_args(Part)
    """What to do."""
    size: Literal["smoke", "paper"] = "paper"
    """smoke: tiny models, few rows, small matrices."""
    minutes: float = 9.0
    """Begin no further part after so many minutes."""
    steps: int = 20
    """Timed steps of each optimizer."""
    peer_path: tuple[str, ...] = ()
    """Checkout of kfac-pytorch, as kfac_pytorch=DIR."""

    def run(self) -> int:
        """Run the command, and return 0, or 1 when a check did not pass or a part failed."""
        if self.steps < MEASURED.refresh:
            raise ValueError(f"steps must be at least {MEASURED.refresh}, got {self.steps}")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {self.device}: torch {torch.__version__} sees no CUDA device here")
        works: Mapping[Part, Callable[[], int]] = {
            "checks": self._checks,
            "windows": self._windows,
            "resnet50": lambda: self._steps("resnet50"),
            "gpt2_small": lambda: self._steps("gpt2_small"),
            "factorisations": self._factorisations,
            "stacks": self._stacks,
        }
        start, rows = time.monotonic(), []
        for part in self.parts:
            began = time.monotonic()
            if began - start > 60 * self.minutes:
                rows.append((part, "-", "no time left"))
                continue
            outcome = _attempt(works[part])
            rows.append((part, f"{time.monotonic() - began:.0f}", outcome))
        table = report.make_table("Parts", ("part", "seconds", "outcome"), rows, f"Device: {_name(self.device)}.")
        report.save(self.out_dir, "gpu", [table], {"device": _name(self.device), "parts": rows})
        return int(any(outcome not in ("done", "no time left") for _, _, outcome in rows))

    @property
    def _small(self) -> bool:
        return self.size == "smoke"

    def _checks(self) -> int:
        found = list(checks(torch.device(self.device)))
        report.save(self.out_dir, "gpu-checks", [_check_table(found)], {"checks": [vars(check) for check in found]})
        return int(any(check.passed is False for check in found))

    def _windows(self) -> int:
        command = Window(
            device=self.device,
            seed=self.seed,
            threads=self.threads,
            out_dir=self.out_dir,
            sizes=("digits",) if self._small else ("large", "resnet50"),
            storages=("topk", "dense") if self._on_cpu else ("topk", "topk-triton", "dense"),
            window_size=16 if self._small else 1024,
            steps=self.steps,
        )
        return command.run()

    @property
    def _on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    def _steps(self, workload: Literal["resnet50", "gpt2_small"]) -> int:
        batch = {"resnet50": 128, "gpt2_small": 16}[workload]
        command = StepTime(
            seed=self.seed,
            threads=self.threads,
            out_dir=self.out_dir,
            workload=workload,
            optimizers=("adamw", "kfac"),
            steps=self.steps,
            size=self.size,
            batch_size=None if self._small else batch,
            random=True,
            device=self.device,
            amp="bfloat16",
            peer_path=self.peer_path,
        )
        return command.run()

    def _factorisations(self) -> int:
        sizes = (8, 16) if self._small else (256, 512, 1024, 2048)
        trials = 1 if self._small else 3
        command = Linalg(
            device=self.device,
            seed=self.seed,
            threads=self.threads,
            out_dir=self.out_dir,
            sizes=sizes,
            trials=trials,
        )
        return command.run()

    def _stacks(self) -> int:
        shapes = ((4, 8),) if self._small else ((64, 64), (64, 256), (32, 512), (16, 1024), (8, 2048), (4, 4096))
        results = [_stack(count, side, torch.device(self.device), self.seed) for count, side in shapes]
        report.save(self.out_dir, "gpu-stacks", [_stack_table(results)], {"results": results})
        return 0


def _attempt(work: Callable[[], int]) -> str:
    try:
        return "done" if work() == 0 else "a check did not pass"
    except FAILURES as err:
        traceback.print_exc()
        return f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"


def _stack(count: int, side: int, device: torch.device, seed: int) -> dict[str, Any]:
    """Time the factorisation of some matrices, at once and one by one."""
    rows = torch.randn(count, 2 * side, side, generator=torch.Generator().manual_seed(seed)).to(device)
    matrices = rows.mT @ rows / (2 * side) + 0.1 * torch.eye(side, device=device)
    found: dict[str, Any] = {"count": count, "side": side}
    for name, factorise in (("eigh", dense.eigh_psd), ("Cholesky", dense.inverse_pd)):
        ways: dict[str, Callable[[], object]] = {
            "at once": partial(factorise, matrices, False),
            "one by one": partial(_one_by_one, factorise, matrices),
        }
        for way, work in ways.items():
            work()
            found[f"{name}, {way}"] = min(seconds(work, device) for _ in range(2))
    return found


def _one_by_one(factorise: Callable[[Tensor, bool], object], matrices: Tensor) -> None:
    for matrix in matrices:
        factorise(matrix[None], False)


def _stack_table(results: list[dict[str, Any]]) -> Table:
    names = [name for name in results[0] if name not in ("count", "side")]
    rows = [(f"{r['count']} × {r['side']}", *(f"{1e3 * r[name]:.1f}" for name in names)) for r in results]
    caption = "Milliseconds, the better of two."
    return report.make_table("Factorisation of many matrices", ("matrices", *names), rows, caption)


def _name(device: str) -> str:
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type


def _check_table(found: list[Check]) -> Table:
    rows = [(check.what, _VERDICTS[check.passed], check.told) for check in found]
    return report.make_table("What holds on this device", ("statement", "holds", "because"), rows)
