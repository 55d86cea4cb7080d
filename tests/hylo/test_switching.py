"""Switch policies decide from periods that ended before a refresh, equally on every device and after a resume."""

import copy
import json
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secondorder import switching
from secondorder.switching import Always, EpochList, GradNormChange, LRChange, ProbeError, SwitchPolicy
from tests.support.saving import through_a_file

NAN, INF = math.nan, math.inf
Place = Callable[[float], Tensor]


# ---------------------------------------------------------------- a device whose values arrive with a synchronization
class Elsewhere(Tensor):
    """A tensor that claims to be on another device. Copies hold garbage until their event; reading its value fails."""

    @property
    def device(self):
        return torch.device("cuda")

    def to(self, *args, **keywords):
        if args != ("cpu",):
            return super().to(*args, **keywords)
        truth = self.as_subclass(Tensor).clone()
        if not keywords.get("non_blocking"):
            return truth
        Event.copies.append((torch.full_like(truth, -1e30), truth))
        return Event.copies[-1][0]

    def __iadd__(self, other):
        assert other.device == self.device
        return super().__iadd__(other)

    def read(self, *args):
        raise AssertionError("this waits for the device")

    __float__ = __bool__ = __int__ = item = tolist = cpu = numpy = read


class Event:
    """An event of that device: copies that began before `record` are complete after `synchronize`."""

    copies: list[tuple[Tensor, Tensor]] = []
    waits = 0

    def __init__(self, device):
        assert device.type == "cuda"
        self.awaited = None

    def record(self):
        self.awaited, Event.copies = Event.copies, []

    def synchronize(self):
        assert self.awaited is not None, "an event that was never recorded"
        Event.waits += 1
        for host, truth in self.awaited:
            host.copy_(truth)

    def __reduce__(self):
        raise TypeError("events cannot be copied")


def here(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def there(value: float) -> Tensor:
    return here(value).as_subclass(Elsewhere)


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "copies", [])
    monkeypatch.setattr(Event, "waits", 0)


places = pytest.mark.parametrize("place", [here, there], ids=["cpu", "device"])


def run(
    policy: SwitchPolicy,
    norms: Sequence[float | None],
    lrs: Sequence[Sequence[float]] | None = None,
    every: int = 1,
    place: Place = here,
    renew: Callable[[SwitchPolicy], SwitchPolicy] | None = None,
    observe_first: bool = True,
) -> str:
    """Decisions of the refreshes, I for KIS and D for KID; a norm of None stands for a step that was not observed."""
    decisions = []
    for step, norm in enumerate(norms):
        for observing in (observe_first, not observe_first):
            if observing and norm is not None:
                policy.observe(step, lrs[step] if lrs else [0.1], place(norm))
            if not observing and step % every == 0:
                decisions.append({"kid": "D", "kis": "I", "sngd": "S"}[policy.decide(step)])
        if renew is not None:
            policy = renew(policy)
    return "".join(decisions)


def blank(policy: SwitchPolicy) -> SwitchPolicy:
    """A new policy with the same options."""
    return eval(repr(policy), vars(switching))


def reloaded(policy: SwitchPolicy, through: Callable[[dict[str, float]], Any]) -> SwitchPolicy:
    other = blank(policy)
    other.load_state_dict(through(policy.state_dict()))
    return other


RENEWALS: dict[str, Callable[[SwitchPolicy], SwitchPolicy]] = {
    "json": partial(reloaded, through=lambda state: json.loads(json.dumps(state))),
    "torch": partial(reloaded, through=lambda state: through_a_file({k: here(value) for k, value in state.items()})),
    "pickle": lambda policy: pickle.loads(pickle.dumps(policy)),
    "deepcopy": copy.deepcopy,
}


