"""Computes each request's energy from condensed rows and a fit, such that everything adds up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeus.serving.columns import Flags, Floats, Ints, Seen
from zeus.serving.digest import Condensed
from zeus.serving.features import DECODE, PREFILL, SHARED
from zeus.serving.fit import IDLE, Fit
from zeus.serving.rows import Totals

RULE = 0.035
"""Error of the rule with a perfect fit, relative, one sigma."""
LIVE_RULE = 0.05
"""The same before the period is settled."""
LEAST_FOREIGN = 5
"""Number of updates in a row, ignoring those with steps, that must show another process."""
FOREIGN_SHARE = 0.25
"""Their least power above idle, as a share of the difference between idle and busy power."""

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
    found = predict(what, fit, RULE)
    seen = what.seen
    idle_w = fit.weights[fit.group(seen.center_s, seen.level), IDLE]
    idle_j = np.maximum(idle_w, 0.0) * seen.idle_s
    measured_j = float(seen.whole_j.sum())
    predicted_j = float(found.joules.sum()) + float(idle_j.sum())
    if predicted_j <= 0:
        return _refused(
            what,
            "no sensor update covers a step"
            if measured_j > 0
            else "the sensor's updates have no energy",
        )
    scale = measured_j / predicted_j
    for name in ("prefill_j", "decode_j", "shared_j", "rule_j"):
        setattr(found, name, getattr(found, name) * scale)
    found.variance = found.variance * scale**2
    found.totals = _idle(seen, idle_j * scale)
    return found


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
    found: Floats = np.where(empty, joules, np.minimum(idle_w, power) * idle_s)
    return found


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
    found: list[Interval] = []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(int)))
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin < LEAST_FOREIGN:
            continue
        # From the last normal idle update to the next one.
        first = where[begin - 1] + 1 if begin else 0
        last = where[end] - 1 if end < where.size else seen.count - 1
        found.append(
            (
                int(seen.begin_ns[first]),
                int(seen.end_ns[last]),
                f"another process used the GPU: {power[begin:end].mean():.0f} W without a step, "
                f"{idle_w:.0f} W is idle",
            )
        )
    return found
