"""Whether optimizers do on a device what they do on the CPU, and do it without making the host wait."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import secondorder
from secondorder import TopK
from secondorder.curvature.window.form import Form, Place

STEPS = 14
"""Steps of a comparison; refreshes are every fourth, so those that overlap are adopted in between."""
_INTERVAL = 4
_FACTORED: dict[str, Any] = {
    "factor_update_steps": 2,
    "inv_update_steps": _INTERVAL,
    "refresh_warmup": False,
    "damping": 0.1,
}
_WINDOW: dict[str, Any] = {"window_size": 4, "lr": 1e-2}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "KFAC, eigenvectors": ("kfac", {**_FACTORED, "lr": 1e-2}),
    "KFAC, Cholesky": ("kfac", {**_FACTORED, "lr": 1e-2, "inverse_method": "cholesky"}),
    "KFAC, overlap": ("kfac", {**_FACTORED, "lr": 1e-2, "overlap": True}),
    "KFAC, packed factors": ("kfac", {**_FACTORED, "lr": 1e-2, "factor_storage": "packed"}),
    "EKFAC, per example": ("ekfac", {**_FACTORED, "lr": 1e-2}),
    "EKFAC, running": ("ekfac", {**_FACTORED, "lr": 1e-2, "estimator": "running"}),
    "HyLo, KID": ("hylo", {"mode": "kid", "update_steps": _INTERVAL, "lr": 1e-2, "rank_fraction": 0.5}),
    "HyLo, KIS": ("hylo", {"mode": "kis", "update_steps": _INTERVAL, "lr": 1e-2, "rank_fraction": 0.5}),
    "M-FAC": ("mfac", _WINDOW),
    "sparse M-FAC": ("sparse_mfac", {**_WINDOW, "compression": TopK(0.1)}),
    "GGT": ("ggt", _WINDOW),
}
"""Method and keywords of what is compared, by its name."""
_TOLERANCE = 1e-8  # of float64 sums in another order, after as many steps
_KERNEL_TOLERANCE = 1e-4  # of float32 sums


@dataclass(frozen=True)
class Check:
    """One statement that was put to the test."""

    what: str
    passed: bool | None
    """None where it cannot be asked."""
    told: str


def checks(device: torch.device) -> Iterator[Check]:
    """Put every statement to the test."""
    for label, (name, keywords) in CASES.items():
        yield _attempt(f"{label}: as on the CPU", partial(_as_on_cpu, name, keywords, device))
    for label, (name, keywords) in CASES.items():
        what = f"{label}: the host never waits"
        if "overlap" in keywords:
            continue  # its thread does wait, and torch would blame it
        if device.type != "cuda":
            yield Check(what, None, "needs a CUDA device")
        else:
            yield _attempt(what, partial(_never_waits, name, keywords, device))
    what = "triton's kernels: what torch's give"
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        yield Check(what, None, "needs a CUDA device and triton")
    else:
        yield _attempt(what, partial(_kernels_agree, device))


def _attempt(what: str, check: Callable[[], tuple[bool, str]]) -> Check:
    try:
        passed, told = check()
    except (RuntimeError, ValueError, TypeError, AttributeError) as err:  # one failure is not to hide the others
        return Check(what, False, f"{type(err).__name__}: {str(err).splitlines()[0]}")
    return Check(what, passed, told)


class _Net(nn.Module):
    """A convolution, a norm and two linear layers: one of each kind of block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.LayerNorm(64)
        self.hidden = nn.Linear(64, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.conv(x)).flatten(1))
        out: Tensor = self.head(torch.tanh(self.hidden(hidden)))
        return out


class _Run:
    """A small network and its optimizer."""

    def __init__(self, name: str, keywords: Mapping[str, Any], device: torch.device) -> None:
        """Build both; equal arguments give equal weights."""
        torch.manual_seed(0)
        self.model = _Net().double().to(device)
        self.optimizer = secondorder.create(name, self.model, **keywords)
        self._device = device

    def step(self, number: int, may_wait: bool = True) -> None:
        """Take a step on the batch of that number."""
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 2, 4, 4, generator=generator, dtype=torch.float64).to(self._device)
        y = torch.randint(5, (8,), generator=generator).to(self._device)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        with nullcontext() if may_wait else _no_waiting(self._device):
            self.optimizer.step()

    def parameters(self) -> Tensor:
        """Return all parameters as one vector, on the CPU."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).cpu()


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Let torch raise where the host waits for a CUDA device."""
    if device.type != "cuda":
        raise ValueError(f"torch tells only of CUDA devices who waits for them, not of {device}")
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _as_on_cpu(name: str, keywords: Mapping[str, Any], device: torch.device) -> tuple[bool, str]:
    runs = [_Run(name, keywords, torch.device("cpu")), _Run(name, keywords, device)]
    for run in runs:
        for number in range(STEPS):
            run.step(number)
    here, there = (run.parameters() for run in runs)
    error = float((here - there).norm() / here.norm())
    return error <= _TOLERANCE, f"relative difference {error:.1e} after {STEPS} steps"


def _never_waits(name: str, keywords: Mapping[str, Any], device: torch.device) -> tuple[bool, str]:
    """Ask torch to raise where a step waits; one that factorises may, for the solver says whether it converged."""
    run = _Run(name, keywords, device)
    for number in range(STEPS):
        factorises = "window_size" not in keywords and number % _INTERVAL == 0
        run.step(number, may_wait=number < _INTERVAL or factorises)
    return True, f"{STEPS - _INTERVAL} steps, those that factorise left out"


def _kernels_agree(device: torch.device) -> tuple[bool, str]:
    found = []
    for kernels in ("torch", "triton"):
        generator = torch.Generator().manual_seed(0)
        shapes = [torch.Size((300, 401)), torch.Size((77,))]
        rows = Form(64, TopK(kernels=kernels)).rows([Place(s, torch.float32, device) for s in shapes])
        for i in range(65):
            gradient = [torch.randn(s, generator=generator).to(device) for s in shapes]
            if i < 64:
                rows.write(gradient, torch.tensor([i], device=device), None)
        a = torch.linspace(-1, 1, 64, dtype=torch.float64, device=device)
        products = [rows.dots(gradient, 64), *rows.combine(a)]
        found.append(torch.cat([part.flatten().double() for part in products]))
    error = float((found[0] - found[1]).norm() / found[0].norm())
    return error <= _KERNEL_TOLERANCE, f"relative difference {error:.1e}"
