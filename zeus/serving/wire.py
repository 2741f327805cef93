"""Messages from an engine's process to the ledger's process, in packets of msgpack.

An engine must not wait, so a message is sent or dropped. Steps are numbered: a gap shows how many
were dropped, and when. A packet is its version and messages; a message is an array of its kind's
letter and its fields. Further fields, of newer senders of the same version, are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import add, lt, sub
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote

import msgpack
from pydantic import ConfigDict, Field, NonNegativeInt, Strict, TypeAdapter

from zeus_ipc.errors import RequestRejected

SOCKET_ENV = "ZEUS_SERVING_SOCKET"
"""Sockets that steps are sent to, separated by colons: the ledger's, and clock control's."""
DEFAULT_SOCKET = "/run/zeus-serving.sock"
VERSION = 1
"""Of the messages; a packet of another version is rejected."""
NAME = "zeus"
_HEAD = bytes(msgpack.packb((NAME, VERSION)))
MOST_BYTES = 180_000
"""Largest size of a packet; longer ones are truncated, and rejected."""
MOST_STEPS = 1000
"""Of one message."""
MOST_REQUESTS = 100_000
"""Most requests of an engine that are known at a time."""
WAIT_NS = 120 * 10**9
"""Time after which a front end sends a step with the requests known by then, even if some run."""
MOST_LABEL = 200
"""Longest tenant or group, in characters; the rest is cut off."""
GROUP = "zeus.group"
"""Member of W3C `baggage` that names a request's group."""
_TRACE = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-")

Pack = Callable[[object], bytes]
"""Packs a message. A sender has its own `msgpack.Packer`, which reuses its buffer: `packb`
allocates one for each message, which takes longer than packing in a process with much memory."""


