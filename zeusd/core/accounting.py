"""Requests about the energy ledger, and who may make them. The ledger itself is in the runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Done, Held, LedgerState, LedgerTotal
from zeus_ipc.requests import NOBODY, Allocate, Deallocate, ForgetUser, GetUsage
from zeus_ipc.wire import Message
from zeusd.core.effects import LedgerCall
from zeusd.core.model import Failure, Peer
from zeusd.core.node import NodeState
from zeusd.core.outbox import Outbox
from zeusd.core.pending import ClientState, PerGpu
from zeusd.core.policy import Settings

Handler = Callable[[ClientState, Any], None]

ABSENT = Failure(
    ErrorCode.NOT_SUPPORTED,
    "this zeusd keeps no energy ledger; set a directory under [accounting] in zeusd.toml",
)


_NOBODYS = ("idle", "unattributed")


def sees_all(settings: Settings, peer: Peer) -> bool:
    """Whether a user may see the energy of all users."""
    readers = settings.ledger
    return (
        readers.everybody
        or settings.access.is_admin(peer)
        or not readers.gids.isdisjoint(peer.groups)
    )


def for_reader(ledger: LedgerState, uid: int) -> LedgerState:
    """The ledger as an ordinary user may see it, with all other users as one sum."""
    own = [one for one in ledger.workloads if one.uid == uid]
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

    def __init__(
        self,
        node: NodeState,
        outbox: Outbox,
        track: Callable[..., PerGpu],
        for_admins: Callable[[str, Handler], Handler],
    ) -> None:
        self._node = node
        self._out = outbox
        self._track = track
        self.handlers: dict[type[Any], Handler] = {
            Allocate: for_admins("allocate GPUs", self._allocate),
            Deallocate: for_admins("allocate GPUs", self._ask),
            ForgetUser: for_admins("change the energy ledger", self._ask),
            GetUsage: self._usage,
        }

    def _allocate(self, connection: ClientState, request: Allocate) -> None:
        pending = self._track(connection, request)
        known = []
        for uuid in pending.gpus():
            if uuid in self._node.gpus:
                known.append(uuid)
            else:
                pending.fail(uuid, self._node.unknown(uuid))

        def done(result: object) -> None:
            for uuid in known:
                if isinstance(result, Failure):
                    pending.fail(uuid, result)
                else:
                    pending.succeed(uuid, Done())

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
        ticket = self._out.ticket(partial(self._answer, connection, request.id))
        peer = connection.peer
        self._out.add(LedgerCall(ticket, request, reader, peer.uid, peer.conn))

    def _answer(self, connection: ClientState, request_id: int, result: object) -> None:
        if isinstance(result, Failure):
            connection.refuse(self._out, request_id, result)
        else:
            assert isinstance(result, Message)
            connection.reply(self._out, request_id, result)
