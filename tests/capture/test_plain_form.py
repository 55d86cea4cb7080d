"""Whatever a model does around its layers, the factors are those of the same mathematics written plainly.

The expected values come from per-example autograd on the plain form, so both the split into calls and the counting of
examples are judged, not only equality of two runs of the same code.
"""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.support.grid import each, pairs
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    assert_same_factors,
    backward,
    directions,
    held_factors,
    layer_state,
    noise,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import reused
from tests.support.oracles.kfac import expected_factors, solve_exact

APPROXIMATIONS = ["expand", "reduce"]
approximations = pytest.mark.parametrize("approx", APPROXIMATIONS)


def data(tokens: bool = False, n: int = 6, seed: int = 0):
    x, y = vectors(n, seed=seed)
    return (noise(n, 3, 4, seed=seed), y) if tokens else (x, y)


def captured(model, x, y, loss=F.cross_entropy, **keywords):
    """Factors of every layer after one step."""
    opt = plain_kfac(model, **keywords)
    train_step(opt, model, x, y, loss)
    return all_factors(opt, model)


@each(approx=APPROXIMATIONS, tokens=[False, True])
def test_in_place_relu(approx, tokens):
    x, y = data(tokens)
    expected = expected_factors(reused(tokens=tokens), x, y, F.cross_entropy, approx=approx)
    assert_factors(captured(reused(tokens=tokens, inplace=True), x, y, approx=approx), expected)


def test_in_place_relu_behind_a_convolution():
    x, y = images()
    expected = expected_factors(convnet(activation=nn.ReLU()), x, y, F.cross_entropy)
    assert_factors(captured(convnet(activation=nn.ReLU(inplace=True)), x, y), expected)


