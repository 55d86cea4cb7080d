"""Steps with a uniform spectrum against an iteration on each singular value."""

import pytest
import torch
from torch import nn

from secondorder import EKFAC, KFAC, ParamScheduler
from secondorder.linalg import polar
from tests.support.building import built
from tests.support.kfac import noise
from tests.support.models import seeded_build


def expected_step(x):
    """The step of a matrix by the published iteration on its singular values."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * max(x.shape) ** 0.5 * u @ torch.diag(s) @ v


def is_uniform(step, width):
    values = torch.linalg.svdvals(step) / (0.2 * width**0.5)
    return bool((values > 0.5).all() & (values < 1.3).all())


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_polar_changes_only_singular_values(shape):
    x = noise(*shape)
    torch.testing.assert_close(polar.step_of(x), expected_step(x), rtol=1e-10, atol=1e-12)
    assert is_uniform(polar.polar(x), 25)
    x = x.float()
    for size in (1e30, 1e-30):
        torch.testing.assert_close(polar.step_of(size * x), polar.step_of(x), rtol=1e-4, atol=1e-5)


def test_a_matrix_of_low_rank_has_no_larger_step_than_others():
    low_rank = polar.step_of(torch.outer(noise(64), noise(32, seed=1)))
    assert torch.linalg.matrix_norm(low_rank, 2) < 1.3 * 0.2 * 8
    full = polar.step_of(torch.linalg.qr(noise(64, 32))[0])
    assert 0.12 < full.square().mean().sqrt() < 0.25


def test_matrices_of_a_stack_are_independent_and_zero_stays_zero():
    x = noise(3, 4, 6)
    x[1] = 0
    found = polar.step_of(x)
    for one, part in zip(x, found, strict=True):
        torch.testing.assert_close(part, polar.step_of(one))
    assert not found[1].any()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 5)
        self.conv = nn.Conv1d(5, 4, 2)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        hidden = torch.tanh(self.inner(self.norm(self.words(x))))
        return self.head(torch.tanh(self.conv(hidden.mT)).flatten(1))


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(7, (8, 4), generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def moves_of(opt, model, x, y):
    """The change of each parameter, and of each layer with a bias as one matrix, for a learning rate of 1."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    moves = {name: (before[name] - p.detach()) / opt.param_groups[0]["lr"] for name, p in model.named_parameters()}
    for name in ("inner", "conv", "head") if isinstance(model, Net) else ():
        moves[name] = torch.cat([moves[f"{name}.weight"].flatten(1), moves[f"{name}.bias"][:, None]], 1)
    return moves


def train(kind, steps=4, **keywords):
    model = seeded_build(Net)
    opt = built(kind, model, lr=0.01, factor_update_steps=1, inv_update_steps=1, **keywords)
    return opt, [moves_of(opt, model, x, y) for x, y in batches(steps)]


ADAM = {"estimator": "running", "power": 0.5, "momentum_mode": "pre", "momentum": 0.8}


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [(EKFAC, ADAM), (EKFAC, {"damping": 0.01, "momentum": 0.0}), (KFAC, {"damping": 0.01, "momentum": 0.0})],
)
def test_the_first_step_is_the_plain_one_with_other_singular_values(kind, keywords):
    _, (plain,) = train(kind, 1, kl_clip=None, **keywords)
    _, (found,) = train(kind, 1, kl_clip=None, orthogonalize=True, **keywords)
    for layer in ("inner", "conv", "head"):
        torch.testing.assert_close(found[layer], expected_step(plain[layer]), rtol=1e-7, atol=1e-9)
    for name in ("words.weight", "norm.weight", "norm.bias"):
        torch.testing.assert_close(found[name], plain[name])


def test_each_group_of_a_convolution_is_a_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2, bias=False), nn.Flatten(), nn.Linear(18, 3)).double()
    opt = EKFAC(model, lr=1.0, orthogonalize=True, momentum=0.0, kl_clip=None, damping=0.01)
    moves = moves_of(opt, model, noise(8, 4, 4), torch.arange(8) % 3)
    for part in moves["0.weight"].flatten(1).chunk(2):
        assert is_uniform(part, 4)


def test_the_clip_does_not_affect_the_size_of_orthogonal_steps():
    _, free = train(EKFAC, kl_clip=None, orthogonalize=True, momentum=0.0)
    _, clipped = train(EKFAC, kl_clip=1e-9, orthogonalize=True, momentum=0.0)
    for layer in ("inner", "head"):
        # the other layers are clipped, so that later gradients differ
        torch.testing.assert_close(clipped[0][layer], free[0][layer])
        assert torch.linalg.matrix_norm(clipped[-1][layer], 2) > 0.1
    assert clipped[0]["words.weight"].norm() < 0.01 * free[0]["words.weight"].norm()


