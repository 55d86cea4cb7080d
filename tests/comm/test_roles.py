"""Roles of ranks for gradients, factors and inverses, and the schedule of versions of the curvature."""

import pytest

from secondorder.comm.dedicated import lockstep, roles
from secondorder.comm.dedicated.roles import Roles

NONE = dict.fromkeys(roles.NAMES)

# numbers of ranks of each role by world
SIZES = {
    3: (1, 1, 1), 4: (2, 1, 1), 5: (3, 1, 1), 6: (4, 1, 1), 7: (5, 1, 1), 8: (4, 2, 2), 9: (5, 2, 2), 10: (6, 2, 2),
}  # fmt: skip


def test_default_roles_fill_the_world_in_order() -> None:
    for world, sizes in SIZES.items():
        found = roles.resolve(world, NONE)
        assert (len(found.gradient), len(found.factor), len(found.inverse)) == sizes
        assert (*found.gradient, *found.factor, *found.inverse) == tuple(range(world))
        assert not found.colocated
    for world in (1, 2):
        with pytest.raises(ValueError, match="at least 3"):
            roles.resolve(world, NONE)
    for world, gradient, others in (
        (2, (0,), (1,)), (3, (0,), (1, 2)), (4, (0, 1), (2, 3)), (8, (0, 1, 2, 3), (4, 5, 6, 7))
    ):  # fmt: skip
        found = roles.resolve(world, NONE, allow_colocated=True)
        assert found == Roles(gradient, others, others)
        assert found.colocated


def test_remaining_ranks_get_the_roles_that_are_not_given() -> None:
    for given, colocated, expected in [
        ({"gradient": [2, 0], "factor": [1], "inverse": [3]}, False, Roles((2, 0), (1,), (3,))),
        ({"gradient": [0], "factor": [1]}, False, Roles((0,), (1,), (2, 3))),
        ({"factor": [3], "inverse": [0]}, False, Roles((1, 2), (3,), (0,))),
        ({"gradient": [0, 1]}, True, Roles((0, 1), (2, 3), (2, 3))),
        ({"inverse": [3]}, True, Roles((0, 1, 2), (3,), (3,))),
        ({"gradient": [0, 3], "factor": [1], "inverse": [2]}, True, Roles((0, 3), (1,), (2,))),
    ]:
        assert roles.resolve(4, roles.check({**NONE, **given}, colocated), colocated) == expected


def test_invalid_roles_are_refused() -> None:
    for given, error, match in [
        ({"gradient": []}, ValueError, "at least one"),
        ({"gradient": [0, 0]}, ValueError, "different"),
        ({"gradient": [-1]}, ValueError, "from 0 on"),
        ({"gradient": [0], "factor": [0]}, ValueError, "rank 0 has two roles"),
        ({"factor": [1], "inverse": [1]}, ValueError, "allow_colocated"),
        ({"factor": 1}, TypeError, "list of ranks"),
        ({"factor": [1.0]}, TypeError, "1.0"),
        ({"factor": "12"}, TypeError, "list of ranks"),
    ]:
        with pytest.raises(error, match=match):
            roles.check({**NONE, **given}, allow_colocated=False)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="rank 2 has two roles"):  # factor and inverse ranks may not overlap in part
        roles.check({"gradient": [0], "factor": [1, 2], "inverse": [2, 3]}, allow_colocated=True)
    for given, match in [
        ({"gradient": [0], "factor": [1], "inverse": [4]}, "beyond the world of 4"),
        ({"gradient": [0], "factor": [1], "inverse": [2]}, r"ranks \[3\] of a world of 4 have no role"),
        ({"gradient": [0]}, "name them"),
        ({"gradient": [0, 1], "factor": [2, 3]}, "leaves no choice"),
    ]:
        with pytest.raises(ValueError, match=match):
            roles.resolve(4, roles.check({**NONE, **given}, False))


def test_role_and_peers_of_a_rank() -> None:
    found = Roles((0, 3), (1,), (2,))
    assert [found.of(rank) for rank in range(4)] == ["gradient", "factor", "inverse", "gradient"]
    assert found.peers(3) == (0, 3)
    assert (found.chief, found.server) == (0, 1)
    assert Roles((0,), (1,), (1,)).of(1) == "factor"


# ----------------------------------------------------------------------------------------------------------- Lockstep
def test_epochs_end_after_a_period() -> None:
    assert [step for step in range(10) if lockstep.ends_epoch(step, 3)] == [3, 6, 9]


def test_the_order_of_work_is_random_for_each_version_and_reproducible() -> None:
    orders = [lockstep.shuffled(range(6), seed=1, version=v) for v in range(20)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 10
    assert orders[0] == [2, 1, 0, 4, 3, 5]
    assert orders[0] != lockstep.shuffled(range(6), seed=2, version=0)
