"""Gives limits back, also to a zeusd that is away at the time.

A zeusd that comes back keeps what living processes hold, so a process that has given up must tell
it; training is not to wait for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError
from zeus_ipc.errors import DaemonUnavailable

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""How often a zeusd that does not answer is told again."""


class LettingGo:
    """The limits that a process holds on some GPUs, and their end.

    Args:
        gpus: The GPUs of this process.
        indices: Which of them.
    """

    def __init__(self, gpus: GPUs, indices: Sequence[int]) -> None:
        self._gpus = gpus
        self._indices = list(indices)
        self._wanted_again = threading.Event()
        self._behind: threading.Thread | None = None

    def now(self) -> None:
        """Gives them back; where zeusd does not answer, a thread goes on trying. Never raises."""
        self._wanted_again.clear()
        if self._released() or (self._behind is not None and self._behind.is_alive()):
            return
        self._behind = threading.Thread(target=self._go_on, name="zeus-letting-go", daemon=True)
        self._behind.start()

    def keep(self) -> None:
        """They are wanted again: nothing is given back any more."""
        self._wanted_again.set()
        if self._behind is not None:
            self._behind.join()
            self._behind = None

    def _released(self) -> bool:
        try:
            self._gpus.release_all(self._indices)
        except ZeusBaseError as error:
            log.info("limits are put back by zeusd when this process ends: %s", error.message)
            return not isinstance(error.__cause__, DaemonUnavailable)
        return True

    def _go_on(self) -> None:
        while not self._wanted_again.wait(RETRY_S):
            if self._released():
                return
