"""Derives steps, queue and latencies for the clock policy from an engine's messages; pure."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from zeus.serving.clock_load import Queue, Step
from zeus.serving.wire import MOST_REQUESTS, Arrival, EngineStep, Finish, Message, Owner

if TYPE_CHECKING:
    from zeus.serving.clock_control import ClockControl
    from zeus.serving.forward_pass import ForwardPass

TPOT_STEPS = 64
"""Number of decode steps whose mean time is taken as one request's TPOT, of forward passes."""

LATE_S = 0.02
"""Largest lateness of a message after which a step is dated by the one before, not by its arrival:
else a process that is not scheduled in time would find the next step too short."""


class _ClockRequest:
    __slots__ = ("arrived_s", "first_s", "last_s", "left", "outputs", "prompt")

    def __init__(self, arrived_s: float, prompt: float) -> None:
        self.arrived_s = arrived_s
        self.prompt = self.left = prompt
        self.first_s = self.last_s = math.nan
        self.outputs = 0


class RequestFeed:
    """Follows the requests of one engine from arrival to end; of too many, it drops the oldest.

    Args:
        control: It gets steps, latencies, and when the engine has no request.
        engine: The engine; None: that of the first message.
    """

    def __init__(self, control: ClockControl, engine: str | None = None) -> None:
        self._control, self._engine = control, engine
        self._requests: dict[str, _ClockRequest] = {}
        self._queued: dict[str, _ClockRequest] = {}  # prompt not computed, oldest first
        self._backlog = 0.0

    def take(self, message: Message) -> bool:
        """Handles a message. Returns False if it is of another engine.

        Instants are of CLOCK_MONOTONIC. A request without a known arrival is assumed to arrive at
        its first step. The end of an unknown request is ignored.
        """
        if isinstance(message, Owner):
            return True  # it does not matter for clocks
        if self._engine is None:
            self._engine = message.engine
        if message.engine != self._engine:
            return False
        if isinstance(message, Arrival):
            self._arrived(message.request, message.at_ns / 1e9, message.prompt)
        elif isinstance(message, Finish):
            self._finish(message.request)
        else:
            self._step(message)
        return True

    def _arrived(self, request: str, at_s: float, prompt_tokens: int) -> None:
        self._forget(request)
        if len(self._requests) >= MOST_REQUESTS:
            self._forget(next(iter(self._requests)))
        one = self._requests[request] = self._queued[request] = _ClockRequest(at_s, prompt_tokens)
        self._backlog += one.left

    def _step(self, step: EngineStep) -> None:
        begin_s, end_s = step.begin_ns / 1e9, step.end_ns / 1e9
        known, queued = self._requests, self._queued
        computed, sequences, length = 0.0, 0, 0.0
        rows = zip(step.ids, step.prefill, step.tokens, step.context, strict=True)
        for name, prompt, count, before in rows:
            one = known.get(name)
            if one is None:
                self._arrived(name, begin_s, int(count) if prompt else 0)
                one = known[name]
            if prompt:
                computed += count
                cached = max(0.0, before - (one.prompt - one.left))
                part = min(count + cached, one.left)
                one.left -= part
                self._backlog -= part
                if one.left > 0:
                    continue
            else:
                sequences += 1
                length += before
                self._backlog -= one.left
                one.left = 0.0
            queued.pop(name, None)
            if one.outputs == 0:
                one.first_s = end_s
            one.outputs += 1
            one.last_s = end_s
        oldest = next(iter(queued.values()), None)
        self._control.step(
            Step(begin_s, end_s, computed, sequences, length, 0.0),
            Queue(
                len(queued),
                max(0.0, self._backlog) if queued else 0.0,
                max(0.0, end_s - oldest.arrived_s) if oldest is not None else 0.0,
            ),
        )

    def _finish(self, request: str) -> None:
        one = self._forget(request)
        if one is not None:
            mean_s = (one.last_s - one.first_s) / (one.outputs - 1) if one.outputs > 1 else 0.0
            self._control.finished(one.first_s - one.arrived_s, mean_s)
            if not self._requests:
                self._control.drained()

    def _forget(self, request: str) -> _ClockRequest | None:
        one = self._requests.pop(request, None)
        if one is not None and self._queued.pop(request, None) is not None:
            self._backlog -= one.left
        return one


class ClockPasses:
    """Hands one worker's passes to clock control.

    Individual requests are not known: TTFT is estimated from the wait of those that leave the
    queue, first in, first out, and TPOT from the mean time of `TPOT_STEPS` steps.

    Args:
        rank: The worker's data parallel rank; None: that of the first pass.
    """

    def __init__(self, control: ClockControl, rank: str | None = None) -> None:
        self._control, self._rank = control, rank
        self._worker: str | None = None
        self._arrivals: deque[float] = deque()  # of the queue, estimated
        self._ended_s = float("-inf")
        self._steps = 0
        self._steps_s = self._tpot_s = 0.0

    def __call__(self, one: ForwardPass) -> None:
        """Handles a pass; ignores those of other workers."""
        step, control = one.step, self._control
        if self._worker is None and self._rank in (None, step.engine):
            self._worker, self._rank = one.worker, step.engine
        if (self._worker, self._rank) != (one.worker, step.engine):
            return
        now_s, seconds = step.end_ns / 1e9, (step.end_ns - step.begin_ns) / 1e9
        if 0.0 <= now_s - self._ended_s - seconds < LATE_S:
            now_s = self._ended_s + seconds
        left = self._left(now_s, one.waiting)
        if one.idle:
            if not one.waiting:
                control.drained()
            return
        begin_s = max(self._ended_s, now_s - seconds)
        self._ended_s = now_s
        rows = [*zip(step.prefill, step.tokens, step.context, strict=True)]
        prompt = sum(tokens for prefill, tokens, _ in rows if prefill)
        contexts = [context for prefill, _, context in rows if not prefill]
        if contexts:
            self._steps += 1
            self._steps_s += now_s - begin_s
            if self._steps == TPOT_STEPS:
                self._tpot_s = self._steps_s / TPOT_STEPS
                self._steps, self._steps_s = 0, 0.0
                left = left or [0.0]
        for waited_s in left:
            control.seen(waited_s, self._tpot_s)
        oldest_s = max(0.0, now_s - self._arrivals[0]) if self._arrivals else 0.0
        control.step(
            Step(begin_s, now_s, prompt, len(contexts), sum(contexts), 0.0),
            Queue(one.waiting, one.backlog_tokens, oldest_s),
        )

    def _left(self, now_s: float, waiting: int) -> list[float]:
        """Updates the length of the queue; returns the waits of requests that left it, s."""
        arrivals, left = self._arrivals, []
        while len(arrivals) > waiting:
            left.append(max(0.0, now_s - arrivals.popleft()))
        arrivals.extend([now_s] * (waiting - len(arrivals)))
        return left
