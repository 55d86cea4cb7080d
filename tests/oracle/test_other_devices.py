"""Devices that lack a factorization or fail in it, and switches of their precision that users have set.

Training on such devices is tested in `tests/contract/test_devices.py`.
"""

import ast
import json
import subprocess
import sys

import pytest
import torch

from secondorder.linalg import dense
from tests.support.device import KIND, SimulatedDevice
from tests.support.source import ROOT, dotted

OPERATORS = (torch.ops.aten._linalg_eigh.default, torch.ops.aten.linalg_cholesky_ex.default)


def test_a_matrix_that_a_device_cannot_factorize_is_factorized_on_the_cpu_in_the_end():
    """This happens after a jitter and in float64, as with any matrix that fails."""
    lacking = {torch.ops.aten._linalg_eigh.default: torch.linalg.LinAlgError("no convergence")}
    with SimulatedDevice(lacking) as device:
        values, _, ok = dense.eigh_psd(device.tensor(torch.eye(3)[None]), host_checks=True)
        assert values.device.type == ok.device.type == KIND
    assert ok.held.tolist() == [True]
    torch.testing.assert_close(values.held, torch.ones(1, 3), rtol=1e-5, atol=1e-5)


def test_a_failure_on_the_cpu_as_well_is_reported():
    """The device does not have the function, and the CPU refuses the NaN."""
    error = NotImplementedError("The operator is not implemented for this device")
    x = torch.eye(3).repeat(2, 1, 1)
    x[1, 0, 0] = torch.nan
    for factorize in (dense.eigh_psd, dense.inverse_pd):
        with SimulatedDevice(dict.fromkeys(OPERATORS, error)) as device:
            *_, ok = factorize(device.tensor(x), True)
        assert ok.held.tolist() == [True, False]


@pytest.mark.parametrize(
    ("error", "device"), [(torch.OutOfMemoryError("a message"), "meta"), (NotImplementedError("a message"), "cpu")]
)
def test_a_lack_of_memory_and_errors_of_the_cpu_itself_are_raised(error, device):
    def broken(x):
        raise error

    with pytest.raises(type(error), match="a message"):
        dense.anywhere(broken, torch.eye(2, device=device))
    with dense.full_precision(torch.device("meta")):
        pass  # devices without autocast need none


# ------------------------- TF32 is off while curvature is computed, whatever switches the user has set, and is restored

SETTINGS = {
    "nothing": "",
    "old, on": "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = True",
    "old, off": "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = False",
    "words": "torch.set_float32_matmul_precision('high')",
    "new, of convolutions": "b.cudnn.conv.fp32_precision = 'ieee'",
    "new, of products": "b.cuda.matmul.fp32_precision = 'tf32'",
    "new, of all": "b.fp32_precision = 'ieee'",
}
#: Torch remembers which kind of switch was used, so each setting has a process, forked from one that has torch.
PROGRAM = """
import json, os, sys
import torch
from secondorder.linalg.dense import full_precision
b = torch.backends
new = hasattr(b.cudnn, "conv")

def seen():
    parts = (b.cuda.matmul, b.cudnn.conv) if new else (b.cuda.matmul, b.cudnn)
    return tuple(part.fp32_precision if new else part.allow_tf32 for part in parts)

def check(setting):
    exec(setting)
    before = seen()
    with full_precision(torch.device("cuda")):
        assert seen() == (("ieee", "ieee") if new else (False, False)), seen()
        with full_precision(torch.device("cuda"), is_half=True):
            assert seen() == (("tf32", "tf32") if new else (True, True)), seen()
        assert seen() == (("ieee", "ieee") if new else (False, False)), seen()
    assert seen() == before, (before, seen())

failed = []
for name, setting in json.loads(sys.argv[1]).items():
    if name.startswith("new") and not new:
        continue  # this torch only has the old ones
    if not (child := os.fork()):
        try:
            check(setting)
        except BaseException as error:
            print(name, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def test_switches_of_either_kind_are_restored():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(SETTINGS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------ CUDA is not used unless there is CUDA

#: Factorizations in the package go through `anywhere`.
FACTORIZATIONS = {
    "eigh", "eigvalsh", "cholesky_ex", "qr", "solve_triangular", "solve", "cholesky", "inv", "svd", "pinv", "lstsq",
    "cholesky_inverse", "cholesky_solve",
}  # fmt: skip
GUARDS = ('type == "cuda"', 'type != "cuda"', "_cuda is None", "cuda.is_available()")


def test_factorizations_may_fall_back_to_the_cpu_and_cuda_is_used_only_after_a_check():
    """Each function that uses it first checks the type of the device, or that there is CUDA."""
    found = []
    for path in sorted([*(ROOT / "secondorder").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        source = path.read_text(encoding="utf-8")
        if "torch.cuda" not in source and not any(f"{name}(" in source for name in FACTORIZATIONS):
            continue
        nodes = list(ast.walk(ast.parse(source)))
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in nodes:
            if isinstance(node, ast.Call) and path.is_relative_to(ROOT / "secondorder"):
                first, _, last = dotted(node.func).rpartition(".")
                if first in ("torch", "torch.linalg") and last in FACTORIZATIONS:
                    found.append(f"{path.name}:{node.lineno}: {first}.{last}")
            if isinstance(node, ast.Attribute) and node.attr == "cuda" and dotted(node) == "torch.cuda":
                around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
                text = ast.get_source_segment(source, around[-1]) if around else ""
                if not any(guard in (text or "") for guard in GUARDS):
                    found.append(f"{path.name}:{node.lineno}")
    assert not found
