"""Sampled Fishers and statistics of a part of the batch: what they converge to, and where their randomness comes from.

To test a mean over draws, every example of the batch is repeated many times. This changes no block, but every copy has
its own draw, so one step is an average over many draws, and few steps make a sharp test.
"""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from secondorder import EKFAC, KFAC
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.kfac import all_factors, assert_close, assert_factors, held_factors, labels, layer_state, noise, twin
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import TwoHeads, mixing
from tests.support.oracles.fisher import LOSSES, METHODS, assert_mean, cross_entropy, observed, observed_step, still
from tests.support.oracles.kfac import covered_names, example_rows, expected_factors

SAMPLED = ["mc", "curvature_prop"]
LIKELIHOODS = ["categorical", "gaussian", "gaussian mean", "bernoulli", "bernoulli mean"]


def any_targets(likelihood: str, *shape: int) -> Tensor:
    return labels(shape[0], shape[1]) if likelihood == "categorical" else noise(*shape).sigmoid()


def repeated(x: Tensor, times: int = 96) -> Tensor:
    return x.repeat(times, *[1] * (x.ndim - 1))


def rarely_refreshed(model, fisher: str, method: type = KFAC, **keywords):
    """An optimizer that spends no time on eigenvectors, which these tests do not need."""
    return still(model, fisher, method, **{"inv_update_steps": 1000, **keywords})


def draws(model, take_step, opt, keys: tuple[str, ...], steps: int) -> dict[str, list[Tensor]]:
    """Statistics of every layer after each of some steps at fixed weights: for every key ``[steps, …]``."""
    seen = {name: [[] for _ in keys] for name in covered_names(model)}
    for _ in range(steps):
        take_step()
        for name, values in seen.items():
            for key, of_key in zip(keys, values, strict=True):
                of_key.append(layer_state(opt, model, name)[key].detach().clone())
    return {name: [torch.stack(of_key) for of_key in values] for name, values in seen.items()}


def fisher_draws(opt, model, x, likelihood, steps: int, key: str = "factor_g", targets=None) -> dict[str, Tensor]:
    found = draws(model, lambda: observed_step(opt, model, x, likelihood, targets), opt, (key,), steps)
    return {name: values for name, (values,) in found.items()}


def step(opt, model, batches, loss=F.cross_entropy, likelihood=None) -> None:
    """One step over micro-batches whose losses are divided by their number."""
    opt.zero_grad()
    for x, y in batches:
        outputs = model(x)
        if likelihood is not None:
            opt.observe(outputs, likelihood)
        (loss(outputs, y) / len(batches)).backward()
    opt.step()


def factor_draws(opt, model, batches, steps: int, **keywords) -> dict[str, list[Tensor]]:
    """(A, B) of every layer."""
    return draws(model, lambda: step(opt, model, batches, **keywords), opt, ("factor_a", "factor_g"), steps)


def scale_draws(opt, model, x, y, steps: int, **keywords) -> dict[str, Tensor]:
    step(opt, model, [(x, y)], **keywords)  # makes the basis
    found = draws(model, lambda: step(opt, model, [(x, y)], **keywords), opt, ("scale",), steps)
    return {name: values for name, (values,) in found.items()}


