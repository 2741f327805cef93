"""Reads the ledger: energy by account between given instants, and the meters' total.

Sums by user or namespace over whole UTC days come from the table of days. The rest of a span, and
all other sums, come from the rows by bucket.
"""

from __future__ import annotations

import operator
import re
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise, starmap
from typing import NamedTuple

from zeus_common.units import DAY_S
from zeus_ipc.charging import Method
from zeus_ipc.requests import BUCKET_S
from zeusd.energy.split import IDLE, NOBODY, Account, Kind
from zeusd.ledger.store import BUCKETS_PER_DAY, METHODS


class By(str, Enum):
    """What to sum by."""

    USER = "user"
    JOB = "job"
    POD = "pod"
    NAMESPACE = "namespace"
    ACCOUNT = "account"
    PROCESS = "process"
    GPU = "gpu"
    TOTAL = "total"


OTHERS = "others"
"""The kind of the sum of accounts that a reader may not see individually."""


@dataclass(slots=True)
class Sum:
    """Energy of one account, or GPU, in one interval; microjoules and ns.

    Attributes:
        interval: Index of the interval.
        kind: An account's kind, `gpu`, `total` or OTHERS.
        name: The account's name, or a GPU's UUID.
        run: The account's run.
        uid: The user; NOBODY: none.
        active_uj, idle_uj: Energy while the GPU worked, and while the driver reported it as idle.
        ns: GPU time.
        begin_s: When a job got its first GPU, UTC; 0: not known.
        end_s: When it released the last one; 0: it has not, or not known.
        first_ms, last_ms: When it was charged first and last; 0: not known.
        limited_ns: Of a job or pod: time in which clocks were limited, by cause.
    """

    interval: int
    kind: str
    name: str = ""
    run: str = ""
    uid: int = NOBODY
    active_uj: int = 0
    idle_uj: int = 0
    lower_uj: int = 0
    upper_uj: int = 0
    ns: int = 0
    methods: set[str] = field(default_factory=set)
    begin_s: int = 0
    end_s: int = 0
    workload: str = ""
    first_ms: int = 0
    last_ms: int = 0
    limited_ns: dict[str, int] = field(default_factory=dict)


class UsageAnswer(NamedTuple):
    """The result of a query."""

    sums: list[Sum]
    metered_uj: list[int]
    settled_ms: int = 0


BUCKETS = 10 * BUCKETS_PER_DAY
"""Buckets that are summed at a time, some milliseconds."""

MAX_ANSWER = 20_000
"""Sums in one answer, over all its pages: about 10 MB."""


class TooManySums(Exception):
    """The answer would be too long; the text is one sentence."""

    def __init__(self) -> None:
        super().__init__(
            f"those are over {MAX_ANSWER} sums, the most that zeusd returns; ask for a shorter "
            "time, or by user"
        )


class _Row(NamedTuple):
    """A group of rows of the ledger."""

    account: int
    gpu: int
    method: int
    active_uj: int
    idle_uj: int
    below_uj: int
    above_uj: int
    ns: int
    first_ms: int = 0
    last_ms: int = 0


_Rows = Iterator["_Row | None"]


