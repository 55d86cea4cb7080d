"""What has no Kronecker statistics is refused or follows the fallback rule, with a message, never silently wrong."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    assert_same_factors,
    backward,
    directions,
    held_factors,
    layer_state,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import mlp, seeded_build, vectors
from tests.support.networks import TwoHeads
from tests.support.oracles.kfac import expected_factors, solve_exact
from tests.support.warned import warned

pytestmark = pytest.mark.filterwarnings("ignore:KFAC. some parameters get no curvature:UserWarning")


def named(inner: nn.Module) -> nn.Module:
    model = nn.Sequential()
    model.add_module("encoder", inner)
    return model


def penalty(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


def rows_of(opt, name: str) -> list[str]:
    """Lines of describe() that start with a parameter of that name."""
    return [line for line in opt.describe().splitlines() if line.strip().startswith(name)]


@contextmanager
def left_out():
    """Collect the warnings about layers that have a gradient but no statistics."""
    messages: list[str] = []
    with warned() as found:
        yield messages
    messages += [w for w in found if "nothing was captured" in w]


def create_graph(model, x, y):
    F.cross_entropy(model(x), y).backward(create_graph=True)


def one_loss_twice(model, x, y):
    value = F.cross_entropy(model(x), y)
    value.backward(retain_graph=True)
    value.backward()


def two_losses(model, x, y):
    output = model(x)
    F.cross_entropy(output, y).backward(retain_graph=True)
    output.square().mean().backward()


# the passes, the layers that may be named, and the remedies
REFUSED = {
    "a gradient penalty": (lambda model, x, y: penalty(model, x), r"encoder\.\d", ("pause_capture", "create_graph")),
    "create_graph": (create_graph, r"encoder\.\d", ("create_graph",)),
    "one loss twice": (one_loss_twice, r"encoder\.\d", ("sum the losses",)),
    "two losses": (two_losses, r"encoder\.\d", ("sum the losses",)),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives_and_second_backwards_are_refused_by_name_with_the_remedy(case):
    run, layer, remedies = REFUSED[case]
    model, (x, y) = named(mlp()), vectors()
    opt = plain_kfac(model)
    with pytest.raises(RuntimeError, match=layer) as error:
        run(model, x, y)
    assert all(remedy in str(error.value).lower() for remedy in remedies)
    opt.zero_grad()
    train_step(opt, model, x, y, F.cross_entropy)  # the refusal leaves nothing behind
    assert_factors(all_factors(opt, model), expected_factors(named(mlp()), x, y, F.cross_entropy))


def test_two_heads_with_a_backward_each_are_refused_where_their_graphs_meet():
    model, (x, y) = seeded_build(TwoHeads), vectors()
    opt = plain_kfac(model)
    left, right = model(x)
    F.cross_entropy(left, y).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="trunk"):
        right.square().sum().backward()
    opt.close()


def test_a_gradient_penalty_works_inside_a_pause():
    """Its gradients count, but its statistics do not."""
    model, (x, y) = mlp(), vectors()
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    opt = plain_kfac(model)
    value = F.cross_entropy(model(x), y)
    with opt.pause_capture():
        extra = penalty(model, x)
    (value + 0.1 * extra).backward()
    reference = mlp()
    (F.cross_entropy(reference(x), y) + 0.1 * penalty(reference, x)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, 1e-12)
    moved = directions(opt, model)
    assert_factors(all_factors(opt, model), expected)
    for name, (gradient, V) in moved.items():
        assert_close(V, solve_exact(expected[name][1], expected[name][0], gradient, 1e-2), 1e-8)


def test_penalties_and_second_backwards_need_no_pause_when_nothing_is_captured():
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, lr=0.01, factor_update_steps=10, inv_update_steps=10)
    train_step(opt, model, x, y, F.cross_entropy)
    opt.zero_grad()
    one_loss_twice(model, x, y)
    (F.cross_entropy(model(x), y) + penalty(model, x)).backward()
    opt.step()
    model = mlp()
    off = plain_kfac(model, inv_update_steps=0)
    penalty(model, x).backward()
    off.step()


def inputs_first(model, x, y):
    """The first pass accumulates into no weight, so the next one does not count as a second backward."""
    inputs = x.clone().requires_grad_()
    value = F.cross_entropy(model(inputs), y)
    torch.autograd.grad(value, inputs, retain_graph=True)
    value.backward(inputs=list(model.parameters()))


def assigned(model, x, y):
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g


def called_with_its_own(model, x, y):
    output = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    F.cross_entropy(output, y).backward()


def for_some_parameters(model, x, y):
    F.cross_entropy(model(x), y).backward(inputs=list(model[2].parameters()))


@pytest.mark.parametrize("fill", [inputs_first, assigned, called_with_its_own, for_some_parameters])
def test_other_ways_to_compute_gradients_are_captured(fill):
    """Only layers that have a gradient get statistics."""
    model, (x, y) = mlp(), vectors()
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    opt = plain_kfac(model, lr=0.1)
    before = model[0].weight.detach().clone()
    fill(model, x, y)
    opt.step()
    if fill is for_some_parameters:
        del expected["0"]
        assert torch.equal(model[0].weight, before)
        assert layer_state(opt, model, "0")["factor_updates"] == 0
    assert_factors({name: held_factors(opt, model, name) for name in expected}, expected)


# ---------------------------------------------------------------- Layers without statistics
class LearnedInputs(nn.Module):
    """A layer sees a parameter instead of the batch: ``vector`` one row, ``image`` one picture, ``table`` six rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        shape = {"vector": (4,), "image": (1, 2, 3, 3), "table": (6, 4)}[kind]
        self.learned = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape))
        self.odd = nn.Conv2d(2, 4, 2) if kind == "image" else nn.Linear(4, 4)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        shift = self.odd(self.learned)
        if self.kind != "vector":
            shift = shift.mean(0) if self.kind == "table" else shift.mean((0, 2, 3))
        return self.head(torch.tanh(self.first(x)) + shift)


