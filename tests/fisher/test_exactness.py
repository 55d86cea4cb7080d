"""Exactness by layer, Fisher and approximation.

If a block is that of the Hessian in theory, it must be. Otherwise it must be that of its definition, computed one
example and one column at a time. The objective of these steps is never the likelihood's own, because nothing of it may
enter an observed statistic.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder import EKFAC, KFAC, BatchOptions
from tests.support.grid import each, pairs
from tests.support.kfac import all_factors, assert_close, assert_factors, held_factors, labels, layer_state, noise, twin
from tests.support.layer_cases import CASES, ONE_OF_EACH
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import NORMED, TwoHeads, applied, mixing
from tests.support.oracles.curvlinops import curvlinops_blocks, gauss_newton_blocks
from tests.support.oracles.ekfac import over_null_spaces
from tests.support.oracles.fisher import (
    LOSSES,
    METHODS,
    Loss,
    assert_observed,
    cross_entropy,
    hessian_block,
    mean_square,
    measured_scale,
    observed,
    observed_step,
    parameter_gradients,
    still,
    unrelated,
)
from tests.support.oracles.kfac import covered_names, kron, objective

APPROXIMATIONS = ["expand", "reduce"]


# ---------------------------------------------------------------- Targets and steps
def targets_for(loss: str, outputs: Tensor) -> Tensor:
    """Targets of the right kind for the loss; second derivatives do not depend on them."""
    if "ategorical" in loss:
        return labels(len(outputs), outputs.shape[1])
    return noise(*outputs.shape).sigmoid()


def factors_after(model: nn.Module, x: Tensor, likelihood, targets=None, **keywords):
    """One observed step of K-FAC with the exact Fisher."""
    opt = still(model, "exact", **keywords)
    observed_step(opt, model, x, likelihood, targets)
    return opt


@pytest.mark.parametrize("loss", LOSSES)
def test_the_oracle_s_block_is_the_hessian_of_a_piecewise_linear_network(loss):
    model, (x, _) = mlp((4, 5, 3), activation=nn.ReLU), vectors()
    y = targets_for(loss, model(x).detach())
    value = LOSSES[loss][1]
    for name, rows in observed(model, ["0", "2"], x, y, value).items():
        exact = hessian_block(
            model,
            name,
            lambda forward: sum(value(forward(a[None]), b[None]) for a, b in zip(x, y, strict=True)) / len(x),
        )
        assert_close(rows.block(), exact, 1e-10, name)


# ---------------------------------------------------------------- Equal to the Hessian
@pairs(method=METHODS, approx=APPROXIMATIONS, bias=[True, False], loss=["gaussian", "gaussian mean"])
def test_linear_network_with_square_loss_is_the_hessian(method, approx, bias, loss):
    model, x = mlp((4, 3, 5, 2), bias=bias, activation=nn.Identity), noise(6, 4)
    y, (likelihood, value) = noise(6, 2, seed=1), LOSSES[loss]
    plain = twin(model)
    ggn = gauss_newton_blocks(plain, x, y, objective("mse", "mean" if "mean" in loss else "sum", 2))
    opt = still(model, "exact", method, approx=approx)
    measured_scale(opt, model, lambda: observed_step(opt, model, x, likelihood))
    for name in ("0", "2", "4"):
        exact = hessian_block(plain, name, lambda forward: value(forward(x), y) / (1 if "mean" in loss else len(x)))
        assert_close(opt.dense_curvature(name), exact, 1e-9, f"Hessian of {name}")
        per_datum = ggn[name] if "mean" in loss else ggn[name] / len(x)
        assert_close(opt.dense_curvature(name), per_datum, 1e-9, f"Gauss-Newton of {name}")


# ---------------------------------------------------------------- Equal to curvlinops' type-2 factors
@each(
    lambda kind, approx: kind != "tokens" or approx == "expand",
    approx=APPROXIMATIONS,
    kind=["mlp", "strided conv", "padded conv", "pooled tokens", "tokens"],
)
def test_cross_entropy_equals_curvlinops(kind, approx):
    """Positions of the tokens do not interact before the loss, so every token is an example in both libraries."""
    likelihood, keywords = "categorical", {}
    if kind == "mlp":
        model, (x, y) = mlp((4, 5, 6, 3)), vectors()
    elif kind == "pooled tokens":
        model, (x, y) = seeded_build(lambda: Tokens(read="mean")), (noise(4, 5, 3), labels(4, 3))
    elif kind == "tokens":
        model, x, y = seeded_build(Tokens), noise(4, 5, 3), torch.randint(3, (4, 5))
        likelihood, keywords = secondorder.Categorical(class_dim=1), {"loss_terms": 5}
    else:
        model, (x, y) = convnet(**({"stride": 2} if kind == "strided conv" else {"padding": 1})), images()
    theirs = curvlinops_blocks(twin(model), x, y, objective("ce", "mean", 3), approx, "type-2")
    opt = factors_after(model, x, likelihood, approx=approx, **keywords)
    assert_factors({name: held_factors(opt, model, name) for name in theirs}, theirs)


# ---------------------------------------------------------------- Equal to the definition
class Poisson(secondorder.Likelihood):
    """Counts of rate exp(f): ℓ = exp(f) − y f, whose Hessian is diag(exp(f))."""

    def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        rates = outputs.exp()
        return rates - torch.poisson(rates, generator=generator)

    def columns(self, outputs: Tensor) -> int:
        return outputs[0].numel()

    def column(self, outputs: Tensor, targets: Tensor | None, index: int) -> Tensor:
        chosen = torch.zeros_like(outputs)
        chosen.flatten(1)[:, index] = (outputs.flatten(1)[:, index] / 2).exp()
        return chosen


def of_two_heads(f: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the four examples of five whose class is not ignored, and a mean over outputs."""
    return cross_entropy(f[0], y[0]) * 5 / 4 + mean_square(f[1], y[1])


