"""`PowerStreamingClient`: power of this node's GPUs and CPUs as zeusd's stream publishes it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from zeus.compat.table import PAGE
from zeus.exceptions import ZeusBaseError
from zeus_ipc.client import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.paths import socket_path
from zeus_ipc.requests import Domain
from zeus_ipc.stream import SampleStream

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
    def tcp(
        cls,
        host: str,
        port: int,
        *,
        token: str | None = None,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
    ) -> ZeusdConfig:
        """A zeusd of another node, which `PowerStreamingClient` refuses."""
        return cls(f"{host}:{port}", None, token, gpu_indices, cpu_indices)

    @classmethod
    def uds(
        cls,
        socket_path: str,
        *,
        token: str | None = None,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
    ) -> ZeusdConfig:
        """The zeusd of this node that has a socket."""
        return cls(None, socket_path, token, gpu_indices, cpu_indices)

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
        endpoints = [one.endpoint for one in servers]
        twice = sorted({one for one in endpoints if endpoints.count(one) > 1})
        if twice:
            raise ValueError(f"zeusd is named twice: {', '.join(twice)}")
        self._delay_s = reconnect_delay_s
        self._changed = threading.Condition()
        self._count = 0
        self._stopped = threading.Event()
        self._readings: dict[str, PowerReadings] = {}
        followers = [_Follower(one) for one in servers]
        self._threads = [
            threading.Thread(target=self._follow, args=(one,), name="zeus-power", daemon=True)
            for one in followers
        ]
        for thread in self._threads:
            thread.start()

    def get_power(self) -> dict[str, PowerReadings]:
        """The newest power, by socket; without those that have published nothing yet."""
        with self._changed:
            return {
                endpoint: PowerReadings(
                    one.timestamp_s, dict(one.gpu_power_w), dict(one.cpu_power_w)
                )
                for endpoint, one in self._readings.items()
            }

    def stop(self) -> None:
        """End the threads and all iterations."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(5.0)

    def __iter__(self) -> Iterator[dict[str, PowerReadings]]:
        seen = self._count
        while not self._stopped.is_set():
            with self._changed:
                while self._count == seen and not self._stopped.is_set():
                    self._changed.wait()
                seen = self._count
            if not self._stopped.is_set():
                yield self.get_power()

    async def __aiter__(self) -> AsyncIterator[dict[str, PowerReadings]]:
        items = iter(self)
        while (item := await asyncio.to_thread(next, items, None)) is not None:
            yield item

    def _follow(self, follower: _Follower) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(ZeusIpcError), follower.open() as sources:
                while not self._stopped.is_set():
                    reading = sources.read()
                    if reading is not None:
                        with self._changed:
                            self._readings[follower.endpoint] = reading
                            self._count += 1
                            self._changed.notify_all()
            self._stopped.wait(self._delay_s)


class _Follower:
    """One zeusd, with the GPUs and CPUs to follow."""

    def __init__(self, config: ZeusdConfig) -> None:
        self.endpoint = config.endpoint
        try:
            with Client(self.endpoint) as client:
                node = client.node()
        except ZeusIpcError as error:
            raise ZeusdConnectionError(error.message) from error
        gpus = _chosen("GPU", config.gpu_indices, range(len(node.gpus)), self.endpoint)
        self.uuids = {index: node.gpus[index].uuid for index in gpus}
        cpus = {one.index: one for one in node.cpus}
        chosen = _chosen("CPU", config.cpu_indices, list(cpus), self.endpoint)
        self.cpus = {index: cpus[index].dram for index in chosen}

    @contextlib.contextmanager
    def open(self) -> Iterator[_Sources]:
        with Client(self.endpoint) as client, contextlib.ExitStack() as stack:
            uuids = list(self.uuids.values())
            yield _Sources(client, stack.enter_context(client.stream(uuids)), self)


class _Sources:
    """A connection, and its newest readings."""

    def __init__(self, client: Client, stream: SampleStream, follower: _Follower) -> None:
        self._client = client
        self._stream = stream
        self._follower = follower
        self._indices = {uuid: index for index, uuid in follower.uuids.items()}
        self._reading = PowerReadings()
        self._cpu_ns = 0

    def read(self) -> PowerReadings | None:
        """The powers after the next tick; None if there was none for a while."""
        sample = self._stream.receive(CPU_PERIOD_S)
        t_ns = time.monotonic_ns() if sample is None else sample.t_ns
        if sample is not None:
            self._reading.gpu_power_w[self._indices[sample.gpu]] = sample.power_mw / 1000
        due = self._follower.cpus and t_ns - self._cpu_ns >= CPU_PERIOD_S * 1e9
        if due:
            self._read_cpus(t_ns)
        if sample is None and not due:
            return None
        self._reading.timestamp_s = (t_ns + time.time_ns() - time.monotonic_ns()) / 1e9
        gpus, cpus = self._reading.gpu_power_w, self._reading.cpu_power_w
        return PowerReadings(self._reading.timestamp_s, dict(gpus), dict(cpus))

    def _read_cpus(self, t_ns: int) -> None:
        for index, dram in self._follower.cpus.items():
            cpu_w = self._newest_w(f"cpu:{index}", t_ns)
            if cpu_w is not None:
                dram_w = self._newest_w(f"dram:{index}", t_ns) if dram else None
                self._reading.cpu_power_w[index] = CpuPowerReading(cpu_w, dram_w)
        self._cpu_ns = t_ns

    def _newest_w(self, source: str, t_ns: int) -> float | None:
        samples = self._client.timeline(source, Domain.POWER, t_ns - 1_000_000_000)
        return samples[-1][1] / 1000 if samples else None


def _chosen(
    kind: str, asked: Sequence[int] | None, there: Sequence[int], endpoint: str
) -> list[int]:
    missing = sorted(set(asked or ()) - set(there))
    if missing:
        raise ValueError(
            f"The zeusd at {endpoint} has no {kind} {missing[0]}; it has: "
            f"{', '.join(map(str, there)) or 'none'}"
        )
    return list(there if asked is None else asked)
