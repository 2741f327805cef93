"""Time that passes only when told to, for tests that train for hours in milliseconds."""

from __future__ import annotations


class VirtualClock:
    """Stands in for both `time.monotonic_ns` (call it) and `time.sleep`."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self._now_ns = start_ns

    def __call__(self) -> int:
        """The time, ns."""
        return self._now_ns

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self._now_ns += max(0, round(seconds * 1e9))
