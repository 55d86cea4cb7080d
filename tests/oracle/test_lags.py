"""Factors of convolutions by lags, against naive sums over patches and in the tests of patches."""

import itertools
import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secondorder.capture.layers import conv as convolutions
from secondorder.capture.layers import conv_lags
from secondorder.capture.layers.conv import ConvAdapter
from secondorder.capture.layers.conv_lags import Window, add_patch_gram_, gains
from secondorder.capture.statistics.call import Call
from secondorder.capture.statistics.kronecker import KroneckerSums, Sampler
from tests.oracle import test_factors_conv as patches
from tests.support.grid import each
from tests.support.kfac import assert_close, noise, plain_kfac
from tests.support.layer_cases import TRANSPOSED


@pytest.fixture
def taken(monkeypatch):
    """Use lags wherever they are possible, and record where they were."""
    found = []

    def possible(window, images, channels, sizes):
        found.append(
            images > 0
            and all(window.positions(axis, size) > 0 and window.sees_all(axis, size) for axis, size in enumerate(sizes))
        )
        return found[-1]

    monkeypatch.setattr(convolutions, "gains", possible)
    monkeypatch.setattr(ConvAdapter, "_has_fast_lags", lambda *_: True)  # in float64, too
    return found


@st.composite
def windows(draw):
    axes = draw(st.integers(1, 3))
    several = st.tuples(*[st.integers(1, 3 if axes == 3 else 4)] * axes)
    window = Window(
        draw(several),
        draw(st.tuples(*[st.integers(1, 2)] * axes)),
        draw(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4))] * axes)),
        draw(st.integers(1, 3)),
    )
    sizes = draw(st.tuples(*[st.integers(1, 6)] * axes))
    return window, draw(st.sampled_from([1, 2, 64])), sizes


@given(windows(), st.sampled_from([1, 7, 72, 10**6]))
def test_every_patch_counts_once(case, portion):
    """Images are processed in portions of a bounded number of positions."""
    window, channels, sizes = case
    positions = [window.positions(axis, size) for axis, size in enumerate(sizes)]
    if min(positions) < 1 or channels * math.prod(window.kernel) > 300:
        return
    x = noise(2, window.groups * channels, *sizes)
    padded = F.pad(x, [side for pair in reversed(window.padding) for side in pair])
    d = channels * math.prod(window.kernel)
    expected = torch.zeros(window.groups, d, d, dtype=torch.float64)
    for image, shift in itertools.product(padded, itertools.product(*map(range, positions))):
        taps = zip(shift, window.kernel, window.dilation, strict=True)
        taken = image[(slice(None), *(slice(p, p + step * (k - 1) + 1, step) for p, k, step in taps))]
        row = taken.reshape(window.groups, d)
        expected += row[:, :, None] * row[:, None, :]
    found = torch.ones_like(expected)
    with patch.object(conv_lags, "_POSITIONS", portion):
        add_patch_gram_(found if window.groups > 1 else found[0], x, window, 0.5)
    assert (found - 1 - expected / 2).abs().max() <= 1e-13 * x.square().sum()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_factors_are_those_of_the_definitions(dims, taken):
    options = itertools.product(patches.PADDING, patches.CHANNELS.values())
    others = itertools.cycle([("all", 1), ("no bias", 2), ("all", 2)])
    for (padding, channels), (trained, dilation) in zip(options, others, strict=False):
        layer = patches.convolution(dims, channels, trained=trained, padding=padding, dilation=dilation)
        patches.check_layer(layer, noise(2, channels[0], *patches.SIZES[dims]))
    patches.test_unbatched_input_is_one_example(dims)
    assert any(taken)


def test_transposed_convolutions(taken):
    for name, case in TRANSPOSED.items():
        model, (inputs, y) = case.model(), case.data()
        opt = plain_kfac(model)
        taken.clear()
        case.loss(model(*inputs), y).backward()
        opt.step()
        case.check(opt, case.factors(case.model()))
        assert any(taken), name


def _sums(conv, x, g, sampler=None, keep=None):
    adapter = ConvAdapter(conv, True, conv.bias is not None)
    like_a, like_g = (torch.zeros(shape, dtype=torch.float32) for shape in adapter.factor_shapes())
    sums = KroneckerSums(adapter, "expand", like_a, like_g, sampler)
    sums.add([Call(x, g, adapter, keep=keep)], len(x))
    return sums.finish()[0]


