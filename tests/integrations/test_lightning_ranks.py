"""Lightning on two ranks: runs are killed and resumed, and curvature that is distributed over ranks is saved."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, launch, restarting

SCRIPT = ROOT / "tests" / "integrations" / "scripts" / "lightning_ranks.py"
SECONDS = 280  # the program takes twenty seconds on an idle machine


def answers(folder: Path, how: str) -> list[dict[str, Any]]:
    ended = launch(restarting(str(SCRIPT), str(folder), how), folder, SECONDS)
    assert ended.returncode == 0, ended.stdout
    return [json.loads((folder / f"answer-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("strategy", ["mem", pytest.param("comm", marks=pytest.mark.slow)])
def test_a_killed_rank_comes_back_and_checkpoints_are_whole(strategy: str, tmp_path: Path) -> None:
    for answer in answers(tmp_path, strategy):
        assert answer["killed"] == {"first step": 6, "same losses": True, "same bits": True}
        assert [answer[name] for name in ("ekfac", "sparse_mfac", "hylo", "unaware")] == [True] * 4


@pytest.mark.slow
def test_sharded_models_resume_from_one_file_and_from_a_folder(tmp_path: Path) -> None:
    """With FSDP2, Lightning collects the state of optimizers itself, and the callback completes it."""
    for answer in answers(tmp_path, "sharded"):
        assert answer == {"kfac-False": True, "kfac-True": True, "sparse_mfac-True": True}
