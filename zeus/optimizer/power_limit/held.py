"""The setting that a process holds on its GPUs, even while zeusd does not answer. A thread sets and
releases it, and training waits for it only as long as it may. The thread retries until zeusd
answers: a zeusd that restarts keeps the leases of running processes, so a setting that is no longer
wanted must be released then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from zeus import _node
from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError, ZeusGPULeaseExpiredError
from zeus.optimizer.power_limit.settings import KINDS, Setting
from zeus_ipc.circuit import bounded, unanswered

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Interval between retries to a zeusd that does not answer."""


_Outcome = ZeusBaseError | bool
"""Whether zeusd has done it; an error: it will not."""


class HeldSetting:
    """The setting that a process holds on some GPUs.

    Args:
        gpus: The process's GPUs.
        indices: Those of them that are set.
        wait: Waits for an event, as long as training may now.
    """

    def __init__(
        self, gpus: GPUs, indices: Sequence[int], wait: Callable[[threading.Event], None]
    ) -> None:
        self._gpus = gpus
        self._indices = gpus.with_power_limit(indices) if indices else []
        self._guard = threading.Lock()
        self._wait = wait
        self._changed, self._tried = threading.Event(), threading.Event()
        self._behind: threading.Thread | None = None
        self._wanted: Setting | None = None
        self._released = self._indices  # the GPUs that are restored
        self._asked = False  # for a setting whose outcome is not known yet
        self._beside: dict[str, bool] = {}  # what was tried beside a limit: whether it was set
        self._outcome: _Outcome = False

    def set(self, setting: Setting) -> bool:
        """Sets a setting on all GPUs, and returns whether it is set. If this takes longer than
        training may wait, False: the next call for the same setting only looks. Acquires a lost
        lease again, as after the program was stopped.

        Raises:
            ZeusBaseError: It cannot be set.
        """
        if not (self._asked and setting == self._wanted):
            self._want(setting, wait=True)
        with self._guard:
            outcome, self._outcome = self._outcome, False
        self._asked = not outcome
        if isinstance(outcome, ZeusBaseError):
            raise outcome
        return outcome

    def inherit(self) -> None:
        """Another setting may be in force: the next one restores what it has beside its limit."""
        self._beside.update(dict.fromkeys(KINDS, False))

    def release(self, indices: Sequence[int]) -> None:
        """Restores these of the GPUs; the others are left as they are. Does not wait for a zeusd
        that does not answer, or has not set one yet.
        """
        self._released = [index for index in self._indices if index in indices]
        self._asked = False
        self._want(None, wait=self._behind is None and _node.answers())

    def _want(self, wanted: Setting | None, wait: bool) -> None:
        with self._guard:
            self._wanted, self._outcome = wanted, False
            self._changed.set()
            self._tried.clear()
            behind = self._behind
            if behind is None:
                behind = threading.Thread(target=self._go_on, name="zeus-power-limit", daemon=True)
                try:
                    behind.start()
                except RuntimeError:  # no more threads, or the process ends
                    with bounded():
                        self._outcome = self._done(wanted)
                    return
                self._behind = behind
        if wait:
            self._wait(self._tried)

    def _go_on(self) -> None:
        """The thread: applies the wanted setting, until zeusd answers."""
        while True:
            with self._guard:
                wanted = self._wanted
                self._changed.clear()
            outcome = self._done(wanted)
            with self._guard:
                if not self._changed.is_set():
                    self._tried.set()
                    if outcome:
                        self._outcome, self._behind = outcome, None
                        return
            if not outcome:
                self._changed.wait(RETRY_S)

    def _done(self, wanted: Setting | None) -> _Outcome:
        """Sets a setting, or releases all. Returns False if unanswered."""
        try:
            if wanted is not None:
                self._write(wanted)
            else:
                self._gpus.release_all(self._released)
                self._beside.clear()
        except ZeusBaseError as error:
            if unanswered(error.__cause__):
                return False
            if wanted is not None:
                lost = isinstance(error, ZeusGPULeaseExpiredError)
                return False if lost else error  # lost again: the next try acquires it
            log.info("limits are restored by zeusd when this process ends: %s", error.message)
        except Exception as error:  # the thread must not end without an outcome
            log.warning("a power limit cannot be set", exc_info=True)
            return ZeusBaseError(repr(error))
        return True

    def _write(self, wanted: Setting) -> None:
        gpus, indices = self._gpus, self._indices
        limit_mw = wanted.power_limit_mw
        self._again(lambda: gpus.set_power_management_limits(indices, limit_mw), "power_limit")
        if wanted.beside is not None:
            self._beside.setdefault(wanted.beside.kind, False)
        for name, was_set in list(self._beside.items()):
            kind, value = KINDS[name], wanted.of(name)
            try:
                self._again(partial(kind.write, gpus, indices, value), kind.control)
            except ZeusBaseError as error:
                if was_set or value is not None or unanswered(error.__cause__):
                    raise
                continue  # what was never set need not be restored
            self._beside[name] = was_set or value is not None

    def _again(self, write: Callable[[], None], control: str) -> None:
        try:
            write()
        except ZeusGPULeaseExpiredError as error:
            log.warning("acquiring a lease again: %s", error.message)
            self._gpus.acquire(self._indices, control)
            write()
