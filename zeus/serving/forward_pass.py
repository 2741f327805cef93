"""Forward-pass metrics of Dynamo and SGLang: one message per step, without requests.

Only sums of a step are known, so energy can be split by phase, not by request. A message has the
duration of the step, not its time, so the step is dated by the arrival of the message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from zeus.serving.wire import EngineStep, Finish, Message
from zeus_ipc.errors import RequestRejected

BLOCK = 1000
"""Number of passes whose rows have the same names in a ledger: figures are known after each
block."""
MOST_SEQUENCES = 4096
"""Largest plausible number of sequences in a step."""
MOST_WAITING = 100_000
"""Largest plausible number of requests in a queue."""


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass.

    Attributes:
        worker: The worker.
        rank: Its data parallel rank.
        number: Number of the worker's pass.
        seconds: Duration, s; 0 when the engine becomes idle.
        prefill_requests, prefill_tokens, prefill_context: Requests in prefill, their tokens in this
            pass, and what was in their KV cache.
        decode_requests, decode_context: Requests in decode, and what was in their KV cache.
        waiting, backlog_tokens: Requests in the queue, and the tokens of their prompts.
    """

    worker: str
    rank: int
    number: int
    seconds: float
    prefill_requests: int
    prefill_tokens: int
    prefill_context: int
    decode_requests: int
    decode_context: int
    waiting: int
    backlog_tokens: int

    def rows(self) -> tuple[list[str], list[bool], list[float], list[float]]:
        """The pass as rows of a step, one for each request; those of a phase are equal.

        Returns:
            Ids (`prefill-0`, `decode-0`, ...), prefill, tokens and context, for `Ledger.step`.
        """
        n, m = self.prefill_requests, self.decode_requests
        ids = [f"prefill-{one}" for one in range(n)] + [f"decode-{one}" for one in range(m)]
        tokens = [self.prefill_tokens / n] * n if n else []
        context = [self.prefill_context / n] * n if n else []
        return (
            ids,
            [True] * n + [False] * m,
            tokens + [1.0] * m,
            context + ([self.decode_context / m] * m if m else []),
        )


def decode(data: bytes) -> ForwardPass:
    """Decodes a message: positional msgpack.

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
        seconds, scheduled, queued = rest[:3]
        prefills, tokens, _, prefill_kv, decodes, decode_kv = scheduled[:6]
        counts = [int(n) for n in (prefills, tokens, prefill_kv, decodes, decode_kv, *queued[:2])]
        found = ForwardPass(str(worker), int(rank), int(number), float(seconds), *counts)
        if min(counts) < 0 or not 0 <= found.seconds < 3600 or found.waiting > MOST_WAITING:
            raise ValueError
        if found.prefill_requests + found.decode_requests > MOST_SEQUENCES:
            raise ValueError
    except (ValueError, TypeError, LookupError, OverflowError, msgpack.UnpackException):
        raise RequestRejected(
            "this is not a message of forward-pass metrics; check the address of the feed"
        ) from None
    return found


class Subscriber:
    """Receives forward passes.

    Args:
        address: Such as `tcp://127.0.0.1:20380` or `ipc:///tmp/fpm`.

    Attributes:
        rejected: Invalid messages.
        lost: Number of passes whose message did not arrive.
    """

    def __init__(self, address: str, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._numbers: dict[tuple[str, int], int] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 10_000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self.rejected = 0
        self.lost = 0

    def receive(self, timeout_s: float) -> tuple[int, int, ForwardPass] | None:
        """The next pass with its start and end, ns; None if none arrives within this time."""
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        end_ns = self._clock_ns()
        data = self._socket.recv_multipart()[-1]
        try:
            found = decode(data)
        except RequestRejected:
            self.rejected += 1
            return None
        key = found.worker, found.rank
        before = self._numbers.get(key)
        self._numbers[key] = found.number
        if before is not None and found.number > before:
            self.lost += found.number - before - 1
        return end_ns - round(found.seconds * 1e9), end_ns, found

    def close(self) -> None:
        """Ends the subscription."""
        self._socket.close()


class LedgerFeed:
    """Sends forward passes to a ledger as steps of an engine named by its rank.

    Args:
        subscriber: The source of the passes.
        take: Called with each message for the ledger.
    """

    def __init__(self, subscriber: Subscriber, take: Callable[[Message], object]) -> None:
        self._subscriber = subscriber
        self._take = take
        self._block: dict[str, int] = {}
        self._names: dict[str, set[str]] = {}

    def receive(self, timeout_s: float) -> None:
        """Handles the next pass, if one arrives within this time."""
        found = self._subscriber.receive(timeout_s)
        if found is None or not found[2].seconds:
            return
        begin_ns, end_ns, one = found
        engine, block = str(one.rank), one.number // BLOCK
        if self._block.get(engine) != block:
            for name in self._names.get(engine, ()):
                self._take(Finish(engine, name))
            self._block[engine], self._names[engine] = block, set()
        ids, prefill, tokens, context = one.rows()
        names = [f"{name}#{block}" for name in ids]
        self._names[engine].update(names)
        self._take(
            EngineStep(engine, one.number + 1, begin_ns, end_ns, names, prefill, tokens, context)
        )
