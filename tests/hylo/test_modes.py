"""KID and KIS against their definitions as dense operators, the number of kept rows, and promises of every mode."""

import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import qr
from torch import Tensor, nn

from secondorder.linalg import selection, stacks
from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, noise
from tests.support.models import Net, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import squares
from tests.support.oracles import hylo as oracle
from tests.support.oracles.hylo import LATER, MODES, greedy, kid_operator, layer_rows, plain_hylo, step, vectors_of

RESIDUALS = ["none", "diag", "full"]
SAMPLINGS = ["systematic", "replacement", "unweighted", "uniform"]
LAYERS = ("first", "second", "head")  # of the network of convolutions


def products(out, target):
    """A loss whose gradient at the output is the target itself."""
    return (out * target).sum(1).mean()


def linear(d_in=4, d_out=3):
    return nn.Linear(d_in, d_out, bias=False).double()


def outer(g, a):
    """The rows of a linear layer."""
    return (g[:, :, None] * a[:, None]).flatten(1)


def uneven(seed=0):
    """Rows of very different lengths: inputs and output gradients of a linear layer, and the rows themselves."""
    a = noise(8, 4, seed=seed) * torch.linspace(0.3, 2, 8, dtype=torch.float64)[:, None]
    g = noise(8, 3, seed=seed + 100)
    return a, g, outer(g, a)


# ------------------------------------------------------------------------------------------------------------------ KID
@pairs(residual=RESIDUALS, rank=[1, 2, 5, 7], relative=[1e-3, 0.1, 10.0])
def test_kid_is_its_definition(residual, rank, relative):
    """This holds at the refresh and, for any gradient, after it."""
    a, g, U = uneven()
    damping, model = relative * oracle.steepest(U[None]), linear()
    keywords = {"rank_fraction": rank / 8, "kid_residual": residual, "damping": damping, "update_steps": LATER}
    opt = plain_hylo(model, mode="kid", **keywords)
    moved = step(opt, model, a, g, products)["weight"].flatten()
    operator = kid_operator(U, greedy(U @ U.mT, rank), damping, residual)
    assert_close(moved, operator @ U.mean(0), 1e-7)
    assert_close(opt.dense_curvature(""), oracle.curvature_of(operator, damping), 1e-6)
    moved = oracle.with_gradient(opt, model, 1)["weight"].flatten()
    assert_close(moved, operator @ model.weight.grad.flatten(), 1e-7)


@each(pivoting=["qr", "score"], rank=[1, 3, 6])
def test_pivots(pivoting, rank):
    a, g, U = uneven(seed=3)
    K = U @ U.mT
    of_qr, of_score = qr(K.numpy(), pivoting=True)[2][:rank].tolist(), K.diagonal().topk(rank).indices.tolist()
    model = linear()
    opt = plain_hylo(model, mode="kid", rank_fraction=rank / 8, kid_pivoting=pivoting, damping=0.05)
    moved = step(opt, model, a, g, products)["weight"].flatten()
    assert_close(moved, kid_operator(U, of_qr if pivoting == "qr" else of_score, 0.05) @ U.mean(0), 1e-7)


