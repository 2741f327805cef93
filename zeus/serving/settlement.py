"""Computes each request's energy from condensed rows and a fit, such that everything adds up; and
keeps the requests: their numbers, spans, labels, and energy so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeus.serving.columns import Flags, Floats, Ints, Seen, StepColumns
from zeus.serving.digest import Condensed
from zeus.serving.features import DECODE, PREFILL, SHARED
from zeus.serving.fit import IDLE, Fit
from zeus.serving.rows import NEVER, RequestEnergy, Totals
from zeus.serving.wire import MOST_REQUESTS

RULE = 0.035
"""Error of the rule with a perfect fit, relative, one sigma."""
LIVE_RULE = 0.05
"""The same before the period is settled."""
LEAST_FOREIGN = 5
"""Number of updates in a row, ignoring those with steps, that must show another process."""
FOREIGN_SHARE = 0.25
"""Their least power above idle, as a share of the difference between idle and busy power."""

DUMMY = "\x00dummy"
"""Name of steps without a request, which are part of the idle energy."""

Interval = tuple[int, int, str]
"""Start and end, ns, and the reason."""


@dataclass
class Split:
    """Energy of a period.

    Attributes:
        request: Numbers of requests, ascending.
        prefill_j, decode_j, shared_j: Energy of each.
        variance: Variance of each one's sum from sensor and fit, J².
        rule_j: Error of the rule, one sigma.
        covered: Whether any update covers a step of each.
        totals: Energy of the period, without that of requests.
        refusal: Why no request gets any energy; empty: not refused.
    """

    request: Ints
    prefill_j: Floats
    decode_j: Floats
    shared_j: Floats
    variance: Floats
    rule_j: Floats
    covered: Flags
    totals: Totals
    refusal: str = ""

    @property
    def joules(self) -> Floats:
        """Energy of each request, J."""
        return self.prefill_j + self.decode_j + self.shared_j


def split(what: Condensed, fit: Fit) -> Split:
    """Splits a period's energy."""
    if fit.refusal:
        return _refused(what, fit.refusal)
    shares = predict(what, fit, RULE)
    seen = what.seen
    idle_w = fit.weights[fit.group(seen.center_s, seen.level), IDLE]
    idle_j = np.maximum(idle_w, 0.0) * seen.idle_s
    measured_j = float(seen.whole_j.sum())
    predicted_j = float(shares.joules.sum()) + float(idle_j.sum())
    if predicted_j <= 0:
        return _refused(
            what,
            "no sensor update covers a step"
            if measured_j > 0
            else "the sensor's updates have no energy",
        )
    scale = measured_j / predicted_j
    for name in ("prefill_j", "decode_j", "shared_j", "rule_j"):
        setattr(shares, name, getattr(shares, name) * scale)
    shares.variance = shares.variance * scale**2
    shares.totals = _idle(seen, idle_j * scale)
    return shares


def predict(what: Condensed, fit: Fit, rule: float = LIVE_RULE) -> Split:
    """Energy of requests as the fit predicts it, not scaled to the measured energy."""
    rows = what.rows
    requests, where = np.unique(rows.request, return_inverse=True)
    size = requests.size
    center_s = (rows.block.astype(np.float64) + 0.5) * what.block_s
    group = fit.group(center_s, rows.level)
    shares = rows.features * fit.ratio_at(center_s)[:, None]
    row_j = shares * fit.weights[group, :IDLE]

    def summed(values: Floats) -> Floats:
        return np.bincount(where, values, size).astype(np.float64)

    total = np.maximum(summed(row_j.sum(axis=1)), 0.0)
    parts = np.stack(
        [
            np.maximum(summed(row_j[:, columns].sum(axis=1)), 0.0)
            for columns in (PREFILL, DECODE, SHARED)
        ]
    )
    # Features that always occur together may have weights of opposite signs; only their sum is well
    # determined. No part is below zero, and the parts add up to the sum.
    above = parts.sum(axis=0)
    prefill_j, decode_j, shared_j = parts * np.divide(
        total, above, out=np.zeros(size), where=above > 0
    )
    joules = prefill_j + decode_j + shared_j
    first, last = np.full(size, 2**62), np.full(size, -(2**62))
    np.minimum.at(first, where, rows.block)
    np.maximum.at(last, where, rows.block + 1)
    length_s = (last - first) * what.block_s
    updates = (length_s + 3.5 * fit.width_s) / max(fit.period_s, 1e-6)
    noise = fit.residual / np.sqrt(np.maximum(updates, 1.0))
    variance = (noise**2 + fit.slow**2) * joules**2
    for one in np.unique(group):  # ... and from the covariance of the weights
        vectors = np.stack([summed(column * (group == one)) for column in shares.T], axis=1)
        covariance = fit.covariance[one][:IDLE, :IDLE]
        own = np.einsum("ik,kl,il->i", vectors, covariance, vectors, optimize=True)
        variance = variance + np.maximum(own, 0.0)
    covered: Flags = summed(rows.features[:, 0]) > 0
    return Split(
        requests, prefill_j, decode_j, shared_j, variance, rule * joules, covered, Totals()
    )


