"""Requests that wait for devices, and connections that wait for replies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Deferred, Envelope, ErrorBody, GpuInfo, Refused, Results
from zeus_ipc.requests import Heartbeat
from zeus_ipc.wire import PROTOCOL_VERSION, Message
from zeusd.core.access import Access, Right
from zeusd.core.deadlines import Deadlines
from zeusd.core.effects import Reply
from zeusd.core.model import Failure, Peer
from zeusd.core.outbox import Outbox


def error_body(failure: Failure, gpu: str | None = None) -> ErrorBody:
    """A failure, as in replies."""
    more: dict[str, Any] = {} if gpu is None else {"gpu": gpu}
    if failure.details:
        more["details"] = failure.details
    return ErrorBody(code=failure.code, message=failure.message, **more)


def no_answer(gpu: str) -> Failure:
    """The failure of a GPU that did not respond in time."""
    return Failure(
        ErrorCode.DEADLINE_EXCEEDED,
        f"{gpu} did not answer before the request's deadline; the driver may be busy or stuck, "
        "look at `nvidia-smi` and the kernel log",
    )


@dataclass(eq=False)
class Deferrals:
    """Failed sets of one client object that were sent with `block=False`. Its connections share
    them."""

    count: int = 0
    last: ErrorBody | None = None

    def add(self, error: ErrorBody, count: int = 1) -> None:
        """Counts failures."""
        self.count += count
        self.last = error


@dataclass(slots=True)
class ClientState:
    """One client connection: its peer, and the failures of its client object."""

    peer: Peer
    waiting: int = 0
    client: str = ""
    deferrals: Deferrals = field(default_factory=Deferrals)
    watch: Heartbeat | None = None  # what waits for a loss
    _access: Access | None = None
    _rights: dict[tuple[str, Control], Right] = field(default_factory=dict)

    def right(self, access: Access, gpu: GpuInfo, control: Control) -> Right:
        """Its user's permissions for a control, cached until the rules or the GPU change."""
        if access is not self._access:
            self._access, self._rights = access, {}
        right = self._rights.get((gpu.uuid, control))
        if right is None or right.gpu is not gpu:
            right = self._rights[gpu.uuid, control] = access.right(self.peer, gpu, control)
        return right

    def refuse(self, outbox: Outbox, request_id: int, failure: Failure) -> None:
        """Answers a request with a failure."""
        error = error_body(failure)
        self._answer(outbox, {"v": PROTOCOL_VERSION, "id": request_id, "error": error})

    def reply(self, outbox: Outbox, request_id: int, result: Message) -> None:
        """Answers a request."""
        self._answer(outbox, {"v": PROTOCOL_VERSION, "id": request_id, "result": result})

    def _answer(self, outbox: Outbox, body: Envelope) -> None:
        self.add_deferred(body)
        outbox.add(Reply(self.peer.conn, body))

    def add_deferred(self, body: Envelope) -> None:
        """Adds failed sets that nobody waited for to a reply."""
        deferrals = self.deferrals
        if deferrals.last is not None:
            body["deferred"] = Deferred(count=deferrals.count, last=deferrals.last)
            deferrals.count, deferrals.last = 0, None


class PerGpu:
    """A request for several GPUs, answered when each has a result or the deadline has passed."""

    def __init__(
        self,
        connection: ClientState,
        request_id: int,
        gpus: Iterable[str],
        outbox: Outbox,
        deadlines: Deadlines[PerGpu],
    ) -> None:
        self._deadlines = deadlines
        self._connection = connection
        self._request_id = request_id
        self._out = outbox
        self._results: dict[str, Message | None] = dict.fromkeys(gpus)
        self._missing = len(self._results)
        connection.waiting += 1

    def gpus(self) -> list[str]:
        """The requested GPUs, without duplicates."""
        return list(self._results)

    def fail(self, gpu: str, failure: Failure) -> None:
        """Records the failure of one GPU."""
        self.succeed(gpu, Refused(error=error_body(failure, gpu)))

    def expire(self) -> None:
        """Answers with the results so far, at the deadline."""
        for gpu, result in self._results.items():
            if result is None:
                self.fail(gpu, no_answer(gpu))

    def succeed(self, gpu: str, result: Message) -> None:
        """Records the result of one GPU."""
        if self._results[gpu] is not None:
            return
        self._results[gpu] = result
        self._missing -= 1
        if self._missing == 0:
            self._deadlines.pop(self)
            self._connection.waiting -= 1
            self._connection.reply(self._out, self._request_id, Results(gpus=self._results))
