"""Statistics of a part of the batch: unbiased, of exactly the size asked for, and reproducible.

Where a mean over draws is judged, the batch holds every example many times: that changes no factor, while each copy is
drawn or not for itself, so that few steps make a sharp test.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from tests.support.grid import each
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    held_factors,
    labels,
    layer_state,
    noise,
    twin,
)
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.fisher import METHODS, assert_mean, observed, state_of, still
from tests.support.oracles.kfac import covered_names, example_rows, expected_factors

both = each(method=METHODS)


def step(opt, model, batches, loss=F.cross_entropy, likelihood=None) -> None:
    """One step over micro-batches whose losses are divided by their number."""
    opt.zero_grad()
    for x, y in batches:
        outputs = model(x)
        if likelihood is not None:
            opt.observe(outputs, likelihood)
        (loss(outputs, y) / len(batches)).backward()
    opt.step()


def factor_draws(opt, model, batches, steps: int, **keywords) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of every layer after each step at fixed weights, ``[steps, …]``."""
    names = covered_names(model)
    seen = {name: ([], []) for name in names}
    for _ in range(steps):
        step(opt, model, batches, **keywords)
        for name in names:
            for values, factor in zip(seen[name], held_factors(opt, model, name), strict=True):
                values.append(factor)
    return {name: (torch.stack(a), torch.stack(b)) for name, (a, b) in seen.items()}


def copies(batch: tuple[Tensor, Tensor], times: int = 16) -> tuple[Tensor, Tensor]:
    return tuple(part.repeat(times, *[1] * (part.ndim - 1)) for part in batch)


# ---------------------------------------------------------------------------------------------------------------------
# Examples
# ---------------------------------------------------------------------------------------------------------------------


def assert_unbiased(found, expected, precision: float) -> None:
    for name, (A, B) in expected.items():
        assert_mean(found[name][0], A, f"A of {name}", precision)
        assert_mean(found[name][1], B, f"B of {name}", precision)


MODELS = {
    "mlp": lambda: (mlp((4, 3, 3)), *vectors(6)),
    "images": lambda: (convnet(stride=2, padding=1), *images(2)),
    "tokens": lambda: (seeded_build(Tokens), noise(3, 5, 3), torch.randint(3, (3, 5))),
    "pooled": lambda: (seeded_build(lambda: Tokens(read="mean")), noise(4, 5, 3), labels(4, 3)),
}


def summed(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="sum")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mlp", {"factor_batch_size": 30}),
        ("mlp", {"factor_batch_size": 30, "approx": "reduce", "loss_reduction": "sum"}),
        ("mlp", {"factor_batch_size": 30, "fisher": "exact"}),
        ("mlp", {"factor_batch_size": 30, "fisher": "mc"}),
        ("images", {"factor_batch_size": 24}),
        ("images", {"factor_positions": 3}),
        ("images", {"factor_positions": 3, "fisher": "exact"}),
        ("tokens", {"factor_positions": 2, "loss_terms": 5}),
        ("pooled", {"factor_positions": 2, "factor_batch_size": 32}),
    ],
    ids=str,
)
def test_some_examples_and_positions_are_unbiased(kind, options):
    model, x, y = MODELS[kind]()
    fisher, approx = options.get("fisher", "empirical"), options.get("approx", "expand")
    if fisher == "empirical":
        terms = {"loss_terms": 5} if kind == "tokens" else {}
        expected = expected_factors(twin(model), x, y, F.cross_entropy, approx=approx, **terms)
    else:
        rows = observed(model, covered_names(model), x, y, summed)
        expected = {name: found.factors() for name, found in rows.items()}
    opt = still(model, **{"fisher": fisher, **options})
    found = factor_draws(
        opt, model, [copies((x, y))], 60,
        loss=summed if "loss_reduction" in options else F.cross_entropy,
        likelihood=None if fisher == "empirical" else "categorical",
    )  # fmt: skip
    assert_unbiased(found, expected, 0.1)


