"""GLUE: files are read by the names of their columns, damaged files are refused by name, and marks are correct."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

from benchmarks.workloads import DataMissingError, make_workload
from benchmarks.workloads.bert import SPECIAL, WordPieces
from benchmarks.workloads.glue import (
    TASKS,
    Glue,
    correlations,
    encode_sentences,
    find_task,
    labels_tensor,
    mark,
    read_glue,
)
from benchmarks.workloads.tiny import write_glue
from secondorder.capture.fisher.likelihood import resolve

# First lines of the published files, with shorter values in columns that are not used.
FILES = {
    "mnli": ("index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label", "0\tfiction\tA b.\tC d\tneutral\tneutral", 1),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\tA b.\tC d\t1", 1),
    "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "0\t1\t2\tA b.\tC d", 0),
    "stsb": ("index\tgenre\tsentence1\tsentence2\tscore", "0\tnews\tA b.\tC d\t3.750", 3.75),
    "sst2": ("sentence\tlabel", "A b.\t1", 1),
    "qnli": ("index\tquestion\tsentence\tlabel", "0\tA b.\tC d\tnot_entailment", 1),
    "cola": ("gj04\t1\t\tOther", "gj04\t0\t*\tA b.", 0),
    "rte": ("index\tsentence1\tsentence2\tlabel", "0\tA b.\tC d\tentailment", 0),
    "wnli": ("index\tsentence1\tsentence2\tlabel", "0\tA b.\tC d\t1", 1),
}


def test_columns_are_found_by_their_names(tmp_path):
    for name in TASKS:
        head, line, label = FILES[name]
        path = tmp_path / "train.tsv"
        path.write_text(f"{head}\n{line}\r\n", encoding="utf-8")
        found = read_glue(path, TASKS[name])
        assert found.texts[-1] == (("A b.",) if name in {"sst2", "cola"} else ("A b.", "C d"))
        assert found.labels[-1] == label
        assert len(found.texts) == (2 if name == "cola" else 1)


def test_damaged_files_are_refused(tmp_path):
    for task, content, why in [
        ("rte", "index\tsentence1\tlabel\n", "must have the columns sentence1, sentence2, label, it lacks sentence2"),
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\n", "line 2: must have 4 columns, got 3"),
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tno\n", "line 2: label must be one of.*got 'no'"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t1\na\tb\tx\n", "line 3: score must be a number, got 'x'"),
        ("cola", "gj04\t1\t\tA\ngj04\t2\t\tB\n", "line 2: label must be one of 0, 1, got '2'"),
        ("sst2", "sentence\tlabel\n", "must hold examples, it has none"),
        ("sst2", b"\xff\xfe\x00", "must be text in UTF-8"),
    ]:
        path = tmp_path / "train.tsv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=rf"train\.tsv.*{why}"):
            read_glue(path, TASKS[task])


def test_quotation_marks_and_gaps_of_published_files(tmp_path):
    """A quotation mark is an ordinary character, and truncated lines of QQP are left out."""
    path = tmp_path / "train.tsv"
    path.write_text('id\tquestion1\tquestion2\tis_duplicate\n0\t"a\tb\t0\n1\tbroken\n2\tc\td"\t1\n')
    assert read_glue(path, TASKS["qqp"]).texts == [('"a', "b"), ("c", 'd"')]


def test_missing_files_and_unknown_tasks_are_named(tmp_path):
    with pytest.raises(
        DataMissingError, match=r"STS-B lacks train\.tsv, dev\.tsv\. Get it from https://glue.*<data-dir>"
    ):
        next(replace(Glue.of_size("smoke", tmp_path), task="stsb").batches(0))
    with pytest.raises(ValueError, match="task must be one of mnli, qqp.*got 'snli'"):
        find_task("snli")


def test_sentences_become_rows():
    pieces = WordPieces({word: i for i, word in enumerate((*SPECIAL, "a", "b", "c"))})
    rows = encode_sentences([("a b",), ("a", "b c b")], pieces, 7)
    assert rows.tolist() == [[2, 5, 6, 3, 0, 0, 0], [2, 5, 3, 6, 7, 6, 3]]
    assert encode_sentences([("a a a a", "b c")], pieces, 7).tolist() == [[2, 5, 5, 3, 6, 7, 3]]


def test_marks_agree_with_scikit_learn_and_scipy():
    generator = torch.Generator().manual_seed(0)
    found, right = (torch.randint(0, 2, (50,), generator=generator) for _ in range(2))
    assert mark("qqp", TASKS["qqp"])(found, right)["F1"] == pytest.approx(f1_score(right, found))
    assert mark("cola", TASKS["cola"])(found, right)["Matthews correlation"] == matthews_corrcoef(right, found)
    scores, true = (torch.rand(50, generator=generator, dtype=torch.float64) for _ in range(2))
    assert correlations(scores, true) == {
        "Pearson correlation": pytest.approx(stats.pearsonr(scores, true).statistic),
        "Spearman correlation": pytest.approx(stats.spearmanr(scores, true).statistic),
    }
    constant = torch.zeros(50).long()
    assert [list(mark(name, TASKS[name])(constant, right).values())[1] for name in ("qqp", "cola")] == [0, 0]
    assert set(correlations(constant.float(), true).values()) == {0.0}
    assert mark("mrpc", TASKS["mrpc"])(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0])) == {
        "accuracy": pytest.approx(2 / 3),
        "F1": pytest.approx(2 / 3),
    }
    assert list(mark("rte", TASKS["rte"])(found, right)) == ["accuracy"]


@pytest.mark.parametrize("name", ["stsb", "cola", "sst2"])
def test_a_model_learns_a_task(name, tmp_path):
    """In the made-up sentences, one word determines the class."""
    write_glue(tmp_path / "glue", TASKS[name], np.random.default_rng(0), 64)
    workload = make_workload("glue", tmp_path, "smoke", changes={"task": name})
    model = workload.build_model(0)
    assert model.head.out_features == (1 if name == "stsb" else 2)
    if name == "stsb":
        torch.nn.init.constant_(model.head.bias, 2.5)  # the mean, which takes most of the steps to learn
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=5e-3), workload.batches(0)
    for _ in range(45):
        optimizer.zero_grad()
        workload.loss(model, next(batches)).backward()
        optimizer.step()
    quality = workload.quality(model)
    assert workload.evaluate(model) > 0.7
    assert workload.evaluate(model, everything=True) == next(iter(quality.values()))
    names = {"stsb": ["Pearson correlation", "Spearman correlation"], "cola": ["accuracy", "Matthews correlation"]}
    assert list(quality) == [f"{mark}, dev" for mark in names.get(name, ["accuracy"])]
    assert workload.metric == ("validation Pearson correlation" if name == "stsb" else "validation accuracy")


def test_the_likelihood_of_scores_is_that_of_their_loss(tmp_path):
    write_glue(tmp_path / "glue", TASKS["stsb"], np.random.default_rng(0), 32)
    workload = replace(Glue.of_size("smoke", tmp_path), task="stsb")
    model, batch = workload.build_model(0), next(workload.batches(0))
    outputs, targets = workload.outputs(model, batch).detach(), workload.targets(batch)
    assert outputs.shape == targets.shape == (16, 1)
    kind, tangent = resolve(workload.likelihood), torch.randn(16, 1)
    _, product = torch.autograd.functional.hvp(
        lambda x: workload.criterion(x, targets) * kind.terms(outputs, targets), outputs, tangent
    )
    torch.testing.assert_close(kind.hessian_product(outputs, targets, tangent), product)
    assert labels_tensor([0.5, 1.0], TASKS["stsb"]).tolist() == [[0.5], [1.0]]


def test_bad_sizes_are_refused(data_dir):
    with pytest.raises(ValueError, match="length must be from 8 to 512, got 513"):
        replace(Glue.of_size("smoke", data_dir), length=513)
    with pytest.raises(ValueError, match="encoder must be one of smallest.*got 'huge'"):
        replace(Glue.of_size("smoke", data_dir), encoder="huge")
