"""Pure functions of the kernel against per-example gradients as an explicit matrix, and against dense solves."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import profile

from secondorder.linalg import kernel, woodbury
from secondorder.linalg.kernel import Rows
from tests.support.grid import each, pairs
from tests.support.operators import Operators
from tests.support.oracles.hylo import error

F64 = torch.float64
KINDS = ["plain", "homogeneous", "indices", "none"]
LEADS = {"one": (), "groups": (3,), "groups of groups": (2, 2)}
COLUMNS = 6  # of tables

every_kind = pairs(kind=KINDS, lead=LEADS)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def make(kind: str, n: int = 5, positions: int = 1, lead: tuple[int, ...] = (), d_i: int = 4, d_o: int = 3) -> Rows:
    g = draw(*lead, n, positions, d_o)
    if kind == "none":
        return Rows(None, g)
    if kind == "indices":  # few columns, so that indices meet again
        return Rows(torch.randint(0, COLUMNS, (*lead, n, positions)), g, columns=COLUMNS)
    return Rows(draw(*lead, n, positions, d_i), g, kind == "homogeneous")


def inputs(rows: Rows) -> Tensor:
    """``(a, 1)`` as an explicit matrix."""
    if rows.a is None:
        return torch.ones_like(rows.g[..., :1])
    if not rows.a.is_floating_point():
        return F.one_hot(rows.a, rows.columns).to(rows.g.dtype)
    return torch.cat([rows.a, torch.ones_like(rows.a[..., :1])], -1) if rows.homogeneous else rows.a


def gradients(rows: Rows) -> Tensor:
    """Uᵀ ``[..., n, d_o·n_a]``."""
    return torch.einsum("...so,...si->...oi", rows.g, inputs(rows)).flatten(-2)


def matrix(rows: Rows) -> Tensor:
    """A random V of the right shape."""
    return draw(*rows.g.shape[:-3], rows.g.shape[-1], inputs(rows).shape[-1])


def eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------------------------- Products
@every_kind
def test_products_are_those_of_the_gradients(kind: str, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are narrower or wider than the inputs, and tiles hold one pair or all of them."""
    for positions, d_o, tiles in ((1, 3, 1), (4, 3, 700), (4, 9, 16 * 2**20), (1, 9, 700)):
        monkeypatch.setattr(kernel, "_TILE_BYTES", tiles)
        monkeypatch.setattr(kernel, "_STRIP", 3)
        x, y = make(kind, 7, positions, lead, d_o=d_o), make(kind, 5, 3, lead, d_o=d_o)
        u, v, z = gradients(x), matrix(x), draw(*lead, 7)
        found = kernel.gram(x)
        assert_close(found, u @ u.mT)
        assert torch.equal(found, found.mT)
        assert_close(kernel.gram(x, y), u @ gradients(y).mT)
        assert_close(kernel.gram(y, x), gradients(y) @ u.mT)
        assert_close(kernel.gram(x, x), found)
        assert_close(kernel.norms(x), u.square().sum(-1))
        assert_close(kernel.project(x, v), (u * v.flatten(-2)[..., None, :]).sum(-1))
        found = torch.zeros_like(v)
        kernel.add_combination_(found, x, z)
        assert_close(found.flatten(-2), (u * z[..., None]).sum(-2))


def test_norms_of_many_positions() -> None:
    """Pairs are cheaper than whole gradients here; the norm of rows that cancel is not negative."""
    for kind in ("homogeneous", "plain"):
        wide = make(kind, 6, 5, d_i=40, d_o=40)
        assert_close(kernel.norms(wide) / 1e3, gradients(wide).square().sum(-1) / 1e3)
    x = make("plain", 50, 2, d_i=40, d_o=30)
    x.a[:, 1], x.g[:, 1] = x.a[:, 0] * 3, x.g[:, 0] / -3
    assert (kernel.norms(x) >= 0).all()
    assert float(kernel.norms(x).max()) < 1e-10