@each(groups=[1, 2], case=["half", "padded rows", "drawn examples"])
def test_lags_equal_patches_with_half_precision_masks_and_drawn_examples(groups, case, taken, monkeypatch):
    conv = nn.Conv2d(4, 6, 3, padding=1, groups=groups)
    x, g = torch.randn(6, 4, 5, 5), torch.randn(6, 6, 5, 5)
    keep = torch.tensor([True, True, False, True, False, True]) if case == "padded rows" else None
    x = x.bfloat16() if case == "half" else x

    def run():
        drawn = Sampler(2, None, torch.Generator().manual_seed(1)) if case == "drawn examples" else None
        return _sums(conv, x, g, drawn, keep)

    by_lags = run()
    assert any(taken)
    monkeypatch.setattr(convolutions, "gains", lambda *shapes: False)
    assert_close(by_lags, run(), 1e-5)


def test_a_wide_layer_needs_no_patches(monkeypatch):
    conv = nn.Conv2d(16, 16, 3, padding=1)
    x, g = torch.randn(16, 16, 24, 24), torch.randn(16, 16, 24, 24)
    rows = F.pad(F.unfold(x.double(), 3, padding=1).transpose(1, 2).flatten(0, 1), (0, 1), value=1.0)
    monkeypatch.setattr(ConvAdapter, "patches", lambda *_: pytest.fail("patches were made"))
    assert_close(_sums(conv, x, g).double(), rows.T @ rows / len(rows), 1e-5)


def test_float32_is_as_exact_as_by_patches():
    """With many positions of smooth images, rounding each addition would make A indefinite."""
    x = torch.randn(512, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    x = F.avg_pool2d(x, 5, 1, 2) + 1
    conv = nn.Conv2d(1, 4, 5, padding=2, bias=False)
    rows = F.unfold(x.double(), 5, padding=2).transpose(1, 2).flatten(0, 1)
    exact = rows.T @ rows / len(rows)
    found = torch.zeros(25, 25)
    assert ConvAdapter(conv, True, False).add_gram_(found, x, 1.0) == len(rows)
    found = found.double() / len(rows)
    assert (found - exact).abs().max() < 3e-6 * exact.abs().max()
    smallest = torch.linalg.eigvalsh(exact)[0]
    assert torch.linalg.eigvalsh(found)[0] == pytest.approx(float(smallest), rel=0.02)


def test_pixels_that_no_tap_reads_may_be_nan():
    """The taps of this kernel skip the middle of the image."""
    conv = nn.Conv2d(16, 8, (2, 3), padding=(5, 1), dilation=(8, 1))
    x = torch.randn(512, 16, 4, 16)
    assert conv(x).shape[2] == 6
    x[:, :, 1:3] = torch.nan
    assert torch.isfinite(conv(x)).all()
    assert torch.isfinite(_sums(conv, x, torch.randn(512, 8, 6, 16))).all()


def test_a_long_signal_needs_no_loop_over_its_pixels():
    window = Window((9,), (3,), ((12, 12),), 1)
    counted = sum(1 for _ in window.missing(0, 10**9))
    assert counted == 24


@pytest.mark.parametrize("kind", ["float64", "without oneDNN", "rows of its own", "stride"])
def test_patches_are_used_where_lags_would_not_help(kind, monkeypatch):
    class Own(ConvAdapter):
        def input_rows(self, x):
            return (3 * rows for rows in super().input_rows(x))

    monkeypatch.setattr(convolutions, "gains", lambda *shapes: pytest.fail("lags were considered"))
    conv, x = nn.Conv2d(4, 4, 3, stride=2 if kind == "stride" else 1), torch.randn(8, 4, 16, 16)
    adapter = (Own if kind == "rows of its own" else ConvAdapter)(conv, True, False)
    out = torch.zeros(36, 36, dtype=torch.float64 if kind == "float64" else torch.float32)
    with torch.backends.mkldnn.flags(enabled=kind != "without oneDNN"):
        assert adapter.add_gram_(out, x, 1.0) is None


def test_lags_are_used_where_they_are_less_work():
    cases = {  # kernel, images, channels, groups, size
        (3, 128, 16, 1, 32): True,
        (3, 128, 64, 1, 8): True,
        (7, 32, 16, 1, 32): True,
        (3, 64, 16, 4, 16): True,
        (1, 128, 16, 1, 32): False,  # a patch is a pixel
        (3, 32, 512, 1, 4): False,  # more border than image
        (3, 64, 1, 64, 16): False,  # depthwise
        (3, 2, 4, 1, 6): False,  # too small to matter
        (3, 0, 16, 1, 32): False,
        (9, 128, 16, 1, 4): False,  # no position is left
    }
    for (kernel, images, channels, groups, size), expected in cases.items():
        side = 0 if kernel == 9 else kernel // 2
        window = Window((kernel, kernel), (1, 1), ((side, side),) * 2, groups)
        assert gains(window, images, channels, (size, size)) is expected
