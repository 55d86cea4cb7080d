"""What TensorBoard reads of an optimizer that trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from secondorder import EKFAC, KFAC, HyLo, SparseMFAC
from secondorder.diagnostics import StageClock, flat
from secondorder.integrations.tensorboard import TensorBoardCallback

METHODS = {"KFAC": KFAC, "EKFAC": EKFAC, "HyLo": HyLo, "SparseMFAC": SparseMFAC}


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("method", METHODS)
def test_every_number_is_there_at_every_third_step(method: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = METHODS[method](model, lr=0.01)
    expected: dict[int, dict[str, float]] = {}
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(optimizer, writer, every=3, by_layer=True) as callback:
        for step in range(1, 8):
            train(model, optimizer, 1)
            expected[step] = flat(optimizer.diagnostics())
        callback.close()
        train(model, optimizer, 3)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()["scalars"]
    assert {tag.removeprefix("secondorder/") for tag in tags} == set(expected[3]) | set(expected[6])
    for tag in tags:
        for event in events.Scalars(tag):
            assert event.step in {3, 6}
            assert event.value == pytest.approx(expected[event.step][tag.removeprefix("secondorder/")], rel=1e-6)


def test_layers_are_summed_up_unless_they_are_wanted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = KFAC(model, lr=0.01, inv_update_steps=1, factor_update_steps=1)
    optimizer.time_stages(StageClock())
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(optimizer, writer, every=2):
        train(model, optimizer, 2)
    found = optimizer.diagnostics()
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"secondorder/damping/0", "secondorder/stage_ms/update", "secondorder/kl_clip_factor"} <= tags
    assert not [tag for tag in tags if tag.startswith("secondorder/condition_number/") and not tag.endswith("/max")]
    (largest,) = events.Scalars("secondorder/condition_number/max")
    assert largest.value == pytest.approx(max(found["condition_number"].values()))


def test_the_only_window_is_reported_in_full(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SparseMFAC(model, lr=0.01)
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(optimizer, writer, every=2):
        train(model, optimizer, 2)
    events = EventAccumulator(str(tmp_path)).Reload()
    (angle,) = events.Scalars("secondorder/units/all/angle")
    assert angle.value == pytest.approx(optimizer.diagnostics()["units"]["all"]["angle"])


def test_steps_are_those_of_the_optimizer_after_a_checkpoint_too(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = KFAC(model, lr=0.01)
    train(model, optimizer, 5)
    resumed = KFAC(model, lr=0.01)
    resumed.load_state_dict(optimizer.state_dict())
    optimizer.close()
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(resumed, writer, every=2):
        train(model, resumed, 4)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("secondorder/step")] == [7, 9]


def test_the_wrapper_of_accelerate_will_do(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    wrapped = Accelerator(cpu=True).prepare(KFAC(model, lr=0.01))
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(wrapped, writer, every=2):
        train(model, wrapped, 2)
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("secondorder/step")[0].value == 2


def test_the_callback_leaves_training_and_copies_alone(tmp_path: Path) -> None:
    losses = []
    for logged in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = KFAC(model, lr=0.1)
        if logged:
            TensorBoardCallback(optimizer, SummaryWriter(tmp_path), every=1)
        train(model, optimizer, 4)
        losses.append([p.detach().clone() for p in model.parameters()])
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_what_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = KFAC(model, lr=0.1)
    writer = SummaryWriter(tmp_path)
    with pytest.raises(TypeError, match="optimizer of secondorder .* got SGD"):
        TensorBoardCallback(torch.optim.SGD(model.parameters(), lr=0.1), writer)
    with pytest.raises(TypeError, match="add_scalar"):
        TensorBoardCallback(optimizer, "runs")  # type: ignore[arg-type]
    for every in (0, 2.5, True):
        with pytest.raises(ValueError, match="every"):
            TensorBoardCallback(optimizer, writer, every)  # type: ignore[arg-type]
    writer.close()