def test_whole_gradients_are_preferred_where_pairs_cost_more() -> None:
    sizes = [(1, 2, 2), (4, 512, 512), (16, 512, 512), (2, 2, 8)]
    assert [kernel.prefers_whole(*of) for of in sizes] == [False, False, True, True]
    with pytest.raises(ValueError, match="indices"):
        kernel.whole(make("indices"))


@pytest.mark.parametrize("kind", KINDS)
def test_products_in_one_position_are_two_matrix_products(kind: str) -> None:
    for lead in LEADS.values():
        with profile() as seen:
            kernel.gram(make(kind, 20, lead=lead))
        products = sum(event.name in {"aten::mm", "aten::bmm"} for event in seen.function_events)
        assert products == (2 if kind in {"plain", "homogeneous"} else 1)


def test_temporaries_of_many_positions_stay_below_a_tile_and_norms_form_no_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Operators() as seen:
        kernel.norms(make("homogeneous", 300, d_i=5, d_o=6))
        kernel.norms(make("homogeneous", 200, 2, d_i=30, d_o=30))
    assert seen.numel < 200 * 200
    monkeypatch.setattr(kernel, "_TILE_BYTES", 2**14)
    x = make("homogeneous", 6, 150, d_i=3, d_o=3)  # all pairs: 6.5 MB, those of two examples: 180 kB
    with Operators(x.a, x.g) as seen:
        kernel.gram(x)
        kernel.norms(x)
    assert seen.numel * 8 <= 5 * 2**14


# ----------------------------------------------------------------------------------------------------------------- Rows
@every_kind
def test_rows_are_picked_padded_concatenated_and_scaled(kind: str, lead: tuple[int, ...]) -> None:
    for positions in (1, 4):
        x, index, weight = make(kind, 5, positions, lead), torch.randint(0, 5, (*lead, 3)), draw(*lead, 3)
        u, factors = gradients(x), draw(*lead)
        found = kernel.pick(x, index, weight)
        assert found.n == 3
        assert found[2:] == x[2:]
        assert_close(gradients(found), u.take_along_dim(index[..., None], -2) * weight[..., None])
        found.g.zero_()
        assert torch.equal(gradients(x), u)
        found = kernel.padded(x, 7)
        assert found.n == 7
        assert_close(gradients(found), F.pad(u, (0, 0, 0, 2)))
        assert_close(kernel.gram(found), F.pad(u @ u.mT, (0, 2, 0, 2)))
        assert kernel.padded(x, 5) is x
        for factor in (0.5, torch.tensor(0.5)):
            assert_close(gradients(kernel.scaled(x, factor)), u / 2)
        assert_close(gradients(kernel.scaled(x, factors)), u * factors[..., None, None])
    parts = [make(kind, n, s, lead) for n, s in ((3, 2), (1, 5), (4, 1))]
    found = kernel.concatenate(parts)
    u = gradients(found)
    assert found.n == 8
    assert_close(u, torch.cat([gradients(part) for part in parts], -2))
    assert_close(kernel.gram(found), u @ u.mT)
    assert_close(kernel.gram(parts[0], found), gradients(parts[0]) @ u.mT)
    assert kernel.concatenate(parts[:1]) is parts[0]


# ---------------------------------------------------------------------------------------------- Inverses and directions
def spd(n: int, *lead: int) -> Tensor:
    root = draw(*lead, n, n)
    return root @ root.mT + eye(root) / 10


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
def test_damped_and_interpolated_inverses_are_the_dense_ones(lead: tuple[int, ...]) -> None:
    s, k, damping = spd(7, *lead), spd(7, *lead), torch.rand(lead, dtype=F64) + 0.1
    before = k.clone()
    damped, interpolated = woodbury.damped_inverse(k, damping), woodbury.interpolated_inverse(s, k)
    assert_close(damped[0], torch.linalg.inv(k + damping[..., None, None] * eye(k)))
    assert_close(interpolated[0], torch.linalg.inv(torch.linalg.inv(s) + k))
    assert damped[0].is_contiguous()
    for found, ok in (damped, interpolated):
        assert torch.equal(found, found.mT)
        assert ok.shape == lead
        assert ok.all()
    assert torch.equal(k, before)
    blocks = [draw(*lead, r, r) for r in (2, 1, 3)]
    flat = [block.reshape(-1, *block.shape[-2:]) for block in blocks]
    wanted = torch.stack([torch.block_diag(*group) for group in zip(*flat, strict=True)])
    assert torch.equal(woodbury.block_diagonal(blocks), wanted.view(*lead, 6, 6))
    assert woodbury.block_diagonal(blocks[:1]) is blocks[0]