def grouped():
    layers = [nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 2, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@each(approx=["expand", "reduce"], residual=RESIDUALS)
def test_kid_of_a_network(approx, residual):
    """Every group of a convolution has its own pivots."""
    model, plain = seeded_build(grouped, 1), seeded_build(grouped, 1)
    x, y = noise(8, 4, 4, 3), vectors(8)[1]
    opt = plain_hylo(model, mode="kid", approx=approx, rank_fraction=0.5, kid_residual=residual)
    kept = step(opt, model, x, y, F.cross_entropy)
    for name in ("0", "2", "6"):
        U = layer_rows(plain, name, x, y, F.cross_entropy, approx)
        chosen = [greedy(u @ u.mT, 4) for u in U]
        operators = [kid_operator(u, i, 1e-2, residual) for u, i in zip(U, chosen, strict=True)]
        V, moved = vectors_of(model, name, kept)
        assert_close(moved, torch.stack([one @ v for one, v in zip(operators, V, strict=True)]), 1e-7, name)
        expected = torch.block_diag(*(oracle.curvature_of(one, 1e-2) for one in operators))
        assert_close(opt.dense_curvature(name), expected, 1e-6, name)
        assert name != "0" or chosen[0] != chosen[1]


# ------------------------------------------------------------------------------------------------------------------ KIS
def is_zero(c):
    return c.abs() < 1e-7


@each(approx=["expand", "reduce"], sampling=["systematic", "unweighted"])
def test_kis_of_a_network(approx, sampling):
    """Scores are the norms of whole rows, even if they have positions."""
    (x, y), model, plain = images(8), convnet(), convnet()
    opt = plain_hylo(model, mode="kis", approx=approx, rank_fraction=0.5, kis_sampling=sampling)
    kept = step(opt, model, x, y, F.cross_entropy)
    for name in LAYERS:
        (U,) = layer_rows(plain, name, x, y, F.cross_entropy, approx)
        c, pi = oracle.shares(opt.dense_curvature(name), U), oracle.inclusion(U.square().sum(1), 4)
        pi = pi if sampling == "systematic" else torch.full_like(pi, 4 / 8)
        assert int((~is_zero(c)).sum()) == 4
        assert_close(c[~is_zero(c)], 1 / pi[~is_zero(c)], 1e-5, name)
        V, moved = vectors_of(model, name, kept)
        assert_close(moved[0], oracle.solve((U.mT * c) @ U / 8, V[0], 1e-2), 1e-6, name)


def drawn(seed):
    """Which of 8 rows are in the curvature of four successive refreshes."""
    (a, g, U), model, found = uneven(), linear(), []
    opt = plain_hylo(model, mode="kis", rank_fraction=3 / 8, deterministic_seed=seed)
    for _ in range(4):
        step(opt, model, a, g, products)
        found.append(is_zero(oracle.shares(opt.dense_curvature(""), U)))
    return torch.stack(found)


def test_a_seed_fixes_the_draws_which_differ_between_refreshes():
    first, again, other = (drawn(seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert any(not torch.equal(first[0], later) for later in first[1:])


@each(sampling=SAMPLINGS, layer=[0, 2])
def test_draws_of_a_layer_do_not_depend_on_the_others(sampling, layer):
    found = []
    for how in ("alone", "frozen", "together"):
        model = mlp((6, 6, 6))
        model[2 - layer].requires_grad_(how != "frozen")
        skipped = [str(2 - layer)] if how == "alone" else []
        opt = plain_hylo(model, mode="kis", rank_fraction=0.25, kis_sampling=sampling, skip_layers=skipped)
        for seed in range(2):
            step(opt, model, noise(32, 6, seed=seed), noise(32, 6, seed=seed + 50), squares)
        found.append(opt.dense_curvature(str(layer)))
    for other in found[1:]:
        assert_close(other, found[0], 1e-12)


# ----------------------------------------------------------------------------------------------------------- Every mode
def test_the_operator_is_symmetric_positive_and_the_inverse_of_the_damped_dense_curvature():
    a, g, _ = uneven()
    for mode, keywords in MODES.items():
        model, columns = linear(), []
        opt = plain_hylo(model, **{**keywords, "update_steps": LATER})
        step(opt, model, a, g, products)
        for unit in oracle.eye(12):
            model.weight.grad = unit.view(3, 4).clone()
            columns.append(oracle.taken(opt)["weight"].flatten())
        operator, held = torch.stack(columns, 1), opt.dense_curvature("")
        assert_close(operator, operator.mT, 1e-9, mode)
        values = torch.linalg.eigvalsh(operator)
        assert 0 < float(values.min()) <= float(values.max()) <= 100 * (1 + 1e-9), mode
        assert torch.equal(held, held.mT), mode
        assert float(torch.linalg.eigvalsh(held).min()) > -1e-9, mode
        assert_close(operator, torch.linalg.inv(held + 1e-2 * oracle.eye(12)), 1e-7, mode)


@pytest.mark.parametrize("sizes", [(4, 9, 6), (9, 2, 1)], ids=str)
def test_batches_of_changing_size(sizes):
    """A smaller batch fills only some of the places for rows; the empty ones must not count."""
    for mode, keywords in MODES.items():
        model = mlp()
        opt = plain_hylo(model, **keywords)
        for seed, n in enumerate(sizes):
            kept = step(opt, model, *vectors(n, seed=seed), F.cross_entropy)
            for name in ("0", "2"):
                V, moved = vectors_of(model, name, kept)
                assert_close(moved[0], oracle.solve(opt.dense_curvature(name), V[0], 1e-2), 1e-7, mode)


# ----------------------------------------------------------------------------------------------------------------- Rank
@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_the_rank_follows_the_fraction_and_the_maximum(mode):
    for fraction, most, rank in ((0.101, 1024, 3), (1.0, 7, 7)):
        model = mlp((9, 8))
        opt = plain_hylo(model, mode=mode, rank_fraction=fraction, max_rank=most)
        step(opt, model, *vectors(20, 9, 8), F.cross_entropy)
        assert {int(r) for r in opt.diagnostics()["rank"].values()} == {rank}
        assert int(torch.linalg.matrix_rank(opt.dense_curvature("0"), rtol=1e-9)) == rank


def fewest(U: Tensor, share: float) -> int:
    """The smallest number of pivots that hold a share of the trace."""
    K = U @ U.T
    order = greedy(K, len(K))
    left = [float(oracle.interpolation(K, order[:r])[1].trace() / K.trace()) for r in range(1, len(order))]
    return next((r for r, part in enumerate(left, 1) if part <= 1 - share), len(order))


def spread() -> Net:
    """A grouped convolution, a narrow and a wide layer: kernels of different energies."""

    def forward(net: Net, x: Tensor) -> Tensor:
        z = torch.tanh(net.conv(x)).flatten(1)
        return net.narrow(z) + net.wide(z)

    return Net(forward, conv=nn.Conv2d(4, 6, 2, groups=2), narrow=nn.Linear(24, 1), wide=nn.Linear(24, 6))


@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_with_an_energy_each_layer_has_its_own_rank(mode):
    """It is the largest rank that a group needs, rounded up to a multiple of 8, and at most the number of rows."""
    model, plain, wanted = seeded_build(spread), seeded_build(spread), {}
    x, y = noise(30, 4, 3, 3), noise(30, 6, seed=3)
    x[:, 2:] = 0  # the second group has only a bias
    for name in ("conv", "narrow", "wide"):
        needed = [fewest(U, 0.9) for U in layer_rows(plain, name, x, y, squares)]
        wanted[name] = min(-(-max(needed) // 8) * 8, 30)
        assert name != "conv" or max(needed) > 8 > min(needed)
    assert len(set(wanted.values())) > 1
    opt = plain_hylo(model, mode=mode, rank_energy=0.9, rank_fraction=1.0)
    step(opt, model, x, y, squares)
    assert opt.diagnostics()["rank"] == wanted
    opt.param_groups[0]["max_rank"] = 10
    step(opt, model, x, y, squares)
    assert opt.diagnostics()["rank"] == {name: min(r, 10) for name, r in wanted.items()}


def test_ranks_by_energy_do_not_depend_on_other_layers():
    def rank(*others: nn.Module) -> int:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(6, 1, bias=False), **{str(i): m for i, m in enumerate(others)}}).float()
        for other in others:
            other.double()
        opt = plain_hylo(model, mode="kid", rank_energy=0.9999999)
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        (model["a"](x).square().sum() + sum(m(x.double()).square().sum() for m in others)).backward()
        opt.step()
        return opt.diagnostics()["rank"]["a"]

    assert rank() == rank(nn.Linear(6, 2)) == 8


@pytest.mark.parametrize("energy", [None, 0.5])
def test_the_limit_of_a_stack_of_kernels_counts_groups(energy, monkeypatch):
    sizes, original = [], selection.interpolate

    def watched(matrix: Tensor, *args, **keywords):
        sizes.append(matrix.numel())
        return original(matrix, *args, **keywords)

    def build() -> nn.Sequential:
        return seeded_build(lambda: nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1, groups=16) for _ in range(5))))

    x, kept = noise(8, 16, 4, 4), []
    for bound in (2 * 16 * 8 * 8, stacks.LIMIT):
        monkeypatch.setattr(stacks, "LIMIT", bound)
        model = build()
        opt = plain_hylo(model, mode="kid", rank_fraction=0.5, rank_energy=energy)
        with monkeypatch.context() as patch:
            patch.setattr(selection, "interpolate", watched)
            kept.append(oracle.flat(step(opt, model, x, torch.zeros(8, 1, 1, 1), squares)))
    rounds = 1 if energy is None else 2
    assert sizes == [*[2048, 2048, 1024] * rounds, *[5 * 1024] * rounds]
    assert_close(kept[0], kept[1], 1e-9)


def test_parameter_groups_may_have_different_modes():
    (x, y), model, plain = vectors(8), mlp(), mlp()
    groups = [{"params": list(model[i].parameters()), "mode": mode} for i, mode in ((0, "kid"), (2, "sngd"))]
    kept = step(plain_hylo(groups, module=model, rank_fraction=0.5), model, x, y, F.cross_entropy)
    U, W = (layer_rows(plain, name, x, y, F.cross_entropy) for name in ("0", "2"))
    V, moved = vectors_of(model, "0", kept)
    assert_close(moved[0], kid_operator(U[0], greedy(U[0] @ U[0].mT, 4), 1e-2) @ V[0], 1e-7)
    V, moved = vectors_of(model, "2", kept)
    assert_close(moved, oracle.sngd(W, V, 1e-2), 1e-8)
