"""``observe`` makes an extra backward pass that affects only statistics, or raises a clear error."""

import contextlib
import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder import EKFAC, KFAC, HyLo
from tests.support import kfac
from tests.support.grid import each, pairs
from tests.support.kfac import all_factors, assert_close, assert_factors, held_factors, layer_state, train_step, twin
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.networks import Sometimes, applied, reused
from tests.support.oracles.fisher import METHODS, assert_observed, cross_entropy, observed, observed_step, still
from tests.support.oracles.kfac import covered_names, expected_factors, kron
from tests.support.tasks import assert_identical
from tests.support.warned import silent

both = each(method=METHODS)
OBSERVED = ["mc", "exact", "curvature_prop"]
fishers = pytest.mark.parametrize("fisher", OBSERVED)
REFUSED = (RuntimeError, ValueError, NotImplementedError)


def exact_factors(model: nn.Module, x: Tensor, y: Tensor):
    rows = observed(model, covered_names(model), x, y, cross_entropy)
    return {name: found.factors() for name, found in rows.items()}


def categorical_step(opt, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Take a step with the likelihood's own objective, without resetting gradients before."""
    outputs = model(x)
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()
    opt.step()


def weight_of(opt, model: nn.Module, name: str = "0") -> float:
    """The number of examples in the estimate of a layer."""
    return float(layer_state(opt, model, name)["factor_weight"])


def assert_expected(opt, model: nn.Module, expected: dict[str, tuple[Tensor, Tensor]], fisher: str) -> None:
    """Compare both factors, or only A if B is drawn."""
    for name, factors in expected.items():
        held = held_factors(opt, model, name)
        assert_close(held[0], factors[0], 1e-9, name)
        if fisher == "exact":
            assert_close(held[1], factors[1], 1e-9, name)


IN_PLACE = partial(nn.ReLU, inplace=True)
BUILDS = {
    "mlp": (mlp, vectors),
    "in place": (lambda: mlp(activation=IN_PLACE), vectors),
    "dropout and batch norm": (
        lambda: seeded_build(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))),
        vectors,
    ),
    "convnet": (lambda: convnet(activation=IN_PLACE(), padding=1), images),
}


@each(fisher=OBSERVED, kind=BUILDS)
def test_observe_changes_nothing_but_statistics(fisher, kind):
    """Gradients, parameters, buffers, modes and targets stay, and the next backward is bitwise the same."""
    build, batch = kind
    x, y = batch()
    found = []
    for with_observe in (False, True):
        torch.manual_seed(3)
        model, inputs = build(), x.clone().requires_grad_()
        opt = still(model, fisher)
        F.cross_entropy(model(x), y).backward()
        outputs = model(inputs)
        if with_observe:
            kept, given = (outputs.detach().clone(), copy.deepcopy(model.state_dict())), y.clone()
            gradients = [(p.grad, p.grad.clone(), p.grad.data_ptr()) for p in model.parameters()]
            with torch.no_grad():
                assert opt.observe(outputs, "categorical", given) is None
            for p, (grad, value, where) in zip(model.parameters(), gradients, strict=True):
                assert p.grad is grad
                assert p.grad.data_ptr() == where
                assert torch.equal(p.grad, value)
            assert inputs.grad is None
            assert_identical((outputs.detach(), model.state_dict(), given), (*kept, y))
            assert torch.is_grad_enabled()
            assert model.training
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        found.append([loss.detach(), inputs.grad, *(p.grad for p in model.parameters())])
    assert_identical(*found)


# ---------------------------------------------------------------- Accumulation
def given_up(opt, model: nn.Module, x: Tensor) -> None:
    """A loop skips a loss that is not finite."""
    opt.observe(model(x), "categorical")
    opt.zero_grad()


def given_up_after_its_backward(opt, model: nn.Module, x: Tensor) -> None:
    outputs = model(x)
    opt.observe(outputs, "categorical")
    outputs.sum().backward()
    opt.zero_grad()


def paused(opt, model: nn.Module, x: Tensor) -> None:
    with opt.pause_capture():
        opt.observe(model(x), "categorical")
    assert opt.memory_usage()["pending"] == 0


