"""One GPU of the AMD backend: a socket of libamd_smi, its locks, and how its loss is detected."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from zeusd.devices.amd import sysfs
from zeusd.devices.amd.codes import GONE
from zeusd.devices.amd.energy import EnergyCounter, LimitedTime
from zeusd.devices.amd.library import Buffer, Library
from zeusd.devices.port import CallOutcome, DeviceError

log = logging.getLogger(__name__)


@dataclass
class Socket:
    """One GPU, while this driver is loaded.

    Attributes:
        partitions: Handles; the first one has the socket's settings.
        address: PCI address without the function.
        uuid: See `AmdBackend.uuid`.
        card: Its folder in sysfs.
        guard: Lock held while several calls make one change.
        counter: Its energy counter.
        limited: Its time limited.
        violations: When their status was last read, and the status.
        celsius: The library's units per degree Celsius; None: not known yet.
        nodes: Numbers of its partitions in the kernel's topology; empty: not known yet.
    """

    partitions: list[int]
    address: str
    card: sysfs.Card
    uuid: str
    guard: threading.Lock = field(default_factory=threading.Lock)
    counter: EnergyCounter = field(default_factory=EnergyCounter)
    limited: LimitedTime = field(default_factory=LimitedTime)
    sensor_guard: threading.Lock = field(default_factory=threading.Lock)
    violations: tuple[int, Buffer] | None = None
    celsius: int | None = None
    nodes: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The partition that represents the socket."""
        return self.partitions[0]


class Calls:
    """Guards several calls on one socket; reports a GPU that has left the bus as lost."""

    def __init__(self, library: Library, socket: Socket, exclusive: bool) -> None:
        self._library = library
        self._socket = socket
        self._exclusive = exclusive

    def __enter__(self) -> tuple[Library, Socket]:
        if self._exclusive:
            self._socket.guard.acquire()
        return self._library, self._socket

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._exclusive:
            self._socket.guard.release()
        if isinstance(error, DeviceError):
            cause = lost(self._socket, error)
            if cause is not error:
                raise cause from None


def lost(socket: Socket, error: DeviceError) -> DeviceError:
    """Turns the error of a GPU whose folder in sysfs is gone into `LOST`: AMD has no code for
    it."""
    if error.code in GONE and not socket.card.there:
        text = f"{error.text}; the GPU has left the PCI bus"
        return DeviceError(CallOutcome.LOST, error.call, text, error.code)
    return error


def report_counter(socket: Socket) -> None:
    """Logs that a counter is trusted again, or no longer."""
    if socket.counter.believed:
        text = "the energy counter of %s agrees with its power again, and is used"
    else:
        text = "the energy counter of %s does not agree with its power; power is integrated instead"
    log.warning(text, socket.uuid, extra={"event": "energy_counter", "gpu": socket.uuid})
