"""Trainer and Accelerate on two ranks: a run that is killed and restarted ends like an uninterrupted one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, launch, restarting

SCRIPT = ROOT / "tests" / "integrations" / "scripts" / "trainer_ranks.py"
SECONDS, WORLD = 240, 2  # the program takes thirty seconds on an idle machine
STEPS, EVERY = 8, 3


@pytest.mark.parametrize(
    "method", ["kfac", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ekfac", "hylo", "sparse_mfac"))]
)
def test_killed_and_resumed_with_either_strategy(tmp_path: Path, method: str) -> None:
    ended = launch(restarting(str(SCRIPT), str(tmp_path), method), tmp_path, SECONDS)
    assert ended.returncode == 0, ended.stdout
    assert "is partial" not in ended.stdout  # Accelerate asks every rank for its state
    by_fallback = 1 if method in {"ekfac", "hylo"} else 0  # the position embedding, which sees no single examples
    whole, resumed = (
        [json.loads((tmp_path / f"{name}-{rank}.json").read_text("utf-8")) for rank in range(WORLD)]
        for name in ("whole", "resumed")
    )
    for name in resumed[0]:
        before, after = [run[name] for run in whole], [run[name] for run in resumed]
        assert [run["step"] for run in before + after] == [STEPS] * 2 * WORLD
        assert before[0]["parameters"] == before[1]["parameters"]
        assert [run["parameters"] for run in after] == [run["parameters"] for run in before]
        assert after[0]["loss"] == before[0]["loss"]
        assert after[0]["losses"][-(STEPS - EVERY) :] == before[0]["losses"][EVERY:]
        assert [run["fallback"] for run in before + after] == [by_fallback] * 2 * WORLD
        assert min(run["used"] for run in before + after) > 0
    for framework in ("transformers", "accelerate"):
        for runs in (whole, resumed):
            assert_spread([run[f"{framework}-mem"] for run in runs], [run[f"{framework}-comm"] for run in runs])


def assert_spread(mem: list[dict[str, Any]], comm: list[dict[str, Any]]) -> None:
    """CommOpt keeps bases, kernels and windows on both ranks; MemOpt keeps a part of them on each."""
    assert comm[0]["held"] == comm[1]["held"] > max(run["held"] for run in mem)
    assert min(run["held"] for run in mem) > 0


pytestmark = pytest.mark.timeout(SECONDS + 60)
