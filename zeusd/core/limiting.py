"""Named ceilings: setting them, their deadlines, and their effects on devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zeus_ipc.controls import SPECS
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import CeilingInfo, CeilingSet
from zeus_ipc.requests import SetCeiling
from zeusd.core.bounds import JOB_PREFIX
from zeusd.core.control import ControlMachine
from zeusd.core.effects import Forget, Put
from zeusd.core.entries import CEILING, CeilingEntry, key_of
from zeusd.core.model import Failure, Peer, refuse_if
from zeusd.core.pending import ClientState, Pending, RequestContext


class CeilingRequests:
    """Answers `set_ceiling`, and ends ceilings whose deadline has passed or whose job has ended."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._node, self._out = context.node, context.out
        self._due_boot_ns: int | None = None
        # Until when a job may be absent: a while after its ceiling is set; once it was seen, not.
        self._awaited_ns: dict[str, int] = {}

    def set_ceiling(self, connection: ClientState, request: SetCeiling) -> None:
        """Sets, replaces or removes a ceiling; replies when the devices have applied it."""
        pending = self._context.track(connection, request)

        def set_one(uuid: str) -> None:
            machine = self._node.machine(uuid, request.control)
            refuse_if(self._refusal(machine, uuid, request))
            if request.value is None:
                then = partial(self._followed, pending, machine)
                self.remove(machine, request.name, connection.peer, then)
            else:
                self._put(pending, machine, request, connection.peer)

        pending.each(set_one)

    def remove(
        self,
        machine: ControlMachine,
        name: str,
        peer: Peer | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Removes the ceiling with this name, if any; `then` is always called."""
        before = machine.bounds.highest()
        if machine.ceilings.pop(name, None) is not None:
            self._schedule()
            after = machine.bounds.highest()
            machine.audit.values("ceiling_removed", before, after, peer, reason=name)
        machine.ceilings_moved(then)
        # Last: by now the journal has the value that the device holds because of it.
        self._out.add(Forget(self._key(machine, name)))

    def release_job(self, job: str, gpus: list[str], peer: Peer) -> None:
        """Ends a job's ceilings."""
        for machine in self._node.machines():
            if (not gpus or machine.gpu in gpus) and f"{JOB_PREFIX}{job}" in machine.ceilings:
                self.remove(machine, f"{JOB_PREFIX}{job}", peer)

    # ------------------------------------------------------------------------------------- time

    def recovered(self) -> None:
        """Registers found GPUs, with their ceilings from the journal."""
        self._schedule()
        self.tick()

    def tick(self) -> None:
        """Applies the fallbacks of ceilings whose deadline has passed."""
        boot_ns = self._boot_ns()
        if self._due_boot_ns is None or boot_ns < self._due_boot_ns:
            return
        self._end(boot_ns)

    def stop(self) -> None:
        """Applies all fallbacks when zeusd ends, because nobody will enforce the deadlines."""
        self._end(None)

    def _end(self, boot_ns: int | None) -> None:
        for machine in self._node.machines():
            before = machine.bounds.highest() if machine.spec.ceilings else ()
            for name in machine.ceilings.expire(boot_ns):
                ceiling = machine.ceilings.get(name)
                key = self._key(machine, name)
                self._out.add(Forget(key) if ceiling is None else Put(key, ceiling))
                after = machine.bounds.highest()
                machine.audit.values("ceiling_expired", before, after, reason=name)
                machine.ceilings_moved()
        self._schedule()

    def next_deadline_ns(self) -> int | None:
        """Time of the next `tick`, CLOCK_MONOTONIC."""
        due_ns = self._due_boot_ns
        return None if due_ns is None else due_ns - self._out.boot_offset_ns

    def _schedule(self) -> None:
        deadlines = (machine.ceilings.next_deadline_ns() for machine in self._node.machines())
        self._due_boot_ns = min(
            (deadline for deadline in deadlines if deadline is not None), default=None
        )

    # ------------------------------------------------------------------------------------- jobs

    @property
    def jobs(self) -> set[str]:
        """The names that control groups may have of jobs that have ceilings."""
        return {name for names in self._groups().values() for name in names}

    def _groups(self) -> dict[str, set[str]]:
        """The same by ceiling."""
        groups: dict[str, set[str]] = {}
        for machine in self._node.machines():
            for name, one in machine.ceilings.items():
                if name.startswith(JOB_PREFIX):
                    names = groups.setdefault(name, {name.removeprefix(JOB_PREFIX)})
                    names |= {one.control_group} - {""}
        return groups

    def jobs_present(self, present: set[str]) -> None:
        """Ends, after a grace period, the ceilings of jobs that have no control group."""
        now_ns, groups = self._out.now_ns, self._groups()
        # Time for a job's control group to appear after its ceiling is set: a prolog runs before.
        self._awaited_ns = {
            name: 0 if names & present else self._awaited_ns.get(name, now_ns + 60_000_000_000)
            for name, names in groups.items()
        }
        for name, names in groups.items():
            if not names & present and now_ns >= self._awaited_ns[name]:
                for machine in self._node.machines():
                    if name in machine.ceilings:
                        self.remove(machine, name)

    # --------------------------------------------------------------------------------- internals

    def _boot_ns(self) -> int:
        return self._out.now_ns + self._out.boot_offset_ns

    def _refusal(self, machine: ControlMachine, uuid: str, request: SetCeiling) -> Failure | None:
        if self._node.closed is not None:
            return self._node.closed
        spec, info = SPECS[request.control], self._node.gpus[uuid].info
        if not spec.ceilings:
            return Failure(
                ErrorCode.NOT_SUPPORTED,
                f"{spec.name} of {uuid} has no order, so it cannot have a ceiling; use persist",
            )
        low, high = info.power_limit_min_mw, info.power_limit_max_mw
        for value in (request.value, request.fallback):
            if value is None:
                continue
            fault = spec.fault(value)
            outside = None not in (low, high) and not (low or 0) <= value[0] <= (high or 0)
            if fault is None and outside:
                fault = f"{spec.text(value)} is outside {spec.span_text(low or 0, high or 0)}"
            if fault is not None:
                message = f"no ceiling {request.name} on {uuid}: {fault}; choose another value"
                return Failure(ErrorCode.OUT_OF_RANGE, message)
        if 0 < request.until_boot_ns <= self._boot_ns():
            return Failure(
                ErrorCode.DEADLINE_EXCEEDED,
                f"the ceiling {request.name} on {uuid} would have ended before it was set; the "
                "request was held up, so send it again with a later time",
            )
        if request.value is not None and (request.fallback or request.value) > request.value:
            return Failure(
                ErrorCode.BAD_REQUEST,
                f"the ceiling {request.name} on {uuid} would fall back to a higher value; --then "
                "must not be higher than the ceiling",
            )
        return None

    def _put(
        self, pending: Pending, machine: ControlMachine, request: SetCeiling, peer: Peer
    ) -> None:
        """Records a ceiling, then applies it: the next zeusd must know why a limit is low."""
        assert request.value is not None
        ends_ns = [self._boot_ns() + request.ttl_ms * 1_000_000] if request.ttl_ms else []
        ends_ns += [request.until_boot_ns] if request.until_boot_ns else []
        fallback = None if request.fallback is None else tuple(request.fallback)
        deadline_ns = min(ends_ns, default=None)
        ceiling = CeilingEntry(
            tuple(request.value), peer.uid, deadline_ns, fallback, request.control_group
        )
        recorded = partial(self._recorded, pending, machine, request.name, ceiling, peer)
        ticket = self._out.ticket(recorded)
        self._out.add(Put(self._key(machine, request.name), ceiling, ticket=ticket))

    def _recorded(
        self,
        pending: Pending,
        machine: ControlMachine,
        name: str,
        ceiling: CeilingEntry,
        peer: Peer,
        failure: object,
    ) -> None:
        if failure is not None:
            pending.put(machine.gpu, failure)
            return
        before = machine.bounds.highest()
        machine.ceilings[name] = ceiling
        self._schedule()
        if (after := machine.bounds.highest()) != before:  # a later deadline alone is not logged
            machine.audit.values("ceiling_set", before, after, peer, reason=name)
        machine.ceilings_moved(partial(self._followed, pending, machine))

    @staticmethod
    def _followed(pending: Pending, machine: ControlMachine) -> None:
        trouble = machine.trouble
        if trouble is None or machine.settling:
            pending.put(machine.gpu, CeilingSet(highest=list(machine.bounds.highest())))
        else:
            pending.put(machine.gpu, trouble)

    @staticmethod
    def _key(machine: ControlMachine, name: str) -> str:
        return key_of(CEILING, machine.gpu, machine.control, name)


def describe_ceilings(machine: ControlMachine, boot_offset_ns: int) -> list[CeilingInfo]:
    """The ceilings of a control."""
    return [
        CeilingInfo(
            name=name,
            control=machine.control.value,
            value=list(one.value),
            uid=one.uid,
            deadline_ns=None if one.deadline_ns is None else one.deadline_ns - boot_offset_ns,
            fallback=None if one.fallback is None else list(one.fallback),
        )
        for name, one in machine.ceilings.items()
    ]
