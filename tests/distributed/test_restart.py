"""`torchrun --max-restarts`: a rank is killed in the middle of a step, and training ends as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import ROOT, launch, torchrun

SCRIPT = ROOT / "tests" / "distributed" / "scripts" / "resume.py"
SECONDS = 240  # for a program that takes ten, on a machine that is busy
WORLD, EVERY, KILLED_AT = 2, 4, 6


def answers(folder: Path, strategy: str, how: str, killed_at: int) -> list[dict[str, Any]]:
    folder.mkdir()
    words = ("--nproc-per-node", str(WORLD), "--max-restarts", "1", "--monitor-interval", "0.2")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    command = torchrun(*words, *rendezvous, str(SCRIPT), str(folder), strategy, how, str(killed_at))
    ended = launch(command, folder, SECONDS)
    assert ended.returncode == 0, ended.stdout
    return [json.loads((folder / f"answer-{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one", "each", "dcp"])
@pytest.mark.parametrize("strategy", ["mem", "comm"])
def test_a_killed_rank_comes_back_and_ends_with_the_same_loss(tmp_path: Path, strategy: str, how: str) -> None:
    undisturbed = answers(tmp_path / "undisturbed", strategy, how, -1)
    disturbed = answers(tmp_path / "disturbed", strategy, how, KILLED_AT)
    assert [answer["started_at"] for answer in undisturbed] == [0] * WORLD
    assert [answer["started_at"] for answer in disturbed] == [KILLED_AT - KILLED_AT % EVERY] * WORLD
    assert [answer["loss"] for answer in disturbed] == [answer["loss"] for answer in undisturbed]
