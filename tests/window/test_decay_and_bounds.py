"""Weight decay in all its modes, clipping, grafting, and parameters that leave the window."""

import pytest
import torch
from torch import Tensor, nn

from secondorder import MFAC, WindowOptions
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.oracles.window import Average, extended, fisher_direction
from tests.support.window import assert_near, columns_of, flat, give, history, noise, parameters, push, put, states
from tests.support.window_storages import METHODS, STORAGES, averaging, explicit, regular

SHAPES, D, M, LR, DECAY = [(4, 5), (3,)], 23, 5, 0.5, 0.1
SPLIT = {"global": [[0, 1]], "layer": [[0], [1]]}
#: Share of the parameters that is subtracted outside of the preconditioned vector.
MODES = {"standard": 0.0, "legacy": DECAY, "reg": 0.0, "both": DECAY}


def step_from(opt: torch.optim.Optimizer, params: list[nn.Parameter], p: Tensor, gradient: Tensor) -> Tensor:
    """What a step subtracts from parameters with the values ``p``."""
    put(params, p)
    give(params, gradient)
    opt.step()
    return p - flat(params)


@pairs(method=list(METHODS), mode=list(MODES), partition=list(SPLIT))
def test_modes_of_weight_decay(method: str, mode: str, partition: str) -> None:
    """With λ = 1e-6 (ε = 1e-4), preconditioning g + wd·p with the dots of g would leave p/λ."""
    params, small = parameters(SHAPES), 1e-6 if method == "mfac" else 1e-4
    keywords = {"weight_decay": DECAY, "weight_decay_mode": mode, "partition": partition, **regular(method, small)}
    opt = built(METHODS[method], params, lr=LR, window_size=M, **keywords)
    seen: list[Tensor] = []
    for step in range(3 * M + 2):
        g, p = noise(D, seed=step), noise(D, seed=100 + step)
        moved = step_from(opt, params, p, g)
        seen.append(g + DECAY * p if mode == "standard" else g)
        x = g if mode == "legacy" else g + DECAY * p
        for unit in SPLIT[partition]:
            c = columns_of(params, unit)
            if len(c) <= M and mode in ("reg", "both"):
                continue  # rows span the unit, so that x/λ cancels; see the next test
            u = explicit(method, torch.stack(seen[-M:])[:, c], x[c], small)
            assert_near(moved[c], LR * u + MODES[mode] * p[c], 1e-9, f"step {step}")


@pytest.mark.parametrize("method", METHODS)
def test_decay_inside_a_window_that_spans_everything(method: str) -> None:
    params, m, damping = parameters([(4,)]), 9, 1e-4
    keywords = {"weight_decay": DECAY, "weight_decay_mode": "reg", **regular(method, damping)}
    opt = built(METHODS[method], params, lr=1.0, window_size=m, **keywords)
    g = noise(20, 4)
    for step in range(20):
        p = noise(4, seed=step)
        moved = step_from(opt, params, p, g[step])
        if step >= 4:
            rows = g[max(0, step + 1 - m) : step + 1]
            assert_near(moved, explicit(method, rows, g[step] + DECAY * p, damping), 1e-9, step)


@pairs(storage=["float32", "bfloat16", "topk", "rank-2"], mode=["reg", "both"])
def test_with_a_compressed_window_the_stored_row_and_the_decay_are_preconditioned(storage: str, mode: str) -> None:
    kind, params = STORAGES[storage], parameters(SHAPES)
    keywords = {"weight_decay": DECAY, "weight_decay_mode": mode, **kind.keywords}
    opt = built(MFAC, params, lr=LR, window_size=M, damping=1e-6, **keywords)
    for step in range(3 * M + 2):
        g, p = noise(D, seed=step), noise(D, seed=100 + step)
        moved = step_from(opt, params, p, g)
        rows = history(opt, params, [0, 1], kind.block_size)
        u = fisher_direction(rows, rows[-1] + DECAY * p, 1e-6)
        assert_near(moved, LR * u + MODES[mode] * p, 1e-9, f"step {step}")


