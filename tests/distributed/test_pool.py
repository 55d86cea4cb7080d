"""The pool of ranks: new groups, results by rank, reported failures, and replacements after a death or a hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Failure, Pool, RankError, device_of, everywhere, on_every_rank


def sum_of_ranks(rank: int, world: int, start: float) -> tuple[int, float, torch.Tensor]:
    total = torch.tensor([start + rank], device=device_of(rank))
    dist.all_reduce(total)
    return world, total.item(), total.cpu()


def misbehave(rank: int, world: int, how: str) -> int:
    if rank == 1:
        if how == "die":
            os._exit(7)
        if how == "hang":
            time.sleep(600)
        raise ValueError(f"bad {how}")
    dist.all_reduce(torch.zeros(1, device=device_of(rank)))
    return rank


@on_every_rank(2)
def test_ranks_have_the_threads_that_the_environment_names(rank: int, world: int) -> None:
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


@pytest.mark.parametrize(("world", "factor"), [(1, 2), (3, 1)])
@on_every_rank()
def test_a_function_of_a_rank_is_a_test(rank: int, world: int, factor: int) -> None:
    assert everywhere(factor * rank) == [factor * r for r in range(world)]
    assert dist.get_world_size() == world


@on_every_rank(2)
def failing(rank: int, world: int) -> None:
    assert rank == 0, "rank 1 has failed"


def test_an_assertion_of_a_rank_fails_the_test(pool: Pool) -> None:
    with pytest.raises(RankError, match="AssertionError: rank 1 has failed"):
        failing(pool)


def test_results_by_rank(pool: Pool) -> None:
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    for world in (1, 3, 2):
        results = pool.run(sum_of_ranks, 1.0, world=world)
        total = sum(1.0 + rank for rank in range(world))
        assert [result[:2] for result in results] == [(world, total)] * world
        assert all(torch.equal(result[2], torch.tensor([total])) for result in results)


def test_a_failure_is_raised_with_its_traceback_or_returned(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2:(.|\n)*in misbehave(.|\n)*ValueError: bad raise"):
        pool.run(misbehave, "raise")
    peer, own = pool.run(misbehave, "raise", expect_failure=True)
    assert own[:2] == ("ValueError", "bad raise")
    assert isinstance(peer, Failure)
    assert peer.type == "RuntimeError"


def test_a_rank_that_is_dead_or_hung_is_replaced(pool: Pool) -> None:
    peer, own = pool.run(misbehave, "die", expect_failure=True)
    assert own[:2] == ("Died", "exit code 7")
    assert peer.type == "RuntimeError"
    assert len(pool.run(sum_of_ranks, 1.0)) == 2
    with pytest.raises(RankError, match="rank 1 of 2: Hung"):
        pool.run(misbehave, "hang", timeout=2, group_timeout=1)
    assert len(pool.run(sum_of_ranks, 1.0)) == 2


def without_group(rank: int, world: int) -> None:
    if rank == 1:
        dist.destroy_process_group()


def test_a_rank_that_left_its_group_is_replaced(pool: Pool) -> None:
    before = [worker.process.pid for worker in pool._hired(2)]
    pool.run(without_group)
    assert len(pool.run(sum_of_ranks, 1.0)) == 2
    after = [worker.process.pid for worker in pool._hired(2)]
    assert set(before) & set(after) == {before[0]}


def test_function_must_be_of_the_top_level(pool: Pool) -> None:
    with pytest.raises(ValueError, match="top-level"):
        pool.run(lambda rank, world: rank)
