"""Forward-pass metrics of Dynamo and SGLang: one message per step, without requests.

Only sums of a step are known, so energy can be split by phase, not by request, and latencies are
estimates. A message has the duration of the step, not its time, so the step is dated by the arrival
of the message; steps whose messages were read together, late, are dated one after another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgpack
import zmq

from zeus.serving.wire import MOST_REQUESTS, EngineStep, Finish, Message
from zeus_ipc.errors import RequestRejected

log = logging.getLogger(__name__)

BLOCK = 1000
"""Number of passes whose rows have the same names in a ledger: figures are known after each
block."""
POLL_MS = 200
MOST_SEQUENCES = 4096
"""Largest plausible number of sequences in a step."""


class ForwardPass(NamedTuple):
    """One forward pass.

    Attributes:
        worker: The worker.
        step: Its step, with a row for each request; those of a phase are equal. Its engine is named
            by the data parallel rank. It has no length when the engine becomes idle.
        waiting, backlog_tokens: Requests in the queue, and the tokens of their prompts.
    """

    worker: str
    step: EngineStep
    waiting: int
    backlog_tokens: int

    @property
    def idle(self) -> bool:
        """Whether the engine becomes idle."""
        return self.step.begin_ns == self.step.end_ns


def decode(data: bytes, now_ns: int) -> ForwardPass:
    """Decodes a message that arrived now: positional msgpack.

    `version, worker_id, dp_rank, counter_id, wall_time, scheduled_requests, queued_requests`, the
    last two being `num_prefill_requests, sum_prefill_tokens, var_prefill_length,
    sum_prefill_kv_tokens, num_decode_requests, sum_decode_kv_tokens, var_decode_kv_tokens`, of the
    queue without the KV cache of prefills. Further fields are ignored.

    Raises:
        RequestRejected: It is not valid.
    """
    try:
        fields: list[Any] = msgpack.unpackb(data)
        _, worker, rank, number, *rest = fields
        if isinstance(rest[0], str):  # newer versions start with the kind of the timing
            rest = rest[1:]
        seconds, scheduled, queued = float(rest[0]), *rest[1:3]
        prefills, tokens, _, prefill_kv, decodes, decode_kv = scheduled[:6]
        counts = [int(n) for n in (prefills, tokens, prefill_kv, decodes, decode_kv, *queued[:2])]
        prefills, tokens, prefill_kv, decodes, decode_kv, waiting, backlog = counts
        if min(counts) < 0 or not 0 <= seconds < 3600 or waiting > MOST_REQUESTS:
            raise ValueError
        if prefills + decodes > MOST_SEQUENCES:
            raise ValueError
        engine, number = str(int(rank)), int(number) + 1
    except (ValueError, TypeError, LookupError, OverflowError, msgpack.UnpackException):
        raise RequestRejected(
            "this is not a message of forward-pass metrics; check the address of the feed"
        ) from None
    rows = [
        (f"{phase}-{n}", phase == "prefill", total / count, context / count)
        for phase, count, total, context in (
            ("prefill", prefills, tokens, prefill_kv),
            ("decode", decodes, decodes, decode_kv),
        )
        for n in range(count)
    ]
    columns = map(list, zip(*rows, strict=True)) if rows else [[]] * 4
    step = EngineStep(engine, number, now_ns - round(seconds * 1e9), now_ns, *columns)
    return ForwardPass(str(worker), step, waiting, backlog)


def subscribe(address: str) -> zmq.Socket[bytes]:
    """A subscription to an address such as `tcp://127.0.0.1:20380` or `ipc:///tmp/fpm`.

    Raises:
        ValueError: The address cannot be used.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ValueError(f"cannot listen to {address}: {error}; check --feed") from None
    log.info("waiting for forward-pass metrics of %s", address)
    return socket


def in_turn(passes: list[ForwardPass], since_ns: int) -> list[ForwardPass]:
    """Dates passes that were read together: each ends when the next begins, the last one as it is.

    Args:
        passes: Passes in the order in which they ended. Their times are ns of CLOCK_MONOTONIC.
        since_ns: All ended after this time: durations that overlap are reduced to what has passed.
    """
    durations = [one.step.end_ns - one.step.begin_ns for one in passes]
    total = left = sum(durations)
    dated = []
    for one, duration in zip(passes, durations, strict=True):
        left -= duration
        share = min(1.0, (one.step.end_ns - since_ns) / max(1, total))
        end_ns = one.step.end_ns - round(share * left)
        step = one.step._replace(begin_ns=end_ns - duration, end_ns=end_ns)
        dated.append(one._replace(step=step))
    return dated


def listen(
    socket: zmq.Socket[bytes], take: Callable[[ForwardPass], None], ended: threading.Event
) -> None:
    """Calls `take` with each pass until the event; then closes the socket. Logs the first message
    that is not valid."""
    warned = False
    since_ns = time.monotonic_ns()
    while not ended.is_set():
        if not socket.poll(POLL_MS):
            continue
        messages: list[bytes] = []
        with suppress(zmq.Again):
            while len(messages) < BLOCK:
                messages.append(socket.recv_multipart(zmq.NOBLOCK)[-1])
        now_ns, passes = time.monotonic_ns(), []
        for data in messages:
            try:
                passes.append(decode(data, now_ns))
            except RequestRejected as error:
                if not warned:
                    warned = True
                    log.warning("%s", error)
        for one in in_turn(passes, since_ns):
            take(one)
        since_ns = now_ns
    socket.close()


def follow(address: str, take: Callable[[Message], object]) -> Callable[[], None]:
    """Hands passes to ledgers, in a thread; returns what ends it.

    Raises:
        ValueError: The address cannot be used.
    """
    arguments = subscribe(address), LedgerPasses(take), (ended := threading.Event())
    thread = threading.Thread(target=listen, args=arguments, name="zeus-serving-feed", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


class LedgerPasses:
    """Hands passes to ledgers as steps of an engine named by its rank.

    Args:
        take: Called with each message for the ledgers.
    """

    def __init__(self, take: Callable[[Message], object]) -> None:
        self._take = take
        self._block: dict[str, int] = {}
        self._names: dict[str, set[str]] = {}

    def __call__(self, one: ForwardPass) -> None:
        """Handles a pass."""
        if one.idle:
            return
        engine, block = one.step.engine, (one.step.number - 1) // BLOCK
        if self._block.get(engine) != block:
            for name in self._names.get(engine, ()):
                self._take(Finish(engine, name))
            self._block[engine], self._names[engine] = block, set()
        names = [f"{name}#{block}" for name in one.step.ids]
        self._names[engine].update(names)
        self._take(one.step._replace(ids=names))
