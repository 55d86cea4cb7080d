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
    labels,
    layer_state,
    noise,
    plain_kfac,
    train_step,
)
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import reused
from tests.support.oracles.kfac import expected_factors, solve_exact

APPROXIMATIONS = ["expand", "reduce"]


def data(tokens: bool = False, n: int = 6, seed: int = 0):
    x, y = vectors(n, seed=seed)
    return (noise(n, 3, 4, seed=seed), y) if tokens else (x, y)


class Residual(nn.Module):
    """In-place arithmetic on a layer's output."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.second, self.plain = nn.Linear(4, 4), nn.Linear(4, 4), plain

    def forward(self, x):
        z = self.second(torch.tanh(self.first(x)))
        if self.plain:
            return (z + x) * 2.0
        z += x
        z *= 2.0
        return z


class Overwriting(nn.Module):
    """Changes its layers' outputs in place through views of them."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.second, self.plain = nn.Linear(4, 4), nn.Linear(4, 3), plain

    def forward(self, x):
        z = self.first(x)
        if self.plain:
            z = z * torch.tensor([0.0, 2.0, 1.0, 1.0], dtype=x.dtype)
        else:
            z[..., 0] = 0.0
            z[..., 1].mul_(2.0)
        out = self.second(torch.tanh(z))
        return out.mean(1) if out.ndim == 3 else out


