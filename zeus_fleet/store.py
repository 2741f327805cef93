"""The store: etcd, through aetcd (the extra `fleet`). Uses one endpoint at a time; the next one
after a failure.

Keys: `budget`, `leader`, `plan` and `plan/NUMBER` (parts of its grants), and for each node
`node/NAME` (heartbeat), `jobs/NAME` (its work) and `limits/NAME` (how to divide its grant), all
below one prefix. A plan is written in one transaction, which always includes `plan`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from zeus_fleet import wire
from zeus_fleet.allocator import Commit, Snapshot
from zeus_fleet.connection import Tls, check, connect
from zeus_fleet.messages import Budget, GrantPlan, NodeReport, NodeWork, StoreAnswer
from zeus_ipc.parsing import Malformed

PREFIX = "/zeus-fleet/"
TIMEOUT_S = 5.0
"""Time limit of one request: a change of etcd's leader takes about three seconds."""

MOST_PUT = 100
"""Most keys that one transaction writes: etcd accepts 128 operations."""

_REFUSED = "permission denied"
"""etcd's errors for a user without the role, or without a name."""

T = TypeVar("T")

log = logging.getLogger("zeus_fleet")


class StoreUnavailable(Exception):
    """No endpoint responded."""


class _Kept(Generic[T]):
    """A cached value that consists of one or more keys and is written as a whole.

    Args:
        names: Names of the keys; the first is written whenever any of them is.
        parse: Parses their contents; keys that do not exist are left out.
    """

    def __init__(self, names: Sequence[str], parse: Callable[[Sequence[bytes]], T]) -> None:
        self.names = names
        self.revision = 0
        self._parse = parse
        self._value: T | None = None

    def forget(self) -> None:
        """Invalidates the cache."""
        self.revision, self._value = 0, None

    def read(self, answer: Any) -> T | None:
        """The present value; None: there is none.

        Args:
            answer: etcd's reply to `FleetStore._if_moved`.
        """
        if not answer.succeeded:
            ranges = [response.response_range.kvs for response in answer.responses]
            self._value = (
                self._parse([kvs[0].value for kvs in ranges if kvs]) if ranges[0] else None
            )
            self.revision = ranges[0][0].mod_revision if ranges[0] else 0
        return self._value


