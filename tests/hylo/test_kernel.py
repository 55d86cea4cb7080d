"""Pure functions of the kernel against per-example gradients written out as a matrix, and dense solves."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from secondorder.linalg import kernel, woodbury
from secondorder.linalg.kernel import Rows
from tests.support.grid import pairs

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
F64 = torch.float64
KINDS = ["plain", "homogeneous", "indices", "none"]
LEADS = {"one": (), "groups": (3,), "groups of groups": (2, 2)}
COLUMNS = 6  # of tables

kinds = pytest.mark.parametrize("kind", KINDS)
leads = pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
every_kind = pairs(kind=KINDS, positions=[1, 4], lead=LEADS)


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
    """``(a, 1)`` written out."""
    if rows.a is None:
        return torch.ones_like(rows.g[..., :1])
    if not rows.a.is_floating_point():
        return F.one_hot(rows.a, rows.columns).to(rows.g.dtype)
    return torch.cat([rows.a, torch.ones_like(rows.a[..., :1])], -1) if rows.homogeneous else rows.a


def gradients(rows: Rows) -> Tensor:
    """Uᵀ ``[..., n, d_o·n_a]``."""
    return torch.einsum("...so,...si->...oi", rows.g, inputs(rows)).flatten(-2)


def matrix(rows: Rows) -> Tensor:
    """Some V of the shape that fits."""
    return draw(*rows.g.shape[:-3], rows.g.shape[-1], inputs(rows).shape[-1])


def eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype)


def solved(u: Tensor, damping: Tensor, v: Tensor) -> Tensor:
    """``(UUᵀ + λI)⁻¹ V`` with the d×d matrix."""
    fisher = u.mT @ u
    damped = fisher + damping[..., None, None] * eye(fisher)
    return torch.linalg.solve(damped, v.flatten(-2)[..., None]).view(v.shape)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, **EXACT)


def assert_symmetric(x: Tensor) -> None:
    assert torch.equal(x, x.mT)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


# ---------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------


@pairs(tiles={"least": 1, "small": 700, "one": 16 * 2**20}, kind=KINDS, positions=[1, 4], lead=LEADS)
def test_kernel_is_that_of_the_gradients(
    tiles: int, kind: str, positions: int, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_TILE_BYTES", tiles)
    if tiles < 1000:
        monkeypatch.setattr(kernel, "_STRIP", 3)
    wide = make("homogeneous" if kind == "homogeneous" else "plain", 6, 5, d_i=40, d_o=40)  # pairs beat gradients
    assert_close(kernel.norms(wide) / 1e3, gradients(wide).square().sum(-1) / 1e3)
    x, y = make(kind, 7, positions, lead), make(kind, 5, 3, lead)
    u = gradients(x)
    found = kernel.gram(x)
    assert_close(found, u @ u.mT)
    assert_symmetric(found)
    assert_close(kernel.gram(x, y), u @ gradients(y).mT)
    assert_close(kernel.gram(y, x), gradients(y) @ u.mT)
    assert_close(kernel.gram(x, x), found)
    assert_close(kernel.norms(x), u.square().sum(-1))


@pairs(kind=KINDS, positions=[1, 4], d_o=[3, 9], lead=LEADS)  # outputs narrower and wider than the inputs
def test_products_are_those_of_the_gradients(kind: str, positions: int, d_o: int, lead: tuple[int, ...]) -> None:
    x = make(kind, 5, positions, lead, d_o=d_o)
    u, v, z = gradients(x), matrix(x), draw(*lead, 5)
    assert_close(kernel.project(x, v), (u * v.flatten(-2)[..., None, :]).sum(-1))
    found = kernel.combine(x, z)
    assert found.shape == v.shape
    assert_close(found.flatten(-2), (u * z[..., None]).sum(-2))


def test_norms_form_no_kernel() -> None:
    with Largest() as seen:
        kernel.norms(make("homogeneous", 300, d_i=5, d_o=6))
        kernel.norms(make("homogeneous", 200, 2, d_i=30, d_o=30))
    assert seen.numel < 200 * 200


def test_norms_of_rows_that_cancel_are_not_negative() -> None:
    x = make("plain", 50, 2, d_i=40, d_o=30)
    x.a[:, 1], x.g[:, 1] = x.a[:, 0] * 3, x.g[:, 0] / -3
    assert (kernel.norms(x) >= 0).all()
    assert float(kernel.norms(x).max()) < 1e-10


@pairs(kind=["plain", "homogeneous", "none"], positions=[1, 4], lead=LEADS)
def test_whole_gradients_do_what_pairs_do(kind: str, positions: int, lead: tuple[int, ...]) -> None:
    x, y = make(kind, 5, positions, lead), make(kind, 4, 2, lead)
    whole = kernel.whole(x)
    v, z, damping = matrix(x), draw(*lead, 5), torch.rand(lead, dtype=F64) + 0.1
    flat = v.flatten(-2)[..., None]
    assert whole.a is None
    assert_close(whole.g.squeeze(-2), gradients(x))
    assert_close(kernel.gram(whole), kernel.gram(x))
    assert_close(kernel.gram(whole, kernel.whole(y)), kernel.gram(x, y))
    assert_close(kernel.norms(whole), kernel.norms(x))
    assert_close(kernel.project(whole, flat), kernel.project(x, v))
    assert_close(kernel.combine(whole, z).view(v.shape), kernel.combine(x, z))
    assert_close(woodbury.exact_update(whole, damping, flat).view(v.shape), woodbury.exact_update(x, damping, v))


def test_tables_are_not_written_out() -> None:
    with pytest.raises(ValueError, match="indices"):
        kernel.whole(make("indices"))


@pytest.mark.parametrize(
    ("positions", "d_i", "d_o", "wanted"),
    [(1, 2, 2, False), (4, 512, 512, False), (16, 512, 512, True), (2, 2, 8, True)],
)
def test_whole_gradients_are_preferred_where_pairs_cost_more(positions: int, d_i: int, d_o: int, wanted: bool) -> None:
    assert kernel.prefers_whole(positions, d_i, d_o) is wanted


@pairs(kind=KINDS, lead=LEADS)
def test_products_in_one_position_are_two_matrix_products(kind: str, lead: tuple[int, ...]) -> None:
    with profile() as seen:
        kernel.gram(make(kind, 20, lead=lead))
    products = sum(event.name in {"aten::mm", "aten::bmm"} for event in seen.function_events)
    assert products == (2 if kind in {"plain", "homogeneous"} else 1)


def test_temporaries_of_many_positions_stay_below_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_TILE_BYTES", 2**14)
    x = make("homogeneous", 6, 150, d_i=3, d_o=3)  # all pairs: 6.5 MB, those of two examples: 180 kB
    with Largest() as seen:
        kernel.gram(x)
        kernel.norms(x)
    assert seen.numel * 8 <= 5 * 2**14


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


@every_kind
def test_picked_rows_are_rows_of_the_matrix(kind: str, positions: int, lead: tuple[int, ...]) -> None:
    x, index, weight = make(kind, 5, positions, lead), torch.randint(0, 5, (*lead, 3)), draw(*lead, 3)
    found = kernel.pick(x, index, weight)
    assert found.n == 3
    assert found[2:] == x[2:]
    assert_close(gradients(found), gradients(x).take_along_dim(index[..., None], -2) * weight[..., None])
    before = gradients(x)
    found.g.zero_()
    assert torch.equal(gradients(x), before)


@pairs(kind=KINDS, lead=LEADS)
def test_rows_are_put_together(kind: str, lead: tuple[int, ...]) -> None:
    parts = [make(kind, n, s, lead) for n, s in ((3, 2), (1, 5), (4, 1))]
    found = kernel.concatenate(parts)
    assert found.n == 8
    assert_close(gradients(found), torch.cat([gradients(part) for part in parts], -2))
    u = gradients(found)
    assert_close(kernel.gram(found), u @ u.mT)
    assert_close(kernel.gram(parts[0], found), gradients(parts[0]) @ u.mT)
    assert kernel.concatenate(parts[:1]) is parts[0]


@every_kind
def test_rows_are_filled_up_with_zeros(kind: str, positions: int, lead: tuple[int, ...]) -> None:
    x = make(kind, 3, positions, lead)
    found, u = kernel.padded(x, 5), gradients(x)
    assert found.n == 5
    assert_close(gradients(found), F.pad(u, (0, 0, 0, 2)))
    assert_close(kernel.gram(found), F.pad(u @ u.mT, (0, 2, 0, 2)))
    assert kernel.padded(x, 3) is x


@pairs(kind=KINDS, lead=LEADS)
def test_a_factor_scales_gradients(kind: str, lead: tuple[int, ...]) -> None:
    x, factors = make(kind, 3, 2, lead), draw(*lead)
    u = gradients(x)
    assert_close(gradients(kernel.scaled(x, 0.5)), u / 2)
    assert_close(gradients(kernel.scaled(x, torch.tensor(0.5))), u / 2)
    assert_close(gradients(kernel.scaled(x, factors)), u * factors[..., None, None])


# ---------------------------------------------------------------------------------------------------------------------
# Inverses and directions
# ---------------------------------------------------------------------------------------------------------------------


def spd(n: int, *lead: int) -> Tensor:
    root = draw(*lead, n, n)
    return root @ root.mT + eye(root) / 10


@every_kind
def test_all_rows_solve_the_dense_system(kind: str, positions: int, lead: tuple[int, ...]) -> None:
    x = make(kind, 6, positions, lead)
    u, v = gradients(x), matrix(x)
    for damping in (1e-3, 1.0, 1e3):
        scale = damping * (torch.rand(lead, dtype=F64) + 0.5)
        before = v.clone()
        wanted = solved(u, scale, v)
        found = woodbury.exact_update(x, scale, v)
        condition = 1 + float(torch.linalg.matrix_norm(u, 2).square().max()) / damping
        assert error(found, wanted) < 1e-12 + 1e-16 * condition**2  # most of it where the rows span V
        assert torch.equal(v, before)
        assert ((found * v).sum((-2, -1)) >= 0).all()


def test_a_direction_is_linear_and_tends_to_the_gradient() -> None:
    x = make("homogeneous", 6)
    v, w, damping = matrix(x), matrix(x), torch.tensor(0.1, dtype=F64)
    inverse, _ = woodbury.damped_inverse(kernel.gram(x), damping)
    both = woodbury.apply(x, inverse, damping, 2 * v - w)
    assert_close(both, 2 * woodbury.apply(x, inverse, damping, v) - woodbury.apply(x, inverse, damping, w))
    assert torch.equal(woodbury.apply(x, inverse, damping, torch.zeros_like(v)), torch.zeros_like(v))
    large = torch.tensor(1e9, dtype=F64)
    torch.testing.assert_close(woodbury.exact_update(x, large, v) * large, v, rtol=1e-6, atol=0)


@kinds
def test_zero_and_repeated_rows_are_harmless(kind: str) -> None:
    x, damping = make(kind, 4, 2), torch.tensor(0.01, dtype=F64)
    v = matrix(x)
    assert_close(woodbury.exact_update(kernel.padded(x, 9), damping, v), woodbury.exact_update(x, damping, v))
    twice = kernel.concatenate([x, x, x])
    found = woodbury.exact_update(twice, damping, v)
    assert_close(found, solved(gradients(twice), damping, v))
    assert_close(found, woodbury.exact_update(kernel.scaled(x, 3**0.5), damping, v))
    nothing = kernel.scaled(x, 0.0)
    assert_close(woodbury.exact_update(nothing, damping, v), v / damping)


@leads
def test_inverse_is_that_of_the_damped_kernel(lead: tuple[int, ...]) -> None:
    k, damping = spd(7, *lead), torch.rand(lead, dtype=F64) + 0.1
    before = k.clone()
    found, ok = woodbury.damped_inverse(k, damping)
    assert_close(found, torch.linalg.inv(k + damping[..., None, None] * eye(k)))
    assert_symmetric(found)
    assert found.is_contiguous()
    assert ok.shape == lead
    assert ok.all()
    assert torch.equal(k, before)


@leads
def test_interpolated_inverse_is_the_form_with_two_inverses(lead: tuple[int, ...]) -> None:
    s, k = spd(7, *lead), spd(7, *lead)
    found, ok = woodbury.interpolated_inverse(s, k)
    assert_close(found, torch.linalg.inv(torch.linalg.inv(s) + k))
    assert_symmetric(found)
    assert ok.shape == lead
    assert ok.all()


def test_a_singular_kernel_is_interpolated() -> None:
    s, k = spd(6), draw(6, 2)
    found, ok = woodbury.interpolated_inverse(s, k @ k.mT)
    assert ok
    assert_close(found, torch.linalg.inv(torch.linalg.inv(s) + k @ k.mT))
    assert_close(woodbury.interpolated_inverse(s, torch.zeros_like(s))[0], s)


@pytest.mark.parametrize("kept", [8, 3])
def test_interpolation_of_rows_of_low_rank_is_exact(kept: int) -> None:
    """U = ÛP: three independent gradients stand for eight, and S = P Pᵀ/λ."""
    basis, p = make("plain", 3, d_i=6, d_o=1), draw(3, 8)
    p[:, :3] = eye(p[:, :3])
    x = Rows((p.mT @ basis.a[:, 0])[:, None], basis.g[:1].expand(8, 1, 1))
    rows = x if kept == 8 else kernel.pick(x, torch.arange(3), torch.ones(3))
    p = eye(draw(8, 8)) if kept == 8 else p
    v, damping = matrix(x), torch.tensor(0.05, dtype=F64)
    inverse, _ = woodbury.interpolated_inverse(p @ p.mT / damping, kernel.gram(rows))
    assert_close(woodbury.apply(rows, inverse, damping, v), solved(gradients(x), damping, v))


@leads
def test_blocks_are_put_on_the_diagonal(lead: tuple[int, ...]) -> None:
    blocks = [draw(*lead, r, r) for r in (2, 1, 3)]
    found = woodbury.block_diagonal(blocks)
    flat = [block.reshape(-1, *block.shape[-2:]) for block in blocks]
    wanted = torch.stack([torch.block_diag(*group) for group in zip(*flat, strict=True)])
    assert torch.equal(found, wanted.view(*lead, 6, 6))
    assert woodbury.block_diagonal(blocks[:1]) is blocks[0]


# The ladder of failures

DIAGONALS = {
    # smallest eigenvalue of diag(1, …, 1, x): the rung that makes it positive
    "first": (1.0, 0.0),
    "1e-6": (-1e-7, 1e-6),
    "1e-4": (-1e-5, 1e-4),
    "1e-2": (-1e-3, 1e-2),
    "none": (-1.0, None),
}


@pytest.fixture(params=["host", "device"])
def ladder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device climbs the whole ladder unseen; the host stops at the rung that holds."""
    if request.param == "device":
        monkeypatch.setattr(woodbury, "all_true_on_cpu", lambda _: False)


