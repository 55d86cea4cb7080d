"""EK-FAC's scale where batches, buffers, layers and options change under it, and what it leaves behind."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from tests.support.ekfac import (
    HELD,
    held_bases,
    held_scales,
    measured,
    next_directions,
    plain_ekfac,
    standing,
    state_of,
    train_step,
)
from tests.support.kfac import assert_close, backward, noise, plain_kfac
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.ekfac import layer_gradients, scales, values

ADAM = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.9, "lr": 1e-2}


RECOMPUTED = {"transport": "recompute"}
LEAVING = [
    *((EKFAC, options) for options in ({}, RECOMPUTED, {"estimator": "running"}, {"fisher": "mc"})),
    *((KFAC, options) for options in ({}, {"fisher": "mc"}, {"approx": "reduce"})),
]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def running_mean(plain: nn.Module, name: str, x: Tensor, y: Tensor, bases) -> Tensor:
    """N (Q_Bᵀ ∇ Q_A)² of the mean gradient."""
    return len(x) * scales(layer_gradients(plain, name, x, y, F.cross_entropy).mean(0, keepdim=True), *bases)


# ---------------------------------------------------------------------------------------------------------------------
# Rows and gradients of a step
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["recompute", "project"])
def test_an_input_buffer_may_be_filled_anew_between_micro_batches(transport):
    model, buffer = mlp(), torch.empty(4, 4, dtype=torch.float64)
    opt = plain_ekfac(model, transport=transport, inv_update_steps=1 if transport == "recompute" else HELD)
    x, y = vectors(8)
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                backward(model, buffer.copy_(rows), targets, F.cross_entropy, 1 / 2)
            buffer.fill_(7.0)
            opt.step()
    for name in ("0", "2"):
        G, layer = layer_gradients(mlp(), name, x, y, F.cross_entropy), model.get_submodule(name)
        assert_close(held_scales(opt, layer), scales(G, *held_bases(opt, layer)), 1e-9, name)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # gc finds what torch has deprecated
@pytest.mark.parametrize("build", LEAVING, ids=lambda b: f"{b[0].__name__}-{b[1]}")
def test_nothing_of_a_batch_outlives_its_step(build):
    (method, options), model = build, mlp((4, 5, 3))
    opt = method(model, lr=0.01, damping=0.1, factor_update_steps=1, inv_update_steps=1, **options)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    for seed in range(3):
        x, y = vectors(29, seed=seed)
        seen.append(weakref.ref(x))
        outputs = model(x)
        opt.observe(outputs, "categorical")
        F.cross_entropy(outputs, y).backward()
        del outputs
        opt.step()
        opt.zero_grad()
        del x, y
    gc.collect()
    assert [r() for r in seen] == [None] * 6
    assert not [t for t in gc.get_objects() if isinstance(t, Tensor) and 29 in t.shape]
    assert opt.memory_usage()["pending"] == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rotated_gradients_do_not_outlive_the_step():
    model = mlp((40, 30), bias=False)
    opt = plain_ekfac(model, estimator="running", momentum=0.9, lr=0.01)
    for seed in range(2):
        train_step(opt, model, noise(5, 40, seed=seed), noise(5, 30, seed=seed + 9), F.mse_loss)
    opt.zero_grad()
    gc.collect()
    alive = [t for t in gc.get_objects() if isinstance(t, Tensor) and tuple(t.shape) == (30, 40)]
    known = [model[0].weight, *state_of(opt, model[0]).values()]
    assert [t for t in alive if not any(t is k for k in known)] == []


def test_calls_that_are_kept_for_the_step_count_as_pending():
    model, (x, y) = mlp((4, 3)), vectors(64)
    opt = plain_ekfac(model, transport="recompute", inv_update_steps=1)
    assert opt.memory_usage()["pending"] == 0
    backward(model, x, y, F.cross_entropy)
    assert opt.memory_usage()["pending"] >= (64 * 4 + 64 * 3 + 5 * 5 + 3 * 3) * 8
    opt.step()
    assert opt.memory_usage()["pending"] == 0


def test_loading_its_own_state_changes_nothing():
    for kept in ("all", "factors"):
        model = mlp()
        opt = plain_ekfac(model, lr=0.01, transport="recompute", inv_update_steps=1, checkpoint_curvature=kept)
        for seed in range(3):
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
        before = {id(p): copy.deepcopy(opt.state[p]) for p in model.parameters()}
        opt.load_state_dict(opt.state_dict())
        for p in model.parameters():
            for key, value in before[id(p)].items():
                if isinstance(value, Tensor):
                    assert_close(opt.state[p][key], value, 1e-9, key)
                else:
                    assert opt.state[p][key] == value, key


# ---------------------------------------------------------------------------------------------------------------------
# The running estimate
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["samples", "update"])
@pytest.mark.parametrize("terms", [1, 3])
def test_a_summed_loss_has_the_running_scale_of_its_mean(terms, weighting):
    x, y = vectors(8)
    mean = measured(mlp(), x, y, F.cross_entropy, estimator="running", weighting=weighting)
    total = measured(
        mlp(), x, y, lambda o, t: F.cross_entropy(o, t, reduction="sum"),
        estimator="running", weighting=weighting, loss_reduction="sum", loss_terms=terms,
    )  # fmt: skip
    states = [opt.state[opt.blocks["0"].owner] for opt in (mean, total)]
    assert_close(total.dense_curvature("0"), mean.dense_curvature("0"), 1e-9)
    expected = (8 if weighting == "samples" else 1) * (1 + 0.95)
    assert [float(state["scale_weight"]) for state in states] == pytest.approx([expected] * 2)


class Branches(nn.Module):
    """The layer that comes first takes part in some forwards only."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.used = nn.Linear(4, 3), nn.Linear(4, 3)
        self.both = True

    def forward(self, x):
        return self.used(x) + self.rare(x) if self.both else self.used(x)


