"""Other code that uses the model or the optimizer changes no bit of the parameters or the state.

Examples are weight averages, EMA teachers, evaluations, per-example gradients, trained copies and repeated hooks.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from secondorder.diagnostics import quantify_preconditioning
from tests.support.checkpoints import COPIERS, Pair, assert_same_run
from tests.support.methods import Method, Variant
from tests.support.tasks import MLP, backward, train, values

Act = Callable[[nn.Module, Any, int], object]  # called with the model, its optimizer and the number of the step
Prepare = Callable[[nn.Module, Any], Act]
STEPS = 5
CONTEXTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "train": torch.enable_grad}


def always(act: Act) -> Prepare:
    """An action that needs no preparation."""
    return lambda model, optimizer: act


def average(**kind: Any) -> Prepare:
    def prepare(model: nn.Module, optimizer: Any) -> Act:
        averaged = AveragedModel(model, **kind)
        return lambda model, *_: averaged.update_parameters(model)

    return prepare


def evaluation(mode: str, of_a_copy: bool) -> Prepare:
    """A forward pass of the model itself or of a copy, which does not contribute to the loss."""

    def prepare(model: nn.Module, optimizer: Any) -> Act:
        teacher = copy.deepcopy(model) if of_a_copy else model

        def act(model: nn.Module, optimizer: Any, step: int) -> None:
            teacher.train(mode != "eval")
            with CONTEXTS.get(mode, torch.no_grad)():
                teacher(MLP.batch(100 + step)[0])
            teacher.train()

        return act

    return prepare


def training_of_a_copy(copier: Callable[[Any], Any]) -> Prepare:
    def prepare(model: nn.Module, optimizer: Any) -> Act:
        twin = copier(model)
        return lambda model, optimizer, step: MLP.loss(twin, 100 + step).backward()

    return prepare


@always
def paused_training(model: nn.Module, optimizer: Any, step: int) -> None:
    with optimizer.pause_capture():
        MLP.loss(model, 100 + step).backward()


@always
def attaching_again(model: nn.Module, optimizer: Any, step: int) -> None:
    """With and without a call of `detach` before."""
    if step % 2:
        optimizer.detach()
    optimizer.attach(model)


@always
def hooks_of_the_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)


@always
def foreign_parameters(model: nn.Module, optimizer: Any, step: int) -> None:
    """Passes with other parameters: the fast weights of a meta-learner, and per-example gradients."""

    def total(own: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(model, own, (inputs,)).sum()

    inputs, targets = MLP.batch(100 + step)
    fast = {name: value.requires_grad_() for name, value in values(model).items()}
    F.cross_entropy(functional_call(model, fast, (inputs,)), targets).backward()
    torch.func.grad(total)(values(model), inputs)
    torch.func.vmap(torch.func.grad(total), (None, 0))(values(model), inputs[:, None])


@always
def gradient_of_inputs(model: nn.Module, optimizer: Any, step: int) -> None:
    """Gradients with respect to inputs only, as for adversarial examples and saliency maps."""
    inputs = MLP.batch(100 + step)[0].requires_grad_()
    for training in (False, True):
        torch.autograd.grad(model.train(training)(inputs).sum(), inputs)


@always
def traced(model: nn.Module, optimizer: Any, step: int) -> None:
    """A model that is exported in training mode has no operators of the optimizer."""
    inputs = MLP.batch(100 + step)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace", DeprecationWarning)
        torch.jit.trace(model, inputs)
    nodes = torch.export.export(model, (inputs,)).graph.nodes
    assert not [node for node in nodes if "secondorder" in str(node.target)]


ANYWHERE: dict[str, Prepare] = {
    "foreign parameters": foreign_parameters,
    "gradient of inputs": gradient_of_inputs,
    "a forward alone": always(lambda model, optimizer, step: model(MLP.batch(100 + step)[0])),
}
COPIES = {f"training of a copy by {name}": training_of_a_copy(copier) for name, copier in COPIERS.items()}
MOMENTS: dict[str, dict[str, Prepare]] = {
    "between two steps": {
        "average": average(),
        "moving average": average(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "average with buffers": average(use_buffers=True),
        "paused training": paused_training,
        "attaching again": attaching_again,
        "export": traced,
        "hooks of the step": hooks_of_the_step,
        **ANYWHERE,
        **COPIES,
    },
    "between forward and backward": {
        **{f"teacher, {mode}": evaluation(mode, True) for mode in (*CONTEXTS, "eval")},
        **ANYWHERE,
        **{f"the model itself, {mode}": evaluation(mode, False) for mode in ("no_grad", "inference_mode", "eval")},
    },
    "between backward and step": {
        **ANYWHERE,
        "clip by norm": always(lambda model, *_: nn.utils.clip_grad_norm_(model.parameters(), 1e6)),
        "clip by value": always(lambda model, *_: nn.utils.clip_grad_value_(model.parameters(), 1e6)),
        **COPIES,
    },
}


def trained(method: Method, moment: str = "", prepare: Prepare | None = None, **keywords: Any) -> Pair:
    model, optimizer = method.start(MLP, **keywords)
    act = prepare(model, optimizer) if prepare else None

    def reach(place: str) -> None:
        if act and place == moment:
            act(model, optimizer, step)

    for step in range(STEPS):
        reach("between two steps")
        optimizer.zero_grad()
        loss = MLP.loss(model, step)
        reach("between forward and backward")
        loss.backward()
        reach("between backward and step")
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

    @always
    def looking(model: nn.Module, optimizer: Any, step: int) -> None:
        for look in (optimizer.diagnostics, optimizer.describe, optimizer.memory_usage, optimizer.__repr__):
            look()
        for name in blocks if step else ():
            optimizer.dense_curvature(name)

    model, optimizer = trained(method, "between two steps", looking, **variant.keywords)
    with optimizer.keep_directions() as kept:
        train(model, optimizer, MLP, 1, start=STEPS)
    quantify_preconditioning({name: model.get_parameter(name).grad for name in kept}, kept, histogram=True)
    twin, undisturbed = trained(method, **variant.keywords)
    train(twin, undisturbed, MLP, 1, start=STEPS)
    assert_same_run((model, optimizer), (twin, undisturbed))


def test_steps_may_run_in_inference_mode(method: Method) -> None:
    pairs = [method.start(MLP) for _ in range(2)]
    for step in range(STEPS):
        for (model, optimizer), context in zip(pairs, (nullcontext, torch.inference_mode), strict=True):
            backward(model, optimizer, MLP, step)
            with context():
                optimizer.step()
    assert_same_run(*pairs)


@pytest.mark.option("window_size")
def test_a_window_method_trains_alike_after_detach(method: Method) -> None:
    model, optimizer = method.start(MLP)
    optimizer.detach()
    train(model, optimizer, MLP, STEPS)
    assert_same_run((model, optimizer), trained(method))