@pytest.mark.usefixtures("ladder")
def test_each_matrix_climbs_its_own_ladder() -> None:
    stack = torch.stack([torch.diag(torch.tensor([1.0] * 9 + [x], dtype=F64)) for x, _ in DIAGONALS.values()])
    found, ok = woodbury.damped_inverse(stack, torch.zeros(len(stack)))
    other, other_ok = woodbury.interpolated_inverse(stack, torch.zeros_like(stack))
    assert ok.tolist() == other_ok.tolist() == [jitter is not None for _, jitter in DIAGONALS.values()]
    for i, (_, jitter) in enumerate(DIAGONALS.values()):
        if jitter is None:
            assert not found[i].any()
            assert not other[i].any()
        else:
            jittered = stack[i] + jitter * stack[i].diagonal().mean() * eye(stack[i])
            assert_close(found[i], torch.linalg.inv(jittered))
            assert_close(other[i], jittered)  # of S: (S⁻¹ + 0)⁻¹


@pytest.mark.usefixtures("ladder")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_kernel_that_is_not_finite_leaves_the_gradient(value: float) -> None:
    bad = torch.stack([spd(4), spd(4)])
    bad[1, 2, 3] = bad[1, 3, 2] = value
    x, damping = make("plain", 4, lead=(2,)), torch.full((2,), 0.5, dtype=F64)
    found, ok = woodbury.damped_inverse(bad, damping)
    assert ok.tolist() == [True, False]
    v = matrix(x)
    update = woodbury.apply(x, found, damping, v)
    assert_close(update[1], v[1] / 0.5)
    assert not torch.equal(update[0], v[0] / 0.5)
    good = torch.stack([spd(4), spd(4)])
    for s, k in ((bad, good), (good, bad)):
        found, ok = woodbury.interpolated_inverse(s, k)
        assert ok.tolist() == [True, False]
        assert not found[1].any()
        assert torch.isfinite(found).all()


