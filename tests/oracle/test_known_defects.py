"""Defects of existing K-FAC implementations, each with the test that keeps it out, here or where the table says:

    defect                                             test
    -------------------------------------------------  ---------------------------------------------------------------
    G lacks N, conv factors scaled by powers of T      test_factors_conv: test_conv2d_network_equals_curvlinops
                                                       test_invariance: test_image_size_under_a_pooled_loss
    ... λ means something else per batch split         test_invariance: test_a_damping_means_the_same_...
    accumulation shrinks G                             test_invariance: test_equal_micro_batches_...,
                                                       test_unequal_micro_batches_with_properly_weighted_losses
    short last window leaks into the next              test_invariance: test_a_short_window_counts_what_it_holds_...
    identity start, no debias                          test_running_estimate: test_the_first_estimate_is_...,
                                                       test_a_constant_batch_keeps_the_estimate_constant
    inverted meaning of decay                          test_running_estimate: test_the_decay_multiplies_the_old_value
    damping added in place accumulates                 test_running_estimate: test_refreshes_leave_the_factors_...
    λ frozen in a cached outer product                 test_solves: test_damping_changed_between_refreshes_...
    lr of the clip stale                               here: test_clip_follows_a_scheduler
    kl_clip=None crashes; zero gradients               here: test_constructs_without_clip; test_solves: test_zero_...
    .item() per layer                                  here: test_no_value_leaves_the_device_in_a_step
    conv ignores dilation, groups, padding, its mode   test_factors_conv: test_grid_of_padding_stride_dilation_...
    3-D Linear reduces g by its mean                   test_factors_linear: test_any_leading_dimensions,
                                                       test_token_mean_cross_entropy_equals_curvlinops
    MultiheadAttention.out_proj without hooks          capture/test_refusals: test_multihead_attention_trains
    unused branch                                      test_schedule: test_a_late_branch_..., test_a_block_without_...
    multi-call modules double the EMA                  capture/test_plain_form: test_module_called_several_times
    in-place ReLU                                      capture/test_plain_form: test_in_place_relu
    checkpointing counts twice                         capture/test_plain_form: test_activation_checkpointing
    no-grad train-mode forward pollutes                capture/test_bystanders: test_forwards_that_train_nothing_...
    hooks cannot be removed                            here: test_detach_gives_the_module_back
    .grad replaced                                     here: test_gradients_are_read_and_left_alone
    overflow poisons the EMA                           test_failures: test_a_non_finite_micro_batch_skips_...
    non-contiguous activations and gradients           capture/test_plain_form: test_memory_layouts
    bucket key collision, mixed dtypes                 test_solves: test_layers_of_one_shape_in_groups_of_their_own_...
    zero inverse at start                              test_solves: test_direction_is_the_dense_solve_with_...
    statistics never read, silent SGD                  the same
    decay only a power if passed explicitly            test_running_estimate: test_the_decay_is_per_factor_update_...
    two optimizers on one module count twice           here: test_two_optimizers_on_one_module
    eigh returns NaN without raising                   test_failures: test_the_last_good_factorisation_stays
    a failure takes others of its shape along          test_failures: test_a_bad_matrix_does_not_take_others_...

Rows on loading a checkpoint belong to the contract tests; Monte Carlo, adaptive damping and ranks to what brings them.
"""

import copy
import math
import pickle
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from secondorder import KFAC
from tests.support.kfac import (
    all_factors,
    assert_close,
    assert_factors,
    backward,
    directions,
    hook_counts,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import convnet, images, mlp, vectors
from tests.support.oracles.kfac import expected_factors


def test_clip_follows_a_scheduler():
    """StepLR halves lr: ν = min(1, √(κ / Σ lr²⟨V, ∇⟩)) is that of the new one."""
    model, (x, y) = mlp(), vectors()
    clip = 1e-5
    opt = plain_kfac(model, lr=0.5, kl_clip=clip, factor_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    for lr in (0.5, 0.25, 0.125):
        assert opt.param_groups[0]["lr"] == lr
        fresh = mlp()
        fresh.load_state_dict(model.state_dict())
        free = plain_kfac(fresh)
        backward(fresh, x, y, F.cross_entropy)
        V = directions(free, fresh)
        total = sum(lr**2 * float((v * gradient).sum()) for gradient, v in V.values())
        factor = min(1.0, math.sqrt(clip / total))
        assert factor < 1
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        for name, (_, step) in directions(opt, model).items():
            assert_close(step, lr * factor * V[name][1], 1e-8, f"{name} at lr {lr}")
        scheduler.step()


def test_constructs_without_clip():
    model, (x, y) = mlp(), vectors()
    opt = KFAC(model, kl_clip=None)
    train_step(opt, model, x, y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device (``numpy`` does not: it exists on the CPU only)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}:
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def reads(monkeypatch):
    with monkeypatch.context() as patch, Reads() as counter:
        for method in ("item", "tolist", "cpu"):
            original = getattr(torch.Tensor, method)

            def counted(tensor, *args, method=method, original=original, **kwargs):
                counter.seen.append(method)
                return original(tensor, *args, **kwargs)

            patch.setattr(torch.Tensor, method, counted)
        yield counter.seen


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"graft": "adam"},
        {"graft": "sgd", "clip_norm": 1.0},
        {"inner": "adamw"},
        {"clip_value": 0.1},
    ],
    ids=["plain", "momentum", "graft adam", "graft sgd and clip", "inner adamw", "clip value"],
)
def test_no_value_leaves_the_device_in_a_step(monkeypatch, method, options):
    """Neither where nothing is due nor where the factors are; a refresh may look at what LAPACK reports."""
    model, (x, y) = convnet(), images()
    settings = {"kl_clip": 1e-3, "inverse_method": method, "factor_update_steps": 2, "inv_update_steps": 100, **options}
    opt = plain_kfac(model, lr=0.01, **settings)
    train_step(opt, model, x, y, F.cross_entropy)
    for t in (1, 2, 3):
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        with reads(monkeypatch) as seen:
            opt.step()
        assert not seen, f"step {t}: {seen}"


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_no_value_leaves_the_device_in_backward(monkeypatch, method):
    model, (x, y) = convnet(), images()
    opt = plain_kfac(model, lr=0.01, inverse_method=method)
    for _ in range(2):
        opt.zero_grad()
        value = F.cross_entropy(model(x), y)
        with reads(monkeypatch) as seen:
            value.backward()
        assert not seen
        opt.step()


