"""The first-order update on plain values: rules, the guard, and which parameters are updated in one call."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder.linalg import first_order
from secondorder.parameters import ParameterTable
from secondorder.preconditioners.base import Proposal, Rule
from secondorder.update import Update

PLAIN = {
    "lr": 0.5, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "decoupled_weight_decay": False, "inner": "sgd",
    "graft": None, "fallback": "sgd", "fallback_lr": None, "fallback_base_lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8,
    "clip_norm": None, "clip_value": None, "kl_clip": None, "foreach": True, "every": 1,
}  # fmt: skip


class Covering:
    """Covers parameters without any mathematics."""

    takes_sources, refresh_interval = True, "every"

    def __init__(self, options: Mapping[nn.Parameter, dict[str, Any]], factor: float = 1.0) -> None:
        self._options, self._factor = options, factor

    def covers(self, p: nn.Parameter) -> bool:
        return p in self._options

    def options_of(self, p: nn.Parameter) -> dict[str, Any]:
        return self._options[p]

    def preconditioned(self, gradients: Mapping[nn.Parameter, Tensor]) -> list[nn.Parameter]:
        return [p for p in gradients if p in self._options]

    def change_sources(self, source: Any, gradients: Any, gate: Any) -> None:
        pass

    def sets_length(self, p: nn.Parameter) -> bool:
        return False

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        return rule._replace(factor=self._factor)


def make(factor: float = 1.0, **options: Any) -> tuple[Update, nn.Parameter, nn.Parameter, dict[str, Any]]:
    """An update of a covered and another parameter, with their group."""
    covered, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    group = {**PLAIN, **options, "params": [covered, other]}
    state = {p: {"step": torch.zeros(())} for p in (covered, other)}
    table = ParameterTable(groups=[group], state=state, group_of=dict.fromkeys((covered, other), group))
    return Update(table, Covering({covered: group}, factor)), covered, other, group  # type: ignore[arg-type]


SGD = Rule("sgd", 0.9, 0.1, False)


@pytest.mark.parametrize(
    ("options", "preconditioned", "covered", "other"),
    [
        ({}, True, SGD, SGD),
        ({"every": 0}, False, SGD, SGD),
        ({"inner": "adamw"}, True, Rule("adam", 0.0, 0.1, True), SGD),
        ({"inner": "adam"}, False, Rule("adam", 0.0, 0.1, False), SGD),
        ({"graft": "adam"}, True, Rule("plain", 0.0, 0.0, False), SGD),
        ({"graft": "adamw"}, True, Rule("plain", 0.0, 0.1, True), SGD),
        ({"graft": "sgd", "fallback": "adam"}, False, SGD, Rule("adam", 0.0, 0.1, False, is_fallback=True)),
        (
            {"fallback": "adamw"}, False, Rule("adam", 0.0, 0.1, True, is_fallback=True),
            Rule("adam", 0.0, 0.1, True, is_fallback=True),
        ),
    ],
)  # fmt: skip
def test_rules(options: dict[str, Any], preconditioned: bool, covered: Rule, other: Rule) -> None:
    update, p, q, group = make(**options)
    assert update.rule(p, group, preconditioned) == covered
    assert update.rule(q, group, False) == other


@pytest.mark.parametrize(("factor", "calls"), [(1.0, 1), (2.0, 2)])
def test_equal_rules_are_applied_in_one_call(factor: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    update, p, q, _ = make(factor, weight_decay=0.0, momentum=0.0)
    found: list[int] = []
    apply = first_order.sgd_
    monkeypatch.setattr(
        first_order, "sgd_", lambda params, *args, **kw: (found.append(len(params)), apply(params, *args, **kw))
    )
    with torch.no_grad():
        update.apply({p: torch.ones(3), q: torch.ones(3)}, {p: torch.ones(3)}, None)
    assert sum(found) == 2
    assert len(found) == calls
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.5 * factor))
    torch.testing.assert_close(q.detach(), torch.full((3,), 0.5))


def test_directions_that_are_not_finite_become_their_sources() -> None:
    update, p, _, _ = make()
    gradients = {p: torch.ones(3)}
    sources = update.sources(gradients, None)
    proposal = Proposal({p: torch.tensor([1.0, torch.nan, 1.0])}, gradients, [(None, [p])])
    assert torch.equal(update.bound(proposal, sources)[p], gradients[p])
    assert not sources


@pytest.mark.parametrize(
    ("options", "keys"),
    [({}, ("momentum_buffer",)), ({"graft": "adam"}, ("exp_avg", "exp_avg_sq")), ({"momentum": 0.0}, ())],
)
def test_state_is_that_of_the_usual_rule(options: dict[str, Any], keys: tuple[str, ...]) -> None:
    update, p, _, group = make(**options)
    update.allocate(p, group)
    assert tuple(key for key in update._table.state[p] if key != "step") == update.keys(p, group) == keys


def test_grafting_remembers_its_factor() -> None:
    update, p, _, _ = make(graft="sgd")
    gradients = {p: torch.full((3,), 4.0)}
    found = update.bound(Proposal({p: torch.ones(3)}, gradients, [("sgd", [p])]), update.sources(gradients, None))
    torch.testing.assert_close(found[p], gradients[p])
    assert float(update.graft_factors[p]) == 4.0
