"""TensorBoard reads the diagnostics of an optimizer back from the event files of the callback."""

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
from tests.integrations.small import regress


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag, without the name of the package."""
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    assert all(tag.startswith("secondorder/") for tag in tags)
    return {tag.removeprefix("secondorder/"): [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo, SparseMFAC])
def test_every_value_is_written_at_every_third_step(method: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = method(model, lr=0.01)
    expected: dict[int, dict[str, float]] = {}
    by_layer = method is not SparseMFAC  # its only window is reported in any case
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(optimizer, writer, 3, by_layer=by_layer) as callback:
        for step in range(1, 8):
            regress(model, optimizer, 1)
            expected[step] = flat(optimizer.diagnostics())
        callback.close()
        regress(model, optimizer, 3)
    found = read(tmp_path)
    assert found.keys() == expected[3].keys() | expected[6].keys()
    for tag, values in found.items():
        for step, value in values:
            assert step in {3, 6}
            assert value == pytest.approx(expected[step][tag], rel=1e-6)


def test_layers_are_summarized_by_default(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = KFAC(model, lr=0.01, inv_update_steps=1, factor_update_steps=1)
    optimizer.time_stages(StageClock())
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(optimizer, writer, every=2):
        regress(model, optimizer, 2)
    found = read(tmp_path)
    assert {"damping/0", "stage_ms/update", "kl_clip_factor"} <= found.keys()
    assert [tag for tag in found if tag.startswith("condition_number/")] == ["condition_number/max"]
    largest = max(optimizer.diagnostics()["condition_number"].values())
    assert found["condition_number/max"] == [(2, pytest.approx(largest))]


def test_steps_continue_after_a_checkpoint(tmp_path: Path) -> None:
    """The optimizer may be wrapped by Accelerate."""
    model = nn.Linear(4, 2)
    optimizer, resumed = KFAC(model, lr=0.01), KFAC(model, lr=0.01)
    regress(model, optimizer, 5)
    resumed.load_state_dict(optimizer.state_dict())
    optimizer.close()
    wrapped = Accelerator(cpu=True).prepare(resumed)
    with SummaryWriter(tmp_path) as writer, TensorBoardCallback(wrapped, writer, every=2):
        regress(model, wrapped, 4)
    assert [step for step, _ in read(tmp_path)["step"]] == [7, 9]


def test_the_callback_leaves_training_and_copies_alone(tmp_path: Path) -> None:
    losses = []
    for logged in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = KFAC(model, lr=0.1)
        if logged:
            TensorBoardCallback(optimizer, SummaryWriter(tmp_path), every=1)
        regress(model, optimizer, 4)
        losses.append([p.detach().clone() for p in model.parameters()])
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
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
