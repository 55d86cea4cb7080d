"""Directions are those of the explicit matrix of the stored rows, which are those of a plain loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import MFAC
from tests.support import window
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.oracles.window import fisher_direction
from tests.support.window import assert_near, columns_of, flat, gram, history, noise, parameters, push, ring, states
from tests.support.window_storages import METHODS, STORAGES, explicit, regular

SHAPES = [(4, 6), (5,), (3, 2, 4), (7,)]
UNITS = {"global": [[0, 1, 2, 3]], "group": [[0, 1], [2, 3]], "layer": [[0], [1], [2], [3]]}
M = 4
STEPS = 3 * M + 2


def build(method: str, params: list[nn.Parameter], **keywords: Any) -> torch.optim.Optimizer:
    """Two groups, steps along the direction."""
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    return built(METHODS[method], groups, **{"lr": 1.0, "window_size": M, **regular(method, 1e-2), **keywords})


def exists(storage: str, dtype: torch.dtype, partition: str, **others: str) -> bool:
    """In bfloat16, parameters show few digits; in float32, factors of parts deviate from the loop earlier."""
    if dtype == torch.float32 and storage.startswith("rank"):
        return partition == "global"
    return dtype != torch.bfloat16 or storage in ("dense", "topk-bfloat16", "rank-1")


@pairs(
    exists,
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    storage=list(STORAGES),
    method=list(METHODS),
    partition=list(UNITS),
)
def test_every_storage_and_partition(method: str, storage: str, dtype: torch.dtype, partition: str) -> None:
    """Every step of more than three turns of the ring is checked."""
    kind, params = STORAGES[storage], parameters(SHAPES, dtype)
    opt = build(method, params, partition=partition, **kind.keywords)
    senders = kind.senders(opt, params)
    sent: list[Tensor] = []
    # The direction of a bfloat16 parameter is read off a rounded parameter; low-rank factors are rounded, too.
    exact = dtype == torch.float64
    tolerance = 1e-9 if exact else 1e-5 if dtype == torch.float32 else 4e-3
    for step in range(STEPS):
        gradient = noise(window.size(SHAPES), seed=step).to(dtype).double()
        u = push(opt, params, gradient)
        sent.append(
            torch.cat([s.send(gradient[c].to(dtype)) for s, c in zip(senders, window.spans(params), strict=True)])
        )
        for unit in UNITS[partition]:
            rows, columns = history(opt, params, unit, kind.block_size), columns_of(params, unit)
            assert len(rows) == min(step + 1, M)
            if not kind.quantised:
                loop = torch.stack(sent[-M:])[:, columns]
                assert_near(rows, loop, 1e-9 if exact else 1e-4 if kind.rank else 0.0, f"rows at step {step}")
            assert_near(u[columns], explicit(method, rows, rows[-1], 1e-2), tolerance, f"direction at step {step}")
            assert window.slots(opt, unit)[-1] == step % M
    for unit in UNITS[partition] if exact else ():  # a row with the dots of the raw gradient would be indefinite
        rows, state = ring(opt, params, unit, kind.block_size), states(opt)[unit[0]]
        assert_near(gram(state), rows @ rows.mT, 1e-12)
        assert (int(state["pos"]), int(state["count"])) == (STEPS % M, STEPS)
        assert all("gram" not in states(opt)[i] for i in unit[1:])


def test_a_layer_is_the_weight_and_bias_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Conv1d(2, 3, 2), nn.Linear(4, 2, bias=False)).double()
    params = list(model.parameters())
    opt = built(MFAC, model, lr=1.0, window_size=3, partition="layer", damping=1e-2)
    assert sum("gram" in state for state in states(opt).values()) == 3
    for step in range(8):
        u = push(opt, params, noise(sum(p.numel() for p in params), seed=step))
        for unit in ([0, 1], [2, 3], [4]):
            rows = history(opt, params, unit)
            assert_near(u[columns_of(params, unit)], fisher_direction(rows, rows[-1], 1e-2))


@pytest.mark.parametrize("method", METHODS)
def test_one_unit_of_parameters_of_several_dtypes(method: str) -> None:
    """There is a flat buffer for each dtype, but dots are over all of them."""
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in ((5, torch.float32), (4, torch.float64))]
    params += parameters([(2, 2)], torch.bfloat16)
    opt = built(METHODS[method], params, lr=1.0, window_size=3, **regular(method, 1e-2))
    for step in range(11):
        u = push(opt, params, noise(13, seed=step).bfloat16().double())
        rows = history(opt, params, [0, 1, 2])
        assert_near(u[:9], explicit(method, rows, rows[-1], 1e-2)[:9], 1e-6)


def test_parameters_without_entries() -> None:
    for storage in ("dense", "topk", "rank-1"):
        kind, params = STORAGES[storage], parameters([(4,), (0, 3), (2, 3)])
        opt = built(MFAC, params, lr=1.0, window_size=3, damping=1e-2, **kind.keywords)
        for step in range(7):
            u = push(opt, params, noise(10, seed=step))
            rows = history(opt, params, [0, 2], kind.block_size)
            assert_near(u, fisher_direction(rows, rows[-1], 1e-2))


@each(
    order=[(0, 1, 2), (1, 0, 2), (2, 0, 1)],
    method=list(METHODS),
    storage=["dense", "topk", "rank-1"],
    real=[torch.float64, torch.float32],
)
def test_complex_parameters_with_an_odd_number_of_real_entries(
    order: tuple[int, ...], method: str, storage: str, real: torch.dtype
) -> None:
    """Real entries come first, between or last, so that complex ones, which are pairs, start at odd offsets."""
    pair = torch.complex128 if real == torch.float64 else torch.complex64
    places = [[((3,), real), ((2, 3), pair), ((5,), pair)][i] for i in order]
    generator, found = torch.Generator().manual_seed(0), []
    gradients = [[torch.randn(shape, dtype=dtype, generator=generator) for shape, dtype in places] for _ in range(11)]
    for view in (lambda x: x, lambda x: torch.view_as_real(x) if x.is_complex() else x):
        params = [nn.Parameter(view(torch.zeros(shape, dtype=dtype))) for shape, dtype in places]
        keywords = {**regular(method, 1e-2), **STORAGES[storage].keywords}
        opt = built(METHODS[method], params, lr=1.0, window_size=5, **keywords)
        for parts in gradients:
            for p, gradient in zip(params, parts, strict=True):
                p.grad = view(gradient)
            opt.step()
        found.append(flat(params))
    assert_near(*found, 1e-9 if real == torch.float64 else 1e-5)


@each(method=list(METHODS), storage=["dense", "topk"])
def test_conjugated_gradients(method: str, storage: str) -> None:
    start, found = torch.complex(noise(7), noise(7, seed=1)), []
    for resolve in (False, True):
        p = nn.Parameter(start.clone())
        opt = built(METHODS[method], [p], lr=0.1, window_size=5, **STORAGES[storage].keywords)
        for step in range(6):
            gradient = torch.complex(noise(7, seed=2 * step + 5), noise(7, seed=2 * step + 6)).conj()
            p.grad = gradient.resolve_conj() if resolve else gradient
            assert p.grad.is_conj() != resolve
            opt.step()
        found.append(p.detach())
    assert torch.equal(*found)
    assert torch.view_as_real(found[0]).isfinite().all()
    assert not torch.equal(found[0], start)
