"""TF32 is off while curvature is computed, whatever switches the user has used, and as it was afterwards."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from secondorder.linalg.dense import full_precision
b = torch.backends
{setting}
new = hasattr(b.cudnn, "conv")
def seen():
    parts = (b.cuda.matmul, b.cudnn.conv) if new else (b.cuda.matmul, b.cudnn)
    return tuple(part.fp32_precision if new else part.allow_tf32 for part in parts)
before = seen()
with full_precision(torch.device("cuda")):
    assert seen() == (("ieee", "ieee") if new else (False, False)), seen()
assert seen() == before, (before, seen())
"""
SETTINGS = {
    "nothing": "",
    "old, on": "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = True",
    "old, off": "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = False",
    "words": "torch.set_float32_matmul_precision('high')",
    "new, of convolutions": "b.cudnn.conv.fp32_precision = 'ieee'",
    "new, of products": "b.cuda.matmul.fp32_precision = 'tf32'",
    "new, of all": "b.fp32_precision = 'ieee'",
}


@pytest.mark.parametrize(
    "name", ["nothing", "new, of all", *(pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS)]
)
def test_switches_of_either_kind(name):
    """In a process of its own, for torch does not forget which kind was used; it needs no device."""
    import torch

    if name.startswith("new") and not hasattr(torch.backends.cudnn, "conv"):
        return  # this torch has the old ones only
    program = PROGRAM.format(setting=SETTINGS[name])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