@pytest.mark.parametrize("F_steps", [1, 10])
def test_examples_are_counted_when_the_first_layer_takes_no_part(F_steps):
    model, plain = seeded_build(Branches), seeded_build(Branches)
    plain.both = False
    opt = plain_ekfac(model, estimator="running", factor_update_steps=F_steps, scale_decay=0.0)
    with standing(opt):
        for t in range(5):
            model.both = t == 0
            x, y = vectors(4 + t, seed=t)
            train_step(opt, model, x, y, F.cross_entropy)
            assert state_of(opt, model.used)["scale_updates"] == t + 1
            assert float(state_of(opt, model.used)["scale_weight"]) == 4 + t
    expected = running_mean(plain, "used", x, y, held_bases(opt, model.used))
    assert_close(held_scales(opt, model.used), expected, 1e-9)
    assert state_of(opt, model.rare)["scale_updates"] == 1


class ChangesItsInput(nn.Module):
    """Its first layer cannot be captured: under autocast nothing forbids the change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x)
        x.mul_(2.0)
        return self.second(torch.tanh(h.float()))


@pytest.mark.filterwarnings("ignore:EKFAC")
def test_examples_are_counted_when_the_first_layer_is_refused():
    model = seeded_build(ChangesItsInput).float()
    opt = plain_ekfac(model, estimator="running", lr=0.0)
    for seed in range(4):
        train_step(opt, model, noise(5, 3, seed=seed).float(), noise(5, 2).float(), F.mse_loss)
    assert state_of(opt, model.second)["scale_updates"] == 4
    assert float(state_of(opt, model.second)["scale_weight"]) == pytest.approx(5 * (1 + 0.95 + 0.95**2 + 0.95**3))


@pytest.mark.parametrize(
    "options", [{"transport": "recompute"}, {"token_is_example": True}, {"scale_batch_size": 4}], ids=str
)
def test_the_running_estimate_refuses_what_only_rows_can_have(options):
    with pytest.raises(ValueError, match="running"):
        plain_ekfac(mlp(), estimator="running", **options)
    plain_ekfac(mlp(), **options)


# ---------------------------------------------------------------------------------------------------------------------
# Momentum of gradients
# ---------------------------------------------------------------------------------------------------------------------


def test_the_first_mean_of_gradients_is_corrected_for_its_own_updates():
    """λ is so large that directions are multiples of what is preconditioned."""
    model = mlp()
    opt = plain_ekfac(
        model, lr=0.01, momentum=0.9, momentum_mode="pre", damping=1e9, inv_update_steps=0, max_factor_dim=None
    )
    for seed in range(30):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    opt.param_groups[0]["inv_update_steps"] = HELD
    means = [torch.zeros_like(p) for p in model.parameters()]
    for t in range(3):
        opt.zero_grad()
        backward(model, *vectors(seed=30 + t), F.cross_entropy)
        means = [0.9 * m + 0.1 * p.grad for m, p in zip(means, model.parameters(), strict=True)]
        with opt.keep_directions() as directions:
            opt.step()
        for (name, _), m in zip(model.named_parameters(), means, strict=True):
            assert_close(1e9 * directions[name], m / (1 - 0.9 ** (t + 1)), 1e-6, name)


@pytest.mark.parametrize("options", [ADAM, {"momentum_mode": "pre", "momentum": 0.9, "lr": 1e-2}], ids=["adam", "pre"])
def test_the_first_step_after_a_resume_without_curvature_is_that_of_a_new_optimizer(options):
    options = {**options, "checkpoint_curvature": "none", "damping": 0.1, "inv_update_steps": 10}
    model = mlp()
    opt = plain_ekfac(model, **options)
    for seed in range(25):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    moved = []
    for load in (True, False):
        other = mlp()
        other.load_state_dict(model.state_dict())
        second = plain_ekfac(other, **options)
        if load:
            second.load_state_dict(copy.deepcopy(opt.state_dict()))
        train_step(second, other, *vectors(seed=99), F.cross_entropy)
        moved.append(flat(other) - flat(model))
    assert_close(moved[0], moved[1], 1e-9)
    if "power" in options:  # Adam's: lr along every axis
        assert float(moved[0].norm()) <= 1e-2 * len(moved[0]) ** 0.5 * 1.001


# ---------------------------------------------------------------------------------------------------------------------
# Weights of updates
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"scale_decay": 0.5}, {"scale_decay": 1.0}, {"decay_per_step": True}, {"burnin_steps": 100}],
    ids=str,
)
def test_a_scale_that_starts_again_from_eigenvalues_weighs_as_one_update(options):
    model = mlp()
    opt = plain_ekfac(
        model, transport="kfac", factor_update_steps=5, scale_update_steps=5, inv_update_steps=20, **options
    )
    with standing(opt):
        for t in range(21):
            train_step(opt, model, *vectors(8, seed=t), F.cross_entropy)
    assert state_of(opt, model[0])["refreshes"] == 2
    assert float(state_of(opt, model[0])["scale_weight"]) == pytest.approx(8)


def test_decay_per_step_of_a_scale_follows_the_steps_that_went_by():
    """Of a branch that rested: β to the power of the steps since its last update."""
    model = seeded_build(Branches)
    opt = plain_ekfac(model, scale_update_steps=2, scale_decay=0.9, decay_per_step=True)
    weight, last = 0.0, None
    with standing(opt):
        for t in range(13):
            model.both = t in (0, 2, 8, 12)
            train_step(opt, model, *vectors(6, seed=t), F.cross_entropy)
            if model.both and t > 0:
                weight = weight * (1.0 if last is None else 0.9 ** (t - last)) + 6
                last = t
                assert float(state_of(opt, model.rare)["scale_weight"]) == pytest.approx(weight)
    assert state_of(opt, model.rare)["scale_updates"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# Options that change between steps
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["intra", "running"])
def test_the_interval_of_the_scale_acts_on_the_forward_that_begins(estimator):
    model, plain = mlp(), mlp()
    opt = plain_ekfac(
        model, estimator=estimator, factor_update_steps=100, scale_update_steps=50, scale_decay=0.0, lr=0.0
    )
    for seed in range(5):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    before = state_of(opt, model[0])["scale_updates"]
    opt.param_groups[0]["scale_update_steps"] = 1
    x, y = vectors(seed=9)
    train_step(opt, model, x, y, F.cross_entropy)
    assert state_of(opt, model[0])["scale_updates"] == before + 1
    bases, G = held_bases(opt, model[0]), layer_gradients(plain, "0", x, y, F.cross_entropy)
    expected = scales(G, *bases) if estimator == "intra" else running_mean(plain, "0", x, y, bases)
    assert_close(held_scales(opt, model[0]), expected, 1e-9)


@pytest.mark.parametrize(("before", "after"), [("running", "intra"), ("intra", "running")])
def test_the_estimator_acts_on_the_forward_that_begins(before, after):
    model, plain = mlp(), mlp()
    opt = plain_ekfac(model, estimator=before, factor_update_steps=100, scale_decay=0.0, lr=0.0)
    for seed in range(5):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    opt.param_groups[0]["estimator"] = after
    x, y = vectors(7, seed=9)
    updates = state_of(opt, model[0])["scale_updates"]
    train_step(opt, model, x, y, F.cross_entropy)
    assert state_of(opt, model[0])["scale_updates"] == updates + 1
    for name in ("0", "2"):
        bases = held_bases(opt, model.get_submodule(name))
        G = layer_gradients(plain, name, x, y, F.cross_entropy)
        expected = scales(G, *bases) if after == "intra" else running_mean(plain, name, x, y, bases)
        assert_close(held_scales(opt, model.get_submodule(name)), expected, 1e-9, name)


CHANGES = {
    "inverse": (plain_kfac, {"inverse_method": "eigen"}, {"inverse_method": "cholesky"}),
    "bound": (plain_kfac, {"max_factor_dim": None}, {"max_factor_dim": 4}),
    "bound of bases": (plain_ekfac, {"max_factor_dim": None}, {"max_factor_dim": 4}),
    "bases": (plain_ekfac, {"basis_update": "eigh"}, {"basis_update": "qr"}),
    "momentum": (plain_ekfac, {"momentum_mode": "post"}, {"momentum_mode": "pre"}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_options_that_decide_the_state_act_from_the_next_step_on(change, back):
    """On one batch without memory: state and direction are those of an optimizer that had the option from the start."""
    build, before, after = CHANGES[change]
    if back:
        before, after = after, before
    x, y = vectors()
    found = []
    for first in (after, before):
        model = mlp()
        opt = build(model, factor_decay=0.0, inv_update_steps=1, **first)
        with standing(opt):
            for _ in range(3):
                train_step(opt, model, x, y, F.cross_entropy)
            opt.param_groups[0].update(after)
            train_step(opt, model, x, y, F.cross_entropy)
            keys = {name: set(opt.state[p]) for name, p in model.named_parameters()}
            for _ in range(2):
                train_step(opt, model, x, y, F.cross_entropy)
        assert keys == {name: set(opt.state[p]) for name, p in model.named_parameters()}
        moved = next_directions(opt, model, x, y, F.cross_entropy, ["0", "2"])
        found.append((keys, {name: V for name, (_, V) in moved.items()}))
    optional = {"momentum_buffer"}  # made where it is first needed
    assert {n: k - optional for n, k in found[0][0].items()} == {n: k - optional for n, k in found[1][0].items()}
    for name in ("0", "2"):
        assert_close(found[1][1][name], found[0][1][name], 1e-7, name)


REFUSED_LOADS = {
    "fisher": ({"estimator": "running"}, {"fisher": "mc"}),
    "model": ({"momentum_mode": "pre"}, {"quadratic_model": True}),
    "adaptive": (ADAM, {"adaptive_damping": True}),
}


@pytest.mark.parametrize("case", REFUSED_LOADS)
def test_a_checkpoint_whose_options_exclude_those_of_the_optimizer_is_refused_whole(case):
    theirs, mine = REFUSED_LOADS[case]
    model, other = mlp(), mlp()
    opt, second = plain_ekfac(model, **theirs), plain_ekfac(other, **mine)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups]
    states, start = [copy.deepcopy(second.state[p]) for p in other.parameters()], values(other[0])
    with pytest.raises(ValueError, match=r"running|pre"):
        second.load_state_dict(opt.state_dict())
    assert [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups] == groups
    assert torch.equal(values(other[0]), start)
    for p, state in zip(other.parameters(), states, strict=True):
        assert second.state[p].keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(second.state[p][k]), torch.as_tensor(v)) for k, v in state.items())
