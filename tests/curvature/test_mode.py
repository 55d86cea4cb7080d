"""The mode of a refresh is that of its group, or the one that a policy has chosen."""

from secondorder.curvature.mode import ModeSwitch
from secondorder.switching import MODES, Always, EpochList


def switch_of(*spans: tuple[int, int]) -> ModeSwitch:
    return ModeSwitch(EpochList(list(spans), 2), "HyLo")


def test_the_option_of_a_group_comes_before_the_policy() -> None:
    switch, constant = switch_of((0, 1)), ModeSwitch(Always("kis"), "HyLo")
    assert [switch.mode_in({"mode": mode}) for mode in MODES] == list(MODES)
    assert constant.mode_in({"mode": "auto"}) == "kis"  # a policy with one mode need not be asked


def test_the_policy_is_asked_for_the_mode_of_a_refresh_unless_the_switch_is_fixed() -> None:
    switch, chosen = switch_of((0, 1)), []
    for step in range(4):
        switch.decide(step)
        chosen.append(switch.mode_in({"mode": "auto"}))
    assert chosen == ["kid", "kid", "kis", "kis"]
    fixed = switch.fixed()
    fixed.decide(0)
    assert fixed.mode_in({"mode": "auto"}) == "kis"
    assert fixed.history == ()
    assert switch.history == ((0, "kid"), (2, "kis"))


def test_a_loaded_switch_keeps_its_mode() -> None:
    switch, other = switch_of((0, 1)), switch_of((0, 1))
    switch.decide(0)
    other.load(switch.vector(), 1)
    assert other.mode == "kid"
    assert other.accepts(switch.vector())
    assert not other.accepts(ModeSwitch(Always("kid"), "HyLo").vector())
    other.load(None, 1)
    assert other.mode is None
