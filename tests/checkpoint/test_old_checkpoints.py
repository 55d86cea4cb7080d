"""Files of older versions in `tests/checkpoint_files` can be loaded and continued; see `tests.support.saved_runs`."""

import json
from typing import Any

import pytest
import torch

from tests.support.pool import Pool
from tests.support.saved_runs import FOLDER, RUNS, continued, continued_in_parts

EXPECTED: dict[str, list[dict[str, list[str]]]] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
IN_PARTS = [name for name, run in RUNS.items() if run.world > 1 and not run.together]
WHOLE = [name for name in RUNS if name not in IN_PARTS]
TOGETHER = [name for name, run in RUNS.items() if run.together]


def assert_continued(answer: dict[str, Any], file: str, expected: dict[str, list[str]] | None) -> None:
    """The loaded state is bitwise equal to the saved one; later parameters agree up to rounding between machines.

    Entries that are not in the file are computed after loading; only their names, dtypes and shapes are compared.
    """
    found = torch.load(FOLDER / file, weights_only=True)
    for saved, loaded in zip(found["optimizer"]["param_groups"], answer["groups"], strict=True):
        for key in saved.keys() - {"params"}:
            assert loaded[key] == saved[key], key
    if expected is not None:
        assert answer["lines"].keys() == expected.keys()
        for i, lines in expected.items():
            kept = found["optimizer"]["state"].get(int(i), {})
            assert [_compared(line, kept) for line in answer["lines"][i]] == [_compared(line, kept) for line in lines]
    for name, value in found["after"].items():
        torch.testing.assert_close(
            answer["after"][name], value, rtol=1e-3, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


def _compared(line: str, kept: dict[str, Any]) -> str:
    return line if line.split(" ", 1)[0] in kept else line.rsplit(" ", 1)[0]


def test_every_file_has_a_test() -> None:
    names = {f"{name}.pt" for name in WHOLE} | {f"{n}-{rank}.pt" for n in IN_PARTS for rank in range(RUNS[n].world)}
    assert {file.name for file in FOLDER.glob("*.pt")} == names
    assert EXPECTED.keys() == RUNS.keys()


@pytest.mark.filterwarnings("ignore:.*holds no curvature")
@pytest.mark.parametrize("name", [name for name in WHOLE if name not in TOGETHER])
def test_a_file_of_one_process_continues(name: str) -> None:
    assert_continued(continued(0, 1, name, f"{name}.pt"), f"{name}.pt", EXPECTED[name][0])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", TOGETHER)
def test_a_consolidated_file_continues(pool: Pool, name: str, world: int) -> None:
    answers = [continued(0, 1, name, f"{name}.pt")] if world == 1 else pool.run(continued, name, f"{name}.pt", world=2)
    for answer in answers:
        assert_continued(answer, f"{name}.pt", EXPECTED[name][0] if world == 1 else None)


@pytest.mark.parametrize("name", IN_PARTS)
def test_files_of_each_rank_continue(pool: Pool, name: str) -> None:
    for rank, answer in enumerate(pool.run(continued_in_parts, name, world=RUNS[name].world)):
        assert_continued(answer, f"{name}-{rank}.pt", EXPECTED[name][rank])
