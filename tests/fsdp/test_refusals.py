"""Failures of one rank of a sharded model, unused layers, tensor-parallel modules, and unsupported options."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from secondorder import EKFAC, GGT, KFAC, MFAC, CommOpt, DedicatedWorkers, HyLo, MemOpt, SparseMFAC
from tests.support.building import built
from tests.support.grid import sample
from tests.support.networks import Sometimes
from tests.support.oracles.ranks import LAYERWISE, assert_replicas, build, descend, distance, flat, mean_loss, shard
from tests.support.pool import Pool, device_of, on_every_rank
from tests.support.saving import raised
from tests.support.sharding import Case, Wrap, fully_sharded, started, train

POISONED = 4


# ------------------------------------------------------------------------------------------------------- One rank only
def poison(model: nn.Module, rank: int, bad: int, now: bool) -> None:
    """Put a NaN into the gradient of the last rows, on the rank that has them."""
    grad = dict(model.named_parameters())["mix.weight"].grad
    own = grad.to_local() if isinstance(grad, DTensor) else grad
    if now and rank == bad:
        own.view(-1)[-1] = torch.nan


def poisoned(rank: int, world: int, case: Case, bad: int, on_device: bool = False) -> tuple[Tensor, int]:
    """The trajectory, and the number of dropped steps, which may be gated as on a device."""
    if world > 1:
        model, optimizer = started(rank, world, case)
    else:
        model = case.model()
        optimizer = case.optimizer(model)
    if on_device:
        optimizer._record.gate = lambda finite: (True, finite)
    path = []
    for step in range(case.steps):
        hook = optimizer.register_step_pre_hook(lambda *_, step=step: poison(model, rank, bad, step == POISONED))
        descend(model, optimizer, shard(case.batch(step), rank, world), case)
        hook.remove()
        path.append(flat(model))
    skipped = optimizer.diagnostics()["skipped_steps"]
    optimizer.close()
    return torch.stack(path), skipped


@sample(
    method=["kfac_eigen", "ekfac_running", "mfac", "mfac_sparse", "ggt"],
    world=[2, 4],
    gate={"on_host": False, "on_device": True},
)
def test_a_nan_in_the_piece_of_one_rank_drops_the_step_on_all(pool: Pool, method: str, world: int, gate: bool) -> None:
    """To avoid a wait for the device, the step is taken there without an effect on parameters."""
    case = Case(method, keywords={"weight_decay": 0.1, "nesterov": method == "mfac"} if gate else {})
    reference, one = pool.run(poisoned, case, 0, gate, world=1)[0]
    found = pool.run(poisoned, case, world - 1, gate, world=world)
    assert_replicas([path for path, _ in found])
    assert [count for _, count in found] == [one] * world
    assert gate or one == 1
    path = found[0][0]
    assert torch.equal(path[POISONED], path[POISONED - 1])
    assert distance(path, reference) <= 1e-9


@on_every_rank(2)
def test_join_is_refused(rank: int, world: int) -> None:
    """FSDP2 itself cannot continue without a rank."""

    def joined(model: nn.Module, optimizer: Any, case: Case) -> None:
        with Join([optimizer]):
            train(model, optimizer, case, 0, 1, rank, world)

    for case in (Case("kfac_eigen"), Case("mfac")):
        kind, text = raised(joined, *started(rank, world, case), case)
        assert kind in ("NotImplementedError", "RuntimeError", "ValueError")
        assert "Join" in text
        assert "fully_shard" in text


# -------------------------------------------------------------------------------------------------------- Unused layers
@on_every_rank(2)
def test_no_layer_is_lost_while_the_module_has_unsharded_parameters(rank: int, world: int) -> None:
    """The trained parameters are not in the module at this time, so that changes are delayed."""
    case = Case(frozen="mix", wrap=Wrap(each=False, reshard=False))
    model, optimizer = started(rank, world, case)
    inputs, _ = shard(case.batch(0), rank, world)
    names = list(optimizer.blocks)
    model(inputs)  # without a backward pass, which would shard the parameters again
    for p in optimizer.param_groups[0]["params"]:
        p.requires_grad_(True)
    model(inputs)
    assert list(optimizer.blocks) == names
    optimizer.close()


#: Methods and the partition of their windows.
METHODS = [(name, {}) for name in ("kfac_eigen", "ekfac_intra", "mfac", "mfac_sparse", "ggt")]
METHODS += [("mfac", {"partition": "layer"})]


def steps_of(model: nn.Module, optimizer: Any, rank: int, shards: int, classes: int) -> Tensor:
    """The trajectory of a model that may use a layer in some steps, on one of the shards of each batch."""
    path, generator = [], torch.Generator().manual_seed(1)
    for step in range(6):
        model.both = step % 3 != 1
        inputs = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        targets = torch.randint(classes, (12,), generator=generator)
        inputs, targets = (t.to(device_of(rank)) for t in shard((inputs, targets), rank % shards, shards))
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.step()
        path.append(flat(model))
    optimizer.close()
    return torch.stack(path)


def assert_all_like_one_process(pool: Pool, paths: Any, world: int) -> None:
    """A function returns the trajectory of each method on a rank."""
    for reference, *of_ranks in zip(pool.run(paths, world=1)[0], *pool.run(paths, world=world), strict=True):
        assert_replicas(of_ranks)
        assert distance(of_ranks[0], reference) <= 1e-9


def sometimes(rank: int, world: int) -> list[Tensor]:
    found = []
    for method, keywords in METHODS:
        torch.manual_seed(0)
        model = Sometimes()
        model.never = nn.Linear(4, 4)
        model.to(device_of(rank), torch.float64)
        for module in [*model.children(), model] if world > 1 else []:
            fully_shard(module)
        found.append(steps_of(model, build(method, model, **keywords), rank, world, 3))
    return found


def test_layers_that_some_steps_do_not_use_train_like_one_process(pool: Pool) -> None:
    assert_all_like_one_process(pool, sometimes, 2)


# ---------------------------------------------------------------------------------------------- Tensor-parallel modules
def four_layers(rank: int) -> nn.Module:
    """Two layers that may be tensor-parallel, between two that are replicated."""
    torch.manual_seed(0)
    sizes = {"stem": (4, 4), "up": (4, 8), "down": (8, 4), "head": (4, 4)}
    model = nn.Sequential()
    for name, size in sizes.items():
        model.add_module(name, nn.Linear(*size))
        model.append(nn.Tanh())
    return model.to(device_of(rank), torch.float64)


def parallel(rank: int, world: int) -> nn.Module:
    model = four_layers(rank)
    if world > 1:
        mesh = init_device_mesh(device_of(rank).type, (world,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel(rank: int, world: int) -> list[Tensor]:
    """The trajectories of a rank that sees the full batch, and has a part of two layers, which layer methods skip."""
    found = []
    for method, keywords in METHODS:
        skipped = {"skip_layers": ["up", "down"], "weight_decay": 0.1} if method in LAYERWISE else {}
        model = parallel(rank, world)
        found.append(steps_of(model, build(method, model, **keywords, **skipped), rank, 1, 4))
    return found


@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_windows_cover_tensor_parallel_modules_and_layer_methods_can_skip_them(pool: Pool, world: int) -> None:
    assert_all_like_one_process(pool, tensor_parallel, world)


@on_every_rank(4)
def test_parameters_that_are_tensor_parallel_or_sharded_in_two_ways_are_refused_by_name(rank: int, world: int) -> None:
    """The latter are tensor-parallel on pairs of ranks, and FSDP2 shards the parts."""
    for cls in (KFAC, EKFAC, HyLo):
        kind, text = raised(cls, parallel(rank, world))
        assert kind == "NotImplementedError"
        for word in ("up", "down", "tensor", "skip_layers"):
            assert word in text, text
    model = four_layers(rank)
    mesh = init_device_mesh(device_of(rank).type, (2, 2), mesh_dim_names=("data", "parallel"))
    parallelize_module(model, mesh["parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    for cls, options in ((MFAC, {}), (KFAC, {"skip_layers": ["up", "down"]})):
        with pytest.raises(NotImplementedError, match="parameter '"):
            built(cls, model, **options)


@on_every_rank(2)
def test_an_optimizer_that_was_built_before_sharding_raises_at_its_first_step(rank: int, world: int) -> None:
    for method in ("kfac_eigen", "mfac"):
        model = four_layers(rank)
        optimizer = build(method, model)
        fully_shard(model)
        model(torch.ones(3, 4, dtype=torch.float64, device=device_of(rank))).sum().backward()
        with pytest.raises(RuntimeError, match=r"make it after fully_shard\(\)"):
            optimizer.step()


@on_every_rank(3)
def test_plans_and_options_that_do_not_support_sharding_are_refused(rank: int, world: int) -> None:
    _, optimizer = started(rank, world, Case(task="mlp"))
    with pytest.raises(NotImplementedError, match="before fully_shard"):
        optimizer.plan()
    for given, word in (
        ({"comm": MemOpt(average_gradients=True)}, "average_gradients"),
        ({"comm": DedicatedWorkers()}, "DedicatedWorkers"),
        ({"reject_steps": True}, "reject_steps"),
        ({"adaptive_damping": True}, "adaptive_damping"),
        ({"quadratic_model": True}, "quadratic_model"),
    ):
        model = fully_sharded(Case(task="mlp").model(device_of(rank)), rank, world, Wrap())
        with pytest.raises(NotImplementedError, match=word):
            built(KFAC, model, **given)


class Complex(nn.Module):
    """A layer and a complex phase."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.phase).abs()


