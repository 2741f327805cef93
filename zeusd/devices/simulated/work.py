"""Streams of work on simulated GPUs, and their progress."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from zeusd.devices.simulated.gpu import SimulatedGpu
from zeusd.devices.simulated.instructions import Instructions
from zeusd.devices.simulated.physics import LIMIT_TAU_S, Relaxation
from zeusd.devices.simulated.workloads import SimulatedWorkload

MAX_QUEUED = 10_000
"""Limit of queued changes from one instruction to another."""


class WorkHost(Protocol):
    """What work needs from its node."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Guards all state of the node."""

    @property
    def sleep(self) -> Callable[[float], None]:
        """Advances the time."""

    def advance(self) -> float:
        """Finishes work that ended by now; returns the time, s. The caller holds the lock."""

    def forget_settings(self, now_s: float) -> None:
        """Handles a closed context. The caller holds the lock."""


class Work:
    """A stream of work on one or more GPUs, which advance in lock step at the pace of the slowest.

    Made by `SimulatedBackend.open_work`. Launching is asynchronous, as on a CUDA stream.
    """

    def __init__(
        self,
        node: WorkHost,
        gpus: Sequence[SimulatedGpu],
        workload: SimulatedWorkload | Instructions,
        now_s: float,
        pid: int | None = None,
    ) -> None:
        self.pid = pid
        self._node = node
        self._gpus = list(gpus)
        self._instructions: Instructions | None = None
        self.blocking_w: float | None = None
        if isinstance(workload, Instructions):
            self._instructions, self.blocking_w = workload, workload.blocking_w
            self.workload: SimulatedWorkload = next(iter(workload.tables.values()))
        else:
            self.workload = workload
        # Instructions queued after the running one, and the number of units launched at each one's
        # end.
        self._next: deque[tuple[SimulatedWorkload, float]] = deque()
        self._launched = 0.0  # at the end of the running instruction
        self._done = 0.0
        self._pace = Relaxation(now_s, 0.0, 0.0, 0.0)
        self.closed = False

    @property
    def active(self) -> bool:
        """Whether any work is left."""
        return self._launched > self._done

    def rank(self, gpu: SimulatedGpu) -> int:
        """This GPU's position among the work's GPUs."""
        return self._gpus.index(gpu)

    def launch(self, units: float, instruction: str | None = None) -> None:
        """Queues units of work; they start at once if nothing else is queued.

        Args:
            units: How many.
            instruction: The instruction to run, if the work is made of instructions.

        Raises:
            ValueError: The instruction does not exist, or the work was closed.
        """
        with self._node.lock:
            now_s = self._node.advance()
            if self.closed:
                raise ValueError("this work was closed")
            workload = self._workload_of(instruction)
            if not self.active:
                self.workload = workload
                self._launched += units
                self.begin(now_s)
                return
            last, until = self._next[-1] if self._next else (self.workload, self._launched)
            if workload is not last:
                if len(self._next) >= MAX_QUEUED:
                    raise ValueError(f"over {MAX_QUEUED} instructions are queued; wait for some")
                self._next.append((workload, until + units))
            elif self._next:
                self._next[-1] = (last, until + units)
            else:
                self._launched += units

    def _workload_of(self, instruction: str | None) -> SimulatedWorkload:
        if self._instructions is not None:
            return self._instructions.table(instruction)
        if instruction is not None:
            raise ValueError(
                f"this work is not made of instructions and has no {instruction!r}; open one such "
                "as perseus/a100/gpt3-175b/stage0"
            )
        return self.workload

    def progress(self) -> tuple[float, int | None]:
        """Units done, and when everything queued will be done, ns; None: never at the present
        pace."""
        with self._node.lock:
            now_s = self._node.advance()
            done = self._done + self._pace.integral(now_s)
            end_s = self.ends_s()
            before = self._launched
            for workload, until in self._next:
                end_s += (until - before) / self._rate_of(workload)
                before = until
            return min(done, self._launched), None if math.isinf(end_s) else round(end_s * 1e9)

    def run(self, units: float, instruction: str | None = None) -> None:
        """Launches units and waits until everything queued is done."""
        self.launch(units, instruction)
        self.wait()

    def wait(self) -> None:
        """Waits until everything queued is done."""
        while True:
            with self._node.lock:
                now_s = self._node.advance()
                if not self.active or self.closed:
                    return
                end_s = self.ends_s()
            self._node.sleep(min(end_s - now_s, 3600.0))

    def refresh(self) -> None:
        """Updates the GPUs after the workload's power changed."""
        with self._node.lock:
            self.follow(self._node.advance(), 0.0)

    def close(self) -> None:
        """Ends the work and its contexts."""
        with self._node.lock:
            now_s = self._node.advance()
            if self.closed:
                return
            self.closed = True
            self._next.clear()
            self._launched = self._done
            for gpu in self._gpus:
                gpu.contexts -= 1
                gpu.work = None
                gpu.retarget(now_s, 0.0)
            self._node.forget_settings(now_s)

    # The node calls these while it holds its lock.

    def ends_s(self) -> float:
        """When the running instruction will be done, if nothing changes."""
        if not self.active:
            return self._pace.t0_s
        return self._pace.when(self._launched - self._done)

    def follow(self, now_s: float, tau_s: float) -> None:
        """Continues at the pace of its slowest GPU after conditions changed."""
        self._done = min(self._launched, self._done + self._pace.integral(now_s))
        before = self._pace.value(now_s)
        rate = self._move(now_s, tau_s)
        self._pace = Relaxation(now_s, before, rate, tau_s if before > 0 else 0.0)

    def begin(self, now_s: float) -> None:
        """Starts work that was queued while nothing ran."""
        if all(gpu.limit_settled(now_s) for gpu in self._gpus):
            rate = self._move(now_s, 0.0)
            self._pace = Relaxation(now_s, rate, rate, 0.0)
            return
        points = [gpu.starting_point(now_s) for gpu in self._gpus]
        before = min(point.rate for point in points)
        starts_w = [
            gpu.waiting_w(point, before) for gpu, point in zip(self._gpus, points, strict=True)
        ]
        self._pace = Relaxation(
            now_s, before, self._move(now_s, LIMIT_TAU_S, starts_w), LIMIT_TAU_S
        )

    def _move(self, now_s: float, tau_s: float, starts_w: Sequence[float] | None = None) -> float:
        """Moves all GPUs to their new steady state. Returns their common pace there."""
        points = [gpu.steady_point() for gpu in self._gpus]
        rate = min(point.rate for point in points)
        for n, gpu in enumerate(self._gpus):
            start_w = None if starts_w is None else starts_w[n]
            gpu.retarget(now_s, tau_s, gpu.waiting_w(points[n], rate), start_w)
        return rate

    def _rate_of(self, workload: SimulatedWorkload) -> float:
        """The pace of a queued instruction under present conditions."""
        before, self.workload = self.workload, workload
        try:
            return min(gpu.steady_point().rate for gpu in self._gpus)
        finally:
            self.workload = before

    def finish(self, now_s: float) -> None:
        """Ends the running instruction and starts the next one, if any."""
        self._done = self._launched
        if self._next:
            # A clock that has not settled continues from its present value.
            on_the_way = self._pace.value(now_s) / self._pace.end if self._pace.end > 0 else 1.0
            shares = [gpu.power_on_the_way(now_s) for gpu in self._gpus]
            tau_s = self._pace.tau_s if abs(on_the_way - 1) > 1e-6 else 0.0
            self.workload, self._launched = self._next.popleft()
            points = [gpu.steady_point() for gpu in self._gpus]
            rate = min(point.rate for point in points)
            starts_w = [
                gpu.waiting_w(point, rate) * share
                for gpu, point, share in zip(self._gpus, points, shares, strict=True)
            ]
            self._pace = Relaxation(
                now_s, rate * on_the_way, self._move(now_s, tau_s, starts_w), tau_s
            )
            return
        self._pace = Relaxation(now_s, 0.0, 0.0, 0.0)
        for gpu in self._gpus:
            gpu.retarget(now_s, 0.0)
