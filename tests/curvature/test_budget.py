"""A budget chooses intervals from counted work: pure arithmetic, and its effect in an optimizer."""

import copy

import pytest
import torch
from torch import nn

import secondorder
from secondorder import KFAC, BudgetOptions, InverseOptions, MachineRates, ParamScheduler, RefreshOptions
from secondorder.comm import from_name
from secondorder.curvature import budget
from secondorder.curvature.budget import NOMINAL, Calibration, Intervals, LayerWork, Others, choose, costs
from tests.support.kfac import noise
from tests.support.models import fit, mlp
from tests.support.pool import on_every_rank
from tests.support.tasks import assert_identical, values

WIDE = [LayerWork(128.0, (784, 512), 1, 8.0 * 16 * 784 * 512, 8.0 * 24 * (784**2 + 512**2))] * 2
LONG = [LayerWork(4096.0, (128, 512), 1, 8.0 * 16 * 128 * 512, 8.0 * 24 * (128**2 + 512**2))] * 6
SMALL = [LayerWork(64.0, (33, 32), 1, 4.0 * 65 * 33 * 32, 9.0 * (33**3 + 32**3))] * 20


# ---------------------------------------------------------------------- arithmetic
@pytest.mark.parametrize("layers", [WIDE, LONG, SMALL], ids=["wide", "long", "small"])
@pytest.mark.parametrize("limit", [1.1, 1.3, 2.0, 4.0])
def test_the_counted_mean_is_within_the_budget(layers, limit):
    found = choose(limit, layers, Others(1000), NOMINAL["cpu"])
    parts = costs(layers, Others(1000), NOMINAL["cpu"])
    steps = range(found.refresh * found.precondition * 3)
    total = sum(
        parts.direction * (t % found.precondition == 0)
        + parts.update * (t % found.update == 0)
        + parts.refresh * (t % found.refresh == 0)
        for t in steps
    )
    assert 1 + parts.idle + total / len(steps) == pytest.approx(found.cost)
    assert found.cost <= limit or parts.idle > 0.2 * (limit - 1)
    assert found.refresh % found.update == 0


@pytest.mark.parametrize("layers", [WIDE, LONG, SMALL], ids=["wide", "long", "small"])
def test_a_larger_budget_never_makes_intervals_between_directions_longer(layers):
    every = [choose(limit, layers, Others(), NOMINAL["cpu"]).precondition for limit in (1.1, 1.3, 1.6, 2.0, 3.0, 5.0)]
    assert every == sorted(every, reverse=True)
    assert choose(1.05, layers, Others(), NOMINAL["cpu"], alternates=False).precondition == 1


def test_the_work_of_a_step_is_that_of_products_bytes_and_operators():
    """If moving bytes and calling operators take no time, ratios are those of the FLOPs."""
    free = Calibration(0.0, 0.0)
    found = costs(WIDE, Others(), free)
    step = 2 * 6 * 128 * 784 * 512
    assert found.direction == pytest.approx(2 * 8 * 16 * 784 * 512 / step)
    assert found.update == pytest.approx(2 * 2 * 128 * (784**2 + 512**2) / step)
    assert costs(WIDE, Others(), Calibration(1.0, 0.0)).update < costs(WIDE, Others(), NOMINAL["cpu"]).update * 2


def test_rows_of_a_lookup_table_have_one_number(monkeypatch):
    """Forward and backward pass move one row of the table for each index, and the factor of the inputs is diagonal."""
    table = LayerWork(128.0, (1000, 32), 1, 0.0, 0.0, one_hot=True)
    found = costs([table], Others(), Calibration(0.0, 0.0))
    assert found.update == pytest.approx(2 * (1 + 32**2) / (6 * 32))
    seen = []
    monkeypatch.setattr(
        budget, "choose", lambda limit, layers, *_, **__: seen.extend(layers) or Intervals(1, 1, 1, 1.0)
    )
    model = nn.Sequential(nn.Embedding(1000, 32), nn.Flatten(), nn.Linear(64, 3))
    optimizer = budgeted(model, budget=2.0)
    model(torch.arange(16).view(8, 2)).square().mean().backward()
    optimizer.step()
    assert [(work.sizes, work.one_hot) for work in seen] == [((1000, 32), True), ((65, 3), False)]


