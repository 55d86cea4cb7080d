"""BERT-base with its 110 million parameters fits on a machine with 24 GB of memory."""

import json
import subprocess
import sys

import pytest

from tests.support.launching import ROOT

GB = 10**9


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["kfac", "hylo", "sparse_mfac"])
def test_three_steps_fit_and_take_what_the_formula_says(method: str) -> None:
    command = [sys.executable, "-m", "tests.integrations.bert_base", method]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["parameters"], found["blocks"]) == (109_483_778, 102)
    assert found["differences"] == {}
    assert found["held"]["total"] < found["peak"] < 24 * GB  # the whole state was in memory
    assert len(found["losses"]) == 3
    assert found["finite"]
    assert found["losses"][-1] < found["losses"][0]
    assert not found["fallback"]
