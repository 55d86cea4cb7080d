"""Parameter groups: every hyper-parameter per group, late groups, and the errors of `torch.optim`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import (
    Task,
    assert_all_close,
    assert_changed,
    assert_identical,
    backward,
    block_vector,
    covered_layers,
    displacements,
    snapshot,
    train,
    values,
)


def split(model: nn.Module, **second: object) -> list[dict[str, object]]:
    """The first layer in one group; all the rest, with options of its own, in another."""
    first = [p for name, p in model.named_parameters() if name.startswith("first.")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("first.")]
    return [{"params": first}, {"params": rest, **second}]


def test_module_parameters_and_named_parameters_train_alike(method: Method, task: Task) -> None:
    results = [
        method.trained(task, 5, params=params) for params in (None, nn.Module.parameters, nn.Module.named_parameters)
    ]
    assert_identical(results[1], results[0])
    assert_identical(results[2], results[0])


def test_split_into_equal_groups_changes_nothing(method: Method, mlp: Task) -> None:
    whole, parted = mlp.model(), mlp.model()
    train(whole, method.build(whole), mlp, 5)
    train(parted, method.build(parted, split(parted)), mlp, 5)
    assert_all_close(values(parted), values(whole), rtol=1e-12, atol=1e-14)


def test_options_of_a_group_override_the_defaults(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, split(model, lr=0.2, momentum=0.5, weight_decay=0.1))
    first, second = optimizer.param_groups
    assert (second["lr"], second["momentum"], second["weight_decay"]) == (0.2, 0.5, 0.1)
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (method.keywords["lr"], 0.9, 0.0)
    assert first.keys() == second.keys()


def test_lr_of_a_group_scales_its_step(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, split(model), **method.bare())
    scaled = method.build(twin, split(twin, lr=0.25), **method.bare())
    for one, quarter in zip(displacements(model, plain, mlp, 3), displacements(twin, scaled, mlp, 3), strict=True):
        for name in one:
            factor = 1.0 if name.startswith("first.") else 0.25
            torch.testing.assert_close(quarter[name], factor * one[name], rtol=1e-9, atol=1e-13)


def test_momentum_of_a_group_carries_its_last_direction(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, split(model), **method.bare())
    heavy = method.build(twin, split(twin, momentum=0.5), **method.bare())
    one, two = displacements(model, plain, mlp, 2)
    _, moved = displacements(twin, heavy, mlp, 2)
    for name in one:
        carried = 0.0 if name.startswith("first.") else 0.5
        torch.testing.assert_close(moved[name], two[name] + carried * one[name], rtol=1e-9, atol=1e-13)


@pytest.mark.cover(decoupled=[False, True])
def test_weight_decay_of_a_group_pulls_its_parameters_only(method: Method, mlp: Task, decoupled: bool) -> None:
    """Added to their direction; coupled decay of a window method to their gradients: see `test_weight_decay.py`."""
    model, twin = mlp.model(), mlp.model()
    keywords = {**method.bare(), **(method.apart if not decoupled else {}), "decoupled_weight_decay": decoupled}
    plain = method.build(model, split(model), **keywords)
    decayed = method.build(twin, split(twin, weight_decay=0.1), **keywords)
    if not method.layerwise and not decoupled:
        plain.register_step_pre_hook(lambda *_: add_to_gradients(model, 0.1))
        (without,), (pulled,) = displacements(model, plain, mlp, 1), displacements(twin, decayed, mlp, 1)
        for name in without:
            torch.testing.assert_close(pulled[name], without[name], rtol=1e-9, atol=1e-13)
        return
    (without,), (pulled,) = displacements(model, plain, mlp, 1), displacements(twin, decayed, mlp, 1)
    for name, start in values(model).items():
        pull = 0.0 if name.startswith("first.") else 0.1
        torch.testing.assert_close(pulled[name], without[name] - pull * start, rtol=1e-9, atol=1e-13)


def add_to_gradients(model: nn.Module, decay: float) -> None:
    """What coupled decay adds, outside the first layer."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("first."):
                parameter.grad.add_(parameter, alpha=decay)


