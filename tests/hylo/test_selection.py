"""Sampling and interpolation of examples against naive loops, exact probabilities and LAPACK.

Statements about expectations are checked over thousands of draws with a fixed seed, within five standard errors.
"""

import math
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from secondorder.linalg.selection import (
    PIVOTINGS,
    RESIDUALS,
    SAMPLINGS,
    core,
    draw,
    energy_rank,
    inclusion,
    interpolate,
    pivots,
    planned_rank,
)
from tests.support.grid import each, pairs

SCORES = {
    name: torch.tensor(q, dtype=torch.float64)
    for name, q in {
        "alike": [1] * 9,
        "mild": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "heavy": [1e6, 1e3, 1e3, 7, 5, 2, 1e-1, 1e-2, 1e-3],
        "tiny": [3e-160, 1e-160, 2e-160, 1e-161, 5e-160, 1e-160, 1e-160, 1e-160, 1e-160],
        "zeros": [0, 3, 0, 1, 0, 50, 2, 0, 4],
    }.items()
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def kernel(n: int = 12, rank: int | None = None, seed: int = 0) -> Tensor:
    rows = normal(n, rank or n, seed=seed) * torch.linspace(0.2, 2.0, n, dtype=torch.float64)[:, None]
    return rows @ rows.T


# ---------------------------------------------------------------------------------------------------------- sampling
def iterated(scores: Tensor, rank: int) -> list[float]:
    """``min(1, r q/Σq)``, where what is cut off is given to the others until nothing is cut off."""
    q, ones = scores.tolist(), set()
    while True:
        rest = sum(x for s, x in enumerate(q) if s not in ones)
        pi = [1.0 if s in ones else (rank - len(ones)) * x / rest if x else 0.0 for s, x in enumerate(q)]
        more = {s for s, x in enumerate(pi) if x >= 1} | ones
        if more == ones:
            return pi
        ones = more


@pytest.mark.parametrize("name", SCORES)
def test_inclusion_is_the_limit_of_the_iteration(name: str) -> None:
    q = SCORES[name]
    positive = int((q > 0).sum())
    for rank in (1, 2, 4, 5, 8, 9):
        found = inclusion(q, rank)
        wanted = iterated(q, rank) if rank < positive else (q > 0).double().tolist()
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)
        assert float(found.sum()) == pytest.approx(min(rank, positive), rel=1e-13)
        assert float(found.max()) <= 1


@pytest.mark.parametrize("name", ["alike", "mild", "heavy", "zeros"])
def test_systematic_draws_never_repeat_and_have_the_frequency_of_inclusion(name: str) -> None:
    times, q = 4000, SCORES[name]
    for rank in (1, 3, 6):
        index, weight = draw(q.expand(times, -1), rank, "systematic", generator())
        assert bool((index.sort(-1).values.diff(dim=-1) > 0).all())
        pi = inclusion(q, rank)
        drawn = weight > 0
        assert bool((drawn.sum(-1) == min(rank, int((q > 0).sum()))).all())
        frequency = torch.zeros(times, 9, dtype=torch.float64).scatter_add_(1, index, drawn.double()).mean(0)
        assert bool(((frequency - pi).abs() <= 5 * (pi * (1 - pi) / times).sqrt()).all())
        torch.testing.assert_close(weight, torch.where(drawn, pi[index].rsqrt(), 0.0), rtol=1e-14, atol=0)


def test_systematic_draws_of_any_two_rows_occur() -> None:
    """The line is permuted at random; otherwise neighbors of small probability would never be drawn together."""
    index = draw(torch.ones(2000, 6), 2, "systematic", generator()).index
    counts = torch.bincount(index[:, 0] * 6 + index[:, 1], minlength=36)
    assert all(counts[i * 6 + j] > 0 for i, j in combinations(range(6), 2))


