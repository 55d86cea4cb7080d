"""Gates in place of branches: an open one does not affect results, and a shut one changes no bit, whatever the batch.

If the host must not wait for a device, a step is not skipped but multiplied by zero, and refreshes of stacks of
matrices continue if one of them fails. Complete steps on a device are tested in `tests/contract/test_devices.py`.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from secondorder.linalg import dense, first_order
from tests.support.grid import pairs
from tests.support.kfac import assert_close, noise

OPEN, SHUT = torch.tensor(True), torch.tensor(False)
SHAPES = ((3, 4), (5,))


def draw(seed: int) -> list[Tensor]:
    return [noise(*shape, seed=seed + i) for i, shape in enumerate(SHAPES)]


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


# ---------------------------------------------------------------------- first-order rules under a gate
RATES = {"number": 0.1, "tensor": torch.tensor(0.1, dtype=torch.float64)}
BETAS = (0.9, 0.999)


@pairs(
    lambda momentum, nesterov, **_: momentum > 0 or not nesterov,
    momentum=[0.0, 0.9],
    nesterov=[False, True],
    weight_decay=[0.0, 0.3],
    decoupled=[False, True],
    lr=RATES,
)
def test_sgd_under_a_gate(momentum, nesterov, weight_decay, decoupled, lr):
    keywords = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "decoupled": decoupled}

    def step(values, buffers, directions, gate):
        first_order.sgd_(values, directions, buffers if momentum else None, lr=lr, gate=gate, **keywords)

    gated, plain, shut = ((draw(0), draw(10)) for _ in range(3))
    for i in range(3):
        for lists, gate in ((gated, OPEN), (plain, None)):
            directions = draw(20 + i)
            step(*lists, directions, gate)
            assert_same(directions, draw(20 + i))
    assert_near(gated[0] + gated[1], plain[0] + plain[1])
    step(*shut, poisoned(), SHUT)
    assert_same(shut[0] + shut[1], draw(0) + draw(10))


def test_sgd_under_a_gate_takes_parameters_in_another_order_of_memory():
    """Directions are contiguous, as products of matrices are, and fused kernels read all tensors as they lie."""
    x, d = noise(2, 3, 4, 5, seed=1), noise(2, 3, 4, 5, seed=2)
    found = x.clone(memory_format=torch.channels_last), torch.zeros_like(x).to(memory_format=torch.channels_last)
    expected = x.clone(), torch.zeros_like(x)
    own = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.3, "decoupled": False}
    for _ in range(2):
        first_order.sgd_([found[0]], [d], [found[1]], gate=OPEN, **own)
        first_order.sgd_([expected[0]], [d], [expected[1]], gate=None, **own)
    assert_near(found, expected)
    assert found[0].is_contiguous(memory_format=torch.channels_last)


def test_squares_that_float16_cannot_hold_are_averaged_under_a_gate():
    g = torch.full((4,), 1000.0, dtype=torch.float16)
    means, squares = torch.zeros_like(g), torch.zeros_like(g)
    first_order.adam_moments_([g], [means], [squares], (0.9, 0.999), OPEN)
    torch.testing.assert_close(squares, torch.full_like(g, 1000.0))


def counts(*steps: float) -> list[Tensor]:
    return [torch.tensor(step) for step in steps]


def moments(fresh: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    return [x * (not fresh) for x in draw(30)], [x.square() * (not fresh) for x in draw(40)]


@pairs(weight_decay=[0.0, 0.3], decoupled=[False, True], lr=RATES)
def test_adam_under_a_gate(weight_decay, decoupled, lr):
    keywords = {"lr": lr, "betas": BETAS, "eps": 1e-8, "weight_decay": weight_decay, "decoupled": decoupled}
    gated, plain = (draw(0), *moments()), (draw(0), *moments())
    for i in range(3):
        for (values, *found), gate in ((gated, OPEN), (plain, None)):
            first_order.adam_(values, draw(50 + i), *found, counts(i + 1.0, i + 4.0), gate=gate, **keywords)
    for one, other in zip(gated, plain, strict=True):
        assert_near(one, other)
    for fresh in (False, True):  # before the first step, too
        values, found = draw(0), moments(fresh)
        first_order.adam_(values, poisoned(), *found, counts(1.0, 7.0), gate=SHUT, **keywords)
        assert_same(values + found[0] + found[1], draw(0) + moments(fresh)[0] + moments(fresh)[1])


def symmetric(n: int, seed: int) -> Tensor:
    x = noise(n, n, seed=seed)
    return x @ x.mT


# ---------------------------------------------------------------------- a stack of matrices, one of which fails
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
def test_only_the_matrix_that_failed_is_repeated(monkeypatch, method, rungs):
    """``rungs`` calls fail: that for the stack, that for the matrix alone, then with jitter, then in float64."""
    name, factorize = ROUTINES[method]
    x = stack(torch.float32)
    *expected, fine = factorize(x, True)
    assert fine.all()
    routine = OneFails(getattr(torch.linalg, name), rungs, [])
    monkeypatch.setattr(torch.linalg, name, routine)
    *found, ok = factorize(x, True)
    assert routine.calls == [(4, 3, 3)] + [(1, 3, 3)] * min(rungs, 3)
    assert ok.tolist() == [True, True, rungs < 9, True]
    for part, wanted in zip(found, expected, strict=True):
        assert_same(part[[0, 1, 3]], wanted[[0, 1, 3]])
        if rungs < 9:
            assert_close(part[2].abs(), wanted[2].abs(), 1e-3)  # signs of eigenvectors are arbitrary
        else:
            assert torch.isfinite(part[2]).all()


@pytest.mark.parametrize("method", ROUTINES)
def test_without_checks_by_the_host_nothing_is_repeated(monkeypatch, method):
    """A routine that raises for the stack is called for each matrix."""
    name, factorize = ROUTINES[method]
    original = getattr(torch.linalg, name)
    *expected, _ = factorize(stack(), False)

    def raises(x):
        if (x[..., 0, 0] > 50).any():
            raise torch.linalg.LinAlgError("made to fail")
        return original(x)

    garbage = OneFails(original, 9, [])
    for routine, tolerance in ((garbage, 0.0), (raises, 1e-12)):
        monkeypatch.setattr(torch.linalg, name, routine)
        *found, ok = factorize(stack(), False)
        assert ok.tolist() == [True, True, False, True]
        for part, wanted in zip(found, expected, strict=True):
            assert_close(part[[0, 1, 3]], wanted[[0, 1, 3]], tolerance)
    assert garbage.calls == [(4, 3, 3)]
