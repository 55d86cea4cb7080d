"""Programs under ``torchrun``: started with a time limit, and nothing of them left afterwards."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = "SECONDORDER_TEST_RUN"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def launch(
    command: Sequence[str], folder: Path, timeout: float, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command that starts processes of its own.

    Args:
        command: Its words.
        folder: Where it runs.
        timeout: Seconds.
        env: Variables beside those of this process.

    Returns:
        What it printed, standard error too, and its status.

    Raises:
        AssertionError: If it did not end in time; what it printed until then is in the text.
    """
    mark = uuid.uuid4().hex  # torchrun starts ranks in sessions of their own: only a variable tells whose they are
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC_", "SLURM_"))}
    paths = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    # Or ranks that start again may find the addresses of those that died.
    paths["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    log = folder / f"log-{mark}.txt"
    with log.open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            list(command),
            cwd=folder,
            env={**inherited, **paths, **(env or {}), _MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(mark)
            process.wait()
    printed = log.read_text(encoding="utf-8")
    assert status is not None, f"{command} did not end within {timeout} s:\n{printed}"
    return subprocess.CompletedProcess(list(command), status, printed)


def torchrun(*words: str) -> list[str]:
    """The words of a ``torchrun`` of this Python."""
    return [sys.executable, "-m", "torch.distributed.run", *words]


def restarting(*words: str, world: int = 2) -> list[str]:
    """The words of a ``torchrun`` that starts all ranks again, once, after one of them has died."""
    ranks = ("--nproc-per-node", str(world), "--max-restarts", "1", "--monitor-interval", "0.2")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    return torchrun(*ranks, *rendezvous, *words)


def _end(mark: str) -> None:
    """Kill all processes of one launch."""
    needle = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is not ours
