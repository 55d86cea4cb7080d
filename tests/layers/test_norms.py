"""Norm layers: a small block per unit, the second moment of per-example gradients of its scale and shift.

The definition applies ``γ x̂ + β`` to torch's own x̂ as a constant, and autograd gives the gradients of each example's
loss. Batch statistics are thereby constants, as they should be in the block.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from secondorder.capture.layers import norms
from secondorder.capture.layers.registry import find_adapter
from tests.support.grid import pairs
from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step, twin
from tests.support.models import seeded_build
from tests.support.oracles.layers import follows_fallback, step_of

N = 6


def parts_of(layer: nn.Module) -> list[nn.Parameter]:
    """The trained ones of scale and shift."""
    return [p for p in layer.parameters() if p.requires_grad]


def normalized(layer: nn.Module, x: Tensor) -> Tensor:
    """x̂ of a batch ``x``: the layer's output with a scale of 1 and no shift."""
    layer = twin(layer)
    for name, p in layer.named_parameters():
        nn.init.constant_(p, float(name == "weight"))
    return layer(x).detach()


def second_moments(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """E[u uᵀ] of every unit, ``[C, k, k]``; u holds scale before shift, as far as they are trained."""
    model = twin(model)
    norm, z = model.norm, model.before(x)
    hats = [normalized(layer, z) for layer in model.layers()]
    axes = () if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else (1,) * (z.ndim - 2)
    us = []
    for n in range(len(x)):
        scale, shift = (getattr(norm, name, None) for name in ("weight", "bias"))
        scale, shift = (0.0 if p is None else p.reshape(*p.shape, *axes) for p in (scale, shift))
        value = F.cross_entropy(model.after(*(hat[n : n + 1] * scale + shift for hat in hats)), y[n : n + 1])
        us.append(torch.stack([g.flatten() for g in torch.autograd.grad(value, parts_of(norm))], -1))
    u = torch.stack(us)  # [N, C, k]
    return torch.einsum("nci,ncj->cij", u, u) / len(x)


class Normed(nn.Module):
    """An uneven map, one norm or two of the same parameters, a nonlinearity, a mean over positions, a head."""

    def __init__(self, norm: nn.Module, features: int, feature_dim: int, second: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.head, self.feature_dim = norm, nn.Linear(features, 3), feature_dim
        self.second = second
        for name, p in norm.named_parameters() if second is not None else ():
            setattr(second, name, p)

    def layers(self) -> list[nn.Module]:
        return [layer for layer in (self.norm, self.second) if layer is not None]

    def before(self, x: Tensor) -> Tensor:
        return x + 0.3 * x.square()

    def after(self, z: Tensor, *second: Tensor) -> Tensor:
        z = torch.tanh(z - second[0].sin() if second else z)
        return self.head(z if z.ndim == 2 else z.movedim(self.feature_dim, -1).flatten(1, -2).mean(1))

    def forward(self, x: Tensor) -> Tensor:
        z = self.before(x)
        return self.after(*(layer(z) for layer in self.layers()))


# name: layer, shape of the input of one example, features of the head and their dimension
CASES = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (4,), 4, -1),
    "LayerNorm of tokens": (lambda: nn.LayerNorm(4), (5, 4), 4, -1),
    "LayerNorm of two axes": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4), 4, -1),
    "LayerNorm without bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4), 4, -1),
    "LayerNorm of large eps": (lambda: nn.LayerNorm(4, eps=0.1), (5, 4), 4, -1),
    "LayerNorm of one unit": (lambda: nn.LayerNorm(1, eps=0.5), (5, 1), 1, -1),
    "RMSNorm": (lambda: nn.RMSNorm(4), (4,), 4, -1),
    "RMSNorm of tokens": (lambda: nn.RMSNorm(4, eps=0.1), (5, 4), 4, -1),
    "RMSNorm of two axes": (lambda: nn.RMSNorm((3, 4)), (2, 3, 4), 4, -1),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 2), 4, 1),
    "GroupNorm of one group": (lambda: nn.GroupNorm(1, 4), (4, 3), 4, 1),
    "GroupNorm of one channel": (lambda: nn.GroupNorm(1, 1), (1, 3, 2), 1, 1),
    "GroupNorm without positions": (lambda: nn.GroupNorm(2, 4), (4,), 4, 1),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 5), 3, 1),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 2, 4), 3, 1),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(3, affine=True, eps=0.1), (3, 2, 2, 2), 3, 1),
    "InstanceNorm2d, tracked": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 2, 4), 3, 1),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (4,), 4, 1),
    "BatchNorm1d with positions": (lambda: nn.BatchNorm1d(4), (4, 3), 4, 1),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2), 4, 1),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4, eps=0.1), (4, 2, 2, 2), 4, 1),
    "BatchNorm2d without running statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 2), 4, 1),
}


