"""Computes each request's energy from condensed rows and a fit, such that everything adds up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeus.serving.columns import Flags, Floats, Ints
from zeus.serving.digest import Condensed
from zeus.serving.features import DECODE, NAMES, PREFILL, SHARED
from zeus.serving.fit import IDLE, Fit
from zeus.serving.spread import RULE_ERROR, SENSOR_ERROR

RULE = 0.035
"""Error of the regression's rule with a perfect fit, relative, one sigma."""
LIVE_RULE = 0.05
"""The same before the period is settled."""


@dataclass
class Split:
    """Energy of a period.

    Attributes:
        request: Numbers of requests, ascending.
        prefill_j, decode_j, shared_j: Energy of each.
        variance: Variance of each one's sum from sensor and fit, J².
        rule_j: Error of the rule, one sigma.
        begin_s, end_s: First and last block of each.
        covered: Whether any update covers a step of each.
        measured_j: Energy of all updates.
        idle_j: Energy of the time without a step.
        startup_j: Part of it before the first step.
        unattributed_j: Energy of the time with steps, if refused; `refusal` says why.
        refusal: Why no request gets any energy; empty: not refused.
    """

    request: Ints
    prefill_j: Floats
    decode_j: Floats
    shared_j: Floats
    variance: Floats
    rule_j: Floats
    begin_s: Floats
    end_s: Floats
    covered: Flags
    measured_j: float
    idle_j: float = 0.0
    startup_j: float = 0.0
    unattributed_j: float = 0.0
    refusal: str = ""

    @property
    def joules(self) -> Floats:
        """Energy of each request, J."""
        return self.prefill_j + self.decode_j + self.shared_j


def split(what: Condensed, fit: Fit | None) -> Split:
    """Splits a period's energy."""
    found, where = _blank(what)
    if fit is None:
        _take(found, what, where)
    elif not fit.refusal:
        _apply(found, what, where, fit)
    else:
        found.refusal = fit.refusal
        _idle_only(found, what)
    return found


def predict(what: Condensed, fit: Fit | None) -> Split:
    """Energy of requests before a period is complete, not scaled to the measured energy."""
    found, where = _blank(what)
    if fit is not None:
        _attribute(found, what, where, fit)
        found.rule_j = LIVE_RULE * found.joules
    else:
        _sum(found, what, where)
    return found


def _blank(what: Condensed) -> tuple[Split, Ints]:
    requests, where = np.unique(what.request, return_inverse=True)
    size = requests.size
    begin_s, end_s = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(begin_s, where, what.block * what.block_s)
    np.maximum.at(end_s, where, (what.block + 1) * what.block_s)
    found = Split(
        requests,
        np.zeros(size),
        np.zeros(size),
        np.zeros(size),
        np.zeros(size),
        np.zeros(size),
        begin_s,
        end_s,
        np.zeros(size, bool),
        float(what.joules.sum()),
    )
    return found, where


def _sum(found: Split, what: Condensed, where: Ints) -> None:
    """Energy of the requests by tokens, with its uncertainties."""
    size = found.request.size
    found.prefill_j = np.bincount(where, what.features[:, 0], size).astype(np.float64)
    found.decode_j = np.bincount(where, what.features[:, 1], size).astype(np.float64)
    found.covered = found.joules > 0
    found.variance = (SENSOR_ERROR * found.joules) ** 2
    found.rule_j = RULE_ERROR * found.joules


def _take(found: Split, what: Condensed, where: Ints) -> None:
    _sum(found, what, where)
    attributed_j = float(found.joules.sum())
    found.idle_j = float(what.idle_j.sum())
    found.startup_j = _before_first(what, what.idle_j)
    busy_j = found.measured_j - found.idle_j
    if attributed_j > 0 and busy_j > 0:
        _scale(found, busy_j / attributed_j)
    else:
        found.unattributed_j = busy_j


