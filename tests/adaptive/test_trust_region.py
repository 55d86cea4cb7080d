"""The trust region on plain values: what it does with a step, without a model and without an optimizer."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder.adaptation.no_trust import NoTrust
from secondorder.adaptation.trial import Adaptation
from secondorder.adaptation.trust_region import GRID, TrustRegion
from secondorder.linalg import quadratic
from secondorder.parameters import ParameterTable


class Block(SimpleNamespace):
    """A block whose inverse depends on the damping of its refresh if it is factored."""

    @property
    def inverse(self) -> SimpleNamespace:
        return SimpleNamespace(holds_damping=self.group.get("inverse_method") == "cholesky")


class Problem:
    """One parameter with the loss ``|p|²/2``, whose steps go as far as they are told."""

    def __init__(self, **options: Any) -> None:
        root = nn.Linear(1, 1, bias=False)
        self.p = root.weight
        with torch.no_grad():
            self.p.fill_(1.0)
        self.group: dict[str, Any] = {"params": [self.p], "damping": 1.0, "maximize": False}
        Adaptation(**options).mark([self.group], 0)
        state = {"step": torch.zeros(()), "momentum_buffer": torch.ones(1, 1), "refreshes": 1}
        table = ParameterTable(groups=[self.group], state={self.p: state}, group_of={self.p: self.group}, root=root)
        self.block = Block(group=self.group, owner=self.p, index=0, label="the layer")
        self.renewed: list[Any] = []
        self.quiet: list[bool] = []
        curvature = SimpleNamespace(
            table=table, comm=SimpleNamespace(combines=False),
            hooks=SimpleNamespace(pause=lambda by_user: nullcontext()),
            setting=SimpleNamespace(
                runtime=SimpleNamespace(step=0), layers=SimpleNamespace(batch_dim=0, batch_input=None),
                loss_scale=SimpleNamespace(multiplies=False),
            ),
            directions=SimpleNamespace(active=lambda gradients: [self.block]),
            plan=SimpleNamespace(blocks=[self.block]),
            renew=self.renewed.extend,
        )  # fmt: skip
        self.trust = TrustRegion(Adaptation(**options), curvature, SimpleNamespace())  # type: ignore[arg-type]

    def loss(self) -> Tensor:
        return (self.p.detach() ** 2).sum() / 2

    def step(self, length: float) -> None:
        """Take a step of the length, or one that λ divides."""

        def move(*, quiet: bool = False) -> None:
            self.quiet.append(quiet)
            self.p.sub_(length / self.group["damping"] if quiet else length)

        with torch.no_grad():
            self.trust.evaluate(self.loss)
            self.trust.take(move, {self.p: self.p.detach().clone()}, None)


def test_without_trust_every_step_is_taken() -> None:
    found: list[bool] = []
    trust, p = NoTrust(), nn.Parameter(torch.ones(2))
    directions = {p: torch.ones(2)}
    trust.take(lambda *, quiet=False: found.append(quiet), directions, None)
    assert found == [False]
    assert trust.size(directions, directions) == (directions, None)
    assert trust.evaluate(None) is None
    assert trust.evaluate(torch.is_grad_enabled)
    assert trust.why_not_joinable() is None
    assert trust.diagnostics() == {}


@pytest.mark.parametrize(("length", "stays"), [(0.5, False), (3.0, True)])
def test_a_step_that_raises_the_loss_is_undone(length: float, stays: bool) -> None:
    problem = Problem(reject_steps=True)
    problem.step(length)
    assert problem.p.item() == (1.0 if stays else 1.0 - length)
    assert problem.group["rejected_in_a_row"] == problem.trust.diagnostics()["rejected_steps"] == int(stays)
    assert (problem.group["damping"] > 1.0) == stays


def test_the_second_rejection_forgets_momentum() -> None:
    problem = Problem(reject_steps=True)
    buffer = problem.trust._table.state[problem.p]["momentum_buffer"]
    for expected in (1.0, 0.0):
        problem.step(3.0)
        assert float(buffer) == expected


def test_calibration_takes_the_best_damping_and_is_quiet() -> None:
    problem = Problem(calibrate_damping=True)
    problem.step(0.1)
    assert problem.quiet == [True] * len(GRID) + [False]
    assert problem.group["damping"] == 1e-1  # the step of length 1 ends at the minimum
    assert problem.group["damping_calibrated"]
    assert problem.p.item() == pytest.approx(0.9)


def test_a_dropped_batch_raises_the_damping() -> None:
    problem = Problem(adaptive_damping=True, damping_interval=1)
    problem.trust.dropped()
    assert problem.group["damping"] == pytest.approx(1 / quadratic.DECAY)
    assert not problem.renewed
    problem.group["inverse_method"] = "cholesky"
    problem.trust.set_damping([2.0])
    assert problem.renewed == [problem.block]


def test_an_error_in_a_step_takes_it_back() -> None:
    problem = Problem(reject_steps=True)

    def move(*, quiet: bool = False) -> None:
        problem.p.sub_(1.0)
        raise KeyError

    with torch.no_grad():
        problem.trust.evaluate(problem.loss)
        with pytest.raises(KeyError):
            problem.trust.take(move, {problem.p: torch.ones(1, 1)}, None)
    assert problem.p.item() == 1.0
