"""``observe``: an extra backward pass that leaves only statistics behind, or says clearly why it cannot be made."""

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import secondorder
from secondorder import EKFAC, KFAC
from tests.support.grid import each, pairs
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    assert_same_factors,
    held_factors,
    labels,
    layer_state,
    noise,
    train_step,
    twin,
)
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.fisher import METHODS, assert_observed, observed, observed_step, state_of, still, unrelated
from tests.support.oracles.kfac import covered_names, expected_factors, kron

both = each(method=METHODS)
OBSERVED = ["mc", "exact", "curvature_prop"]
fishers = pytest.mark.parametrize("fisher", OBSERVED)
REFUSED = (RuntimeError, ValueError, NotImplementedError)


def summed(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="sum")


def exact_factors(model: nn.Module, x: Tensor, y: Tensor, loss=summed, approx: str = "expand"):
    return {name: rows.factors(approx) for name, rows in observed(model, covered_names(model), x, y, loss).items()}


# ---------------------------------------------------------------------------------------------------------------------
# What it leaves as it was
# ---------------------------------------------------------------------------------------------------------------------


@fishers
def test_gradients_that_are_there_stay(fisher):
    model, (x, y) = mlp(), vectors()
    opt = still(model, fisher)
    outputs = model(x)
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    held = [(p.grad, p.grad.clone(), p.grad.data_ptr()) for p in model.parameters()]
    opt.observe(model(x), "categorical")
    for p, (grad, value, where) in zip(model.parameters(), held, strict=True):
        assert p.grad is grad
        assert p.grad.data_ptr() == where
        assert torch.equal(p.grad, value)


@each(fisher=OBSERVED, kind=["mlp", "dropout", "convnet", "inplace"])
def test_the_backward_that_follows_is_bitwise_the_same(fisher, kind):
    def build() -> nn.Module:
        if kind == "convnet":
            return convnet(activation=nn.ReLU(inplace=True), padding=1)
        if kind == "dropout":
            return seeded_build(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)))
        return mlp(activation=(lambda: nn.ReLU(inplace=True)) if kind == "inplace" else nn.Tanh)

    x, y = images() if kind == "convnet" else vectors()
    gradients, values = [], []
    for with_observe in (False, True):
        torch.manual_seed(3)
        model = build()
        opt = still(model, fisher)
        inputs = x.clone().requires_grad_()
        outputs = model(inputs)
        kept = outputs.detach().clone()
        if with_observe:
            opt.observe(outputs, "categorical")
            assert torch.equal(outputs, kept)
            assert inputs.grad is None
            assert all(p.grad is None for p in model.parameters())
            assert outputs.requires_grad
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        values.append(loss.detach())
        gradients.append([inputs.grad, *(p.grad for p in model.parameters())])
    assert torch.equal(*values)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@fishers
