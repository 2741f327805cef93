"""Steps for clock control from recorders in engines: vLLM's probe, transformers', your own."""

from __future__ import annotations

import threading

from zeus.serving.clock_requests import RequestFeed, Sink
from zeus.serving.receiver import Receiver
from zeus.serving.wire import Arrival, EngineStep, Finish, Message

NS = 1e-9
RECEIVE_S = 0.02
"""How often messages are taken: far more often than clocks change."""


class RecordedFeed:
    """Forwards the messages of one engine.

    Args:
        sink: The receiver.
        engine: Only this engine, with data parallelism; None: the first one that sends.
    """

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
