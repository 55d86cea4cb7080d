"""Recurrent layers made visible by `secondorder.nn.expose`, against networks unrolled by hand over plain products."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import secondorder
from tests.support.kfac import assert_close, labels, noise, plain_kfac, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import solve_exact
from tests.support.oracles.layers import (
    Tape,
    check_block,
    expected_pairs,
    follows_fallback,
    rows_by_example,
    singles,
    step_of,
    train,
)

N, T, D, H = 4, 3, 3, 2
State = tuple[Tensor, ...]
LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}
kinds = pytest.mark.parametrize("kind", LAYERS)


def cell_step(kind: str, i: Tensor, h: Tensor, state: State, nonlinearity: str = "tanh") -> State:
    """One step from the two products ``i = W_ih x + b_ih`` and ``h = W_hh h + b_hh``; the state leads with h."""
    if kind == "RNN":
        return (torch.relu(i + h) if nonlinearity == "relu" else torch.tanh(i + h),)
    if kind == "GRU":
        ir, iz, i_n = i.chunk(3, -1)
        hr, hz, hn = h.chunk(3, -1)
        reset, update = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
        new = torch.tanh(i_n + reset * hn)
        return ((1 - update) * new + update * state[0],)
    into, forget, candidate, out = (i + h).chunk(4, -1)
    c = torch.sigmoid(forget) * state[1] + torch.sigmoid(into) * torch.tanh(candidate)
    return torch.sigmoid(out) * torch.tanh(c), c


def unroll(tape: Tape, name: str, kind: str, layer: nn.RNNBase, x: Tensor, start: list[State] | None = None) -> Tensor:
    """Outputs ``[1, T, H · directions]`` of a stack of layers over one sequence ``[1, T, D]``."""
    for i in range(layer.num_layers):
        outputs = []
        for suffix in ("", "_reverse")[: 1 + layer.bidirectional]:
            given = {part: getattr(layer, f"{part}_l{i}{suffix}", None) for part in (
                "weight_ih", "weight_hh", "bias_ih", "bias_hh")}  # fmt: skip
            zeros = x.new_zeros(1, layer.hidden_size)
            state = (
                (zeros,) * (1 + (kind == "LSTM"))
                if start is None
                else start[len(outputs) + i * (1 + layer.bidirectional)]
            )
            steps = range(x.shape[1])
            found = {}
            for t in reversed(steps) if suffix else steps:
                a = tape.product(f"{name}.ih_l{i}{suffix}", x[:, t], given["weight_ih"], given["bias_ih"])
                b = tape.product(f"{name}.hh_l{i}{suffix}", state[0], given["weight_hh"], given["bias_hh"])
                state = cell_step(kind, a, b, state, getattr(layer, "nonlinearity", "tanh"))
                found[t] = state[0]
            outputs.append(torch.stack([found[t] for t in steps], 1))
        x = torch.cat(outputs, -1)
    return x


class Sequences(nn.Module):
    """A recurrent layer, a nonlinearity, a mean over time, a head."""

    def __init__(self, kind: str, **options) -> None:
        super().__init__()
        self.kind, options = kind, {"batch_first": True, **options}
        self.rnn = LAYERS[kind](D, H, **options)
        self.head = nn.Linear(H * (1 + self.rnn.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        z, _ = self.rnn(x)
        return self.head(torch.tanh(z).mean(1 if self.rnn.batch_first else 0))

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        z = unroll(tape, "rnn", self.kind, self.rnn, x)
        return tape.linear("head", self.head, torch.tanh(z).mean(1))


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "two layers of two directions": {"num_layers": 2, "bidirectional": True},
    "positions first": {"batch_first": False},
}


def check(model: Sequences, plain: Sequences, x: Tensor, y: Tensor, approx: str = "expand", **keywords) -> None:
    expected = expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy, approx)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model, approx=approx, **keywords)
    assert "fallback" not in opt.describe()
    batch = x if model.rnn.batch_first else x.transpose(0, 1).contiguous()
    assert_close(model(batch).detach(), plain.by_hand(Tape(), x).detach(), 1e-12, "the definition")
    train(opt, model, (batch,), y, F.cross_entropy)
    assert set(opt.blocks) == set(expected)
    for name, pair in expected.items():
        check_block(opt, name, pair)


@kinds
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_factors(kind, option, approx):
    model = seeded_build(lambda: Sequences(kind, **OPTIONS[option]))
    batch_dim = 1 if option == "positions first" else 0
    check(model, twin(model), noise(N, T, D), labels(N, 3), approx, batch_dim=batch_dim)


def test_factors_of_a_relu_network():
    model = seeded_build(lambda: Sequences("RNN", nonlinearity="relu"))
    check(model, twin(model), noise(N, T, D), labels(N, 3))


@kinds
def test_the_definition_is_the_layer(kind):
    model = seeded_build(lambda: Sequences(kind, num_layers=2, bidirectional=True))
    x, y = noise(N, T, D), labels(N, 3)
    assert_close(model(x).detach(), model.by_hand(Tape(), x).detach(), 1e-12)
    rows = rows_by_example(model.by_hand, singles(x), y.split(1), F.cross_entropy)
    F.cross_entropy(model(x), y).backward()
    for i, part in ((0, "ih"), (1, "hh")):
        for suffix in ("", "_reverse"):
            end = f"_{part}_l{i}{suffix}"
            weight, bias = (getattr(model.rnn, f"{which}{end}").grad for which in ("weight", "bias"))
            mean = rows[f"rnn.{part}_l{i}{suffix}"].mean_gradient()[0]
            assert_close(mean, torch.cat([weight, bias[:, None]], 1), 1e-10)


@kinds
def test_initial_states(kind):
    class Started(Sequences):
        def states(self, start: Tensor):
            return (start, start.square()) if kind == "LSTM" else start

        def forward(self, x, start):
            z, _ = self.rnn(x, self.states(start.transpose(0, 1).contiguous()))
            return self.head(torch.tanh(z).mean(1))

        def by_hand(self, tape, x, start):
            states = [(h, h.square()) for h in start.unbind(1)]
            z = unroll(tape, "rnn", kind, self.rnn, x, states)
            return tape.linear("head", self.head, torch.tanh(z).mean(1))

    model = seeded_build(lambda: Started(kind, num_layers=2))
    x, start, y = noise(N, T, D), noise(N, 2, H, seed=5), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x, start), y.split(1), F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model)
    train(opt, model, (x, start), y, F.cross_entropy)
    for name, pair in expected.items():
        check_block(opt, name, pair)


LENGTHS = [3, 1, 4, 2]


class Packed(Sequences):
    """Sequences of different lengths, packed on the way in."""

    def __init__(self, kind: str, is_sorted: bool, **options) -> None:
        super().__init__(kind, **options)
        self.is_sorted = is_sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        z, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(torch.tanh(z).sum(1) / lengths[:, None])

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        return super().by_hand(tape, x)


@kinds
@pytest.mark.parametrize("option", ["plain", "two layers of two directions"])
@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequences_have_rows_for_real_steps_only(kind, option, is_sorted):
    lengths = torch.tensor(sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS)
    model = seeded_build(lambda: Packed(kind, is_sorted, **OPTIONS[option]))
    x, y = noise(N, 4, D), labels(N, 3)
    examples = [(x[n : n + 1, :length],) for n, length in enumerate(lengths.tolist())]
    plain = twin(model)
    expected = expected_pairs(plain.by_hand, examples, y.split(1), F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model)
    assert_close(model(x, lengths).detach(), plain(x, lengths).detach(), 1e-12)
    train(opt, model, (x, lengths), y, F.cross_entropy)
    for name, pair in expected.items():
        check_block(opt, name, pair)


def test_a_packed_sequence_as_the_model_s_own_input_has_its_sequences_as_examples():
    class Inner(Packed):
        def forward(self, packed):
            z, lengths = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.head(torch.tanh(z).sum(1) / lengths[:, None])

    model, x, y = seeded_build(lambda: Inner("LSTM", False)), noise(N, 4, D), labels(N, 3)
    examples = [(x[n : n + 1, :length],) for n, length in enumerate(LENGTHS)]
    expected = expected_pairs(twin(model).by_hand, examples, y.split(1), F.cross_entropy)
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model)
    train(opt, model, (packed,), y, F.cross_entropy)
    for name, pair in expected.items():
        check_block(opt, name, pair)


def test_one_sequence_without_a_batch_axis():
    class Bare(Sequences):
        def forward(self, x):
            z, _ = self.rnn(x)
            return self.head(torch.tanh(z).mean(0))

    model, x, y = seeded_build(lambda: Bare("GRU")), noise(T, D), labels(1, 3)[0]
    plain = twin(model)
    run = lambda tape, x: plain.by_hand(tape, x)[0]  # noqa: E731
    expected = expected_pairs(run, [(x[None],)], [y], F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    for name in ("rnn.ih_l0", "rnn.hh_l0"):
        check_block(opt, name, expected[name])


class Stepped(nn.Module):
    """A cell called once per step."""

    def __init__(self, kind: str, bias: bool = True) -> None:
        super().__init__()
        self.kind, self.cell, self.head = kind, CELLS[kind](D, H, bias=bias), nn.Linear(H, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0] if self.kind == "LSTM" else state)

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        cell, state = self.cell, (x.new_zeros(1, H),) * 2
        for t in range(x.shape[1]):
            i = tape.product("cell.ih", x[:, t], cell.weight_ih, cell.bias_ih)
            h = tape.product("cell.hh", state[0], cell.weight_hh, cell.bias_hh)
            state = cell_step(self.kind, i, h, state)
        return tape.linear("head", self.head, state[0])


@kinds
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_cells(kind, bias, approx):
    model, x, y = seeded_build(lambda: Stepped(kind, bias)), noise(N, T, D), labels(N, 3)
    plain = twin(model)
    expected = expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy, approx)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model, approx=approx)
    assert_close(model(x).detach(), plain(x).detach(), 1e-12)
    train(opt, model, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == set(expected)
    for name, pair in expected.items():
        check_block(opt, name, pair)


@kinds
def test_direction_is_the_dense_solve(kind):
    model, x, y = seeded_build(lambda: Sequences(kind)), noise(N, T, D), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model, damping=0.02)
    F.cross_entropy(model(x), y).backward()
    named = dict(model.named_parameters())
    params = [named[f"rnn.{which}_{part}_l0"] for part in ("ih", "hh") for which in ("weight", "bias")]
    found = step_of(opt, params)
    for part, ((dw, vw), (db, vb)) in (("ih", found[:2]), ("hh", found[2:])):
        A, B = expected[f"rnn.{part}_l0"]
        gradient, moved = torch.cat([dw, db[:, None]], 1), torch.cat([vw, vb[:, None]], 1)
        assert_close(moved, solve_exact(B, A, gradient, 0.02), 1e-8, part)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "bias_hh_l0"])
def test_frozen_parts(frozen):
    model, x, y = seeded_build(lambda: Sequences("LSTM")), noise(N, T, D), labels(N, 3)
    getattr(model.rnn, frozen).requires_grad_(False)
    plain = twin(model)
    expected = expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    for name in ("rnn.ih_l0", "rnn.hh_l0"):
        assert_close(opt.dense_curvature(name), torch.kron(expected[name][1], expected[name][0]), 1e-9, name)


@kinds
def test_a_layer_that_is_not_exposed_takes_the_fallback_and_names_the_way_out(kind):
    model, x, y = seeded_build(lambda: Sequences(kind)), noise(N, T, D), labels(N, 3)
    with pytest.warns(UserWarning, match="expose"):
        opt = plain_kfac(model, lr=0.1)
    for name, _ in model.rnn.named_parameters():
        assert follows_fallback(opt, f"rnn.{name}", "expose")
    F.cross_entropy(model(x), y).backward()
    for gradient, moved in step_of(opt, list(model.rnn.parameters())):
        assert_close(moved, 0.1 * gradient)


@kinds
def test_a_cell_that_is_not_exposed_takes_the_fallback_and_names_the_way_out(kind):
    opt = plain_kfac(seeded_build(lambda: Stepped(kind)))
    assert follows_fallback(opt, "cell.weight_ih", "expose")


def test_an_lstm_with_a_projection_is_covered_or_says_why():
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(D, 4, proj_size=2, batch_first=True), nn.Linear(2, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0].mean(1))

        def by_hand(self, tape, x):
            h, c, found = x.new_zeros(1, 2), x.new_zeros(1, 4), []
            for t in range(x.shape[1]):
                i = tape.product("rnn.ih_l0", x[:, t], self.rnn.weight_ih_l0, self.rnn.bias_ih_l0)
                j = tape.product("rnn.hh_l0", h, self.rnn.weight_hh_l0, self.rnn.bias_hh_l0)
                wide, c = cell_step("LSTM", i, j, (h, c))
                h = tape.product("rnn.hr_l0", wide, self.rnn.weight_hr_l0)
                found.append(h)
            return tape.linear("head", self.head, torch.stack(found, 1).mean(1))

    model, x, y = seeded_build(Projected), noise(N, T, D), labels(N, 3)
    plain = twin(model)
    assert_close(plain(x).detach(), plain.by_hand(Tape(), x).detach(), 1e-12)
    expected = expected_pairs(plain.by_hand, singles(x), y.split(1), F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model, lr=0.1)
    assert_close(model(x).detach(), plain(x).detach(), 1e-12)
    train(opt, model, (x,), y, F.cross_entropy)
    for name, _ in plain.named_parameters():
        _, kind, part = name.replace("weight_", "weight ").replace("bias_", "bias ").partition(" ")
        block = f"rnn.{part}" if name.startswith("rnn") else "head"
        if block in opt.blocks:
            check_block(opt, block, expected[block])
        else:
            assert follows_fallback(opt, name, "proj"), name


def test_micro_batches_do_not_matter():
    model, x, y = seeded_build(lambda: Sequences("LSTM")), noise(N, T, D), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    model = secondorder.nn.expose(model)
    opt = plain_kfac(model)
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (F.cross_entropy(model(part), target) / 2).backward()
    opt.step()
    for name, pair in expected.items():
        check_block(opt, name, pair)
