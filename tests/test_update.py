"""The first-order update without an optimizer: rules, which parameters share a call, and lengths of directions.

The lengths of steps, which depend on clipping, grafting and rates, are tested in `tests/contract`.
"""

from collections.abc import Mapping
from types import SimpleNamespace
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
    """A preconditioner that covers parameters without preconditioning them, and records the calls of `rule`."""

    takes_sources, refresh_interval = True, "every"

    def __init__(self, options: Mapping[nn.Parameter, dict[str, Any]], factor: float = 1.0) -> None:
        self._options, self._factor = options, factor
        self.asked: list[tuple[Any, ...]] = []

    @property
    def covered(self) -> dict[nn.Parameter, Any]:
        return {p: SimpleNamespace(group=group, sets_length=False) for p, group in self._options.items()}

    def adam_options(self, group: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
        return group["betas"], group["eps"]

    def preconditioned(self, gradients: Mapping[nn.Parameter, Tensor]) -> list[nn.Parameter]:
        return [p for p in gradients if p in self._options]

    def change_sources(self, source: Any, gradients: Any, gate: Any) -> None:
        pass

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        self.asked.append(("rule", p, rule))
        return rule._replace(factor=self._factor)


def make(factor: float = 1.0, **options: Any) -> tuple[Update, nn.Parameter, nn.Parameter, Covering]:
    """Create an update of one covered and one other parameter, and its preconditioner."""
    covered, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    group = {**PLAIN, **options, "params": [covered, other]}
    state = {p: {"step": torch.zeros(())} for p in (covered, other)}
    table = ParameterTable(groups=[group], state=state, group_of=dict.fromkeys((covered, other), group))
    covering = Covering({covered: group}, factor)
    return Update(table, covering), covered, other, covering  # type: ignore[arg-type]


def ones(*params: nn.Parameter, value: float = 1.0) -> dict[nn.Parameter, Tensor]:
    return {p: torch.full((3,), value) for p in params}


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
def test_rules_of_parameters(options: dict[str, Any], preconditioned: bool, covered: Rule, other: Rule) -> None:
    update, p, q, _ = make(**options)
    group = update._table.groups[0]
    assert update.rule(p, group, preconditioned) == covered
    assert update.rule(q, group, False) == other


@pytest.mark.parametrize(("factor", "calls"), [(1.0, 1), (2.0, 2)])
def test_equal_rules_are_applied_in_one_call(factor: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preconditioner chooses the rule only of its own directions."""
    update, p, q, covering = make(factor, weight_decay=0.0, momentum=0.0)
    found: list[int] = []
    rule = first_order.sgd_
    monkeypatch.setattr(
        first_order, "sgd_", lambda params, *args, **kw: (found.append(len(params)), rule(params, *args, **kw))
    )
    with torch.no_grad():
        update.apply(ones(p, q), ones(p), None)
    assert sum(found) == 2
    assert len(found) == calls
    assert covering.asked == [("rule", p, Rule("sgd", 0.0, 0.0, False))]
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.5 * factor))
    torch.testing.assert_close(q.detach(), torch.full((3,), 0.5))


# ------------------------------------------------------------------ lengths of directions
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_set_with_one_bad_direction_is_replaced_by_its_sources(bad: float) -> None:
    update, p, q, _ = make()
    sources, directions = ones(p, q, value=5.0), {p: torch.tensor([1.0, bad, 1.0]), **ones(q)}
    found = update.bound(Proposal(directions, ones(p, q, value=7.0), [(None, [p]), (None, [q])]), sources)
    assert (found[p].tolist(), found[q].tolist()) == ([5.0] * 3, [1.0] * 3)
    assert not sources


@pytest.mark.parametrize("gate", [None, torch.tensor(True)], ids=["fused", "gated"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lengths_and_moments_are_those_of_the_steps_of_adam(dtype: torch.dtype, gate: Tensor | None) -> None:
    """One tensor consists of several pieces with a shorter last one. The others are small or empty."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((5, 3), (300, 701), (0,), (7,))]
    adam = torch.optim.Adam(params, lr=1.0, betas=(0.8, 0.95), eps=1e-3)
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    # Without pieces, a sum of 210,300 squares in float32 is less accurate.
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5 if gate is None else 2e-5
    for step in range(1, 4):
        for p in params:
            p.detach().zero_()  # so that the step is not rounded as the parameter is
            p.grad = torch.randn_like(p)
        adam.step()
        gradients, counts = [p.grad for p in params if p.grad is not None], [torch.tensor(float(step))] * 4
        lengths = first_order.adam_lengths_(gradients, *moments, counts, (0.8, 0.95), 1e-3, gate)
        expected = [torch.linalg.vector_norm(p.detach().double()) for p in params]
        torch.testing.assert_close(lengths.double(), torch.stack(expected), rtol=tolerance, atol=0)
    for key, found in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        torch.testing.assert_close(found, [adam.state[p][key] for p in params], rtol=tolerance, atol=tolerance)
