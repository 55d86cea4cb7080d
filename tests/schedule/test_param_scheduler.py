"""`ParamScheduler` sets options of groups to values that are functions of the step, or changes nothing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from secondorder import KFAC, MFAC, AdaptationOptions
from secondorder.schedule import ParamScheduler, damping_decay
from tests.support.building import built
from tests.support.kfac import train_step
from tests.support.models import mlp, vectors
from tests.support.saving import through_a_file
from tests.support.tasks import assert_identical, values
from tests.support.warned import silent

Build = Callable[..., Optimizer]


def kfac(model: nn.Module, **options: Any) -> Optimizer:
    intervals = {"factor_update_steps": 1, "inv_update_steps": 2}
    return built(KFAC, model, **{"lr": 0.05, "damping": 1e-2, **intervals, **options})


def mfac(model: nn.Module, **options: Any) -> Optimizer:
    return built(MFAC, model, **{"lr": 0.05, "damping": 1e-2, "window_size": 4, **options})


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


BUILDS = [sgd, kfac, mfac]


def two_groups(kind: type[Optimizer] = SGD, **options: Any) -> Optimizer:
    model = mlp((5, 4, 3))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    more = {"module": model, "damping": 1e-2} if kind is KFAC else {}
    return kind(groups, **{"lr": 0.05, **more, **options})


def train(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    train_step(optimizer, model, *vectors(8, 5, seed=step), nn.functional.cross_entropy)


def held(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of every group, tensors copied."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def option(optimizer: Optimizer, key: str) -> list[Any]:
    return [group[key] for group in optimizer.param_groups]


def followed(schedule: ParamScheduler, key: str, steps: int) -> list[list[Any]]:
    """The current option of every group, and that after each of some steps of the schedule."""
    found = [option(schedule.optimizer, key)]
    for _ in range(steps):
        schedule.step()
        found.append(option(schedule.optimizer, key))
    return found


# ---------------------------------------------------------------- functions and milestones
@pytest.mark.parametrize("build", BUILDS)
def test_a_function_gives_the_value_of_each_step(build: Build) -> None:
    """It is called once per step, with an int."""
    calls: list[Any] = []
    values = [0.1 * 0.5**t for t in range(5)]
    schedule = ParamScheduler(build(mlp((5, 4, 3))), weight_decay=lambda t: calls.append(t) or values[t])
    assert followed(schedule, "weight_decay", 4) == [[value] for value in values]
    assert calls == [0, 1, 2, 3, 4]
    assert all(type(step) is int for step in calls)


def test_milestones_hold_until_the_next() -> None:
    """Before the first one, the value is not changed."""
    schedule = ParamScheduler(kfac(mlp((5, 4, 3))), inv_update_steps={3: 5, 0: 10, 5: 100})
    assert followed(schedule, "inv_update_steps", 6) == [[v] for v in (10, 10, 10, 5, 5, 100, 100)]
    optimizer = kfac(mlp((5, 4, 3)), damping=0.3)
    schedule = ParamScheduler(optimizer, damping={2: 0.1})
    assert option(optimizer, "damping") == [0.3]
    optimizer.param_groups[0]["damping"] = 0.25  # by hand, or by adaptation
    assert followed(schedule, "damping", 2) == [[0.25], [0.25], [0.1]]
    optimizer.param_groups[0]["damping"] = 123.0
    assert followed(schedule, "damping", 1)[1] == [0.1]  # whatever changed it in between
    growing = ParamScheduler(mfac(mlp((5, 4, 3)), window_size=2), window_size={0: 2, 3: 5})
    assert followed(growing, "window_size", 3)[2:] == [[2], [5]]


def test_several_options_may_be_scheduled_together() -> None:
    optimizer = kfac(mlp((5, 4, 3)))
    schedule = ParamScheduler(
        optimizer,
        damping=lambda t: 10.0**-t,
        factor_decay={0: 0.5, 2: 0.9},
        kl_clip={1: None, 2: 1e-2},
        nesterov={2: True},
        fallback_betas={0: (0.8, 0.9), 1: [0.85, 0.95]},
    )
    keys = ("damping", "factor_decay", "kl_clip", "nesterov", "betas")
    found = [[optimizer.param_groups[0][key] for key in keys]]
    for _ in range(2):
        schedule.step()
        found.append([optimizer.param_groups[0][key] for key in keys])
    assert found == [
        [1.0, 0.5, 1e-3, False, (0.8, 0.9)],
        [0.1, 0.5, None, False, (0.85, 0.95)],
        [0.01, 0.9, 1e-2, True, (0.85, 0.95)],
    ]


# ---------------------------------------------------------------- groups
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_has_one_schedule_per_group(kind: type) -> None:
    """One schedule without a list serves all groups; it may be any callable, for any option, even the user's own."""
    optimizer = SGD([{"params": mlp((5, 4, 3)).parameters(), "temperature": 1.0}], lr=0.1)
    assert followed(ParamScheduler(optimizer, temperature=[0.5, 0.25].__getitem__), "temperature", 1)[1] == [0.25]
    schedule = ParamScheduler(two_groups(), lr=lambda t: 0.1 / (t + 1))
    assert followed(schedule, "lr", 1)[1] == [0.05, 0.05]
    schedule = ParamScheduler(two_groups(KFAC), damping=kind([lambda t: 0.1 / (t + 1), {0: 0.2, 2: 0.4}]))
    assert followed(schedule, "damping", 2) == [[0.1, 0.2], [0.05, 0.2], [0.1 / 3, 0.4]]