class Reader:
    """Answers questions about a ledger.

    Args:
        gpus: Only of these GPUs; empty: of all.
    """

    def __init__(self, connection: sqlite3.Connection, gpus: Sequence[str] = ()) -> None:
        self._db = connection
        self._of = ""
        if gpus:
            ids = [
                key for key, uuid in connection.execute("SELECT id, uuid FROM gpu") if uuid in gpus
            ]
            self._of = f" AND gpu IN ({', '.join(map(str, ids))})"

    def usage(
        self,
        edges: Sequence[int],
        by: By,
        reader: int | None,
        uid: int | None = None,
        name: str = "",
        by_method: bool = False,
    ) -> Generator[None, None, UsageAnswer]:
        """Sums by interval. Yields now and then, so that others can have their turn.

        Args:
            edges: Edges of the intervals, UTC seconds, ascending, multiples of BUCKET_S.
            reader: The user who may see only the own energy, and one sum of all others'; None: all
                is itemized.
            uid: Only this user; `metered_uj` still includes all.
            name: Only the job or pod with this name, or the run with this SLUID.
            by_method: Return one sum per method, so that bounds are of one kind.

        Raises:
            TooManySums: The answer would be too long.
        """
        accounts: dict[int, _KnownAccounts] = {0: _KnownAccounts(IDLE, 0)}
        kept_s = self._kept_s()
        # Older energy is available by whole UTC days only.
        edges = [edge if edge >= kept_s else edge // DAY_S * DAY_S for edge in edges]
        totals: list[Sum] = []
        metered: list[int] = []
        gpus: dict[int, str] = dict(self._db.execute("SELECT id, uuid FROM gpu").fetchall())
        for interval, (begin_s, end_s) in enumerate(pairwise(edges)):
            sums: dict[tuple[object, ...], Sum] = {}
            rows = self._rows(begin_s, end_s, by, name, kept_s)
            if by is By.PROCESS:
                rows = self._undivided(rows, begin_s, end_s)
                self._add_processes(sums, interval, (begin_s, end_s), reader, uid, by_method)
            for number, row in enumerate(rows):
                # Rows until others have their turn.
                if row is None or number % 256 == 0:
                    yield
                    if len(totals) + len(sums) > MAX_ANSWER:
                        raise TooManySums
                if row is None:
                    continue
                known = self._known(row.account, accounts)
                account = charged = known.account
                if by is not By.ACCOUNT and _OWN.get(by) is not account.kind:
                    charged = self._known(known.parent, accounts).account
                if (uid is not None and account.uid != uid) or (
                    name and name not in (charged.name, charged.run)
                ):
                    continue
                if (uid is not None or name) and reader not in (None, charged.uid):
                    continue  # the sum of a single other user would reveal that user's energy
                kind, label, run, owner = _label(charged, by, gpus.get(row.gpu, ""), reader)
                method = row.method if by_method else None
                one = sums.setdefault(
                    (kind, label, run, owner, method), Sum(interval, kind, label, run, owner)
                )
                _add(one, row, exact=by is By.GPU)
            totals += sorted(sums.values(), key=lambda one: -(one.active_uj + one.idle_uj))
            metered.append(self._metered(begin_s, end_s))
        if by in (By.JOB, By.POD):
            self._add_times(totals)
            if not by_method:
                self._add_limited(totals, edges)
        return UsageAnswer(totals, metered, self._settled_ms())

    def begins_s(self) -> int | None:
        """Start of the ledger's oldest row, UTC; None: it is empty."""
        (day,) = self._db.execute("SELECT min(day) FROM day").fetchone()
        return None if day is None else int(day) * DAY_S

    # --------------------------------------------------------------------------------- internals

    def _settled_ms(self) -> int:
        (settled_ms,) = self._db.execute(
            "SELECT min(t_ns + offset_ns) / 1000000 FROM position JOIN clock USING (boot) "
            f"WHERE true{self._of}"
        ).fetchone()
        return settled_ms or 0

    def _undivided(self, rows: _Rows, begin_s: int, end_s: int) -> _Rows:
        """Rows of parents, without the part known by process."""
        left: dict[tuple[int, int], _Row] = {}
        for row in rows:
            if row is None:
                yield None
                continue
            known = left.get((row.account, row.method))
            if known is not None:  # of another part of the span
                row = _Row(*row[:3], *map(operator.add, row[3:], known[3:]))
            left[row.account, row.method] = row
        for parent, method, *amounts in self._db.execute(
            f"SELECT parent, method, {_SUMS} FROM divided JOIN account ON id = account "
            f"WHERE bucket >= ? AND bucket < ?{self._of} GROUP BY parent, method",
            (begin_s // BUCKET_S, end_s // BUCKET_S),
        ):
            row = left[parent, method]
            left[parent, method] = _Row(
                parent,
                0,
                method,
                *(one - less for one, less in zip(row[3:8], amounts, strict=True)),
            )
        yield from (row for row in left.values() if any(row[3:]))

    def _add_processes(
        self,
        sums: dict[tuple[object, ...], Sum],
        interval: int,
        span: tuple[int, int],
        reader: int | None,
        uid: int | None,
        by_method: bool,
    ) -> None:
        """Sums of processes, with one sum for those that the reader may not see."""
        for key, pid, ticks, begin_s, kind, name, owner, method, *amounts in self._db.execute(
            "SELECT process.id, pid, start_ticks, process.begin_s, kind, name, uid, method, "
            f"{_SUMS}, {_SPAN} FROM process_energy JOIN process ON process.id = process "
            "JOIN account ON account.id = process.account "
            f"WHERE bucket >= ? AND bucket < ?{self._of} GROUP BY process.id, method",
            (span[0] // BUCKET_S, span[1] // BUCKET_S),
        ):
            if uid is not None and owner != uid:
                continue
            one = Sum(interval, By.PROCESS.value, str(pid), str(ticks), owner, begin_s=begin_s)
            if kind != Kind.USER.value:
                one.workload = f"{kind} {name}"
            where: tuple[object, ...] = (By.PROCESS, key)
            if reader not in (None, owner):
                if uid is not None:
                    continue
                one, where = Sum(interval, OTHERS), (OTHERS, "", "", NOBODY)
            one = sums.setdefault((*where, method if by_method else None), one)
            _add(one, _Row(0, 0, method, *amounts), exact=False)

    def _kept_s(self) -> int:
        """First UTC day with rows by bucket."""
        (bucket,) = self._db.execute("SELECT min(bucket) FROM energy").fetchone()
        (day,) = self._db.execute("SELECT max(day) + 1 FROM day").fetchone()
        if bucket is None:
            return (day or 0) * DAY_S
        return int(bucket) // BUCKETS_PER_DAY * DAY_S

    def _known(self, key: int, known: dict[int, _KnownAccounts]) -> _KnownAccounts:
        """Reads an account by its row id: only the needed ones, as there may be a million."""
        accounts = known.get(key)
        if accounts is None:
            kind, name, run, uid, parent = self._db.execute(
                "SELECT kind, name, run, uid, parent FROM account WHERE id = ?", (key,)
            ).fetchone()
            accounts = known[key] = _KnownAccounts(Account(Kind(kind), name, run, uid), parent)
        return accounts

    def _rows(self, begin_s: int, end_s: int, by: By, name: str, kept_s: int) -> _Rows:
        """Rows of a span, and None where others can have their turn. For days before `kept_s` only
        sums exist."""
        if name:
            yield from self._of_account(begin_s // BUCKET_S, end_s // BUCKET_S, name)
            return
        first_day, last_day = -(-begin_s // DAY_S), end_s // DAY_S
        if by not in (By.USER, By.NAMESPACE, By.PROCESS, By.TOTAL):
            last_day = min(last_day, kept_s // DAY_S)
        if first_day >= last_day or self._of:
            yield from self._by_bucket(begin_s // BUCKET_S, end_s // BUCKET_S, by)
            return
        yield from self._by_bucket(begin_s // BUCKET_S, first_day * BUCKETS_PER_DAY, by)
        yield from self._by_day(first_day, last_day, by)
        yield from self._by_bucket(last_day * BUCKETS_PER_DAY, end_s // BUCKET_S, by)

    def _by_day(self, first: int, last: int, by: By) -> _Rows:
        if by is By.GPU:  # the owner is no longer known, nor whether the GPU was idle
            for gpu, uj in self._db.execute(
                "SELECT gpu, SUM(uj) FROM meter WHERE bucket >= ? AND bucket < ? GROUP BY gpu",
                (first * BUCKETS_PER_DAY, last * BUCKETS_PER_DAY),
            ):
                yield _Row(0, gpu, METHODS.index(Method.NONE), uj, 0, 0, 0, 0)
            return
        for row in self._db.execute(
            f"SELECT account, 0, method, {_SUMS} FROM day WHERE day >= ? AND day < ? "
            "GROUP BY account, method",
            (first, last),
        ):
            yield _Row(*row)

    def _by_bucket(self, first: int, last: int, by: By) -> _Rows:
        if by in (By.JOB, By.POD, By.ACCOUNT):
            query = f"SELECT account, 0, method, {_SUMS}, {_SPAN} FROM energy"
            group = "account, method"
        else:  # many jobs of few users: SQLite sums them by parent
            gpu = "gpu" if by is By.GPU else "0"
            query = (
                f"SELECT parent, {gpu}, method, {_SUMS} FROM energy JOIN account ON id = account"
            )
            group = f"parent, method{', gpu' if by is By.GPU else ''}"
        oldest, newest = self._db.execute("SELECT min(bucket), max(bucket) FROM energy").fetchone()
        if oldest is None:
            return
        first, last = max(first, oldest), min(last, newest + 1)
        for begin in range(first, last, BUCKETS):
            yield None
            rows = self._db.execute(
                f"{query} WHERE bucket >= ? AND bucket < ?{self._of} GROUP BY {group}",
                (begin, min(begin + BUCKETS, last)),
            )
            yield from starmap(_Row, rows.fetchall())

    def _of_account(self, first: int, last: int, name: str) -> _Rows:
        """Rows of a job or pod; searches only the buckets in which it held a GPU."""
        is_run = _SLUID.fullmatch(name) is not None
        which = "run = ? AND run GLOB 's*'" if is_run else "name = ?"
        spans = self._db.execute(
            "SELECT id, begin_s, end_s, id IN (SELECT account FROM holding WHERE end_ns IS NULL) "
            f"FROM account WHERE {which} AND kind IN ('job', 'pod')",
            (name,),
        ).fetchall()
        for key, begin_s, end_s, holds in spans:
            # A step of the clock may have shifted buckets by an hour.
            yield None
            low = max(first, begin_s // BUCKET_S - 4)
            high = last if holds or not end_s else min(last, end_s // BUCKET_S + 5)
            for row in self._db.execute(
                f"SELECT account, 0, method, {_SUMS}, {_SPAN} FROM energy WHERE bucket >= ? "
                f"AND bucket < ? AND account = ?{self._of} GROUP BY method",
                (low, high, key),
            ):
                yield _Row(*row)

    def _metered(self, begin_s: int, end_s: int) -> int:
        (metered_uj,) = self._db.execute(
            f"SELECT coalesce(sum(uj), 0) FROM meter WHERE bucket >= ? AND bucket < ?{self._of}",
            (begin_s // BUCKET_S, end_s // BUCKET_S),
        ).fetchone()
        return int(metered_uj)

    def _add_times(self, sums: Sequence[Sum]) -> None:
        for used in sums:
            if used.kind in (Kind.JOB.value, Kind.POD.value):
                used.begin_s, used.end_s, holds = self._db.execute(
                    "SELECT begin_s, end_s, id IN (SELECT account FROM holding WHERE end_ns IS "
                    "NULL) FROM account WHERE kind = ? AND name = ? AND run = ? AND uid = ?",
                    (used.kind, used.name, used.run, used.uid),
                ).fetchone()
                if holds:
                    used.end_s = 0

    def _add_limited(self, sums: Sequence[Sum], edges: Sequence[int]) -> None:
        for used in sums:
            if used.kind in (Kind.JOB.value, Kind.POD.value):
                begin_s, end_s = edges[used.interval : used.interval + 2]
                rows = self._db.execute(
                    "SELECT cause, sum(ns) FROM account JOIN limited ON account = id WHERE kind = "
                    "? AND name = ? AND run = ? AND uid = ? AND bucket >= ? AND bucket < ? "
                    "GROUP BY cause",
                    (
                        used.kind,
                        used.name,
                        used.run,
                        used.uid,
                        begin_s // BUCKET_S,
                        end_s // BUCKET_S,
                    ),
                )
                used.limited_ns = dict(rows.fetchall())


_SLUID = re.compile(r"s[0-9A-HJKMNP-TV-Z]{13}")


class _KnownAccounts(NamedTuple):
    account: Account
    parent: int


_SUMS = "SUM(active_uj), SUM(idle_uj), SUM(below_uj), SUM(above_uj), SUM(ns)"
_SPAN = f"MIN(bucket * {BUCKET_S * 1000} + first_ms), MAX(bucket * {BUCKET_S * 1000} + last_ms)"

_OWN: dict[By, Kind] = {By.JOB: Kind.JOB, By.POD: Kind.POD}
_NOBODYS = (Kind.IDLE, Kind.UNATTRIBUTED)


def _label(charged: Account, by: By, uuid: str, reader: int | None) -> tuple[str, str, str, int]:
    if by is By.GPU:
        return By.GPU.value, uuid, "", NOBODY
    if by is By.TOTAL:
        kind = charged.kind.value if charged.kind in _NOBODYS else By.TOTAL.value
        return kind, "", "", NOBODY
    if reader is not None and charged.kind not in _NOBODYS and charged.uid != reader:
        return OTHERS, "", "", NOBODY
    return charged.kind.value, charged.name, charged.run, charged.uid


def _add(one: Sum, row: _Row, exact: bool) -> None:
    """Adds a row. Only the assignment to an account is uncertain, not the GPU's energy."""
    estimate_uj = row.active_uj + row.idle_uj
    one.active_uj += row.active_uj
    one.idle_uj += row.idle_uj
    one.lower_uj += estimate_uj - (0 if exact else row.below_uj)
    one.upper_uj += estimate_uj + (0 if exact else row.above_uj)
    one.ns += row.ns
    one.first_ms = min(one.first_ms or row.first_ms, row.first_ms)
    one.last_ms = max(one.last_ms, row.last_ms)
    method = METHODS[row.method]
    if method is not Method.NONE:
        one.methods.add(method.value)
