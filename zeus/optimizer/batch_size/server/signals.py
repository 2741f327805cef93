"""The signals that jobs may name, fetched on a thread, never within a request."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

from zeus.monitor.signals import FollowedSignal, signal_of
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError

REFRESH_S = 300.0

FIRST_S = 5.0
"""How long the server's start waits for the first values."""


class Signals:
    """Signals by name.

    Raises:
        ZeusBSOConfigError: One cannot be read, or its text is wrong.
    """

    def __init__(self, sources: Mapping[str, str], every_s: float = REFRESH_S) -> None:
        self.by_name: dict[str, FollowedSignal] = {}
        for name, source in sources.items():
            try:
                signal = signal_of(source, math.inf)
            except (OSError, ValueError) as error:
                raise ZeusBSOConfigError(f"the signal {name} cannot be read: {error}") from None
            assert isinstance(signal, FollowedSignal)
            self.by_name[name] = signal
        self._every_s = every_s
        self._stop, self._first = threading.Event(), threading.Event()

    def start(self) -> None:
        """Starts fetching."""
        if self.by_name:
            threading.Thread(target=self._run, name="zeus-signals", daemon=True).start()
            self._first.wait(FIRST_S)

    def close(self) -> None:
        """Stops fetching."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            for signal in self.by_name.values():
                signal.fetch(time.time())
            self._first.set()
            self._stop.wait(self._every_s)