@pytest.mark.parametrize("kind", [SGD, KFAC])
def test_a_group_that_is_added_later_follows_at_the_next_step(kind: type[Optimizer]) -> None:
    optimizer = two_groups(kind)
    schedule = ParamScheduler(optimizer, weight_decay=lambda t: float(t), lr=[{0: 1.0}, {0: 2.0}])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5})
    assert followed(schedule, "weight_decay", 1) == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert option(optimizer, "lr") == [1.0, 2.0, 0.5]  # a list is for the groups that existed


# ---------------------------------------------------------------- tensors and numbers of other libraries
@pytest.mark.parametrize("build", [sgd, kfac])
def test_a_tensor_is_filled_in_place(build: Build) -> None:
    """The function may return a number, or the same tensor each time, which it changes."""
    source = torch.ones(1, dtype=torch.float64)
    for rate in (lambda t: 0.5**t, lambda t: source.fill_(0.5**t)):
        optimizer = build(mlp((5, 4, 3)), lr=torch.tensor(0.05))
        (inside,) = option(optimizer, "lr")
        schedule = ParamScheduler(optimizer, lr=rate)
        for step in range(3):
            assert option(optimizer, "lr")[0] is inside
            assert (inside.item(), inside.dtype, inside.shape) == (0.5**step, torch.float32, ())
            source.fill_(9.0)
            assert inside.item() == 0.5**step
            schedule.step()


def test_groups_that_share_a_tensor_get_their_own_for_their_own_schedules() -> None:
    lr = torch.tensor(0.05)
    shared, apart = two_groups(lr=lr), two_groups(lr=lr.clone())
    assert shared.param_groups[0]["lr"] is shared.param_groups[1]["lr"]  # this is what torch does
    ParamScheduler(shared, lr=lambda t: 0.5)
    assert shared.param_groups[0]["lr"] is shared.param_groups[1]["lr"]
    schedule = ParamScheduler(apart, lr=[{0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0}])
    (first, second), values = option(apart, "lr"), []
    for steps in (0, 1):
        followed(schedule, "lr", steps)
        values.append([v.item() for v in option(apart, "lr")])
    assert values == [[1.0, 3.0], [2.0, 4.0]]
    assert apart.param_groups[0]["lr"] is first
    assert apart.param_groups[1]["lr"] is second


@pytest.mark.parametrize("build", [sgd, kfac])
def test_numbers_of_other_libraries_become_python_numbers(build: Build) -> None:
    for make in (np.float32, np.float64, np.array, torch.tensor, lambda x: torch.tensor([x])):
        optimizer = build(mlp((5, 4, 3)))
        ParamScheduler(optimizer, lr=lambda t: make(0.25), weight_decay={0: make(0.5)})  # noqa: B023
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)
        assert type(group["lr"]) is type(group["weight_decay"]) is float
    if build is kfac:
        ParamScheduler(optimizer, inv_update_steps=lambda t: np.int64(7))
        assert type(option(optimizer, "inv_update_steps")[0]) is int


