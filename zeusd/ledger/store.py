"""Writes the ledger: allocations, and settlements, each in one transaction with its position."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zeus_common.units import DAY_S, MS
from zeus_ipc.charging import BOUNDS, ChargeBasis, Method
from zeus_ipc.requests import BUCKET_S
from zeusd.energy.accountant import BUCKET_NS, ChargeRow, Position, Settlement
from zeusd.energy.split import NOBODY, Account, ChargedProcess, Kind, parent_of

BUCKETS_PER_DAY = DAY_S // BUCKET_S
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

METHODS = tuple(Method)
"""Methods by their number in rows."""

Estimates = dict[Method, ChargeRow]
"""The estimated parts of a sum, by method."""

_ADD = (
    "ON CONFLICT DO UPDATE SET active_uj = active_uj + excluded.active_uj, "
    "idle_uj = idle_uj + excluded.idle_uj, below_uj = below_uj + excluded.below_uj, "
    "above_uj = above_uj + excluded.above_uj, ns = ns + excluded.ns"
)
_ADD_SPAN = (
    f"{_ADD}, first_ms = min(first_ms, excluded.first_ms), last_ms = max(last_ms, excluded.last_ms)"
)


@dataclass(frozen=True, slots=True)
class GpuAllocation:
    """The allocation of one GPU.

    Attributes:
        weight: Its weight relative to other holders.
        parts: Number of parts of the GPU; 0: the sum of the weights.
        control_group: The job or pod whose control group's end ends it.
        end_ns: End; None: it has not ended.
    """

    id: int
    uuid: str
    account: Account
    weight: int
    parts: int
    control_group: str
    begin_ns: int
    end_ns: int | None
    seen: bool = False


class LedgerStore:
    """The ledger of one node, during one boot. Belongs to one thread.

    Every method may raise `sqlite3.Error`; the ledger is then as it was before the call.
    """

    def __init__(self, connection: sqlite3.Connection, boot: str) -> None:
        self._db = connection
        self._boot = boot
        self._gpus: dict[str, int] = {}
        self._accounts: dict[Account, int] = {}
        self._processes: dict[tuple[Account, ChargedProcess], int] = {}

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    # ---------------------------------------------------------------------------- allocations

    def begin(
        self,
        uuids: Iterable[str],
        account: Account,
        weight: int,
        parts: int,
        control_group: str,
        t_ns: int,
        utc_s: int,
    ) -> list[GpuAllocation]:
        """Records an allocation of GPUs. Returns one holding for each."""
        begun = []
        with self._transaction():
            self._db.execute(
                "UPDATE account SET begin_s = ? WHERE id = ? AND begin_s = 0",
                (utc_s, self._account(account)),
            )
            for uuid in uuids:
                row = self._db.execute(
                    "INSERT INTO holding (gpu, account, weight, parts, control_group, boot, "
                    "begin_ns) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        self._gpu(uuid),
                        self._account(account),
                        weight,
                        parts,
                        control_group,
                        self._boot,
                        t_ns,
                    ),
                )
                assert row.lastrowid is not None
                begun.append(
                    GpuAllocation(
                        row.lastrowid, uuid, account, weight, parts, control_group, t_ns, None
                    )
                )
        return begun

    def end(self, holdings: Iterable[int], t_ns: int, utc_s: int) -> None:
        """Ends holdings."""
        with self._transaction():
            for holding in holdings:
                self._db.execute(
                    "UPDATE holding SET end_ns = ? WHERE id = ? AND end_ns IS NULL", (t_ns, holding)
                )
                self._db.execute(
                    "UPDATE account SET end_s = max(begin_s, end_s, ?) WHERE id = "
                    "(SELECT account FROM holding WHERE id = ?)",
                    (utc_s, holding),
                )

    def saw(self, holdings: Iterable[int]) -> None:
        """Records that the control groups of these holders exist."""
        with self._transaction():
            self._db.executemany(
                "UPDATE holding SET seen = 1 WHERE id = ?", [(holding,) for holding in holdings]
            )

    def end_earlier_boots(self) -> None:
        """Ends allocations from before a reboot, at the end of what was charged."""
        with self._transaction():
            self._db.execute(
                "UPDATE account SET end_s = max(begin_s, end_s, coalesce((SELECT (max(bucket) + 1) "
                f"* {BUCKET_S} FROM energy WHERE energy.account = account.id), 0)) "
                "WHERE id IN (SELECT account FROM holding WHERE boot != ? AND end_ns IS NULL)",
                (self._boot,),
            )
            self._db.execute("DELETE FROM holding WHERE boot != ?", (self._boot,))

    def holdings(self) -> list[GpuAllocation]:
        """Present allocations, and those that ended after their GPU's position."""
        rows = self._db.execute(
            "SELECT holding.id, gpu.uuid, kind, name, run, uid, weight, parts, control_group, "
            "begin_ns, end_ns, seen FROM holding JOIN gpu ON gpu.id = holding.gpu "
            "JOIN account ON account.id = holding.account "
            "LEFT JOIN position ON position.gpu = holding.gpu "
            "WHERE holding.boot = ? AND (end_ns IS NULL OR position.boot IS NOT holding.boot "
            "OR end_ns > position.t_ns) ORDER BY holding.id",
            (self._boot,),
        )
        return [
            GpuAllocation(
                key,
                uuid,
                Account(Kind(kind), name, run, uid),
                weight,
                parts,
                group,
                begin,
                end,
                bool(seen),
            )
            for key, uuid, kind, name, run, uid, weight, parts, group, begin, end, seen in rows
        ]

    # ----------------------------------------------------------------------------- settlements

    def totals(self) -> dict[Account, ChargeRow]:
        """Charges of users, namespaces and other parent accounts since the ledger began, in order
        of first appearance."""
        rows = self._db.execute(
            "SELECT kind, name, run, uid, sum(active_uj), sum(idle_uj), sum(below_uj), "
            "sum(above_uj), sum(ns) FROM total JOIN account ON account.id = total.account "
            "GROUP BY account.id ORDER BY account.id"
        )
        return {
            Account(Kind(kind), name, run, uid): _row(*amounts)
            for kind, name, run, uid, *amounts in rows
        }

    def estimates(self) -> dict[Account, Estimates]:
        """The estimated part of `totals`."""
        rows = self._db.execute(
            "SELECT kind, name, run, uid, method, active_uj, idle_uj, below_uj, above_uj, ns "
            "FROM estimate JOIN account ON account.id = estimate.account"
        )
        estimates: dict[Account, Estimates] = {}
        for kind, name, run, uid, method, *amounts in rows:
            account = Account(Kind(kind), name, run, uid)
            estimates.setdefault(account, {})[METHODS[method]] = _row(*amounts)
        return estimates

    def used(self, kind: Kind, name: str, uid: int) -> Estimates:
        """Charges of all runs of a job or pod by method, as far as rows are kept."""
        rows = self._db.execute(
            "SELECT method, sum(active_uj), sum(idle_uj), sum(below_uj), sum(above_uj), "
            "sum(energy.ns) FROM account JOIN energy ON energy.account = account.id "
            "WHERE kind = ? AND name = ? AND uid = ? AND begin_s > 0 "
            f"AND bucket >= begin_s / {BUCKET_S} - 4 GROUP BY method",
            (kind.value, name, uid),
        )
        return {METHODS[method]: _row(*amounts) for method, *amounts in rows}

    def unused(self) -> list[tuple[str, str, str, int, int]]:
        """Energy of each GPU that was not charged, or that it drew while held and idle.

        Returns:
            UUID, kind (`idle`, `unattributed`, or empty for a holder), reason, energy, and the part
            of it while the GPU was idle; microjoules.
        """
        rows = self._db.execute(
            "SELECT coalesce(uuid, '') AS gpu_uuid, "
            "CASE WHEN kind IN ('idle', 'unattributed') THEN kind ELSE '' END AS what, "
            "CASE kind WHEN 'unattributed' THEN name ELSE '' END AS reason, "
            "sum(active_uj + idle_uj), sum(idle_uj) FROM total "
            "JOIN account ON account.id = total.account LEFT JOIN gpu ON gpu.id = total.gpu "
            "GROUP BY gpu_uuid, what, reason"
        )
        return rows.fetchall()

    def counted(self) -> dict[str, int]:
        """Energy counted by each GPU's meter since the ledger began, microjoules."""
        rows = self._db.execute("SELECT uuid, counted_uj FROM position JOIN gpu ON gpu.id = gpu")
        return dict(rows.fetchall())

    def positions(self) -> dict[str, Position]:
        """Start of each GPU's next settlement; without positions of an earlier boot."""
        rows = self._db.execute(
            "SELECT uuid, t_ns, energy_uj FROM position JOIN gpu ON gpu.id = gpu WHERE boot = ?",
            (self._boot,),
        )
        return {uuid: Position(t_ns, energy_uj) for uuid, t_ns, energy_uj in rows}

    def offset_ns(self) -> int | None:
        """UTC minus CLOCK_MONOTONIC, as last stored in this boot."""
        row = self._db.execute("SELECT offset_ns FROM clock WHERE boot = ?", (self._boot,))
        first: tuple[int] | None = row.fetchone()
        return None if first is None else first[0]

    def settle(
        self, settlements: dict[str, Settlement], offset_ns: int, slept_ns: int | None = None
    ) -> None:
        """Stores settlements by GPU, with their new positions.

        Args:
            offset_ns: UTC minus CLOCK_MONOTONIC.
            slept_ns: CLOCK_BOOTTIME minus CLOCK_MONOTONIC; None: no rows by process are kept.
        """
        with self._transaction():
            for uuid, settlement in settlements.items():
                gpu = self._gpu(uuid)
                self._settle(gpu, settlement, offset_ns)
                if slept_ns is not None:
                    self._detail(gpu, settlement, offset_ns, slept_ns)
            self._db.execute("DELETE FROM clock WHERE boot != ?", (self._boot,))
            self._db.execute("INSERT OR REPLACE INTO clock VALUES (?, ?)", (self._boot, offset_ns))

    def _settle(self, gpu: int, settlement: Settlement, offset_ns: int) -> None:
        for key, row in settlement.rows.items():
            account, parent = self._account(key.account), self._account(parent_of(key.account))
            values = _values(key.method, row)
            self._add(
                "energy", key.bucket, gpu, account, *values, *_span(key.bucket, row, offset_ns)
            )
            self._add("day", key.bucket // BUCKETS_PER_DAY, parent, *values)
            self._add("total", parent, gpu, *values[1:])
            if BOUNDS[key.method] is not ChargeBasis.EXACT:
                self._add("estimate", parent, *values)
        for (bucket, owner, cause), ns in settlement.limited.items():
            self._db.execute(
                "INSERT INTO limited VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET ns = ns + "
                "excluded.ns",
                (self._account(owner), bucket, cause, ns),
            )
        counted_uj = 0
        for bucket, drawn_uj in settlement.metered.items():
            counted_uj += drawn_uj
            self._db.execute(
                "INSERT INTO meter VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET uj = uj + "
                "excluded.uj",
                (bucket, gpu, drawn_uj),
            )
        t_ns, energy_uj = settlement.position
        self._db.execute(
            "DELETE FROM holding WHERE gpu = ? AND boot = ? AND end_ns <= ?",
            (gpu, self._boot, t_ns),
        )
        self._db.execute(
            "INSERT INTO position VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "boot = excluded.boot, t_ns = excluded.t_ns, energy_uj = excluded.energy_uj, "
            "counted_uj = counted_uj + excluded.counted_uj",
            (gpu, self._boot, t_ns, energy_uj, counted_uj),
        )

    def _detail(self, gpu: int, settlement: Settlement, offset_ns: int, slept_ns: int) -> None:
        booted_s = (offset_ns - slept_ns) // 1_000_000_000
        for key, row in settlement.divided.items():
            account = self._account(key.account)
            self._add("divided", key.bucket, gpu, account, *_values(key.method, row))
        for detail, row in settlement.processes.items():
            process = self._process(detail.account, detail.process, booted_s)
            values = *_values(detail.method, row), *_span(detail.bucket, row, offset_ns)
            self._add("process_energy", detail.bucket, gpu, process, *values)

    def _add(self, table: str, *values: int) -> None:
        """Adds amounts to a row."""
        places = ", ".join("?" * len(values))
        add = _ADD_SPAN if table in ("energy", "process_energy") else _ADD
        self._db.execute(f"INSERT INTO {table} VALUES ({places}) {add}", values)

    # --------------------------------------------------------------------------------- retention

    def expire(self, utc_s: int, bucket_days: int, day_days: int, process_days: int = 0) -> None:
        """Deletes rows older than their retention."""
        today = utc_s // DAY_S
        (earlier,) = self._db.execute("SELECT max(day) FROM day WHERE day < ?", (today,)).fetchone()
        # A clock that is years ahead for some hours, as at boot, must not empty the ledger: 30 days
        # after the last energy, rows expire as if there were no more.
        today = min(today, today if earlier is None else earlier + 30)
        rows_day, sums_day = today - bucket_days, today - day_days
        details_day = today - min(process_days, bucket_days)
        with self._transaction():
            for table in ("process_energy", "divided"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE bucket < ?", (details_day * BUCKETS_PER_DAY,)
                )
            self._db.execute(
                "DELETE FROM process WHERE id NOT IN (SELECT process FROM process_energy)"
            )
            self._processes.clear()
            for table in ("energy", "limited"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE bucket < ?", (rows_day * BUCKETS_PER_DAY,)
                )
            self._db.execute("DELETE FROM meter WHERE bucket < ?", (sums_day * BUCKETS_PER_DAY,))
            self._db.execute("DELETE FROM day WHERE day < ?", (sums_day,))
            # Only its children refer to a parent until the first of them is charged, so delete
            # children first.
            for ids in (
                "id != parent",
                "id NOT IN (SELECT parent FROM account WHERE id != parent)",
            ):
                self._db.execute(
                    f"DELETE FROM account WHERE {ids} AND id NOT IN (SELECT account FROM energy) "
                    "AND id NOT IN (SELECT account FROM total) "
                    "AND id NOT IN (SELECT account FROM holding) "
                    "AND id NOT IN (SELECT account FROM process)"
                )
            self._accounts.clear()

    def forget(self, uid: int) -> int:
        """Replaces a user by a random number; all sums remain. Returns the number of rows
        changed."""
        alias = -2 - secrets.randbelow(2**62)
        with self._transaction():
            changed = self._db.execute(
                "UPDATE account SET uid = ?, name = CASE kind WHEN 'user' THEN name ELSE "
                "lower(hex(randomblob(8))) END, run = '' WHERE uid = ?",
                (alias, uid),
            ).rowcount
            self._accounts.clear()
            self._processes.clear()
        return changed

    # --------------------------------------------------------------------------------- internals

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # The row may have been inserted just now.
            self._accounts.clear()
            self._gpus.clear()
            self._processes.clear()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _gpu(self, uuid: str) -> int:
        known = self._gpus.get(uuid)
        if known is None:
            self._db.execute("INSERT OR IGNORE INTO gpu (uuid) VALUES (?)", (uuid,))
            (known,) = self._db.execute("SELECT id FROM gpu WHERE uuid = ?", (uuid,)).fetchone()
            self._gpus[uuid] = known
        return known

    def _process(self, account: Account, process: ChargedProcess, booted_s: int) -> int:
        known = self._processes.get((account, process))
        if known is None:
            if len(self._processes) >= MAX_KNOWN:
                self._processes.clear()
            values = (self._account(account), self._boot, *process)
            self._db.execute(
                "INSERT OR IGNORE INTO process (account, boot, pid, start_ticks, begin_s) "
                "VALUES (?, ?, ?, ?, ?)",
                (*values, booted_s + process.start_ticks // TICKS_PER_S),
            )
            (known,) = self._db.execute(
                "SELECT id FROM process WHERE account = ? AND boot = ? AND pid = ? "
                "AND start_ticks = ?",
                values,
            ).fetchone()
            self._processes[account, process] = known
        return known

    def _account(self, account: Account) -> int:
        known = self._accounts.get(account)
        if known is not None:
            return known
        parent = parent_of(account)
        values = (account.kind.value, account.name, account.run, account.uid)
        find = "SELECT id FROM account WHERE kind = ? AND name = ? AND run = ? AND uid = ?"
        row = self._db.execute(find, values).fetchone()
        if row is None:
            above = None if parent == account else self._account(parent)
            inserted = self._db.execute(
                "INSERT INTO account (kind, name, run, uid, parent) VALUES (?, ?, ?, ?, ?)",
                (*values, -1 if above is None else above),
            )
            row = (inserted.lastrowid,)
            if above is None:
                self._db.execute("UPDATE account SET parent = id WHERE id = ?", row)
        if len(self._accounts) >= MAX_KNOWN:
            self._accounts.clear()
        self._accounts[account] = int(row[0])
        return int(row[0])


def _values(method: Method, row: ChargeRow) -> tuple[int, ...]:
    """The columns of a row from its method on."""
    estimate_uj = row.active_uj + row.idle_uj
    return (
        METHODS.index(method),
        row.active_uj,
        row.idle_uj,
        estimate_uj - row.lower_uj,
        row.upper_uj - estimate_uj,
        row.ns,
    )


def _span(bucket: int, row: ChargeRow, offset_ns: int) -> tuple[int, int]:
    """When a row was charged first and last, ms from its bucket's beginning."""
    offset_ns -= bucket * BUCKET_NS
    return (row.begin_ns + offset_ns) // MS, -(-(row.end_ns + offset_ns) // MS)


def _row(active_uj: int, idle_uj: int, below_uj: int, above_uj: int, ns: int) -> ChargeRow:
    estimate_uj = active_uj + idle_uj
    return ChargeRow(active_uj, idle_uj, estimate_uj - below_uj, estimate_uj + above_uj, ns)


MAX_KNOWN = 4096
"""Accounts whose row ids are cached."""

assert NOBODY == -1, "random numbers of erased users are below it"
