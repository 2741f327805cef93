"""A stream of samples of GPUs."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from zeus_ipc.replies import Sample
from zeus_ipc.transport import Subscription

_POLL_S = 0.2
"""Interval of checks for a closed stream or a dead daemon."""


class SampleStream(AbstractContextManager["SampleStream"]):
    """An iterator, and an async iterator, over samples of GPUs; made by `Client.stream`.

    It ends when any thread closes it. A reader that is too slow loses samples; `Sample.lost` is the
    number of samples of that GPU lost just before.

    Raises:
        DaemonUnavailable: While iterating: the daemon has ended and does not come back.
    """

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._numbers: dict[str, int] = {}
        self._closed = False
        self._guard = threading.Lock()
        self.lost = 0

    def receive(self, timeout_s: float) -> Sample | None:
        """Returns the next sample; None if none comes within this time, or the stream is closed."""
        with self._guard:
            if self._closed:
                return None
            received = self._subscription.receive(timeout_s)
        if received is None:
            return None
        sample = Sample.model_validate(received)
        before = self._numbers.get(sample.gpu)
        self._numbers[sample.gpu] = sample.number
        # A lower number: zeusd was restarted, and counts from the beginning.
        lost = 0 if before is None else max(0, sample.number - before - 1)
        self.lost += lost
        return sample.model_copy(update={"lost": lost}) if lost else sample

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> Sample:
        while not self._closed:
            sample = self.receive(_POLL_S)
            if sample is not None:
                return sample
        raise StopIteration

    def __aiter__(self) -> SampleStream:
        return self

    async def __anext__(self) -> Sample:
        import asyncio  # most programs do not need it, and it is slow to import

        while not self._closed:
            sample = self.receive(0) or await asyncio.to_thread(self.receive, _POLL_S)
            if sample is not None:
                return sample
        raise StopAsyncIteration

    def close(self) -> None:
        """Closes the stream."""
        self._closed = True
        with self._guard:
            self._subscription.close()

    def __exit__(self, *error: object) -> None:
        self.close()