# ---------------------------------------------------------------- together with schedulers of the learning rate
@pytest.mark.parametrize("first", [True, False], ids=["before it", "after it"])
@pytest.mark.parametrize("build", BUILDS)
def test_it_works_together_with_other_schedulers(build: Build, first: bool) -> None:
    """They set what they set alone, and a second `ParamScheduler` may take two steps at a time."""
    model, twin = mlp((5, 4, 3)), mlp((5, 4, 3))
    optimizer, plain = build(model), build(twin)
    makers = [
        lambda: ParamScheduler(optimizer, weight_decay=lambda t: 0.01 * t),
        lambda: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    ]
    with silent():
        both = [make() for make in (makers if first else makers[::-1])]
        alone = lr_scheduler.OneCycleLR(plain, 0.1, total_steps=10)
        other = ParamScheduler(optimizer, nesterov=lambda t: t > 4)
        for step in range(1, 6):
            train(model, optimizer, step)
            train(twin, plain, step)
            for scheduler in (*both, alone, other, other):
                scheduler.step()
            for key in ("lr", "momentum"):
                assert option(optimizer, key) == option(plain, key)
            assert option(optimizer, "weight_decay") == [0.01 * step]
            assert option(optimizer, "nesterov") == [2 * step > 4]


# ---------------------------------------------------------------- refusals change nothing
def refused(optimizer: Optimizer, error: Any, match: str, **schedules: Any) -> None:
    before = held(optimizer)
    with pytest.raises(error, match=match):
        ParamScheduler(optimizer, **schedules)
    assert held(optimizer) == before


def test_options_that_cannot_be_scheduled_are_refused_by_name() -> None:
    for build in BUILDS:
        unknown = {"weight_decay": lambda t: 0.1, "dampening_factor": lambda t: 1.0}
        known = r"'dampening_factor' is not an option.*lr, .*momentum, .*weight_decay"
        refused(build(mlp((5, 4, 3))), ValueError, known, **unknown)
        for key in ("params", "param_names", "initial_lr", "fallback_base_lr"):
            refused(build(mlp((5, 4, 3))), ValueError, f"'{key}' cannot be scheduled", **{key: lambda t: 1.0})
    other = two_groups()
    other.param_groups[0]["mine"] = 1.0
    refused(other, ValueError, "'mine' is not an option of every", mine=lambda t: 1.0)
    refused(kfac(mlp((5, 4, 3))), ValueError, "cannot be scheduled", inverse_method={0: "eigen", 5: "cholesky"})


BAD_MILESTONES: list[tuple[Any, type[Exception], str]] = [
    ({-1: 0.1}, ValueError, "milestone of lr must be >= 0, got -1"),
    ({0.5: 0.1}, TypeError, "milestone of lr must be an integer, got 0.5"),
    ({True: 0.1}, TypeError, "milestone of lr must be an integer"),
    ({"5": 0.1}, TypeError, "milestone of lr must be an integer"),
    ({}, ValueError, "lr: milestones must not be empty"),
    ({0: lambda t: 0.1}, TypeError, "milestone 0 must not be a function"),
]


def test_invalid_schedules_and_optimizers_are_refused() -> None:
    for schedule in (0.1, "linear", None, {1, 2}, torch.tensor(1.0), [0.1], [None]):
        refused(sgd(mlp((5, 4, 3))), TypeError, "lr: a schedule is a function", momentum=lambda t: 0.5, lr=schedule)
    for milestones, error, match in BAD_MILESTONES:
        refused(sgd(mlp((5, 4, 3))), error, match, momentum=lambda t: 0.5, lr=milestones)
    for count in (0, 1, 3):
        refused(two_groups(), ValueError, f"one schedule per group, got {count} for 2", lr=[{0: 0.1}] * count)
    for value in (torch.ones(2), "0.1", None):
        optimizer = two_groups(lr=torch.tensor(0.05))
        refused(optimizer, (TypeError, ValueError), "lr must be", momentum={0: 0.5}, lr=[{0: 0.1}, {0: value}])
    for wrong in (mlp((5, 4, 3)), None, [{"params": [], "lr": 1.0}]):
        with pytest.raises(TypeError, match="must be a torch.optim.Optimizer"):
            ParamScheduler(wrong, lr=lambda t: 0.1)


BAD_VALUES: list[tuple[str, Any, type[Exception]]] = [
    ("damping", -1.0, ValueError),
    ("damping", "high", TypeError),
    ("inv_update_steps", 10.0, TypeError),
    ("approx", "shrink", ValueError),
    ("lr", None, TypeError),
    ("betas", (0.9, 1.0), ValueError),
]


