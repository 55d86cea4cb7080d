"""`ParamScheduler` sets options of groups to values that are functions of the step, or changes nothing."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

from secondorder import KFAC, MFAC, AdaptationOptions
from secondorder.schedule import ParamScheduler
from tests.support.building import built
from tests.support.warned import silent

Build = Callable[..., Optimizer]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def kfac(model: nn.Module, **options: Any) -> Optimizer:
    intervals = {"factor_update_steps": 1, "inv_update_steps": 2}
    return built(KFAC, model, **{"lr": 0.05, "damping": 1e-2, **intervals, **options})


def mfac(model: nn.Module, **options: Any) -> Optimizer:
    return built(MFAC, model, **{"lr": 0.05, "damping": 1e-2, "window_size": 4, **options})


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


BUILDS = [sgd, kfac, mfac]


def two_groups(kind: type[Optimizer] = SGD, **options: Any) -> Optimizer:
    model = network()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    more = {"module": model, "damping": 1e-2} if kind is KFAC else {}
    return kind(groups, **{"lr": 0.05, **more, **options})


def train(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    data = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 5, dtype=torch.float64, generator=data), torch.randint(3, (8,), generator=data)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


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
    schedule = ParamScheduler(build(network()), weight_decay=lambda t: calls.append(t) or values[t])
    assert followed(schedule, "weight_decay", 4) == [[value] for value in values]
    assert calls == [0, 1, 2, 3, 4]
    assert all(type(step) is int for step in calls)


def test_milestones_hold_until_the_next() -> None:
    """Before the first one, the value is not changed."""
    schedule = ParamScheduler(kfac(network()), inv_update_steps={3: 5, 0: 10, 5: 100})
    assert followed(schedule, "inv_update_steps", 6) == [[v] for v in (10, 10, 10, 5, 5, 100, 100)]
    optimizer = kfac(network(), damping=0.3)
    schedule = ParamScheduler(optimizer, damping={2: 0.1})
    assert option(optimizer, "damping") == [0.3]
    optimizer.param_groups[0]["damping"] = 0.25  # by hand, or by adaptation
    assert followed(schedule, "damping", 2) == [[0.25], [0.25], [0.1]]


def test_values_are_absolute() -> None:
    """They do not depend on changes in between, and nothing accumulates."""
    optimizer = kfac(network(), damping=7.0)
    schedule = ParamScheduler(optimizer, damping=lambda t: 1.0 / (t + 1), kl_clip={0: 0.1})
    for step in range(1, 5):
        optimizer.param_groups[0].update(damping=123.0, kl_clip=None)
        schedule.step()
        assert option(optimizer, "damping") == [1.0 / (step + 1)]
        assert option(optimizer, "kl_clip") == [0.1]


def test_several_options_may_be_scheduled_together() -> None:
    optimizer = kfac(network())
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


def test_without_schedules_nothing_happens_and_no_step_of_the_optimizer_is_needed() -> None:
    optimizer = sgd(network())
    before = held(optimizer)
    schedule = ParamScheduler(optimizer)
    with silent():
        schedule.step()
    assert held(optimizer) == before
    assert schedule.last_step == 1


# ---------------------------------------------------------------- groups
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_has_one_schedule_per_group(kind: type) -> None:
    """One schedule without a list serves all groups; it may be any callable, for any option, even the user's own."""
    optimizer = SGD([{"params": network().parameters(), "temperature": 1.0}], lr=0.1)
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
    lr = torch.tensor(0.05)
    optimizer = build(network(), lr=lr)
    inside = option(optimizer, "lr")[0]
    schedule = ParamScheduler(optimizer, lr=lambda t: 0.5**t)
    for step in range(3):
        assert option(optimizer, "lr")[0] is inside
        assert inside.item() == 0.5**step
        assert inside.dtype == torch.float32
        schedule.step()


def test_a_tensor_is_filled_from_a_tensor() -> None:
    optimizer = sgd(network(), lr=torch.tensor(0.05, dtype=torch.float64))
    inside, source = option(optimizer, "lr")[0], torch.tensor([0.25], dtype=torch.float32)
    schedule = ParamScheduler(optimizer, lr=lambda t: source)
    assert option(optimizer, "lr")[0] is inside
    assert inside.item() == 0.25
    assert inside.shape == ()
    source.fill_(0.5)
    assert inside.item() == 0.25
    schedule.step()
    assert inside.item() == 0.5


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
        optimizer = build(network())
        ParamScheduler(optimizer, lr=lambda t: make(0.25), weight_decay={0: make(0.5)})  # noqa: B023
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)
        assert type(group["lr"]) is type(group["weight_decay"]) is float
    if build is kfac:
        ParamScheduler(optimizer, inv_update_steps=lambda t: np.int64(7))
        assert type(option(optimizer, "inv_update_steps")[0]) is int


