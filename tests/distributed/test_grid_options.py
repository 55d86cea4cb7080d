"""Options of strategies: meshes, verification, rounded messages, and one optimizer per strategy."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from secondorder import KFAC, MFAC, ChiefOnly, CommOpt, HybridOpt, LocalFactors, MemOpt
from tests.support.building import built
from tests.support.kfac import hook_counts
from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, build
from tests.support.pool import everywhere, on_every_rank
from tests.support.saving import raised, started, train
from tests.support.tasks import assert_identical

RUN = Run()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def _train(
    rank: int, world: int, comm: Any, spoil: Callable[[int, int, KFAC], None] | None = None, **options: Any
) -> tuple[list[float], KFAC]:
    """The final parameters, and the closed optimizer."""
    model, generator = DistributedDataParallel(_net()), torch.Generator().manual_seed(0)
    settings = {"lr": 0.05, "damping": 0.1, "factor_update_steps": 1, "inv_update_steps": 2}
    with built(KFAC, model, comm=comm, **settings, **options) as optimizer:
        for t in range(8):
            x, y = (torch.randn(12, n, generator=generator).chunk(world)[rank] for n in (4, 2))
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if spoil is not None:
                spoil(rank, t, optimizer)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), optimizer


@on_every_rank(4)
def test_a_mesh_is_the_grid(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    plain, _ = _train(rank, world, HybridOpt(0.5))
    params, optimizer = _train(rank, world, HybridOpt(mesh=mesh))
    row, column = optimizer.comm.grid.row_of(rank), optimizer.comm.grid.column_of(rank)
    assert list(row) == dist.get_process_group_ranks(mesh.get_group(1)) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert list(column) == dist.get_process_group_ranks(mesh.get_group(0)) == [rank % 2, rank % 2 + 2]
    dist.barrier(group=mesh.get_group(0))  # the groups of the caller's mesh still exist
    with pytest.raises(ValueError, match="drop one of them"):
        HybridOpt(1.0, mesh=mesh)
    with pytest.raises(ValueError, match="two-dimensional over all ranks"):
        HybridOpt(mesh=init_device_mesh("cpu", (4,)))
    assert everywhere(params) == [plain] * world


@on_every_rank(2)
def test_differences_between_ranks_are_reported_on_every_rank(rank: int, world: int) -> None:
    """Verification finds different parameters and names the step. Different learning rates are found at once."""

    def drift(rank: int, t: int, optimizer: KFAC) -> None:
        if rank == 1 and t == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][2].add_(1e-7)

    def reduce_rate(rank: int, t: int, optimizer: KFAC) -> None:
        if t == 3:
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + rank)

    for make in (MemOpt, CommOpt):
        kind, text = raised(_train, rank, world, make(verify_every=2), drift)
        assert kind == "RuntimeError"
        assert text.startswith("step 6: the optimizers of rank 0 and rank 1 differ in parameters")
        assert "number 2:" in text
    _, text = raised(_train, rank, world, CommOpt(), reduce_rate)
    assert text.startswith(
        f"step 3: the options of the parameter groups differ between ranks (lr here: [{0.05 / (1 + rank)}])"
    )


@pytest.mark.parametrize(("world", "strategy"), [(3, "mem"), (2, "comm"), (4, "hybrid_half")])
@on_every_rank()
def test_wire_dtype_bfloat16_halves_messages_of_directions_and_keeps_replicas_equal(
    rank: int, world: int, strategy: str
) -> None:
    make = STRATEGIES[strategy]
    exact, plain = _train(rank, world, make())
    params, rounded = _train(rank, world, make(wire_dtype=torch.bfloat16, verify_every=1))
    before, after = (optimizer.comm.collectives.counter.bytes_by_stage() for optimizer in (plain, rounded))
    assert everywhere(params) == [params] * world
    assert after.get("directions", 0) * 2 == before.get("directions", 0)
    assert after.get("curvature", 0) == before.get("curvature", 0)  # curvature is never rounded
    torch.testing.assert_close(torch.tensor(params), torch.tensor(exact), rtol=0.05, atol=5e-3)


@on_every_rank(2)
def test_curvature_in_bfloat16_agrees_between_strategies(rank: int, world: int) -> None:
    low = {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16}
    kinds = ((CommOpt, low), (MemOpt, low), (CommOpt, {}))
    paths = [_train(rank, world, make(), **options)[0] for make, options in kinds]
    assert everywhere(paths) == [paths] * world
    comm, mem, full = (torch.tensor(path) for path in paths)
    torch.testing.assert_close(comm, mem, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(comm, full, rtol=0.05, atol=5e-3)


def test_invalid_arguments_are_refused_by_name() -> None:
    for make, error, text in [
        (lambda: CommOpt(replicate_factors="yes"), TypeError, "replicate_factors"),  # type: ignore[arg-type]
        (lambda: CommOpt(average_gradients=1), TypeError, "average_gradients"),  # type: ignore[arg-type]
        (lambda: MemOpt(wire_dtype=torch.float16), ValueError, "wire_dtype"),
        (lambda: MemOpt(timeout=0), ValueError, "timeout"),
        (lambda: MemOpt(verify_every=0), ValueError, "verify_every"),
        (lambda: MemOpt(verify_every=2.5), TypeError, "verify_every"),  # type: ignore[arg-type]
        (lambda: HybridOpt(0.0), ValueError, "grad_worker_fraction"),
        (lambda: HybridOpt("half"), TypeError, "grad_worker_fraction"),  # type: ignore[arg-type]
        (lambda: HybridOpt(mesh="mesh"), TypeError, "DeviceMesh"),  # type: ignore[arg-type]
        (lambda: ChiefOnly(root=-1), ValueError, "root"),
        (lambda: ChiefOnly(root="0"), TypeError, "root"),  # type: ignore[arg-type]
        (lambda: ChiefOnly(deliver="factors"), ValueError, "deliver"),
        (lambda: ChiefOnly(statistics="root"), ValueError, "statistics"),
    ]:
        with pytest.raises(error, match=text):
            make()


# -------------------------------------------------------------------------------------------- Lifetime of a strategy
def is_hooked(model: nn.Module) -> bool:
    return any(map(any, hook_counts(model).values()))


def test_a_strategy_serves_one_optimizer() -> None:
    for make in [CommOpt, MemOpt, LocalFactors, ChiefOnly, lambda: HybridOpt(0.5)]:
        comm, model = make(), _net()
        with KFAC(model, comm=comm):
            hooks = hook_counts(model)
            with pytest.raises(ValueError, match="serves another optimizer already"):
                KFAC(model, comm=comm)
            assert hook_counts(model) == hooks


@on_every_rank(2)
def test_a_strategy_serves_its_optimizer_after_a_refusal_and_another_one_after_close(rank: int, world: int) -> None:
    """A copy has a separate strategy, with process groups of its own, which verifies, too."""
    other = _net()
    model, optimizer = started(rank, "mem", RUN, verify_every=1)
    path = train(model, optimizer, rank, world, RUN, 0, 3)
    with pytest.raises(ValueError, match="serves another optimizer already"):
        KFAC(other, comm=optimizer.comm)
    assert not is_hooked(other)
    twin, copied = copy.deepcopy(model), copy.deepcopy(optimizer)
    copied.attach(twin)
    rest = train(twin, copied, rank, world, RUN, 3, 7)
    assert_identical(train(model, optimizer, rank, world, RUN, 3, 7), rest)
    optimizer.close()
    model = TASKS["mlp"].model()
    again = train(model, build(RUN.method, model, optimizer.comm), rank, world, RUN, 0, 7)
    assert_identical(again, path + rest)


@on_every_rank(2)
def test_close_works_after_the_default_group_is_destroyed(rank: int, world: int, tmp_path: Path) -> None:
    left_over = [started(rank, "mem", RUN) for _ in range(2)]
    for model, optimizer in left_over:
        train(model, optimizer, rank, world, RUN, 0, 3)
    dist.destroy_process_group()
    left_over[1][1].close()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=rank, world_size=world)
    for _ in range(2):
        left_over[0][1].close()
    assert not any(is_hooked(model) for model, _ in left_over)


@on_every_rank(2)
def test_a_loss_scaler_is_refused_with_average_gradients(rank: int, world: int) -> None:
    def make(scaler: Any, **keywords: Any) -> KFAC:
        return built(KFAC, _net(), comm=MemOpt(**keywords), grad_scaler=scaler)

    scaler, averaging = torch.amp.GradScaler("cpu"), {"average_gradients": True}
    with pytest.raises(NotImplementedError, match="average_gradients=True"):
        make(scaler, **averaging)
    with pytest.raises(NotImplementedError, match="average_gradients=True"):
        make(None, **averaging).grad_scaler = scaler
    make(torch.amp.GradScaler("cpu", enabled=False), **averaging)
    make(scaler)


@on_every_rank(2)
def test_the_mean_of_large_float16_gradients_is_finite(rank: int, world: int) -> None:
    layer = nn.Linear(4, 4).half()
    optimizer = MFAC(layer.parameters(), lr=0.1, comm=MemOpt(average_gradients=True))
    for p in layer.parameters():
        p.grad = torch.full_like(p, 40000.0 + 16384.0 * rank)
    optimizer.comm.average_gradients(list(layer.parameters()))
    assert {value for p in layer.parameters() for value in p.grad.flatten().tolist()} == {48192.0}