@on_every_rank(2)
def test_complex_parameters_of_sharded_models_are_refused_by_name(rank: int, world: int) -> None:
    """The phase is replicated, or sharded like the layer."""
    for whole_model, cls in product((False, True), (MFAC, KFAC)):
        model = Complex().to(device_of(rank))
        fully_shard(model if whole_model else model.layer, mesh=init_device_mesh(device_of(rank).type, (world,)))
        with pytest.raises(NotImplementedError, match="'phase' is complex"):
            cls(model, lr=0.1)


@pytest.mark.parametrize("method", ["kfac_eigen", pytest.param("mfac", marks=pytest.mark.slow)])
@on_every_rank(2)
def test_sharding_after_construction_is_refused_with_average_gradients(rank: int, world: int, method: str) -> None:
    """The groups contain the sharded parameters in place of those of the construction."""
    model, inputs = four_layers(rank), torch.ones(3, 4, dtype=torch.float64, device=device_of(rank))
    names = {p: path for path, p in model.named_parameters()}
    optimizer = build(method, model, CommOpt(average_gradients=True))
    fully_shard(model)
    cut = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"][:] = [cut[names[p]] for p in group["params"]]

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()

    with pytest.raises(NotImplementedError, match="average_gradients=True is for plain parameters"):
        step()


def test_the_first_fsdp_is_refused_with_the_remedy() -> None:
    """It is built without its constructor, which needs an accelerator."""
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    model._fsdp_wrapped_module, model.training_state = nn.Linear(4, 3), None
    for cls, module in product((KFAC, EKFAC, HyLo, MFAC, SparseMFAC, GGT), (model, nn.Sequential(model))):
        kind, text = raised(cls, module)
        assert kind == "NotImplementedError"
        assert "FullyShardedDataParallel" in text
        assert "fully_shard" in text