def poisson(f: Tensor, y: Tensor) -> Tensor:
    return F.poisson_nll_loss(f, y, log_input=True, reduction="sum")


def token_labels(*shape: int, ignored: bool) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(3, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.4, -100, y) if ignored else y


def token_mean(kept: float, class_dim: int = -1) -> Loss:
    """Loss of one example if the objective is the mean over all targets that count, ``kept`` per example."""

    def loss(f: Tensor, y: Tensor) -> Tensor:
        f = f.movedim(class_dim, -1)
        return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100) / kept

    return loss


@dataclass
class Case:
    """A model with a batch, the loss of one example, and the arguments of ``observe``."""

    model: nn.Module
    x: Tensor
    y: Any
    loss: Loss
    likelihood: Any
    given: Any = None
    keywords: dict[str, Any] = field(default_factory=dict)


def known(loss: str, model: nn.Module, x: Tensor, **keywords: Any) -> Case:
    """A likelihood of ``LOSSES``, which needs no targets."""
    likelihood, value = LOSSES[loss]
    return Case(model, x, targets_for(loss, model(x).detach()), value, likelihood, keywords=keywords)


def classified(model: nn.Module, x: Tensor, y: Tensor, likelihood: Any = "categorical", class_dim: int = -1) -> Case:
    """The mean over targets that are not −100, which is the objective of language models and of segmentation."""
    return Case(model, x, y, token_mean(int((y != -100).sum()) / len(x), class_dim), likelihood, y)


def frozen(part: str) -> nn.Module:
    model = mlp((4, 5, 3))
    getattr(model[0], part).requires_grad_(False)
    return model


def repeated() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 3))


def of_groups() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten())


def segmenting() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 2, padding=1))


X, TOKENS, PICTURES = noise(5, 4), noise(3, 4, 3), images(3)[0]
SOME, ALL = token_labels(3, 4, ignored=True), token_labels(3, 4, ignored=False)
#: Targets if class 1 is the one that is ignored.
ONES = torch.where(SOME == -100, 1, SOME)
#: Classes of five examples, of which one is ignored.
FOUR = torch.tensor([0, 2, -100, 1, 1])
BY_ENTRY = ("gaussian", "gaussian mean", "bernoulli", "bernoulli mean")
CIRCULAR = {"dilation": 2, "padding": "same", "padding_mode": "circular"}

