"""Figures that are computed from the Gram matrix equal those of the vectors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import GGT, MFAC
from tests.support.building import built
from tests.support.grid import each
from tests.support.window import flat, give, history, noise, parameters, push, residual, states
from tests.support.window_storages import STORAGES

SHAPES, D, M = [(4, 5), (3,)], 23, 4


@each(cls=[MFAC, GGT], storage=["dense", "bfloat16", "topk", "rank-1"])
def test_cosine_angle_and_norms(cls: Any, storage: str) -> None:
    kind, params = STORAGES[storage], parameters(SHAPES)
    opt = built(cls, params, lr=1.0, window_size=M, **kind.keywords)
    for step in range(3 * M):
        u = push(opt, params, noise(D, seed=step))
        (figures,) = opt.diagnostics()["units"].values()
        g = history(opt, params, [0, 1], kind.block_size)[-1]
        cosine = float(g @ u / (g.norm() * u.norm()))
        assert figures["cos"] == pytest.approx(cosine, abs=1e-9)
        assert figures["angle"] == pytest.approx(math.degrees(math.acos(min(1.0, cosine))), abs=1e-4)
        assert figures["norm_ratio"] == pytest.approx(float(u.norm() / g.norm()), rel=1e-9)
        assert figures["count"] == step + 1


@pytest.mark.parametrize("damping", [1e-2, 1e-5])
def test_amplification_and_effective_rank(damping: float) -> None:
    params = parameters(SHAPES)
    opt = MFAC(params, lr=1.0, window_size=M, damping=damping)
    for step in range(3 * M):
        push(opt, params, noise(D, seed=step // 2) + 1e-2 * noise(D, seed=99 + step))
        (figures,) = opt.diagnostics()["units"].values()
        rows = history(opt, params, [0, 1])
        S, n = rows @ rows.mT, len(rows)
        a = torch.linalg.solve(
            damping * torch.eye(n, dtype=torch.float64) + S / n, torch.eye(n, dtype=torch.float64)[-1]
        )
        spectrum = torch.linalg.eigvalsh(S)
        expected = float((a * rows.norm(dim=1)).norm() / (a @ S @ a).sqrt())
        assert figures["amplification"] == pytest.approx(expected, rel=1e-6)
        share = spectrum / spectrum.sum()
        assert figures["effective_rank"] == pytest.approx(float(torch.exp(-(share * share.log()).sum())), rel=1e-6)


@pytest.mark.parametrize("storage", ["topk", "topk-bfloat16", "rank-1"])
def test_sent_energy_and_length_of_the_residual(storage: str) -> None:
    """They are ‖ĝ‖² / ‖e + g‖², ‖e‖ and ‖e‖ / ‖g‖."""
    kind, params = STORAGES[storage], parameters(SHAPES)
    opt, left = built(MFAC, params, lr=1.0, window_size=M, **kind.keywords), torch.zeros(D, dtype=torch.float64)
    for step in range(3 * M):
        g = noise(D, seed=step)
        push(opt, params, g)
        (figures,) = opt.diagnostics()["units"].values()
        row, accumulated = history(opt, params, [0, 1], kind.block_size)[-1], left + g
        left = torch.cat([residual(s, p.numel()) for s, p in zip(states(opt).values(), params, strict=True)])
        assert figures["sent_energy"] == pytest.approx(float(row @ row / (accumulated @ accumulated)), rel=5e-3)
        assert figures["residual_norm"] == pytest.approx(float(left.norm()), rel=1e-5)
        assert figures["residual_ratio"] == pytest.approx(float(left.norm() / g.norm()), rel=1e-5)


@each(storage=["topk", "topk-4-bit"], missing=[[0, 1], [1], [2, 3]])
def test_diagnostics_after_a_layer_without_gradient_and_a_dropped_step(storage: str, missing: list[int]) -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    params, units = list(net.parameters()), {"0": [0, 1], "1": [2, 3]}
    opt = built(MFAC, net, lr=1.0, window_size=M, damping=1e-2, partition="layer", **STORAGES[storage].keywords)
    give(params, torch.full((39,), torch.nan))
    opt.step()
    assert opt.diagnostics()["units"]["0"] == {"rows": 0, "count": 0}
    lengths: dict[str, Tensor] = {}
    for step in range(6):
        give(params, noise(39, seed=step))
        for i in missing if step in (3, 5) else []:
            params[i].grad = None
        for name, unit in units.items():
            if given := [params[i].grad for i in unit if params[i].grad is not None]:
                lengths[name] = flat(given).norm()
        opt.step()
    diagnostics, state = opt.diagnostics(), states(opt)
    for name, unit in units.items():
        found = diagnostics["units"][name]
        if storage == "topk":
            left = torch.cat([residual(state[i], params[i].numel()) for i in unit]).norm()
            assert found["residual_norm"] == pytest.approx(float(left), rel=1e-12)
        assert found["residual_ratio"] == pytest.approx(found["residual_norm"] / float(lengths[name]), rel=1e-9)
        assert 0 < found["sent_energy"] <= 1
        assert found["count"] == int(state[unit[0]]["count"]) == (4 if set(unit) <= set(missing) else 6)
        assert all(math.isfinite(float(value)) for value in found.values())
    give(params, torch.full((39,), torch.nan))
    opt.step()
    after = opt.diagnostics()
    assert after["units"] == diagnostics["units"]
    assert (after["skipped_steps"], after["solve_failures"]) == (diagnostics["skipped_steps"] + 1, 0)
