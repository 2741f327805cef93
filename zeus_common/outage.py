"""Logs a failure that repeats: when it begins, and when it is over."""

from __future__ import annotations

import logging
import time


class Outage:
    """Something that is used again and again and may not answer for a while.

    Args:
        log: Where to log.
        over: What to log when it answers again; empty: nothing.
        again_s: Log the failure again after this many seconds; None: once until it is over.

    Attributes:
        lasts: Whether the last use failed.
    """

    def __init__(
        self, log: logging.Logger, over: str = "", *, again_s: float | None = None
    ) -> None:
        self.lasts = False
        self._log = log
        self._over = over
        self._again_s = again_s
        self._next_s = 0.0

    def failed(self, text: str) -> None:
        """Notes a failure: the warning to log if it is due, else a message for debugging."""
        now_s = time.monotonic()
        due = not self.lasts or (self._again_s is not None and now_s >= self._next_s)
        self._log.log(logging.WARNING if due else logging.DEBUG, "%s", text)
        self.lasts = True
        if due:
            self._next_s = now_s + (self._again_s or 0.0)

    def succeeded(self) -> None:
        """Notes a success."""
        if self.lasts and self._over:
            self._log.warning("%s", self._over)
        self.lasts = False
