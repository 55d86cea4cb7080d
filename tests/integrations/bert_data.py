"""Questions in the format of SQuAD, sentences in the formats of GLUE, and what BERT takes, made of them.

Files are written by hand as the data sets have them, and read by `datasets`, as scripts do; tokenizers are trained.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import BertTokenizer

NAMES = ("Anna", "Béla", "Chloe", "Dmitri", "Eva", "Farid")
PLACES = ("Oslo", "New York", "Rome", "Kyoto", "São Paulo", "Lima")
LENGTH, STRIDE = 32, 8  # tokens of a feature, and of what two neighbours of one text share

# ---------------------------------------------------------------------------------------------------------------------
# SQuAD
# ---------------------------------------------------------------------------------------------------------------------


def write_squad(path: Path, version: str, *, paragraphs: int = 4, seed: int = 0) -> None:
    """Articles, paragraphs, questions; version 2.0 also has questions without an answer."""
    draw = random.Random(seed)
    articles = [
        {"title": f"People {i}", "paragraphs": [_paragraph(draw, f"{i}-{j}", version) for j in range(2)]}
        for i in range(paragraphs // 2)
    ]
    path.write_text(json.dumps({"version": version, "data": articles}, ensure_ascii=False), encoding="utf-8")


def _paragraph(draw: random.Random, number: str, version: str) -> dict[str, Any]:
    people = draw.sample(NAMES, 5)
    homes = {name: draw.choice(PLACES) for name in people[:4]}
    context = " ".join(f"{name} moved to {home}, and has lived there since." for name, home in homes.items())
    questions: list[dict[str, Any]] = []
    for name, home in homes.items():
        start = context.index(home, context.index(name))
        answers = [{"text": home, "answer_start": start}]
        questions.append({"id": f"{number}-{name}", "question": f"Where does {name} live?", "answers": answers})
    if version == "v2.0":
        for question in questions:
            question["is_impossible"] = False
        nowhere = {"text": homes[people[0]], "answer_start": context.index(homes[people[0]])}
        question = {"id": f"{number}-none", "question": f"Where does {people[4]} live?", "answers": []}
        questions.append(question | {"plausible_answers": [nowhere], "is_impossible": True})
    return {"context": context, "qas": questions}


def questions(articles: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """A row per question, from a batch of articles."""
    rows: list[dict[str, Any]] = [
        {"id": qa["id"], "question": qa["question"], "context": paragraph["context"], "answers": qa["answers"]}
        for paragraphs in articles["paragraphs"]
        for paragraph in paragraphs
        for qa in paragraph["qas"]
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def read_squad(path: Path) -> Dataset:
    """A file of either version, a row per question."""
    articles = load_dataset("json", data_files=str(path), field="data", split="train")
    return articles.map(questions, batched=True, remove_columns=articles.column_names)


def spans(tokenizer: BertTokenizer, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Features of questions: each context in pieces that overlap, with the tokens at which the answer starts and ends.

    Both are 0, the place of `[CLS]`, in pieces that do not hold the whole answer.
    """
    features = tokenizer(
        rows["question"], rows["context"], truncation="only_second", max_length=LENGTH, stride=STRIDE,
        return_overflowing_tokens=True, return_offsets_mapping=True, padding="max_length",
    )  # fmt: skip
    features["start_positions"], features["end_positions"] = [], []
    for i, row in enumerate(features["overflow_to_sample_mapping"]):
        found = _span(rows["answers"][row], features["offset_mapping"][i], features.sequence_ids(i))
        features["start_positions"].append(found[0])
        features["end_positions"].append(found[1])
    return dict(features)


def _span(answers: list[dict[str, Any]], offsets: list[tuple[int, int]], parts: list[int | None]) -> tuple[int, int]:
    if not answers:
        return 0, 0
    start = answers[0]["answer_start"]
    end = start + len(answers[0]["text"])
    inside = [i for i, part in enumerate(parts) if part == 1]
    if start < offsets[inside[0]][0] or end > offsets[inside[-1]][1]:
        return 0, 0
    first = next(i for i in inside if offsets[i][1] > start)
    last = next(i for i in reversed(inside) if offsets[i][0] < end)
    return first, last


