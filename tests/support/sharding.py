"""Models whose parameters FSDP2 shards, and the trajectory of one process on the joined batches.

::

    case = Case("kfac_eigen", "odd", wrap=Wrap(each=True), frozen="mix")
    alone(case)                      [steps, P] of one process with plain tensors
    sharded_path(rank, world, case)  [steps, P] of a rank with its shards and batches, gathered after every step
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from tests.support.building import built
from tests.support.oracles import ranks
from tests.support.oracles.ranks import CLASSES, METHODS, STRATEGIES, TASKS, Batch, Task, assert_same_path, build
from tests.support.pool import Pool, device_of

WORDS, LENGTH, WIDTH = 7, 3, 5


class Odd(nn.Module):
    """Numbers of rows that neither 2 nor 4 ranks divide, a single row, and a parameter that no layer method covers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WORDS)
        self.conv = nn.Conv1d(WORDS, WIDTH, 2, padding=1)
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, WIDTH))
        self.squeeze = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(1, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.norm(self.embed(tokens))))
        hidden = torch.tanh(self.conv(hidden.mT).mT[:, :LENGTH]) * self.gain
        return self.head(self.squeeze(hidden))


class Even(nn.Sequential):
    """Numbers of rows and columns that 2 and 4 ranks divide."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, CLASSES))


def _words(generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (12, LENGTH), generator=generator)


TASKS |= {
    "odd": Task(Odd, _words, (LENGTH,)),
    "even": Task(Even, lambda generator: torch.randn(12, 4, generator=generator, dtype=torch.float64)),
}


@dataclass(frozen=True)
class Wrap:
    """How parameters are sharded."""

    each: bool = True  # whether every layer is a unit of FSDP, in addition to the root
    replicas: int = 1  # number of copies of the sharded model (HSDP)
    reshard: bool | None = None  # whether parameters are sharded again after the forward pass; None: FSDP's default
    columns: bool = False  # whether matrices are split along their columns where these divide evenly
    low: bool = False  # whether the forward and backward passes run in bfloat16


@dataclass(frozen=True)
class Case:
    """A trajectory of one process and of ranks."""

    method: str = "kfac_eigen"
    task: str = "odd"
    keywords: Mapping[str, Any] = field(default_factory=dict, hash=False)  # in addition to those of `METHODS`
    strategy: str | None = None  # None for the default of the optimizer
    wrap: Wrap = Wrap(each=False)
    frozen: str | None = None  # prefix of the names of parameters that are not trained
    thaw: int | None = None  # first step in which the frozen parameters are trained
    steps: int = 9
    micro: int = 1  # and the following as in `Run`
    sync: bool = False
    sizes: tuple[int, ...] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = ranks.mean_loss
    split: bool = False  # whether the parameters are in two groups, the second with half the learning rate

    def batch(self, step: int) -> Batch:
        return TASKS[self.task].batch(step)

    def model(self, device: torch.device | None = None) -> nn.Module:
        model = TASKS[self.task].model(device)
        self.freeze(model, True)
        return model

    def freeze(self, model: nn.Module, yes: bool) -> None:
        for name, p in model.named_parameters():
            if self.frozen is not None and name.startswith(self.frozen):
                p.requires_grad_(not yes)

    def optimizer(self, model: nn.Module, comm: Any = None, **keywords: Any) -> Any:
        """The optimizer of all parameters, in two groups if ``split`` is set."""
        settings = {**self.keywords, **keywords}
        if not self.split:
            return build(self.method, model, comm, **settings)
        named = list(model.named_parameters())
        half = len(named) // 2
        cls, own = METHODS[self.method]
        groups = [{"params": named[:half]}, {"params": named[half:], "lr": own["lr"] / 2}]
        return built(cls, groups, module=model, comm=comm, **{**own, **settings})


# ------------------------------------------------------------------------------------------------------- Sharded models


def mesh_of(rank: int, world: int, replicas: int = 1) -> DeviceMesh:
    """A mesh with a dimension for shards, after one for replicas if there are any."""
    device = device_of(rank).type
    if replicas == 1:
        return init_device_mesh(device, (world,))
    return init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def fully_sharded(model: nn.Module, rank: int, world: int, wrap: Wrap) -> nn.Module:
    """The model itself, with DTensors as parameters."""
    shards = world // wrap.replicas

    def placement(p: nn.Parameter) -> Shard | None:
        return Shard(1) if wrap.columns and p.dim() > 1 and p.shape[1] % shards == 0 else None

    keywords: dict[str, Any] = {"mesh": mesh_of(rank, world, wrap.replicas), "shard_placement_fn": placement}
    if wrap.reshard is not None:
        keywords["reshard_after_forward"] = wrap.reshard
    if wrap.low:
        keywords["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if wrap.each:
        for layer in model.children():
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, **keywords)
    return fully_shard(model, **keywords)


def started(rank: int, world: int, case: Case, **keywords: Any) -> tuple[nn.Module, Any]:
    """A sharded model and its optimizer."""
    model = fully_sharded(case.model(device_of(rank)), rank, world, case.wrap)
    comm = STRATEGIES[case.strategy]() if case.strategy else None
    return model, case.optimizer(model, comm, **keywords)


# ------------------------------------------------------------------------------------------------------------- Training


def train(
    model: nn.Module, optimizer: Any, case: Case, first: int, last: int, rank: int = 0, world: int = 1
) -> list[Tensor]:
    """The parameters ``[P]`` after each step."""
    thaw = last if case.thaw is None else min(max(first, case.thaw), last)
    path = ranks.train(model, optimizer, rank, world, case, first, thaw)
    if thaw < last:
        case.freeze(model, False)
    return path + ranks.train(model, optimizer, rank, world, case, thaw, last)


_paths: dict[str, Tensor] = {}


def alone(case: Case) -> Tensor:
    """The trajectory ``[steps, P]`` of one process on the joined batches, which depends on neither wrap nor ranks."""
    key = repr(replace(case, strategy=None, wrap=Wrap(), sync=False))
    if key not in _paths:
        model = case.model()
        _paths[key] = torch.stack(train(model, case.optimizer(model), case, 0, case.steps))
    return _paths[key]


def sharded_path(rank: int, world: int, case: Case) -> Tensor:
    """The trajectory ``[steps, P]`` of a rank."""
    model, optimizer = started(rank, world, case)
    path = torch.stack(train(model, optimizer, case, 0, case.steps, rank, world))
    optimizer.close()
    return path


def assert_like_one_process(pool: Pool, case: Case, world: int, tolerance: float = 1e-9) -> None:
    """All ranks have the parameters of one process after every step."""
    assert_same_path(pool.run(sharded_path, case, world=world), alone(case), tolerance)