def test_an_indefinite_kernel_of_rounding_is_interpolated() -> None:
    """A kernel formed in float32 has eigenvalues around -1e-7, more than S = I/λ can take for the smallest λ."""
    root = draw(20, 3).float()
    k = (root @ root.mT).double()
    assert float(torch.linalg.eigvalsh(k)[0]) < -1e-9
    found, ok = woodbury.interpolated_inverse(eye(k) * 1e10, k)
    assert ok
    assert torch.isfinite(found).all()


# ---------------------------------------------------------------------------------------------------------------------
# Precision and devices
# ---------------------------------------------------------------------------------------------------------------------


def single(rows: Rows) -> Rows:
    a = rows.a if rows.a is None or not rows.a.is_floating_point() else rows.a.float()
    return rows._replace(a=a, g=rows.g.float())


@pairs(kind=KINDS, positions=[1, 4])
def test_single_precision_comes_close(kind: str, positions: int) -> None:
    x = make(kind, 12, positions, d_i=20, d_o=15)
    v, low = matrix(x), single(x)
    assert kernel.gram(low).dtype == torch.float32
    assert error(kernel.gram(low), kernel.gram(x)) < 1e-6
    assert error(kernel.norms(low), kernel.norms(x)) < 1e-6
    damping = 1e-3 * torch.linalg.eigvalsh(kernel.gram(x))[-1]
    for scale in (damping, damping.float()):  # λ and M in a precision of their own
        found = woodbury.exact_update(low, scale, v.float())
        assert found.dtype == torch.float32
        assert error(found, woodbury.exact_update(x, damping, v)) < 1e-4


