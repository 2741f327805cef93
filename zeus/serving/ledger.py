"""The energy of every request of an engine, adding up to what the sensor measured.

    ledger = Ledger(["GPU-..."])
    ledger.step(EngineStep("0", 1, begin_ns, end_ns, ["a", "b"], [True, False], [512, 1], [0, 830]))
    ledger.sample(sample)         # of zeusd's stream; or ledger.add_updates(...) of another sensor
    ledger.finish("a", tenant="search")
    ledger.poll(now_ns)           # provisional figures of finished requests; final ones each hour
    ledger.settle()               # the rest

A step's energy has several causes at once, so a request's part of it is attributed, not measured:
`uncertainty_j` is the error of sensor and fit, `rule_uncertainty_j` that of the rule. This module
has no I/O and no thread, and does not depend on an engine. Needs NumPy: pip install
"zeusd[serving]".
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from zeus.serving.columns import StepColumns, Updates, by_end
from zeus.serving.digest import Condensed, Digest
from zeus.serving.fit import Fit, Weights, fit, learned_weights, nearest_weights
from zeus.serving.meter import Meter
from zeus.serving.rows import ClosedPeriod, RequestEnergy, Totals
from zeus.serving.settlement import DUMMY, Interval, Requests, find_foreign, predict, split
from zeus.serving.wire import (
    MOST_LABEL,
    MOST_REQUESTS,
    WAIT_NS,
    EngineStep,
    Finish,
    Message,
    Owner,
    group_of,
)

if TYPE_CHECKING:
    from zeus_ipc.replies import Sample

T = TypeVar("T")

METHOD = "regression"
LAG_NS = 2 * 10**9
"""Delay after which all steps and samples that ended have arrived."""
FRONT_END_RULE = 0.08
"""Additional error of the rule with front-end statistics, relative, one sigma."""
NO_CONTEXTS_RULE = 0.07
"""The same if steps do not say how long the contexts are: agents with long ones are 5 % off."""
PERIOD_NS = 3600 * 10**9
"""A period is settled after this time."""
LIVE_UPDATES = 6_000
"""Updates that a provisional fit uses."""
_SEQUENCE = re.compile(r"^\d+_")
"""vLLM's prefix of the id of each sequence of a request with several."""
_PROMPT = re.compile(r"-\d+$")
"""vLLM's suffix of the id of each prompt of a completion."""

PHASES = ("prefill", "decode", "shared", "idle")


