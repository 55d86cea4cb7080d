"""Accelerate on one process: ``prepare``, ``accumulate``, ``save_state``, ``load_state`` and skipped steps."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from secondorder.integrations.accelerate import consolidate_before_save
from secondorder.optimizer import SecondOrderOptimizer
from tests.integrations import small
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
        prepared = self.accelerator.prepare(self.bare, self.optimizer, batches(), linear(self.optimizer))
        self.model, self.prepared, self.loader, self.scheduler = prepared

    def step(self, inputs: Tensor, targets: Tensor, factor: float = 1.0) -> tuple[Tensor, float]:
        """Train on a micro-batch; return its outputs and its loss."""
        with self.accelerator.accumulate(self.model):
            outputs = self.model(inputs)
            loss = cross_entropy(outputs, targets)
            self.accelerator.backward(factor * loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.prepared.step()
            self.scheduler.step()
            self.prepared.zero_grad()
        return outputs, loss.item()

    def train(self, epochs: int) -> list[float]:
        return [self.step(*batch)[1] for _ in range(epochs) for batch in self.loader]


def linear(optimizer: torch.optim.Optimizer) -> LinearLR:
    return LinearLR(optimizer, 1.0, 0.1, total_iters=8)


def by_hand(name: str, **options: Any) -> tuple[nn.Module, SecondOrderOptimizer]:
    made = partial(make, name, **options)
    return small.by_hand(made, EPOCHS, accumulate=ACCUMULATED, clip=1.0, schedule=linear)


@every_method
def test_prepared_and_accumulated_training_is_that_of_a_plain_loop(name: str) -> None:
    """In the middle, the optimizer is wrapped again, and the wrapper loads the optimizer's own state into it."""
    run = Run(name)
    run.train(EPOCHS // 2)
    run.prepared = AcceleratedOptimizer(run.optimizer)
    run.train(EPOCHS - EPOCHS // 2)
    model, optimizer = by_hand(name)
    assert_same_bits(run.bare, model)
    assert run.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < METHODS[name][1]["lr"]
    assert not any("fallback" in line for line in run.optimizer.describe().splitlines()[2:])
    counts = [s.get("refreshes", s.get("count", 0)) for s in run.optimizer.state.values()]
    assert max(counts) > 0


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

    def gather(to: int | None = 0, pieces: bool = True) -> None:
        seen.append(f"gather to {to}")

    monkeypatch.setattr(run.optimizer, "consolidate_state_dict", gather)
    run.optimizer.register_state_dict_pre_hook(lambda _: seen.append("state"))
    handle = consolidate_before_save(run.accelerator, run.prepared)
    run.accelerator.save_state(str(tmp_path / "first"))
    run.accelerator.project_configuration.save_on_each_node = True
    run.accelerator.save_state(str(tmp_path / "second"))
    handle.remove()
    run.accelerator.save_state(str(tmp_path / "third"))
    assert seen == ["gather to 0", "state", "gather to None", "state", "state"]
    other = run.accelerator.prepare(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="got SGD"):
        consolidate_before_save(run.accelerator, other)


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
        before = parameters(run.bare)
        outputs, _ = run.step(inputs, targets, factor=float("inf") if i == 2 else 1.0)
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
