"""The free memory of a device, as far as it can be determined without allocating."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that can be allocated on a device, or None if that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [value for value in (_available(), _within_cgroup()) if value is not None]
    return min(known, default=None)


def _available() -> int | None:
    """Return the memory that, according to the kernel, can be used without swapping."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _within_cgroup() -> int | None:
    """Return the rest of a container's limit; pages of files count as free, since they are released when needed."""
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if not limit or not used or limit[0] == "max":
        return None
    files = sum(int(line.split()[1]) for line in _lines("/sys/fs/cgroup/memory.stat") if line.startswith("file "))
    return max(0, int(limit[0]) - int(used[0]) + files)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