def problem(case: str, second: Callable[[], nn.Module | None] = lambda: None) -> tuple[Normed, Tensor, Tensor]:
    build, shape, features, dim = CASES[case]

    def model() -> Normed:
        made = Normed(build(), features, dim, second())
        for p in made.norm.parameters():
            nn.init.uniform_(p, 0.5, 1.5)
        return made

    return seeded_build(model), noise(N, *shape), labels(N, 3)


def check(case: str | Normed, curvature="unit", parts=1, reduction="mean", x: Tensor | None = None, **keywords) -> None:
    """A step on a case, in micro-batches or in one; its block is that of the definition."""
    model, x, y = problem(case) if isinstance(case, str) else (case, noise(N, 5, 4) if x is None else x, labels(N, 3))
    expected = second_moments(model, x, y)
    opt = plain_kfac(model, norm_curvature=curvature, loss_reduction=reduction, **keywords)
    x = x.transpose(0, 1).contiguous() if "batch_dim" in keywords else x
    for part, target in zip(x.split(len(x) // parts), y.split(N // parts), strict=True):
        value = F.cross_entropy(model(part), target, reduction=reduction)
        (value / parts if reduction == "mean" else value).backward()
    opt.step()
    found = opt.dense_curvature("norm")
    diagonal = torch.diag(expected.diagonal(dim1=1, dim2=2).flatten())
    assert_close(found, torch.block_diag(*expected) if curvature == "unit" else diagonal, 1e-6)
    assert "fallback" not in opt.describe()


@pytest.mark.parametrize("case", CASES)
def test_a_block_per_unit_is_the_second_moment_of_per_example_gradients(case):
    """With "diagonal" it is the diagonal of that. A normalized input is that of torch, in low precision, too."""
    check(case)
    check(case, "diagonal")
    model, x, _ = problem(case)
    layer, low = model.norm, (3 * x + 1).bfloat16()
    kind, _ = find_adapter(layer)
    found = kind(layer, True, getattr(layer, "bias", None) is not None).normalized
    assert_close(found(x), normalized(layer, x), 1e-9)
    assert found(low).dtype == torch.float32
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if isinstance(layer, nn.RMSNorm) else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found(low).double(), normalized(layer, low.double()), **tolerance)


@pairs(
    case=["LayerNorm of tokens", "RMSNorm", "GroupNorm", "BatchNorm2d", "InstanceNorm1d"],
    frozen=["", "weight", "bias"], curvature=["unit", "diagonal"], damping=[0.1, 1e-3],
    inverse_method=["eigen", "cholesky"],
)  # fmt: skip
def test_direction_is_the_inverse_of_each_damped_unit(case, frozen, damping, curvature, inverse_method):
    """Blocks this small add λ to their own eigenvalues, whatever the large ones do; a frozen part has no row."""
    model, x, y = problem(case)
    if frozen and getattr(model.norm, "bias", None) is not None:
        getattr(model.norm, frozen).requires_grad_(False)
    kept = {name: p.clone() for name, p in model.norm.named_parameters() if not p.requires_grad}
    F_units = second_moments(model, x, y)
    eye = torch.eye(F_units.shape[-1], dtype=torch.float64)
    F_units = F_units * eye if curvature == "diagonal" else F_units
    opt = plain_kfac(model, damping=damping, norm_curvature=curvature, inverse_method=inverse_method)
    F.cross_entropy(model(x), y).backward()
    found = step_of(opt, parts_of(model.norm))
    gradient, moved = (torch.stack([pair[i].flatten() for pair in found], -1) for i in (0, 1))  # [C, k]
    assert_close(moved, torch.linalg.solve(F_units + damping * eye, gradient[..., None])[..., 0], 1e-6)
    assert_close(opt.dense_curvature("norm"), torch.block_diag(*F_units), 1e-6)
    assert all(torch.equal(p, kept[name]) for name, p in model.norm.named_parameters() if name in kept)


def test_a_norm_without_parameters_has_no_block():
    layers = [nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False), nn.BatchNorm1d(4, affine=False)]
    model = seeded_build(lambda: nn.Sequential(*layers, nn.Linear(4, 3)))
    opt = plain_kfac(model)
    train_step(opt, model, (noise(N, 3),), labels(N, 3), F.cross_entropy)
    assert set(opt.blocks) == {"0", "3"}


def test_micro_batches_reductions_and_approximations_do_not_matter():
    check("LayerNorm of tokens", parts=3, reduction="sum")
    check("GroupNorm", parts=3)
    check("LayerNorm of tokens", approx="reduce")  # without an input factor, there is nothing to choose


