"""Scales and dense blocks against curvlinops.

Eigenvectors agree up to sign and up to rotation in degenerate spaces, so scales are compared in *their* basis, which is
copied to the optimizer's state between two steps, and their scales are averaged over null spaces, as ours are. Dense
blocks are compared if the eigenvalues of each factor are simple (with one null direction at most).
"""

import warnings
from functools import partial

import curvlinops
from torch import nn

from tests.support.ekfac import held_scales, plain_ekfac, standing, state_of
from tests.support.grid import each
from tests.support.kfac import assert_close, noise, twin
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.ekfac import layer_gradients, over_null_spaces, scales
from tests.support.oracles.kfac import covered_names, objective
from tests.support.oracles.trajectory import dense_blocks, operator


def corrected(model, x, y, loss, approx, fisher):
    """Their operator with the eigenvalue correction."""
    op = operator(model, x, y, loss, approx, fisher, kind=curvlinops.EKFACLinearOperator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op.compute_eigenvalue_correction()
    return op


def corrected_eigenvalues(op, layer):
    """``[n_g, n_a]``; without a bias they hold one matrix per parameter."""
    found = op._corrected_eigenvalues[layer]
    return next(iter(found.values())) if isinstance(found, dict) else found


def problem(build, data, kind):
    x, y = data(24)
    return build(), x, y if kind == "ce" else noise(24, 3, seed=1)


MODELS = {
    "linear": partial(problem, lambda: mlp((4, 5, 3)), vectors),
    "conv": partial(problem, lambda: convnet(stride=2), images),
    # sums over overlapping patches make A singular several times over under reduce
    "padded conv": partial(problem, lambda: convnet(stride=2, padding=1), images),
}
LIKELIHOODS = {"ce": "categorical", "mse": "gaussian"}
# (loss, reduction, Fisher); their Gaussian Hessian of a mean over C outputs is 2/C, so exact is compared with the sum
CASES = {
    "ce": ("ce", "mean", "empirical"),
    "summed ce": ("ce", "sum", "empirical"),
    "mse": ("mse", "mean", "empirical"),
    "summed mse": ("mse", "sum", "empirical"),
    "exact ce": ("ce", "mean", "type-2"),
    "exact summed ce": ("ce", "sum", "type-2"),
    "exact summed mse": ("mse", "sum", "type-2"),
}


def step(opt, model, x, y, loss, fisher):
    opt.zero_grad()
    outputs = model(x)
    if fisher == "type-2":
        kind = "ce" if isinstance(loss.module, nn.CrossEntropyLoss) else "mse"
        opt.observe(outputs, LIKELIHOODS[kind])
    loss(outputs, y).backward()
    opt.step()


def ours(model, x, y, loss, approx, fisher, bases=None):
    """The optimizer after a step for the basis and one that measures in it, or in the given ``bases``."""
    terms = loss.loss_terms if fisher == "empirical" else 1
    fishers = {"empirical": "empirical", "type-2": "exact"}
    keywords = {"approx": approx, "fisher": fishers[fisher], "loss_reduction": loss.loss_reduction}
    opt = plain_ekfac(model, loss_terms=terms, **keywords)
    with standing(opt):
        step(opt, model, x, y, loss, fisher)
        for name, (Q_B, Q_A) in (bases or {}).items():
            state = state_of(opt, model.get_submodule(name))
            state["basis_g"].copy_(Q_B)
            state["basis_a"].copy_(Q_A)
        step(opt, model, x, y, loss, fisher)
    return opt


@each(kind=list(MODELS), case=CASES, approx=["expand", "reduce"])
def test_scales_in_their_basis_and_dense_blocks(kind, case, approx):
    name, reduction, fisher = case
    model, x, y = MODELS[kind](name)
    loss, plain = objective(name, reduction, 3), twin(model)
    op = corrected(plain, x, y, loss, approx, fisher)
    per_datum = len(x) if reduction == "sum" else 1
    bases = {
        layer: (op._gradient_covariances_eigenvectors[layer], op._input_covariances_eigenvectors[layer])
        for layer in covered_names(model)
    }
    opt = ours(model, x, y, loss, approx, fisher, bases)
    for layer in covered_names(model):
        factors = (state_of(opt, model.get_submodule(layer))[f"factor_{side}"] for side in "ga")
        theirs = over_null_spaces(corrected_eigenvalues(op, layer)[None] / per_datum, *factors)[0]
        assert_close(held_scales(opt, model.get_submodule(layer))[0], theirs, 1e-9, layer)
        if case == CASES["ce"]:  # checks the oracle of the other tests by an independent one
            own = scales(layer_gradients(plain, layer, x, y, loss), *bases[layer])[0]
            assert_close(own, corrected_eigenvalues(op, layer), 1e-9, layer)
    if kind != "padded conv":
        opt = ours(twin(plain), x, y, loss, approx, fisher)
        for layer, block in dense_blocks(op, plain, x.dtype).items():
            assert_close(opt.dense_curvature(layer), block / per_datum, 1e-7, layer)
