"""The pool of ranks: reported failures, and replacements after a death or a hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Failure, Pool, RankError, device_of, everywhere, on_every_rank


@pytest.mark.parametrize(("world", "factor"), [(1, 2), (3, 1)])
@on_every_rank()
def test_a_function_of_a_rank_is_a_test(rank: int, world: int, factor: int) -> None:
    assert everywhere(factor * rank) == [factor * r for r in range(world)]
    assert dist.get_world_size() == world
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


@on_every_rank(2)
def failing(rank: int, world: int) -> None:
    assert rank == 0, "rank 1 has failed"


def test_an_assertion_of_a_rank_fails_the_test(pool: Pool) -> None:
    with pytest.raises(RankError, match="AssertionError: rank 1 has failed"):
        failing(pool)


def misbehave(rank: int, world: int, how: str) -> int:
    if rank == 1:
        if how == "die":
            os._exit(7)
        if how == "hang":
            time.sleep(600)
        if how == "leave":
            dist.destroy_process_group()
            return rank
        raise ValueError(f"bad {how}")
    if how != "leave":
        dist.all_reduce(torch.zeros(1, device=device_of(rank)))
    return rank


def test_a_failure_is_raised_with_its_traceback_or_returned(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2:(.|\n)*in misbehave(.|\n)*ValueError: bad raise"):
        pool.run(misbehave, "raise")
    peer, own = pool.run(misbehave, "raise", expect_failure=True)
    assert own[:2] == ("ValueError", "bad raise")
    assert isinstance(peer, Failure)
    assert peer.type == "RuntimeError"


def test_a_rank_that_is_dead_or_hung_or_has_left_its_group_is_replaced(pool: Pool) -> None:
    peer, own = pool.run(misbehave, "die", expect_failure=True)
    assert own[:2] == ("Died", "exit code 7")
    assert peer.type == "RuntimeError"
    with pytest.raises(RankError, match="rank 1 of 2: Hung"):
        pool.run(misbehave, "hang", timeout=2, group_timeout=1)
    before = [worker.process.pid for worker in pool._hired(2)]
    assert pool.run(misbehave, "leave") == [0, 1]
    after = [worker.process.pid for worker in pool._hired(2)]
    assert set(before) & set(after) == {before[0]}


def test_function_must_be_of_the_top_level(pool: Pool) -> None:
    with pytest.raises(ValueError, match="top-level"):
        pool.run(lambda rank, world: rank)