def _apply(found: Split, what: Condensed, where: Ints, fit: Fit) -> None:
    _attribute(found, what, where, fit)
    seen = what.observed
    idle_w = fit.weights[fit.group(seen.center_s, seen.level), IDLE]
    idle_j = np.maximum(idle_w, 0.0) * what.idle_s
    found.idle_j = float(idle_j.sum())
    found.startup_j = _before_first(what, idle_j)
    predicted_j = float(found.joules.sum()) + found.idle_j
    if predicted_j <= 0:
        found.refusal = (
            "no sensor update covers a step"
            if found.measured_j > 0
            else "the sensor's updates have no energy"
        )
        _idle_only(found, what)
        return
    scale = found.measured_j / predicted_j
    found.idle_j *= scale
    found.startup_j *= scale
    _scale(found, scale)


def _attribute(found: Split, what: Condensed, where: Ints, fit: Fit) -> None:
    """Energy of the requests predicted by the fit, with its uncertainties."""
    size = found.request.size
    center_s = what.center_s
    group = fit.group(center_s, what.level)
    shares = what.features * fit.ratio_at(center_s)[:, None]
    row_j = shares * fit.weights[group, :IDLE]
    total = np.maximum(np.bincount(where, row_j.sum(axis=1), size), 0.0)
    parts = np.stack(
        [
            np.maximum(np.bincount(where, row_j[:, columns].sum(axis=1), size), 0.0)
            for columns in (PREFILL, DECODE, SHARED)
        ]
    )
    # Features that always occur together may have weights of opposite signs; only their sum is well
    # determined. No part is below zero, and the parts add up to the sum.
    above = parts.sum(axis=0)
    found.prefill_j, found.decode_j, found.shared_j = parts * np.divide(
        total, above, out=np.zeros(size), where=above > 0
    )
    found.covered = np.bincount(where, what.features[:, 0], size) > 0
    length_s = np.maximum(found.end_s - found.begin_s, what.block_s)
    updates = (length_s + 3.5 * fit.width_s) / max(fit.period_s, 1e-6)
    noise = fit.residual / np.sqrt(np.maximum(updates, 1.0))
    found.variance = _variance(shares, group, where, size, fit)
    found.variance = found.variance + (noise**2 + fit.slow**2) * found.joules**2
    found.rule_j = RULE * found.joules


def _variance(shares: Floats, group: Ints, where: Ints, size: int, fit: Fit) -> Floats:
    """Variance of each request's energy from the covariance of the weights, J²."""
    found = np.zeros(size)
    for one in np.unique(group):
        some = group == one
        vectors = np.zeros((size, len(NAMES)))
        for column in range(len(NAMES)):
            vectors[:, column] = np.bincount(where[some], shares[some, column], size)
        covariance = fit.covariance[one][:IDLE, :IDLE]
        found += np.einsum("ik,kl,il->i", vectors, covariance, vectors, optimize=True)
    return np.maximum(found, 0.0)


def _scale(found: Split, scale: float) -> None:
    found.prefill_j = found.prefill_j * scale
    found.decode_j = found.decode_j * scale
    found.shared_j = found.shared_j * scale
    found.variance = found.variance * scale**2
    found.rule_j = found.rule_j * scale


def _idle_only(found: Split, what: Condensed) -> None:
    """Idle energy according to whole updates without a step; the rest is unattributed."""
    length_s = (what.update_end_ns - what.update_begin_ns) / 1e9
    empty = what.idle_s > 0.999 * length_s
    power = what.joules[empty] / length_s[empty]
    idle_w = float(np.median(power)) if power.size else 0.0
    part_w = np.minimum(idle_w, what.joules / length_s)
    idle_j = np.where(empty, what.joules, part_w * what.idle_s)
    found.idle_j = float(idle_j.sum())
    found.startup_j = _before_first(what, idle_j)
    found.unattributed_j = found.measured_j - found.idle_j


def _before_first(what: Condensed, idle_j: Floats) -> float:
    """Idle energy of the updates before the first one with a step."""
    length_s = (what.update_end_ns - what.update_begin_ns) / 1e9
    busy = np.flatnonzero(what.idle_s < 0.999 * length_s)
    first = int(busy[0]) if busy.size else what.idle_s.size
    return float(idle_j[:first].sum())
