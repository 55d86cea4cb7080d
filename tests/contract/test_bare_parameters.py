"""Parameters without a module: a layer method asks for `module=`; what that module does not hold takes the fallback.

A window method needs none, and covers every parameter.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import Shadow, Task, assert_identical, snapshot

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


def groups_of(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.25}]


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(str(i), p) for i, p in enumerate(params)]


@LAYERWISE
@pytest.mark.cover(wrap=[iter, list, groups_of, named])
def test_without_a_module_the_error_says_what_to_pass(method: Method, wrap: object) -> None:
    with pytest.raises(ValueError, match=r"module="):
        method.cls(wrap(parameters()))


@LAYERWISE
def test_with_a_foreign_module_they_follow_the_fallback(method: Method) -> None:
    params = parameters()
    optimizer = method.build(nn.Linear(2, 2), params)
    shadow = Shadow(params, lambda copies: torch.optim.SGD(copies, method.keywords["lr"], momentum=0.9))
    for step in range(5):
        fill(params, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()
    assert all(state.keys() <= {"step", "momentum_buffer", "global_step"} for state in optimizer.state.values())


@LAYERWISE
def test_groups_of_them_follow_the_fallback(method: Method) -> None:
    params = parameters()
    optimizer = method.build(nn.Linear(2, 2), groups_of(params), weight_decay=0.1, nesterov=True)
    shadow = Shadow(
        params,
        lambda copies: torch.optim.SGD(groups_of(copies), 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    )
    for step in range(5):
        fill(params, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()


@LAYERWISE
def test_module_that_owns_some_of_them(method: Method, mlp: Task) -> None:
    model = mlp.model()
    stranger = parameters()[0]
    optimizer = method.build(model, [*model.parameters(), stranger], momentum=0.0)
    start = stranger.detach().clone()
    mlp.loss(model, 0).backward()
    fill([stranger], 0)
    optimizer.step()
    assert_identical(stranger.detach(), start.add(stranger.grad, alpha=-method.keywords["lr"]))


def go_on(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        fill(params, step)
        optimizer.step()


@WINDOWED
@pytest.mark.cover(wrap=[iter, list, groups_of, named])
def test_window_methods_cover_every_one(method: Method, wrap: object) -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = method.cls(wrap(params), **method.keywords)
    go_on(optimizer, params, 7)
    for p, old in zip(params, before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)
        assert optimizer.state[p].keys() >= method.variants[0].own_state(p)
    assert "fallback" not in optimizer.describe()


@WINDOWED
@pytest.mark.cover(module={"no module": None, "a foreign module": nn.Linear(2, 2)})
def test_names_and_a_module_do_not_change_what_a_window_does(method: Method, module: nn.Module | None) -> None:
    results = []
    for wrap, keywords in ((list, {}), (named, {"module": module}), (list, {"module": module})):
        params = parameters()
        go_on(method.cls(wrap(params), **method.keywords, **keywords), params, 6)
        results.append([p.detach() for p in params])
    assert_identical(results[1], results[0])
    assert_identical(results[2], results[0])


@WINDOWED
def test_window_of_bare_parameters_resumes_exactly(method: Method, variant: Variant) -> None:
    keywords = {**method.keywords, **variant.keywords}
    params, others = parameters(), parameters()
    optimizer = method.cls(params, **keywords)
    go_on(optimizer, params, 6)
    with torch.no_grad():
        for mine, theirs in zip(others, params, strict=True):
            mine.copy_(theirs)
    second = method.cls(others, **keywords)
    second.load_state_dict(snapshot(optimizer))
    go_on(optimizer, params, 9, start=6)
    go_on(second, others, 9, start=6)
    assert_identical([p.detach() for p in others], [p.detach() for p in params])
    assert_identical(second.state_dict(), optimizer.state_dict())


@WINDOWED
def test_an_empty_parameter_does_no_harm(method: Method, variant: Variant) -> None:
    """As in torch: it has state, and nothing to move."""
    keywords = {**method.keywords, **variant.keywords}
    plain, params = parameters(), parameters()
    empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
    go_on(method.cls(plain, **keywords), plain, 6)
    optimizer = method.cls([*params, empty], **keywords)
    for step in range(6):
        fill(params, step)
        empty.grad = torch.empty_like(empty)
        optimizer.step()
    assert_identical([p.detach() for p in params], [p.detach() for p in plain])
    assert empty in optimizer.state
