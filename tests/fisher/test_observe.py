"""``observe``: an extra backward pass that leaves only statistics behind, or says clearly why it cannot be made."""

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import secondorder
from secondorder import EKFAC, KFAC
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    held_factors,
    labels,
    layer_state,
    noise,
    train_step,
    twin,
)
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.fisher import METHODS, observed, observed_step, state_of, still
from tests.support.oracles.kfac import covered_names, expected_factors, kron

both = pytest.mark.parametrize("method", METHODS)
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
@both
def test_no_gradient_appears(fisher, method):
    model, (x, _) = mlp(), vectors()
    opt = still(model, fisher, METHODS[method])
    opt.observe(model(x), "categorical")
    assert all(p.grad is None for p in model.parameters())


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


@fishers
@pytest.mark.parametrize("kind", ["mlp", "dropout", "convnet", "inplace"])
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
            assert outputs.requires_grad
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        values.append(loss.detach())
        gradients.append([inputs.grad, *(p.grad for p in model.parameters())])
    assert torch.equal(*values)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@fishers
def test_buffers_and_modes_stay(fisher):
    model = seeded_build(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    opt = still(model, fisher)
    outputs = model(vectors()[0])
    before = {name: b.clone() for name, b in model.named_buffers()}
    opt.observe(outputs, "categorical")
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert torch.is_grad_enabled()
    assert model.training


@fishers
def test_targets_and_parameters_stay(fisher):
    model, (x, y) = mlp(), vectors()
    opt = still(model, fisher)
    before, wanted = copy.deepcopy(model.state_dict()), y.clone()
    opt.observe(model(x), "categorical", y)
    assert torch.equal(y, wanted)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


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


def accumulated(method: str, sizes: list[int], x: Tensor, y: Tensor, steps: int = 1, **keywords):
    model = mlp((4, 5, 3))
    opt = still(model, "exact", METHODS[method], **{"inv_update_steps": 1000, **keywords})
    for _ in range(steps):
        opt.zero_grad()
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            outputs = model(a)
            opt.observe(outputs, "categorical")
            (F.cross_entropy(outputs, b, reduction="sum") / len(x)).backward()
        opt.step()
    return opt, model


@both
@pytest.mark.parametrize("sizes", [[4, 4], [2, 2, 2, 2], [1, 7], [5, 2, 1]], ids=str)
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_micro_batches_equal_one_batch(method, sizes, approx):
    x, y = vectors(8)
    whole, one = accumulated(method, [8], x, y, steps=2, approx=approx)
    cut, other = accumulated(method, sizes, x, y, steps=2, approx=approx)
    assert_factors(all_factors(cut, other), all_factors(whole, one), 1e-12)
    for name in ("0", "2"):
        assert_close(cut.dense_curvature(name), whole.dense_curvature(name), 1e-9, name)
        mine, theirs = (layer_state(o, m, name)["factor_weight"] for o, m in ((cut, other), (whole, one)))
        assert float(mine) == float(theirs) == 8


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_scale_of_the_objective_does_not_enter(reduction):
    x, y = vectors(8)
    held = []
    for scale in (1.0, 1e3):
        model = mlp((4, 5, 3))
        opt = still(model, "exact", loss_reduction=reduction)
        observed_step(opt, model, x, "categorical", objective=lambda f, s=scale: s * F.cross_entropy(f, y))
        held.append(all_factors(opt, model))
    assert_factors(held[1], held[0], 1e-12)


@fishers
def test_an_observed_pass_counts_its_examples_once(fisher):
    model, (x, _) = mlp(), vectors(6)
    opt = still(model, fisher)
    observed_step(opt, model, x, "categorical")
    assert float(layer_state(opt, model, "0")["factor_weight"]) == 6
    assert layer_state(opt, model, "0")["factor_updates"] == 1


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


@fishers
@both
def test_a_batch_that_was_observed_and_given_up_is_in_no_estimate(fisher, method):
    """No backward followed its ``zero_grad``, as where a loop skips a batch whose loss is not finite."""
    model, one, other = mlp(), vectors(6), vectors(3, seed=1)
    expected = exact_factors(twin(model), *other)
    opt = still(model, fisher, METHODS[method])
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


@pytest.mark.parametrize("container", [tuple, list])
def test_heads_are_the_sum_of_each_alone(container):
    x = noise(5, 4)
    factors = {}
    for chosen in ("left", "right", "both"):
        model = seeded_build(TwoHeads)
        opt = still(model, "exact")
        left, right = model(x)
        told = {
            "left": (left, "categorical"),
            "right": (right, "gaussian"),
            "both": (container((left, right)), container(("categorical", "gaussian"))),
        }[chosen]
        opt.observe(*told)
        (left.sum() + right.sum()).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a head that was left out
            opt.step()
        factors[chosen] = held_factors(opt, model, "trunk")
    assert_close(factors["both"][1], factors["left"][1] + factors["right"][1], 1e-10)
    assert_close(factors["both"][0], factors["left"][0], 1e-12)


@both
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_heads_against_the_definition(method, approx):
    def loss(f: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return summed(f[0], y[0]) + (f[1] - y[1]).square().mean()

    model, x = seeded_build(TwoHeads), noise(5, 4)
    rows = observed(model, covered_names(model), x, (labels(5, 3), noise(5, 2)), loss)
    opt = still(model, "exact", METHODS[method], approx=approx)
    observed_step(opt, model, x, ("categorical", secondorder.Gaussian(mean=True)))
    for name, found in rows.items():
        for mine, theirs in zip(held_factors(opt, model, name), found.factors(approx), strict=True):
            assert_close(mine, theirs, 1e-9, name)


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


@fishers
@pytest.mark.parametrize("inside", [True, False], ids=["inside autocast", "after it"])
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
        opt = still(model, "exact", METHODS[method], grad_scaler=scaler, inv_update_steps=1000)
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


@fishers
@both
def test_activation_checkpointing(fisher, method):
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model, (x, y) = seeded_build(lambda: Checkpointed(recompute)), vectors()  # noqa: B023
        opt = still(model, fisher, METHODS[method], inv_update_steps=1000)
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


@fishers
@both
@pytest.mark.usefixtures("process_group")
def test_data_parallel_with_one_process(fisher, method):
    x, y = vectors(8)
    found = []
    for wrapped in (False, True):
        bare = mlp((4, 5, 3))
        model = nn.parallel.DistributedDataParallel(bare) if wrapped else bare
        opt = still(model, fisher, METHODS[method], lr=0.1)
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


@fishers
@both
def test_a_due_step_without_it_keeps_the_old_estimate_and_says_so_once(fisher, method):
    model = mlp()
    opt = still(model, fisher, METHODS[method])
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


@fishers
@both
def test_where_nothing_is_due_it_does_nothing(fisher, method, monkeypatch):
    model, (x, _) = mlp(), vectors()
    scales = {} if method == "kfac" else {"scale_update_steps": 3}
    opt = still(model, fisher, METHODS[method], factor_update_steps=3, inv_update_steps=3, **scales)
    observed_step(opt, model, x, "categorical")
    held = all_factors(opt, model)
    for name in ("grad", "backward"):
        monkeypatch.setattr(torch.autograd, name, None)
    outputs = model(vectors(seed=1)[0])
    assert opt.observe(outputs, "categorical") is None
    monkeypatch.undo()
    outputs.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    for name, (A, B) in held.items():
        assert torch.equal(held_factors(opt, model, name)[0], A)
        assert torch.equal(held_factors(opt, model, name)[1], B)


@fishers
def test_steps_that_are_not_due_need_none(fisher):
    model = mlp()
    opt = still(model, fisher, factor_update_steps=3, inv_update_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(7):
            if t % 3 == 0:
                observed_step(opt, model, vectors(seed=t)[0], "categorical")
            else:
                train_step(opt, model, *vectors(seed=t), F.cross_entropy)
    assert layer_state(opt, model, "0")["factor_updates"] == 3


@both
def test_the_empirical_fisher_ignores_it(method):
    found = []
    for told in (False, True):
        model, (x, y) = mlp(), vectors()
        opt = still(model, "empirical", METHODS[method])
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


def test_two_forwards_before_their_observations():
    """Both halves forward first, then observed in the other order."""
    model, (x, y) = mlp(), vectors(8)
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    one, two = model(x[:3]), model(x[3:])
    opt.observe(two, "categorical")
    opt.observe(one, "categorical")
    (one.sum() + two.sum()).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


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
    opt = still(model, "mc", METHODS[method])
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
    opt = still(model, "mc", METHODS[method])
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


@fishers
def test_after_the_backward_it_is_too_late(fisher):
    model, (x, y) = mlp(), vectors()
    opt = still(model, fisher)
    outputs = model(x)
    F.cross_entropy(outputs, y).backward()
    with pytest.raises(
        RuntimeError, match=r"observe.*before.*backward|before.*backward.*observe|between.*forward and loss.backward"
    ):
        opt.observe(outputs, "categorical")


@fishers
def test_twice_for_one_forward_is_an_error(fisher):
    model, (x, _) = mlp(), vectors()
    opt = still(model, fisher)
    outputs = model(x)
    opt.observe(outputs, "categorical")
    with pytest.raises(RuntimeError, match="twice|second|already|once"):
        opt.observe(outputs, "categorical")


@pytest.mark.parametrize("likelihood", ["poisson", "Categorical", "", "cross_entropy"])
def test_an_unknown_likelihood_is_refused_by_its_name(likelihood):
    model, (x, _) = mlp(), vectors()
    opt = still(model, "exact")
    with pytest.raises(ValueError, match=repr(likelihood)):
        opt.observe(model(x), likelihood)


@pytest.mark.parametrize(
    "likelihood",
    [None, 3, secondorder.Categorical, F.cross_entropy, {"categorical"}],
    ids=["None", "int", "class", "function", "set"],
)
def test_a_likelihood_of_a_wrong_kind_is_refused(likelihood):
    model, (x, _) = mlp(), vectors()
    opt = still(model, "exact")
    with pytest.raises(TypeError, match="likelihood"):
        opt.observe(model(x), likelihood)


@pytest.mark.parametrize("outputs", [None, 1.0, "logits", [[0.0, 1.0]]], ids=repr)
def test_outputs_of_a_wrong_kind_are_refused(outputs):
    model, (x, _) = mlp(), vectors()
    opt = still(model, "exact")
    model(x)
    with pytest.raises(TypeError, match="output"):
        opt.observe(outputs, "categorical")


def test_an_error_leaves_the_step_usable():
    model, (x, y) = mlp(), vectors()
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    outputs = model(x)
    with pytest.raises(ValueError, match="poisson"):
        opt.observe(outputs, "poisson")
    with pytest.raises(TypeError):
        opt.observe(outputs, 3)
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


@fishers
@pytest.mark.parametrize("kind", ["detached", "a leaf", "another model", "a forward without gradients"])
def test_outputs_that_are_not_the_model_s_are_noticed(fisher, kind):
    model, (x, _) = mlp(), vectors()
    opt = still(model, fisher)
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((*REFUSED, UserWarning), match="outputs|model|graph|grad"):
            opt.observe(outputs_from_elsewhere(kind, model, x), "categorical")


def test_targets_of_a_wrong_shape_are_refused():
    model, (x, y) = mlp(), vectors()
    opt = still(model, "exact")
    with pytest.raises(ValueError, match="targets"):
        opt.observe(model(x), "categorical", y[:4])


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_too_many_columns_are_refused_with_the_mend(fisher):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).repeat(1, 20_000)

    model, x = seeded_build(Wide), noise(2, 2)
    opt = still(model, fisher)
    if fisher == "mc":
        observed_step(opt, model, x, "categorical")
        return
    with pytest.raises(REFUSED, match="mc|curvature_prop"):
        opt.observe(model(x), "categorical")


@both
def test_an_unknown_fisher_is_refused(method):
    with pytest.raises(ValueError, match="fisher.*'type-2'"):
        METHODS[method](mlp(), fisher="type-2")
    with pytest.raises(TypeError, match="fisher"):
        METHODS[method](mlp(), fisher=2)
    with pytest.raises(ValueError, match="fisher_samples"):
        METHODS[method](mlp(), fisher="mc", fisher_samples=0)


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


def test_ekfac_refuses_forward_only():
    with pytest.raises(REFUSED, match="forward_only"):
        EKFAC(mlp(), fisher="forward_only")


@fishers
def test_ekfac_refuses_running_scales_of_an_observed_fisher(fisher):
    """They are made of the mean gradient, which is the objective's."""
    with pytest.raises(REFUSED, match="running"):
        EKFAC(mlp(), fisher=fisher, estimator="running")


def test_ekfac_s_scales_are_never_of_the_objective():
    model, (x, y) = mlp(), vectors()
    rows = observed(model, ["0", "2"], x, y, summed)
    opt = still(model, "exact", EKFAC, inv_update_steps=1000)
    for _ in range(3):
        observed_step(opt, model, x, "categorical", objective=lambda f: 100 * F.cross_entropy(f, y))
    for name, found in rows.items():
        state = state_of(opt, model, name)
        assert_close(state["scale"], found.scale(state["basis_a"], state["basis_g"]), 1e-9, name)


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


def test_kfac_takes_every_fisher_and_any_method_says_what_it_uses():
    for fisher in ("empirical", "mc", "exact", "curvature_prop", "forward_only"):
        KFAC(mlp(), fisher=fisher)
    for fisher in ("empirical", "mc", "exact", "curvature_prop"):
        EKFAC(mlp(), fisher=fisher)
