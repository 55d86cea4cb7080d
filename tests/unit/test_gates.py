"""Gates in place of branches: an open one changes no number, a shut one changes no bit, whatever the batch held.

Where a device must not be waited for, a step is not left out but multiplied away; and refreshes of whole stacks of
matrices go on where one of them fails. Whole steps on a device are in `tests/contract/test_devices.py`.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from secondorder.capture.statistics import averages
from secondorder.linalg import dense, first_order
from tests.support.device import SimulatedDevice
from tests.support.kfac import assert_close, noise

OPEN, SHUT = torch.tensor(True), torch.tensor(False)
SHAPES = ((3, 4), (5,))


def draw(seed: int) -> list[Tensor]:
    return [noise(*shape, seed=seed + i) for i, shape in enumerate(SHAPES)]


def copies(*lists: list[Tensor]) -> tuple[list[Tensor], ...]:
    return copy.deepcopy(lists)


def poisoned() -> list[Tensor]:
    values = draw(90)
    values[0][1, 2] = float("nan")
    values[1].fill_(float("inf"))
    return values


def assert_same(actual, expected) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def assert_near(actual, expected) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y, 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# First-order rules under a gate
# ---------------------------------------------------------------------------------------------------------------------

LRS = {"number": 0.1, "tensor": torch.tensor(0.1, dtype=torch.float64)}
SGD = {
    "plain": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "decoupled": False},
    "momentum": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "decoupled": False},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0, "decoupled": False},
    "coupled": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.3, "decoupled": False},
    "decoupled": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3, "decoupled": True},
    "coupled nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3, "decoupled": False},
    "decay alone": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.3, "decoupled": True},
}
lrs = pytest.mark.parametrize("lr", LRS.values(), ids=LRS)
sgd_cases = pytest.mark.parametrize("keywords", SGD.values(), ids=SGD)


@lrs
@sgd_cases
def test_sgd_with_an_open_gate_is_sgd(keywords, lr):
    params, buffers = draw(0), draw(10)
    gated, plain = copies(params, buffers), copies(params, buffers)
    for step in range(3):
        for (values, momenta), gate in ((gated, OPEN), (plain, None)):
            directions = draw(20 + step)
            first_order.sgd_(
                values, directions, momenta if keywords["momentum"] else None, lr=lr, gate=gate, **keywords
            )
            assert_same(directions, draw(20 + step))
    assert_near(gated[0], plain[0])
    assert_near(gated[1], plain[1])


@lrs
@sgd_cases
def test_sgd_with_a_shut_gate_changes_nothing(keywords, lr):
    params, buffers = draw(0), draw(10)
    values, momenta = copies(params, buffers)
    first_order.sgd_(values, poisoned(), momenta if keywords["momentum"] else None, lr=lr, gate=SHUT, **keywords)
    assert_same(values, params)
    assert_same(momenta, buffers)


BETAS = (0.9, 0.999)


def moments() -> tuple[list[Tensor], list[Tensor]]:
    return draw(30), [x.square() for x in draw(40)]


def test_adam_moments_with_an_open_gate_are_adam_s():
    gated, plain = moments(), moments()
    for step in range(3):
        first_order.adam_moments_(draw(50 + step), *gated, BETAS, OPEN)
        first_order.adam_moments_(draw(50 + step), *plain, BETAS)
    assert_near(gated[0], plain[0])
    assert_near(gated[1], plain[1])


def test_adam_moments_with_a_shut_gate_stay():
    found = moments()
    first_order.adam_moments_(poisoned(), *found, BETAS, SHUT)
    assert_same(found[0], moments()[0])
    assert_same(found[1], moments()[1])


@lrs
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, True), (0.3, True), (0.3, False)])
def test_adam_with_an_open_gate_is_adam(weight_decay, decoupled, lr):
    keywords = {"lr": lr, "betas": BETAS, "eps": 1e-8, "weight_decay": weight_decay, "decoupled": decoupled}
    gated, plain = (draw(0), *moments()), (draw(0), *moments())
    for step in range(3):
        first_order.adam_(gated[0], draw(50 + step), *gated[1:], [step + 1.0, step + 4.0], gate=OPEN, **keywords)
        first_order.adam_(plain[0], draw(50 + step), *plain[1:], [step + 1.0, step + 4.0], **keywords)
    for one, other in zip(gated, plain, strict=True):
        assert_near(one, other)


@lrs
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, True), (0.3, True), (0.3, False)])
@pytest.mark.parametrize("fresh", [False, True], ids=["running", "first step"])
def test_adam_with_a_shut_gate_changes_nothing(weight_decay, decoupled, lr, fresh):
    first, second = moments()
    if fresh:
        first, second = [x * 0 for x in first], [x * 0 for x in second]
    values, means, squares = copies(draw(0), first, second)
    keywords = {"lr": lr, "betas": BETAS, "eps": 1e-8, "weight_decay": weight_decay, "decoupled": decoupled}
    first_order.adam_(values, poisoned(), means, squares, [1.0, 7.0], gate=SHUT, **keywords)
    assert_same(values, draw(0))
    assert_same(means, first)
    assert_same(squares, second)


# ---------------------------------------------------------------------------------------------------------------------
# The running estimate
# ---------------------------------------------------------------------------------------------------------------------


def symmetric(n: int, seed: int) -> Tensor:
    x = noise(n, n, seed=seed)
    return x @ x.mT


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_running_mean_of_a_device_is_that_of_the_cpu(decay, dtype, tolerance):
    def start() -> tuple[list[Tensor], Tensor]:
        return [torch.zeros(n, n, dtype=dtype) for n in (3, 2)], torch.zeros((), dtype=torch.float64)

    def sums_of(batch: int, good: bool) -> list[Tensor]:
        sums = [symmetric(3, batch).to(dtype), symmetric(2, batch).to(dtype)]
        if not good:
            sums[0][0, 0] = float("nan")
            sums[1][1, 0] = float("inf")
        return sums

    here, weight_here = start()
    with SimulatedDevice() as device:
        there, weight_there = [device.tensor(x) for x in here], device.tensor(weight_here)
        for batch, good in ((5, True), (2, True), (9, False), (1, True)):
            scales = [1 / batch, 0.5]
            before = [x.clone() for x in (*here, weight_here)]
            averages.ratio_ema_(here, weight_here, sums_of(batch, good), scales, batch, decay, torch.tensor(good))
            sums, flag = [device.tensor(x) for x in sums_of(batch, good)], device.tensor(torch.tensor(good))
            averages.ratio_ema_(there, weight_there, sums, scales, batch, decay, flag)
            if not good:
                assert_same((*here, weight_here), before)
            for x, y in zip(there, here, strict=True):
                assert_close(x.held, y, tolerance)
            assert float(weight_there.held) == float(weight_here)
    assert device.waits == []
    assert float(weight_here) == (((5 * decay) + 2) * decay) + 1


# ---------------------------------------------------------------------------------------------------------------------
# A stack of matrices, one of which fails
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class OneFails:
    """A function of ``torch.linalg`` that returns garbage for the matrices marked by a huge first entry."""

    original: object
    rungs: int
    calls: list[tuple[int, ...]]

    def __call__(self, x):
        self.calls.append(tuple(x.shape))
        bad = x[..., 0, 0] > 50
        found = tuple(part.clone() for part in self.original(x))
        if len(self.calls) <= self.rungs:
            for part in found:
                part[bad] = float("nan") if part.is_floating_point() else 1
        return found


ROUTINES = {"eigen": ("eigh", dense.eigh_psd), "cholesky": ("cholesky_ex", dense.inverse_pd)}


def stack(dtype=torch.float64) -> Tensor:
    x = torch.stack([symmetric(3, seed) for seed in range(4)])
    x += torch.eye(3, dtype=torch.float64)
    x[2, 0, 0] += 100.0
    return x.to(dtype)


@pytest.mark.parametrize("method", ROUTINES)
@pytest.mark.parametrize("rungs", [1, 2, 3, 9], ids=["alone", "jitter", "float64", "never"])
def test_only_the_matrix_that_failed_climbs(monkeypatch, method, rungs):
    """``rungs`` calls fail; the stack is the first call, its matrix alone the second, then jitter, then float64."""
    name, factorise = ROUTINES[method]
    x = stack(torch.float32)
    *expected, fine = factorise(x, True)
    assert fine.all()
    routine = OneFails(getattr(torch.linalg, name), rungs, [])
    monkeypatch.setattr(torch.linalg, name, routine)
    *found, ok = factorise(x, True)
    assert routine.calls == [(4, 3, 3)] + [(1, 3, 3)] * min(rungs, 3)
    assert ok.tolist() == [True, True, rungs < 9, True]
    for part, wanted in zip(found, expected, strict=True):
        assert_same(part[[0, 1, 3]], wanted[[0, 1, 3]])
        if rungs < 9:
            assert_close(part[2].abs(), wanted[2].abs(), 1e-3)  # eigenvectors have a sign of their own
        else:
            assert torch.isfinite(part[2]).all()


@pytest.mark.parametrize("method", ROUTINES)
def test_without_a_look_by_the_host_nothing_climbs(monkeypatch, method):
    name, factorise = ROUTINES[method]
    *expected, _ = factorise(stack(), False)
    routine = OneFails(getattr(torch.linalg, name), 9, [])
    monkeypatch.setattr(torch.linalg, name, routine)
    *found, ok = factorise(stack(), False)
    assert routine.calls == [(4, 3, 3)]
    assert ok.tolist() == [True, True, False, True]
    for part, wanted in zip(found, expected, strict=True):
        assert_same(part[[0, 1, 3]], wanted[[0, 1, 3]])


@pytest.mark.parametrize("method", ROUTINES)
def test_a_routine_that_raises_for_the_stack_is_asked_matrix_by_matrix(monkeypatch, method):
    name, factorise = ROUTINES[method]
    original = getattr(torch.linalg, name)
    *expected, _ = factorise(stack(), True)

    def fails(x):
        if (x[..., 0, 0] > 50).any():
            raise torch.linalg.LinAlgError("made to fail")
        return original(x)

    monkeypatch.setattr(torch.linalg, name, fails)
    *found, ok = factorise(stack(), False)
    assert ok.tolist() == [True, True, False, True]
    for part, wanted in zip(found, expected, strict=True):
        assert_close(part[[0, 1, 3]], wanted[[0, 1, 3]], 1e-12)
