"""The user's own hooks on covered layers: statistics are those of the layer's own inputs and outputs."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from secondorder import KFAC
from tests.support.grid import pairs
from tests.support.kfac import assert_close, assert_factors, labels, noise, plain_kfac, train_step
from tests.support.models import Net, seeded_build
from tests.support.oracles.kfac import expected_factors
from tests.support.oracles.layers import block_state
from tests.support.warned import silent

WIDTH, N = 64, 12


def times() -> Net:
    """Does what the hooks of these tests do, because the oracle runs no hooks."""
    return Net(lambda net, x: 3 * x)


def layers(kind: str) -> list[nn.Module]:
    if kind == "conv":
        return [nn.Conv2d(4, WIDTH, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(WIDTH * 9, 5)]
    middle = [nn.Unflatten(1, (1, 7)), nn.AvgPool2d((7, 1)), nn.Flatten()] if kind == "tokens" else []
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *middle, nn.Linear(WIDTH, 5)]


SHAPES = {"rows": (WIDTH,), "tokens": (7, WIDTH), "conv": (4, 3, 3)}


def data(kind: str = "rows") -> tuple[Tensor, Tensor]:
    return noise(N, *SHAPES[kind]), labels(N, 5)


def plain(kind: str = "rows") -> nn.Sequential:
    return seeded_build(lambda: nn.Sequential(*layers(kind)))


def with_module(kind: str = "rows") -> nn.Sequential:
    """The first layer's output times 3, by a module after it; layer "0" is the first in both models."""
    model = plain(kind)
    return nn.Sequential(model[0], times(), *model[1:])


times_three = lambda module, args, output: 3 * output  # noqa: E731


