"""Steps of a uniform spectrum, against singular values that are moved one by one, and Nesterov momentum before them."""

import pytest
import torch
from torch import nn

from secondorder import EKFAC, KFAC, ParamScheduler
from secondorder.linalg import polar

torch.manual_seed(0)


def _risen(values):
    """Singular values after the published iteration, one number at a time."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def _expected(x):
    """The step of a matrix by its singular value decomposition."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return 0.2 * max(x.shape) ** 0.5 * u @ torch.diag(_risen(s / torch.linalg.vector_norm(s))) @ v


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_polar_moves_singular_values_and_nothing_else(shape):
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(polar.step_of(x), _expected(x), rtol=1e-10, atol=1e-12)
    values = torch.linalg.svdvals(polar.polar(x))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_direction_of_one_example_moves_no_further_than_others():
    x = torch.outer(torch.randn(64, dtype=torch.float64), torch.randn(32, dtype=torch.float64))
    assert torch.linalg.matrix_norm(polar.step_of(x), 2) < 1.3 * 0.2 * 8
    full = polar.step_of(torch.linalg.qr(torch.randn(64, 32, dtype=torch.float64))[0])
    assert 0.12 < full.square().mean().sqrt() < 0.25


def test_huge_and_tiny_numbers_are_no_zeros():
    x = torch.randn(4, 6)
    for size in (1e30, 1e-30):
        torch.testing.assert_close(polar.step_of(size * x), polar.step_of(x), rtol=1e-4, atol=1e-5)


def test_stacks_are_matrices_one_by_one_and_nothing_stays_nothing():
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    x[1] = 0
    found = polar.step_of(x)
    for one, part in zip(x, found, strict=True):
        torch.testing.assert_close(part, polar.step_of(one))
    assert not found[1].any()


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 5)
        self.conv = nn.Conv1d(5, 4, 2, groups=1)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        hidden = torch.tanh(self.inner(self.norm(self.words(x))))
        return self.head(torch.tanh(self.conv(hidden.mT)).flatten(1))


def _batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(7, (8, 4), generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def _train(kind, steps=4, model=None, **keywords):
    torch.manual_seed(0)
    model = _Net().double() if model is None else model
    opt = kind(model, lr=0.01, factor_update_steps=1, inv_update_steps=1, **keywords)
    moves = []
    for x, y in _batches(steps):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        moves.append({name: (before[name] - p.detach()) / 0.01 for name, p in model.named_parameters()})
    return opt, moves


def _matrix(moves, layer):
    return torch.cat([moves[f"{layer}.weight"].flatten(1), moves[f"{layer}.bias"][:, None]], 1)


ADAM = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.8}


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [(EKFAC, ADAM), (EKFAC, {"damping": 0.01, "momentum": 0.0}), (KFAC, {"damping": 0.01, "momentum": 0.0})],
)
def test_the_first_step_is_the_plain_one_with_its_singular_values_moved(kind, keywords):
    _, (plain,) = _train(kind, 1, kl_clip=None, **keywords)
    _, (found,) = _train(kind, 1, kl_clip=None, orthogonalize=True, **keywords)
    for layer in ("inner", "conv", "head"):
        torch.testing.assert_close(_matrix(found, layer), _expected(_matrix(plain, layer)), rtol=1e-7, atol=1e-9)
    for name in ("words.weight", "norm.weight", "norm.bias"):
        torch.testing.assert_close(found[name], plain[name])


