"""Whatever a model does around its layers, the factors are those of the same mathematics written plainly.

The expected values come from per-example autograd on the plain form, so the split into calls and the number of
examples are checked, and not only that two runs of the same code are equal.
"""

from collections import UserDict
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.grid import each, pairs
from tests.support.kfac import (
    accumulate,
    all_factors,
    assert_captures,
    assert_factors,
    assert_same_factors,
    backward,
    labels,
    layer_state,
    noise,
    plain_kfac,
    train_step,
)
from tests.support.models import Net, Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import reused
from tests.support.oracles.kfac import expected_factors
from tests.support.tasks import assert_identical, values

APPROXIMATIONS = ["expand", "reduce"]


def overwriting(plain: bool) -> Net:
    """Changes its layers' outputs in place, also through views of them."""

    def forward(net, x):
        z = net.first(x)
        if plain:
            z = (z * torch.tensor([0.0, 2.0, 1.0, 1.0], dtype=x.dtype) + x) * 2.0
        else:
            z[..., 0] = 0.0
            z[..., 1].mul_(2.0)
            z += x
            z *= 2.0
        out = net.second(torch.tanh(z))
        return out.mean(1) if out.ndim == 3 else out

    return Net(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 3))


def recursive(plain: bool) -> Net:
    """Has layers before, inside and after its call of itself."""

    def forward(net, x, depth=2, outermost=True):
        if plain:
            for layer in [net.down] * (depth + 1) + [net.up] * (depth + 1):
                x = torch.tanh(layer(x))
        else:
            x = torch.tanh(net.down(x))
            x = net(x, depth - 1, outermost=False) if depth else x
            x = torch.tanh(net.up(x))
        return net.head(x).mean(1) if outermost else x

    return Net(forward, down=nn.Linear(4, 4), up=nn.Linear(4, 4), head=nn.Linear(4, 3))


def transposing(plain: bool) -> Net:
    """Feeds its layers views with odd strides, and reads its outputs through others."""

    def forward(net, x):
        z = net.first(x.transpose(1, 2).contiguous() if plain else x.transpose(1, 2))  # [N, 5, 4]
        z = torch.tanh(z).transpose(1, 2)
        z = net.second(z.contiguous() if plain else z)  # [N, 4, 2]
        return z.permute(2, 0, 1).sum(2).T  # gradients arrive expanded

    return Net(forward, first=nn.Linear(3, 4), second=nn.Linear(5, 2))


@dataclass
class Output:
    mask: Tensor
    logits: Tensor


class Containers(nn.Module):
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
        mask = torch.ones(7, 2)
        forms = {"tensor": z, "tuple": (mask, z), "dataclass": Output(mask, z)}
        return {**forms, "attributes": SimpleNamespace(mask=mask, logits=z)}[self.output]


def mapped(container: type, x: Tensor):
    """The head sees rows flattened from examples and positions: by itself it would count three times too many."""
    return container(name="batch", x=[x] if container is dict else x, other=noise(2, 9))


def strided(x: Tensor) -> list[Tensor]:
    return [x[::1], x.repeat_interleave(2, 2)[..., ::2], x.permute(2, 1, 0).contiguous().permute(2, 1, 0)]


def last(plain: bool) -> nn.Module:
    return convnet(padding=1).to(memory_format=torch.contiguous_format if plain else torch.channels_last)


