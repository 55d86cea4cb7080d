"""The curvature of a likelihood is the Hessian of its loss, which autograd computes.

Every case names torch's loss of one example. Columns and `hessian_product` must equal its Hessian, and the second
moment of random vectors must be within five standard errors of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from secondorder.capture.fisher.likelihood import Bernoulli, Categorical, Gaussian, Likelihood, resolve
from tests.support.grid import each
from tests.support.oracles.ranks import sum_loss as over_tokens

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A likelihood, and the loss of one example as torch computes it: outputs `[1, …]`, targets `[1, …]`."""

    likelihood: Likelihood
    loss: Loss
    shape: tuple[int, ...]  # outputs of one example
    targets: Callable[[int], Tensor]  # of a number of examples


def classes(*shape: int, count: int = 4, ignored: bool = False) -> Callable[[int], Tensor]:
    def draw(n: int) -> Tensor:
        found = torch.randint(count, (n, *shape))
        return torch.where(torch.arange(found.numel()).view_as(found) % 3 == 1, -100, found) if ignored else found

    return draw


def bits(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(2, (n, *shape)).double()


def reals(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def squared(reduction: str, factor: float = 1.0) -> Loss:
    return lambda f, y: factor * F.mse_loss(f, y, reduction=reduction)


over_pixels = partial(F.cross_entropy, reduction="sum")
logistic = partial(F.binary_cross_entropy_with_logits, reduction="sum")


CASES = {
    "classes": Case(Categorical(), over_pixels, (4,), classes()),
    "one class": Case(Categorical(), over_pixels, (1,), classes(count=1)),
    "tokens": Case(Categorical(), over_tokens, (3, 4), classes(3)),
    "ignored tokens": Case(Categorical(), over_tokens, (3, 4), classes(3, ignored=True)),
    "pixels": Case(Categorical(class_dim=1), over_pixels, (4, 2, 3), classes(2, 3)),
    "ignored pixels": Case(Categorical(class_dim=-3), over_pixels, (4, 2, 3), classes(2, 3, ignored=True)),
    "another ignored class": Case(Categorical(ignore_index=2), partial(over_pixels, ignore_index=2), (4,), classes()),
    "bits": Case(Bernoulli(), logistic, (3,), bits(3)),
    "mean of bits": Case(Bernoulli(mean=True), F.binary_cross_entropy_with_logits, (2, 3), bits(2, 3)),
    "one bit": Case(Bernoulli(), logistic, (), bits()),
    "squares": Case(Gaussian(), squared("sum"), (3,), reals(3)),
    "mean of squares": Case(Gaussian(mean=True), squared("mean"), (2, 3), reals(2, 3)),
    "noise of variance 4": Case(Gaussian(variance=4.0), squared("sum", 0.125), (3,), reals(3)),
    "mean, variance 1": Case(Gaussian(variance=1.0, mean=True), squared("mean", 0.5), (3,), reals(3)),
}
cases = pytest.mark.parametrize("name", CASES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(case: Case, n: int = 3) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(n, *case.shape, dtype=torch.float64), case.targets(n)


def hessian(case: Case, outputs: Tensor, targets: Tensor) -> Tensor:
    """Second derivative of the loss of one example, `[d, d]`."""
    return torch.autograd.functional.hessian(lambda f: case.loss(f.view_as(outputs), targets), outputs.flatten())


@cases
def test_columns_and_products_are_those_of_the_hessian(name: str) -> None:
    case = CASES[name]
    outputs, targets = batch(case)
    count = case.likelihood.columns(outputs)
    assert count == outputs[0].numel()
    columns = torch.stack([case.likelihood.column(outputs, targets, i) for i in range(count)])
    assert columns.shape == (count, *outputs.shape)
    assert columns.dtype == outputs.dtype
    tangent = torch.randn_like(outputs)
    product = case.likelihood.hessian_product(outputs, targets, tangent)
    assert product.shape == outputs.shape
    for n in range(len(outputs)):
        S, H = columns[:, n].reshape(count, -1).T, hessian(case, outputs[n : n + 1], targets[n : n + 1])
        torch.testing.assert_close(S @ S.T, H, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(product[n].flatten(), H @ tangent[n].flatten(), rtol=1e-9, atol=1e-12)


def test_a_column_belongs_to_one_term_and_others_are_refused() -> None:
    outputs, targets = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, -100, 1]])
    for index in range(12):
        column, term = Categorical().column(outputs, targets, index), index // 4
        assert not column[:, [t for t in range(3) if t != term]].any()
        assert column[0, term].any()
        assert bool(column[1, term].any()) == (term != 1)
    for likelihood in (Categorical(), Bernoulli(), Gaussian()):
        for index in (-1, 4):
            with pytest.raises(IndexError, match=f"column {index} of 4"):
                likelihood.column(torch.randn(2, 4), None, index)


DRAWS = 20_000


def assert_moments(vectors: Tensor, expected: Tensor) -> None:
    """The means of draws `[K, d]` and of their products: within five standard errors of zero and the expected `[d, d]`.

    The standard deviation of a product is estimated from the draws, but is at least that of independent factors: it
    would be zero for two rare classes that never occurred together.
    """
    count, squares = len(vectors), vectors.square()
    assert (vectors.mean(0).abs() <= 5 * vectors.std(0) / count**0.5 + 1e-12).all()
    mean, root = vectors.T @ vectors / count, expected.diagonal().sqrt()
    deviation = (squares.T @ squares / count - mean.square()).clamp(min=0).sqrt()
    error = torch.maximum(deviation, torch.outer(root, root)) / count**0.5
    assert ((mean - expected).abs() <= 5 * error + 1e-12).all()


@cases
@pytest.mark.parametrize("kind", ["sample", "rademacher"])
def test_the_second_moment_of_random_vectors_is_the_hessian(name: str, kind: str) -> None:
    """Their only source of randomness is the generator that is passed."""
    case = CASES[name]
    draw, (outputs, targets) = getattr(case.likelihood, kind), batch(case, 1)
    repeated, marks = outputs.expand(DRAWS, *case.shape), targets.expand(DRAWS, *targets.shape[1:])
    found = draw(repeated, marks, generator())
    assert (found.shape, found.dtype) == (repeated.shape, outputs.dtype)
    assert_moments(found.reshape(DRAWS, -1), hessian(case, outputs, targets))
    outputs, targets = batch(case, 30)
    before, source = torch.get_rng_state(), generator(3)
    first, second = draw(outputs, targets, source), draw(outputs, targets, source)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1234)
    assert torch.equal(draw(outputs, targets, generator(3)), first)
    if name != "one class":  # which is certain
        assert not torch.equal(first, second)
        assert not torch.equal(draw(outputs, targets, generator(4)), first)


