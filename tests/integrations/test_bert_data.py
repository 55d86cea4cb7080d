"""The data of the tests with BERT: files in the formats of SQuAD and GLUE come out as what the models take."""

import json
from pathlib import Path

import pytest

from tests.integrations import bert_data


@pytest.mark.parametrize("version", ["1.1", "v2.0"])
def test_a_span_of_tokens_is_the_text_of_the_answer(version: str, tmp_path: Path) -> None:
    bert_data.write_squad(tmp_path / "train.json", version)
    data = bert_data.read_squad(tmp_path / "train.json")
    features = bert_data.spans(bert_data.train_tokenizer(data), data[:])
    found: dict[int, set[str]] = {}
    pieces = zip(*(features[name] for name in ("overflow_to_sample_mapping", "offset_mapping")), strict=True)
    for i, (row, offsets) in enumerate(pieces):
        first, last = features["start_positions"][i], features["end_positions"][i]
        if last:
            found.setdefault(row, set()).add(data[row]["context"][offsets[first][0] : offsets[last][1]])
    answerable = {i: {row["answers"][0]["text"]} for i, row in enumerate(data) if row["answers"]}
    assert found == answerable  # each is found in some piece, and nothing else is
    assert len(answerable) == 16
    assert len(data) - len(answerable) == (4 if version == "v2.0" else 0)


def test_pieces_of_a_context_overlap_by_the_stride(tmp_path: Path) -> None:
    bert_data.write_squad(tmp_path / "train.json", "1.1")
    data = bert_data.read_squad(tmp_path / "train.json")
    features = bert_data.spans(bert_data.train_tokenizer(data), data[:])
    rows = features["overflow_to_sample_mapping"]
    assert len(rows) > 2 * len(data)
    context = [[span for span, part in zip(offsets, kinds, strict=True) if part] for offsets, kinds in zip(
        features["offset_mapping"], features["token_type_ids"], strict=True
    )]  # fmt: skip
    neighbours = [(a, b) for a, b, i, j in zip(context, context[1:], rows, rows[1:], strict=False) if i == j]
    for first, second in neighbours:
        assert first[-1 - bert_data.STRIDE : -1] == second[: bert_data.STRIDE]  # the last is [SEP]


def test_the_file_has_the_nesting_of_the_data_set(tmp_path: Path) -> None:
    bert_data.write_squad(tmp_path / "train.json", "v2.0")
    text = json.loads((tmp_path / "train.json").read_text(encoding="utf-8"))
    assert text.keys() == {"version", "data"}
    question = text["data"][0]["paragraphs"][0]["qas"][-1]
    assert question["is_impossible"]
    assert question["answers"] == []
    assert question["plausible_answers"][0].keys() == {"text", "answer_start"}


@pytest.mark.parametrize("task", bert_data.COLUMNS)
def test_every_line_of_a_table_is_a_row(task: str, tmp_path: Path) -> None:
    """Quotation marks that open and never close are text there."""
    bert_data.write_glue(tmp_path / "train.tsv", task)
    lines = (tmp_path / "train.tsv").read_text(encoding="utf-8-sig").splitlines()
    assert any(line.count('"') % 2 for line in lines)
    data = bert_data.read_glue(tmp_path / "train.tsv", task)
    assert data.column_names == lines[0].split("\t")
    assert ["\t".join(map(str, row.values())) for row in data] == lines[1:]
    features = bert_data.labelled(bert_data.train_tokenizer(data), data[:], task)
    assert set(features["labels"]) == set(range(3 if task == "mnli" else 2))
    assert {len(set(types)) for types in features["token_type_ids"]} == {1 if task == "sst2" else 2}