# ---------------------------------------------------------------- training
@pytest.mark.parametrize("build", BUILDS)
def test_training_follows_the_schedule_as_if_set_by_hand(build: Build) -> None:
    model, twin = network(), network()
    optimizer, other = build(model), build(twin)
    key = "momentum" if build is sgd else "damping"
    values = [0.5 / (t + 1) for t in range(6)]
    schedule = ParamScheduler(optimizer, **{key: values.__getitem__, "lr": {0: 0.05, 3: 0.01}})
    for step in range(5):
        train(model, optimizer, step)
        schedule.step()
        other.param_groups[0][key] = values[step]
        other.param_groups[0]["lr"] = 0.05 if step < 3 else 0.01
        train(twin, other, step)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_window_may_grow() -> None:
    model = network()
    optimizer = mfac(model, window_size=2)
    schedule = ParamScheduler(optimizer, window_size={0: 2, 3: 5})
    for step in range(6):
        train(model, optimizer, step)
        schedule.step()
    assert option(optimizer, "window_size") == [5]


# ---------------------------------------------------------------- together with schedulers of the learning rate
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("first", [True, False], ids=["before it", "after it"])
def test_it_works_together_with_schedulers_of_the_learning_rate(build: Build, first: bool) -> None:
    model = network()
    optimizer = build(model)
    with silent():
        ours = [ParamScheduler(optimizer, weight_decay=lambda t: 0.01 * t)] if first else []
        decay = lr_scheduler.StepLR(optimizer, 2, 0.5)
        schedulers = [*ours, decay] if first else [decay, ParamScheduler(optimizer, weight_decay=lambda t: 0.01 * t)]
        for step in range(1, 6):
            train(model, optimizer, step)
            for scheduler in schedulers:
                scheduler.step()
            assert option(optimizer, "lr") == [0.05 * 0.5 ** (step // 2)]
            assert option(optimizer, "weight_decay") == [0.01 * step]


def test_it_works_together_with_one_cycle_and_a_second_param_scheduler() -> None:
    model, twin = network(), network()
    optimizer, plain = kfac(model), kfac(twin)
    cycle, alone = (lr_scheduler.OneCycleLR(o, 0.1, total_steps=10) for o in (optimizer, plain))
    schedule = ParamScheduler(optimizer, damping=lambda t: 0.1 * 0.9**t)
    other = ParamScheduler(optimizer, kl_clip=lambda t: 2.0 + t)
    for step in range(1, 6):
        for net, opt in ((model, optimizer), (twin, plain)):
            train(net, opt, step)
        for scheduler in (cycle, schedule, alone, other, other):
            scheduler.step()
        for key in ("lr", "momentum"):
            assert option(optimizer, key) == option(plain, key)
        assert option(optimizer, "damping") == [0.1 * 0.9**step]
        assert option(optimizer, "kl_clip") == [2.0 + 2 * step]


# ---------------------------------------------------------------- refusals change nothing
def refused(optimizer: Optimizer, error: Any, match: str, **schedules: Any) -> None:
    before = held(optimizer)
    with pytest.raises(error, match=match):
        ParamScheduler(optimizer, **schedules)
    assert held(optimizer) == before


@pytest.mark.parametrize("build", BUILDS)
def test_unknown_options_are_refused_with_a_list_of_the_known_ones(build: Build) -> None:
    refused(
        build(network()), ValueError, r"'dampening_factor' is not an option.*lr, .*momentum, .*weight_decay",
        weight_decay=lambda t: 0.1, dampening_factor=lambda t: 1.0,
    )  # fmt: skip
    for key in ("params", "param_names", "initial_lr", "fallback_base_lr"):
        refused(build(network()), ValueError, f"'{key}' cannot be scheduled", **{key: lambda t: 1.0})


def test_an_option_that_not_every_group_or_state_has_is_refused() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "mine": 1.0}, {"params": model[2].parameters()}]
    refused(SGD(groups, lr=0.1), ValueError, "'mine' is not an option of every", mine=lambda t: 1.0)
    refused(kfac(network()), ValueError, "cannot be scheduled", inverse_method={0: "eigen", 5: "cholesky"})


