"""Sends samples to subscribers of their source.

A subscriber that reads too slowly loses samples; their numbers show how many.
"""

from __future__ import annotations

from collections.abc import Callable

from zeus_ipc.zmtp import ProtocolError
from zeusd.server.connection import ClientConnection
from zeusd.server.zmtp import MAX_TOPIC_BYTES, publication

MAX_WAITING_BYTES = 64 * 1024
"""Most samples that wait for one subscriber."""


class Topics:
    """The subscriptions."""

    def __init__(self, send: Callable[[ClientConnection, bytes], None]) -> None:
        self._send = send
        self._subscribers: dict[bytes, set[ClientConnection]] = {}

    @property
    def names(self) -> frozenset[str]:
        """All topics with a subscriber that may be a source's name."""
        return frozenset(topic.decode("latin-1") for topic in self._subscribers)

    def subscribe(self, connection: ClientConnection, topic: bytes) -> bool:
        """Adds a subscription. Returns whether it is the topic's first.

        libzmq repeats a subscription but cancels it once, so repeating one changes nothing.

        Raises:
            ProtocolError: There are too many topics, or it is too long.
        """
        if topic in connection.topics:
            return False
        # Most topics of one connection: more than any node has GPUs.
        if len(topic) > MAX_TOPIC_BYTES or len(connection.topics) >= 256:
            raise ProtocolError("too many topics")
        connection.topics.add(topic)
        subscribers = self._subscribers.setdefault(topic, set())
        subscribers.add(connection)
        return len(subscribers) == 1

    def cancel(self, connection: ClientConnection, topic: bytes) -> bool:
        """Removes a subscription. Returns whether it was the topic's last."""
        if topic not in connection.topics:
            return False
        connection.topics.discard(topic)
        subscribers = self._subscribers[topic]
        subscribers.discard(connection)
        if not subscribers:
            del self._subscribers[topic]
        return not subscribers

    def leave(self, connection: ClientConnection) -> bool:
        """Removes all subscriptions of a connection. Returns whether one was a topic's last."""
        lasts = [self.cancel(connection, topic) for topic in list(connection.topics)]
        return any(lasts)

    def wanted(self, topic: bytes) -> bool:
        """Whether the topic has a subscriber."""
        return topic in self._subscribers

    def publish(self, topic: bytes, payload: bytes) -> None:
        """Sends a sample to the subscribers that keep up."""
        data = publication(topic, payload)
        for connection in list(self._subscribers.get(topic, ())):
            if connection.waiting + len(data) <= MAX_WAITING_BYTES:
                self._send(connection, data)
