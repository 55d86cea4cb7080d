"""Devices that lack a factorization or break down in it: what is done on the CPU, and what is raised.

Training on such devices is in `tests/contract/test_devices.py`. Nothing asks for CUDA unless there is CUDA.
"""

import ast
from pathlib import Path

import pytest
import torch

from secondorder.linalg import dense
from tests.support.device import KIND, SimulatedDevice

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = (torch.ops.aten._linalg_eigh.default, torch.ops.aten.linalg_cholesky_ex.default)


def test_a_matrix_that_a_device_cannot_factorise_is_factorised_on_the_cpu_at_last():
    """After a jitter and in float64, as any matrix that fails."""
    lacking = {torch.ops.aten._linalg_eigh.default: torch.linalg.LinAlgError("no convergence")}
    with SimulatedDevice(lacking) as device:
        values, _, ok = dense.eigh_psd(device.tensor(torch.eye(3)[None]), host_checks=True)
        assert values.device.type == ok.device.type == KIND
    assert ok.held.tolist() == [True]
    torch.testing.assert_close(values.held, torch.ones(1, 3), rtol=1e-5, atol=1e-5)


def test_a_failure_on_the_cpu_as_well_climbs_the_ladder():
    """NaN: the device does not have the function, and the CPU refuses the matrix."""
    error = NotImplementedError("The operator is not implemented for this device")
    x = torch.eye(3).repeat(2, 1, 1)
    x[1, 0, 0] = torch.nan
    for factorise in (dense.eigh_psd, dense.inverse_pd):
        with SimulatedDevice(dict.fromkeys(OPERATORS, error)) as device:
            *_, ok = factorise(device.tensor(x), True)
        assert ok.held.tolist() == [True, False]


@pytest.mark.parametrize(
    ("error", "device"), [(torch.OutOfMemoryError("told"), "meta"), (NotImplementedError("told"), "cpu")]
)
def test_a_lack_of_memory_and_errors_of_the_cpu_itself_are_raised(error, device):
    def broken(x):
        raise error

    with pytest.raises(type(error), match="told"):
        dense.anywhere(broken, torch.eye(2, device=device))


def test_devices_without_autocast_need_none():
    with dense.full_precision(torch.device("meta")):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Nothing asks for CUDA unless there is CUDA
# ---------------------------------------------------------------------------------------------------------------------

#: Factorisations in the package go through `anywhere`.
FACTORISATIONS = {
    "eigh", "eigvalsh", "cholesky_ex", "qr", "solve_triangular", "solve", "cholesky", "inv", "svd", "pinv", "lstsq",
    "cholesky_inverse", "cholesky_solve",
}  # fmt: skip


def dotted(node):
    """``torch.linalg.eigh`` of its syntax tree."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_every_factorisation_may_go_to_the_cpu():
    found = []
    for path in sorted((ROOT / "secondorder").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                first, _, last = dotted(node.func).rpartition(".")
                if first in ("torch", "torch.linalg") and last in FACTORISATIONS:
                    found.append(f"{path.name}:{node.lineno}: {first}.{last}")
    assert not found


def test_cuda_is_named_only_where_a_device_is_known_to_be_one():
    """Each place is a function that first asks for the type of the device, or for CUDA itself."""
    guards = ('type == "cuda"', 'type != "cuda"', "_cuda is None", "cuda.is_available()")
    found = []
    for path in sorted([*(ROOT / "secondorder").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted(node) == "torch.cuda":
                around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
                text = ast.get_source_segment(source, around[-1]) if around else ""
                if not any(guard in (text or "") for guard in guards):
                    found.append(f"{path.name}:{node.lineno}")
    assert not found