class Largest(TorchDispatchMode):
    """Notes the size of the largest new tensor, and every operator whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.waits = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if any(word in name for word in ("_local_scalar_dense", "equal.default", "nonzero", "masked_select")):
            self.waits.append(name)
        if isinstance(result, Tensor):
            storage = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            if result.untyped_storage().data_ptr() not in storage:
                self.numel = max(self.numel, result.numel())
        return result


@pairs(kind=KINDS, positions=[1, 4])
def test_nothing_waits_for_a_device(kind: str, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(woodbury, "all_true_on_cpu", lambda _: False)
    x, damping = make(kind, 6, positions), torch.tensor(0.1, dtype=F64)
    v, index = matrix(x), torch.tensor([3, 1])
    with Largest() as seen:
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
    made: set[int] = set()

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= v.nbytes:
                made.add(result.untyped_storage().data_ptr())
            return result

    with Made():
        found = woodbury.apply(x, inverse, damping, v)
    given = {part.untyped_storage().data_ptr() for part in (v, x.a, x.g) if part is not None}
    assert made - given == {found.untyped_storage().data_ptr()}


# ---------------------------------------------------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------------------------------------------------


@pairs(kind=KINDS, lead=LEADS)
def test_curvature_is_what_apply_inverts(kind: str, lead: tuple[int, ...]) -> None:
    x, damping = make(kind, 5, 2, lead), torch.rand(lead, dtype=F64) + 0.1
    # S ≤ I/λ, as P D⁻¹ Pᵀ of independent rows, and singular
    weight = torch.tensor([1.0, 0.5, 0.0, 0.3, 0.9], dtype=F64)
    half = (weight / damping[..., None]).sqrt()[..., None]
    k = kernel.gram(x)
    inverse = half * torch.linalg.inv(eye(k) + half * k * half.mT) * half.mT
    v, f = matrix(x), woodbury.curvature(x, inverse, damping)
    wanted = torch.linalg.solve(f + damping[..., None, None] * eye(f), v.flatten(-2)[..., None]).view(v.shape)
    assert_close(woodbury.apply(x, inverse, damping, v), wanted)
    assert_close(f, gradients(x).mT @ (weight[:, None] * gradients(x)))
    assert_close(woodbury.curvature(x, torch.zeros_like(k), damping), torch.zeros_like(f))


def test_curvature_is_double_whatever_the_rows_are() -> None:
    x, damping = make("homogeneous", 5, 2), torch.tensor(0.1, dtype=F64)
    inverse, _ = woodbury.damped_inverse(kernel.gram(x), damping)
    found = woodbury.curvature(single(x), inverse.float(), damping.float())
    assert found.dtype == F64
    assert error(found, gradients(x).mT @ gradients(x)) < 1e-4


def test_effective_rank_of_known_spectra() -> None:
    values = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0], [3, 3, -1e-9, 0], [0, 0, 0, -1e-9]])
    assert_close(kernel.effective_rank(values), torch.tensor([4.0, 1, 2, 0], dtype=F64))
    p = torch.tensor([0.7, 0.2, 0.1], dtype=F64)
    assert_close(kernel.effective_rank(3 * p), (-(p * p.log()).sum()).exp())


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 0), (0.4, 1), (0.5, 1), (0.51, 2), (0.9, 4), (1.0, 5)])
def test_rank_of_energy_counts_the_largest(share: float, wanted: int) -> None:
    values = torch.tensor([1.0, 8, 2, -1e-9, 4, 1, 0])
    assert int(kernel.rank_of_energy(values, share)) == wanted


def test_rank_of_energy_of_no_energy_is_zero() -> None:
    found = kernel.rank_of_energy(torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, 0.0]]))
    assert found.tolist() == [0, 2, 0]
    assert found.dtype == torch.int64
