"""Receipts: what zeusd knows about an interval of the past, as evidence for its energy. Pure;
`evidence` asks zeusd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from zeus_common.text import user_name
from zeus_common.units import WATT_MW
from zeus_ipc.controls import Control
from zeus_ipc.replies import AuditRecord, AuditRecords, GpuInfo, NodeInfo, UsageSum, WindowEnergies
from zeus_ipc.wire import Message

SCHEMA: Final = "zeusctl.receipt/1"

EDGE_MS = 20
"""Starts of processes are known to 10 ms: who used a GPU for less than this is not counted."""

LATE_NS = 2_000_000_000
"""The history has a change of the limit at most this long after it was made."""

_WRITES = ("set", "restore", "ceiling")
_CEILINGS = ("ceiling_set", "ceiling_removed", "ceiling_expired")
OUTSIDE = "outside_change"
_CHANGES = (*_WRITES, *_CEILINGS, OUTSIDE, "persisted", "restore_clamped")
_EVENTS = {
    "quiesced": "an administrator made zeusd close the driver",
    "driver_changed": "another driver was loaded",
    "gpu_lost": "the driver lost the GPU",
}


class Change(Message):
    """A change of a control, as the audit log has it."""

    since: datetime
    until: datetime
    """Of the last of several."""
    control: str
    old: str | None
    new: str | None
    text: str
    """What happened, when and by whom."""
    before: bool
    """Whether it was made before the interval, as the last one of its control."""
    own: bool
    """Whether the subject made it under a lease; without a subject, the reader."""


class Occupant(Message):
    """Who used or held a GPU, as far as the reader may see it."""

    who: str
    since: datetime
    until: datetime
    """First and last use, in the quarters of an hour that the interval is part of."""
    own: bool
    """Whether it is the subject; without a subject, what used most energy."""


class Gap(Message):
    """A time without any reading of the sensors."""

    since: datetime
    until: datetime


class Limit(Message):
    """A power limit in force."""

    since: datetime
    power_limit_w: float


class GpuReceipt(Message):
    """One GPU over the interval. None: unknown, and `Receipt.reasons` says why."""

    index: int
    uuid: str
    name: str
    vbios: str
    energy_j: float | None
    uncertainty_j: float | None
    """Two standard deviations, without gain errors of the sensor."""
    average_power_w: float | None
    method: Literal["counter", "power"]
    """The GPU's own energy counter, or its power, integrated."""
    limited_s: dict[str, float | None] = {}
    """Time in which its clocks were limited, by reason, see `limited.REASONS`. Empty: unknown."""
    gaps: list[Gap]
    power_limits: list[Limit]
    """In force, from the beginning on."""
    power_limit_default_w: float | None
    gpu_clock_mhz: list[int]
    """[lowest, mean, highest] of the rows of the history."""
    changes: list[Change]
    occupants: list[Occupant]


class Receipt(Message):
    """What zeusd knows about an interval."""

    schema_name: Annotated[Literal["zeusctl.receipt/1"], Field(alias="schema")] = SCHEMA
    at: datetime
    host: str
    zeusd: str
    driver: str | None
    simulated: bool
    since: datetime
    until: datetime
    time_s: float
    subject: str
    """`job 77`, `process 123`, or empty: what used most energy."""
    gpus: list[GpuReceipt]
    energy_j: float | None
    uncertainty_j: float | None
    restarts: list[datetime]
    """Of zeusd, if it did not run, or recorded nothing, in a part of the interval."""
    valid: bool
    """Whether the energy is complete and nothing but the subject affected it, as far as zeusd
    knows."""
    reasons: list[str]
    """Why not."""

    def json_text(self) -> str:
        """The receipt in one line."""
        return self.model_dump_json(by_alias=True)


class Subject(NamedTuple):
    """What is measured: a job, a process, or without a name what used most energy."""

    kind: Literal["job", "process", ""] = ""
    name: str = ""

    def is_user(self, one: UsageSum) -> bool:
        """Whether this is the subject's energy."""
        if self.kind == "job" and one.kind == "process":
            return one.workload == f"job {self.name}"
        names = (one.name, one.run) if self.kind == "job" else (one.name,)
        return one.kind == self.kind and self.name in names

    def made(self, one: AuditRecord, uid: int) -> bool:
        """Whether it made this change; without a name, whether this user did."""
        if one.event not in _WRITES or one.pid == 0:
            return False
        known = {"job": one.job == self.name, "process": str(one.pid) == self.name}
        return known.get(self.kind, one.uid == uid)


