"""The layout of `state_dict()`: fixed string keys per parameter, with tensors and ints, allocated at construction."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.checkpoints import builder
from tests.support.methods import Method, Variant
from tests.support.storages import compute_bytes
from tests.support.tasks import Task, assert_identical, train, values

HALF = (torch.bfloat16, torch.float16)


def owners(variant: Variant, model: nn.Module) -> set[str]:
    """Names of the parameters with the state of a block: weights of covered layers, or the first one of a window."""
    return {names[0] for names in variant.units(model).values()}


def shapes(optimizer: Any) -> list[dict[str, object]]:
    return [
        {key: value.shape if isinstance(value, Tensor) else type(value) for key, value in state.items()}
        for state in optimizer.state.values()
    ]


def test_a_state_dict_is_plain_deterministic_and_of_sizes_known_at_construction(
    method: Method, variant: Variant, task: Task
) -> None:
    """Calls of it, and changes in the returned dict, as by `torch.distributed.checkpoint`, have no effect."""
    (model, optimizer), (twin, asked) = (builder(method, task, **variant.keywords)() for _ in range(2))
    at_construction = shapes(optimizer)
    train(model, optimizer, task, 5)
    for step in range(5):
        train(twin, asked, task, 1, start=step)
        returned = asked.state_dict()
        returned["state"].clear()
        for group in returned["param_groups"]:
            group.pop("params")
    saved = optimizer.state_dict()
    assert_identical(asked.state_dict(), saved)
    assert saved.keys() == {"state", "param_groups"}
    assert list(saved["state"]) == list(asked.state_dict()["state"])
    assert sorted(saved["state"]) == list(range(len(list(model.parameters()))))
    assert set(optimizer.state) == set(model.parameters())
    for state in saved["state"].values():
        assert all(isinstance(key, str) for key in state)
        assert all(isinstance(value, Tensor) or type(value) is int for value in state.values())
    assert variant.lazy or shapes(optimizer) == at_construction


def test_keys_per_parameter(method: Method, variant: Variant, task: Task) -> None:
    model, optimizer = method.start(task, **variant.keywords)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        heavy_ball = variant.heavy_ball or name not in method.covered(model)
        expected = {"step"} | ({"momentum_buffer"} if heavy_ball else set())
        if index == 0:
            expected |= {"global_step"} | variant.first_state
        if name in owners(variant, model):
            expected |= variant.of(model.get_submodule(name.rpartition(".")[0]))
        if name in method.covered(model):
            expected |= variant.own_state(parameter)
        assert optimizer.state[parameter].keys() == expected, name


def test_step_momentum_and_fallback(method: Method, mlp: Task) -> None:
    """Each parameter counts its own updates. Without momentum, there is no buffer; Adam's rule has two moments."""
    _, optimizer = method.start(mlp, 2, momentum=0.0)
    assert all("momentum_buffer" not in state for state in optimizer.state.values())
    model, optimizer = method.start(mlp, fallback="adamw", **method.leave_out)
    for name in method.left_out(model):
        assert optimizer.state[model.get_parameter(name)].keys() == {"step", "exp_avg", "exp_avg_sq"}
    model, optimizer = method.start(mlp, 2)
    optimizer.zero_grad()
    mlp.loss(model, 2).backward()
    model.scale.gain.grad = None
    optimizer.step()
    for name, parameter in model.named_parameters():
        count = optimizer.state[parameter]["step"]
        assert_identical(count, torch.tensor(2.0 if name == "scale.gain" else 3.0))
    assert optimizer.state[model.first.weight]["global_step"] == 3


@pytest.mark.cover(dtype=[torch.float64, torch.float32, *HALF])
def test_curvature_is_at_least_single_precision(
    method: Method, variant: Variant, mlp: Task, dtype: torch.dtype
) -> None:
    """Options for a smaller storage are the exception."""
    model = mlp.model(dtype)
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 3)
    wanted = torch.float64 if compute_bytes(dtype) == 8 else torch.float32
    dtypes = variant.dtypes(wanted)
    seen = set()
    for state in optimizer.state.values():
        for key in state.keys() & dtypes.keys():
            assert state[key].dtype == dtypes[key], key
            assert state[key].isfinite().all(), key
            seen.add(key)
    own = {key for name in method.covered(model) for key in variant.own_state(model.get_parameter(name))}
    assert seen >= (variant.owner_state | own) & dtypes.keys()


