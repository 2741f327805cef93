"""Derives steps, queue and latencies for the clock policy from the requests in each step; pure.

For feeds inside an engine, which know their requests. The rows of a step are as in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from zeus.serving.clock_steps import Queue, Step

MOST_REQUESTS = 100_000
"""Most requests that are kept; the oldest are dropped first."""


class StepSink(Protocol):
    """Receiver of steps: `ClockControl`."""

    def step(self, step: Step, queue: Queue) -> None:
        """Handles the end of a step."""

    def drained(self) -> None:
        """Handles that the engine has no request."""


class Sink(StepSink, Protocol):
    """The same, with the latencies of requests."""

    def finished(self, ttft_s: float, tpot_s: float) -> None:
        """A request has ended."""


class _Request:
    __slots__ = ("arrived_s", "first_s", "last_s", "left", "outputs", "prompt")

    def __init__(self, arrived_s: float, prompt: float) -> None:
        self.arrived_s = arrived_s
        self.prompt = self.left = prompt
        self.first_s = self.last_s = math.nan
        self.outputs = 0


class RequestFeed:
    """Follows requests from arrival to end.

    Args:
        sink: The receiver. Times are of its clock, `time.monotonic`.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._requests: dict[str, _Request] = {}
        self._queued: dict[str, _Request] = {}  # prompt not computed, oldest first
        self._backlog = 0.0

    def arrived(self, request: str, at_s: float, prompt_tokens: int) -> None:
        """Handles the arrival of a request.

        Args:
            prompt_tokens: Tokens of its prompt, including cached ones.
        """
        self._forget(request)
        if len(self._requests) >= MOST_REQUESTS:
            self._forget(next(iter(self._requests)))
        one = self._requests[request] = self._queued[request] = _Request(at_s, prompt_tokens)
        self._backlog += one.left

    def step(
        self,
        begin_s: float,
        end_s: float,
        requests: Sequence[str],
        prefill: Sequence[bool],
        tokens: Sequence[float],
        context: Sequence[float],
    ) -> None:
        """Handles one step, with a row for each request in it.

        Args:
            requests: Ids. A request without a known arrival is assumed to arrive here.
            prefill: Whether the tokens belong to the prompt.
        """
        known, queued = self._requests, self._queued
        computed, sequences, length = 0.0, 0, 0.0
        for name, prompt, count, before in zip(requests, prefill, tokens, context, strict=True):
            one = known.get(name)
            if one is None:
                self.arrived(name, begin_s, int(count) if prompt else 0)
                one = known[name]
            if prompt:
                computed += count
                cached = max(0.0, before - (one.prompt - one.left))
                part = min(count + cached, one.left)
                one.left -= part
                self._backlog -= part
                if one.left > 0:
                    continue
            else:
                sequences += 1
                length += before
                self._backlog -= one.left
                one.left = 0.0
            queued.pop(name, None)
            if one.outputs == 0:
                one.first_s = end_s
            one.outputs += 1
            one.last_s = end_s
        oldest = next(iter(queued.values()), None)
        self._sink.step(
            Step(begin_s, end_s, computed, sequences, length, 0.0),
            Queue(
                len(queued),
                max(0.0, self._backlog) if queued else 0.0,
                max(0.0, end_s - oldest.arrived_s) if oldest is not None else 0.0,
            ),
        )

    def finish(self, request: str) -> None:
        """Handles a request that ended or was dropped. Ignores unknown ones."""
        one = self._forget(request)
        if one is not None:
            mean_s = (one.last_s - one.first_s) / (one.outputs - 1) if one.outputs > 1 else 0.0
            self._sink.finished(one.first_s - one.arrived_s, mean_s)
            if not self._requests:
                self._sink.drained()

    def _forget(self, request: str) -> _Request | None:
        one = self._requests.pop(request, None)
        if one is not None and self._queued.pop(request, None) is not None:
            self._backlog -= one.left
        return one
