"""The exactness ladder: layer × Fisher × approximation.

Where theory says that a block is the Hessian's, it must be. Elsewhere it must be what its definition says, computed one
example and one column at a time. The objective that is differentiated in these steps is never the likelihood's own:
nothing of it may enter an observed statistic.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder import EKFAC, KFAC
from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, assert_factors, held_factors, labels, noise, twin
from tests.support.models import ConvNet, Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import over_null_spaces
from tests.support.oracles.fisher import (
    METHODS,
    assert_observed,
    hessian_block,
    measured_scale,
    observed,
    observed_step,
    parameter_gradients,
    state_of,
    still,
    unrelated,
)
from tests.support.oracles.kfac import covered_names, kron, objective
from tests.support.oracles.trajectory import curvlinops_blocks, curvlinops_exact

both = each(method=METHODS)
APPROXIMATIONS = ["expand", "reduce"]
approximations = pytest.mark.parametrize("approx", APPROXIMATIONS)


# ---------------------------------------------------------------------------------------------------------------------
# Losses of one example, and how `observe` is told of them
# ---------------------------------------------------------------------------------------------------------------------


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="sum")


def summed_square(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum()


def mean_square(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().mean()


def summed_bce(f: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y, reduction="sum")


def mean_bce(f: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y)


LOSSES = {
    "categorical": (lambda: "categorical", cross_entropy),
    "Categorical": (secondorder.Categorical, cross_entropy),
    "gaussian": (lambda: "gaussian", summed_square),
    "Gaussian": (secondorder.Gaussian, summed_square),
    "gaussian mean": (lambda: secondorder.Gaussian(mean=True), mean_square),
    "gaussian variance": (lambda: secondorder.Gaussian(variance=0.3), lambda f, y: summed_square(f, y) / 0.6),
    "bernoulli": (lambda: "bernoulli", summed_bce),
    "Bernoulli": (secondorder.Bernoulli, summed_bce),
    "bernoulli mean": (lambda: secondorder.Bernoulli(mean=True), mean_bce),
}


def targets_for(loss: str, outputs: Tensor, seed: int = 0) -> Tensor:
    """Targets of the kind that the loss takes; second derivatives do not depend on which."""
    if "ategorical" in loss:
        return labels(len(outputs), outputs.shape[1], seed)
    return noise(*outputs.shape, seed=seed).sigmoid()


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def factors_after(model: nn.Module, x: Tensor, likelihood, targets=None, **keywords):
    """One observed step of K-FAC with the exact Fisher."""
    opt = still(model, "exact", **keywords)
    observed_step(opt, model, x, likelihood, targets)
    return opt


# ---------------------------------------------------------------------------------------------------------------------
# The oracle first
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["categorical", "gaussian", "gaussian mean", "bernoulli mean"])
def test_the_oracle_s_block_is_the_hessian_of_a_piecewise_linear_network(loss):
    model, (x, _) = mlp((4, 5, 3), activation=nn.ReLU), vectors()
    y = targets_for(loss, outputs_of(model, x))
    value = LOSSES[loss][1]
    for name, rows in observed(model, ["0", "2"], x, y, value).items():
        exact = hessian_block(
            model,
            name,
            lambda forward: sum(value(forward(a[None]), b[None]) for a, b in zip(x, y, strict=True)) / len(x),
        )
        assert_close(rows.block(), exact, 1e-10, name)


# ---------------------------------------------------------------------------------------------------------------------
# Equal to the Hessian
# ---------------------------------------------------------------------------------------------------------------------


@pairs(method=METHODS, approx=APPROXIMATIONS, bias=[True, False], loss=["gaussian", "gaussian mean"])
def test_linear_network_with_square_loss_is_the_hessian(method, approx, bias, loss):
    model, x = mlp((4, 3, 5, 2), bias=bias, activation=nn.Identity), noise(6, 4)
    y, (likelihood, value) = noise(6, 2, seed=1), LOSSES[loss]
    plain = twin(model)
    data = (plain, x, y, objective("mse", "mean" if "mean" in loss else "sum", 2))
    ggn = curvlinops_exact("ggn", *data)
    opt = still(model, "exact", method, approx=approx)
    measured_scale(opt, model, lambda: observed_step(opt, model, x, likelihood()))
    for name in ("0", "2", "4"):
        exact = hessian_block(plain, name, lambda forward: value(forward(x), y) / (1 if "mean" in loss else len(x)))
        assert_close(opt.dense_curvature(name), exact, 1e-9, f"Hessian of {name}")
        per_datum = ggn[name] if "mean" in loss else ggn[name] / len(x)
        assert_close(opt.dense_curvature(name), per_datum, 1e-9, f"Gauss-Newton of {name}")


class LinearTokens(nn.Module):
    """A linear network over positions, read out per position or as their mean."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.inner, self.outer, self.read = nn.Linear(3, 4), nn.Linear(4, 2), read

    def forward(self, x: Tensor) -> Tensor:
        z = self.outer(self.inner(x))
        return z.mean(1) if self.read == "mean" else z