def test_detach_gives_the_module_back():
    model, (x, y) = convnet(), images()
    before, outputs = hook_counts(model), model(x).detach().clone()
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    opt = plain_kfac(model)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    train_step(opt, model, x, y, F.cross_entropy)
    opt.detach()
    assert hook_counts(model) == before
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == attributes
    model.load_state_dict(start)
    assert torch.equal(model(x), outputs)
    opt.detach()
    opt.close()
    assert hook_counts(model) == before


def test_a_with_block_detaches():
    model = mlp()
    before = hook_counts(model)
    with plain_kfac(model) as opt:
        train_step(opt, model, *vectors(), F.cross_entropy)
    assert hook_counts(model) == before


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True}, {"clip_value": 1e-3}, {"graft": "adam"}, {"foreach": False}],
    ids=["plain", "weight decay", "maximize", "clip value", "graft adam", "loop"],
)
def test_gradients_are_read_and_left_alone(options):
    """Neither rebound (bucket views of DDP) nor written to (the user may log them)."""
    model, (x, y) = convnet(), images()
    opt = plain_kfac(model, lr=0.01, momentum=0.9, kl_clip=1e-3, **options)
    for _ in range(2):
        opt.zero_grad()
        backward(model, x, y, F.cross_entropy)
        gradients = {n: p.grad for n, p in model.named_parameters()}
        kept = {n: (g.data_ptr(), g.clone()) for n, g in gradients.items()}
        opt.step()
        for n, p in model.named_parameters():
            assert p.grad is gradients[n]
            assert p.grad.data_ptr() == kept[n][0]
            assert torch.equal(p.grad, kept[n][1]), n


def test_two_optimizers_on_one_module():
    """Each has hooks and statistics of its own, and detaching one leaves the other."""
    model, (x, y) = mlp(), vectors()
    expected = expected_factors(twin(model), x, y, F.cross_entropy)
    first = plain_kfac(model, lr=0.0)
    second = plain_kfac(model, lr=0.0)
    backward(model, x, y, F.cross_entropy)
    first.step()
    second.step()
    assert_factors(all_factors(first, model), expected)
    assert_factors(all_factors(second, model), expected)
    first.detach()
    first.zero_grad()
    x, y = vectors(seed=1)
    expected = expected_factors(mlp(), x, y, F.cross_entropy)
    second.param_groups[0]["factor_decay"] = 0.0
    backward(model, x, y, F.cross_entropy)
    second.step()
    assert_factors(all_factors(second, model), expected)


def test_a_copied_model_carries_no_optimizer_along():
    """Hooks of a copy are inert: an averaged model neither holds the state twice nor feeds it."""
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model)
    train_step(opt, model, x, y, F.cross_entropy)
    held = all_factors(opt, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(pickle.dumps(other)) < 2 * len(pickle.dumps(mlp())) + 4000
        backward(other, *vectors(seed=1), F.cross_entropy)
    opt.zero_grad()
    opt.step()
    now = all_factors(opt, model)
    for name, (A, B) in held.items():
        assert torch.equal(now[name][0], A)
        assert torch.equal(now[name][1], B)


def test_an_averaged_model_works_beside_it():
    model, (x, _) = mlp(), vectors()
    opt = plain_kfac(model, lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for seed in range(2):
        train_step(opt, model, *vectors(seed=seed), F.cross_entropy)
        averaged.update_parameters(model)
    assert torch.isfinite(averaged(x)).all()


def test_the_swap_of_one_line_trains():
    """A constant sanity check under all these details: the loss falls, and faster than by plain gradient descent."""
    x, y = vectors(40)
    found = {}
    for name in ("kfac", "sgd"):
        model = mlp((4, 16, 3), activation=nn.ReLU)
        opt = KFAC(model, lr=0.1) if name == "kfac" else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(30):
            train_step(opt, model, x, y, F.cross_entropy)
        found[name] = F.cross_entropy(model(x), y).item()
    assert found["kfac"] < found["sgd"] < math.log(3)