@dataclass(frozen=True)
class Evidence:
    """What a receipt is made of: replies of zeusd, which shows each user what the policy lets them
    see. Times in ns are of CLOCK_MONOTONIC.

    Attributes:
        utc_ns: UTC minus CLOCK_MONOTONIC.
        uid: The reader.
        windows: The energy by GPU, or why there is none.
        timelines: The history by GPU and domain; the limit from before the interval on.
        usage: The ledger's sums by account and by process, by GPU; a text: why there are none.
        settled_ms: Until when the ledger has all energy of GPUs whose energy is known, UTC.
    """

    host: str
    node: NodeInfo
    gpus: Sequence[GpuInfo]
    since_ns: int
    until_ns: int
    utc_ns: int
    uid: int
    windows: Mapping[str, WindowEnergies | str]
    timelines: Mapping[tuple[str, str], Sequence[tuple[int, int]]]
    audit: AuditRecords
    usage: Mapping[str, Sequence[UsageSum]] | str
    settled_ms: int
    subject: Subject

    def at(self, t_ns: float) -> datetime:
        """Local time of an instant."""
        return _local(self.ms(t_ns))

    def clock(self, t_ns: float) -> str:
        """The same as text."""
        return _clock(self.ms(t_ns))

    def ms(self, t_ns: float) -> float:
        """UTC of an instant, ms."""
        return (t_ns + self.utc_ns) / 1e6

    def overlaps(self, one: AuditRecord) -> bool:
        """Whether a record is of the interval."""
        return one.t_ns < self.until_ns and one.last_ns >= self.since_ns


def receipt_of(evidence: Evidence) -> Receipt:
    """Makes a receipt."""
    restarts = [record for record in evidence.audit.records if record.event == "restarted"]
    reasons = [*_of_the_node(evidence, restarts)]
    gpus = []
    for info in evidence.gpus:
        gpu = _Gpu(evidence, info)
        gpus.append(gpu.receipt())
        reasons += [f"GPU {info.index}: {text}" for text in dict.fromkeys(gpu.reasons)]
    whole = all(gpu.energy_j is not None for gpu in gpus)
    return Receipt(
        at=datetime.now(timezone.utc).astimezone(),
        host=evidence.host,
        zeusd=evidence.node.daemon_version,
        driver=evidence.node.driver_version,
        simulated=evidence.node.simulated is not None,
        since=evidence.at(evidence.since_ns),
        until=evidence.at(evidence.until_ns),
        time_s=(evidence.until_ns - evidence.since_ns) / 1e9,
        subject=" ".join(evidence.subject).strip(),
        gpus=gpus,
        energy_j=sum(gpu.energy_j or 0.0 for gpu in gpus) if whole else None,
        uncertainty_j=sum(gpu.uncertainty_j or 0.0 for gpu in gpus) if whole else None,
        restarts=[
            evidence.at(restart.last_ns) for restart in restarts if evidence.overlaps(restart)
        ],
        valid=not reasons,
        reasons=reasons,
    )


def _of_the_node(evidence: Evidence, restarts: Sequence[AuditRecord]) -> Iterator[str]:
    started_ns, complete_ns = evidence.node.started_ns, evidence.audit.complete_ns
    for restart in restarts:
        if evidence.overlaps(restart):
            since, until = evidence.clock(restart.t_ns), evidence.clock(restart.last_ns)
            yield f"zeusd was restarted at {until}; it has recorded nothing since {since}"
    if started_ns > evidence.since_ns and started_ns not in [
        restart.last_ns for restart in restarts
    ]:
        yield f"zeusd was started at {evidence.clock(started_ns)}, and has no earlier audit log"
    if complete_ns > evidence.since_ns:
        yield (
            f"the audit log is complete from {evidence.clock(complete_ns)} on; earlier changes are "
            "in zeusd's log (journalctl -u zeusd)"
        )
    for record in evidence.audit.records:
        if record.gpu is None and record.event in _EVENTS and evidence.overlaps(record):
            yield f"{_EVENTS[record.event]} at {evidence.clock(record.t_ns)}"
    if isinstance(evidence.usage, str):
        yield f"nobody knows who used the GPUs: {evidence.usage}"
    elif evidence.settled_ms + EDGE_MS < evidence.ms(evidence.until_ns):
        yield "the energy ledger has not reached the end of the interval; ask again later"


