"""The client: the protocol's operations as Python methods.

Methods take one GPU's UUID or several, and return results by UUID. If one GPU was requested, its
error is raised as it is; if several were, `SeveralGpusFailed` holds the error of each.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zeus_ipc import errors, operations, replies
from zeus_ipc._version import __version__
from zeus_ipc.circuit import Circuit
from zeus_ipc.controls import Control
from zeus_ipc.heartbeat import HeartbeatThread
from zeus_ipc.operations import Operation, R
from zeus_ipc.requests import (
    MAX_JOB_NAME,
    MAX_LOOKUPS,
    MAX_RECORDS,
    MAX_WINDOWS,
    NO_END_NS,
    NOBODY,
    Domain,
    Whose,
)
from zeus_ipc.socket_transport import SocketTransport
from zeus_ipc.sockets import socket_path
from zeus_ipc.stream import SampleStream
from zeus_ipc.transport import Transport
from zeus_ipc.wire import PROTOCOL_VERSION


class Client(contextlib.AbstractContextManager["Client"]):
    """A connection to a node's zeusd.

    Safe to share between threads, and safe to use after `fork` (the child gets a connection, and
    leases, of its own). Leases acquired through it end with `close`, with the `with` block, and
    with the process.

    Args:
        path: The daemon's socket; None: `$ZEUSD_SOCK_PATH`, else `/run/zeusd/zeusd.sock`.
        timeout_s: Seconds after which any call gives up.
        heartbeat: Send heartbeats from a thread while this process holds leases. If false, call
            `heartbeat` yourself at least once within each lease's TTL.
        stall_timeout_s: With `heartbeat`: stop the heartbeats, and so lose all leases, if
            `progress` is not called for this long, as in a collective that never ends. None: never.
        transport: Another way to a node than a socket, such as an engine in this process.

    Every method raises a `ZeusIpcError`: `DaemonUnavailable` (nobody listens), `AccessRefused`
    (this user may not use the socket), `RequestTimeout`, `VersionMismatch`, and what the daemon
    answers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 5.0,
        heartbeat: bool = True,
        stall_timeout_s: float | None = None,
        transport: Transport | None = None,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s}")
        if stall_timeout_s is not None and not 0 < stall_timeout_s < math.inf:
            raise ValueError(
                f"stall_timeout_s must be a positive number of seconds, or None for never, not "
                f"{stall_timeout_s}"
            )
        self._timeout_s = timeout_s
        self._transport = SocketTransport(socket_path(path)) if transport is None else transport
        self._name = secrets.token_hex(6)
        self._pid = os.getpid()
        self._closed = False
        self._guard = threading.Lock()
        self._unraised: dict[str, Any] | None = None
        self._circuit = Circuit(self._probe)
        self._heartbeat = HeartbeatThread(self._beat, stall_timeout_s) if heartbeat else None

    def __exit__(self, *error: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------- the node

    def node(self) -> replies.NodeInfo:
        """Describes the daemon and the node's GPUs."""
        return self._ask(operations.HELLO, client_version=__version__)

    def state(self, gpus: str | Sequence[str]) -> dict[str, replies.GpuState]:
        """Reads limits, clocks, power, energy and temperature of GPUs, by UUID."""
        return self._each(operations.STATE, gpus=_uuids(gpus))

    def energy(self, gpus: str | Sequence[str]) -> dict[str, replies.EnergyReading]:
        """Energy counters, mJ, with the time of reading, by UUID.

        Raises:
            NotSupported: A GPU has no counter.
        """
        return self._each(operations.ENERGY, gpus=_uuids(gpus))

    def power(self, gpus: str | Sequence[str]) -> dict[str, replies.PowerReading]:
        """Power sensors, mW, by UUID."""
        return self._each(operations.POWER, gpus=_uuids(gpus))

    def windows(
        self,
        sources: str | Sequence[str],
        windows: Sequence[tuple[int, int, int]] = (),
        *,
        limited: bool = False,
    ) -> dict[str, replies.WindowEnergies]:
        """Energy between pairs of instants, by source.

        Any number of windows: they are requested in as few messages as possible. Waits at most one
        update period for a window that has just ended.

        Args:
            sources: UUIDs of GPUs, `cpu:0`, `dram:0`.
            windows: Beginning and end, ns of CLOCK_MONOTONIC, and whether the GPU had nothing to do
                just before and after except what is measured; or `PAUSE`, see `GetWindows`. None:
                checks only whether windows can be computed.
            limited: Ask also how long the clocks were limited, and why.

        Raises:
            NotSupported: A source has no energy.
        """
        names = _uuids(sources)
        each = max(1, min(MAX_WINDOWS, MAX_LOOKUPS // max(1, len(names))))
        by_source: dict[str, replies.WindowEnergies] = {}
        for first in range(0, max(1, len(windows)), each):
            part = windows[first : first + each]
            numbers = [number for begin, end, aligned in part for number in (begin, end, +aligned)]
            asked = {"limited": True} if limited else {}
            answer = self._each(operations.WINDOWS, sources=names, windows=numbers, **asked)
            for name, energies in answer.items():
                if name in by_source:
                    by_source[name].energy_uj.extend(energies.energy_uj)
                    by_source[name].uncertainty_uj.extend(energies.uncertainty_uj)
                    for reason, numbers_ms in energies.limited_ms.items():
                        by_source[name].limited_ms.setdefault(reason, []).extend(numbers_ms)
                else:
                    by_source[name] = energies
        return by_source

    def timeline(
        self,
        source: str,
        domain: Domain | str = Domain.POWER,
        start_ns: int = 0,
        end_ns: int | None = None,
    ) -> list[tuple[int, int]]:
        """Reads the history of a source: times, ns of CLOCK_MONOTONIC, and readings.

        Args:
            source: UUID of a GPU, `cpu:0`, `dram:0`.
            domain: See `Domain` for the units.
            start_ns: Oldest time.
            end_ns: Newest; None: no bound.
        """
        end_ns = NO_END_NS if end_ns is None else end_ns
        points: list[tuple[int, int]] = []
        while True:
            part = self._each(
                operations.TIMELINE,
                sources=[source],
                domain=Domain(domain).value,
                start_ns=max(0, start_ns),
                end_ns=max(0, end_ns),
            )[source]
            points.extend(zip(part.t_ns, part.values, strict=True))
            if not part.more:
                return points
            start_ns = part.t_ns[-1] + 1

    def stream(self, gpus: str | Sequence[str], *, buffer: int = 1000) -> SampleStream:
        """Streams samples of GPUs: power, energy, clocks and temperature at each update of their
        sensors.

        Args:
            gpus: UUIDs.
            buffer: Samples kept for the reader; if it is full, samples are dropped, and counted.

        Raises:
            UnknownGpu: There is no such GPU.
        """
        names = _uuids(gpus)
        self.windows(names)  # do they exist, and do they have sensors?
        return SampleStream(self._transport.subscribe(names, self.node().stream, buffer))

    def clocks(self, gpu: str) -> replies.SupportedClocks:
        """Lists the clocks, MHz, that a GPU can be locked to."""
        return self._each(operations.CLOCKS, gpus=[gpu])[gpu]

    def processes(self, gpus: str | Sequence[str]) -> dict[str, replies.GpuProcesses]:
        """Lists the processes that use GPUs, by UUID: at most a second old."""
        return self._each(operations.PROCESSES, gpus=_uuids(gpus))

    # ---------------------------------------------------------------------------------- controls

    def set(
        self,
        gpus: str | Sequence[str],
        control: Control | str,
        value: Sequence[int],
        *,
        block: bool = True,
        together: bool = False,
    ) -> dict[str, list[int]]:
        """Sets a control. `set_power_limit` and the like do the same for one control each.

        Args:
            gpus: UUIDs.
            control: Which.
            value: `[mW]`, `[min MHz, max MHz]`, `[0]` or `[1]`, or `[profile, ...]`.
            block: As for `set_power_limit`.
            together: Allow it even if a conflicting control of the GPU is leased: a power profile
                beside a power limit or locked clocks.

        Returns:
            The value that each GPU holds now, as read back: a driver may round it, or move it into
                its range. Empty without `block`.
        """
        name = Control(control).value
        value = _listed(value, f"the value of {name} is a list of whole numbers")
        more = {"together": True} if together else {}
        answers = self._set(operations.SET, gpus, block, control=name, value=value, **more)
        applied = {uuid: operations.SET.read(one).applied for uuid, one in answers.items()}
        return {uuid: value if one is None else one for uuid, one in applied.items()}

    def set_power_limit(
        self, gpus: str | Sequence[str], power_limit_mw: int, *, block: bool = True
    ) -> None:
        """Sets the power limit, mW, acquiring its lease if nobody holds it.

        Args:
            gpus: UUIDs.
            power_limit_mw: Within the GPU's range and at most the site limit.
            block: Wait until it is set. If false, the call returns at once, and a later call that
                waits raises `DeferredSetFailed` if it failed.

        Raises:
            LeaseHeld, LeaseExpired, OutOfRange, PermissionRefused, NotSupported, DeviceFailure: See
                each.
        """
        self.set(gpus, Control.POWER_LIMIT, [power_limit_mw], block=block)

    def set_gpu_clocks(
        self, gpus: str | Sequence[str], min_mhz: int, max_mhz: int, *, block: bool = True
    ) -> None:
        """Locks the graphics clock to a range, MHz. Errors as for `set_power_limit`."""
        self.set(gpus, Control.GPU_CLOCKS, [min_mhz, max_mhz], block=block)

    def set_memory_clocks(
        self, gpus: str | Sequence[str], min_mhz: int, max_mhz: int, *, block: bool = True
    ) -> None:
        """Locks the memory clock to a range, MHz. Errors as for `set_power_limit`."""
        self.set(gpus, Control.MEMORY_CLOCKS, [min_mhz, max_mhz], block=block)

    def set_persistence_mode(
        self, gpus: str | Sequence[str], enabled: bool, *, block: bool = True
    ) -> None:
        """Turns persistence mode on or off. Errors as for `set_power_limit`."""
        value = int(enabled) if enabled in (True, False) else enabled  # refused like others
        self.set(gpus, Control.PERSISTENCE_MODE, [value], block=block)

    def reset(
        self, gpus: str | Sequence[str], control: Control | str, *, block: bool = True
    ) -> None:
        """Restores a control and keeps the lease; see `release`."""
        self._set(operations.RESET, gpus, block, control=Control(control).value)

    # ------------------------------------------------------------------------------------ leases

    def acquire(
        self,
        gpus: str | Sequence[str],
        controls: Sequence[Control | str],
        *,
        ttl_s: float | None = None,
        together: bool = False,
    ) -> dict[str, dict[str, replies.Back]]:
        """Acquires the leases on these controls without changing anything. A process that lost a
        lease (`LeaseExpired`) can get it again only in this way.

        Args:
            gpus: UUIDs.
            controls: Which.
            ttl_s: How long they last without a heartbeat, within the site's bounds; None: the
                site's default.
            together: As for `set`.

        Returns:
            The restore target of each control, by UUID and control.

        Raises:
            LeaseHeld: Another process holds one.
            PermissionRefused: The site does not allow it to this user.
        """
        names = [Control(control).value for control in _listed(controls, "controls are a list")]
        ttl_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        more = {"together": True} if together else {}
        arguments = {"gpus": _uuids(gpus), "controls": names, "ttl_ms": ttl_ms, **more}
        result = self._result(operations.ACQUIRE, arguments)
        self._holds()
        return {uuid: one.back for uuid, one in _read_each(operations.ACQUIRE, result).items()}

    def release(
        self,
        gpus: str | Sequence[str] = (),
        controls: Sequence[Control | str] = (),
        *,
        whose: Whose | str = Whose.PROCESS,
        pids: Sequence[int] = (),
        job: str = "",
    ) -> int:
        """Restores controls and releases their leases.

        Args:
            gpus: UUIDs; empty: all.
            controls: Empty: all.
            whose: This process's own, all of this user's, or, for administrators, anybody's.
            pids: Only what these processes hold; empty: all.
            job: Only what this job holds: Slurm's job id, or the uid of a Kubernetes pod.

        Returns:
            How many leases were released. It is not an error if none was held.

        Raises:
            PermissionRefused: Someone else's leases, and this user is not an administrator.
        """
        if len(job) > MAX_JOB_NAME:
            raise errors.RequestRejected(
                f"a job's name has at most {MAX_JOB_NAME} characters, not {len(job)}; give Slurm's "
                "job id or the uid of a pod"
            )
        answer = self._ask(
            operations.RELEASE,
            gpus=_uuids(gpus) if gpus else [],
            controls=[Control(control).value for control in controls],
            whose=Whose(whose).value,
            pids=list(pids),
            job=job,
        )
        return answer.released

    def leases(self) -> list[replies.LeaseInfo]:
        """All leases on the node."""
        return self._ask(operations.LEASES).leases

    def heartbeat(self) -> int:
        """Sends a heartbeat. Returns how many leases this process holds."""
        return self._ask(operations.HEARTBEAT).leases

    def lost_leases(self, known: int, wait_s: float) -> list[tuple[str, str]]:
        """Waits until the number of leases that this process has lost and not acquired again is
        another than `known`. Returns the GPU and control of each.

        Raises:
            RequestTimeout: It has not changed within `wait_s`.
        """
        message = self._message(operations.HEARTBEAT, {"losses": known})
        beat = _read(operations.HEARTBEAT, self._transport.request(message, wait_s))
        return [(gpu, control) for gpu, control in beat.lost]

    @property
    def answers(self) -> bool:
        """Whether the daemon answered the last request; takes no time, and sends none."""
        return not self._circuit.open

    @property
    def leases_lost(self) -> int:
        """How often a heartbeat found that this process had lost leases; takes no time. Values that
        it set may no longer be in force.
        """
        return 0 if self._heartbeat is None else self._heartbeat.lost

    def progress(self) -> None:
        """Reports progress of the application; see `stall_timeout_s`. Takes no time."""
        if self._heartbeat is not None:
            self._heartbeat.progress()

    # ---------------------------------------------------------------------------- administration

    def restore(
        self,
        gpus: str | Sequence[str] = (),
        controls: Sequence[Control | str] = (),
        jobs: Sequence[str] = (),
        forget: bool = False,
    ) -> dict[str, dict[str, str]]:
        """Restores controls to the site limit, even if others hold or have set them. For
        administrators. Holders lose their leases, and get an error at their next set.

        Args:
            gpus: UUIDs; empty: all.
            controls: Empty: all.
            jobs: The names of a job that is about to start: what other jobs hold is left to them.
            forget: Instead, give up restoring these GPUs, which zeusd does not find.

        Returns:
            By UUID and control: see `Restored.controls`.
        """
        names = [Control(control).value for control in controls]
        uuids = _uuids(gpus) if gpus else []
        more = {"jobs": list(jobs), "forget": forget}
        answer = self._each(operations.RESTORE, gpus=uuids, controls=names, **more)
        return {uuid: one.controls for uuid, one in answer.items()}

    def persist(self, gpus: str | Sequence[str], controls: Sequence[Control | str]) -> None:
        """Makes the values that this process has set the restore targets, until `restore`. For
        administrators. A power limit is then also the highest that others may set.

        Raises:
            RequestRejected: This process has not set one of these controls.
        """
        names = [Control(control).value for control in controls]
        self._each(operations.PERSIST, gpus=_uuids(gpus), controls=names)

    def set_ceiling(
        self,
        gpus: str | Sequence[str],
        name: str,
        power_limit_mw: int | None,
        *,
        ttl_s: float | None = None,
        until_boot_ns: int | None = None,
        fallback_mw: int | None = None,
        control_group: str = "",
    ) -> dict[str, int]:
        """Sets or removes a ceiling of the power limit; for administrators.

        Args:
            gpus: UUIDs.
            name: `fleet`, `persisted` or `job:ID`.
            power_limit_mw: The bound; None removes it.
            ttl_s: Then `fallback_mw` takes its place, unless it is set again before.
            until_boot_ns: The same as an instant of CLOCK_BOOTTIME. A request that reaches zeusd
                later is refused.
            fallback_mw: At most `power_limit_mw`; None: the ceiling ends then.
            control_group: See `SetCeiling`.

        Returns:
            The highest limit that may be set now, mW, by UUID.
        """
        answer = self._each(
            operations.SET_CEILING,
            gpus=_uuids(gpus),
            name=name,
            value=None if power_limit_mw is None else [power_limit_mw],
            ttl_ms=0 if ttl_s is None else max(1, round(ttl_s * 1000)),
            until_boot_ns=until_boot_ns or 0,
            fallback=None if fallback_mw is None else [fallback_mw],
            control_group=control_group,
        )
        return {uuid: one.highest[0] for uuid, one in answer.items()}

    def publish_profile(
        self,
        gpus: str | Sequence[str],
        progress: Mapping[int, float] | None = None,
        *,
        measuring: bool = False,
        needs_mw: int | None = None,
    ) -> None:
        """Publishes what power limits are worth to this process, which must hold their leases. A
        restart of zeusd discards it.

        Args:
            gpus: UUIDs.
            progress: Relative speed by limit in mW, 1 at the highest; None: unknown.
            measuring: Whether this process measures now, and needs its highest limit for that.
            needs_mw: The limit below which it misses a latency objective; None: it has none.

        Raises:
            LeaseExpired: This process does not hold the lease of a GPU's power limit.
        """
        limits = sorted(progress or {})
        self._each(
            operations.PUBLISH_PROFILE,
            gpus=_uuids(gpus),
            limits_mw=limits,
            progress=[float((progress or {})[limit]) for limit in limits],
            measuring=measuring,
            needs_mw=needs_mw,
        )

    # ------------------------------------------------------------------------------- whose energy

    def allocate(
        self,
        gpus: str | Sequence[str],
        name: str,
        *,
        kind: str = "job",
        run: str = "",
        uid: int | None = None,
        weight: int = 0,
        parts: int = 0,
        control_group: str = "",
    ) -> None:
        """Charges the energy of GPUs to a job or pod from now on; for administrators.

        Args:
            gpus: UUIDs.
            name: Slurm's job id, or `namespace/pod`.
            kind: `job` or `pod`.
            run: Distinguishes runs of one job.
            uid: The user to charge.
            weight: Its part beside other holders; 0: all of it, which ends other allocations.
            parts: Of how many parts that is; 0: as many as are held.
            control_group: Name of its control group, if it differs from `name`.
        """
        self._each(
            operations.ALLOCATE,
            gpus=_uuids(gpus),
            name=name,
            kind=kind,
            run=run,
            uid=NOBODY if uid is None else uid,
            weight=weight,
            parts=parts,
            control_group=control_group,
        )

    def deallocate(
        self,
        name: str,
        *,
        kind: str = "job",
        run: str | None = None,
        gpus: str | Sequence[str] = (),
    ) -> int:
        """Ends an allocation; for administrators. Returns how many GPUs it held.

        Waits until the energy up to now is in the ledger.

        Args:
            name: Slurm's job id, or `namespace/pod`.
            kind: `job` or `pod`.
            run: Only of this run; None: of every run.
            gpus: UUIDs; empty: all that it holds.
        """
        uuids = _uuids(gpus) if gpus else []
        return self._ask(operations.DEALLOCATE, name=name, kind=kind, run=run, gpus=uuids).ended

    def usage(
        self,
        edges: Sequence[int],
        by: str = "user",
        *,
        uid: int | None = None,
        name: str = "",
        device: str = "gpu",
        by_method: bool = False,
        gpus: Sequence[str] = (),
    ) -> replies.Usage:
        """Reads who used how much energy in each interval.

        Args:
            edges: Ends of the intervals: UTC seconds, ascending, multiples of `BUCKET_S`.
            by: `user`, `job`, `pod`, `namespace`, `account`, `process`, `gpu` or
                `total`.
            uid: Only of this user.
            name: Only of the job or pod of this name, or of the run with this SLUID.
            device: `gpu`, or `cpu`: energy of CPU packages.
            by_method: A sum for each method, whose bounds are of one kind.
            gpus: UUIDs; empty: all.
        """
        arguments: dict[str, Any] = {
            "edges": list(edges),
            "by": by,
            "uid": uid,
            "name": name,
            "device": device,
            "by_method": by_method,
            "gpus": list(gpus),
        }
        sums: list[replies.UsageSum] = []
        while True:
            page = self._ask(operations.USAGE, **arguments, offset=len(sums))
            sums += page.sums
            if not page.more:
                return page.model_copy(update={"sums": sums})

    def forget_user(self, uid: int) -> int:
        """Replaces a user by a random number in the ledger; for administrators. Returns the number
        of the user's accounts.
        """
        return self._ask(operations.FORGET_USER, uid=uid).accounts

    def quiesce(self) -> replies.Quiesced:
        """Makes zeusd restore everything and close the driver; for administrators."""
        return self._ask(operations.QUIESCE)

    def resume(self) -> replies.NodeInfo:
        """Makes zeusd reopen the driver and read every GPU again; for administrators."""
        return self._ask(operations.RESUME)

    def policy(self) -> replies.Policy:
        """Reads this user's permissions."""
        return self._ask(operations.POLICY)

    def audit(self, *, after: int = 0, limit: int = 200) -> replies.AuditRecords:
        """Reads the newest records of the audit log, the oldest first.

        Args:
            after: Only records with a higher number.
            limit: Maximum number of records; zeusd keeps a thousand.
        """
        records: list[replies.AuditRecord] = []
        before = 2**62
        while True:
            size = max(1, min(MAX_RECORDS, limit - len(records)))
            page = self._ask(operations.AUDIT, after=after, before=before, limit=size)
            records = [*page.records, *records]
            if len(page.records) < size or len(records) >= limit:
                return page.model_copy(update={"records": records})
            before = records[0].number

    def metrics(self) -> replies.Metrics:
        """Reads the daemon's metrics."""
        return self._ask(operations.METRICS)

    def close(self, *, patient: bool = True) -> None:
        """Releases what this client acquired and ends the connection. Never raises.

        Args:
            patient: Wait for a zeusd that may be restarting. The end of the process ends leases,
                too.
        """
        if self._closed:
            return
        self._closed = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if not patient and isinstance(self._transport, SocketTransport):
            self._transport.patient = False
        # A child of fork acquired nothing through this client unless it used it itself.
        with contextlib.suppress(errors.ZeusIpcError):
            if self._transport.used:
                self._ask(operations.GOODBYE, _timeout_s=min(self._timeout_s, 2.0))
        self._transport.close()

    # --------------------------------------------------------------------------------- internals

    def _message(self, operation: Operation[Any], arguments: dict[str, Any]) -> dict[str, Any]:
        pid = os.getpid()
        if pid != self._pid:
            self._pid = pid
            self._name = secrets.token_hex(6)
            self._guard = threading.Lock()
            self._unraised = None
            self._circuit.after_fork()
            if self._heartbeat is not None:
                self._heartbeat.after_fork()
        return {"v": PROTOCOL_VERSION, "op": operation.name, "client": self._name, **arguments}

    def _ask(
        self, operation: Operation[R], *, _timeout_s: float | None = None, **arguments: Any
    ) -> R:
        """Sends one request; returns its result."""
        return operation.read(self._result(operation, arguments, _timeout_s))

    def _each(self, operation: Operation[R], **arguments: Any) -> dict[str, R]:
        """Sends one request for several GPUs or sources; returns the result for each."""
        return _read_each(operation, self._result(operation, arguments))

    def _result(
        self,
        operation: Operation[Any],
        arguments: dict[str, Any],
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        reply = self._exchange(operation, timeout_s, arguments)
        error = reply.get("error")
        if error is not None:
            raise errors.from_wire(error)
        with self._guard:
            deferred, self._unraised = self._unraised, None
        if deferred is not None:
            raise errors.DeferredSetFailed(
                int(deferred["count"]), errors.from_wire(deferred["last"])
            )
        result = reply.get("result")
        if not isinstance(result, dict):
            raise errors.RequestRejected(
                f"this client cannot read the answer to {operation.name}; use matching releases "
                "of zeusd and its client"
            )
        return result

    def _exchange(
        self, operation: Operation[Any], timeout_s: float | None, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Sends one request; returns its reply. Failures of earlier sets are kept for the next
        `_ask`.
        """
        message = self._message(operation, arguments)
        reply = self._circuit.call(self._transport.request, message, timeout_s or self._timeout_s)
        deferred = reply.get("deferred")
        if deferred is not None:
            with self._guard:
                before = 0 if self._unraised is None else int(self._unraised["count"])
                self._unraised = {**deferred, "count": before + int(deferred["count"])}
        return reply

    def _probe(self) -> None:
        """Sends any request. Raises the error of a request that got no reply."""
        self._exchange(operations.HELLO, None, {"client_version": __version__})

    def _beat(self) -> replies.HeartbeatResult:
        return _read(operations.HEARTBEAT, self._exchange(operations.HEARTBEAT, None, {}))

    def _holds(self) -> None:
        """Notes that this process may hold a lease from now on."""
        if self._heartbeat is not None:
            self._heartbeat.start()

    def _set(
        self,
        operation: Operation[replies.Applied],
        gpus: str | Sequence[str],
        block: bool,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Sets a control; returns the results as decoded from the wire."""
        arguments["gpus"] = _uuids(gpus)
        if block:
            result = self._result(operation, arguments)
            self._holds()
            return _answers(operation, result)
        arguments["block"] = False
        message = self._message(operation, arguments)
        self._circuit.call(self._transport.send, message, self._timeout_s)
        self._holds()
        return {}


def _read(operation: Operation[R], reply: dict[str, Any]) -> R:
    if "error" in reply:
        raise errors.from_wire(reply["error"])
    return operation.read(reply["result"])


def _read_each(operation: Operation[R], result: dict[str, Any]) -> dict[str, R]:
    return {name: operation.read(one) for name, one in _answers(operation, result).items()}


def _answers(operation: Operation[Any], result: dict[str, Any]) -> dict[str, Any]:
    """Returns the result for each GPU or source, as decoded from the wire.

    Raises:
        ZeusIpcError: Some failed.
    """
    answers: dict[str, Any] = result[operation.each]
    failed = {
        name: errors.from_wire(one["error"]) for name, one in answers.items() if "error" in one
    }
    if not failed:
        return answers
    if len(answers) == 1:
        raise next(iter(failed.values()))
    raise errors.SeveralGpusFailed(failed)


def _uuids(gpus: str | Sequence[str]) -> list[str]:
    return [gpus] if isinstance(gpus, str) else _listed(gpus, "GPUs are a UUID or a list of UUIDs")


def _listed(values: Iterable[Any], rule: str) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise errors.RequestRejected(f"{rule}, not {values!r:.60}")
    return list(values)
