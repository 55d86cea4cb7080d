"""Observed curvature and running factors where layouts, modes and intervals are out of the ordinary."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from tests.support.ekfac import plain_ekfac
from tests.support.kfac import assert_close, noise, plain_kfac, train_step
from tests.support.models import mlp, seeded_build, vectors

both = pytest.mark.parametrize("build", [plain_kfac, plain_ekfac], ids=["KFAC", "EKFAC"])
fishers = pytest.mark.parametrize("fisher", ["mc", "exact", "curvature_prop"])


# ---------------------------------------------------------------------------------------------------------------------
# Sequence first
# ---------------------------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.layer, self.flat = nn.Linear(3, 2, bias=False), flat

    def forward(self, x):
        f = self.layer(x)
        return f.flatten(0, 1) if self.flat else f


@pytest.mark.parametrize(("S", "N"), [(5, 3), (4, 4), (8, 4), (3, 5)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@both
def test_the_exact_fisher_of_sequence_first_outputs(build, reduction, S, N):
    """``J^T H J`` of every token, in a loop; an example's loss is the sum over its tokens, or their mean."""
    model, x = seeded_build(Rows), noise(S, N, 3)
    opt = build(model, lr=0.0, fisher="exact", batch_dim=1, loss_reduction=reduction)
    for _ in range(2):
        opt.zero_grad()
        outputs = model(x)
        opt.observe(outputs, "categorical")
        outputs.sum().backward()
        opt.step()
    weight, per_example = model.layer.weight.detach(), []
    for n in range(N):
        total = 0.0
        for s in range(S):
            p = (weight @ x[s, n]).softmax(-1)
            H = torch.diag(p) - torch.outer(p, p)
            total += torch.kron(H, torch.outer(x[s, n], x[s, n]))
        per_example.append(total)
    exact = sum(per_example) / N / (S if reduction == "mean" else 1)
    found = opt.dense_curvature("layer")
    if build is plain_ekfac:  # tokens of one example have vectors of their own, so there is no cross term
        assert float(found.trace()) == pytest.approx(float(exact.trace()))
        return
    A = torch.einsum("sni,snj->ij", x, x) / (S * N)
    logits = (x @ weight.mT).softmax(-1)
    H = torch.diag(logits.sum((0, 1))) - torch.einsum("snc,snd->cd", logits, logits)
    assert_close(found, torch.kron(H / N / (S if reduction == "mean" else 1), A), 1e-9)


@pytest.mark.parametrize(("S", "N"), [(5, 3), (4, 4), (8, 4), (3, 5)])
@both
def test_sequence_first_outputs_in_one_are_refused(build, S, N):
    """Nothing says which of their rows belong to one example."""
    model = seeded_build(lambda: Rows(flat=True))
    opt = build(model, fisher="exact", batch_dim=1)
    with pytest.raises(ValueError, match="which rows"):
        opt.observe(model(noise(S, N, 3)), "categorical")


# ---------------------------------------------------------------------------------------------------------------------
# When observe is called
# ---------------------------------------------------------------------------------------------------------------------


@both
@fishers
def test_a_forward_is_observed_once(build, fisher):
    model, (x, y) = mlp(), vectors()
    opt = build(model, fisher=fisher)
    outputs = model(x)
    opt.observe(outputs, "categorical")
    with pytest.raises(RuntimeError, match="observed already"):
        opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert float(opt.state[model[0].weight]["factor_weight"]) == len(x)


@both
@fishers
def test_observing_in_eval_mode_does_nothing(build, fisher):
    model, (x, y) = mlp(), vectors()
    opt = build(model, fisher=fisher)
    model.eval()
    opt.observe(model(x), "categorical")
    assert opt.memory_usage()["pending"] == 0
    model.train()
    outputs = model(x)
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert float(opt.state[model[0].weight]["factor_weight"]) == len(x)


@both
@fishers
def test_a_layer_that_is_the_whole_model_is_observed(build, fisher):
    (x, y), found = vectors(), []
    for wrapped in (False, True):
        layer = seeded_build(lambda: nn.Linear(4, 3))
        model = nn.Sequential(layer) if wrapped else layer
        opt = build(model, lr=0.0, fisher=fisher)
        for _ in range(2):
            opt.zero_grad()
            outputs = model(x)
            opt.observe(outputs, "categorical", y)
            F.cross_entropy(outputs, y).backward()
            opt.step()
        found.append(opt.dense_curvature("0" if wrapped else ""))
    assert_close(found[0], found[1], 1e-12)
    assert float(found[0].abs().max()) > 0


