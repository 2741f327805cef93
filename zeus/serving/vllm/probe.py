"""A probe on vLLM's scheduler, found by vLLM through its entry point `vllm.general_plugins`.

It does nothing unless `ZEUS_SERVING=steps`. Written against vLLM 0.32 and 0.33, run with 0.32; it
requires only `SchedulerOutput.num_scheduled_tokens` and `Scheduler.requests`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import msgpack

from zeus.serving.recorder import InFlight, Recorder, Silent, wrap
from zeus.serving.wire import pack_request

log = logging.getLogger(__name__)

MODE_ENV = "ZEUS_SERVING"
"""`steps`: the scheduler probe. `stats`: only the front end's statistics. Otherwise nothing."""
TESTED = ("0.32", "0.33")

RANDOM_ENV = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
"""With it, vLLM does not change the callers' ids."""

_computed = attrgetter("num_computed_tokens")
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


class Probe:
    """Records one scheduler's steps.

    Args:
        scheduler: Has `requests` by engine id.
        recorder: Receives steps; None: a new `Recorder`.
    """

    def __init__(self, scheduler: Any, recorder: Recorder | None = None) -> None:
        self.silent = Silent("vLLM")
        self.in_flight: InFlight[Any] = InFlight()
        self._requests = getattr(scheduler, "requests", {})
        self._recorder = recorder or Recorder(_engine(scheduler), hold=True)
        self._known: dict[str, str] = {}  # external names
        self._packed: dict[str, bytes] = {}
        self._pack = msgpack.Packer().pack
        self._planned: dict[str, int] = {}  # the previous step's requests; the next two describe it
        self._ids: list[str] = []
        self._batch: list[Any] = []
        self._roster = b""
        self._same = 0  # consecutive steps with the same requests and one token each
        self._base = False  # whether the recorder can derive the next one of them
        self._names: set[str] = set()
        self._ended: Iterable[str] = ()
        self._count = 0
        self._gone: list[tuple[str, str]] = []
        self._random = os.environ.get(RANDOM_ENV, "0").strip().lower() not in ("1", "true")

    def arrived(self, request: Any, *more: object) -> None:
        """Handles a new request."""
        self._planned, self._ids = {}, []  # it may be another request with the same id
        if request.request_id not in self._known:  # otherwise more input of a session
            headers = getattr(request, "trace_headers", None) or {}
            trace = str(headers.get("traceparent", ""))
            self._recorder.arrived(*self._meet(request.request_id, request), trace)

    def scheduled(self, begin_ns: int, output: Any) -> None:
        """Handles a composed step."""
        for one in getattr(output, "finished_req_ids", None) or ():
            self._forget(one)
        self._finish()
        planned = output.num_scheduled_tokens
        if planned == self._planned and planned:
            if self._base:
                self.in_flight.begin(begin_ns, (planned, b"", (), ()))
                return
            self._same += self._same > 0
        else:
            self._recorder.flush()  # earlier steps must not wait for this one
            self._planned = planned
            if not planned:
                self.in_flight.begin(begin_ns, None)
                return
            ids = list(planned)
            if ids != self._ids:
                self._compose(ids)
            self._same = 0
        counts = list(planned.values())
        if not self._same:
            self._same = int(counts.count(1) == len(counts))
        # The scheduler has already counted this step's tokens.
        computed = list(map(_computed, self._batch))
        # Tokens of a step in flight may still be rejected, unless it is of the same kind.
        self._base = self._same > len(self.in_flight)
        self.in_flight.begin(begin_ns, (planned, self._roster, counts, computed))

    def _compose(self, ids: list[str]) -> None:
        """Looks up and packs the requests of a step if they differ from the previous step's."""
        packed, requests = self._packed, self._requests
        try:
            self._roster = b"".join(map(packed.__getitem__, ids))
        except KeyError:  # its arrival was missed
            for one in set(ids) - packed.keys():
                self._meet(one, requests[one])
            self._roster = b"".join(map(packed.__getitem__, ids))
        self._batch = list(map(requests.__getitem__, ids))
        self._ids = ids

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
        return name, self.in_flight.now_ns(), prompt

    def ended(self, *output: object) -> None:
        """Handles a step's output."""
        found, self._ended = self.in_flight.end(), ()
        self._count = len(self._requests)
        if found is not None and found[2] is not None:
            begin_ns, end_ns, (self._ended, roster, tokens, computed) = found
            if roster:
                self._recorder.batch(begin_ns, end_ns, roster, tokens, computed)
            else:
                self._recorder.again(begin_ns, end_ns)

    def updated(self, *output: object) -> None:
        """Handles that the scheduler has processed the output and dropped finished requests."""
        if len(self._requests) != self._count:
            for one in self._ended:
                if one not in self._requests:
                    self._forget(one)
        self._finish()
        if not self._requests:
            self._recorder.flush()  # the next step may be far away

    def _forget(self, one: str) -> None:
        # Drops all data of ended requests.
        self._planned, self._ids, self._batch = {}, [], []
        self._packed.pop(one, None)
        name = self._known.pop(one, None)
        if name is not None:
            self._gone.append((one, name))

    def _finish(self) -> None:
        """Sends ends of requests, except while a step that was scheduled ahead still computes
        one."""
        if not self._gone:
            return
        ahead = [what[0] for what in self.in_flight.under_way() if what]
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
