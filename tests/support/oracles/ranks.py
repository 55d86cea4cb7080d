"""Tiny models in float64 with a batch for every step, and two ways to train them that must agree.

`alone` trains one process on whole batches, and `together` one of W ranks on its shards. Both return the parameters
after every step, flat ``[steps, P]``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, SparseMFAC, TopK, comm
from tests.support.building import built
from tests.support.pool import device_of

EXAMPLES = 12  # divides by 2, 3 and 4 ranks
CLASSES, TOKENS, LENGTH, WIDTH = 4, 6, 3, 4

Batch = tuple[Tensor, Tensor]


# --------------------------------------------------------------------------------------------------------------- Models


class Mlp(nn.Sequential):
    """Three layers, so that some of four ranks own none."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def cnn() -> nn.Module:
    layers = OrderedDict(first=nn.Conv2d(2, 3, 3, padding=1), tanh=nn.Tanh())
    layers |= OrderedDict(second=nn.Conv2d(3, 4, 2, stride=2, bias=False), tanh_2=nn.Tanh())
    return nn.Sequential(
        layers | OrderedDict(mean=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(4, CLASSES))
    )


class Words(nn.Module):
    """Embedding, normalization, Conv1d and Linear layers, and a bare parameter that no layer method covers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 2, padding=1)
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.norm(self.embed(tokens))))
        hidden = self.conv(hidden.mT).mT[:, :LENGTH]
        return self.head(torch.tanh(hidden) * self.gain)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.embed(inputs))
        return self.head(hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0])


def broad() -> nn.Module:
    """Layers with more columns than a batch has examples, so that their factors have null spaces."""
    layers = OrderedDict(conv=nn.Conv2d(2, 6, 3), tanh=nn.Tanh(), flat=nn.Flatten(), wide=nn.Linear(24, 20))
    return nn.Sequential(layers | OrderedDict(tanh_2=nn.Tanh(), head=nn.Linear(20, CLASSES)))


def mixed() -> nn.Module:
    """A convolution, which has many positions, and layers with one position."""
    layers = OrderedDict(conv=nn.Conv2d(2, 3, 3, padding=1), tanh=nn.Tanh(), mean=nn.AdaptiveAvgPool2d((2, 1)))
    layers |= OrderedDict(flat=nn.Flatten(), wide=nn.Linear(6, 5), tanh_2=nn.Tanh(), head=nn.Linear(5, CLASSES))
    return nn.Sequential(layers)


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(EXAMPLES, *shape, generator=generator, dtype=torch.float64)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(TOKENS, (EXAMPLES, LENGTH), generator=generator)


@dataclass(frozen=True)
class Task:
    """A model and a batch for every step; a loss per output position."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    positions: tuple[int, ...] = ()

    def model(self, device: torch.device | None = None) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self.build().to(device, torch.float64)

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = self.inputs(generator)
        return inputs, torch.randint(CLASSES, (EXAMPLES, *self.positions), generator=generator)


TASKS = {
    "mlp": Task(Mlp, _normal(5)), "cnn": Task(cnn, _normal(2, 4, 4)), "words": Task(Words, _tokens, (LENGTH,)),
    "broad": Task(broad, _normal(2, 4, 4)), "mixed": Task(mixed, _normal(2, 4, 4)),
    "attention": Task(Attention, _normal(LENGTH, 3), (LENGTH,)),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------- Methods and strategies

_KRONECKER = {"lr": 0.05, "momentum": 0.9, "damping": 0.05, "factor_update_steps": 2, "inv_update_steps": 4}
_ROWS = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "update_steps": 3}
_WINDOW = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "window_size": 6}

METHODS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "kfac_eigen": (KFAC, {**_KRONECKER, "inverse_method": "eigen"}),
    "kfac_cholesky": (KFAC, {**_KRONECKER, "inverse_method": "cholesky"}),
    "ekfac_running": (EKFAC, {**_KRONECKER, "estimator": "running"}),
    "ekfac_intra": (EKFAC, {**_KRONECKER, "estimator": "intra"}),
    "hylo_sngd": (HyLo, {**_ROWS, "mode": "sngd"}),
    "hylo_kid": (HyLo, {**_ROWS, "mode": "kid", "rank_fraction": 0.5}),
    "hylo_kis": (HyLo, {**_ROWS, "mode": "kis", "rank_fraction": 0.5}),
    "mfac": (MFAC, _WINDOW),
    "mfac_sparse": (SparseMFAC, {**_WINDOW, "compression": TopK(density=0.3, block_size=8)}),
    "ggt": (GGT, {"lr": 0.05, "momentum": 0.9, "eps": 0.1, "window_size": 6}),
}
LAYERWISE = [name for name, (cls, _) in METHODS.items() if cls in {KFAC, EKFAC, HyLo}]
WINDOWED = [name for name in METHODS if name not in LAYERWISE]