def test_graft_determines_the_length_and_the_polar_factor_the_direction():
    _, (plain,) = train(KFAC, 1, graft="adam", damping=0.01)
    _, (found,) = train(KFAC, 1, graft="adam", damping=0.01, orthogonalize=True)
    for layer in ("inner", "conv", "head"):
        expected = expected_step(plain[layer])
        expected *= plain[layer].norm() / expected.norm()
        torch.testing.assert_close(found[layer].norm(), plain[layer].norm())
        torch.testing.assert_close(found[layer] / expected.norm(), expected / expected.norm(), rtol=1e-6, atol=1e-8)


def test_orthogonalize_may_be_scheduled_and_set_per_group():
    model = seeded_build(Net)
    groups = [{"params": list(model.inner.parameters()), "orthogonalize": True}]
    groups.append({"params": [p for n, p in model.named_parameters() if not n.startswith("inner")]})
    opt = built(EKFAC, groups, module=model, lr=0.01, kl_clip=None, **ADAM)
    schedule = ParamScheduler(opt, orthogonalize={0: True, 1: False})
    for whole in (True, False):
        assert is_uniform(moves_of(opt, model, *batches(1)[0])["inner"], 7) == whole
        schedule.step()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"adaptive_damping": True}, ValueError, "orthogonalize=True takes steps .* drop adaptive_damping=True"),
        ({"calibrate_damping": True}, ValueError, "orthogonalize=True takes steps .* drop calibrate_damping=True"),
        ({"quadratic_model": True}, ValueError, "orthogonalize=True takes steps .* drop quadratic_model=True"),
        ({"inner": "adamw"}, ValueError, "inner='adamw' undoes it"),
        ({"orthogonalize": "yes"}, TypeError, "orthogonalize"),
        (
            {"orthogonal_dtype": torch.float16},
            ValueError,
            "orthogonal_dtype must be torch.float32 or torch.bfloat16, got torch.float16",
        ),
    ],
    ids=str,
)
def test_incompatible_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        built(KFAC, nn.Linear(2, 2), **{"orthogonalize": True, **options})


def error_of(found, exact):
    return float((found - exact).norm() / exact.norm())


def test_bfloat16_changes_a_step_of_full_rank_by_a_few_percent():
    """Small matrices and double precision are not affected."""
    for shape in ((128, 200), (2, 160, 128)):
        x = noise(*shape, dtype=torch.float32)
        exact = torch.stack([expected_step(part) for part in x.double().reshape(-1, *shape[-2:])]).reshape(shape)
        low, fine = polar.step_of(x, torch.bfloat16), polar.step_of(x, torch.float32)
        assert low.dtype == torch.float32
        assert 1e-3 < error_of(low, exact) < 0.05
        assert error_of(fine, exact) < 1e-4
        assert torch.equal(polar.step_of(x), fine)
    for x in (noise(127, 500, dtype=torch.float32), noise(128, 128)):
        assert torch.equal(polar.step_of(x), polar.step_of(x, torch.bfloat16))


def test_with_a_low_rank_float32_keeps_zeros_and_bfloat16_does_not():
    left, right = (torch.linalg.qr(noise(n, 8, dtype=torch.float32, seed=n))[0] for n in (160, 200))
    x = left @ right.T
    outside = torch.eye(160) - left @ left.T
    fine, low = (polar.step_of(x, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert (outside @ fine).norm() < 1e-3 * fine.norm()
    assert 0.05 < (outside @ low).norm() / low.norm() < 0.5  # the documentation warns of this


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_the_precision_of_the_products_can_be_chosen(kind):
    steps, x = [], noise(200, 150, dtype=torch.float32)
    for chosen in ({}, {"orthogonal_dtype": torch.float32}, {"orthogonal_dtype": torch.bfloat16}):
        torch.manual_seed(0)
        model = nn.Linear(150, 140)
        opt = built(kind, model, lr=1.0, damping=0.1, momentum=0.0, orthogonalize=True, **chosen)
        steps.append(moves_of(opt, model, x, torch.arange(200) % 140)["weight"])
    assert torch.equal(steps[0], steps[1])
    assert 1e-3 < error_of(steps[2], steps[0]) < 0.1