def test_each_group_of_a_convolution_is_a_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2, bias=False), nn.Flatten(), nn.Linear(18, 3)).double()
    opt = EKFAC(model, lr=1.0, orthogonalize=True, momentum=0.0, kl_clip=None, damping=0.01)
    before = model[0].weight.detach().clone()
    nn.functional.cross_entropy(model(torch.randn(8, 4, 4).double()), torch.randint(3, (8,))).backward()
    opt.step()
    for part in (before - model[0].weight.detach()).flatten(1).chunk(2):
        values = torch.linalg.svdvals(part) / (0.2 * 4**0.5)
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_steps_have_their_own_size_whatever_the_clip():
    _, free = _train(EKFAC, kl_clip=None, orthogonalize=True, momentum=0.0)
    _, clipped = _train(EKFAC, kl_clip=1e-9, orthogonalize=True, momentum=0.0)
    for layer in ("inner", "head"):
        # the other layers are clipped, so that later gradients differ
        torch.testing.assert_close(_matrix(clipped[0], layer), _matrix(free[0], layer))
        assert torch.linalg.matrix_norm(_matrix(clipped[-1], layer), 2) > 0.1
    assert clipped[0]["words.weight"].norm() < 0.01 * free[0]["words.weight"].norm()


def test_graft_gives_the_length_and_the_polar_factor_the_direction():
    _, (plain,) = _train(KFAC, 1, graft="adam", damping=0.01)
    _, (found,) = _train(KFAC, 1, graft="adam", damping=0.01, orthogonalize=True)
    for layer in ("inner", "conv", "head"):
        ours, theirs = _matrix(found, layer), _matrix(plain, layer)
        torch.testing.assert_close(ours.norm(), theirs.norm())
        torch.testing.assert_close(
            ours / ours.norm(), _expected(theirs) / _expected(theirs).norm(), rtol=1e-6, atol=1e-8
        )


def test_nesterov_before_preconditioning_against_a_loop():
    """The gradient and the corrected mean are mixed as heavy-ball Nesterov mixes them; bases stay those of step one."""
    frozen = {**ADAM, "scale_decay": 1.0, "fallback_eps": 1e-2, "kl_clip": None}
    torch.manual_seed(0)
    weight = torch.randn(3, 4, dtype=torch.float64)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    moves = {}
    for nesterov in (False, True):
        model = nn.Linear(4, 3, bias=False).double()
        model.weight.data.copy_(weight)
        opt = EKFAC(model, lr=0.05, nesterov=nesterov, inv_update_steps=10**6, factor_update_steps=1, **frozen)
        gradients, moves[nesterov] = [], []
        for _ in range(3):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            gradients.append(model.weight.grad.clone())
            before = model.weight.detach().clone()
            opt.step()
            moves[nesterov].append((before - model.weight.detach()) / 0.05)
        state = opt.state[model.weight]
        scale = state["scale"].sqrt() + 1e-2
        qa, qg = state["basis_a"], state["basis_g"]
        mean = sum(0.2 * 0.8 ** (2 - i) * g for i, g in enumerate(gradients)) / (1 - 0.8**3)
        source = 0.2 * gradients[-1] + 0.8 * mean if nesterov else mean
        expected = qg @ ((qg.T @ source @ qa) / scale) @ qa.T
        torch.testing.assert_close(moves[nesterov][-1], expected, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(moves[True][-1], moves[False][-1])


def test_it_may_be_scheduled_and_chosen_by_group():
    model = _Net().double()
    groups = [{"params": list(model.inner.parameters()), "orthogonalize": True}]
    groups.append({"params": [p for n, p in model.named_parameters() if not n.startswith("inner")]})
    torch.manual_seed(0)
    opt = EKFAC(groups, module=model, lr=0.01, kl_clip=None, **ADAM)
    schedule = ParamScheduler(opt, orthogonalize={0: True, 1: False})
    x, y = _batches(1)[0]
    for whole in (True, False):
        before = model.inner.weight.detach().clone(), model.inner.bias.detach().clone()
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        moved = torch.cat([before[0] - model.inner.weight, (before[1] - model.inner.bias)[:, None]], 1) / 0.01
        values = torch.linalg.svdvals(moved) / (0.2 * 7**0.5)
        assert bool((values > 0.5).all() & (values < 1.3).all()) == whole
        schedule.step()


@pytest.mark.parametrize("option", ["adaptive_damping", "calibrate_damping", "quadratic_model"])
def test_judging_a_model_of_other_steps_is_refused(option):
    with pytest.raises(ValueError, match=f"orthogonalize=True takes steps .* drop {option}=True"):
        KFAC(nn.Linear(2, 2), orthogonalize=True, **{option: True})
    with pytest.raises(ValueError, match="inner='adamw' undoes it"):
        KFAC(nn.Linear(2, 2), orthogonalize=True, inner="adamw")
    with pytest.raises(TypeError, match="orthogonalize"):
        KFAC(nn.Linear(2, 2), orthogonalize="yes")


def test_a_resumed_run_goes_on_bit_for_bit():
    keywords = {**ADAM, "orthogonalize": True, "nesterov": True}
    opt, _ = _train(EKFAC, 3, **keywords)
    model = _Net().double()
    model.load_state_dict(opt.module.state_dict())
    again = EKFAC(model, lr=0.01, factor_update_steps=1, inv_update_steps=1, **keywords)
    again.load_state_dict(opt.state_dict())
    for x, y in _batches(3, seed=2):
        for one in (opt, again):
            net = one.module
            one.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            one.step()
    for p, q in zip(opt.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_plan_counts_the_iteration():
    plain, extra = (
        EKFAC(nn.Linear(9, 4), orthogonalize=flag).plan(batch_size=8).ranks[0].flops["precondition"]
        for flag in (False, True)
    )
    assert extra - plain == 5 * (2 * 4 * 4 * 10 + 2 * 4 * 4 * 4 + 2 * 4 * 4 * 10)


def _in_full(x):
    return torch.stack([_expected(part) for part in x.double().reshape(-1, *x.shape[-2:])]).reshape(x.shape)


def _error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(128, 200), (2, 160, 128)])
def test_bfloat16_moves_a_step_of_full_rank_by_a_few_percent(shape):
    x = torch.randn(shape)
    exact, low = _in_full(x), polar.step_of(x, torch.bfloat16)
    assert low.dtype == torch.float32
    assert 1e-3 < _error(low, exact) < 0.05
    assert _error(polar.step_of(x), exact) < 1e-4
    assert torch.equal(polar.step_of(x), polar.step_of(x, torch.float32))


