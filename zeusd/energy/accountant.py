"""One GPU's account: turns its holders, users and energy over time into rows of the ledger.

The position is the instant until which energy has been charged, and the meter's reading there. Each
settlement charges the difference to the next position, so every microjoule is charged exactly once,
whatever happens between two settlements. Position and rows must be stored in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from zeus_common.units import SECOND_NS
from zeus_ipc.charging import Method
from zeus_ipc.requests import BUCKET_S
from zeusd.energy.split import (
    Account,
    Charge,
    ChargedProcess,
    Claim,
    Situation,
    divide,
    split,
    unread,
)

BUCKET_NS = BUCKET_S * SECOND_NS
"""Length of a bucket. All offsets from UTC in use are multiples of it."""

NEVER_NS = 2**62

MAX_PROCESSES = 256
"""Limit of processes of one GPU with their own rows in a bucket; beyond it only their accounts are
charged."""


class Fact(str, Enum):
    """The kind of fact that a span states."""

    HOLDER = "holder"
    PRESENT = "present"
    USED = "used"
    SLICES = "slices"
    LISTED = "listed"
    IDLE = "idle"
    UNKNOWN = "unknown"
    EXCLUDED = "excluded"


@dataclass(slots=True, eq=False)
class FactSpan:
    """A fact that held from one instant to another.

    Attributes:
        fact: Its kind.
        begin_ns: First instant, ns of CLOCK_MONOTONIC.
        end_ns: The instant after the last; NEVER_NS: it still holds.
        claim: The claim of HOLDER, PRESENT, USED and SLICES; see `split.Situation`.
        reason: The reason of UNKNOWN and EXCLUDED.
        process: The account's process, for PRESENT, USED and SLICES; None: not known.
    """

    fact: Fact
    begin_ns: int
    end_ns: int = NEVER_NS
    claim: Claim | None = None
    reason: str = ""
    process: ChargedProcess | None = None


class Position(NamedTuple):
    """The instant until which energy has been charged, and the meter's reading there."""

    t_ns: int
    energy_uj: int


class Key(NamedTuple):
    """Key of a row."""

    bucket: int
    account: Account
    method: Method


class ProcessKey(NamedTuple):
    """Key of a process's row."""

    bucket: int
    account: Account
    process: ChargedProcess
    method: Method


@dataclass(slots=True)
class ChargeRow:
    """The charge of an account in one bucket by one method; see `split.Charge`.

    Attributes:
        begin_ns, end_ns: When it was charged first and last.
    """

    active_uj: int = 0
    idle_uj: int = 0
    lower_uj: int = 0
    upper_uj: int = 0
    ns: int = 0
    begin_ns: int = NEVER_NS
    end_ns: int = 0

    def add(self, more: Charge | ChargeRow, part: _Part | None = None) -> None:
        """Adds the charge of a part of the bucket, or another row."""
        self.active_uj += more.active_uj
        self.idle_uj += more.idle_uj
        self.lower_uj += more.lower_uj
        self.upper_uj += more.upper_uj
        self.ns += more.ns
        if part is not None:
            self.begin_ns = min(self.begin_ns, part.begin_ns)
            self.end_ns = max(self.end_ns, part.end_ns)


@dataclass(slots=True)
class Settlement:
    """The result of one settlement.

    Attributes:
        rows: The charges.
        metered: The GPU's energy by bucket, from the meter.
        position: Start of the next settlement.
        processes: Rows by process, as far as known.
        divided: The part of the rows that is divided among `processes`.
        limited: Time in which the clocks were limited, ns, by bucket, account and cause.
    """

    rows: dict[Key, ChargeRow]
    metered: dict[int, int]
    position: Position
    processes: dict[ProcessKey, ChargeRow] = field(default_factory=dict)
    divided: dict[Key, ChargeRow] = field(default_factory=dict)
    limited: dict[tuple[int, Account, str], int] = field(default_factory=dict)


def never_limited(begin_ns: int, end_ns: int) -> Mapping[str, int]:
    """The time limited of a device that does not count it."""
    return {}


@dataclass(slots=True)
class _Part:
    """The charges of an interval in which nothing changes."""

    begin_ns: int
    end_ns: int
    drawn_uj: int
    spans: list[FactSpan]
    charges: list[Charge]


