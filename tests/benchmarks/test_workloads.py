"""Every workload: the seed determines weights and batches, missing data is named, and sizes are the published ones."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks.downloads import BY_HAND, DATA_SETS
from benchmarks.workloads import WORKLOADS, DataMissingError, chargpt, make_workload, multi30k
from benchmarks.workloads.mnist import read_labels
from benchmarks.workloads.multi30k import number_words, read_sentences
from benchmarks.workloads.tiny import write_idx, write_sentences
from secondorder import EKFAC, KFAC, HyLo
from tests.support.workloads import WITHOUT_BERT, Promises, check_coverage, check_padding, check_parts

SIZES = ("smoke", "cpu", "paper")
FILES = {
    "autoencoder": ("mnist", "train-images-idx3-ubyte.gz"),
    "resnet20": ("cifar10", "data_batch_1"),
    "chargpt": ("shakespeare", "input.txt"),
    "logistic": ("mnist", "train-labels-idx1-ubyte.gz"),
    "multi30k": ("multi30k", "train.de.gz"),
    "unet": ("membrane", "image/0.png"),
    "vgg16": ("cifar10", "test_batch"),
    "resnet18": ("imagenet", "train/<class>/*.JPEG, val/<class>/*.JPEG"),
}


@pytest.mark.parametrize("name", WITHOUT_BERT)
class TestWorkloads(Promises):
    pass


@pytest.mark.parametrize(
    ("name", "module", "limit", "size"),
    [("chargpt", chargpt, "EVAL_WINDOWS", 3), ("multi30k", multi30k, "EVAL_SENTENCES", 5)],
)
def test_evaluation_in_parts_has_the_same_result(name, module, limit, size, data_dir, monkeypatch):
    workload = make_workload(name, data_dir, "smoke")
    check_parts(workload, monkeypatch, module, limit, size)
    model = workload.build_model(0)
    assert workload.evaluate(model) != workload.evaluate(model, everything=True)


def test_the_page_has_the_sizes_of_the_workloads(tmp_path):
    """The numbers of trainable parameters, batch sizes and steps; those of texts depend on the vocabulary."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    rows = [row for row in rows if row[0] != "multi30k"]
    assert {row[0] for row in rows} == set(WORKLOADS) - {"chargpt", "gpt2_small", "multi30k", "bert_qa", "glue"}
    for name, *counts, examples, steps in rows:
        for size, count, batch, length in zip(SIZES, counts, examples.split(", "), steps.split(", "), strict=True):
            workload = make_workload(name, tmp_path, size)
            with torch.device("meta"):
                model = workload.build_model(0)
            assert f"{sum(p.numel() for p in model.parameters()):,}" == count
            assert f"{workload.batch_size:,}" in batch  # the first one, if it grows
            assert f"{workload.steps[size]:,}" == length


def test_padding_changes_nothing(data_dir):
    check_padding(make_workload("multi30k", data_dir, "smoke"), lambda *pair: tuple(F.pad(x, (0, 3)) for x in pair))


@pytest.mark.parametrize("name", FILES)
def test_the_error_of_missing_data_names_files_folder_and_the_command_that_gets_them(name, tmp_path):
    folder, file = FILES[name]
    with pytest.raises(DataMissingError) as caught:
        next(make_workload(name, tmp_path).batches(0))
    assert isinstance(caught.value, FileNotFoundError)
    message, _, workload = str(caught.value).rpartition(" fetch --workload ")
    assert str(tmp_path / folder) in message
    assert file in message
    assert {*DATA_SETS.get(workload, ()), *BY_HAND} & {*DATA_SETS.get(name, ()), name}


def test_the_cifar_folder_itself_may_be_passed(data_dir):
    for inside in ["", "cifar10", "cifar10/cifar-10-batches-py"]:
        next(make_workload("resnet20", data_dir / inside, "smoke").batches(0))


def test_a_batch_larger_than_the_data_is_refused(data_dir):
    with pytest.raises(ValueError, match="batch_size must be at most"):
        next(make_workload("autoencoder", data_dir, batch_size=100_000).batches(0))


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path):
    path = tmp_path / "labels.gz"
    for labels in ([1, 2, 3], [1, 10]):
        write_idx(path, np.array(labels, np.uint8))
        with pytest.raises(ValueError, match="must hold 2 labels from 0 to 9"):
            read_labels(path, 2)


def test_logistic_regression_is_convex_in_its_parameters(data_dir):
    """The features are not trained, and the loss is convex along any line between two weights."""
    workload = make_workload("logistic", data_dir, "smoke")
    model, batch = workload.build_model(0).double(), next(workload.batches(0))
    batch = (batch[0].double(), batch[1])
    assert [tuple(p.shape) for p in model.parameters()] == [(10, 64), (10,)]
    ends = [[torch.randn_like(p) for p in model.parameters()] for _ in range(2)]

    def loss_at(t):
        with torch.no_grad():
            for p, a, b in zip(model.parameters(), *ends, strict=True):
                p.copy_(a.lerp(b, t))
            return workload.loss(model, batch).item()

    assert loss_at(0.5) < (loss_at(0.0) + loss_at(1.0)) / 2