def times_three_in_place(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    output.mul_(3)


def factors_of(opt: Any, model: nn.Module, kind: str = "rows", name: str = "0") -> tuple[Tensor, Tensor]:
    train_step(opt, model, *data(kind), F.cross_entropy)
    state = block_state(opt, name)
    return state["factor_a"], state["factor_g"]


def check_first_layer(opt: Any, model: nn.Module, kind: str = "rows", approx: str = "expand") -> None:
    expected = expected_factors(with_module(kind), *data(kind), F.cross_entropy, ["0"], approx)
    assert_factors({"0": factors_of(opt, model, kind)}, expected)


@pairs(kind=["rows", "tokens", "conv"], approx=["expand", "reduce"], hook=[times_three, times_three_in_place])
def test_a_hook_that_was_registered_first_may_change_the_output(kind, approx, hook):
    model = plain(kind)
    model[0].register_forward_hook(hook)
    check_first_layer(plain_kfac(model, approx=approx), model, kind, approx)


@pairs(when=["before", "after", "between steps"], prepend=[False, True])
def test_hooks_that_come_at_any_time(when, prepend):
    model = plain()
    if when == "before":
        model[0].register_forward_hook(times_three, prepend=prepend)
    opt = plain_kfac(model, lr=0.0, factor_decay=0.0)
    if when == "between steps":
        factors_of(opt, model)
    if when != "before":
        model[0].register_forward_hook(times_three, prepend=prepend)
    check_first_layer(opt, model)


def test_two_optimizers_and_hooks_around_them():
    model = plain()
    hook = model[0].register_forward_hook
    hook(times_three)
    first = plain_kfac(model, lr=0.0)
    hook(lambda *_: None, prepend=True)
    second = plain_kfac(model, lr=0.0)
    hook(lambda m, args, output: output / 2, prepend=True)
    hook(lambda m, args, output: output * 2)
    for opt in (first, second):
        check_first_layer(opt, model)
    own = [hook for hook in model[0]._forward_hooks.values() if type(hook).__module__.startswith("secondorder")]
    assert list(model[0]._forward_hooks.values())[:2] == own


def test_hooks_with_keywords_and_hooks_that_always_run():
    model, seen = plain(), []
    model[0].register_forward_hook(lambda m, args, kwargs, output: 3 * output, with_kwargs=True)
    model[0].register_forward_hook(lambda *_: seen.append(1), always_call=True)
    opt = plain_kfac(model)
    check_first_layer(opt, model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(noise(N, WIDTH + 1))
    assert seen == [1, 1]
    opt.zero_grad()
    factors_of(opt, model)  # nothing of the failed forward is left


def test_a_layer_that_is_the_model_itself():
    """Its tap runs before the user's hook, and the hook that ends the forward after both."""
    model = seeded_build(lambda: nn.Linear(WIDTH, 5))
    expected = expected_factors(nn.Sequential(copy.deepcopy(model), times()), *data(), F.cross_entropy)
    model.register_forward_hook(times_three)
    opt = plain_kfac(model)
    model.register_forward_hook(lambda *_: None, prepend=True)
    assert_factors({"0": factors_of(opt, model, name="")}, expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_hooks_under_compilation():
    """The order of hooks cannot be changed after compilation, so a layer is left out if a hook precedes its tap."""
    model = plain()
    model[0].register_forward_hook(times_three)
    check_first_layer(plain_kfac(model), torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()
    model = plain()
    opt = plain_kfac(model)
    model[0].register_forward_hook(times_three, prepend=True)
    with pytest.warns(UserWarning, match=r"\(0: its hooks did not run\)"):
        train_step(opt, torch.compile(model, backend="aot_eager"), *data(), F.cross_entropy)
    assert [block_state(opt, name)["factor_updates"] for name in ("0", "2")] == [0, 1]


def test_a_layer_that_is_called_without_its_model():
    """No forward of the model has moved the taps to the front, so the layer is left out of the first step only."""
    model = plain()
    opt = plain_kfac(model, lr=0.0)
    model[0].register_forward_hook(times_three, prepend=True)
    x, y = data()
    for warns in (pytest.warns(UserWarning, match=r"\(0: a forward hook .* ran before the optimizer's\)"), silent()):
        opt.zero_grad()
        F.cross_entropy(model[2](model[1](model[0](x))), y).backward()
        with warns:
            opt.step()
    assert block_state(opt, "0")["factor_updates"] == 1
    expected = expected_factors(with_module(), x, y, F.cross_entropy, ["0"])["0"]
    assert_close(block_state(opt, "0")["factor_g"], expected[1])


@pytest.mark.parametrize("late", [False, True])
def test_a_pre_hook_may_change_the_input(late):
    expected = expected_factors(nn.Sequential(times(), *plain()), *data(), F.cross_entropy, ["1"])
    model = plain()
    opt = plain_kfac(model) if late else None
    model[0].register_forward_pre_hook(lambda m, args: (3 * args[0],))
    assert_factors({"1": factors_of(opt or plain_kfac(model), model)}, expected)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_full_backward_hooks_keep_their_effect():
    """A pre-hook changes the gradient at the output, which the weight sees; a hook changes the one at the input."""
    model, seen = plain(), []
    model[0].register_full_backward_pre_hook(lambda m, grads: (3 * grads[0],))
    model[2].register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0].detach()))
    opt = plain_kfac(model)
    (A, B), (_, head) = expected_factors(plain(), *data(), F.cross_entropy).values()
    assert_factors({"0": factors_of(opt, model)}, {"0": (A, 9 * B)})
    for expected in (head, N * seen[0].mT @ seen[0]):
        assert_close(block_state(opt, "2")["factor_g"], expected)


def test_a_hook_for_all_modules_that_changes_nothing():
    model, seen = plain(), []
    expected = expected_factors(plain(), *data(), F.cross_entropy, ["0"])
    with register_module_forward_hook(lambda m, args, output: seen.append(type(m))):
        assert_factors({"0": factors_of(plain_kfac(model), model)}, expected)
    assert nn.Linear in seen


def test_a_closed_optimizer_leaves_the_user_s_hooks_in_their_order():
    model, hooks = plain(), [lambda *_: None for _ in range(3)]
    model[0].register_forward_hook(hooks[1])
    opt = KFAC(model)
    model[0].register_forward_hook(hooks[2])
    model[0].register_forward_hook(hooks[0], prepend=True)
    model(data()[0])
    opt.close()
    assert list(model[0]._forward_hooks.values()) == hooks


@pytest.mark.filterwarnings("ignore:.*follow the fallback")
def test_a_parameter_that_the_model_returns_keeps_no_hook():
    scale, layer = nn.Parameter(torch.ones(())), nn.Linear(4, 3)
    model = seeded_build(lambda: Net(lambda net, x: (net.layer(x) * net.scale, net.scale), layer=layer, scale=scale))
    opt = plain_kfac(model)
    for _ in range(3):
        opt.zero_grad()
        sum(output.square().mean() for output in model(noise(8, 4))).backward()
        opt.step()
    assert not model.scale._backward_hooks