def _doubt(gap: list[_Part]) -> None:
    """Widens the charges of a time whose power is not known, if the charged accounts change."""
    if len({frozenset(charge.account for charge in part.charges) for part in gap}) < 2:
        return
    whole_uj = sum(part.drawn_uj for part in gap)
    for part in gap:
        others_uj = whole_uj - part.drawn_uj
        part.charges = [unread(charge, others_uj) for charge in part.charges]


@dataclass(slots=True)
class Accountant:
    """The account of one GPU.

    Attributes:
        position: The instant until which energy has been charged.
        spans: Facts about the time since; more may be added until it is settled.
    """

    position: Position
    spans: list[FactSpan] = field(default_factory=list)
    _known: dict[int, set[ChargedProcess]] = field(default_factory=dict)

    def add(self, span: FactSpan) -> FactSpan:
        """Adds a fact that has begun, or that held for a while."""
        self.spans.append(span)
        return span

    def settle(
        self,
        until_ns: int,
        energy_uj: Callable[[int], int],
        offset_ns: int,
        observed: Iterable[FactSpan] = (),
        idle_uw: int = 0,
        limited: Callable[[int, int], Mapping[str, int]] = never_limited,
    ) -> Settlement:
        """Charges the energy since the position.

        Args:
            until_ns: A time that the meter's readings cover.
            energy_uj: The meter at any time up to then.
            offset_ns: UTC minus CLOCK_MONOTONIC, for the names of the buckets.
            observed: Further facts about this time; UNKNOWN: the meter was not read.
            idle_uw: The GPU's power when nobody uses it; 0: not known.
            limited: How long its clocks were limited between two times, ns, by cause.
        """
        begin_ns, begin_uj = self.position
        until_ns = max(begin_ns, until_ns)
        observed = [*observed]
        spans = [*self.spans, *observed]
        end_uj = max(begin_uj, energy_uj(until_ns))
        readings = {begin_ns: begin_uj, until_ns: end_uj}
        highest_uj = begin_uj

        def meter(t_ns: int) -> int:
            # Interpolated between readings, of which there may be more each time; it never
            # decreases.
            nonlocal highest_uj
            if t_ns not in readings:
                readings[t_ns] = min(max(highest_uj, energy_uj(t_ns)), end_uj)
            highest_uj = readings[t_ns]
            return highest_uj

        rows: dict[Key, ChargeRow] = {}
        processes: dict[ProcessKey, ChargeRow] = {}
        divided: dict[Key, ChargeRow] = {}
        metered: dict[int, int] = {}
        slowed: dict[tuple[int, Account, str], int] = {}
        borders = [*_borders(begin_ns, until_ns, offset_ns)]
        parts = []
        for first_ns, last_ns, active in _pieces(begin_ns, until_ns, spans, borders):
            before_uj = meter(first_ns)
            drawn_uj = meter(last_ns) - before_uj
            charges = split(drawn_uj, last_ns - first_ns, _situation(active, idle_uw))
            parts.append(_Part(first_ns, last_ns, drawn_uj, [*active], charges))
        for gap in observed:
            if gap.fact is Fact.UNKNOWN:
                _doubt([part for part in parts if gap.begin_ns <= part.begin_ns < gap.end_ns])
        for part in parts:
            bucket = (part.begin_ns + offset_ns) // BUCKET_NS
            present = _processes(part.spans)
            several = any(len(some) > 1 for some in present.values())
            causes = limited(part.begin_ns, part.end_ns)
            uses = [_uses(part.spans, fact) if several else {} for fact in (Fact.USED, Fact.SLICES)]
            for charge in part.charges:
                key = Key(bucket, charge.account, charge.method)
                rows.setdefault(key, ChargeRow()).add(charge, part)
                for cause, ns in causes.items():
                    share_ns = ns * charge.ns // (part.end_ns - part.begin_ns)
                    place = bucket, charge.account, cause
                    slowed[place] = slowed.get(place, 0) + share_ns
                charged = present.get(charge.account)
                if charged is None or not self._has_room(bucket, charged):
                    continue
                divided.setdefault(key, ChargeRow()).add(charge)
                for process, share in divide(charge, charged, *uses):
                    detail = ProcessKey(bucket, charge.account, process, share.method)
                    processes.setdefault(detail, ChargeRow()).add(share, part)
        edges = [begin_ns, *borders, until_ns]
        for first_ns, last_ns in pairwise(edges):
            bucket = (first_ns + offset_ns) // BUCKET_NS
            drawn_uj = readings[last_ns] - readings[first_ns]
            metered[bucket] = metered.get(bucket, 0) + drawn_uj
        self.position = Position(until_ns, end_uj)
        self.spans = [span for span in self.spans if span.end_ns > until_ns]
        return Settlement(rows, metered, self.position, processes, divided, slowed)

    def _has_room(self, bucket: int, processes: Iterable[ChargedProcess]) -> bool:
        """Whether a bucket has room for these processes' rows."""
        if bucket not in self._known:
            self._known = {bucket: set()}
        known = self._known[bucket].union(processes)
        if len(known) > MAX_PROCESSES:
            return False
        self._known[bucket] = known
        return True


