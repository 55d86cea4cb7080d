"""Lightning's own trainer drives every method as a loop written by hand does, to the last bit."""

from __future__ import annotations

import subprocess
import sys
import warnings
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

from secondorder import KFAC, MemOpt
from secondorder.integrations.lightning import SecondOrderCallback
from tests.integrations.lightning_models import (
    BATCHES,
    METHODS,
    Make,
    Module,
    assert_same_bits,
    batches,
    network,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*get no curvature and follow the fallback rule"),
]
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=20)


# ---------------------------------------------------------------------------------------------------------------------
# Automatic optimization, always with a closure
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["network", "module"])
@every_method
def test_training_is_that_of_a_plain_loop(make: Make, whole: bool) -> None:
    module = Module(make, whole=whole)
    trainer().fit(module, batches())
    expected = network()
    optimizer = make(expected)
    for _ in range(2):
        for inputs, targets in batches():
            optimizer.zero_grad()
            cross_entropy(expected(inputs), targets).backward()
            optimizer.step()
    assert_same_bits(module.network, expected)


@every_method
def test_clipping_accumulation_and_a_schedule(make: Make) -> None:
    module = Module(make, schedule=one_cycle)
    fitted = trainer(4, gradient_clip_val=0.1, accumulate_grad_batches=2)
    fitted.fit(module, batches())
    expected = network()
    optimizer = make(expected)
    scheduler = one_cycle(optimizer)
    for _ in range(4):
        for number, (inputs, targets) in enumerate(batches()):
            (cross_entropy(expected(inputs), targets) / 2).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert fitted.global_step == 4 * BATCHES // 2
    assert fitted.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert_same_bits(module.network, expected)


