"""A small world around the core: devices, journal and replies as plain data, time by hand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from zeus_ipc import replies
from zeus_ipc.codec import decode_reply, encode
from zeus_ipc.controls import SPECS, Control, ControlValue, profile_name
from zeus_ipc.errors import ErrorCode
from zeus_ipc.operations import OF_REQUEST, Operation
from zeus_ipc.replies import (
    Deallocated,
    EmptyResult,
    EnergyReading,
    Forgotten,
    GpuInfo,
    GpuSupport,
    LedgerState,
    ProfileInfo,
    Refused,
)
from zeus_ipc.requests import Allocate, Deallocate, ForgetUser, GetUsage, request_adapter
from zeus_ipc.wire import Message
from zeusd.core.access import OPEN, Access, AllowRule
from zeusd.core.control import ControlMachine
from zeusd.core.core import Core
from zeusd.core.effects import (
    CloseDriver,
    Effect,
    Forget,
    LedgerCall,
    Look,
    Note,
    OpenDriver,
    Put,
    Read,
    ReadingMade,
    Reply,
    RuntimeCounters,
    Unwatch,
    WatchProcess,
    Write,
)
from zeusd.core.entries import PendingRestore, Recorded, parse
from zeusd.core.model import Failure, GpuFacts, Peer, ProcessIdentity, ProcessUsage, device_failure
from zeusd.core.policy import CoreSettings, GpuRule, LeaseTerms, SitePolicy
from zeusd.devices.nvml.codes import nvml_error
from zeusd.devices.port import DeviceError
from zeusd.restore_rule import Device, Holds, WriteResult, is_moved, is_rounded, read_settled
from zeusd.runtime.workers import write_checked

GPU0, GPU1 = "GPU-0000", "GPU-1111"
UUIDS = (GPU0, GPU1, "GPU-2222", "GPU-3333")
POWER, CLOCKS = (GPU0, Control.POWER_LIMIT), (GPU0, Control.GPU_CLOCKS)
ADMIN, ALICE, BOB = 1, 2, 3
"""Connections of `staffed`: an administrator, and two users."""

STAFFED = Access(
    rules=(
        AllowRule(
            uids=frozenset({1002, 1003}),
            controls=frozenset({Control.POWER_LIMIT, Control.GPU_CLOCKS}),
            ranges={Control.POWER_LIMIT: (150_000, 290_000)},
        ),
    ),
    admin_gids=frozenset({600}),
)
MOST_WAKES = 100
LEDGER: dict[type[Message], Message] = {
    Allocate: EmptyResult(),
    Deallocate: Deallocated(ended=1),
    ForgetUser: Forgotten(accounts=1),
    GetUsage: replies.Usage(sums=[], more=False, metered_uj=[], begins_s=None),
}
"""What the ledger answers."""
LIMITS = ("power_limit_min_mw", "power_limit_max_mw", "power_limit_default_mw")


@functools.cache
def _info(uuid: str, index: int) -> GpuInfo:
    return GpuInfo(
        uuid=uuid,
        index=index,
        pci_address=f"00000000:0{index}:00.0",
        name="Test GPU",
        architecture=7,
        memory_mib=1024,
        power_limit_min_mw=100_000,
        power_limit_max_mw=300_000,
        power_limit_default_mw=280_000,
        power_limit_site_mw=None,
        mig_enabled=False,
        supports=GpuSupport(
            power_limit=True,
            gpu_clocks=True,
            memory_clocks=True,
            persistence_mode=True,
            energy_counter=True,
            power_instant=True,
            power_average=True,
        ),
        controls=[control.value for control in SPECS],
        power_profiles=[
            ProfileInfo(profile=number, name=profile_name(number), priority=number)
            for number in range(10)
        ],
    )


def facts(
    uuid: str, index: int, power_limit_mw: int = 300_000, profiles: ControlValue = ()
) -> GpuFacts:
    values: dict[Control, ControlValue] = {
        Control.POWER_LIMIT: (power_limit_mw,),
        Control.PERSISTENCE_MODE: (0,),
        Control.POWER_PROFILE: profiles,
    }
    return GpuFacts(_info(uuid, index).model_copy(), values)


@dataclass
class Odd:
    """A driver that does not write exactly the requested power limit on one GPU."""

    round_to_mw: int = 1
    round_up: bool = False
    clamp_mw: tuple[int, int] | None = None
    ignores: bool = False
    stale_reads: int = 0
    stale: list[ControlValue] = field(default_factory=list)


class World:
    """Drives a core. Device calls run at once, unless `hold` is set.

    Attributes:
        values: What each device control holds.
        writes: Every value written to a device, in order.
        journal: The journal's entries.
        newest: What is to be journaled soon; what the journal says is right, too.
        late: What is to be journaled and could not be yet; None deletes.
        outdated: Keys whose newest entry never got into the journal.
        void: Keys whose entry in the journal was deleted since, and is still there.
        lost: Keys of which something was late when zeusd was killed.
        behind: Keys whose newest value was not in the journal when zeusd was killed.
        peers: Who has each connection; they connect again when they ask another zeusd.
        faults: NVML codes by (gpu, control or None for all), returned by writes instead.
        hold: Keep device calls back until `run_held`.
        accounted: What the ledger was asked.
        ledger: Why it does nothing; None: it does.
        ledger_state: What metrics say of it.
    """

    def __init__(
        self,
        policy: SitePolicy | None = None,
        limits_mw: tuple[int, ...] = (300_000,),
        access: Access = OPEN,
        terms: LeaseTerms | None = None,
        owner_of: Callable[[int], int] = lambda uid: uid,
    ):
        self.owner_of = owner_of
        self.now_ns = 1_000_000_000
        self._overdue = 0
        self.settings = CoreSettings(policy or SitePolicy(), access, terms or LeaseTerms())
        self.driver = "driver-1"
        self.range_mw = (100_000, 300_000)
        self.compute_uids: frozenset[int] = frozenset()
        self.split: set[str] = set()
        self.refused_values: set[ControlValue] = set()
        self.values: dict[tuple[str, Control], ControlValue] = {}
        self.writes: list[tuple[str, Control, ControlValue]] = []
        self.journal: dict[str, dict[str, Any]] = {}
        self.newest: dict[str, Recorded] = {}
        self.late: dict[str, dict[str, Any] | None] = {}
        self.outdated: set[str] = set()
        self.void: set[str] = set()
        self.lost: set[str] = set()
        self.behind: set[str] = set()
        self.watched: dict[ProcessIdentity, int] = {}
        self.peers: dict[int, Peer] = {}
        self.replies: dict[int, list[dict[str, Any]]] = {}
        self._asked: dict[tuple[int, int], Operation[Any]] = {}
        self.notes: list[Note] = []
        self.faults: dict[tuple[str, Control | None], int] = {}
        self.odd: dict[str, Odd] = {}
        self.lowest_mw: dict[str, int] = {}  # as low as a driver that clamped last went
        self.reads_fail = False
        self.read_backs: list[int] = []  # codes of the next readings within writes
        self.hidden: dict[str, frozenset[Control]] = {}
        self.cpu_share: dict[ProcessIdentity, float] = {}
        self.stopped: set[ProcessIdentity] = set()
        self.journal_broken = False
        self.hold = False
        self.driver_open = False
        self.accounted: list[LedgerCall] = []
        self.ledger: Failure | None = None
        self.ledger_state: LedgerState | None = None
        self.held: list[Read | Write] = []
        self.limits_mw = limits_mw
        self._ids = itertools.count(1)
        for uuid, limit_mw in zip(UUIDS, limits_mw, strict=False):
            self.values[(uuid, Control.POWER_LIMIT)] = (limit_mw,)
            self.values[(uuid, Control.PERSISTENCE_MODE)] = (0,)
            self.values[(uuid, Control.GPU_CLOCKS)] = ()
            self.values[(uuid, Control.MEMORY_CLOCKS)] = ()
            self.values[(uuid, Control.POWER_PROFILE)] = ()
        self.core = self.start_core(alive=set())

    def start_core(self, alive: set[ProcessIdentity]) -> Core:
        """A new daemon on the same devices and the same journal."""
        self.core = Core(self.settings, daemon_version="test", owner_of=self.owner_of)
        self.held.clear()
        self.lost |= {*self.late}
        self.behind |= {*self.newest}
        self.newest.clear()
        self.late.clear()
        self.void.clear()
        self.watched.clear()
        self.core.recover({key: parse(key, entry) for key, entry in self.journal.items()}, alive)
        self.driver_open = False
        if self.core.node.quiesced_ns is None:
            self.find_gpus()
        return self.core

    def find_gpus(self) -> None:
        """The driver is opened, and its GPUs are passed to the core."""
        self.driver_open = True
        found = [
            self._facts(uuid, index) for index, uuid in enumerate(UUIDS[: len(self.limits_mw)])
        ]
        self.apply(self.core.gpus_found(self.now_ns, "1.0", found, self.driver))

    def _facts(self, uuid: str, index: int) -> GpuFacts:
        limit, profiles = Control.POWER_LIMIT, Control.POWER_PROFILE
        found = facts(uuid, index, self.values[(uuid, limit)][0], self.values[(uuid, profiles)])
        hidden = self.hidden.get(uuid, frozenset())
        offered = [control.value for control in SPECS if control not in hidden]
        limits = {} if Control.POWER_LIMIT not in hidden else dict.fromkeys(LIMITS)
        info = found.info.model_copy(update={"controls": offered, **limits})
        values = {one: value for one, value in found.values.items() if one not in hidden}
        return GpuFacts(info, values)

    def machine(self, gpu: str, control: Control = Control.POWER_LIMIT) -> ControlMachine:
        """One control's state in the core."""
        return self.core.node.gpus[gpu].machines[control]

    def connect(
        self,
        conn: int,
        pid: int | None = None,
        uid: int = 1000,
        groups: frozenset[int] = frozenset(),
        on_host: bool = True,
        command: str = "",
        job: str = "",
    ) -> ProcessIdentity:
        """Returns the process; who only asks is connected by that, with the defaults."""
        process = ProcessIdentity(pid if pid is not None else conn, 77)
        self.peers[conn] = Peer(conn, process, uid, uid, groups, on_host, command, job)
        self.apply(self.core.peer_opened(self.now_ns, self.peers[conn]))
        return process

    def close(self, conn: int) -> None:
        """A connection ends."""
        self.apply(self.core.peer_closed(self.now_ns, conn))

    def restart(self, *alive: int) -> None:
        """Another zeusd starts, while the processes of these connections live."""
        self.start_core({self.peers[conn].process for conn in alive})

    def die(self, conn: int) -> None:
        """The process of a connection ends, which zeusd watches."""
        process = self.peers[conn].process
        assert process in self.watched, "nobody watches this process"
        self.apply(self.core.process_gone(self.now_ns, process))

    def ask(self, conn: int, op: str, **arguments: Any) -> int:
        """Sends a request; returns its id."""
        if conn not in self.peers:
            self.connect(conn)
        elif self.core.connection(conn) is None:
            self.apply(self.core.peer_opened(self.now_ns, self.peers[conn]))
        request_id = next(self._ids)
        message = {"v": 1, "id": request_id, "op": op, **arguments}
        request = request_adapter.validate_python(message)
        self._asked[conn, request_id] = OF_REQUEST[type(request)]
        self.apply(self.core.request(self.now_ns, conn, request))
        return request_id

    def answer(self, conn: int, request_id: int) -> dict[str, Any] | None:
        """The reply to a request, if there is one."""
        for body in self.replies.get(conn, []):
            if body["id"] == request_id:
                return body
        return None

    def call(self, conn: int, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns its reply."""
        reply = self.answer(conn, self.ask(conn, op, **arguments))
        assert reply is not None, f"no reply to {op}"
        return reply

    def outcome(self, conn: int, request_id: int, gpu: str = GPU0) -> dict[str, Any]:
        """What a request gave for one GPU, or the error of all of it."""
        reply = self.answer(conn, request_id)
        assert reply is not None, "no reply yet"
        found: dict[str, Any] = reply if "error" in reply else reply["result"]["gpus"][gpu]
        return found

    def result(self, conn: int, op: str, gpu: str = GPU0, **arguments: Any) -> dict[str, Any]:
        """What a request gives for one GPU."""
        return self.outcome(conn, self.ask(conn, op, gpus=[gpu], **arguments), gpu)

    def code(self, conn: int, op: str, gpu: str = GPU0, **arguments: Any) -> str:
        """What is wrong with a request for one GPU; "ok" if it is done."""
        return str(self.result(conn, op, gpu, **arguments).get("error", {"code": "ok"})["code"])

    def lock_clocks(self, conn: int, low: int = 900, high: int = 1000, **more: Any) -> str:
        """Sets a range of GPU clocks, MHz. Returns what is wrong, or "ok"."""
        return self.code(conn, "set", control="gpu_clocks", value=[low, high], **more)

    def ask_power(self, conn: int, watts: int, **more: Any) -> int:
        """Asks for a power limit; returns the request's id."""
        asked = {"gpus": [GPU0], "control": "power_limit", **more}
        return self.ask(conn, "set", value=[watts * 1000], **asked)

    def set_power(self, conn: int, watts: int, gpu: str = GPU0, **more: Any) -> dict[str, Any]:
        """Sets a power limit. Returns the GPU's result, empty if it holds the requested value."""
        result = self.result(conn, "set", gpu, control="power_limit", value=[watts * 1000], **more)
        return {} if result == {"applied": [watts * 1000]} else result

    def limit_w(self, gpu: str = GPU0) -> float:
        return self.values[(gpu, Control.POWER_LIMIT)][0] / 1000

    def look_around(self) -> None:
        """Reads the controls that nobody holds."""
        self.apply(self.core.look_around(self.now_ns))

    def reload(self, site: SitePolicy) -> None:
        """The site's configuration is another from now on."""
        self.settings = replace(self.settings, site=site)
        self.apply(self.core.reconfigure(self.now_ns, self.settings))

    def advance(self, seconds: float) -> None:
        """Time passes, and zeusd is woken when it asked to be."""
        end_ns = self.now_ns + int(seconds * 1e9)
        while (due_ns := self.core.next_deadline_ns()) is not None and due_ns < end_ns:
            self.woken_for(due_ns)
            self.now_ns = max(self.now_ns + 1, due_ns)
            self.apply(self.core.tick(self.now_ns))
        self.stall((end_ns - self.now_ns) / 1e9)

    def woken_for(self, due_ns: int) -> None:
        """zeusd asked to be woken then: a time that stays due after each tick would keep it busy.

        Raises:
            AssertionError: It has been woken for what was due, and still is, `MOST_WAKES` times.
        """
        self._overdue = self._overdue + 1 if due_ns <= self.now_ns else 0
        assert self._overdue < MOST_WAKES, "zeusd asks to be woken for what it does not do"

    def stall(self, seconds: float) -> None:
        """Time passes, and zeusd notices it at the end only."""
        self.now_ns += int(seconds * 1e9)
        self.keep_newest()
        self.apply(self.core.tick(self.now_ns))

    def run_next(self) -> None:
        """Carries out the first of the calls that are held back."""
        self.reach(self.held.pop(0))

    def run_held(self, gpu: str = "") -> None:
        """Performs the calls that were held, of one GPU or all, and those that follow."""
        while ready := [call for call in self.held if gpu in ("", call.gpu)]:
            self.held.remove(ready[0])
            self.reach(ready[0])

    def journaled(self, *kinds: str) -> list[str]:
        """Keys of the journal that begin with one of these words."""
        return [key for key in self.journal if key.partition("/")[0] in kinds]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [note.fields for note in self.notes if note.event == name]

    # ---------------------------------------------------------------------------------- effects

    def keep(self, key: str, entry: dict[str, Any] | Recorded | None) -> None:
        """Writes records that no device waits for: at once, or when the journal is whole again."""
        if isinstance(entry, Recorded):
            entry = entry.to_json()
        self.newest.pop(key, None)
        if self.journal_broken:
            self.late[key] = entry
            self.outdated.add(key)
            if entry is None:
                self.void.add(key)
            return
        self.void.discard(key)
        self.late.pop(key, None)
        self.outdated.discard(key)
        if entry is None:
            self.journal.pop(key, None)
        else:
            self.journal[key] = entry

    def announce(self, write: Write) -> bool:
        """Writes the record of a write. Returns whether the write may be made."""
        key = write.restore.key
        states = [None if key in self.void else self.journal.get(key)]
        states += [self.late[key]] if key in self.late else []
        known = [PendingRestore.from_json(state) if state else None for state in states]
        if all(state is not None and state.covers(write.restore) for state in known):
            self.newest[key] = write.restore
            self.outdated.add(key)
            return True
        leads = all(state is not None and state.leads_to(write.restore) for state in known)
        if leads or not self.journal_broken:
            self.keep(key, write.restore.following(known[-1]))
        return leads or not self.journal_broken

    def keep_newest(self) -> None:
        """Journals what could wait for others."""
        for key, entry in [*self.newest.items()]:
            self.keep(key, entry)

    def keep_late(self) -> None:
        """Writes late records, if that is possible now."""
        if not self.journal_broken:
            for key, entry in [*self.late.items()]:
                newest = self.newest.get(key)
                self.keep(key, entry)
                if newest is not None:
                    self.newest[key] = newest
                    self.outdated.add(key)

    def _check_kind(self, reply: Reply) -> None:
        """The reply has the fields of its operation."""
        operation, result = self._asked[reply.conn, reply.body["id"]], reply.body.get("result")
        if result is not None:
            kinds = (operation.result, Refused) if operation.each else operation.result
            every = getattr(result, operation.each).values() if operation.each else [result]
            assert all(isinstance(one, kinds) for one in every), (operation.name, result)

    def apply(self, effects: list[Effect]) -> None:
        self.keep_late()
        for effect in effects:
            if isinstance(effect, Reply):
                self._check_kind(effect)
                self.replies.setdefault(effect.conn, []).append(decode_reply(encode(effect.body)))
            elif isinstance(effect, Write):
                if self.announce(effect):
                    self._submit(effect)
                else:
                    failure = Failure(ErrorCode.JOURNAL_FAILED, "the disk is full")
                    self.apply(self.core.device_done(self.now_ns, effect.ticket, failure))
            elif isinstance(effect, Read):
                self._submit(effect)
            elif isinstance(effect, CloseDriver):
                # A call that does not return keeps the library, and with it the device files.
                self.driver_open = bool(self.held)
                still_open = ("/dev/nvidia0",) if self.held else ()
                self.apply(self.core.device_done(self.now_ns, effect.ticket, still_open))
            elif isinstance(effect, OpenDriver):
                self.find_gpus()
                self.apply(self.core.device_done(self.now_ns, effect.ticket, None))
            elif isinstance(effect, Put) and effect.ticket:
                failure = None
                if self.journal_broken:
                    failure = Failure(ErrorCode.JOURNAL_FAILED, "the disk is full")
                else:
                    self.keep(effect.key, effect.entry)
                self.apply(self.core.device_done(self.now_ns, effect.ticket, failure))
            elif isinstance(effect, Put):
                if effect.soon and self.hold:
                    self.newest[effect.key] = effect.entry
                else:
                    self.keep(effect.key, effect.entry)
            elif isinstance(effect, Forget):
                self.keep(effect.key, None)
            elif isinstance(effect, WatchProcess):
                self.watched[effect.process] = self.watched.get(effect.process, 0) + 1
            elif isinstance(effect, Unwatch):
                self.watched[effect.process] -= 1
                if not self.watched[effect.process]:
                    del self.watched[effect.process]
            elif isinstance(effect, Look):
                usage = self.usage(effect.process)
                self.apply(self.core.device_done(self.now_ns, effect.ticket, usage))
            elif isinstance(effect, LedgerCall):
                self.accounted.append(effect)
                result = self.ledger or LEDGER[type(effect.request)]
                self.apply(self.core.device_done(self.now_ns, effect.ticket, result))
            else:
                self.notes.append(effect)

    def usage(self, process: ProcessIdentity) -> ProcessUsage | None:
        """The kernel's state of a process: asleep, unless `cpu_share` is set."""
        share = self.cpu_share.get(process, 0.0)
        return ProcessUsage(self.now_ns, round(share * self.now_ns), process in self.stopped)

    def _submit(self, call: Read | Write) -> None:
        if self.hold:
            self.held.append(call)
        else:
            self.reach(call)

    def reach(self, call: Read | Write) -> None:
        """A call arrives at its device, which answers the core."""
        if call.gpu:
            assert self.driver_open, f"{call} while the driver is closed"
        control = call.control
        code = self.faults.get((call.gpu, control), self.faults.get((call.gpu, None)))
        result: object = None
        if isinstance(call, Write):
            result = self._carry_out(call, code)
        elif call.reading is ReadingMade.CONTROL:
            assert control is not None
            if code is not None and self.reads_fail:
                result = device_failure("reading", call.gpu, nvml_error(code, "get"))
            else:
                result = read_settled(lambda: self._read(call.gpu, control))
        elif call.reading is ReadingMade.LIMITS:
            result = self.range_of(call.gpu)
        elif call.reading is ReadingMade.SPLIT:
            result = call.gpu in self.split
        elif call.reading is ReadingMade.COMPUTE_UIDS:
            result = self.compute_uids
        elif call.reading is ReadingMade.METRICS:
            result = RuntimeCounters([], [], [], self.ledger_state)
        else:
            result = EnergyReading(t_ns=self.now_ns, energy_mj=5)
        self.apply(self.core.device_done(self.now_ns, call.ticket, result))

    def range_of(self, gpu: str) -> tuple[int, int]:
        """The driver's range of a power limit."""
        odd = self.odd.get(gpu)
        return self.range_mw if odd is None or odd.clamp_mw is None else odd.clamp_mw

    def _read(self, gpu: str, control: Control) -> ControlValue:
        odd = self.odd.get(gpu)
        if odd is not None and control is Control.POWER_LIMIT and odd.stale:
            return odd.stale.pop()
        return self.values[(gpu, control)]

    def _changed(self, call: Write) -> bool:
        """Whether the control holds a value that is not zeusd's, where that is checked."""
        found, spec = self.values[(call.gpu, call.control)], SPECS[call.control]
        if not call.expected or found in call.expected:
            return False
        ours = is_rounded(found, call.doubts, spec.rounding)
        if not ours and spec.refused_target == "nearest":
            ours = is_moved(found, call.doubts, self.range_of(call.gpu))
        return not ours

    def _carry_out(self, call: Write, code: int | None) -> WriteResult:
        """A write as the worker of a GPU makes it: compare, write, read back."""

        def write(value: ControlValue) -> None:
            made = replace(call, value=value)
            if code is not None or not self._takes(made):
                raise nvml_error(code or 2, "set")
            self.take(made)
            self.writes.append((call.gpu, call.control, value))
            self.wrote(made)

        def read() -> ControlValue:
            if self.read_backs and self.writes:
                raise nvml_error(self.read_backs.pop(0), "get")
            return self._read(call.gpu, call.control)

        device = Device(read, write, lambda seconds: None, SPECS[call.control].rounding)
        outcome = write_checked(call, device, lambda: self.range_of(call.gpu))
        if isinstance(outcome, Holds) or not isinstance(outcome.trouble, DeviceError):
            return outcome
        return replace(outcome, trouble=device_failure("setting", call.gpu, outcome.trouble))

    def take(self, call: Write) -> None:
        """The value that the driver writes."""
        key = (call.gpu, call.control)
        odd = self.odd.get(call.gpu)
        if odd is None or call.control is not Control.POWER_LIMIT:
            # An ignored write of an unreadable control cannot be noticed.
            if odd is None or not odd.ignores or not SPECS[call.control].readable:
                self.values[key] = call.value
            return
        before = self.values[key]
        if odd.stale_reads:
            odd.stale = [before] * odd.stale_reads
        if not odd.ignores:
            limit_mw = call.value[0]
            if odd.clamp_mw is not None:
                limit_mw = min(max(limit_mw, odd.clamp_mw[0]), odd.clamp_mw[1])
                if limit_mw == odd.clamp_mw[0]:
                    self.lowest_mw[call.gpu] = limit_mw
            off = -limit_mw if odd.round_up else limit_mw
            self.values[key] = (limit_mw - (off % odd.round_to_mw) * (-1 if odd.round_up else 1),)

    def wrote(self, write: Write) -> None:
        """A write has reached its device."""

    def _takes(self, write: Write) -> bool:
        low, high = self.range_mw
        if write.value in self.refused_values:
            return False
        return write.control is not Control.POWER_LIMIT or low <= write.value[0] <= high


def site(
    power_w: int | None = None, clocks: tuple[int, int] | None = None, enforce: bool = False
) -> SitePolicy:
    """A site that configures limits for all its GPUs."""
    targets: dict[Control, ControlValue] = {}
    if power_w is not None:
        targets[Control.POWER_LIMIT] = (1000 * power_w,)
    if clocks is not None:
        targets[Control.GPU_CLOCKS] = clocks
    return SitePolicy(rules=(GpuRule("*", targets, enforce=enforce),))


def staffed(policy: SitePolicy | None = None, gpus: int = 1) -> World:
    """A world with an administrator and two users, who may set power limits and clocks."""
    world = World(policy, (300_000,) * gpus, STAFFED)
    world.connect(ADMIN, pid=101, uid=1001, groups=STAFFED.admin_gids)
    world.connect(ALICE, pid=102, uid=1002)
    world.connect(BOB, pid=103, uid=1003)
    return world