def test_samples_are_gradients_of_the_loss_at_drawn_targets() -> None:
    """They are exactly `p − onehot` and `σ − bit`, so that each one is what a backward pass would give."""
    outputs = torch.randn(50, 4, dtype=torch.float64)
    probabilities, sample = outputs.softmax(1), Categorical().sample(outputs, None, generator())
    drawn = (probabilities - sample).round()
    assert torch.equal(drawn.sum(1), torch.ones(50, dtype=torch.float64))
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn.any(0).all()
    torch.testing.assert_close(sample, probabilities - drawn, rtol=0, atol=1e-15)
    flipped = outputs.sigmoid() - Bernoulli().sample(outputs, None, generator())
    torch.testing.assert_close(flipped, flipped.round(), rtol=0, atol=1e-15)
    assert set(flipped.round().unique().tolist()) == {0.0, 1.0}


def test_impossible_classes_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the smallest and the largest number that `torch.rand` can return."""
    outputs = torch.zeros(4000, 5)
    outputs[:, [0, 2, 4]] = -torch.inf
    v = Categorical().sample(outputs, None, generator())
    assert not v[:, [0, 2, 4]].any()
    assert torch.equal(v[:, 1].abs(), torch.full((4000,), 0.5))
    outputs = torch.randn(500, 9)
    outputs[:, [0, 8]] = -torch.inf
    for u, expected in ((0.0, 1), (1 - 2**-24, 7)):
        monkeypatch.setattr(torch, "rand", lambda shape, u=u, **options: torch.full(shape, u))
        assert (Categorical().sample(outputs, None, generator()).argmin(1) == expected).all()


def test_logits_that_are_not_finite_stay_in_their_term() -> None:
    """There is no error and no check: the step that receives the NaN is dropped."""
    outputs = torch.randn(3, 4)
    outputs[1, 2] = torch.nan
    for draw in (Categorical().sample, Categorical().rademacher):
        v, ignored = (draw(outputs, y, generator()) for y in (None, torch.tensor([0, -100, 2])))
        assert v[[0, 2]].isfinite().all()
        assert v[1].isnan().all()
        assert ignored.isfinite().all()
        assert not ignored[1].any()


def test_terms_count_what_a_mean_runs_over() -> None:
    for likelihood, shape, expected in (
        (Categorical(), (5, 4), 5),
        (Categorical(), (5, 3, 4), 15),
        (Categorical(class_dim=1), (5, 4, 2, 3), 30),
        (Bernoulli(), (5, 4), 5),
        (Bernoulli(), (5,), 5),
        (Bernoulli(mean=True), (5, 4), 5),
        (Gaussian(), (5, 2, 3), 5),
    ):
        found = likelihood.terms(torch.randn(shape), None)
        assert (type(found), found) == (int, expected)
    outputs, targets = torch.randn(2, 3, 4), torch.tensor([[0, 1, -100], [-100, -100, 2]])
    counted = Categorical().terms(outputs, targets)
    assert counted.shape == ()
    assert counted.item() == Categorical(class_dim=1).terms(outputs.mT, targets).item() == 3
    assert Categorical(ignore_index=2).terms(outputs, targets).item() == 5
    assert Categorical(ignore_index=None).terms(outputs, targets.clamp(min=0)) == 6
    assert Categorical().terms(outputs, outputs.softmax(-1)) == 6  # probabilities ignore nothing


LIKELIHOODS = [Categorical(), Bernoulli(), Bernoulli(mean=True), Gaussian(), Gaussian(variance=2.0, mean=True)]
likelihoods = pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)


def everything(
    likelihood: Likelihood, outputs: Tensor, tangent: Tensor, targets: Any = None, source: Any = None
) -> list[Tensor]:
    """A column, a product, and two random vectors."""
    likelihood.terms(outputs, targets)
    column = likelihood.column(outputs, targets, likelihood.columns(outputs) - 1)
    drawn = [draw(outputs, targets, source or generator()) for draw in (likelihood.sample, likelihood.rademacher)]
    return [column, likelihood.hessian_product(outputs, targets, tangent), *drawn]


@likelihoods
def test_precisions(likelihood: Likelihood) -> None:
    """Low precisions are computed in float32 and differ only by the final rounding; the graph is left alone."""
    empty = torch.empty(0, 4)
    assert likelihood.sample(empty, None, generator()).shape == (0, 4)
    assert likelihood.terms(empty, None) == 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        outputs, tangent = (4 * torch.randn(6, 50)).to(dtype), torch.randn(6, 50).to(dtype)
        singles = everything(likelihood, outputs.float(), tangent.float())
        for found, expected in zip(everything(likelihood, outputs, tangent), singles, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, expected.to(dtype))
    outputs, tangent = 3 * torch.randn(6, 20), torch.randn(6, 20)
    doubles = everything(likelihood, outputs.double(), tangent.double())[:2]
    for single, double in zip(everything(likelihood, outputs, tangent)[:2], doubles, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)
    weights = torch.randn(6, 5, requires_grad=True)
    outputs, tangent = weights * 2, torch.randn(6, 5)
    before, given = outputs.detach().clone(), tangent.clone()
    assert not any(v.requires_grad for v in everything(likelihood, outputs, tangent))
    assert torch.equal(outputs, before)
    assert torch.equal(tangent, given)
    outputs.sum().backward()


def test_certain_bits_keep_their_curvature() -> None:
    """`s (1 − s)` at a logit of 20 is 2·10⁻⁹, which a float32 `1 − s` would round to zero."""
    logits = torch.tensor([[20.0], [-20.0]])
    expected = (logits.double().sigmoid() * (-logits.double()).sigmoid()).float()
    torch.testing.assert_close(Bernoulli().hessian_product(logits, None, torch.ones(2, 1)), expected)


def test_names_and_objects_are_resolved_and_nothing_else_is() -> None:
    assert resolve("categorical") == Categorical(ignore_index=-100, class_dim=-1)
    assert resolve("bernoulli") == Bernoulli(mean=False)
    assert resolve("gaussian") == Gaussian(variance=0.5, mean=False)
    mine = Categorical(ignore_index=0)
    assert resolve(mine) is mine
    for name in ("poisson", "Categorical", "", "cross_entropy"):
        with pytest.raises(ValueError, match=f"'categorical', 'bernoulli', 'gaussian'.*{name!r}"):
            resolve(name)
    for wrong in (None, 3, Categorical, F.cross_entropy, {"categorical"}):
        with pytest.raises(TypeError, match="'categorical', 'bernoulli', 'gaussian'"):
            resolve(wrong)


def test_values_out_of_range_are_refused() -> None:
    variances = (0.0, -1.0, float("inf"), float("nan"))
    for make, keywords, error, message in (
        *((Gaussian, {"variance": v}, ValueError, f"variance must be > 0 and finite, got {v}") for v in variances),
        *((Gaussian, {"variance": v}, TypeError, "variance") for v in ("1", True)),
        (Gaussian, {"mean": 1}, TypeError, "mean"),
        (Bernoulli, {"mean": "mean"}, TypeError, "mean must be True or False"),
        *((Categorical, {"class_dim": dim}, TypeError, "must be an integer") for dim in (None, True)),
        (Categorical, {"ignore_index": 1.0}, TypeError, "must be an integer"),
    ):
        with pytest.raises(error, match=message):
            make(**keywords)
    assert hash(Categorical(class_dim=1)) == hash(Categorical(class_dim=1))
    with pytest.raises(AttributeError):
        Gaussian().variance = 1.0


def test_outputs_and_targets_that_do_not_fit_are_refused() -> None:
    scalar, batched = torch.tensor(1.0), torch.randn(2, 3, 4)
    targets = [torch.zeros(shape, dtype=torch.int64) for shape in ((6,), (3, 2), (2, 3, 1))]
    refused: list[tuple[Likelihood, Tensor, Tensor | None, str]] = [
        *((Categorical(class_dim=d), torch.randn(4), None, r"batch, got outputs of") for d in (-1, 1, 0)),
        *((likelihood, scalar, None, "batch") for likelihood in (Bernoulli(), Gaussian())),
        *((Categorical(), batched, y, "do not fit outputs") for y in targets),
    ]
    for likelihood, outputs, y, text in refused:
        calls = [partial(likelihood.sample, outputs, y, generator()), partial(likelihood.terms, outputs, y)]
        for call in (*calls, partial(likelihood.columns, outputs)) if y is None else calls:
            with pytest.raises(ValueError, match=text):
                call()
    for likelihood, outputs in product(LIKELIHOODS, (batched.long(), batched.cfloat())):
        with pytest.raises(TypeError, match="floating"):
            likelihood.sample(outputs, None, generator())


def test_a_custom_likelihood_needs_only_sample() -> None:
    class Laplace(Likelihood):
        def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
            return torch.randn(outputs.shape, generator=generator).sign()

    with pytest.raises(TypeError, match="sample"):
        type("Nothing", (Likelihood,), {})()
    mine, outputs = resolve(Laplace()), torch.randn(5, 3)
    assert mine.terms(outputs, None) == 5
    assert mine.sample(outputs, None, generator()).shape == (5, 3)
    for text, call in (
        (r"Laplace has no columns\(\) and column\(\)", partial(mine.columns, outputs)),
        (r"Laplace has no columns\(\) and column\(\)", partial(mine.column, outputs, None, 0)),
        ("curvature_prop", partial(mine.rademacher, outputs, None, generator())),
        ("hessian_product", partial(mine.hessian_product, outputs, None, outputs)),
    ):
        with pytest.raises(NotImplementedError, match=f"{text}.*define"):
            call()


@likelihoods
def test_no_value_is_read_by_the_host(likelihood: Likelihood) -> None:
    """Fake tensors have no values: reading one raises."""
    with FakeTensorMode():
        targets = torch.zeros(6, dtype=torch.int64) if isinstance(likelihood, Categorical) else None
        everything(likelihood, torch.randn(6, 5), torch.randn(6, 5), targets, torch.Generator())


@pytest.mark.gpu
@each(likelihood=LIKELIHOODS, dtype=[torch.float32, torch.bfloat16])
def test_a_device_is_not_waited_for_and_computes_the_same(likelihood: Likelihood, dtype: torch.dtype) -> None:
    """A generator of the CPU draws the same numbers for outputs on a device."""
    outputs = torch.randn(6, 5, device="cuda", dtype=dtype)
    targets = torch.tensor([0, 1, 2, -100, 4, 0], device="cuda") if isinstance(likelihood, Categorical) else None
    source = torch.Generator("cuda").manual_seed(0)
    everything(likelihood, outputs, outputs, targets, source)
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(likelihood, outputs, outputs, targets, source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outputs, tangent = torch.randn(6, 5), torch.randn(6, 5)
    there = everything(likelihood, outputs.cuda(), tangent.cuda())
    for found, expected in zip(there, everything(likelihood, outputs, tangent), strict=True):
        torch.testing.assert_close(found.cpu(), expected)
