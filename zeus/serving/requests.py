"""The requests of a ledger: their numbers, spans, labels, and energy so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from zeus.serving.columns import Ints, StepColumns
from zeus.serving.rows import NEVER, RequestEnergy, Totals
from zeus.serving.settlement import Interval, Split

MOST_OPEN = 200_000
"""Most requests at a time; beyond this, those without a step for longest are dropped."""

DUMMY = "\x00dummy"
"""Name of steps without a request, which are part of the idle energy."""


class Requests:
    """Requests by number; a name may be that of several, one after the other."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}  # of those that have not ended, by name
        self._open: dict[int, RequestEnergy] = {}
        self._next = 0
        self._done: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether there are more than `MOST_OPEN`."""
        return len(self._open) > MOST_OPEN

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The number of each name; a new name is a new request."""
        known = self._number
        found = []
        for name in names:
            number = known.get(name)
            if number is None:
                number = known[name] = self._next
                self._next += 1
                self._open[number] = RequestEnergy(name)
            found.append(number)
        return found

    def names(self) -> list[str]:
        """All requests that have not ended."""
        return list(self._number)

    def end(self, name: str) -> int | None:
        """Handles the end of a request: from now on, its name is that of another one. Returns its
        number; None: it had no step."""
        return self._number.pop(name, None)

    def finish(self, number: int, tenant: str, group: str) -> None:
        """Marks a request as finished."""
        one = self._open.get(number)
        if one is not None:
            one.tenant, one.group, one.finished = tenant, group, True
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
        columns = (column.tolist() for column in (numbers, begin, end, prefill, total))
        for number, first_ns, last_ns, prefilled, all_tokens in zip(*columns, strict=True):
            one = self._open.get(number)
            if one is not None:
                one.begin_ns = min(one.begin_ns, first_ns) if one.end_ns else first_ns
                one.end_ns = max(one.end_ns, last_ns)
                one.prefill_tokens += prefilled
                one.decode_tokens += all_tokens - prefilled

    def newly_done(self) -> list[int]:
        """Numbers of requests that finished since the last call and have steps."""
        ready = [n for n in self._done if n in self._open and self._open[n].end_ns]
        kept = set(ready)
        self._done = [n for n in self._done if n in self._open and n not in kept]
        return ready

    def provisional(self, numbers: Ints, found: Split, method: str) -> list[RequestEnergy]:
        """Rows of requests whose energy of the open period is predicted."""
        rows = []
        place = {number: at for at, number in enumerate(found.request.tolist())}
        for number in numbers.tolist():
            now, at = replace(self._open[number]), place.get(number)
            refusal = found.refusal
            if at is not None and found.covered[at]:
                now.add(found, at)
            else:
                refusal = refusal or now.reason or NEVER
            rows.append(now.stated(method, refusal, provisional=True))
        return rows

    def charge(self, found: Split, foreign: Sequence[Interval]) -> Totals:
        """Adds a period's energy to its requests; returns its totals."""
        totals = replace(found.totals)
        joules = found.joules.tolist()
        for at, number in enumerate(found.request.tolist()):
            one = self._open.get(number)
            own_j = joules[at]
            if one is None:  # dropped, and started again under the same name
                totals.unattributed_j += own_j
                continue
            if one.request == DUMMY:
                totals.idle_j += own_j
                totals.dummy_j += own_j
                continue
            why = found.refusal or _reason(one, foreign)
            if why and one.reason in ("", NEVER):
                one.reason = why
                totals.requests_j -= one.joules
                totals.unattributed_j += one.joules
            if one.reason not in ("", NEVER):
                totals.unattributed_j += own_j
                continue
            totals.requests_j += own_j
            one.add(found, at)
        return totals

    def take(self, method: str, *, final: bool) -> list[RequestEnergy]:
        """Removes completed requests and returns their rows."""
        ready = [n for n, one in self._open.items() if final or one.finished]
        if not final and len(self._open) - len(ready) > MOST_OPEN:
            rest = sorted((one.end_ns, n) for n, one in self._open.items() if not one.finished)
            ready += [n for _, n in rest[: len(rest) - MOST_OPEN]]
        rows = []
        for number in sorted(ready):
            one = self._open[number]
            if one.request == DUMMY and not final:
                continue
            del self._open[number]
            if self._number.get(one.request) == number:
                del self._number[one.request]
            if one.request != DUMMY:
                rows.append(one.stated(method))
        self._done = [n for n in self._done if n in self._open]
        return rows


def _reason(one: RequestEnergy, foreign: Sequence[Interval]) -> str:
    for begin_ns, end_ns, why in foreign:
        if one.begin_ns < end_ns and begin_ns < one.end_ns:
            return why
    return ""