@pytest.mark.parametrize(("key", "value", "error"), BAD_VALUES)
def test_values_that_the_constructor_refuses_are_refused(key: str, value: Any, error: type[Exception]) -> None:
    """They are refused at construction, even for later milestones, or at the step at which a function returns them."""
    optimizer = kfac(mlp((5, 4, 3)))
    for schedule in ({0: value}, {3: value}, lambda t: value):
        refused(optimizer, error, key, kl_clip=lambda t: 0.5, **{key: schedule})
    good = optimizer.param_groups[0][key]
    later = ParamScheduler(optimizer, kl_clip=lambda t: 0.5 + t, **{key: lambda t: value if t == 2 else good})
    later.step()
    before = held(optimizer)
    for _ in range(2):  # a second attempt is the same step
        with pytest.raises(error, match=key):
            later.step()
        assert held(optimizer) == before
        assert later.last_step == 1


def test_options_that_exclude_each_other_are_refused() -> None:
    """An invalid value for one group does not affect the others, and groups of one window must agree."""
    refused(two_groups(KFAC), ValueError, "damping must be .*got -1", damping=[{0: 1.0}, {0: -1.0}])
    never = {"nesterov": {0: True, 5: True}, "momentum": {3: 0.0}}
    refused(kfac(mlp((5, 4, 3)), momentum=0.9), ValueError, "nesterov needs momentum", **never)
    refused(kfac(mlp((5, 4, 3)), inner="adamw"), ValueError, "graft='sgd' and inner='adamw'", graft={4: "sgd"})
    decoupled = mfac(mlp((5, 4, 3)), decoupled_weight_decay=True)
    refused(decoupled, ValueError, "exclude each other", weight_decay_mode={0: "legacy"})
    refused(two_groups(MFAC), ValueError, "agree on damping, got 0.1 and 0.2", damping=[{0: 0.1}, {0: 0.2}])
    ParamScheduler(two_groups(MFAC), damping=[{0: 0.1}, {0: 0.1}])


@pytest.mark.parametrize(
    ("build", "failing", "error"),
    [
        (sgd, {"lr": [0.1, 0.2].__getitem__}, IndexError),
        (mfac, {"damping": lambda t: -1.0 if t > 1 else 0.1}, ValueError),
    ],
)
def test_an_error_at_a_step_changes_nothing(build: Build, failing: dict[str, Any], error: type[Exception]) -> None:
    """The groups are not replaced, not even for the check."""
    optimizer = build(mlp((5, 4, 3)))
    groups, first = optimizer.param_groups, optimizer.param_groups[0]
    schedule = ParamScheduler(optimizer, momentum=lambda t: 0.5 / (t + 1), **failing)
    schedule.step()
    before = held(optimizer)
    with pytest.raises(error):
        schedule.step()
    assert held(optimizer) == before
    assert schedule.last_step == 1
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is first


def test_a_scheduled_damping_without_a_mode_warns_about_its_unit() -> None:
    """Without ``damping``, K-FAC interprets the number as a multiple of the mean eigenvalue."""
    with pytest.warns(UserWarning, match="multiples of the mean eigenvalue"):
        ParamScheduler(KFAC(mlp((5, 4, 3)), lr=0.1), damping=lambda t: 1e-3)
    with silent():
        ParamScheduler(KFAC(mlp((5, 4, 3)), lr=0.1, damping=1e-2), damping=lambda t: 1e-3)
        ParamScheduler(KFAC(mlp((5, 4, 3)), lr=0.1, damping_mode="relative"), damping=lambda t: 5.0)
        ParamScheduler(KFAC(mlp((5, 4, 3)), lr=0.1), damping=lambda t: 1e-3, damping_mode={0: "absolute"})
        ParamScheduler(KFAC(mlp((5, 4, 3)), lr=0.1), kl_clip=lambda t: 1e-3)
        ParamScheduler(mfac(mlp((5, 4, 3))), damping=lambda t: 1e-3)


