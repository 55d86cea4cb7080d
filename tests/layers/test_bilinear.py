"""`nn.Bilinear` is a linear layer over the products of its two inputs' features."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.kfac import assert_close, labels, noise, plain_kfac, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import layer_gradient, solve_exact, solve_pi
from tests.support.oracles.layers import Tape, check_block, expected_pairs, rows_by_example, singles, step_of, train

N = 5


class Pair(nn.Module):
    """A bilinear layer over two inputs, on any leading dimensions, a mean over positions, a head."""

    def __init__(self, bias: bool = True, keywords: bool = False) -> None:
        super().__init__()
        self.left, self.both, self.head = nn.Linear(3, 3), nn.Bilinear(3, 2, 4, bias=bias), nn.Linear(4, 3)
        self.keywords = keywords

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.left(x))
        z = self.both(input1=x, input2=y) if self.keywords else self.both(x, y)
        z = torch.tanh(z)
        return self.head(z if z.ndim == 2 else z.flatten(1, -2).mean(1))

    def by_hand(self, tape: Tape, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(tape.linear("left", self.left, x))
        products = (x[..., :, None] * y[..., None, :]).flatten(-2)
        z = torch.tanh(tape.product("both", products, self.both.weight.flatten(1), self.both.bias))
        return tape.linear("head", self.head, z if z.ndim == 2 else z.flatten(1, -2).mean(1))


def data(*lead: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (noise(N, *lead, 3), noise(N, *lead, 2, seed=1)), labels(N, 3)


LEADS = [(), (4,), (2, 3)]


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_definition_is_the_layer(lead, bias):
    model, (inputs, y) = seeded_build(lambda: Pair(bias)), data(*lead)
    assert_close(model.by_hand(Tape(), *inputs).detach(), model(*inputs).detach(), 1e-12)
    rows = rows_by_example(model.by_hand, singles(*inputs), y.split(1), F.cross_entropy)["both"]
    F.cross_entropy(model(*inputs), y).backward()
    assert_close(rows.mean_gradient()[0], layer_gradient(model.both), 1e-12)


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_factors(lead, bias, approx):
    model, (inputs, y) = seeded_build(lambda: Pair(bias)), data(*lead)
    expected = expected_pairs(twin(model).by_hand, singles(*inputs), y.split(1), F.cross_entropy, approx)
    opt = plain_kfac(model, approx=approx)
    train(opt, model, inputs, y, F.cross_entropy)
    for name, pair in expected.items():
        check_block(opt, name, pair)
    assert "fallback" not in opt.describe()


def test_inputs_given_by_keyword():
    model, (inputs, y) = seeded_build(lambda: Pair(keywords=True)), data(4)
    expected = expected_pairs(twin(model).by_hand, singles(*inputs), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train(opt, model, inputs, y, F.cross_entropy)
    check_block(opt, "both", expected["both"])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_part(frozen):
    model, (inputs, y) = seeded_build(Pair), data(4)
    getattr(model.both, frozen).requires_grad_(False)
    expected = expected_pairs(twin(model).by_hand, singles(*inputs), y.split(1), F.cross_entropy)["both"]
    opt = plain_kfac(model)
    train(opt, model, inputs, y, F.cross_entropy)
    check_dense = opt.dense_curvature("both")
    assert_close(check_dense, torch.kron(expected[1], expected[0]))


@pytest.mark.parametrize(("method", "solve"), [("eigen", solve_exact), ("cholesky", solve_pi)])
def test_direction_is_the_dense_solve(method, solve):
    model, (inputs, y) = seeded_build(Pair), data(4)
    A, B = expected_pairs(twin(model).by_hand, singles(*inputs), y.split(1), F.cross_entropy)["both"]
    opt = plain_kfac(model, damping=0.02, inverse_method=method)
    F.cross_entropy(model(*inputs), y).backward()
    (dw, vw), (db, vb) = step_of(opt, [model.both.weight, model.both.bias])
    gradient, moved = (torch.cat([w.flatten(1), b[:, None]], 1) for w, b in ((dw, db), (vw, vb)))
    assert_close(moved, solve(B, A, gradient, 0.02), 1e-8)


def test_only_the_second_input_leads_to_trained_parameters():
    """The first input then needs no gradient; the rows need both all the same."""

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.right, self.both = nn.Linear(2, 2), nn.Bilinear(3, 2, 3)

        def forward(self, x, y):
            return self.both(x, torch.tanh(self.right(y)))

        def by_hand(self, tape, x, y):
            y = torch.tanh(tape.linear("right", self.right, y))
            products = (x[..., :, None] * y[..., None, :]).flatten(-2)
            return tape.product("both", products, self.both.weight.flatten(1), self.both.bias)

    model, (inputs, y) = seeded_build(Second), data()
    expected = expected_pairs(twin(model).by_hand, singles(*inputs), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train(opt, model, inputs, y, F.cross_entropy)
    for name, pair in expected.items():
        check_block(opt, name, pair)