# ---------------------------------------------------------------- GradNormChange
@places
def test_decisions_follow_the_norms(place):
    """Whether a step is observed before or after its refresh does not matter."""
    for eta, period, norms, expected in [
        # Means are 4, 4.2, 4.2, 6, 6, 5.9: the change to the fourth causes KID in the fifth.
        (0.1, 2, [3.0, 5.0, 4.0, 4.4, 4.2, 4.2, 7.0, 5.0, 6.0, 6.0, 5.9, 5.9, 1.0, 1.0], "DDDDIIIIDDIIII"),
        # Every change is enough for eta = 0, and so is a change of exactly eta. The norm may fall to zero.
        (0.0, 2, [1.0] * 8, "D" * 8),
        (0.5, 1, [2.0, 3.0, 3.0], "DDD"),
        (0.1, 1, [4.0, 4.0, 3.0, 3.0, 3.2, 0.0, 0.0, 1.0, 1.0], "DDIDIIDID"),
        # A norm that is not finite is left out of the sum and of the count: three norms of 4 are not less than four.
        (0.1, 4, [4.0] * 5 + [-INF] + [4.0] * 6, "DDDDDDDDIIII"),
        # A period without a norm is skipped: later periods are compared with the last one that had one.
        (0.1, 2, [4.0, 4.0, *[None] * 4, *[4.0] * 3, *[None] * 3, *[8.0] * 4], "DDDDDDDDIIIIIIDD"),
    ]:
        for first in (True, False):
            assert run(GradNormChange(eta, period), norms, place=place, observe_first=first) == expected


def test_the_reason_is_reported():
    changed, rates = "a learning rate changed at step 3", [[0.1]] * 3 + [[0.05]] * 2
    for policy, norms, expected in [
        (GradNormChange(0.1, 1), [], "nothing decided yet"),
        (GradNormChange(0.1, 1), [1.0], "no two periods to compare yet"),
        (GradNormChange(0.1, 1), [1.0, 1.25, 9.0], "mean gradient norm 1 → 1.25, a change of 0.25 (eta=0.1)"),
        (GradNormChange(0.1, 1), [1.0] * 4, changed),
        (LRChange(period_steps=1), [NAN] * 3, "no learning rate has changed"),
        (LRChange(period_steps=1), [NAN] * 5, changed),
        (EpochList([(0, 1), (3, 5)], steps_per_epoch=1), [NAN] * 5, "epoch 4 is in the intervals of KID"),
        (EpochList([(0, 1), (3, 5)], steps_per_epoch=1), [NAN] * 3, "epoch 2 is outside the intervals of KID"),
        (ProbeError(), [NAN], "no error measured yet, or not a number"),
        (Always("sngd"), [NAN], "always sngd"),
    ]:
        run(policy, norms, rates)
        assert policy.reason == expected


@places
def test_nothing_waits_before_a_period_is_over(place):
    """The host waits only in the first refresh of a period, for a copy that began one step earlier."""
    policy = GradNormChange(period_steps=4)
    for step in range(13):
        before = Event.waits
        policy.observe(step, [0.1], place(1.0))
        assert Event.waits == before
        policy.decide(step)
        assert Event.waits - before == (place is there and step > 0 and step % 4 == 0)


def test_without_refreshes_at_most_one_copy_is_pending():
    policy = GradNormChange(period_steps=1)
    for step in range(5):
        policy.observe(step, [0.1], there(1.0))
    assert Event.waits == 4
    assert policy.decide(5) == "kis"


def test_a_model_may_move_to_another_device():
    norms = [1.0] * 8 + [5.0] * 8
    moves = iter([here, there, there, here] * 4)
    found = run(GradNormChange(eta=0.1, period_steps=3), norms, place=lambda x: next(moves)(x))
    assert found == run(GradNormChange(eta=0.1, period_steps=3), norms)


def test_the_norm_may_change_afterwards_and_sums_are_in_float64():
    for place in (here, there):
        policy, norm = GradNormChange(period_steps=1), place(1.0)
        for step in range(3):
            policy.observe(step, [0.1], norm.fill_(1.0))
            norm.fill_(77.0)
        assert policy.decide(3) == "kis"
        assert policy.state_dict()["last_norm"] == 1.0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        policy, norm, expected = GradNormChange(period_steps=300), torch.tensor(1 / 3, dtype=dtype), 0.0
        for step in range(299):
            policy.observe(step, [0.1], norm)
            expected += float(norm)
        assert policy.state_dict()["norm_sum"] == expected