# ---------------------------------------------------------------------------------------------------------------------
# GLUE
# ---------------------------------------------------------------------------------------------------------------------

#: By task: the columns of the sentences, that of the label, and the words that stand for labels.
COLUMNS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "sst2": (("sentence",), "label", ()),
    "mrpc": (("#1 String", "#2 String"), "Quality", ()),
    "mnli": (("sentence1", "sentence2"), "gold_label", ("contradiction", "entailment", "neutral")),
}


def write_glue(path: Path, task: str, *, lines: int = 24, seed: int = 0) -> None:
    """Lines as the task has them: its header, tabs, and quotation marks that quote nothing."""
    draw = random.Random(seed)
    columns, label, words = COLUMNS[task]
    header = {
        "sst2": ["sentence", "label"],
        "mrpc": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        "mnli": ["index", "genre", "sentence1", "sentence2", "label1", "gold_label"],
    }[task]
    rows = []
    for i in range(lines):
        value = i % (len(words) or 2)
        row = dict.fromkeys(header, str(i)) | {"genre": "fiction"}
        row |= dict(zip(columns, _sentences(draw, len(columns), value), strict=True))
        row[label] = words[value] if words else str(value)
        rows.append("\t".join(row[name] for name in header))
    start = "\ufeff" if task == "mrpc" else ""  # its files begin with a mark of their byte order
    path.write_text(start + "\n".join(["\t".join(header), *rows]) + "\n", encoding="utf-8")


def _sentences(draw: random.Random, number: int, label: int) -> Iterator[str]:
    """One or two sentences of which the label can be told: it is the word for the weather in the last one."""
    for i in range(number):
        weather = ("rain", "sun", "snow")[label if i == number - 1 else draw.randrange(3)]
        asides = ['he said , " of course', "as everybody knows", ""]
        yield f"in {draw.choice(PLACES)} there was {weather} {draw.choice(asides)} .".replace("  ", " ")


def read_glue(path: Path, task: str) -> Dataset:
    """A file of the task: its columns as they are called there."""
    return load_dataset(
        "csv", data_files=str(path), split="train", delimiter="\t", quoting=csv.QUOTE_NONE, encoding="utf-8-sig"
    )


def labelled(tokenizer: BertTokenizer, rows: Mapping[str, list[Any]], task: str) -> dict[str, list[Any]]:
    """Features of sentences or pairs of them, of their own lengths, with labels that are numbers."""
    columns, label, words = COLUMNS[task]
    features = dict(tokenizer(*(rows[name] for name in columns), truncation=True, max_length=LENGTH))
    features["labels"] = [words.index(value) if words else value for value in rows[label]]
    return features


# ---------------------------------------------------------------------------------------------------------------------
# Both
# ---------------------------------------------------------------------------------------------------------------------


def train_tokenizer(data: Dataset) -> BertTokenizer:
    """WordPiece on all texts of some data."""
    texts = [value for name in data.column_names for value in data[name] if isinstance(value, str)]
    return BertTokenizer().train_new_from_iterator(texts, vocab_size=160)


def features_of(task: str, folder: Path) -> tuple[Dataset, BertTokenizer]:
    """Written, read and tokenized: of `"squad1"`, `"squad2"` or a task of GLUE."""
    if task.startswith("squad"):
        path = folder / f"{task}.json"
        write_squad(path, {"squad1": "1.1", "squad2": "v2.0"}[task])
        data = read_squad(path)
        tokenizer = train_tokenizer(data)
        features = data.map(lambda rows: spans(tokenizer, rows), batched=True, remove_columns=data.column_names)
        return features.remove_columns(["offset_mapping", "overflow_to_sample_mapping"]), tokenizer
    path = folder / f"{task}.tsv"
    write_glue(path, task)
    data = read_glue(path, task)
    tokenizer = train_tokenizer(data)
    return data.map(lambda r: labelled(tokenizer, r, task), batched=True, remove_columns=data.column_names), tokenizer
