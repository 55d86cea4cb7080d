"""Averaged copies of the model: `torch.optim.swa_utils`, EMA teachers, copies of copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, backward, train, values

KINDS: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "buffers": {"use_buffers": True},
}


@pytest.mark.cover(kind=[*KINDS], hooked_first=[True, False])
def test_average_beside_the_training(method: Method, mlp: Task, kind: str, hooked_first: bool) -> None:
    model, alone = mlp.model(), mlp.model()
    undisturbed = method.build(alone)
    if hooked_first:
        optimizer = method.build(model)
        averaged = AveragedModel(model, **KINDS[kind])
    else:
        averaged = AveragedModel(model, **KINDS[kind])
        optimizer = method.build(model)
    for step in range(5):
        train(model, optimizer, mlp, 1, start=step)
        averaged.update_parameters(model)
        train(alone, undisturbed, mlp, 1, start=step)
    assert_identical(values(model), values(alone))
    assert_identical(optimizer.state_dict(), undisturbed.state_dict())
    assert int(averaged.n_averaged) == 5


@pytest.mark.cover(mode=["no_grad", "inference_mode", "eval", "train"])
def test_teacher_in_the_loss(method: Method, mlp: Task, mode: str) -> None:
    """Its forward stands between the student's forward and backward, and is none of the optimizer's business."""

    def run(with_teacher: bool) -> Any:
        model, optimizer = method.start(mlp)
        teacher = copy.deepcopy(model)
        teacher.train(mode != "eval")
        for step in range(5):
            optimizer.zero_grad()
            loss = mlp.loss(model, step)
            if with_teacher:
                contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
                with contexts.get(mode, torch.enable_grad)():
                    teacher(mlp.batch(100 + step)[0])
            loss.backward()
            optimizer.step()
        return values(model), optimizer.state_dict()

    assert_identical(run(True), run(False))


@pytest.mark.cover(mode=["no_grad", "inference_mode", "eval"])
def test_the_hooked_model_itself_between_forward_and_backward(method: Method, mlp: Task, mode: str) -> None:
    def run(with_evaluation: bool) -> Any:
        model, optimizer = method.start(mlp)
        for step in range(5):
            optimizer.zero_grad()
            loss = mlp.loss(model, step)
            if with_evaluation:
                contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
                model.train(mode != "eval")
                with contexts.get(mode, torch.no_grad)():
                    model(mlp.batch(100 + step)[0])
                model.train()
            loss.backward()
            optimizer.step()
        return values(model), optimizer.state_dict()

    assert_identical(run(True), run(False))


def test_optimizer_of_an_averaged_model(method: Method, mlp: Task) -> None:
    """A wrapper is a module like any other: names carry its prefix, and the layers inside get their blocks."""
    model, plain = AveragedModel(mlp.model()), mlp.model()
    optimizer, reference = method.build(model), method.build(plain)
    for step in range(4):
        backward(model, optimizer, mlp, step)
        optimizer.step()
        train(plain, reference, mlp, 1, start=step)
    assert_identical(values(model.module), values(plain))


def test_batch_norm_update_does_not_reach_the_optimizer(method: Method) -> None:
    """`update_bn` runs the averaged model in training mode."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    batches = [torch.randn(6, 3) for _ in range(3)]
    optimizer = method.build(model)
    averaged = AveragedModel(model)
    for inputs in batches:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    before = copy.deepcopy(optimizer.state_dict())
    update_bn(batches, averaged)
    update_bn(batches, model)
    assert_identical(optimizer.state_dict(), before)


def test_average_loads_into_the_model_and_training_goes_on(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    averaged = AveragedModel(model)
    train(model, optimizer, mlp, 3)
    averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    before = values(model)
    train(model, optimizer, mlp, 2, start=3)
    assert all(not torch.equal(value, before[name]) for name, value in values(model).items())
