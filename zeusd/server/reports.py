"""Logs users who exceed limits or break the protocol: one record per minute and user.

Events in the minute after a record are combined in one record at the end of the minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from zeus_common.text import known_user
from zeus_common.units import SECOND_NS
from zeusd.logs import EVERY_S

log = logging.getLogger(__name__)

EVERY_NS = round(EVERY_S * SECOND_NS)


@dataclass(slots=True)
class _UserReport:
    """The pending report of a user.

    Attributes:
        event: Name of the event to report; empty: none.
    """

    due_ns: int = 0
    event: str = ""
    text: str = ""
    left_out: int = 0


class Reports:
    """Writes the records on its own thread, because looking up a user's name may take long."""

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, every_ns: int = EVERY_NS
    ) -> None:
        self._clock_ns = clock_ns
        self._every_ns = every_ns
        self._users: dict[int, _UserReport] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def add(self, uid: int, event: str, text: str) -> None:
        """Reports an event to the administrator."""
        with self._changed:
            user = self._users.setdefault(uid, _UserReport())
            if user.event:
                user.left_out += 1
            else:
                self._changed.notify()
            user.event, user.text = event, text

    def stop(self) -> None:
        """Stops the thread after everything is written. Waits briefly."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                now_ns = self._clock_ns()
                waiting = {uid: user for uid, user in self._users.items() if user.event}
                stops = self._stopped
                due = {uid: user for uid, user in waiting.items() if stops or user.due_ns <= now_ns}
                if not due:
                    if stops:
                        return
                    # Users without anything left to report.
                    self._users = {
                        uid: user
                        for uid, user in self._users.items()
                        if user.event or user.due_ns > now_ns
                    }
                    next_ns = min((user.due_ns for user in self._users.values()), default=None)
                    self._changed.wait(None if next_ns is None else (next_ns - now_ns) / 1e9)
                    continue
                said = [(uid, user.event, user.text, user.left_out) for uid, user in due.items()]
                for uid in due:
                    self._users[uid] = _UserReport(now_ns + self._every_ns)
            for one in said:
                _write(*one)


def _write(uid: int, event: str, text: str, left_out: int) -> None:
    name = known_user(uid)
    since = f" ({left_out} other events of this user were not logged)" if left_out else ""
    log.warning(
        "user %s %s%s",
        name or uid,
        text,
        since,
        extra={"event": event, "uid": uid, "user": name, "left_out": left_out},
    )