# ---------------------------------------------------------------- Convergence of sampled Fishers
def token_mean(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum") / (5 / 2)


def of_two_heads(f: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(f[0], y[0]) + F.mse_loss(f[1], y[1], reduction="sum")


IGNORING = torch.tensor([[0, -100, 2], [1, 2, 0]])
# name: model, batch, likelihood, given targets, loss of one example and its targets, precision
PROBLEMS = {
    **{
        name: (lambda: mlp((3, 4, 3)), noise(3, 3), given, None, loss, any_targets(name, 3, 3), 0.05)
        for name, (given, loss) in LOSSES.items()
        if name in LIKELIHOODS
    },
    "images": (
        lambda: convnet(stride=2, padding=1), images(2)[0], "categorical", None, cross_entropy, labels(2, 3), 0.1
    ),
    # a common draw for all tokens of an example, or for all heads, would have cross terms between them
    "tokens": (lambda: mixing(), noise(2, 3, 3), "categorical", IGNORING, token_mean, IGNORING, 0.1),
    "heads": (
        lambda: seeded_build(lambda: TwoHeads(3)), noise(3, 3), ("categorical", "gaussian"), None,
        of_two_heads, (labels(3, 3), noise(3, 2)), 0.05,
    ),
}  # fmt: skip


@pairs(
    lambda approx, problem, **_: approx == "expand" or problem[0] in ("images", "tokens"),
    fisher=SAMPLED,
    problem={name: (name, *parts) for name, parts in PROBLEMS.items()},
    approx=["expand", "reduce"],
)
def test_the_mean_over_draws_is_the_exact_fisher(fisher, problem, approx):
    _, build, x, likelihood, targets, loss, y, precision = problem
    model = build()
    rows = observed(model, covered_names(model), x, y, loss)
    targets = None if targets is None else repeated(targets)
    opt = rarely_refreshed(model, fisher, approx=approx)
    for name, values in fisher_draws(opt, model, repeated(x), likelihood, 40, targets=targets).items():
        assert_mean(values, rows[name].factors(approx)[1], f"B of {name}", precision)


@each(fisher=SAMPLED, likelihood=LIKELIHOODS, samples=[1, 4])
def test_the_mean_of_ekfac_s_scales_is_exact(fisher, likelihood, samples):
    model, x = mlp((3, 4, 3)), noise(3, 3)
    given, loss = LOSSES[likelihood]
    rows = observed(model, ["0", "2"], x, any_targets(likelihood, 3, 3), loss)
    opt = rarely_refreshed(model, fisher, EKFAC, fisher_samples=samples, scale_decay=0.0)
    observed_step(opt, model, repeated(x), given)  # makes the basis
    for name, values in fisher_draws(opt, model, repeated(x), given, 30, key="scale").items():
        state = layer_state(opt, model, name)
        assert_mean(values, rows[name].scale(state["basis_a"], state["basis_g"]), f"scale of {name}")


@each(fisher=SAMPLED, method=METHODS)
def test_more_samples_have_less_variance_around_the_same_mean(fisher, method):
    x, y = vectors(3, d=3)
    spread = {}
    for samples in (1, 4):
        model = mlp((3, 4, 3))
        rows = observed(model, ["0"], x, y, cross_entropy)
        opt = rarely_refreshed(model, fisher, method, fisher_samples=samples)
        values = fisher_draws(opt, model, repeated(x, 32), "categorical", 30)["0"]
        assert_mean(values, rows["0"].factors()[1], f"{samples} samples", 0.1)
        spread[samples] = float(values.var(0).sum())
    assert 2 < spread[1] / spread[4] < 8


# ---------------------------------------------------------------- A part of the examples or of their positions
MODELS = {
    "mlp": lambda: (mlp((4, 3, 3)), *vectors(6)),
    "images": lambda: (convnet(stride=2, padding=1), *images(2)),
    "tokens": lambda: (seeded_build(Tokens), noise(3, 5, 3), torch.randint(3, (3, 5))),
    "pooled": lambda: (seeded_build(lambda: Tokens(read="mean")), noise(4, 5, 3), labels(4, 3)),
}


def weighted(f: Tensor, target: Tensor, weight: float) -> Tensor:
    return weight * cross_entropy(f, target)


def assert_unbiased(found, expected, precision: float) -> None:
    for name, factors in expected.items():
        for values, factor, which in zip(found[name], factors, "AB", strict=True):
            assert_mean(values, factor, f"{which} of {name}", precision)


@pytest.mark.parametrize(
    ("kind", "options", "cuts"),
    [
        ("mlp", {"factor_batch_size": 30, "approx": "reduce", "loss_reduction": "sum"}, [6]),
        ("mlp", {"factor_batch_size": 30, "fisher": "exact"}, [6]),
        ("mlp", {"factor_batch_size": 30, "fisher": "mc"}, [6]),
        ("mlp", {"factor_batch_size": 12}, [3, 3]),
        ("mlp", {"factor_batch_size": 12}, [1, 5]),
        ("images", {"factor_positions": 3}, [2]),
        ("images", {"factor_positions": 3, "fisher": "exact"}, [2]),
        ("tokens", {"factor_positions": 2, "loss_terms": 5}, [3]),
        ("pooled", {"factor_positions": 2, "factor_batch_size": 32}, [4]),
    ],
    ids=str,
)
def test_some_examples_and_positions_are_unbiased(kind, options, cuts):
    """Micro-batches are weighted so that their sum is the mean over all examples."""
    model, x, y = MODELS[kind]()
    fisher, approx = options.get("fisher", "empirical"), options.get("approx", "expand")
    if fisher == "empirical":
        terms = {"loss_terms": 5} if kind == "tokens" else {}
        expected = expected_factors(twin(model), x, y, F.cross_entropy, approx=approx, **terms)
    else:
        rows = observed(model, covered_names(model), x, y, cross_entropy)
        expected = {name: found.factors() for name, found in rows.items()}
    opt = rarely_refreshed(model, **{"fisher": fisher, **options})
    batches = [(repeated(a, 16), repeated(b, 16)) for a, b in zip(x.split(cuts), y.split(cuts), strict=True)]
    likelihood, loss = None if fisher == "empirical" else "categorical", F.cross_entropy
    if "loss_reduction" in options:
        loss = cross_entropy
    elif len(cuts) > 1:  # `step` divides by the number of micro-batches
        loss = partial(weighted, weight=len(cuts) / (16 * len(x)))
    found = factor_draws(opt, model, batches, 60, loss=loss, likelihood=likelihood)
    assert_unbiased(found, expected, 0.1 if len(cuts) == 1 else 0.15)


def subsets_of(values: Tensor, kept: int) -> dict[tuple[int, ...], Tensor]:
    """The mean over every subset of ``kept`` examples."""
    return {chosen: values[list(chosen)].mean(0) for chosen in itertools.combinations(range(len(values)), kept)}


def outer(rows: Tensor) -> Tensor:
    return torch.einsum("ni,nj->nij", rows, rows)


def matching(value: Tensor, candidates: dict) -> tuple[int, ...]:
    """The only subset whose mean a statistic can be."""
    found = [key for key, c in candidates.items() if float((c - value).abs().max()) < 1e-10 * float(c.abs().max())]
    assert len(found) == 1, f"{len(found)} subsets fit"
    return found[0]


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_the_requested_number_of_examples_is_kept_with_equal_probabilities(kept):
    model, (x, y) = mlp((4, 3, 3)), vectors(6)
    rows = example_rows(twin(model), ["0"], x, y, F.cross_entropy)["0"]
    inputs = subsets_of(outer(torch.stack([a[0, 0] for a in rows.a])), kept)
    outputs = subsets_of(outer(torch.stack([g[0, 0] for g in rows.g])), kept)
    opt = rarely_refreshed(model, "empirical", factor_batch_size=kept)
    drawn = torch.zeros(6)
    for A, B in zip(*factor_draws(opt, model, [(x, y)], 50)["0"], strict=True):
        chosen = matching(A, inputs)
        assert matching(B, outputs) == chosen, "both factors are of the same examples"
        drawn[list(chosen)] += 1
    share = kept / 6
    assert ((drawn / 50 - share).abs() <= 5 * math.sqrt(share * (1 - share) / 50)).all()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mlp", {"factor_batch_size": 6, "factor_positions": 1}),  # a layer without positions has one
        ("mlp", {"factor_batch_size": 1000}),
        ("pooled", {"factor_positions": 5}),
        ("pooled", {"factor_positions": 100}),
    ],
    ids=str,
)
def test_limits_above_the_number_of_examples_or_positions_keep_all(kind, options):
    model, x, y = MODELS[kind]()
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = rarely_refreshed(model, "empirical", **options)
    step(opt, model, [(x, y)])
    assert_factors(all_factors(opt, model), expected)


