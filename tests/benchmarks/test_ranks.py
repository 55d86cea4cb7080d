"""The command ``ranks`` counts bytes on real processes."""

import json
from pathlib import Path

import pytest

from benchmarks.cli import main


@pytest.mark.slow
def test_mem_opt_divides_the_curvature_among_ranks(tmp_path: Path) -> None:
    words = "scale ranks --world 2 --batch 2 --steps 2 --factor-steps 1 --strategies comm_opt mem_opt --out-dir"
    assert main([*words.split(), str(tmp_path)]) == 0
    report = json.loads((tmp_path / "ranks.json").read_text())
    everyone, owner = ([rank[0] for rank in entry["ranks"]] for entry in report["results"])
    assert everyone[0] == everyone[1]
    assert sum(owner) == everyone[0]  # every layer is on exactly one rank
    assert max(owner) <= 1.15 / 2 * everyone[0]
    sent = [[rank[1] for rank in entry["ranks"]] for entry in report["results"]]
    assert all(n > 0 for ranks in sent for n in ranks)