class Recursive(nn.Module):
    """Layers before, inside and behind its call of itself."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.down, self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.plain = plain

    def forward(self, x, depth=2, outermost=True):
        if self.plain:
            for layer in [self.down] * (depth + 1) + [self.up] * (depth + 1):
                x = torch.tanh(layer(x))
        else:
            x = torch.tanh(self.down(x))
            x = self(x, depth - 1, outermost=False) if depth else x
            x = torch.tanh(self.up(x))
        return self.head(x).mean(1) if outermost else x


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


class Segmented(nn.Module):
    """A sequence that is checkpointed in segments."""

    def __init__(self, plain: bool, reentrant: bool) -> None:
        super().__init__()
        self.body, self.plain, self.reentrant = mlp((4, 5, 6, 5, 3)), plain, reentrant

    def forward(self, x):
        if self.plain:
            return self.body(x)
        return checkpoint_sequential(self.body, 3, x.clone().requires_grad_(), use_reentrant=self.reentrant)


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


def mapped(container: type, x: Tensor):
    """The read-out sees rows flattened from examples and positions: alone it would count three times too many."""
    return container(name="batch", x=[x] if container is dict else x, other=noise(2, 9))


def strided(x: Tensor) -> list[Tensor]:
    return [x[::1], x.repeat_interleave(2, 2)[..., ::2], x.permute(2, 1, 0).contiguous().permute(2, 1, 0)]


X, TOKENS, LAYOUT = noise(6, 4), noise(6, 3, 4), noise(6, 3, 5)
IN_PLACE = nn.ReLU(inplace=True)
# name: the model by whether it is plain, inputs of the plain one, inputs of the other, regression instead of classes
FORMS = {
    "in-place": (lambda plain: reused(inplace=not plain), X, X),
    "in-place, tokens": (lambda plain: reused(inplace=not plain, tokens=True), TOKENS, TOKENS),
    "in-place, images": (
        lambda plain: convnet(activation=nn.ReLU() if plain else IN_PLACE),
        images(6)[0],
        images(6)[0],
    ),
    "in-place arithmetic": (Residual, X, X),
    "into a slice": (Overwriting, X, X),
    "into a slice, tokens": (Overwriting, TOKENS, TOKENS),
    "calls itself": (Recursive, TOKENS, TOKENS),
    **{f"layout {i}": (Transposing, LAYOUT, x) for i, x in enumerate(strided(LAYOUT))},
    "segments": (lambda plain: Segmented(plain, False), X, X),
    "segments, reentrant": (lambda plain: Segmented(plain, True), X, X),
    "dictionary": (lambda plain: Dressed(), TOKENS, mapped(dict, TOKENS)),
    "mapping": (lambda plain: Dressed(), TOKENS, mapped(UserDict, TOKENS)),
    "three calls": (lambda plain: reused(repeat=3, tokens=True), TOKENS, TOKENS),
    "one example, one position": (lambda plain: convnet(), images(1, size=(4, 4))[0], images(1, size=(4, 4))[0]),
}


@pairs(approx=APPROXIMATIONS, form=FORMS.keys())
def test_factors_are_those_of_the_plain_form(approx, form):
    build, x, given = FORMS[form]
    plain = seeded_build(lambda: build(True))
    output = plain(x)
    y, loss = (labels(len(x), 3), F.cross_entropy) if output.shape[1] == 3 else (noise(*output.shape), F.mse_loss)
    expected = expected_factors(plain, x, y, loss, approx=approx)
    model = seeded_build(lambda: build(False))
    opt = plain_kfac(model, approx=approx, lr=0.0)
    for updates in (1, 2):
        train_step(opt, model, given, y, loss)
        assert_factors(all_factors(opt, model), expected)
        assert {layer_state(opt, model, name)["factor_updates"] for name in expected} == {updates}


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


@pytest.mark.parametrize("between", [True, False], ids=["between", "after the backward"])
def test_zero_grad_discards_the_statistics_of_the_gradients_and_no_others(between):
    """Of the model too, as trainers call it: no gradient left at the next forward means that its statistics go too.

    Between forward and backward it loses nothing.
    """
    x, y = vectors(seed=1)
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    for which, none in (("opt", True), ("opt", False), ("model", True), *([("model", False)] if between else [])):
        model = mlp()
        opt = plain_kfac(model)
        zero = opt.zero_grad if which == "opt" else model.zero_grad
        if not between:
            backward(model, *vectors(9), F.cross_entropy)
            zero(set_to_none=none)
        value = F.cross_entropy(model(x), y)
        if between:
            zero(set_to_none=none)
        value.backward()
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


@pytest.mark.parametrize("split", [[8], [3, 5]], ids=str)
def test_experts_divide_their_inputs_by_their_rows_and_gradients_by_all_examples(split):
    """An example that does not reach a layer has no row there, and no gradient: B counts it, A cannot."""
    x, y = vectors(8, seed=3)
    assert 0 < int((x[:, 0] > 0).sum()) < 8
    expected = expected_factors(seeded_build(Experts), x, y, F.cross_entropy)
    model = seeded_build(Experts)
    opt = plain_kfac(model)
    for a, b in zip(x.split(split), y.split(split), strict=True):
        backward(model, a, b, lambda o, t: F.cross_entropy(o, t, reduction="sum") / 8)
    opt.step()
    assert_factors(all_factors(opt, model), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["model and data", "data only"])
def test_channels_last(whole):
    x, y = images()
    expected = expected_factors(convnet(padding=1), x, y, F.cross_entropy)
    model = convnet(padding=1)
    if whole:
        model = model.to(memory_format=torch.channels_last)
    strides = {n: p.stride() for n, p in model.named_parameters()}
    opt = plain_kfac(model, momentum=0.9)
    backward(model, x.to(memory_format=torch.channels_last), y, F.cross_entropy)
    for name, (gradient, V) in directions(opt, model).items():
        assert_close(V, solve_exact(expected[name][1], expected[name][0], gradient, 1e-2), 1e-8, name)
    assert_factors(all_factors(opt, model), expected)
    assert {n: p.stride() for n, p in model.named_parameters()} == strides


def test_broadcast_gradients_are_read_in_full():
    """The gradient of a sum is an expanded scalar, without memory of its own."""
    model, x = seeded_build(lambda: nn.Linear(4, 3)), noise(5, 4)
    opt = plain_kfac(model)
    model(x).sum().backward()
    opt.step()
    B = opt.state[model.weight]["factor_g"]
    assert_close(B, torch.full((3, 3), 25.0, dtype=torch.float64))


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
