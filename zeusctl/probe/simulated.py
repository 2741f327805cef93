"""A simulated node for a probe: in this process, on a virtual clock. Two minutes of probing take
only as long as their computation. Calls take no time.
"""

from __future__ import annotations

from zeus_ipc.overriding import override
from zeusctl.probe.backend import BackendGpu, call_error
from zeusctl.probe.driver import CallError, Clock, Driver, GpuReader
from zeusctl.probe.load import Load, SimulatedLoad
from zeusd.devices.port import DeviceError
from zeusd.devices.simulated import SimulatedBackend, VirtualClock

WORKLOAD = "model/compute"
"""The workload that serves as load."""


class SimulatedDriver(Driver):
    """Implements `zeusctl.probe.driver.Driver`.

    Args:
        spec: The node, in the syntax of `zeusd serve --simulate`.

    Raises:
        ValueError: The spec is not valid; the message says what is.
    """

    def __init__(self, spec: str) -> None:
        time = VirtualClock()
        self.simulated: str | None = spec
        self.backend = SimulatedBackend(spec, clock_ns=time, sleep=time.sleep)
        self.clock = Clock(time, time.sleep)
        self.backend.init()

    @override
    def versions(self) -> dict[str, str]:
        return {"driver": self.backend.driver_version(), "binding": "zeusd's simulated node"}

    @override
    def gpus(self) -> dict[int, GpuReader | CallError]:
        found: dict[int, GpuReader | CallError] = {}
        for index in range(self.backend.device_count()):
            try:
                found[index] = BackendGpu(
                    self.backend, self.backend.device_handle(index), self.clock
                )
            except DeviceError as error:
                found[index] = call_error(error)
        return found

    def load_on(self, index: int) -> Load:
        """Work on one GPU."""
        work = self.backend.open_work([index], WORKLOAD)
        begin_ns = self.clock.now_ns()
        work.launch(1.0)
        _, end_ns = work.progress()
        assert end_ns is not None
        work.wait()
        return SimulatedLoad(work, 1e9 / (end_ns - begin_ns), self.clock.now_ns)

    @override
    def close(self) -> None:
        self.backend.shutdown()