class LinearConv(nn.Module):
    def __init__(self, read: str) -> None:
        super().__init__()
        self.inner, self.read = nn.Conv2d(2, 3, 2), read

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        return z.mean((2, 3)) if self.read == "mean" else z


@pytest.mark.parametrize(("approx", "read"), [("expand", "positions"), ("reduce", "mean")])
@pytest.mark.parametrize("kind", ["tokens", "conv"])
def test_weight_sharing_cases_that_are_the_hessian(kind, approx, read):
    """Expand with a loss term per position; reduce with positions averaged before the loss."""
    model = seeded_build(lambda: {"tokens": LinearTokens, "conv": LinearConv}[kind](read))
    x = noise(3, 5, 3) if kind == "tokens" else noise(3, 2, 3, 4)
    plain = twin(model)
    y = noise(*outputs_of(model, x).shape, seed=1)
    opt = factors_after(model, x, "gaussian", approx=approx)
    for name in [n for n in ("inner", "outer") if hasattr(plain, n)]:
        exact = hessian_block(plain, name, lambda forward: summed_square(forward(x), y) / len(x))
        assert_close(opt.dense_curvature(name), exact, 1e-9, name)


class Repeated(nn.Module):
    """One linear layer called three times per forward, with a loss term per call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x[:, s]) for s in range(3)], 1)


def test_several_calls_with_a_loss_term_each_are_the_hessian():
    model, x, y = seeded_build(Repeated), noise(4, 3, 3), noise(4, 3, 2, seed=1)
    exact = hessian_block(twin(model), "layer", lambda forward: summed_square(forward(x), y) / len(x))
    assert_close(factors_after(model, x, "gaussian").dense_curvature("layer"), exact, 1e-9)


@each(method=METHODS, loss=LOSSES.keys())
def test_one_datum_in_a_piecewise_linear_network_is_the_hessian(method, loss):
    model, (x, _) = mlp((4, 5, 6, 3), activation=nn.ReLU), vectors(1)
    y, (likelihood, value) = targets_for(loss, outputs_of(model, x)), LOSSES[loss]
    plain = twin(model)
    opt = still(model, "exact", method)
    measured_scale(opt, model, lambda: observed_step(opt, model, x, likelihood()))
    for name in ("0", "2", "4"):
        exact = hessian_block(plain, name, lambda forward: value(forward(x), y))
        assert_close(opt.dense_curvature(name), exact, 1e-9, name)


def test_one_datum_and_one_position_of_a_convolution_is_the_hessian():
    """A kernel as large as the image."""
    model = seeded_build(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 3))
    )
    x, y = images(1, size=(3, 3))
    plain = twin(model)
    opt = factors_after(model, x, "categorical")
    for name in ("0", "2", "4"):
        exact = hessian_block(plain, name, lambda forward: cross_entropy(forward(x), y))
        assert_close(opt.dense_curvature(name), exact, 1e-9, name)


# ---------------------------------------------------------------------------------------------------------------------
# Equal to curvlinops' type-2 factors
# ---------------------------------------------------------------------------------------------------------------------


@approximations
@pytest.mark.parametrize("kind", ["mlp", "strided conv", "padded conv", "pooled tokens"])
def test_cross_entropy_equals_curvlinops(kind, approx):
    if kind == "mlp":
        model, (x, y) = mlp((4, 5, 6, 3)), vectors()
    elif kind == "pooled tokens":
        model, (x, y) = seeded_build(lambda: Tokens(read="mean")), (noise(4, 5, 3), labels(4, 3))
    else:
        model, (x, y) = convnet(**({"stride": 2} if kind == "strided conv" else {"padding": 1})), images()
    theirs = curvlinops_blocks(twin(model), x, y, objective("ce", "mean", 3), approx, "type-2")
    opt = factors_after(model, x, "categorical", approx=approx)
    assert_factors({name: held_factors(opt, model, name) for name in theirs}, theirs)


def test_token_mean_cross_entropy_equals_curvlinops():
    """Positions that do not meet before the loss: every token is a datum, here and there."""
    model, x, y = seeded_build(Tokens), noise(4, 5, 3), torch.randint(3, (4, 5))
    theirs = curvlinops_blocks(twin(model), x, y, objective("ce", "mean", 3), "expand", "type-2")
    opt = factors_after(model, x, secondorder.Categorical(class_dim=1), loss_terms=5)
    assert_factors({name: held_factors(opt, model, name) for name in theirs}, theirs)


# ---------------------------------------------------------------------------------------------------------------------
# Else: equal to the definition
# ---------------------------------------------------------------------------------------------------------------------


def assert_definition(model, x, y, loss, likelihood, targets=None, approx="expand", tolerance=1e-9, **keywords):
    """K-FAC's factors and EK-FAC's scales of every Linear and Conv layer are those of the definition."""
    names = covered_names(model)
    rows = observed(model, names, x, y, loss)
    other = twin(model)
    opt = factors_after(model, x, likelihood, targets, approx=approx, **keywords)
    assert_factors(
        {name: held_factors(opt, model, name) for name in names},
        {name: found.factors(approx) for name, found in rows.items()},
        tolerance,
    )
    for name, found in rows.items():
        A, B = found.factors(approx)
        assert_close(opt.dense_curvature(name), kron(B, A), tolerance, f"dense block of {name}")
    assert_scales(other, rows, x, likelihood, targets, approx, tolerance, **keywords)


def assert_scales(model, rows, x, likelihood, targets=None, approx="expand", tolerance=1e-9, **keywords):
    """The scales in the basis that the optimizer holds; its basis is that of the first step's factors."""
    opt = still(model, "exact", EKFAC, approx=approx, **{"inv_update_steps": 1000, **keywords})
    measured_scale(opt, model, lambda: observed_step(opt, model, x, likelihood, targets))
    for name, found in rows.items():
        state = state_of(opt, model, name)
        A, B = found.factors(approx)
        for basis, factor in ((state["basis_a"], A), (state["basis_g"], B)):
            rotated = basis.mT @ factor @ basis
            off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
            assert float(off.abs().max()) <= 1e-9 * float(factor.abs().max()), f"basis of {name}"
        expected = found.scale(state["basis_a"], state["basis_g"])
        grouped = expected if expected.dim() == 3 else expected[None]
        expected = over_null_spaces(grouped, B, A).view_as(expected)
        assert_close(state["scale"], expected, tolerance, f"scale of {name}")
        trace = opt.dense_curvature(name).trace()
        assert_close(trace, found.block().trace(), tolerance, f"trace of {name}")


