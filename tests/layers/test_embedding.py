"""Lookup tables: positions that the whole batch shares, memory, tables without a block, tables that are also heads."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, labels, plain_kfac, train_step
from tests.support.layer_cases import Words, words
from tests.support.models import Net, seeded_build
from tests.support.operators import Operators
from tests.support.oracles import layers as oracle
from tests.support.oracles.kfac import solve_exact
from tests.support.oracles.layers import Tape, check_block, embedding, expected_pairs, row_of, singles, step_of
from tests.support.warned import messages_of, silent, warned

V, D, N, S = 7, 3, 4, 4


#: Indices of a position table for all examples together.
INDICES = {
    "shared": lambda x: torch.arange(x.shape[1]),
    "expanded": lambda x: torch.arange(x.shape[1])[None].expand(len(x), -1),
    "one": lambda x: torch.arange(x.shape[1])[None],
}


@pytest.mark.parametrize(
    ("examples", "index"), [(5, "shared"), (4, "shared"), (1, "shared"), (4, "expanded"), (4, "one")]
)
def test_a_position_index_shared_over_the_batch(examples, index):
    """There is one set of rows per forward: A is divided by their number, B is that of the captured gradients."""

    def forward(net, x):
        return net.head(torch.tanh(net.words(x) + net.positions(INDICES[index](x))).mean(1))

    def build():
        return Net(forward, words=nn.Embedding(V, D), positions=nn.Embedding(6, D), head=nn.Linear(D, 3))

    model, plain, x, y = seeded_build(build), seeded_build(build), words(examples, S), labels(examples, 3)
    shared = plain.positions(INDICES[index](x)).detach().requires_grad_()
    output = plain.head(torch.tanh(plain.words(x) + shared).mean(1))
    (g,) = torch.autograd.grad(F.cross_entropy(output, y), shared)
    g = g.reshape(-1, D)
    A = torch.diag(torch.tensor([1.0] * S + [0.0] * (6 - S), dtype=torch.float64) / S)
    B = examples * g.mT @ g
    opt = plain_kfac(model)
    train_step(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "positions", (A, B), torch.kron(A, B))


@pytest.mark.parametrize(("kind", "method"), [(nn.Embedding, "eigen"), (nn.EmbeddingBag, "cholesky")])
def test_a_large_vocabulary_makes_no_square_matrix_and_no_one_hot_rows(kind, method):
    vocabulary, width = 50_000, 4
    model = nn.Sequential(kind(vocabulary, width), nn.Flatten(), nn.LazyLinear(2))
    x, y = torch.randint(vocabulary, (8, 16)), labels(8, 2)
    model(x)
    opt = plain_kfac(model, inverse_method=method, momentum=0.0)
    with Operators() as seen:
        train_step(opt, model, (x,), y, F.cross_entropy)
    state = oracle.block_state(opt, "0")
    assert state["factor_a"].shape == (vocabulary,)
    assert state["factor_g"].shape == (width, width)
    second = {"eigen": 2 * vocabulary + width + width**2, "cholesky": vocabulary + width**2}[method]
    held = {key: x.numel() for key, x in state.items() if isinstance(x, Tensor)}
    assert sum(held.values()) <= vocabulary + width**2 + second + 16
    assert seen.numel <= 2 * vocabulary * (width + 1)
    assert opt.memory_usage()["total"] < 4 * 12 * vocabulary


def on_means(net: nn.Module, x: Tensor) -> Tensor:
    z = net.table(x)
    return net.head(torch.tanh(z.mean(1) if z.ndim == 3 else z))


UNSUPPORTED = {"sparse": True, "max_norm": 1.0, "scale_grad_by_freq": True}
REFUSALS = [(kind, {key: value}, key) for kind in (nn.Embedding, nn.EmbeddingBag) for key, value in UNSUPPORTED.items()]
REFUSALS.append((nn.EmbeddingBag, {"mode": "max"}, "max"))


def test_unsupported_options_follow_the_fallback_with_one_warning():
    x, y = words(N, S), labels(N, 3)
    for kind, options, reason in REFUSALS:
        model = Net(on_means, table=kind(V, D, **options), head=nn.Linear(D, 3)).double()
        with warned() as texts:
            opt = plain_kfac(model, lr=0.1)
            assert oracle.follows_fallback(opt, "table.weight", reason)
            assert "fallback" not in row_of(opt, "head.weight")
            F.cross_entropy(model(x), y).backward()
            ((gradient, moved),) = step_of(opt, [model.table.weight])
            train_step(opt, model, (x,), y, F.cross_entropy)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        assert_close(moved, 0.1 * gradient)
        (message,) = [w for w in texts if "table.weight" in w]
        assert reason in message


def test_a_batch_of_padding_only():
    model, x, y = seeded_build(lambda: Words(padding_idx=0)), words(N, S), labels(N, 3)
    opt = plain_kfac(model, lr=0.1)
    for tokens in (torch.zeros_like(x), x):
        train_step(opt, model, (tokens,), y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Language(nn.Module):
    """Words, a layer, logits of words; table and head are one weight if they are ``tied``."""

    def __init__(self, tied: bool, head_first: bool = False, tables: int = 1) -> None:
        super().__init__()
        table, head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        if head_first:
            self.head = head
        self.words, self.body, self.head = table, nn.Linear(D, D), head
        self.second = nn.Embedding(V, D) if tables == 2 else None
        if self.second is not None:
            self.second.weight = table.weight
        if tied:
            head.weight = table.weight
        else:
            head.weight.data.copy_(table.weight)

    def forward(self, x: Tensor) -> Tensor:
        z = self.words(x) if self.second is None else self.words(x) * self.second(x.flip(1))
        return self.head(torch.tanh(self.body(z))).transpose(1, 2)

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        z = embedding(tape, "words", x, self.words.weight)
        z = z if self.second is None else z * embedding(tape, "words", x.flip(1), self.words.weight)
        z = torch.tanh(tape.linear("body", self.body, z))
        return tape.linear("head", self.head, z).transpose(1, 2)


def data() -> tuple[Tensor, Tensor]:
    words = torch.randint(V, (2, N, S), generator=torch.Generator().manual_seed(0))
    return words[0], words[1]


def untied_pairs(approx: str = "expand", tables: int = 1) -> dict:
    """Statistics of each use, from a copy with two weights of equal values."""
    x, y = data()
    plain = seeded_build(lambda: Language(False, tables=tables))
    return expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy, approx)


@each(method=[KFAC, EKFAC, HyLo], head_first=[False, True])
def test_by_default_the_head_has_the_block_without_a_warning(method, head_first):
    (x, y), model = data(), seeded_build(lambda: Language(True, head_first))
    with silent():
        opt, chosen = method(model), built(method, copy.deepcopy(model), tied="head")
        for optimizer in (opt, chosen):
            for _ in range(3):
                train_step(optimizer, optimizer.module, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == {"head", "body"}
    assert "its use in words has no statistics" in opt.describe()
    assert "fallback" not in opt.describe()
    for mine, theirs in zip(opt.param_groups[0]["params"], chosen.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)


def test_without_a_choice_the_shared_weight_follows_the_fallback_with_a_warning():
    (x, y), model, opts = data(), seeded_build(lambda: Language(True)), []
    assert any("tied" in text for text in messages_of(lambda: opts.append(plain_kfac(model, lr=0.1, tied=None))))
    (opt,) = opts
    assert set(opt.blocks) == {"body"}
    assert oracle.follows_fallback(opt, "words.weight", "tied")
    F.cross_entropy(model(x), y).backward()
    ((gradient, moved),) = step_of(opt, [model.words.weight])
    assert_close(moved, 0.1 * gradient)


@pairs(tied=["embedding", "head"], head_first=[False, True], approx=["expand", "reduce"])
def test_the_statistics_are_those_of_the_chosen_use(tied, head_first, approx):
    (x, y), model = data(), seeded_build(lambda: Language(True, head_first))
    use = "words" if tied == "embedding" else "head"
    A, B = untied_pairs(approx)[use]
    opt = plain_kfac(model, tied=tied, approx=approx, damping=0.02)
    assert set(opt.blocks) == {use, "body"}
    assert "fallback" not in opt.describe()
    F.cross_entropy(model(x), y).backward()
    ((gradient, moved),) = step_of(opt, [model.words.weight])
    if tied == "head":
        check_block(opt, use, (A, B))
        assert_close(moved, solve_exact(B, A, gradient, 0.02), 1e-8)
    else:
        A = oracle.diagonal_of(A)
        check_block(opt, use, (A, B), torch.kron(A, B))
        assert_close(moved.mT, solve_exact(B, A, gradient.mT, 0.02), 1e-8)


def test_tied_has_no_effect_on_a_model_without_ties():
    (x, y), expected = data(), untied_pairs()
    for tied in (None, "embedding", "head"):
        model = seeded_build(lambda: Language(False))
        opt = plain_kfac(model, tied=tied)
        train_step(opt, model, (x,), y, F.cross_entropy)
        assert set(opt.blocks) == {"words", "body", "head"}
        check_block(opt, "head", expected["head"])
        check_block(opt, "words", expected["words"], torch.kron(*expected["words"]))


@pytest.mark.parametrize("tied", ["embedding", "head", None])
def test_two_tables_and_a_head_of_one_weight(tied):
    """As in translators; two tables without a head are one block by default."""
    (x, y), model = data(), seeded_build(lambda: Language(tied is not None, tables=2))
    expected = untied_pairs(tables=2)
    opt = plain_kfac(model, **({} if tied is None else {"tied": tied}))
    train_step(opt, model, (x,), y, F.cross_entropy)
    if tied != "head":
        check_block(opt, "words", expected["words"], torch.kron(*expected["words"]))
    if tied != "embedding":
        check_block(opt, "head", expected["head"])
    assert "fallback" not in opt.describe()


@pytest.mark.parametrize("tied", ["embedding", "head"])
def test_the_bias_of_a_tied_head_is_in_the_block_of_the_head_or_follows_the_fallback(tied):
    (x, y), model = data(), seeded_build(lambda: Language(True))
    model.head.bias = nn.Parameter(torch.ones(V, dtype=torch.float64))
    opt = plain_kfac(model, tied=tied, lr=0.1)
    assert oracle.follows_fallback(opt, "head.bias", "another use") == (tied == "embedding")
    train_step(opt, model, (x,), y, F.cross_entropy)
    assert not model.head.bias.equal(torch.ones_like(model.head.bias))