class _Gpu:
    """Makes the receipt of one GPU, and collects why it is not valid."""

    def __init__(self, evidence: Evidence, info: GpuInfo) -> None:
        self._evidence = evidence
        self._info = info
        self._records = [
            record
            for record in evidence.audit.records
            if record.gpu == info.uuid and not (record.event in _WRITES and record.result != "ok")
        ]
        self._named: AuditRecord | None = None  # who made the limit low
        self.reasons: list[str] = []

    def receipt(self) -> GpuReceipt:
        """The receipt; afterwards, `reasons` is complete."""
        evidence, info = self._evidence, self._info
        energy_j, uncertainty_j = self._energy()
        default_mw = info.power_limit_default_mw
        rows = evidence.timelines[info.uuid, "gpu_clock"]
        mhz = [value for _, value in rows if value]
        return GpuReceipt(
            index=info.index,
            uuid=info.uuid,
            name=info.name,
            vbios=info.vbios,
            energy_j=energy_j,
            uncertainty_j=uncertainty_j,
            average_power_w=None
            if energy_j is None
            else energy_j / (evidence.until_ns - evidence.since_ns) * 1e9,
            method="counter" if info.supports.energy_counter else "power",
            limited_s=self._limited(),
            gaps=[*self._gaps()],
            power_limits=self._limits(),
            power_limit_default_w=None if default_mw is None else default_mw / 1000,
            gpu_clock_mhz=[min(mhz), round(sum(mhz) / len(mhz)), max(mhz)] if mhz else [],
            changes=[*self._changes()],
            occupants=[] if isinstance(evidence.usage, str) else [*self._occupants(evidence.usage)],
        )

    def _energy(self) -> tuple[float | None, float | None]:
        window = self._evidence.windows[self._info.uuid]
        if isinstance(window, str):
            self.reasons.append(f"its energy is not known: {window}")
            return None, None
        energy_uj = window.energy_uj[0]
        if energy_uj is None:
            begins = self._evidence.clock(window.begins_ns)
            self.reasons.append(f"its history begins at {begins}, later than the interval")
            return None, None
        return energy_uj / 1e6, window.uncertainty_uj[0] / 1e6

    def _limited(self) -> dict[str, float | None]:
        window = self._evidence.windows[self._info.uuid]
        every = {} if isinstance(window, str) else window.limited_ms
        return {reason: None if ms is None else ms / 1e3 for reason, (ms,) in every.items()}

    def _gaps(self) -> Iterator[Gap]:
        evidence = self._evidence
        for t_ns, ms in evidence.timelines[self._info.uuid, "gap"]:
            begin_ns = max(t_ns - ms * 1_000_000, evidence.since_ns)
            end_ns = min(t_ns, evidence.until_ns)
            if begin_ns < end_ns:
                since, seconds = evidence.clock(begin_ns), (end_ns - begin_ns) / 1e9
                self.reasons.append(f"no reading of its sensors for {seconds:.1f} s from {since}")
                yield Gap(since=evidence.at(begin_ns), until=evidence.at(end_ns))

    def _limits(self) -> list[Limit]:
        """The limits in force; names who set the lowest, if it is below the usual one."""
        evidence, info = self._evidence, self._info
        rows = evidence.timelines[info.uuid, "power_limit"]
        before = [mw for t_ns, mw in rows if t_ns <= evidence.since_ns][-1:]
        kept = [(evidence.since_ns, mw) for mw in before]
        kept += [row for row in rows if row[0] > evidence.since_ns]
        kept = [*kept[:1], *(row for last, row in pairwise(kept) if last[1] != row[1])]
        usual_mw = info.power_limit_default_mw or 0
        if info.power_limit_configured:
            usual_mw = min(usual_mw, info.power_limit_site_mw or 0)
        t_ns, lowest_mw = min(kept, key=lambda row: row[1], default=(0, usual_mw))
        if lowest_mw < usual_mw - WATT_MW:
            self._name_cap(t_ns, lowest_mw, usual_mw)
        return [Limit(since=evidence.at(t_ns), power_limit_w=mw / 1000) for t_ns, mw in kept]

    def _name_cap(self, t_ns: int, lowest_mw: int, usual_mw: int) -> None:
        """Names who set the limit that was in force from a time on, unless the subject did."""
        every = [
            record
            for record in self._records
            if record.control == Control.POWER_LIMIT and record.event in _CHANGES
        ]
        same = [one for one in every if abs(_milliwatts(one) - lowest_mw) <= WATT_MW]
        ends_ns = [*(one.t_ns for one in every[1:]), t_ns]
        made = [
            one
            for one, end_ns in zip(every, ends_ns, strict=False)
            if one in same and one.t_ns <= t_ns + LATE_NS and end_ns >= t_ns - LATE_NS
        ][-1:]
        if not made:  # zeusd may have noticed it later, or never
            made = [one for one in same if one.event == OUTSIDE and one.t_ns > t_ns][:1]
        elif made[0].event in ("ceiling", "restore"):  # of what an administrator chose
            made = [one for one in same if one.event in (*_CEILINGS, "persisted")][-1:] or made
        why = "no record says who set it"
        recorded = {one.reason for one in every if one.event == "ceiling_set"}
        for ceiling in self._info.ceilings:
            if ceiling.value[0] <= lowest_mw and ceiling.name not in recorded:
                why = f"the ceiling {ceiling.name} of {user_name(ceiling.uid)}"
        if made:
            self._named, why = made[0], self._sentence(made[0])
        if not (made and self._is_own(made[0])):
            usual = f"below its usual {usual_mw / 1000:g} W"
            self.reasons.append(f"its power limit was {lowest_mw / 1000:g} W, {usual}: {why}")

    def _changes(self) -> Iterator[Change]:
        newest: dict[str, AuditRecord] = {}
        for record in self._records:
            if record.event in _EVENTS and self._evidence.overlaps(record):
                self.reasons.append(
                    f"{_EVENTS[record.event]} at {self._evidence.clock(record.t_ns)}"
                )
            if record.event in _CHANGES and record.last_ns < self._evidence.since_ns:
                newest[record.control or ""] = record
        now = [
            record
            for record in self._records
            if record.event in _CHANGES and self._evidence.overlaps(record)
        ]
        for one in [*newest.values(), *now]:
            before = one.last_ns < self._evidence.since_ns
            text = self._sentence(one) + (", before the interval" if before else "")
            harmless = one.control == Control.PERSISTENCE_MODE or one.old == one.new
            if before:  # of the power limit, the history has what was in force
                harmless |= one.control == Control.POWER_LIMIT or one.new in ("unlocked", "none")
            if not (harmless or one is self._named or self._is_own(one)):
                self.reasons.append(text)
            yield Change(
                since=self._evidence.at(one.t_ns),
                until=self._evidence.at(one.last_ns),
                control=one.control or "",
                old=one.old,
                new=one.new,
                text=text,
                before=before,
                own=self._is_own(one),
            )

    def _is_own(self, one: AuditRecord) -> bool:
        return self._evidence.subject.made(one, self._evidence.uid)

    def _sentence(self, one: AuditRecord) -> str:
        what = (one.control or "").replace("_", " ")
        how = {"restore": "restored", OUTSIDE: "changed outside zeusd"}
        text = f"{what} {how.get(one.event, 'set')} to {one.new}"
        if one.event in _CEILINGS:
            verb = one.event.removeprefix("ceiling_")
            text = f"ceiling {one.reason} {verb}, {what} at most {one.new}"
        return f"{text} at {self._evidence.clock(one.last_ns)} {_who(one)}"

    def _occupants(self, usage: Mapping[str, Sequence[UsageSum]]) -> Iterator[Occupant]:
        evidence = self._evidence
        since_ms, until_ms = (
            evidence.ms(evidence.since_ns) + EDGE_MS,
            evidence.ms(evidence.until_ns) - EDGE_MS,
        )
        sums = [
            one
            for one in usage[self._info.uuid]
            if one.first_ms < until_ms and one.last_ms > since_ms
        ]
        counted = not isinstance(evidence.windows[self._info.uuid], str)
        if counted and not any(used.first_ms <= since_ms for used in sums):
            self.reasons.append("the energy ledger does not reach back to the interval's beginning")
        users = _users(sums, since_ms, until_ms)
        own = self._own(users)
        for user in users:
            who, begin, end = _label(user), _clock(user.first_ms), _clock(user.last_ms)
            if user.kind == "unattributed":
                self.reasons.append(f"nobody knows who used it for a time: {who}")
                continue
            if user not in own:
                self.reasons.append(f"{who} used it, too, from {begin} to {end}")
            since, until = _local(user.first_ms), _local(user.last_ms)
            yield Occupant(who=who, since=since, until=until, own=user in own)

    def _own(self, users: Sequence[UsageSum]) -> list[UsageSum]:
        """Those of the users that are the subject."""
        if self._evidence.subject.kind:
            return [user for user in users if self._evidence.subject.is_user(user)]
        known = [user for user in users if user.kind not in ("unattributed", "others")]
        most = max(known, key=lambda one: one.active_uj + one.idle_uj, default=None)
        if most is None or not most.workload:
            return [] if most is None else [most]
        return [one for one in known if one.workload == most.workload]