class Residual(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first, self.second, self.inplace = nn.Linear(4, 4), nn.Linear(4, 4), inplace

    def forward(self, x):
        z = self.second(torch.tanh(self.first(x)))
        if self.inplace:
            z += x
            z *= 2.0
            return z
        return (z + x) * 2.0


def test_in_place_arithmetic_on_a_layer_output():
    x, y = noise(5, 4), noise(5, 4, seed=1)
    expected = expected_factors(seeded_build(lambda: Residual(False)), x, y, F.mse_loss)
    assert_factors(captured(seeded_build(lambda: Residual(True)), x, y, F.mse_loss), expected)


class Overwriting(nn.Module):
    """Changes its layers' outputs in place through views of them."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.second, self.plain = nn.Linear(4, 4), nn.Linear(4, 3), plain

    def forward(self, x):
        z = self.first(x)
        if self.plain:
            mask = torch.tensor([0.0, 2.0, 1.0, 1.0], dtype=x.dtype)
            z = z * mask
        else:
            z[..., 0] = 0.0
            z[..., 1].mul_(2.0)
        out = self.second(torch.tanh(z))
        return out.mean(1) if out.ndim == 3 else out


@pairs(approx=APPROXIMATIONS, tokens=[False, True])
def test_assignment_into_a_slice_of_a_layer_output(approx, tokens):
    x, y = data(tokens)
    expected = expected_factors(seeded_build(lambda: Overwriting(True)), x, y, F.cross_entropy, approx=approx)
    assert_factors(captured(seeded_build(lambda: Overwriting(False)), x, y, approx=approx), expected)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_in_place_relu_behind_an_unbatched_convolution(bias):
    """Its output is a view, as that of a Linear on 3-D input."""
    x, y = noise(2, 5, 4), noise(3, 4, 3, seed=1)
    found = []
    for inplace in (False, True):
        model = seeded_build(lambda: nn.Sequential(nn.Conv2d(2, 3, 2, bias=bias), nn.ReLU(inplace=inplace)))  # noqa: B023
        opt = plain_kfac(model)
        train_step(opt, model, x, y, F.mse_loss)
        found.append(held_factors(opt, model, "0"))
    assert_close(found[1][0], found[0][0])
    assert_close(found[1][1], found[0][1])
    assert float(found[0][1].abs().max()) > 0


@pairs(approx=APPROXIMATIONS, mode=["reentrant", "non-reentrant"], repeat=[1, 2], inplace=[False, True])
def test_activation_checkpointing(approx, mode, repeat, inplace):
    x, y = data(tokens=True)
    expected = expected_factors(reused(tokens=True, repeat=repeat), x, y, F.cross_entropy, approx=approx)
    model = reused(tokens=True, repeat=repeat, mode=mode, inplace=inplace)
    opt = plain_kfac(model, approx=approx)
    train_step(opt, model, x, y, F.cross_entropy)
    assert_factors(all_factors(opt, model), expected)
    assert layer_state(opt, model, "middle")["factor_updates"] == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_sequence_checkpointed_in_segments(reentrant):
    x, y = vectors()
    expected = expected_factors(mlp((4, 5, 6, 5, 3)), x, y, F.cross_entropy)
    body = mlp((4, 5, 6, 5, 3))

    class Segmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint_sequential(self.body, 3, x.requires_grad_(), use_reentrant=reentrant)

    model = Segmented()
    opt = plain_kfac(model)
    train_step(opt, model, x.clone(), y, F.cross_entropy)
    held = {name.removeprefix("body."): pair for name, pair in all_factors(opt, model).items()}
    assert_factors(held, expected)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("joint", [False, True], ids=["a backward each", "one backward"])
def test_checkpointing_with_two_forwards(mode, joint):
    """Two forwards before the backward, of unequal size: recomputed layers belong to their own forward."""
    (xa, ya), (xb, yb) = data(n=4), data(n=2, seed=1)
    x, y = torch.cat([xa, xb]), torch.cat([ya, yb])
    expected = expected_factors(reused(), x, y, F.cross_entropy)
    model = reused(mode=mode)
    opt = plain_kfac(model)
    outputs = model(xa), model(xb)
    losses = [F.cross_entropy(o, t, reduction="sum") / 6 for o, t in zip(outputs, (ya, yb), strict=True)]
    if joint:
        sum(losses).backward()
    else:
        for value in losses:
            value.backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


@each(approx=APPROXIMATIONS, mode=["plain", "reentrant", "non-reentrant"])
def test_unequal_micro_batches(approx, mode):
    x, y = data(tokens=True, n=7)
    expected = expected_factors(reused(tokens=True), x, y, F.cross_entropy, approx=approx)
    model = reused(tokens=True, mode=mode)
    opt = plain_kfac(model, approx=approx)
    for a, b in zip(x.split([4, 1, 2]), y.split([4, 1, 2]), strict=True):
        backward(model, a, b, lambda o, t: F.cross_entropy(o, t, reduction="sum") / 7)
    opt.step()
    assert_factors(all_factors(opt, model), expected)


@pairs(approx=APPROXIMATIONS, tokens=[False, True], repeat=[2, 3])
def test_module_called_several_times(approx, tokens, repeat):
    """Calls are further positions: expand pools them, reduce averages inputs and sums gradients over them."""
    x, y = data(tokens)
    plain = reused(tokens=tokens, repeat=repeat)
    expected = expected_factors(twin(plain), x, y, F.cross_entropy, approx=approx)
    opt = plain_kfac(plain, approx=approx)
    train_step(opt, plain, x, y, F.cross_entropy)
    assert_factors(all_factors(opt, plain), expected)
    assert layer_state(opt, plain, "middle")["factor_updates"] == 1


class Recurrent(nn.Module):
    """A cell stepped over time, its calls of unequal use: the last steps feed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.cell_in, self.cell_state, self.head = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = torch.tanh(self.cell_in(x[:, t]) + self.cell_state(state))
        return self.head(state)


@approximations
def test_recurrent_cell(approx):
    x, y = noise(5, 4, 3), torch.tensor([0, 1, 2, 0, 1])
    expected = expected_factors(seeded_build(Recurrent), x, y, F.cross_entropy, approx=approx)
    assert_factors(captured(seeded_build(Recurrent), x, y, approx=approx), expected)


class Tied(nn.Module):
    """Two modules, one weight (and bias): the two are one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedPlainly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.first(torch.tanh(self.first(x)))))


@approximations
def test_tied_weights(approx):
    x, y = vectors()
    expected = expected_factors(seeded_build(TiedPlainly), x, y, F.cross_entropy, ["first", "head"], approx)
    model = seeded_build(Tied)
    opt = plain_kfac(model, approx=approx)
    backward(model, x, y, F.cross_entropy)
    moved = directions(opt, model, ["first", "head"])
    held = {name: held_factors(opt, model, name) for name in ("first", "head")}
    assert_factors(held, expected)
    gradient, V = moved["first"]
    assert_close(V, solve_exact(expected["first"][1], expected["first"][0], gradient, 1e-2), 1e-8)


class Attentive(nn.Module):
    """torch's attention, which calls none of its linear maps as modules; or the same from layers that are called."""

    def __init__(self, plain: bool, batch_first: bool, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.head = nn.Linear(4, 3)
        self.plain, self.batch_first, self.weights = plain, batch_first, weights
        if plain:
            self.maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            values = zip(self.attention.in_proj_weight.chunk(3), self.attention.in_proj_bias.chunk(3), strict=True)
            out = self.attention.out_proj
            with torch.no_grad():
                for layer, (weight, bias) in zip(self.maps, [*values, (out.weight, out.bias)], strict=True):
                    layer.weight.copy_(weight)
                    layer.bias.copy_(bias)

    def forward(self, x):
        if self.plain:
            q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in self.maps[:3])
            z = self.maps[3]((torch.softmax(q @ k.mT / 2**0.5, -1) @ v).transpose(1, 2).flatten(2))
        else:
            x = x if self.batch_first else x.transpose(0, 1)
            z, _ = self.attention(x, x, x, need_weights=self.weights)
            z = z if self.batch_first else z.transpose(0, 1)
        return self.head(z.mean(1))


@pairs(approx=APPROXIMATIONS, batch_first=[True, False], weights=[True, False])
@pytest.mark.filterwarnings("error")
def test_multihead_attention(approx, batch_first, weights):
    """Query, key and value are three pairs of factors of one block."""
    x, y = noise(6, 5, 4), vectors()[1]
    names = ["maps.0", "maps.1", "maps.2", "maps.3", "head"]
    plain = seeded_build(lambda: Attentive(True, batch_first, weights))
    *triple, out, head = expected_factors(plain, x, y, F.cross_entropy, names, approx).values()
    model = seeded_build(lambda: Attentive(False, batch_first, weights))
    opt = plain_kfac(model, lr=0.01, damping=0.1, approx=approx)
    assert set(opt.blocks) == {"attention.in_proj", "attention.out_proj", "head"}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_step(opt, model, x, y, F.cross_entropy)
    state = opt.state[model.attention.in_proj_weight]
    held = {name: held_factors(opt, model, name) for name in ("attention.out_proj", "head")}
    assert_factors(held, {"attention.out_proj": out, "head": head})
    stacked = tuple(torch.stack(pair) for pair in zip(*triple, strict=True))
    assert_factors({"": (state["factor_a"], state["factor_g"])}, {"": stacked})
    for _ in range(3):
        train_step(opt, model, x, y, F.cross_entropy)
    for n, p in model.named_parameters():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[n]), n


