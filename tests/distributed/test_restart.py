"""`torchrun --max-restarts`: a rank is killed in the middle of a step, and training ends as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.scripts.resume import EVERY, train
from tests.support.launching import ROOT, launch, torchrun
from tests.support.pool import Pool

SCRIPT = ROOT / "tests" / "distributed" / "scripts" / "resume.py"
SECONDS = 240  # for a program that takes ten, on a machine that is busy
WORLD, KILLED_AT = 2, 6


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "how"), [("mem", "one"), ("mem", "each"), ("comm", "one"), ("mem", "dcp")])
def test_a_killed_rank_comes_back_and_ends_with_the_same_loss(
    pool: Pool, tmp_path: Path, strategy: str, how: str
) -> None:
    words = ("--nproc-per-node", str(WORLD), "--max-restarts", "1", "--monitor-interval", "0.2")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    command = torchrun(*words, *rendezvous, str(SCRIPT), str(tmp_path), strategy, how, str(KILLED_AT))
    ended = launch(command, tmp_path, SECONDS)
    assert ended.returncode == 0, ended.stdout
    disturbed = [json.loads((tmp_path / f"answer-{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]
    (tmp_path / "undisturbed").mkdir()
    undisturbed = pool.run(train, tmp_path / "undisturbed", strategy, how, -1, world=WORLD)
    assert [answer["started_at"] for answer in disturbed] == [KILLED_AT - KILLED_AT % EVERY] * WORLD
    assert [answer["started_at"] for answer in undisturbed] == [0] * WORLD
    assert [answer["loss"] for answer in disturbed] == [answer["loss"] for answer in undisturbed]
