"""Helpers that drive ``EKFAC`` and read its state, in the layouts of ``tests.support.oracles.ekfac``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from secondorder import EKFAC
from tests.support import kfac
from tests.support.building import built
from tests.support.kfac import assert_close, backward, noise, owner, train_step
from tests.support.models import Net, mlp
from tests.support.oracles.ekfac import mean_gradient, measured_scales, values
from tests.support.oracles.kfac import covered_names

HELD = 10**6
# Defaults of the tests: plain steps along the preconditioned gradient. Every update is due at every step, except that
# the basis of the first step is kept.
PLAIN = {**kfac.PLAIN, "inv_update_steps": HELD, "scale_update_steps": 1}


def plain_ekfac(params, **keywords) -> EKFAC:
    return built(EKFAC, params, **{**PLAIN, **keywords})


def state_of(opt: EKFAC, layer: nn.Module) -> dict:
    return opt.state[owner(layer)]


def held(state: dict) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """s as ``[Γ, n_g, n_a]`` and (Q_B, Q_A) as ``[Γ, n, n]``; a side whose factor is a diagonal has the identity."""
    s = state["scale"].detach().clone()
    s, bases = s if s.ndim == 3 else s[None], []
    for side, n in (("g", s.shape[1]), ("a", s.shape[2])):
        Q = state.get(f"basis_{side}")
        Q = torch.eye(n, dtype=s.dtype).expand(len(s), n, n) if Q is None else Q.detach().clone()
        bases.append(Q if Q.ndim == 3 else Q[None])
    return s, (bases[0], bases[1])


def held_scales(opt: EKFAC, layer: nn.Module) -> Tensor:
    return held(state_of(opt, layer))[0]


def held_bases(opt: EKFAC, layer: nn.Module) -> tuple[Tensor, Tensor]:
    return held(state_of(opt, layer))[1]


@contextmanager
def standing(opt: EKFAC) -> Iterator[None]:
    """Set the learning rates to zero within the block, so that steps do not move the parameters."""
    rates = [group["lr"] for group in opt.param_groups]
    for group in opt.param_groups:
        group["lr"] = 0.0
    yield
    for group, lr in zip(opt.param_groups, rates, strict=True):
        group["lr"] = lr


def measure(opt: EKFAC, model: nn.Module, x: Tensor, y: Tensor, loss: Callable) -> None:
    """Take two steps on one batch with a learning rate of zero: one for the basis, one for the scales in it."""
    with standing(opt):
        for _ in range(2):
            train_step(opt, model, x, y, loss)


def measured(model: nn.Module, x: Tensor, y: Tensor, loss: Callable, **keywords) -> EKFAC:
    opt = plain_ekfac(model, **keywords)
    measure(opt, model, x, y, loss)
    return opt


def next_directions(opt: EKFAC, model: nn.Module, x: Tensor, y: Tensor, loss: Callable, names: list[str]):
    """Take a step on one more batch, and return (∇, change) of every layer."""
    opt.zero_grad()
    backward(model, x, y, loss)
    return kfac.directions(opt, model, names, values, mean_gradient)


def assert_scales(opt, model, plain, x, y, loss, names=None, *, estimator="intra", factor=1.0, tolerance=1e-9) -> None:
    """The scales of every layer are ``factor`` times those of the definition, for one batch in the current bases."""
    for name in covered_names(model) if names is None else names:
        layer = model.get_submodule(name)
        expected = measured_scales(plain, name, x, y, held_bases(opt, layer), estimator, loss)
        assert_close(held_scales(opt, layer), factor * expected, tolerance, name)


def regression(n=12, seed=0):
    """Data under which both factors of `mlp((3, 4, 2))` have simple spectra."""
    return noise(n, 3, seed=seed), noise(n, 2, seed=seed + 100)


def network():
    return mlp((3, 4, 2))


def snapshot(opt, layer):
    """A copy of the state of a layer."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state_of(opt, layer).items()}


def unchanged(opt, layer, before, keys=("scale", "scale_weight", "scale_updates")):
    state = state_of(opt, layer)
    return all(torch.equal(*map(torch.as_tensor, (state[key], before[key]))) for key in keys)


def branches() -> Net:
    """A network whose first layer takes part in some forward passes only; build it with ``seeded_build``."""
    layers = {"rare": nn.Linear(4, 3), "used": nn.Linear(4, 3)}
    return Net(lambda net, x: net.used(x) + net.rare(x) if net.both else net.used(x), both=True, **layers)
