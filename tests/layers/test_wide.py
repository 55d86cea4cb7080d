"""`max_factor_dim`: a factor wider than it is kept as its diagonal, on one side or on both."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, backward, directions, labels, noise, plain_kfac, train_step, twin
from tests.support.layer_cases import CASES, ONE_OF_EACH
from tests.support.models import mlp, vectors
from tests.support.oracles.kfac import expected_factors, pi_factors, solve_exact, solve_pi
from tests.support.oracles.layers import block_state, check_block, diagonal_of, largest_tensor, row_of, train

# layer "0" has 5 inputs (with the 1) and 7 outputs, layer "2" 8 inputs and 3 outputs
WIDTHS = (4, 7, 3)
LIMITS = {
    "one-each": 6,
    "input-of-second": 7,
    "input-and-output": 4,
    "both": 2,
    "none": 8,
    "unset": None,
}


def cut(X: Tensor, limit: int | None) -> Tensor:
    """A factor as it is kept: itself, or its diagonal beyond the limit."""
    return X if limit is None or X.shape[-1] <= limit else diagonal_of(X)


@each(limit=LIMITS, approx=["expand", "reduce"])
def test_a_wide_factor_is_the_diagonal_of_the_full_one(limit, approx):
    x, y = vectors(d=4)
    expected = expected_factors(mlp(WIDTHS), x, y, F.cross_entropy, approx=approx)
    model = mlp(WIDTHS)
    opt = plain_kfac(model, max_factor_dim=limit, approx=approx)
    train_step(opt, model, x, y, F.cross_entropy)
    for name, (A, B) in expected.items():
        check_block(opt, name, (cut(A, limit), cut(B, limit)))
        for side, X in (("factor_a", A), ("factor_g", B)):
            wide = limit is not None and len(X) > limit
            assert block_state(opt, name)[side].shape == (X.shape[:1] if wide else X.shape)


@pairs(
    limit=[6, 7, 4, 2],
    way={
        "eigen": ({"inverse_method": "eigen"}, solve_exact),
        "eigen-pi": ({"inverse_method": "eigen", "damping_split": "pi"}, solve_pi),
        "cholesky": ({"inverse_method": "cholesky"}, solve_pi),
    },
)
def test_direction_with_diagonal_sides(limit, way):
    """Blocks that are diagonal as a whole take λ on their own entries, whatever the others do."""
    x, y = vectors(d=4)
    expected = expected_factors(mlp(WIDTHS), x, y, F.cross_entropy)
    (keywords, solve), model = way, mlp(WIDTHS)
    opt = plain_kfac(model, damping=0.03, max_factor_dim=limit, **keywords)
    backward(model, x, y, F.cross_entropy)
    for name, (gradient, V) in directions(opt, model).items():
        A, B = expected[name]
        if min(len(A), len(B)) <= limit:
            wanted = solve(cut(B, limit), cut(A, limit), gradient, 0.03)
        elif keywords.get("damping_split") == "pi":
            continue  # which is not said of blocks that are diagonal as a whole
        else:
            wanted = gradient / (torch.outer(B.diagonal(), A.diagonal()) + 0.03)
        assert_close(V, wanted, 1e-8, name)


def test_the_diagonal_of_an_inverse_of_cholesky_is_the_reciprocal_of_the_damped_diagonal():
    x, y = vectors(d=4)
    A, B = expected_factors(mlp(WIDTHS), x, y, F.cross_entropy)["2"]
    model = mlp(WIDTHS)
    opt = plain_kfac(model, damping=0.03, max_factor_dim=7, inverse_method="cholesky")
    train_step(opt, model, x, y, F.cross_entropy)
    damped_B, damped_A = pi_factors(B, diagonal_of(A), 0.03)
    state = block_state(opt, "2")
    assert_close(state["inverse_a"], 1 / damped_A.diagonal(), 1e-8)
    assert_close(state["inverse_g"], torch.linalg.inv(damped_B), 1e-8)


@each(limit=LIMITS, method=["eigen", "cholesky"])
def test_describe_says_diagonal_where_a_side_is(limit, method):
    model = mlp(WIDTHS)
    opt = plain_kfac(model, max_factor_dim=limit, inverse_method=method)
    for name, sizes in (("0", (5, 7)), ("2", (8, 3))):
        row = row_of(opt, f"{name}.weight")
        assert ("diagonal" in row) == (limit is not None and max(sizes) > limit), row
        assert "fallback" not in row


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_kind_of_layer(name):
    """Group by group; the input side of a table is a diagonal anyway, whatever the limit."""
    case = CASES[name]
    full, (inputs, y) = case.factors(case.model()), case.data()
    for limit in (2, 4, 9):
        model = case.ready(case.model())
        opt = plain_kfac(model, max_factor_dim=limit, **case.keywords)
        train(opt, model, inputs, y, case.loss)
        assert set(opt.blocks) == set(full)
        for block, (A, B) in full.items():
            pair = A if block in case.tables else cut(A, limit), cut(B, limit)
            check_block(opt, block, pair, torch.kron(*pair) if block in case.tables else None)


def test_each_group_has_its_own_limit_and_a_diagonal_runs_like_any_estimate():
    full, model = mlp(WIDTHS), mlp(WIDTHS)
    groups = [
        {"params": list(model[0].parameters()), "max_factor_dim": 2},
        {"params": list(model[2].parameters()), "max_factor_dim": None},
    ]
    kept = plain_kfac(full, lr=0.0, factor_decay=0.7, max_factor_dim=None)
    opt = plain_kfac(groups, module=model, lr=0.0, factor_decay=0.7)
    for seed in range(3):
        x, y = vectors(d=4, seed=seed)
        train_step(kept, full, x, y, F.cross_entropy)
        train_step(opt, model, x, y, F.cross_entropy)
    for name, limit in (("0", 2), ("2", None)):
        A, B = (block_state(kept, name)[side] for side in ("factor_a", "factor_g"))
        check_block(opt, name, (cut(A, limit), cut(B, limit)))


@each(change={"down": (None, 4), "up": (4, None), "between": (7, 4)}, method=["eigen", "cholesky"])
def test_the_limit_may_change_between_steps(change, method):
    first, second = change
    model, (x, y) = mlp(WIDTHS), vectors(d=4)
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    opt = plain_kfac(model, lr=0.0, factor_decay=0.0, max_factor_dim=first, inverse_method=method)
    train_step(opt, model, x, y, F.cross_entropy)
    opt.param_groups[0]["max_factor_dim"] = second
    for _ in range(2):
        train_step(opt, model, x, y, F.cross_entropy)
    for name, (A, B) in expected.items():
        check_block(opt, name, (cut(A, second), cut(B, second)))


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_a_head_of_fifty_thousand_words_works_in_bounded_memory(method):
    """By default: the limit lies between what is decomposed gladly and such a vocabulary."""
    words, width = 50_257, 8
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, words))
    x, y = noise(4, 4, dtype=torch.float32), labels(4, words)
    opt = plain_kfac(model, inverse_method=method)
    with largest_tensor() as largest:
        train(opt, model, (x,), y, F.cross_entropy)
        opt.zero_grad()
        train(opt, model, (x,), y, F.cross_entropy)
    n_a = width + 1
    factors = words + n_a**2
    second = {"eigen": words + n_a + n_a**2, "cholesky": words + n_a**2}[method]
    state = block_state(opt, "2")
    assert state["factor_a"].numel() + state["factor_g"].numel() == factors
    derived = ("basis", "eigenvalues", "inverse")
    assert sum(state[key].numel() for key in state if key.startswith(derived)) == second
    usage, small = opt.memory_usage(), 5**2 + 8**2  # those of the first layer
    assert usage["factors"] == 4 * (factors + small)
    assert usage["second_order"] == 4 * (second + small + (5 + 8 if method == "eigen" else 0))
    assert largest.numel <= 4 * words * n_a  # temporaries as large as the gradient
    assert "diagonal" in row_of(opt, "2.weight")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_wrong_limit_is_refused():
    for value in (0, -1, 2.5, "wide", True):
        with pytest.raises((ValueError, TypeError), match="max_factor_dim"):
            plain_kfac(mlp(), max_factor_dim=value)
