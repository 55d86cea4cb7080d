"""Words between processes that wait for each other now and then, kept in the store of the default group.

A word is written once, by one process, and may be read by any. Where a word decides whether a message is sent, both
ends of the message read it first: nobody is left waiting for a message that never comes. A process that gives up says
so here too, and whoever waits for a word raises its error at once instead of waiting for the time to run out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from secondorder.comm.rendezvous import attempt

#: Seconds between two looks at the store: the first, and the longest.
_FIRST, _LONGEST = 2e-4, 5e-3
#: Where the first rank that gives up says so.
ABORTED = "aborted"


class SilenceError(RuntimeError):
    """Nobody wrote a word in time."""


class Words:
    """Words of one strategy object.

    Args:
        name: The same on all ranks, and never used before in this process group.
        timeout: Seconds to wait for a word.
    """

    def __init__(self, name: str, timeout: float) -> None:
        # The default group's own store: with a file as rendezvous there is no address for another one.
        prefix = f"secondorder/{attempt()}/{name}"
        self._store = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
        self.timeout = timeout

    def write(self, key: str, **content: Any) -> None:
        """Write a word, of what JSON can hold."""
        self._store.set(key, json.dumps(content))

    def look(self, key: str) -> dict[str, Any] | None:
        """A word, or None if it is not there yet."""
        if not self._store.check([key]):
            return None
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found

    def wait(
        self, key: str, seconds: float | None = None, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """A word, as soon as it is there.

        Args:
            key: Where it is written.
            seconds: How long to wait; the timeout by default.
            meanwhile: What to do again and again.

        Returns:
            The word.

        Raises:
            SilenceError: If it does not come in time.
            RuntimeError: If another rank has given up.
        """
        seconds = self.timeout if seconds is None else seconds
        deadline, pause = time.monotonic() + seconds, _FIRST
        while (word := self.look(key)) is None:
            self.raise_aborted()
            if time.monotonic() > deadline:
                raise SilenceError(f"nobody wrote '{key}' within {seconds:g} s")
            if meanwhile is not None:
                meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return word

    def abort(self, message: str) -> str:
        """Have all other ranks raise.

        Returns:
            The first message that was given here, which stays.
        """
        word = self.look(ABORTED)
        if word is None:
            self.write(ABORTED, message=message)
        return message if word is None else str(word["message"])

    def raise_aborted(self) -> None:
        """Raise if a rank has given up.

        Raises:
            RuntimeError: With what that rank said.
        """
        word = self.look(ABORTED)
        if word is not None:
            raise RuntimeError(word["message"])
