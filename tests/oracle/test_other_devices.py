"""A device that lacks a factorisation, or breaks down in it: the CPU does that one, and training goes on as ever.

The device is made up: every tensor is on it, and its functions fail, but for copies that were brought to the host.
"""

import ast
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, LowRank
from secondorder.linalg import dense

ROOT = Path(__file__).resolve().parents[2]
FAILING = ["eigh", "eigvalsh", "cholesky_ex", "qr", "solve_triangular", "solve"]
ERRORS = {
    "not implemented": NotImplementedError("The operator 'aten::_linalg_eigh' is not implemented for this device"),
    "breakdown": RuntimeError("solver error: EXECUTION_FAILED"),
}
errors = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
EVERY = {"factor_update_steps": 1, "inv_update_steps": 1}
METHODS = {
    "kfac": lambda m: KFAC(m, lr=0.1, damping=0.1, **EVERY),
    "cholesky": lambda m: KFAC(m, lr=0.1, damping=0.1, inverse_method="cholesky", **EVERY),
    "ekfac": lambda m: EKFAC(m, lr=0.1, damping=0.1, **EVERY),
    "swept": lambda m: EKFAC(m, lr=0.1, damping=0.1, basis_update="qr", **EVERY),
    "kid": lambda m: HyLo(m, lr=0.1, mode="kid", update_steps=1, rank_fraction=0.5),
    "sngd": lambda m: HyLo(m, lr=0.1, mode="sngd", update_steps=1),
    "mfac": lambda m: MFAC(m, lr=0.1, damping=0.1, window_size=3),
    "filtered": lambda m: MFAC(m, lr=0.1, damping=0.1, window_size=3, solver="eigh"),
    "low_rank": lambda m: MFAC(m, lr=0.1, damping=0.1, window_size=3, compression=LowRank(2)),
    "ggt": lambda m: GGT(m, lr=0.1, window_size=3),
}


class Device:
    """Where every tensor is that was not brought to the host."""

    def __init__(self, monkeypatch, error, failing=FAILING):
        self.on_host, self.calls = [], 0
        monkeypatch.setattr(dense, "_is_on_host", self.is_on_host)
        monkeypatch.setattr(dense, "_to_host", self.to_host)
        monkeypatch.setattr(dense, "_elsewhere", set())
        for name in failing:
            monkeypatch.setattr(torch.linalg, name, self.lacking(getattr(torch.linalg, name), name, error))

    def is_on_host(self, x):
        return any(x is y for y in self.on_host)

    def to_host(self, x):
        self.on_host.append(x.clone())
        return self.on_host[-1]

    def lacking(self, original, name, error):
        def function(*tensors, **keywords):
            if all(self.is_on_host(x) for x in tensors):
                return original(*tensors, **keywords)
            self.calls += 1
            raise error

        function.__name__ = name
        return function


def train(build, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    opt = build(model)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return opt, [p.detach() for p in model.parameters()]


@errors
@pytest.mark.parametrize("method", METHODS)
def test_training_is_what_it_is_on_a_device_that_has_all(method, error, monkeypatch):
    _, expected = train(METHODS[method])
    device = Device(monkeypatch, error)
    opt, found = train(METHODS[method])
    opt.diagnostics()
    assert device.calls > 0
    assert opt.diagnostics().get("refresh_failures", 0) == opt.diagnostics().get("solve_failures", 0) == 0
    for p, q in zip(found, expected, strict=True):
        assert torch.equal(p, q)


@errors
def test_what_a_device_does_not_do_is_logged_once(error, monkeypatch, caplog):
    Device(monkeypatch, error)
    with caplog.at_level(logging.INFO, "secondorder"):
        train(METHODS["kfac"])
    (record,) = caplog.records
    assert record.getMessage().startswith("eigh is done on the CPU")


def test_matrices_that_cannot_be_factorised_climb_the_ladder_on_their_device(monkeypatch):
    device = Device(monkeypatch, torch.linalg.LinAlgError("no convergence"), ["eigh"])
    values, _, ok = dense.eigh_psd(torch.eye(3)[None], host_checks=True)
    assert not device.on_host
    assert not ok.any()
    assert not values.any()


@pytest.mark.parametrize("factorise", [dense.eigh_psd, dense.inverse_pd])
def test_a_failure_on_the_cpu_as_well_climbs_the_ladder(factorise, monkeypatch):
    """NaN: the device does not have the function, and the CPU refuses the matrix."""
    Device(monkeypatch, ERRORS["not implemented"])
    x = torch.eye(3).repeat(2, 1, 1)
    x[1, 0, 0] = torch.nan
    *_, ok = factorise(x, True)
    assert ok.tolist() == [True, False]


def test_a_lack_of_memory_is_told():
    def greedy(x):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        dense.anywhere(greedy, torch.eye(2, device="meta"))


def test_errors_of_the_cpu_itself_are_raised():
    def broken(x):
        raise NotImplementedError("not for this type")

    with pytest.raises(NotImplementedError, match="not for this type"):
        dense.anywhere(broken, torch.eye(2))


def test_devices_without_autocast_need_none():
    with dense.full_precision(torch.device("meta")):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Nothing asks for CUDA unless there is CUDA
# ---------------------------------------------------------------------------------------------------------------------

#: Factorisations in the package go through `anywhere`.
FACTORISATIONS = {*FAILING, "cholesky", "inv", "svd", "pinv", "lstsq", "cholesky_inverse", "cholesky_solve"}


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
