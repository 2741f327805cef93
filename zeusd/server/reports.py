"""Log records about users who ask for too much or break the protocol: one of each a minute."""

from __future__ import annotations

import logging
import pwd
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY_NS = 60_000_000_000


class Reports:
    """Writes the records, on a thread of its own: to look a user's name up may take long.

    Args:
        clock_ns: CLOCK_MONOTONIC.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._recent: dict[tuple[int, str], tuple[int, int]] = {}
        self._queue: queue.SimpleQueue[tuple[int, str, str, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def add(self, uid: int, event: str, text: str) -> None:
        """Something happened that the administrator should know of.

        Args:
            uid: The user.
            event: Its name in the log.
            text: What the user does and what became of it: the rest of a sentence.
        """
        now_ns, key = self._clock_ns(), (uid, event)
        since_ns, left_out = self._recent.get(key, (-EVERY_NS, 0))
        if now_ns - since_ns < EVERY_NS:
            self._recent[key] = (since_ns, left_out + 1)
            return
        if len(self._recent) > 1024:
            self._recent = {
                one: found for one, found in self._recent.items() if now_ns - found[0] < EVERY_NS
            }
        self._recent[key] = (now_ns, 0)
        self._queue.put((uid, event, text, left_out))

    def stop(self) -> None:
        """Ends the thread when everything is written. Waits a moment."""
        self._queue.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            uid, event, text, left_out = item
            name = _name(uid)
            since = f" ({left_out} times more since the last record)" if left_out else ""
            log.warning(
                "user %s %s%s",
                name or uid,
                text,
                since,
                extra={"event": event, "uid": uid, "user": name, "left_out": left_out},
            )


def _name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return None
