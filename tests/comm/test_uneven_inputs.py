"""Ranks without data adopt gradients and options of one with data, under a strategy that simulates the other ranks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from secondorder.comm.join import JOIN_DISABLED, UnevenInputs
from secondorder.parameters import ParameterTable

OPTIONS = ("lr", "betas", "graft", "steps")


class Strategy:
    """One rank of two; `sent` contains the messages of the other one."""

    combines = True

    def __init__(self, rank: int, live: tuple[float, float], sent: list[list[Tensor]]) -> None:
        self.rank, self.live, self.sent = rank, torch.tensor(live, dtype=torch.float64), sent
        self.averaged: list[list[nn.Parameter]] = []
        self.copied: list[tuple[int, list[Tensor]]] = []

    def average_gradients(self, params: list[nn.Parameter]) -> None:
        self.averaged.append(params)

    def agree(self, present: Tensor) -> Tensor:
        assert present.tolist()[self.rank] == self.live[self.rank]
        assert not present.tolist()[1 - self.rank]
        return self.live

    def copy_from(self, source: int, tensors: list[Tensor]) -> None:
        if source != self.rank:
            for mine, theirs in zip(tensors, self.sent[len(self.copied)], strict=True):
                mine.copy_(theirs)
        self.copied.append((source, [x.clone() for x in tensors]))


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(Join, "notify_join_context", lambda joinable: None)


def made(strategy: Strategy, **options: Any) -> tuple[UnevenInputs, list[nn.Parameter], dict[str, Any]]:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    group = {"lr": 1.0, "betas": (0.5, 0.5), "graft": None, "steps": 3, **options, "params": params}
    table = ParameterTable(groups=[group])
    table.regroup()
    return UnevenInputs(cast(Any, strategy), table, OPTIONS), params, group


def optimizer(joins: bool = True) -> Any:
    return SimpleNamespace(_join_config=SimpleNamespace(enable=joins))


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


#: β₁ and β₂, the graft, the rate and the steps, ordered by name.
THEIRS = (0.25, 0.75, torch.nan, 0.125, 7.0)
WITHOUT_DATA = [[numbers(1, 0, *THEIRS)], [torch.full((2,), 5.0)]]


def test_nothing_is_copied_outside_of_join_and_while_every_rank_has_data() -> None:
    """Outside of join, gradients are averaged."""
    for joins, live in ((False, (1, 0)), (True, (1, 1))):
        strategy = Strategy(0, live, [])
        inputs, params, _ = made(strategy)
        assert not inputs.average_gradients(optimizer(joins))
        assert joins or strategy.averaged == [params]
        assert not strategy.copied


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_rank_without_data_adopts_gradients_and_options_of_a_live_one(rate: Any) -> None:
    """A rate that is a tensor changes in place."""
    strategy = Strategy(1, (1, 0), WITHOUT_DATA)
    inputs, (p, q), group = made(strategy, lr=rate)
    inputs.has_joined = True
    assert inputs.average_gradients(optimizer())
    assert p.grad is not None
    assert p.grad.tolist() == [5.0, 5.0]
    assert q.grad is None  # it has no gradient on the other rank
    assert {key: group[key] for key in OPTIONS} == {"lr": 0.125, "betas": (0.25, 0.75), "graft": None, "steps": 7}
    assert not isinstance(rate, Tensor) or group["lr"] is rate
    assert [source for source, _ in strategy.copied] == [0, 0]
    inputs.forget_gradients()
    assert p.grad is None


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_rank_with_data_sends_and_changes_nothing(is_sparse: bool) -> None:
    """A sparse gradient is sent as a dense one, and frozen parameters are left out."""
    strategy = Strategy(0, (1, 0), [])
    inputs, (p, q), group = made(strategy)
    p.grad = torch.tensor([0.0, 4.0]).to_sparse() if is_sparse else torch.tensor([0.0, 4.0])
    assert not inputs.average_gradients(optimizer())
    (_, (header,)), (_, (gradient,)) = strategy.copied
    torch.testing.assert_close(header, numbers(1, 0, 0.5, 0.5, torch.nan, 1, 3), equal_nan=True)
    assert gradient.tolist() == p.grad.to_dense().tolist() == [0.0, 4.0]
    assert q.grad is None
    assert group["lr"] == 1.0
    p.requires_grad_(False)
    strategy.copied.clear()
    inputs.average_gradients(optimizer())
    assert len(strategy.copied[0][1][0]) == 1 + len(THEIRS)


@pytest.mark.parametrize("is_last", [False, True])
def test_all_ranks_end_with_the_options_of_the_last_one(is_last: bool) -> None:
    inputs, _, group = made(Strategy(0 if is_last else 1, (1, 0), [[numbers(*THEIRS)]]))
    inputs.has_joined = True
    inputs.end(is_last_joiner=is_last)
    assert (group["lr"], group["steps"]) == ((1.0, 3) if is_last else (0.125, 7))
    assert not inputs.has_joined


def test_a_rank_without_data_discards_its_batch_and_steps() -> None:
    inputs, (p, _), _ = made(Strategy(1, (1, 0), [[numbers(*THEIRS)]]))
    p.grad = torch.ones(2)
    seen: list[Any] = []
    stepping = optimizer()
    stepping.preconditioner = SimpleNamespace(hooks=SimpleNamespace(discard=lambda: seen.append("discard")))
    stepping.step = lambda: seen.append((inputs.has_joined, p.grad))
    hook = inputs.hook(stepping)
    hook.main_hook()
    assert seen == ["discard", (True, None)]
    hook.post_hook(is_last_joiner=False)
    assert stepping._join_config is JOIN_DISABLED
    assert not inputs.has_joined
