"""`kfac_when_cheaper`: which layers use K-FAC's factors instead of rows, and that these factors are those of KFAC."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import KFAC, HyLo, RowOptions
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.kfac import assert_close, noise
from tests.support.models import Net, images, mlp, seeded_build, vectors
from tests.support.networks import squares
from tests.support.oracles.hylo import check_block, layer_rows, plain_hylo, step, vectors_of
from tests.support.oracles.kfac import expected_factors, solve_exact
from tests.support.oracles.layers import row_of

APPROX = ["expand", "reduce"]


def assert_kfac(opt: HyLo, model: nn.Module, kept: dict, name: str, factors: tuple, damping: float = 1e-2) -> None:
    A, B = factors
    V, moved = vectors_of(model, name, kept)
    assert_close(moved[0], solve_exact(B, A, V.view(len(B), len(A)), damping).flatten(), 1e-8)
    assert_close(opt.dense_curvature(name), torch.kron(B, A), 1e-9)


# --------------------------------------------------------------------------------------------------------- Which layers
@pairs(mode=["sngd", "kid", "kis"], approx=APPROX)
def test_layers_for_which_kfac_is_cheaper_use_it(approx: str, mode: str) -> None:
    """Per layer: rows iff R(d_i + d_o) < d_i² + d_o² and R³ < d_i³ + d_o³, else factors from the same batch."""

    def build() -> nn.Module:
        return seeded_build(
            lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(40, 6), nn.Linear(6, 3))
        )

    (x, y), model, plain = images(12), build(), build()
    opt = plain_hylo(model, mode=mode, approx=approx, rank_fraction=1.0, kfac_when_cheaper=True)
    kept = step(opt, model, x, y, F.cross_entropy)
    for name, (d_o, d_i) in {"0": (2, 9), "3": (6, 41), "4": (3, 7)}.items():
        cheaper = not (12 * (d_i + d_o) < d_i**2 + d_o**2 and d_i**3 + d_o**3 > 12**3)
        assert opt.blocks[name].is_factored == cheaper == (name != "3")
        assert ("k-fac" in row_of(opt, f"{name}.weight").lower()) == cheaper
        assert "fallback" not in row_of(opt, f"{name}.weight")
        if cheaper:
            assert_kfac(opt, model, kept, name, expected_factors(plain, x, y, F.cross_entropy, [name], approx)[name])
    check_block(opt, model, "3", layer_rows(plain, "3", x, y, F.cross_entropy), kept, 1e-2)


def test_the_first_rule_counts_kept_rows_and_their_positions_and_decides_once() -> None:
    """R S (d_i + d_o) < d_i² + d_o² compares R · 15, or 4 · 7 · 15 = 420 or 4 · 15 = 60, with 137."""
    tokens = noise(4, 7, 10), noise(4, 7, 4, seed=1)
    for keywords, batch, factored in (
        ({"mode": "sngd"}, vectors(9, 10, 4), False),
        ({"mode": "sngd"}, vectors(10, 10, 4), True),
        ({"mode": "kid", "rank_fraction": 0.1}, vectors(40, 10, 4), False),
        ({"mode": "kid", "rank_fraction": 1.0}, vectors(40, 10, 4), True),
        ({"approx": "expand"}, tokens, True),
        ({"approx": "reduce"}, tokens, False),
    ):
        model = mlp((10, 4))
        opt = plain_hylo(model, kfac_when_cheaper=True, **keywords)
        for x, y in (batch, vectors(40, 10, 4), vectors(4, 10, 4)):
            step(opt, model, x, y, squares if y.ndim > 1 else F.cross_entropy)
            assert opt.blocks["0"].is_factored == factored, keywords


def test_describe_compares_the_costs_of_rows_and_factors() -> None:
    """Of R rows of S positions, the numbers grow with S, but the kernel that is inverted does not."""
    model = seeded_build(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))
    opt = plain_hylo(model, mode="kid", approx="expand", kfac_when_cheaper=True, rank_fraction=0.5)
    for frozen in (False, True):
        model[0].bias.requires_grad_(not frozen)
        step(opt, model, noise(8, 5, 8), noise(8, 5, 4, seed=1), squares)
        first, last = (line for line in opt.describe().splitlines() if ".weight" in line)
        # Whole gradients of 6·9 and 4·7 numbers are smaller than 5 positions of 6 + 9 and 4 + 7.
        assert "numbers 216 against 117" in first or frozen
        assert "R³ = 64 against 945" in first or frozen
        assert "R³ = 64 against" in first
        assert "numbers 112 against 65" in last
        assert "R³ = 64 against 407" in last


def test_a_rank_by_energy_cannot_be_compared_with_factors() -> None:
    with pytest.raises(ValueError, match=r"kfac_when_cheaper=True .* rank_energy"):
        HyLo(nn.Linear(3, 2), rows=RowOptions(kfac_when_cheaper=True, energy=0.9))


# ------------------------------------------------------------------------------------------------- Damping and averages
def test_a_new_damping_acts_on_factors_at_the_next_refresh() -> None:
    (x, y), model, plain = vectors(40), mlp((4, 3)), mlp((4, 3))
    opt = plain_hylo(model, kfac_when_cheaper=True, update_steps=2)
    factors = expected_factors(plain, x, y, F.cross_entropy)["0"]
    for given, damping in ((1e-2, 1e-2), (3.0, 1e-2), (0.1, 0.1), (5.0, 0.1)):
        opt.param_groups[0]["damping"] = given
        kept = step(opt, model, x, y, F.cross_entropy)
        assert_kfac(opt, model, kept, "0", factors, damping)


@pytest.mark.parametrize("approx", APPROX)
def test_a_relative_damping_means_the_same_for_factors(approx: str) -> None:
    """It is a multiple of the trace of the kernel per example; λ is read off (F̂ + λI) d = V."""
    for cheaper in (False, True):
        model, x, y = mlp((4, 3)), noise(32, 4), noise(32, 3, seed=50)
        U = layer_rows(model, "0", x, y, squares)
        opt = plain_hylo(model, approx=approx, kfac_when_cheaper=cheaper, damping=0.5, damping_mode="relative")
        V, d = (v[0] for v in vectors_of(model, "0", step(opt, model, x, y, squares)))
        assert opt.blocks["0"].is_factored == cheaper
        found = float(d @ (V - opt.dense_curvature("0") @ d) / (d @ d))
        assert found == pytest.approx(0.5 * float(U.square().sum()) / 32 / 32)


def test_factors_are_running_means_weighted_by_examples() -> None:
    model, plain = mlp((4, 3)), mlp((4, 3))
    opt = plain_hylo(model, kfac_when_cheaper=True, factor_decay=0.5)
    total, A, B = 0.0, 0.0, 0.0
    for seed, n in enumerate((20, 30, 40)):
        x, y = vectors(n, seed=seed)
        kept = step(opt, model, x, y, F.cross_entropy)
        a, b = expected_factors(plain, x, y, F.cross_entropy)["0"]
        total = 0.5 * total + n
        A, B = A + n / total * (a - A), B + n / total * (b - B)
        assert_kfac(opt, model, kept, "0", (A, B))


# ----------------------------------------- The factors are those of KFAC, which sums them call by call and keeps no row
def attention() -> Net:
    """Three calls fill one block of three groups; keys and queries differ in length."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    return Net(lambda net, query, key: net.attention(query, key, key, need_weights=False)[0], attention=layer)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 4, 2))


