"""The preconditioned gradient against explicit dense solves, read off the parameters after one step with lr = 1."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.grid import pairs, product
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    backward,
    directions,
    held_factors,
    noise,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.kfac import (
    expected_factors,
    grouped,
    layer_gradient,
    layer_values,
    ratio_average,
    solve_exact,
    solve_pi,
)

METHODS = {
    "eigen": ({"inverse_method": "eigen"}, solve_exact),
    "eigen pi": ({"inverse_method": "eigen", "damping_split": "pi"}, solve_pi),
    "cholesky": ({"inverse_method": "cholesky"}, solve_pi),
}
methods = pytest.mark.parametrize("method", METHODS)


def grouped_conv():
    """Groups of very different size, which must not share one π."""
    scale = torch.tensor([100.0, 100.0, 1.0, 1.0], dtype=torch.float64)[:, None, None]
    layer = seeded_build(lambda: nn.Conv2d(4, 4, 2, groups=2))
    return layer, scale * noise(3, 4, 4, 3), noise(3, 4, 3, 2, seed=1), F.mse_loss


def frozen(part):
    model = mlp()
    getattr(model[0], part).requires_grad_(False)
    return model, *vectors(), F.cross_entropy


PROBLEMS = {
    "mlp": lambda: (mlp(), *vectors(), F.cross_entropy),
    "no bias": lambda: (mlp(bias=False), *vectors(), F.cross_entropy),
    "one example": lambda: (mlp(), *vectors(1), F.cross_entropy),
    "convnet": lambda: (convnet(stride=2, padding=1), *images(), F.cross_entropy),
    "grouped conv": grouped_conv,
    "frozen bias": lambda: frozen("bias"),
    "frozen weight": lambda: frozen("weight"),
}


@product(problem=list(PROBLEMS), method=list(METHODS), damping=[1e-1, 1e-4], mode=["absolute", "relative"])
def test_direction_is_the_dense_solve_with_this_batch_s_factors(problem, method, damping, mode):
    """The first step updates the factors and refreshes before it preconditions: no identity, no stale inverse.

    A relative λ is a multiple of the mean eigenvalue of each block, and of each group of a convolution.
    """
    model, x, y, loss = PROBLEMS[problem]()
    keywords, solve = METHODS[method]
    expected = expected_factors(twin(model), x, y, loss)
    opt = plain_kfac(model, damping=damping, damping_mode=mode, **keywords)
    backward(model, x, y, loss)
    for name, (gradient, V) in directions(opt, model).items():
        pairs_of_groups = list(zip(*map(grouped, expected[name]), strict=True))
        parts = []
        for (A, B), part in zip(pairs_of_groups, gradient.chunk(len(pairs_of_groups)), strict=True):
            mean = float(A.trace() * B.trace()) / (len(A) * len(B))
            parts.append(solve(B, A, part, damping * mean if mode == "relative" else damping))
        assert_close(V, torch.cat(parts), 1e-8, name)
        assert float((V - gradient).abs().max()) > 1e-3, "statistics were never used"
        assert float((V * gradient).sum()) > 0, "not a descent direction"


@pytest.mark.parametrize(("method", "split"), [("eigen", "exact"), ("cholesky", "pi")])
def test_the_split_of_a_method_is_the_only_one_that_it_needs_no_word_for(method, split):
    steps = []
    for words in ({}, {"damping_split": split}):
        model = mlp()
        train_step(plain_kfac(model, inverse_method=method, **words), model, *vectors(), F.cross_entropy)
        steps.append(model[0].weight.detach())
    assert torch.equal(*steps)


@methods
def test_a_large_damping_leaves_the_gradient_over_lambda(method):
    model, (x, y) = mlp(), vectors()
    damping = 1e9
    opt = plain_kfac(model, lr=damping, damping=damping, **METHODS[method][0])
    backward(model, x, y, F.cross_entropy)
    for gradient, V in directions(opt, model).values():
        # pi keeps terms of order √λ, so it converges as their square root
        assert_close(V, gradient, 1e-8 if METHODS[method][1] is solve_exact else 1e-3)


def test_damping_changed_between_refreshes_acts_at_once_for_eigen():
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, damping=1e-2, inverse_method="eigen", factor_update_steps=50, inv_update_steps=50)
    train_step(opt, model, x, y, F.cross_entropy)
    held = all_factors(opt, model)
    for damping in (1.0, 1e-3):
        opt.param_groups[0]["damping"] = damping
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        for name, (gradient, V) in directions(opt, model).items():
            assert_close(V, solve_exact(held[name][1], held[name][0], gradient, damping), 1e-8, f"{name} λ={damping}")


def test_cholesky_takes_a_changed_damping_at_the_next_refresh_at_the_latest():
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, damping=1e-2, inverse_method="cholesky", factor_update_steps=1, inv_update_steps=2)
    train_step(opt, model, x, y, F.cross_entropy)
    opt.param_groups[0]["damping"] = 0.5
    train_step(opt, model, x, y, F.cross_entropy)
    opt.zero_grad()
    backward(model, x, y, F.cross_entropy)
    moved = directions(opt, model)  # t = 2: due
    held = all_factors(opt, model)
    for name, (gradient, V) in moved.items():
        assert_close(V, solve_pi(held[name][1], held[name][0], gradient, 0.5), 1e-8, name)


@methods
def test_relative_damping_does_not_know_the_unit_of_the_loss(method):
    """Loss → c·loss scales F by c² and ∇ by c: a relative λ makes V scale by exactly 1/c."""
    found = []
    for c in (1.0, 64.0):
        model, (x, y) = mlp(), vectors()
        opt = plain_kfac(model, damping=0.1, damping_mode="relative", **METHODS[method][0])
        backward(model, x, y, F.cross_entropy, scale=c)
        found.append({name: c * V for name, (_, V) in directions(opt, model).items()})
    for name, V in found[0].items():
        assert_close(found[1][name], V, 1e-8, name)


@methods
def test_rescaling_of_activations_against_gradients_changes_nothing(method):
    """A → c²A, B → B/c² (weights scaled down behind inputs scaled up) leaves B ⊗ A, π's product and W's path alone."""
    x, y = noise(6, 4), noise(6, 3, seed=1)
    found = []
    for c in (1.0, 8.0):
        layer = seeded_build(lambda: nn.Linear(4, 3, bias=False))

        class Scaled(nn.Module):
            def __init__(self, layer, c) -> None:
                super().__init__()
                self.layer, self.c = layer, c

            def forward(self, x):
                return self.layer(x * self.c) / self.c

        model = Scaled(layer, c)
        opt = plain_kfac(model, damping=0.1, **METHODS[method][0])
        backward(model, x, y, F.mse_loss)
        found.append(directions(opt, model)["layer"][1])
    assert_close(found[1], found[0], 1e-9)


def test_invertible_affine_inputs_are_undone_without_damping():
    """x → Mx + c with W → WM⁻¹, b → b − WM⁻¹c is the same function; as λ → 0 its K-FAC step is the same too."""
    x, y = noise(40, 3), noise(40, 2, seed=1)
    M, c = noise(3, 3, seed=2) + 2 * torch.eye(3, dtype=torch.float64), noise(3, seed=3)
    plain = seeded_build(lambda: nn.Linear(3, 2))
    moved = twin(plain)
    with torch.no_grad():
        moved.weight.copy_(plain.weight @ torch.linalg.inv(M))
        moved.bias.copy_(plain.bias - moved.weight @ c)
    x_moved = x @ M.T + c
    torch.testing.assert_close(moved(x_moved), plain(x))
    for layer, inputs in ((plain, x), (moved, x_moved)):
        opt = plain_kfac(layer, damping=1e-13, lr=0.1)
        train_step(opt, layer, inputs, y, F.mse_loss)
    assert_close(moved(x_moved).detach(), plain(x).detach(), 1e-8)


def test_cholesky_with_exact_damping_is_refused_with_the_mend():
    with pytest.raises(ValueError, match="exact") as error:
        plain_kfac(mlp(), inverse_method="cholesky", damping_split="exact")
    assert "eigen" in str(error.value) or "pi" in str(error.value)


@pairs(method=list(METHODS), dead=["inputs", "gradients", "both"])
def test_factors_of_zeros_give_the_gradient_over_lambda(method, dead):
    """A dead input or a dead output makes F = 0 for a first batch; what comes later is divided by λ."""
    model, (x, y) = mlp((4, 3), bias=False), vectors()
    opt = plain_kfac(model, damping=0.25, factor_update_steps=50, inv_update_steps=50, **METHODS[method][0])
    first = x if dead == "gradients" else torch.zeros_like(x)
    backward(model, first, y, F.cross_entropy, scale=1.0 if dead == "inputs" else 0.0)
    opt.step()
    zero = [not factor.any() for factor in held_factors(opt, model, "0")]
    assert zero == [dead != "gradients", dead != "inputs"]
    opt.zero_grad()
    backward(model, x, y, F.cross_entropy)
    gradient, V = directions(opt, model)["0"]
    A, B = held_factors(opt, model, "0")
    assert_close(V, METHODS[method][1](B, A, gradient, 0.25), 1e-9)
    if dead == "both" or method == "eigen":
        assert_close(V, gradient / 0.25, 1e-9)


def test_layers_of_one_shape_in_groups_of_their_own_do_not_mix():
    """Refreshes are batched over equal shapes: equal shapes in two groups and two dtypes keep their own results."""
    x, y = noise(6, 4), noise(6, 4, seed=1)
    model = nn.Sequential(*(seeded_build(lambda: nn.Linear(4, 4), seed) for seed in range(4)))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model
            self.layers[1].float()
            self.layers[3].float()

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
            return x.double()

    mixed = Mixed()
    groups = [
        {"params": [*model[0].parameters(), *model[1].parameters()], "damping": 0.3},
        {"params": [*model[2].parameters(), *model[3].parameters()], "damping": 0.02},
    ]
    expected = expected_factors(twin(mixed), x, y, F.mse_loss)
    opt = plain_kfac(groups, module=mixed)
    backward(mixed, x, y, F.mse_loss)
    moved = directions(opt, mixed)
    assert_factors(all_factors(opt, mixed), expected, 1e-4)  # all pass through float32 layers
    for i, damping in enumerate((0.3, 0.3, 0.02, 0.02)):
        gradient, V = moved[f"layers.{i}"]
        A, B = held_factors(opt, mixed, f"layers.{i}")
        assert A.dtype == B.dtype == V.dtype == (torch.float64 if i in (0, 2) else torch.float32)
        tolerance = 1e-8 if i in (0, 2) else 1e-4
        assert_close(V.double(), solve_exact(B.double(), A.double(), gradient.double(), damping), tolerance)


def expected_clip(found, lrs, clip):
    total = sum(lrs[name] ** 2 * float((V * gradient).sum()) for name, (gradient, V) in found.items())
    return min(1.0, math.sqrt(clip / abs(total)))


def unclipped(model, x, y, **keywords):
    """(∇, V) of a copy of ``model`` with lr = 1 and no clip."""
    copy = twin(model)
    opt = plain_kfac(copy, **keywords)
    backward(copy, x, y, F.cross_entropy)
    return directions(opt, copy)


@pytest.mark.parametrize("clip", [1e-5, 1e3], ids=["clips", "leaves alone"])
def test_kl_clip_bounds_the_change_that_the_current_lr_of_each_group_predicts(clip):
    """ν = min(1, √(κ / Σ lr²⟨V, ∇⟩)), at every step of a scheduler."""
    model, (x, y) = mlp(), vectors()
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.8},
        {"params": list(model[2].parameters()), "lr": 0.1},
    ]
    opt = plain_kfac(groups, module=model, kl_clip=clip, factor_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, [lambda t: 0.5**t, lambda t: 4.0 + t])
    for t in range(3):
        fresh = mlp()
        fresh.load_state_dict(model.state_dict())
        free = unclipped(fresh, x, y)
        lrs = {"0": 0.8 * 0.5**t, "2": 0.1 * (4.0 + t)}
        factor = expected_clip(free, lrs, clip)
        assert (factor < 1) == (clip < 1)
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        for name, (_, step) in directions(opt, model).items():
            assert_close(step, lrs[name] * factor * free[name][1], 1e-8, f"{name} at {t}")
        scheduler.step()


def test_kl_clip_leaves_uncovered_parameters_alone():
    class WithScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.layer(x) * self.scale

    model, (x, y) = seeded_build(WithScale), vectors()
    opt = plain_kfac(model, lr=0.5, kl_clip=1e-8)
    backward(model, x, y, F.cross_entropy)
    before, gradient = model.scale.detach().clone(), model.scale.grad.clone()
    opt.step()
    assert_close(before - model.scale.detach(), 0.5 * gradient, 1e-12)


@methods
def test_zero_gradients_stay_zero_and_finite(method):
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, kl_clip=1e-3, **METHODS[method][0])
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, x, y, F.cross_entropy, scale=0.0)
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


OPTIONS = {  # what becomes of a direction V of gradient ∇ and values θ
    "weight decay": ({"weight_decay": 0.1}, lambda V, gradient, values: V + 0.1 * values),
    "decoupled": (
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        lambda V, gradient, values: V + 0.1 * values,
    ),
    "maximize": ({"maximize": True}, lambda V, gradient, values: -V),
    "clip value": ({"clip_value": 0.05}, lambda V, gradient, values: V.clamp(-0.05, 0.05)),
    "graft sgd": (
        {"graft": "sgd", "kl_clip": 1e-9},  # sizes come from the graft: no clip on top
        lambda V, gradient, values: V * gradient.norm() / V.norm(),
    ),
    # at the first step of Adam m̂ = ∇ and v̂ = ∇²
    "graft adam": (
        {"graft": "adam", "momentum": 0.9, "kl_clip": 1e-9},
        lambda V, gradient, values: V * (gradient / (gradient.abs() + 1e-8)).norm() / V.norm(),
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_an_option_makes_of_a_direction(option):
    keywords, expected = OPTIONS[option]
    model, (x, y) = mlp(), vectors()
    free = unclipped(model, x, y)
    before = {name: layer_values(model.get_submodule(name)) for name in free}
    opt = plain_kfac(model, lr=0.5, **keywords)
    backward(model, x, y, F.cross_entropy)
    for name, (gradient, step) in directions(opt, model).items():
        assert_close(step, 0.5 * expected(free[name][1], gradient, before[name]), 1e-7, name)


def test_momentum_accumulates_preconditioned_gradients():
    model, reference = mlp(), mlp()
    opt = plain_kfac(model, lr=0.1, momentum=0.9)
    buffer, history = {}, []
    for seed in range(3):
        x, y = vectors(seed=seed)
        reference.load_state_dict(model.state_dict())
        history.append(expected_factors(reference, x, y, F.cross_entropy))
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        for name, (gradient, step) in directions(opt, model).items():
            A, B = (ratio_average([(len(x), pairs[name][i]) for pairs in history], 0.95) for i in (0, 1))
            V = solve_exact(B, A, gradient, 1e-2)
            buffer[name] = 0.9 * buffer[name] + V if name in buffer else V
            assert_close(step, 0.1 * buffer[name], 1e-8, name)


def block_norm(*tensors):
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def test_grafting_on_adam_preconditions_the_first_moment():
    """Second step with factors kept: P(m̂₂) scaled to ‖m̂₂ / (√v̂₂ + ε)‖, without heavy-ball momentum on top."""
    model = mlp()
    opt = plain_kfac(model, lr=0.01, graft="adam", momentum=0.9, factor_update_steps=5, inv_update_steps=5)
    seen = []
    for seed in (0, 1):
        opt.zero_grad()
        backward(model, *vectors(seed=seed), F.cross_entropy)
        seen.append(directions(opt, model))
    held = all_factors(opt, model)
    for name in ("0", "2"):
        first, second = seen[0][name][0], seen[1][name][0]
        mean = (0.9 * 0.1 * first + 0.1 * second) / (1 - 0.9**2)
        square = (0.999 * 0.001 * first**2 + 0.001 * second**2) / (1 - 0.999**2)
        V = solve_exact(held[name][1], held[name][0], mean, 1e-2)
        size = block_norm(mean / (square.sqrt() + 1e-8))
        assert_close(seen[1][name][1], 0.01 * V * size / block_norm(V), 1e-7, name)


def test_inner_adamw_consumes_the_preconditioned_gradient():
    """Two steps of torch's own AdamW, fed with V where ∇ would be."""
    model, (x, y) = mlp(), vectors()
    free = twin(model)
    reference = torch.optim.AdamW(free.parameters(), lr=0.01, weight_decay=0.1)
    keywords = {"inner": "adamw", "weight_decay": 0.1, "factor_update_steps": 5, "inv_update_steps": 5}
    opt = plain_kfac(model, lr=0.01, **keywords)
    for seed in (0, 1):
        x, y = vectors(seed=seed)
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        opt.step()
        backward(free, x, y, F.cross_entropy)
        for name in ("0", "2"):
            layer = free.get_submodule(name)
            A, B = held_factors(opt, model, name)
            V = solve_exact(B, A, layer_gradient(layer), 1e-2)
            layer.weight.grad, layer.bias.grad = V[:, :-1].clone(), V[:, -1].clone()
        reference.step()
        reference.zero_grad()
        for p, q in zip(model.parameters(), free.parameters(), strict=True):
            assert_close(p.detach(), q.detach(), 1e-8)


