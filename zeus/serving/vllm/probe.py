"""A probe on vLLM's scheduler, found by vLLM through its entry point `vllm.general_plugins`.

It does nothing unless `ZEUS_SERVING=steps`. Written against vLLM 0.32 and 0.33, run with 0.32; it
requires only `SchedulerOutput.num_scheduled_tokens` and `Scheduler.requests`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from itertools import islice
from typing import Any

import msgpack

from zeus.serving.recorder import MOST_AHEAD, EngineProbe, Recorder, wrap
from zeus.serving.wire import pack_request

log = logging.getLogger(__name__)

MODE_ENV = "ZEUS_SERVING"
"""`steps`: the scheduler probe. `stats`: only the front end's statistics. Otherwise nothing."""
TESTED = ("0.32", "0.33")

RANDOM_ENV = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
"""With it, vLLM does not change the callers' ids."""

_RANDOM = re.compile("-[0-9a-f]{8}$")
"""vLLM's suffix of the caller's id. Its scheduler does not know the id without it."""


def register() -> None:
    """The entry point that vLLM calls in each of its processes."""
    if os.environ.get(MODE_ENV) != "steps":
        return
    try:
        scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
        version = str(getattr(importlib.import_module("vllm"), "__version__", ""))
    except (ImportError, AttributeError) as error:
        log.warning("no energy of requests: this vLLM has no V1 scheduler (%s)", error)
        return
    if not version.startswith(TESTED):
        log.warning("the energy probe was not tested with vLLM %s, only %s", version, TESTED)
    install(scheduler)


def install(scheduler: Any) -> bool:
    """Wraps a scheduler class once; its subclasses are wrapped with it.

    Returns:
        Whether it has the wrapped methods.
    """
    wanted = {
        "add_request": ("arrived", ""),
        "schedule": ("", "scheduled"),
        "update_from_output": ("ended", "updated"),
    }
    there = [name for name in wanted if callable(getattr(scheduler, name, None))]
    if not {"schedule", "update_from_output"} <= set(there):
        log.warning("no energy of requests: the scheduler has no schedule and update_from_output")
        return False
    for name in there:
        wrap(scheduler, name, Probe, *wanted[name])
    return True


class Probe(EngineProbe):
    """Records one scheduler's steps.

    Args:
        scheduler: Has `requests` by engine id.
        recorder: Receives steps; None: a new `Recorder`.
    """

    def __init__(self, scheduler: Any, recorder: Recorder | None = None) -> None:
        super().__init__("vLLM")
        self._requests = getattr(scheduler, "requests", {})
        self._recorder = recorder or Recorder(_engine(scheduler), hold=True)
        self._known: dict[str, str] = {}  # external names
        self._packed: dict[str, bytes] = {}
        self._pack = msgpack.Packer().pack
        self._expected: dict[str, int] = {}  # requests of the last step, of which each gets 1
        self._left: list[str] = []  # names of those of it that are gone
        self._plain = 0  # whole steps since the last one of which tokens may be rejected
        self._derived = False  # whether the next step can be derived from the last one
        self._names: set[str] = set()
        self._ended: dict[str, int] = {}
        self._count = 0
        self._gone: list[tuple[str, str]] = []
        self._random = os.environ.get(RANDOM_ENV, "0").strip().lower() not in ("1", "true")

    def arrived(self, request: Any, *more: object) -> None:
        """Handles a new request."""
        if request.request_id in self._known:  # more input of a session, or the same id again
            self._derived = False
            return
        headers = getattr(request, "trace_headers", None) or {}
        trace = str(headers.get("traceparent", ""))
        self._recorder.arrived(*self._meet(request.request_id, request), trace)

    def scheduled(self, begin_ns: int, output: Any) -> None:
        """Handles a composed step."""
        for one in getattr(output, "finished_req_ids", None) or ():
            self._forget(one)
        self._finish()
        planned = output.num_scheduled_tokens
        if not planned:
            self._recorder.flush()  # the next step may be far away
            self.begin(begin_ns, None)
            return
        expected = self._expected
        derived = self._derived and not self._recorder.starts and len(self._steps) < MOST_AHEAD
        if derived and not self._left and planned == expected:
            self.begin(begin_ns, (planned, ()))
            return
        # New requests are the last ones; where others are new, the step is not derived.
        joined = list(islice(reversed(planned), max(0, len(planned) - len(expected))))
        for one in joined:
            expected[one] = planned[one]
        whole = not derived or planned != expected
        if whole:
            joined, self._left = list(planned), []
        tokens = [planned[one] for one in joined]
        plain = tokens.count(1) == len(tokens)
        if whole:
            # Tokens of a step in flight may still be rejected, unless each has one.
            self._plain = self._plain + 1 if plain else 0
            self._derived = self._plain > len(self._steps)
        if whole or not plain:
            self._recorder.flush()  # earlier steps must not wait for one that may be longer
            self._expected = dict.fromkeys(planned, 1)
        left, self._left = self._left, []
        rows = left, *self._rows(joined), tokens, whole
        self.begin(begin_ns, (planned, rows))

    def _rows(self, ids: list[str]) -> tuple[bytes, list[int]]:
        """The packed requests, and the tokens of each that are computed by the step's end."""
        requests, packed = self._requests, self._packed
        for one in ids:
            if one not in packed:  # its arrival was missed
                self._meet(one, requests[one])
        # The scheduler has already counted this step's tokens.
        computed = [requests[one].num_computed_tokens for one in ids]
        return b"".join(map(packed.__getitem__, ids)), computed

    def _meet(self, one: str, request: Any) -> tuple[str, int, int]:
        """Adds a new request: its external name, its arrival, and its prompt."""
        name = getattr(request, "external_req_id", None)
        if not name:
            name = _RANDOM.sub("", one) if self._random else one
        if name in self._names:  # callers may reuse an id
            name = one
        prompt = int(getattr(request, "num_prompt_tokens", 0))
        self._names.add(name)
        self._known[one] = name
        self._packed[one] = pack_request(name, prompt, self._pack)
        return name, self.now_ns(), prompt

    def ended(self, *output: object) -> None:
        """Handles a step's output."""
        step, self._ended = self.end(), {}
        self._count = len(self._requests)
        if step is not None and step[2] is not None:
            begin_ns, end_ns, (self._ended, rows) = step
            self._recorder.batch(begin_ns, end_ns, *rows)

    def updated(self, *output: object) -> None:
        """Handles that the scheduler has processed the output and dropped finished requests."""
        if len(self._requests) != self._count:
            for one in self._ended.keys() - self._requests.keys():
                self._forget(one)
        self._finish()
        if not self._requests:
            self._recorder.flush()  # the next step may be far away

    def _forget(self, one: str) -> None:
        """Drops all data of a request that ended."""
        self._packed.pop(one, None)
        name = self._known.pop(one, None)
        if name is not None:
            self._gone.append((one, name))
            if self._expected.pop(one, None):
                self._left.append(name)

    def _finish(self) -> None:
        """Sends ends of requests, except while a step that was scheduled ahead still computes
        one."""
        if not self._gone:
            return
        ahead = [what[0] for what in self.under_way() if what]
        kept = []
        for one, name in self._gone:
            if any(one in step for step in ahead):
                kept.append((one, name))
            else:
                self._names.discard(name)
                self._recorder.finish(name)
        self._gone = kept


def _engine(scheduler: Any) -> str:
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    rank = getattr(parallel, "data_parallel_rank", 0)
    return str(rank if isinstance(rank, int) else 0)
