"""Messages from an engine's process to the ledger's process, in packets of msgpack.

An engine must not wait, so a message is sent or dropped. Steps are numbered: a gap shows how many
were dropped, and when.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import lt, sub
from typing import Any

import msgpack

from zeus_ipc.errors import RequestRejected

SOCKET_ENV = "ZEUS_SERVING_SOCKET"
"""Sockets that steps are sent to, separated by colons: the ledger's, and clock control's."""
DEFAULT_SOCKET = "/run/zeus-serving.sock"
MOST_BYTES = 180_000
"""Largest size of a packet; longer ones are truncated, and rejected."""
MOST_STEPS = 1000
"""Of one message."""

Pack = Callable[[object], bytes]
"""Packs a message. A sender has its own `msgpack.Packer`, which reuses its buffer: `packb`
allocates one for each message, which takes longer than packing in a process with much memory."""


def socket_paths() -> list[str]:
    """Sockets that steps are sent to."""
    named = os.environ.get(SOCKET_ENV, "").split(":")
    return [one for one in named if one] or [DEFAULT_SOCKET]


@dataclass(frozen=True)
class EngineStep:
    """A step of one engine.

    Attributes:
        engine: The engine of the instance, with data parallelism.
        number: Number of the engine's step.
        begin_ns, end_ns: Start and end, CLOCK_MONOTONIC.
        ids: Its requests; empty: a dummy step.
        prefill: Whether each is in its prefill.
        tokens: Tokens computed for each.
        context: Tokens in the KV cache of each at the start.
    """

    engine: str
    number: int
    begin_ns: int
    end_ns: int
    ids: Sequence[str]
    prefill: Sequence[bool]
    tokens: Sequence[float]
    context: Sequence[float]


@dataclass(frozen=True)
class Arrival:
    """The arrival of a request.

    Attributes:
        engine: Which engine of the instance.
        request: Its id.
        at_ns: Time of arrival, CLOCK_MONOTONIC.
        prompt: Tokens of its prompt, including cached ones.
        trace: Its `traceparent` of W3C Trace Context; empty: it is not traced.
    """

    engine: str
    request: str
    at_ns: int
    prompt: int
    trace: str = ""


@dataclass(frozen=True)
class Finish:
    """The end of a request."""

    engine: str
    request: str
    tenant: str = ""


@dataclass(frozen=True)
class Owner:
    """The tenant of a request, from the front end, which does not know the engine."""

    request: str
    tenant: str


Message = EngineStep | Arrival | Finish | Owner


def pack_step(
    engine: str,
    number: int,
    begin_ns: int,
    end_ns: int,
    ids: Sequence[str],
    prefill: Sequence[bool],
    tokens: Sequence[float],
    context: Sequence[float],
    pack: Pack = msgpack.packb,
) -> bytes:
    """A step as bytes."""
    found: bytes = pack(("s", engine, number, begin_ns, end_ns, ids, prefill, tokens, context))
    return found


def pack_request(request: str, prompt: int, pack: Pack = msgpack.packb) -> bytes:
    """A request of a batch, and the tokens of its prompt: packed once for many batches."""
    found: bytes = pack(request) + pack(prompt)
    return found


def pack_batches(
    engine: str,
    number: int,
    instants: Sequence[int],
    roster: bytes,
    tokens: Sequence[int],
    computed: Sequence[int],
    ahead: int = 0,
    pack: Pack = msgpack.packb,
) -> bytes:
    """Steps of the same requests as bytes, without data that the receiver can derive.

    Args:
        engine: See `EngineStep`.
        number: Number of the first step.
        instants: Start and end of each step, alternating, CLOCK_MONOTONIC.
        roster: Their requests, each packed by `pack_request`, concatenated.
        tokens: See `EngineStep`; with more than one step: 1 for each request.
        computed: Tokens of each request that are computed by the end of a first step.
        ahead: How many steps after that one these start.
    """
    found: bytes = pack(("b", engine, number, instants, roster, tokens, computed, ahead))
    return found


def pack_finish(engine: str, request: str, tenant: str = "", pack: Pack = msgpack.packb) -> bytes:
    """The end of a request as bytes."""
    found: bytes = pack(("f", engine, request, tenant))
    return found


def pack_arrival(
    engine: str,
    request: str,
    at_ns: int,
    prompt: int,
    trace: str = "",
    pack: Pack = msgpack.packb,
) -> bytes:
    """The arrival of a request as bytes."""
    found: bytes = pack(("a", engine, request, at_ns, prompt, trace))
    return found


def pack_owner(request: str, tenant: str) -> bytes:
    """The owner of a request as bytes."""
    found: bytes = msgpack.packb(("o", request, tenant))
    return found


def unpack(data: bytes) -> list[Message]:
    """Yields the messages of a packet.

    Raises:
        RequestRejected: Part of it is not valid.
    """
    unpacker = msgpack.Unpacker()
    found: list[Message] = []
    try:
        unpacker.feed(data)
        while not found or unpacker.tell() < len(data):
            kind, *rest = unpacker.unpack()
            found += _MESSAGES[kind](rest)
        return found
    except (ValueError, TypeError, LookupError, msgpack.UnpackException):
        raise RequestRejected("this is not a message about a step or a request") from None


def _finish(rest: list[Any]) -> list[Message]:
    return [Finish(*(_text(one) for one in rest[:3]))]


def _owner(rest: list[Any]) -> list[Message]:
    return [Owner(_text(rest[0]), _text(rest[1]))]


def _arrival(rest: list[Any]) -> list[Message]:
    engine, request, at_ns, prompt, trace = rest[:5]
    if not isinstance(at_ns, int) or not isinstance(prompt, int) or prompt < 0:
        raise ValueError
    return [Arrival(_text(engine), _text(request), at_ns, prompt, _text(trace))]


def _batches(rest: list[Any]) -> list[Message]:
    engine, number, instants, roster, tokens, computed, ahead = rest[:7]
    names, prompts = _roster(roster)
    if not len(names) == len(tokens) == len(computed) or not isinstance(ahead, int):
        raise ValueError
    count = len(instants) // 2
    if len(instants) != 2 * count or not 0 < count <= MOST_STEPS or ahead < 0:
        raise ValueError
    if count + ahead > 1 and any(one != 1 for one in tokens):
        raise ValueError
    found: list[Message] = []
    context = [one + ahead for one in map(sub, computed, tokens)]
    for position in range(count):
        begin_ns, end_ns = instants[2 * position : 2 * position + 2]
        prefill = list(map(lt, context, prompts))
        where = (engine, number + position, begin_ns, end_ns)
        found += _step([*where, names, prefill, tokens, context])
        context = [one + 1 for one in context]
    return found


@lru_cache(maxsize=64)
def _roster(data: bytes) -> tuple[list[str], list[int]]:
    """Names and prompts of a roster, cached: an engine's batches often have the same requests."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    found = list(unpacker)
    if len(found) % 2:
        raise ValueError
    return found[::2], found[1::2]


def _step(rest: list[Any]) -> list[Message]:
    engine, number, begin_ns, end_ns, ids, prefill, tokens, context = rest[:8]
    if not all(isinstance(one, int) for one in (number, begin_ns, end_ns)):
        raise ValueError
    if not len(ids) == len(prefill) == len(tokens) == len(context) or begin_ns > end_ns:
        raise ValueError
    if not all(0 <= one < math.inf for one in (*tokens, *context)):
        raise ValueError
    names = [_text(one) for one in ids]
    if len(set(names)) != len(names):
        raise ValueError
    flags = [bool(one) for one in prefill]
    where = _text(engine), number, begin_ns, end_ns
    return [EngineStep(*where, names, flags, tokens, context)]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_MESSAGES: dict[str, Callable[[list[Any]], list[Message]]] = {
    "a": _arrival,
    "b": _batches,
    "f": _finish,
    "o": _owner,
    "s": _step,
}
