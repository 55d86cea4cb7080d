"""Tiny texts in the standard formats, made up of a few words: questions, and pairs of sentences."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads.glue import Task

_PEOPLE = ("Anna", "Bruno", "Clara", "David", "Edith", "Felix", "Greta", "Henri")
_PLACES = ("London", "the old harbour", "Rome", "a small village", "Köln", "the north tower", "Paris", "Oslo")
_THINGS = ("bread", "music", "maps", "old coins", "rain", "chess")


def write_squad(path: Path, rng: np.random.Generator, paragraphs: int, version: float = 2.0) -> None:
    entries = [_paragraph(rng, number, version) for number in range(paragraphs)]
    data = {"version": f"v{version:.1f}", "data": [{"title": "People", "paragraphs": entries}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def _paragraph(rng: np.random.Generator, number: int, version: float) -> dict[str, Any]:
    people, places = rng.permutation(_PEOPLE)[:4], rng.permutation(_PLACES)[:4]
    context, questions = "", []
    for index, (person, place) in enumerate(zip(people[:3], places, strict=False)):
        context += f"{person} lives in "
        answers = [{"text": str(place), "answer_start": len(context)}]
        context += f"{place} and likes {rng.choice(_THINGS)}. "
        asked = {"id": f"{number}-{index}", "question": f"Where does {person} live?", "answers": answers}
        questions.append(asked if version < 2 else {**asked, "is_impossible": False})
    if version >= 2:
        nothing = {"id": f"{number}-none", "question": f"Where does {people[3]} live?", "answers": []}
        questions.append({**nothing, "is_impossible": True})
    return {"context": context.strip(), "qas": questions}


def write_glue(folder: Path, task: Task, rng: np.random.Generator, count: int) -> None:
    """Write a tiny version of a task: pairs that share a word belong to the first class."""
    heads = list(task.heads) or ["index", *task.texts, task.label]
    (folder / task.folder).mkdir(parents=True, exist_ok=True)
    for name, rows in (("train.tsv", count), *((name, count // 2) for name in task.validation)):
        lines = [] if task.heads else ["\t".join(heads)]
        lines += ["\t".join(_row(heads, task, rng, number)) for number in range(rows)]
        (folder / task.folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(heads: Sequence[str], task: Task, rng: np.random.Generator, number: int) -> list[str]:
    kind = int(rng.integers(len(task.classes) or 6))
    person, thing = rng.choice(_PEOPLE), _THINGS[kind]
    label = task.classes[kind] if task.classes else f"{kind}.000"
    cells = dict.fromkeys(heads, str(number))
    cells |= dict.fromkeys(task.texts, f"{person} likes {thing}, too.")
    return list({**cells, task.label: label}.values())
