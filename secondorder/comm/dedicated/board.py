"""A board in the store of the default group, where processes post notices for each other.

A notice is written once, by one process, and can be read by all. If a notice decides whether a message is sent, both
ends of the message read it first, so no rank waits for a message that is never sent. A process that fails posts its
error here too, and a rank that waits for a notice raises this error at once instead of waiting for the timeout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from secondorder.comm.rendezvous import attempt

#: Seconds between two reads of the store: the first and the longest interval.
_FIRST, _LONGEST = 2e-4, 5e-3
#: Key under which the first rank that fails posts its message.
ABORTED = "aborted"


class SilenceError(RuntimeError):
    """A notice was not written in time."""


class Board:
    """The notices of one strategy object.

    Args:
        name: Name of the board, which is the same on all ranks and new in this process group.
        timeout: Seconds to wait for a notice.
    """

    def __init__(self, name: str, timeout: float) -> None:
        # Use the store of the default group, since a rendezvous by file has no address for another store.
        prefix = f"secondorder/{attempt()}/{name}"
        self._store = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
        self.timeout = timeout

    def write(self, key: str, **content: Any) -> None:
        """Write a notice, whose content must be serializable as JSON."""
        self._store.set(key, json.dumps(content))

    def look(self, key: str) -> dict[str, Any] | None:
        """Return a notice, or None if it has not been written yet."""
        if not self._store.check([key]):
            return None
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found

    def wait(
        self, key: str, seconds: float | None = None, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Wait for a notice and return it.

        Args:
            key: The key of the notice.
            seconds: How long to wait; None for the timeout.
            meanwhile: A function that is called repeatedly while waiting.

        Returns:
            The content of the notice.

        Raises:
            SilenceError: If the notice is not written in time.
            RuntimeError: If another rank has failed.
        """
        seconds = self.timeout if seconds is None else seconds
        deadline, pause = time.monotonic() + seconds, _FIRST
        while (notice := self.look(key)) is None:
            self.raise_aborted()
            if time.monotonic() > deadline:
                raise SilenceError(f"no rank wrote '{key}' within {seconds:g} s")
            if meanwhile is not None:
                meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return notice

    def abort(self, message: str) -> str:
        """Make all other ranks raise.

        Returns:
            The first message that was posted. Later ones do not replace it.
        """
        notice = self.look(ABORTED)
        if notice is None:
            self.write(ABORTED, message=message)
        return message if notice is None else str(notice["message"])

    def raise_aborted(self) -> None:
        """Raise an error if a rank has failed.

        Raises:
            RuntimeError: With the message of that rank.
        """
        notice = self.look(ABORTED)
        if notice is not None:
            raise RuntimeError(notice["message"])
