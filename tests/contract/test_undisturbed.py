"""Other code that uses the model or the optimizer changes no bit of the parameters or the state.

Examples are weight averages, EMA teachers, evaluations, per-example gradients, trained copies and repeated hooks.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from secondorder.diagnostics import quantify_preconditioning
from tests.support.checkpoints import COPIERS, Pair, assert_same_run
from tests.support.methods import Method, Variant
from tests.support.tasks import MLP, assert_identical, train, values

Act = Callable[[int], object]  # called in every step, with its number
Prepare = Callable[[nn.Module, Any], Act]
STEPS = 5
CONTEXTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "train": torch.enable_grad}


def average(**kind: Any) -> Prepare:
    def prepare(model: nn.Module, optimizer: Any) -> Act:
        averaged = AveragedModel(model, **kind)
        return lambda step: averaged.update_parameters(model)

    return prepare


def evaluation(mode: str, of_a_copy: bool) -> Prepare:
    """A forward pass of the model itself or of a copy, which does not contribute to the loss."""

    def prepare(model: nn.Module, optimizer: Any) -> Act:
        teacher = copy.deepcopy(model) if of_a_copy else model

        def act(step: int) -> None:
            teacher.train(mode != "eval")
            with CONTEXTS.get(mode, torch.no_grad)():
                teacher(MLP.batch(100 + step)[0])
            teacher.train()

        return act

    return prepare


def training_of_a_copy(copier: Callable[[Any], Any]) -> Prepare:
    def prepare(model: nn.Module, optimizer: Any) -> Act:
        twin = copier(model)
        return lambda step: MLP.loss(twin, 100 + step).backward()

    return prepare


def paused_training(model: nn.Module, optimizer: Any) -> Act:
    def act(step: int) -> None:
        with optimizer.pause_capture():
            MLP.loss(model, 100 + step).backward()

    return act


def attaching_again(model: nn.Module, optimizer: Any) -> Act:
    """With and without a call of `detach` before."""

    def act(step: int) -> None:
        if step % 2:
            optimizer.detach()
        optimizer.attach(model)

    return act


def hooks_of_the_step(model: nn.Module, optimizer: Any) -> Act:
    def act(step: int) -> None:
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.register_step_post_hook(lambda *_: None)

    return act


def foreign_parameters(model: nn.Module, optimizer: Any) -> Act:
    """Passes with other parameters: the fast weights of a meta-learner, and per-example gradients."""

    def total(own: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(model, own, (inputs,)).sum()

    def act(step: int) -> None:
        inputs, targets = MLP.batch(100 + step)
        fast = {name: value.requires_grad_() for name, value in values(model).items()}
        F.cross_entropy(functional_call(model, fast, (inputs,)), targets).backward()
        torch.func.grad(total)(values(model), inputs)
        torch.func.vmap(torch.func.grad(total), (None, 0))(values(model), inputs[:, None])

    return act


def gradient_of_inputs(model: nn.Module, optimizer: Any) -> Act:
    """Gradients with respect to inputs only, as for adversarial examples and saliency maps."""

    def act(step: int) -> None:
        inputs = MLP.batch(100 + step)[0].requires_grad_()
        for training in (False, True):
            torch.autograd.grad(model.train(training)(inputs).sum(), inputs)

    return act


def forward_alone(model: nn.Module, optimizer: Any) -> Act:
    return lambda step: model(MLP.batch(100 + step)[0])


def clip_that_is_not_reached(clip: Callable[..., Any]) -> Prepare:
    return lambda model, optimizer: lambda step: clip(model.parameters(), 1e6)


ALWAYS: dict[str, Prepare] = {
    "foreign parameters": foreign_parameters,
    "gradient of inputs": gradient_of_inputs,
    "a forward alone": forward_alone,
}
COPIES = {f"training of a copy by {name}": training_of_a_copy(copier) for name, copier in COPIERS.items()}
MOMENTS: dict[str, dict[str, Prepare]] = {
    "between two steps": {
        "average": average(),
        "moving average": average(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "average with buffers": average(use_buffers=True),
        "paused training": paused_training,
        "attaching again": attaching_again,
        "hooks of the step": hooks_of_the_step,
        **ALWAYS,
        **COPIES,
    },
    "between forward and backward": {
        **{f"teacher, {mode}": evaluation(mode, True) for mode in (*CONTEXTS, "eval")},
        **ALWAYS,
        **{f"the model itself, {mode}": evaluation(mode, False) for mode in ("no_grad", "inference_mode", "eval")},
    },
    "between backward and step": {
        **ALWAYS,
        "clip by norm": clip_that_is_not_reached(nn.utils.clip_grad_norm_),
        "clip by value": clip_that_is_not_reached(nn.utils.clip_grad_value_),
        **COPIES,
    },
}


def trained(method: Method, moment: str = "", prepare: Prepare | None = None, **keywords: Any) -> Pair:
    model, optimizer = method.start(MLP, **keywords)
    act = prepare(model, optimizer) if prepare else None
    for step in range(STEPS):
        acts = {moment: act} if act else {}
        acts.get("between two steps", int)(step)
        optimizer.zero_grad()
        loss = MLP.loss(model, step)
        acts.get("between forward and backward", int)(step)
        loss.backward()
        acts.get("between backward and step", int)(step)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("moment", MOMENTS)
def test_training_is_undisturbed(method: Method, moment: str) -> None:
    undisturbed = trained(method)
    for name, prepare in MOMENTS[moment].items():
        try:
            assert_same_run(trained(method, moment, prepare), undisturbed)
        except AssertionError as error:
            raise AssertionError(f"disturbed by: {name}") from error


def test_diagnostics_and_kept_directions_change_nothing(method: Method, variant: Variant) -> None:
    blocks = ["first", "second"] if method.layerwise else [name for name, _ in MLP.model().named_parameters()]

    def looking(model: nn.Module, optimizer: Any) -> Act:
        def act(step: int) -> None:
            for look in (optimizer.diagnostics, optimizer.describe, optimizer.memory_usage, optimizer.__repr__):
                look()
            for name in blocks if step else ():
                optimizer.dense_curvature(name)

        return act

    model, optimizer = trained(method, "between two steps", looking, **variant.keywords)
    with optimizer.keep_directions() as kept:
        train(model, optimizer, MLP, 1, start=STEPS)
    quantify_preconditioning({name: model.get_parameter(name).grad for name in kept}, kept, histogram=True)
    twin, undisturbed = trained(method, **variant.keywords)
    train(twin, undisturbed, MLP, 1, start=STEPS)
    assert_same_run((model, optimizer), (twin, undisturbed))


@pytest.mark.option("window_size")
def test_a_window_method_trains_alike_without_a_module_and_after_detach(method: Method) -> None:
    expected = trained(method)
    model, twin = MLP.model(), MLP.model()
    detached, alone = method.build(model), method.build(twin, twin.parameters())
    detached.detach()
    with alone:
        for net, optimizer in ((model, detached), (twin, alone)):
            train(net, optimizer, MLP, STEPS)
    alone.detach()
    assert_same_run((model, detached), expected)
    assert_identical(values(twin), values(expected[0]))
    assert_identical(alone.state_dict()["state"], expected[1].state_dict()["state"])
    assert alone.memory_usage()["total"] > 0


def test_batch_norm_update_does_not_reach_the_optimizer(method: Method) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
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
