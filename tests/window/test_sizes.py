"""Window sizes, parameter sizes, block sizes and ranks at which indexing might go wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor

from secondorder import GGT, MFAC, LowRank, TopK
from tests.support.building import built
from tests.support.grid import each
from tests.support.oracles.window import TopKRows, fisher_direction, woodbury
from tests.support.tasks import snapshot
from tests.support.window import assert_near, differences, gram, history, noise, parameters, push, states, stored_rows
from tests.support.window_storages import METHODS, STORAGES, averaging, explicit, regular

CHECKED = 4  # last steps of a run that are compared with the explicit matrix


@each(
    lambda storage, m, method: m < 90 or storage in ("dense", "topk"),
    storage=["dense", "topk", "bfloat16", "topk-4-bit", "rank-1"],
    m=[1, 3, 31, 96, 160],
    method=list(METHODS),
)
def test_window_sizes(storage: str, m: int, method: str) -> None:
    kind, params = STORAGES[storage], parameters([(3, 5), (4,)])
    own = {**averaging(method, 0.0, 0.99), **regular(method, 1e-2), **kind.keywords}
    opt = built(METHODS[method], params, lr=1.0, window_size=m, **own)
    steps = 3 * m + 2 if m < 90 else m + 7
    for step in range(steps):
        u = push(opt, params, noise(19, seed=step))
        if step >= steps - CHECKED:
            rows = history(opt, params, [0, 1], kind.block_size)
            assert len(rows) == min(m, step + 1)
            assert_near(u, explicit(method, rows, rows[-1], 1e-2, 0.99))


def test_a_window_above_1024_rows() -> None:
    """A checkpoint fills it, because more than a thousand growing solves would not show more."""
    m, d = 1100, 6
    params = parameters([(d,)])
    opt = MFAC(params, lr=1.0, window_size=m, damping=1e-2)
    push(opt, params, noise(d))
    saved, rows = snapshot(opt), noise(m, d, seed=1)
    state = saved["state"][0]
    row, column = torch.tril_indices(m, m)
    state["window"], state["gram"] = rows, (rows @ rows.mT)[row, column]
    state["count"], state["pos"] = (torch.as_tensor(state[key]) * 0 + n for key, n in (("count", 2500), ("pos", 300)))
    opt.load_state_dict(saved)
    for step in range(2):
        u = push(opt, params, noise(d, seed=2 + step))
        rows = history(opt, params, [0])
        assert len(rows) == m
        assert_near(u, fisher_direction(rows, rows[-1], 1e-2))
        ordered = rows.roll(301 + step, dims=0)  # in the order of the slots
        assert_near(gram(states(opt)[0]), ordered @ ordered.mT, 1e-12)


RULES = [(16, 0.25), (16, 0.01), (64, 0.3), (64, 0.01), (100, 0.99), (4096, 0.5)]  # the last: more than 1024 entries


@pytest.mark.parametrize(("block", "density"), RULES)
def test_parameters_smaller_and_larger_than_a_block(block: int, density: float) -> None:
    spec = {"density": density, "block_size": block}
    for N in (1, 7, block - 1, block, block + 1, 3 * block + 5):
        params, sender = parameters([(N,)]), TopKRows(N, spec, torch.float64)
        opt = MFAC(params, lr=1.0, window_size=3, damping=1e-2, compression=TopK(**spec))
        sent: list[Tensor] = []
        for step in range(11):
            g = noise(N, seed=step)
            u = push(opt, params, g)
            sent.append(sender.send(g))
            rows = history(opt, params, [0], block)
            assert torch.equal(rows, torch.stack(sent[-3:]))
            if step >= 11 - CHECKED:
                assert_near(u, woodbury(rows, rows[-1], 1e-2, len(rows)))
        if N < 70:
            assert_near(u, fisher_direction(rows, rows[-1], 1e-2))
        state = states(opt)[0]
        assert ("window_idx" in state) == (block <= N)
        assert ("tail_idx" in state) == (N % block > 0)


@pytest.mark.parametrize(("block", "dtype"), [(32768, torch.int16), (65536, torch.int32)])
def test_offsets_above_the_range_of_16_bits(block: int, dtype: torch.dtype) -> None:
    """As a signed 16-bit number, 40000 would be -25536."""
    N, far = 65536 + 11, 40000
    params = parameters([(N,)])
    opt = MFAC(params, lr=1.0, window_size=3, damping=1e-2, compression=TopK(density=1e-4, block_size=block))
    for step in range(5):
        g = 1e-3 * noise(N, seed=step)
        g[far], g[block - 1], g[N - 1] = 3.0, -2.0, 1.0
        u = push(opt, params, g)
        state, rows = states(opt)[0], history(opt, params, [0], block)
        assert state["window_idx"].dtype == state["tail_idx"].dtype == dtype
        assert state["window_idx"].shape == (65536 // block, 3, 8)
        assert (rows[-1, far], rows[-1, block - 1], rows[-1, N - 1]) == (3.0, -2.0, 1.0)
        assert_near(u, woodbury(rows, rows[-1], 1e-2, len(rows)))
        assert u[far]
        assert not u[(rows == 0).all(dim=0)].any()


@pytest.mark.parametrize("rank", [3, 7])
def test_full_rank_is_the_dense_window(rank: int) -> None:
    for cls in (MFAC, GGT):
        dense, factors = (parameters([(3, 5), (3, 2, 4), (5,), ()]) for _ in range(2))
        opt = cls(dense, lr=1.0, window_size=4)
        twin = cls(factors, lr=1.0, window_size=4, compression=LowRank(rank=rank))
        for step in range(14):
            g = noise(45, seed=step)
            assert_near(push(twin, factors, g), push(opt, dense, g), 1e-9)


def test_low_rank_of_a_zero_gradient_keeps_its_start() -> None:
    params = parameters([(6, 7)])
    opt = MFAC(params, lr=1.0, window_size=3, compression=LowRank(rank=2))
    before = snapshot(opt)["state"][0]["q_prev"]
    assert before.any()
    u = push(opt, params, torch.zeros(42))
    state = states(opt)[0]
    assert torch.equal(state["q_prev"], before)
    assert not u.any()
    assert not state["error"].any()
    assert not stored_rows(state, 42).any()
    push(opt, params, noise(42))
    assert_near(history(opt, params, [0])[-1].reshape(6, 7) + states(opt)[0]["error"], noise(42).reshape(6, 7), 1e-12)


def test_low_rank_starts_from_its_seed() -> None:
    def trained(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed + 10)  # has no effect
        params = parameters([(6, 7)])
        opt = MFAC(params, lr=1.0, window_size=3, compression=LowRank(rank=2), deterministic_seed=seed)
        push(opt, params, noise(42))
        return snapshot(opt)

    assert differences(trained(0), trained(0)) == set()
    assert "window_p" in differences(trained(0), trained(1))
