"""Steps for clock control: from recorders in engines (vLLM's probe, transformers', your own), and
from forward-pass metrics, as Dynamo and SGLang publish them.

A step of forward-pass metrics ends when its message arrives. Individual requests are not known:
TTFT is estimated from the wait of those that leave the queue, TPOT from the mean time of `BLOCK`
steps.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from zeus.serving.clock_requests import RequestFeed, Sink, StepSink
from zeus.serving.clock_steps import Queue, Step
from zeus.serving.forward_pass import decode
from zeus.serving.receiver import Receiver
from zeus.serving.wire import Arrival, EngineStep, Finish, Message
from zeus_ipc.errors import RequestRejected

BLOCK = 64
"""Number of decode steps whose mean time is taken as one request's TPOT."""


class QueueAge:
    """Estimates the waits of a queue's requests from its length, first in, first out."""

    def __init__(self) -> None:
        self._arrivals: deque[float] = deque()

    def seen(self, now_s: float, waiting: int) -> tuple[float, list[float]]:
        """Updates the length. Returns the wait of the oldest, and of those that have left, s."""
        arrivals = self._arrivals
        left = []
        while len(arrivals) > waiting:
            left.append(max(0.0, now_s - arrivals.popleft()))
        arrivals.extend([now_s] * (waiting - len(arrivals)))
        return (max(0.0, now_s - arrivals[0]) if arrivals else 0.0), left


class PassSink(StepSink, Protocol):
    """Receiver of steps and approximate latencies: `ClockControl`."""

    def seen(self, ttft_s: float, tpot_s: float) -> None:
        """Handles approximate latencies of a request."""


class ForwardPassFeed:
    """Forwards the messages of one worker."""

    def __init__(self, sink: PassSink, rank: int | None = None) -> None:
        self._sink = sink
        self._only: tuple[str | None, int] | None = None if rank is None else (None, rank)
        self._age = QueueAge()
        self._ended_s = float("-inf")
        self._block_steps = 0
        self._block_s = self._tpot_s = 0.0
        self.rejected = 0
        """Messages that were not valid, or another worker's."""

    def message(self, data: bytes, now_s: float) -> None:
        """Handles one message that arrived at a time, s of `time.monotonic`. Never raises."""
        try:
            found = decode(data)
        except RequestRejected:
            self.rejected += 1
            return
        if self._only is None or self._only[0] is None:
            if self._only is not None and self._only[1] != found.rank:
                self.rejected += 1
                return
            self._only = found.worker, found.rank
        elif self._only != (found.worker, found.rank):
            self.rejected += 1
            return
        oldest_s, left = self._age.seen(now_s, found.waiting)
        if found.seconds == 0.0:
            if not found.waiting:
                self._sink.drained()
            return
        begin_s = max(self._ended_s, now_s - found.seconds)
        if found.decode_requests:
            self._block_steps += 1
            self._block_s += now_s - begin_s
            if self._block_steps == BLOCK:
                self._tpot_s = self._block_s / BLOCK
                self._block_steps, self._block_s = 0, 0.0
                self._sink.seen(left[0] if left else 0.0, self._tpot_s)
                left = left[1:]
        for waited_s in left:
            self._sink.seen(waited_s, self._tpot_s)
        self._ended_s = now_s
        self._sink.step(
            Step(
                begin_s,
                now_s,
                found.prefill_tokens,
                found.decode_requests,
                found.decode_context,
                0.0,
            ),
            Queue(found.waiting, found.backlog_tokens, oldest_s),
        )


NS = 1e-9
RECEIVE_S = 0.02
"""How often messages are taken: far more often than clocks change."""


class RecordedFeed:
    """Forwards the messages of one engine."""

    def __init__(self, sink: Sink, engine: str | None = None) -> None:
        self._requests = RequestFeed(sink)
        self._engine = engine

    def take(self, message: Message) -> bool:
        """Handles one message. Returns whether it was from this engine."""
        if not isinstance(message, Arrival | Finish | EngineStep):
            return True  # an owner's message, which does not matter for clocks
        if self._engine is None:
            self._engine = message.engine
        if message.engine != self._engine:
            return False
        if isinstance(message, Arrival):
            self._requests.arrived(message.request, message.at_ns * NS, message.prompt)
        elif isinstance(message, Finish):
            self._requests.finish(message.request)
        else:
            self._requests.step(
                message.begin_ns * NS,
                message.end_ns * NS,
                message.ids,
                message.prefill,
                message.tokens,
                message.context,
            )
        return True


def listen(path: str, sink: Sink, engine: str | None, ended: threading.Event) -> None:
    """Forwards messages of recorders on a socket until the event.

    Raises:
        OSError: The socket cannot be listened on.
    """
    receiver = Receiver(path, RecordedFeed(sink, engine).take)
    try:
        while not ended.wait(RECEIVE_S):
            receiver.receive()
    finally:
        receiver.close()