X, TOKENS, LAYOUT, IMAGES = noise(6, 4), noise(6, 3, 4), noise(6, 3, 5), images(6)[0]
# build(is_plain), inputs of the plain model, inputs of the other one
FORMS = {
    "in-place": (lambda plain: reused(inplace=not plain), X, X),
    "in-place, tokens": (lambda plain: reused(inplace=not plain, tokens=True), TOKENS, TOKENS),
    "in-place, images": (lambda plain: convnet(activation=nn.ReLU(inplace=not plain)), IMAGES, IMAGES),
    "into a slice": (overwriting, X, X),
    "into a slice, tokens": (overwriting, TOKENS, TOKENS),
    "calls itself": (recursive, TOKENS, TOKENS),
    **{f"layout {i}": (transposing, LAYOUT, x) for i, x in enumerate(strided(LAYOUT))},
    "dictionary": (lambda plain: Containers(), TOKENS, mapped(dict, TOKENS)),
    "mapping": (lambda plain: Containers(), TOKENS, mapped(UserDict, TOKENS)),
    "three calls": (lambda plain: reused(repeat=3, tokens=True), TOKENS, TOKENS),
    "one example, one position": (lambda plain: convnet(), images(1, size=(4, 4))[0], images(1, size=(4, 4))[0]),
    "channels last": (last, IMAGES, IMAGES.to(memory_format=torch.channels_last)),
    "channels last, data only": (lambda plain: last(True), IMAGES, IMAGES.to(memory_format=torch.channels_last)),
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
def test_in_place_relu_after_an_unbatched_convolution(bias):
    """The output of the convolution is a view, like that of a Linear on 3-D input."""
    found = []
    for relu in (nn.ReLU(), nn.ReLU(inplace=True)):
        model = seeded_build(lambda: nn.Sequential(nn.Conv2d(2, 3, 2, bias=bias), relu))  # noqa: B023
        opt = plain_kfac(model)
        train_step(opt, model, noise(2, 5, 4), noise(3, 4, 3, seed=1), F.mse_loss)
        found.append(all_factors(opt, model))
    assert_factors(found[1], found[0])
    assert float(found[0]["0"][1].abs().max()) > 0


class Recomputed(Tokens):
    """A model that is recomputed in backward as a whole."""

    reentrant = False

    def __call__(self, x):
        return checkpoint(super().__call__, x.clone().requires_grad_(), use_reentrant=self.reentrant)


@pairs(
    lambda mode, repeat, inplace, **_: not mode.startswith("whole") or (repeat == 1 and not inplace),
    approx=APPROXIMATIONS,
    mode=["plain", "reentrant", "non-reentrant", "function", "whole, reentrant", "whole, non-reentrant"],
    repeat=[1, 2], inplace=[False, True], sizes=[[7], [4, 1, 2]],
)  # fmt: skip
def test_micro_batches_and_activation_checkpointing(approx, mode, repeat, inplace, sizes):
    x, y = noise(7, 3, 4), labels(7, 3)
    if mode.startswith("whole"):
        model = seeded_build(lambda: Recomputed("mean", d=4))
        model.reentrant = mode == "whole, reentrant"
        plain, layer = seeded_build(lambda: Tokens("mean", d=4)), "inner"
    else:
        model = reused(tokens=True, repeat=repeat, mode=mode, inplace=inplace)
        plain, layer = reused(tokens=True, repeat=repeat), "middle"
    opt = assert_captures(model, plain, x, y, lambda model: accumulate(model, x, y, sizes), approx=approx)
    assert layer_state(opt, model, layer)["factor_updates"] == 1


#: The plain form, the form that is trained, and a function from its output to the logits.
#: The plain form, the form that is trained, and a function from its output to the logits.
TWO_FORWARDS = {
    "plain": (mlp, mlp, lambda f: f),
    **{mode: (reused, partial(reused, mode=mode), lambda f: f) for mode in ("reentrant", "non-reentrant", "function")},
    "tuple": (Containers, lambda: Containers("tuple", reentrant=True), lambda f: f[1]),
    "dataclass": (Containers, lambda: Containers("dataclass", reentrant=True), lambda f: f.logits),
    "attributes": (Containers, lambda: Containers("attributes", reentrant=True), lambda f: f.logits),
}


@pairs(
    lambda approx, kind, **_: approx == "expand" or kind[0] is Containers, approx=APPROXIMATIONS, kind=TWO_FORWARDS,
    order=["one backward", "in order", "reversed"],
)  # fmt: skip
def test_two_forwards_before_the_backward(approx, kind, order):
    """Their sizes differ, as in training a discriminator; recomputed layers belong to their own forward."""
    plain, build, logits = kind
    x, y = noise(6, 3, 4) if plain is Containers else noise(6, 4), labels(6, 3)

    def run(model):
        parts = zip((model(x[:4]), model(x[4:])), y.split([4, 2]), strict=True)
        losses = [F.cross_entropy(logits(output), target, reduction="sum") / 6 for output, target in parts]
        for value in {"one backward": [sum(losses)], "in order": losses, "reversed": losses[::-1]}[order]:
            value.backward()

    assert_captures(seeded_build(build), seeded_build(plain), x, y, run, approx=approx)


def test_zero_grad_discards_the_statistics_of_the_gradients_and_no_others():
    """So does that of the model, which trainers call; between forward and backward, nothing is lost."""
    x, y = vectors(seed=1)
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    for which, none, between in product(("opt", "model"), (True, False), (True, False)):
        if (which, none, between) == ("model", False, False):  # zeros in .grad: the statistics stay
            continue
        model = mlp()
        opt = plain_kfac(model)
        zero = partial(opt.zero_grad if which == "opt" else model.zero_grad, set_to_none=none)
        if not between:
            backward(model, *vectors(9), F.cross_entropy)
            zero()
        value = F.cross_entropy(model(x), y)
        if between:
            zero()
        value.backward()
        opt.step()
        assert_factors(all_factors(opt, model), expected)


def test_a_step_without_zero_grad_resets_the_statistics():
    """Pending sums belong to one step, even if the user keeps accumulating into .grad."""
    model, (x, y) = mlp(), vectors(seed=1)
    opt = plain_kfac(model, lr=0.0, factor_decay=0.0)
    for batch in (vectors(), (x, y)):
        backward(model, *batch, F.cross_entropy)
        opt.step()
    assert_factors(all_factors(opt, model), expected_factors(mlp(), x, y, F.cross_entropy))


def test_an_empty_batch_changes_nothing():
    """The last batch of a filtered loader may have no example at all."""
    model = mlp()
    opt = plain_kfac(model, lr=0.1)
    train_step(opt, model, *vectors(), F.cross_entropy)
    held, before = all_factors(opt, model), values(model)
    train_step(opt, model, noise(0, 4), None, lambda output, _: output.sum())
    assert_same_factors(opt, model, held)
    assert_identical(values(model), before)


@pytest.mark.parametrize("by_parts", [False, True])
def test_a_forward_that_raised_leaves_nothing_behind(by_parts):
    def refuse(module, args):
        if len(args[0]) > 6:
            raise ValueError("too long")

    def run(model):
        model[1].register_forward_pre_hook(refuse)
        with pytest.raises(ValueError, match="too long"):
            model(vectors(9)[0])
        output = model[2](torch.tanh(model[0](x))) if by_parts else model(x)
        F.cross_entropy(output, y).backward()

    x, y = vectors()
    assert_captures(mlp(), mlp(), x, y, run)


@each(approx=APPROXIMATIONS, part=["one layer", "all"])
def test_freezing_for_a_forward_between_two_micro_batches(approx, part):
    def run(model):
        frozen = model[2] if part == "one layer" else model
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            backward(model, a, b, F.cross_entropy, 0.5)
            frozen.requires_grad_(False)
            model(vectors(9, seed=5)[0])
            frozen.requires_grad_(True)

    (x, y), widths = vectors(), (4, 5, 6, 3)
    assert_captures(mlp(widths), mlp(widths), x, y, run, approx=approx)
