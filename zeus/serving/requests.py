"""The requests of a ledger: their numbers, spans, tenants, and energy so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeus.serving.columns import Ints, StepColumns
from zeus.serving.digest import Interval
from zeus.serving.rows import RequestEnergy, Totals
from zeus.serving.settlement import Split

MOST_OPEN = 200_000
"""Most requests at a time; beyond this, those without a step for longest are dropped."""

NEVER = "no sensor update covers its steps"


@dataclass
class Open:
    """One request."""

    name: str
    tenant: str = ""
    finished: bool = False
    begin_ns: int = 2**62
    end_ns: int = 0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    prefill_j: float = 0.0
    decode_j: float = 0.0
    shared_j: float = 0.0
    variance: float = 0.0
    rule_j: float = 0.0
    covered: bool = False
    reason: str = ""

    @property
    def joules(self) -> float:
        """Energy of settled periods."""
        return self.prefill_j + self.decode_j + self.shared_j

    def add(self, found: Split, at: int) -> None:
        """Adds a period's energy, which is at this position of the split."""
        self.prefill_j += float(found.prefill_j[at])
        self.decode_j += float(found.decode_j[at])
        self.shared_j += float(found.shared_j[at])
        self.variance += float(found.variance[at])
        self.rule_j += float(found.rule_j[at])
        self.covered |= bool(found.covered[at])


class Requests:
    """Requests by name and by number."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._open: dict[int, Open] = {}
        self._next = 0
        self._done: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether there are more than `MOST_OPEN`."""
        return len(self._open) > MOST_OPEN

    def numbers(self, names: Sequence[str]) -> Ints:
        """The number of each name; a new name is a new request."""
        known = self._number
        found = np.empty(len(names), np.int64)
        for position, name in enumerate(names):
            number = known.get(name)
            if number is None:
                number = known[name] = self._next
                self._next += 1
                self._open[number] = Open(name)
            found[position] = number
        return found

    def names(self) -> list[str]:
        """All requests."""
        return list(self._number)

    def finish(self, name: str, tenant: str) -> None:
        """Marks a request as finished. A request without a step is ignored."""
        number = self._number.get(name)
        if number is None:
            return
        one = self._open[number]
        one.tenant = tenant or one.tenant
        if not one.finished:
            one.finished = True
            self._done.append(number)

    def saw(self, steps: StepColumns) -> None:
        """Records condensed steps."""
        numbers, where = np.unique(steps.request, return_inverse=True)
        step = steps.step_of_row
        begin = np.full(numbers.size, 2**62)
        end = np.zeros(numbers.size, np.int64)
        np.minimum.at(begin, where, steps.begin_ns[step])
        np.maximum.at(end, where, steps.end_ns[step])
        prefill = np.bincount(where, steps.tokens * steps.prefill, numbers.size)
        total = np.bincount(where, steps.tokens, numbers.size)
        rows = zip(
            numbers.tolist(),
            begin.tolist(),
            end.tolist(),
            prefill.tolist(),
            total.tolist(),
            strict=True,
        )
        for number, first_ns, last_ns, prefilled, all_tokens in rows:
            one = self._open.get(number)
            if one is None:
                continue
            one.begin_ns = min(one.begin_ns, first_ns)
            one.end_ns = max(one.end_ns, last_ns)
            one.prefill_tokens += prefilled
            one.decode_tokens += all_tokens - prefilled

    def newly_done(self) -> list[int]:
        """Numbers of requests that finished since the last call and have steps."""
        ready = [n for n in self._done if n in self._open and self._open[n].end_ns]
        kept = set(ready)
        self._done = [n for n in self._done if n in self._open and n not in kept]
        return ready

    def rows_of(
        self, numbers: Ints, found: Split | None, method: str, reason: str
    ) -> list[RequestEnergy]:
        """Provisional rows."""
        rows = []
        place = {} if found is None else {n: i for i, n in enumerate(found.request.tolist())}
        for number in numbers.tolist():
            one = self._open[number]
            at = place.get(number)
            if reason or found is None or at is None or not found.covered[at]:
                rows.append(_row(one, method, reason or one.reason or NEVER, provisional=True))
                continue
            now = replace(one)
            now.add(found, at)
            rows.append(_row(now, method, one.reason, provisional=True))
        return rows

    def charge(self, found: Split, foreign: Sequence[Interval], dummy: str) -> Totals:
        """Adds a period's energy to its requests; returns its totals."""
        totals = Totals(
            measured_j=found.measured_j,
            idle_j=found.idle_j,
            unattributed_j=found.unattributed_j,
            startup_j=found.startup_j,
        )
        joules = found.joules.tolist()
        for at, number in enumerate(found.request.tolist()):
            one = self._open.get(number)
            own_j = joules[at]
            if one is None:  # dropped, and started again under the same name
                totals.unattributed_j += own_j
                continue
            if one.name == dummy:
                totals.idle_j += own_j
                totals.dummy_j += own_j
                continue
            why = found.refusal or _reason(one, foreign)
            if why and not one.reason:
                one.reason = why
                totals.requests_j -= one.joules
                totals.unattributed_j += one.joules
            if one.reason:
                totals.unattributed_j += own_j
                continue
            totals.requests_j += own_j
            one.add(found, at)
        return totals

    def take(self, method: str, dummy: str, *, final: bool) -> list[RequestEnergy]:
        """Removes completed requests and returns their rows."""
        ready = [n for n, one in self._open.items() if final or one.finished]
        if not final and len(self._open) - len(ready) > MOST_OPEN:
            rest = sorted((one.end_ns, n) for n, one in self._open.items() if not one.finished)
            ready += [n for _, n in rest[: len(rest) - MOST_OPEN]]
        rows = []
        for number in sorted(ready):
            one = self._open[number]
            if one.name == dummy and not final:
                continue
            del self._open[number]
            del self._number[one.name]
            if one.name != dummy:
                reason = one.reason or ("" if one.covered else NEVER)
                rows.append(_row(one, method, reason))
        self._done = [n for n in self._done if n in self._open]
        return rows


def _reason(one: Open, foreign: Sequence[Interval]) -> str:
    for begin_ns, end_ns, why in foreign:
        if one.begin_ns < end_ns and begin_ns < one.end_ns:
            return why
    return ""


def _row(one: Open, method: str, reason: str, *, provisional: bool = False) -> RequestEnergy:
    unknown = math.nan if reason else 0.0
    return RequestEnergy(
        one.name,
        one.joules + unknown,
        one.prefill_j + unknown,
        one.decode_j + unknown,
        one.shared_j + unknown,
        math.sqrt(one.variance) + unknown,
        one.rule_j + unknown,
        method,
        reason,
        one.tenant,
        provisional,
        one.begin_ns if one.end_ns else 0,
        one.end_ns,
        round(one.prefill_tokens),
        round(one.decode_tokens),
        one.finished,
    )
