"""The power limit and profile that a process holds on its GPUs, even while zeusd does not answer.
A thread sets and releases them, and training waits for it only as long as its shell allows. The
thread retries until zeusd answers: a zeusd that restarts keeps the leases of running processes, so
a limit that is no longer wanted must be released then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeus import _node
from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError, ZeusGPULeaseExpiredError
from zeus_ipc.circuit import bounded, unanswered

log = logging.getLogger(__name__)

_Wanted = tuple[int, int | None] | None
"""A limit, mW, and a workload power profile; None: to be released."""

RETRY_S = 1.0
"""Interval between retries to a zeusd that does not answer."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of setting or releasing a limit.

    Attributes:
        power_limit_mw: The limit; None: a release.
        error: Why it failed; None: it succeeded.
    """

    power_limit_mw: int | None
    error: ZeusBaseError | None = None
    profile: int | None = None


class HeldLimits:
    """The limits that a process holds on some GPUs.

    Args:
        gpus: The process's GPUs.
        indices: Those of them whose limits are set.
        wait: Waits for an event, as long as training may now.
    """

    def __init__(
        self, gpus: GPUs, indices: Sequence[int], wait: Callable[[threading.Event], None]
    ) -> None:
        self._gpus = gpus
        self._indices = gpus.with_power_limit(indices) if indices else []
        self._wait = wait
        self._guard = threading.Lock()
        self._changed, self._tried = threading.Event(), threading.Event()
        self._behind: threading.Thread | None = None
        self._wanted: _Wanted = None
        self._profiled = False  # whether any profile has been set
        self._outcome: Outcome | None = None

    def set(self, power_limit_mw: int, profile: int | None = None) -> Outcome | None:
        """Sets a limit on all GPUs, mW, and a workload power profile, or clears the one that was
        set. Returns None if this takes longer than training may wait; see `outcome`. Acquires a
        lost lease again, as after the program was stopped.
        """
        return self._want((power_limit_mw, profile), wait=True)

    def outcome(self) -> Outcome | None:
        """Returns, once, the outcome for which `set` returned None; None: still pending. Takes no
        time.
        """
        with self._guard:
            outcome, self._outcome = self._outcome, None
        return outcome

    def release(self) -> None:
        """Restores the limits. Does not wait for a zeusd that does not answer, or has not set a
        limit yet.
        """
        self._want(None, wait=self._behind is None and _node.answers())

    def _want(self, wanted: _Wanted, wait: bool) -> Outcome | None:
        with self._guard:
            self._wanted, self._outcome = wanted, None
            self._changed.set()
            self._tried.clear()
            behind = self._behind
            if behind is None:
                behind = threading.Thread(target=self._go_on, name="zeus-power-limit", daemon=True)
                try:
                    behind.start()
                except RuntimeError:  # no more threads, or the process ends
                    with bounded():
                        return self._done(wanted)
                self._behind = behind
        if wait:
            self._wait(self._tried)
        return self.outcome()

    def _go_on(self) -> None:
        """The thread: applies the wanted limit, until zeusd answers."""
        while True:
            with self._guard:
                wanted = self._wanted
                self._changed.clear()
            outcome = self._done(wanted)
            with self._guard:
                if not self._changed.is_set():
                    self._tried.set()
                    if outcome is not None:
                        self._outcome, self._behind = outcome, None
                        return
            if outcome is None:
                self._changed.wait(RETRY_S)

    def _done(self, wanted: _Wanted) -> Outcome | None:
        """Sets a limit, or releases them all. Returns None if unanswered."""
        try:
            if wanted is None:
                self._gpus.release_all(self._indices)
                return Outcome(None)
            self._write(*wanted)
        except ZeusBaseError as error:
            if unanswered(error.__cause__):
                return None
            if wanted is None:
                log.info("limits are restored by zeusd when this process ends: %s", error.message)
                return Outcome(None, error)
            return Outcome(wanted[0], error, wanted[1])
        except Exception as error:  # the thread must not end without an outcome
            log.warning("a power limit cannot be set", exc_info=True)
            return Outcome(None if wanted is None else wanted[0], ZeusBaseError(repr(error)))
        return Outcome(wanted[0], profile=wanted[1])

    def _write(self, power_limit_mw: int, profile: int | None) -> None:
        gpus, indices = self._gpus, self._indices
        self._again(
            lambda: gpus.set_power_management_limits(indices, power_limit_mw),
            lambda: gpus.acquire_power_limits(indices),
        )
        if profile is None and not self._profiled:
            return
        self._profiled = True
        profiles = [] if profile is None else [profile]
        self._again(
            lambda: gpus.set_power_profiles_of(indices, profiles),
            lambda: gpus.acquire_power_profiles(indices),
        )

    def _again(self, write: Callable[[], None], acquire: Callable[[], None]) -> None:
        try:
            write()
        except ZeusGPULeaseExpiredError as error:
            log.warning("acquiring a lease again: %s", error.message)
            acquire()
            write()
