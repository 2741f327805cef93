"""AMD Instinct GPUs of this machine.

A GPU is a socket of libamd_smi, which is one PCI device: a card, or one die of an MI250. Power cap,
clocks and energy belong to the whole socket, so all calls go through its first partition.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.overriding import override
from zeusd.devices.amd import clocks, layouts, sysfs
from zeusd.devices.amd.codes import Status, amd_error
from zeusd.devices.amd.energy import MAX_POWER_W
from zeusd.devices.amd.library import INIT_S, Buffer, Library, Opener
from zeusd.devices.amd.power_cap import Cap, write_cap
from zeusd.devices.amd.profiles import Presets, write_profile
from zeusd.devices.amd.sockets import Calls, Socket, lost, report_counter
from zeusd.devices.control_calls import ControlCalls, TabledControls
from zeusd.devices.port import (
    CallOutcome,
    DeviceError,
    GpuProcess,
    Handle,
    MigInstance,
    PowerLimitRange,
    ProcessUse,
    SensorValues,
    WorkloadProfile,
    after_a_write,
)

_HOTSPOT, _CURRENT = 1, 0

_TWO_DIES = "MI250"
"""Part of the name of products whose cards have two GPUs each."""

_POWER, _HW_SLOWDOWN, _HW_THERMAL = 0x4, 0x8, 0x40
_REASONS = (_HW_SLOWDOWN, _POWER, _HW_THERMAL, _HW_THERMAL, _HW_THERMAL)
"""Throttle reasons, as the port numbers them, of the library's violations in their order."""


