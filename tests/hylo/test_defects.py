"""What public implementations of the method get wrong, one test each at least."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import HyLo, ParamScheduler
from secondorder.schedule import damping_decay
from secondorder.switching import Always, EpochList, GradNormChange, LRChange, ProbeError
from tests.support.kfac import assert_close, backward, hook_counts, noise
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.hylo import (
    LATER,
    as_rows,
    check_block,
    error,
    example_gradients,
    fisher,
    flat,
    gradients,
    greedy,
    kid_operator,
    one,
    plain_hylo,
    published_operator,
    sngd,
    steepest,
    step,
    taken,
    with_gradient,
)

MODES = {
    "sngd": {"mode": "sngd"},
    "kid": {"mode": "kid", "rank_fraction": 0.4},
    "kid full": {"mode": "kid", "rank_fraction": 0.4, "kid_residual": "full"},
    "kid none": {"mode": "kid", "rank_fraction": 0.4, "kid_residual": "none"},
    "kid all": {"mode": "kid", "rank_fraction": 1.0},
    "kid all, no residual": {"mode": "kid", "rank_fraction": 1.0, "kid_residual": "none"},
    "kid qr": {"mode": "kid", "rank_fraction": 0.4, "kid_pivoting": "qr"},
    "kid score": {"mode": "kid", "rank_fraction": 0.4, "kid_pivoting": "score"},
    "kis": {"mode": "kis", "rank_fraction": 0.4},
    "kis all": {"mode": "kis", "rank_fraction": 1.0},
    "kis replacement": {"mode": "kis", "rank_fraction": 1.0, "kis_sampling": "replacement"},
    "kis unweighted": {"mode": "kis", "rank_fraction": 1.0, "kis_sampling": "unweighted"},
    "kis uniform": {"mode": "kis", "rank_fraction": 0.4, "kis_sampling": "uniform"},
    "auto": {"mode": "auto", "rank_fraction": 0.4},
}
modes = pytest.mark.parametrize("mode", MODES)


def products(out, target):
    return (out * target).sum(1).mean()


# ---------------------------------------------------------------------------------------------------------------------
# The algebra of interpolation
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [0.1, 0.01])
@pytest.mark.parametrize("build", [lambda: mlp((6, 5, 3)), convnet], ids=["mlp", "convnet"])
def test_the_published_algebra_is_worse_than_plain_descent(build, relative):
    """An inverse of K̂ where K̂ belongs, divided by the kept rows, the residual unscaled; same rows, same gradient."""
    x, y = vectors(24, 6) if isinstance(build(), nn.Sequential) else images(24)
    y = noise(24, 3, seed=4)

    def loss(out, target):
        return 20 * (out - target).square().sum(1).mean()

    plain = build()
    found = example_gradients(plain, (x,), y, loss)
    for name, module in plain.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        U = as_rows(plain, name, found)
        damping = relative * steepest(U)
        model = build()
        opt = plain_hylo(model, mode="kid", rank_fraction=0.25, damping=damping)
        kept = step(opt, model, x, y, loss)
        V, moved = (as_rows(model, name, one(values))[0, 0] for values in (gradients(model), kept))
        exact, chosen = sngd(U, V[None], damping)[0], greedy(U[0] @ U[0].mT, 6)
        published = published_operator(U[0], chosen, damping) @ V
        assert error(published, exact) > 1
        assert error(published, exact) > 3 * error(moved, exact)
        assert_close(moved, kid_operator(U[0], chosen, damping) @ V, 1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Singular kernels
# ---------------------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_duplicated_examples(mode, dtype):
    """A kernel of rank 3 for 12 rows; what is exact stays exact."""
    x, y = vectors(3)
    model, plain = mlp().to(dtype), mlp()
    opt = plain_hylo(model, **MODES[mode])
    kept = step(opt, model, x.repeat(4, 1).to(dtype), y.repeat(4), F.cross_entropy)
    assert torch.isfinite(flat(kept)).all()
    if mode in ("sngd", "kid", "kid full", "kid none", "kid all", "kid all, no residual", "kis all"):
        found = example_gradients(plain, (x,), y, F.cross_entropy)
        for name in ("0", "2"):
            V, moved = (as_rows(model, name, one(v)).double()[:, 0] for v in (gradients(model), kept))
            assert_close(moved, sngd(as_rows(plain, name, found), V, 1e-2), 1e-3 if dtype == torch.float32 else 1e-7)


@modes
def test_more_rows_than_parameters(mode):
    x, y = vectors(30, 2, 2)
    model, plain = mlp((2, 2), bias=False), mlp((2, 2), bias=False)
    opt = plain_hylo(model, **MODES[mode])
    kept = step(opt, model, x, y, F.cross_entropy)
    assert torch.isfinite(flat(kept)).all()
    if mode == "sngd" or mode.startswith("kid") and mode not in ("kid score", "kid qr") or mode == "kis all":
        U = as_rows(plain, "0", example_gradients(plain, (x,), y, F.cross_entropy))
        V, moved = (as_rows(model, "0", one(values))[:, 0] for values in (gradients(model), kept))
        assert_close(moved, sngd(U, V, 1e-2), 1e-6)


@modes
def test_examples_without_a_gradient(mode):
    """Some rows are zero: a masked loss."""
    x, y = vectors(10)
    keep = (torch.arange(10) % 3 > 0).double()
    model, plain = mlp(), mlp()
    opt = plain_hylo(model, **MODES[mode])
    kept = step(opt, model, x, y, lambda out, t: (keep * F.cross_entropy(out, t, reduction="none")).mean())
    assert torch.isfinite(flat(kept)).all()
    if mode in ("sngd", "kid all", "kis all"):
        found = example_gradients(plain, (x,), y, F.cross_entropy)
        for name in ("0", "2"):
            U = as_rows(plain, name, found) * keep[:, None]
            check_block(opt, model, name, U, kept, 1e-2, 1e-6)


@modes
@pytest.mark.parametrize("damping", [1e-2, 1e-8])
def test_a_batch_without_any_gradient(mode, damping):
    """Nothing is known: the step is V/λ with the next gradient, and zero with this one."""
    (x, y), model = vectors(), mlp()
    opt = plain_hylo(model, damping=damping, **{**MODES[mode], "update_steps": LATER})
    kept = step(opt, model, x, y, lambda out, t: 0.0 * F.cross_entropy(out, t))
    assert not flat(kept).any()
    moved = flat(with_gradient(opt, model, 0))
    assert_close(damping * moved, flat(gradients(model)), 1e-9)


@modes
def test_a_batch_without_any_gradient_and_relative_damping(mode):
    """No trace to be relative to: whatever the step is, it is a number."""
    (x, y), model = vectors(), mlp()
    opt = plain_hylo(model, damping=0.1, damping_mode="relative", **MODES[mode])
    step(opt, model, x, y, lambda out, t: 0.0 * F.cross_entropy(out, t))
    kept = step(opt, model, x, y, F.cross_entropy)
    assert torch.isfinite(flat(kept)).all()


@modes
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_batch_leaves_the_last_good_rows(mode, value):
    (x, y), model = vectors(8), mlp()
    opt = plain_hylo(model, **MODES[mode])
    step(opt, model, x, y, F.cross_entropy)
    step(opt, model, x, y, lambda out, t: value * F.cross_entropy(out, t))
    assert torch.isfinite(opt.dense_curvature("0")).all()
    assert torch.isfinite(flat(dict(model.named_parameters()))).all()
    kept = step(opt, model, x, y, F.cross_entropy)
    assert torch.isfinite(flat(kept)).all()


@modes
@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_tiny_and_huge_losses_in_single_precision(mode, scale):
    (x, y), model = vectors(12), mlp().float()
    opt = plain_hylo(model, damping=0.1, damping_mode="relative", **MODES[mode])
    kept = step(opt, model, x.float(), y, lambda out, t: scale * F.cross_entropy(out, t))
    assert torch.isfinite(flat(kept)).all()
    assert flat(kept).any()


# ---------------------------------------------------------------------------------------------------------------------
# Construction, tiny batches, every layer type
# ---------------------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """A grouped convolution, a shared layer without bias, tokens, a norm layer, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, groups=2, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.mix = nn.Linear(4, 4, bias=False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        z = self.act(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(self.norm(torch.tanh(self.mix(self.mix(z)))).mean(1))


@pytest.mark.parametrize("n", [1, 2, 12], ids=lambda n: f"{n} examples")
@modes
def test_every_kind_of_layer_with_any_batch(mode, n):
    torch.manual_seed(0)
    model = Zoo().double()
    x, y = images(n)
    opt = plain_hylo(model, lr=1e-3, approx="reduce", **MODES[mode])
    for _ in range(3):
        assert torch.isfinite(flat(step(opt, model, x, y, F.cross_entropy))).all()


def test_default_arguments():
    """A plain loop, and no switch that has to be thrown around backward."""
    torch.manual_seed(0)
    model = Zoo()
    opt = HyLo(model)
    (x, y), losses = images(16), []
    for _ in range(25):
        opt.zero_grad()
        loss = F.cross_entropy(model(x.float()), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    group = opt.param_groups[0]
    assert (group["lr"], group["momentum"], group["update_steps"], group["rank_fraction"]) == (0.1, 0.9, 10, 0.1)


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"mode": "kfac"}, "kfac"),
        ({"rank_fraction": 0.0}, "0.0"),
        ({"rank_fraction": 1.5}, "1.5"),
        ({"max_rank": 0}, "0"),
        ({"rank_energy": 1.5}, "1.5"),
        ({"kis_sampling": "best"}, "best"),
        ({"kid_pivoting": "random"}, "random"),
        ({"kid_residual": "half"}, "half"),
        ({"approx": "mean"}, "mean"),
        ({"conv_scale": "paper"}, "paper"),
        ({"damping": -1.0}, "-1.0"),
        ({"damping": 0.0}, "0.0"),
        ({"update_steps": -1}, "-1"),
        ({"weight_decay_mode": "l2"}, "l2"),
        ({"damping_mode": "odd", "damping": 0.1}, "odd"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_bad_values_are_refused_by_name(keywords, match):
    with pytest.raises(ValueError, match=match):
        HyLo(mlp(), **keywords)


def test_a_module_is_needed():
    with pytest.raises(ValueError, match="module"):
        HyLo(mlp().parameters())


POLICIES = {
    "norm": lambda: GradNormChange(eta=0.1, period_steps=2),
    "lr": lambda: LRChange(hold=1, period_steps=2),
    "epochs": lambda: EpochList([(0, 1)], steps_per_epoch=3),
    "probe": lambda: ProbeError(layers=1, threshold=0.1),
    "kid": lambda: Always("kid"),
    "kis": lambda: Always("kis"),
    "sngd": lambda: Always("sngd"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_an_optimizer_with_any_policy_can_be_copied(policy, how):
    model = mlp()
    opt = plain_hylo(model, mode="auto", switch=POLICIES[policy](), lr=0.01, rank_fraction=0.3)
    for seed in range(3):
        step(opt, model, *vectors(8, seed=seed), F.cross_entropy)
    pair = (model, opt)
    other, second = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    second.attach(other)
    for seed in range(3, 8):
        step(opt, model, *vectors(8, seed=seed), F.cross_entropy)
        step(second, other, *vectors(8, seed=seed), F.cross_entropy)
    assert torch.equal(flat(dict(other.named_parameters())), flat(dict(model.named_parameters())))


# ---------------------------------------------------------------------------------------------------------------------
# Observers, shared modules, schedules
# ---------------------------------------------------------------------------------------------------------------------


@modes
def test_looking_changes_nothing(mode):
    found = []
    for look in (False, True):
        model = mlp()
        opt = plain_hylo(model, lr=0.05, **{**MODES[mode], "update_steps": 2})
        for seed in range(6):
            step(opt, model, *vectors(8, seed=seed), F.cross_entropy)
            if look:
                opt.dense_curvature("0")
                opt.diagnostics()
                opt.describe()
                opt.memory_usage()
        found.append(flat(dict(model.named_parameters())))
    assert torch.equal(*found)


def test_calls_of_a_shared_module_add_up():
    """Not the rows of the last call alone."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    model = Shared().double()
    plain, (x, y) = copy.deepcopy(model), vectors(6, 3)
    opt = plain_hylo(model)
    kept = step(opt, model, x, y, F.cross_entropy)
    found = example_gradients(plain, (x,), y, F.cross_entropy)
    check_block(opt, model, "layer", as_rows(plain, "layer", found), kept, 1e-2)


@pytest.mark.parametrize("interval", [1, 5, 13])
def test_a_decay_of_the_damping_is_in_steps_whatever_the_interval(interval):
    """λ(t) = λ_T + (λ₀ − λ_T)(1 − α)^t, and a kernel has the λ of the step that made it."""
    model, x = nn.Linear(3, 2, bias=False).double(), noise(4, 3)
    opt = plain_hylo(model, update_steps=interval, damping=2.0)
    schedule = ParamScheduler(opt, damping=damping_decay(2.0, 0.02, 40))
    alpha = 2 * 2.0 / 40  # 2 log10(λ₀/λ_T) / N
    for t in range(30):
        opt.zero_grad()
        products(model(x), torch.zeros(4, 2, dtype=torch.float64)).backward()
        model.weight.grad.fill_(1.0)  # no row has a gradient: the update is V/λ
        refresh = t - t % interval
        damping = 0.02 + 1.98 * (1 - alpha) ** refresh
        assert_close(taken(opt)["weight"], torch.full((2, 3), 1 / damping, dtype=torch.float64), 1e-9)
        schedule.step()


def test_the_warm_up_of_a_decay():
    decay = damping_decay(1.0, 0.1, 100, warmup_steps=10)
    assert decay(0) == decay(10) == 1.0
    assert decay(11) == pytest.approx(0.1 + 0.9 * (1 - 2 / 100))
    assert decay(10**5) == pytest.approx(0.1)
    assert pickle.loads(pickle.dumps(decay))(37) == decay(37)


def test_a_bound_on_the_step_is_not_ignored():
    found = []
    for bound in (None, 1e-6):
        (x, y), model = vectors(), mlp()
        opt = plain_hylo(model, lr=0.5, kl_clip=bound)
        before = flat(dict(model.named_parameters()))
        step(opt, model, x, y, F.cross_entropy)
        found.append(float((flat(dict(model.named_parameters())) - before).norm()))
    assert found[1] < 0.1 * found[0]


def test_capture_happens_where_a_refresh_is_due_only():
    """Steps between refreshes leave no rows behind, and forwards without gradients none at all."""
    (x, y), model = vectors(), mlp()
    opt = plain_hylo(model, update_steps=3)
    step(opt, model, x, y, F.cross_entropy)
    held = opt.dense_curvature("0")
    for seed in (5, 6):
        step(opt, model, *vectors(9, seed=seed), F.cross_entropy)
        assert torch.equal(opt.dense_curvature("0"), held)
    step(opt, model, *vectors(9, seed=7), F.cross_entropy)
    assert not torch.equal(opt.dense_curvature("0"), held)


def test_the_module_is_as_it_was_after_close():
    model = convnet()
    before = hook_counts(model)
    opt = plain_hylo(model)
    step(opt, model, *images(), F.cross_entropy)
    opt.close()
    opt.close()
    assert hook_counts(model) == before


def test_no_warning_in_a_plain_loop():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = convnet()
        opt = plain_hylo(model, update_steps=2, mode="auto", rank_fraction=0.5)
        for seed in range(5):
            step(opt, model, *images(seed=seed), F.cross_entropy)


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis"])
def test_a_gradient_that_is_no_mean_of_examples(mode):
    """A loss of the whole batch (Dice, say): rows are what backward makes of it, and steps stay numbers."""
    x, y = images(6)
    model = convnet()
    opt = plain_hylo(model, mode=mode, rank_fraction=0.5, lr=1e-3)
    for _ in range(3):
        kept = step(opt, model, x, y, lambda out, t: 1 - out.softmax(1)[torch.arange(6), t].sum() / out.abs().sum())
        assert torch.isfinite(flat(kept)).all()


def test_gradients_are_left_as_they_are():
    (x, y), model, plain = images(), convnet(), convnet()
    opt = plain_hylo(model, lr=0.1, mode="kid", rank_fraction=0.5)
    step(opt, model, x, y, F.cross_entropy)
    backward(plain, x, y, F.cross_entropy)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_the_exact_curvature_is_that_of_the_rows_whatever_the_rank_was():
    """A change of mode between refreshes leaves no rows of the former one behind."""
    (x, y), model, plain = vectors(8), mlp((4, 3)), mlp((4, 3))
    opt = plain_hylo(model, mode="auto", switch=EpochList([(0, 1)], steps_per_epoch=1), rank_fraction=1.0)
    U = as_rows(plain, "0", example_gradients(plain, (x,), y, F.cross_entropy))
    for _ in range(4):
        step(opt, model, x, y, F.cross_entropy)
        assert_close(opt.dense_curvature("0"), fisher(U)[0], 1e-7)