def test_many_rows_that_must_be_drawn_are_drawn() -> None:
    """With 600 probabilities of 1 and 400 small ones, rounding errors of a sum would miss some in some draws."""
    q = torch.rand(20, 1000, generator=generator(), dtype=torch.float64) + 0.5
    q[:, ::5], q[:, 1::5] = 1e-4, 1e-7
    index, weight = draw(q, 610, "systematic", generator())
    certain = inclusion(q, 610) == 1
    assert bool((certain.sum(-1) >= 600).all())
    found = torch.zeros_like(certain).scatter_(1, index, True)
    assert bool(found[certain].all())
    assert bool((weight > 0).all())


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53], ids=["least", "greatest"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_extreme_random_numbers(sampling: str, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draw is beyond the ends of the line, and none is superfluous, however probabilities are rounded."""
    q = torch.rand(200, 37, generator=generator(), dtype=torch.float64) ** 3
    q[:, :2] = q[:, -2:] = 0
    rand = torch.rand

    def extreme(*args: int, **kwargs: object) -> Tensor:
        numbers = rand(*args, **kwargs)
        numbers[..., -1 if sampling == "systematic" else slice(None)] = number
        return numbers

    monkeypatch.setattr(torch, "rand", extreme)
    index, weight = draw(q, 5, sampling, generator())
    assert bool((weight > 0).all())
    assert bool((q.gather(-1, index) > 0).all())
    assert sampling == "replacement" or bool((index.diff(dim=-1) > 0).all())


def sequential(q: list[float], order: tuple[int, ...]) -> float:
    """Probability of this order if examples are drawn one after the other from those that are left."""
    probability, left = 1.0, sum(q)
    for s in order:
        probability, left = probability * q[s] / left, left - q[s]
    return probability


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("sampling", ["unweighted", "uniform"])
def test_draws_without_replacement_have_their_exact_distribution(sampling: str, rank: int) -> None:
    times, q = 20_000, [1.0, 4.0, 0.5, 2.0, 6.0]
    index, weight = draw(torch.tensor(q).expand(times, -1), rank, sampling, generator())
    assert bool((weight == torch.tensor(math.sqrt(5 / rank))).all())
    rates = q if sampling == "unweighted" else [1.0] * 5
    for chosen in combinations(range(5), rank):
        p = sum(sequential(rates, order) for order in permutations(chosen))
        frequency = float((index == torch.tensor(chosen)).all(-1).double().mean())
        assert abs(frequency - p) <= 5 * math.sqrt(p * (1 - p) / times)


def test_draws_with_replacement_have_their_frequencies_and_weights() -> None:
    times, q = 20_000, SCORES["zeros"]
    index, weight = draw(q.expand(times, -1), 3, "replacement", generator())
    p = q / q.sum()
    frequency = torch.bincount(index.flatten(), minlength=9) / (3 * times)
    assert bool(((frequency - p).abs() <= 5 * (p * (1 - p) / (3 * times)).sqrt()).all())
    torch.testing.assert_close(weight, (3 * p[index]).rsqrt(), rtol=1e-14, atol=0)
    assert bool((index[:, 0] == index[:, 1]).any())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_of_zeros_are_never_drawn(sampling: str) -> None:
    q = SCORES["zeros"]
    for rank in (1, 4, 7):
        index, weight = draw(q.expand(1000, -1), rank, sampling, generator())
        assert bool((q[index][weight > 0] > 0).all())
        if sampling == "replacement":
            assert bool((weight > 0).all())
            continue
        assert bool(((weight > 0).sum(-1) == min(rank, 5)).all())
        assert bool((index.sort(-1).values.diff(dim=-1) > 0).all())  # places without a draw repeat nothing either
        if rank == 7 and sampling != "unweighted":  # all rows, with their own weight
            assert bool((weight[weight > 0] == 1).all())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_scores_that_are_zero_or_not_finite_affect_the_weights_of_their_own_block_only(sampling: str) -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        q = torch.ones(3, 8)
        q[1] = bad if bad <= 0 else 1.0
        q[1, 5] = bad
        index, weight = draw(q, 4, sampling, generator())
        assert bool((weight[1] == 0).all() if bad <= 0 else weight[1].isnan().all())
        assert bool((weight[[0, 2]] > 0).all())
        assert bool(((index >= 0) & (index < 8)).all())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_are_determined_by_the_generator(sampling: str) -> None:
    q = torch.rand(3, 20, generator=generator(5))
    before, rng = q.clone(), generator(7)
    first = draw(q, 4, sampling, rng)
    torch.manual_seed(2)
    again = draw(q, 4, sampling, generator(7))
    assert torch.equal(first.index, again.index)
    assert torch.equal(first.weight, again.weight)
    assert first.weight.dtype == torch.float32
    assert torch.equal(q, before)
    for other in (generator(8), rng):  # the generator advances
        assert not torch.equal(draw(q, 4, sampling, other).index, first.index)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_batch_is_drawn_like_its_parts_one_after_the_other(sampling: str) -> None:
    q = torch.rand(2, 3, 20, generator=generator(5), dtype=torch.float64) ** 3
    together, rng = draw(q, 4, sampling, generator()), generator()
    parts = [draw(one, 4, sampling, rng) for one in q.flatten(0, 1)]
    for i, found in enumerate(together):
        assert torch.equal(found.flatten(0, 1), torch.stack([part[i] for part in parts]))


# ------------------------------------------------------------------------------------------------------ interpolation
def naive(k: Tensor, rank: int, order: list[int] | None = None) -> tuple[list[int], Tensor, Tensor]:
    """Pivots, L ``[n, r]`` and the whole remainder, which is updated after each pivot."""
    rest, chosen, columns = k.clone(), [], []
    for j in range(rank):
        i = int(rest.diagonal().argmax()) if order is None else order[j]
        columns.append(rest[:, i] / rest[i, i].sqrt())
        rest -= torch.outer(columns[-1], columns[-1])
        chosen.append(i)
    return chosen, torch.stack(columns, 1), rest


def rebuilt(k: Tensor, index: Tensor, p: Tensor) -> Tensor:
    return p.mT @ k[index[:, None], index] @ p


@pairs(order={"pivoted": None, "given": [3, 0, 11, 7, 5, 1, 2, 4, 6, 8, 9, 10]}, rank=[1, 5, 12])
def test_interpolation_is_that_of_the_naive_loop(rank: int, order: list[int] | None) -> None:
    k = kernel()
    found = interpolate(k, rank, order=None if order is None else torch.tensor(order[:rank]))
    chosen, lower, rest = naive(k, rank, order)
    assert found.index.tolist() == chosen
    assert found.valid.tolist() == [1] * rank
    wanted = torch.linalg.solve(k[chosen][:, chosen], k[chosen])
    torch.testing.assert_close(found.p, wanted, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.p[:, chosen], torch.eye(rank, dtype=torch.float64))
    torch.testing.assert_close(found.residual, rest.diagonal(), rtol=1e-9, atol=1e-12)
    assert bool((found.residual[chosen] == 0).all())
    assert bool((found.residual >= 0).all())
    torch.testing.assert_close(found.energy, lower.square().sum(0).cumsum(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("pivoting", PIVOTINGS)
def test_a_kernel_of_low_rank_is_rebuilt_from_as_many_pivots(pivoting: str) -> None:
    k = kernel(rank=3)
    found = interpolate(k, 6, order=pivots(k, 6, pivoting))
    assert found.valid.tolist() == [1, 1, 1, 0, 0, 0]
    assert len(set(found.index.tolist())) == 6
    assert bool((found.p[3:] == 0).all())
    torch.testing.assert_close(rebuilt(k, found.index, found.p), k, rtol=0, atol=1e-11)
    assert float(found.residual.max()) < 1e-11
    assert float(found.energy[2]) == pytest.approx(float(k.trace()), rel=1e-12)
    assert bool((found.energy[3:] == found.energy[2]).all())


def test_a_given_order_may_contain_pivots_that_add_nothing() -> None:
    """A duplicate of the first, the first again, and then one that is new."""
    rows = normal(5, 9)
    rows[3] = rows[0]
    k = rows @ rows.T
    found = interpolate(k, 4, order=torch.tensor([0, 3, 0, 2]))
    assert found.valid.tolist() == [1, 0, 0, 1]
    wanted = torch.linalg.solve(k[[0, 2]][:, [0, 2]], k[[0, 2]])
    torch.testing.assert_close(found.p[[0, 3]], wanted, rtol=1e-12, atol=1e-12)
    assert bool((found.p[1:3] == 0).all())
    assert torch.equal(found.p[[0, 3]][:, [0, 2]], torch.eye(2, dtype=torch.float64))
    assert found.residual[[0, 2]].tolist() == [0, 0]
    rest = (k - k[:, [0, 2]] @ wanted).diagonal()
    torch.testing.assert_close(found.residual, rest, rtol=1e-12, atol=1e-12)
    for residual in RESIDUALS:
        assert bool(core(k, found, 0.1, residual).isfinite().all())


def test_kernels_of_zeros_have_no_pivots_and_negative_remainders_are_never_chosen() -> None:
    found = interpolate(torch.zeros(5, 5), 3)
    assert found.valid.tolist() == [0, 0, 0]
    assert bool((found.p == 0).all())
    assert bool((found.residual == 0).all())
    found = interpolate(torch.diag(torch.tensor([-1.0, 2.0, -3.0])), 3)
    assert found.index.tolist()[0] == 1
    assert found.valid.tolist() == [1, 0, 0]
    assert found.residual.tolist() == [0, 0, 0]
    found = interpolate(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), 2)
    assert found.valid.tolist() == [1, 0]
    assert found.residual.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tolerance_depends_on_the_precision_of_the_kernel(dtype: torch.dtype) -> None:
    k = torch.diag(torch.tensor([1.0, 1e-5, 1e-7, 1e-12, 1e-14])).to(dtype)
    found = interpolate(k, 5)
    assert int(found.valid.sum()) == (2 if dtype == torch.float32 else 4)
    assert found.valid.dtype == dtype
    assert found.p.dtype == found.residual.dtype == found.energy.dtype == torch.float64
    assert int(interpolate(k, 5, tolerance=1e-6).valid.sum()) == 2
    assert int(interpolate(k, 5, tolerance=0.0).valid.sum()) == 5


def test_large_float32_kernels_stay_in_float32() -> None:
    rows = torch.randn(2049, 2, generator=generator())
    k = rows @ rows.T
    found = interpolate(k, 2)
    assert found.p.dtype == torch.float32
    torch.testing.assert_close(rebuilt(k, found.index, found.p), k, rtol=0, atol=1e-4)


def test_a_kernel_that_is_not_finite_affects_its_own_block_only() -> None:
    for bad in (math.nan, math.inf):
        k = torch.stack([kernel(6, seed=s) for s in range(3)])
        k[1, 2], k[1, :, 2] = bad, bad
        found = interpolate(k, 4)
        assert bool(found.valid[1].isnan().all())
        assert bool((found.valid[[0, 2]] == 1).all())
        assert bool(((found.index >= 0) & (found.index < 6)).all())
        for residual in RESIDUALS:
            assert bool(core(k, found, 0.1, residual)[[0, 2]].isfinite().all())


@each(pivoting=PIVOTINGS, residual=RESIDUALS)
def test_a_batch_is_decomposed_like_its_parts(pivoting: str, residual: str) -> None:
    k = torch.stack([kernel(8, rank, seed=rank) for rank in (1, 2, 3, 5, 8, 8)]).view(2, 3, 8, 8)
    k[1, 2] = 0
    before, damping = k.clone(), torch.tensor([[0.1, 1, 2], [1e-3, 0.5, 1]], dtype=torch.float64)
    together = interpolate(k, 4, order=pivots(k, 4, pivoting))
    s = core(k, together, damping, residual)
    for i in range(2):
        for j in range(3):
            alone = interpolate(k[i, j], 4, order=pivots(k[i, j], 4, pivoting))
            valid = alone.valid.bool()  # places without a pivot are arbitrary
            assert torch.equal(together.index[i, j][valid], alone.index[valid])
            for found, wanted in zip(together[1:], alone[1:], strict=True):
                torch.testing.assert_close(found[i, j], wanted, rtol=1e-12, atol=1e-12)
            wanted = core(k[i, j], alone, damping[i, j], residual)
            torch.testing.assert_close(s[i, j], wanted, rtol=1e-9, atol=1e-9)
    assert torch.equal(k, before)


# --------------------------------------------------------------------------------------------------- core and ranks
@pytest.mark.parametrize("residual", RESIDUALS)
def test_rows_without_a_pivot_have_a_one_on_the_diagonal(residual: str) -> None:
    found = interpolate(kernel(rank=2), 4)
    s = core(kernel(rank=2), found, 0.5, residual)
    wanted = torch.eye(4, dtype=torch.float64)
    wanted[:2, :2] = found.p[:2] @ found.p[:2].T / 0.5
    torch.testing.assert_close(s, wanted, rtol=1e-10, atol=1e-10)
    assert float(torch.linalg.eigvalsh(s)[0]) > 0


def test_an_indefinite_remainder_is_replaced_by_its_diagonal() -> None:
    k = kernel()
    k[0, 1] = k[1, 0] = k[0, 1] + 100  # no longer a Gram matrix
    found = interpolate(k, 2, order=torch.tensor([8, 9]))
    both = torch.stack([k, kernel()])
    stacked = interpolate(both, 2, order=torch.tensor([[8, 9], [8, 9]]))
    assert torch.equal(core(k, found, 1e-3, "full"), core(k, found, 1e-3, "diag"))
    full, diag = core(both, stacked, 1e-3, "full"), core(both, stacked, 1e-3, "diag")
    assert torch.equal(full[0], diag[0])
    assert not torch.allclose(full[1], diag[1], rtol=1e-3)


def test_rank_of_energy_is_the_smallest_that_suffices() -> None:
    k = torch.stack([torch.diag(torch.tensor([6.0, 2.0, 1.0, 1.0])), torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0]))])
    trace = k.diagonal(dim1=-2, dim2=-1).sum(-1)
    found = interpolate(k, 4)
    for share, wanted in [(0.0, [1, 1]), (0.5, [1, 2]), (0.6, [1, 3]), (0.75, [2, 3]), (0.95, [4, 4]), (1.0, [4, 4])]:
        assert energy_rank(found, trace, share).tolist() == wanted
    assert energy_rank(interpolate(k, 2), trace, 0.9).tolist() == [2, 2]
    assert energy_rank(interpolate(torch.zeros(3, 3), 2), torch.tensor(0.0), 0.9).tolist() == 1
    assert energy_rank(found, trace, 0.9).dtype == torch.int64


@pytest.mark.parametrize(
    ("n", "fraction", "limit", "wanted"),
    [
        (1, 0.001, 1024, 1), (64, 1e-12, 1024, 1), (80, 0.1, 1024, 8), (81, 0.1, 1024, 9),
        (100, 0.07, 1024, 7),  # 7.000000000000001 before rounding up
        (64, 1.0, 1024, 64), (64, 1.0, 10, 10), (64, 0.5, 0, 1),
    ],
)  # fmt: skip
def test_planned_rank(n: int, fraction: float, limit: int, wanted: int) -> None:
    assert planned_rank(n, fraction, limit) == wanted


# ----------------------------------------------------------------------------------------------- arguments and devices
@pytest.mark.parametrize("rank", [0, -1, 6])
def test_a_rank_beyond_the_examples_is_refused(rank: int) -> None:
    for call in (
        lambda: inclusion(torch.ones(5), rank),
        lambda: draw(torch.ones(5), rank, "uniform", generator()),
        lambda: pivots(kernel(5), rank, "qr"),
        lambda: interpolate(kernel(5), rank),
    ):
        with pytest.raises(ValueError, match=rf"rank must be in 1…5, the number of examples, got {rank}"):
            call()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling must be one of .*'systematic'.*, got 'best'"):
        draw(torch.ones(5), 2, "best", generator())
    with pytest.raises(ValueError, match=r"pivoting must be one of .*'cholesky'.*, got 'best'"):
        pivots(kernel(5), 2, "best")
    with pytest.raises(ValueError, match=r"residual must be one of .*'diag'.*, got 'best'"):
        core(kernel(5), interpolate(kernel(5), 2), 0.1, "best")


def test_no_value_is_read_by_the_host() -> None:
    """Tensors of the meta device have no values to read and cannot be combined with those of another device."""
    q, k = torch.ones(2, 6, device="meta"), torch.ones(2, 6, 6, device="meta")
    for sampling in SAMPLINGS:
        assert draw(q, 3, sampling, generator()).weight.shape == (2, 3)
    for pivoting in PIVOTINGS:
        found = interpolate(k, 3, order=pivots(k, 3, pivoting))
        assert found.p.shape == (2, 3, 6)
    for residual in RESIDUALS:
        assert core(k, found, 0.1, residual).shape == (2, 3, 3)
    assert energy_rank(found, q[:, 0], 0.9).shape == (2,)
