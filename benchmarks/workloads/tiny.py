"""Tiny data sets in the standard formats, which replace missing files in the size ``smoke``.

The contents are made up: smooth blobs, one tint per class, random words. They can show that the code works, but not how
well an optimizer performs.
"""

import gzip
import json
import pickle
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.workloads import DataMissingError, Size, WorkloadName, make_workload
from benchmarks.workloads.chargpt import FILE as TEXT_FILE
from benchmarks.workloads.cifar import CIFAR
from benchmarks.workloads.glue import TASKS, Task
from benchmarks.workloads.imagenet import PARTS as IMAGENET_PARTS
from benchmarks.workloads.mnist import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from benchmarks.workloads.multi30k import TRAIN_FILES as SENTENCES_TRAIN
from benchmarks.workloads.multi30k import VALIDATION_FILES as SENTENCES_VALIDATION
from benchmarks.workloads.readers import UInt8Array
from benchmarks.workloads.unet import FOLDERS as MEMBRANE_FOLDERS
from benchmarks.workloads.unet import IMAGES as MEMBRANE_IMAGES

_WORDS = ("the", "king", "and", "queen", "shall", "speak", "of", "war", "or", "love", "to", "thee", "my", "lord")
_TRANSLATED = ("der", "könig", "und", "königin", "soll", "sprechen", "von", "krieg", "oder", "liebe", "zu", "dir",
               "mein", "herr")  # fmt: skip


@contextmanager
def found_or_made_up(
    name: WorkloadName, data_dir: Path, size: Size, changes: Mapping[str, Any] | None = None, talk: bool = True
) -> Iterator[tuple[Path, bool]]:
    """Yield the folder to read, and whether its data is made up because files for the size ``smoke`` are missing."""
    missing = _missing(name, data_dir, size, changes) if size == "smoke" else None
    if missing is None:
        yield data_dir, False
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_data(Path(folder))
        if _missing(name, Path(folder), size, changes):
            raise missing
        if talk:
            print(f"{name}: no data in {data_dir}, so made-up data of the same format is used")
        yield Path(folder), True


def _missing(
    name: WorkloadName, data_dir: Path, size: Size, changes: Mapping[str, Any] | None
) -> DataMissingError | None:
    try:
        next(make_workload(name, data_dir, size, changes=changes).batches(0))
    except DataMissingError as err:
        return err
    return None


def write_tiny_data(data_dir: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    folder = _folder(data_dir / "mnist")
    for images, labels, count in ((TRAIN_IMAGES, TRAIN_LABELS, 256), (TEST_IMAGES, TEST_LABELS, 64)):
        pixels, places = _blobs(rng, count)
        write_idx(folder / images, pixels)
        write_idx(folder / labels, places)
    folder = _folder(data_dir / "cifar10" / CIFAR["cifar10"].folder)
    tints = rng.integers(0, 256, (10, 3, 1, 1))
    for name in (*CIFAR["cifar10"].train, *CIFAR["cifar10"].test):
        write_cifar_batch(folder / name, rng, tints, count=64)
    words = rng.choice(_WORDS, 4000)
    _folder(data_dir / "shakespeare").joinpath(TEXT_FILE).write_text(" ".join(words), encoding="utf-8")
    folder = _folder(data_dir / "multi30k")
    for names, count in ((SENTENCES_TRAIN, 128), (SENTENCES_VALIDATION, 32)):
        picks = [rng.integers(0, len(_WORDS), rng.integers(3, 13)) for _ in range(count)]
        for name, language in zip(names, (_TRANSLATED, _WORDS), strict=True):
            write_sentences(folder / name, ([language[i] for i in pick] for pick in picks))
    write_membranes(data_dir / "membrane", rng)
    folder = _folder(data_dir / "cifar100" / CIFAR["cifar100"].folder)
    tints = rng.integers(0, 256, (100, 3, 1, 1))
    for name in (*CIFAR["cifar100"].train, *CIFAR["cifar100"].test):
        write_cifar_batch(folder / name, rng, tints, count=64, key="fine_labels")
    write_photographs(data_dir / "imagenet", rng)
    for version in (2.0, 1.1):
        for part, paragraphs in (("train", 24), ("dev", 8)):
            write_squad(data_dir / "squad" / f"{part}-v{version}.json", rng, paragraphs, version)
    for task in TASKS.values():
        write_glue(data_dir / "glue", task, rng, count=96)


def write_idx(path: Path, array: UInt8Array) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 0x08, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_sentences(path: Path, sentences: Iterable[Iterable[str]]) -> None:
    text = "".join(" ".join(sentence) + "\n" for sentence in sentences).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_cifar_batch(
    path: Path, rng: np.random.Generator, tints: np.typing.NDArray[np.int64], count: int, key: str = "labels"
) -> None:
    labels = rng.integers(0, len(tints), count)
    images = tints[labels] + rng.normal(0, 40, (count, 3, 32, 32))
    data = images.clip(0, 255).astype(np.uint8).reshape(count, -1)
    path.write_bytes(pickle.dumps({"data": data, key: labels.tolist()}, protocol=2))


def write_membranes(folder: Path, rng: np.random.Generator, side: int = 40) -> None:
    """Write noisy images of cells with dark borders, and labels that are black at the borders."""
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"))
    for number in range(MEMBRANE_IMAGES):
        cells = rng.uniform(0, side, (side // 4, 2, 1, 1))
        nearest = np.sort(np.sqrt(((grid - cells) ** 2).sum(1)), 0)
        inside = np.asarray(255 * (nearest[1] - nearest[0] > 2), np.uint8)
        picture = (90 + inside / 3 + rng.normal(0, 20, inside.shape)).clip(0, 255).astype(np.uint8)
        for name, pixels in zip(MEMBRANE_FOLDERS, (picture, inside), strict=True):
            Image.fromarray(pixels).save(_folder(folder / name) / f"{number}.png")


def write_photographs(folder: Path, rng: np.random.Generator, classes: int = 4, each: int = 8) -> None:
    """Write noisy images of different shapes, tinted by class, in the folders of ImageNet."""
    tints = rng.integers(0, 256, (classes, 3))
    for part, count in zip(IMAGENET_PARTS, (each, each // 4), strict=True):
        for label, tint in enumerate(tints):
            place = _folder(folder / part / f"n{label:08}")
            for number in range(count):
                pixels = tint + rng.normal(0, 20, (*rng.integers(32, 49, 2), 3))
                picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                picture.save(place / f"{place.name}_{number}.JPEG")


def _blobs(rng: np.random.Generator, count: int) -> tuple[UInt8Array, UInt8Array]:
    centers = rng.uniform(8, 20, (count, 2, 1, 1))
    grid = np.stack(np.meshgrid(np.arange(28), np.arange(28), indexing="ij"))
    distance = ((grid - centers) ** 2).sum(1)
    row, column = ((centers.reshape(count, 2) - 8) // 4).astype(np.uint8).T
    return np.asarray(255 * np.exp(-distance / 20), np.uint8), 3 * row + column


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


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
    """Write a tiny version of a task, in which the thing that the sentences mention determines the class."""
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