DEFINITIONS: dict[str, Callable[[], Case]] = {
    **{f"mlp {loss}": lambda loss=loss: known(loss, mlp((4, 5, 6, 3)), X) for loss in LOSSES},
    "strided": lambda: known("categorical", convnet(stride=2, padding=1), PICTURES),
    "padded": lambda: known("categorical", convnet(padding=1), PICTURES),
    "strided, mean": lambda: known("gaussian mean", convnet(stride=2, padding=1), PICTURES),
    "circular": lambda: known("categorical", convnet(**CIRCULAR), PICTURES),
    "groups": lambda: known("categorical", seeded_build(of_groups), noise(3, 4, 6)),
    "frozen weight": lambda: known("categorical", frozen("weight"), X),
    "frozen bias": lambda: known("categorical", frozen("bias"), X),
    "a layer that is the model": lambda: known("categorical", seeded_build(lambda: nn.Linear(4, 3)), X),
    "pooled tokens": lambda: known("bernoulli", seeded_build(lambda: Tokens(read="mean")), TOKENS),
    "classes of pooled tokens": lambda: known("categorical", seeded_build(lambda: Tokens(read="mean")), TOKENS),
    "a layer called twice": lambda: known("categorical", seeded_build(repeated), X),
    # every entry of an example's output is an output of the model; positions interact in the layers before it
    **{f"entries {loss}": lambda loss=loss: known(loss, mixing(), TOKENS) for loss in BY_ENTRY},
    "tokens": lambda: classified(mixing(), TOKENS, ALL),
    "tokens, some ignored": lambda: classified(mixing(), TOKENS, SOME),
    "tokens, a mean over positions": lambda: Case(
        seeded_build(Tokens), noise(4, 5, 3), token_labels(4, 5, ignored=False), token_mean(5.0, 1),
        secondorder.Categorical(class_dim=1), keywords={"loss_terms": 5},
    ),
    "tokens that do not interact": lambda: classified(mixing(False), TOKENS, SOME),
    "tokens, summed": lambda: Case(
        mixing(), TOKENS, SOME, token_mean(1.0), "categorical", SOME, {"loss_reduction": "sum"}
    ),
    "an example without a target": lambda: classified(
        mixing(), TOKENS, torch.where(torch.arange(3)[:, None] == 1, -100, ALL)
    ),
    "another ignored class": lambda: replace(
        classified(mixing(), TOKENS, torch.where(ONES == 1, -100, ONES), secondorder.Categorical(ignore_index=1)),
        given=ONES,
    ),
    "classes on axis one": lambda: classified(
        seeded_build(segmenting), noise(2, 2, 3, 3), token_labels(2, 3, 3, ignored=True),
        secondorder.Categorical(class_dim=1), 1,
    ),
    "ignored examples": lambda: classified(mlp((4, 5, 3)), X, torch.tensor([0, -100, 2, -100, 1])),
    "a custom likelihood": lambda: Case(mlp((4, 5, 3)), X, noise(5, 3).sigmoid(), poisson, Poisson()),
    "heads": lambda: Case(
        seeded_build(TwoHeads), X, (FOUR, noise(5, 2)), of_two_heads,
        ("categorical", secondorder.Gaussian(mean=True)), (FOUR, None),
    ),
    # whose gradient is zero and does not affect the other head
    "a head without a target": lambda: Case(
        seeded_build(TwoHeads), X, (FOUR, FOUR), lambda f, y: cross_entropy(f[0], y[0]) * 5 / 4,
        ("categorical", "categorical"), (FOUR, torch.full((5,), -100)),
    ),
    "the objective is a sum": lambda: known("categorical", mlp((4, 5, 3)), X, loss_reduction="sum"),
    "the objective is a mean": lambda: known("categorical", mlp((4, 5, 3)), X, loss_reduction="mean"),
}  # fmt: skip


@each(name=DEFINITIONS.keys(), approx=APPROXIMATIONS)
def test_factors_and_scales_are_those_of_the_definition(name, approx):
    """A and B of K-FAC, the dense block, and EK-FAC's scales in its basis are compared."""
    case, tolerance = DEFINITIONS[name](), 1e-9
    model, names = case.model, covered_names(case.model)
    rows = observed(model, names, case.x, case.y, case.loss)
    other = twin(model)
    opt = factors_after(model, case.x, case.likelihood, case.given, approx=approx, **case.keywords)
    assert_observed(opt, model, rows, approx)
    for layer, found in rows.items():
        A, B = found.factors(approx)
        assert_close(opt.dense_curvature(layer), kron(B, A), tolerance, f"dense block of {layer}")
    opt = still(other, "exact", EKFAC, approx=approx, inv_update_steps=1000, **case.keywords)
    measured_scale(opt, other, lambda: observed_step(opt, other, case.x, case.likelihood, case.given))
    for layer, found in rows.items():
        state = layer_state(opt, other, layer)
        A, B = found.factors(approx)
        for basis, factor in ((state["basis_a"], A), (state["basis_g"], B)):
            rotated = basis.mT @ factor @ basis
            off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
            assert float(off.abs().max()) <= 1e-9 * float(factor.abs().max()), f"basis of {layer}"
        expected = found.scale(state["basis_a"], state["basis_g"])
        grouped = expected if expected.dim() == 3 else expected[None]
        expected = over_null_spaces(grouped, B, A).view_as(expected)
        assert_close(state["scale"], expected, tolerance, f"scale of {layer}")
        assert_close(opt.dense_curvature(layer).trace(), found.block().trace(), tolerance, f"trace of {layer}")