@each(approx=APPROXIMATIONS, loss=LOSSES.keys())
def test_mlp(loss, approx):
    model, (x, _) = mlp((4, 5, 6, 3)), vectors(5)
    y, (likelihood, value) = targets_for(loss, outputs_of(model, x)), LOSSES[loss]
    assert_definition(model, x, y, value, likelihood(), approx=approx)


@pairs(
    approx=APPROXIMATIONS,
    loss=["categorical", "gaussian mean"],
    conv={
        "strided": {"stride": 2, "padding": 1},
        "circular": {"dilation": 2, "padding": "same", "padding_mode": "circular"},
    },
)
def test_convolutions(loss, approx, conv):
    model, (x, _) = convnet(**conv), images(3)
    y, (likelihood, value) = targets_for(loss, outputs_of(model, x)), LOSSES[loss]
    assert_definition(model, x, y, value, likelihood(), approx=approx)


@approximations
def test_grouped_convolution(approx):
    model = seeded_build(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    )
    x, y = noise(3, 4, 6), labels(3, 6)
    assert_definition(model, x, y, cross_entropy, "categorical", approx=approx)


@each(approx=APPROXIMATIONS, freeze=["weight", "bias"])
def test_frozen_parts(approx, freeze):
    model, (x, y) = mlp((4, 5, 3)), vectors(4)
    getattr(model[0], freeze).requires_grad_(False)
    assert_definition(model, x, y, cross_entropy, "categorical", approx=approx)


