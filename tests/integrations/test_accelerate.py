"""Accelerate on one process: ``prepare``, ``accumulate``, ``save_state``, ``load_state`` and skipped steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LinearLR

from secondorder.integrations.accelerate import consolidate_before_save
from secondorder.optimizer import SecondOrderOptimizer
from tests.integrations.small import METHODS, assert_same_bits, batches, give_a_scaler, make, network, parameters

ACCUMULATED, EPOCHS = 2, 2

every_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Reset the settings that an ``Accelerator`` inherits from earlier ones of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """A training script as in the documentation of Accelerate."""

    def __init__(self, name: str, options: dict[str, Any] | None = None, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **settings)
        self.bare = network()
        self.optimizer = make(name, self.bare, **options or {})
        scheduler = LinearLR(self.optimizer, 1.0, 0.1, total_iters=8)
        self.model, self.prepared, self.loader, self.scheduler = self.accelerator.prepare(
            self.bare, self.optimizer, batches(), scheduler
        )

    def train(self, epochs: int) -> list[float]:
        losses = []
        for _ in range(epochs):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = cross_entropy(self.model(inputs), targets)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.prepared.step()
                    self.scheduler.step()
                    self.prepared.zero_grad()
                losses.append(loss.item())
        return losses


def by_hand(name: str, **options: Any) -> tuple[nn.Module, SecondOrderOptimizer]:
    model = network()
    optimizer = make(name, model, **options)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    for _ in range(EPOCHS):
        for i, (inputs, targets) in enumerate(batches()):
            (cross_entropy(model(inputs), targets) / ACCUMULATED).backward()
            if (i + 1) % ACCUMULATED == 0:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, optimizer


@every_method
def test_prepared_and_accumulated_training_is_that_of_a_plain_loop(name: str) -> None:
    run = Run(name)
    run.train(EPOCHS)
    model, optimizer = by_hand(name)
    assert_same_bits(run.bare, model)
    assert run.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < METHODS[name][1]["lr"]
    assert not any("fallback" in line for line in run.optimizer.describe().splitlines()[2:])
    counts = [s.get("refreshes", s.get("count", 0)) for s in run.optimizer.state.values()]
    assert max(counts) > 0


@every_method
def test_the_wrapper_changes_nothing_in_the_middle_of_training(name: str) -> None:
    """The wrapper loads the optimizer's own state into the optimizer."""
    wrapped, plain = network(), network()
    optimizers = [make(name, wrapped), make(name, plain)]
    accelerator = Accelerator(cpu=True)
    prepared: list[Any] = list(optimizers)
    for step in range(6):
        if step == 3:
            prepared[0] = accelerator.prepare(optimizers[0])
        for model, optimizer in zip((wrapped, plain), prepared, strict=True):
            draw = torch.Generator().manual_seed(step)
            cross_entropy(model(torch.randn(8, 6, generator=draw)), torch.arange(8) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(wrapped, plain)


@every_method
def test_a_loaded_state_continues_bitwise(name: str, tmp_path: Path) -> None:
    whole = Run(name)
    before = whole.train(1)
    whole.accelerator.save_state(str(tmp_path / "state"))
    after = whole.train(1)
    saved = torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)
    assert saved["state"][0]["step"] == len(before) / ACCUMULATED
    resumed = Run(name)
    with torch.no_grad():
        resumed.bare[0].weight.zero_()  # load_state restores it
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert resumed.train(1) == after
    assert_same_bits(resumed.bare, whole.bare)


def test_the_state_is_gathered_before_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = Run("kfac"), []
    monkeypatch.setattr(
        run.optimizer, "consolidate_state_dict", lambda to=0, pieces=True: seen.append(f"gather to {to}")
    )
    run.optimizer.register_state_dict_pre_hook(lambda _: seen.append("state"))
    handle = consolidate_before_save(run.accelerator, run.prepared)
    run.accelerator.save_state(str(tmp_path / "first"))
    assert seen == ["gather to 0", "state"]
    run.accelerator.project_configuration.save_on_each_node = True
    run.accelerator.save_state(str(tmp_path / "second"))
    assert seen[2:] == ["gather to None", "state"]
    handle.remove()
    run.accelerator.save_state(str(tmp_path / "third"))
    assert seen[4:] == ["state"]


def test_other_optimizers_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="got SGD"):
        consolidate_before_save(accelerator, optimizer)


# ---------------------------------------------------------------------- float16
class HalfRun(Run):
    """A run in float16. On a CPU Accelerate creates no scaler, so the test provides one."""

    def __init__(self, name: str, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patched:
            give_a_scaler(patched)
            super().__init__(name, options, mixed_precision="fp16")


@every_method
def test_a_batch_that_overflows_is_no_step(name: str) -> None:
    run = HalfRun(name)
    skipped = []
    for i, (inputs, targets) in enumerate(run.loader):
        with run.accelerator.accumulate(run.model):
            outputs = run.model(inputs)
            loss = cross_entropy(outputs, targets)
            run.accelerator.backward(loss * (float("inf") if i == 2 else 1.0))
            if run.accelerator.sync_gradients:
                run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
            before = parameters(run.bare)
            run.prepared.step()
            run.scheduler.step()
            run.prepared.zero_grad()
            if run.accelerator.sync_gradients:
                skipped.append(run.accelerator.optimizer_step_was_skipped)
                assert skipped[-1] == all(torch.equal(before[n], p) for n, p in run.bare.named_parameters())
    assert outputs.dtype == torch.float32  # Accelerate converts what leaves the model
    assert skipped == [False, True, False]
    assert run.optimizer.diagnostics()["step"] == 2
    assert run.optimizer.grad_scaler is run.accelerator.scaler or name == "sparse_mfac"
    assert run.scheduler.get_last_lr() == [pytest.approx(METHODS[name][1]["lr"] * (1 - 0.9 * 2 / 8))]  # two steps
    for state in run.optimizer.state.values():  # in HyLo's switch_state, NaN marks unknown values
        numbers = [v for key, v in state.items() if isinstance(v, torch.Tensor) and key != "switch_state"]
        assert all(torch.isfinite(v).all() for v in numbers)


def test_float16_trains_as_float32() -> None:
    half = HalfRun("kfac", lr=0.1, damping=0.1)
    half.optimizer.grad_scaler = half.accelerator.scaler  # otherwise the statistics of the first batch are left out
    half.train(EPOCHS)
    full, _ = by_hand("kfac", lr=0.1, damping=0.1)
    for mine, theirs in zip(half.bare.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)
