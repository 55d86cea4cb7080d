"""Messages about layers without curvature are correct, have one line and name a remedy."""

import pytest
import torch
from torch import Tensor, nn

import secondorder
from secondorder import EKFAC, KFAC, HyLo
from tests.support.building import built
from tests.support.models import Net
from tests.support.warned import messages_of

METHODS = pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo])
OFTEN = dict.fromkeys((KFAC, EKFAC), {"factor_update_steps": 1}) | {HyLo: {"update_steps": 1}}


def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@METHODS
def test_a_message_starts_with_the_fact_that_nothing_is_covered(method):
    own = lambda: Net(lambda net, x: x @ net.w, w=nn.Parameter(torch.ones(3, 3)))  # noqa: E731
    (text,) = messages_of(lambda: method(own(), graft="adam"))
    assert text.startswith(f"{method.__name__}: nothing is covered. All parameters get no curvature")
    assert "rule 'adam' (Net has no adapter" in text
    (text,) = messages_of(lambda: method(nn.Sequential(nn.Linear(3, 3), own())))
    assert "nothing is covered" not in text
    assert "some parameters get no curvature" in text


@METHODS
def test_a_second_step_after_one_backward_pass_is_reported_as_such(method):
    model, x = perceptron(), torch.randn(8, 4)
    opt = built(method, model, lr=0.01, **OFTEN[method])
    step(model, opt, x)
    (text,) = messages_of(lambda: [opt.step() for _ in range(3)])
    assert "without a backward pass in between" in text
    assert "eval mode" not in text
    assert messages_of(lambda: step(model, opt, x)) == []
    (text,) = messages_of(lambda: step(model.eval(), opt, x))
    assert "the model was in eval mode" in text
    assert [opt.describe().count(f"block '{name}' (Linear)") for name in (0, 2)] == [2, 2]


def test_a_layer_that_was_not_called_is_not_attributed_to_eval_mode():
    idle = nn.Linear(4, 2)
    forward = lambda net, x: net.used(x) + 0 * sum(p.sum() for p in idle.parameters())  # noqa: E731
    model = Net(forward, used=nn.Linear(4, 2), idle=idle)
    opt = KFAC(model, lr=0.01, factor_update_steps=1)
    (text,) = messages_of(lambda: [step(model, opt, torch.randn(8, 4)) for _ in range(3)])
    assert text.startswith(
        "KFAC: nothing was captured for 1 of the 2 layers that have a gradient (idle: its hooks did not run). It keeps "
        "its last estimate, or follows the fallback rule until there is one. Usual causes: they were not called"
    )
    assert "the model was in eval mode" not in text


def mixture(net: Net, x: Tensor) -> Tensor:
    """Each token goes to one of many experts, so most see a few rows that are not whole examples."""
    rows = x.flatten(0, 1)
    weight, chosen = net.gate(rows).softmax(-1).max(-1)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(net.experts):
        own = (chosen == number).nonzero()[:, 0]
        if len(own):
            out = out.index_add(0, own, expert(rows[own]) * weight[own, None])
    return net.head((rows + out).view_as(x).mean(1))


@pytest.mark.parametrize("method", [EKFAC, HyLo])
def test_many_experts_are_reported_in_one_line(method):
    experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(24))
    model = Net(mixture, gate=nn.Linear(8, 24), head=nn.Linear(8, 3), experts=experts)
    opt = built(method, model, lr=0.01, **OFTEN[method])
    (text,) = messages_of(lambda: [step(model, opt, torch.randn(4, 5, 8)) for _ in range(6)])
    assert len(text) < 420
    assert "more: for example, its values of shape (" in text
    assert "fallback: its values of shape (" in opt.describe() or method is EKFAC  # which has old estimates by then


def sequences() -> Net:
    layers = {"table": nn.Embedding(9, 6), "body": secondorder.nn.LSTM(6, 5), "head": nn.Linear(5, 3)}
    return Net(lambda net, x: net.head(net.body(net.table(x))[0]), **layers)


@pytest.mark.parametrize("method", [EKFAC, HyLo])
def test_the_remedy_for_as_many_time_steps_as_examples_is_batch_dim(method):
    x, model, other = torch.randint(9, (4, 4)), sequences(), sequences()
    (text,) = messages_of(lambda: step(model, method(model, lr=0.01), x))
    assert "make the optimizer with batch=BatchOptions(dim=1)" in text
    assert messages_of(lambda: step(other, built(method, other, lr=0.01, batch_dim=1), x)) == []


@METHODS
def test_a_model_that_is_a_layer_is_called_by_its_type(method):
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    opt = built(method, model, lr=0.01, **OFTEN[method])
    step(model, opt, x)
    assert "block Linear" in opt.describe()
    assert "''" not in opt.describe()
    assert opt.dense_curvature("").shape == (15, 15)
    with pytest.raises(ValueError, match=r"no block is named 'fc'; there are: '' \(the Linear itself\)"):
        opt.dense_curvature("fc")
    loss = model(x).square().sum()
    with pytest.raises(RuntimeError, match="layer 'Linear'"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (text,) = messages_of(lambda: step(model.eval(), opt, x))
    assert "(Linear: its hooks did not run)" in text


@METHODS
def test_nested_tensors_are_left_out_and_the_step_is_taken(method):
    model = perceptron().double()
    opt = built(method, model, lr=0.1)
    rows = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 5)]
    before = model[0].weight.detach().clone()
    model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values().square().mean().backward()
    with pytest.warns(UserWarning, match="0, 2: its output is a nested tensor"):
        opt.step()
    assert not model[0].weight.equal(before)


@METHODS
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_elements_follow_the_fallback_rule(method):
    """The last projection of ``nn.AdaptiveLogSoftmaxWithLoss`` may have no width."""

    model, other = (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 0), nn.Linear(0, 3)) for _ in range(2))
    opt = built(method, model, lr=0.1)
    for _ in range(2):
        step(model, opt, torch.randn(6, 4))
    assert list(opt.blocks) == ["0"]
    assert opt.describe().count("fallback: it has no elements") == 4
    built(method, other, lr=0.1).load_state_dict(opt.state_dict())