@each(approx=APPROXIMATIONS, loss=["categorical", "bernoulli"])
def test_pooled_tokens(loss, approx):
    model, x = seeded_build(lambda: Tokens(read="mean")), noise(3, 4, 3)
    y, (likelihood, value) = targets_for(loss, outputs_of(model, x)), LOSSES[loss]
    assert_definition(model, x, y, value, likelihood(), approx=approx)


@approximations
def test_repeated_layer(approx):
    """Gradients of several uses are summed before they are squared."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    model, (x, y) = seeded_build(Twice), vectors(4)
    assert_definition(model, x, y, cross_entropy, "categorical", approx=approx)


@each(approx=APPROXIMATIONS, loss=["gaussian", "gaussian mean", "bernoulli", "bernoulli mean"])
def test_outputs_of_several_dimensions(loss, approx):
    """Every entry of an example's output is an output of the model; positions meet in the layers below."""
    model, x = seeded_build(Mixing), noise(3, 4, 3)
    y, (likelihood, value) = targets_for(loss, outputs_of(model, x)), LOSSES[loss]
    assert_definition(model, x, y, value, likelihood(), approx=approx)


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Per-token outputs ``[N, S, 3]`` of which each depends on all tokens of its example."""

    def __init__(self, mixes: bool = True) -> None:
        super().__init__()
        self.inner, self.outer, self.mixes = nn.Linear(3, 4), nn.Linear(4, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        if self.mixes:
            h = h + torch.cumsum(h, 1).square() / 4
        return self.outer(h)


def token_mean(kept: float):
    """Loss of one example where the objective is the mean over all tokens that count, ``kept`` per example."""
    return lambda f, y: F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100) / kept


def token_labels(*shape: int, ignored: bool) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(3, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.4, -100, y) if ignored else y


@pairs(approx=APPROXIMATIONS, ignored=[False, True], mixes=[False, True])
def test_tokens(approx, ignored, mixes):
    """[N, S, C] with the mean over all tokens that have a target: the objective of language models."""
    model, x = seeded_build(lambda: Mixing(mixes)), noise(3, 4, 3)
    y = token_labels(3, 4, ignored=ignored)
    kept = int((y != -100).sum()) / 3
    assert_definition(model, x, y, token_mean(kept), "categorical", y, approx=approx)


def test_tokens_of_a_summed_objective():
    """``loss_reduction="sum"``: an example's loss is the sum over its tokens, as with the empirical Fisher."""
    model, x = seeded_build(Mixing), noise(3, 4, 3)
    y = token_labels(3, 4, ignored=True)
    assert_definition(model, x, y, token_mean(1.0), "categorical", y, loss_reduction="sum")


@pairs(method=METHODS, cuts=[[4], [2, 2], [1, 3]], ignored=[False, True])
def test_tokens_in_micro_batches(method, cuts, ignored):
    """However the targets that count are spread over the micro-batches, the mean runs over all of them."""
    x, y = noise(4, 4, 3), token_labels(4, 4, ignored=False)
    if ignored:
        y[0, 1:], y[2, 0] = -100, -100
    model = seeded_build(Mixing)
    rows = observed(model, ["inner", "outer"], x, y, token_mean(int((y != -100).sum()) / 4))
    opt = still(model, "exact", method, inv_update_steps=1000)
    for _ in range(2):
        opt.zero_grad()
        for a, b in zip(x.split(cuts), y.split(cuts), strict=True):
            outputs = model(a)
            opt.observe(outputs, "categorical", b)
            unrelated(outputs).backward()
        opt.step()
    for name, found in rows.items():
        for mine, theirs in zip(held_factors(opt, model, name), found.factors(), strict=True):
            assert_close(mine, theirs, 1e-9, name)
        if method is EKFAC:
            state = state_of(opt, model, name)
            assert_close(state["scale"], found.scale(state["basis_a"], state["basis_g"]), 1e-9, name)


def test_an_example_without_a_single_target():
    model, x = seeded_build(Mixing), noise(3, 4, 3)
    y = token_labels(3, 4, ignored=False)
    y[1] = -100
    assert_definition(model, x, y, token_mean(8 / 3), "categorical", y)


def test_another_ignore_index():
    model, x = seeded_build(Mixing), noise(3, 4, 3)
    y = token_labels(3, 4, ignored=True)
    told = y.where(y != -100, torch.tensor(1))  # where 1 is ignored, tokens of class 1 are
    dropped = y.where(y != 1, torch.tensor(-100))
    kept = int((dropped != -100).sum()) / 3
    assert_definition(model, x, dropped, token_mean(kept), secondorder.Categorical(ignore_index=1), told)