def test_damping_of_a_group_is_read_at_each_step(method: Method, mlp: Task) -> None:
    """A huge λ turns the direction into ∇/λ; set in one group, between two steps."""
    model, twin = mlp.model(), mlp.model()
    keywords = method.bare(**method.apart, **method.eager)  # rows take a damping over when they are renewed
    plain, damped = method.build(model, split(model), **keywords), method.build(twin, split(twin), **keywords)
    huge = 1e9

    def raise_damping() -> None:
        damped.param_groups[1][method.damping] = huge

    _, reference = displacements(model, plain, mlp, 2)
    _, moved = displacements(twin, damped, mlp, 2, between=raise_damping)
    backward(twin, damped, mlp, 1)
    for name in method.covered(model):
        if name.startswith("first."):
            assert_identical(moved[name], reference[name])
        elif method.variants[0].lingers:  # not the gradient as it is
            assert 0 < moved[name].norm() < 1e-6 * reference[name].norm()
        else:
            gradient = twin.get_parameter(name).grad
            torch.testing.assert_close(moved[name], -gradient / huge, rtol=1e-6, atol=1e-16)


@pytest.mark.option("damping", "window_size")
def test_damping_of_all_groups_is_read_at_each_step(method: Method, variant: Variant, mlp: Task) -> None:
    """Nothing of an old λ is left in the state: raised between two steps, it is as if it had been there all along."""
    model, twin = mlp.model(), mlp.model()
    changed = method.build(model, split(model), **method.bare(**variant.keywords))
    always = method.build(twin, split(twin), **method.bare(**variant.keywords, damping=0.75))

    def raise_damping() -> None:
        for group in changed.param_groups:
            group["damping"] = 0.75

    *_, moved = displacements(model, changed, mlp, 6, between=raise_damping)
    *_, expected = displacements(twin, always, mlp, 6)
    assert_identical(moved, expected)


@pytest.mark.option("skip_layers")
def test_interval_of_a_group_is_read_at_each_step(method: Method, mlp: Task) -> None:
    """An interval shortened between two steps holds for the very next one."""
    model, optimizer = method.start(mlp, 3, **method.every(20, capture=10))
    assert optimizer.state[model.first.weight]["factor_updates"] == 1
    optimizer.param_groups[0][method.capture_keyword] = 1
    train(model, optimizer, mlp, 1, start=3)
    assert optimizer.state[model.first.weight]["factor_updates"] == 2


def test_weight_and_bias_in_different_groups_stay_one_block(method: Method, mlp: Task) -> None:
    """The direction is the block's; each of the two takes the learning rate of its own group."""
    model, twin = mlp.model(), mlp.model()
    whole = method.build(model, **method.bare())
    weights = [p for name, p in twin.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in twin.named_parameters() if name.endswith("bias")]
    parted = method.build(twin, [{"params": weights}, {"params": biases, "lr": 0.5}], **method.bare())
    for together, apart in zip(displacements(model, whole, mlp, 3), displacements(twin, parted, mlp, 3), strict=True):
        for name in together:
            factor = 0.5 if name.endswith("bias") else 1.0
            torch.testing.assert_close(apart[name], factor * together[name], rtol=1e-9, atol=1e-13)


def test_parameters_outside_all_groups_are_left_alone(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.first.parameters())
    before = values(model)
    train(model, optimizer, mlp, 3)
    moved = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert moved == {"first.weight", "first.bias"}
    assert optimizer.state.keys() == set(model.first.parameters())