def _refused(what: Condensed, reason: str) -> Split:
    """Idle energy according to whole updates without a step; the rest is unattributed."""
    requests = np.unique(what.rows.request)
    seen = what.seen
    none: Floats = np.zeros(requests.size)
    totals = _idle(seen, idle_energy(seen.whole_j, seen.length_s, seen.idle_s, seen.empty))
    totals.unattributed_j = totals.measured_j - totals.idle_j
    return Split(requests, none, none, none, none, none, none > 0, totals, reason)


def idle_energy(joules: Floats, length_s: Floats, idle_s: Floats, empty: Flags) -> Floats:
    """Energy of each update's idle seconds, J, by the median power of updates without a step.

    In an update with steps, the power of idle time is at most the update's mean power.
    """
    power = joules / length_s
    idle_w = float(np.median(power[empty])) if empty.any() else 0.0
    idle_j: Floats = np.where(empty, joules, np.minimum(idle_w, power) * idle_s)
    return idle_j


def _idle(seen: Seen, idle_j: Floats) -> Totals:
    """A period's totals from the idle energy of each update."""
    busy = np.flatnonzero(~seen.empty)
    first = int(busy[0]) if busy.size else seen.count
    return Totals(
        measured_j=float(seen.whole_j.sum()),
        idle_j=float(idle_j.sum()),
        startup_j=float(idle_j[:first].sum()),
    )


def find_foreign(seen: Seen) -> list[Interval]:
    """Intervals in which another process used the GPU: power above idle in time without a step.

    A process that only runs during steps is not found. zeusd knows which jobs hold the GPU, and the
    caller can report them (`Ledger.foreign`).
    """
    empty = seen.empty
    busy = np.flatnonzero(~empty)
    if busy.size == 0:
        return []
    # An update may lag behind slightly, so one next to a step is not trusted.
    trusted = empty.copy()
    trusted[1:] &= empty[:-1]
    trusted[:-1] &= empty[1:]
    trusted[: busy[0]] = False  # start-up: loading weights, capturing graphs
    where = np.flatnonzero(trusted)
    if where.size < 2 * LEAST_FOREIGN:
        return []
    power = (seen.whole_j / seen.length_s)[where]
    idle_w = float(np.quantile(power, 0.2))
    busy_w = float((seen.whole_j / seen.length_s)[~empty].mean())
    above = power > idle_w + FOREIGN_SHARE * max(busy_w - idle_w, 0.2 * idle_w)
    foreign: list[Interval] = []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(int)))
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin < LEAST_FOREIGN:
            continue
        # From the last normal idle update to the next one.
        first = where[begin - 1] + 1 if begin else 0
        last = where[end] - 1 if end < where.size else seen.count - 1
        foreign.append(
            (
                int(seen.begin_ns[first]),
                int(seen.end_ns[last]),
                f"another process used the GPU: {power[begin:end].mean():.0f} W without a step, "
                f"{idle_w:.0f} W is idle",
            )
        )
    return foreign


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
        """Whether there are more than `MOST_REQUESTS`: then a settlement drops those without a step
        for longest."""
        return len(self._open) > MOST_REQUESTS

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The number of each name; a new name is a new request."""
        known = self._number
        numbers = []
        for name in names:
            number = known.get(name)
            if number is None:
                number = known[name] = self._next
                self._next += 1
                self._open[number] = RequestEnergy(name)
            numbers.append(number)
        return numbers

    def names(self) -> list[str]:
        """All requests that have not ended."""
        return [name for name in self._number if name != DUMMY]

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

    def provisional(self, numbers: Ints, shares: Split, method: str) -> list[RequestEnergy]:
        """Rows of requests whose energy of the open period is predicted."""
        rows = []
        place = {number: at for at, number in enumerate(shares.request.tolist())}
        for number in numbers.tolist():
            now, at = replace(self._open[number]), place.get(number)
            refusal = shares.refusal
            if at is not None and shares.covered[at]:
                now.add(shares, at)
            else:
                refusal = refusal or now.reason or NEVER
            rows.append(now.stated(method, refusal, provisional=True))
        return rows

    def charge(self, shares: Split, foreign: Sequence[Interval]) -> Totals:
        """Adds a period's energy to its requests; returns its totals."""
        totals = replace(shares.totals)
        joules = shares.joules.tolist()
        for at, number in enumerate(shares.request.tolist()):
            one = self._open.get(number)
            own_j = joules[at]
            if one is None:  # dropped, and started again under the same name
                totals.unattributed_j += own_j
                continue
            if one.request == DUMMY:
                totals.idle_j += own_j
                totals.dummy_j += own_j
                continue
            why = shares.refusal or _reason(one, foreign)
            if why and one.reason in ("", NEVER):
                one.reason = why
                totals.requests_j -= one.joules
                totals.unattributed_j += one.joules
            if one.reason not in ("", NEVER):
                totals.unattributed_j += own_j
                continue
            totals.requests_j += own_j
            one.add(shares, at)
        return totals

    def take(self, method: str, *, final: bool) -> list[RequestEnergy]:
        """Removes completed requests and returns their rows."""
        ready = [n for n, one in self._open.items() if final or one.finished]
        if not final and len(self._open) - len(ready) > MOST_REQUESTS:
            rest = sorted((one.end_ns, n) for n, one in self._open.items() if not one.finished)
            ready += [n for _, n in rest[: len(rest) - MOST_REQUESTS]]
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