def test_of_a_low_rank_float32_leaves_zeros_and_bfloat16_does_not():
    left, right = torch.linalg.qr(torch.randn(160, 8))[0], torch.linalg.qr(torch.randn(200, 8))[0]
    x = left @ right.T
    outside = torch.eye(160) - left @ left.T
    fine, low = (polar.step_of(x, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert (outside @ fine).norm() < 1e-3 * fine.norm()
    assert 0.05 < (outside @ low).norm() / low.norm() < 0.5  # what the documentation warns of


@pytest.mark.parametrize(("shape", "dtype"), [((127, 500), torch.float32), ((128, 128), torch.float64)])
def test_small_matrices_and_double_precision_stay(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    assert torch.equal(polar.step_of(x), polar.step_of(x, torch.bfloat16))


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_the_precision_of_the_products_can_be_chosen(kind):
    steps = []
    for chosen in ({}, {"orthogonal_dtype": torch.float32}, {"orthogonal_dtype": torch.bfloat16}):
        torch.manual_seed(0)
        model = nn.Linear(150, 140)
        x = torch.randn(200, 150)
        opt = kind(model, lr=1.0, damping=0.1, momentum=0.0, orthogonalize=True, **chosen)
        before = model.weight.detach().clone()
        nn.functional.cross_entropy(model(x), torch.arange(200) % 140).backward()
        opt.step()
        steps.append(before - model.weight.detach())
    assert torch.equal(steps[0], steps[1])
    assert 1e-3 < _error(steps[2], steps[0]) < 0.1
    with pytest.raises(
        ValueError, match=r"orthogonal_dtype must be torch.float32 or torch.bfloat16, got torch.float16"
    ):
        kind(nn.Linear(2, 2), orthogonal_dtype=torch.float16)