def test_parameters_buffers_modes_and_targets_stay(fisher):
    model = seeded_build(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    opt, (x, y) = still(model, fisher), vectors()
    outputs = model(x)
    before, wanted = copy.deepcopy(model.state_dict()), y.clone()
    opt.observe(outputs, "categorical", y)
    assert torch.equal(y, wanted)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.is_grad_enabled()
    assert model.training


def test_it_returns_nothing_and_may_be_called_without_grad_mode_around():
    model, (x, _) = mlp(), vectors()
    opt = still(model, "exact")
    outputs = model(x)
    with torch.no_grad():
        assert opt.observe(outputs, "categorical") is None
    outputs.sum().backward()
    opt.step()
    assert layer_state(opt, model, "0")["factor_updates"] == 1


def test_a_backward_kept_for_later_may_come_first():
    model, (x, y) = mlp(), vectors()
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    opt.observe(outputs, "categorical")
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def test_the_objective_may_have_a_second_backward_of_its_own():
    """Outputs kept for another loss: the graph is still whole after ``observe``."""
    model, (x, y) = mlp(), vectors()
    plain = twin(model)
    opt = still(model, "exact")
    outputs = model(x)
    opt.observe(outputs, "categorical")
    penalty = torch.autograd.grad(outputs.square().sum(), model[0].weight, retain_graph=True)[0]
    other = torch.autograd.grad(plain(x).square().sum(), plain[0].weight)[0]
    assert torch.equal(penalty, other)
    F.cross_entropy(outputs, y).backward()


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation
# ---------------------------------------------------------------------------------------------------------------------


def accumulated(method: type, sizes: list[int], x: Tensor, y: Tensor, steps: int = 1, **keywords):
    model = mlp((4, 5, 3))
    opt = still(model, "exact", method, **{"inv_update_steps": 1000, **keywords})
    for _ in range(steps):
        opt.zero_grad()
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            outputs = model(a)
            opt.observe(outputs, "categorical")
            (F.cross_entropy(outputs, b, reduction="sum") / len(x)).backward()
        opt.step()
    return opt, model


@pairs(method=METHODS, sizes=[[4, 4], [1, 7], [5, 2, 1]], approx=["expand", "reduce"])
def test_micro_batches_equal_one_batch(method, sizes, approx):
    x, y = vectors(8)
    whole, one = accumulated(method, [8], x, y, steps=2, approx=approx)
    cut, other = accumulated(method, sizes, x, y, steps=2, approx=approx)
    assert_factors(all_factors(cut, other), all_factors(whole, one), 1e-12)
    for name in ("0", "2"):
        assert_close(cut.dense_curvature(name), whole.dense_curvature(name), 1e-9, name)
        mine, theirs = (layer_state(o, m, name)["factor_weight"] for o, m in ((cut, other), (whole, one)))
        assert float(mine) == float(theirs) == 8


@fishers
def test_discarded_gradients_take_their_statistics_along(fisher):
    """``zero_grad`` after the pass: the next step knows of one batch only."""
    model, one, other = mlp(), vectors(6), vectors(3, seed=1)
    opt = still(model, fisher)
    outputs = model(one[0])
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, one[1]).backward()
    observed_step(opt, model, other[0], "categorical")
    assert float(layer_state(opt, model, "0")["factor_weight"]) == 3


@fishers
def test_gradients_may_be_reset_between_observe_and_backward(fisher):
    """As trainers do that call ``zero_grad`` after the forward."""
    x, y = vectors(6)
    found = []
    for late in (True, False):
        model = mlp()
        opt = still(model, fisher)
        for _ in range(2):
            if not late:
                opt.zero_grad()
            outputs = model(x)
            opt.observe(outputs, "categorical")
            if late:
                opt.zero_grad()
            F.cross_entropy(outputs, y).backward()
            opt.step()
        assert layer_state(opt, model, "0")["factor_updates"] == 2
        found.append(all_factors(opt, model))
    assert_factors(*found)