def _milliwatts(one: AuditRecord) -> float:
    watts = (one.new or "").removesuffix(" W")
    return 1000 * float(watts) if watts.replace(".", "", 1).isdecimal() else 0.0


def _users(sums: Iterable[UsageSum], since_ms: float, until_ms: float) -> list[UsageSum]:
    """One sum for each user; of accounts whose processes are known, only those."""
    merged: dict[tuple[object, ...], UsageSum] = {}
    for used in sums:
        key = (used.kind, used.name, used.run, used.uid)
        other = merged.get(key)
        if other is not None:
            span = {
                "first_ms": min(used.first_ms, other.first_ms),
                "last_ms": max(used.last_ms, other.last_ms),
                "ns": used.ns + other.ns,
                "methods": [*used.methods, *other.methods],
            }
            used = used.model_copy(update=span)
        merged[key] = used

    def alone(one: UsageSum) -> bool:
        """Whether it had the GPU for itself and without a pause, so that it had nobody else."""
        covers = one.first_ms <= since_ms and until_ms <= one.last_ms
        whole = one.ns / 1e6 + EDGE_MS >= one.last_ms - one.first_ms
        return covers and whole and {*one.methods} <= {"allocated", "exclusive"}

    everyone = [*merged.values()]
    for one in sorted(filter(alone, everyone), key=lambda one: one.kind == "process"):
        if one in everyone:
            mine = [each for each in everyone if _account(each) == _account(one)]
            everyone = [each for each in mine if each is one or each.kind != one.kind]
    known = {_account(one) for one in everyone if one.kind == "process"}
    return [
        one
        for one in everyone
        if one.kind == "process" or not (one.kind == "idle" or _account(one) in known)
    ]


