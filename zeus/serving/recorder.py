"""What is in an engine's process: it pairs the starts of steps with their ends, and sends them,
without blocking the engine or raising into it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from zeus.serving.wire import (
    MOST_BYTES,
    Arrival,
    Batch,
    EngineStep,
    Finish,
    Message,
    Owner,
    pack,
    packet,
    socket_paths,
)

log = logging.getLogger(__name__)

MOST_AHEAD = 64
"""Most steps in flight; with more, ends were missed, and the oldest are dropped. Also most messages
that are held."""
RETRY_S = 1.0
"""Period of looking for a listener."""
HOLD_NS = 20_000_000
"""Time for which messages are collected, which is clock control's period. A longer step is sent at
its end."""
SEND_BYTES = 4 * 2**20
"""Most steps that wait while the listener is busy: some seconds."""

_SAME: tuple[bool, Sequence[str], bytes, Sequence[int], Sequence[int]] = False, (), b"", (), ()
"""Fields of a batch whose requests are those of the step before."""


class Recorder:
    """The sender in an engine's process: messages about steps are sent or dropped.

    It needs no listener, and finds one that starts later within a second. Not safe across threads;
    does nothing in a child of `fork`.

    Args:
        engine: The engine of the instance, with data parallelism.
        path: The listener's socket; None: those of `$ZEUS_SERVING_SOCKET`.
        hold: Messages may be collected for up to `HOLD_NS` of the engine's steps: call `flush`
            before a pause, and before a step unlike the previous one.
    """

    def __init__(self, engine: str = "0", path: str | None = None, *, hold: bool = False) -> None:
        self._engine = engine
        self._listeners = [_Listener(one) for one in ([path] if path else socket_paths())]
        self.number = 0
        """Of the newest step."""
        self._pack = msgpack.Packer().pack
        self._pid = os.getpid()
        self._failed = False
        self._unsent = 0
        self._closed = False
        self._hold = hold
        self._held: list[bytes] = []
        self._batch = _SAME  # of the first step that is not packed yet
        self._instants: list[int] = []  # start and end of these steps
        self._whole = False  # whether a whole batch is held
        self.starts = False
        """Whether a listener cannot know the step before, so that the next batch must be whole."""
        self._sent_ns = 0

    @property
    def sent(self) -> int:
        """Messages that a listener's kernel buffer accepted."""
        return sum(one.sent for one in self._listeners)

    @property
    def dropped(self) -> int:
        """Messages that it did not accept, or that had no listener."""
        return self._unsent + sum(one.dropped for one in self._listeners)

    def step(
        self,
        begin_ns: int,
        end_ns: int,
        ids: Sequence[str],
        prefill: Sequence[bool],
        tokens: Sequence[float],
        context: Sequence[float],
    ) -> None:
        """Sends a step; arguments as of an `EngineStep`. A `batch` after it must be whole."""
        self._pack_batch()
        self.number += 1
        self._send(
            EngineStep(self._engine, self.number, begin_ns, end_ns, ids, prefill, tokens, context)
        )

    def batch(
        self,
        begin_ns: int,
        end_ns: int,
        left: Sequence[str] = (),
        roster: bytes = b"",
        computed: Sequence[int] = (),
        tokens: Sequence[int] = (),
        whole: bool = False,
    ) -> None:
        """Sends how a step differs from the one before, at a lower cost than `step`.

        All other requests of the step before compute one token each.

        Args:
            left: Requests of the step before that are not in this one.
            roster: Its other requests, each packed by `wire.pack_request`, concatenated.
            computed: Tokens of each of these that are computed by the end of the step.
            tokens: Tokens of each of these that are computed in this step.
            whole: Whether `roster` has all requests of the step.
        """
        if whole or left or roster:
            self._pack_batch()
            self._batch = whole, left, roster, computed, tokens
        self.number += 1
        self._instants += begin_ns, end_ns
        if not self._hold or end_ns - self._sent_ns >= HOLD_NS:
            self._sent_ns = end_ns
            self.flush()

    def flush(self) -> None:
        """Sends the collected messages."""
        self._pack_batch()
        held = self._held
        if held:
            self._held = []
            if self._closed or os.getpid() != self._pid:
                return
            data, whole = packet(held), self._whole
            self._whole = False
            if len(data) > MOST_BYTES:
                self._fail(ValueError("their requests have too long names"))
                return
            self.starts = False
            for one in self._listeners:
                self.starts |= one.send(data, whole=whole)

    def _pack_batch(self) -> None:
        instants = self._instants
        if not instants:
            return
        self._instants = []
        first = self.number - len(instants) // 2 + 1
        self._whole |= self._batch[0]
        self._add(Batch(self._engine, first, instants, *self._batch))
        self._batch = _SAME

    def arrived(self, request: str, at_ns: int, prompt: int, trace: str = "") -> None:
        """Sends the arrival of a request, for clock control.

        Args:
            at_ns: When it arrived, CLOCK_MONOTONIC.
            prompt: Tokens of its prompt, including cached ones.
            trace: Its `traceparent` of W3C Trace Context; empty: it is not traced.
        """
        self._send(Arrival(self._engine, request, at_ns, prompt, trace))

    def finish(self, request: str, tenant: str = "", group: str = "") -> None:
        """Sends the end of a request, after its last step, with its tenant and its group if they
        are known here. Later steps with its name are of another request."""
        self._send(Finish(self._engine, request, tenant, group))

    def owner(self, request: str, tenant: str, group: str = "") -> None:
        """Sends tenant and group of a request, from a process that does not know its steps."""
        self._send(Owner(request, tenant, group))

    def close(self) -> None:
        """Sends the collected messages, and nothing after that."""
        self.flush()
        self._closed = True
        for one in self._listeners:
            one.disconnect()

    def _send(self, message: Message) -> None:
        self._pack_batch()
        self._add(message)
        if not self._hold or len(self._held) >= MOST_AHEAD:
            self.flush()

    def _add(self, message: Message | Batch) -> None:
        try:
            self._held.append(pack(message, self._pack))
        except Exception as error:  # noqa: BLE001 - never raise into the engine
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._unsent += 1
        self.starts = True
        for one in self._listeners:
            one.lost = True
        if not self._failed:
            self._failed = True
            with contextlib.suppress(Exception):
                log.warning("steps are not recorded: %s", error)