@approximations
def test_classes_on_axis_one(approx):
    """Segmentation: logits [N, C, H, W], targets [N, H, W]."""
    model = seeded_build(lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 2, padding=1)))
    x = noise(2, 2, 3, 3)
    y = token_labels(2, 3, 3, ignored=True)
    kept = int((y != -100).sum()) / 2

    def loss(f: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(f, target, reduction="sum", ignore_index=-100) / kept

    assert_definition(model, x, y, loss, secondorder.Categorical(class_dim=1), y, approx=approx)


def test_ignored_examples_of_a_classifier():
    """[N, C] with some targets ignored: the mean runs over the others."""
    model, (x, y) = mlp((4, 5, 3)), vectors(5)
    y[[1, 3]] = -100

    def loss(f: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(f, target, reduction="sum", ignore_index=-100) * 5 / 3

    assert_definition(model, x, y, loss, "categorical", y)


class Flattened(nn.Module):
    """Logits ``[N·S, C]``, as loops over language models flatten them."""

    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x).flatten(0, 1)


@pytest.mark.parametrize("mixes", [False, True], ids=["separate", "mixed"])
@approximations
def test_logits_flattened_over_positions(approx, mixes):
    """They are the same model: terms of one example need columns of their own here too."""
    plain, x = seeded_build(lambda: Mixing(mixes)), noise(3, 4, 3)
    y = token_labels(3, 4, ignored=True)
    kept = int((y != -100).sum()) / 3
    rows = observed(plain, ["inner", "outer"], x, y, token_mean(kept))
    model = Flattened(plain)
    opt = still(model, "exact", approx=approx)
    observed_step(opt, model, x, "categorical", y.flatten())
    assert_observed(opt, model, rows, approx, prefix="tokens.")


@pytest.mark.parametrize("loss", ["categorical", "gaussian", "gaussian mean"])
def test_outputs_with_the_batch_on_their_second_axis(loss):
    """``batch_dim=1``: the outputs of such a model are understood, or refused, but never mistaken."""

    class PositionsFirst(nn.Module):
        def __init__(self, tokens: nn.Module) -> None:
            super().__init__()
            self.tokens = tokens

        def forward(self, x: Tensor) -> Tensor:
            return self.tokens(x.transpose(0, 1)).transpose(0, 1)

    plain, x = seeded_build(Mixing), noise(3, 4, 3)
    likelihood, value = LOSSES[loss]
    y = token_labels(3, 4, ignored=False) if loss == "categorical" else noise(3, 4, 3)
    rows = observed(plain, ["inner", "outer"], x, y, token_mean(4.0) if loss == "categorical" else value)
    for batch_first in (True, False):
        model = PositionsFirst(seeded_build(Mixing))
        opt = still(model, "exact", batch_dim=1)
        outputs = model(x.transpose(0, 1))
        try:
            opt.observe(outputs.transpose(0, 1) if batch_first else outputs, likelihood())
        except ValueError:
            assert not batch_first
            continue
        unrelated(outputs).backward()
        opt.step()
        assert_observed(opt, model, rows, prefix="tokens.")


class SequenceFirst(nn.Module):
    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.layer, self.flat = nn.Linear(3, 2, bias=False), flat

    def forward(self, x):
        f = self.layer(x)
        return f.flatten(0, 1) if self.flat else f


@pairs(method=METHODS, reduction=["mean", "sum"], shape=[(5, 3), (4, 4), (3, 5)])
def test_sequence_first_outputs(method, reduction, shape):
    """``J^T H J`` of every token, in a loop; an example's loss is the sum over its tokens, or their mean."""
    (S, N), x = shape, noise(*shape, 3)
    model = seeded_build(SequenceFirst)
    opt = still(model, "exact", method, batch_dim=1, loss_reduction=reduction)
    measured_scale(opt, model, lambda: observed_step(opt, model, x, "categorical"))
    p = (x @ model.layer.weight.detach().mT).softmax(-1)
    H = torch.diag_embed(p) - torch.einsum("snc,snd->sncd", p, p)
    datum = N * S if reduction == "mean" else N
    found = opt.dense_curvature("layer")
    if method is EKFAC:  # tokens of one example have vectors of their own, so there is no cross term
        exact = sum(torch.kron(H[s, n], torch.outer(x[s, n], x[s, n])) for s in range(S) for n in range(N)) / datum
        assert_close(found.trace(), exact.trace(), 1e-9)
        return
    A = torch.einsum("sni,snj->ij", x, x) / (S * N)
    assert_close(found, torch.kron(H.sum((0, 1)) / datum, A), 1e-9)


@both
def test_sequence_first_outputs_in_one_are_refused(method):
    """Nothing says which of their rows belong to one example."""
    for shape in ((5, 3), (4, 4), (8, 4), (3, 5)):
        model = seeded_build(lambda: SequenceFirst(flat=True))
        opt = method(model, fisher="exact", batch_dim=1)
        with pytest.raises(ValueError, match="which rows"):
            opt.observe(model(noise(*shape, 3)), "categorical")


@pytest.mark.parametrize("mixes", [False, True], ids=["separate", "mixed"])
def test_tokens_as_examples_of_the_scales(mixes):
    """EK-FAC with every token a datum: squares of each position's own term, none of their sum."""
    model, x = seeded_build(lambda: Mixing(mixes)), noise(3, 4, 3)
    rows = observed(model, ["inner", "outer"], x, token_labels(3, 4, ignored=False), token_mean(4.0))
    opt = still(model, "exact", EKFAC, token_is_example=True, inv_update_steps=1000)
    measured_scale(opt, model, lambda: observed_step(opt, model, x, "categorical"))
    for name, found in rows.items():
        state = state_of(opt, model, name)
        terms = [
            torch.einsum("ksi,sj->ij", (g[:, 0] @ state["basis_g"]).square(), (a[0] @ state["basis_a"]).square())
            for a, g in zip(found.a, found.g, strict=True)
        ]
        assert_close(state["scale"], sum(terms) / len(x), 1e-9, name)


def test_a_mask_keeps_padding_out():
    """With the mask and the ignored targets, padded sequences say what their tokens alone say."""
    keep = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    padded, alone, x = seeded_build(lambda: Mixing(False)), seeded_build(lambda: Mixing(False)), noise(3, 4, 3)
    one, other = still(padded, "exact"), still(alone, "exact")
    with one.mask(keep):
        observed_step(one, padded, x, "categorical", torch.where(keep, 1, -100))
    observed_step(other, alone, x[keep], "categorical")
    for name in ("inner", "outer"):
        for mine, theirs in zip(held_factors(one, padded, name), held_factors(other, alone, name), strict=True):
            assert_close(mine, theirs, 1e-9, name)


# ---------------------------------------------------------------------------------------------------------------------
# Other kinds of layers
# ---------------------------------------------------------------------------------------------------------------------


class Front(nn.Module):
    """A layer of some kind, then a tanh network to three logits."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x, x.cos()) if isinstance(self.layer, nn.Bilinear) else self.layer(x)
        h = torch.tanh(h[0] if isinstance(h, tuple) else h)
        spatial = isinstance(self.layer, (nn.modules.conv._ConvNd, nn.GroupNorm))
        return self.head(h.flatten(2).mean(2) if spatial else h.mean(1) if h.ndim == 3 else h)


class Recurrent(nn.Module):
    """A recurrent network whose steps can be seen, in the place of a layer."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.cells = kind(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Attention(nn.Module):
    def __init__(self, **keywords) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True, **keywords)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x.sin(), x.cos(), need_weights=False)[0]