@each(fisher=OBSERVED, method=METHODS)
def test_a_batch_that_was_observed_and_given_up_is_in_no_estimate(fisher, method):
    """No backward followed its ``zero_grad``, as where a loop skips a batch whose loss is not finite."""
    model, one, other = mlp(), vectors(6), vectors(3, seed=1)
    expected = exact_factors(twin(model), *other)
    opt = still(model, fisher, method)
    opt.observe(model(100 * one[0]), "categorical")
    opt.zero_grad()
    outputs = model(other[0])
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, other[1]).backward()
    opt.step()
    assert float(layer_state(opt, model, "0")["factor_weight"]) == 3
    found = all_factors(opt, model)
    for name, (A, _) in expected.items():
        assert_close(found[name][0], A, 1e-9, name)
    if fisher == "exact":  # the others draw numbers
        assert_factors(found, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Several heads
# ---------------------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.left(h), self.right(h)


@pairs(method=METHODS, approx=["expand", "reduce"], container=[tuple, list])
def test_heads_against_the_definition(method, approx, container):
    def loss(f: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return summed(f[0], y[0]) + (f[1] - y[1]).square().mean()

    model, x = seeded_build(TwoHeads), noise(5, 4)
    rows = observed(model, covered_names(model), x, (labels(5, 3), noise(5, 2)), loss)
    opt = still(model, "exact", method, approx=approx)
    left, right = model(x)
    opt.observe(container((left, right)), container(("categorical", secondorder.Gaussian(mean=True))))
    unrelated((left, right)).backward()
    opt.step()
    assert_observed(opt, model, rows, approx)


def test_heads_with_targets():
    """A tuple of targets, one of which ignores examples, the other needs none."""

    def loss(f: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(f[0], y[0], reduction="sum", ignore_index=-100) * 5 / 4 + (f[1] - y[1]).square().sum()

    model, x, y = seeded_build(TwoHeads), noise(5, 4), labels(5, 3)
    y[2] = -100
    rows = observed(model, covered_names(model), x, (y, noise(5, 2)), loss)
    opt = still(model, "exact")
    observed_step(opt, model, x, ("categorical", "gaussian"), (y, None))
    for name, found in rows.items():
        assert_close(held_factors(opt, model, name)[1], found.factors()[1], 1e-9, name)


def test_heads_and_likelihoods_must_be_as_many():
    model, x = seeded_build(TwoHeads), noise(5, 4)
    opt = still(model, "exact")
    with pytest.raises(ValueError, match="2.*3|3.*2"):
        opt.observe(model(x), ("categorical", "gaussian", "gaussian"))


# ---------------------------------------------------------------------------------------------------------------------
# Precision, loss scaling, checkpointing, wrappers
# ---------------------------------------------------------------------------------------------------------------------


@each(fisher=OBSERVED, inside=[True, False])
def test_autocast(fisher, inside):
    model, (x, y) = mlp((4, 16, 3)).float(), vectors(32)
    expected = exact_factors(twin(model).double(), x, y)
    opt = still(model, fisher, fisher_samples=1 if fisher == "exact" else 64)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x.float())
        assert outputs.dtype == torch.bfloat16
        if inside:
            opt.observe(outputs, "categorical")
    if not inside:
        opt.observe(outputs, "categorical")
    F.cross_entropy(outputs.float(), y).backward()
    opt.step()
    for name, factors in expected.items():
        for mine, theirs in zip(held_factors(opt, model, name), factors, strict=True):
            assert mine.dtype == torch.float32
            assert_close(mine.double(), theirs, 0.03 if fisher == "exact" else 0.15, f"{fisher} {name}")


@both
def test_the_loss_scale_does_not_enter(method):
    """Only the objective's own backward is scaled."""
    held = []
    for scaled in (False, True):
        model, (x, y) = mlp((4, 5, 3)), vectors()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        opt = still(model, "exact", method, grad_scaler=scaler, inv_update_steps=1000)
        for _ in range(2):
            opt.zero_grad()
            outputs = model(x)
            opt.observe(outputs, "categorical")
            scaler.scale(F.cross_entropy(outputs, y)).backward()
            scaler.step(opt)
            scaler.update()
        held.append((all_factors(opt, model), opt.dense_curvature("0")))
    assert_factors(held[1][0], held[0][0], 1e-12)
    assert_close(held[1][1], held[0][1], 1e-9)


def test_a_scaler_that_the_optimizer_does_not_know_changes_nothing_either():
    model, (x, y) = mlp((4, 5, 3)), vectors()
    expected = exact_factors(twin(model), x, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = still(model, "exact")
    outputs = model(x)
    opt.observe(outputs, "categorical")
    scaler.scale(F.cross_entropy(outputs, y)).backward()
    scaler.unscale_(opt)
    opt.step()
    assert_factors(all_factors(opt, model), expected)


class Checkpointed(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 4), nn.Tanh())
        self.head, self.recompute = nn.Linear(4, 3), recompute

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        return self.head(h)


@each(fisher=OBSERVED, method=METHODS)
def test_activation_checkpointing(fisher, method):
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model, (x, y) = seeded_build(lambda: Checkpointed(recompute)), vectors()  # noqa: B023
        opt = still(model, fisher, method, inv_update_steps=1000)
        for _ in range(2):
            observed_step(opt, model, x, "categorical", objective=lambda f, y=y: F.cross_entropy(f, y))
        gradients = [p.grad.clone() for p in model.parameters()]
        blocks = [opt.dense_curvature(name) for name in covered_names(model)]
        weight = float(layer_state(opt, model, "inner.0")["factor_weight"])
        found.append((all_factors(opt, model), gradients, blocks, weight))
    plain, recomputed = found
    assert_factors(recomputed[0], plain[0], 1e-12)
    assert all(torch.equal(a, b) for a, b in zip(plain[1], recomputed[1], strict=True))
    for a, b in zip(plain[2], recomputed[2], strict=True):
        assert_close(b, a, 1e-9)
    assert plain[3] == recomputed[3] == 6


@pytest.fixture
def process_group(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@each(fisher=OBSERVED, method=METHODS)
@pytest.mark.usefixtures("process_group")
def test_data_parallel_with_one_process(fisher, method):
    x, y = vectors(8)
    found = []
    for wrapped in (False, True):
        bare = mlp((4, 5, 3))
        model = nn.parallel.DistributedDataParallel(bare) if wrapped else bare
        opt = still(model, fisher, method, lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            outputs = model(x)
            opt.observe(outputs, "categorical")
            F.cross_entropy(outputs, y).backward()
            opt.step()
        found.append((all_factors(opt, bare), [p.detach().clone() for p in bare.parameters()]))
    assert_factors(found[1][0], found[0][0], 1e-12)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert_close(b, a, 1e-12)


@pytest.mark.usefixtures("process_group")
def test_data_parallel_with_no_sync():
    x, y = vectors(8)
    bare = mlp((4, 5, 3))
    expected = exact_factors(twin(bare), x, y)
    model = nn.parallel.DistributedDataParallel(bare)
    opt = still(model, "exact")
    with model.no_sync():
        outputs = model(x[:4])
        opt.observe(outputs, "categorical")
        (F.cross_entropy(outputs, y[:4]) / 2).backward()
    outputs = model(x[4:])
    opt.observe(outputs, "categorical")
    (F.cross_entropy(outputs, y[4:]) / 2).backward()
    opt.step()
    assert_factors(all_factors(opt, bare), expected)


# ---------------------------------------------------------------------------------------------------------------------
# When it is needed, and when not
# ---------------------------------------------------------------------------------------------------------------------


@each(fisher=OBSERVED, method=METHODS)
def test_a_due_step_without_it_keeps_the_old_estimate_and_says_so_once(fisher, method):
    model = mlp()
    opt = still(model, fisher, method)
    observed_step(opt, model, vectors()[0], "categorical")
    held = all_factors(opt, model)
    with pytest.warns(UserWarning, match="observe"):
        train_step(opt, model, *vectors(seed=1), F.cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (2, 3):
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    for name, (A, B) in held.items():
        assert torch.equal(held_factors(opt, model, name)[0], A)
        assert torch.equal(held_factors(opt, model, name)[1], B)
        assert layer_state(opt, model, name)["factor_updates"] == 1


@fishers
def test_without_any_estimate_the_step_is_the_fallback_s(fisher):
    model, (x, y) = mlp(), vectors()
    opt = still(model, fisher, lr=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="observe"):
        train_step(opt, model, x, y, F.cross_entropy)
    for p, old in zip(model.parameters(), before, strict=True):
        assert_close(p.detach(), old - 0.5 * p.grad, 1e-12)


@each(fisher=OBSERVED, method=METHODS)
def test_where_nothing_is_due_it_does_nothing_and_is_not_missed(fisher, method, monkeypatch):
    model = mlp()
    scales = {} if method is KFAC else {"scale_update_steps": 3}
    opt = still(model, fisher, method, factor_update_steps=3, inv_update_steps=3, **scales)
    observed_step(opt, model, vectors()[0], "categorical")
    held = all_factors(opt, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, called in ((1, True), (2, False)):
            outputs = model(vectors(seed=seed)[0])
            with monkeypatch.context() as patch:
                for name in ("grad", "backward"):
                    patch.setattr(torch.autograd, name, None)
                assert not called or opt.observe(outputs, "categorical") is None
            outputs.sum().backward()
            opt.step()
    assert_same_factors(opt, model, held)
    observed_step(opt, model, vectors(seed=3)[0], "categorical")
    assert layer_state(opt, model, "0")["factor_updates"] == 2


@both
def test_the_empirical_fisher_ignores_it(method):
    found = []
    for told in (False, True):
        model, (x, y) = mlp(), vectors()
        opt = still(model, "empirical", method)
        for _ in range(2):
            opt.zero_grad()
            outputs = model(x)
            if told:
                assert opt.observe(outputs, "categorical") is None
            F.cross_entropy(outputs, y).backward()
            opt.step()
        found.append((all_factors(opt, model), [p.detach().clone() for p in model.parameters()]))
    for name, factors in found[0][0].items():
        assert all(torch.equal(a, b) for a, b in zip(factors, found[1][0][name], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@fishers
def test_observed_and_empirical_statistics_never_mix(fisher):
    """The objective's own backward, however large, leaves no trace in the estimate."""
    held = []
    for weight in (0.0, 1e6):
        model, (x, y) = mlp(), vectors()
        opt = still(model, fisher)
        objective = lambda f, w=weight, y=y: f.sum() + w * F.cross_entropy(f, y)  # noqa: E731
        for _ in range(2):
            observed_step(opt, model, x, "categorical", objective=objective)
        held.append(all_factors(opt, model))
    for name, factors in held[0].items():
        assert all(torch.equal(a, b) for a, b in zip(factors, held[1][name], strict=True))
    assert layer_state(opt, model, "0")["factor_updates"] == 2


def test_an_observed_pass_beside_one_that_was_not():
    """Of two micro-batches one is observed: the estimate is that one's, whatever the other holds."""
    model, (x, y), (other, _) = mlp(), vectors(4), vectors(6, seed=1)
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = model(x)
        opt.observe(outputs, "categorical")
        outputs.sum().backward()
        model(other).sum().backward()
        opt.step()
    assert_factors(all_factors(opt, model), expected)


@fishers
def test_capture_may_be_paused(fisher):
    model, (x, y) = mlp(), vectors()
    opt = still(model, fisher)
    with opt.pause_capture():
        outputs = model(x)
        opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert layer_state(opt, model, "0")["factor_updates"] == 0


@each(fisher=OBSERVED, method=METHODS)
def test_observing_in_eval_mode_does_nothing(method, fisher):
    model, (x, y) = mlp(), vectors()
    opt = still(model, fisher, method)
    model.eval()
    opt.observe(model(x), "categorical")
    assert opt.memory_usage()["pending"] == 0
    model.train()
    outputs = model(x)
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert float(opt.state[model[0].weight]["factor_weight"]) == len(x)


@each(fisher=OBSERVED, method=METHODS)
def test_a_layer_that_is_the_whole_model_is_observed(method, fisher):
    (x, y), found = vectors(), []
    for wrapped in (False, True):
        layer = seeded_build(lambda: nn.Linear(4, 3))
        model = nn.Sequential(layer) if wrapped else layer
        opt = still(model, fisher, method)
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


@each(fisher=["empirical", *OBSERVED], method=METHODS)
def test_forwards_without_backward_keep_nothing(method, fisher):
    """Outputs that are dropped take their graph with them, all but those of the last few forwards."""
    spy = Remembering()
    model = nn.Sequential(nn.Linear(4, 5), spy, nn.Linear(5, 3)).double()
    opt = still(model, fisher, method)
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
    opt = still(model, "exact")
    logits = model(x)["logits"].view(6, 3)
    gc.collect()
    opt.observe(logits, "categorical")
    F.cross_entropy(logits, y).backward()
    opt.step()
    assert float(opt.state[model.layer.weight]["factor_weight"]) == 6


def test_forwards_in_between_do_not_matter():
    """An evaluation between the forward and its ``observe``."""
    model, (x, y) = mlp(), vectors()
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    outputs = model(x)
    with torch.no_grad():
        model(vectors(9, seed=4)[0])
    opt.observe(outputs, "categorical")
    outputs.sum().backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


@each(fisher=OBSERVED, order=[(0, 1), (1, 0)])
def test_forwards_whose_outputs_are_kept_may_be_observed_later(fisher, order):
    model, batches = mlp(), [vectors(5, seed=1), vectors(3, seed=2)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = exact_factors(twin(model), x, y)
    opt = still(model, fisher)
    outputs = [model(a) for a, _ in batches]
    model(vectors(7)[0])  # of this one nothing is left
    gc.collect()
    for i in order:
        opt.observe(outputs[i], "categorical")
    (outputs[0].sum() + outputs[1].sum()).backward()
    opt.step()
    for name, (A, B) in expected.items():
        held = held_factors(opt, model, name)
        assert_close(held[0], A, 1e-12, name)
        assert fisher != "exact" or assert_close(held[1], B, 1e-9, name) is None
    assert float(layer_state(opt, model, "0")["factor_weight"]) == 8


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("positions", [False, True], ids=["vectors", "flattened tokens"])
def test_a_forward_that_is_thrown_away(first, positions):
    """Recorded by autograd like any other, but nothing of it is asked for: its examples are nobody's."""
    shape = (4, 4) if positions else (4,)
    x, stray = noise(*shape, 4), noise(4, *shape[1:], 4, seed=1)
    y = torch.zeros(16 if positions else 4, dtype=torch.long)

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).reshape(-1, 3)

    held = []
    for disturbed in (False, True):
        model = Rows()
        opt = still(model, "exact", approx="reduce")  # where it matters which rows are of one example
        if disturbed and first:
            model(stray)
        outputs = model(x)
        if disturbed and not first:
            model(stray)
        opt.observe(outputs, "categorical")
        F.cross_entropy(outputs, y).backward()
        opt.step()
        held.append([held_factors(opt, model, f"layers.{i}") for i in (0, 2)])
    for mine, theirs in zip(held[1], held[0], strict=True):
        assert_close(mine[0], theirs[0], 1e-12)
        assert_close(mine[1], theirs[1], 1e-12)


def test_two_forwards_observed_at_once():
    """Outputs of two passes joined before the loss, as in contrastive training."""
    model, (x, y) = mlp(), vectors(8)
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    outputs = torch.cat([model(x[:4]), model(x[4:])])
    opt.observe(outputs, "categorical")
    outputs.sum().backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def test_inside_of_a_closure():
    found = []
    for as_closure in (False, True):
        model, (x, y) = mlp(), vectors()
        opt = still(model, "mc", lr=0.1)

        def closure(model=model, opt=opt, x=x, y=y) -> Tensor:
            opt.zero_grad()
            outputs = model(x)
            opt.observe(outputs, "categorical")
            loss = F.cross_entropy(outputs, y)
            loss.backward()
            return loss

        for _ in range(3):
            if as_closure:
                opt.step(closure)
            else:
                closure()
                opt.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@both
def test_an_expert_without_a_call_is_left_alone(method):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.head = nn.ModuleList(nn.Linear(4, 5) for _ in range(2)), nn.Linear(5, 3)

        def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
            return self.head(torch.tanh(sum(self.experts[i](x) for i in used)))

    model, (x, y) = seeded_build(Experts), vectors()
    opt = still(model, "mc", method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for used in ((0, 1), (0,), (0, 1)):
            opt.zero_grad()
            outputs = model(x, used)
            opt.observe(outputs, "categorical")
            F.cross_entropy(outputs, y).backward()
            opt.step()
    counts = [layer_state(opt, model, name)["factor_updates"] for name in ("experts.0", "experts.1", "head")]
    assert counts == [3, 2, 3]


@both
def test_statistics_that_are_not_finite_are_dropped_and_counted(method):
    class Broken(secondorder.Likelihood):
        def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
            return torch.full_like(outputs, float("nan"))

    model, (x, _) = mlp(), vectors()
    opt = still(model, "mc", method)
    observed_step(opt, model, x, "categorical")
    held = all_factors(opt, model)
    observed_step(opt, model, x, Broken())
    for name, factors in held.items():
        assert all(torch.equal(a, b) for a, b in zip(held_factors(opt, model, name), factors, strict=True))
        assert layer_state(opt, model, name)["factor_updates"] == 1
    assert opt.diagnostics()["skipped_statistics"] >= 2
    observed_step(opt, model, x, "categorical")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_step_that_the_scaler_skips_leaves_nothing_behind():
    model, (x, y) = mlp().float(), vectors()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = still(model, "exact", grad_scaler=scaler)
    for n, factor in ((6, float("inf")), (3, 1.0)):
        opt.zero_grad()
        outputs = model(x[:n].float())
        opt.observe(outputs, "categorical")
        scaler.scale(factor * F.cross_entropy(outputs, y[:n])).backward()
        scaler.step(opt)
        scaler.update()
    assert layer_state(opt, model, "0")["factor_updates"] == 1
    assert float(layer_state(opt, model, "0")["factor_weight"]) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


def test_after_the_backward_it_is_too_late():
    model, (x, y) = mlp(), vectors()
    opt = still(model, "exact")
    outputs = model(x)
    F.cross_entropy(outputs, y).backward()
    with pytest.raises(
        RuntimeError, match=r"observe.*before.*backward|before.*backward.*observe|between.*forward and loss.backward"
    ):
        opt.observe(outputs, "categorical")


@each(fisher=OBSERVED, method=METHODS)
def test_a_forward_is_observed_once(fisher, method):
    model, (x, y) = mlp(), vectors()
    opt = still(model, fisher, method)
    outputs = model(x)
    opt.observe(outputs, "categorical")
    with pytest.raises(RuntimeError, match="observed already"):
        opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert float(layer_state(opt, model, "0")["factor_weight"]) == len(x)


def test_wrong_arguments_are_refused_and_leave_the_step_usable():
    model, (x, y) = mlp(), vectors()
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    outputs = model(x)
    with pytest.raises(ValueError, match="poisson"):
        opt.observe(outputs, "poisson")
    for wrong in (3, None, secondorder.Categorical):
        with pytest.raises(TypeError, match="likelihood"):
            opt.observe(outputs, wrong)
    for wrong in (None, 1.0, "logits", [[0.0, 1.0]]):
        with pytest.raises(TypeError, match="output"):
            opt.observe(wrong, "categorical")
    with pytest.raises(ValueError, match="targets"):
        opt.observe(outputs, "categorical", y[:4])
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


def outputs_from_elsewhere(kind: str, model: nn.Module, x: Tensor) -> Tensor:
    return {
        "detached": lambda: model(x).detach(),
        "a leaf": lambda: noise(6, 3).requires_grad_(),
        "another model": lambda: mlp(seed=9)(x),
        "a forward without gradients": lambda: torch.no_grad()(model)(x),
    }[kind]()


@each(fisher=OBSERVED, kind=["detached", "a leaf", "another model", "a forward without gradients"])
def test_outputs_that_are_not_the_model_s_are_noticed(fisher, kind):
    model, (x, _) = mlp(), vectors()
    opt = still(model, fisher)
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((*REFUSED, UserWarning), match="outputs|model|graph|grad"):
            opt.observe(outputs_from_elsewhere(kind, model, x), "categorical")


def test_too_many_columns_are_refused_with_the_mend():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).repeat(1, 20_000)

    model, x = seeded_build(Wide), noise(2, 2)
    observed_step(still(model, "mc"), model, x, "categorical")
    opt = still(seeded_build(Wide), "exact")
    model = opt.module
    with pytest.raises(REFUSED, match="mc|curvature_prop"):
        opt.observe(model(x), "categorical")


@both
def test_an_unknown_fisher_is_refused(method):
    with pytest.raises(ValueError, match="fisher.*'type-2'"):
        method(mlp(), fisher="type-2")
    with pytest.raises(TypeError, match="fisher"):
        method(mlp(), fisher=2)
    with pytest.raises(ValueError, match="fisher_samples"):
        method(mlp(), fisher="mc", fisher_samples=0)


def test_a_closed_optimizer_says_so():
    model, (x, _) = mlp(), vectors()
    opt = still(model, "exact")
    outputs = model(x)
    opt.close()
    with pytest.raises(RuntimeError, match="attach|closed"):
        opt.observe(outputs, "categorical")


# ---------------------------------------------------------------------------------------------------------------------
# forward_only, and what EK-FAC makes of each Fisher
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_forward_only_has_an_identity_for_b_and_needs_no_observation(approx):
    model, (x, y) = convnet(padding=1), images()
    expected = expected_factors(twin(model), x, y, F.cross_entropy, approx=approx)
    opt = still(model, "forward_only", approx=approx)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(opt, model, x, y, F.cross_entropy)
    for name, (A, B) in expected.items():
        identity = torch.eye(len(B), dtype=torch.float64)
        assert_close(held_factors(opt, model, name)[0], A, 1e-9, name)
        assert torch.equal(held_factors(opt, model, name)[1], identity)
        assert_close(opt.dense_curvature(name), kron(identity, A), 1e-9, name)


def test_forward_only_accumulates_like_any_other():
    model, (x, y) = mlp(), vectors(8)
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = still(model, "forward_only")
    for a, b in zip(x.split([3, 5]), y.split([3, 5]), strict=True):
        outputs = model(a)
        assert opt.observe(outputs, "categorical") is None
        (F.cross_entropy(outputs, b, reduction="sum") / 8).backward()
    opt.step()
    for name, (A, _) in expected.items():
        assert_close(held_factors(opt, model, name)[0], A, 1e-9, name)


@pytest.mark.parametrize("inverse", ["eigen", "cholesky"])
def test_the_direction_of_forward_only(inverse):
    """(I ⊗ A + λI)⁻¹ for eigen; both factors damped for cholesky."""
    model, (x, y) = mlp(bias=False), vectors()
    opt = still(model, "forward_only", lr=1.0, inverse_method=inverse, damping=0.1)
    before = model[0].weight.detach().clone()
    train_step(opt, model, x, y, F.cross_entropy)
    A = x.T @ x / len(x)
    gradient, eye = model[0].weight.grad, torch.eye(4, dtype=torch.float64)
    if inverse == "eigen":
        expected = gradient @ torch.linalg.inv(A + 0.1 * eye)
    else:
        pi = (float(A.trace()) / 4) ** 0.5
        root = 0.1**0.5
        expected = gradient / (1 + root / pi) @ torch.linalg.inv(A + pi * root * eye)
    assert_close(before - model[0].weight.detach(), expected, 1e-9)


def test_ekfac_refuses_what_its_scales_cannot_be_measured_from():
    """Running scales are made of the mean gradient, which is the objective's; forward_only has no gradient at all."""
    for fisher in OBSERVED:
        with pytest.raises(REFUSED, match="running"):
            EKFAC(mlp(), fisher=fisher, estimator="running")
    with pytest.raises(REFUSED, match="forward_only"):
        EKFAC(mlp(), fisher="forward_only")


def test_ekfac_s_scales_may_be_due_alone():
    """Factors every fourth step, scales on every one: each step observed enters the scales only."""
    model, (x, _) = mlp(), vectors()
    opt = still(model, "exact", EKFAC, factor_update_steps=4, inv_update_steps=4, scale_decay=0.0)
    observed_step(opt, model, x, "categorical")
    held = all_factors(opt, model)
    for seed in (1, 2, 3):
        a, b = vectors(5, seed=seed)
        rows = observed(mlp(), ["0", "2"], a, b, summed)
        observed_step(opt, model, a, "categorical")
        for name, found in rows.items():
            state = state_of(opt, model, name)
            assert_close(state["scale"], found.scale(state["basis_a"], state["basis_g"]), 1e-9, name)
            assert torch.equal(held_factors(opt, model, name)[1], held[name][1])