def test_invalid_schedules_and_optimizers_are_refused() -> None:
    for schedule in (0.1, "linear", None, {1, 2}, torch.tensor(1.0), [0.1], [None]):
        refused(sgd(network()), TypeError, "lr: a schedule is a function", momentum=lambda t: 0.5, lr=schedule)
    for count in (0, 1, 3):
        refused(two_groups(), ValueError, f"one schedule per group, got {count} for 2", lr=[{0: 0.1}] * count)
    for wrong in (network(), None, [{"params": [], "lr": 1.0}]):
        with pytest.raises(TypeError, match="must be a torch.optim.Optimizer"):
            ParamScheduler(wrong, lr=lambda t: 0.1)


BAD_MILESTONES: list[tuple[Any, type[Exception], str]] = [
    ({-1: 0.1}, ValueError, "milestone of lr must be >= 0, got -1"),
    ({0.5: 0.1}, TypeError, "milestone of lr must be an integer, got 0.5"),
    ({True: 0.1}, TypeError, "milestone of lr must be an integer"),
    ({"5": 0.1}, TypeError, "milestone of lr must be an integer"),
    ({}, ValueError, "lr: milestones must not be empty"),
    ({0: lambda t: 0.1}, TypeError, "milestone 0 must not be a function"),
]


def test_bad_milestones_are_refused() -> None:
    for milestones, error, match in BAD_MILESTONES:
        refused(sgd(network()), error, match, momentum=lambda t: 0.5, lr=milestones)


BAD_VALUES: list[tuple[str, Any, type[Exception]]] = [
    ("damping", -1.0, ValueError),
    ("damping", 0, ValueError),
    ("damping", float("nan"), ValueError),
    ("damping", "high", TypeError),
    ("inv_update_steps", 10.0, TypeError),
    ("inv_update_steps", -1, ValueError),
    ("factor_decay", 1.5, ValueError),
    ("approx", "shrink", ValueError),
    ("nesterov", 1, TypeError),
    ("lr", -0.1, ValueError),
    ("lr", None, TypeError),
    ("betas", (0.9, 1.0), ValueError),
]


@pytest.mark.parametrize(("key", "value", "error"), BAD_VALUES)
def test_values_that_the_constructor_refuses_are_refused(key: str, value: Any, error: type[Exception]) -> None:
    """They are refused at construction, even for later milestones, or at the step at which a function returns them."""
    optimizer = kfac(network())
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
    """An invalid value for one group does not affect the others."""
    refused(two_groups(KFAC), ValueError, "damping must be .*got -1", damping=[{0: 1.0}, {0: -1.0}])
    never = {"nesterov": {0: True, 5: True}, "momentum": {3: 0.0}}
    refused(kfac(network(), momentum=0.9), ValueError, "nesterov needs momentum", **never)
    refused(kfac(network(), inner="adamw"), ValueError, "graft='sgd' and inner='adamw'", graft={4: "sgd"})
    decoupled = mfac(network(), decoupled_weight_decay=True)
    refused(decoupled, ValueError, "exclude each other", weight_decay_mode={0: "legacy"})


def test_groups_of_one_window_must_agree() -> None:
    optimizer = two_groups(MFAC)
    refused(optimizer, ValueError, "agree on damping, got 0.1 and 0.2", damping=[{0: 0.1}, {0: 0.2}])
    ParamScheduler(optimizer, damping=[{0: 0.1}, {0: 0.1}])
    assert option(optimizer, "damping") == [0.1, 0.1]


def test_a_check_does_not_replace_the_groups() -> None:
    optimizer = mfac(network())
    groups, first = optimizer.param_groups, optimizer.param_groups[0]
    schedule = ParamScheduler(optimizer, damping=lambda t: 0.1 if t < 2 else -1.0)
    schedule.step()
    with pytest.raises(ValueError, match="damping"):
        schedule.step()
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is first


def test_values_that_cannot_fill_a_tensor_are_refused() -> None:
    for value in (torch.ones(2), "0.1", None):
        optimizer = two_groups(lr=torch.tensor(0.05))
        refused(optimizer, (TypeError, ValueError), "lr must be", momentum={0: 0.5}, lr=[{0: 0.1}, {0: value}])


def test_an_error_inside_a_function_changes_nothing() -> None:
    optimizer = sgd(network())
    schedule = ParamScheduler(optimizer, momentum=lambda t: 0.5 / (t + 1), lr=[0.1, 0.2].__getitem__)
    schedule.step()
    before = held(optimizer)
    with pytest.raises(IndexError):
        schedule.step()
    assert held(optimizer) == before
    assert schedule.last_step == 1


