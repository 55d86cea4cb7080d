"""Settings of the tests with real trainers and loggers, which use the CPU and only data that a test generates.

They run in their own environment (``make test-integrations``). Processes that a test starts inherit the variables.
"""

import atexit
import os
import shutil
import socket
import tempfile
from typing import Any

import pytest

_HOME = tempfile.mkdtemp(prefix="secondorder-integrations-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)

# The libraries read these on import. They keep every library away from hubs and from the user's caches.
os.environ.update(
    HF_HOME=f"{_HOME}/hf",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",  # otherwise tokenizers warn in every forked process
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    WANDB_DIR=_HOME,
    WANDB_CACHE_DIR=f"{_HOME}/wandb-cache",
    WANDB_CONFIG_DIR=f"{_HOME}/wandb-config",
    WANDB_DATA_DIR=f"{_HOME}/wandb-data",
    CUDA_VISIBLE_DEVICES="",
)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to other machines."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in {"127.0.0.1", "::1", "localhost"}, f"reaches {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