@pytest.mark.filterwarnings("error")
def test_normalisation_layers():
    """Each unit has the second moment of what every example wants of its gain and shift, 2 × 2, and nothing else."""
    model, (x, y) = seeded_build(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6))), vectors()
    model.append(nn.Linear(6, 3, dtype=torch.float64))
    with torch.no_grad():
        z = model[0](x)
        normal = {1: (z - z.mean(0)) / (z.var(0, unbiased=False) + model[1].eps) ** 0.5}
        normal[2] = F.layer_norm(normal[1], (6,))  # gain 1 and shift 0 so far
    expected = {}
    for index, inputs in normal.items():
        params, rows = (model[index].weight, model[index].bias), []
        for row, target in zip(inputs, y, strict=True):
            value = F.cross_entropy(model[index + 1 :](params[0] * row + params[1]), target)
            rows.append(torch.stack(torch.autograd.grad(value, params)))  # [2, C]
        expected[str(index)] = torch.ones(6, 1, 1).double(), torch.einsum("nic,njc->cij", *[torch.stack(rows)] * 2) / 6
    opt = plain_kfac(model)
    assert set(opt.blocks) == {"0", "1", "2", "3"}
    train_step(opt, model, x, y, F.cross_entropy)
    assert_factors({name: held_factors(opt, model, name) for name in expected}, expected)


def test_two_losses_from_two_forwards():
    """As in training a discriminator: forward, forward, backward, backward. N is the examples of both forwards."""
    (xa, ya), (xb, yb) = vectors(4), vectors(2, seed=1)
    x, y = torch.cat([xa, xb]), torch.cat([ya, yb])
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    for order in ("one backward", "in order", "reversed", "alternating"):
        model = mlp()
        opt = plain_kfac(model)
        if order == "alternating":
            for a, b in ((xa, ya), (xb, yb)):
                backward(model, a, b, lambda o, t: F.cross_entropy(o, t, reduction="sum") / 6)
        else:
            losses = [F.cross_entropy(model(a), b, reduction="sum") / 6 for a, b in ((xa, ya), (xb, yb))]
            if order == "one backward":
                losses = [sum(losses)]
            for value in losses[:: -1 if order == "reversed" else 1]:
                value.backward()
        opt.step()
        assert_factors(all_factors(opt, model), expected)