INDICES = torch.tensor([[1, 2, 2], [3, 0, 1], [5, 1, 6]])
FRONTS = {
    "Conv1d": (lambda: nn.Conv1d(2, 4, 2, stride=2, padding=1, groups=2), noise(3, 2, 4)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 2, dilation=2), noise(3, 2, 3, 3, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 4, 3, stride=2, output_padding=1), noise(3, 2, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 4, 2, stride=2, padding=1), noise(3, 2, 3, 3)),
    "ConvTranspose2d of groups": (lambda: nn.ConvTranspose2d(2, 4, 3, groups=2, bias=False), noise(3, 2, 2, 2)),
    "Embedding": (lambda: nn.Embedding(7, 4), INDICES),
    "Embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=0), INDICES),
    "EmbeddingBag sum": (lambda: nn.EmbeddingBag(7, 4, mode="sum"), INDICES),
    "EmbeddingBag mean": (lambda: nn.EmbeddingBag(7, 4, mode="mean"), INDICES),
    "Bilinear": (lambda: nn.Bilinear(3, 3, 4), noise(3, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(4), noise(3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), noise(3, 5, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), noise(3, 4, 2, 3)),
    "RNN": (lambda: Recurrent(nn.RNN), noise(3, 4, 3)),
    "GRU": (lambda: Recurrent(nn.GRU), noise(3, 4, 3)),
    "LSTM": (lambda: Recurrent(nn.LSTM), noise(3, 4, 3)),
    "MultiheadAttention": (Attention, noise(3, 4, 4)),
    "MultiheadAttention without bias": (lambda: Attention(bias=False), noise(3, 4, 4)),
}


