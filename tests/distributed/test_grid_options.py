"""What a grid of ranks is asked for beside who does what: meshes, verification, roundings, one optimizer each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from secondorder import KFAC, MFAC, ChiefOnly, CommOpt, HybridOpt, LocalFactors, MemOpt
from tests.support.oracles.ranks import TASKS, Run, build
from tests.support.pool import Pool
from tests.support.saving import raised, started, train
from tests.support.tasks import assert_identical

BATCH, STEPS = 12, 8
RUN = Run()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def _train(
    rank: int, world: int, comm: Any, spoil: Callable[[int, int, KFAC], None] | None = None, **options: Any
) -> tuple[list[float], KFAC]:
    model = _net()
    wrapped = DistributedDataParallel(model)
    optimizer = KFAC(model, lr=0.05, damping=0.1, factor_update_steps=1, inv_update_steps=2, comm=comm, **options)
    generator = torch.Generator().manual_seed(0)
    for t in range(STEPS):
        x, y = (torch.randn(BATCH, n, generator=generator).chunk(world)[rank] for n in (4, 2))
        optimizer.zero_grad()
        (wrapped(x) - y).square().mean().backward()
        if spoil is not None:
            spoil(rank, t, optimizer)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), optimizer


def _on_a_mesh(rank: int, world: int) -> tuple[list[float], list[float], list[int], list[int]]:
    mesh = init_device_mesh("cpu", (2, 2))
    plain, first = _train(rank, world, HybridOpt(0.5))
    first.close()
    params, optimizer = _train(rank, world, HybridOpt(mesh=mesh))
    assert isinstance(optimizer.comm, HybridOpt)
    row, column = optimizer.comm.grid.row_of(rank), optimizer.comm.grid.column_of(rank)
    assert list(row) == torch.distributed.get_process_group_ranks(mesh.get_group(1))
    assert list(column) == torch.distributed.get_process_group_ranks(mesh.get_group(0))
    optimizer.close()
    torch.distributed.barrier(group=mesh.get_group(0))  # the mesh is the caller's, and stays
    with pytest.raises(ValueError, match="drop one of them"):
        HybridOpt(1.0, mesh=mesh)
    with pytest.raises(ValueError, match="two-dimensional over all ranks"):
        HybridOpt(mesh=init_device_mesh("cpu", (4,)))
    return plain, params, list(row), list(column)


def test_a_mesh_is_the_grid(pool: Pool) -> None:
    found = pool.run(_on_a_mesh, world=4)
    for rank, (plain, params, row, column) in enumerate(found):
        assert params == plain == found[0][1]
        assert row == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert column == [rank % 2, rank % 2 + 2]


def _drift(rank: int, t: int, optimizer: KFAC) -> None:
    if rank == 1 and t == 4:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][2].add_(1e-7)


def _verified(rank: int, world: int) -> list[tuple[str, str]]:
    return [raised(_train, rank, world, make(verify_every=2), _drift) for make in (MemOpt, CommOpt)]


def test_verification_names_the_step_and_the_parameter(pool: Pool) -> None:
    for answers in pool.run(_verified):
        for kind, text in answers:
            assert kind == "RuntimeError"
            assert text.startswith("step 6: the optimizers of rank 0 and rank 1 differ in parameters")
            assert "number 2:" in text


def _rates(rank: int, t: int, optimizer: KFAC) -> None:
    if t == 3:  # what ReduceLROnPlateau does with a loss of this rank alone
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + rank)


def _scheduled_apart(rank: int, world: int) -> tuple[str, str]:
    return raised(_train, rank, world, CommOpt(), _rates)


def test_schedules_that_drift_apart_are_told_on_every_rank(pool: Pool) -> None:
    (_, first), (_, second) = pool.run(_scheduled_apart)
    assert first.startswith("step 3: the options of the parameter groups differ between ranks (lr here: [0.05])")
    assert "lr here: [0.025]" in second


def _rounded(rank: int, world: int, kind: str) -> list[tuple[list[float], dict[str, int]]]:
    """Parameters and bytes by stage, exact and rounded."""
    make = {"mem": MemOpt, "comm": CommOpt, "hybrid": lambda **kw: HybridOpt(0.5, **kw)}[kind]
    runs = [_train(rank, world, make(**kw)) for kw in ({}, {"wire_dtype": torch.bfloat16, "verify_every": 1})]
    return [(params, optimizer.comm.collectives.counter.bytes_by_stage()) for params, optimizer in runs]


@pytest.mark.parametrize(("kind", "world"), [("mem", 3), ("comm", 2), ("hybrid", 4)])
def test_bfloat16_on_the_wire_halves_directions_and_keeps_replicas_equal(pool: Pool, kind: str, world: int) -> None:
    found = pool.run(_rounded, kind, world=world)
    for (exact, before), (params, after) in found:
        assert params == found[0][1][0]
        assert after.get("directions", 0) * 2 == before.get("directions", 0)
        assert after.get("curvature", 0) == before.get("curvature", 0)  # never rounded
        torch.testing.assert_close(torch.tensor(params), torch.tensor(exact), rtol=0.05, atol=5e-3)


def _kept_low(rank: int, world: int) -> dict[str, tuple[list[float], int]]:
    low = {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16}
    found = {}
    chosen = {"comm": low, "mem": low, "full": {}, "packed": {"factor_storage": "packed"}}
    for kind, options in chosen.items():
        params, optimizer = _train(rank, world, CommOpt() if kind in ("comm", "full") else MemOpt(), **options)
        found[kind] = params, optimizer.comm.collectives.counter.bytes_by_stage().get("curvature", 0)
        optimizer.close()
    return found


def test_curvature_kept_in_bfloat16_is_sent_so_and_is_the_same_under_every_strategy(pool: Pool) -> None:
    answers = pool.run(_kept_low, world=2)
    for found in answers:
        assert found["comm"][0] == answers[0]["comm"][0]
        assert found["mem"][0] == answers[0]["mem"][0]
        torch.testing.assert_close(*(torch.tensor(found[kind][0]) for kind in ("comm", "mem")), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(*(torch.tensor(found[kind][0]) for kind in ("comm", "full")), rtol=0.05, atol=5e-3)
        assert found["packed"][0] == answers[0]["packed"][0]
        torch.testing.assert_close(*(torch.tensor(found[kind][0]) for kind in ("packed", "full")), rtol=1e-4, atol=1e-5)
    low, full = (sum(found[kind][1] for found in answers) for kind in ("comm", "full"))
    assert 0.5 * full < low < 0.65 * full  # eigenvalues are sent whole


def test_a_strategy_serves_one_optimizer() -> None:
    for make in [CommOpt, MemOpt, LocalFactors, ChiefOnly, lambda: HybridOpt(0.5)]:
        comm, model = make(), _net()
        optimizer = KFAC(model, comm=comm)
        hooks = [len(m._forward_hooks) for m in model]
        with pytest.raises(ValueError, match="serves another optimizer already"):
            KFAC(model, comm=comm)
        assert [len(m._forward_hooks) for m in model] == hooks
        optimizer.close()


def test_bad_arguments_are_refused_by_name() -> None:
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


def _refused(rank: int, world: int) -> list[tuple[str, str]]:
    return [raised(KFAC, _net(), comm=comm) for comm in (HybridOpt(0.3), ChiefOnly(root=7))]


def test_what_the_number_of_ranks_does_not_allow_is_told_with_what_it_does(pool: Pool) -> None:
    for (_, fraction), (_, root) in pool.run(_refused, world=2):
        assert "0.5, 1" in fraction
        assert "root=7" in root
        assert "2 ranks" in root


# ---------------------------------------------------------------------------------------------------------------------
# The life of a strategy
# ---------------------------------------------------------------------------------------------------------------------


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def _refused_second(rank: int, world: int) -> tuple[list[Tensor], list[Tensor], tuple[str, str], int, list[Tensor]]:
    model, optimizer = started(rank, "mem", RUN)
    expected = train(model, optimizer, rank, world, RUN, 0, 7)
    optimizer.close()
    other = _net()
    model, optimizer = started(rank, "mem", RUN)
    found = train(model, optimizer, rank, world, RUN, 0, 3)
    refusal = raised(KFAC, other, comm=optimizer.comm)
    hooks = _hooks(other)
    found += train(model, optimizer, rank, world, RUN, 3, 7)
    optimizer.close()
    model = TASKS["mlp"].model()
    again = train(model, build(RUN.method, model, optimizer.comm), rank, world, RUN, 0, 7)
    return expected, found, refusal, hooks, again


def test_a_strategy_goes_on_serving_its_optimizer_and_another_one_after_it(pool: Pool) -> None:
    for expected, found, (kind, text), hooks, again in pool.run(_refused_second):
        assert kind == "ValueError"
        assert "serves another optimizer already" in text
        assert hooks == 0
        assert_identical(found, expected)
        assert_identical(again, expected)


def _copied(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    model, optimizer = started(rank, "mem", RUN, verify_every=1)
    train(model, optimizer, rank, world, RUN, 0, 3)
    twin, copied = copy.deepcopy(model), copy.deepcopy(optimizer)
    copied.attach(twin)
    return train(twin, copied, rank, world, RUN, 3, 7), train(model, optimizer, rank, world, RUN, 3, 7)


def test_copies_train_on_with_groups_of_their_own_and_are_verified_too(pool: Pool) -> None:
    for copied, own in pool.run(_copied):
        assert_identical(copied, own)


def _outlived(rank: int, world: int, directory: str) -> int:
    def left_over() -> tuple[nn.Module, KFAC]:
        model, optimizer = started(rank, "mem", RUN)
        train(model, optimizer, rank, world, RUN, 0, 3)
        return model, optimizer

    (model, optimizer), (other, second) = left_over(), left_over()
    dist.destroy_process_group()
    second.close()
    dist.init_process_group("gloo", init_method=f"file://{directory}/again", rank=rank, world_size=world)
    for _ in range(2):
        optimizer.close()
    return _hooks(model) + _hooks(other)


def test_closing_outlives_the_default_group(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_outlived, str(tmp_path)) == [0, 0]


def _scaled(rank: int, world: int) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    def make(scaler: Any, **keywords: Any) -> KFAC:
        return KFAC(_net(), comm=MemOpt(**keywords), grad_scaler=scaler)

    averaging = {"average_gradients": True}
    at_birth = raised(make, torch.amp.GradScaler("cpu"), **averaging)
    late = raised(setattr, make(None, **averaging), "grad_scaler", torch.amp.GradScaler("cpu"))
    make(torch.amp.GradScaler("cpu", enabled=False), **averaging)
    return at_birth, late, raised(make, torch.amp.GradScaler("cpu"))


def test_a_loss_scaler_is_refused_where_gradients_are_averaged_after_it(pool: Pool) -> None:
    for *refused, allowed in pool.run(_scaled):
        for kind, text in refused:
            assert kind == "NotImplementedError"
            assert "average_gradients=True" in text
        assert allowed == ("", "")


def _averaged_halves(rank: int, world: int) -> list[float]:
    layer = nn.Linear(4, 4).half()
    optimizer = MFAC(layer.parameters(), lr=0.1, comm=MemOpt(average_gradients=True))
    for p in layer.parameters():
        p.grad = torch.full_like(p, 40000.0 + 16384.0 * rank)
    optimizer.comm.average_gradients(list(layer.parameters()))
    return [value for p in layer.parameters() for value in (p.grad.min().item(), p.grad.max().item())]


def test_the_mean_of_large_float16_gradients_is_finite(pool: Pool) -> None:
    assert pool.run(_averaged_halves) == [[48192.0] * 4] * 2