def test_a_loaded_period_of_another_length_ends_too():
    for steps in (2, 3, 50):
        policy = GradNormChange(period_steps=20)
        run(policy, [1.0] * 30)
        other = GradNormChange(period_steps=steps)
        other.load_state_dict(policy.state_dict())
        found = []
        for step in range(30, 250):
            other.observe(step, [0.1], here(1.0 if step < 150 else 5.0))
            found.append(other.decide(step))
        assert "kis" in found[: 4 * steps]
        assert "kid" in found[120 : 122 + steps]


# ---------------------------------------------------------------- ... against the definition
def changes_of(lrs: Sequence[Sequence[float]]) -> list[int]:
    """Steps at which a rate fell by more than a tenth or a rise ended."""
    pairs = list(pairwise(lrs))
    rose = [False] + [any(new > old for old, new in zip(*pair, strict=True)) for pair in pairs]
    fell = [False] + [any(new < 0.9 * old for old, new in zip(*pair, strict=True)) for pair in pairs]
    return [t for t in range(1, len(lrs)) if fell[t] or (rose[t - 1] and not rose[t])]


def follows_change(step: int, every: int, changes: list[int], window: int) -> bool:
    past = [t for t in changes if t <= step]
    return bool(window and past) and (step - past[-1] < window or past[-1] > step - every)


