"""Requests that wait for devices, and connections that wait for replies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zeus_ipc.errors import ErrorCode
from zeusd.core.deadlines import Deadlines
from zeusd.core.effects import Reply
from zeusd.core.model import Failure, Peer
from zeusd.core.outbox import Outbox


def failure_body(failure: Failure, gpu: str | None = None) -> dict[str, Any]:
    """A failure as `replies.ErrorBody` has it."""
    body: dict[str, Any] = {"code": failure.code, "message": failure.message}
    if gpu is not None:
        body["gpu"] = gpu
    if failure.details:
        body["details"] = failure.details
    return body


def no_answer(gpu: str) -> Failure:
    """The failure of a GPU that did not answer in time."""
    return Failure(
        ErrorCode.DEADLINE_EXCEEDED,
        f"{gpu} did not answer before the request's deadline; the driver may be busy or stuck, "
        "look at `nvidia-smi` and the kernel log",
    )


@dataclass(slots=True)
class Connection:
    """One client connection: its peer, and the failures nobody waited for."""

    peer: Peer
    waiting: int = 0
    _deferred: int = 0
    _last: dict[str, Any] = field(default_factory=dict)

    def defer(self, failure: Failure, gpu: str) -> None:
        """Counts a failed set that was sent with `block=False`."""
        self._deferred += 1
        self._last = failure_body(failure, gpu)

    def refuse(self, outbox: Outbox, request_id: int, failure: Failure) -> None:
        """Answers a request with why not."""
        self.reply(outbox, request_id, error=failure_body(failure))

    def reply(self, outbox: Outbox, request_id: int, **content: Any) -> None:
        """Answers a request, and reports what has failed unasked since the last answer."""
        outbox.add(Reply(self.peer.conn, {"id": request_id, **content, **self.take_deferred()}))

    def take_deferred(self) -> dict[str, Any]:
        """The field of a reply that reports failed sets nobody waited for; empty: none failed."""
        if not self._deferred:
            return {}
        count, self._deferred = self._deferred, 0
        return {"deferred": {"count": count, "last": self._last}}


class PerGpu:
    """A request for several GPUs, answered when each has its result or the deadline is over."""

    def __init__(
        self,
        connection: Connection,
        request_id: int,
        gpus: Iterable[str],
        outbox: Outbox,
        deadlines: Deadlines[PerGpu],
    ) -> None:
        self._deadlines = deadlines
        self._connection = connection
        self._request_id = request_id
        self._out = outbox
        self._results: dict[str, dict[str, Any] | None] = dict.fromkeys(gpus)
        self._missing = len(self._results)
        connection.waiting += 1

    def gpus(self) -> list[str]:
        """The GPUs asked for, each once."""
        return list(self._results)

    def succeed(self, gpu: str, result: dict[str, Any]) -> None:
        """One GPU's result is there."""
        self._put(gpu, result)

    def fail(self, gpu: str, failure: Failure) -> None:
        """One GPU failed."""
        self._put(gpu, {"error": failure_body(failure, gpu)})

    def expire(self) -> None:
        """The deadline is over: answers with what there is."""
        for gpu, result in self._results.items():
            if result is None:
                self.fail(gpu, no_answer(gpu))

    def _put(self, gpu: str, result: dict[str, Any]) -> None:
        if self._results[gpu] is not None:
            return
        self._results[gpu] = result
        self._missing -= 1
        if self._missing == 0:
            self._deadlines.pop(self)
            self._connection.waiting -= 1
            self._connection.reply(self._out, self._request_id, result={"gpus": self._results})