@approximations
def test_two_losses_on_one_forward_summed_before_backward(approx):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x):
            z = torch.tanh(self.trunk(x))
            return torch.cat([self.left(z), self.right(z)], 1)

    def both(output, target):
        return F.cross_entropy(output[:, :3], target) + output[:, 3:].square().sum() / len(output)

    x, y = vectors()
    expected = expected_factors(seeded_build(Heads), x, y, both, approx=approx)
    assert_factors(captured(seeded_build(Heads), x, y, both, approx=approx), expected)


def test_zero_grad_between_forward_and_backward_loses_nothing():
    x, y = vectors()
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    for which in ("optimizer", "model", "to zero", "model to zero"):
        model = mlp()
        opt = plain_kfac(model)
        value = F.cross_entropy(model(x), y)
        zero = opt.zero_grad if which in {"optimizer", "to zero"} else model.zero_grad
        zero(set_to_none="to zero" not in which)
        value.backward()
        opt.step()
        assert_factors(all_factors(opt, model), expected)


@pytest.mark.parametrize("zero", ["optimizer", "optimizer, to zero", "model"])
def test_zero_grad_discards_what_belonged_to_the_gradients(zero):
    """Of the model too, as trainers call it: no gradient left at the next forward means that its statistics go too."""
    x, y = vectors(seed=1)
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    model = mlp()
    opt = plain_kfac(model)
    backward(model, *vectors(9), F.cross_entropy)
    (model if zero == "model" else opt).zero_grad(set_to_none="zero" not in zero)
    backward(model, x, y, F.cross_entropy)
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def test_step_without_zero_grad_starts_the_statistics_anew():
    """Pending sums belong to one step, also where the user goes on accumulating into .grad."""
    model = mlp()
    opt = plain_kfac(model, lr=0.0, factor_decay=0.0)
    backward(model, *vectors(), F.cross_entropy)
    opt.step()
    x, y = vectors(seed=1)
    backward(model, x, y, F.cross_entropy)
    opt.step()
    assert_factors(all_factors(opt, model), expected_factors(mlp(), x, y, F.cross_entropy))


def test_everything_inside_a_closure():
    x, y = vectors()
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    model = mlp()
    opt = plain_kfac(model)
    calls = []

    def closure():
        calls.append(1)
        opt.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        return value

    opt.step(closure)
    assert len(calls) == 1
    assert_factors(all_factors(opt, model), expected)


def test_parameters_in_groups_with_module_keyword():
    x, y = vectors()
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    model = mlp()
    groups = [{"params": [p for n, p in model.named_parameters() if kind in n]} for kind in ("weight", "bias")]
    opt = plain_kfac(groups, module=model)
    backward(model, x, y, F.cross_entropy)
    moved = directions(opt, model)
    assert_factors(all_factors(opt, model), expected)
    for name, (gradient, V) in moved.items():
        assert_close(V, solve_exact(expected[name][1], expected[name][0], gradient, 1e-2), 1e-8)


class Experts(nn.Module):
    """Each example is routed to one of two layers, which see that many rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.positive, self.negative = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        z = torch.tanh(self.trunk(x))
        chosen = x[:, 0] > 0
        out = z.new_zeros(len(x), 3)
        out[chosen] = self.positive(z[chosen])
        out[~chosen] = self.negative(z[~chosen])
        return out


@pytest.mark.parametrize("split", [[8], [3, 5], [2, 2, 2, 2]], ids=str)
def test_experts_divide_their_inputs_by_their_rows_and_gradients_by_all_examples(split):
    """An example that does not reach a layer has no row there, and no gradient: B counts it, A cannot."""
    x, y = vectors(8, seed=3)
    reached = int((x[:, 0] > 0).sum())
    assert 0 < reached < 8
    expected = expected_factors(seeded_build(Experts), x, y, F.cross_entropy)
    model = seeded_build(Experts)
    opt = plain_kfac(model)
    for a, b in zip(x.split(split), y.split(split), strict=True):
        backward(model, a, b, lambda o, t: F.cross_entropy(o, t, reduction="sum") / 8)
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def test_an_expert_without_any_row_keeps_its_estimate():
    x, y = vectors(8, seed=3)
    model = seeded_build(Experts)
    opt = plain_kfac(model, lr=0.1)
    train_step(opt, model, x, y, F.cross_entropy)
    held = held_factors(opt, model, "negative")
    only = x[:, 0] > 0
    train_step(opt, model, x[only], y[only], F.cross_entropy)
    now = held_factors(opt, model, "negative")
    assert torch.equal(now[0], held[0])
    assert torch.isfinite(now[1]).all()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    train_step(opt, model, x, y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------------------


class Transposing(nn.Module):
    """Feeds its layers views with odd strides, and reads its outputs through others."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.second, self.plain = nn.Linear(3, 4), nn.Linear(5, 2), plain

    def forward(self, x):
        z = self.first(x.transpose(1, 2).contiguous() if self.plain else x.transpose(1, 2))  # [N, 5, 4]
        z = torch.tanh(z).transpose(1, 2)
        z = self.second(z.contiguous() if self.plain else z)  # [N, 4, 2]
        return z.permute(2, 0, 1).sum(2).T  # gradients arrive expanded