STRATEGIES: dict[str, Callable[..., Any]] = {
    "comm": comm.CommOpt, "mem": comm.MemOpt, "hybrid_half": partial(comm.HybridOpt, 0.5),
    "hybrid_third": partial(comm.HybridOpt, 1 / 3), "comm_owner": partial(comm.CommOpt, replicate_factors=False),
    "mem_replicated": partial(comm.MemOpt, replicate_factors=True), "local_factors": comm.LocalFactors,
    "chief": comm.ChiefOnly, "chief_inverses": partial(comm.ChiefOnly, deliver="inverses"),
    "chief_own": partial(comm.ChiefOnly, statistics="chief"),
}  # fmt: skip


def build(method: str, module: nn.Module, comm: Any = None, **keywords: Any) -> Any:
    """An optimizer on a module, which may be wrapped."""
    cls, settings = METHODS[method]
    return built(cls, module, comm=comm, **{**settings, **keywords})


# ------------------------------------------------------------------------------------------------------------- Training


def bounds(examples: int, world: int, sizes: tuple[int, ...] | None = None) -> list[tuple[int, int]]:
    """First and last example of each rank's shard; equal shards unless sizes are given."""
    ends = torch.tensor([0, *(sizes or [examples // world] * world)]).cumsum(0).tolist()
    assert ends[-1] == examples
    return list(zip(ends, ends[1:], strict=False))


def shard(batch: Batch, rank: int, world: int, sizes: tuple[int, ...] | None = None) -> Batch:
    """A rank's part of a batch."""
    first, last = bounds(len(batch[0]), world, sizes)[rank]
    return batch[0][first:last], batch[1][first:last]


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sum_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")


@dataclass
class Run:
    """The settings of a trajectory, the same for one process and for several ranks."""

    task: str = "mlp"
    method: str = "kfac_eigen"
    keywords: Mapping[str, Any] = field(default_factory=dict)  # in addition to those of `METHODS`
    steps: int = 20
    micro: int = 1  # number of micro-batches per step; the ranks only communicate in the last one
    sizes: tuple[int, ...] | None = None  # of the ranks' shards, which are equal by default
    loss: Callable[[Tensor, Tensor], Tensor] = mean_loss
    poison: int | None = None  # the step whose batch contains a NaN
    sync: bool = False  # whether FSDP reduces gradients after every micro-batch, and not only after the last one

    def batch(self, step: int) -> Batch:
        inputs, targets = TASKS[self.task].batch(step)
        if step == self.poison:
            inputs[-1] = torch.nan
        return inputs, targets


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector ``[P]`` on the CPU, a copy; all ranks must call it if parameters are sharded."""
    params = [p.detach() for p in model.parameters()]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in params]).cpu()


def descend(model: nn.Module, optimizer: Any, batch: Batch, run: Run) -> None:
    """Take a step on the losses of all micro-batches; mean losses are averaged, and summed losses added."""
    optimizer.zero_grad()
    device = next(model.parameters()).device
    for part in range(run.micro):
        inputs, targets = (t.to(device) for t in shard(batch, part, run.micro))
        is_last = part == run.micro - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(run.sync or is_last)
        with model.no_sync() if isinstance(model, DDP) and not is_last else nullcontext():
            loss = run.loss(model(inputs), targets)
            (loss / run.micro if run.loss is mean_loss else loss).backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Any, rank: int, world: int, run: Run, first: int, last: int) -> list[Tensor]:
    """The parameters ``[P]`` after each of the steps on the shards of a rank."""
    path = []
    for step in range(first, last):
        descend(model, optimizer, shard(run.batch(step), rank, world, run.sizes), run)
        path.append(flat(model))
    return path


def alone(run: Run, comm: Any = None) -> tuple[Tensor, nn.Module, Any]:
    """Train one process on whole batches; return its trajectory ``[steps, P]``, model and optimizer."""
    model = TASKS[run.task].model()
    optimizer = build(run.method, model, comm, **run.keywords)
    return path_of(model, optimizer, 0, 1, replace(run, micro=1, sizes=None)), model, optimizer


def together(rank: int, world: int, strategy: str | None, run: Run, **wrapping: Any) -> Tensor:
    """Train one rank on its shards under DDP with some keywords; return its trajectory ``[steps, P]``."""
    model = DDP(TASKS[run.task].model(device_of(rank)), **wrapping)
    with optimizer_on(model, strategy, run) as optimizer:
        return path_of(model, optimizer, rank, world, run)


@contextmanager
def optimizer_on(model: nn.Module, strategy: str | None, run: Run, **keywords: Any) -> Iterator[Any]:
    """The optimizer of a run under a strategy with some keywords, closed at the end."""
    comm = STRATEGIES[strategy](**keywords) if strategy else None
    optimizer = build(run.method, model, comm, **run.keywords)
    yield optimizer
    optimizer.close()


def path_of(model: nn.Module, optimizer: Any, rank: int, world: int, run: Run) -> Tensor:
    """Train on shards; return the trajectory."""
    return torch.stack(train(model, optimizer, rank, world, run, 0, run.steps))


def curvatures(optimizer: Any) -> dict[str, Tensor]:
    """Dense curvature of every block that this rank estimates, by name."""
    return {
        name: optimizer.dense_curvature(name).cpu()
        for name, block in optimizer.blocks.items()
        if optimizer.comm.estimates(block.index)
    }


def statistics_of_shards(
    rank: int, world: int, strategy: str, run: Run, sizes: list[tuple[int, ...]]
) -> dict[str, Tensor]:
    """The curvature on a rank after one step for each tuple of shard sizes."""
    model = DDP(TASKS[run.task].model(device_of(rank)))
    with optimizer_on(model, strategy, run) as optimizer:
        for step, of_step in enumerate(sizes):
            descend(model, optimizer, shard(first(run.batch(step), sum(of_step)), rank, world, of_step), run)
        return curvatures(optimizer)


def first(batch: Batch, examples: int) -> Batch:
    return batch[0][:examples], batch[1][:examples]


def joined_statistics(run: Run, examples: list[int]) -> dict[str, Tensor]:
    model = TASKS[run.task].model()
    optimizer = build(run.method, model, **run.keywords)
    for step, number in enumerate(examples):
        descend(model, optimizer, first(run.batch(step), number), run)
    return curvatures(optimizer)


# ---------------------------------------------------------------------------------------------------------- Comparisons


def distance(path: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest entry of the reference."""
    return float((path - reference).abs().max() / reference.abs().max())


def assert_replicas(paths: list[Tensor]) -> None:
    """All ranks have bitwise equal parameters after every step."""
    for rank, path in enumerate(paths):
        assert path.isfinite().all(), f"rank {rank} has parameters that are not finite"
        same = (path == paths[0]).all(1)
        assert same.all(), f"rank {rank} differs from rank 0 from step {int((~same).nonzero()[0])} on"


def assert_same_path(paths: list[Tensor], reference: Tensor, tolerance: float = 1e-9) -> None:
    """Replicas are bitwise equal, and agree with a reference up to a relative tolerance."""
    assert_replicas(paths)
    errors = [(step, distance(a, b)) for step, (a, b) in enumerate(zip(paths[0], reference, strict=True))]
    wrong = [(step, error) for step, error in errors if error > tolerance]
    assert not wrong, f"off by {wrong[0][1]:.1e} at step {wrong[0][0]}, by {max(e for _, e in wrong):.1e} at most"


def assert_held(of_ranks: list[dict[str, Tensor]], expected: dict[str, Tensor], everywhere: bool) -> None:
    """Every block is on one rank, or on all of them if ``everywhere`` is true, and has the expected value."""
    for name, dense in expected.items():
        held = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        assert len(held) == (len(of_ranks) if everywhere else 1), name
        for matrix in held:
            assert distance(matrix, dense) < 1e-10, name
