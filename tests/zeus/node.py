"""A simulated node inside the test's process, whose time passes only by training."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support import TIMEOUT_S
from zeus import _node
from zeus.monitor import ZeusMonitor
from zeus.monitor.lookup import TICK_NS
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, effects
from zeus_ipc import circuit
from zeusd import embed
from zeusd.devices.simulated import SimulatedBackend, VirtualClock, Work
from zeusd.nodes import OpenedNode


class VirtualNode:
    """A node, an engine embedded in this process, and `zeus` pointed at it.

    Args:
        spec: See `zeusd serve --simulate`; setters take no time unless it says otherwise.
        state_dir: For the journal.
    """

    def __init__(self, spec: str, state_dir: Path) -> None:
        self.clock = VirtualClock()
        self.nvml = SimulatedBackend(spec, clock_ns=self.clock, sleep=self.clock.sleep)
        node = OpenedNode(self.nvml, "simulated", lambda: None, self.clock)
        self.client = embed.connect(node, state_dir=str(state_dir))
        self.monitors: list[ZeusMonitor] = []
        """Those whose time is the node's, the newest last."""
        self._stack = contextlib.ExitStack()
        training = SimpleNamespace(monotonic=lambda: self.clock() / 1e9)
        self._stack.enter_context(mock.patch.object(effects, "time", training))
        # No time of training passes while a busy machine keeps an answer waiting.
        bounds = circuit.bounded.__wrapped__  # type: ignore[attr-defined]  # of contextlib
        self._stack.enter_context(mock.patch.object(bounds, "__defaults__", (TIMEOUT_S,)))
        self._stack.enter_context(_node.use(self.client))

    def monitor(self, **options: Any) -> ZeusMonitor:
        """A monitor whose time is the node's."""
        monitor = ZeusMonitor(**options)
        self.use_clock(monitor)
        return monitor

    def use_clock(self, monitor: ZeusMonitor) -> None:
        """Lets a monitor's time pass with the node's. What its thread does is done at once, so far
        as it takes no time.
        """
        self.monitors.append(monitor)
        self.lookup = lookup = monitor._lookup
        monitor._clock_ns = lookup.clock_ns = self.clock
        lookup.wake = lambda: lookup.round(self.clock() - TICK_NS)

    def limit_w(self, gpu: int = 0) -> float:
        """The limit that the device has."""
        return self.nvml.power_limit_mw(gpu) / 1000

    def close(self) -> None:
        """Ends engine and node."""
        self._stack.close()
        self.client.close()


def train(
    optimizer: GlobalPowerLimitOptimizer,
    work: Work,
    steps: int,
    *,
    until_done: bool = False,
) -> int:
    """Runs training steps in one epoch. Returns how many."""
    from zeus.optimizer.power_limit import Done

    optimizer.on_epoch_begin()
    taken = 0
    while taken < steps and not (until_done and isinstance(optimizer.state, Done)):
        optimizer.on_step_begin()
        work.run(1)
        optimizer.on_step_end()
        taken += 1
    return taken
