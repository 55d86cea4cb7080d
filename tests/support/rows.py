"""Runs of HyLo whose ranks have batches of any size, and the same runs in one process."""

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secondorder import HyLo
from secondorder.linalg import selection
from tests.support.building import built
from tests.support.oracles.hylo import layer_rows
from tests.support.oracles.ranks import CLASSES, STRATEGIES, TASKS, TOKENS, WIDTH, flat, mean_loss, shard
from tests.support.pool import device_of

STEPS = 10
SETTINGS = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "update_steps": 3}


@dataclass
class Case:
    """A trajectory on several ranks, or in one process."""

    task: str = "mlp"
    keywords: Mapping[str, Any] = field(default_factory=lambda: {"mode": "sngd"})  # in addition to `SETTINGS`
    sizes: tuple[int, ...] | None = None  # of the shards, which are equal by default
    steps: int = STEPS
    batches: int = 1  # number of batches of the task that are joined for a step

    def model(self) -> nn.Module:
        return TASKS[self.task].model()

    def build(self, model: nn.Module, comm: Any = None) -> HyLo:
        return built(HyLo, model, comm=comm, **{**SETTINGS, **self.keywords})

    def shards(self, step: int, world: int) -> list[tuple[Tensor, Tensor]]:
        parts = [TASKS[self.task].batch(self.batches * step + i) for i in range(self.batches)]
        batch = torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])
        return [shard(batch, rank, world, self.sizes) for rank in range(world)]

    def backward(self, model: nn.Module, batch: tuple[Tensor, Tensor], rank: int, weight: float = 1.0) -> None:
        """Backward pass of the mean loss of a shard, times its weight."""
        inputs, targets = batch
        if not len(inputs):
            return
        if self.task == "lengths":  # the length of sentences differs between ranks
            inputs = inputs[:, : rank + 1].repeat(1, 3) if rank else inputs[:, :1]
            targets = targets[:, :1].expand(inputs.shape)
        outputs = model(inputs, rank == 0) if self.task == "branches" else model(inputs)
        (weight * mean_loss(outputs, targets)).backward()


