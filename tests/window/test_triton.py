"""Kernels of sparse windows: in triton's interpreter on the CPU, and on a GPU if there is one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from secondorder import TopK
from secondorder.curvature.window.form import Form, Place


@pytest.mark.slow
def test_interpreted_kernels_give_what_torch_gives() -> None:
    """They run in another process, because triton chooses between compiler and interpreter when it is imported."""
    checks = Path(__file__).parents[1] / "support" / "interpreted_kernels.py"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(checks)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout, done.stdout


def test_unavailable_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kernels must be one of \('torch', 'triton'\), got 'cuda'"):
        TopK(kernels="cuda")
    with pytest.raises(ValueError, match="needs a GPU and these parameters are on cpu: use 'torch'"):
        Form(2, TopK(kernels="triton")).rows([Place(torch.Size((64, 64)), torch.float32, torch.device("cpu"))])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install triton"):
        TopK(kernels="triton")


@pytest.mark.gpu
def test_kernels_on_a_gpu_give_what_torch_gives() -> None:
    shapes, found = [torch.Size((300, 401)), torch.Size((77,))], []
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(s, generator=generator) for s in shapes] for _ in range(65)]
    for kernels, name in (("triton", "cuda"), ("torch", "cuda"), ("torch", "cpu")):
        device = torch.device(name)
        rows = Form(64, TopK(kernels=kernels)).rows([Place(s, torch.float32, device) for s in shapes])
        *sent, x = ([part.to(device, copy=True) for part in gradient] for gradient in gradients)
        for i, gradient in enumerate(sent):
            rows.write(gradient, torch.tensor([i], device=device), None)
        a = torch.linspace(-1, 1, 64, dtype=torch.float64, device=device)
        found.append([rows.dots(x, 64).cpu(), *(part.cpu() for part in rows.combine(a))])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-4, atol=1e-4)
