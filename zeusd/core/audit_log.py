"""The newest records of the audit log, and counts of its events. Pure; the log has all records."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zeus_ipc.replies import AuditRecord
from zeusd.core.effects import Note

KEPT = 1000
"""Most records. Beyond it, the oldest record of the user with most records is dropped."""

PRIVATE = frozenset({"pid", "lease", "command", "job"})
"""Fields that only the record's user and administrators may see."""

REPEATED_NS = 600_000_000_000
"""A warning that comes again within this time after the last one is counted in the same record."""

_FIELDS = (
    *("gpu", "control", "uid", "pid", "command", "job", "lease"),
    *("old", "new", "reason", "result"),
)


class AuditLog:
    """Adds records, keeps the newest, and counts all.

    Attributes:
        owner_of: The user to whom a uid belongs: records of subordinate uids count as the owner's.
        complete_ns: Since when no record is missing.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.failing: dict[tuple[str | None, str | None], int] = {}
        self.owner_of: Callable[[int], int] = lambda uid: uid
        self.complete_ns = 0
        self._records: dict[int, AuditRecord] = {}
        self._numbers: defaultdict[int | None, deque[int]] = defaultdict(deque)
        # The number of the newest record of each control, and of each warning.
        self._newest: dict[tuple[str | None, str | None], int] = {}
        self._warnings: dict[str, int] = {}
        self._next = 1

    def note(self, now_ns: int, note: Note) -> int:
        """Something happened: returns how often, with this time, since the record of it began."""
        said = note.fields
        where = said.get("gpu"), said.get("control")
        self._follow(now_ns, note.event, where)
        before = self._records.get(self._newest.get(where, 0))
        if note.event == "set" and before is not None and _goes_on(before, said):
            return self._again(before, now_ns, said["new"])
        fields = {name: said[name] for name in _FIELDS if said.get(name) is not None}
        if "error" in said:
            fields["result"] = said["error"]
        key = f"{note.event} {fields}" if note.warning else ""
        before = self._records.get(self._warnings.get(key, 0))
        if before is not None and now_ns - before.last_ns < REPEATED_NS:
            return self._again(before, now_ns, before.new)
        fields |= {"number": self._next, "t_ns": now_ns, "last_ns": now_ns, "count": 1}
        fields |= {"event": note.event, "warning": note.warning}
        record = AuditRecord.model_construct(**fields)  # not validated, as it is ours
        self._count(record)
        self._next += 1
        self._newest[where] = record.number
        self._keep(record)
        if note.warning:
            self._warnings[key] = record.number
            if len(self._warnings) > 2 * KEPT:
                known = self._warnings.items()
                self._warnings = {key: one for key, one in known if one in self._records}
        return 1

    def _keep(self, record: AuditRecord) -> None:
        self._records[record.number] = record
        owner = None if record.uid is None else self.owner_of(record.uid)
        self._numbers[owner].append(record.number)
        if len(self._records) > KEPT:
            some = (numbers for numbers in self._numbers.values() if numbers)
            most = max(some, key=lambda one: (len(one), -one[0]))
            dropped = self._records.pop(most.popleft())
            self.complete_ns = max(self.complete_ns, dropped.last_ns)

    def _follow(self, t_ns: int, event: str, where: tuple[str | None, str | None]) -> None:
        if event == "restore_failed":
            self.failing.setdefault(where, t_ns)
        elif event in ("lease_ended", "restored", "restore_forgotten"):
            self.failing.pop(where, None)

    def _again(self, record: AuditRecord, now_ns: int, new: str | None) -> int:
        # Replies are frozen, and a copy would take as long as all else that a set does here.
        vars(record).update(count=record.count + 1, last_ns=now_ns, new=new)
        self._count(record)
        return record.count

    def _count(self, record: AuditRecord) -> None:
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

    def newest(self, after: int, before: int, limit: int) -> list[AuditRecord]:
        """The newest records with a number between these two, at most `limit`, oldest first."""
        records: list[AuditRecord] = []
        for record in reversed(self._records.values()):
            if record.number <= after or len(records) == limit:
                break
            if record.number < before:
                records.append(record)
        return records[::-1]

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
        return [record.model_dump(exclude_unset=True) for record in self._records.values()]

    def restarted(self, saved_ns: int, now_ns: int) -> None:
        """Adds the record of a restart: nothing is known of the time since the last save."""
        self.note(saved_ns, Note("restarted", {}))
        vars(self._records[self._next - 1]).update(last_ns=now_ns)

    def load(self, records: Iterable[dict[str, Any]], complete_ns: int = 0) -> None:
        """Adds the records that an earlier zeusd of this boot has dumped, before the present ones.

        Raises:
            ValueError: These are not records.
        """
        earlier = [AuditRecord.model_validate(fields) for fields in records]
        present = [*self._records.values()]
        last = max((record.number for record in earlier), default=0)
        self._next += last
        self._records.clear()
        self._numbers.clear()
        self._newest.clear()
        self._warnings.clear()
        self.failing.clear()
        self.complete_ns = max(self.complete_ns, complete_ns)
        for record in earlier:
            self._keep(record)
        for record in present:
            self._keep(record.model_copy(update={"number": record.number + last}))
        for record in self._records.values():
            self._follow(record.t_ns, record.event, (record.gpu, record.control))


def public(record: AuditRecord) -> AuditRecord:
    """A record as other users may see it."""
    names = record.model_fields_set - PRIVATE
    return AuditRecord.model_construct(**{name: getattr(record, name) for name in names})


def _goes_on(record: AuditRecord, said: dict[str, Any]) -> bool:
    """Whether a record and a new one are successful sets under the same lease."""
    return (
        record.event == "set"
        and record.result == "ok" == said.get("result")
        and record.lease == said.get("lease")
    )
