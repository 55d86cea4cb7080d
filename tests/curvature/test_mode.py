"""The mode of a refresh for a dry run, which must not ask the policy of the optimizer. `tests/hylo` tests policies."""

from secondorder.curvature.mode import ModeSwitch
from secondorder.switching import MODES, EpochList


def test_a_fixed_switch_stays_in_the_current_mode() -> None:
    switch = ModeSwitch(EpochList([(0, 1)], 2), "HyLo")
    switch.decide(0)
    switch.decide(2)
    fixed = switch.fixed()
    fixed.decide(0)
    assert fixed.mode_in({"mode": "auto"}) == "kis"
    assert [fixed.mode_in({"mode": mode}) for mode in MODES] == list(MODES)
    assert fixed.history == ()
    assert switch.history == ((0, "kid"), (2, "kis"))
