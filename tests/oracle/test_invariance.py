"""What the factors and the direction must not depend on: how a batch is cut, ordered, repeated, reduced or scaled."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.kfac import all_factors, assert_close, assert_factors, backward, directions, noise, plain_kfac
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors

few = settings(derandomize=True, max_examples=6, deadline=None)
APPROX = st.sampled_from(["expand", "reduce"])
BUILDS = {
    "mlp": (lambda: mlp((4, 5, 3)), vectors),
    "convnet": (lambda: convnet(stride=2, padding=1), images),
    "tokens": (lambda: seeded_build(lambda: Tokens(read="mean")), lambda n: (noise(n, 5, 3), vectors(n)[1])),
}


def result(model, batches, approx="expand", **keywords):
    """(factors, directions) after one step over ``batches`` of (x, y, loss)."""
    opt = plain_kfac(model, approx=approx, **keywords)
    for x, y, loss in batches:
        backward(model, x, y, loss)
    moved = directions(opt, model)
    return all_factors(opt, model), {name: V for name, (_, V) in moved.items()}


def assert_same(one, other, tolerance=1e-9):
    assert_factors(one[0], other[0], tolerance)
    for name, V in other[1].items():
        assert_close(one[1][name], V, 100 * tolerance, f"V of {name}")


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_equal_micro_batches_with_the_loss_over_their_number(kind, parts, approx):
    build, data = BUILDS[kind]
    x, y = data(8)
    whole = result(build(), [(x, y, F.cross_entropy)], approx)
    cut = [
        (a, b, lambda out, target: F.cross_entropy(out, target) / parts)
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
    ]
    assert_same(result(build(), cut, approx), whole)


@few
@given(st.sampled_from(sorted(BUILDS)), APPROX, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_unequal_micro_batches_with_properly_weighted_losses(kind, approx, sizes):
    build, data = BUILDS[kind]
    x, y = data(sum(sizes))
    whole = result(build(), [(x, y, F.cross_entropy)], approx)
    cut = [
        (a, b, lambda out, target: F.cross_entropy(out, target, reduction="sum") / len(x))
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True)
    ]
    assert_same(result(build(), cut, approx), whole)


@few
@given(st.sampled_from(sorted(BUILDS)), APPROX, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_unequal_micro_batches_of_a_summed_loss(kind, approx, sizes):
    build, data = BUILDS[kind]
    x, y = data(sum(sizes))

    def summed(out, target):
        return F.cross_entropy(out, target, reduction="sum")

    whole = result(build(), [(x, y, summed)], approx, loss_reduction="sum")
    cut = [(a, b, summed) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    assert_same(result(build(), cut, approx, loss_reduction="sum"), whole)


@few
@given(st.sampled_from(sorted(BUILDS)), APPROX, st.permutations(range(6)))
def test_permutation_of_the_examples(kind, approx, order):
    build, data = BUILDS[kind]
    x, y = data(6)
    whole = result(build(), [(x, y, F.cross_entropy)], approx)
    assert_same(result(build(), [(x[list(order)], y[list(order)], F.cross_entropy)], approx), whole)


@few
@given(st.sampled_from(sorted(BUILDS)), APPROX, st.integers(2, 4))
def test_replication_of_the_batch(kind, approx, times):
    build, data = BUILDS[kind]
    x, y = data(3)
    whole = result(build(), [(x, y, F.cross_entropy)], approx)
    repeated = (x.repeat(times, *[1] * (x.ndim - 1)), y.repeat(times), F.cross_entropy)
    assert_same(result(build(), [repeated], approx), whole)


@few
@given(st.sampled_from(sorted(BUILDS)), APPROX, st.integers(1, 7))
def test_mean_and_summed_loss_have_one_curvature(kind, approx, n):
    build, data = BUILDS[kind]
    x, y = data(n)
    mean = result(build(), [(x, y, F.cross_entropy)], approx)
    total = result(build(), [(x, y, lambda o, t: F.cross_entropy(o, t, reduction="sum"))], approx, loss_reduction="sum")
    assert_factors(total[0], mean[0])
    for name, V in mean[1].items():
        assert_close(total[1][name], n * V, 1e-8, name)  # F is per datum; the gradient is N times as large


@few
@given(st.sampled_from(sorted(BUILDS)), APPROX, st.integers(0, 20), st.booleans())
def test_loss_scale_of_a_grad_scaler(kind, approx, exponent, unscale):
    build, data = BUILDS[kind]
    x, y = data(5)
    whole = result(build(), [(x, y, F.cross_entropy)], approx)
    model = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**exponent)
    opt = plain_kfac(model, approx=approx, grad_scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if unscale:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(opt)
    scaler.update()
    assert_factors(all_factors(opt, model), whole[0], 1e-12)
    plain = build()
    result(plain, [(x, y, F.cross_entropy)], approx)
    for p, q, start in zip(model.parameters(), plain.parameters(), before, strict=True):
        assert_close(p.detach() - start, q.detach() - start, 1e-9)


@pytest.mark.parametrize("damping", [1e-3, 1e-1, 10.0])
def test_a_damping_means_the_same_for_one_batch_of_64_and_four_of_16(damping):
    x, y = vectors(64)
    whole = result(mlp(), [(x, y, F.cross_entropy)], damping=damping)
    cut = [(a, b, lambda o, t: F.cross_entropy(o, t) / 4) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    assert_same(result(mlp(), cut, damping=damping), whole)


def test_a_short_window_counts_what_it_holds_and_leaks_nothing():
    """Windows of 4, of 1 (cut short), of 4 micro-batches: each estimate is that of its own batches."""
    x, y = vectors(8)
    cut = [(a, b, lambda o, t: F.cross_entropy(o, t) / 4) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    expected = result(mlp(), cut)
    short = result(mlp(), cut[:1])
    quarter = result(mlp(), [(x[:2], y[:2], F.cross_entropy)])
    for name, (A, B) in short[0].items():
        assert_close(A, quarter[0][name][0], 1e-12)
        assert_close(B, quarter[0][name][1] / 16, 1e-12)  # the objective of that window was a quarter of a mean

    model = mlp()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    opt = plain_kfac(model, factor_decay=0.0)  # keeps the last window only
    for window in (cut, cut[:1], cut):
        model.load_state_dict(start)
        opt.zero_grad()
        for a, b, loss in window:
            backward(model, a, b, loss)
        opt.step()
    assert_factors(all_factors(opt, model), expected[0], 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# The number of positions
# ---------------------------------------------------------------------------------------------------------------------


@few
@given(st.integers(2, 4), APPROX)
def test_duplicated_tokens_under_a_token_mean_loss(times, approx):
    """Expand with T = S: exactly invariant. Reduce sums its gradients, so it needs a read-out of the sum or mean."""
    x = noise(4, 3, 3)
    y = torch.randint(3, (4, 3), generator=torch.Generator().manual_seed(0))
    found = []
    for k in (1, times):
        model = seeded_build(lambda: Tokens(read="mean" if approx == "reduce" else "positions"))
        target = y[:, 0] if approx == "reduce" else y.repeat(1, k)
        terms = 1 if approx == "reduce" else 3 * k
        found.append(result(model, [(x.repeat(1, k, 1), target, F.cross_entropy)], approx, loss_terms=terms))
    assert_same(found[1], found[0])


class Pointwise(nn.Module):
    """A 1×1 convolution under a mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 1), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).mean((2, 3)))


@few
@given(st.integers(1, 3), st.integers(1, 3))
def test_image_size_under_a_pooled_loss(rows, columns):
    """Reduce does not see it; expand's A neither, and its B falls as 1/S: no other power of S appears anywhere."""
    x, y = images(4, size=(2, 3))
    larger = x.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    for approx, fall in (("reduce", 1), ("expand", rows * columns)):
        small = result(seeded_build(Pointwise), [(x, y, F.cross_entropy)], approx)[0]
        large = result(seeded_build(Pointwise), [(larger, y, F.cross_entropy)], approx)[0]
        assert_close(large["conv"][0], small["conv"][0], 1e-10)
        assert_close(large["conv"][1], small["conv"][1] / fall, 1e-10)
        assert_close(large["head"][0], small["head"][0], 1e-10)
        assert_close(large["head"][1], small["head"][1], 1e-10)