def test_a_scheduled_damping_without_a_mode_warns_about_its_unit() -> None:
    """Without ``damping``, K-FAC interprets the number as a multiple of the mean eigenvalue."""
    with pytest.warns(UserWarning, match="multiples of the mean eigenvalue"):
        ParamScheduler(KFAC(network(), lr=0.1), damping=lambda t: 1e-3)
    with silent():
        ParamScheduler(KFAC(network(), lr=0.1, damping=1e-2), damping=lambda t: 1e-3)
        ParamScheduler(KFAC(network(), lr=0.1, damping_mode="relative"), damping=lambda t: 5.0)
        ParamScheduler(KFAC(network(), lr=0.1), damping=lambda t: 1e-3, damping_mode={0: "absolute"})
        ParamScheduler(KFAC(network(), lr=0.1), kl_clip=lambda t: 1e-3)
        ParamScheduler(mfac(network()), damping=lambda t: 1e-3)


# ---------------------------------------------------------------- resume
def test_the_state_is_plain_numbers() -> None:
    schedule = ParamScheduler(sgd(network()), lr=lambda t: 0.1, momentum={0: 0.5})
    schedule.step()
    assert schedule.state_dict() == {"last_step": 1}
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"last_step": 1}


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("build", BUILDS)
def test_a_resumed_run_goes_on_exactly(build: Build, optimizer_first: bool) -> None:
    def fresh() -> tuple[nn.Module, Optimizer, ParamScheduler, Any]:
        model = network()
        optimizer = build(model)
        decay = lr_scheduler.ExponentialLR(optimizer, 0.9)
        moves = {"weight_decay": lambda t: 0.01 * t, "momentum": {2: 0.5, 5: 0.25}, "nesterov": {0: False}}
        return model, optimizer, ParamScheduler(optimizer, **moves), decay

    def run(model: nn.Module, optimizer: Optimizer, schedule: ParamScheduler, decay: Any, steps: range) -> None:
        for step in steps:
            train(model, optimizer, step)
            schedule.step()
            decay.step()

    whole = fresh()
    run(*whole, range(3))
    states = [copy.deepcopy(x.state_dict()) for x in whole]
    run(*whole, range(3, 7))

    resumed = fresh()
    order = range(4) if optimizer_first else (0, 2, 3, 1)
    for i in order:
        resumed[i].load_state_dict(states[i])
    assert resumed[2].last_step == 3
    assert option(resumed[1], "weight_decay") == [0.03]
    run(*resumed, range(3, 7))
    for p, q in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert held(resumed[1]) == held(whole[1])


def test_a_scheduler_that_is_built_after_loading_the_optimizer_is_corrected_by_its_state() -> None:
    optimizer = kfac(network())
    schedule = ParamScheduler(optimizer, damping=lambda t: 0.1 * 0.5**t, kl_clip={2: 0.5})
    for _ in range(3):
        schedule.step()
    later = kfac(network())
    later.load_state_dict(optimizer.state_dict())
    resumed = ParamScheduler(later, damping=lambda t: 0.1 * 0.5**t, kl_clip={2: 0.5})
    assert option(later, "damping") == [0.1]  # f(0)
    resumed.load_state_dict(schedule.state_dict())
    assert held(later) == held(optimizer)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_states_of_later_and_earlier_steps_can_be_loaded(as_tensor: bool) -> None:
    """Loading fills a tensor in place and does not change its argument."""
    optimizer = sgd(network(), lr=torch.tensor(0.05) if as_tensor else 0.05)
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
    optimizer = kfac(network())
    schedule = ParamScheduler(optimizer, kl_clip=lambda t: 1.0 + t, damping=lambda t: 0.1 if t < 9 else -1.0)
    schedule.step()
    before = held(optimizer)
    for state, error in BAD_STATES:
        with pytest.raises(error, match="last_step|damping"):
            schedule.load_state_dict(state)
        assert held(optimizer) == before
        assert schedule.last_step == 1


def power(step: int) -> float:
    return 0.1 * 0.5**step


def test_copies_schedule_their_own_optimizer() -> None:
    optimizer = Adam(network().parameters(), lr=0.1)
    schedule = ParamScheduler(optimizer, lr=power, betas={0: (0.8, 0.9), 3: (0.9, 0.99)})
    schedule.step()
    for twin in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        twin.step()
        twin.step()
        assert twin.optimizer is not optimizer
        assert twin.optimizer.param_groups[0]["lr"] == power(3)
        assert twin.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
        assert option(optimizer, "lr") == [power(1)]
        assert option(optimizer, "betas") == [(0.8, 0.9)]


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
