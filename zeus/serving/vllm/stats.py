"""A stat logger, found by vLLM through its entry point `vllm.stat_logger_plugins`.

It records nothing unless `ZEUS_SERVING=stats`; with `ZEUS_SERVING_METRICS` it adds the ledger's
metrics to vLLM's. It works without the probe in the scheduler, but less accurately and later: the
front end knows when each step's output arrived, and, of a finished request, how long its prefill
and its decode took. So a request was in every step in between, and its prompt is spread evenly over
the steps of its prefill. Written against vLLM 0.32 and 0.33, whose statistics may change: missing
values count as 0.
"""

from __future__ import annotations

import importlib
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zeus.serving.metrics import URL_ENV, register
from zeus.serving.recorder import EngineProbe, Recorder
from zeus.serving.vllm.probe import MODE_ENV
from zeus.serving.wire import MOST_REQUESTS, WAIT_NS

log = logging.getLogger(__name__)

LATE = 0.3
"""Share of a step by which the front end may learn of the previous one late."""
NEAR_STEPS = 3
"""Largest difference between steps counted by tokens and by time. With a larger one, a step
produced several tokens, or a preempted request was computed twice."""


@dataclass
class _EngineIteration:
    end_ns: int
    running: int
    begin_ns: int = 2**62
    rows: list[tuple[str, bool, float, float]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """A finished request.

    Attributes:
        prefill_s: Time from its first step to its first token.
        decode_s: Time from its first token to its last.
        prompt: Tokens of its prompt that were computed.
        cached: Tokens of its prompt from a cache.
        generated: Tokens that it generated.
    """

    request: str
    prefill_s: float
    decode_s: float
    prompt: int
    cached: int
    generated: int


Row = tuple[int, int, list[str], list[bool], list[float], list[float]]
"""Arguments of `Ledger.step`."""


class FrontEnd:
    """Reconstructs steps."""

    def __init__(self) -> None:
        self._iterations: list[_EngineIteration] = []
        self._ends: list[int] = []
        self._last_ns = -(2**62)
        self._last_of: dict[str, int] = {}

    def iteration(self, end_ns: int, running: int, finished: list[Finished]) -> None:
        """Handles the output of a step, which came at `end_ns` and had this many requests."""
        if self._ends and end_ns <= self._ends[-1]:
            end_ns = self._ends[-1] + 1
        self._iterations.append(_EngineIteration(end_ns, running))
        self._ends.append(end_ns)
        self._iterations[-1].ended += [self._place(one, end_ns) for one in finished]

    def ready(self, now_ns: int) -> Iterator[tuple[Row, list[str]]]:
        """Steps whose requests are all known, or that have waited long enough, and the requests
        that ended with each; each once.

        A request has its id as its name, prefixed with a number if another one with this id ran at
        the same time.
        """
        done = 0
        for one in self._iterations:
            if len(one.rows) < one.running and now_ns - one.end_ns < WAIT_NS:
                break
            done += 1
            if one.rows:
                begin_ns = min(max(one.begin_ns, self._last_ns), one.end_ns)
                names, prefill, tokens, context = map(list, zip(*one.rows, strict=True))
                yield (begin_ns, one.end_ns, names, prefill, tokens, context), one.ended
            self._last_ns = one.end_ns
        del self._iterations[:done], self._ends[:done]

    def _place(self, one: Finished, last_ns: int) -> str:
        first_ns = last_ns - round(one.decode_s * 1e9)
        begin_ns = first_ns - round(one.prefill_s * 1e9)
        high = bisect_left(self._ends, last_ns) + 1
        # The step of its first token is the one that ended closest to that instant, or as many
        # steps before the last as it has tokens: counting does not depend on delays of the front
        # end.
        middle = min(self._nearest(first_ns) + 1, high)
        counted = high - (one.generated - 1)
        if counted > 0 and abs(counted - middle) <= NEAR_STEPS:
            middle = counted
        low = max(0, min(self._after(begin_ns), middle - 1))
        name = self._name(one.request, low, last_ns)
        prefills = self._iterations[low:middle]
        for number, step in enumerate(prefills):
            part = one.prompt / len(prefills)
            self._add(step, begin_ns, name, True, part, one.cached + number * part)
        decodes = self._iterations[middle:high]
        for number, step in enumerate(decodes):
            # More than one token per step: speculation, of which only accepted tokens are known.
            part = max(1.0, (one.generated - 1) / len(decodes))
            before = one.cached + one.prompt + number * part
            self._add(step, begin_ns, name, False, part, before)
        return name

    def _nearest(self, at_ns: int) -> int:
        """The step that ended closest to an instant."""
        after = min(bisect_left(self._ends, at_ns), len(self._ends) - 1)
        before = max(0, after - 1)
        return min(after, before, key=lambda n: abs(self._ends[n] - at_ns))

    def _after(self, begin_ns: int) -> int:
        """The first step that started at an instant or later, by the ends of steps."""
        low = bisect_right(self._ends, begin_ns)
        if 0 < low < len(self._ends):
            length_ns = self._ends[low] - self._ends[low - 1]
            if self._ends[low] - begin_ns < LATE * length_ns:
                return low + 1
        return low

    def _name(self, request: str, low: int, last_ns: int) -> str:
        first_ns = self._ends[low]
        name, number = request, 0
        while self._last_of.get(name, first_ns - 1) >= first_ns:
            number += 1
            name = f"{number}_{request}"
        self._last_of[name] = last_ns
        if len(self._last_of) > MOST_REQUESTS:
            oldest_ns = self._ends[0]
            self._last_of = {n: at for n, at in self._last_of.items() if at >= oldest_ns}
        return name

    @staticmethod
    def _add(
        step: _EngineIteration,
        begin_ns: int,
        name: str,
        prefill: bool,
        tokens: float,
        context: float,
    ) -> None:
        step.begin_ns = min(step.begin_ns, begin_ns)
        step.rows.append((name, prefill, tokens, context))


def _base() -> Any:
    try:
        return importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
    except (ImportError, AttributeError):
        return object


class EnergyStatLogger(_base()):  # type: ignore[misc]  # vLLM's, if there
    """Records one engine's steps from the front end's statistics."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._probe = EngineProbe("vLLM's statistics")
        self._front_end = FrontEnd()
        self._recorder: Recorder | None = None
        if url := os.environ.get(URL_ENV):
            register(url)
        if os.environ.get(MODE_ENV) != "stats":
            return
        servers = getattr(getattr(vllm_config, "parallel_config", None), "_api_process_count", 1)
        if isinstance(servers, int) and servers > 1:
            log.warning(
                "no energy of requests: each of the %d API servers sees only its own requests; "
                "set %s=steps, or --api-server-count 1",
                servers,
                MODE_ENV,
            )
            return
        self._recorder = Recorder(str(engine_index))

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **more: Any,
    ) -> None:
        """Called by vLLM after each step."""
        if self._recorder is not None:
            self._probe.silent(self._record, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Called by vLLM once."""
        if self._recorder is not None:
            log.info("steps are recorded from the front end's statistics")

    def log(self) -> None:
        """Called by vLLM periodically; prints nothing."""

    def _record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if iteration_stats is None or self._recorder is None:
            return
        finished = [_finished(one) for one in getattr(iteration_stats, "finished_requests", ())]
        ended = [one for one in finished if one is not None]
        now_ns = self._probe.now_ns()
        # The scheduler no longer counts requests of the step that it ended.
        running = int(getattr(scheduler_stats, "num_running_reqs", 0) or 0) + len(ended)
        self._front_end.iteration(now_ns, running, ended)
        for step, names in self._front_end.ready(now_ns):
            self._recorder.step(*step)
            for name in names:
                self._recorder.finish(name)


def _finished(one: Any) -> Finished | None:
    name = getattr(one, "request_id", None)
    if not name:
        return None
    prompt = int(getattr(one, "num_prompt_tokens", 0) or 0)
    cached = int(getattr(one, "num_cached_tokens", 0) or 0)
    return Finished(
        str(name),
        float(getattr(one, "prefill_time", 0.0) or 0.0),
        float(getattr(one, "decode_time", 0.0) or 0.0),
        max(0, prompt - cached),
        cached,
        int(getattr(one, "num_generation_tokens", 0) or 0),
    )