def socket_paths() -> list[str]:
    """Sockets that steps are sent to."""
    named = os.environ.get(SOCKET_ENV, "").split(":")
    return [one for one in named if one] or [DEFAULT_SOCKET]


Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Tokens: their squares and products are finite."""
Count = Annotated[int, Field(ge=0, le=10**9)]
Instant = Annotated[int, Field(ge=0, lt=2**62)]
"""CLOCK_MONOTONIC, ns: differences fit into 64 bits."""


class EngineStep(NamedTuple):
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
    number: NonNegativeInt
    begin_ns: Instant
    end_ns: Instant
    ids: Sequence[str]
    prefill: Sequence[Annotated[bool, Strict(False)]]
    tokens: Sequence[Amount]
    context: Sequence[Amount]


class Arrival(NamedTuple):
    """The arrival of a request.

    Attributes:
        at_ns: When it arrived, CLOCK_MONOTONIC.
        prompt: Tokens of its prompt, including cached ones.
        trace: Its `traceparent` of W3C Trace Context; empty: it is not traced.
    """

    engine: str
    request: str
    at_ns: Instant
    prompt: Count
    trace: str = ""


class Finish(NamedTuple):
    """The end of a request."""

    engine: str
    request: str
    tenant: str = ""
    group: str = ""


class Owner(NamedTuple):
    """Tenant and group of a request, from the front end, which does not know the engine."""

    request: str
    tenant: str
    group: str = ""


class Batch(NamedTuple):
    """Steps without what the receiver can derive from the step before.

    Each request computes one token a step, except in the first one, which those of `roster` join.

    Attributes:
        number: Number of the first step.
        instants: Start and end of each step, alternating, CLOCK_MONOTONIC.
        whole: Whether these are all requests of the step; else they join those of the step before.
        left: Requests of the step before that are in none of these.
        roster: Requests, each packed by `pack_request`, concatenated.
        computed: Tokens of each of them that are computed by the end of the first step.
        tokens: Tokens of each in this step.
    """

    engine: str
    number: NonNegativeInt
    instants: Annotated[Sequence[Instant], Field(min_length=2, max_length=2 * MOST_STEPS)]
    whole: bool
    left: Sequence[str]
    roster: bytes
    computed: Sequence[Count]
    tokens: Sequence[Count]


Message = EngineStep | Arrival | Finish | Owner

_KINDS: dict[str, type[Message | Batch]] = {
    "a": Arrival,
    "b": Batch,
    "f": Finish,
    "o": Owner,
    "s": EngineStep,
}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


def packet(messages: Iterable[bytes]) -> bytes:
    """Packed messages, as they are sent."""
    return _HEAD + b"".join(messages)


def group_of(trace: str, baggage: str = "") -> str:
    """The group of a request: an agent's task, or a phase of reinforcement learning.

    It is the member `zeus.group` of its `baggage`, else the trace id of its `traceparent` (both of
    W3C); empty: it has neither.
    """
    for member in baggage.split(","):
        name, _, value = member.partition(";")[0].partition("=")
        if name.strip() == GROUP:
            return unquote(value.strip())[:MOST_LABEL]
    match = _TRACE.match(trace)
    return match[1] if match else ""


def pack(message: Message | Batch, packer: Pack = msgpack.packb) -> bytes:
    """A message as bytes."""
    return packer((_LETTERS[type(message)], *message))


def pack_request(request: str, prompt: int, packer: Pack = msgpack.packb) -> bytes:
    """A request of a batch, and the tokens of its prompt: packed once for many batches."""
    return packer(request) + packer(prompt)


class Unpacker:
    """Unpacks the packets of one engine's process."""

    def __init__(self) -> None:
        self._number = -1  # of the last step; its requests' prompts and computed tokens follow
        self._prompts: dict[str, int] = {}
        self._computed: dict[str, int] = {}

    def __call__(self, data: bytes) -> list[Message]:
        """The messages of a packet; those of a batch are its steps.

        A batch whose step before was lost has none: the sender is about to send a whole one.

        Raises:
            RequestRejected: Part of it is not valid, or it is of another version.
        """
        unpacker = msgpack.Unpacker()
        messages: list[Message] = []
        try:
            unpacker.feed(data)
            name, version = unpacker.unpack()
            if name != NAME:
                raise ValueError
            if version != VERSION:
                raise RequestRejected(
                    f"an engine sends messages of version {version}, and this process reads "
                    f"{VERSION}; install the same zeusd in both environments"
                )
            while True:
                letter, *fields = unpacker.unpack()
                known = len(_KINDS[letter]._fields)
                message = _adapter(letter).validate_python(fields[:known])
                messages += (
                    self._steps(message) if isinstance(message, Batch) else [_checked(message)]
                )
                if unpacker.tell() >= len(data):
                    return messages
        except (ValueError, TypeError, LookupError, msgpack.UnpackException):
            self._number = -1  # nothing is derived from what is wrong
            raise RequestRejected("this is not a message about a step or a request") from None

    def _steps(self, batch: Batch) -> Iterator[EngineStep]:
        names, prompts = _roster(batch.roster)
        if not len(names) == len(batch.tokens) == len(batch.computed):
            raise ValueError
        if any(map(lt, batch.computed, batch.tokens)):
            raise ValueError
        if batch.whole:
            self._prompts, self._computed = {}, {}
        elif batch.number != self._number + 1:
            return
        for name in batch.left:
            del self._prompts[name], self._computed[name]
        if not self._prompts.keys().isdisjoint(names) or len(self._prompts) > MOST_REQUESTS:
            raise ValueError
        tokens = dict.fromkeys(self._prompts, 1) | dict(zip(names, batch.tokens, strict=True))
        self._prompts.update(zip(names, prompts, strict=True))
        before = map(sub, batch.computed, batch.tokens)
        self._computed.update(zip(names, before, strict=True))
        pairs = zip(batch.instants[::2], batch.instants[1::2], strict=True)
        for self._number, (begin_ns, end_ns) in enumerate(pairs, batch.number):
            if begin_ns > end_ns:
                raise ValueError
            context = list(self._computed.values())
            yield EngineStep(
                batch.engine,
                self._number,
                begin_ns,
                end_ns,
                list(tokens),
                list(map(lt, context, self._prompts.values())),
                list(tokens.values()),
                context,
            )
            self._computed = dict(zip(tokens, map(add, context, tokens.values()), strict=True))
            tokens = dict.fromkeys(tokens, 1)


@lru_cache
def _adapter(letter: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[letter], config=ConfigDict(strict=True))


def _checked(message: Message) -> Message:
    if isinstance(message, EngineStep):
        _, _, begin_ns, end_ns, ids, *rows = message
        if begin_ns > end_ns or {len(set(ids)), *map(len, rows)} != {len(ids)}:
            raise ValueError
    return message


def _roster(data: bytes) -> tuple[list[str], list[int]]:
    """Names and prompts of a roster."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    items = list(unpacker)
    names, prompts = items[::2], items[1::2]
    if not len(set(names)) == len(names) == len(prompts):
        raise ValueError
    if {*map(type, names)} - {str} or {*map(type, prompts)} - {int}:
        raise TypeError
    return names, prompts