def by_definition(
    norms: Sequence[float], lrs: Sequence[Sequence[float]], every: int, eta: float | None, period: int, hold: int
) -> str:
    """Each decision, from the whole history before it; without ``eta``, norms do not matter."""
    answers = []
    for step in range(0, len(norms), every):
        ended = [norms[e * period : (e + 1) * period] for e in range(step // period)]
        finite = [[x for x in values if math.isfinite(x)] for values in ended]
        means = [sum(values) / len(values) for values in finite if values]
        kid = follows_change(step, every, changes_of(lrs), hold * period)
        if eta is not None:
            kid = kid or len(means) < 2 or abs(means[-1] - means[-2]) >= eta * means[-2]
        answers.append("D" if kid else "I")
    return "".join(answers)


LRS = st.lists(st.sampled_from([0.0, 0.01, 0.095, 0.1, 0.2]), min_size=2, max_size=2)
SIGNAL = st.tuples(st.sampled_from([1.0, 1.0, 1.0, 1.3, 2.0, NAN, INF]), LRS, st.integers(1, 6))


@places
@settings(max_examples=40)
@given(
    signals=st.lists(SIGNAL, min_size=3, max_size=12),
    every=st.integers(1, 9),
    eta=st.sampled_from([0.07, 0.21]),
    period=st.integers(1, 6),
    hold=st.integers(0, 2),
    name=st.sampled_from(["none", "json", "pickle"]),
)
def test_decisions_follow_the_definition(place, signals, every, eta, period, hold, name):
    norms = [norm for norm, _, length in signals for _ in range(length)]
    lrs = [rates for _, rates, length in signals for _ in range(length)]
    for policy, eta_of in ((GradNormChange(eta, period, hold), eta), (LRChange(hold + 1, period), None)):
        expected = by_definition(norms, lrs, every, eta_of, period, policy.hold)
        assert run(policy, norms, lrs, every, place, RENEWALS.get(name)) == expected


# ---------------------------------------------------------------- LRChange and EpochList
def test_decisions_follow_the_rates_or_the_epochs():
    rounded = [0.1 * (1 + 2e-16 * (t % 3)) for t in range(20)]
    assert len(set(rounded)) > 1
    for lrs, expected in [
        # Small changes do not count: exactly a tenth is not more than a tenth, and rounding is not a rise.
        ([[0.9**t] for t in range(20)], "I" * 20),
        ([[0.89**t] for t in range(5)], "IDDDD"),
        ([[rate] for rate in rounded], "I" * 20),
        # A group may be added later.
        ([[0.1]] * 2 + [[0.1, 0.001]] * 2 + [[0.1, 0.0001]] * 2, "IIIIDI"),
        # Of more than eight groups, those eight apart share a sum: with equal rates, a fall by 21 % counts as 10.5 %.
        *[([[0.1] * 12] * 2 + [[0.1] * i + [0.079] + [0.1] * (11 - i)] * 2, "IIDI") for i in range(12)],
    ]:
        assert run(LRChange(period_steps=1), [NAN] * len(lrs), lrs) == expected, lrs
    assert run(EpochList([(0, 1), (3, 5)], steps_per_epoch=2), [NAN] * 14) == "DDIIIIDDDDIIII"


# ---------------------------------------------------------------- ProbeError
@places
@pytest.mark.parametrize(("threshold", "expected"), [(0.1, "DIDIDDIDI"), (0.3, "DIIIIDIDI")])
def test_the_error_of_the_refresh_before_decides(place, threshold, expected):
    policy, found = ProbeError(threshold=threshold), []
    for refresh, error in enumerate([0.05, 0.2, 0.1, 0.10001, NAN, 0.0, INF, 0.0, 0.0]):
        found.append({"kid": "D", "kis": "I"}[policy.decide(10 * refresh)])
        policy.probe(place(error))
    assert "".join(found) == expected


@places
def test_only_the_last_probe_counts_and_is_waited_for_at_the_next_refresh(place):
    policy = ProbeError()
    for refresh in range(4):
        assert Event.waits == (place is there) * max(0, refresh - 1)
        policy.decide(refresh)
        waited = Event.waits
        for error in (there(5.0), place(6.0), place(0.01).reshape(1) if refresh == 2 else place(0.01)):
            policy.probe(error)
        assert Event.waits == waited
    assert policy.decide(4) == policy.decide(5) == "kis"
    assert policy.reason == "error of KIS 0.01 (threshold=0.1)"


# ---------------------------------------------------------------- all of them
ALL = [
    GradNormChange(),
    GradNormChange(eta=0.25, period_steps=7, hold=0),
    LRChange(),
    LRChange(hold=3, period_steps=11),
    EpochList([(0, 10), [35, 40]], 100),
    ProbeError(),
    ProbeError(layers=5, threshold=1),
    Always("kid"),
    Always("kis"),
    Always("sngd"),
]


def test_properties_equality_and_repr_of_policies():
    """The repr is the call that builds an equal policy."""
    assert [policy.needs_gradient_norm for policy in ALL] == [True] * 2 + [False] * 8
    assert [policy.probes for policy in ALL] == [0] * 5 + [2, 5] + [0] * 3
    for policy in ALL:
        other = blank(policy)
        assert other == policy
        assert repr(other) == repr(policy)
        assert [other == x for x in ALL].count(True) == 1
    for mode in ("kid", "kis", "sngd"):
        assert {Always(mode).decide(step) for step in (0, 5, 10**6)} == {mode}
    assert repr(GradNormChange(np.float64(0.5))) == "GradNormChange(eta=0.5, period_steps=100, hold=1)"
    assert repr(ProbeError(threshold=np.float64(0.5))) == "ProbeError(layers=2, threshold=0.5)"
    assert repr(EpochList([[0, 2]], 5)) == "EpochList(intervals=((0, 2),), steps_per_epoch=5)"


def live(policy: SwitchPolicy, steps: range, place: Place) -> list[str]:
    found = []
    for step in steps:
        policy.observe(step, [0.1 * 0.8 ** (step // 9), 0.2], place(1.0 + (step // 13) % 3))
        if step % 4 == 0:
            found.append(policy.decide(step))
            policy.probe(place(0.05 * (step % 5)))
    return found


@places
def test_a_copy_in_the_middle_decides_alike(place):
    """A state always has the same keys, and replaces the one of a policy that was used before."""
    for original, stop in product(ALL, (5, 16, 27)):
        policy, used = copy.deepcopy(original), blank(original)
        keys = list(policy.state_dict())
        live(policy, range(stop), place)
        live(used, range(100, 117), place)
        state = policy.state_dict()
        used.load_state_dict(state)
        others = [used, *(renew(policy) for renew in RENEWALS.values())]
        assert others == [policy] * len(others)
        found = [live(other, range(stop, 45), place) for other in others]
        taken = policy.state_dict()
        taken.update(dict.fromkeys(taken, 5.0))
        assert str(policy.state_dict()) == str(state), original
        assert found == [live(policy, range(stop, 45), place)] * len(others), original
        policy.observe(45, [0.1] * 20, place(1.0))
        assert list(state) == list(policy.state_dict()) == keys
        assert all(type(value) is float for value in state.values())


def test_a_state_that_does_not_fit_is_refused_as_a_whole():
    for original in ALL:
        policy = blank(original)
        live(policy, range(30), here)
        before = policy.state_dict()
        with pytest.raises(ValueError, match=rf"not the state of a {type(policy).__name__}: .*unknown \['novel'\]"):
            policy.load_state_dict({**before, "novel": 1.0})
        for key in before:
            rest = {k: 7.0 for k in before if k != key}
            with pytest.raises(ValueError, match=rf"missing \['{key}'\]"):
                policy.load_state_dict(rest)
            for wrong in ("1", None, True, [1.0], torch.ones(2)):
                with pytest.raises(TypeError, match=f"{key} must be a number"):
                    policy.load_state_dict({**rest, key: wrong})
        assert str(policy.state_dict()) == str(before)


def test_bad_values_are_refused():
    for build, error, match in [
        (lambda: GradNormChange(eta=-0.1), ValueError, "eta must be finite, >= 0.0, got -0.1"),
        (lambda: GradNormChange(eta="0.1"), TypeError, "eta must be a number, got '0.1'"),
        (lambda: GradNormChange(period_steps=0), ValueError, "period_steps must be >= 1, got 0"),
        (lambda: GradNormChange(hold=-1), ValueError, "hold must be >= 0, got -1"),
        (lambda: GradNormChange(hold=True), TypeError, "hold must be an integer, got True"),
        (lambda: LRChange(hold=0), ValueError, "hold must be >= 1, got 0"),
        (lambda: EpochList(5, 10), TypeError, "intervals must be a list of pairs of epochs, got 5"),
        (lambda: EpochList([(1, 2, 3)], 10), TypeError, r"pairs of epochs, got \[\(1, 2, 3\)\]"),
        (lambda: EpochList([], 10), ValueError, r"must not be empty, got \[\].*Always\('kis'\)"),
        (lambda: EpochList([(4, 4)], 10), ValueError, r"end after it starts, got \(4, 4\)"),
        (lambda: EpochList([(-1, 4)], 10), ValueError, "start of an interval must be >= 0, got -1"),
        (lambda: EpochList([(0, 1.5)], 10), TypeError, "end of an interval must be an integer, got 1.5"),
        (lambda: EpochList([(0, 1)], 0), ValueError, "steps_per_epoch must be >= 1, got 0"),
        (lambda: ProbeError(layers=0), ValueError, "layers must be >= 1, got 0"),
        (lambda: ProbeError(threshold=INF), ValueError, "threshold must be .*got inf"),
        (lambda: Always("auto"), ValueError, "mode must be one of .*got 'auto'"),
        (lambda: Always(1), TypeError, "mode must be one of .*got 1"),
    ]:
        with pytest.raises(error, match=match):
            build()


def test_a_policy_of_your_own_needs_one_method():
    with pytest.raises(TypeError, match="abstract"):
        SwitchPolicy()

    class Odd(SwitchPolicy):
        probes = 3

        def decide(self, step: int) -> str:
            return "kid" if step % 2 else "sngd"

    policy = Odd()
    assert run(policy, [1.0] * 4) == "SDSD"
    policy.probe(here(1.0))
    policy.load_state_dict(policy.state_dict())
    assert (policy.state_dict(), policy.needs_gradient_norm, policy.probes) == ({}, False, 3)


@pytest.mark.gpu
def test_a_real_device_decides_like_the_cpu(monkeypatch):
    monkeypatch.undo()
    for policy in ALL:
        found = [live(copy.deepcopy(policy), range(60), lambda x, d=d: here(x).to(d)) for d in ("cpu", "cuda")]
        assert found[0] == found[1]
