"""Answers questions about the energy ledger, on a thread that nothing else waits for.

Users take turns by the time that their queries take, and each query goes on a slice at a time, so
that a query over a year delays another user's by a slice. A user has a bounded number of queries,
and beyond a burst a share of the thread's time. What a connection asked ends with the connection.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from zeus_ipc import replies
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import UsageSum
from zeus_ipc.requests import MAX_SUMS, GetUsage
from zeusd.core.effects import LedgerCall
from zeusd.core.model import Failure
from zeusd.ledger.schema import open_to_read
from zeusd.ledger.usage import By, Reader, TooManySums, UsageAnswer

log = logging.getLogger(__name__)

MAX_WAITING = 8
"""Queries of one user that may wait for an answer."""

SHARE = 0.5
BURST_NS = 2_000_000_000
"""Time for which a user's queries may take the thread without pauses; then only `SHARE` of it."""

LEAST_NS = 20_000_000
"""What a query counts at least: it takes the loop and the ledger's writer some time, too."""

BUSY = Failure(
    ErrorCode.OVERLOADED, "too many queries already wait for the energy ledger; try again later"
)
FLOOD = Failure(
    ErrorCode.OVERLOADED,
    f"{MAX_WAITING} of this user's queries already wait for the energy ledger; try again when "
    "they are answered",
)
CLOSED = Failure(ErrorCode.SHUTTING_DOWN, "nobody waits for this any more")

Answer: TypeAlias = "replies.Usage | Failure"
Steps: TypeAlias = Generator[None, None, Answer]


@dataclass(slots=True)
class _UserQueries:
    """A user's queries.

    Attributes:
        steps: The remaining slices of the oldest one; None: it has not begun.
    """

    waiting: deque[LedgerCall] = field(default_factory=deque)
    steps: Steps | None = None
    due_ns: int = 0


