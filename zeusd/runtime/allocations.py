"""Allocations of GPUs to jobs and pods: started and ended by request, or ended with a job's control
group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from zeus_ipc.replies import Held
from zeusd.energy.accountant import NEVER_NS, Fact, FactSpan
from zeusd.energy.split import Account, Claim, Kind
from zeusd.ledger.store import GpuAllocation, LedgerStore

GONE_NS = 10_000_000_000
"""A job ends when its control group has been absent for this long, because it may be recreated."""


@dataclass(slots=True, eq=False)
class _Open:
    """A holding that has not ended, and its span in the GPU's account."""

    holding: GpuAllocation
    span: FactSpan
    seen: bool
    gone_ns: int | None = None

    @property
    def groups(self) -> set[str]:
        """Control groups whose end ends it: Slurm names a job's group by its id or its SLUID."""
        account = self.holding.account
        return {self.holding.control_group, *([account.name] if account.kind is Kind.JOB else [])}


class Allocations:
    """The holdings of this boot. Each change is stored in the ledger before it takes effect."""

    def __init__(
        self, store: LedgerStore, add: Callable[[str, FactSpan], None], utc_s: Callable[[], int]
    ) -> None:
        self._store = store
        self._add = add
        self._utc_s = utc_s
        self._open: list[_Open] = []

    def recover(self) -> None:
        """Continues with the holdings that an earlier zeusd stored in this boot."""
        self._store.end_earlier_boots()
        for holding in self._store.holdings():
            opened = self._begun(holding)
            if holding.end_ns is not None:
                opened.span.end_ns = holding.end_ns
                self._open.remove(opened)

    def begin(
        self,
        uuids: Sequence[str],
        account: Account,
        weight: int,
        parts: int,
        control_group: str,
        t_ns: int,
    ) -> None:
        """Allocates GPUs: whole (weight 0), which ends every other holding, or in parts."""
        stale, held = [], set()
        for one in self._open:
            holding = one.holding
            if holding.uuid not in uuids:
                if _is_earlier_run(holding.account, account):
                    stale.append(one)
                continue
            if holding.account == account and bool(holding.weight) == bool(weight):
                held.add(holding.uuid)
            elif not weight or not holding.weight:
                stale.append(one)
        self._end(stale, t_ns)
        fresh = [uuid for uuid in uuids if uuid not in held]
        group = control_group or account.name
        if fresh:
            begun = self._store.begin(fresh, account, weight, parts, group, t_ns, self._utc_s())
            for holding in begun:
                self._begun(holding)

    def end(
        self, kind: Kind, name: str, run: str | None, uuids: Sequence[str], t_ns: int
    ) -> list[str]:
        """Ends a job's or pod's holdings. Returns the GPUs that it held."""
        ending = [
            one
            for one in self._open
            if (one.holding.account.kind, one.holding.account.name) == (kind, name)
            and run in (None, one.holding.account.run)
            and (not uuids or one.holding.uuid in uuids)
        ]
        self._end(ending, t_ns)
        return [one.holding.uuid for one in ending]

    @property
    def control_groups(self) -> set[str]:
        """Control groups whose end ends a holding."""
        return {name for one in self._open for name in one.groups}

    def present(self, groups: Iterable[str], t_ns: int) -> None:
        """Records which of `control_groups` exist, and ends holdings whose group no longer
        exists."""
        there = {*groups}
        new, gone = [], []
        for one in self._open:
            if not one.groups.isdisjoint(there):
                one.gone_ns = None
                if not one.seen:
                    new.append(one)
            elif one.seen:
                if one.gone_ns is None:
                    one.gone_ns = t_ns
                elif t_ns - one.gone_ns >= GONE_NS:
                    gone.append(one)
        if new:
            self._store.saw([one.holding.id for one in new])
            for one in new:
                one.seen = True
        for one in gone:
            assert one.gone_ns is not None
            self._end([one], one.gone_ns)

    def accounts(self) -> list[Account]:
        """Accounts that hold a GPU."""
        return [one.holding.account for one in self._open]

    def held(self) -> list[Held]:
        """What is held, by GPU."""
        return [
            Held(
                gpu=one.uuid,
                kind=one.account.kind.value,
                name=one.account.name,
                run=one.account.run,
                uid=one.account.uid,
                weight=one.weight,
                parts=one.parts,
                since_ns=one.begin_ns,
            )
            for one in sorted((one.holding for one in self._open), key=lambda one: one.uuid)
        ]

    def whole(self) -> set[str]:
        """GPUs that one job or pod holds as a whole."""
        return {one.holding.uuid for one in self._open if not one.holding.weight}

    def holder(self, uuid: str, account: Account) -> Account:
        """The holder of a GPU that an account stands for; else the account itself.

        Control groups name a job or pod differently from its holding.
        """
        names = {account.name, account.name.rpartition("/")[2]}
        for one in self._open:
            held = one.holding.account
            named = held.name == account.name or one.holding.control_group in names
            if one.holding.uuid == uuid and held.kind is account.kind and named:
                return held
        return account

    def named(self, account: Account) -> Account:
        """The job or pod that holds a GPU, found by its name in control groups; else the account
        itself."""
        uuids = {one.holding.uuid for one in self._open}
        holders = (self.holder(uuid, account) for uuid in sorted(uuids))
        return next((holder for holder in holders if holder != account), account)

    def _begun(self, holding: GpuAllocation) -> _Open:
        claim = Claim(holding.account, max(1, holding.weight), holding.parts)
        span = FactSpan(Fact.HOLDER, holding.begin_ns, NEVER_NS, claim)
        opened = _Open(holding, span, holding.seen)
        self._open.append(opened)
        self._add(holding.uuid, span)
        return opened

    def _end(self, ending: Sequence[_Open], t_ns: int) -> None:
        if ending:
            self._store.end([one.holding.id for one in ending], t_ns, self._utc_s())
            for one in ending:
                one.span.end_ns = t_ns
                self._open.remove(one)


def _is_earlier_run(held: Account, account: Account) -> bool:
    """Whether a job that starts was already started before: its epilog was lost."""
    same = (held.kind, held.name) == (account.kind, account.name)
    return same and held.kind is Kind.JOB and held.run != account.run