class Remembering(nn.Module):
    """Passes its input on, and remembers it weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x):
        x = x * 1.0
        self.seen.append(weakref.ref(x))
        return x

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.seen)


@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact", "curvature_prop"])
@both
def test_forwards_without_backward_keep_nothing(build, fisher):
    """Outputs that are dropped take their graph with them, all but those of the last few forwards."""
    spy = Remembering()
    model = nn.Sequential(nn.Linear(4, 5), spy, nn.Linear(5, 3)).double()
    opt = build(model, lr=0.0, fisher=fisher)
    for seed in range(50):
        model(vectors(seed=seed)[0])
    assert spy.alive() <= 9
    x, y = vectors()
    outputs = model(x)
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert float(opt.state[model[0].weight]["factor_weight"]) == len(x)
    del outputs
    opt.zero_grad()
    assert spy.alive() == 0


@fishers
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_forwards_whose_outputs_are_kept_may_be_observed_later(fisher, order):
    model, batches = mlp(), [vectors(5, seed=1), vectors(3, seed=2)]
    opt = plain_kfac(model, lr=0.0, fisher=fisher, deterministic_seed=1)
    outputs = [model(x) for x, _ in batches]
    model(vectors(7)[0])  # of this one nothing is left
    gc.collect()
    for i in order:
        opt.observe(outputs[i], "categorical")
    for f, (_, y) in zip(outputs, batches, strict=True):
        (F.cross_entropy(f, y, reduction="sum") / 8).backward()
    opt.step()
    rows = torch.cat([x for x, _ in batches])
    state = opt.state[model[0].weight]
    assert_close(state["factor_a"][:4, :4], rows.mT @ rows / 8, 1e-12)
    assert float(state["factor_weight"]) == 8


def test_the_graph_of_a_kept_part_of_the_outputs_is_enough():
    """Models return tuples and dataclasses, of which programs keep one tensor."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            f = self.layer(x)
            return {"hidden": torch.tanh(f), "logits": f}

    model, (x, y) = seeded_build(Two), vectors()
    opt = plain_kfac(model, lr=0.0, fisher="exact")
    logits = model(x)["logits"].view(6, 3)
    gc.collect()
    opt.observe(logits, "categorical")
    F.cross_entropy(logits, y).backward()
    opt.step()
    assert float(opt.state[model.layer.weight]["factor_weight"]) == 6


# ---------------------------------------------------------------------------------------------------------------------
# Running factors
# ---------------------------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """A layer whose A is the square of what it is given, and which may rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)
        self.rests = False

    def forward(self, x):
        return self.other(x) if self.rests else self.layer(x) + self.other(x)


def per_step(times: list[int], decay: float) -> float:
    """The running mean of t² over updates at some steps, each of weight 4."""
    weight = mean = 0.0
    for i, t in enumerate(times):
        weight = weight * (decay ** (t - times[i - 1]) if i else 1.0) + 4
        mean += 4 / weight * (t * t - mean)
    return mean


SCHEDULES = {
    "warm-up": ({"refresh_warmup": True, "factor_update_steps": 4, "inv_update_steps": 8}, [*range(8), 8, 12, 16]),
    "grid": ({"factor_update_steps": 3, "inv_update_steps": 3}, [0, 3, 6, 9, 12, 15]),
    "every step": ({}, [*range(17)]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@both
def test_decay_per_step_counts_the_steps_that_went_by(build, schedule):
    options, times = SCHEDULES[schedule]
    model = seeded_build(Constant)
    opt = build(model, **{"lr": 0.0, "decay_per_step": True, "factor_decay": 0.9, **options})
    for t in range(17):
        train_step(opt, model, torch.full((4, 1), float(t), dtype=torch.float64), noise(4, 2, seed=t), F.mse_loss)
    state = opt.state[model.layer.weight]
    assert state["factor_updates"] == len(times)
    assert float(state["factor_a"]) == pytest.approx(per_step(times, 0.9))


@pytest.mark.parametrize("resumes", [False, True], ids=["straight", "resumed"])
@pytest.mark.parametrize(("active", "times"), [(range(4, 17), [4, 5, 10, 15]), ((0, 10, 15), [0, 10, 15])], ids=str)
def test_decay_per_step_of_a_layer_that_comes_late_or_rests(active, times, resumes):
    """Its first update may be off the grid, and it may miss others."""
    options = {"lr": 0.0, "decay_per_step": True, "factor_decay": 0.9, "factor_update_steps": 5, "inv_update_steps": 5}
    model = seeded_build(Constant)
    opt = plain_kfac(model, **options)
    for t in range(17):
        model.rests = t not in active
        train_step(opt, model, torch.full((4, 1), float(t), dtype=torch.float64), noise(4, 2, seed=t), F.mse_loss)
        if resumes and t in (3, 7, 12):
            saved = opt.state_dict()
            model = seeded_build(Constant)
            opt = plain_kfac(model, **options)
            opt.load_state_dict(saved)
    state = opt.state[model.layer.weight]
    assert state["factor_updates"] == len(times)
    assert float(state["factor_a"]) == pytest.approx(per_step(times, 0.9))


def test_decay_per_step_may_be_switched_on_later():
    model = seeded_build(Constant)
    opt = plain_kfac(model, lr=0.0, factor_decay=0.9, factor_update_steps=2, inv_update_steps=2)
    weight = 0.0
    for t in range(9):
        opt.param_groups[0]["decay_per_step"] = t > 4
        train_step(opt, model, torch.full((4, 1), float(t), dtype=torch.float64), noise(4, 2, seed=t), F.mse_loss)
        if t % 2 == 0:
            weight = weight * (0.9 if t <= 4 else 0.81) + 4
    assert float(opt.state[model.layer.weight]["factor_weight"]) == pytest.approx(weight)


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_reduce_refuses_a_part_of_the_positions(method):
    with pytest.raises(ValueError, match=r"reduce.*factor_positions"):
        method(mlp(), approx="reduce", factor_positions=2)
    opt = method(mlp(), factor_positions=2)
    saved = opt.state_dict()
    saved["param_groups"][0]["approx"] = "reduce"
    with pytest.raises(ValueError, match=r"reduce.*factor_positions"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["approx"] == "expand"
