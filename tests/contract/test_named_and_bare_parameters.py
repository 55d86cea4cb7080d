"""Parameters with names, and parameters without a module.

Groups and checkpoints contain names only if the user passes them. A layer method requires `module=`, and parameters
outside that module use the fallback. A window method covers every parameter and needs no module.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.support.building import built
from tests.support.methods import Method, Variant
from tests.support.tasks import Shadow, Task, assert_all_close, assert_identical, backward, snapshot, train, values


def names_of(optimizer: object) -> list[object]:
    return [group.get("param_names") for group in optimizer.param_groups]


def test_names_are_those_of_the_user_or_of_the_module(method: Method, mlp: Task) -> None:
    model = mlp.model()
    named = list(model.named_parameters())
    expected = [name for name, _ in named]
    assert names_of(method.build(model, named)) == names_of(method.build(model)) == [expected]
    unnamed = method.build(model, model.parameters())
    assert "param_names" not in unnamed.param_groups[0]
    assert ("param_names" in unnamed.state_dict()["param_groups"][0]) == method.layerwise  # they come from the module
    optimizer = method.build(model, [{"params": named[:2]}, {"params": named[2:], "lr": 0.5}])
    assert names_of(optimizer) == [expected[:2], expected[2:]]
    assert optimizer.param_groups[0]["params"] == [parameter for _, parameter in named[:2]]


def test_a_checkpoint_with_names_loads_without_names_and_vice_versa(method: Method, mlp: Task) -> None:
    for saved_by, loaded_by in itertools.product((nn.Module.named_parameters, nn.Module.parameters), repeat=2):
        (_, first), (_, second) = method.start(mlp, 3, params=saved_by), method.start(mlp, params=loaded_by)
        second.load_state_dict(first.state_dict())
        assert_identical(snapshot(second)["state"], snapshot(first)["state"])
        if saved_by is loaded_by:
            assert names_of(second) == names_of(first)
            assert_identical(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("how", ["named", "module"])
def test_parameters_in_another_order_are_matched_by_name(method: Method, mlp: Task, how: str) -> None:
    """The names are those of the user, or those in the module."""
    model, other = mlp.model(), mlp.model()
    listed = nn.Module.named_parameters if how == "named" else nn.Module.parameters
    needs_module = how == "module" and not method.layerwise
    optimizer, second = (
        method.build(net, list(listed(net))[::order], **({"module": net} if needs_module else {}))
        for net, order in ((model, 1), (other, -1))
    )
    train(model, optimizer, mlp, 5)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(optimizer.state_dict())
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        for key in {"momentum_buffer", "step"} & optimizer.state[p].keys():
            assert_identical(second.state[q][key], optimizer.state[p][key], name)
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, 4, start=5)
    assert_all_close(values(other), values(model), rtol=1e-9, atol=1e-12)  # the order of sums over parameters differs


LAYERWISE = pytest.mark.option("module", "skip_layers")
WINDOWED = pytest.mark.option("window_size")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (4,), (2, 3, 2), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def fill(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, start: int = 0) -> list[Tensor]:
    """The parameters after some steps."""
    for step in range(start, start + steps):
        fill(params, step)
        optimizer.step()
    return [p.detach() for p in params]


def groups_of(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.25}]


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(str(i), p) for i, p in enumerate(params)]


@LAYERWISE
def test_a_missing_module_is_an_error_with_the_keyword(method: Method) -> None:
    for wrap in (iter, list, groups_of, named):
        with pytest.raises(ValueError, match=r"module="):
            method.cls(wrap(parameters()))


@LAYERWISE
@pytest.mark.parametrize("wrap", [list, groups_of])
def test_parameters_outside_the_module_follow_the_fallback(method: Method, mlp: Task, wrap: Any) -> None:
    """The parameters of the module are in a group with some of the others, or in none."""
    model, params = mlp.model(), parameters()
    options = {"weight_decay": 0.1, "nesterov": True} if wrap is groups_of else {}
    given = wrap(params) if wrap is groups_of else [*model.parameters(), *params]
    optimizer = method.build(model, given, **options)
    shadow = Shadow(params, lambda copies: SGD(wrap(copies), method.keywords["lr"], momentum=0.9, **options))
    for step in range(5):
        backward(model, optimizer, mlp, step)
        fill(params, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()
    assert all(optimizer.state[p].keys() <= {"step", "momentum_buffer", "global_step"} for p in params)


@WINDOWED
def test_window_methods_cover_every_parameter_and_need_neither_names_nor_a_module(method: Method) -> None:
    results, module = [], {"module": nn.Linear(2, 2)}
    for wrap, keywords in ((list, {}), (iter, {}), (named, {}), (named, module), (list, module)):
        params = parameters()
        optimizer = built(method.cls, wrap(params), **method.keywords, **keywords)
        results.append(run(optimizer, params, 6))
        assert all(optimizer.state[p].keys() >= method.variants[0].own_state(p) for p in params)
        assert "fallback" not in optimizer.describe()
    assert_identical(results[1:], results[:1] * 4)
    assert not any(torch.equal(p, q) for p, q in zip(results[0], parameters(), strict=True))


@WINDOWED
def test_window_of_bare_parameters_resumes_exactly(method: Method, variant: Variant) -> None:
    """This includes an empty parameter, which has state, as in torch."""

    def start(*more: nn.Parameter) -> tuple[list[nn.Parameter], Any]:
        params = [*parameters(), *more]
        return params, built(method.cls, params, **{**method.keywords, **variant.keywords})

    empty = torch.empty(0, 3, dtype=torch.float64)
    (plain, alone), (params, optimizer), (others, second) = start(), *(start(nn.Parameter(empty)) for _ in range(2))
    assert_identical(run(optimizer, params, 6)[:-1], run(alone, plain, 6))
    assert params[-1] in optimizer.state
    with torch.no_grad():
        for mine, theirs in zip(others, params, strict=True):
            mine.copy_(theirs)
    second.load_state_dict(snapshot(optimizer))
    assert_identical(run(second, others, 9, start=6), run(optimizer, params, 9, start=6))
    assert_identical(second.state_dict(), optimizer.state_dict())