class Ledger:
    """Attributes the energy of one engine's GPUs to its requests.

    The engine works on one GPU, or on several that process every step together (tensor parallel),
    whose energies are added. With data parallelism each engine has its own ledger and GPUs. Any
    input may be missing.

    Not safe across threads. Memory is bounded: steps are condensed to a few rows per request, with
    at most a million rows in total; beyond 100,000 unfinished requests, the oldest are dropped.

    Args:
        gpus: UUIDs of the GPUs whose samples count.
        prior: Weights of an earlier fit of the same GPU, engine and model, by clock in MHz
            (`weights`), which help until there are enough updates.
        front_end: Steps are reconstructed from an engine's front end: they arrive later, and the
            rule's error is larger.
    """

    def __init__(
        self, gpus: Sequence[str] = (), *, prior: Weights | None = None, front_end: bool = False
    ) -> None:
        self.gpus = list(gpus)
        self.meter = Meter(gpus)
        self.weights: Weights = prior or {}
        """Weights of the newest fit at each clock, as a prior for the next ledger."""
        self._front_end = front_end
        self._decodes = self._contexts = False  # whether steps had decodes, and these contexts
        self.digest = Digest()
        self.requests = Requests()
        self._steps: list[tuple[EngineStep, list[int]]] = []  # with the numbers of its requests
        self._finished: list[tuple[int, int, tuple[str, str, str]]] = []
        self._foreign: list[Interval] = []
        self._number = 0
        self._end_ns = -(2**62)  # end of the newest step
        self._settled_ns: int | None = None
        self._rows: OrderedDict[str, RequestEnergy] = OrderedDict()
        self._owners: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._traces: OrderedDict[str, str] = OrderedDict()
        self._provisional = dict.fromkeys(PHASES, 0.0)
        self._final = dict.fromkeys(PHASES, 0.0)
        self._shown = dict.fromkeys(PHASES, 0.0)
        self.totals = Totals()
        """Totals of all settled periods."""
        self.tokens = {"prefill": 0.0, "decode": 0.0}
        self.residual = math.nan
        """Of the newest settled fit, relative."""
        self.uncertainty = math.nan
        """Mean of the newest settled period, relative, one sigma."""
        self.clock_hz = math.nan

    # --------------------------------------------------------------------------------------- input

    def take(self, message: Message) -> None:
        """Adds an engine's message."""
        if isinstance(message, EngineStep):
            self.step(message)
        elif isinstance(message, Finish):
            self.finish(*message[1:])  # all but its engine
        elif isinstance(message, Owner):
            labels = message.tenant[:MOST_LABEL], message.group[:MOST_LABEL]
            _keep(self._owners, message.request, labels)
        elif message.trace:
            _keep(self._traces, message.request, message.trace[:MOST_LABEL])

    def step(self, step: EngineStep) -> None:
        """Adds a step; a step without requests is a dummy, whose energy counts as idle.

        Steps must be in the order of their ends. If earlier ones are missing by their numbers,
        their time is not attributed; a number that is not new is of an engine that was restarted,
        so the requests of the former one have ended.
        """
        lost = step.number - self._number - 1
        if self._number and lost > 0:
            self.foreign(self._end_ns, step.begin_ns + 1, f"{lost} steps were not received")
        if step.number <= self._number:
            for name in self.requests.names():
                self.finish(name)
        self._number = step.number
        self._end_ns = max(self._end_ns, step.end_ns)
        for prefill, tokens in zip(step.prefill, step.tokens, strict=True):
            self.tokens["prefill" if prefill else "decode"] += tokens
        if not step.ids:
            step = step._replace(ids=(DUMMY,), prefill=(False,), tokens=(1,), context=(0,))
        self._steps.append((step, self.requests.numbers(step.ids)))

    def add_steps(self, steps: StepColumns, names: Sequence[str]) -> None:
        """Adds many steps at once.

        Args:
            steps: `request` has positions in `names`; each step has at least one row.
        """
        self._flush()
        if steps.count:
            self._end_ns = max(self._end_ns, int(steps.end_ns.max()))
        used, where = np.unique(steps.request, return_inverse=True)
        numbers = self.requests.numbers(names[number] for number in used.tolist())
        self._add(replace(steps, request=np.array(numbers)[where]))

    def sample(self, one: Sample) -> None:
        """Adds a sample that zeusd published."""
        if one.gpu_clock_mhz is not None:
            self.clock_hz = one.gpu_clock_mhz * 1e6
        self.meter.sample(one)

    def add_updates(self, updates: Updates) -> None:
        """Adds updates of a sensor, sorted by time and without overlap."""
        self.digest.add_updates(updates)

    def finish(self, request: str, tenant: str = "", group: str = "") -> None:
        """Marks a request as finished, completed or aborted, after its last step. Later steps with
        its name are of another request."""
        number = self.requests.end(request)
        if number is not None:
            self._finished.append((self._end_ns, number, (request, tenant, group)))

    def foreign(self, begin_ns: int, end_ns: int, reason: str) -> None:
        """Excludes a span from attribution, such as one in which another process used the GPU.

        Requests with a step in it are refused, and their energy is unattributed.
        """
        last = self._foreign[-1] if self._foreign else None
        if last is not None and last[2] == reason and last[0] <= begin_ns <= last[1]:
            begin_ns, end_ns = last[0], max(last[1], end_ns)
            self._foreign.pop()
        self._foreign.append((begin_ns, end_ns, reason))

    # -------------------------------------------------------------------------------------- output

    def poll(self, now_ns: int) -> tuple[list[RequestEnergy], Totals | None]:
        """Does the periodic work.

        Returns:
            Requests whose energy became known or changed: provisional ones, or, when a period was
            settled, its final ones; and then the period's totals. A period is an hour, or shorter
            with too many unfinished requests.
        """
        until_ns = now_ns - LAG_NS - (WAIT_NS if self._front_end else 0)
        if self._settled_ns is None:
            self._settled_ns = until_ns
        if until_ns - self._settled_ns >= PERIOD_NS or self.requests.full:
            self._settled_ns = until_ns
            done = self.settle(until_ns)
            return done.rows, done.totals
        return self.advance(until_ns), None

    def advance(self, until_ns: int) -> list[RequestEnergy]:
        """Condenses new data, and returns provisional figures.

        Args:
            until_ns: All steps and updates that ended before have been added.

        Returns:
            Finished requests whose last step is covered; each once.
        """
        self._condense(until_ns)
        wanted = np.array(self.requests.newly_done(), np.int64)
        if not wanted.size:
            return []
        what = self.digest.recent(wanted, LIVE_UPDATES)
        fitted = self._fit(what)
        predicted = predict(what, fitted)
        predicted.refusal = fitted.refusal
        rows = self._stated(self.requests.provisional(wanted, predicted, METHOD))
        _count(self._provisional, rows)
        return rows

    def settle(self, until_ns: int | None = None) -> ClosedPeriod:
        """Closes a period: fits once more, and scales to the measured energy.

        Args:
            until_ns: The period ends here, and all steps and updates that ended before have been
                added; None: there is no more data.

        Returns:
            Finished requests in the order of their first step; all requests if there is no more
            data.
        """
        self._condense(until_ns)
        what = self.digest.condensed()
        fitted = self._fit(what)
        if not fitted.refusal:
            self.weights = learned_weights(self.weights, fitted, what.seen, what.clocks_mhz)
        foreign = [*self._foreign, *find_foreign(what.seen)]
        totals = self.requests.charge(split(what, fitted), foreign)
        rows = self._stated(self.requests.take(METHOD, final=until_ns is None))
        self._foreign = []
        self.digest.restart()
        self.totals.add(totals)
        self.residual = fitted.residual
        known = [row for row in rows if not row.refused]
        joules = math.fsum(row.joules for row in known)
        if joules > 0:
            errors = (math.hypot(row.uncertainty_j, row.rule_uncertainty_j) for row in known)
            self.uncertainty = math.fsum(errors) / joules
        _count(self._final, rows)
        self._final["idle"] += totals.idle_j
        self._provisional = dict.fromkeys(PHASES, 0.0)
        return ClosedPeriod(rows, totals, fitted)

    def energy(self, request: str) -> RequestEnergy | None:
        """A request's energy; None: it has not finished, or finished too long ago."""
        return self._rows.get(request)

    def trace(self, request: str) -> str:
        """The `traceparent` of a request, once; empty: it is not traced."""
        return self._traces.pop(request, "")

    @property
    def phases(self) -> dict[str, float]:
        """Energy by phase, J, which never decreases: settled, plus provisional energy of finished
        requests."""
        self._provisional["idle"] = self.digest.idle_j
        for phase in PHASES:
            now_j = self._final[phase] + self._provisional[phase]
            self._shown[phase] = max(self._shown[phase], now_j)
        return dict(self._shown)

    # -------------------------------------------------------------------------------- internals

    def _condense(self, until_ns: int | None) -> None:
        updates = self.meter.updates()
        if updates is not None:
            self.digest.add_updates(updates)
        self._flush()
        done = self.digest.advance(until_ns)
        if done is not None:
            self.requests.saw(done)
        next_ns, later = self.digest.next_ns, []
        for finished in self._finished:
            end_ns, number, given = finished
            if end_ns < next_ns:
                self.requests.finish(number, *self._labels(*given))
            else:  # its last step is not condensed yet
                later.append(finished)
        self._finished = later

    def _labels(self, request: str, tenant: str, group: str) -> tuple[str, str]:
        """Tenant and group of a request. They are looked up some seconds after its end, because
        messages of the front end may be read after those of the engine."""
        # The front end knows a request by the id that all its sequences share.
        shared = _SEQUENCE.sub("", request)
        for name in (request, shared, _PROMPT.sub("-0", shared)):
            if name in self._owners:
                known_tenant, known_group = self._owners[name]
                tenant, group = tenant or known_tenant, group or known_group
                break
        group = group or group_of(self._traces.get(request, ""))
        return tenant[:MOST_LABEL], group[:MOST_LABEL]

    def _flush(self) -> None:
        """Turns new steps into columns."""
        steps, self._steps = self._steps, []
        if steps:
            counts = [len(one.ids) for one, _ in steps]
            columns = StepColumns(
                np.array([one.begin_ns for one, _ in steps], np.int64),
                np.array([one.end_ns for one, _ in steps], np.int64),
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                np.concatenate([np.asarray(numbers, np.int64) for _, numbers in steps]),
                np.concatenate([np.asarray(one.prefill, bool) for one, _ in steps]),
                np.concatenate([np.asarray(one.tokens, np.float64) for one, _ in steps]),
                np.concatenate([np.asarray(one.context, np.float64) for one, _ in steps]),
            )
            self._add(columns)

    def _add(self, steps: StepColumns) -> None:
        self._decodes |= not steps.prefill.all()
        self._contexts |= bool(steps.context[~steps.prefill].any())
        self.digest.add(by_end(steps))

    def _fit(self, what: Condensed) -> Fit:
        return fit(what.seen, len(what.clocks_mhz), nearest_weights(self.weights, what.clocks_mhz))

    def _stated(self, rows: list[RequestEnergy]) -> list[RequestEnergy]:
        """Rows as they are given to the caller, kept for queries: with what the steps lack."""
        lacks = {"front end": FRONT_END_RULE} if self._front_end else {}
        if self._decodes and not self._contexts:
            lacks["no contexts"] = NO_CONTEXTS_RULE
        if lacks:
            method, error = ", ".join((METHOD, *lacks)), math.hypot(*lacks.values())
            rows = [
                replace(
                    row,
                    method=method,
                    rule_uncertainty_j=math.hypot(row.rule_uncertainty_j, error * row.joules),
                )
                for row in rows
            ]
        for row in rows:
            _keep(self._rows, row.request, row)
        return rows


def _keep(known: OrderedDict[str, T], request: str, value: T) -> None:
    """Keeps a figure or a label for later; drops the oldest of too many."""
    known[request] = value
    known.move_to_end(request)
    while len(known) > MOST_REQUESTS:
        known.popitem(last=False)


def _count(sums: dict[str, float], rows: Sequence[RequestEnergy]) -> None:
    for row in rows:
        if not row.refused:
            sums["prefill"] += row.prefill_j
            sums["decode"] += row.decode_j
            sums["shared"] += row.shared_j
