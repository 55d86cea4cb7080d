"""The workloads of the benchmarks with BERT keep the promises of all workloads, and learn.

``tests/benchmarks/test_bert_data.py`` reads their files.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks.workloads import DataMissingError, bert, make_workload, squad
from benchmarks.workloads.bert import SPECIAL
from benchmarks.workloads.glue import TASKS, Sentences
from benchmarks.workloads.gpt2 import GPT2
from benchmarks.workloads.squad import Question, marks
from benchmarks.workloads.tiny import write_glue, write_squad, write_tiny_data
from secondorder import EKFAC, KFAC, HyLo
from tests.support.workloads import (
    WITH_BERT,
    Promises,
    check_coverage,
    check_likelihood,
    check_made_up_data,
    check_padding,
    check_parts,
    check_recipe,
    train,
)

WORDS = (*SPECIAL, "where", "is", "ann", "in", "rome", "##s", "!", "?")
every_workload = pytest.mark.parametrize("name", WITH_BERT)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tiny_data(folder)
    return folder


@pytest.fixture
def known_words(tmp_path):
    """A data folder with a vocabulary in BERT's format."""
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return tmp_path


@every_workload
class TestWorkloads(Promises):
    pass


@every_workload
def test_evaluation_in_parts_has_the_same_result(name, data_dir, monkeypatch):
    check_parts(make_workload(name, data_dir, "smoke"), monkeypatch, bert, "EVAL_EXAMPLES", 7)


@every_workload
def test_encoding_in_parts_has_the_same_result(name, data_dir, monkeypatch):
    whole = make_workload(name, data_dir, "smoke").train
    for module in (bert, squad):
        monkeypatch.setattr(module, "PART", 7)
    assert all(map(torch.equal, whole, make_workload(name, data_dir, "smoke").train))


@every_workload
def test_padding_changes_nothing(name, data_dir):
    check_padding(make_workload(name, data_dir, "smoke"), lambda inputs, targets: (F.pad(inputs, (0, 3)), targets))


@every_workload
@pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo])
def test_every_parameter_is_covered(name, method, data_dir):
    check_coverage(method, make_workload(name, data_dir, "smoke"))


@every_workload
@pytest.mark.parametrize("method", ["kfac", "hylo", "ekfac_natural", "ekfac_whiten"])
def test_a_recipe_takes_steps(name, method, data_dir):
    check_recipe(method, name, data_dir)