def test_group_added_late_trains_like_one_given_at_once(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    at_once = method.build(model, split(model, lr=0.01))
    late = method.build(twin, split(twin)[:1])
    late.add_param_group(split(twin, lr=0.01)[1])
    assert [len(group["params"]) for group in late.param_groups] == [2, 3]
    assert late.param_groups[1].keys() == late.param_groups[0].keys()
    train(model, at_once, mlp, 5)
    train(twin, late, mlp, 5)
    assert_all_close(values(twin), values(model), rtol=1e-12, atol=1e-14)


def test_group_added_between_steps_gets_blocks_and_trains(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, split(model)[:1])
    train(model, optimizer, mlp, 3)
    optimizer.add_param_group(split(model)[1])
    before = values(model)
    train(model, optimizer, mlp, 3, start=3)
    assert all(not torch.equal(value, before[name]) for name, value in values(model).items())
    late, early = model.second.weight, model.first.weight
    if method.layerwise:
        assert optimizer.state[late].keys() | {"global_step"} == optimizer.state[early].keys()
    else:
        assert optimizer.state[late].keys() == {"step", "momentum_buffer"} | method.variants[0].own_state(late)
    assert float(optimizer.state[late]["step"]) == 3.0


@pytest.mark.option("window_size")
def test_group_added_to_a_running_window_leaves_what_is_there(method: Method, variant: Variant, mlp: Task) -> None:
    """Its columns are zero in the rows that came before it."""
    model = mlp.model()
    optimizer = method.build(model, split(model)[:1], **variant.keywords)
    train(model, optimizer, mlp, 6)
    before = snapshot(optimizer)
    optimizer.add_param_group(split(model)[1])
    after = snapshot(optimizer)
    assert_identical({index: after["state"][index] for index in before["state"]}, before["state"])
    for index, state in after["state"].items():
        if index not in before["state"]:
            rows = [state[key] for key in ("window", "window_val", "tail_val", "window_p") if key in state]
            assert not any(row.any() for row in rows)
    start = values(model)
    train(model, optimizer, mlp, 6, start=6)
    assert all(value.isfinite().all() for value in values(model).values())
    assert all(not torch.equal(value, start[name]) for name, value in values(model).items())


@pytest.mark.option("skip_layers", "fallback")
def test_added_parameter_that_the_module_does_not_hold_follows_the_fallback(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.parameters(), momentum=0.0, fallback="sgd")
    stranger = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer.add_param_group({"params": [stranger], "lr": 0.5})
    backward(model, optimizer, mlp, 0)
    stranger.grad = torch.full_like(stranger, 0.25)
    optimizer.step()
    assert_identical(stranger.detach(), torch.full_like(stranger, 1 - 0.5 * 0.25))
    assert optimizer.state[stranger].keys() == {"step"}


def test_one_parameter_in_two_groups_is_refused(method: Method, mlp: Task) -> None:
    model = mlp.model()
    groups = [{"params": list(model.parameters())}, {"params": [model.first.weight]}]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        method.build(model, groups)


def test_late_group_with_a_known_parameter_is_refused_and_nothing_changes(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, split(model)[:1])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": list(model.parameters())})
    assert len(optimizer.param_groups) == 1
    assert optimizer.state.keys() == set(model.first.parameters())
    train(model, optimizer, mlp, 2)


def test_one_parameter_twice_in_a_group_warns(method: Method, mlp: Task) -> None:
    model = mlp.model()
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        method.build(model, [model.first.weight, model.first.weight])


def test_frozen_parameters_in_a_group_stay(method: Method, mlp: Task) -> None:
    model = mlp.model()
    model.first.requires_grad_(False)
    optimizer = method.build(model)
    before = values(model)
    train(model, optimizer, mlp, 3)
    for name, value in values(model).items():
        assert torch.equal(value, before[name]) == name.startswith("first."), name


def test_groups_hold_plain_values_only(method: Method, mlp: Task) -> None:
    model = mlp.model()
    for group in method.build(model).param_groups:
        for key, value in group.items():
            if key in {"params", "param_names"}:
                continue
            flat = value if isinstance(value, tuple) else (value,)
            assert all(isinstance(item, (bool, int, float, str, type(None))) for item in flat), key


def test_layers_of_different_groups_keep_their_own_direction(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, split(model, lr=0.0), **method.bare())
    (moved,) = displacements(model, optimizer, mlp, 1)
    for layer, names in covered_layers(model).items():
        assert bool(block_vector(moved, names).norm() > 0) == (layer == "first")


def test_group_dicts_that_are_replaced_are_followed(method: Method, mlp: Task) -> None:
    """Some trainers rebuild ``param_groups``; options of the new dicts must count."""
    results = []
    for replaced in (False, True):
        model, optimizer = method.start(mlp, 1)
        if replaced:
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        optimizer.param_groups[0]["lr"] = 0.0125
        optimizer.param_groups[0][method.damping] = 0.75
        train(model, optimizer, mlp, 5, start=1)
        results.append([p.detach().clone() for p in model.parameters()])
    assert_identical(*results)


def replaced(model: nn.Module, optimizer: Any, path: str) -> None:
    """A new parameter in the place of another one, in the module and in the groups, as some trainers do."""
    module, _, name = path.rpartition(".")
    old = model.get_parameter(path)
    new = nn.Parameter(old.detach().clone())
    setattr(model.get_submodule(module), name, new)
    for group in optimizer.param_groups:
        group["params"][:] = [new if p is old else p for p in group["params"]]


@pytest.mark.cover(steps=[0, 3])
def test_parameters_replaced_in_training_are_named_once(method: Method, mlp: Task, steps: int) -> None:
    """Their curvature and momentum begin anew: before the first step there is none to lose."""
    model, optimizer = method.start(mlp, steps)
    for path in ("first.weight", "second.weight"):
        replaced(model, optimizer, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, mlp, 3, start=steps)
    told = [str(w.message) for w in caught if "other parameters have come" in str(w.message)]
    assert len(told) == bool(steps)
    for text in told:
        assert f"after {steps} steps" in text
        assert "first.weight" in text
        assert "second.weight" in text
        assert "first.bias" not in text
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}


