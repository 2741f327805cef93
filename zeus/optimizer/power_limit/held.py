"""The power limit that a process holds on its GPUs, also where zeusd does not answer for a while.

Training waits for an answer once, and not long. What was not answered is done by a thread that goes
on until zeusd answers: a zeusd that comes back keeps what living processes hold, so that a limit
that is not wanted any more must be released then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError, ZeusGPULeaseExpiredError
from zeus_ipc.circuit import bounded, unanswered

log = logging.getLogger(__name__)

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
    """

    power_limit_mw: int | None
    error: ZeusBaseError | None = None


class HeldLimits:
    """The limits that a process holds on some GPUs.

    Args:
        gpus: The GPUs of this process.
        indices: Which of them.
    """

    def __init__(self, gpus: GPUs, indices: Sequence[int]) -> None:
        self._gpus = gpus
        self._indices = gpus.with_power_limit(indices)
        self._guard = threading.Lock()
        self._changed = threading.Event()
        self._behind: threading.Thread | None = None
        self._wanted: int | None = None  # mW; None: they are to be released
        self._outcome: Outcome | None = None

    def set(self, power_limit_mw: int) -> Outcome | None:
        """Sets a limit on all GPUs, mW. None: zeusd does not answer; see `outcome`. Never raises.

        A lease that was lost, as by a program that stood still, is acquired again.
        """
        return self._want(power_limit_mw)

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

    def _want(self, power_limit_mw: int | None) -> Outcome | None:
        with self._guard:
            behind, self._wanted, self._outcome = self._behind, power_limit_mw, None
            self._changed.set()
        if behind is not None:
            behind.join(THREAD_S)
            return self.outcome()
        with bounded():
            outcome = self._done(power_limit_mw)
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

    def _done(self, power_limit_mw: int | None) -> Outcome | None:
        """Sets a limit, or releases them all. None: not answered."""
        try:
            if power_limit_mw is None:
                self._gpus.release_all(self._indices)
            else:
                self._write(power_limit_mw)
        except ZeusBaseError as error:
            if unanswered(error.__cause__):
                return None
            if power_limit_mw is None:
                log.info("limits are restored by zeusd when this process ends: %s", error.message)
            return Outcome(power_limit_mw, error)
        return Outcome(power_limit_mw)

    def _write(self, power_limit_mw: int) -> None:
        try:
            self._gpus.set_power_management_limits(self._indices, power_limit_mw)
        except ZeusGPULeaseExpiredError as error:
            log.warning("acquiring the power limit again: %s", error.message)
            self._gpus.acquire_power_limits(self._indices)
            self._gpus.set_power_management_limits(self._indices, power_limit_mw)