BATCHES = {
    "tokens": (linear, [(noise(40, 6, 4),)]),
    "padding": (linear, [(noise(40, 6, 4),)]),
    "sequences of two lengths": (linear, [(noise(40, 6, 4),), (noise(30, 9, 4, seed=1),)]),
    "groups": (convolutions, [(noise(60, 4, 6, 6),)]),
    "attention": (attention, [(noise(60, 5, 4), noise(60, 7, 4, seed=1))]),
}


def blocks(cls: type, model: nn.Module, batches: list, keep: Tensor | None, **keywords: object) -> dict[str, Tensor]:
    opt = built(cls, model, lr=0.0, **keywords)
    for batch in batches:
        with nullcontext() if keep is None else opt.mask(keep):
            out = model(*batch)
        out = out if keep is None else out * keep[..., None]
        (out.square().sum() + out.sum()).backward()
    opt.step()
    if isinstance(opt, HyLo):
        assert all(block.is_factored for block in opt.blocks.values())
    return {name: opt.dense_curvature(name) for name in opt.blocks}


@pairs(lambda kind, approx: (kind, approx) != ("padding", "reduce"), kind=list(BATCHES), approx=APPROX)
def test_factors_are_those_of_kfac(kind: str, approx: str) -> None:
    keep = noise(40, 6) > -0.25 if kind == "padding" else None
    build, batches = BATCHES[kind]
    model = seeded_build(build)
    expected = blocks(KFAC, copy.deepcopy(model), batches, keep, approx=approx)
    found = blocks(HyLo, model, batches, keep, kfac_when_cheaper=True, mode="sngd", approx=approx)
    assert found.keys() == expected.keys()
    for name, block in expected.items():
        assert_close(found[name], block)
