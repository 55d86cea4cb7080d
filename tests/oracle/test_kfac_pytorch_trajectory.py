"""The function on the page about migrating from kfac-pytorch against that program's algorithm, over several steps.

The oracle applies its definitions to one example after the other: covariances over all positions of the inputs and of
the gradients of the mean loss, divided by the number of pixels; running averages that start at the identity; λ added to
the eigenvalues of ``G ⊗ A``; one clip for all layers, with its own rate; and torch's SGD on the new gradients.
"""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from secondorder import KFAC, ParamScheduler
from tests.support.code_blocks import DOCS, run
from tests.support.kfac import assert_close
from tests.support.models import images, seeded_build
from tests.support.oracles.kfac import Rows, example_rows, layer_gradient, solve_exact

#: The micro-batches of a step.
Parts = list[tuple[Tensor, Tensor]]

LAYERS = ["first", "second", "tokens", "out"]
BATCHES = [images(4, size=(7, 6), seed=seed) for seed in range(6)]


class Mixed(nn.Module):
    """Two convolutions, a linear layer on positions and one on examples, and a norm that has no factors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.second = nn.Conv2d(3, 4, (2, 1), bias=False)
        self.tokens = nn.Linear(4, 3)
        self.out = nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.norm(self.first(x))))
        x = self.tokens(torch.tanh(x).flatten(2).transpose(1, 2))
        return self.out(torch.tanh(x).flatten(1))


class Oracle:
    """The preconditioner of kfac-pytorch, which replaces the gradients of a model.

    Args:
        model: The model.
        names: Its layers with factors.
        options: The arguments of the preconditioner.
    """

    def __init__(self, model: nn.Module, names: list[str], **options: float) -> None:
        self.layers = {name: model.get_submodule(name) for name in names}
        self.model, self.options, self.steps = model, options, 0
        self.running = {name: identities(layer) for name, layer in self.layers.items()}
        self.inverted, self.scales = self.running, []

    def observe(self, parts: Parts) -> None:
        """Update the running averages with the mean over micro-batches, whose losses are divided by their number."""
        if self.steps % self.options["factor_update_steps"]:
            return
        rows = [example_rows(self.model, list(self.layers), x, y, mean_loss(parts)) for x, y in parts]
        decay = self.options["factor_decay"]
        for name, old in self.running.items():
            found = [covariances(self.layers[name], own[name]) for own in rows]
            means = [sum(some) / len(parts) for some in zip(*found, strict=True)]
            self.running[name] = tuple(decay * x + (1 - decay) * new for x, new in zip(old, means, strict=True))

    def step(self) -> None:
        """Replace the gradients by the preconditioned ones, scaled by the clip."""
        if self.steps % self.options["inv_update_steps"] == 0:
            self.inverted = dict(self.running)
        products, found = [], {}
        for name, layer in self.layers.items():
            A, G = self.inverted[name]
            found[name] = solve_exact(G, A, layer_gradient(layer), self.options["damping"])
            products.append(float((found[name] * layer_gradient(layer)).sum()))
        bound = self.options["kl_clip"] / abs(sum(products) * self.options["lr"] ** 2)
        self.scales.append(min(1.0, math.sqrt(bound)))
        for name, layer in self.layers.items():
            write(layer, self.scales[-1] * found[name])
        self.steps += 1


def identities(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """A and G before the first batch."""
    sizes = layer.weight[0].numel() + (layer.bias is not None), len(layer.weight)
    return tuple(torch.eye(size, dtype=torch.float64) for size in sizes)


def covariances(layer: nn.Module, rows: Rows) -> tuple[Tensor, Tensor]:
    """A and G of a batch: means over all positions, with the gradients of the mean loss."""
    pixels = rows.a[0].shape[1] if isinstance(layer, nn.Conv2d) else 1
    a, g = torch.cat(rows.a, 1)[0] / pixels, torch.cat(rows.g, 1)[0] / len(rows.g) / pixels
    return a.T @ a / len(a), g.T @ g / len(g)


def mean_loss(parts: Parts) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a micro-batch, whose gradients are accumulated."""
    return lambda outputs, targets: F.cross_entropy(outputs, targets) / len(parts)


def write(layer: nn.Module, direction: Tensor) -> None:
    """Write a direction ``[W | b]`` to the gradients of a layer."""
    if layer.bias is not None:
        direction, layer.bias.grad = direction[:, :-1], direction[:, -1].clone()
    layer.weight.grad = direction.reshape(layer.weight.shape).clone()


def backward(opt: Optimizer, model: nn.Module, parts: Parts) -> None:
    """Accumulate the gradients of a step."""
    opt.zero_grad()
    for x, y in parts:
        mean_loss(parts)(model(x), y).backward()