@approximations
def test_memory_layouts(approx):
    x, y = noise(6, 3, 5), noise(6, 2, seed=1)
    expected = expected_factors(seeded_build(lambda: Transposing(True)), x, y, F.mse_loss, approx=approx)
    for inputs in (x, x[::1], x.repeat_interleave(2, 2)[..., ::2], x.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        model = seeded_build(lambda: Transposing(False))
        assert_factors(captured(model, inputs, y, F.mse_loss, approx=approx), expected)


@pytest.mark.parametrize("whole", [True, False], ids=["model and data", "data only"])
def test_channels_last(whole):
    x, y = images()
    expected = expected_factors(convnet(padding=1), x, y, F.cross_entropy)
    model = convnet(padding=1)
    if whole:
        model = model.to(memory_format=torch.channels_last)
    strides = {n: p.stride() for n, p in model.named_parameters()}
    opt = plain_kfac(model, momentum=0.9)
    for _ in range(2):
        opt.zero_grad()
        backward(model, x.to(memory_format=torch.channels_last), y, F.cross_entropy)
        before = {n: m.weight.detach().flatten(1).clone() for n, m in model.named_modules() if hasattr(m, "weight")}
        opt.step()
        if expected is not None:
            assert_factors(all_factors(opt, model), expected)
            gradient = torch.cat([model.first.weight.grad.flatten(1), model.first.bias.grad[:, None]], 1)
            V = solve_exact(expected["first"][1], expected["first"][0], gradient, 1e-2)
            assert_close(before["first"] - model.first.weight.detach().flatten(1), V[:, :-1], 1e-8)
        expected = None
    assert {n: p.stride() for n, p in model.named_parameters()} == strides


def test_broadcast_gradients_are_read_in_full():
    """The gradient of a sum is an expanded scalar, without memory of its own."""
    model, x = seeded_build(lambda: nn.Linear(4, 3)), noise(5, 4)
    opt = plain_kfac(model)
    model(x).sum().backward()
    opt.step()
    B = opt.state[model.weight]["factor_g"]
    assert_close(B, torch.full((3, 3), 25.0, dtype=torch.float64))


def test_single_example_and_single_position():
    model, (x, y) = convnet(), images(1, size=(4, 4))
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    assert_factors(captured(model, x, y), expected)


def test_an_empty_batch_changes_nothing():
    """The last batch of a filtered loader may have no example at all."""
    model = mlp()
    opt = plain_kfac(model, lr=0.1)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held, values = all_factors(opt, model), [p.detach().clone() for p in model.parameters()]
    opt.zero_grad()
    model(noise(0, 4)).sum().backward()
    opt.step()
    assert_same_factors(opt, model, held)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), values, strict=True))


def test_a_forward_that_raised_leaves_nothing_behind():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            z = torch.tanh(self.first(x))
            if len(x) > 6:
                raise ValueError("too long")
            return self.second(z)

    x, y = vectors()
    expected = expected_factors(seeded_build(Picky), x, y, F.cross_entropy)
    for by_parts in (False, True):
        model = seeded_build(Picky)
        opt = plain_kfac(model)
        with pytest.raises(ValueError, match="too long"):
            model(vectors(9)[0])
        output = model.second(torch.tanh(model.first(x))) if by_parts else model(x)
        F.cross_entropy(output, y).backward()
        opt.step()
        assert_factors(all_factors(opt, model), expected)


