"""`max_factor_dim`: a wider factor is kept as its diagonal; its default, and the warning about it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from secondorder.curvature.factors import default_bound
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.kfac import assert_close, backward, directions, labels, noise, plain_kfac, train_step
from tests.support.layer_cases import CASES, ONE_OF_EACH
from tests.support.models import mlp, vectors
from tests.support.operators import Operators
from tests.support.oracles.kfac import expected_factors, solve_exact, solve_pi
from tests.support.oracles.layers import block_state, check_block, diagonal_of, row_of
from tests.support.saving import through_a_file
from tests.support.warned import warned

# layer "0" has 5 inputs (with the 1) and 7 outputs, layer "2" 8 inputs and 3 outputs
WIDTHS = (4, 7, 3)


def cut(X: Tensor, limit: int | None) -> Tensor:
    """The stored factor, which is a diagonal beyond the limit."""
    return X if limit is None or X.shape[-1] <= limit else diagonal_of(X)


@pairs(
    # the input and output of a layer, both, one of each layer, the input of the second, none
    limit=[4, 2, 6, 7, 8, None], approx=["expand", "reduce"],
    way={
        "eigen": ({"inverse_method": "eigen"}, solve_exact),
        "eigen-pi": ({"inverse_method": "eigen", "damping_split": "pi"}, solve_pi),
        "cholesky": ({"inverse_method": "cholesky"}, solve_pi),
    },
)  # fmt: skip
def test_a_wide_factor_is_the_diagonal_of_the_full_one_and_the_direction_solves_with_it(limit, approx, way):
    """Blocks that are completely diagonal add λ to their own entries, whatever the others do."""
    x, y = vectors(d=4)
    expected = expected_factors(mlp(WIDTHS), x, y, F.cross_entropy, approx=approx)
    (keywords, solve), model = way, mlp(WIDTHS)
    opt = plain_kfac(model, damping=0.03, max_factor_dim=limit, approx=approx, **keywords)
    backward(model, x, y, F.cross_entropy)
    for name, (gradient, V) in directions(opt, model).items():
        A, B = expected[name]
        check_block(opt, name, (cut(A, limit), cut(B, limit)))
        wide = [limit is not None and len(X) > limit for X in (A, B)]
        for side, X, is_wide in zip(("factor_a", "factor_g"), (A, B), wide, strict=True):
            assert block_state(opt, name)[side].shape == (X.shape[:1] if is_wide else X.shape)
        row = row_of(opt, f"{name}.weight")
        assert ("diagonal" in row) == any(wide)
        assert "fallback" not in row
        if not all(wide):
            assert_close(V, solve(cut(B, limit), cut(A, limit), gradient, 0.03), 1e-8, name)
        elif "damping_split" not in keywords:  # blocks that are completely diagonal do not split the damping
            assert_close(V, gradient / (torch.outer(B.diagonal(), A.diagonal()) + 0.03), 1e-8, name)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_kind_of_layer(name):
    """The limit applies group by group; the input side of a table is always a diagonal."""
    case = CASES[name]
    full, (inputs, y) = case.factors(case.model()), case.data()
    for limit in (2, 4, 9):
        model = case.ready(case.model())
        opt = plain_kfac(model, max_factor_dim=limit, **case.keywords)
        train_step(opt, model, inputs, y, case.loss)
        assert set(opt.blocks) == set(full)
        for block, (A, B) in full.items():
            pair = A if block in case.tables else cut(A, limit), cut(B, limit)
            check_block(opt, block, pair, torch.kron(*pair) if block in case.tables else None)


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_a_head_of_fifty_thousand_words_needs_bounded_memory(method):
    words, width = 50_257, 8
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, words))
    opt = plain_kfac(model, inverse_method=method)
    with Operators() as seen:
        for _ in range(2):
            train_step(opt, model, noise(4, 4, dtype=torch.float32), labels(4, words), F.cross_entropy)
    n_a, eigen = width + 1, method == "eigen"
    factors = words + n_a**2
    second = words + n_a * eigen + n_a**2
    state = block_state(opt, "2")
    assert state["factor_a"].numel() + state["factor_g"].numel() == factors
    derived = ("basis", "eigenvalues", "inverse")
    assert sum(state[key].numel() for key in state if key.startswith(derived)) == second
    usage, small = opt.memory_usage(), 5**2 + 8**2  # those of the first layer
    assert usage["factors"] == 4 * (factors + small)
    assert usage["second_order"] == 4 * (second + small + (5 + 8) * eigen)
    assert seen.numel <= 4 * words * n_a  # temporaries as large as the gradient
    assert "diagonal" in row_of(opt, "2.weight")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def wide(n: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, n, bias=False))


def made(method, *args, **keywords) -> tuple[KFAC, list[str]]:
    """An optimizer, and the texts of its warnings."""
    with warned() as found:
        opt = built(method, *args, **keywords)
    return opt, found


CHOLESKY = {"inverse_method": "cholesky"}


@pytest.mark.parametrize(("method", "keywords", "bound"), [(KFAC, {}, 2048), (EKFAC, {}, 2048), (KFAC, CHOLESKY, 4096)])
def test_the_widest_dense_side_on_a_cpu(method, keywords, bound):
    for n, given in ((bound, {}), (bound + 1, {}), (2100, {"max_factor_dim": 2048}), (2100, {"max_factor_dim": None})):
        opt, texts = made(method, wide(n), **keywords, **given)
        limit = given.get("max_factor_dim", bound)
        assert opt.param_groups[0]["max_factor_dim"] == limit
        assert (f"diagonal {n}" in row_of(opt, "1.weight")) == (limit is not None and n > limit)
        assert len(texts) == (n > bound and not given)  # a bound that is given causes no warning
        for part in (f"more than {bound} rows", f"1 (outputs, {n})", "or 8192 for"):
            assert all(part in text for text in texts)


def test_other_devices_keep_wider_factors_and_copies_have_the_default_of_the_original():
    assert default_bound("cuda", "eigen") == default_bound("cuda", "cholesky") == 8192
    assert KFAC(wide(3000).to("meta")).param_groups[0]["max_factor_dim"] == 8192
    model = wide(10)
    for copied in (copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))):
        opt = copied(KFAC(model))
        opt.attach(copy.deepcopy(model))
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **CHOLESKY})
        assert opt.param_groups[1]["max_factor_dim"] == 4096


def test_many_wide_layers_give_one_warning_and_a_large_vocabulary_gives_none():
    _, (text,) = made(KFAC, nn.Sequential(*(nn.Linear(2100, 2, bias=False) for _ in range(9))))
    assert "0 (inputs, 2100), 1 (inputs, 2100)" in text
    assert "and 5 more" in text
    assert made(KFAC, wide(8193))[1] == []  # a matrix of that size is not expected


def test_the_default_of_a_group_depends_on_its_inverse_method():
    model = wide(3000)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), **CHOLESKY}]
    for given, found in (
        ({}, [2048, 4096]),
        ({"max_factor_dim": 100}, [2048, 100]),
        ({"max_factor_dim": "auto"}, [7, 4096]),
    ):
        default = {"max_factor_dim": 7} if "auto" in given.values() else {}
        opt, texts = made(KFAC, [groups[0], groups[1] | given], module=model, **default)
        assert texts == []
        assert [group["max_factor_dim"] for group in opt.param_groups] == found
        assert block_state(opt, "1")["factor_g"].ndim == (1 if found[1] < 3000 else 2)


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_a_checkpoint_with_a_dense_factor_keeps_its_bound(method):
    """The former default was 8192; the bound is an option of the group, which is part of a checkpoint."""
    options = {"lr": 0.01}
    before, after = wide(2060), wide(2060)
    after.load_state_dict(before.state_dict())
    old, (new, _) = built(method, before, max_factor_dim=8192, **options), made(method, after, **options)
    old.state[before[1].weight]["factor_g"].fill_diagonal_(2.0)  # no step, since a refresh of this size takes seconds
    new.load_state_dict(through_a_file(old.state_dict()))
    assert new.param_groups[0]["max_factor_dim"] == 8192
    assert "diagonal" not in row_of(new, "1.weight")
    assert torch.equal(new.state[after[1].weight]["factor_g"], old.state[before[1].weight]["factor_g"])