class FleetStore:
    """The requests of agents, allocators and operators to etcd.

    Args:
        endpoints: `host:port` of members; the next is tried when one fails.
        prefix: Prefix of all keys.
        tls: None: connections are not encrypted.
        timeout_s: Time limit of one request to etcd.

    Raises:
        ValueError: An endpoint is not valid, or a TLS file cannot be used.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str = PREFIX,
        tls: Tls | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        try:
            import aetcd
            import grpc
        except ImportError:
            raise StoreUnavailable(
                'etcd needs the extra fleet: pip install "zeusd[fleet]"'
            ) from None
        check(endpoints, tls)
        self._tls = tls
        self._failures = (asyncio.TimeoutError, OSError, aetcd.ClientError, grpc.RpcError)
        self._endpoints = [*endpoints]
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._client: Any = None
        self._budget: _Kept[Budget] = _Kept(("budget",), lambda kept: wire.budget_from(kept[0]))
        self._plans: dict[str, _Kept[GrantPlan]] = {}
        self._unreadable: Mapping[str, str] = {}

    async def seek(self) -> None:
        """Finds an endpoint that responds, if any, for a single request."""
        for _ in self._endpoints:
            with contextlib.suppress(StoreUnavailable):
                await self._ask(lambda client: client.get(self._key("budget")))
                return

    async def close(self) -> None:
        """Closes the connection."""
        client, self._client = self._client, None
        # After a reconnection, etcd may have other contents under the same revisions.
        self._budget.forget()
        self._plans.clear()
        if client is not None:
            with contextlib.suppress(Exception):
                await client.close()

    # -------------------------------------------------------------------------------------- nodes

    async def newest_number(self, node: str) -> int:
        """The number of a node's newest heartbeat; 0 if there is none that can be read, and then
        writes one."""
        key = self._key(f"node/{node}")
        first = wire.number_key(0) + b"[-1,0,0,0,0,0]"

        async def ask(client: Any) -> int:
            make = client.transactions
            heartbeat = await client.get(key)
            revision = 0 if heartbeat is None else heartbeat.mod_revision
            if heartbeat is not None:
                with contextlib.suppress(Malformed):
                    return wire.heartbeat_from(heartbeat.value).number
            await client.transaction(
                compare=[make.mod(key) == revision], success=[make.put(key, first)], failure=[]
            )
            return 0

        return await self._ask(ask)

    async def beat(
        self, node: str, beat: NodeReport, works: tuple[NodeWork, ...] | None = None
    ) -> StoreAnswer | None:
        """Stores a heartbeat, and reads the node's data at the same revision.

        etcd sends plan and budget only if they were written since this object last read them.

        Args:
            node: Its name.
            beat: The heartbeat.
            works: Its work; None: unchanged.

        Returns:
            None if the store has a newer heartbeat of this node.
        """
        key, jobs = self._key(f"node/{node}"), self._key(f"jobs/{node}")
        kept = self._plans.setdefault(
            node,
            _Kept(
                ("plan", f"plan/{wire.piece_of(node)}"),
                lambda read: wire.plan_from(read[0], read[1:]),
            ),
        )
        known = True

        async def ask(client: Any) -> StoreAnswer | None:
            nonlocal known
            make = client.transactions
            work = [] if works is None else [make.put(jobs, wire.works_bytes(works))]
            stored, replies = await client.transaction(
                compare=[make.value(key) < wire.number_key(beat.number)],
                success=[
                    make.put(key, wire.heartbeat_bytes(beat)),
                    *work,
                    *(self._if_moved(make, one) for one in (kept, self._budget)),
                    make.get(self._key(f"limits/{node}")),
                ],
                failure=[make.get(key)],
            )
            if not stored:
                known = (
                    bool(replies[0]) and _read(replies[0][0][0], wire.heartbeat_from) is not None
                )
                return None
            plan, budget, limits = replies[-3:]
            return StoreAnswer(
                kept.read(plan.response_txn),
                self._budget.read(budget.response_txn),
                (_read(limits[0][0], wire.limits_from) if limits else None) or {},
            )

        answer = await self._ask(ask)
        if known:
            return answer
        # The store was recreated empty, or has something else in the heartbeat's place.
        await self.newest_number(node)
        return await self._ask(ask)

    # --------------------------------------------------------------------------------- allocators

    async def read(self) -> tuple[Snapshot | None, dict[str, int]]:
        """Reads everything at one revision, and the revision of each node; None without a
        budget."""
        folders = (self._key("plan/"), self._key("node/"), self._key("jobs/"))

        async def ask(client: Any) -> tuple[Snapshot | None, dict[str, int]]:
            make = client.transactions
            _, (leader, plan, budget, grants, beats, works) = await client.transaction(
                compare=[],
                success=[
                    make.get(self._key("leader")),
                    make.get(self._key("plan")),
                    make.get(self._key("budget")),
                    *(
                        make.get(folder, folder[:-1] + bytes([folder[-1] + 1]))
                        for folder in folders
                    ),
                ],
                failure=[],
            )
            if not budget:
                return None, {}
            unreadable: dict[str, str] = {}
            known = self._parsed(beats, wire.heartbeat_from, unreadable)
            reported = self._parsed(works, wire.works_from, unreadable)
            self._report(unreadable)
            snapshot = Snapshot(
                leader[0][1].create_revision if leader else 0,
                wire.budget_from(budget[0][0]),
                budget[0][1].mod_revision,
                wire.plan_from(plan[0][0], [value for value, _ in grants]) if plan else None,
                plan[0][1].mod_revision if plan else 0,
                {node: beat for node, beat in known.items() if beat.number},
                reported,
                unreadable,
            )
            return snapshot, {self._node(item): item.mod_revision for _, item in beats}

        return await self._ask(ask)

    async def commit(
        self, commit: Commit, revisions: dict[str, int], before: GrantPlan | None = None
    ) -> bool:
        """Writes a plan if its inputs have not changed.

        Args:
            commit: What to write and to compare.
            revisions: Revisions of the nodes, from the same `read` as the commit.
            before: The plan that it replaces, from the same `read`; equal parts are not written.
        """
        known, wanted = wire.pieces_of(before), wire.pieces_of(commit.plan)
        moved = {one: wanted.get(one, b"{}") for one in known.keys() | wanted.keys()}
        moved = {one: value for one, value in moved.items() if known.get(one) != value}

        async def ask(client: Any) -> bool:
            make = client.transactions
            done, _ = await client.transaction(
                compare=[
                    make.create(self._key("leader")) == commit.token,
                    make.mod(self._key("plan")) == commit.plan_revision,
                    make.mod(self._key("budget")) == commit.budget_revision,
                    *(
                        make.mod(self._key(f"node/{node}")) == revisions.get(node, 0)
                        for node in commit.heartbeats
                    ),
                ],
                success=[
                    make.put(self._key("plan"), wire.plan_bytes(commit.plan)),
                    *(make.put(self._key(f"plan/{one}"), value) for one, value in moved.items()),
                ],
                failure=[],
            )
            return bool(done)

        return await self._ask(ask)

    async def advise(self, limits_mw: Mapping[str, Mapping[int, int]]) -> None:
        """Writes how nodes divide their grants; delays are harmless."""
        rows = [*limits_mw.items()]

        def put_some(first: int) -> Callable[[Any], Awaitable[Any]]:
            async def ask(client: Any) -> Any:
                put = client.transactions.put
                some = rows[first : first + MOST_PUT]
                puts = [
                    put(self._key(f"limits/{node}"), wire.limits_bytes(limits))
                    for node, limits in some
                ]
                return await client.transaction(compare=[], success=puts, failure=[])

            return ask

        for first in range(0, len(rows), MOST_PUT):
            await self._ask(put_some(first))

    async def campaign(self, name: str, lease: int | None) -> tuple[int | None, int | None]:
        """Makes this allocator the leader if there is none.

        Returns:
            The token if `name` leads now, else None; and the etcd lease to pass to the next call.
        """
        key = self._key("leader")

        async def ask(client: Any) -> tuple[int | None, int | None]:
            kept = lease
            if kept is not None:
                reply = await client.refresh_lease(kept)
                kept = kept if reply is not None and reply.TTL > 0 else None
            if kept is None:
                # TTL of the leader's key, which is an etcd lease and proves nothing about nodes.
                kept = (await client.lease(5)).id
            make = client.transactions
            _, replies = await client.transaction(
                compare=[make.create(key) == 0],
                success=[make.put(key, name.encode(), lease=kept), make.get(key)],
                failure=[make.get(key)],
            )
            value, item = replies[-1][0]
            mine = value == name.encode() and item.lease == kept
            return (item.create_revision if mine else None), kept

        return await self._ask(ask)

    # ---------------------------------------------------------------------------------- operators

    async def set_budget(self, budget: Budget, revision: int) -> bool:
        """Writes a budget if the present one has this revision; 0: there is none.

        Raises:
            ValueError: The others could not read it.
        """
        data = wire.budget_bytes(budget)
        wire.budget_from(data)

        async def ask(client: Any) -> bool:
            make = client.transactions
            key = self._key("budget")
            done, _ = await client.transaction(
                compare=[make.mod(key) == revision],
                success=[make.put(key, data)],
                failure=[],
            )
            return bool(done)

        return await self._ask(ask)

    # ---------------------------------------------------------------------------------- internals

    def _if_moved(self, make: Any, kept: _Kept[Any]) -> Any:
        """A nested transaction that reads what is not cached."""
        keys = [self._key(name) for name in kept.names]
        return make.txn(
            compare=[make.mod(keys[0]) == kept.revision],
            success=[],
            failure=[make.get(key) for key in keys],
        )

    def _report(self, unreadable: Mapping[str, str]) -> None:
        """Logs nodes when they begin to be unreadable, and when they are readable again."""
        for node in unreadable.keys() - self._unreadable.keys():
            log.warning("%r is left out: %s", node, unreadable[node])
        for node in self._unreadable.keys() - unreadable.keys():
            log.warning("%r can be read again", node)
        self._unreadable = unreadable

    def _node(self, item: Any) -> str:
        """The node's name in a key."""
        name: bytes = item.key[len(self._prefix.encode()) :].partition(b"/")[2]
        return name.decode(errors="backslashreplace")

    def _parsed(
        self,
        rows: Iterable[tuple[bytes, Any]],
        parse: Callable[[bytes], T],
        unreadable: dict[str, str],
    ) -> dict[str, T]:
        """The nodes' data. Adds nodes whose data cannot be read to `unreadable`."""
        parsed = {}
        for value, item in rows:
            try:
                parsed[self._node(item)] = parse(value)
            except Malformed as error:
                unreadable[self._node(item)] = f"what it wrote is {error}"
        return parsed

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()

    def _connect(self) -> Any:
        try:
            return connect(self._endpoints[0], self._tls, self._timeout_s)
        except ValueError as error:  # certificates may be about to be renewed
            raise StoreUnavailable(str(error)) from None

    async def _ask(self, request: Callable[[Any], Awaitable[T]]) -> T:
        try:
            if self._client is None:
                self._client = self._connect()
            # Not in wait_for, which may swallow this task's cancellation before Python 3.12.
            return await request(self._client)
        except Malformed as error:
            raise StoreUnavailable(
                f"etcd has something below {self._prefix} that is {error}; delete that key: an "
                "allocator writes the plan again, and zeus-fleet budget --file the budget"
            ) from None
        except self._failures as error:
            failed = self._endpoints[0]
            await self.close()
            self._endpoints.append(self._endpoints.pop(0))
            what = str(error) or type(error).__name__
            if _REFUSED in what:
                raise StoreUnavailable(
                    f"etcd at {failed} refuses this user; grant it the role that "
                    "docs/operate/fleet_security.md names"
                ) from error
            raise StoreUnavailable(f"etcd at {failed} does not answer: {what}") from error


def _read(value: bytes, parse: Callable[[bytes], T]) -> T | None:
    """A value; None: it cannot be read."""
    try:
        return parse(value)
    except Malformed:
        return None