def front(kind: str) -> tuple[nn.Module, Tensor]:
    build, x = FRONTS[kind]
    return secondorder.nn.expose(seeded_build(lambda: Front(build(), 4))), x


def assert_trace(method: type, kind: str, **keywords) -> None:
    """The blocks of the first layer have the trace of Σ_n Σ_v ∇⟨f, v⟩∇⟨f, v⟩ᵀ / N."""
    model, x = front(kind)
    parts = [name for name, _ in model.named_parameters() if name.startswith("layer.")]
    gradients = parameter_gradients(model, parts, x, labels(3, 3), cross_entropy)
    trace = sum(g.square().sum() for g in gradients) / len(x)
    opt = still(model, "exact", method, **keywords)
    measured_scale(opt, model, lambda: observed_step(opt, model, x, "categorical"))
    blocks = [opt.dense_curvature(name) for name in opt.blocks if name.startswith("layer")]
    assert_close(sum(block.trace() for block in blocks), trace, 1e-9, kind)


@pytest.mark.parametrize("kind", FRONTS)
def test_ekfac_keeps_the_trace_of_every_layer(kind):
    assert_trace(EKFAC, kind)


@pairs(method=METHODS, norm_curvature=["unit", "diagonal"], kind=["LayerNorm", "RMSNorm", "GroupNorm"])
def test_blocks_of_norms_keep_it_with_any_method(method, kind, norm_curvature):
    assert_trace(method, kind, norm_curvature=norm_curvature)


@each(kind=["Embedding", "Conv1d", "ConvTranspose2d", "Bilinear", "LSTM", "MultiheadAttention"], limit=[2, 4])
def test_diagonal_factors_keep_it_too(kind, limit):
    """Beyond ``max_factor_dim`` a side has no basis, and the scales are measured all the same."""
    assert_trace(EKFAC, kind, max_factor_dim=limit)


def test_both_factors_of_an_embedding():
    """A counts the indices, B sums over positions; padding enters neither."""
    model = seeded_build(lambda: Front(nn.Embedding(5, 4, padding_idx=0), 4))
    x = torch.tensor([[1, 2, 2], [3, 0, 1]])
    taps: list[Tensor] = []
    plain = twin(model)
    plain.layer.register_forward_hook(lambda module, args, output: taps.append(output))
    B = torch.zeros(4, 4, dtype=torch.float64)
    for n in range(2):
        taps.clear()
        outputs = plain(x[n : n + 1])
        p = outputs.detach().softmax(1)[0]
        for c in range(3):
            e = torch.eye(3, dtype=torch.float64)[c]
            (g,) = torch.autograd.grad(outputs, taps, (p[c].sqrt() * (e - p))[None], retain_graph=True)
            real = g[0][x[n] != 0]
            B += real.T @ real / 2
    opt = factors_after(model, x, "categorical")
    state = state_of(opt, model, "layer")
    assert_close(state["factor_g"], B, 1e-9)
    counted = torch.tensor([0.0, 2, 2, 1, 0], dtype=torch.float64)
    assert state["factor_a"].shape == (5,)
    assert_close(state["factor_a"] / state["factor_a"].sum(), counted / 5, 1e-12)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_unit_blocks_of_a_norm_layer(bias):
    model, x = seeded_build(lambda: Front(nn.LayerNorm(4, bias=bias), 4)), noise(3, 5, 4)
    names = ["layer.weight", "layer.bias"] if bias else ["layer.weight"]
    found = torch.cat(parameter_gradients(model, names, x, labels(3, 3), cross_entropy))  # [N·K, (2·)4]
    units = found.reshape(len(found), -1, 4)  # [N·K, k, C]
    expected = torch.block_diag(*(u.T @ u / len(x) for u in units.unbind(2)))
    assert_close(factors_after(model, x, "categorical").dense_curvature("layer"), expected, 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# A likelihood of one's own
# ---------------------------------------------------------------------------------------------------------------------


class Poisson(secondorder.Likelihood):
    """Counts of rate exp(f): ℓ = exp(f) − y f, of which the Hessian is diag(exp(f))."""

    def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        rates = outputs.exp()
        return rates - torch.poisson(rates, generator=generator)

    def columns(self, outputs: Tensor) -> int:
        return outputs[0].numel()

    def column(self, outputs: Tensor, targets: Tensor | None, index: int) -> Tensor:
        chosen = torch.zeros_like(outputs)
        chosen.flatten(1)[:, index] = (outputs.flatten(1)[:, index] / 2).exp()
        return chosen


def poisson(f: Tensor, y: Tensor) -> Tensor:
    return F.poisson_nll_loss(f, y, log_input=True, reduction="sum")


@approximations
def test_a_likelihood_of_one_s_own(approx):
    model, x = mlp((4, 5, 3)), vectors(5)[0]
    assert_definition(model, x, noise(5, 3).sigmoid(), poisson, Poisson(), approx=approx)


def test_a_likelihood_that_can_only_sample():
    class OnlySamples(secondorder.Likelihood):
        def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
            return torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)

    x = vectors(5)[0]
    model = mlp((4, 5, 3))
    observed_step(still(model, "mc"), model, x, OnlySamples())
    for fisher in ("exact", "curvature_prop"):
        model = mlp((4, 5, 3))
        with pytest.raises(NotImplementedError, match="OnlySamples"):
            still(model, fisher).observe(model(x), OnlySamples())


