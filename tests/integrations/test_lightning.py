"""Every method trains under Lightning exactly as in a handwritten loop."""

import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from secondorder import AdaptationOptions, MemOpt
from secondorder.integrations.lightning import SecondOrderCallback
from tests.integrations.lightning_models import METHODS, Make, Module, fit
from tests.integrations.small import BATCHES, assert_same_bits, batches, by_hand, network, repeated

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*get no curvature and follow the fallback rule"),
]
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=20)


# ---------------------------------------------------------------------- automatic optimization
@every_method
def test_training_in_bfloat16_is_that_of_a_plain_loop(make: Make) -> None:
    module = Module(make)
    fit(module, precision="bf16-mixed")
    assert_same_bits(module.network, by_hand(make, cast=torch.bfloat16)[0])


@pytest.mark.parametrize("whole", [False, True])
@every_method
def test_clipping_accumulation_and_a_schedule(make: Make, whole: bool) -> None:
    """The optimizer gets either the network or the whole module."""
    module = Module(make, whole=whole, schedule=one_cycle)
    fitted = fit(module, 4, gradient_clip_val=0.1, accumulate_grad_batches=2)
    expected, optimizer = by_hand(make, 4, accumulate=2, clip=0.1, schedule=one_cycle)
    assert fitted.global_step == 4 * BATCHES // 2
    assert fitted.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert_same_bits(module.network, expected)


@every_method
def test_float16_training_is_that_of_a_plain_loop(make: Make) -> None:
    """On the CPU, Lightning turns "16-mixed" into bfloat16, so the test passes the plugin for float16 itself.

    Gradients overflow with the first scale, and both runs skip those batches.
    """
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=2.0**24) for _ in range(2))
    module, plugin = Module(make), MixedPrecision("16-mixed", "cpu", scaler=scaler)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "KFAC|EKFAC|HyLo|SparseMFAC")
        fitted = fit(module, plugins=[plugin], gradient_clip_val=0.5, callbacks=[SecondOrderCallback()])
    assert fitted.optimizers[0].grad_scaler is scaler
    expected, optimizer = by_hand(make, clip=0.5, cast=torch.float16, scaler=other)
    assert scaler.get_scale() == other.get_scale() < 2.0**24
    assert 0 < optimizer.diagnostics()["step"] < 2 * BATCHES
    assert_same_bits(module.network, expected)