@pytest.mark.parametrize("first", [3, 1], ids=["equal", "unequal"])
def test_some_examples_of_every_micro_batch_are_unbiased(first):
    """Micro-batches with the weights that make their sum the mean over all examples."""
    model, (x, y) = mlp((4, 3, 3)), vectors(6)
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = still(model, "empirical", factor_batch_size=12)

    def loss(f: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(f, target, reduction="sum") / 48  # over 2 micro-batches: 1/96 of the sum

    batches = [copies((x[:first], y[:first])), copies((x[first:], y[first:]))]
    assert_unbiased(factor_draws(opt, model, batches, 60, loss=loss), expected, 0.15)


def subsets_of(rows: Tensor, kept: int) -> dict[tuple[int, ...], Tensor]:
    """The mean of r rᵀ over every subset of the rows ``[N, d]``."""
    outer = torch.einsum("ni,nj->nij", rows, rows)
    return {chosen: outer[list(chosen)].mean(0) for chosen in itertools.combinations(range(len(rows)), kept)}


def matching(value: Tensor, candidates: dict) -> tuple[int, ...]:
    """The only subset that a factor can be of."""
    found = [key for key, c in candidates.items() if float((c - value).abs().max()) < 1e-10 * float(c.abs().max())]
    assert len(found) == 1, f"{len(found)} subsets fit"
    return found[0]


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_the_kept_examples_are_as_many_as_asked_for_and_each_equally_often(kept):
    model, (x, y) = mlp((4, 3, 3)), vectors(6)
    rows = example_rows(twin(model), ["0"], x, y, F.cross_entropy)["0"]
    inputs = subsets_of(torch.stack([a[0, 0] for a in rows.a]), kept)
    outputs = subsets_of(torch.stack([g[0, 0] for g in rows.g]), kept)
    opt = still(model, "empirical", factor_batch_size=kept)
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
def test_as_many_as_there_are_is_all_of_them(kind, options):
    model, x, y = MODELS[kind]()
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = still(model, "empirical", **options)
    step(opt, model, [(x, y)])
    assert_factors(all_factors(opt, model), expected)


def test_micro_batches_keep_their_number_each():
    """2 of 3 and 2 of 3: rank 4, of two different pairs."""
    model, (x, y) = mlp((9, 3, 3)), vectors(6, d=9)
    opt = still(model, "empirical", factor_batch_size=2)
    step(opt, model, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert int(torch.linalg.matrix_rank(held_factors(opt, model, "0")[0], rtol=1e-9)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Positions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_the_kept_positions_are_as_many_as_asked_for(kept):
    """One example, so that A is the mean over its kept rows and B S/p times the sum over theirs."""
    model = build()
    x, y = noise(1, 5, 3), labels(1, 3)
    rows = example_rows(twin(model), ["inner"], x, y, F.cross_entropy)["inner"]
    inputs = subsets_of(rows.a[0][0], kept)
    opt = still(model, "empirical", factor_positions=kept)
    seen = set()
    for A, B in zip(*factor_draws(opt, model, [(x, y)], 50)["inner"], strict=True):
        chosen = matching(A, inputs)
        g = rows.g[0][0][list(chosen)]
        assert_close(B, 5 / kept * g.T @ g, 1e-10, "B of the same positions")
        seen.add(chosen)
    assert len(seen) == math.comb(5, kept), "every subset comes up"


# ---------------------------------------------------------------------------------------------------------------------
# Scales of EK-FAC
# ---------------------------------------------------------------------------------------------------------------------


def scale_draws(opt, model, x, y, steps: int, likelihood=None) -> dict[str, Tensor]:
    names = covered_names(model)
    step(opt, model, [(x, y)], likelihood=likelihood)  # without a basis there is nothing to measure in
    seen = {name: [] for name in names}
    for _ in range(steps):
        step(opt, model, [(x, y)], likelihood=likelihood)
        for name in names:
            seen[name].append(layer_state(opt, model, name)["scale"].detach().clone())
    return {name: torch.stack(values) for name, values in seen.items()}


def empirical_scale(rows, basis_a: Tensor, basis_g: Tensor) -> Tensor:
    n = len(rows.a)
    return sum((basis_g.mT @ rows.gradient(i)[0] @ basis_a).square() for i in range(n)) / n


@pytest.mark.parametrize(("kind", "fisher"), [("mlp", "empirical"), ("images", "empirical"), ("mlp", "exact")])
def test_scales_of_some_examples_are_unbiased(kind, fisher):
    model, x, y = MODELS[kind]()
    names = covered_names(model)
    opt = still(model, fisher, EKFAC, scale_batch_size=24, scale_decay=0.0, inv_update_steps=1000)
    rows = observed(model, names, x, y, summed) if fisher == "exact" else None
    rows = example_rows(twin(model), names, x, y, F.cross_entropy) if rows is None else rows
    likelihood = "categorical" if fisher == "exact" else None
    for name, values in scale_draws(opt, model, *copies((x, y)), 40, likelihood=likelihood).items():
        state, scale = state_of(opt, model, name), rows[name].scale if fisher == "exact" else None
        bases = state["basis_a"], state["basis_g"]
        assert_mean(values, scale(*bases) if scale else empirical_scale(rows[name], *bases), f"scale of {name}", 0.1)


def test_the_examples_of_a_scale_are_as_many_as_asked_for():
    model, (x, y) = mlp((4, 3, 3)), vectors(5)
    rows = example_rows(twin(model), ["0"], x, y, F.cross_entropy)["0"]
    opt = still(model, "empirical", EKFAC, scale_batch_size=2, scale_decay=0.0, inv_update_steps=1000)
    values = scale_draws(opt, model, x, y, 40)["0"]
    state = state_of(opt, model, "0")
    squares = torch.stack([(state["basis_g"].mT @ rows.gradient(n)[0] @ state["basis_a"]).square() for n in range(5)])
    pairs = {pair: squares[list(pair)].mean(0) for pair in itertools.combinations(range(5), 2)}
    assert len({matching(value, pairs) for value in values}) > 5


def test_options_of_the_factors_leave_the_scales_alone_and_the_other_way_round():
    """Positions of a scale are summed inside the square: a part of them would not be an estimate of it."""
    model, x, y = MODELS["pooled"]()
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = still(model, "empirical", EKFAC, scale_batch_size=2)
    step(opt, model, [(x, y)])
    step(opt, model, [(x, y)])
    assert_factors(all_factors(opt, model), expected)
    model, x, y = MODELS["pooled"]()
    rows = example_rows(twin(model), ["inner"], x, y, F.cross_entropy)["inner"]
    opt = still(model, "empirical", EKFAC, factor_positions=2, scale_decay=0.0, inv_update_steps=1000)
    step(opt, model, [(x, y)])
    step(opt, model, [(x, y)])
    state = state_of(opt, model, "inner")
    assert_close(state["scale"], empirical_scale(rows, state["basis_a"], state["basis_g"]), 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Reproducible
# ---------------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "examples": {"factor_batch_size": 3},
    "positions": {"factor_positions": 2},
    "both": {"factor_positions": 2, "factor_batch_size": 2},
}


def build() -> nn.Module:
    return seeded_build(lambda: Tokens(read="mean"))


def data(seed: int) -> tuple[Tensor, Tensor]:
    return noise(6, 5, 3, seed=seed), labels(6, 3, seed)


def sequence(option: str, method: type = KFAC, steps: int = 3, **keywords) -> list[Tensor]:
    model = build()
    opt = still(model, "empirical", method, **OPTIONS[option], **keywords)
    found = []
    for _ in range(steps):
        step(opt, model, [data(0)])
        found.append(held_factors(opt, model, "inner")[0])
    return found


@each(option=OPTIONS.keys(), method=METHODS)
def test_the_seed_decides_what_is_kept_and_the_user_s_generator_is_neither_read_nor_touched(option, method):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = sequence(option, method, steps=4, deterministic_seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = sequence(option, method, steps=4, deterministic_seed=1)
    other = sequence(option, method, steps=4, deterministic_seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.allclose(a, b) for a, b in zip(one, other, strict=True))
    assert not all(torch.allclose(a, one[0]) for a in one), "every step keeps others"


@each(option=OPTIONS.keys(), method=METHODS)
def test_resume(option, method):
    keywords = {**OPTIONS[option], "lr": 0.1, "factor_decay": 0.9, "deterministic_seed": 5}
    if method is EKFAC:
        keywords["scale_batch_size"] = 4
    model = build()
    opt = still(model, "empirical", method, **keywords)
    for seed in range(3):
        step(opt, model, [data(seed)])
    resumed = build()
    resumed.load_state_dict(model.state_dict())
    again = still(resumed, "empirical", method, **keywords)
    again.load_state_dict(opt.state_dict())
    for seed in range(3, 6):
        step(opt, model, [data(seed)])
        step(again, resumed, [data(seed)])
    for (name, p), q in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_gradients_are_those_of_the_whole_batch():
    one, other = build(), build()
    x, y = data(0)
    still(one, "empirical", factor_batch_size=2, factor_positions=2)
    F.cross_entropy(one(x), y).backward()
    F.cross_entropy(other(x), y).backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_bad_values_are_refused():
    for method, option in (
        *((method, option) for method in METHODS.values() for option in ("factor_batch_size", "factor_positions")),
        (EKFAC, "scale_batch_size"),
    ):
        for value, error in ((0, ValueError), (2.5, TypeError)):
            with pytest.raises(error, match=option):
                method(build(), **{option: value})


@both
def test_reduce_refuses_a_part_of_the_positions(method):
    with pytest.raises(ValueError, match=r"reduce.*factor_positions"):
        method(mlp(), approx="reduce", factor_positions=2)
    opt = method(mlp(), factor_positions=2)
    saved = opt.state_dict()
    saved["param_groups"][0]["approx"] = "reduce"
    with pytest.raises(ValueError, match=r"reduce.*factor_positions"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["approx"] == "expand"
