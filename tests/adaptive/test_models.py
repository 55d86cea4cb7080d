"""Adaptation with models that are compiled, in bfloat16, partly frozen, with attention, or observed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder import EKFAC, KFAC
from tests.support.building import built
from tests.support.quadratic import Loop, batch, damping, flat, gauss_newton, kfac, mlp, problem, repeat

ALL: dict[str, Any] = {
    "adaptive_damping": True, "damping_interval": 2, "reject_steps": True, "quadratic_model": True,
    "likelihood": "categorical", "calibrate_damping": True, "lr": 1.0, "kl_clip": None,
}  # fmt: skip


class Sequence(nn.Module):
    """Tokens to logits: embedding, norm, attention, a residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        found = self.head(x + self.mlp(x))
        assert isinstance(found, Tensor)
        return found


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_a_transformer_learns_with_all_options(method: type[KFAC]) -> None:
    model, tokens = Sequence(), torch.randint(0, 7, (6, 5))
    optimizer = built(method, model, damping=0.1, loss_terms=5, factor_update_steps=1, inv_update_steps=2, **ALL)
    loop = Loop(model, optimizer, tokens, tokens, token_loss, outputs=True)
    before = loop.value()
    repeat(optimizer, loop, 8)
    assert loop.value() < 0.5 * before
    assert optimizer.diagnostics()["reduction_ratio"] is not None


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_a_convolution_with_running_statistics_learns() -> None:
    """The learning rate is a tensor."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    )
    x, y = torch.randn(12, 1, 6, 6), torch.randint(0, 3, (12,))
    optimizer = built(KFAC, model, damping=0.1, **{**ALL, "lr": torch.tensor(1.0)})
    losses = repeat(optimizer, Loop(model, optimizer, x, y, outputs=True), 8)
    assert losses[-1] < 0.6 * losses[0]
    assert int(model[1].num_batches_tracked) == 8  # one per step, however often the loss was evaluated


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_trains_as_in_eager_mode(in_place: bool) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, (x, y) = mlp(), batch()
        run: Any = model
        if compiled and in_place:
            model.compile(backend="eager")
        elif compiled:
            run = torch.compile(model, backend="eager")
        optimizer = built(KFAC, run, damping=0.1, **ALL)
        repeat(optimizer, Loop(run, optimizer, x, y, outputs=True), 5)
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("cast", [False, True])
def test_models_learn_in_bfloat16_and_under_autocast(cast: bool) -> None:
    x, y = batch()
    model, inputs = (mlp().bfloat16(), x.bfloat16()) if cast else (mlp().float(), x.float())
    optimizer = built(KFAC, model, damping=0.1, **ALL)
    loop = Loop(model, optimizer, inputs, y, outputs=True)

    def closure() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            return loop()

    losses = repeat(optimizer, closure, 6)
    assert losses[-1] < 0.8 * losses[0]


def test_frozen_parameters_do_not_move_in_the_model() -> None:
    model, (x, y) = mlp(), batch()
    C = gauss_newton(model, x, y)[20:, 20:]
    model[0].requires_grad_(False)
    optimizer, theta = kfac(model, quadratic_model=True, likelihood="categorical"), flat(model[3].parameters())
    with optimizer.keep_directions() as kept:
        optimizer.step(Loop(model, optimizer, x, y, outputs=True))
    V = flat([kept["3.weight"], kept["3.bias"]])
    alpha = -(flat(p.grad for p in model[3].parameters()) @ V) / (V @ C @ V + 0.1 * V @ V)
    torch.testing.assert_close(flat(model[3].parameters()) - theta, alpha * V)


@pytest.mark.parametrize("fisher", ["mc", "exact", "curvature_prop"])
def test_observing_in_the_closure_counts_once(fisher: str) -> None:
    """Observations of the second evaluation are dropped: the factors are those of a run without it."""
    factors = []
    for adaptive in (False, True):
        torch.manual_seed(0)
        _, optimizer, loop = problem(fisher=fisher, adaptive_damping=adaptive, damping_interval=1, lr=0.0)
        loop.loss = lambda f, y, opt=optimizer: (opt.observe(f, "categorical"), F.cross_entropy(f, y))[1]
        repeat(optimizer, loop, 3)
        factors.append([optimizer.dense_curvature(name) for name in optimizer.blocks])
    torch.testing.assert_close(*factors, rtol=0, atol=0)


def test_the_warning_about_layers_that_are_not_captured_remains() -> None:
    """A second evaluation pauses capture and must not be mistaken for the user's pause, which silences the warning."""
    model, optimizer, loop = problem(adaptive_damping=True, damping_interval=1)
    optimizer.step(loop)
    model.eval()
    with pytest.warns(UserWarning, match="nothing was captured"):
        optimizer.step(loop)


def test_schedules_remain_effective() -> None:
    _, optimizer, loop = problem(lr=1.0, adaptive_damping=True, damping_interval=1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for expected in (1.0, 0.5, 0.25):
        assert optimizer.param_groups[0]["lr"] == expected
        optimizer.step(loop)
        schedule.step()
    other = secondorder.ParamScheduler(optimizer, damping={0: 0.7, 1: 0.5})
    optimizer.step(loop)
    other.step()
    assert damping(optimizer) == 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_device_trains_as_the_cpu_and_its_generator_is_restored(dropout: float) -> None:
    found, states = [], []
    for device, adaptive in (("cpu", True), ("cuda", True), ("cuda", False)):
        torch.manual_seed(0)
        model, (x, y) = mlp(dropout), batch()
        model, x, y = model.to(device), x.to(device), y.to(device)
        torch.cuda.manual_seed(0)
        optimizer = built(KFAC, model, damping=0.1, **ALL if adaptive else {})
        repeat(optimizer, Loop(model, optimizer, x, y, outputs=True), 6)
        found.append((flat(model.parameters()).cpu(), damping(optimizer)))
        states.append(torch.cuda.get_rng_state())
    assert torch.equal(states[1], states[2])  # second evaluations do not affect it
    if not dropout:  # dropout masks differ
        torch.testing.assert_close(*found[:2])
