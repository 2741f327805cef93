"""A simulated node for a probe: in this process, on a virtual clock. Two minutes of probing take
only as long as their computation. Calls take no time.
"""

from __future__ import annotations

from zeusctl.probe.backend import ProbedNode
from zeusctl.probe.driver import Clock
from zeusctl.probe.load import ProbeLoad, SimulatedLoad
from zeusd.devices.simulated import SimulatedBackend, VirtualClock

WORKLOAD = "model/compute"
"""The workload that serves as load."""


class ProbedSimulation(ProbedNode):
    """A simulated node.

    Raises:
        ValueError: The spec is not valid; the message says what is.
    """

    binding = "zeusd's simulated node"

    def __init__(self, spec: str) -> None:
        time = VirtualClock()
        self.simulated = spec
        backend = SimulatedBackend(spec, clock_ns=time, sleep=time.sleep)
        super().__init__(backend, Clock(time, time.sleep))

    def load_on(self, index: int) -> ProbeLoad:
        """Work on one GPU."""
        work = self.backend.open_work([index], WORKLOAD)
        begin_ns = self.clock.now_ns()
        work.launch(1.0)
        _, end_ns = work.progress()
        assert end_ns is not None
        work.wait()
        return SimulatedLoad(work, 1e9 / (end_ns - begin_ns), self.clock.now_ns)