def test_a_closure_may_be_called_again() -> None:
    """Damping that follows the loss judges each step by the same batch."""

    def make(module: nn.Module) -> Any:
        return KFAC(module, lr=0.05, adaptive_damping=True, damping_interval=2)

    module = Module(make)
    trainer().fit(module, batches())
    expected = network()
    optimizer = make(expected)
    for _ in range(2):
        for inputs, targets in batches():

            def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
                optimizer.zero_grad()
                loss = cross_entropy(expected(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert_same_bits(module.network, expected)


def test_the_true_fisher_is_observed_in_the_training_step() -> None:
    class Observed(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.network(batch[0])
            self.optimizers(use_pl_optimizer=False).observe(logits, "categorical")
            return cross_entropy(logits, batch[1])

    def make(module: nn.Module) -> Any:
        return KFAC(module, lr=0.05, fisher="exact", factor_update_steps=1, inv_update_steps=4)

    module = Observed(make)
    trainer().fit(module, batches())
    expected = network()
    optimizer = make(expected)
    for _ in range(2):
        for inputs, targets in batches():
            optimizer.zero_grad()
            logits = expected(inputs)
            optimizer.observe(logits, "categorical")
            cross_entropy(logits, targets).backward()
            optimizer.step()
    assert_same_bits(module.network, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Manual optimization
# ---------------------------------------------------------------------------------------------------------------------


class TwoPlayers(pl.LightningModule):
    """Two networks with an optimizer each, of which one is frozen while the other learns."""

    def __init__(self, make: Make, toggled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.second = network()
        self.make, self.toggled = make, toggled
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return self.make(self.first), self.make(self.second)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        for number, optimizer in enumerate(self.optimizers()):
            if self.toggled:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            inner = self.first(inputs)
            loss = cross_entropy(self.second(inner.detach() if number else inner), targets)
            self.manual_backward(-loss if number else loss)
            optimizer.step()
            if self.toggled:
                self.untoggle_optimizer(optimizer)


@every_method
def test_manual_optimization_with_two_optimizers(make: Make) -> None:
    toggled, expected = TwoPlayers(make), TwoPlayers(make)
    fitted = trainer()
    fitted.fit(toggled, batches())
    first, second = expected.configure_optimizers()
    for _ in range(2):
        for inputs, targets in batches():
            first.zero_grad()
            cross_entropy(expected.second(expected.first(inputs)), targets).backward()
            first.step()
            second.zero_grad()
            (-cross_entropy(expected.second(expected.first(inputs).detach()), targets)).backward()
            second.step()
    assert fitted.global_step == 4 * BATCHES
    assert_same_bits(toggled, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Precision
# ---------------------------------------------------------------------------------------------------------------------


@every_method
def test_bfloat16_is_that_of_a_plain_loop(make: Make) -> None:
    module = Module(make)
    trainer(precision="bf16-mixed").fit(module, batches())
    expected = network()
    optimizer = make(expected)
    for _ in range(2):
        for inputs, targets in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = cross_entropy(expected(inputs), targets)
            loss.backward()
            optimizer.step()
    assert_same_bits(module.network, expected)


@every_method
def test_float16_is_that_of_a_plain_loop(make: Make) -> None:
    """On the CPU, Lightning makes bfloat16 of "16-mixed"; its plugin for float16 is driven here as on a GPU.

    The first scale makes the gradients overflow: those batches are left out, by both.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    module = Module(make)
    fitted = trainer(
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        gradient_clip_val=0.5,
        callbacks=[SecondOrderCallback()],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "KFAC|EKFAC|HyLo|SparseMFAC")
        fitted.fit(module, batches())
    assert fitted.optimizers[0].grad_scaler is scaler

    other = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    expected = network()
    optimizer = make(expected, grad_scaler=other)  # type: ignore[call-arg]
    for _ in range(2):
        for inputs, targets in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = cross_entropy(expected(inputs), targets)
            other.scale(loss).backward()
            other.unscale_(optimizer)
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            other.step(optimizer)
            other.update()
    assert scaler.get_scale() == other.get_scale() < 2.0**24
    assert 0 < optimizer.diagnostics()["step"] < 2 * BATCHES
    assert_same_bits(module.network, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


@every_method
def test_resumed_training_is_that_of_an_uninterrupted_one(make: Make, tmp_path: Path) -> None:
    """In the middle of an interval, and read with `weights_only`."""
    whole = Module(make, schedule=one_cycle)
    trainer(3).fit(whole, batches())
    begun = Module(make, schedule=one_cycle)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    trainer(1, callbacks=[keep, SecondOrderCallback()], enable_checkpointing=True).fit(begun, batches())
    saved = torch.load(keep.last_model_path, weights_only=True)
    assert saved["optimizer_states"][0]["state"]
    resumed = Module(make, schedule=one_cycle)
    trainer(3).fit(resumed, batches(), ckpt_path=keep.last_model_path, weights_only=True)
    assert begun.losses + resumed.losses == whole.losses
    assert_same_bits(resumed.network, whole.network)


def test_a_checkpoint_of_weights_alone_is_saved(tmp_path: Path) -> None:
    module = Module(METHODS["KFAC"])
    fitted = trainer(1, callbacks=[SecondOrderCallback()])
    fitted.fit(module, batches())
    fitted.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


# ---------------------------------------------------------------------------------------------------------------------
# The callback
# ---------------------------------------------------------------------------------------------------------------------


def test_diagnostics_go_to_every_logger(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, name="board"), CSVLogger(tmp_path, name="table")]
    fitted = trainer(2, logger=loggers, callbacks=[SecondOrderCallback(log_every_n_steps=5)])
    fitted.fit(Module(METHODS["KFAC"]), batches())
    events = EventAccumulator(loggers[0].log_dir).Reload()
    seen = events.Scalars("secondorder/step")
    assert [(event.step, event.value) for event in seen] == [(5, 5.0), (10, 10.0)]
    assert [e.value for e in events.Scalars("secondorder/damping/0")] == pytest.approx([0.01, 0.01])
    header = (Path(loggers[1].log_dir) / "metrics.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert {"secondorder/kl_clip_factor", "secondorder/skipped_steps", "step"} <= set(header)


def test_several_optimizers_are_told_apart(tmp_path: Path) -> None:
    """`global_step` counts the steps of both, and those of accumulated batches once; foreign ones are left alone."""

    class Mixed(TwoPlayers):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.first.parameters(), lr=0.1), self.make(self.second)

    logger = TensorBoardLogger(tmp_path)
    callback = SecondOrderCallback(log_every_n_steps=8)
    trainer(1, logger=logger, callbacks=[callback]).fit(Mixed(METHODS["KFAC"]), batches())
    events = EventAccumulator(logger.log_dir).Reload()
    assert [(e.step, e.value) for e in events.Scalars("secondorder/1/step")] == [(8, 4.0)]
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("secondorder/0/")]


def test_a_resumed_run_logs_where_it_goes_on(tmp_path: Path) -> None:
    module, callback = Module(METHODS["KFAC"]), SecondOrderCallback(log_every_n_steps=4)
    fitted = trainer(1, callbacks=[callback])
    fitted.fit(module, batches())
    fitted.save_checkpoint(tmp_path / "at-6.ckpt")
    logger = TensorBoardLogger(tmp_path)
    again = trainer(2, logger=logger, callbacks=[SecondOrderCallback(log_every_n_steps=4)])
    again.fit(Module(METHODS["KFAC"]), batches(), ckpt_path=tmp_path / "at-6.ckpt", weights_only=True)
    events = EventAccumulator(logger.log_dir).Reload()
    assert [(e.step, e.value) for e in events.Scalars("secondorder/step")] == [(8, 8.0), (12, 12.0)]


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_a_wrong_interval_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="log_every_n_steps"):
        SecondOrderCallback(log_every_n_steps=steps)


def test_one_process_with_a_strategy_has_nothing_to_complete(tmp_path: Path) -> None:
    def make(module: nn.Module) -> Any:
        return KFAC(module, lr=0.05, comm=MemOpt())

    fitted = trainer(1, callbacks=[SecondOrderCallback()])
    fitted.fit(Module(make), batches())
    fitted.save_checkpoint(tmp_path / "one.ckpt")
    assert "partial" not in torch.load(tmp_path / "one.ckpt", weights_only=True)["optimizer_states"][0]


@pytest.mark.slow
def test_the_older_name_of_the_library_has_its_own_callback() -> None:
    """`pytorch_lightning` is another package with other classes, and its trainer wants its own."""
    program = (
        "import pytorch_lightning; from secondorder.integrations.lightning import SecondOrderCallback;"
        "assert issubclass(SecondOrderCallback, pytorch_lightning.Callback)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


# ---------------------------------------------------------------------------------------------------------------------
# Beside it
# ---------------------------------------------------------------------------------------------------------------------


@every_method
def test_a_moving_average_of_the_weights_leaves_training_alone(make: Make, tmp_path: Path) -> None:
    """The callback copies the whole module, hooks included."""
    plain, averaged = Module(make), Module(make)
    trainer(3).fit(plain, batches())
    fitted = trainer(3, callbacks=[EMAWeightAveraging(decay=0.5)])
    fitted.fit(averaged, batches())
    assert averaged.losses == plain.losses
    assert any(not torch.equal(a, b) for a, b in zip(averaged.parameters(), plain.parameters(), strict=True))


@every_method
def test_stochastic_weight_averaging_trains_on(make: Make) -> None:
    module = Module(make)
    trainer(4, callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=1)]).fit(
        module, batches()
    )
    assert sum(module.losses[-BATCHES:]) < sum(module.losses[:BATCHES])


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
