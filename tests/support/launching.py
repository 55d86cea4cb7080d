"""Programs under ``torchrun``, with a time limit, after which none of their processes is left."""

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
    """A port that no process listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def launch(
    command: Sequence[str], folder: Path, timeout: float, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command that starts processes of its own in a folder; return its status, and its output and errors.

    Raises:
        AssertionError: If the command did not end in time; the message contains its output.
    """
    mark = uuid.uuid4().hex  # identifies the ranks, because torchrun starts each of them in a session of its own
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC_", "SLURM_"))}
    paths = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    # Otherwise, restarted ranks may find the addresses of those that died.
    paths["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    log = folder / f"log-{mark}.txt"
    with log.open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            list(command), cwd=folder, env={**inherited, **paths, **(env or {}), _MARK: mark},
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
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
    """The command line of ``torchrun`` with this Python interpreter."""
    return [sys.executable, "-m", "torch.distributed.run", *words]


def restarting(*words: str, world: int = 2) -> list[str]:
    """The command line of a ``torchrun`` that restarts all ranks once, after one of them has died."""
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