def test_gradients_pass_through_frozen_parameters():
    """Their forward and backward passes make a step more expensive, and curvature cheaper in comparison."""
    free = Calibration(0.0, 0.0)
    found = costs(WIDE, Others(frozen=784 * 512), free)
    assert found.update == pytest.approx(costs(WIDE, Others(), free).update * 12 / 16)


# ---------------------------------------------------------------------- in an optimizer
def network():
    return mlp((40, 64, 3)).float()


def budgeted(model, **options):
    return KFAC(model, **{"lr": 0.01, "graft": "adamw", "budget": 1.5, **options})


def trained(model, optimizer, steps, start=0, batch=16):
    fit(model, optimizer, batch, 40, steps=steps, start=start)
    return values(model)


def test_the_first_step_chooses_and_the_rest_equals_the_printed_options():
    model, other = network(), network()
    optimizer = budgeted(model, budget=2.0)
    assert "budget 2 (chosen in the first step)" in optimizer.describe()
    trained(model, optimizer, 1)
    group = optimizer.param_groups[0]
    intervals = {key: group[key] for key in ("factor_update_steps", "inv_update_steps")}
    turn = group["precondition_steps"]
    assert turn > 1
    assert f"budget 2: factors every {group['factor_update_steps']} steps" in optimizer.describe()
    assert f"directions every {turn} steps" in optimizer.describe()
    refresh = RefreshOptions(precondition_steps=turn, warmup="doubling")
    explicit = budgeted(other, budget=None, inverse_method=InverseOptions(rank=16), refresh=refresh, **intervals)
    trained(other, explicit, 1)
    steps = 2 * group["inv_update_steps"] + 3
    assert_identical(trained(model, optimizer, steps, 1), trained(other, explicit, steps, 1))


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ("eigen", None), ("cholesky", None), (InverseOptions(), None), (InverseOptions(damping_split="exact"), None),
        (InverseOptions(rank=4), 4),
    ],
)  # fmt: skip
def test_a_budget_does_not_change_an_inverse_that_was_given(given, rank):
    group = budgeted(network(), inverse_method=given).param_groups[0]
    assert group["inverse_rank"] == rank
    assert group["inverse_method"] == getattr(given, "method", given)


@pytest.mark.parametrize(("warmup", "updates"), [(None, 5), ("doubling", 5), (False, 1)])
def test_the_first_interval_refreshes_at_doubling_steps(warmup, updates):
    model = network()
    optimizer = budgeted(model, refresh=RefreshOptions(warmup=warmup))
    trained(model, optimizer, 10)
    assert optimizer.param_groups[0]["factor_update_steps"] >= 10
    assert {optimizer.state[layer.weight]["factor_updates"] for layer in (model[0], model[2])} == {updates}


def test_a_resumed_run_keeps_the_chosen_intervals():
    model, again = network(), network()
    optimizer, resumed = (budgeted(net) for net in (model, again))
    trained(model, optimizer, 4)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_identical(trained(again, resumed, 25, 4), trained(model, optimizer, 25, 4))
    assert resumed.param_groups[0]["precondition_steps"] == optimizer.param_groups[0]["precondition_steps"]


def test_a_chosen_interval_may_be_changed_later_but_the_budget_cannot_be_scheduled():
    """It chooses once, in the first step."""
    model = network()
    optimizer = budgeted(model)
    with pytest.raises(ValueError, match="'budget' cannot be scheduled"):
        ParamScheduler(optimizer, budget={10: 2.0})
    schedule = ParamScheduler(optimizer, precondition_steps={3: 1})
    for t in range(5):
        trained(model, optimizer, 1, t)
        schedule.step()
    assert optimizer.param_groups[0]["precondition_steps"] == 1