# ---------------------------------------------------------------------------------------------------------------------
# What the exact Fisher does not depend on
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{"loss_reduction": "sum"}, {"loss_reduction": "mean"}])
def test_the_objective_s_reduction_is_of_no_concern(keywords):
    """Vectors of the likelihood are of unit scale, whatever the objective's."""
    model, (x, y) = mlp((4, 5, 3)), vectors(4)
    assert_definition(model, x, y, cross_entropy, "categorical", **keywords)


@both
def test_the_direction_solves_with_the_observed_block(method):
    model, (x, y) = mlp((4, 5, 3)), vectors(5)
    opt = still(model, "exact", method, damping=0.1)
    if method is EKFAC:
        observed_step(opt, model, x, "categorical")
    for group in opt.param_groups:
        group["lr"] = 1.0
    before = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    observed_step(opt, model, x, "categorical", objective=lambda f: F.cross_entropy(f, y))
    gradient = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1)
    step = torch.cat([before[0] - model[0].weight, (before[1] - model[0].bias)[:, None]], 1).detach()
    damped = opt.dense_curvature("0") + 0.1 * torch.eye(gradient.numel(), dtype=torch.float64)
    assert_close(step, torch.linalg.solve(damped, gradient.reshape(-1)).view_as(step), 1e-9)


def test_the_model_s_distribution_decides_not_the_labels():
    """Observed with any targets, the same bits."""
    held = []
    for seed in (0, 1):
        model = mlp((4, 5, 3))
        x, y = vectors(4, seed=0)[0], labels(4, 3, seed)
        opt = still(model, "exact")
        observed_step(opt, model, x, "categorical", y, objective=lambda f, y=y: F.cross_entropy(f, y))
        held.append(held_factors(opt, model, "0"))
    assert torch.equal(held[0][0], held[1][0])
    assert torch.equal(held[0][1], held[1][1])


def test_kfac_and_ekfac_hold_the_same_factors():
    one, other = (convnet(padding=1) for _ in range(2))
    x, _ = images(3)
    kfac, ekfac = still(one, "exact", KFAC), still(other, "exact", EKFAC)
    observed_step(kfac, one, x, "categorical")
    observed_step(ekfac, other, x, "categorical")
    for name in covered_names(one):
        for mine, theirs in zip(held_factors(kfac, one, name), held_factors(ekfac, other, name), strict=True):
            assert_close(theirs, mine, 1e-12, name)


def test_every_fisher_of_a_model_without_weight_sharing_has_the_same_input_factor():
    x = images(3)[0]
    held = {}
    for fisher in ("empirical", "mc", "exact", "curvature_prop", "forward_only"):
        model = seeded_build(ConvNet)
        opt = still(model, fisher)
        observed_step(opt, model, x, "categorical")
        held[fisher] = [held_factors(opt, model, name)[0] for name in covered_names(model)]
    for fisher, factors in held.items():
        for mine, theirs in zip(factors, held["empirical"], strict=True):
            assert_close(mine, theirs, 1e-12, fisher)