def compare(model: nn.Module, opt: KFAC, oracle: Oracle, theirs: Optimizer, batches: list[Parts]) -> Iterator[float]:
    """Take steps with the oracle and with the package, each on its own model, and yield the scale of each clip."""
    for parts in batches:
        oracle.observe(parts)
        backward(theirs, oracle.model, parts)
        oracle.step()
        theirs.step()
        backward(opt, model, parts)
        opt.step()
        for (name, p), q in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
            assert_close(p.detach(), q.detach(), 1e-10, name)
        assert opt.diagnostics()["kl_clip_factor"] == pytest.approx(oracle.scales[-1], rel=1e-9)
        yield oracle.scales[-1]


def course(step: int) -> float:
    """Factor of the learning rate."""
    return 1 / (1 + step)


@pytest.fixture(scope="module")
def like_kfac_pytorch() -> Callable[..., KFAC]:
    """The function of the page."""
    return run(DOCS / "migrating" / "kfac-pytorch.md", set())["like_kfac_pytorch"]


#: Arguments of the preconditioner by case, with those of SGD, the micro-batches of a step and whether the clip acts.
THEIRS = {
    "damping": 1e-3,
    "factor_decay": 0.95,
    "kl_clip": 1e-3,
    "lr": 0.1,
    "factor_update_steps": 1,
    "inv_update_steps": 1,
}
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.05}
CASES = {
    "defaults": ({}, {}, 1, {True}),
    "momentum and decay": ({"kl_clip": 1e-2}, MOMENTUM, 1, {True, False}),
    "no clip": ({"kl_clip": 1e9}, {"momentum": 0.9, "nesterov": True}, 1, {False}),
    "stale inverses": ({"damping": 1e-5, "inv_update_steps": 2}, MOMENTUM, 1, {True}),
    "stale factors": (
        {"factor_decay": 0.5, "lr": 0.02, "factor_update_steps": 2, "inv_update_steps": 2}, MOMENTUM, 1, {True, False}
    ),
    "micro-batches": ({"kl_clip": 1e-2, "inv_update_steps": 2}, MOMENTUM, 2, {True, False}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_trajectory_is_that_of_kfac_pytorch(case: str, like_kfac_pytorch: Callable[..., KFAC]) -> None:
    changes, sgd, count, clips = CASES[case]
    model, options = seeded_build(Mixed), {**THEIRS, **changes}
    oracle = Oracle(copy.deepcopy(model), LAYERS, **options)
    theirs = torch.optim.SGD(oracle.model.parameters(), 0.05, **sgd)
    own = {"kl_clip_lr": options.pop("lr"), **options, **sgd}
    opt = like_kfac_pytorch(model, BATCHES[0][0][:3], 4, 0.05, **own)
    batches = [list(zip(x.chunk(count), y.chunk(count), strict=True)) for x, y in BATCHES]
    assert {scale < 1 for scale in compare(model, opt, oracle, theirs, batches)} == clips


def test_the_rate_of_the_clip_may_differ_from_a_scheduled_one(like_kfac_pytorch: Callable[..., KFAC]) -> None:
    """The rate of SGD falls, but that of the clip stays, so κ follows the square of the rate."""
    model = seeded_build(Mixed)
    oracle = Oracle(copy.deepcopy(model), LAYERS, **THEIRS)
    theirs = torch.optim.SGD(oracle.model.parameters(), 0.05, momentum=0.9)
    opt = like_kfac_pytorch(model, BATCHES[0][0], 4, 0.05, momentum=0.9)
    schedules = [LambdaLR(theirs, course), LambdaLR(opt, course)]
    clip = ParamScheduler(opt, kl_clip=lambda step: THEIRS["kl_clip"] * (0.05 * course(step) / THEIRS["lr"]) ** 2)
    for _ in compare(model, opt, oracle, theirs, [[batch] for batch in BATCHES]):
        for schedule in (*schedules, clip):
            schedule.step()


def test_skipped_and_frozen_layers_follow_sgd(like_kfac_pytorch: Callable[..., KFAC]) -> None:
    """Rules are regular expressions for names and class names; a layer with a frozen part is skipped, too."""
    model = seeded_build(Mixed)
    model.tokens.bias.requires_grad_(False)
    oracle = Oracle(copy.deepcopy(model), ["second"], **THEIRS)
    theirs = torch.optim.SGD(oracle.model.parameters(), 0.05)
    opt = like_kfac_pytorch(model, BATCHES[0][0], 4, 0.05, skip_layers=["irs", "^out$", "Norm"])
    assert len([*compare(model, opt, oracle, theirs, [[batch] for batch in BATCHES[:2]])]) == 2