def evaluated(opt, model: nn.Module, x: Tensor) -> None:
    opt.observe(model.eval()(x), "categorical")
    assert opt.memory_usage()["pending"] == 0
    model.train()


def not_observed(opt, model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def observed_backward(opt, outputs: Tensor, y: Tensor) -> None:
    opt.observe(outputs, "categorical")
    F.cross_entropy(outputs, y).backward()


def after_a_backward(opt, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """It keeps the graph."""
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    observed_backward(opt, outputs, y)


def concatenated(opt, model: nn.Module, x: Tensor, y: Tensor) -> None:
    observed_backward(opt, torch.cat([model(x[:4]), model(x[4:])]), y)


def reset_in_between(opt, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Trainers that call ``zero_grad`` after the forward do so."""
    outputs = model(x)
    opt.observe(outputs, "categorical")
    opt.zero_grad()
    F.cross_entropy(outputs, y).backward()


def observed_later(opt, model: nn.Module, x: Tensor, y: Tensor, order: tuple[int, ...]) -> None:
    """The outputs of both forwards are kept, and those of a third one are dropped."""
    outputs = [model(part) for part in x.split(5)]
    model(100 * x)
    gc.collect()
    for i in order:
        opt.observe(outputs[i], "categorical")
    (outputs[0].sum() + outputs[1].sum()).backward()


def after(other):
    """A batch that does not count comes before the observed one."""

    def loop(opt, model: nn.Module, x: Tensor, y: Tensor) -> None:
        other(opt, model, 100 * x[:6])
        observed_backward(opt, model(x), y)

    return loop


DO_NOT_COUNT = (given_up, given_up_after_its_backward, paused, evaluated, not_observed)
LOOPS = {
    **{other.__name__: after(other) for other in DO_NOT_COUNT},
    **{loop.__name__: loop for loop in (after_a_backward, concatenated, reset_in_between)},
    "observed later": partial(observed_later, order=(0, 1)),
    "observed later in another order": partial(observed_later, order=(1, 0)),
}


@pairs(fisher=OBSERVED, method=METHODS, loop=LOOPS)
@pytest.mark.filterwarnings("ignore")
def test_the_estimate_is_that_of_the_observed_batch(fisher, method, loop):
    model, (x, y) = mlp(), vectors(8)
    expected = exact_factors(twin(model), x, y)
    opt = still(model, fisher, method)
    for updates in (1, 2):
        opt.zero_grad()
        loop(opt, model, x, y)
        opt.step()
        assert_expected(opt, model, expected, fisher)
        assert layer_state(opt, model, "0")["factor_updates"] == updates
        assert weight_of(opt, model) == 8


# ---------------------------------------------------------------- Precision, loss scaling, checkpointing, wrappers
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


@each(method=METHODS, known=[True, False])
def test_the_loss_scale_does_not_enter(method, known):
    """Only the backward of the objective is scaled, so the optimizer need not know the scaler."""
    model, (x, y) = mlp((4, 5, 3)), vectors()
    rows = observed(twin(model), ["0", "2"], x, y, cross_entropy)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = still(model, "exact", method, inv_update_steps=1000, **({"grad_scaler": scaler} if known else {}))
    for _ in range(2):
        opt.zero_grad()
        outputs = model(x)
        opt.observe(outputs, "categorical")
        scaler.scale(F.cross_entropy(outputs, y)).backward()
        scaler.unscale_(opt)
        scaler.step(opt) if known else opt.step()
        scaler.update()
    assert_observed(opt, model, rows)
    if method is EKFAC:
        assert_close(opt.dense_curvature("0").trace(), rows["0"].block().trace(), 1e-9)


@each(fisher=OBSERVED, method=METHODS)
def test_activation_checkpointing(fisher, method):
    found = []
    for mode in ("plain", "non-reentrant"):
        model, (x, y) = reused(mode=mode), vectors()
        opt = still(model, fisher, method, inv_update_steps=1000)
        for _ in range(2):
            opt.zero_grad()
            categorical_step(opt, model, x, y)
        assert weight_of(opt, model, "middle") == 6
        blocks = [opt.dense_curvature(name) for name in covered_names(model)]
        found.append([*blocks, *(p.grad for p in model.parameters())])
    for plain, again in zip(*found, strict=True):
        assert_close(again, plain, 1e-9)


@each(fisher=OBSERVED, method=METHODS)
@pytest.mark.usefixtures("group_of_one")
def test_data_parallel_with_one_process(fisher, method):
    """All micro-batches except the last one are under ``no_sync``."""
    (x, y), found = vectors(8), []
    for wrapped in (False, True):
        bare = mlp((4, 5, 3))
        model = nn.parallel.DistributedDataParallel(bare) if wrapped else bare
        opt = still(model, fisher, method, lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            for i, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                with model.no_sync() if wrapped and i == 0 else contextlib.nullcontext():
                    outputs = model(a)
                    opt.observe(outputs, "categorical")
                    (F.cross_entropy(outputs, b) / 2).backward()
            opt.step()
        found.append((all_factors(opt, bare), list(bare.parameters())))
    assert_factors(found[1][0], found[0][0], 1e-12)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert_close(b, a, 1e-12)


# ---------------------------------------------------------------- Steps with and without observe
@each(fisher=OBSERVED, method=METHODS)
def test_a_due_step_without_observe_keeps_the_old_estimate_and_warns_once(fisher, method):
    """Without an old estimate it follows the fallback rule."""
    model = mlp()
    opt = still(model, fisher, method, lr=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="observe"):
        train_step(opt, model, *vectors(), F.cross_entropy)
    for p, old in zip(model.parameters(), before, strict=True):
        assert_close(p.detach(), old - 0.5 * p.grad, 1e-12)
    observed_step(opt, model, vectors()[0], "categorical")
    held = all_factors(opt, model)
    with silent():
        for seed in (2, 3):
            train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    kfac.assert_same_factors(opt, model, held)
    assert all(layer_state(opt, model, name)["factor_updates"] == 1 for name in held)


@each(fisher=OBSERVED, method=METHODS)
@pytest.mark.filterwarnings("error")
def test_observe_does_nothing_and_is_not_needed_when_nothing_is_due(fisher, method, monkeypatch):
    model = mlp()
    scales = {} if method is KFAC else {"scale_update_steps": 3}
    opt = still(model, fisher, method, factor_update_steps=3, inv_update_steps=3, **scales)
    observed_step(opt, model, vectors()[0], "categorical")
    held = all_factors(opt, model)
    for seed, called in ((1, True), (2, False)):
        outputs = model(vectors(seed=seed)[0])
        with monkeypatch.context() as patch:
            for name in ("grad", "backward"):
                patch.setattr(torch.autograd, name, None)
            assert not called or opt.observe(outputs, "categorical") is None
        outputs.sum().backward()
        opt.step()
    kfac.assert_same_factors(opt, model, held)
    observed_step(opt, model, vectors(seed=3)[0], "categorical")
    assert layer_state(opt, model, "0")["factor_updates"] == 2


@each(fisher=["empirical", *OBSERVED], method=METHODS)
def test_forwards_without_backward_keep_nothing(method, fisher):
    """Dropped outputs free their graph, except for those of the last few; the empirical Fisher ignores `observe`."""
    model, seen = mlp((4, 5, 3)), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))

    def alive() -> int:
        gc.collect()
        return sum(reference() is not None for reference in seen)

    opt = still(model, fisher, method)
    for seed in range(50):
        model(vectors(seed=seed)[0])
    assert alive() <= 9
    categorical_step(opt, model, *vectors())
    assert weight_of(opt, model) == 6
    if fisher == "empirical":
        assert_factors(all_factors(opt, model), expected_factors(mlp((4, 5, 3)), *vectors(), F.cross_entropy))
    opt.zero_grad()
    assert alive() == 0


def test_a_part_of_the_outputs_is_enough_and_forwards_in_between_do_not_matter():
    """The program keeps one tensor of a dictionary, and an evaluation comes before ``observe``."""
    model, (x, y) = seeded_build(lambda: applied(mlp(), lambda net, x: {"inputs": x, "logits": net(x)})), vectors()
    expected = exact_factors(twin(model.model), x, y)
    opt = still(model, "exact")
    logits = model(x)["logits"].view(6, 3)
    gc.collect()
    with torch.no_grad():
        model(vectors(9, seed=4)[0])
    opt.observe(logits, "categorical")
    F.cross_entropy(logits, y).backward()
    opt.step()
    assert_expected(opt, model.model, expected, "exact")
    assert weight_of(opt, model, "model.0") == 6


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_forward_whose_outputs_are_dropped_does_not_count(place):
    x, stray, held = kfac.noise(4, 4, 4, 4), kfac.noise(4, 4, 4, 4, seed=1), []
    for disturbed in (None, place):
        model = nn.Sequential(mlp(), nn.Flatten(0, -2))
        opt = still(model, "exact", approx="reduce")  # it matters which rows belong to one example
        if disturbed == "before":
            model(stray)
        outputs = model(x)
        if disturbed == "after":
            model(stray)
        opt.observe(outputs, "categorical")
        outputs.sin().sum().backward()
        opt.step()
        held.append(all_factors(opt, model[0]))
    assert_factors(held[1], held[0], 1e-12)


@both
@pytest.mark.filterwarnings("error")
def test_a_layer_that_is_not_called_keeps_its_estimate(method):
    model = seeded_build(Sometimes)
    opt = still(model, "mc", method)
    for model.both in (True, False, True):
        observed_step(opt, model, vectors()[0], "categorical")
    assert [layer_state(opt, model, name)["factor_updates"] for name in ("first", "second", "head")] == [3, 2, 3]


@pytest.mark.parametrize(
    "build",
    [partial(KFAC, factor_update_steps=2, inv_update_steps=2), partial(HyLo, update_steps=2)],
    ids=["KFAC", "HyLo"],
)
def test_a_layer_that_is_never_called_does_not_make_a_step_need_an_observation(build):
    """It has no estimate, so it is due in every step; outputs of another model are still refused in the others."""
    model, (x, y) = seeded_build(Sometimes), vectors()
    model.both = False
    opt = build(model, lr=0.0, fisher="mc")
    for step in range(3):
        opt.zero_grad()
        if step % 2 == 0:
            with pytest.raises(RuntimeError, match="no covered layer"):
                opt.observe(mlp()(x), "categorical")
        categorical_step(opt, model, x, y)
    assert [layer_state(opt, model, name)["factor_updates"] for name in ("first", "second", "head")] == [2, 0, 2]


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
    kfac.assert_same_factors(opt, model, held)
    assert all(layer_state(opt, model, name)["factor_updates"] == 1 for name in held)
    assert opt.diagnostics()["skipped_statistics"] >= 2


# ---------------------------------------------------------------- Errors
def after_the_backward(opt, outputs: Tensor) -> Tensor:
    outputs.sum().backward()
    return outputs


def of_a_closed_optimizer(opt, outputs: Tensor) -> Tensor:
    opt.close()
    return outputs


#: What is passed instead of the outputs, and the message.
ELSEWHERE = {
    "detached": (lambda opt, outputs: outputs.detach(), "outputs|model|graph|grad"),
    "a leaf": (lambda opt, outputs: kfac.noise(6, 3).requires_grad_(), "outputs|model|graph|grad"),
    "another model": (lambda opt, outputs: mlp(seed=9)(vectors()[0]), "outputs|model|graph|grad"),
    "no gradients": (lambda opt, outputs: torch.no_grad()(opt.module)(vectors()[0]), "outputs|model|graph|grad"),
    "after the backward": (after_the_backward, r"between.*forward and loss.backward|before.*backward"),
    "a closed optimizer": (of_a_closed_optimizer, "attach|closed"),
}


@each(fisher=OBSERVED, kind=ELSEWHERE.keys())
@pytest.mark.filterwarnings("error")
def test_outputs_that_cannot_be_observed_are_refused(fisher, kind):
    model, (x, _) = mlp(), vectors()
    opt = still(model, fisher)
    instead, message = ELSEWHERE[kind]
    outputs = instead(opt, model(x))
    with pytest.raises((*REFUSED, UserWarning), match=message):
        opt.observe(outputs, "categorical")


def test_too_many_columns_are_refused_with_the_remedy():
    x, wide = vectors(2)[0], (nn.Unflatten(1, (3, 1)), nn.Upsample(scale_factor=20_000), nn.Flatten())
    for fisher in ("mc", "exact"):
        model = seeded_build(lambda: nn.Sequential(nn.Linear(4, 3), *wide))
        opt = still(model, fisher)
        if fisher == "mc":
            observed_step(opt, model, x, "categorical")
            continue
        with pytest.raises(REFUSED, match="mc|curvature_prop"):
            opt.observe(model(x), "categorical")


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
    assert weight_of(opt, model) == len(x)


def test_wrong_arguments_are_refused_and_leave_the_step_usable():
    model, (x, y) = mlp(), vectors()
    expected = exact_factors(twin(model), x, y)
    opt = still(model, "exact")
    outputs = model(x)
    for given, error, message in (
        ((outputs, "poisson"), ValueError, "poisson"),
        *(((outputs, wrong), TypeError, "likelihood") for wrong in (3, None, secondorder.Categorical)),
        *(((wrong, "categorical"), TypeError, "output") for wrong in (None, 1.0, "logits", [[0.0, 1.0]])),
        ((outputs, "categorical", y[:4]), ValueError, "targets"),
        (((outputs, outputs), ("gaussian",) * 3), ValueError, "2.*3|3.*2"),
    ):
        with pytest.raises(error, match=message):
            opt.observe(*given)
    opt.observe([outputs], ["categorical"])
    F.cross_entropy(outputs, y).backward()
    opt.step()
    assert_factors(all_factors(opt, model), expected)


# ---------------------------------------------------------------- forward_only, and EK-FAC with each Fisher
@each(approx=["expand", "reduce"], sizes=[[5], [2, 3]])
@pytest.mark.filterwarnings("error")
def test_forward_only_has_an_identity_for_b_and_needs_no_observation(approx, sizes):
    model, (x, y) = convnet(padding=1), images()
    expected = expected_factors(twin(model), x, y, F.cross_entropy, approx=approx)
    opt = still(model, "forward_only", approx=approx)
    for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
        outputs = model(a)
        assert opt.observe(outputs, "categorical") is None
        (F.cross_entropy(outputs, b, reduction="sum") / 5).backward()
    opt.step()
    for name, (A, B) in expected.items():
        identity = torch.eye(len(B), dtype=torch.float64)
        assert_close(held_factors(opt, model, name)[0], A, 1e-9, name)
        assert torch.equal(held_factors(opt, model, name)[1], identity)
        assert_close(opt.dense_curvature(name), kron(identity, A), 1e-9, name)


def test_ekfac_refuses_fishers_that_cannot_measure_its_scales():
    """Running scales come from the mean gradient of the objective; forward_only has no gradient."""
    for fisher in OBSERVED:
        with pytest.raises(REFUSED, match="running"):
            EKFAC(mlp(), fisher=fisher, estimator="running")
    with pytest.raises(REFUSED, match="forward_only"):
        EKFAC(mlp(), fisher="forward_only")


def test_ekfac_s_scales_may_be_due_without_the_factors():
    """Factors are due every fourth step, scales at every one."""
    model, (x, _) = mlp(), vectors()
    opt = still(model, "exact", EKFAC, factor_update_steps=4, inv_update_steps=4, scale_decay=0.0)
    observed_step(opt, model, x, "categorical")
    held = all_factors(opt, model)
    for seed in (1, 2, 3):
        a, b = vectors(5, seed=seed)
        rows = observed(mlp(), ["0", "2"], a, b, cross_entropy)
        observed_step(opt, model, a, "categorical")
        for name, found in rows.items():
            state = layer_state(opt, model, name)
            assert_close(state["scale"], found.scale(state["basis_a"], state["basis_g"]), 1e-9, name)
        assert torch.equal(held_factors(opt, model, "0")[1], held["0"][1])