@pytest.mark.parametrize("foreach", [None, False])
def test_steps_that_are_not_preconditioned_are_those_of_the_graft(foreach):
    """They are bitwise those of torch's fused kernel, or of its loop if ``foreach`` is set."""
    model, other = network(), network()
    optimizer = KFAC(
        model, lr=0.01, weight_decay=0.1, graft="adamw", damping=1.0, factor_update_steps=1, inv_update_steps=1,
        refresh=RefreshOptions(precondition_steps=3), foreach=foreach,
    )  # fmt: skip
    adamw = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1, fused=foreach is None)
    trained(model, optimizer, 1)
    trained(other, adamw, 1)
    other.load_state_dict(model.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        adamw.state[q].update({key: optimizer.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq", "step")})
    before = values(model)
    assert_identical(trained(model, optimizer, 2, 1), trained(other, adamw, 2, 1))
    assert all(not torch.equal(x, before[name]) for name, x in values(model).items())
    after = trained(model, optimizer, 1, 3), trained(other, adamw, 1, 3)
    assert any(not torch.equal(after[0][name], after[1][name]) for name in after[0])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
def test_the_kernel_of_adam_does_not_matter(layout):
    def steps(foreach):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).double()
        refresh = RefreshOptions(precondition_steps=2)
        optimizer = budgeted(model, budget=None, weight_decay=0.1, foreach=foreach, refresh=refresh)
        model.to(memory_format=layout)
        for i in range(5):
            optimizer.zero_grad()
            model(noise(6, 3, 8, 8, seed=i)).square().mean().backward()
            for p in model.parameters() if i % 2 else ():
                p.grad = p.grad.contiguous()  # the user's own gradients may have another layout than their parameter
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.testing.assert_close(steps(None), steps(False), rtol=1e-11, atol=1e-12)


def test_measured_rates_determine_the_choice():
    def rates(operator):
        flat = ((1.0, 1e11), (512.0, 1e11))
        bytes_ = ((1.0, 1e10), (1e9, 1e10))
        times = ((16.0, 1e-5), (512.0, 1e-2))
        return MachineRates("cpu", operator, bytes_, flat, 1e9, flat, flat, times, times)

    chosen = []
    for operator in (1e-9, 1e-4):
        model = network()
        optimizer = budgeted(model, budget=BudgetOptions(1.3, rates(operator)))
        trained(model, optimizer, 1, batch=512)
        chosen.append(optimizer.param_groups[0]["precondition_steps"])
    assert chosen[0] < chosen[1]


def test_each_group_has_its_own_choice():
    model = network()
    groups = [{"params": model[0].parameters(), "budget": 4.0}, {"params": model[2].parameters()}]
    optimizer = budgeted(groups, module=model, budget=1.1)
    trained(model, optimizer, 1)
    first, second = optimizer.param_groups
    assert first["precondition_steps"] < second["precondition_steps"]
    assert "of group 1" in optimizer.describe()


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"budget": 1.3, "adaptation": secondorder.AdaptationOptions(adaptive_damping=True)}, "judges .*drop budget"),
        ({"budget": 1.0}, "budget must be finite, >= 1.05"),
        ({"budget": 1.3, "factor_update_steps": 5}, r"budget=1.3 chooses .*drop factor_update_steps=5"),
        ({"budget": 1.3, "inv_update_steps": 5}, "drop inv_update_steps=5"),
        ({"budget": 1.3, "refresh": RefreshOptions(warmup=True)}, "drop refresh.warmup=True"),
        ({"lr": 0.1, "graft": None, "refresh": RefreshOptions(precondition_steps=2)}, "precondition_steps=2 needs"),
    ],
)  # fmt: skip
def test_incompatible_options_are_refused(keywords, words):
    with pytest.raises(ValueError, match=words):
        KFAC(network(), **keywords)


@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt", "local_factors", "chief_only"])
@on_every_rank(2)
def test_ranks_with_unequal_batches_make_the_same_choice(rank: int, world: int, strategy: str) -> None:
    model = network()
    optimizer = budgeted(model, comm=from_name(strategy))
    for t in range(3):
        x = torch.randn(8 + 200 * rank, 40, generator=torch.Generator().manual_seed(rank + 10 * t))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
        optimizer.step()
    keys = "factor_update_steps", "inv_update_steps", "precondition_steps"
    own = torch.tensor([optimizer.param_groups[0][key] for key in keys])
    all_ranks = [torch.zeros_like(own) for _ in range(world)]
    torch.distributed.all_gather(all_ranks, own)
    assert all(torch.equal(own, other) for other in all_ranks)
