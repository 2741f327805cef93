"""Requests about the energy ledger, and permissions for them. The ledger is in the runtime."""

from __future__ import annotations

from functools import partial
from typing import Any

from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Held, LedgerState, LedgerTotal
from zeus_ipc.requests import NOBODY, Allocate, Deallocate, ForgetUser, GetUsage
from zeusd.core.effects import LedgerCall
from zeusd.core.model import Failure, Peer
from zeusd.core.pending import ClientState, Handler, RequestContext
from zeusd.core.policy import CoreSettings

ABSENT = Failure(
    ErrorCode.NOT_SUPPORTED,
    "this zeusd keeps no energy ledger; set a directory under [accounting] in zeusd.toml",
)


_NOBODYS = ("idle", "unattributed")


def sees_all(settings: CoreSettings, peer: Peer) -> bool:
    """Whether a user may see the energy of all users."""
    readers = settings.ledger
    return (
        readers.everybody
        or settings.access.is_admin(peer)
        or not readers.gids.isdisjoint(peer.groups)
    )


def for_reader(ledger: LedgerState, uid: int) -> LedgerState:
    """The ledger as an ordinary user may see it, with all other users as one sum."""
    own = [workload for workload in ledger.workloads if workload.uid == uid]
    return ledger.model_copy(
        update={
            "totals": _seen(ledger.totals, uid),
            "cpu_totals": _seen(ledger.cpu_totals, uid),
            "workloads": own,
            "held": [one if one.uid == uid else Held(gpu=one.gpu) for one in ledger.held],
        }
    )


def _seen(totals: list[LedgerTotal], uid: int) -> list[LedgerTotal]:
    shown: list[LedgerTotal] = []
    others = dict.fromkeys(_AMOUNTS, 0)
    for total in totals:
        if total.uid == uid or total.kind in _NOBODYS:
            shown.append(total)
        else:
            for amount in _AMOUNTS:
                others[amount] += getattr(total, amount)
    shown.append(LedgerTotal(kind="others", name="", uid=NOBODY, **others))
    return shown


_AMOUNTS = ("active_uj", "idle_uj", "lower_uj", "upper_uj")


class AccountingRequests:
    """Answers `allocate`, `deallocate`, `usage` and `forget_user`."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._node, self._out = context.node, context.out
        self.handlers: dict[type[Any], Handler] = {
            Allocate: context.for_admins("allocate GPUs", self._allocate),
            Deallocate: context.for_admins("allocate GPUs", self._ask),
            ForgetUser: context.for_admins("change the energy ledger", self._ask),
            GetUsage: self._usage,
        }

    def _allocate(self, connection: ClientState, request: Allocate) -> None:
        pending = self._context.track(connection, request)
        known = [uuid for uuid in pending.names if uuid in self._node.gpus]
        for uuid in pending.names:
            if uuid not in known:
                pending.put(uuid, self._node.unknown(uuid))

        def done(result: object) -> None:
            for uuid in known:
                pending.put(uuid, result)

        if known:
            asked = request.model_copy(update={"gpus": known})
            self._out.add(LedgerCall(self._out.ticket(done), asked))

    def _usage(self, connection: ClientState, request: GetUsage) -> None:
        peer = connection.peer
        reader = None if sees_all(self._node.settings, peer) else peer.uid
        self._ask(connection, request, reader)

    def _ask(
        self,
        connection: ClientState,
        request: Deallocate | ForgetUser | GetUsage,
        reader: int | None = None,
    ) -> None:
        ticket = self._out.ticket(partial(connection.answer, request.id))
        peer = connection.peer
        owner = self._node.owner_of(peer.uid)
        self._out.add(LedgerCall(ticket, request, reader, owner, peer.conn))