@pairs(approx=APPROXIMATIONS, reentrant=[False, True], sizes=[[5], [4, 1]])
def test_the_whole_model_checkpointed(approx, reentrant, sizes):
    x, y = noise(5, 4, 3), vectors(5)[1]

    def build():
        return seeded_build(lambda: Tokens("mean"))

    expected = expected_factors(build(), x, y, F.cross_entropy, approx=approx)
    model = build()
    opt = plain_kfac(model, approx=approx)
    outputs = [checkpoint(model, part.clone().requires_grad_(), use_reentrant=reentrant) for part in x.split(sizes)]
    F.cross_entropy(torch.cat(outputs), y).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


class Recursive(nn.Module):
    """Layers before, inside and behind its call of itself."""

    def __init__(self, recursive: bool) -> None:
        super().__init__()
        self.down, self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.recursive = recursive

    def forward(self, x, depth=2, outermost=True):
        if self.recursive:
            x = torch.tanh(self.down(x))
            x = self(x, depth - 1, outermost=False) if depth else x
            x = torch.tanh(self.up(x))
        else:
            for layer in [self.down] * (depth + 1) + [self.up] * (depth + 1):
                x = torch.tanh(layer(x))
        return self.head(x).mean(1) if outermost else x


@approximations
def test_a_model_that_calls_itself(approx):
    x, y = data(True)
    expected = expected_factors(seeded_build(lambda: Recursive(False)), x, y, F.cross_entropy, approx=approx)
    model = seeded_build(lambda: Recursive(True))
    opt = plain_kfac(model, approx=approx, factor_decay=0.0)
    for _ in range(2):
        model.load_state_dict(seeded_build(lambda: Recursive(True)).state_dict())
        train_step(opt, model, x, y, F.cross_entropy)
        assert_factors(all_factors(opt, model), expected)


@dataclass
class Output:
    mask: Tensor
    logits: Tensor


class Dressed(nn.Module):
    """Takes and returns containers; ``body`` may be recomputed in backward."""

    def __init__(self, output: str = "tensor", reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.output, self.reentrant = output, reentrant

    def middle(self, x):
        return torch.tanh(self.body(x))

    def forward(self, batch):
        x = batch if isinstance(batch, Tensor) else batch["x"]
        x = x[0] if isinstance(x, list) else x
        z = torch.tanh(self.first(x))
        z = checkpoint(self.middle, z, use_reentrant=True) if self.reentrant else self.middle(z)
        z = self.head(z.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)
        if self.output == "tensor":
            return z
        mask = torch.ones(7, 2)
        return (mask, z) if self.output == "tuple" else Output(mask, z)


@each(approx=APPROXIMATIONS, output=["tuple", "dataclass"])
def test_recomputed_layers_find_their_forward_behind_a_structured_output(approx, output):
    (xa, ya), (xb, yb) = data(True, 4), data(True, 2, seed=1)
    x, y = torch.cat([xa, xb]), torch.cat([ya, yb])
    expected = expected_factors(seeded_build(Dressed), x, y, F.cross_entropy, approx=approx)
    model = seeded_build(lambda: Dressed(output, reentrant=True))
    opt = plain_kfac(model, approx=approx)
    outputs = model(xa), model(xb)
    logits = [o[1] if output == "tuple" else o.logits for o in outputs]
    sum(F.cross_entropy(z, t, reduction="sum") / 6 for z, t in zip(logits, (ya, yb), strict=True)).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


@each(approx=APPROXIMATIONS, container=[dict, UserDict])
def test_a_mapping_is_counted_by_its_first_tensor(approx, container):
    """The read-out sees rows flattened from examples and positions: alone it would count three times too many."""
    x, y = data(True)
    expected = expected_factors(seeded_build(Dressed), x, y, F.cross_entropy, approx=approx)
    model = seeded_build(Dressed)
    batch = container(name="batch", x=[x] if container is dict else x, other=noise(2, 9))
    assert_factors(captured(model, batch, y, approx=approx), expected)


@each(approx=APPROXIMATIONS, part=["one layer", "all"])
def test_freezing_for_a_forward_between_two_micro_batches(approx, part):
    x, y = vectors()
    expected = expected_factors(mlp((4, 5, 6, 3)), x, y, F.cross_entropy, approx=approx)
    model = mlp((4, 5, 6, 3))
    opt = plain_kfac(model, approx=approx)
    frozen = model[2] if part == "one layer" else model
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        backward(model, a, b, F.cross_entropy, 0.5)
        frozen.requires_grad_(False)
        model(vectors(9, seed=5)[0])
        frozen.requires_grad_(True)
    opt.step()
    assert_factors(all_factors(opt, model), expected)