def test_a_clip_of_the_norm_is_one_of_all_directions():
    model, (x, y) = mlp(), vectors()
    free = unclipped(model, x, y)
    opt = plain_kfac(model, clip_norm=block_norm(*(V for _, V in free.values())) / 4)
    backward(model, x, y, F.cross_entropy)
    for name, (_, step) in directions(opt, model).items():
        assert_close(step, free[name][1] / 4, 1e-8, name)


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_bytes_are_those_of_the_formula(method):
    """Factors n_a² + n_g², as much again for bases or inverses, n_a + n_g eigenvalues: nothing else is held."""
    model, (x, y) = convnet(), images()
    opt = plain_kfac(model, inverse_method=method)
    train_step(opt, model, x, y, F.cross_entropy)
    opt.zero_grad()
    sizes = [(19, 3), (12, 4), (5, 3)]
    squares = sum(a * a + g * g for a, g in sizes)
    vectors_too = sum(a + g for a, g in sizes) if method == "eigen" else 0
    used = opt.memory_usage()
    scalars = 8 * len(sizes)  # the factor weights
    assert squares * 8 <= used["factors"] <= squares * 8 + scalars
    assert used["second_order"] == (squares + vectors_too) * 8
    assert used["total"] == sum(bytes_ for kind, bytes_ in used.items() if kind != "total")


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True}, {"clip_value": 1e-3}, {"graft": "adam"}, {"foreach": False}],
    ids=["plain", "weight decay", "maximize", "clip value", "graft adam", "loop"],
)
def test_gradients_are_read_and_left_alone(options):
    """Neither rebound (bucket views of DDP) nor written to (the user may log them)."""
    model, (x, y) = convnet(), images()
    opt = plain_kfac(model, lr=0.01, momentum=0.9, kl_clip=1e-3, **options)
    for _ in range(2):
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        gradients = {n: p.grad for n, p in model.named_parameters()}
        kept = {n: (g.data_ptr(), g.clone()) for n, g in gradients.items()}
        opt.step()
        for n, p in model.named_parameters():
            assert p.grad is gradients[n]
            assert p.grad.data_ptr() == kept[n][0]
            assert torch.equal(p.grad, kept[n][1]), n
