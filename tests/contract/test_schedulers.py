"""Every scheduler of `torch.optim.lr_scheduler` works with a method as it works with `torch.optim.SGD`."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.support.methods import Method
from tests.support.tasks import Task, assert_changed, assert_identical, assert_same_moves, displacements, train, values

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.05, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=3),
}


CYCLES_BETAS = {"CyclicLR", "OneCycleLR"}  # instead of the momentum, if a group has betas


def tick(scheduler: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def test_every_scheduler_of_torch_is_listed() -> None:
    assert SCHEDULERS.keys() - {"SWALR"} == set(lr_scheduler.__all__) - {"LRScheduler"}


def test_every_scheduler_sets_what_it_sets_for_sgd(method: Method, mlp: Task) -> None:
    for name, schedule in SCHEDULERS.items():
        model, twin = mlp.model(), mlp.model()
        optimizer = method.build(model)
        sgd = torch.optim.SGD(twin.parameters(), method.keywords["lr"], momentum=0.9)
        before = values(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as "lr_scheduler.step() before optimizer.step()"
            # SequentialLR of torch 2.8 causes this warning itself.
            warnings.filterwarnings("ignore", message="The epoch parameter in", category=UserWarning)
            ours, theirs = schedule(optimizer), schedule(sgd)
            for step in range(6):
                train(model, optimizer, mlp, 1, start=step)
                sgd.step()
                tick(ours)
                tick(theirs)
                group, expected = optimizer.param_groups[0], dict(sgd.param_groups[0])
                if name in CYCLES_BETAS and "betas" in optimizer.defaults:  # the momentum does not change
                    assert group["betas"] == (expected["momentum"], *method.cls(mlp.model()).defaults["betas"][1:])
                    expected["momentum"] = method.keywords["momentum"]
                for key in ("lr", "momentum"):
                    assert group[key] == expected[key], name
        assert_changed(model, before)


def test_steps_use_the_scheduled_lr_and_momentum(method: Method, mlp: Task) -> None:
    def cycle(optimizer: Any) -> None:
        optimizer.param_groups[0]["momentum"] = 0.25

    model, scheduled = method.start(mlp, **method.bare())
    scheduler, plain = lr_scheduler.StepLR(scheduled, 1, 0.5), method.bare_moves(mlp, 4)
    pairs = zip(plain, displacements(model, scheduled, mlp, 4, scheduler.step), strict=True)
    for step, (full, halved) in enumerate(pairs):
        assert_same_moves(halved, {name: value * 0.5**step for name, value in full.items()})
    _, moved = method.bare_moves(mlp, 2, momentum=0.9, between=cycle)
    assert_same_moves(moved, {name: plain[1][name] + 0.25 * plain[0][name] for name in moved})


@pytest.mark.parametrize("schedule", ["OneCycleLR", "StepLR"])
def test_a_scheduled_run_resumes_from_its_state(method: Method, mlp: Task, schedule: str) -> None:
    """The rate of a fallback is in proportion to the initial rate, and not to the one at which training resumes."""

    def fresh() -> tuple[Any, Any, Any]:
        model, optimizer = method.start(mlp, fallback="adamw", fallback_lr=0.02, **method.leave_out)
        return model, optimizer, SCHEDULERS[schedule](optimizer)

    def run(steps: range, model: Any, optimizer: Any, scheduler: Any) -> None:
        for step in steps:
            train(model, optimizer, mlp, 1, start=step)
            scheduler.step()

    first, second = fresh(), fresh()
    run(range(3), *first)
    for mine, theirs in zip(second, first, strict=True):
        mine.load_state_dict(theirs.state_dict())
    for one in (first, second):
        run(range(3, 7), *one)
    assert_identical(values(second[0]), values(first[0]))
    assert second[1].param_groups[0]["lr"] == first[1].param_groups[0]["lr"]


def test_step_wrapped_on_the_instance_is_the_one_that_runs(method: Method, mlp: Task) -> None:
    """Schedulers, trainers and Accelerate replace `step` on the instance."""
    model, optimizer = method.start(mlp)
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step = Mock(wraps=optimizer.step)
    before = values(model)
    train(model, optimizer, mlp, 2)
    assert optimizer.step.call_count == 2
    assert_changed(model, before)