def _borders(begin_ns: int, end_ns: int, offset_ns: int) -> Iterator[int]:
    """Starts of buckets between two instants."""
    border_ns = ((begin_ns + offset_ns) // BUCKET_NS + 1) * BUCKET_NS - offset_ns
    while border_ns < end_ns:
        yield border_ns
        border_ns += BUCKET_NS


def _pieces(
    begin_ns: int, end_ns: int, spans: Iterable[FactSpan], borders: Iterable[int]
) -> Iterator[tuple[int, int, Iterable[FactSpan]]]:
    """Intervals in which nothing changes, each with the spans that cover it."""
    begins: dict[int, list[FactSpan]] = {}
    ends: dict[int, list[FactSpan]] = {}
    for span in spans:
        first_ns, last_ns = max(begin_ns, span.begin_ns), min(end_ns, span.end_ns)
        if first_ns < last_ns:
            begins.setdefault(first_ns, []).append(span)
            ends.setdefault(last_ns, []).append(span)
    active: dict[FactSpan, None] = {}
    before_ns = begin_ns
    for t_ns in sorted({*begins, *ends, *borders, end_ns}):
        if t_ns > before_ns:
            yield before_ns, t_ns, active
        for span in ends.get(t_ns, ()):
            del active[span]
        active.update(dict.fromkeys(begins.get(t_ns, ())))
        before_ns = t_ns


def _processes(active: Iterable[FactSpan]) -> dict[Account, list[ChargedProcess]]:
    """Processes of the charged accounts; empty if a job or pod holds the GPU."""
    by_account: dict[Account, list[ChargedProcess]] = {}
    for span in active:
        if span.fact is Fact.HOLDER:
            return {}
        if span.fact is Fact.PRESENT and span.claim is not None and span.process is not None:
            by_account.setdefault(span.claim.account, []).append(span.process)
    return by_account


def _uses(active: Iterable[FactSpan], fact: Fact) -> dict[ChargedProcess, int]:
    """Use by process, or the sizes of their instances."""
    weights: dict[ChargedProcess, int] = {}
    for span in active:
        if span.fact is fact and span.claim is not None and span.process is not None:
            weights[span.process] = weights.get(span.process, 0) + span.claim.weight
    return weights


def _situation(active: Iterable[FactSpan], idle_uw: int) -> Situation:
    spans = [*active]
    facts = {span.fact for span in spans}

    def claims(fact: Fact) -> list[Claim]:
        return [span.claim for span in spans if span.fact is fact and span.claim is not None]

    def reason(fact: Fact) -> str:
        return next((span.reason for span in spans if span.fact is fact), "")

    return Situation(
        holders=claims(Fact.HOLDER),
        present=claims(Fact.PRESENT),
        used=claims(Fact.USED),
        slices=claims(Fact.SLICES),
        idle_uw=idle_uw,
        listed=Fact.LISTED in facts,
        idle=Fact.IDLE in facts,
        unknown=reason(Fact.UNKNOWN),
        excluded=reason(Fact.EXCLUDED),
    )