class AmdBackend(TabledControls):
    """Implements `zeusd.devices.port.Backend`.

    Args:
        library: The libamd_smi to load; None: the first one found.
        sysfs_root: Where sysfs is mounted.
        init_s: Time limit for initialising the library.
    """

    def __init__(
        self, library: str | None = None, sysfs_root: str = sysfs.ROOT, init_s: float = INIT_S
    ) -> None:
        self._opener = Opener(library, init_s)
        self._root = sysfs_root
        self._library: Library | None = None
        self._sockets: list[Socket] = []
        self._inits = 0
        self._guard = threading.Lock()
        self.controls = self._control_calls()

    def _control_calls(self) -> dict[Control, ControlCalls]:
        def domain_offered(domain: int) -> Callable[[Handle], bool]:
            return lambda gpu: self._clocks(gpu).limits[domain][1] > 0

        return {
            Control.POWER_LIMIT: ControlCalls(
                offered=lambda gpu: bool(self.power_limits(gpu)),
                write=lambda gpu, value: self.set_power_limit(gpu, value[0]),
                read=lambda gpu: (self.power_limit_mw(gpu),),
                range=lambda gpu: self.power_limits(gpu)[:2],
            ),
            Control.GPU_CLOCKS: ControlCalls(
                offered=domain_offered(clocks.GRAPHICS), write=self._set_gpu_clocks
            ),
            Control.MEMORY_CLOCKS: ControlCalls(
                offered=domain_offered(clocks.MEMORY), write=self._set_memory_clocks
            ),
            Control.POWER_PROFILE: ControlCalls(
                offered=lambda gpu: bool(self.power_profiles(gpu)),
                write=self._set_profile,
                read=lambda gpu: self._presets(gpu).requested,
            ),
        }

    # ------------------------------------------------------------------------------ the driver

    @override
    def init(self) -> None:
        """Initialises the library once, however often this is called."""
        with self._guard:
            if self._inits == 0:
                if not sysfs.driver_loaded(self._root):
                    raise amd_error(Status.DRIVER_NOT_LOADED, "amdsmi_init")
                library = self._opener.open()
                try:
                    self._sockets = list(self._enumerate(library))
                except DeviceError:
                    library.status("shut_down")
                    raise
                self._library = library
            self._inits += 1

    @override
    def shutdown(self) -> None:
        with self._guard:
            library = self._lib("shut_down")
            self._inits -= 1
            if self._inits == 0:
                self._library, self._sockets = None, []
                library.call("shut_down")

    @override
    def driver_version(self) -> str:
        return sysfs.driver_version(self._root)

    @override
    def device_count(self) -> int:
        self._lib("get_socket_handles")
        return len(self._sockets)

    @override
    def device_handle(self, index: int) -> Handle:
        self._lib("get_processor_handles")
        if not 0 <= index < len(self._sockets):
            raise amd_error(Status.INVALID, "amdsmi_get_processor_handles")
        return self._sockets[index]

    def _enumerate(self, library: Library) -> Iterator[Socket]:
        sockets: list[tuple[int, list[int]]] = []
        for socket in library.handles("get_socket_handles"):
            partitions = library.gpus_of(socket)
            if partitions:
                bdf = library.read("get_gpu_device_bdf", partitions[0]).number("<Q")
                sockets.append((bdf, partitions))
        seen: set[str] = set()
        for bdf, partitions in sorted(sockets):
            address = sysfs.address(bdf, 8)
            card = sysfs.Card(self._root, bdf)
            uuid = f"GPU-{card.unique_id() or 'AMD'}"
            if uuid in seen or uuid == "GPU-AMD":
                uuid += f"-{address}"
            seen.add(uuid)
            yield Socket(partitions, address, card, uuid)

    # ----------------------------------------------------------------------------- identity

    @override
    def uuid(self, gpu: Handle) -> str:
        """`GPU-` and the chip's unique_id, which is the name that ROCm's runtime uses.

        The library's own UUID changes between its releases. If there is no unique_id, or two dies
        share one, the UUID includes the PCI address.
        """
        return self._socket(gpu).uuid

    @override
    def name(self, gpu: Handle) -> str:
        return self._read(gpu, "get_gpu_asic_info").text(0, 256) or "AMD GPU"

    @override
    def vbios(self, gpu: Handle) -> str:
        return self._socket(gpu).card.vbios() or ""

    @override
    def pci_address(self, gpu: Handle) -> str:
        return self._socket(gpu).address

    @override
    def device_file(self, gpu: Handle) -> str:
        path = self._socket(gpu).card.render_node()
        if path is None:
            raise amd_error(Status.NOT_SUPPORTED, "device_file", "the kernel lists no render node")
        return path

    @override
    def architecture(self, gpu: Handle) -> int:
        """Always raises `UNSUPPORTED`: the number is NVML's."""
        raise amd_error(Status.NOT_SUPPORTED, "architecture", "AMD GPUs have no NVML architecture")

    @override
    def memory_mib(self, gpu: Handle) -> int:
        return self._memory(gpu, "total")

    @override
    def mig_enabled(self, gpu: Handle) -> bool:
        """Whether the GPU is partitioned, AMD's counterpart of MIG; partitions share cap, clocks
        and energy."""
        return len(self._socket(gpu).partitions) > 1

    @override
    def runtime_indices(self, gpu: Handle) -> list[int]:
        """HIP counts the nodes of the kernel's compute driver (KFD) in ascending order; each
        partition is a node. Libraries before 24.7 do not report them.
        """
        for socket in self._sockets:
            if not socket.nodes:  # they do not change until the driver is reloaded
                socket.nodes = [self._node_of(partition) for partition in socket.partitions]
        order = sorted(node for socket in self._sockets for node in socket.nodes)
        if len(set(order)) < len(order):
            text = "two partitions have the same number in the kernel's topology"
            raise amd_error(Status.UNEXPECTED_DATA, "amdsmi_get_gpu_kfd_info", text)
        return [order.index(node) for node in self._socket(gpu).nodes]

    def _node_of(self, partition: int) -> int:
        # This also asks the other GPUs, and a lost one must not make this one lost.
        reply = self._lib("get_gpu_kfd_info").read("get_gpu_kfd_info", partition)
        return reply.number("<I", layouts.KFD_NODE)

    def _place(self, gpu: Handle) -> int:
        """Index on the node."""
        socket = self._socket(gpu)
        return next(at for at, one in enumerate(self._sockets) if one is socket)

    @override
    def power_domain(self, gpu: Handle) -> list[int]:
        """The dies of an MI250 are adjacent on the bus, and one of them has the cap."""
        place = self._place(gpu)
        if _TWO_DIES not in self.name(gpu):
            return []
        like = [at for at, one in enumerate(self._sockets) if _TWO_DIES in self.name(one)]
        first = like.index(place) // 2 * 2
        dies = like[first : first + 2]
        return sorted(dies, key=lambda at: not self._has_cap(self._sockets[at]))

    def _has_cap(self, gpu: Handle) -> bool:
        try:
            return bool(self.power_limits(gpu))
        except DeviceError as error:
            if error.outcome is CallOutcome.UNSUPPORTED:
                return False
            raise

    @override
    def module(self, gpu: Handle) -> int | None:
        """None: AMD's GPUs report the power of the socket only."""
        self._socket(gpu)
        return None

    @override
    def power_profiles(self, gpu: Handle) -> list[WorkloadProfile]:
        """The driver's presets, which tune how it chooses clocks. MI300 has none."""
        return self._presets(gpu).profiles

    @override
    def enforced_power_profiles(self, gpu: Handle) -> ControlValue:
        presets = self._presets(gpu)
        if not presets.offered:
            raise amd_error(Status.NOT_SUPPORTED, "power_profiles", "this GPU has none")
        return presets.requested

    def _presets(self, gpu: Handle) -> Presets:
        with self._reading(gpu, "get_gpu_power_profile_presets") as (library, socket):
            return Presets(library, socket.first)

    def _set_profile(self, gpu: Handle, value: ControlValue) -> None:
        with self._changing(gpu, "set_gpu_power_profile") as (library, socket):
            write_profile(library, socket.first, value)
            if not value:
                with after_a_write():
                    clocks.relax(library, socket.first)

    # --------------------------------------------------------------------------- power limits

    @override
    def power_limits(self, gpu: Handle) -> PowerLimitRange:
        return self._cap(gpu).limits

    def power_limit_mw(self, gpu: Handle) -> int:
        """The power cap, mW."""
        return self._cap(gpu).mw

    @override
    def enforced_power_limit_mw(self, gpu: Handle) -> int:
        """The requested limit: AMD reports no other."""
        return self._cap(gpu).mw

    def set_power_limit(self, gpu: Handle, power_limit_mw: int) -> None:
        """Sets the power cap, rounded down to whole watts."""
        with self._changing(gpu, "set_power_cap") as (library, socket):
            write_cap(library, socket.first, power_limit_mw)

    # --------------------------------------------------------------------------------- clocks

    @override
    def supported_memory_clocks(self, gpu: Handle) -> list[int]:
        reply = self._read(gpu, "get_clk_freq", clocks.MEMORY)
        count = min(reply.number("<I", layouts.LEVEL_COUNT), layouts.LEVELS_MAX)
        levels = reply.numbers(f"<{count}Q", layouts.LEVELS)
        return sorted({level // 1_000_000 for level in levels if level}, reverse=True)

    @override
    def supported_gpu_clocks(self, gpu: Handle, memory_clock_mhz: int) -> list[int]:
        """Clocks at fixed steps of the continuous range."""
        low, high = self._clocks(gpu).limits[clocks.GRAPHICS]
        # Step between listed graphics clocks, whose range is continuous.
        return sorted({*range(high, low, -25), low}, reverse=True)

    @override
    def gpu_clock_mhz(self, gpu: Handle) -> int:
        return self._clock_mhz(gpu, clocks.GRAPHICS)

    @override
    def memory_clock_mhz(self, gpu: Handle) -> int:
        return self._clock_mhz(gpu, clocks.MEMORY)

    def _clock_mhz(self, gpu: Handle, domain: int) -> int:
        mhz = self._read(gpu, "get_clock_info", domain).number("<I", layouts.CLOCK)
        return _present(mhz, "amdsmi_get_clock_info")

    def _set_gpu_clocks(self, gpu: Handle, value: ControlValue) -> None:
        with self._changing(gpu, "set_gpu_clk_limit") as (library, socket):
            if value:
                clocks.lock_graphics(library, socket.first, *value)
            else:
                clocks.unlock(library, socket.first, clocks.GRAPHICS)

    def _set_memory_clocks(self, gpu: Handle, value: ControlValue) -> None:
        with self._changing(gpu, "set_gpu_clk_limit") as (library, socket):
            if value:
                clocks.lock_memory(library, socket.first, value[1])
            else:
                clocks.unlock(library, socket.first, clocks.MEMORY)

    # ------------------------------------------------------------------------------ the state

    @override
    def sensors(self, gpu: Handle, counter: bool = True, averages: bool = True) -> SensorValues:
        """Two calls, each of which makes the driver query the GPU, and with averages a third. GPUs
        before MI300 have filtered power only, which stands in for the instant power too.
        """
        socket = self._socket(gpu)
        library = self._lib("get_energy_count")
        limited_ns = self._limited_ns(socket) if averages else ()
        count, unit, stamp = ctypes.c_uint64(), ctypes.c_float(), ctypes.c_uint64()
        out = (ctypes.byref(count), ctypes.byref(unit), ctypes.byref(stamp))
        before_ns = time.monotonic_ns()
        code = library.status("get_energy_count", socket.first, *out)
        took_ns = time.monotonic_ns() - before_ns
        t_ns = before_ns + took_ns // 2
        if code not in (Status.SUCCESS, Status.NOT_SUPPORTED, Status.NO_SYMBOL):
            raise self._error(socket, code, "get_energy_count")
        instant_w, average_w = self._power_w(library, socket)
        energy_uj = None
        if code == Status.SUCCESS:
            with socket.sensor_guard:
                energy_uj = socket.counter.energy_uj(t_ns, count.value, instant_w)
                if socket.counter.changed:
                    report_counter(socket)
        return SensorValues(
            t_ns,
            None if energy_uj is None else energy_uj // 1000,
            None if instant_w is None else instant_w * 1000,
            None if average_w is None else average_w * 1000,
            None,
            took_ns=took_ns,
            limited_ns=limited_ns,
        )

    def _limited_ns(self, socket: Socket) -> tuple[int | None, ...]:
        """The time limited by each reason."""
        try:
            reply = self._violations(socket)
        except DeviceError:
            return ()
        with socket.sensor_guard:
            return socket.limited.ns(time.monotonic_ns(), reply.numbers("<6Q", layouts.VIOLATIONS))

    def _violations(self, socket: Socket) -> Buffer:
        """The status of violations, for which some versions take 0.1 s."""
        buffer = Buffer()
        code = self._lib("get_violation_status").status(
            "get_violation_status", socket.first, buffer.data
        )
        if code != Status.SUCCESS:
            raise self._error(socket, code, "get_violation_status")
        socket.violations = time.monotonic_ns(), buffer
        return buffer

    def _power_w(self, library: Library, socket: Socket) -> tuple[int | None, int | None]:
        """Instant and average power, W."""
        buffer = Buffer()
        code = library.status("get_power_info", socket.first, buffer.data)
        if code == Status.NOT_SUPPORTED:
            return None, None
        if code != Status.SUCCESS:
            raise self._error(socket, code, "get_power_info")
        now, average = (_watts(buffer.number("<I", one)) for one in library.layouts.power)
        return now if now is not None else average, average

    @override
    def temperature_c(self, gpu: Handle) -> int:
        """Temperature of the hottest spot; the library's unit changed between releases."""
        socket = self._socket(gpu)
        if socket.celsius is None:
            typical = median(self._temperature(gpu) for _ in range(3))
            socket.celsius = 1000 if typical > 1000 else 1
        found_c = self._temperature(gpu) // socket.celsius
        # A higher temperature is a torn reading.
        if not 0 <= found_c <= 150:
            raise amd_error(
                Status.UNEXPECTED_DATA,
                "amdsmi_get_temp_metric",
                f"a temperature of {found_c} degrees Celsius is not plausible",
            )
        return found_c

    def _temperature(self, gpu: Handle) -> int:
        return self._read(gpu, "get_temp_metric", _HOTSPOT, _CURRENT).number("<q")

    @override
    def throttle_reasons(self, gpu: Handle) -> int:
        """The library's violations as the port's bits."""
        socket = self._socket(gpu)
        read_ns, reply = socket.violations or (0, Buffer())
        # Age up to which a status of violations is not read again.
        if time.monotonic_ns() - read_ns > 200_000_000:
            reply = self._violations(socket)
        active = reply.numbers("<5B", self._lib("get_violation_status").layouts.violations)
        if all(one not in (0, 1) for one in active):
            raise amd_error(Status.NOT_SUPPORTED, "amdsmi_get_violation_status")
        reasons = 0
        for one, reason in zip(active, _REASONS, strict=True):
            reasons |= reason if one == 1 else 0
        return reasons

    @override
    def processes(self, gpu: Handle) -> list[GpuProcess]:
        """Processes of all partitions. Before ROCm 10, a process is listed on every GPU it
        opened."""
        socket = self._socket(gpu)
        memory_by_pid: dict[int, int] = {}
        for partition in socket.partitions:
            for pid, memory in self._listed(socket, partition):
                memory_by_pid[pid] = max(memory_by_pid.get(pid, 0), memory)
        return [GpuProcess(pid, memory_by_pid[pid], compute=True) for pid in sorted(memory_by_pid)]

    def _listed(self, socket: Socket, partition: int) -> Iterator[tuple[int, int]]:
        library = self._lib("get_gpu_process_list")
        size, pid_at, memory_at = library.layouts.process
        # Entries requested with the first list of processes; a longer list takes a second call.
        room, count = 128, ctypes.c_uint32()
        while True:
            entries = Buffer(room * size + layouts.BUFFER)
            count.value = room
            code = library.status(
                "get_gpu_process_list", partition, ctypes.byref(count), entries.data
            )
            more = code in (*Status.MORE_DATA, Status.OUT_OF_RESOURCES)
            if not more or room > 1 << 16:
                break
            room = max(2 * room, count.value)
        if code != Status.SUCCESS:
            raise self._error(socket, code, "get_gpu_process_list")
        for entry in range(min(count.value, room)):
            pid = entries.number("<I", entry * size + pid_at)
            if pid:
                yield pid, entries.number("<Q", entry * size + memory_at)

    @override
    def process_utilization(self, gpu: Handle, since_us: int) -> list[ProcessUse]:
        """None: the library does not report use by process."""
        raise DeviceError(
            CallOutcome.UNSUPPORTED, "process_utilization", "not offered by libamd_smi"
        )

    @override
    def mig_instances(self, gpu: Handle, measure: bool = False) -> list[MigInstance]:
        """None: partitions do not list their own processes."""
        return []

    @override
    def utilization_percent(self, gpu: Handle) -> int:
        percent = self._read(gpu, "get_gpu_activity").number("<I", layouts.ACTIVITY)
        return _present(percent, "amdsmi_get_gpu_activity")

    @override
    def memory_used_mib(self, gpu: Handle) -> int:
        return self._memory(gpu, "used")

    # -------------------------------------------------------------------------------- internals

    def _lib(self, name: str) -> Library:
        library = self._library
        if library is None:
            raise amd_error(Status.NOT_INITIALISED, f"amdsmi_{name}")
        return library

    def _socket(self, gpu: Handle) -> Socket:
        """The socket of a handle; rejects a handle from an earlier initialisation."""
        self._lib("get_processor_handles")
        if not any(gpu is socket for socket in self._sockets):
            raise amd_error(Status.INVALID, "amdsmi_get_processor_handles")
        socket: Socket = gpu
        return socket

    def _read(self, gpu: Handle, name: str, *arguments: int) -> Buffer:
        socket, buffer = self._socket(gpu), Buffer()
        code = self._lib(name).status(name, socket.first, *arguments, buffer.data)
        if code != Status.SUCCESS:
            raise self._error(socket, code, name)
        return buffer

    def _cap(self, gpu: Handle) -> Cap:
        with self._reading(gpu, "get_power_cap_info") as (library, socket):
            return Cap(library, socket.first)

    def _clocks(self, gpu: Handle) -> clocks.ClockState:
        with self._reading(gpu, "get_gpu_od_volt_info") as (library, socket):
            return clocks.read_clocks(library, socket.first)

    def _memory(self, gpu: Handle, which: str) -> int:
        size = self._socket(gpu).card.memory_bytes(which)
        if size is None:
            raise amd_error(Status.FILE, f"mem_info_vram_{which}", "sysfs has no such file")
        return size // (1024 * 1024)

    def _error(self, socket: Socket, code: int, name: str) -> DeviceError:
        return lost(socket, amd_error(code, f"amdsmi_{name}"))

    def _reading(self, gpu: Handle, name: str) -> Calls:
        return Calls(self._lib(name), self._socket(gpu), exclusive=False)

    def _changing(self, gpu: Handle, name: str) -> Calls:
        return Calls(self._lib(name), self._socket(gpu), exclusive=True)


def _watts(number: int) -> int | None:
    return number if 0 < number <= MAX_POWER_W else None


def _present(number: int, call: str) -> int:
    if number in layouts.ABSENT_32:
        raise amd_error(Status.NOT_SUPPORTED, call, "the driver has no such reading")
    return number