def test_keys_that_a_group_cannot_have_are_named(method: Method, mlp: Task) -> None:
    """What only the constructor takes is refused, what looks misspelled warned about; schedulers' keys are fine."""
    model = mlp.model()
    for fixed in ("comm", "grad_scaler"):
        with pytest.raises(ValueError, match=f"{fixed}: set once for all groups"):
            method.build(model, split(model, **{fixed: None}))
    with pytest.warns(UserWarning, match="'weight_decy' .* did you mean 'weight_decay'"):
        method.build(model, split(model, weight_decy=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.build(model, split(model, initial_lr=0.1, max_lr=1.0, max_momentum=0.9, name="rest", lr_scale=1.0))
    assert not [w for w in caught if "has no effect" in str(w.message)]


@pytest.mark.option("damping_mode", "factor_update_steps", "fallback")
def test_none_in_a_group_means_unset(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.cls(model.first.parameters(), module=model)
    unset = {"damping": None, "damping_mode": None, "fallback": None}
    optimizer.add_param_group({"params": list(model.second.parameters()), **unset})
    optimizer.add_param_group({"params": [model.scale.gain], **unset, "damping": 1e-3})
    first, second, third = optimizer.param_groups
    assert {key: second[key] for key in unset} == {key: first[key] for key in unset}
    assert {key: third[key] for key in unset} == {"damping": 1e-3, "damping_mode": "absolute", "fallback": "sgd"}
    train(model, optimizer, mlp, 2)


@pytest.mark.option("fallback", "graft")
def test_an_unset_fallback_of_a_group_follows_its_graft(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.first.parameters(), **method.apart)
    optimizer.add_param_group({"params": list(model.second.parameters()), "graft": "adam", "fallback": None})
    optimizer.add_param_group({"params": [model.scale.gain], "graft": "adam"})
    assert [group["fallback"] for group in optimizer.param_groups] == ["sgd", "adam", "adam"]
    before = values(model)
    train(model, optimizer, mlp, 3)
    assert_changed(model, before)


@pytest.mark.option("module", "fallback")
def test_an_unnamed_parameter_may_join_named_ones(method: Method, mlp: Task) -> None:
    """An optimizer of a module names its parameters, and torch wants names for all or for none."""
    model, optimizer = method.start(mlp, momentum=0.0, fallback="sgd")
    stranger = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer.add_param_group({"params": [stranger], "lr": 0.5})
    backward(model, optimizer, mlp, 0)
    stranger.grad = torch.full_like(stranger, 0.25)
    optimizer.step()
    if method.layerwise:  # which knows no layer of it
        assert_identical(stranger.detach(), torch.full_like(stranger, 1 - 0.5 * 0.25))
    assert (stranger < 1).any()
    assert len(optimizer.param_groups[1]["param_names"]) == 1
    other, second = method.start(mlp, momentum=0.0, fallback="sgd")
    second.add_param_group({"params": nn.Parameter(stranger.detach().clone()), "lr": 0.5})
    second.load_state_dict(snapshot(optimizer))
    assert_identical(snapshot(second), snapshot(optimizer))


def test_a_set_of_parameters_is_refused_as_torch_does(method: Method, mlp: Task) -> None:
    model, stranger = mlp.model(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    reference = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError) as theirs:
        reference.add_param_group({"params": {stranger}})
    for params in (None, model.parameters()):
        optimizer = method.build(model, params)
        with pytest.raises(TypeError) as ours:
            optimizer.add_param_group({"params": {stranger}})
        assert str(ours.value) == str(theirs.value)
        assert len(optimizer.param_groups) == 1
