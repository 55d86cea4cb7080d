"""Options that change between steps, and those of checkpoints."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.support.ekfac import assert_scales, next_directions, plain_ekfac, standing, state_of, train_step
from tests.support.kfac import assert_close, plain_kfac
from tests.support.models import mlp, vectors
from tests.support.oracles.ekfac import values

ADAM = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.9, "lr": 1e-2}


ACTING = {  # options of a layer whose scale is not due, and what is changed in front of a forward
    "interval of intra": ("intra", {"scale_update_steps": 50}, {"scale_update_steps": 1}),
    "interval of running": ("running", {"scale_update_steps": 50}, {"scale_update_steps": 1}),
    "to intra": ("intra", {"estimator": "running"}, {"estimator": "intra"}),
    "to running": ("running", {"estimator": "intra"}, {"estimator": "running"}),
}


@pytest.mark.parametrize("case", ACTING)
def test_interval_and_estimator_of_the_scale_act_on_the_forward_that_begins(case):
    estimator, before, after = ACTING[case]
    model = mlp()
    opt = plain_ekfac(model, **{"estimator": estimator, **before}, factor_update_steps=100, scale_decay=0.0, lr=0.0)
    for seed in range(5):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    opt.param_groups[0].update(after)
    x, y = vectors(7, seed=9)
    updates = state_of(opt, model[0])["scale_updates"]
    train_step(opt, model, x, y, F.cross_entropy)
    assert state_of(opt, model[0])["scale_updates"] == updates + 1
    assert_scales(opt, model, mlp(), x, y, F.cross_entropy, estimator=estimator)


CHANGES = {
    "inverse": (plain_kfac, {"inverse_method": "eigen"}, {"inverse_method": "cholesky"}),
    "bound": (plain_kfac, {"max_factor_dim": None}, {"max_factor_dim": 4}),
    "bound of bases": (plain_ekfac, {"max_factor_dim": None}, {"max_factor_dim": 4}),
    "bases": (plain_ekfac, {"basis_update": "eigh"}, {"basis_update": "qr"}),
    "momentum": (plain_ekfac, {"momentum_mode": "post"}, {"momentum_mode": "pre"}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_options_that_decide_the_state_act_from_the_next_step_on(change, back):
    """On one batch without memory: state and direction are those of an optimizer that had the option from the start."""
    build, before, after = CHANGES[change]
    if back:
        before, after = after, before
    x, y = vectors()
    found = []
    for first in (after, before):
        model = mlp()
        opt = build(model, factor_decay=0.0, inv_update_steps=1, **first)
        with standing(opt):
            for _ in range(3):
                train_step(opt, model, x, y, F.cross_entropy)
            opt.param_groups[0].update(after)
            train_step(opt, model, x, y, F.cross_entropy)
            keys = {name: set(opt.state[p]) for name, p in model.named_parameters()}
            for _ in range(2):
                train_step(opt, model, x, y, F.cross_entropy)
        assert keys == {name: set(opt.state[p]) for name, p in model.named_parameters()}
        moved = next_directions(opt, model, x, y, F.cross_entropy, ["0", "2"])
        found.append((keys, {name: V for name, (_, V) in moved.items()}))
    optional = {"momentum_buffer"}  # made where it is first needed
    assert {n: k - optional for n, k in found[0][0].items()} == {n: k - optional for n, k in found[1][0].items()}
    for name in ("0", "2"):
        assert_close(found[1][1][name], found[0][1][name], 1e-7, name)


REFUSED_LOADS = {
    "fisher": ({"estimator": "running"}, {"fisher": "mc"}),
    "model": ({"momentum_mode": "pre"}, {"quadratic_model": True}),
    "adaptive": (ADAM, {"adaptive_damping": True}),
}


@pytest.mark.parametrize("case", REFUSED_LOADS)
def test_a_checkpoint_whose_options_exclude_those_of_the_optimizer_is_refused_whole(case):
    theirs, mine = REFUSED_LOADS[case]
    model, other = mlp(), mlp()
    opt, second = plain_ekfac(model, **theirs), plain_ekfac(other, **mine)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups]
    states, start = [copy.deepcopy(second.state[p]) for p in other.parameters()], values(other[0])
    with pytest.raises(ValueError, match=r"running|pre"):
        second.load_state_dict(opt.state_dict())
    assert [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups] == groups
    assert torch.equal(values(other[0]), start)
    for p, state in zip(other.parameters(), states, strict=True):
        assert second.state[p].keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(second.state[p][k]), torch.as_tensor(v)) for k, v in state.items())
