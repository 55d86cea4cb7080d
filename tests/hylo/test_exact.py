"""Mode "sngd" is the dense solve (F + λI)⁻¹ V: of which V, at which λ, and what becomes of it in a step."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.kfac import assert_close, noise
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.hylo import (
    LATER,
    as_rows,
    check,
    check_block,
    dense,
    example_gradients,
    fisher,
    flat,
    gradients,
    one,
    plain_hylo,
    sngd,
    steepest,
    step,
    taken,
    with_gradient,
)
from tests.support.oracles.kfac import expected_factors, solve_exact

NAMES = ["0", "2"]


def exact_of(plain, x, y, loss, names, values, damping):
    """(F + λI)⁻¹ of any values, by layer."""
    found = example_gradients(plain, (x,), y, loss)
    return {n: sngd(as_rows(plain, n, found), as_rows(plain, n, one(values))[:, 0], damping) for n in names}


def assert_directions(model, kept, expected, tolerance=1e-8, factor=1.0):
    for name, direction in expected.items():
        assert_close(as_rows(model, name, one(kept))[:, 0], factor * direction, tolerance, name)


# ---------------------------------------------------------------------------------------------------------------------
# The solve
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("n", [1, 2, 6, 40], ids=lambda n: f"{n} examples")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_linear(damping, n, bias):
    """More and fewer examples than the layers have parameters."""
    x, y = vectors(n)
    opt, model = check(
        lambda: mlp(bias=bias), x, y, F.cross_entropy, NAMES, damping=damping, tolerance=1e-8 / damping**0.5
    )
    assert "fallback" not in opt.describe()


def test_the_mean_of_the_rows_is_the_gradient():
    """Checks the definitions themselves."""
    x, y = images()
    model, plain = convnet(), convnet()
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    F.cross_entropy(model(x), y).backward()
    for name in ("first", "second", "head"):
        V = as_rows(model, name, one(gradients(model)))[:, 0]
        assert_close(as_rows(plain, name, found).mean(1), V, 1e-12)


@pytest.mark.parametrize("frozen", ["0.bias", "0.weight", "2.bias", "2.weight"])
def test_frozen_parts(frozen):
    def build():
        model = mlp()
        model.get_parameter(frozen).requires_grad_(False)
        return model

    opt, model = check(build, *vectors(), F.cross_entropy, NAMES)
    layer, part = frozen.split(".")
    size = {"0": (5, 4), "2": (3, 5)}[layer]
    assert len(opt.dense_curvature(layer)) == (size[0] if part == "weight" else size[0] * size[1])


def test_a_frozen_layer_is_left_alone():
    def build():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    _, model = check(build, *vectors(), F.cross_entropy, ["2"], lr=1.0)
    assert torch.equal(model[0].weight, build()[0].weight)


def test_the_parameters_move_along_the_direction():
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, lr=0.25)
    kept = step(opt, model, x, y, F.cross_entropy)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close((q - p).detach(), 0.25 * kept[name], 1e-12)
    expected = exact_of(plain, x, y, F.cross_entropy, NAMES, gradients(model), 1e-2)
    assert_directions(model, kept, expected)


def test_momentum_is_heavy_ball_on_the_direction():
    (x, y), model = vectors(), mlp()
    opt = plain_hylo(model, lr=0.1, momentum=0.9)
    buffer = 0.0
    for _ in range(3):
        before = flat(dict(model.named_parameters()))
        buffer = 0.9 * buffer + flat(step(opt, model, x, y, F.cross_entropy))
        assert_close(before - flat(dict(model.named_parameters())), 0.1 * buffer, 1e-9)


def test_a_bound_on_the_rank_is_not_for_the_exact_mode():
    check(mlp, *vectors(), F.cross_entropy, NAMES, max_rank=2, rank_fraction=0.01)


def test_groups_have_dampings_of_their_own():
    (x, y), model, plain, dampings = vectors(), mlp(), mlp(), {"0": 0.5, "2": 1e-3}
    groups = [{"params": list(model.get_submodule(name).parameters()), "damping": d} for name, d in dampings.items()]
    opt = plain_hylo(groups, module=model)
    kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name, damping in dampings.items():
        check_block(opt, model, name, as_rows(plain, name, found), kept, damping)


@pytest.mark.parametrize("size", [4, 9, 20])
def test_a_promised_batch_size_that_is_not_kept_to(size):
    """Fewer or more examples than the rows were allocated for."""
    (x, y), model, plain = vectors(9), mlp(), mlp()
    opt = plain_hylo(model, batch_size=size)
    kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in NAMES:
        check_block(opt, model, name, as_rows(plain, name, found), kept, 1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Stale rows
# ---------------------------------------------------------------------------------------------------------------------


def test_rows_of_the_last_refresh_precondition_the_gradient_of_now():
    batches = [vectors(n, seed=n) for n in (6, 9, 4, 9, 5)]
    model, plain = mlp(), mlp()
    opt = plain_hylo(model, update_steps=3)
    for number, batch in enumerate(batches):
        kept = step(opt, model, *batch, F.cross_entropy)
        seen = batches[number - number % 3]
        assert_directions(model, kept, exact_of(plain, *seen, F.cross_entropy, NAMES, gradients(model), 1e-2))


@pytest.mark.parametrize("build", [mlp, convnet], ids=["mlp", "convnet"])
def test_any_gradient_between_refreshes(build):
    x, y = vectors() if build is mlp else images()
    names = NAMES if build is mlp else ["first", "second", "head"]
    model, plain = build(), build()
    opt = plain_hylo(model, update_steps=LATER)
    step(opt, model, x, y, F.cross_entropy)
    for seed in range(3):
        kept = with_gradient(opt, model, seed)
        assert_directions(model, kept, exact_of(plain, x, y, F.cross_entropy, names, gradients(model), 1e-2))


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_a_gradient_that_is_changed_between_backward_and_step(mode):
    """Clipping, say: on the step of the refresh, too, V is what stands in ``.grad``."""
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, mode=mode, rank_fraction=1.0)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    model[2].weight.grad.add_(noise(3, 5))
    kept = taken(opt)
    expected = exact_of(plain, x, y, F.cross_entropy, NAMES, gradients(model), 1e-2)
    assert_directions(model, kept, expected, 1e-7)


def test_a_new_damping_waits_for_the_refresh():
    """Between refreshes the 1/λ of the update is that of the kernel, so that the two belong together."""
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, update_steps=2, damping=1e-2)
    for number, damping in enumerate([1e-2, 1e-2, 3.0, 3.0, 0.5]):
        kept = step(opt, model, x, y, F.cross_entropy)
        assert_directions(model, kept, exact_of(plain, x, y, F.cross_entropy, NAMES, gradients(model), damping))
        opt.param_groups[0]["damping"] = [3.0, 3.0, 7.0, 0.5, 0.5][number]


def test_a_new_interval_counts_at_once():
    model, refreshed = mlp(), []
    opt = plain_hylo(model, update_steps=3)
    held = None
    for seed in range(10):
        opt.param_groups[0]["update_steps"] = 1 if 4 <= seed < 7 else 3
        step(opt, model, *vectors(7, seed=seed), F.cross_entropy)
        now = opt.dense_curvature("0")
        refreshed.append(held is None or not torch.equal(now, held))
        held = now
    assert refreshed == [True, False, False, True, True, True, True, False, False, True]


def test_an_interval_of_zero_turns_preconditioning_off():
    (x, y), model = vectors(), mlp()
    opt = plain_hylo(model, update_steps=0, lr=1.0)
    before = flat(dict(model.named_parameters()))
    step(opt, model, x, y, F.cross_entropy)
    assert_close(before - flat(dict(model.named_parameters())), flat(gradients(model)), 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# λ
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-3, 1.0, 30.0])
def test_relative_damping_is_in_units_of_the_mean_eigenvalue_of_the_kernel(factor):
    """trace(K)/m with K = UUᵀ/m over all m rows of the layer."""
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, damping=factor, damping_mode="relative")
    kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in NAMES:
        U = as_rows(plain, name, found)
        damping = factor * float(U.square().sum()) / len(x) / len(x)
        check_block(opt, model, name, U, kept, damping, 1e-7)


@pytest.mark.parametrize("mode", ["kid", "kis"])
def test_relative_damping_of_kept_rows_is_relative_to_all(mode):
    """With a fresh V far from the kept rows, the update is V/λ minus something: λ shows in rows that are orthogonal."""
    x, model = torch.eye(8, dtype=torch.float64)[:6], nn.Linear(8, 2, bias=False).double()
    targets = noise(6, 2)
    opt = plain_hylo(model, mode=mode, rank_fraction=0.5, damping=0.7, damping_mode="relative", update_steps=LATER)
    step(opt, model, x, targets, lambda out, t: (out * t).sum(1).mean())
    model.weight.grad = torch.zeros(2, 8, dtype=torch.float64)
    model.weight.grad[:, 7] = 1.0  # an input that no example has
    damping = 0.7 * float(targets.square().sum()) / 36
    assert_close(taken(opt)["weight"], model.weight.grad / damping, 1e-10)


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_normalised_damping_multiplies_by_it(mode):
    (x, y), found = vectors(), []
    for normalised in (False, True):
        model = mlp()
        opt = plain_hylo(model, mode=mode, rank_fraction=0.4, damping=0.3, normalize_damping=normalised)
        found.append(flat(step(opt, model, x, y, F.cross_entropy)))
    assert_close(found[1], 0.3 * found[0], 1e-12)


def test_normalised_damping_uses_the_one_of_the_kernel():
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, update_steps=2, damping=0.3, normalize_damping=True)
    step(opt, model, x, y, F.cross_entropy)
    opt.param_groups[0]["damping"] = 5.0
    kept = step(opt, model, x, y, F.cross_entropy)
    expected = exact_of(plain, x, y, F.cross_entropy, NAMES, gradients(model), 0.3)
    assert_directions(model, kept, expected, factor=0.3)


def test_normalised_relative_damping():
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, damping=0.5, damping_mode="relative", normalize_damping=True)
    kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    for name in NAMES:
        U, V = as_rows(plain, name, found), as_rows(plain, name, one(gradients(model)))[:, 0]
        damping = 0.5 * float(U.square().sum()) / len(x) ** 2
        assert_directions(model, kept, {name: sngd(U, V, damping)}, factor=damping)


# ---------------------------------------------------------------------------------------------------------------------
# Bounds and decay
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
@pytest.mark.parametrize("kl_clip", [1e-6, 1e-2, 1e6])
def test_kl_clip(mode, kl_clip):
    """ν = min(1, √(κ / (lr² |Σ ⟨update, V⟩|))) over all layers."""
    (x, y), moves, lr = vectors(), [], 0.5
    for bound in (None, kl_clip):
        model = mlp()
        opt = plain_hylo(model, mode=mode, rank_fraction=0.4, lr=lr, kl_clip=bound)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        step(opt, model, x, y, F.cross_entropy)
        moves.append({name: (before[name] - p.detach()) / lr for name, p in model.named_parameters()})
    free, clipped = moves
    s = lr**2 * sum(float((free[name] * p.grad).sum()) for name, p in model.named_parameters())
    factor = min(1.0, math.sqrt(kl_clip / s))
    assert (factor < 1) == (kl_clip < 1e3)
    assert_close(flat(clipped), factor * flat(free), 1e-6)


def decayed(**keywords):
    (x, y), model = vectors(), mlp()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = plain_hylo(model, lr=0.5, weight_decay=0.1, **keywords)
    step(opt, model, x, y, F.cross_entropy)
    return start, gradients(model), {name: (start[name] - p.detach()) / 0.5 for name, p in model.named_parameters()}


@pytest.mark.parametrize("decoupled", [False, True])
def test_standard_decay_is_not_preconditioned(decoupled):
    start, grads, moved = decayed(decoupled_weight_decay=decoupled)
    expected = exact_of(mlp(), *vectors(), F.cross_entropy, NAMES, grads, 1e-2)
    pulled = {name: value - 0.1 * start[name] for name, value in moved.items()}
    assert_directions(mlp(), pulled, expected)


def test_decay_as_part_of_the_objective_is_preconditioned():
    """V = ∇ + wd·W, with the rows of the loss alone."""
    start, grads, moved = decayed(weight_decay_mode="reg")
    total = {name: g + 0.1 * start[name] for name, g in grads.items()}
    expected = exact_of(mlp(), *vectors(), F.cross_entropy, NAMES, total, 1e-2)
    assert_directions(mlp(), moved, expected)


def test_maximize_goes_the_other_way():
    found = []
    for maximize in (False, True):
        (x, y), model = vectors(), mlp()
        before = flat(dict(model.named_parameters()))
        opt = plain_hylo(model, lr=0.5, maximize=maximize)
        step(opt, model, x, y, F.cross_entropy)
        found.append(flat(dict(model.named_parameters())) - before)
    assert_close(found[1], -found[0], 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# K-FAC where it is cheaper
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_layers_of_which_kfac_is_cheaper_follow_it(approx, mode):
    """Per layer: rows iff R(d_i + d_o) < d_i² + d_o² and R³ < d_i³ + d_o³, else factors from the same batch."""

    def build():
        return seeded_build(
            lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(40, 6), nn.Linear(6, 3))
        )

    x, y = images(12)
    model, plain = build(), build()
    opt = plain_hylo(model, mode=mode, approx=approx, rank_fraction=1.0, kfac_when_cheaper=True)
    kept = step(opt, model, x, y, F.cross_entropy)
    described = {line.split()[0]: line.lower() for line in opt.describe().splitlines() if line.split()}
    for name, (d_o, d_i) in {"0": (2, 9), "3": (6, 41), "4": (3, 7)}.items():
        cheaper = not (12 * (d_i + d_o) < d_i**2 + d_o**2 and d_i**3 + d_o**3 > 12**3)
        assert cheaper == (name != "3")
        row = described[f"{name}.weight"]
        assert ("k-fac" in row or "kfac" in row) == cheaper
        assert "fallback" not in row
        if cheaper:
            V = as_rows(model, name, one(gradients(model)))[0]
            A, B = expected_factors(plain, x, y, F.cross_entropy, [name], approx)[name]
            assert_directions(model, kept, {name: solve_exact(B, A, V.view(d_o, d_i), 1e-2).view(1, -1)})
            assert_close(opt.dense_curvature(name), torch.kron(B, A), 1e-9)
    assert_directions(model, kept, exact_of(plain, x, y, F.cross_entropy, ["3"], gradients(model), 1e-2))


@pytest.mark.parametrize(
    ("n", "cheaper"), [(9, False), (10, True)], ids=["by the first rule", "against the first rule"]
)
def test_the_border_of_the_first_rule(n, cheaper):
    """d_i = 11, d_o = 4: R · 15 against 137."""
    model = mlp((10, 4))
    opt = plain_hylo(model, kfac_when_cheaper=True)
    step(opt, model, *vectors(n, 10, 4), F.cross_entropy)
    row = next(line.lower() for line in opt.describe().splitlines() if line.split()[:1] == ["0.weight"])
    assert ("k-fac" in row or "kfac" in row) == (n * 15 >= 137) == cheaper


def test_the_choice_is_by_the_kept_rows():
    """The same batch: 4 kept rows are cheap where 40 are not."""
    for rank_fraction, cheaper in ((0.1, False), (1.0, True)):
        model = mlp((10, 4))
        opt = plain_hylo(model, mode="kid", rank_fraction=rank_fraction, kfac_when_cheaper=True)
        step(opt, model, *vectors(40, 10, 4), F.cross_entropy)
        row = next(line.lower() for line in opt.describe().splitlines() if line.split()[:1] == ["0.weight"])
        assert ("k-fac" in row or "kfac" in row) == cheaper


def is_factored(opt, name):
    row = next(line.lower() for line in opt.describe().splitlines() if line.split()[:1] == [f"{name}.weight"])
    return "k-fac" in row or "kfac" in row


@pytest.mark.parametrize(("approx", "factored"), [("expand", True), ("reduce", False)])
def test_positions_make_rows_expensive(approx, factored):
    """R S (d_i + d_o) < d_i² + d_o²: 4 · 7 · 15 = 420 or 4 · 15 = 60 against 137."""
    model = mlp((10, 4))
    opt = plain_hylo(model, approx=approx, kfac_when_cheaper=True)
    step(opt, model, noise(4, 7, 10), noise(4, 7, 4, seed=1), lambda out, t: (out - t).square().sum((1, 2)).mean())
    assert is_factored(opt, "0") == factored


def test_the_choice_is_made_once():
    """At the first refresh; later batches of another size do not change it."""
    for first, later in ((40, 4), (4, 40)):
        model = mlp((10, 4))
        opt = plain_hylo(model, kfac_when_cheaper=True)
        for seed, n in enumerate((first, later)):
            step(opt, model, *vectors(n, 10, 4, seed=seed), F.cross_entropy)
        assert is_factored(opt, "0") == (first == 40)


def test_a_new_damping_acts_on_factors_at_the_next_refresh():
    """As it does on rows."""
    (x, y), model, plain = vectors(40), mlp((4, 3)), mlp((4, 3))
    opt = plain_hylo(model, kfac_when_cheaper=True, update_steps=2)
    A, B = expected_factors(plain, x, y, F.cross_entropy)["0"]
    for given, damping in ((1e-2, 1e-2), (3.0, 1e-2), (0.1, 0.1), (5.0, 0.1)):
        opt.param_groups[0]["damping"] = given
        kept = step(opt, model, x, y, F.cross_entropy)
        V = as_rows(model, "0", one(gradients(model)))[0].view(3, 5)
        assert_directions(model, kept, {"0": solve_exact(B, A, V, damping).view(1, -1)})


def test_factors_of_a_running_mean():
    """The layers that take K-FAC average their factors over the refreshes, the weights being the examples."""
    model, plain = mlp((4, 3)), mlp((4, 3))
    opt = plain_hylo(model, kfac_when_cheaper=True, factor_decay=0.5)
    total, A, B = 0.0, 0.0, 0.0
    for seed, n in enumerate((20, 30, 40)):
        x, y = vectors(n, seed=seed)
        kept = step(opt, model, x, y, F.cross_entropy)
        a, b = expected_factors(plain, x, y, F.cross_entropy)["0"]
        total = 0.5 * total + n
        A, B = A + n / total * (a - A), B + n / total * (b - B)
        V = as_rows(model, "0", one(gradients(model)))[0].view(3, 5)
        assert_directions(model, kept, {"0": solve_exact(B, A, V, 1e-2).view(1, -1)})


# ---------------------------------------------------------------------------------------------------------------------
# What is told about it
# ---------------------------------------------------------------------------------------------------------------------


def test_memory_is_counted_as_rows_and_kernels():
    (x, y), model = vectors(), mlp()
    opt = plain_hylo(model)
    step(opt, model, x, y, F.cross_entropy)
    used = opt.memory_usage()
    assert used["rows"] >= 6 * (4 + 5 + 5 + 3) * 8
    assert used["kernel"] >= 2 * 6 * 6 * 8
    assert used["total"] >= used["rows"] + used["kernel"]


@pytest.mark.parametrize(("mode", "rank"), [("sngd", 20), ("kid", 5), ("kis", 5)])
def test_the_rank_of_every_layer_is_reported(mode, rank):
    (x, y), model = vectors(20), mlp()
    opt = plain_hylo(model, mode=mode, rank_fraction=0.23)
    assert set(opt.blocks) == set(NAMES)
    step(opt, model, x, y, F.cross_entropy)
    told = opt.diagnostics()
    assert told["mode"] == mode
    assert {name: int(r) for name, r in told["rank"].items()} == dict.fromkeys(NAMES, rank)


def test_dense_curvature_is_undamped():
    (x, y), model, plain = vectors(), mlp(), mlp()
    opt = plain_hylo(model, damping=0.7, normalize_damping=True)
    step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    assert_close(opt.dense_curvature("2"), dense(fisher(as_rows(plain, "2", found))), 1e-9)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_curvature_shown_of_groups_with_many_rows(threads):
    """With two threads torch's LU factorisation of a batch of matrices of this size breaks down."""
    shown, before = {}, torch.get_num_threads()
    torch.set_num_threads(threads)
    for mode, fraction in (("sngd", 1.0), ("kid", 0.9)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)).double()
        opt = plain_hylo(model, mode=mode, rank_fraction=fraction)
        step(opt, model, noise(256, 4, 3, 3), noise(256, 4, 3, 3, seed=1), F.mse_loss)
        shown[mode] = opt.dense_curvature("0")
    torch.set_num_threads(before)
    assert_close(shown["kid"], shown["sngd"], 1e-6)  # six dimensions per group: the rows that are kept span all


@pytest.mark.parametrize("relative", [1.0, 1e-4, 1e-6])
@pytest.mark.parametrize("n", [6, 40], ids=lambda n: f"{n} examples")
@pytest.mark.parametrize("mode", ["sngd", "kis"])
def test_the_curvature_shown_does_not_depend_on_the_damping(relative, n, mode):
    """Undamped means the sum over the rows, however small λ was and whether there are more rows than entries."""
    (x, y), plain = vectors(n), mlp()
    U = as_rows(plain, "0", example_gradients(plain, (x,), y, F.cross_entropy))
    model = mlp()
    opt = plain_hylo(model, mode=mode, rank_fraction=1.0, damping=relative * steepest(U))
    step(opt, model, x, y, F.cross_entropy)
    assert_close(opt.dense_curvature("0"), dense(fisher(U)), 1e-9)
