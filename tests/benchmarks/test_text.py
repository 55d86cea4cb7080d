"""Workloads on text: GPT-2, the character model, translations and their BLEU."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.workloads import DataMissingError, make_workload, multi30k
from benchmarks.workloads.base import cross_entropy
from benchmarks.workloads.chargpt import CharGPT
from benchmarks.workloads.gpt2 import GPT2
from benchmarks.workloads.multi30k import BEGIN, END, TEST_FILES, Multi30k, bleu, greedy
from benchmarks.workloads.tiny import write_sentences
from secondorder import EKFAC, KFAC, HyLo
from tests.support.workloads import check_coverage


# ---------------------------------------------------------------------- characters
def test_any_text_file_can_be_used(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("abcd" * 100)
    workload = make_workload("chargpt", tmp_path, "smoke", changes={"text": str(path)})
    tokens, targets = next(workload.batches(0))
    assert set(tokens.flatten().tolist()) == {0, 1, 2, 3}
    assert targets.equal((tokens + 1) % 4)
    assert make_workload("gpt2_small", tmp_path, "smoke", changes={"text": str(path)}).examples == 359 // 32


def test_invalid_and_missing_texts_are_named(tmp_path):
    path = tmp_path / "mine.txt"
    for content, why in [
        (None, r"lacks mine\.txt"),
        (b"", "it is empty"),
        (b"\xff\xfe", "must be text in UTF-8"),
        (b"short", "must be longer, got 5 tokens for context 128"),
    ]:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises((DataMissingError, ValueError), match=why):
            next(CharGPT(tmp_path, text=str(path)).batches(0))
    with pytest.raises(DataMissingError, match=r"lacks input\.txt.*fetch --workload gpt2_small"):
        next(GPT2(tmp_path).batches(0))


def test_weights_and_windows_of_the_character_model_do_not_change(data_dir):
    """Published results depend on the weights from a seed, and on the positions of the windows."""
    workload = CharGPT(data_dir)
    model = workload.build_model(0)
    torch.manual_seed(0)
    expected = torch.empty(workload._vocabulary, 128).normal_()
    assert model.tokens.weight.equal(expected)
    assert [name for name, _ in model.named_parameters()][:4] == [
        "tokens.weight", "positions.weight", "layers.0.norm1.weight", "layers.0.norm1.bias",
    ]  # fmt: skip
    starts = torch.randint(workload._split[0].numel() - 128, (32,), generator=torch.Generator().manual_seed(5))
    assert next(workload.batches(5))[0][:, 0].equal(workload._split[0][starts])


def test_only_dropout_of_the_character_model_depends_on_the_mode(data_dir):
    workload = replace(CharGPT.of_size("paper", data_dir), batch_size=2, context=8, width=24, layers=1)
    model, batch = workload.build_model(0), next(workload.batches(0))
    assert not model(batch[0]).equal(model(batch[0]))
    model.eval()
    assert model(batch[0]).equal(model(batch[0]))


def test_an_output_depends_on_earlier_characters_only(data_dir):
    workload = CharGPT.of_size("smoke", data_dir)
    model, tokens = workload.build_model(0), torch.randint(5, (2, 8))
    changed = torch.cat((tokens[:, :5], 1 + tokens[:, 5:]), 1)
    torch.testing.assert_close(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:])


# ---------------------------------------------------------------------- GPT-2
def test_gpt2_small_has_its_published_size():
    workload = GPT2.of_size("paper", Path("nowhere"))
    with torch.device("meta"):
        model = workload.architecture(50_257)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert model.head.weight is model.tokens.weight
    assert (workload.context, workload.layers, workload.width, workload.heads) == (1024, 12, 768, 12)


def test_gpt2_is_initialized_as_published(data_dir):
    model = replace(GPT2(data_dir), layers=3).build_model(0)
    ends = [layer.attention.out.weight for layer in model.layers] + [layer.mlp[-1].weight for layer in model.layers]
    assert model.positions.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert model.layers[0].attention.query.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for weight in ends:
        assert weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.02)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo])
def test_a_tied_head_has_a_block(method, data_dir):
    check_coverage(method, replace(GPT2.of_size("smoke", data_dir), tied=True))


def test_missing_byte_pairs_are_named(tmp_path):
    (tmp_path / "input.txt").write_text("low lower " * 60)
    assert GPT2.of_size("paper", tmp_path).pieces is None
    with pytest.raises(DataMissingError, match=r"lacks vocab\.json, merges\.txt"):
        next(GPT2(tmp_path, pieces=str(tmp_path)).batches(0))


# ---------------------------------------------------------------------- translation
def test_greedy_decoding_takes_the_most_likely_word_until_the_end():
    """The model counts up from a first number per sentence, and ends after 6."""
    firsts = torch.tensor([4, 6])

    def next_word(words):
        assert words[:, 0].eq(BEGIN).all()
        last = torch.where(torch.tensor(words.shape[1] == 1), firsts - 1, words[:, -1])
        chosen = torch.where(last >= 6, torch.tensor(END), last + 1)
        return torch.nn.functional.one_hot(chosen, 8).float()

    assert greedy(next_word, 2, 10) == [[4, 5, 6], [6]]
    assert greedy(next_word, 2, 2) == [[4, 5], [6]]


def test_bleu_by_hand():
    """One wrong word of five at the end gives the precisions 4/5, 3/4, 2/3 and 1/2, without a brevity penalty."""
    reference = ["a", "man", "on", "a", "sofa"]
    assert bleu([reference], [reference]) == pytest.approx(100)
    found = bleu([["a", "man", "on", "a", "<unknown>"]], [reference])
    assert found == pytest.approx(100 * (0.8 * 0.75 * 2 / 3 / 2) ** 0.25)
    assert bleu([["x"], ["y"]], [reference, reference]) == 0


def test_a_model_translates_sentences_that_it_has_learned(tmp_path):
    pairs = [("eins zwei", "one two"), ("drei", "three"), ("vier fünf eins", "four five one"), ("zwei", "two")]
    for side, language in enumerate(("de", "en")):
        lines = [pair[side].split() for pair in pairs]
        write_sentences(tmp_path / f"train.{language}.gz", lines)
        write_sentences(tmp_path / f"val.{language}", lines)
    workload = replace(Multi30k.of_size("smoke", tmp_path), batch_size=4)
    model = workload.build_model(0)
    assert workload.quality(model)["BLEU, validation"] < 60
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=1e-2), workload.batches(0)
    for _ in range(40):
        optimizer.zero_grad()
        workload.loss(model, next(batches)).backward()
        optimizer.step()
    assert workload.translate(model, [["drei"], ["vier", "fünf", "eins"]]) == [["three"], ["four", "five", "one"]]
    assert model.training
    for name in TEST_FILES:
        shutil.copy(tmp_path / f"val.{name[-2:]}", tmp_path / name)
    found = Multi30k.of_size("smoke", tmp_path).quality(model)
    assert found == {"BLEU, test_2016_flickr": 0.0}  # no sentence has four words


def test_translations_in_parts_are_the_same(data_dir, monkeypatch):
    workload = Multi30k.of_size("smoke", data_dir)
    model = workload.build_model(0)
    sentences = workload._validation[0][:9]
    whole = workload.translate(model, sentences)
    monkeypatch.setattr(multi30k, "EVAL_SENTENCES", 2)
    assert workload.translate(model, sentences) == whole


def test_label_smoothing_is_for_training_only(data_dir):
    plain = Multi30k.of_size("smoke", data_dir)
    smooth = replace(plain, label_smoothing=0.1)
    model, batch = plain.build_model(0), next(plain.batches(0))
    outputs, targets = plain.outputs(model, batch), plain.targets(batch)
    even = -outputs.log_softmax(-1).mean(-1)[targets >= 0].mean()
    expected = 0.9 * plain.loss(model, batch) + 0.1 * even
    torch.testing.assert_close(smooth.loss(model, batch), expected)
    assert smooth.evaluate(model) == plain.evaluate(model)
    torch.testing.assert_close(cross_entropy(outputs, targets), plain.criterion(outputs, targets))


def test_published_size_of_the_translator(data_dir):
    workload = Multi30k.of_size("paper", data_dir)
    with torch.device("meta"):
        model = replace(workload, layers=1).build_model(0)
    assert model.transformer.decoder.layers[0].linear1.out_features == 2048
    assert (workload.layers, workload.width, workload.heads, workload.batch_size) == (6, 512, 8, 128)
    assert workload.steps["paper"] == 200 * (29_000 // 128)
