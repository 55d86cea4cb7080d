"""Curvature and directions do not depend on how a batch is split, ordered, repeated, reduced or scaled."""

from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.building import built
from tests.support.ekfac import plain_ekfac, standing
from tests.support.grid import pairs
from tests.support.kfac import all_factors, assert_close, noise, plain_kfac
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.fisher import cross_entropy as summed
from tests.support.oracles.kfac import covered_names, layer_values

few = settings(derandomize=True, max_examples=8, deadline=None)
METHODS = {"kfac": plain_kfac, "ekfac": plain_ekfac, "running": partial(plain_ekfac, estimator="running")}
BUILDS = {
    "mlp": (lambda: mlp((4, 5, 3)), vectors),
    "convnet": (lambda: convnet(stride=2, padding=1), images),
    "tokens": (lambda: seeded_build(lambda: Tokens(read="mean")), lambda n: (noise(n, 5, 3), vectors(n)[1])),
}
METHOD, BUILD = st.sampled_from(list(METHODS)), st.sampled_from(list(BUILDS))
APPROX = st.sampled_from(["expand", "reduce"])


def take_step(opt, model, batches, scaler=None, unscale=False):
    opt.zero_grad()
    for x, y, loss in batches:
        value = loss(model(x), y)
        (value if scaler is None else scaler.scale(value)).backward()
    if scaler is None:
        opt.step()
        return
    if unscale:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(opt)
    scaler.update()


def result(method, model, batches, approx="expand", unscale=False, **keywords):
    """Curvature of every layer after two steps over ``batches`` of (x, y, loss) without moving, and the next step."""
    opt = built(METHODS[method], model, approx=approx, **keywords)
    scaler, names = keywords.get("grad_scaler"), covered_names(model)
    with standing(opt):
        for _ in range(2):
            take_step(opt, model, batches, scaler, unscale)
    before = {name: layer_values(model.get_submodule(name)) for name in names}
    take_step(opt, model, batches, scaler, unscale)
    if method == "kfac":
        known = {
            f"{side} of {name}": X
            for name, AB in all_factors(opt, model).items()
            for side, X in zip("AB", AB, strict=True)
        }
    else:
        known = {name: opt.dense_curvature(name) for name in names}
    return known, {name: before[name] - layer_values(model.get_submodule(name)) for name in names}


def assert_same(one, other, times=1, known=1e-9, directions=1e-9):
    for name, value in other[0].items():
        assert_close(one[0][name], value, known, name)
    for name, V in other[1].items():
        assert_close(one[1][name], times * V, directions, f"V of {name}")


@pairs(
    method=METHODS.keys(),
    kind=BUILDS.keys(),
    approx=["expand", "reduce"],
    sizes=[[2, 2, 2, 2], [4, 4], [1, 7], [3, 1, 4]],
    mean=[True, False],
    damping=[1e-2, 10.0],
)
def test_micro_batches_are_one_batch_with_weighted_means_or_sums(method, kind, approx, sizes, mean, damping):
    """A damping means the same for one batch of 8 as for four of 2."""
    build, data = BUILDS[kind]
    x, y = data(sum(sizes))
    loss, share = (F.cross_entropy, len(x)) if mean else (summed, 1)
    cut = [(a, b, lambda o, t: summed(o, t) / share) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    keywords = {"approx": approx, "loss_reduction": "mean" if mean else "sum", "damping": damping}
    assert_same(result(method, build(), cut, **keywords), result(method, build(), [(x, y, loss)], **keywords))


@few
@given(METHOD, BUILD, APPROX, st.integers(1, 3), st.randoms(use_true_random=False))
def test_reordering_or_repeating_a_batch_does_not_matter(method, kind, approx, times, random):
    """The running estimate of EK-FAC grows with the number of examples, as documented."""
    build, data = BUILDS[kind]
    x, y = data(5)
    times = 1 if method == "running" else times
    order = random.sample(range(5 * times), 5 * times)
    many = torch.cat([x] * times)[order], torch.cat([y] * times)[order], F.cross_entropy
    assert_same(result(method, build(), [many], approx), result(method, build(), [(x, y, F.cross_entropy)], approx))


@few
@given(METHOD, BUILD, APPROX, st.integers(1, 7))
def test_mean_and_summed_loss_have_one_curvature(method, kind, approx, n):
    """It is per example; the gradient of the sum is N times as large."""
    build, data = BUILDS[kind]
    x, y = data(n)
    mean = result(method, build(), [(x, y, F.cross_entropy)], approx)
    assert_same(result(method, build(), [(x, y, summed)], approx, loss_reduction="sum"), mean, times=n)


@few
@given(METHOD, BUILD, APPROX, st.integers(0, 20), st.booleans())
def test_the_scale_of_a_grad_scaler_does_not_matter(method, kind, approx, exponent, unscale):
    build, data = BUILDS[kind]
    x, y = data(5)
    batches = [(x, y, F.cross_entropy)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**exponent)
    found = result(method, build(), batches, approx, unscale, grad_scaler=scaler)
    assert_same(found, result(method, build(), batches, approx), known=1e-12 if method == "kfac" else 1e-9)


def test_a_short_window_counts_what_it_holds_and_leaks_nothing():
    """Steps have 4, 1 (cut short) and 4 micro-batches; each estimate is that of its own batches."""
    x, y = vectors(8)
    cut = [(a, b, lambda o, t: F.cross_entropy(o, t) / 4) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    model = mlp()
    opt = plain_kfac(model, lr=0.0, factor_decay=0.0)  # keeps the last window only
    found = []
    for window in (cut, cut[:1], cut):
        take_step(opt, model, window)
        found.append(all_factors(opt, model))
    quarter = result("kfac", mlp(), [(x[:2], y[:2], F.cross_entropy)])[0]
    for name, (A, B) in found[1].items():
        assert_close(A, quarter[f"A of {name}"], 1e-12)
        assert_close(B, quarter[f"B of {name}"] / 16, 1e-12)  # the objective of that step was a quarter of a mean
        for one, other in zip(found[0][name], found[2][name], strict=True):
            assert_close(one, other, 1e-12)
    expected = result("kfac", mlp(), cut)[0]
    assert_close(found[2]["0"][1], expected["B of 0"], 1e-12)
