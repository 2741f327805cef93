"""The power limit, and the profile, that a process holds on its GPUs, also where zeusd does not
answer for a while.

Training waits for an answer once, and not long. What was not answered is done by a thread that goes
on until zeusd answers: a zeusd that comes back keeps what living processes hold, so that a limit
that is not wanted any more must be released then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError, ZeusGPULeaseExpiredError
from zeus_ipc.circuit import bounded, unanswered

log = logging.getLogger(__name__)

_Wanted = tuple[int, int | None] | None
"""A limit, mW, and a workload power profile; None: they are to be released."""

RETRY_S = 1.0
"""How often a zeusd that does not answer is asked again."""
THREAD_S = 0.02
"""How long the thread is waited for, where zeusd answers again."""


@dataclass(frozen=True)
class Outcome:
    """What became of a limit that was to be set, or released.

    Attributes:
        power_limit_mw: The limit; None: limits were to be released.
        error: Why it is not done; None: it is.
        profile: The workload power profile that was to be set with it.
    """

    power_limit_mw: int | None
    error: ZeusBaseError | None = None
    profile: int | None = None


class HeldLimits:
    """The limits that a process holds on some GPUs.

    Args:
        gpus: The GPUs of this process.
        indices: Which of them.
    """

    def __init__(self, gpus: GPUs, indices: Sequence[int]) -> None:
        self._gpus = gpus
        self._indices = gpus.with_power_limit(indices) if indices else []
        self._guard = threading.Lock()
        self._changed = threading.Event()
        self._behind: threading.Thread | None = None
        self._wanted: _Wanted = None
        self._profiled = False  # whether a profile was ever set
        self._outcome: Outcome | None = None

    def set(self, power_limit_mw: int, profile: int | None = None) -> Outcome | None:
        """Sets a limit on all GPUs, mW, and a workload power profile, or clears the one that was
        set. None: zeusd does not answer; see `outcome`. Never raises.

        A lease that was lost, as by a program that stood still, is acquired again.
        """
        return self._want((power_limit_mw, profile))

    def outcome(self) -> Outcome | None:
        """What became of the limit that `set` returned None for; None: nothing yet. Takes no time,
        and says it once.
        """
        with self._guard:
            outcome, self._outcome = self._outcome, None
        return outcome

    def release(self) -> None:
        """Restores the limits; where zeusd does not answer, a thread goes on. Never raises."""
        self._want(None)

    def _want(self, wanted: _Wanted) -> Outcome | None:
        with self._guard:
            behind, self._wanted, self._outcome = self._behind, wanted, None
            self._changed.set()
        if behind is not None:
            behind.join(THREAD_S)
            return self.outcome()
        with bounded():
            outcome = self._done(wanted)
        if outcome is None:
            with self._guard:
                self._behind = threading.Thread(
                    target=self._go_on, name="zeus-power-limit", daemon=True
                )
                self._behind.start()
        return outcome

    def _go_on(self) -> None:
        """What the thread does: what is wanted, until zeusd answers."""
        while True:
            with self._guard:
                wanted = self._wanted
                self._changed.clear()
            outcome = self._done(wanted)
            with self._guard:
                if outcome is not None and not self._changed.is_set():
                    self._outcome, self._behind = outcome, None
                    return
            if outcome is None:
                self._changed.wait(RETRY_S)

    def _done(self, wanted: _Wanted) -> Outcome | None:
        """Sets a limit, or releases them all. None: not answered."""
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