# ---------------------------------------------------------------- resume
#: The order in which a resumed run loads the model, the optimizer and the schedule. Without the schedule, it is built
#: after the others are loaded, and sets the values of step 0 in between.
ORDERS = {"optimizer first": (0, 1, 2), "schedule first": (0, 2, 1), "built later": (0, 1)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", BUILDS)
def test_a_resumed_run_goes_on_exactly(build: Build, order: str) -> None:
    moves = {"weight_decay": lambda t: 0.01 * t, "momentum": {2: 0.5, 5: 0.25}, "nesterov": {0: False}}

    def fresh() -> tuple[nn.Module, Optimizer, ParamScheduler]:
        model = mlp((5, 4, 3))
        optimizer = build(model)
        return model, optimizer, ParamScheduler(optimizer, **moves)

    def run(model: nn.Module, optimizer: Optimizer, schedule: ParamScheduler, steps: range) -> None:
        for step in steps:
            train(model, optimizer, step)
            schedule.step()

    whole, resumed = fresh(), fresh()
    run(*whole, range(3))
    states = [through_a_file(x.state_dict()) for x in whole]
    assert states[2] == {"last_step": 3}
    run(*whole, range(3, 7))
    for i in ORDERS[order]:
        resumed[i].load_state_dict(states[i])
    if order == "built later":
        resumed = (*resumed[:2], ParamScheduler(resumed[1], **moves))
        assert option(resumed[1], "weight_decay") == [0.0]
        resumed[2].load_state_dict(states[2])
    assert resumed[2].last_step == 3
    assert option(resumed[1], "weight_decay") == [0.03]
    run(*resumed, range(3, 7))
    assert_identical(values(resumed[0]), values(whole[0]))
    assert held(resumed[1]) == held(whole[1])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_states_of_later_and_earlier_steps_can_be_loaded(as_tensor: bool) -> None:
    """Loading fills a tensor in place and does not change its argument."""
    optimizer = sgd(mlp((5, 4, 3)), lr=torch.tensor(0.05) if as_tensor else 0.05)
    schedule = ParamScheduler(optimizer, lr=lambda t: 0.5**t)
    inside = option(optimizer, "lr")[0]
    for step in (3, 0):
        state = {"last_step": step, "of a later version": 1}
        schedule.load_state_dict(state)
        assert state == {"last_step": step, "of a later version": 1}
        assert schedule.last_step == step
        assert option(optimizer, "lr") == [0.5**step]
        assert option(optimizer, "lr")[0] is inside or not as_tensor


BAD_STATES: list[tuple[Any, type[Exception]]] = [
    ({}, ValueError),
    (None, ValueError),
    ({"last_epoch": 3}, ValueError),
    ({"last_step": -1}, ValueError),
    ({"last_step": "3"}, TypeError),
    ({"last_step": 2.0}, TypeError),
    ({"last_step": True}, TypeError),
    ({"last_step": 9}, ValueError),  # the schedule returns a value out of range there
]


def test_an_invalid_state_changes_nothing() -> None:
    optimizer = kfac(mlp((5, 4, 3)))
    schedule = ParamScheduler(optimizer, kl_clip=lambda t: 1.0 + t, damping=lambda t: 0.1 if t < 9 else -1.0)
    schedule.step()
    before = held(optimizer)
    for state, error in BAD_STATES:
        with pytest.raises(error, match="last_step|damping"):
            schedule.load_state_dict(state)
        assert held(optimizer) == before
        assert schedule.last_step == 1


def test_copies_schedule_their_own_optimizer() -> None:
    rate = damping_decay(10.0, 1.0, decay_steps=4)  # a function that can be pickled
    optimizer = Adam(mlp((5, 4, 3)).parameters(), lr=0.1)
    schedule = ParamScheduler(optimizer, lr=rate, betas={0: (0.8, 0.9), 3: (0.9, 0.99)})
    schedule.step()
    for twin in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        twin.step()
        twin.step()
        assert twin.optimizer is not optimizer
        assert held(twin.optimizer)[0].items() >= {"lr": rate(3), "betas": (0.9, 0.99)}.items()
        assert held(optimizer)[0].items() >= {"lr": rate(1), "betas": (0.8, 0.9)}.items()


def test_milestones_restart_an_adapted_damping() -> None:
    """Between them, and when a scheduler is loaded, the adapted value stays; a function is refused."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    adaptation = AdaptationOptions(adaptive_damping=True, damping_interval=1)
    optimizer = KFAC(model, lr=0.1, damping=0.5, adaptation=adaptation)
    schedule = ParamScheduler(optimizer, damping={0: 0.3, 4: 0.7})
    inputs = torch.randn(16, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    seen = [optimizer.param_groups[0]["damping"]]
    for _ in range(6):
        optimizer.step(closure)
        schedule.step()
        seen.append(float(optimizer.param_groups[0]["damping"]))
    assert seen[0] == 0.3
    assert seen[4] == 0.7
    assert len({*seen[:4]}) > 1
    assert len({*seen[4:]}) > 1
    schedule.load_state_dict(schedule.state_dict())
    assert float(optimizer.param_groups[0]["damping"]) == seen[-1]
    with pytest.raises(ValueError, match="give milestones, {step: value}, and the adaptation starts again"):
        ParamScheduler(optimizer, damping=lambda step: 0.1)
    ParamScheduler(optimizer, weight_decay=lambda step: 0.1)
