"""BERT-base with its 110 million parameters fits on a machine with 24 GB of memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from tests.integrations import bert_sizes

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9


def run(method: str) -> dict[str, Any]:
    """Return what `bert_base` prints, or fail with its errors."""
    command = [sys.executable, "-m", "tests.integrations.bert_base", method]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_formulas_at_the_base_shape() -> None:
    """The sums over 74 linear layers, 3 embeddings and 25 layer norms were worked out by hand."""
    shapes = bert_sizes.shapes_of(BertConfig(), outputs=2, pooler=True)
    d = 12 * (4 * 769 * 768 + 769 * 3072 + 3073 * 768 + 4 * 768) + 31036 * 768 + 1536 + 769 * 768 + 769 * 2
    assert shapes.entries == d == 109_483_778
    assert shapes.blocks == 102
    square = 12 * (5 * 769**2 + 5 * 768**2 + 3072**2 + 3073**2) + 769**2 + 768**2 + 769**2 + 2**2 + 3 * 768**2
    norms = 25 * 768
    assert bert_sizes.kronecker(shapes)["factors"] == 4 * (square + 31036 + 5 * norms)
    values = 12 * (5 * 1537 + 3072 + 3073) + 1537 + 771 + 3 * 768
    assert bert_sizes.kronecker(shapes)["second_order"] == 4 * (square + values + 31036 + 8 * norms)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["kfac", "hylo", "sparse_mfac"])
def test_three_steps_fit_and_take_what_the_formula_says(method: str) -> None:
    found = run(method)
    assert found["parameters"] == 109_483_778
    assert bert_sizes.differences(found["held"], found["expected"], found["blocks"]) == {}
    assert found["peak"] < 24 * GB
    assert found["peak"] > found["held"]["total"]  # the whole state was in memory
    assert len(found["losses"]) == 3
    assert found["finite"]
    assert found["losses"][-1] < found["losses"][0]
    assert not found["fallback"]