UNBATCHED = [
    (nn.LayerNorm(4), (4,)), (nn.LayerNorm((2, 3)), (2, 3)), (nn.InstanceNorm1d(4, affine=True), (4, 5)),
    (nn.InstanceNorm2d(4, affine=True), (4, 5, 3)), (nn.InstanceNorm3d(4, affine=True), (4, 5, 3, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "shape"), UNBATCHED)
def test_one_example_without_a_batch_axis(layer, shape):
    layer = twin(layer).double()
    opt = plain_kfac(layer)
    layer(noise(*shape)).tanh().square().sum().backward()
    u = torch.stack([layer.weight.grad.flatten(), layer.bias.grad.flatten()], -1)
    opt.step()
    assert_close(opt.dense_curvature(""), torch.block_diag(*(u[:, :, None] * u[:, None, :])), 1e-9)


class Laid(Normed):
    """Passes the same tokens through the norm in another layout, or recomputes them in backward."""

    def __init__(self, layout: str) -> None:
        super().__init__(nn.LayerNorm(4), 4, -1)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        z = self.before(x)
        if self.layout.startswith("checkpointed"):
            reentrant = self.layout == "checkpointed"
            return self.after(checkpoint(self.norm, z.requires_grad_(), use_reentrant=reentrant))
        if self.layout == "flattened":
            return self.after(self.norm(z.flatten(0, 1)).view_as(z))
        if self.layout == "positions first":
            return self.after(self.norm(z.transpose(0, 1)).transpose(0, 1))
        if self.layout == "positions first in the batch":
            return self.after(self.norm(z).transpose(0, 1))
        return self.after(torch.stack([self.norm(z[:, s]) for s in range(z.shape[1])], 1))


@pytest.mark.parametrize(
    "layout", ["flattened", "positions first", "a call per position", "checkpointed", "checkpointed without reentry"]
)
def test_examples_are_recognized_in_other_layouts(layout):
    check(seeded_build(lambda: Laid(layout)))


def test_positions_may_come_first_in_the_batch():
    check(seeded_build(lambda: Laid("positions first in the batch")), batch_dim=1)


@pytest.mark.parametrize(
    ("case", "second"),
    [
        ("LayerNorm of tokens", lambda: nn.LayerNorm(4, eps=1.0)),
        ("RMSNorm", lambda: nn.RMSNorm(4, eps=1.0)),
        ("GroupNorm of one group", lambda: nn.GroupNorm(4, 4)),
        ("BatchNorm2d", lambda: nn.BatchNorm2d(4, eps=1.0)),
        ("InstanceNorm1d", lambda: nn.InstanceNorm1d(3, affine=True, eps=1.0)),
    ],
)
def test_two_norms_of_one_weight(case, second):
    """Each has its own eps or groups."""
    model, x, _ = problem(case, second)
    check(model, x=x)


class Shared(Normed):
    """Six examples share five normalized positions, so gradients of single examples are unknown."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.norm(torch.arange(20.0).sin().view(5, 4).to(x)))


@pytest.mark.parametrize("case", ["shared by the batch", "statistics frozen, as in fine-tuning"])
def test_norms_without_gradients_of_examples_follow_the_fallback_with_a_warning(case):
    if case == "shared by the batch":
        model, x, y = seeded_build(lambda: Shared(nn.LayerNorm(4), 4, -1)), noise(N, 5, 4), labels(N, 3)
    else:
        model, x, y = problem("BatchNorm2d")
        model.norm.eval()
    opt = plain_kfac(model, lr=0.1, damping=0.1)
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="norm"):
        found = step_of(opt, list(model.norm.parameters()))
    for gradient, moved in found:
        assert_close(moved, 0.1 * gradient)


def test_each_micro_batch_of_a_batch_norm_has_its_own_statistics():
    """Running statistics are updated as without the optimizer."""
    model, x, y = problem("BatchNorm2d")
    parts, plain = [(x[:4], y[:4]), (x[4:], y[4:])], twin(model)
    expected = sum(second_moments(model, *part) * len(part[0]) for part in parts) / N
    opt = plain_kfac(model)
    for part, target in parts:
        (F.cross_entropy(model(part), target) * len(part) / N).backward()
        plain(part)
    opt.step()
    assert_close(opt.dense_curvature("norm"), torch.block_diag(*expected), 1e-6)
    for (name, mine), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_norm_over_ranks_follows_the_fallback():
    assert follows_fallback(plain_kfac(nn.Sequential(nn.SyncBatchNorm(3), nn.Linear(3, 3))), "0.weight", "ranks")


@pytest.mark.parametrize(("cached", "folds"), [(1, 3), (1 << 12, 1), (1 << 12, 3), (1 << 30, 1)])
def test_sums_of_a_batch_norm_in_parts(cached: int, folds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are far from zero."""
    monkeypatch.setattr(norms, "_CACHED", cached)
    adapter = norms.BatchNormAdapter(nn.BatchNorm2d(5), True, True)
    x = 30 + torch.randn(4 * folds, 5, 6, 7)
    g = torch.randn(4 * folds, 5, 6, 7)
    wide = x.double()
    mean, variance = wide.mean((0, 2, 3), keepdim=True), wide.var((0, 2, 3), correction=0, keepdim=True)
    terms = g.double() * (wide - mean) / (variance + 1e-5).sqrt()
    wanted = terms.sum((2, 3)).view(4, folds, 5).sum(1)
    torch.testing.assert_close(adapter.scaled_sums(g, x, 4).double(), wanted, rtol=1e-4, atol=1e-4)
