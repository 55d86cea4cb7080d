"""Files of GLUE and SQuAD are read, and damaged ones refused by name; marks and the best answers are correct.

These parts need no Transformers. ``tests/integrations/test_bert_workloads.py`` has the others.
"""

import json
import sys

import pytest
import torch
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

from benchmarks.workloads import DataMissingError, make_workload
from benchmarks.workloads.glue import TASKS, find_files, marks, read_glue
from benchmarks.workloads.squad import Question, Windows, best_answers, read_squad

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


def test_columns_of_glue_are_found_by_their_names(tmp_path):
    for name in TASKS:
        head, line, label = FILES[name]
        path = tmp_path / "train.tsv"
        path.write_text(f"{head}\n{line}\r\n", encoding="utf-8")
        found = read_glue(path, TASKS[name])
        assert found.texts[-1] == (("A b.",) if name in {"sst2", "cola"} else ("A b.", "C d"))
        assert found.labels[-1] == label
        assert len(found.texts) == (2 if name == "cola" else 1)


def test_damaged_files_of_glue_are_refused(tmp_path):
    for task, content, why in [
        ("rte", "index\tsentence1\tlabel\n", "must have the columns sentence1, sentence2, label, it lacks sentence2"),
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\n", "line 2: must have 4 columns"),
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


def test_missing_files_are_named(tmp_path):
    why = r"STS-B lacks train\.tsv, dev\.tsv: python -m benchmarks fetch --workload glue"
    with pytest.raises(DataMissingError, match=why):
        find_files(tmp_path, TASKS["stsb"])


def test_marks_of_glue_agree_with_scikit_learn_and_scipy():
    generator = torch.Generator().manual_seed(0)
    found, right = (torch.randint(0, 2, (50,), generator=generator) for _ in range(2))
    assert marks("qqp", found, right)["F1"] == pytest.approx(f1_score(right, found))
    assert marks("cola", found, right)["Matthews correlation"] == matthews_corrcoef(right, found)
    scores, true = (torch.rand(50, generator=generator, dtype=torch.float64) for _ in range(2))
    assert marks("stsb", scores, true) == {
        "Pearson correlation": pytest.approx(stats.pearsonr(scores, true).statistic),
        "Spearman correlation": pytest.approx(stats.spearmanr(scores, true).statistic),
    }
    constant = torch.zeros(50).long()
    assert [list(marks(name, constant, right).values())[1] for name in ("qqp", "cola")] == [0, 0]
    assert set(marks("stsb", constant.float(), true).values()) == {0.0}
    assert marks("mrpc", torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0])) == {
        "accuracy": pytest.approx(2 / 3),
        "F1": pytest.approx(2 / 3),
    }
    assert list(marks("rte", found, right)) == ["accuracy"]


# ---------------------------------------------------------------------- SQuAD
def _write(path, entry, context="Ann is in Rome"):
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [entry]}]}]}))
    return path


def test_both_versions_of_squad_are_read(tmp_path):
    right = {"text": "Rome", "answer_start": 10}
    old = _write(tmp_path / "old.json", {"id": "1", "question": "Where?", "answers": [right, right]})
    assert read_squad(old) == [Question("Ann is in Rome", "Where?", ("Rome", "Rome"), 10)]
    new = {"id": "1", "question": "Where?", "answers": [], "plausible_answers": [right], "is_impossible": True}
    assert read_squad(_write(tmp_path / "new.json", new))[0].answers == ()


def test_damaged_questions_are_refused(tmp_path):
    path, entry = tmp_path / "train.json", {"id": "q1", "question": "?", "answers": []}
    for content, why in [
        ("{", "must be in the format of SQuAD"),
        ("[]", "must be in the format of SQuAD"),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "lacks 'context'"),
        ({"id": 1, "question": "?"}, "lacks 'answers'"),
        (entry, "question q1 has no answer"),
        ({**entry, "answers": [{"text": "b", "answer_start": 0}]}, "'b' does not stand in its text"),
    ]:
        path.write_text(content) if isinstance(content, str) else _write(path, content)
        with pytest.raises(ValueError, match=rf"train\.json.*{why}"):
            read_squad(path)


def _logits(length, **values):
    logits = torch.zeros(2, length)
    for key, value in values.items():
        logits[0 if key[0] == "s" else 1, int(key[1:])] = value
    return logits


def _windows(*rows):
    """Windows with the question of each, and the places of its pieces; None stands for a piece outside the text."""
    questions, places = zip(*rows, strict=True)
    spans = [[(0, 0) if place is None else (place, place + 1) for place in row] for row in places]
    return Windows(torch.empty(0), torch.empty(0), torch.tensor(questions), torch.tensor(spans))


def test_the_best_span_over_all_windows():
    windows = _windows((0, [None, None, 0, 2, 4, None]), (0, [None, None, 4, 6, None, None]))
    question = Question("a b c d", "?", ("b",), 2)
    # An end before the start, and a start in the question, do not count.
    first = _logits(6, s3=3.0, e4=2.0, e2=4.0, s1=9.0)
    assert best_answers([question], windows, [first, _logits(6)]) == ["b c"]
    assert best_answers([question], windows, [first, _logits(5, s3=4.0, e3=4.0)]) == ["d"]


def test_the_answer_is_empty_if_all_windows_predict_no_answer():
    questions = [Question("a", "?"), Question("a", "?", ("a",))]
    windows = _windows(*((owner, [None, None, 0, None]) for owner in (0, 0, 1)))
    nothing, something = _logits(4, s0=2.0, e0=2.0, s2=1.0), _logits(4, s0=0.5, s2=1.0)
    assert best_answers(questions, windows, [nothing, nothing, something]) == ["", "a"]
    assert best_answers(questions, windows, [nothing, something, nothing]) == ["a", ""]
    assert best_answers(questions[1:], _windows((0, [None, None, 0, None])), [nothing]) == ["a"]  # version 1.1


def test_the_length_of_an_answer_is_limited():
    windows, logits = _windows((0, [None, None, *range(50)])), _logits(52, s2=5.0, e40=5.0, e32=4.0, e31=3.0)
    assert best_answers([Question("x" * 50, "?")], windows, [logits]) == ["x" * 30]


# ---------------------------------------------------------------------- both
def test_invalid_fields_and_a_missing_library_are_named(data_dir, monkeypatch):
    for name, change, why in [
        ("glue", {"length": 513}, "length must be from 8 to 512, got 513"),
        ("glue", {"encoder": "huge"}, "encoder must be one of smallest, tiny.*got 'huge'"),
        ("glue", {"task": "snli"}, "task must be one of mnli, qqp.*got 'snli'"),
        ("bert_qa", {"encoder": "huge"}, "encoder must be one of smallest, tiny.*got 'huge'"),
        ("bert_qa", {"length": 600}, "stride < length <= 512 must hold, got 8 and 600"),
        ("bert_qa", {"stride": 48}, "got 48 and 48"),
        ("bert_qa", {"version": 3.0}, "version must be 2.0 or 1.1, got 3.0"),
    ]:
        with pytest.raises(ValueError, match=why):
            make_workload(name, data_dir, "smoke", changes=change)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("glue", "bert_qa"):
        for use in (lambda workload: next(workload.batches(0)), lambda workload: workload.build_model(0)):
            with pytest.raises(ValueError, match=r'transformers is not installed: pip install "secondorder\[text\]"'):
                use(make_workload(name, data_dir, "smoke"))
