"""What is counted, and what it is on the wire."""

from __future__ import annotations

import pytest
import torch

from secondorder.comm import counter
from secondorder.comm.counter import Counter


def test_bytes_by_stage() -> None:
    messages = Counter()
    messages.add("a", "all_reduce", 4, 10, torch.float32)
    messages.add("b", "broadcast", 4, 10, torch.bfloat16)
    messages.add("a", "all_gather", 4, 5, torch.float64)
    assert messages.bytes_by_stage() == {"a": 80, "b": 20}
    assert [record.wire_bytes for record in messages.records] == [60.0, 20.0, 30.0]
    messages.clear()
    assert (messages.bytes_by_stage(), messages.records) == ({}, [])


def test_a_long_run_keeps_the_last_messages_and_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "MOST_RECORDS", 10)
    messages = Counter()
    for i in range(100):
        messages.add("a", "reduce", 2, i, torch.uint8)
    assert 5 <= len(messages.records) <= 10
    assert messages.records[-1].numel == 99
    assert messages.bytes_by_stage() == {"a": sum(range(100))}