def _account(one: UsageSum) -> tuple[str, int]:
    """The account that is charged, also of a process."""
    name = one.workload or "user " if one.kind == "process" else f"{one.kind} {one.name}"
    return name, one.uid


def _label(one: UsageSum) -> str:
    if one.kind == "others":
        return "other users, whom zeusd does not name to you,"
    if one.kind == "unattributed":
        hint = "; allocate it to the job, or set processes = true under [accounting] in zeusd.toml"
        return one.name + (hint if one.name == "no holder" else "")
    user = user_name(one.uid) if one.uid >= 0 else ""
    parts = [user] if one.kind == "user" else [one.kind, one.name, *(["of", user] if user else [])]
    return " ".join([*parts, f"({one.workload})"] if one.workload else parts)


def _who(one: AuditRecord) -> str:
    if one.event == OUTSIDE:
        return "by an unknown program"
    if one.uid is None or one.pid == 0:
        return "by zeusd"
    parts = [f"by {user_name(one.uid)}"]
    parts += [f"{one.command or 'process'} {one.pid}"] if one.pid else []
    return ", ".join([*parts, f"job {one.job}"] if one.job else parts)


def _local(t_ms: float) -> datetime:
    return datetime.fromtimestamp(t_ms / 1e3, timezone.utc).astimezone()


def _clock(t_ms: float) -> str:
    return _local(t_ms).strftime("%b %d %H:%M:%S")
