"""The first-order update on plain values: rules, the guard, and which parameters are updated in one call."""

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
    """Covers parameters without any mathematics."""

    takes_sources, refresh_interval = True, "every"

    def __init__(self, options: Mapping[nn.Parameter, dict[str, Any]], factor: float = 1.0) -> None:
        self._options, self._factor = options, factor

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


# ------------------------------------------------------------------ what the preconditioner is asked
class Recording(Covering):
    """Writes down the questions."""

    def __init__(self, options: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        super().__init__(options)
        self.asked: list[tuple[Any, ...]] = []

    def change_sources(self, source: Any, gradients: Any, gate: Any) -> None:
        self.asked.append(("sources", dict(source), dict(gradients), gate))
        for p in source:
            source[p] = source[p] * 2

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        self.asked.append(("rule", p, rule))
        return rule


def recorded(**options: Any) -> tuple[Update, nn.Parameter, nn.Parameter, Recording]:
    update, p, q, group = make(**options)
    recording = Recording({p: group})
    return Update(update._table, recording), p, q, recording  # type: ignore[arg-type]


def test_only_what_is_covered_is_preconditioned_and_the_preconditioner_may_change_it() -> None:
    update, p, q, recording = recorded()
    gate = torch.tensor(True)
    gradients = {p: torch.ones(3), q: torch.ones(3)}
    found = update.sources(gradients, gate)
    assert recording.asked == [("sources", {p: gradients[p]}, gradients, gate)]
    assert [*found] == [p]
    assert found[p].tolist() == [2.0] * 3


def test_with_a_graft_of_adam_its_mean_is_preconditioned() -> None:
    update, p, _, recording = recorded(graft="adam", weight_decay=0.0)
    update.count({p: torch.ones(3)})
    update.sources({p: torch.full((3,), 4.0)}, None)
    ((_, sources, _, _),) = recording.asked
    torch.testing.assert_close(sources[p], torch.full((3,), 4.0))  # bias-corrected


def test_coupled_decay_is_in_adam_s_moments() -> None:
    update, p, _, recording = recorded(graft="adam", weight_decay=0.5)
    update.count({p: torch.ones(3)})
    update.sources({p: torch.full((3,), 4.0)}, None)
    torch.testing.assert_close(recording.asked[0][1][p], torch.full((3,), 4.5))


def test_a_closed_gate_leaves_adam_s_moments() -> None:
    update, p, _, _ = recorded(graft="adamw")
    update.count({p: torch.ones(3)})
    update.sources({p: torch.full((3,), 4.0)}, torch.tensor(False))
    assert not update.state_of(p, "exp_avg").any()


def test_the_preconditioner_is_asked_for_the_rule_of_directions_alone() -> None:
    update, p, q, recording = recorded(momentum=0.0, weight_decay=0.0)
    with torch.no_grad():
        update.apply({p: torch.ones(3), q: torch.ones(3)}, {p: torch.ones(3)}, None)
    assert recording.asked == [("rule", p, Rule("sgd", 0.0, 0.0, False))]


def test_a_step_counts_parameters_that_have_a_gradient() -> None:
    update, p, q, _ = recorded()
    update.count({p: torch.ones(3)})
    assert (update.steps_of(p), update.steps_of(q)) == (1.0, 0.0)


# ------------------------------------------------------------------ the size of directions
def bounded(direction: float, gradient: float, **options: Any) -> tuple[list[float], Update]:
    update, p, _, _ = recorded(**options)
    proposal = Proposal({p: torch.full((3,), direction)}, {p: torch.full((3,), gradient)}, [(None, [p])])
    return update.bound(proposal, {p: torch.full((3,), gradient)})[p].tolist(), update


def test_a_direction_without_limits_stays() -> None:
    found, update = bounded(2.0, 4.0)
    assert found == [2.0] * 3
    assert update.kl_factor is None


@pytest.mark.parametrize(("limit", "factor"), [(1e6, 1.0), (0.06, 0.1)])
def test_the_kl_clip_is_a_factor_of_at_most_one(limit: float, factor: float) -> None:
    found, update = bounded(2.0, 4.0, kl_clip=limit)  # lr² ⟨direction, gradient⟩ = 6
    torch.testing.assert_close(found, [2.0 * factor] * 3)
    assert update.kl_factor is not None
    assert float(update.kl_factor) == pytest.approx(factor)


def test_the_norm_of_directions_is_limited() -> None:
    torch.testing.assert_close(bounded(2.0, 1.0, clip_norm=3**0.5)[0], [1.0] * 3)
    torch.testing.assert_close(bounded(0.5, 1.0, clip_norm=3**0.5)[0], [0.5] * 3)


def test_the_entries_of_directions_are_limited() -> None:
    assert bounded(-2.0, 1.0, clip_value=0.5)[0] == [-0.5] * 3


def test_a_set_with_one_bad_direction_becomes_its_gradients_and_others_stay() -> None:
    update, p, q, _ = recorded()
    raw = {p: torch.full((3,), 5.0), q: torch.full((3,), 5.0)}
    proposal = Proposal({p: torch.full((3,), torch.inf), q: torch.ones(3)}, raw, [(None, [p]), (None, [q])])
    found = update.bound(proposal, dict(raw))
    assert (found[p].tolist(), found[q].tolist()) == ([5.0] * 3, [1.0] * 3)


# ------------------------------------------------------------------ rates
@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, 1e-3),  # Adam's own rate
        ({"fallback_lr": 0.2}, 0.2),
        ({"fallback_lr": 0.2, "lr": 0.25}, 0.1),  # half of what the schedule of lr began with
        ({"fallback_lr": 0.2, "fallback_base_lr": 0.0}, 0.2),
        ({"graft": "sgd"}, 0.5),
    ],
)
def test_rates_of_a_fallback_to_adam(options: dict[str, Any], moved: float) -> None:
    update, _, q, _ = recorded(fallback="adam", weight_decay=0.0, **options)
    update.count({q: torch.ones(3)})
    with torch.no_grad():
        update.apply({q: torch.ones(3)}, {}, None)
    torch.testing.assert_close(q.detach(), torch.full((3,), 1 - moved))


def test_a_closed_gate_changes_no_parameter() -> None:
    update, p, q, _ = recorded()
    with torch.no_grad():
        update.apply({p: torch.ones(3), q: torch.ones(3)}, {p: torch.ones(3)}, torch.tensor(False))
    assert p.tolist() == q.tolist() == [1.0] * 3
    assert not update.state_of(p, "momentum_buffer").any()