@pairs(method=METHODS, cuts=[[4], [2, 2], [1, 3]], ignored=[False, True], approx=APPROXIMATIONS)
def test_tokens_in_micro_batches(method, cuts, ignored, approx):
    """The mean is over all targets that count, however they are distributed over the micro-batches."""
    x, y = noise(4, 4, 3), token_labels(4, 4, ignored=False)
    if ignored:
        y[0, 1:], y[2, 0] = -100, -100
    model = mixing()
    rows = observed(model, ["inner", "outer"], x, y, token_mean(int((y != -100).sum()) / 4))
    opt = still(model, "exact", method, inv_update_steps=1000, approx=approx)
    for _ in range(2):
        opt.zero_grad()
        for a, b in zip(x.split(cuts), y.split(cuts), strict=True):
            outputs = model(a)
            opt.observe(outputs, "categorical", b)
            unrelated(outputs).backward()
        opt.step()
    assert_observed(opt, model, rows, approx)
    assert_scales(opt, model, rows)
    assert all(float(layer_state(opt, model, name)["factor_weight"]) == 4 for name in rows)


def assert_scales(opt: Any, model: nn.Module, rows: dict[str, Any], prefix: str = "") -> None:
    """The scales of EK-FAC, if it is that, agree with the definition in the optimizer's bases."""
    for name, found in rows.items() if isinstance(opt, EKFAC) else ():
        state = layer_state(opt, model, prefix + name)
        assert_close(state["scale"], found.scale(state["basis_a"], state["basis_g"]), 1e-9, name)


@each(mixes=[False, True], approx=APPROXIMATIONS)
def test_logits_flattened_over_positions(approx, mixes):
    """The model is the same, so terms of one example need separate columns here, too."""
    plain = mixing(mixes)
    rows = observed(plain, ["inner", "outer"], TOKENS, SOME, token_mean(int((SOME != -100).sum()) / 3))
    model = nn.Sequential(plain, nn.Flatten(0, 1))
    opt = still(model, "exact", approx=approx)
    observed_step(opt, model, TOKENS, "categorical", SOME.flatten())
    assert_observed(opt, model, rows, approx, prefix="0.")


@each(
    lambda batch_first, shape, **_: not batch_first or shape[0] != shape[1],
    method=METHODS,
    loss=["categorical", "gaussian", "gaussian mean"],
    reduction=["mean", "sum"],
    batch_first=[False, True],
    shape=[(3, 4), (4, 4), (3, 5)],
)
def test_outputs_with_the_batch_on_their_second_axis(method, loss, reduction, batch_first, shape):
    """With ``batch_dim=1``, an output is interpreted correctly in both layouts, or its own layout is refused."""
    likelihood, value = LOSSES[loss]
    x, y = noise(*shape, 3), noise(*shape, 3)
    if loss == "categorical":
        y, value = token_labels(*shape, ignored=False), token_mean(shape[1] if reduction == "mean" else 1)
    rows = observed(mixing(), ["inner", "outer"], x, y, value)
    model = applied(mixing(), lambda tokens, x: tokens(x.transpose(0, 1)).transpose(0, 1))
    opt = still(model, "exact", method, batch_dim=1, loss_reduction=reduction, inv_update_steps=1000)
    for _ in range(2):
        opt.zero_grad()
        outputs = model(x.transpose(0, 1))
        try:
            opt.observe(outputs.transpose(0, 1) if batch_first else outputs, likelihood)
        except ValueError:
            assert not batch_first
            assert loss != "categorical"
            return
        unrelated(outputs).backward()
        opt.step()
    assert_observed(opt, model, rows, prefix="model.")
    assert_scales(opt, model, rows, prefix="model.")


def test_flattened_sequence_first_outputs_are_refused():
    """It is unknown which rows belong to one example."""
    for shape in ((5, 3), (4, 4), (8, 4), (3, 5)):
        model = nn.Sequential(nn.Linear(3, 2), nn.Flatten(0, 1)).double()
        opt = KFAC(model, fisher="exact", batch=BatchOptions(dim=1))
        with pytest.raises(ValueError, match="which rows"):
            opt.observe(model(noise(*shape, 3)), "categorical")