class Branches(nn.Module):
    """A network with a layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.sometimes = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        return self.head(hidden + torch.tanh(self.sometimes(hidden)) if branch else hidden)


def lengths() -> nn.Module:
    """A network for sentences of any length."""
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def groups() -> nn.Module:
    """A convolution with two groups, and a normalization."""
    layers = OrderedDict(conv=nn.Conv2d(2, 6, 3, padding=1, groups=2), norm=nn.GroupNorm(3, 6), tanh=nn.Tanh())
    return nn.Sequential(
        layers | OrderedDict(mean=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(6, CLASSES))
    )


TASKS |= {
    "branches": replace(TASKS["mlp"], build=Branches),
    "lengths": replace(TASKS["words"], build=lengths),
    "groups": replace(TASKS["cnn"], build=groups),
}


@contextmanager
def on_rank(
    case: Case, strategy: str, rank: int, world: int
) -> Iterator[tuple[nn.Module, HyLo, Callable[..., Tensor]]]:
    """A model, its optimizer, and a function that takes steps and returns the parameters after each ``[steps, P]``."""
    model = case.model().to(device_of(rank))
    with case.build(model, STRATEGIES[strategy]()) as optimizer:

        def go(*steps: int) -> Tensor:
            return torch.stack([own_step(model, optimizer, case, step, rank, world) for step in steps])

        yield model, optimizer, go


def on_ranks(rank: int, world: int, case: Case, strategies: Sequence[str]) -> list[Tensor]:
    """Trajectories ``[steps, P]`` under some strategies; gradients are weighted by the number of examples."""
    paths = []
    for strategy in strategies:
        with on_rank(case, strategy, rank, world) as (_, _, go):
            paths.append(go(*range(case.steps)))
    return paths


def own_step(model: nn.Module, optimizer: HyLo, case: Case, step: int, rank: int, world: int) -> Tensor:
    optimizer.zero_grad()
    shards = case.shards(step, world)
    inputs, targets = (t.to(device_of(rank)) for t in shards[rank])
    case.backward(model, (inputs, targets), rank)
    share = len(inputs) / sum(len(x) for x, _ in shards)
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad * share
        dist.all_reduce(p.grad)
    optimizer.step()
    return flat(model)


def in_one_process(case: Case, world: int) -> Tensor:
    """The trajectory of one process with one backward pass per shard."""
    model = case.model()
    optimizer = case.build(model)
    path = []
    for step in range(case.steps):
        optimizer.zero_grad()
        shards = case.shards(step, world)
        for rank, batch in enumerate(shards):
            case.backward(model, batch, rank, len(batch[0]) / sum(len(x) for x, _ in shards))
        optimizer.step()
        path.append(flat(model))
    return torch.stack(path)


# -------------------------------------------------------------- Rows that every rank chooses, and their dense matrices


def chosen_path(case: Case, world: int) -> Tensor:
    """The trajectory of KIS or KID on a stack of Linear layers, in one process that plays the role of all ranks."""
    model, settings = case.model(), {**SETTINGS, **case.keywords}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    descent = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=settings["momentum"])
    kept: dict[str, tuple[Tensor, Tensor, float]] = {}
    path = []
    for step in range(case.steps):
        shards = case.shards(step, world)
        total = sum(len(inputs) for inputs, _ in shards)
        gradients = {name: torch.zeros(1) for name in layers}
        of_ranks = [
            {name: layer_rows(model, name, inputs, targets, mean_loss)[0] for name in layers}
            for inputs, targets in shards
        ]
        for name in layers:
            rows = [found[name] / total**0.5 for found in of_ranks]
            gradients[name] = sum(found[name].sum(0) for found in of_ranks) / total
            if step % settings["update_steps"] == 0:
                kept[name] = choose(rows, name, step // settings["update_steps"], settings)
        for name, layer in layers.items():
            u, m, damping = kept[name]
            direction = (gradients[name] - u.T @ (m @ (u @ gradients[name]))) / damping
            matrix = direction.view(layer.out_features, layer.in_features + 1)
            layer.weight.grad, layer.bias.grad = matrix[:, :-1].clone(), matrix[:, -1].clone()
        descent.step()
        path.append(flat(model))
    return torch.stack(path)


def choose(rows: list[Tensor], name: str, refresh: int, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor, float]:
    """The kept rows of all ranks, M and λ, from rows that were divided by √N."""
    trace, total = sum(float(u.square().sum()) for u in rows), sum(len(u) for u in rows)
    damping = settings["damping"]
    if settings.get("damping_mode") == "relative":
        damping *= trace / total
    most = max(math.ceil(settings["rank_fraction"] * len(u)) for u in rows)
    most = min(most, max(1, settings.get("max_rank", 1024) // len(rows)))
    chosen, cores = [], []
    for rank, u in enumerate(rows):
        r = min(most, len(u))
        if settings["mode"] == "kis":
            generator = torch.Generator().manual_seed(seed_of(refresh, f"{name} on rank {rank}"))
            sampling = settings.get("kis_sampling", "systematic")
            drawn = selection.draw(u.square().sum(1), r, sampling, generator)
            chosen.append(u[drawn.index] * drawn.weight[:, None])
            cores.append(torch.eye(r, dtype=u.dtype) / damping)
            continue
        kernel = u @ u.T
        pivots = selection.interpolate(kernel, r).index
        p = torch.linalg.solve(kernel[pivots][:, pivots], kernel[pivots])
        rest = (kernel - p.T @ kernel[pivots]).diagonal().clamp(min=0)
        chosen.append(u[pivots])
        cores.append(p @ torch.diag(1 / (damping + rest)) @ p.T)
    together = torch.cat(chosen)
    inverse = torch.linalg.inv(torch.linalg.inv(torch.block_diag(*cores)) + together @ together.T)
    return together, inverse, damping


def seed_of(refresh: int, stream: str) -> int:
    """The seed of one draw, which depends on the refresh, the layer and the rank."""
    mixed = 0
    for part in (refresh, zlib.crc32(stream.encode())):
        mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
    return mixed