@every_workload
def test_compare_needs_no_data(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # has no folder of data
    check_made_up_data(name, tmp_path, capsys)


@every_workload
def test_the_page_has_the_sizes_of_the_workloads(name, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{name}`.*? \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    *counts, examples, steps = row
    columns = ("smoke", "cpu", "paper"), (200, 8000, 30_522), counts, examples.split(", "), steps.split(", ")
    for size, pieces, count, batch, length in zip(*columns, strict=True):
        workload = make_workload(name, tmp_path, size)
        with torch.device("meta"):
            kind = getattr(bert.library(), workload.head)
            model = kind(workload.configuration(pieces, num_labels=workload.labels))
        assert f"{sum(p.numel() for p in model.parameters()):,}" == count
        assert (f"{workload.batch_size:,}", f"{workload.steps[size]:,}") == (batch, length)


# ---------------------------------------------------------------------- vocabularies and checkpoints
def test_a_vocabulary_of_bert_is_used_if_it_exists(known_words):
    write_squad(known_words / "squad" / "train-v1.1.json", np.random.default_rng(0), 4, 1.1)
    write_squad(known_words / "squad" / "dev-v1.1.json", np.random.default_rng(1), 2, 1.1)
    workload = make_workload("bert_qa", known_words, "smoke", changes={"version": 1.1})
    assert workload.tokenizer.tokenize("Romes, café") == ["rome", "##s", "[UNK]", "[UNK]"]
    assert workload.build_model(0).bert.embeddings.word_embeddings.num_embeddings == len(WORDS)
    with pytest.raises(DataMissingError, match=r"train-v2\.0\.json.*fetch --workload bert_qa"):
        next(replace(workload, version=2.0).batches(0))


def test_the_most_frequent_words_are_the_vocabulary_otherwise(data_dir):
    workload = make_workload("bert_qa", data_dir, "smoke", changes={"vocabulary": 12})
    pieces = workload.tokenizer.get_vocab()
    assert sorted(pieces, key=pieces.get) == [*SPECIAL, ".", "and", "in", "likes", "lives", "old", "the"]
    assert workload.tokenizer.tokenize("Anna lives ín Rome.") == ["[UNK]", "lives", "in", "[UNK]", "."]


def test_a_checkpoint_replaces_the_encoder_and_its_vocabulary(data_dir, known_words):
    plain = make_workload("glue", data_dir, "smoke")
    folder = known_words / "bert"
    theirs = replace(make_workload("bert_qa", known_words, "smoke"), encoder="tiny").build_model(1)
    theirs.save_pretrained(folder)
    loaded = replace(plain, checkpoint=str(folder), dropout=0.3)
    model, again = loaded.build_model(0), loaded.build_model(0)
    assert model.training
    assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.3
    for name, value in theirs.bert.state_dict().items():
        assert model.bert.state_dict()[name].equal(value)
    assert model.classifier.weight.equal(again.classifier.weight)
    assert len(loaded.tokenizer) == len(WORDS)
    assert make_workload("glue", known_words, "paper").checkpoint == str(folder)
    assert make_workload("glue", data_dir, "paper").checkpoint is None


def test_gpt2_uses_byte_pairs_if_they_exist(tmp_path):
    """`` lower`` is Ġ l o w e r, which is merged to Ġl, Ġlo, we (before er) and Ġlowe, followed by r."""
    tokens = ["l", "o", "w", "e", "r", "Ġ", "Ġl", "Ġlo", "we", "er", "Ġlowe", "Ã", "©", "Ċ", "<|endoftext|>"]
    folder, merges = tmp_path / "gpt2", ["#version: 0.2", "Ġ l", "Ġl o", "w e", "e r", "Ġlo we"]
    folder.mkdir()
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    (folder / "vocab.json").write_text(str({token: i for i, token in enumerate(tokens)}).replace("'", '"'))
    (tmp_path / "input.txt").write_text("low lower é\n" * 60, encoding="utf-8")
    workload = replace(GPT2.of_size("paper", tmp_path), batch_size=2, context=8, width=16, layers=1, heads=2)
    assert workload.pieces == str(folder)
    assert [tokens[i] for i in workload._tokens[:9]] == ["l", "o", "w", "Ġlowe", "r", "Ġ", "Ã", "©", "Ċ"]
    inputs, targets = next(workload.batches(0))
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert workload.build_model(0)(inputs).shape == (2, 8, len(tokens))


# ---------------------------------------------------------------------- question answering
def _windows(folder, questions, length, stride=2):
    workload = make_workload("bert_qa", folder, "smoke", changes={"length": length, "stride": stride})
    return workload._windows(questions)


def test_windows_by_hand(known_words):
    """After the question, there is room for five pieces of the text, and neighboring windows share two of them."""
    question = Question("in in in in is ann in rome!", "where is ann?", ("ann in rome",), 15)
    found = _windows(known_words, [question], 12)
    cls, sep, pad, where, is_, ann, in_, rome, mark = (
        WORDS.index(w) for w in ("[CLS]", "[SEP]", "[PAD]", "where", "is", "ann", "in", "rome", "!")
    )
    asked = [cls, where, is_, ann, WORDS.index("?"), sep]
    assert found.inputs[:, 0].tolist() == [
        [*asked, in_, in_, in_, in_, is_, sep],
        [*asked, in_, is_, ann, in_, rome, sep],
        [*asked, in_, rome, mark, sep, pad, pad],
    ]
    assert found.inputs[2, 1].tolist() == [0] * 6 + [1] * 4 + [0, 0]
    assert found.inputs[2, 2].tolist() == [1] * 10 + [0, 0]
    assert found.targets.tolist() == [[0, 0], [8, 10], [0, 0]]
    assert found.places[2].tolist() == [[0, 0]] * 6 + [[19, 21], [22, 26], [26, 27]] + [[0, 0]] * 3
    assert found.questions.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("answers", "start", "target"),
    [((), 0, [0, 0]), ((" ",), 2, [0, 0]), ((" rome ",), 3, [5, 5]), (("ome",), 5, [5, 5])],
)
def test_the_target_of_an_answer(answers, start, target, known_words):
    """Without an answer, it is the first position; otherwise, the pieces that the answer touches, without spaces."""
    question = Question("in  rome ", "where?", answers, start)
    assert _windows(known_words, [question], 10).targets.tolist() == [target]


def test_a_window_too_short_for_a_text_is_refused(known_words):
    with pytest.raises(ValueError, match="length must be at least 9 for the longest question, got 8"):
        _windows(known_words, [Question("in rome", "where is?")], 8)
    assert len(_windows(known_words, [Question("in rome", "where is?")], 9).inputs) == 1


def test_marks_by_hand():
    """Case, punctuation, articles and spaces do not count, and the nearest of several answers does."""
    for answer, right, exact, f1 in [
        ("the Eiffel tower", ("Eiffel  Tower.",), 1, 1),
        ("the cat sat", ("a cat sat down",), 0, 4 / 5),
        ("cat cat dog", ("cat bird",), 0, 2 / 5),
        ("dog", ("cat",), 0, 0),
        ("Rome", ("old Rome", "Rome"), 1, 1),
        ("", (), 1, 1),
        ("cat", (), 0, 0),
    ]:
        found = marks([Question("", "", right), Question("", "")], [answer, ""])
        assert found == {"exact match, %": 50 * (1 + exact), "F1, %": pytest.approx(50 * (1 + f1))}


def test_a_model_learns_to_answer(data_dir):
    workload = replace(make_workload("bert_qa", data_dir, "smoke"), batch_size=16)
    loss = workload.evaluate(workload.build_model(0))
    model, gains = train(workload, 120, 5e-3)
    assert set(gains) == {"exact match, %", "F1, %"}
    assert gains["F1, %"] > 5
    assert workload.evaluate(model) < loss / 2


# ---------------------------------------------------------------------- GLUE
def _glue(folder, task, count=64):
    write_glue(folder / "glue", TASKS[task], np.random.default_rng(0), count)
    return make_workload("glue", folder, "smoke", changes={"task": task})


def test_sentences_become_rows(known_words):
    workload = replace(_glue(known_words, "rte"), length=8)
    inputs, targets = workload._encoded(Sentences([("in is", "in"), ("in in in in", "is ann")], [0, 1]))
    cls, sep, is_, ann, in_ = (WORDS.index(word) for word in ("[CLS]", "[SEP]", "is", "ann", "in"))
    assert inputs[:, 0].tolist() == [[cls, in_, is_, sep, in_, sep, 0, 0], [cls, in_, in_, in_, sep, is_, ann, sep]]
    assert inputs[:, 1].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert inputs[:, 2].tolist() == [[1] * 6 + [0] * 2, [1] * 8]
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("stsb", ["Pearson correlation", "Spearman correlation"]),
        ("cola", ["accuracy", "Matthews correlation"]),
        ("sst2", ["accuracy"]),
    ],
)
def test_a_model_learns_a_task(task, names, tmp_path):
    """In the made-up sentences, one word determines the class."""
    workload = _glue(tmp_path, task)
    model, _ = train(workload, 60, 5e-3)
    assert model.classifier.out_features == (1 if task == "stsb" else 2)
    quality = workload.quality(model)
    assert workload.evaluate(model) > 0.7
    assert workload.evaluate(model, everything=True) == next(iter(quality.values()))
    assert list(quality) == [f"{name}, dev" for name in names]
    assert workload.metric == ("validation Pearson correlation" if task == "stsb" else "validation accuracy")


def test_the_likelihood_of_scores_is_that_of_their_loss(tmp_path):
    workload = _glue(tmp_path, "stsb", 32)
    model, batch = workload.build_model(0), next(workload.batches(0))
    assert workload.outputs(model, batch).shape == batch[1].shape == (16, 1)
    check_likelihood(workload, model, batch)
