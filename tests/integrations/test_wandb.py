"""An offline run of Weights & Biases writes the diagnostics of an optimizer to disk."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from torch import nn
from wandb.proto import wandb_internal_pb2

from secondorder import KFAC
from secondorder.diagnostics import flat
from secondorder.integrations.wandb import WandbCallback
from tests.integrations.small import regress

BLOCK, HEAD, MAGIC = 32768, 7, 7  # of LevelDB's log format, which follows ":W&B" and a version


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a run's file: chunks of ``checksum, length, type``. Types 2, 3 and 4 form one record."""
    data, at, parts = path.read_bytes(), MAGIC, b""
    while at + HEAD <= len(data):
        if at % BLOCK > BLOCK - HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in {1, 4}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    """Return the logged rows after the process that writes the file has finished."""
    deadline = time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in records(path)):
        assert time.monotonic() < deadline, "the run does not end"
        time.sleep(0.05)
    rows = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in rows]


def test_an_offline_run_contains_every_value(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = KFAC(model, lr=0.01)
    expected: dict[int, dict[str, float]] = {}
    quiet = wandb.Settings(console="off", x_disable_meta=True, x_disable_stats=True)
    run = wandb.init(project="test", mode="offline", dir=tmp_path, settings=quiet)
    with WandbCallback(optimizer, run, every=3, by_layer=True):
        for step in range(1, 8):
            regress(model, optimizer)
            run.log({"loss": float(step)})  # as a script does that logs its own values
            expected[step] = flat(optimizer.diagnostics())
    regress(model, optimizer, 3)
    run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = history(path)
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    ours = [row for row in rows if any(key.startswith("secondorder/") for key in row)]
    assert [row["secondorder/step"] for row in ours] == [3.0, 6.0]
    for row in ours:
        found = {key.removeprefix("secondorder/"): v for key, v in row.items() if key.startswith("secondorder/")}
        assert found == pytest.approx(expected[int(row["secondorder/step"])])
    metrics = [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]
    assert ("secondorder/*", "secondorder/step") in {(m.glob_name, m.step_metric) for m in metrics}


def test_an_object_that_is_not_a_run_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(TypeError, match=r"wandb\.init"):
        WandbCallback(KFAC(model, lr=0.1), "run")  # type: ignore[arg-type]
