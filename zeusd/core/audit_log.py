"""The newest records of the audit log, and counts of its events. Pure; the log has all records."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from zeus_ipc.replies import AuditRecord
from zeusd.core.effects import Note

KEPT = 1000
"""Records that are kept. Of more, the oldest one of the user who has most goes."""

PRIVATE = ("pid", "lease", "command", "job")
"""Fields that only the record's user and administrators may see."""

REPEATED_NS = 600_000_000_000
"""A warning that comes again within this time after the last one is counted in the same record."""

_FIELDS = (
    *("gpu", "control", "uid", "pid", "command", "job", "lease"),
    *("old", "new", "reason", "result"),
)


@dataclass(slots=True)
class Record:
    """One record of the audit log, with the fields of `replies.AuditRecord`."""

    number: int
    t_ns: int
    last_ns: int
    count: int
    event: str
    warning: bool
    gpu: str | None = None
    control: str | None = None
    uid: int | None = None
    pid: int | None = None
    command: str | None = None
    job: str | None = None
    lease: str | None = None
    old: str | None = None
    new: str | None = None
    reason: str | None = None
    result: str | None = None

    def message(self, hidden: Collection[str] = ()) -> AuditRecord:
        """The record as readers get it, without these fields. Not validated, as it is ours."""
        values = ((name, getattr(self, name)) for name in _ALL if name not in hidden)
        fields = {name: value for name, value in values if value is not None}
        return AuditRecord.model_construct(set(fields), **fields)

    def goes_on(self, said: dict[str, Any]) -> bool:
        """Whether this record and another one are successful sets under the same lease."""
        return (
            self.event == "set"
            and self.result == "ok" == said.get("result")
            and self.lease == said.get("lease")
        )


_ALL = tuple(field.name for field in fields(Record))


class AuditLog:
    """Adds records, keeps the newest, and counts all."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.failing: dict[tuple[str | None, str | None], int] = {}
        self._records: dict[int, Record] = {}
        self._numbers: defaultdict[int | None, deque[int]] = defaultdict(deque)
        self._newest: dict[tuple[str | None, str | None], Record] = {}
        self._warnings: dict[str, Record] = {}
        self._next = 1

    def note(self, now_ns: int, note: Note) -> int:
        """Something happened: returns how often, with this time, since the record of it began."""
        said = note.fields
        where = said.get("gpu"), said.get("control")
        self._follow(now_ns, note.event, where)
        before = self._newest.get(where)
        if note.event == "set" and before is not None and before.goes_on(said):
            return self._again(before, now_ns, said["new"])
        fields: dict[str, Any] = {name: said[name] for name in _FIELDS if name in said}
        if "error" in said:
            fields["result"] = said["error"]
        key = f"{note.event} {fields}" if note.warning else ""
        before = self._warnings.get(key)
        if before is not None and self._lasts(before, now_ns):
            return self._again(before, now_ns, before.new)
        record = Record(self._next, now_ns, now_ns, 1, note.event, note.warning, **fields)
        self._count(record)
        self._next += 1
        self._newest[where] = record
        self._keep(record)
        if note.warning:
            self._warnings[key] = record
            if len(self._warnings) > 2 * KEPT:
                found = self._warnings.items()
                self._warnings = {key: one for key, one in found if self._lasts(one, now_ns)}
        return 1

    def _keep(self, record: Record) -> None:
        self._records[record.number] = record
        self._numbers[record.uid].append(record.number)
        if len(self._records) > KEPT:
            some = (one for one in self._numbers.values() if one)
            most = max(some, key=lambda one: (len(one), -one[0]))
            del self._records[most.popleft()]

    def _follow(self, t_ns: int, event: str, where: tuple[str | None, str | None]) -> None:
        if event == "restore_failed":
            self.failing.setdefault(where, t_ns)
        elif event in ("lease_ended", "restored", "restore_forgotten"):
            self.failing.pop(where, None)

    def _again(self, record: Record, now_ns: int, new: str | None) -> int:
        record.count += 1
        record.last_ns, record.new = now_ns, new
        self._count(record)
        return record.count

    def _lasts(self, record: Record, now_ns: int) -> bool:
        """Whether a repetition belongs to this record: it is kept, and not long ago."""
        return record.number in self._records and now_ns - record.last_ns < REPEATED_NS

    def _count(self, record: Record) -> None:
        control, result = record.control or "", record.result or ""
        if record.event in ("set", "restore"):
            self.counts[record.event, control, "ok" if result == "ok" else "failed"] += 1
        elif record.event == "lease_ended":
            self.counts["lease_ended", record.reason or "", result] += 1
        elif record.event == "outside_change":
            self.counts["outside_change", control, result] += 1
        elif record.event in ("restore_failed", "lease_expired"):
            self.counts[record.event, control] += 1

    def refused(self, code: str) -> None:
        """Handles a refused set or acquire; only some become records."""
        self.counts["refusal", code] += 1

    def total(self, event: str) -> Iterator[tuple[tuple[str, ...], int]]:
        """The counts of an event, by the values that distinguish its kinds."""
        for key, count in sorted(self.counts.items()):
            if key[0] == event:
                yield key[1:], count

    def newest(self, after: int, before: int, limit: int) -> list[Record]:
        """The newest records with a number between these two, at most `limit`, oldest first."""
        found: list[Record] = []
        for record in reversed(self._records.values()):
            if record.number <= after or len(found) == limit:
                break
            if record.number < before:
                found.append(record)
        return found[::-1]

    @property
    def state(self) -> tuple[int, int]:
        """Changes whenever the records do."""
        return self._next, self.counts.total()

    @property
    def dropped(self) -> int:
        """Number of records that are no longer kept."""
        return self._next - 1 - len(self._records)

    def dump(self) -> list[dict[str, Any]]:
        """All records, for the next zeusd."""
        return [asdict(record) for record in self._records.values()]

    def load(self, records: Iterable[dict[str, Any]]) -> None:
        """Adds the records that an earlier zeusd of this boot has dumped, before the present ones.

        Raises:
            TypeError, ValueError: These are not records.
        """
        valid = [AuditRecord.model_validate(fields) for fields in records]
        earlier, present = [Record(**vars(one)) for one in valid], [*self._records.values()]
        last = max((record.number for record in earlier), default=0)
        for record in present:
            record.number += last
        self._next += last
        self._records.clear()
        self._numbers.clear()
        self.failing.clear()
        for record in [*earlier, *present]:
            self._keep(record)
            self._follow(record.t_ns, record.event, (record.gpu, record.control))
