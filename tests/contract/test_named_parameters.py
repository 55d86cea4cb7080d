"""Named parameters: names are kept in groups and checkpoints where the user gave them, and only there."""

from __future__ import annotations

import pytest
import torch

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, snapshot, train, values


def names_of(optimizer: object) -> list[object]:
    return [group.get("param_names") for group in optimizer.param_groups]


def test_names_of_named_parameters_and_of_a_module(method: Method, mlp: Task) -> None:
    model = mlp.model()
    expected = [[name for name, _ in model.named_parameters()]]
    assert names_of(method.build(model, model.named_parameters())) == expected
    assert names_of(method.build(model)) == expected


def test_no_names_where_none_were_given(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.parameters())
    assert "param_names" not in optimizer.param_groups[0]
    assert ("param_names" in optimizer.state_dict()["param_groups"][0]) == method.layerwise  # a module knows them


def test_names_per_group(method: Method, mlp: Task) -> None:
    model = mlp.model()
    named = list(model.named_parameters())
    optimizer = method.build(model, [{"params": named[:2]}, {"params": named[2:], "lr": 0.5}])
    assert names_of(optimizer) == [[name for name, _ in named[:2]], [name for name, _ in named[2:]]]
    assert optimizer.param_groups[0]["params"] == [parameter for _, parameter in named[:2]]


def test_names_survive_a_round_trip(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.named_parameters())
    train(model, optimizer, mlp, 2)
    other = mlp.model()
    second = method.build(other, other.named_parameters())
    second.load_state_dict(optimizer.state_dict())
    assert names_of(second) == names_of(optimizer)
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.cover(saved_with_names=[True, False])
def test_dict_with_names_loads_without_and_the_other_way_round(
    method: Method, mlp: Task, saved_with_names: bool
) -> None:
    model, other = mlp.model(), mlp.model()
    named, unnamed = method.build(model, model.named_parameters()), method.build(other, other.parameters())
    first, second = (named, unnamed) if saved_with_names else (unnamed, named)
    trained = model if saved_with_names else other
    train(trained, first, mlp, 3)
    second.load_state_dict(first.state_dict())
    assert_identical(snapshot(second)["state"], snapshot(first)["state"])


def test_unnamed_parameter_among_named_ones_is_refused(method: Method, mlp: Task) -> None:
    model = mlp.model()
    with pytest.raises(ValueError, match="all optimizer params should be with/without names"):
        method.build(model, [("first.weight", model.first.weight), model.first.bias])
    with pytest.raises(ValueError, match="all optimizer param groups should be with/without names"):
        method.build(model, [{"params": [model.first.weight]}, {"params": [("first.bias", model.first.bias)]}])


def test_names_do_not_change_the_result(method: Method, mlp: Task) -> None:
    model, other = mlp.model(), mlp.model()
    train(model, method.build(model, model.parameters()), mlp, 5)
    strange = [(f"p{index}", parameter) for index, parameter in enumerate(other.parameters())]
    train(other, method.build(other, strange), mlp, 5)
    assert_identical(values(other), values(model))


@pytest.mark.cover(how=["named", "module"])
def test_parameters_in_another_order_are_matched_by_name(method: Method, mlp: Task, how: str) -> None:
    """Names are those that were given, or that a module has which is named beside the parameters."""
    model, other = mlp.model(), mlp.model()
    if how == "named":
        ours, theirs = list(model.named_parameters()), list(other.named_parameters())[::-1]
    else:
        ours, theirs = list(model.parameters()), list(other.parameters())[::-1]
    extra = {} if how == "named" or method.layerwise else {"module": model}
    optimizer = method.build(model, ours, **extra)
    train(model, optimizer, mlp, 5)
    other.load_state_dict(model.state_dict())
    second = method.build(other, theirs, **({"module": other} if extra else {}))
    second.load_state_dict(optimizer.state_dict())
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        for key in {"momentum_buffer", "step"} & optimizer.state[p].keys():
            assert_identical(second.state[q][key], optimizer.state[p][key], name)
    train(model, optimizer, mlp, 4, start=5)
    train(other, second, mlp, 4, start=5)
    for name, value in values(model).items():  # sums over all parameters have another order
        torch.testing.assert_close(other.get_parameter(name).detach(), value, rtol=1e-9, atol=1e-12)