class _Listener:
    """One destination socket, with or without a listening process.

    Attributes:
        lost: Whether a step since its last whole batch was not sent to it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._tried_s = -RETRY_S
        self.sent = self.dropped = 0
        self.lost = True

    def send(self, data: bytes, *, whole: bool) -> bool:
        """Sends or drops data; returns whether the next batch must be whole."""
        if self._socket is None:
            self._connect()
        if self._socket is None:
            self.dropped += 1
            return False
        try:
            self._socket.send(data)
        except OSError as error:
            self.dropped += 1
            self.lost = True
            if not isinstance(error, BlockingIOError):
                self.disconnect()
        else:
            self.sent += 1
            self.lost &= not whole
        return self.lost and self._socket is not None

    def disconnect(self) -> None:
        self.lost = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        now_s = time.monotonic()
        if now_s - self._tried_s < RETRY_S:
            return
        self._tried_s = now_s
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            connection.connect(self._path)
        except OSError:
            connection.close()
        else:
            self._socket = connection


class EngineProbe:
    """Code in an engine that does it no harm: after a failure it logs one warning, and stops.

    It has the steps in flight, first in, first out: engines that schedule ahead start a step before
    the previous one has ended.

    Args:
        name: The engine, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.failed = False
        self.now_ns: Callable[[], int] = time.monotonic_ns
        self._steps: deque[tuple[int, Any]] = deque(maxlen=MOST_AHEAD)

    def silent(self, work: Callable[..., None], *arguments: object) -> None:
        """Runs `work`, unless it failed before."""
        if self.failed:
            return
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - never raise into the engine
            self.failed = True
            log.warning(
                "the energy probe of %s stops, the engine continues: %s: %s",
                self._name,
                type(error).__name__,
                error,
            )

    def begin(self, begin_ns: int, what: Any) -> None:
        """Adds a step that started, and data about it."""
        self._steps.append((begin_ns, what))

    def under_way(self) -> list[Any]:
        """The data of the steps in flight."""
        return [what for _, what in self._steps]

    def end(self) -> tuple[int, int, Any] | None:
        """Removes the oldest step, which ended; returns its start, end and data; None: none is in
        flight."""
        if not self._steps:
            return None
        begin_ns, what = self._steps.popleft()
        return begin_ns, self.now_ns(), what


PROBE = "_zeus_probe"
"""Attribute of an engine's object that holds its probe."""


def wrap(owner: Any, name: str, make: Callable[[Any], Any], before: str, after: str) -> None:
    """Wraps a method of an engine's class once, so that a probe learns of its calls.

    Args:
        make: Makes the probe of an object of the class, an `EngineProbe`.
        before: The probe's method that gets the arguments of a call; empty: none.
        after: The probe's method that gets the call's start, ns (0 if it has one before), and its
            result; empty: none.
    """
    method = getattr(owner, name)
    if hasattr(method, PROBE):
        return
    attaching = EngineProbe(owner.__name__)

    def attach(engine: Any) -> None:
        setattr(engine, PROBE, make(engine))

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        probe = getattr(self, PROBE, None)
        if probe is None:
            attaching.silent(attach, self)
            probe = getattr(self, PROBE, None)
        if probe is None:
            return method(self, *arguments, **options)
        begin_ns = 0
        if before:
            probe.silent(getattr(probe, before), *arguments, *options.values())
        else:
            begin_ns = probe.now_ns()
        result = method(self, *arguments, **options)
        if after:
            probe.silent(getattr(probe, after), begin_ns, result)
        return result

    setattr(wrapped, PROBE, True)
    setattr(owner, name, wrapped)
