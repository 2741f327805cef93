"""What carries requests of one process to a node and brings the replies back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Subscription(Protocol):
    """Samples as they come."""

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next sample; None if none comes within this time.

        Raises:
            DaemonUnavailable: None can come any more.
        """

    def close(self) -> None:
        """Ends it."""


class Transport(Protocol):
    """How a client reaches a node."""

    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a request and waits for its reply.

        Args:
            message: All of the request but `id` and `deadline_ns`.
            timeout_s: Seconds to wait, for the connection and for the reply together.

        Raises:
            DaemonUnavailable: Nobody listens, or the daemon did not answer in time.
        """

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Sends a request that gets no reply. Does not wait once there is a connection.

        Raises:
            DaemonUnavailable: There is none within `timeout_s`.
        """

    def subscribe(self, names: Sequence[str], path: str | None, buffer: int) -> Subscription:
        """Opens a subscription to the samples of these sources.

        Args:
            names: Their UUIDs.
            path: The daemon's socket for subscribers, as `NodeInfo.stream` has it.
            buffer: Samples that wait for their reader; of more, the newest are lost.
        """

    def close(self) -> None:
        """Ends the connection."""

    @property
    def used(self) -> bool:
        """Whether this process has anything to say goodbye for."""
