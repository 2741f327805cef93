"""Results of a ledger."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

if TYPE_CHECKING:
    from zeus.serving.fit import Fit
    from zeus.serving.settlement import Split

NEVER = "no sensor update covers its steps"

Joules = Annotated[
    float, Field(ge=-1e-3, le=1e30, allow_inf_nan=False, description="an energy in J, at least 0")
]
"""Differences of sums may be a little below 0."""

IDLE = ("exclude", "proportional", "owner")
"""Treatment of idle energy: exclude it, add it to the requests in proportion to their own energy,
or charge it to the owner of the server."""

BY = ("model", "tenant", "group", "hour")
"""What a report may sum by."""


@dataclass
class RequestEnergy:
    """Energy attributed to one request.

    Attributes:
        request: Its id.
        joules: Its energy, the sum of the next three; NaN: refused.
        prefill_j: Energy caused by its prefill tokens.
        decode_j: Energy caused by its decode tokens and their context.
        shared_j: Its share of energy that no single request causes, such as reading the weights.
        uncertainty_j: Error of sensor and fit, one sigma.
        rule_uncertainty_j: Error of the rule, one sigma.
        method: How it was attributed.
        reason: Why it is refused; empty: not refused.
        tenant: Tenant, as given when it finished.
        group: The task or phase that it is part of; see `zeus.serving.wire.group_of`.
        provisional: Whether the period is still open and the figure may change.
        begin_ns: Start of its first step.
        end_ns: End of its last step so far.
        prefill_tokens: Tokens computed in prefill, without those from a prefix cache.
        decode_tokens: Tokens computed in decode, accepted or not.
        finished: Whether it was marked as finished.
    """

    request: str
    joules: float = 0.0
    prefill_j: float = 0.0
    decode_j: float = 0.0
    shared_j: float = 0.0
    uncertainty_j: float = 0.0
    rule_uncertainty_j: float = 0.0
    method: str = ""
    reason: str = NEVER
    tenant: str = ""
    group: str = ""
    provisional: bool = False
    begin_ns: int = 0
    end_ns: int = 0
    prefill_tokens: float = 0
    decode_tokens: float = 0
    finished: bool = False

    def add(self, shares: Split, at: int) -> None:
        """Adds a period's energy, which is at this position of the split."""
        prefill_j, decode_j, shared_j = (
            float(part[at]) for part in (shares.prefill_j, shares.decode_j, shares.shared_j)
        )
        self.joules += prefill_j + decode_j + shared_j
        self.prefill_j += prefill_j
        self.decode_j += decode_j
        self.shared_j += shared_j
        self.uncertainty_j = math.hypot(self.uncertainty_j, float(shares.variance[at]) ** 0.5)
        self.rule_uncertainty_j += float(shares.rule_j[at])
        if shares.covered[at] and self.reason == NEVER:
            self.reason = ""

    def stated(self, method: str, refusal: str = "", *, provisional: bool = False) -> RequestEnergy:
        """A copy with whole tokens; without figures if it is refused."""
        row = replace(
            self,
            method=method,
            reason=refusal or self.reason,
            provisional=provisional,
            prefill_tokens=round(self.prefill_tokens),
            decode_tokens=round(self.decode_tokens),
        )
        if row.reason:
            row.joules = row.prefill_j = row.decode_j = row.shared_j = math.nan
            row.uncertainty_j = row.rule_uncertainty_j = math.nan
        return row

    @property
    def refused(self) -> bool:
        """Whether there is no figure."""
        return math.isnan(self.joules)

    def as_json(self, engine: str, more: dict[str, Any] | None = None) -> str:
        """One line of JSON; the figures of a refused request are null."""
        fields = {"engine": engine, **vars(self), **(more or {})}
        return json.dumps({name: known(value) for name, value in fields.items()})


def known(value: Any) -> Any:
    """A value, or None for NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass
class Totals:
    """Energy of a span; requests + idle + unattributed = measured.

    Attributes:
        measured_j: Total energy of the sensor's updates.
        requests_j: Energy attributed to requests.
        idle_j: Energy while no request was in a step, including start-up and dummy steps.
        unattributed_j: Energy of refused requests.
        startup_j: Part of `idle_j` before the first step.
        dummy_j: Part of `idle_j` in steps without a request.
    """

    measured_j: Joules = 0.0
    requests_j: Joules = 0.0
    idle_j: Joules = 0.0
    unattributed_j: Joules = 0.0
    startup_j: Joules = 0.0
    dummy_j: Joules = 0.0

    def add(self, other: Totals) -> None:
        """Adds another span's energy."""
        for name, joules in vars(other).items():
            setattr(self, name, getattr(self, name) + joules)


@dataclass(frozen=True)
class ClosedPeriod:
    """A closed period.

    Attributes:
        rows: Its requests.
        totals: Its energy.
        fit: The energy cost of steps; None: attributed without one.
    """

    rows: list[RequestEnergy]
    totals: Totals
    fit: Fit | None