def test_each_micro_batch_keeps_the_requested_number():
    """2 of 3 and 2 of 3 examples have rank 4."""
    model, (x, y) = mlp((9, 3, 3)), vectors(6, d=9)
    opt = rarely_refreshed(model, "empirical", factor_batch_size=2)
    step(opt, model, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert int(torch.linalg.matrix_rank(held_factors(opt, model, "0")[0], rtol=1e-9)) == 4


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_the_requested_number_of_positions_is_kept(kept):
    """For one example, A is the mean over the kept rows, and B is S/p times the sum over them."""
    model, x, y = MODELS["pooled"]()
    x, y = x[:1], y[:1]
    rows = example_rows(twin(model), ["inner"], x, y, F.cross_entropy)["inner"]
    inputs = subsets_of(outer(rows.a[0][0]), kept)
    opt = rarely_refreshed(model, "empirical", factor_positions=kept)
    seen = set()
    for A, B in zip(*factor_draws(opt, model, [(x, y)], 50)["inner"], strict=True):
        chosen = matching(A, inputs)
        g = rows.g[0][0][list(chosen)]
        assert_close(B, 5 / kept * g.T @ g, 1e-10, "B of the same positions")
        seen.add(chosen)
    assert len(seen) == math.comb(5, kept), "every subset occurs"


def squares(rows, basis_a: Tensor, basis_g: Tensor) -> Tensor:
    """Squares of the empirical gradient of every example in a basis."""
    return torch.stack([(basis_g.mT @ rows.gradient(n)[0] @ basis_a).square() for n in range(len(rows.a))])


@pytest.mark.parametrize(("kind", "fisher"), [("images", "empirical"), ("mlp", "exact")])
def test_scales_of_some_examples_are_unbiased(kind, fisher):
    model, x, y = MODELS[kind]()
    names, exact = covered_names(model), fisher == "exact"
    opt = rarely_refreshed(model, fisher, EKFAC, scale_batch_size=24, scale_decay=0.0)
    if exact:
        rows = observed(model, names, x, y, cross_entropy)
    else:
        rows = example_rows(twin(model), names, x, y, F.cross_entropy)
    found = scale_draws(opt, model, repeated(x, 16), repeated(y, 16), 40, likelihood="categorical" if exact else None)
    for name, values in found.items():
        bases = (layer_state(opt, model, name)[key] for key in ("basis_a", "basis_g"))
        expected = rows[name].scale(*bases) if exact else squares(rows[name], *bases).mean(0)
        assert_mean(values, expected, f"scale of {name}", 0.1)


def test_a_scale_is_that_of_the_requested_number_of_examples():
    model, (x, y) = mlp((4, 3, 3)), vectors(5)
    rows = example_rows(twin(model), ["0"], x, y, F.cross_entropy)["0"]
    opt = rarely_refreshed(model, "empirical", EKFAC, scale_batch_size=2, scale_decay=0.0)
    values = scale_draws(opt, model, x, y, 40)["0"]
    state = layer_state(opt, model, "0")
    by_pair = subsets_of(squares(rows, state["basis_a"], state["basis_g"]), 2)
    assert len({matching(value, by_pair) for value in values}) > 5


def test_options_of_the_factors_do_not_affect_the_scales_and_vice_versa():
    """Positions of a scale are summed before the square, so some of them would not give an estimate of it."""
    model, x, y = MODELS["pooled"]()
    other = twin(model)
    expected = expected_factors(other, x, y, F.cross_entropy)
    rows = example_rows(other, ["inner"], x, y, F.cross_entropy)["inner"]
    opt = rarely_refreshed(model, "empirical", EKFAC, scale_batch_size=2)
    scale_draws(opt, model, x, y, 1)
    assert_factors(all_factors(opt, model), expected)
    opt = rarely_refreshed(other, "empirical", EKFAC, factor_positions=2, scale_decay=0.0)
    (scale,) = scale_draws(opt, other, x, y, 1)["inner"]
    state = layer_state(opt, other, "inner")
    assert_close(scale, squares(rows, state["basis_a"], state["basis_g"]).mean(0), 1e-9)


@pytest.mark.parametrize("method", METHODS.values())
def test_positions_of_reduced_rows_are_refused(method):
    with pytest.raises(ValueError, match=r"reduce.*factor_positions"):
        built(method, mlp(), approx="reduce", factor_positions=2)
    opt = built(method, mlp(), factor_positions=2)
    saved = opt.state_dict()
    saved["param_groups"][0]["approx"] = "reduce"
    with pytest.raises(ValueError, match=r"reduce.*factor_positions"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["approx"] == "expand"


# ---------------------------------------------------------------- Where the randomness comes from
#: Options, and the side of the factor of the first layer that they draw.
DRAWN = {
    "mc": ({"fisher": "mc"}, 1),
    "curvature_prop": ({"fisher": "curvature_prop"}, 1),
    "examples": ({"factor_batch_size": 3}, 0),
    "positions": ({"factor_positions": 2}, 0),
    "both": ({"factor_positions": 2, "factor_batch_size": 2}, 0),
}


def sequence(drawn: str, method: type = KFAC, steps: int = 3, parts: int = 1, **keywords) -> list[Tensor]:
    """Factors of the first layer after each of some steps; every micro-batch is the same batch."""
    options, side = DRAWN[drawn]
    model = seeded_build(lambda: Tokens(read="mean"))
    batch = noise(16, 5, 3), labels(16, 3)
    opt = rarely_refreshed(model, **{"fisher": "empirical", **options}, method=method, **keywords)
    found = []
    for _ in range(steps):
        step(opt, model, [batch] * parts, likelihood="categorical" if side else None)
        found.append(held_factors(opt, model, "inner")[side])
    return found


@each(drawn=DRAWN.keys(), method=METHODS)
def test_the_seed_determines_the_draws_of_every_step(drawn, method):
    """``tests/contract/test_curvature_options.py`` tests that the user's generator is not used, and resumed runs."""
    first, again, other = (sequence(drawn, method, deterministic_seed=seed) for seed in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(first, other, strict=True))
    assert not any(torch.allclose(a, first[0]) for a in first[1:])


@pytest.mark.parametrize("fisher", SAMPLED)
def test_every_step_micro_batch_sample_and_example_has_its_own_draw(fisher):
    """With equal draws, equal micro-batches would be like one of them, and equal examples would have rank one."""
    found = sequence(fisher, steps=5)
    assert not any(torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])
    for keywords in ({"parts": 2}, {"fisher_samples": 4}):
        (other,) = sequence(fisher, steps=1, **keywords)
        assert not torch.allclose(other, found[0])
    for copies, rank in ((1, 1), (16, 2)):
        model, x = mlp((3, 4, 3)), vectors(1, d=3)[0]
        opt = rarely_refreshed(model, fisher)
        observed_step(opt, model, repeated(x, copies), "categorical")
        assert int(torch.linalg.matrix_rank(held_factors(opt, model, "2")[1], rtol=1e-9)) == rank