def test_groups_of_one_unit_may_have_different_decays() -> None:
    params = parameters(SHAPES)
    groups = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:]}]
    opt = MFAC(groups, lr=1.0, window_size=M, damping=1e-6, weight_decay_mode="reg")
    decay, rows = torch.cat([torch.full((20,), 0.3, dtype=torch.float64), torch.zeros(3)]), noise(12, D)
    for step in range(12):
        p = noise(D, seed=100 + step)
        expected = fisher_direction(rows[max(0, step + 1 - M) : step + 1], rows[step] + decay * p, 1e-6)
        assert_near(step_from(opt, params, p, rows[step]), expected, 1e-9, step)


@pytest.mark.parametrize("method", METHODS)
def test_reg_adds_the_decay_to_momentum_before_preconditioning(method: str) -> None:
    own = {**averaging(method, 0.9, 0.8), **regular(method, 1e-3)}
    params, average = parameters(SHAPES), Average(D, 0.9)
    opt = built(METHODS[method], params, lr=1.0, window_size=M, weight_decay=DECAY, weight_decay_mode="reg", **own)
    g = noise(17, D)
    for step in range(17):
        p, v = noise(D, seed=100 + step), average.add(g[step])
        rows = g[max(0, step + 1 - M) : step + 1]
        u = explicit(method, rows, v + extended(DECAY * p), 1e-3, 0.8)
        assert_near(step_from(opt, params, p, g[step]), u, 1e-9, step)


# ------------------------------------------------------------------------------------------------ clipping and grafting
@pairs(method=list(METHODS), partition=list(SPLIT))
def test_the_norm_of_all_directions_is_clipped_before_momentum(method: str, partition: str) -> None:
    keywords = {"lr": 1.0, "window_size": M, "partition": partition}
    (plain, clipped), v = (parameters(SHAPES), parameters(SHAPES)), torch.zeros(D, dtype=torch.float64)
    opt = built(METHODS[method], plain, **keywords)
    twin = built(METHODS[method], clipped, clip_norm=0.1, momentum=0.5, **keywords)
    for step in range(12):
        g = noise(D, seed=step) * 4.0 ** (step % 3)
        u = push(opt, plain, g)
        v = 0.5 * v + u * min(1.0, 0.1 / (float(u.norm()) + 1e-12))
        assert_near(push(twin, clipped, g), v, 1e-10)


@pytest.mark.filterwarnings("ignore:.*momentum=0.5 has no effect")
@pairs(method=list(METHODS), partition=list(SPLIT))
def test_adam_graft(method: str, partition: str) -> None:
    """The direction is the method's for Adam's first moment over the rows of the window; its norm is Adam's."""
    params, (beta1, beta2), eps = parameters(SHAPES), (0.8, 0.9), 1e-3
    graft = {"graft": "adam", "fallback_betas": (beta1, beta2), "fallback_eps": eps, **regular(method, 1e-3)}
    opt = built(METHODS[method], params, lr=1.0, momentum=0.5, window_size=M, partition=partition, **graft)
    g, mean, square = noise(17, D), torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    for step in range(17):
        mean = beta1 * mean + (1 - beta1) * g[step]
        square = beta2 * square + (1 - beta2) * g[step] ** 2
        m_hat, v_hat = mean / (1 - beta1 ** (step + 1)), square / (1 - beta2 ** (step + 1))
        size, moved = m_hat / (v_hat.sqrt() + eps), push(opt, params, g[step])
        rows = g[max(0, step + 1 - M) : step + 1]
        remembered = (beta1 ** torch.arange(len(rows) - 1, -1, -1, dtype=torch.float64)) @ rows
        for unit in SPLIT[partition]:
            c = columns_of(params, unit)
            u = explicit(method, rows[:, c], remembered[c], 1e-3)
            assert_near(moved[c], u * size[c].norm() / u.norm(), 1e-8, step)


class Scaling(nn.LayerNorm):
    """A norm layer with a name that does not reveal it."""


def test_derived_norm_layers_are_left_out() -> None:
    net = nn.Sequential(nn.Linear(5, 4), Scaling(4))
    opt = MFAC(net, window=WindowOptions(skip_norm_layers=True))
    assert [i for i, state in states(opt).items() if "window" in state] == [0, 1]