def test_examples_of_an_epoch(data_dir):
    assert make_workload("digits", data_dir).examples == 1437
    assert make_workload("chargpt", data_dir, "smoke").examples == len(_text(data_dir)) * 9 // 10 // 32
    assert make_workload("unet", data_dir, "smoke").examples == 24


def _text(data_dir):
    return (data_dir / "shakespeare" / "input.txt").read_text()


COVERED = [(method, name) for method in (KFAC, EKFAC, HyLo) for name in WITHOUT_BERT]
ONE_BY_ONE = [((KFAC, EKFAC, HyLo)[i % 3], name) for i, name in enumerate(WITHOUT_BERT)]


@pytest.mark.parametrize(
    ("method", "name"), [pytest.param(*case, marks=() if case in ONE_BY_ONE else pytest.mark.slow) for case in COVERED]
)
def test_every_parameter_is_covered(name, method, data_dir):
    check_coverage(method, make_workload(name, data_dir, "smoke"))


def _translation(folder, train):
    for side, language in enumerate(("de", "en")):
        write_sentences(folder / f"train.{language}.gz", [line.split() for line in train[side]])
        write_sentences(folder / f"val.{language}", [["a"]])
    return make_workload("multi30k", folder, "smoke", batch_size=2)


def test_sentences_become_numbers(tmp_path):
    """0 is padding, 1 the beginning, 2 the end and 3 unknown; words are ordered by frequency, then alphabetically."""
    workload = _translation(tmp_path, (["b a b", "c"], ["y x", "z z"]))
    source, target = next(workload.batches(0))
    order = source[:, 0].argsort()
    assert source[order].tolist() == [[4, 5, 4, 2], [6, 2, 0, 0]]
    assert target[order].tolist() == [[1, 6, 5, 2], [1, 4, 4, 2]]
    assert workload.targets((source, torch.tensor([[1, 6, 2, 0, 0]]))).tolist() == [[6, 2, -100, -100]]
    assert number_words([["b", "a", "<end>"], ["b"]], 5) == {
        "<pad>": 0, "<begin>": 1, "<end>": 2, "<unknown>": 3, "b": 4,
    }  # fmt: skip


def test_long_sentences_are_truncated_and_rare_words_unknown(tmp_path):
    workload = replace(_translation(tmp_path, (["a " * 50, "c"], ["x " * 50, "z"])), vocabulary=5, length=6)
    source, target = next(workload.batches(0))
    assert sorted(source.tolist()) == [[3, 2, 0, 0, 0, 0], [4, 4, 4, 4, 4, 2]]
    assert sorted(target.tolist()) == [[1, 3, 2, 0, 0, 0, 0], [1, 4, 4, 4, 4, 4, 2]]
    assert workload.outputs(workload.build_model(0), (source, target)).shape == (2, 6, 5)


def test_sentences_of_a_batch_have_similar_lengths(data_dir):
    workload = make_workload("multi30k", data_dir, "smoke")
    sources = [source for source, _ in islice(workload.batches(0), 8)]
    lengths = [source.shape[1] for source in sources]
    assert len(set(lengths)) > 3
    assert lengths != sorted(lengths)
    assert sum(int((source == 0).sum()) for source in sources) < 0.1 * sum(source.numel() for source in sources)


def test_damaged_translations_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"train\.de\.gz and train\.en\.gz must pair up, got 1 and 2 lines"):
        next(_translation(tmp_path, (["a"], ["x", "y"])).batches(0))
    whole = (tmp_path / "train.de.gz").read_bytes()
    for path, content in ((tmp_path / "train.de.gz", whole[:20]), (tmp_path / "val.de", b"\xff\xfe")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path.name} is truncated or no text"):
            read_sentences(path)


def test_published_sizes(data_dir):
    """Numbers of parameters of models of texts, by hand."""
    vocabulary = len(set(_text(data_dir)))
    layer = 4 * (128 + 1) * 128 + (128 + 1) * 512 + (512 + 1) * 128 + 2 * 2 * 128
    embeddings = (vocabulary + 128) * 128
    expected = 4 * layer + embeddings + 2 * 128 + (128 + 1) * vocabulary
    assert _count(make_workload("chargpt", data_dir)) == expected
    words = 4 + 14
    attention, mlp, norm = 4 * (256 + 1) * 256, (256 + 1) * 512 + (512 + 1) * 256, 2 * 256
    encoder, decoder = attention + mlp + 2 * norm, 2 * attention + mlp + 3 * norm
    expected = 2 * (encoder + decoder) + 2 * norm + 2 * (words + 40) * 256 + (256 + 1) * words
    assert _count(make_workload("multi30k", data_dir)) == expected


def _count(workload):
    return sum(p.numel() for p in workload.build_model(0).parameters())
