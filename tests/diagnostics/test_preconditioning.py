"""`quantify_preconditioning` against numpy, vectors with known angles, and its promises about devices and memory."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secondorder.diagnostics import preconditioning, quantify_preconditioning
from tests.support.grid import pairs
from tests.support.operators import Operators

SCALARS = {f"qp_{name}" for name in (
    "q25", "q50", "q75", "min", "max", "mean", "zero_grad_frac", "cos", "angle", "sign_agree", "norm_g", "norm_u",
    "norm_ratio_u_g",
)}  # fmt: skip


def numpy_of(x: Tensor) -> np.ndarray:
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.detach().double().numpy().reshape(-1)


def oracle(g: Tensor, u: Tensor, signed: bool = False) -> dict[str, float]:
    """The definitions, in numpy and float64."""
    a, b = numpy_of(g), numpy_of(u)
    kept = a != 0
    ratio = b[kept] / a[kept] if signed else np.abs(b[kept]) / np.abs(a[kept])
    cos = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    q25, q50, q75 = np.quantile(ratio, [0.25, 0.5, 0.75])
    return {
        "qp_q25": q25,
        "qp_q50": q50,
        "qp_q75": q75,
        "qp_min": ratio.min(),
        "qp_max": ratio.max(),
        "qp_mean": ratio.mean(),
        "qp_n": len(ratio),
        "qp_zero_grad_frac": np.mean(~kept),
        "qp_cos": cos,
        "qp_angle": math.degrees(math.acos(max(-1.0, min(1.0, cos)))),
        "qp_sign_agree": np.mean(np.sign(a) * np.sign(b) > 0),
        "qp_norm_g": np.linalg.norm(a),
        "qp_norm_u": np.linalg.norm(b),
        "qp_norm_ratio_u_g": np.linalg.norm(b) / np.linalg.norm(a),
    }


def plain(report: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in report.items() if name != "layers"}


def assert_is(report: dict[str, Any], wanted: dict[str, float]) -> None:
    found = plain(report)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # The arc cosine turns a rounding error of a cosine near 1 into 1e-8 radians.
        assert found[name] == pytest.approx(value, rel=1e-11, abs=3e-6 if name == "qp_angle" else 1e-13), name


def with_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape).to(dtype)
    return x * (torch.rand(shape) > 0.2)


@pairs(
    signed=[False, True],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64],
    shape=[(1,), (2,), (5,), (40, 31), (3, 4, 5, 6)],
)
def test_every_measure_is_that_of_numpy(shape: tuple[int, ...], dtype: torch.dtype, signed: bool) -> None:
    g, u = with_zeros(*shape, dtype=dtype), torch.randn(shape).to(dtype)
    g.view(-1)[0] = 1.5  # at least one is not zero
    assert_is(quantify_preconditioning(g, u, signed=signed), oracle(g, u, signed))


@pytest.mark.parametrize(("factor", "angle"), [(-1.0, 180.0), (2.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_angle_of_a_multiple_of_the_gradient(dtype: torch.dtype, factor: float, angle: float) -> None:
    g = torch.randn(1000).to(dtype)
    report = plain(quantify_preconditioning(g, factor * g, signed=True))
    assert report["qp_angle"] == pytest.approx(angle, abs=1e-5)
    assert report["qp_sign_agree"] == (factor > 0)
    assert {report[f"qp_{name}"] for name in ("q25", "q50", "q75", "min", "max", "mean")} == {factor}
    assert report["qp_norm_ratio_u_g"] == abs(factor)


def test_the_angle_is_the_arc_cosine() -> None:
    report = quantify_preconditioning(torch.tensor([1.0, 0.0]), torch.tensor([1.0, math.sqrt(3.0)]))
    assert float(report["qp_cos"]) == pytest.approx(0.5)
    assert float(report["qp_angle"]) == pytest.approx(60.0)


def test_small_and_mixed_numbers_and_any_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = torch.full((3000,), 1e-30)  # squares are zero in float32
    tiny[0] = 1e-25
    for g, u, tiles in (
        (torch.tensor([1e-30, -1e-12, 1e-3]), torch.tensor([2e-30, 3e-12, -4e-3]), ()),
        (tiny, torch.ones(3000), ()),
        (torch.randn(50).bfloat16(), torch.randn(50, dtype=torch.float64), ()),
        (with_zeros(211), torch.randn(211), (1, 3, 64, 1000)),
    ):
        assert_is(quantify_preconditioning(g, u, signed=True), oracle(g, u, signed=True))
        for tile in tiles:
            monkeypatch.setattr(preconditioning, "_TILE", tile)
            assert_is(quantify_preconditioning(g, u), oracle(g, u))


def test_a_result_is_a_tensor_on_the_device_and_a_count_an_int() -> None:
    """By default there are neither layers nor a histogram; the arguments are not changed."""
    g = torch.randn(10, requires_grad=True)
    u = g.detach() * 2
    before = g.detach().clone(), u.clone()
    report = quantify_preconditioning(g, u)
    assert report.keys() == SCALARS | {"qp_n"}
    assert type(report["qp_n"]) is int
    for name in SCALARS:
        assert isinstance(report[name], Tensor), name
        assert (report[name].shape, report[name].dtype) == (torch.Size([]), torch.float64), name
        assert not report[name].requires_grad
    quantify_preconditioning([g], [u], histogram=True)
    assert torch.equal(g, before[0])
    assert torch.equal(u, before[1])


#: One model's gradients and directions.
G = {"first": torch.randn(4, 3), "second": torch.randn(5), "empty": torch.zeros(0)}
U = {name: torch.randn_like(value) for name, value in G.items()}


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_measures_of_the_whole_are_those_of_one_concatenated_vector(kind: type) -> None:
    report = quantify_preconditioning(*((dict(x) if kind is dict else kind(x.values())) for x in (G, U)), signed=True)
    whole = torch.cat([x.view(-1) for x in G.values()]), torch.cat([x.view(-1) for x in U.values()])
    assert_is(report, oracle(*whole, signed=True))
    names = list(G) if kind is dict else ["0", "1", "2"]
    assert list(report["layers"]) == names
    for name, key in zip(names[:2], list(G)[:2], strict=True):
        assert_is(report["layers"][name], oracle(G[key], U[key], signed=True))


def test_the_order_of_names_does_not_matter_and_gradients_that_are_none_are_left_out() -> None:
    g, wanted = {**G, "frozen": None}, plain(quantify_preconditioning(G, U))
    turned = dict(reversed(U.items()))
    for direction in (U, turned, {**U, "frozen": None}, {**U, "frozen": torch.randn(3)}):
        report = quantify_preconditioning(g, direction)
        assert list(report["layers"]) == list(G)
        assert_is(report, wanted)
    report = quantify_preconditioning([None, torch.ones(2)], [torch.ones(7), torch.ones(2)])
    assert list(report["layers"]) == ["1"]
    assert report["qp_n"] == 2


@pytest.mark.parametrize("nothing", [[], [None], {}, {"a": None}, torch.zeros(0), [torch.zeros(0)]], ids=str)
def test_empty_arguments_are_not_an_error(nothing: Any) -> None:
    report = quantify_preconditioning(nothing, nothing, histogram=True)
    assert report["qp_n"] == 0
    assert float(report["qp_norm_g"]) == float(report["qp_norm_u"]) == 0.0
    assert all(math.isnan(report[name]) for name in SCALARS - {"qp_norm_g", "qp_norm_u"})
    assert int(report["qp_hist"].sum()) == 0


NAN = math.nan


@pytest.mark.parametrize(
    ("g", "u", "undefined", "expected"),
    [
        # Without a gradient there is no ratio, and no angle.
        ([0, 0, 0, 0], [1, 1, 1, 1], ("q50", "cos"), {"n": 0, "zero_grad_frac": 1, "sign_agree": 0, "norm_u": 2}),
        # A direction of zeros scales by zero.
        ([1, 1, 1, 1], [0, 0, 0, 0], ("angle",), {"max": 0, "mean": 0, "norm_ratio_u_g": 0}),
        # NaN affects every measure that it enters.
        ([1, 1, 1, 1], [1, 1, NAN, 1], ("q25", "q50", "min", "max", "mean", "cos", "norm_u"), {"norm_g": 2}),
    ],
    ids=["no gradient", "no direction", "nan"],
)
def test_undefined_measures_are_nan(
    g: list[float], u: list[float], undefined: tuple[str, ...], expected: dict[str, float]
) -> None:
    given = (torch.tensor(values, dtype=torch.float32) for values in (g, u))
    report = plain(quantify_preconditioning(*given))
    assert all(math.isnan(report[f"qp_{name}"]) for name in undefined)
    assert {name: report[f"qp_{name}"] for name in expected} == expected


@pytest.mark.parametrize("layout", ["transposed", "channels last", "sliced", "conjugated", "sparse", "repeated"])
def test_memory_layouts_do_not_matter(layout: str) -> None:
    g, u = torch.randn(4, 6, 3, 3), torch.randn(4, 6, 3, 3)
    if layout == "transposed":
        given_g, given_u = g.permute(1, 3, 2, 0), u.permute(1, 3, 2, 0).contiguous()
    elif layout == "channels last":
        given_g, given_u = g.contiguous(memory_format=torch.channels_last), u
    elif layout == "sliced":
        g, u = g[:, ::2], u[:, ::2]
        given_g, given_u = g, u.contiguous()
    elif layout == "conjugated":
        g, u = torch.view_as_complex(g[..., :2].contiguous()), torch.view_as_complex(u[..., :2].contiguous())
        given_g, given_u = g.conj(), u.conj().resolve_conj()
    elif layout == "sparse":
        g = g * (g > 1)
        given_g, given_u = g.to_sparse(), u
    else:  # a sparse gradient of a table from which a row was looked up twice
        layer = nn.Embedding(10, 3, sparse=True)
        layer(torch.tensor([1, 1, 4])).sum().backward()
        given_g, given_u = layer.weight.grad, torch.ones(10, 3)
        g, u = given_g.to_dense(), given_u
    assert_is(quantify_preconditioning(given_g, given_u), oracle(g, u))


@pytest.mark.parametrize("tile", [1 << 20, 999])
def test_above_the_limit_the_quantiles_are_those_of_a_sample(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "_TILE", tile)
    g, u = with_zeros(60_000), torch.randn(60_000)
    u *= torch.linspace(0.1, 10, len(u))  # a sample from one end would be far off
    report, wanted = plain(quantify_preconditioning(g, u, sample=20_000)), oracle(g, u)
    assert report["qp_n"] == 20_000
    for name, value in wanted.items():
        if name in {"qp_q25", "qp_q50", "qp_q75"}:
            assert report[name] == pytest.approx(value, rel=0.05), name
        elif name not in {"qp_n", "qp_min", "qp_max", "qp_mean"}:
            assert report[name] == pytest.approx(value, rel=1e-11), name  # always exact
    assert wanted["qp_min"] <= report["qp_min"]
    assert report["qp_max"] <= wanted["qp_max"]


@pytest.mark.parametrize("tile", [1 << 20, 70])
def test_a_sample_holds_ratios_of_coordinates_with_a_gradient(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "_TILE", tile)
    g, u = torch.zeros(1000), torch.arange(1000.0)
    g[torch.randperm(1000)[:800]] = 1.0
    tiles = list(preconditioning._tiles("", g, u))
    for wanted in (1, 5, 500, 799, 800, 801):
        places = preconditioning._ratios(tiles, preconditioning._filled(tiles), wanted, seed=0).long()
        assert len(places) == min(wanted, 800)
        assert bool((g[places] == 1).all())
        assert bool((places.diff() >= 0).all())
    assert torch.equal(places, g.nonzero()[:, 0])


def test_all_coordinates_are_equally_likely() -> None:
    g, u = torch.ones(10), torch.arange(10.0)
    tiles = list(preconditioning._tiles("", g, u))
    drawn = torch.cat([preconditioning._ratios(tiles, [10], 4, seed) for seed in range(2000)])
    counts = torch.bincount(drawn.long(), minlength=10)
    assert bool(((counts - 800).abs() < 110).all()), counts  # about five standard deviations


def test_the_seed_determines_the_sample() -> None:
    g, u = torch.randn(5000), torch.randn(5000)
    first, again, other = (plain(quantify_preconditioning(g, u, sample=100, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("signed", [False, True])
def test_the_histogram_is_that_of_numpy(signed: bool) -> None:
    g, u = with_zeros(5000), with_zeros(5000)
    report = quantify_preconditioning(g, u, signed=signed, histogram=True)
    ratio = np.abs(numpy_of(u)[numpy_of(g) != 0] / numpy_of(g)[numpy_of(g) != 0])
    counts, edges = np.histogram(np.log10(ratio[ratio > 0]), bins=64)
    np.testing.assert_allclose(report["qp_hist_edges"].numpy(), edges, rtol=0, atol=1e-12)
    assert report["qp_hist"].dtype == torch.int64
    assert np.abs(report["qp_hist"].numpy() - counts).sum() <= 4  # rounding at an edge
    assert int(report["qp_hist"].sum()) == np.count_nonzero(ratio)  # a ratio of zero is in no bin


def test_a_histogram_of_equal_ratios_is_one_bin_of_a_decade() -> None:
    g = torch.randn(100)
    report = quantify_preconditioning({"a": g}, {"a": g * 8}, histogram=True)
    for part in (report, report["layers"]["a"]):
        assert int(part["qp_hist"].sum()) == 100
        low, high = part["qp_hist_edges"][[0, -1]].tolist()
        assert low < math.log10(8) < high


ONE, TWO = torch.ones(1), torch.ones(2)
UNFIT: list[tuple[Any, Any, str]] = [
    ({"a": ONE, "b": TWO}, {"a": ONE, "b": torch.ones(3)}, r"'b': g has shape \(2,\) and u \(3,\)"),
    (torch.ones(6), torch.ones(2, 3), r"g has shape \(6,\) and u \(2, 3\)"),
    ({"a": ONE, "b": ONE}, {"a": ONE}, r"u lacks \['b'\], which g has"),
    ({"a": ONE}, {"a": None}, r"u lacks \['a'\], which g has"),
    ({"a": ONE}, {"a": ONE, "b": ONE}, r"g lacks \['b'\], which u has"),
    ([ONE, ONE], [ONE], "g has 2 tensors and u has 1"),
    (TWO, torch.ones(2, device="meta"), "g is on cpu and u on meta"),
    (torch.ones(2, dtype=torch.complex64), TWO, r"g is torch\.complex64 and u torch\.float32"),
]


def test_arguments_that_do_not_fit_are_refused() -> None:
    for g, u, match in UNFIT:
        with pytest.raises(ValueError, match=match):
            quantify_preconditioning(g, u)
    for sample in (0, -5):
        with pytest.raises(ValueError, match=f"sample must be >= 1, got {sample}"):
            quantify_preconditioning(TWO, TWO, sample=sample)
    for g, u in [
        (ONE, [ONE]),
        ([ONE], {"0": ONE}),
        ({"tensor": ONE}, ONE),
        (3.0, ONE),
        (ONE, "u"),
        ([3.0], [ONE]),
        ({"a": ONE}, {"a": [1.0]}),
        ((x for x in [ONE]), [ONE]),
    ]:
        with pytest.raises(TypeError, match="must"):
            quantify_preconditioning(g, u)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(self, *args, **kwargs)

        return read

    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
    return seen


@pytest.mark.parametrize("sample", [10, 1_000_000])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_host_reads_one_list_of_counts_per_call(layers: int, sample: int, readings: list[str]) -> None:
    g, u = [with_zeros(50) for _ in range(layers)], [torch.randn(50) for _ in range(layers)]
    readings.clear()
    with Operators(*g, *u) as seen:
        quantify_preconditioning(g, u, histogram=True, sample=sample)
    assert readings == ["tolist"]
    assert not seen.waits


def test_temporaries_are_small_compared_with_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "_TILE", 1024)
    g, u = with_zeros(100_000), torch.randn(100_000)
    with Operators(g, u) as seen:
        quantify_preconditioning(g, u, histogram=True, sample=2000)
    assert seen.nbytes <= 8 * 2048


@pytest.mark.gpu
def test_results_stay_on_the_device_and_the_host_waits_once() -> None:
    g, u = [with_zeros(3000), with_zeros(50)], [torch.randn(3000), torch.randn(50)]
    wanted = quantify_preconditioning(g, u, signed=True)
    g, u = [x.cuda() for x in g], [x.cuda() for x in u]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = quantify_preconditioning(g, u, signed=True, histogram=True, sample=10_000)
            quantify_preconditioning(g, u, histogram=True, sample=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 2
    assert all(report[name].is_cuda for name in SCALARS | {"qp_hist", "qp_hist_edges"})
    without = {name: value for name, value in report.items() if "hist" not in name}
    assert_is(without, plain(wanted))