class Usages:
    """The thread. All methods may be called from any thread, and return at once."""

    def __init__(
        self,
        directories: dict[str, str],
        refresh: Callable[[], Failure | None],
        answer: Callable[[LedgerCall, object], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._directories = directories
        self._refresh = refresh
        self._answer = answer
        self._clock_ns = clock_ns
        self._users: dict[int, _UserQueries] = {}
        self._turns: deque[int] = deque()
        self._pages: dict[int, tuple[object, int, UsageAnswer, int | None]] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its present slice."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    def submit(self, call: LedgerCall) -> Failure | None:
        """Queues a query; returns why it is refused."""
        with self._changed:
            if sum(len(user.waiting) for user in self._users.values()) >= 256:
                return BUSY
            user = self._users.setdefault(call.uid, _UserQueries())
            if len(user.waiting) >= MAX_WAITING:
                return FLOOD
            user.waiting.append(call)
            self._queue(call.uid)
            self._changed.notify()
        return None

    def closed(self, conn: int) -> None:
        """A connection ended: drops its queries."""
        gone: list[LedgerCall] = []
        with self._changed:
            for user in self._users.values():
                mine = [call for call in user.waiting if call.conn == conn]
                if mine and user.waiting[0] is mine[0]:
                    user.steps = None
                for call in mine:
                    user.waiting.remove(call)
                gone += mine
        for call in gone:
            self._answer(call, CLOSED)

    # --------------------------------------------------------------------------------- internals

    def _queue(self, uid: int) -> None:
        if uid not in self._turns:
            self._turns.append(uid)

    def _run(self) -> None:
        while True:
            with self._changed:
                uid = self._next()
                if uid is None:
                    return
                user = self._users[uid]
                call, steps = user.waiting[0], user.steps
            begin_ns = self._clock_ns()
            if steps is None:
                steps = self._steps(call)
            result = self._advance(steps, begin_ns + 10_000_000)
            now_ns = self._clock_ns()
            with self._changed:
                user.due_ns = max(user.due_ns, now_ns - BURST_NS)
                took_ns = max(now_ns - begin_ns, LEAST_NS if result is not None else 0)
                user.due_ns += round(took_ns / SHARE)
                self._queue(uid)
                # It is another one if the connection has ended meanwhile.
                asked = bool(user.waiting) and user.waiting[0] is call
                if asked:
                    user.steps = steps if result is None else None
                if asked and result is not None:
                    user.waiting.popleft()
            if result is not None and asked:
                self._answer(call, result)

    def _next(self) -> int | None:
        """The user whose turn it is, once there is one; None: the end."""
        while not self._stopped:
            now_ns = self._clock_ns()
            earliest_ns: int | None = None
            for _ in range(len(self._turns)):
                uid = self._turns.popleft()
                user = self._users[uid]
                due_ns = user.due_ns
                if not user.waiting:
                    due_ns += BURST_NS  # then it has nothing to pay for
                if due_ns > now_ns:
                    self._turns.append(uid)
                    earliest_ns = due_ns if earliest_ns is None else min(earliest_ns, due_ns)
                elif user.waiting:
                    return uid
                else:
                    del self._users[uid]
            wait_s = None if earliest_ns is None else max(0.001, (earliest_ns - now_ns) / 1e9)
            self._changed.wait(wait_s)
        return None

    def _advance(self, steps: Steps, until_ns: int) -> Answer | None:
        """Goes on with a query for a while; returns its result, None: there is more to do."""
        try:
            while self._clock_ns() < until_ns:
                next(steps)
        except StopIteration as end:
            result: Answer = end.value
            return result
        except sqlite3.Error as error:
            return Failure(
                ErrorCode.LEDGER_FAILED,
                f"the energy ledger cannot be read ({error}); see zeusd's log",
            )
        except Exception as error:  # the client must get a reply
            log.exception("a query of the ledger failed", extra={"event": "bug"})
            return Failure(
                ErrorCode.INTERNAL,
                f"zeusd failed in its energy ledger ({type(error).__name__}); please report it "
                "with zeusd's log",
            )
        return None

    def _steps(self, call: LedgerCall) -> Steps:
        request = call.request
        assert isinstance(request, GetUsage)
        now_ns = self._clock_ns()
        question = (call.reader, request.model_dump(exclude={"id", "offset", "deadline_ns"}))
        # How long the rest of a long reply is kept.
        self._pages = {
            uid: page for uid, page in self._pages.items() if now_ns - page[1] < 10_000_000_000
        }
        page = self._pages.get(call.uid)
        if request.offset and page is not None and page[0] == question:
            usage, begins_s = page[2:]
        else:
            failure = self._refresh()
            if failure is not None:
                return failure
            with open_to_read(self._directories[request.device]) as connection:
                reader = Reader(connection, request.gpus)
                try:
                    usage = yield from usage_of(reader, request, call.reader)
                except TooManySums as error:
                    return Failure(ErrorCode.OVERLOADED, str(error))
                begins_s = reader.begins_s()
        answer = page_of(usage, request, begins_s)
        self._pages.pop(call.uid, None)
        # Long replies that are kept, one for each user.
        if answer.more and len(self._pages) < 4:
            self._pages[call.uid] = (question, now_ns, usage, begins_s)
        return answer


def usage_of(
    reader: Reader, request: GetUsage, user: int | None
) -> Generator[None, None, UsageAnswer]:
    """The sums that a request asks for, as far as a user may see them; None: all."""
    return reader.usage(
        request.edges, By(request.by), user, request.uid, request.name, request.by_method
    )


def page_of(usage: UsageAnswer, request: GetUsage, begins_s: int | None) -> replies.Usage:
    """The requested part of an answer."""
    end = request.offset + MAX_SUMS
    return replies.Usage(
        sums=[
            UsageSum(**{**asdict(one), "methods": sorted(one.methods)})
            for one in usage.sums[request.offset : end]
        ],
        more=len(usage.sums) > end,
        metered_uj=usage.metered_uj,
        begins_s=begins_s,
        settled_ms=usage.settled_ms,
    )
