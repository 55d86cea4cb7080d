"""Question answering: word pieces with positions, windows, answers and marks by hand, and the encoder's weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from benchmarks.workloads import DataMissingError, make_workload
from benchmarks.workloads.bert import SHAPES, SPECIAL, Bert, Piece, WordPieces, load_checkpoint, their_name
from benchmarks.workloads.squad import (
    Answer,
    BertQA,
    Place,
    Question,
    SpanModel,
    best_answers,
    exact_match,
    f1,
    make_windows,
    marks,
    normalise,
    read_squad,
)
from benchmarks.workloads.tiny import write_squad

WORDS = (*SPECIAL, "where", "is", "ann", "in", "rome", "##s", "un", "##believ", "##able", "cafe", "!", "?", "中", "$")


@pytest.fixture
def pieces():
    return WordPieces({word: number for number, word in enumerate(WORDS)})


def _texts(pieces, text):
    return [(WORDS[number], text[start:stop]) for number, start, stop in pieces.encode(text)]


# ---------------------------------------------------------------------- pieces
def test_pieces_have_positions_in_the_text(pieces):
    text = "  Romes is unbelievable!\tCafé?中$ 5"
    assert _texts(pieces, text) == [
        ("rome", "Rome"), ("##s", "s"), ("is", "is"), ("un", "un"), ("##believ", "believ"), ("##able", "able"),
        ("!", "!"), ("cafe", "Café"), ("?", "?"), ("中", "中"), ("$", "$"), ("[UNK]", "5"),
    ]  # fmt: skip


def test_a_word_with_an_unknown_part_is_unknown_as_a_whole(pieces):
    assert _texts(pieces, "romex in") == [("[UNK]", "romex"), ("in", "in")]
    assert _texts(pieces, "un" * 60) == [("[UNK]", "un" * 60)]  # too long
    assert _texts(pieces, "ro\u200bme e\u0301") == [("rome", "ro\u200bme"), ("[UNK]", "e")]


def test_a_vocabulary_is_made_of_words_and_characters():
    made = WordPieces.learn(["ab ab cab", "dog dog dog cat"], 16)
    assert list(made.numbers)[:5] == list(SPECIAL)
    assert list(made.numbers)[5:] == ["a", "b", "##a", "##b", "dog", "ab", "cab", "cat"]
    assert len(made) == 13
    assert [piece.number for piece in made.encode("abba")] == [made.numbers[p] for p in ("ab", "##b", "##a")]


def test_a_vocabulary_without_special_pieces_is_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    assert WordPieces.read(path).numbers["rome"] == WORDS.index("rome")
    path.write_text("[PAD]\nrome\n")
    with pytest.raises(ValueError, match=r"vocab\.txt must be a vocabulary of BERT.*lacks \[UNK\], \[CLS\], \[SEP\]"):
        WordPieces.read(path)


# ---------------------------------------------------------------------- reading
def _write(path, *entries, context="Ann is in Rome"):
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": list(entries)}]}]}))
    return path


def test_both_versions_are_read(tmp_path):
    right = {"text": "Rome", "answer_start": 10}
    old = _write(tmp_path / "old.json", {"id": "1", "question": "Where?", "answers": [right, right]})
    assert read_squad(old) == [Question("1", "Ann is in Rome", "Where?", (Answer("Rome", 10),) * 2)]
    new = {"id": "1", "question": "Where?", "answers": [], "plausible_answers": [right], "is_impossible": True}
    assert read_squad(_write(tmp_path / "new.json", new))[0].answers == ()


def test_an_answer_with_a_wrong_position_is_found_nearby(tmp_path):
    entry = {"id": "1", "question": "?", "answers": [{"text": "a", "answer_start": 7}]}
    assert read_squad(_write(tmp_path / "q.json", entry, context="a b c a b c"))[0].answers == (Answer("a", 6),)


def test_damaged_questions_are_refused(tmp_path):
    for content, why in [
        ("{", "must be in the format of SQuAD"),
        ("[]", "must be in the format of SQuAD"),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "lacks 'context'"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 1, "question": "?"}]}]}]}', "lacks 'answers'"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": "q1", "question": "?", "answers": []}]}]}]}',
            "question q1 has no answer",
        ),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": "q1", "question": "?", "answers": '
            '[{"text": "b", "answer_start": 0}]}]}]}]}',
            "'b' does not stand in its text",
        ),
    ]:
        path = tmp_path / "train.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=why):
            read_squad(path)


# ---------------------------------------------------------------------- windows
def test_windows_by_hand(pieces):
    """After the question, there is room for five pieces of the text, and neighboring windows share two of them."""
    question = Question("1", "in in in in is ann in rome!", "where is ann?", (Answer("ann in rome", 15),))
    found = make_windows([question], pieces, 12, 2)
    cls, sep, pad, where, is_, ann, in_, rome, mark = (
        WORDS.index(w) for w in ("[CLS]", "[SEP]", "[PAD]", "where", "is", "ann", "in", "rome", "!")
    )
    asked = [cls, where, is_, ann, WORDS.index("?"), sep]
    assert found.tokens.tolist() == [
        [*asked, in_, in_, in_, in_, is_, sep],
        [*asked, in_, is_, ann, in_, rome, sep],
        [*asked, in_, rome, mark, sep, pad, pad],
    ]
    assert found.targets.tolist() == [[0, 0], [8, 10], [0, 0]]
    assert [(p.begin, p.shown, p.offset) for p in found.places] == [(0, 5, 6), (3, 5, 6), (6, 3, 6)]


def test_a_question_without_an_answer_has_the_first_position_as_target(pieces):
    assert make_windows([Question("1", "in rome", "where?", ())], pieces, 10, 2).targets.tolist() == [[0, 0]]
    blank = Question("1", "in  rome", "where?", (Answer(" ", 2),))
    assert make_windows([blank], pieces, 10, 2).targets.tolist() == [[0, 0]]


def test_a_window_too_short_for_a_text_is_refused(pieces):
    with pytest.raises(ValueError, match="must leave room for a text beside the question, got 5"):
        make_windows([Question("1", "in rome", "where is?", ())], pieces, 5, 0)


# ---------------------------------------------------------------------- answers
def _logits(length, **values):
    logits = torch.zeros(2, length)
    for key, value in values.items():
        logits[0 if key[0] == "s" else 1, int(key[1:])] = value
    return logits


def test_the_best_span_over_all_windows():
    context = "a b c d"
    text = [Piece(9, 2 * i, 2 * i + 1) for i in range(4)]
    places = [Place(0, text, 0, 3, 2), Place(0, text, 2, 2, 2)]
    question = Question("1", context, "?", (Answer("b", 2),))
    # An end before the start, and a start in the question, do not count.
    first = _logits(6, s3=3.0, e4=2.0, e2=4.0, s1=9.0)
    assert best_answers([question], places, [first, _logits(6)]) == ["b c"]
    assert best_answers([question], places, [first, _logits(6, s3=4.0, e3=4.0)]) == ["d"]


def test_the_answer_is_empty_if_all_windows_predict_no_answer():
    text = [Piece(9, 0, 1)]
    questions = [Question("1", "a", "?", ()), Question("2", "a", "?", (Answer("a", 0),))]
    places = [Place(0, text, 0, 1, 2), Place(0, text, 0, 1, 2), Place(1, text, 0, 1, 2)]
    nothing, something = _logits(4, s0=2.0, e0=2.0, s2=1.0), _logits(4, s0=0.5, s2=1.0)
    assert best_answers(questions, places, [nothing, nothing, something]) == ["", "a"]
    assert best_answers(questions, places, [nothing, something, nothing]) == ["a", ""]
    assert best_answers(questions[1:], [Place(0, text, 0, 1, 2)], [nothing]) == ["a"]  # version 1.1


def test_the_length_of_an_answer_is_limited():
    text = [Piece(9, i, i + 1) for i in range(50)]
    logits = _logits(60, s2=5.0, e40=5.0, e31=3.0)
    assert best_answers([Question("1", "x" * 50, "?", ())], [Place(0, text, 0, 50, 2)], [logits]) == ["x" * 30]


def test_marks_by_hand():
    assert normalise("The  Cat, an other's  a-B!") == "cat others ab"
    assert exact_match("the Eiffel tower", "Eiffel Tower.") == 1
    assert exact_match("Eiffel", "Eiffel Tower") == 0
    assert f1("the cat sat", "a cat sat down") == pytest.approx(2 * (1 * 2 / 3) / (1 + 2 / 3))
    assert f1("cat cat dog", "cat bird") == pytest.approx(2 * (1 / 3 * 1 / 2) / (1 / 3 + 1 / 2))
    assert f1("dog", "cat") == 0
    assert (f1("", ""), f1("the", ""), f1("cat", "")) == (1, 1, 0)


def test_the_nearest_right_answer_counts():
    questions = [
        Question("1", "", "", (Answer("old Rome", 0), Answer("Rome", 4))),
        Question("2", "", "", ()),
        Question("3", "", "", (Answer("in Oslo", 0),)),
    ]
    assert marks(questions, ["Rome", "", "Oslo"]) == {
        "exact match, %": pytest.approx(100 * 2 / 3),
        "F1, %": pytest.approx(100 * (1 + 1 + 2 / 3) / 3),
    }


# ---------------------------------------------------------------------- encoder
class _Numbered:
    """A vocabulary with as many pieces as that of BERT."""

    padding, separator = 0, 102

    def __len__(self):
        return 30_522


def test_published_sizes():
    """Tiny and base have the published sizes with the pooler; for question answering, tiny has no pooler."""
    counts = {}
    with torch.device("meta"):
        for name in ("tiny", "base"):
            counts[name] = sum(p.numel() for p in Bert(SHAPES[name], _Numbered(), pooled=True).parameters())
        answering = SpanModel(Bert(SHAPES["tiny"], _Numbered()))
    assert counts == {"tiny": 4_385_920, "base": 109_482_240}
    assert sum(p.numel() for p in answering.parameters()) == 4_385_920 - 129 * 128 + 2 * 129


def test_the_encoder_is_that_of_the_paper(pieces):
    """One layer by hand, with norms after each part, segments of two sentences, and masked padding."""
    encoder = Bert((1, 8, 2), pieces).double()
    tokens = torch.tensor([[2, 5, 3, 8, 9, 3, 0, 0]])
    layer = encoder.layers[0]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0]])
    x = encoder.words(tokens) + encoder.positions.weight[:8] + encoder.segments(segments)
    x = F.layer_norm(x, (8,), eps=1e-12)[0, :6]
    q, k, v = (
        m(x).view(6, 2, 4).transpose(0, 1) for m in (layer.attention.query, layer.attention.key, layer.attention.value)
    )
    mixed = ((q @ k.mT / 2).softmax(-1) @ v).transpose(0, 1).reshape(6, 8)
    x = F.layer_norm(x + layer.attention.out(mixed), (8,), eps=1e-12)
    x = F.layer_norm(x + layer.mlp[2](F.gelu(layer.mlp[0](x))), (8,), eps=1e-12)
    torch.testing.assert_close(encoder(tokens)[0, :6], x)
    with pytest.raises(ValueError, match="without a pooler"):
        encoder.first(tokens)


def _published(encoder, prefix="bert.", old=True):
    names = {name: their_name(name) for name in encoder.state_dict()}
    state = {prefix + names[name]: torch.randn_like(value) for name, value in encoder.state_dict().items()}
    if old:
        state = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
                 for k, v in state.items()}  # fmt: skip
    return {**state, "cls.predictions.bias": torch.zeros(3), f"{prefix}embeddings.position_ids": torch.arange(512)}


@pytest.mark.parametrize(("prefix", "old"), [("bert.", True), ("", False)])
def test_published_weights_are_loaded(tmp_path, pieces, prefix, old):
    encoder = Bert((2, 8, 2), pieces, pooled=True)
    state = _published(encoder, prefix, old)
    torch.save(state, tmp_path / "weights.bin")
    load_checkpoint(encoder, tmp_path / "weights.bin")
    norm = "gamma" if old else "weight"
    own = encoder.state_dict()
    for name, theirs in {
        "layers.1.attention.query.weight": "encoder.layer.1.attention.self.query.weight",
        "layers.0.attention.out.bias": "encoder.layer.0.attention.output.dense.bias",
        "layers.0.mlp.0.weight": "encoder.layer.0.intermediate.dense.weight",
        "layers.0.mlp.2.weight": "encoder.layer.0.output.dense.weight",
        "layers.1.norm1.weight": f"encoder.layer.1.attention.output.LayerNorm.{norm}",
        "layers.1.norm2.weight": f"encoder.layer.1.output.LayerNorm.{norm}",
        "norm.weight": f"embeddings.LayerNorm.{norm}",
        "segments.weight": "embeddings.token_type_embeddings.weight",
        "pooler.weight": "pooler.dense.weight",
    }.items():
        assert own[name].equal(state[prefix + theirs])


def test_weights_that_do_not_fit_are_refused(tmp_path, pieces):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"weights\.bin must be a state that torch\.save wrote"):
        load_checkpoint(Bert((1, 8, 2), pieces), path)
    torch.save(_published(Bert((2, 8, 2), pieces)), path)
    with pytest.raises(ValueError, match=r"has 2 layers, the encoder has 1"):
        load_checkpoint(Bert((1, 8, 2), pieces), path)
    with pytest.raises(
        ValueError, match=r"lacks encoder\.layer\.2\.attention\.output\.LayerNorm\.weight and 15 more of 53"
    ):
        load_checkpoint(Bert((3, 8, 2), pieces), path)
    with pytest.raises(ValueError, match=r"word_embeddings\.weight has shape \(19, 8\), the encoder has \(19, 16\)"):
        load_checkpoint(Bert((2, 16, 2), pieces), path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(ValueError, match="must hold tensors by name"):
        load_checkpoint(Bert((1, 8, 2), pieces), path)


# ---------------------------------------------------------------------- workload
def test_a_checkpoint_replaces_the_encoder_only(data_dir, tmp_path):
    plain = BertQA.of_size("smoke", data_dir)
    model = plain.build_model(0)
    torch.save(_published(model.encoder), tmp_path / "weights.bin")
    loaded = replace(plain, checkpoint=str(tmp_path / "weights.bin")).build_model(0)
    assert loaded.head.weight.equal(model.head.weight)
    assert not loaded.encoder.words.weight.equal(model.encoder.words.weight)


def test_a_vocabulary_of_bert_is_used_if_it_exists(tmp_path):
    write_squad(tmp_path / "squad" / "train-v1.1.json", np.random.default_rng(0), 4, 1.1)
    write_squad(tmp_path / "squad" / "dev-v1.1.json", np.random.default_rng(1), 2, 1.1)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    workload = BertQA.of_size("smoke", tmp_path)
    assert workload.build_model(0).encoder.words.num_embeddings == len(WORDS)
    with pytest.raises(DataMissingError, match=r"train-v2\.0\.json.*SQuAD-explorer"):
        replace(workload, version=2.0).build_model(0)


def test_a_model_learns_to_answer(data_dir):
    workload = replace(BertQA.of_size("smoke", data_dir), batch_size=16)
    model = workload.build_model(0)
    before, loss = workload.quality(model), workload.evaluate(model)
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=5e-3), workload.batches(0)
    for _ in range(80):
        optimizer.zero_grad()
        workload.loss(model, next(batches)).backward()
        optimizer.step()
    after = workload.quality(model)
    assert set(after) == {"exact match, %", "F1, %"}
    assert after["F1, %"] > before["F1, %"] + 10
    assert workload.evaluate(model) < loss


def test_bad_sizes_are_refused(data_dir):
    for change, why in [
        ({"encoder": "huge"}, "encoder must be one of smallest, tiny.*got 'huge'"),
        ({"length": 600}, "stride < length <= 512 must hold, got 8 and 600"),
        ({"stride": 48}, "got 48 and 48"),
        ({"version": 3.0}, "version must be 2.0 or 1.1, got 3.0"),
    ]:
        with pytest.raises(ValueError, match=why):
            make_workload("bert_qa", data_dir, "smoke", changes=change)