@pytest.mark.parametrize("mixes", [False, True], ids=["separate", "mixed"])
def test_tokens_as_examples_of_the_scales(mixes):
    """In EK-FAC every token is then an example, so each position's own term is squared, and not their sum."""
    model = mixing(mixes)
    rows = observed(model, ["inner", "outer"], TOKENS, ALL, token_mean(4.0))
    opt = still(model, "exact", EKFAC, token_is_example=True, inv_update_steps=1000)
    measured_scale(opt, model, lambda: observed_step(opt, model, TOKENS, "categorical"))
    for name, found in rows.items():
        state = layer_state(opt, model, name)
        terms = [
            torch.einsum("ksi,sj->ij", (g[:, 0] @ state["basis_g"]).square(), (a[0] @ state["basis_a"]).square())
            for a, g in zip(found.a, found.g, strict=True)
        ]
        assert_close(state["scale"], sum(terms) / len(TOKENS), 1e-9, name)


def test_a_mask_keeps_padding_out():
    """With the mask and ignored targets, padded sequences have the statistics of their tokens alone."""
    keep = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    padded, alone = mixing(False), mixing(False)
    one, other = still(padded, "exact"), still(alone, "exact")
    with one.mask(keep):
        observed_step(one, padded, TOKENS, "categorical", torch.where(keep, 1, -100))
    observed_step(other, alone, TOKENS[keep], "categorical")
    assert_factors(all_factors(one, padded), all_factors(other, alone))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_kind_of_layer(name):
    """Columns of a Gaussian's Hessian are √2 e_k. EK-FAC keeps the trace, even if a side is diagonal."""
    case = CASES[name]
    by_column = [replace(case, loss=lambda f, y, k=k: 2**0.5 * f[:, k].sum()) for k in range(3)]
    pairs_of = [column.factors(case.model()) for column in by_column]
    expected = {block: (A, sum(found[block][1] for found in pairs_of)) for block, (A, _) in pairs_of[0].items()}
    squares = dict.fromkeys(expected, 0.0)
    for column in by_column:
        for block, groups in column.rows(case.model()).items():
            squares[block] += sum(float(rows.gradient(n).square().sum()) for rows in groups for n in range(len(rows.a)))
    inputs, _ = case.data()
    scales = [(EKFAC, {}), (EKFAC, {"max_factor_dim": 3})]
    for method, keywords in [(KFAC, {}), *(() if "packed" in name else scales)]:  # packed rows belong to no example
        model = case.ready(case.model())
        opt = still(model, "exact", method, **case.keywords, **keywords)
        for _ in range(2):
            opt.zero_grad()
            outputs = model(*inputs)
            opt.observe(outputs, "gaussian")
            unrelated(outputs).backward()
            opt.step()
        if method is KFAC:
            case.check(opt, expected)
            continue
        for block, total in squares.items():
            assert float(opt.dense_curvature(block).trace()) == pytest.approx(total / case.number, rel=1e-9), block


@pairs(method=METHODS, norm_curvature=["unit", "diagonal"], kind=NORMED.keys())
def test_every_kind_of_norm(method, norm_curvature, kind):
    """Each unit of scale and shift has a block, or its diagonal."""
    build, inputs = NORMED[kind]
    model, x = seeded_build(build), inputs()
    names = [name for name, _ in model.named_parameters() if name.startswith("norm.")]
    found = torch.cat(parameter_gradients(model, names, x, labels(6, 3), cross_entropy))  # [N·K, (2·)4]
    units = found.reshape(len(found), -1, 4)  # [N·K, k, C]
    opt = still(model, "exact", method, norm_curvature=norm_curvature)
    measured_scale(opt, model, lambda: observed_step(opt, model, x, "categorical"))
    block = torch.block_diag(*(u.T @ u / len(x) for u in units.unbind(2)))
    expected = block if norm_curvature == "unit" else block.diagonal().diag()
    assert_close(opt.dense_curvature("norm"), expected, 1e-9)


def test_a_likelihood_that_can_only_sample_supports_only_mc():
    class OnlySamples(secondorder.Likelihood):
        def sample(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
            return torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)

    model = mlp((4, 5, 3))
    observed_step(still(model, "mc"), model, X, OnlySamples())
    for fisher in ("exact", "curvature_prop"):
        model = mlp((4, 5, 3))
        with pytest.raises(NotImplementedError, match="OnlySamples"):
            still(model, fisher).observe(model(X), OnlySamples())