def test_without_the_callback_the_first_step_finds_the_loss_scaler() -> None:
    """The curvature of the last batch equals that of unscaled float32."""

    make = partial(METHODS["kfac"], lr=0.0, damping=0.1, factor_decay=0.0, inv_update_steps=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    (optimizer,) = fit(Module(make), 1, plugins=[plugin], gradient_clip_val=0.5).optimizers
    assert optimizer.grad_scaler is scaler
    assert optimizer.diagnostics()["step"] == BATCHES
    _, plain = by_hand(make, 1)
    for block in ("0", "2"):
        expected = plain.dense_curvature(block)
        assert float((optimizer.dense_curvature(block) - expected).norm() / expected.norm()) < 2e-2, block


def test_a_closure_may_be_called_again() -> None:
    """Adaptive damping evaluates each step again on the same batch."""

    make = partial(METHODS["kfac"], adaptation=AdaptationOptions(adaptive_damping=True, damping_interval=2))
    module = Module(make)
    fit(module)
    expected = network()
    optimizer = make(expected)
    for inputs, targets in repeated(2):

        def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            loss = cross_entropy(expected(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_bits(module.network, expected)


def test_the_true_fisher_is_observed_in_the_training_step() -> None:
    def observe(optimizer: Any, logits: Any) -> None:
        optimizer.observe(logits, "categorical")

    class Observed(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.network(batch[0])
            observe(self.optimizers(use_pl_optimizer=False), logits)
            return cross_entropy(logits, batch[1])

    make = partial(METHODS["kfac"], fisher="exact")
    module = Observed(make)
    fit(module)
    assert_same_bits(module.network, by_hand(make, observe=observe)[0])


# ---------------------------------------------------------------------- manual optimization
class TwoPlayers(pl.LightningModule):
    """Two networks with one optimizer each. One network is frozen while the other is trained."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.second = network()
        self.make, self.automatic_optimization = make, False

    def configure_optimizers(self) -> Any:
        return self.make(self.first), self.make(self.second)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            inner = self.first(inputs)
            loss = cross_entropy(self.second(inner.detach() if number else inner), targets)
            self.manual_backward(-loss if number else loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@every_method
def test_manual_optimization_with_two_optimizers(make: Make) -> None:
    toggled, expected = TwoPlayers(make), TwoPlayers(make)
    fitted = fit(toggled)
    first, second = expected.configure_optimizers()
    for inputs, targets in repeated(2):
        first.zero_grad()
        cross_entropy(expected.second(expected.first(inputs)), targets).backward()
        first.step()
        second.zero_grad()
        (-cross_entropy(expected.second(expected.first(inputs).detach()), targets)).backward()
        second.step()
    assert fitted.global_step == 4 * BATCHES
    assert_same_bits(toggled, expected)


# ---------------------------------------------------------------------- checkpoints
@every_method
def test_resumed_training_is_that_of_an_uninterrupted_one(make: Make, tmp_path: Path) -> None:
    """The run resumes in the middle of an interval, and the checkpoint is read with `weights_only`."""
    whole, begun, resumed = (Module(make, schedule=one_cycle) for _ in range(3))
    fit(whole, 3)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(begun, 1, callbacks=[keep, SecondOrderCallback()], enable_checkpointing=True)
    saved = torch.load(keep.last_model_path, weights_only=True)
    assert saved["optimizer_states"][0]["state"]
    fit(resumed, 3, ckpt_path=keep.last_model_path, weights_only=True)
    assert begun.losses + resumed.losses == whole.losses
    assert_same_bits(resumed.network, whole.network)


def test_one_process_with_a_strategy_has_nothing_to_complete(tmp_path: Path) -> None:
    """The same holds for a checkpoint of only the weights."""
    fitted = fit(Module(partial(METHODS["kfac"], comm=MemOpt())), 1, callbacks=[SecondOrderCallback()])
    for alone in (False, True):
        fitted.save_checkpoint(tmp_path / "one.ckpt", weights_only=alone)
        saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
        assert ("optimizer_states" in saved) != alone
        assert "partial" not in saved.get("optimizer_states", [{}])[0]


# ---------------------------------------------------------------------- logging
def logged(logger: TensorBoardLogger, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(logger.log_dir).Reload()
    return [(event.step, event.value) for event in events.Scalars(f"secondorder/{tag}")]


def test_diagnostics_go_to_every_logger_and_a_resumed_run_continues_its_log(tmp_path: Path) -> None:
    begun = fit(Module(METHODS["kfac"]), 1, callbacks=[SecondOrderCallback(log_every_n_steps=4)])
    begun.save_checkpoint(tmp_path / "at-6.ckpt")
    loggers = [TensorBoardLogger(tmp_path, name="board"), CSVLogger(tmp_path, name="table")]
    more = {"logger": loggers, "callbacks": [SecondOrderCallback(log_every_n_steps=4)]}
    fit(Module(METHODS["kfac"]), 2, ckpt_path=tmp_path / "at-6.ckpt", weights_only=True, **more)
    assert logged(loggers[0], "step") == [(8, 8.0), (12, 12.0)]
    assert [value for _, value in logged(loggers[0], "damping/0")] == pytest.approx([0.01, 0.01])
    header = (Path(loggers[1].log_dir) / "metrics.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert {"secondorder/kl_clip_factor", "secondorder/skipped_steps", "step"} <= set(header)


def test_several_optimizers_are_logged_by_number(tmp_path: Path) -> None:
    """`global_step` counts the steps of both optimizers. Only those of this package are logged."""

    class Mixed(TwoPlayers):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.first.parameters(), lr=0.1), self.make(self.second)

    logger = TensorBoardLogger(tmp_path)
    fit(Mixed(METHODS["kfac"]), 1, logger=logger, callbacks=[SecondOrderCallback(log_every_n_steps=8)])
    assert logged(logger, "1/step") == [(8, 4.0)]
    tags = EventAccumulator(logger.log_dir).Reload().Tags()["scalars"]
    assert not [tag for tag in tags if tag.startswith("secondorder/0/")]


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_a_wrong_interval_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="log_every_n_steps"):
        SecondOrderCallback(log_every_n_steps=steps)


@pytest.mark.slow
def test_the_older_name_of_the_library_has_its_own_callback() -> None:
    """`pytorch_lightning` is a separate package, and its trainer needs a callback of its own class."""
    program = (
        "import pytorch_lightning; from secondorder.integrations.lightning import SecondOrderCallback;"
        "assert issubclass(SecondOrderCallback, pytorch_lightning.Callback)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


# ---------------------------------------------------------------------- averages of weights, and Fabric
@every_method
def test_averages_of_the_weights_leave_training_alone(make: Make) -> None:
    """The callback of a moving average copies the whole module including its hooks."""
    plain, averaged, stochastic = Module(make), Module(make), Module(make)
    fit(plain, 3)
    fit(averaged, 3, callbacks=[EMAWeightAveraging(decay=0.5)])
    assert averaged.losses == plain.losses
    assert any(not torch.equal(a, b) for a, b in zip(averaged.parameters(), plain.parameters(), strict=True))
    fit(stochastic, 4, callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=1)])
    assert sum(stochastic.losses[-BATCHES:]) < sum(stochastic.losses[:BATCHES])


@every_method
def test_fabric_trains_saves_and_resumes(make: Make, tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)

    def begin() -> tuple[Any, Any]:
        return fabric.setup(net := network(), make(net))

    def train(model: Any, optimizer: Any) -> None:
        for inputs, targets in batches():
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(inputs), targets))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()

    model, optimizer = begin()
    train(model, optimizer)
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    train(model, optimizer)
    resumed, other = begin()
    fabric.load(tmp_path / "state.ckpt", {"model": resumed, "optimizer": other}, weights_only=True)
    train(resumed, other)
    assert_same_bits(resumed, model)