def test_singular_and_indefinite_kernels_are_interpolated() -> None:
    """A kernel from float32 has eigenvalues around -1e-7, which is too much for S = I/λ with the smallest λ."""
    s, k = spd(6), draw(6, 2)
    found, ok = woodbury.interpolated_inverse(s, k @ k.mT)
    assert ok
    assert_close(found, torch.linalg.inv(torch.linalg.inv(s) + k @ k.mT))
    assert_close(woodbury.interpolated_inverse(s, torch.zeros_like(s))[0], s)
    root = draw(20, 3).float()
    k = (root @ root.mT).double()
    assert float(torch.linalg.eigvalsh(k)[0]) < -1e-9
    found, ok = woodbury.interpolated_inverse(eye(k) * 1e10, k)
    assert ok
    assert torch.isfinite(found).all()


#: The smallest eigenvalue of diag(1, …, 1, x), and the jitter that makes it positive.
DIAGONALS = {1.0: 0.0, -1e-7: 1e-6, -1e-5: 1e-4, -1e-3: 1e-2, -1.0: None}


@pytest.fixture(params=["host", "device"])
def ladder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device runs the whole ladder of jitters unseen; the host stops at the first that suffices."""
    if request.param == "device":
        monkeypatch.setattr(woodbury, "all_true_on_cpu", lambda _: False)


@pytest.mark.usefixtures("ladder")
def test_each_matrix_of_a_stack_gets_its_own_jitter() -> None:
    stack = torch.stack([torch.diag(torch.tensor([1.0] * 9 + [x], dtype=F64)) for x in DIAGONALS])
    found, ok = woodbury.damped_inverse(stack, torch.zeros(len(stack)))
    other, other_ok = woodbury.interpolated_inverse(stack, torch.zeros_like(stack))
    assert ok.tolist() == other_ok.tolist() == [jitter is not None for jitter in DIAGONALS.values()]
    for i, jitter in enumerate(DIAGONALS.values()):
        if jitter is None:
            assert not found[i].any()
            assert not other[i].any()
        else:
            jittered = stack[i] + jitter * stack[i].diagonal().mean() * eye(stack[i])
            assert_close(found[i], torch.linalg.inv(jittered))
            assert_close(other[i], jittered)  # of S: (S⁻¹ + 0)⁻¹


@pytest.mark.usefixtures("ladder")
def test_a_kernel_that_is_not_finite_leaves_the_plain_gradient() -> None:
    x, damping = make("plain", 4, lead=(2,)), torch.full((2,), 0.5, dtype=F64)
    v, good = matrix(x), torch.stack([spd(4), spd(4)])
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = torch.stack([spd(4), spd(4)])
        bad[1, 2, 3] = bad[1, 3, 2] = value
        found, ok = woodbury.damped_inverse(bad, damping)
        assert ok.tolist() == [True, False]
        update = woodbury.apply(x, found, damping, v)
        assert_close(update[1], v[1] / 0.5)
        assert not torch.equal(update[0], v[0] / 0.5)
        for s, k in ((bad, good), (good, bad)):
            found, ok = woodbury.interpolated_inverse(s, k)
            assert ok.tolist() == [True, False]
            assert not found[1].any()
            assert torch.isfinite(found).all()


# ------------------------------------------------------------------------------------------------ Precision and devices
@each(kind=KINDS, positions=[1, 4])
def test_nothing_waits_for_a_device(kind: str, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(woodbury, "all_true_on_cpu", lambda _: False)
    x, damping = make(kind, 6, positions), torch.tensor(0.1, dtype=F64)
    v, index = matrix(x), torch.tensor([3, 1])
    with Operators() as seen:
        kept = kernel.padded(kernel.concatenate([kernel.pick(x, index, torch.ones(2)), x]), 9)
        core = woodbury.block_diagonal([kernel.gram(x), kernel.gram(x)])[:9, :9].clone()
        inverse, _ = woodbury.interpolated_inverse(core, kernel.gram(kept))
        woodbury.apply(kernel.scaled(kept, damping), inverse, damping, v)
        woodbury.exact_update(x, damping, v)
        values = kernel.norms(x)
        kernel.effective_rank(values)
        kernel.rank_of_energy(values)
    assert not seen.waits


@pytest.mark.parametrize("kind", ["plain", "homogeneous", "none"])
def test_the_result_is_the_only_matrix_as_large_as_the_parameter(kind: str) -> None:
    x, damping = make(kind, 3, d_i=40, d_o=50), torch.tensor(0.1, dtype=F64)
    v = matrix(x)
    inverse, _ = woodbury.damped_inverse(kernel.gram(x), damping)
    with Operators(*(part for part in (v, x.a, x.g) if part is not None)) as seen:
        found = woodbury.apply(x, inverse, damping, v)
    large = [address for address, nbytes in seen.storages.items() if nbytes >= v.nbytes]
    assert large == [found.untyped_storage().data_ptr()]


# ------------------------------------------------------------------------------------------------------------- Analysis
def test_effective_rank_and_rank_of_energy_of_known_spectra() -> None:
    values = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0], [3, 3, -1e-9, 0], [0, 0, 0, -1e-9]])
    assert_close(kernel.effective_rank(values), torch.tensor([4.0, 1, 2, 0], dtype=F64))
    p = torch.tensor([0.7, 0.2, 0.1], dtype=F64)
    assert_close(kernel.effective_rank(3 * p), (-(p * p.log()).sum()).exp())
    values = torch.tensor([1.0, 8, 2, -1e-9, 4, 1, 0])
    for share, wanted in ((0.0, 0), (0.4, 1), (0.5, 1), (0.51, 2), (0.9, 4), (1.0, 5)):
        assert int(kernel.rank_of_energy(values, share)) == wanted
    found = kernel.rank_of_energy(torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, 0.0]]))
    assert found.tolist() == [0, 2, 0]
    assert found.dtype == torch.int64


def solved(u: Tensor, damping: Tensor, v: Tensor) -> Tensor:
    """``(UUᵀ + λI)⁻¹ V`` with the d×d matrix."""
    fisher = u.mT @ u
    damped = fisher + damping[..., None, None] * eye(fisher)
    return torch.linalg.solve(damped, v.flatten(-2)[..., None]).view(v.shape)


@every_kind
def test_all_rows_solve_the_dense_system(kind: str, lead: tuple[int, ...]) -> None:
    """They do so as pairs of inputs and gradients and, except for tables, as whole gradients."""
    for positions, damping in product((1, 4), (1e-3, 1.0, 1e3)):
        x = make(kind, 6, positions, lead)
        u, v, scale = gradients(x), matrix(x), damping * (torch.rand(lead, dtype=F64) + 0.5)
        before, wanted = v.clone(), solved(u, scale, v)
        found = [woodbury.exact_update(x, scale, v)]
        if kind == "indices":
            with pytest.raises(ValueError, match="indices"):
                kernel.whole(x)
        else:
            found.append(woodbury.exact_update(kernel.whole(x), scale, v.flatten(-2)[..., None]).view(v.shape))
        condition = 1 + float(torch.linalg.matrix_norm(u, 2).square().max()) / damping
        for update in found:
            assert error(update, wanted) < 1e-12 + 1e-16 * condition**2  # the largest where the rows span V
            assert ((update * v).sum((-2, -1)) >= 0).all()
        assert torch.equal(v, before)