@pytest.mark.parametrize(("kind", "n"), [("vector", 8), ("image", 4)])
def test_reduce_leaves_out_a_layer_whose_rows_are_not_examples(kind, n):
    x, y = vectors(n)
    model = seeded_build(lambda: LearnedInputs(kind))
    expected = expected_factors(twin(model), x, y, F.cross_entropy, ["first", "head"], approx="reduce")
    opt = plain_kfac(model, lr=0.1, approx="reduce", factor_decay=0.0)
    start = twin(model).state_dict()
    with left_out() as messages:
        for _ in range(2):
            model.load_state_dict(start)
            opt.zero_grad()
            backward(model, x, y, F.cross_entropy)
            moved = directions(opt, model)
            gradient, step = moved["odd"]
            assert_close(step, 0.1 * gradient)
            for name, (A, B) in expected.items():
                assert_close(moved[name][1], 0.1 * solve_exact(B, A, moved[name][0], 1e-2), 1e-8, name)
    (message,) = messages
    assert "odd: " in message
    assert "first: " not in message
    assert_factors({name: held_factors(opt, model, name) for name in expected}, expected)
    assert layer_state(opt, model, "odd")["factor_updates"] == 0
    for name in ("odd", "first"):
        (row,) = rows_of(opt, f"{name}.weight")
        assert ("fallback" in row) == (name == "odd")


