"""Connections, the requests that wait for devices, and what answers requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Deferred, Envelope, ErrorBody, GpuInfo, Refused, Results
from zeus_ipc.requests import Heartbeat
from zeus_ipc.wire import PROTOCOL_VERSION, Message
from zeusd.core.access import Access, Right
from zeusd.core.effects import Reply
from zeusd.core.model import Failure, Peer, Refusal
from zeusd.core.node import NodeState
from zeusd.core.outbox import Outbox

Answer: TypeAlias = Message | Failure


def error_body(failure: Failure, gpu: str | None = None) -> ErrorBody:
    """A failure, as in replies."""
    more: dict[str, Any] = {} if gpu is None else {"gpu": gpu}
    if failure.details:
        more["details"] = failure.details
    return ErrorBody(code=failure.code, message=failure.message, **more)


def envelope(request_id: int, result: Answer) -> Envelope:
    """The reply to a request."""
    if isinstance(result, Failure):
        return {"v": PROTOCOL_VERSION, "id": request_id, "error": error_body(result)}
    return {"v": PROTOCOL_VERSION, "id": request_id, "result": result}


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
    out: Outbox
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

    def answer(self, request_id: int, result: Any) -> None:
        """Answers a request with a message, or with a failure."""
        body = envelope(request_id, result)
        self.add_deferred(body)
        self.out.add(Reply(self.peer.conn, body))

    def add_deferred(self, body: Envelope) -> None:
        """Adds failed sets that nobody waited for to a reply."""
        deferrals = self.deferrals
        if deferrals.last is not None:
            body["deferred"] = Deferred(count=deferrals.count, last=deferrals.last)
            deferrals.count, deferrals.last = 0, None


class Pending:
    """A request for several GPUs or other sources, which is over when each has a result."""

    def __init__(
        self,
        names: Iterable[str],
        over: Callable[[dict[str, Message | None]], None],
        conn: int = -1,
    ) -> None:
        self.conn = conn
        self.names = [*dict.fromkeys(names)]
        self._results: dict[str, Message | None] = dict.fromkeys(self.names)
        self._left = len(self.names)
        self._over = over

    @property
    def waits(self) -> bool:
        """Whether a result is missing, and wanted."""
        return self._left > 0

    def put(self, name: str, result: Any) -> None:
        """Takes the result for one GPU, unless it has one: a message, or a failure."""
        if not self.waits or self._results[name] is not None:
            return
        if isinstance(result, Failure):
            result = Refused(error=error_body(result, name))
        assert isinstance(result, Message)
        self._results[name] = result
        self._left -= 1
        if not self._left:
            self._over(self._results)

    def each(self, one: Callable[[str], Message | None]) -> None:
        """Calls a function for each GPU, and takes what it returns or refuses; None: a result
        follows."""
        for name in self.names:
            try:
                result: Answer | None = one(name)
            except Refusal as refusal:
                result = refusal.failure
            if result is not None:
                self.put(name, result)

    def expire(self) -> None:
        """The deadline has passed: what is missing follows no more."""
        for name in self.names:
            self.put(name, no_answer(name))

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._left = 0


class RateLimiter:
    """One token bucket for each key, such as a uid."""

    def __init__(self, per_second: float, burst: float) -> None:
        self.per_second = per_second
        self.burst = max(1.0, burst)
        self._buckets: dict[Hashable, tuple[float, int]] = {}

    def take(self, key: Hashable, now_ns: int) -> bool:
        """Takes one token; False if the bucket is empty."""
        level = self._level(key, now_ns)
        if level < 1.0:
            return False
        self._buckets[key] = (level - 1.0, now_ns)
        # Beyond this number, full buckets are dropped, so that unused ones take no memory.
        if len(self._buckets) > 4096:
            buckets = self._buckets.items()
            self._buckets = {
                key: bucket for key, bucket in buckets if self._level(key, now_ns) < self.burst
            }
        return True

    def _level(self, key: Hashable, now_ns: int) -> float:
        level, then_ns = self._buckets.get(key, (self.burst, now_ns))
        return min(self.burst, level + (now_ns - then_ns) * 1e-9 * self.per_second)


Handler: TypeAlias = Callable[[ClientState, Any], Answer | None]
"""Answers a request, at once or later (None). May raise `Refusal`."""


class RequestContext:
    """What all handlers of requests share."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.out = node.out
        self.reconfigured()

    def reconfigured(self) -> None:
        """The configuration changed."""
        per_second = self.node.settings.access.writes_per_second
        self._writes = RateLimiter(per_second, 2 * per_second)

    def track(
        self, connection: ClientState, request: Any, names: Iterable[str] | None = None
    ) -> Pending:
        """A request for several GPUs begins; it is answered when all have a result."""

        def over(results: dict[str, Message | None]) -> None:
            self.out.due_ns.drop(pending.expire)
            connection.waiting -= 1
            connection.answer(request.id, Results(gpus=results))

        pending = Pending(request.gpus if names is None else names, over)
        connection.waiting += 1
        if request.deadline_ns:
            self.out.due_ns[pending.expire] = request.deadline_ns
        return pending

    def is_admin(self, peer: Peer) -> bool:
        """Whether this user is an administrator."""
        return self.node.settings.access.is_admin(peer)

    def count_change(self, peer: Peer) -> None:
        """Takes one of the user's changes for this second.

        Raises:
            Refusal: There is none left.
        """
        if not self._writes.take(self.node.owner_of(peer.uid), self.out.now_ns):
            allowed = self.node.settings.access.writes_per_second
            raise Refusal(
                Failure(
                    ErrorCode.OVERLOADED,
                    f"user {peer.uid} sends over {allowed:g} changes a second; send them more "
                    "slowly",
                )
            )

    def for_admins(self, what: str, handler: Handler) -> Handler:
        """A handler that refuses everyone but administrators; `what` describes the action."""

        def handle(connection: ClientState, request: Any) -> Answer | None:
            if self.is_admin(connection.peer):
                return handler(connection, request)
            self.out.audit_log.refused(ErrorCode.PERMISSION_DENIED)
            return Failure(
                ErrorCode.PERMISSION_DENIED,
                f"user {connection.peer.uid} may not {what}; ask an administrator of this node's "
                "GPUs",
            )

        return handle
