"""Mode "sngd" is the dense solve (F + λI)⁻¹ V: which V and λ it uses, and how a step uses the result."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, noise
from tests.support.models import mlp, seeded_build, vectors
from tests.support.networks import squares
from tests.support.oracles import hylo as oracle
from tests.support.oracles.hylo import LATER, as_rows, check, layer_rows, plain_hylo, sngd, step, taken, vectors_of

NAMES = ["0", "2"]


def assert_solved(model, plain, batch, kept, damping=1e-2, values=None, factor=1.0, names=NAMES, tolerance=1e-8):
    """Directions are ``factor`` times (F + λI)⁻¹ of the gradients, or of other values, with the rows of a batch."""
    for name in names:
        V, moved = vectors_of(model, name, kept)
        V = V if values is None else as_rows(plain, name, oracle.one(values))[:, 0]
        expected = sngd(layer_rows(plain, name, *batch, F.cross_entropy), V, damping)
        assert_close(moved, factor * expected, tolerance, name)


@pairs(damping=[1e-6, 1e-2, 1.0], n=[1, 2, 6, 40], bias=[True, False])
def test_linear(damping, n, bias):
    """There are more and fewer examples than parameters; bounds on the rank do not apply to this mode."""
    keywords = {"damping": damping, "tolerance": 1e-8 / damping**0.5, "max_rank": 2, "rank_fraction": 0.01}
    opt, _ = check(lambda: mlp(bias=bias), *vectors(n), F.cross_entropy, NAMES, **keywords)
    assert "fallback" not in opt.describe()


THAWING = {
    "linear": (lambda: nn.Linear(4, 3), (16, 4), (16, 3)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), (16, 3, 5, 5), (16, 8, 3, 3)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (16, 4, 5, 5), (16, 8, 3, 3)),
    "one input": (lambda: nn.Linear(1, 3), (16, 6, 1), (16, 6, 3)),
    "norm of two": (lambda: nn.LayerNorm(2), (16, 6, 2), (16, 6, 2)),
}


@each(kind=list(THAWING), approx=["reduce", "expand"])
def test_rows_are_renewed_when_a_bias_thaws(kind, approx):
    build, size, shape = THAWING[kind]
    model = nn.Sequential(seeded_build(build))
    x, y = 0.05 * noise(*size), noise(*shape, seed=1) + 1
    model[0].bias.requires_grad_(False)
    opt = plain_hylo(model, approx=approx, update_steps=LATER)
    step(opt, model, x, y, squares)
    assert opt.state[model[0].weight]["refreshes"] == 1
    model[0].bias.requires_grad_(True)
    opt.zero_grad()
    squares(model(x), y).backward()
    assert opt.state[model[0].weight]["refreshes"] == 0
    kept = taken(opt)
    assert opt.state[model[0].weight]["refreshes"] == 1
    V, moved = vectors_of(model, "0", kept)
    assert float((V * moved).sum()) > 0
    if approx == "expand":
        assert_close(moved, sngd(layer_rows(model, "0", x, y, squares), V, 1e-2), 1e-6)


def test_batches_may_be_smaller_or_larger_than_the_given_batch_size():
    for size in (4, 9, 20):
        check(mlp, *vectors(9), F.cross_entropy, NAMES, batch_size=size)


def test_rows_of_the_last_refresh_precondition_the_current_gradient():
    batches = [vectors(n, seed=n) for n in (6, 9, 4, 9, 5)]
    model, plain = mlp(), mlp()
    opt = plain_hylo(model, update_steps=3)
    for number, batch in enumerate(batches):
        kept = step(opt, model, *batch, F.cross_entropy)
        assert_solved(model, plain, batches[number - number % 3], kept)


@pairs(normalized=[False, True], relative=[False, True])
def test_a_new_damping_waits_for_the_refresh(normalized, relative):
    """Between refreshes the 1/λ of the update, and the λ that multiplies it, are those of the kernel."""
    (x, y), model, plain = vectors(), mlp(), mlp()
    keywords = {"damping_mode": "relative"} if relative else {}
    opt = plain_hylo(model, update_steps=2, damping=1e-2, normalize_damping=normalized, **keywords)
    for number, factor in enumerate([1e-2, 1e-2, 3.0, 3.0, 0.5]):
        kept = step(opt, model, x, y, F.cross_entropy)
        for name in NAMES:
            trace = float(layer_rows(plain, name, x, y, F.cross_entropy).square().sum()) / len(x) ** 2
            damping = factor * (trace if relative else 1.0)
            assert_solved(model, plain, (x, y), kept, damping, factor=damping if normalized else 1.0, names=[name])
        opt.param_groups[0]["damping"] = [3.0, 3.0, 7.0, 0.5, 0.5][number]


def test_relative_damping_of_kept_rows_is_relative_to_all_rows():
    """The update is V/λ for a V that is orthogonal to all rows, so λ can be read off."""
    x, targets = torch.eye(8, dtype=torch.float64)[:6], noise(6, 2)
    damping = 0.7 * float(targets.square().sum()) / 36
    for mode in ("kid", "kis"):
        model = nn.Linear(8, 2, bias=False).double()
        keywords = {"damping": 0.7, "damping_mode": "relative", "update_steps": LATER}
        opt = plain_hylo(model, mode=mode, rank_fraction=0.5, **keywords)
        step(opt, model, x, targets, lambda out, t: (out * t).sum(1).mean())
        model.weight.grad = torch.zeros(2, 8, dtype=torch.float64)
        model.weight.grad[:, 7] = 1.0  # an input that no example has
        assert_close(taken(opt)["weight"], model.weight.grad / damping, 1e-10)


def test_with_kept_rows_normalized_damping_multiplies_the_update():
    for mode in ("kid", "kis"):
        (x, y), found = vectors(), []
        for normalized in (False, True):
            model = mlp()
            opt = plain_hylo(model, mode=mode, rank_fraction=0.4, damping=0.3, normalize_damping=normalized)
            found.append(oracle.flat(step(opt, model, x, y, F.cross_entropy)))
        assert_close(found[1], 0.3 * found[0], 1e-12)


def test_weight_decay_is_preconditioned_as_part_of_the_objective_only():
    """V = ∇ + wd·W for "reg", with the rows of the loss alone."""
    batch, model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, lr=0.5, weight_decay=0.1, weight_decay_mode="reg")
    step(opt, model, *batch, F.cross_entropy)
    start, after = (dict(m.named_parameters()) for m in (plain, model))
    moved = {name: (start[name] - p).detach() / 0.5 for name, p in after.items()}
    values = {name: g + 0.1 * start[name] for name, g in oracle.gradients(model).items()}
    assert_solved(model, plain, batch, moved, values=values)


def test_dense_curvature_of_groups_with_many_rows():
    """With two threads torch's LU factorization of a batch of matrices of this size breaks down."""
    shown, before = {}, torch.get_num_threads()
    torch.set_num_threads(2)
    for mode, fraction in (("sngd", 1.0), ("kid", 0.9)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)).double()
        opt = plain_hylo(model, mode=mode, rank_fraction=fraction)
        step(opt, model, noise(256, 4, 3, 3), noise(256, 4, 3, 3, seed=1), F.mse_loss)
        shown[mode] = opt.dense_curvature("0")
    torch.set_num_threads(before)
    assert_close(shown["kid"], shown["sngd"], 1e-6)  # six dimensions per group: the rows that are kept span all


@each(relative=[1.0, 1e-4, 1e-6], n=[6, 40], mode=["sngd", "kis"], normalized=[False, True])
def test_dense_curvature_does_not_depend_on_the_damping(relative, n, mode, normalized):
    """It is the sum over the rows, however small λ is, with more rows than entries and with fewer."""
    (x, y), model = vectors(n), mlp()
    U = as_rows(model, "0", oracle.example_gradients(model, (x,), y, F.cross_entropy))
    keywords = {"damping": relative * oracle.steepest(U), "normalize_damping": normalized}
    opt = plain_hylo(model, mode=mode, rank_fraction=1.0, **keywords)
    step(opt, model, x, y, F.cross_entropy)
    assert_close(opt.dense_curvature("0"), oracle.dense(oracle.fisher(U)), 1e-9)
