"""Scales and dense blocks against curvlinops.

Eigenvectors agree up to sign and up to rotation in degenerate spaces, so scales are compared in *their* basis, which is
copied to the optimizer's state between two steps, and their scales are averaged over null spaces, as ours are. Dense
blocks are compared if the eigenvalues of each factor are simple (with one null direction at most).
"""

import warnings

import curvlinops

from tests.support.ekfac import held_scales, plain_ekfac, standing
from tests.support.grid import each
from tests.support.kfac import assert_close, layer_state, noise, twin
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.curvlinops import dense_blocks, operator
from tests.support.oracles.ekfac import layer_gradients, over_null_spaces, scales
from tests.support.oracles.kfac import covered_names, objective

MODELS = {
    "linear": (lambda: mlp((4, 5, 3)), vectors),
    "conv": (lambda: convnet(stride=2), images),
    # sums over overlapping patches make A singular several times over under reduce
    "padded conv": (lambda: convnet(stride=2, padding=1), images),
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


def corrected(model, x, y, loss, approx, fisher):
    """Their operator with the eigenvalue correction, and the corrected eigenvalues ``[n_g, n_a]`` of each layer."""
    op = operator(model, x, y, loss, approx, fisher, kind=curvlinops.EKFACLinearOperator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op.compute_eigenvalue_correction()
    # without a bias, a layer has one matrix per parameter
    found = op._corrected_eigenvalues.items()
    return op, {layer: next(iter(own.values())) if isinstance(own, dict) else own for layer, own in found}


def ours(model, x, y, loss, approx, likelihood, bases=None):
    """The optimizer after a step for the basis and one that measures in it, or in the given ``bases``."""
    exact = likelihood is not None
    fisher = {"fisher": "exact"} if exact else {"loss_terms": loss.loss_terms}
    opt = plain_ekfac(model, approx=approx, loss_reduction=loss.loss_reduction, **fisher)
    with standing(opt):
        for replaced in ({}, bases or {}):
            for name, (Q_B, Q_A) in replaced.items():
                layer_state(opt, model, name)["basis_g"].copy_(Q_B)
                layer_state(opt, model, name)["basis_a"].copy_(Q_A)
            opt.zero_grad()
            outputs = model(x)
            if exact:
                opt.observe(outputs, likelihood)
            loss(outputs, y).backward()
            opt.step()
    return opt


@each(kind=MODELS, case=CASES, approx=["expand", "reduce"])
def test_scales_in_their_basis_and_dense_blocks(kind, case, approx):
    (build, data), (name, reduction, fisher) = kind, case
    model, (x, y) = build(), data(24)
    y = y if name == "ce" else noise(24, 3, seed=1)
    loss, plain, layers = objective(name, reduction, 3), twin(model), covered_names(model)
    likelihood = LIKELIHOODS[name] if fisher == "type-2" else None
    op, eigenvalues = corrected(plain, x, y, loss, approx, fisher)
    per_datum = len(x) if reduction == "sum" else 1
    gradients, inputs = op._gradient_covariances_eigenvectors, op._input_covariances_eigenvectors
    bases = {layer: (gradients[layer], inputs[layer]) for layer in layers}
    opt = ours(model, x, y, loss, approx, likelihood, bases)
    for layer in layers:
        factors = (layer_state(opt, model, layer)[f"factor_{side}"] for side in "ga")
        theirs = over_null_spaces(eigenvalues[layer][None] / per_datum, *factors)[0]
        assert_close(held_scales(opt, model.get_submodule(layer))[0], theirs, 1e-9, layer)
        if case == CASES["ce"]:  # checks the oracle of the other tests by an independent one
            own = scales(layer_gradients(plain, layer, x, y, loss), *bases[layer])[0]
            assert_close(own, eigenvalues[layer], 1e-9, layer)
    if kind is not MODELS["padded conv"]:
        opt = ours(twin(plain), x, y, loss, approx, likelihood)
        for layer, block in dense_blocks(op, plain, x.dtype).items():
            assert_close(opt.dense_curvature(layer), block / per_datum, 1e-7, layer)