@pytest.mark.parametrize("sizes", [(4,), (6, 4, 3)], ids=str)
def test_one_batch_that_does_not_fit_leaves_the_layer_out_of_its_step_only(sizes):
    """Six learned rows can be split into six examples or three, but not into four."""
    model = seeded_build(lambda: LearnedInputs("table"))
    opt = plain_kfac(model, lr=0.1, approx="reduce")
    train_step(opt, model, *vectors(6), F.cross_entropy)
    A, B = held_factors(opt, model, "odd")
    opt.zero_grad()
    for n in sizes:
        backward(model, *vectors(n), F.cross_entropy)
    with pytest.warns(UserWarning, match="odd: "):
        gradient, step = directions(opt, model)["odd"]
    assert_close(step, 0.1 * solve_exact(B, A, gradient, 1e-2), 1e-8)
    assert_same_factors(opt, model, {"odd": (A, B)})
    assert layer_state(opt, model, "odd")["factor_updates"] == 1
    assert layer_state(opt, model, "head")["factor_updates"] == 2
    train_step(opt, model, *vectors(3), F.cross_entropy)
    assert layer_state(opt, model, "odd")["factor_updates"] == 2
    assert not torch.equal(held_factors(opt, model, "odd")[1], B)


class Overwritten(nn.Module):
    """Changes a layer's input after the layer; autocast has kept a copy, so autograd does not object."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.middle, self.head, self.inplace = nn.Linear(4, 4), nn.Linear(4, 3), inplace

    def forward(self, x):
        h = x * self.gain
        y = self.middle(h)
        return self.head(h.add_(3 * y) if self.inplace else h + 3 * y)


@pytest.mark.parametrize("inplace", [True, False])
def test_an_input_modified_in_place_after_its_layer_is_not_captured(inplace):
    x, y = vectors()
    expected = expected_factors(seeded_build(lambda: Overwritten(False)), x, y, F.cross_entropy)
    model = seeded_build(lambda: Overwritten(inplace)).float()
    opt = plain_kfac(model, lr=0.0)
    with left_out() as messages:
        for _ in range(2):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = F.cross_entropy(model(x.float()), y)
            value.backward()
            opt.step()
    for name in ("middle", "head")[inplace:]:
        A, B = held_factors(opt, model, name)
        assert_close(A.double(), expected[name][0], 3e-2)
        assert_close(B.double(), expected[name][1], 6e-2)
    assert layer_state(opt, model, "middle")["factor_updates"] == (0 if inplace else 2)
    assert [("middle: " in message, "in place" in message) for message in messages] == [(True, True)] * inplace


# ---------------------------------------------------------------- skip_layers
class Special(nn.Linear):
    pass


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.lm_head = Special(4, 3)

    def forward(self, x):
        return self.lm_head(self.decoder(self.encoder(x)))


ALL = {"encoder.0", "encoder.2.0", "decoder.0", "lm_head"}


# what is skipped, and which blocks are left
SKIPS = [
    ((), ALL),
    (["lm_head"], ALL - {"lm_head"}),
    (("encoder.2",), ALL - {"encoder.2.0"}),
    *((skip, {"decoder.0", "lm_head"}) for skip in (("encoder",), ("encoder.*",), lambda model: (model.encoder,))),
    *((skip, {"lm_head"}) for skip in (("*.0",), (nn.Sequential,))),
    ((nn.Linear,), set()),
    ((Special,), ALL - {"lm_head"}),
    (lambda model: (model.encoder[2][0],), ALL - {"encoder.2.0"}),
    (lambda model: (model.lm_head, "decoder"), {"encoder.0", "encoder.2.0"}),
]


def test_skip_layers_by_name_pattern_type_and_instance():
    for skip, left in SKIPS:
        model = seeded_build(Deep)
        opt = plain_kfac(model, lr=0.1, skip_layers=skip(model) if callable(skip) else skip)
        assert set(opt.blocks) == left, skip
        for name, _ in model.named_parameters():
            (row,) = rows_of(opt, name)
            assert ("fallback" in row) == ("skip" in row) == (name.rpartition(".")[0] not in left)


def test_a_skip_that_matches_nothing_raises():
    unknown = nn.Linear(4, 4)
    for skip, text in (
        ("decodr", "decodr"), ("nothing.*", r"nothing\.\*"), (nn.Conv2d, "Conv2d"), (unknown, "skip_layers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            plain_kfac(seeded_build(Deep), skip_layers=(skip,))
