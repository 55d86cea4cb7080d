"""What has no Kronecker statistics is refused or follows the fallback rule, with a message, never silently wrong."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    assert_same_factors,
    assert_solves,
    backward,
    directions,
    held_factors,
    layer_state,
    plain_kfac,
    train_step,
)
from tests.support.models import Net, mlp, seeded_build, vectors
from tests.support.networks import TwoHeads
from tests.support.oracles.kfac import expected_factors, solve_exact
from tests.support.oracles.layers import row_of
from tests.support.warned import warned

pytestmark = pytest.mark.filterwarnings("ignore:KFAC. some parameters get no curvature:UserWarning")


def named(inner: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(encoder=inner))


def penalty(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


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
# the passes, and the remedies
REFUSED = {
    "a gradient penalty": (lambda model, x, y: penalty(model, x), ("pause_capture", "create_graph")),
    "create_graph": (create_graph, ("create_graph",)),
    "one loss twice": (one_loss_twice, ("sum the losses",)),
    "two losses": (two_losses, ("sum the losses",)),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_derivatives_and_second_backwards_are_refused_by_name_with_the_remedy(case):
    run, remedies = REFUSED[case]
    model, (x, y) = named(mlp()), vectors()
    opt = plain_kfac(model)
    with pytest.raises(RuntimeError, match=r"encoder\.\d") as error:
        run(model, x, y)
    assert all(remedy in str(error.value).lower() for remedy in remedies)
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
    model, reference, (x, y) = mlp(), mlp(), vectors()
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    opt = plain_kfac(model)
    value = F.cross_entropy(model(x), y)
    with opt.pause_capture():
        extra = penalty(model, x)
    (value + 0.1 * extra).backward()
    (F.cross_entropy(reference(x), y) + 0.1 * penalty(reference, x)).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, 1e-12)
    moved = directions(opt, model)
    assert_factors(all_factors(opt, model), expected)
    assert_solves(moved, expected, solve_exact, 1e-2)


def test_penalties_and_second_backwards_need_no_pause_when_nothing_is_captured():
    model, other, (x, y) = mlp(), mlp(), vectors()
    opt = plain_kfac(model, lr=0.01, factor_update_steps=10, inv_update_steps=10)
    train_step(opt, model, x, y, F.cross_entropy)
    opt.zero_grad()
    one_loss_twice(model, x, y)
    (F.cross_entropy(model(x), y) + penalty(model, x)).backward()
    opt.step()
    off = plain_kfac(other, inv_update_steps=0)
    penalty(other, x).backward()
    off.step()


def inputs_first(model, x, y):
    """The first pass accumulates into no weight, so the next one does not count as a second backward."""
    inputs = x.clone().requires_grad_()
    value = F.cross_entropy(model(inputs), y)
    torch.autograd.grad(value, inputs, retain_graph=True)
    value.backward(inputs=list(model.parameters()))


def called_with_its_own(model, x, y):
    output = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    F.cross_entropy(output, y).backward()


def for_some_parameters(model, x, y):
    F.cross_entropy(model(x), y).backward(inputs=list(model[2].parameters()))


@pytest.mark.parametrize("fill", [inputs_first, called_with_its_own, for_some_parameters])
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


def on_a_table(net, x):
    return net.head(torch.tanh(net.first(x)) + net.odd(net.table).mean(0))


@pytest.mark.parametrize("sizes", [(4,), (6, 4, 3)], ids=str)
def test_one_batch_that_does_not_fit_leaves_the_layer_out_of_its_step_only(sizes):
    """Six learned rows can be split into six examples or three, but not into four."""
    table = nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4))
    odd, first, head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    model = Net(on_a_table, table=table, odd=odd, first=first, head=head).double()
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
    assert [layer_state(opt, model, name)["factor_updates"] for name in ("odd", "head")] == [1, 2]
    train_step(opt, model, *vectors(3), F.cross_entropy)
    assert layer_state(opt, model, "odd")["factor_updates"] == 2
    assert not torch.equal(held_factors(opt, model, "odd")[1], B)


def overwriting(inplace):
    """Changes a layer's input after the layer; autocast has kept a copy, so autograd does not object."""

    def forward(net, x):
        h = x * net.gain
        y = net.middle(h)
        return net.head(h.add_(3 * y) if inplace else h + 3 * y)

    gain = nn.Parameter(torch.ones(4))
    return seeded_build(lambda: Net(forward, gain=gain, middle=nn.Linear(4, 4), head=nn.Linear(4, 3)))


@pytest.mark.parametrize("inplace", [True, False])
def test_an_input_modified_in_place_after_its_layer_is_not_captured(inplace):
    (x, y), model = vectors(), overwriting(inplace).float()
    expected = expected_factors(overwriting(False), x, y, F.cross_entropy)
    opt = plain_kfac(model, lr=0.0)
    with warned() as messages:
        for _ in range(2):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = F.cross_entropy(model(x.float()), y)
            value.backward()
            opt.step()
    for name in ("middle", "head")[inplace:]:
        for found, wanted, tolerance in zip(held_factors(opt, model, name), expected[name], (3e-2, 6e-2), strict=True):
            assert_close(found.double(), wanted, tolerance)
    assert layer_state(opt, model, "middle")["factor_updates"] == (0 if inplace else 2)
    messages = [text for text in messages if "nothing was captured" in text]
    assert [("middle: " in text, "in place" in text) for text in messages] == [(True, True)] * inplace


class Special(nn.Linear):
    pass


def deep() -> nn.Module:
    encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    layers = {"encoder": encoder, "decoder": decoder, "lm_head": Special(4, 3)}
    return Net(lambda net, x: net.lm_head(net.decoder(net.encoder(x))), **layers).double()


ALL = {"encoder.0", "encoder.2.0", "decoder.0", "lm_head"}


# what is skipped, and which blocks are left
SKIPS = [
    ((), ALL), (["lm_head"], ALL - {"lm_head"}), (("encoder.2",), ALL - {"encoder.2.0"}),
    *((skip, {"decoder.0", "lm_head"}) for skip in (("encoder",), ("encoder.*",), lambda model: (model.encoder,))),
    *((skip, {"lm_head"}) for skip in (("*.0",), (nn.Sequential,))), ((nn.Linear,), set()),
    ((Special,), ALL - {"lm_head"}), (lambda model: (model.encoder[2][0],), ALL - {"encoder.2.0"}),
    (lambda model: (model.lm_head, "decoder"), {"encoder.0", "encoder.2.0"}),
]  # fmt: skip


def test_skip_layers_by_name_pattern_type_and_instance():
    for skip, left in SKIPS:
        model = deep()
        opt = plain_kfac(model, lr=0.1, skip_layers=skip(model) if callable(skip) else skip)
        assert set(opt.blocks) == left, skip
        for name, _ in model.named_parameters():
            row = row_of(opt, name)
            assert ("fallback" in row) == ("skip" in row) == (name.rpartition(".")[0] not in left)


def test_a_skip_that_matches_nothing_raises():
    refused = {"decodr": "decodr", "nothing.*": r"nothing\.\*", nn.Conv2d: "Conv2d", nn.Linear(4, 4): "skip_layers"}
    for skip, text in refused.items():
        with pytest.raises(ValueError, match=text):
            plain_kfac(deep(), skip_layers=(skip,))
