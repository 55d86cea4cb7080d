"""Parameter groups: options per group, groups that are added later, invalid values, and the errors of `torch.optim`."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.building import built
from tests.support.methods import Method
from tests.support.tasks import (
    Task,
    assert_all_close,
    assert_changed,
    assert_identical,
    assert_same_moves,
    backward,
    displacements,
    moved_names,
    snapshot,
    train,
    values,
)
from tests.support.warned import messages_of


def split(model: nn.Module, part: str = "first", **second: object) -> list[dict[str, object]]:
    """Two groups: the parameters with this word in their name, and all others with these options."""
    groups: list[list[nn.Parameter]] = [[], []]
    for name, p in model.named_parameters():
        groups[part not in name].append(p)
    return [{"params": groups[0]}, {"params": groups[1], **second}]


def test_the_way_in_which_parameters_are_passed_does_not_matter(method: Method, task: Task) -> None:
    """Names are those of the module or any others, and groups may come from an iterator."""

    def with_other_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [(f"p{index}", parameter) for index, parameter in enumerate(model.parameters())]

    expected = method.trained(task)
    for params in (nn.Module.parameters, nn.Module.named_parameters, with_other_names):
        assert_identical(method.trained(task, params=params), expected)
    for params in (split, lambda model: iter(split(model))):
        assert_all_close(method.trained(task, params=params), expected)


def test_options_of_a_group_override_the_defaults(method: Method, mlp: Task) -> None:
    model, given = mlp.model(), {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}
    first, second = method.build(model, split(model, **given)).param_groups
    assert {key: second[key] for key in given} == given
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (method.keywords["lr"], 0.9, 0.0)
    assert first.keys() == second.keys()
    for key, value in (*first.items(), *second.items()):
        flat = value if isinstance(value, tuple) else (value,)
        plain = all(isinstance(item, (bool, int, float, str, type(None))) for item in flat)
        assert plain or key in {"params", "param_names"}, key


def test_steps_use_lr_momentum_and_maximize_of_the_group(method: Method, mlp: Task) -> None:
    """A layer remains one block even if its weight and bias are in different groups."""
    plain = method.bare_moves(mlp, 3)
    slow = method.bare_moves(mlp, 3, params=partial(split, lr=0.25))
    parted = method.bare_moves(mlp, 3, params=partial(split, part="weight", lr=0.5))
    heavy = method.bare_moves(mlp, 2, params=partial(split, momentum=0.5))
    (upward,) = method.bare_moves(mlp, 1, params=partial(split, maximize=True))
    for one, of_layers, of_biases in zip(plain, slow, parted, strict=True):
        assert_same_moves(of_layers, {n: m if n.startswith("first.") else 0.25 * m for n, m in one.items()})
        assert_same_moves(of_biases, {n: m if n.endswith("weight") else 0.5 * m for n, m in one.items()})
    one, two, _ = plain
    assert_same_moves(heavy[1], {n: m if n.startswith("first.") else m + 0.5 * one[n] for n, m in two.items()})
    assert_same_moves(upward, {n: m if n.startswith("first.") else -m for n, m in one.items()})


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_of_a_group_only_affects_its_parameters(method: Method, mlp: Task, decoupled: bool) -> None:
    """Coupled decay of a window method is added to the gradients: see `test_weight_decay_and_momentum.py`."""
    keywords = {**method.bare(), **(method.apart if not decoupled else {}), "decoupled_weight_decay": decoupled}
    model, plain = method.start(mlp, params=split, **keywords)
    rest = {name: value for name, value in values(model).items() if not name.startswith("first.")}
    enters = not method.layerwise and not decoupled

    def into_the_gradients(*_: object) -> None:
        for name in rest:
            model.get_parameter(name).grad.add_(model.get_parameter(name).detach(), alpha=0.1)

    if enters:
        plain.register_step_pre_hook(into_the_gradients)
    (expected,) = displacements(model, plain, mlp, 1)
    for name, value in rest.items() if not enters else ():
        expected[name] -= 0.1 * value
    (moved,) = method.moves(mlp, 1, params=partial(split, weight_decay=0.1), **keywords)
    assert_same_moves(moved, expected)


def test_damping_of_a_group_is_read_at_each_step(method: Method, mlp: Task) -> None:
    """The state does not depend on λ, so raising it between two steps is equivalent to a constant higher λ."""

    def raise_damping(optimizer: Any) -> None:
        optimizer.param_groups[1][method.damping] = 0.75

    raised = partial(split, **{method.damping: 0.75})
    for variant in method.variants[:1] if method.layerwise else method.variants:
        # rows use a new damping after the next update
        keywords = {**method.apart, **method.eager, **variant.keywords}
        first, *_, moved = method.bare_moves(mlp, 6, params=split, between=raise_damping, **keywords)
        other, *_, expected = method.bare_moves(mlp, 6, params=raised, **keywords)
        assert_identical(moved, expected)
        assert not torch.equal(first["second.weight"], other["second.weight"])


@pytest.mark.option("skip_layers")
def test_interval_of_a_group_is_read_at_each_step(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 3, **method.every(20, capture=10))
    assert optimizer.state[model.first.weight]["factor_updates"] == 1
    optimizer.param_groups[0][method.capture_keyword] = 1
    train(model, optimizer, mlp, 1, start=3)
    assert optimizer.state[model.first.weight]["factor_updates"] == 2
    optimizer.param_groups[0][method.capture_keyword] = 0
    if method.accepts("factor_update_steps"):
        with pytest.raises(ValueError, match="factor_update_steps must be >= 1, got 0"):
            model(mlp.batch(4)[0])


@pytest.mark.parametrize("why", ["outside all groups", "frozen", "lr=0"])
def test_parameters_that_are_not_trained_do_not_change(method: Method, mlp: Task, why: str) -> None:
    model = mlp.model()
    for layer in (model.scale, model.second):
        layer.requires_grad_(why != "frozen")
    params = {"outside all groups": model.first.parameters(), "lr=0": split(model, lr=0.0)}.get(why)
    optimizer, before = method.build(model, params), values(model)
    train(model, optimizer, mlp, 3)
    assert moved_names(model, before) == {"first.weight", "first.bias"}
    assert why != "outside all groups" or optimizer.state.keys() == set(model.first.parameters())


def test_group_added_later_trains_like_one_passed_to_the_constructor(method: Method, mlp: Task) -> None:
    model, late = method.start(mlp, params=lambda model: split(model)[:1])
    late.add_param_group(split(model, lr=0.01)[1])
    assert [len(group["params"]) for group in late.param_groups] == [2, 3]
    assert late.param_groups[1].keys() == late.param_groups[0].keys()
    train(model, late, mlp, 5)
    assert_all_close(values(model), method.trained(mlp, params=partial(split, lr=0.01)))


def test_group_added_between_steps_gets_blocks_and_trains(method: Method, mlp: Task) -> None:
    """The columns of a new group are zero in the existing rows of a window, which do not change otherwise."""
    for variant in method.variants if not method.layerwise else method.variants[:1]:
        model, optimizer = method.start(mlp, 6, params=lambda model: split(model)[:1], **variant.keywords)
        before = snapshot(optimizer)["state"]
        optimizer.add_param_group(split(model)[1])
        after = snapshot(optimizer)["state"]
        assert_identical({index: after.pop(index) for index in before}, before)
        for key in () if method.layerwise else ("window", "window_val", "tail_val", "window_p"):
            assert not any(state[key].any() for state in after.values() if key in state)
        start = values(model)
        train(model, optimizer, mlp, 6, start=6)
        assert_changed(model, start)
        late, early = (optimizer.state[layer.weight] for layer in (model.second, model.first))
        if method.layerwise:
            assert late.keys() | {"global_step"} == early.keys()
        elif variant is method.variants[0]:
            assert late.keys() == {"step", "momentum_buffer"} | variant.own_state(model.second.weight)
        assert float(late["step"]) == 6.0


@pytest.mark.option("module", "fallback")
@pytest.mark.parametrize("params", [None, nn.Module.parameters], ids=["named", "bare"])
def test_an_added_parameter_that_is_not_in_the_module(method: Method, mlp: Task, params: Any) -> None:
    """Layer methods use the fallback for it. It may be added to named parameters without a name, unlike in torch."""
    (model, optimizer), (_, second) = (method.start(mlp, params=params, momentum=0.0) for _ in range(2))
    stranger = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer.add_param_group({"params": [stranger], "lr": 0.5})
    backward(model, optimizer, mlp, 0)
    stranger.grad = torch.full_like(stranger, 0.25)
    optimizer.step()
    if method.layerwise:
        assert_identical(stranger.detach(), torch.full_like(stranger, 1 - 0.5 * 0.25))
        assert optimizer.state[stranger].keys() == {"step"}
    assert (stranger < 1).any()
    assert len(optimizer.param_groups[1].get("param_names", [])) == (params is None)
    second.add_param_group({"params": nn.Parameter(stranger.detach().clone()), "lr": 0.5})
    second.load_state_dict(snapshot(optimizer))
    assert_identical(snapshot(second), snapshot(optimizer))


def test_groups_that_torch_refuses_are_refused_with_its_errors_and_not_added(method: Method, mlp: Task) -> None:
    """`test_torch_optimizer_info.py` tests the constructor."""
    for params in (lambda model: split(model)[:1], nn.Module.parameters):
        model, optimizer = method.start(mlp, params=params)
        sgd, state = torch.optim.SGD(params(model), 0.1), optimizer.state.keys()
        for wrong in ([*model.parameters()], {nn.Parameter(torch.ones(2, dtype=torch.float64))}):
            with pytest.raises((TypeError, ValueError)) as theirs:
                sgd.add_param_group({"params": wrong})
            with pytest.raises(theirs.type) as ours:
                optimizer.add_param_group({"params": wrong})
            assert str(ours.value) == str(theirs.value)
            assert len(optimizer.param_groups) == 1
            assert optimizer.state.keys() == state
        train(model, optimizer, mlp, 2)


def test_options_of_replaced_group_dicts_are_used(method: Method, mlp: Task) -> None:
    """Some trainers rebuild ``param_groups``."""
    results = []
    for replaced in (False, True):
        model, optimizer = method.start(mlp, 1)
        if replaced:
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        optimizer.param_groups[0]["lr"] = 0.0125
        optimizer.param_groups[0][method.damping] = 0.75
        train(model, optimizer, mlp, 5, start=1)
        results.append(values(model))
    assert_identical(*results)


def replace_weight(module: nn.Module, optimizer: Any) -> None:
    """Replace a weight in the module and in the groups, as some trainers do."""
    old, module.weight = module.weight, nn.Parameter(module.weight.detach().clone())
    for group in optimizer.param_groups:
        group["params"][:] = [module.weight if p is old else p for p in group["params"]]


@pytest.mark.parametrize("steps", [0, 3])
def test_parameters_replaced_in_training_are_named_once(method: Method, mlp: Task, steps: int) -> None:
    """Their curvature and momentum are lost, except before the first step."""
    model, optimizer = method.start(mlp, steps)
    for layer in (model.first, model.second):
        replace_weight(layer, optimizer)
    texts = messages_of(lambda: train(model, optimizer, mlp, 3, start=steps))
    texts = [text for text in texts if "other parameters have come" in text]
    assert len(texts) == bool(steps)
    for text in texts:
        assert all(part in text for part in (f"after {steps} steps", "first.weight", "second.weight"))
        assert "first.bias" not in text
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}


def test_invalid_keys_of_a_group_are_named(method: Method, mlp: Task) -> None:
    """Keywords of the constructor are refused, misspelled keys cause a warning, and keys of schedulers are accepted."""
    model = mlp.model()
    for fixed in ("comm", "skip_layers" if method.layerwise else "partition"):
        with pytest.raises(ValueError, match=f"{fixed}: set once for all groups"):
            method.build(model, split(model, **{fixed: None}))
    with pytest.warns(UserWarning, match="'weight_decy' .* did you mean 'weight_decay'"):
        method.build(model, split(model, weight_decy=0.1))
    known = {"initial_lr": 0.1, "max_lr": 1.0, "max_momentum": 0.9, "name": "rest", "lr_scale": 1.0}
    texts = messages_of(lambda: method.build(model, split(model, **known)))
    assert not [text for text in texts if "has no effect" in text]


def test_a_subclass_that_passes_keywords_on_has_the_same_options(method: Method, mlp: Task) -> None:
    class Passing(method.cls):  # type: ignore[name-defined, misc]
        def __init__(self, params: Any, **keywords: Any) -> None:
            super().__init__(params, **keywords)

    model, other = mlp.model(), mlp.model()
    with pytest.raises(ValueError, match="comm: set once for all groups"):
        Passing(split(model, comm=None), lr=0.1, module=model)
    assert repr(Passing(model, lr=0.1)).replace("Passing", method.cls.__name__) == repr(method.cls(other, lr=0.1))


def test_a_parameter_that_is_appended_to_a_group_trains(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, params=lambda model: split(model)[:1])
    before = values(model)
    optimizer.param_groups[0]["params"].extend(split(model)[1]["params"])
    train(model, optimizer, mlp, 3)
    assert_changed(model, before)
    optimizer.load_state_dict(snapshot(optimizer))


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


def test_a_bad_value_is_refused_before_anything_changes(method: Method, mlp: Task) -> None:
    """`test_errors.py` tests the messages."""
    model, optimizer = method.start(mlp, 3)
    (group,) = optimizer.param_groups
    bad = {"lr": -0.1, "weight_decay": float("nan"), "momentum": "0.9", "clip_norm": 0.0, "graft": "adamax"}
    for key, value in (bad | {method.damping: -1.0}).items():
        good, before, state = group[key], values(model), snapshot(optimizer)
        group[key] = value
        with pytest.raises((ValueError, TypeError), match=key):
            train(model, optimizer, mlp, 1, start=3)
        assert_identical(values(model), before)
        group[key] = good
        assert_identical(snapshot(optimizer), state)
    train(model, optimizer, mlp, 2, start=3)
    assert_identical(values(model), method.trained(mlp))
    group.update(graft="sgd", inner="adam")
    with pytest.raises(ValueError, match="both set the step size"):
        train(model, optimizer, mlp, 1, start=1)


def test_options_that_no_rule_reads_are_named_once(method: Method, mlp: Task) -> None:
    def warned_of(**keywords: Any) -> list[str]:
        return [text for text in messages_of(lambda: method.build(mlp.model(), **keywords)) if "no effect" in text]

    own = "fallback_betas" if method.accepts("sgd_weight") else "betas"
    quiet: list[dict[str, Any]] = [
        {"momentum": 0.9, "nesterov": True, "graft": None},
        {"momentum": 0.0, "graft": "adamw"},
        {"momentum": 0.5, "graft": "adamw", "fallback": "sgd"},
        {own: (0.8, 0.9), "fallback": "adamw"},
    ]
    if method.accepts("momentum_mode", "window_size"):
        quiet.append({"momentum": 0.5, "momentum_mode": "pre", "graft": "adamw"})
    assert [warned_of(**keywords) for keywords in quiet] == [[]] * len(quiet)
    (text,) = warned_of(momentum=0.5, nesterov=True, graft="adamw")
    assert f"momentum=0.5 and nesterov=True have no effect, because Adam's rule sets every step: use {own}" in text
    (text,) = warned_of(momentum=0.9, **{own: (0.8, 0.9)})
    assert f"{own}=(0.8, 0.9) has no effect, because only Adam's rule reads it" in text


@pytest.mark.option("damping_mode")
def test_default_damping_is_relative_or_absolute(method: Method, mlp: Task) -> None:
    """Without factors, it is relative only if another rule sets the size of a step; a given number is absolute."""

    def found(**keywords: Any) -> tuple[float, str]:
        (group,) = built(method.cls, mlp.model(), **keywords).param_groups
        return group["damping"], group["damping_mode"]

    if method.accepts("factor_update_steps"):
        assert found()[1] == "relative"
        assert found(damping_mode="absolute")[1] == "absolute"
    else:
        assert found()[1] == found(lr=0.1, graft="sgd")[1] == found(inner="adam")[1] == "relative"
        assert found(lr=0.1) == found(graft=None) == (found(lr=0.1)[0], "absolute")
    assert found(damping_mode="relative") == found()
    assert found(damping=1e-3) == (1e-3, "absolute")
    assert found(damping=2.0, damping_mode="relative") == (2.0, "relative")


@pytest.mark.option("damping_mode", "skip_layers")
def test_damping_of_a_group_has_a_separate_mode(method: Method, mlp: Task) -> None:
    """None means unset."""
    for group, keywords, expected in (
        ({"damping": 1e-3}, {}, (1e-3, "absolute")),
        ({"damping": 1e-3, "damping_mode": None}, {}, (1e-3, "absolute")),
        ({"damping": 2.0, "damping_mode": "relative"}, {}, (2.0, "relative")),
        ({"damping": 2.0}, {"damping_mode": "relative"}, (2.0, "relative")),
        ({"damping": 0.5}, {"damping": 0.1}, (0.5, "absolute")),
        ({}, {"damping": 0.1}, (0.1, "absolute")),
        ({"damping": None, "damping_mode": None}, {"damping": 2.0, "damping_mode": "relative"}, (2.0, "relative")),
    ):
        model = mlp.model()
        groups = [{"params": layer.parameters()} for layer in (model.first, model.second)]
        at_once = built(method.cls, [groups[0], groups[1] | group], module=model, **keywords)
        late = built(method.cls, model.first.parameters(), module=model, **keywords)
        late.add_param_group({"params": model.second.parameters(), **group})
        for found in (at_once.param_groups[1], late.param_groups[1]):
            assert (found["damping"], found["damping_mode"]) == expected
