"""Pure functions of EK-FAC against loops over examples, dense matrices and ``torch.linalg.eigh``."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from secondorder.capture.layers.embedding import EmbeddingAdapter
from secondorder.linalg.dense import Workspace
from secondorder.linalg.eigenbasis import dense, precondition, qr_refresh, transport
from secondorder.linalg.gradient_squares import choose_route, route_costs, scale_intra
from tests.support.grid import each
from tests.support.operators import Operators
from tests.support.oracles.ekfac import scales

WHICH = {"both": "ag", "a": "a", "g": "g", "none": ""}
ROUTES = ["gramian", "gradient", "unprojected", "unprojected_a", "unprojected_g"]
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def orthogonal(*shape: int) -> Tensor:
    """Random orthogonal matrices, neither symmetric nor close to the identity."""
    return torch.linalg.qr(draw(*shape, shape[-1]))[0]


def bases(which: str, n_a: int, n_g: int, *groups: int) -> tuple[Tensor | None, Tensor | None]:
    return (orthogonal(*groups, n_a) if "a" in which else None, orthogonal(*groups, n_g) if "g" in which else None)


def matrix(basis: Tensor | None, n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64) if basis is None else basis.double()


def naive_scale(a: Tensor, g: Tensor, basis_a: Tensor | None, basis_g: Tensor | None) -> Tensor:
    """The sum over examples of one group, one example after the other."""
    gradients = (g.double().mT @ a.double())[:, None]
    return len(a) * scales(gradients, matrix(basis_g, g.shape[-1]), matrix(basis_a, a.shape[-1]))[0]


SHAPES = {"few": (7, 5), "one": (2, 1), "flat": (2, 6), "wide": (70, 3), "tall": (3, 70), "both": (65, 67)}
ROWS = {"a row": (1, 1), "rows": (5, 1), "positions": (1, 9), "rows of two": (4, 2), "rows of nine": (3, 9)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_route_is_the_loop_over_examples(shape: tuple[int, int]) -> None:
    """Groups are independent, chunks may have any size, and each row of the input may have a 1 appended."""
    n_a, n_g = shape
    layouts = itertools.cycle([((), False), ((3,), True), ((), True), ((3,), False), ((), False)])
    for ((examples, positions), which), (groups, homogeneous) in zip(
        itertools.product(ROWS.values(), WHICH.values()), layouts, strict=False
    ):
        a, g = (draw(*groups, examples, positions, n) for n in (n_a, n_g))
        basis_a, basis_g = bases(which, n_a, n_g, *groups)
        if homogeneous:
            a[..., -1] = 1
        wanted = torch.empty(*groups, n_g, n_a, dtype=torch.float64)
        for k in [(i,) for i in range(*groups)] if groups else [...]:
            wanted[k] = naive_scale(a[k], g[k], *(None if basis is None else basis[k] for basis in (basis_a, basis_g)))
        x = a[..., :-1] if homogeneous else a
        for route, chunk_bytes in itertools.product([*ROUTES, None], (1, 8 * 60 * positions + 300, 1 << 24)):
            found = scale_intra(x, g, basis_a, basis_g, route, chunk_bytes, homogeneous=homogeneous)
            torch.testing.assert_close(found, wanted, **EXACT)


def test_without_an_input_the_gradient_is_a_sum() -> None:
    for chunk_bytes, groups, which in itertools.product([1, 1 << 20], [(), (2,)], ["g", ""]):
        g, (_, basis_g) = draw(*groups, 4, 9, 5), bases(which, 1, 5, *groups)
        sign = -torch.ones(*groups, 1, 1, dtype=torch.float64)
        wanted = scale_intra(torch.ones_like(g[..., :1]), g, None, basis_g, "gradient")
        assert wanted.shape == (*groups, 5, 1)
        torch.testing.assert_close(scale_intra(None, g, sign, basis_g, chunk_bytes=chunk_bytes), wanted, **EXACT)
        for route in ROUTES:
            only_ones = scale_intra(g[..., :0], g, None, basis_g, route, chunk_bytes, homogeneous=True)
            torch.testing.assert_close(only_ones, wanted, **EXACT)


@pytest.mark.parametrize("route", ROUTES)
def test_layouts_and_precisions(route: str) -> None:
    a, g, (basis_a, basis_g) = draw(5, 4, 6), draw(5, 4, 3), bases("ag", 6, 3)
    wanted = naive_scale(a, g, basis_a, basis_g)
    scattered = a.mT.contiguous().mT, g.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    torch.testing.assert_close(scale_intra(*scattered, basis_a, basis_g, route), wanted, **EXACT)
    assert basis_a is not None
    assert basis_g is not None
    single = scale_intra(a.float(), g.float(), basis_a.float(), basis_g.float(), route)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), wanted, rtol=1e-4, atol=1e-4)
    half = scale_intra(a.bfloat16(), g.bfloat16(), basis_a, basis_g, route)
    torch.testing.assert_close(half, naive_scale(a.bfloat16(), g.bfloat16(), basis_a, basis_g), **EXACT)
    assert scale_intra(a.half(), g.half(), None, None, route).dtype == torch.float32
    a, g = draw(3, 4, 5, dtype=torch.float32), draw(3, 4, 6, dtype=torch.float32)
    a[:, 2:], g[:, 2:] = a[:, :2], -g[:, :2]  # every gradient cancels up to rounding, and no entry is negative
    assert (scale_intra(a, g, None, None, route) >= 0).all()


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(ValueError, match="route must be one of .*'gramian'.* or None, got 'gram'"):
        scale_intra(draw(2, 2, 2), draw(2, 2, 2), None, None, "gram")


def test_flops_of_the_routes() -> None:
    """With S = 3, n_a = 5, n_g = 2, rows cost 2·3·25 and 2·3·4, and gradients 2·2·25 and 2·5·4."""
    flops = {name: cost.flops for name, cost in route_costs(3, 5, 2).items()}
    assert flops == {
        "gramian": 150 + 24 + 3 * 4 * 10,
        "gradient": 150 + 24 + 2 * 3 * 10,
        "unprojected": 100 + 40 + 2 * 3 * 10,
        "unprojected_a": 100 + 24 + 2 * 3 * 10,
        "unprojected_g": 150 + 40 + 2 * 3 * 10,
    }
    bare = {name: cost.flops for name, cost in route_costs(3, 5, 2, rotate_a=False, rotate_g=False).items()}
    assert bare == {"gramian": 120} | dict.fromkeys(ROUTES[1:], 60)


def test_the_route_of_a_layer() -> None:
    chosen = {
        (1, 65, 10): "gramian",  # one position: the product of the squared rows
        (1, 10, 1): "gramian",
        (4, 513, 512): "gramian",  # 16·1025 < 513·512
        (9, 4097, 4096): "gramian",
        (4, 9, 8): "gradient",  # 16·17 > 72
        (2, 8, 8): "gradient",  # 4·16 = 8·8
        (2, 9, 8): "gramian",  # 4·17 < 9·8
        (16, 33, 32): "gradient",
        (64, 1025, 1024): "gradient",  # 64²·2049 > 1025·1024
        (20, 4097, 4096): "gradient",  # the pairs would be smaller, but 210 products of them are too many
        (1024, 28, 16): "unprojected",  # 1024·(28² + 16²) > 28·16·44
        (3136, 577, 64): "unprojected",
        (196, 10, 1): "unprojected_a",  # one group of a depth-wise convolution
        (256, 64 * 9, 64): "unprojected_a",  # more positions than rows of the gradient, fewer than columns
        (256, 64, 64 * 9): "unprojected_g",
    }
    assert {sizes: choose_route(*sizes) for sizes in chosen} == chosen


def peak_bytes(**arguments: Any) -> int:
    """Largest sum of live allocations during a call of ``scale_intra``, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = scale_intra(**arguments)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = list(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert live[-1] >= result.nbytes  # what is left is the result: every allocation was seen
    return max(live)


SIZES = {"wide": (4, 33, 31), "rows": (40, 9, 5), "one position": (1, 70, 66)}


@each(route=ROUTES, case=["plain", "groups", "cast", "scattered", "no bases"], size=SIZES)
def test_temporaries_stay_below_chunk_bytes(route: str, size: tuple[int, int, int], case: str) -> None:
    (positions, n_a, n_g), groups, examples, dtype = size, 3 if case == "groups" else 1, 96, torch.float32
    lead = (groups,) if case == "groups" else ()
    a, g = (draw(*lead, examples, positions, n, dtype=dtype) for n in (n_a - 1, n_g))
    basis_a, basis_g = bases("" if case == "no bases" else "ag", n_a, n_g, *lead)
    if case == "cast":
        a, g = a.bfloat16(), g.bfloat16()
    if case == "scattered":
        a, g = a.mT.contiguous().mT, g.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    aligned_bases = 0
    if basis_a is not None and basis_g is not None:
        basis_a, basis_g = basis_a.to(dtype), basis_g.to(dtype)
        aligned_bases = 4 * ((n_a + 16) ** 2 + (n_g + 16) ** 2) * groups
    per_example, result = 4 * route_costs(positions, n_a, n_g)[route].memory * groups, 4 * n_a * n_g * groups
    arguments = {"a": a, "g": g, "basis_a": basis_a, "basis_g": basis_g, "route": route, "homogeneous": True}
    for chunk_bytes in (2 * per_example, 5 * per_example, 17 * per_example):
        assert peak_bytes(**arguments, chunk_bytes=chunk_bytes) <= chunk_bytes + result + aligned_bases


def test_chunks_use_the_available_memory() -> None:
    """A chunk has as many examples as fit, so the number of products falls with the bytes."""
    a, g, (basis_a, basis_g) = draw(64, 4, 9), draw(64, 4, 8), bases("ag", 9, 8)
    seen = []
    for chunk_bytes in (1, 1 << 14, 1 << 24):
        with Operators() as operators:
            scale_intra(a, g, basis_a, basis_g, "gradient", chunk_bytes)
        seen.append(sum("mm" in name for name in operators.names))
    assert seen[0] == 3 * 64
    assert seen[2] == 3 < seen[1] < 3 * 32


@pytest.mark.parametrize("masked", [False, True])
def test_embedding_is_the_loop_over_one_hot_rows(masked: bool) -> None:
    n_a, n_g = 4, 3  # few entries: most are repeated inside an example
    for shape, which in itertools.product([(1, 1), (1, 7), (5, 1), (6, 9)], ["g", ""]):
        indices, g, (_, basis_g) = torch.randint(n_a, shape), draw(*shape, n_g), bases(which, 1, n_g)
        keep = torch.rand(shape) < 0.6 if masked else torch.ones(shape, dtype=torch.bool)
        kept = torch.where(keep[..., None], g, 0)
        one_hot = torch.nn.functional.one_hot(indices, n_a) * keep[..., None]
        adapter = EmbeddingAdapter(torch.nn.Embedding(n_a, n_g), True)
        rows = kept.flatten(0, 1) if basis_g is None else kept.flatten(0, 1) @ basis_g
        found = adapter.example_squares(adapter.masked(indices, keep) if masked else indices, rows, shape[0])
        torch.testing.assert_close(found, naive_scale(one_hot, kept, None, basis_g), **EXACT)


@pytest.mark.parametrize("which", WHICH.values(), ids=WHICH)
def test_precondition_is_the_dense_solve(which: str) -> None:
    workspace = Workspace()
    for groups, (n_a, n_g) in itertools.product([(), (3,)], [(7, 5), (65, 2), (2, 66)]):
        grad, (basis_a, basis_g) = draw(*groups, n_g, n_a), bases(which, n_a, n_g, *groups)
        scale = torch.rand(*groups, n_g, n_a, dtype=torch.float64)
        kept, lam = (grad.clone(), scale.clone()), torch.full(groups, 1e-2, dtype=torch.float64)
        found = precondition(grad, basis_a, basis_g, scale, lam, 1.0, workspace)
        damped = dense(scale, basis_a, basis_g) + 1e-2 * torch.eye(n_a * n_g, dtype=torch.float64)
        wanted = torch.linalg.solve(damped, grad.flatten(-2)[..., None])[..., 0].view_as(grad)
        torch.testing.assert_close((grad, scale), kept, rtol=0, atol=0)
        workspace.reset()
        workspace.empty((workspace.nbytes // 8,), grad).fill_(float("nan"))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)  # the result is not memory of the workspace
        torch.testing.assert_close(precondition(grad, basis_a, basis_g, scale, lam, 1.0), found, **EXACT)


def test_without_damping_scales_are_at_least_the_rounding_of_the_largest_one() -> None:
    scale = torch.zeros(2, 3, 4)
    scale[0, 1, 2] = 8.0
    scale[1] = 1.0
    for power in (1.0, 0.5):
        found = precondition(torch.ones(2, 3, 4), None, None, scale, torch.zeros(2), power)
        torch.testing.assert_close(found[0, 0, 0], torch.tensor((8 * torch.finfo(torch.float32).eps) ** -power))
        torch.testing.assert_close(found[1], torch.ones(3, 4))


def test_transport_keeps_the_sum_in_float32() -> None:
    scale = torch.rand(70, 130).exp() ** 8
    moved = scale
    for _ in range(5):
        moved = transport(moved, orthogonal(130).float(), orthogonal(70).float())
    assert abs(float(moved.double().sum() / scale.double().sum()) - 1) < 1e-6
    assert (moved >= 0).all()


def spectrum(values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix ``[1, n, n]`` of given ascending eigenvalues, and its eigenvectors."""
    basis = orthogonal(1, len(values))
    return basis * values @ basis.mT, basis


def offdiag(given: Tensor, basis: Tensor) -> float:
    inside = basis.mT @ given @ basis
    return float((inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))).norm() / inside.norm())


def departure(basis: Tensor) -> float:
    """Largest entry of ``QᵀQ − I``, in float64."""
    basis = basis.double()
    return float((basis.mT @ basis - torch.eye(basis.shape[-1]).double()).abs().max())


FOUR_DECADES = torch.logspace(-4, 0, 30, dtype=torch.float64)


def test_qr_converges_from_a_random_start() -> None:
    given, _ = spectrum(FOUR_DECADES)
    basis = orthogonal(1, 30)
    for steps, bound in ((0, 1.0), (10, 6e-2), (10, 3e-3), (10, 2e-4), (300, 1e-8)):
        for _ in range(steps):
            values, basis, _, reported, ok = qr_refresh(given, basis)
            assert ok.all()
        assert offdiag(given, basis) < bound
        assert bound == 1.0 or float(reported) == pytest.approx(offdiag(given, basis), rel=1e-3, abs=1e-9)
    torch.testing.assert_close(values[0], FOUR_DECADES, rtol=1e-6, atol=1e-8)
    assert departure(basis) < 1e-13


def test_qr_at_the_eigenvectors_stays_there() -> None:
    """They are sorted as by ``eigh`` and keep their signs, in whatever order they were.

    Any basis of the space of equal eigenvalues consists of eigenvectors, and so does any basis if the matrix is zero.
    """
    repeated = torch.tensor([1.0, 1, 1, 4, 4, 9, 9, 9]).double()
    given, exact = spectrum(repeated)
    turned = exact @ torch.block_diag(orthogonal(3), orthogonal(2), orthogonal(3))
    other, vectors = spectrum(FOUR_DECADES)
    signs = torch.where(torch.rand(30) < 0.5, -1.0, 1.0).double()
    for matrices, start, wanted in (
        (given, turned, repeated),
        (0 * given, orthogonal(1, 8), 0 * repeated),
        (other, vectors, FOUR_DECADES),
        (other, vectors[..., torch.randperm(30)] * signs, FOUR_DECADES),
    ):
        values, basis, permutation, reported, ok = qr_refresh(matrices, start)
        torch.testing.assert_close(basis[0], start[0][:, permutation[0]], rtol=0, atol=1e-9)
        torch.testing.assert_close(values[0], wanted, **EXACT)
        torch.testing.assert_close((basis.mT @ matrices @ basis)[0], wanted.diag(), rtol=0, atol=1e-9)
        assert ok.all()
        assert float(reported) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_qr_finds_null_spaces(dtype: torch.dtype) -> None:
    rows = draw(5, 12).to(dtype)
    given, basis = (rows.T @ rows)[None], orthogonal(1, 12).to(dtype)
    results = [qr_refresh(given, basis, sweeps=4) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    for _ in range(40):
        values, basis, _, reported, ok = qr_refresh(given, basis, sweeps=4)
    assert ok.all()
    small = 1e-4 if dtype == torch.float32 else 1e-8
    assert departure(basis) < (1e-5 if dtype == torch.float32 else 1e-13)
    assert (values[0, :7] < small * values[0, -1]).all()
    assert (values >= 0).all()
    assert float(reported) < small


def test_neither_the_scale_of_the_matrix_nor_its_asymmetry_matters() -> None:
    given, basis = (x.float() for x in spectrum(torch.linspace(1, 2, 9).double()))
    noisy = torch.linalg.qr(basis + 0.1 * draw(1, 9, 9).float())[0]
    values, found, permutation, reported, ok = qr_refresh(given, noisy)
    assert ok.all()
    for magnitude in (1e-30, 1e-12, 1e12, 1e30):
        scaled = qr_refresh(given * magnitude, noisy)
        torch.testing.assert_close(scaled[0] / magnitude, values, rtol=1e-5, atol=0)
        torch.testing.assert_close(scaled[1], found, rtol=0, atol=1e-5)
        assert torch.equal(scaled[2], permutation)
        torch.testing.assert_close(scaled[3], reported, rtol=1e-3, atol=0)
        assert scaled[4].all()
    given, basis = spectrum(torch.linspace(1, 2, 6).double())
    skew = 1e-3 * draw(1, 6, 6)
    torch.testing.assert_close(qr_refresh(given + skew - skew.mT, basis)[1], qr_refresh(given, basis)[1], **EXACT)


def test_matrices_of_a_batch_are_independent_and_failures_are_flagged() -> None:
    matrices = torch.cat([spectrum(torch.rand(5).double().sort().values + 0.1)[0] for _ in range(4)])
    start = orthogonal(4, 5)
    together = qr_refresh(matrices, start)
    for k in range(4):
        for part, alone in zip(together, qr_refresh(matrices[k : k + 1], start[k : k + 1]), strict=True):
            torch.testing.assert_close(part[k], alone[0], **EXACT)
    matrices[1, 2, 2], matrices[2, 0, 1] = torch.nan, torch.inf
    assert qr_refresh(matrices, start)[-1].tolist() == [True, False, False, True]
    values, basis, *_, ok = qr_refresh(torch.full((2, 1, 1), 3.0), torch.ones(2, 1, 1))
    torch.testing.assert_close((values, basis), (torch.full((2, 1), 3.0), torch.ones(2, 1, 1)))
    assert ok.all()