@pytest.mark.option("factor_update_steps")
def test_factor_shapes(method: Method, mlp: Task) -> None:
    """A trainable bias adds a row and a column, and groups are a batch dimension.

    Every unit of a norm layer is a group; A of an embedding is a diagonal; if the weight is frozen, the bias owns the
    block.
    """
    for variant in method.variants:
        model = nn.Sequential(
            nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 4, 2, bias=False), nn.Flatten(), nn.Linear(4, 3),
            nn.Linear(3, 2), nn.BatchNorm1d(5), nn.LayerNorm(4, bias=False), nn.Embedding(7, 2),
        )  # fmt: skip
        model[4].bias.requires_grad_(False)
        optimizer = method.build(model, **variant.keywords)
        dense = {0: (2, 19, 3), 1: (24, 4), 3: (5, 3), 4: (3, 2), 5: (5, 1, 2), 6: (4, 1, 1)}
        expected = {layer: ((*batch, n_a, n_a), (*batch, n_g, n_g)) for layer, (*batch, n_a, n_g) in dense.items()}
        for layer, shapes_of_both in {**expected, 7: ((7,), (2, 2))}.items():
            state = optimizer.state[model[layer].weight]
            assert (state["factor_a"].shape, state["factor_g"].shape) == shapes_of_both

        model = mlp.model()
        model.first.weight.requires_grad_(False)
        optimizer = method.build(model, **variant.keywords)
        state = optimizer.state[model.first.bias]
        assert state.keys() >= variant.owner_state
        assert not optimizer.state[model.first.weight].keys() & variant.owner_state
        train(model, optimizer, mlp, 3)
        assert_identical(state["factor_a"], torch.ones(1, 1, dtype=torch.float64))


def shapes_of_rows(state: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(state[key].shape) for key in ("rows_a", "rows_g", "kernel"))


@pytest.mark.option("update_steps")
def test_shapes_of_rows_of_groups_and_of_a_bias(method: Method, mlp: Task) -> None:
    """Every group of a convolution has separate rows; if the weight is frozen, the bias owns the rows."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Conv1d(6, 4, 2, bias=False), nn.BatchNorm1d(5))
    optimizer = method.build(model)
    expected = {0: ((2, 3, 1, 19), (2, 3, 1, 3), (2, 3, 3)), 1: ((3, 1, 12), (3, 1, 4), (3, 3))}
    for layer, found in {**expected, 2: ((3, 1, 0), (3, 1, 10), (3, 3))}.items():
        assert shapes_of_rows(optimizer.state[model[layer].weight]) == found, layer

    model = mlp.model()
    model.first.weight.requires_grad_(False)
    optimizer, before = method.build(model), values(model)
    assert not optimizer.state[model.first.weight].keys() & method.variants[0].owner_state
    for steps in (0, 3):
        train(model, optimizer, mlp, steps)
        assert shapes_of_rows(optimizer.state[model.first.bias]) == ((3, 1, 0), (3, 1, 4), (3, 3))
    moved = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert moved == before.keys() - {"first.weight"}


def test_counters_of_a_block_or_a_window(method: Method, variant: Variant, mlp: Task) -> None:
    """Factors are updated every 2 steps and refreshed every 4; rows of examples are updated every 2 steps.

    A window counts the slot of the next row and the total number of rows.
    """
    keywords = {**variant.keywords, **({"stagger": False} if method.accepts("stagger") else {})}
    model, optimizer = method.start(mlp, **keywords)
    for steps in range(8):
        for names in variant.units(model).values():
            state = optimizer.state[model.get_parameter(names[0])]
            if method.layerwise:
                refreshes = (steps + 3) // 4 if method.family == "factors" else (steps + 1) // 2
                if steps == 7 or not variant.keywords.get("overlap"):  # overlap adopts results one step later
                    assert (state["factor_updates"], state["refreshes"]) == ((steps + 1) // 2, refreshes)
                if method.family == "factors":
                    weight = 6.0 * sum(0.95**age for age in range((steps + 1) // 2))
                    assert (state["factor_weight"].shape, state["factor_weight"].dtype) == ((), torch.float64)
                    torch.testing.assert_close(state["factor_weight"].item(), weight, rtol=1e-12, atol=0)
                continue
            assert (int(state["pos"]), int(state["count"])) == (steps % 4, steps)
            assert (int(state["skipped"]), int(state["solve_failures"])) == (0, 0)
        train(model, optimizer, mlp, 1, start=steps)
