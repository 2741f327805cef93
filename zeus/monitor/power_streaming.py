"""`PowerStreamingClient`: power of this node's GPUs and CPUs as zeusd's stream publishes it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeus.compat.table import PAGE
from zeus.exceptions import ZeusBaseError
from zeus_ipc.client import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.requests import Domain
from zeus_ipc.sockets import socket_path

CPU_PERIOD_S = 0.1
"""Interval at which the power of CPUs is read, and the longest wait for a GPU's next sample."""


class ZeusdConnectionError(ZeusBaseError):
    """zeusd cannot be reached, or not over the network."""


class ZeusdAuthError(ZeusBaseError):
    """Never raised: the kernel identifies zeusd's clients."""


class ZeusdCapabilityError(ZeusBaseError):
    """zeusd does not offer the requested readings."""


@dataclass(frozen=True)
class ZeusdConfig:
    """The address of a zeusd, and the devices to follow.

    Attributes:
        host_port: Not supported: zeusd opens no port.
        token: Has no effect: the kernel identifies clients.
        gpu_indices: GPUs, by zeusd's index; None: all; []: none.
        cpu_indices: CPU packages; None: all whose energy is measured; []: none.
    """

    host_port: str | None = None
    socket_path: str | None = None
    token: str | None = None
    gpu_indices: list[int] | None = None
    cpu_indices: list[int] | None = None

    @classmethod
    def tcp(cls, host: str, port: int, **options: Any) -> ZeusdConfig:
        """A zeusd of another node, which `PowerStreamingClient` refuses."""
        return cls(f"{host}:{port}", **options)

    @classmethod
    def uds(cls, socket_path: str, **options: Any) -> ZeusdConfig:
        """The zeusd of this node that has a socket; the options are the attributes above."""
        return cls(None, socket_path, **options)

    @classmethod
    def from_env(cls) -> ZeusdConfig:
        """The zeusd that `$ZEUSD_SOCK_PATH` names, or the one of this node."""
        return cls(socket_path=socket_path())

    @property
    def endpoint(self) -> str:
        """Its socket."""
        if self.socket_path is None:
            raise ZeusdConnectionError(
                f"{self.host_port or 'zeusd'} cannot be reached over the network: zeusd opens no "
                "port. Follow the zeusd of each node there, with ZeusdConfig.uds(PATH), or use its "
                f"Prometheus exporter; see {PAGE}"
            )
        return self.socket_path


@dataclass
class CpuPowerReading:
    """Power of a CPU package, W, and of its memory, W; None where that is not measured."""

    cpu_w: float = 0.0
    dram_w: float | None = None


@dataclass
class PowerReadings:
    """The newest readings of one zeusd.

    Attributes:
        timestamp_s: When, seconds since the epoch.
    """

    timestamp_s: float = 0.0
    gpu_power_w: dict[int, float] = field(default_factory=dict)
    cpu_power_w: dict[int, CpuPowerReading] = field(default_factory=dict)


class PowerStreamingClient:
    """Follows the power of GPUs and CPUs on a thread for each zeusd.

    Read the newest with `get_power`, or iterate, also with `async for`: each item is what
    `get_power` returns after the next update of a sensor.

    Raises:
        ValueError: A zeusd is named twice, or an index names no GPU or CPU of it.
        ZeusdConnectionError: A zeusd cannot be reached.
    """

    def __init__(self, servers: Sequence[ZeusdConfig], reconnect_delay_s: float = 1.0) -> None:
        endpoints = [server.endpoint for server in servers]
        if len(set(endpoints)) < len(endpoints):
            raise ValueError(f"a zeusd is named twice: {', '.join(endpoints)}")
        self._delay_s = reconnect_delay_s
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._readings: dict[str, PowerReadings] = {}  # replaced, never changed
        self._threads = [
            threading.Thread(target=self._follow, args=of, name="zeus-power", daemon=True)
            for of in [(server.endpoint, *_devices(server)) for server in servers]
        ]
        for thread in self._threads:
            thread.start()

    def get_power(self) -> dict[str, PowerReadings]:
        """The newest power, by socket; without those that have published nothing yet."""
        return dict(self._readings)

    def stop(self) -> None:
        """Ends the threads and all iterations."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(5.0)

    def __iter__(self) -> Iterator[dict[str, PowerReadings]]:
        seen = self._readings
        while True:
            with self._changed:
                while self._readings is seen and not self._stopped.is_set():
                    self._changed.wait()
                seen = self._readings
            if self._stopped.is_set():
                return
            yield dict(seen)

    async def __aiter__(self) -> AsyncIterator[dict[str, PowerReadings]]:
        items = iter(self)
        while (item := await asyncio.to_thread(next, items, None)) is not None:
            yield item

    def _follow(self, endpoint: str, gpus: dict[str, int], cpus: dict[int, bool]) -> None:
        gpu_w: dict[int, float] = {}
        cpu_w: dict[int, CpuPowerReading] = {}
        next_cpus_s = 0.0
        while not self._stopped.is_set():
            with (
                contextlib.suppress(ZeusIpcError),
                Client(endpoint) as client,
                client.stream(list(gpus)) as stream,
            ):
                while not self._stopped.is_set():
                    sample = stream.receive(CPU_PERIOD_S)
                    due = bool(cpus) and time.monotonic() >= next_cpus_s
                    if sample is not None:
                        gpu_w[gpus[sample.gpu]] = sample.power_mw / 1000
                    if due:
                        next_cpus_s = time.monotonic() + CPU_PERIOD_S
                        cpu_w |= _cpu_power(client, cpus)
                    if due or sample is not None:
                        now = PowerReadings(time.time(), dict(gpu_w), dict(cpu_w))
                        with self._changed:
                            self._readings = {**self._readings, endpoint: now}
                            self._changed.notify_all()
            self._stopped.wait(self._delay_s)


def _devices(config: ZeusdConfig) -> tuple[dict[str, int], dict[int, bool]]:
    """Indices of the GPUs by UUID, and of each CPU whether its memory is measured, too."""
    try:
        with Client(config.endpoint) as client:
            node = client.node()
    except ZeusIpcError as error:
        raise ZeusdConnectionError(error.message) from error
    uuids, dram = [gpu.uuid for gpu in node.gpus], {cpu.index: cpu.dram for cpu in node.cpus}
    gpus = _chosen("GPU", config.gpu_indices, range(len(uuids)), config.endpoint)
    cpus = _chosen("CPU", config.cpu_indices, list(dram), config.endpoint)
    return {uuids[index]: index for index in gpus}, {index: dram[index] for index in cpus}


def _chosen(
    kind: str, asked: Sequence[int] | None, there: Sequence[int], endpoint: str
) -> Sequence[int]:
    missing = sorted(set(asked or ()) - set(there))
    if missing:
        raise ValueError(
            f"The zeusd at {endpoint} has no {kind} {missing[0]}; it has: "
            f"{', '.join(map(str, there)) or 'none'}"
        )
    return there if asked is None else asked


def _cpu_power(client: Client, cpus: dict[int, bool]) -> dict[int, CpuPowerReading]:
    def newest_w(source: str) -> float | None:
        samples = client.timeline(source, Domain.POWER, time.monotonic_ns() - 1_000_000_000)
        return samples[-1][1] / 1000 if samples else None

    readings = {}
    for index, dram in cpus.items():
        cpu_w = newest_w(f"cpu:{index}")
        if cpu_w is not None:
            readings[index] = CpuPowerReading(cpu_w, newest_w(f"dram:{index}") if dram else None)
    return readings
