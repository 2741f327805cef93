"""Performs the actions of a core: sets limits, measures, communicates with the leader and the
user."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import singledispatchmethod

from zeus import _node
from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError, ZeusGPUInvalidArgError, ZeusGPUNoPermissionError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.optimizer.power_limit import actions
from zeus.optimizer.power_limit.actions import Action, Actions, Part
from zeus.optimizer.power_limit.core import Core
from zeus.optimizer.power_limit.held import HeldLimits, Outcome
from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.link import LeaderConnection, connect
from zeus.optimizer.power_limit.planner import LimitPlanner
from zeus.optimizer.power_limit.profile import watts
from zeus.utils import framework
from zeus.utils.framework import RanksUnreachable
from zeus.utils.warn import warn
from zeus_ipc.circuit import WAIT_S
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import LeaseInfo
from zeus_ipc.users import user_name

log = logging.getLogger(__name__)

STEP_WAIT_S = 0.01
"""How long training waits for limits within a step, s, all of its waits together."""


class Shell:
    """Connects one process's core to GPUs, leader and user.

    Attributes:
        link: The connection to the leader; None: none, or no longer.
    """

    def __init__(
        self,
        core: Core,
        monitor: ZeusMonitor,
        indices: Sequence[int],
        planner: LimitPlanner,
        highest_mw: int,
        together: bool,
    ) -> None:
        self.core = core
        self.monitor = monitor
        self.link: LeaderConnection | None = None
        self.leader: Leader | None = None
        self.show: Callable[[dict[str, float]], None] | None = None
        self._planner = planner
        self._highest_mw = highest_mw
        self._together = together
        self._indices = list(indices)
        self._limits = HeldLimits(monitor.gpus, self._indices, self._wait)
        self._unread: deque[tuple[Part | None, list[Measurement]]] = deque()
        self._last_set_mw = 0
        self._step, self._wait_s = 0, WAIT_S  # how long this step may still wait

    def perform(self, wanted: Actions) -> None:
        """Performs actions in order; handles the result of each before the next."""
        if not wanted:
            return
        left = deque(wanted)
        while left:
            action = left.popleft()
            left.extendleft(reversed(_method_for(type(action))(self, action)))

    def _wait(self, event: threading.Event) -> None:
        """Waits for an event, as long as this step may."""
        if self._step != self.core.step:
            self._step, self._wait_s = self.core.step, STEP_WAIT_S
        until_s = time.monotonic() + self._wait_s
        while (left_s := until_s - time.monotonic()) > 0 and not event.wait(left_s):
            pass
        self._wait_s = until_s - time.monotonic()

    @singledispatchmethod
    def _do(self, action: Action) -> Actions:
        raise TypeError(action)

    @_do.register
    def _join(self, action: actions.Join) -> Actions:
        core, world = self.core, framework.world_size() if self._together else 1
        if world == core.world and not core.disabled:
            return []
        if core.world and not core.disabled:
            self._planner.read_for_rank()  # it belonged to another participants
        core.joining(world)
        self._unread.clear()
        planner = self._planner
        self.leader = Leader(world, planner.begin, planner.choose, planner.save)
        try:
            self.link = connect(self.leader, world)
        except RanksUnreachable as error:
            return core.cut_off(str(error))
        return core.joined(self.link.leader is not None)

    @_do.register
    def _set_limit(self, action: actions.SetLimit) -> Actions:
        limit, profile = action.power_limit_mw, action.profile
        return self._limit_is(self._limits.set(limit, profile))

    @_do.register
    def _ask_for_limit(self, action: actions.AskForLimit) -> Actions:
        return self._limit_is(self._limits.outcome())

    def _limit_is(self, outcome: Outcome | None) -> Actions:
        core = self.core
        if outcome is None or outcome.power_limit_mw is None:
            return core.unanswered()
        limit, profile, error = outcome.power_limit_mw, outcome.profile, outcome.error
        if error is None:
            self._last_set_mw = limit
            return core.limit_set(limit, profile)
        if isinstance(error, ZeusGPUInvalidArgError) or profile is not None:
            return core.limit_refused(limit, error.message, profile)
        if isinstance(error, ZeusGPUNoPermissionError):
            return core.limit_denied(error.message)
        return core.limit_failed(error.message)

    @_do.register
    def _release_limits(self, action: actions.ReleaseLimits) -> Actions:
        if action.at_end:
            self._step, self._wait_s = self.core.step, WAIT_S
        self._limits.release()
        return []

    @_do.register
    def _open_window(self, action: actions.OpenWindow) -> Actions:
        try:
            self.monitor.begin_window(_window(action.power_limit_mw), restart=True)
        except ZeusBaseError as error:
            return self.core.window_failed(error.message)
        return []

    @_do.register
    def _close_window(self, action: actions.CloseWindow) -> Actions:
        try:
            measurement = self.monitor.end_window(_window(action.power_limit_mw))
        except ZeusBaseError as error:
            self._do(actions.DropWindow(action.power_limit_mw))
            return self.core.window_failed(error.message)
        except ValueError as error:  # something else reset the monitor's windows
            return self.core.window_failed(str(error))
        self._unread.append((action.part, self.monitor.between_reads(measurement)))
        return []

    @_do.register
    def _drop_window(self, action: actions.DropWindow) -> Actions:
        if _window(action.power_limit_mw) in self.monitor.measurement_states:
            self.monitor.end_window(_window(action.power_limit_mw), cancel=True)
        return []

    @_do.register
    def _collect(self, action: actions.Collect) -> Actions:
        core = self.core
        if not self._unread or core.over:
            return []
        part, windows = self._unread[0]
        if not all(map(self.monitor.available, windows)):
            return []
        self._unread.popleft()
        error = next((one.error for one in windows if one.error is not None), None)
        if error is not None:
            # Without a cause: zeusd was started after the window began, and knows the next one's.
            return core.unknown(part, error.message, lasting=error.__cause__ is not None)
        time_s = sum(one.time for one in windows)
        power_w, error_w = _mean_power(windows) if self._indices else (0.0, 0.0)
        return core.measured(part, power_w * time_s, error_w * time_s, time_s)

    @_do.register
    def _forget(self, action: actions.Forget) -> Actions:
        parts = [part for part, _ in self._unread if part is not None]
        self._unread.clear()
        return [
            one
            for part in parts
            for one in self.core.unknown(part, "it was interrupted", lasting=False)
        ]

    @_do.register
    def _for_leader(self, action: actions.ForLeader) -> Actions:
        if self.link is not None and self.link.leader is not None:
            action.reach(self.link.leader, time.monotonic(), self.core.step)
        return []

    @_do.register
    def _tell(self, action: actions.Tell) -> Actions:
        if self.link is None:
            return []
        try:
            self.link.tell(action.message)
        except RanksUnreachable as error:
            return self.core.cut_off(str(error))
        return []

    @_do.register
    def _listen(self, action: actions.Listen) -> Actions:
        if self.link is None or self.core.over:
            return []
        try:
            commands = self.link.hear(time.monotonic(), self.core.step)
        except RanksUnreachable as error:
            return self.core.cut_off(str(error))
        return self.core.heard(commands)

    @_do.register
    def _leave(self, action: actions.Leave) -> Actions:
        link, self.link = self.link, None
        if link is not None and action.reason is not None and self.core.world > 1:
            link.leave(action.reason, time.monotonic(), self.core.step)
        return []

    @_do.register
    def _gave_up(self, action: actions.GiveUp) -> Actions:
        if not action.warn:
            log.warning("the power limit optimizer stopped: %s", action.reason)
            return []
        last = f"; {watts(self._last_set_mw)} W was set last" if self._last_set_mw else ""
        found = [f" at a power limit that cannot be read now{last}"]

        asked = threading.Event()

        def ask() -> None:
            with contextlib.suppress(ZeusBaseError):
                found.append(limit_in_force(self.monitor.gpus, self._indices, self._highest_mw))
            asked.set()

        threading.Thread(target=ask, daemon=True).start()
        self._wait(asked)
        warn(
            f"The power limit optimizer stopped, and training continues{found[-1]}: {action.reason}"
        )
        return []

    @_do.register
    def _say(self, action: actions.Say) -> Actions:
        if action.warn:
            warn(action.text)
        else:
            log.info("%s", action.text)
        return []

    @_do.register
    def _show(self, action: actions.Show) -> Actions:
        if self.show is not None:
            self.show({f"zeus/{name}": value for name, value in action.figures.items()})
        return []


# `self._do(action)` would create and wrap a function in each call.
_method_for = vars(Shell)["_do"].dispatcher.dispatch


def _mean_power(windows: Sequence[Measurement]) -> tuple[float, float]:
    """Returns the mean power of windows of the same work, weighted by how certain each is, and its
    uncertainty, W.
    """
    weights = [(one.time / max(one.uncertainty, 1e-9)) ** 2 for one in windows]
    powers = [one.total_energy / one.time for one in windows]
    mean = sum(weight * one for weight, one in zip(weights, powers, strict=True)) / sum(weights)
    return mean, 1 / math.sqrt(sum(weights))


def _window(power_limit_mw: int) -> str:
    return f"__GlobalPowerLimitOptimizer_{watts(power_limit_mw)}"


def limit_in_force(gpus: GPUs, indices: Sequence[int], highest_mw: int) -> str:
    """Returns the rest of the sentence "training continues".

    Raises:
        ZeusBaseGPUError: It cannot be read.
    """
    if not highest_mw:
        return ""
    limits = {index: gpus[index].get_power_management_limit() for index in indices}
    lowered = {index: limit for index, limit in limits.items() if limit != highest_mw}
    if not lowered:
        return " at the highest limit"
    index, limit = next(iter(lowered.items()))
    where = f" on GPU {index}" if len(limits) > 1 else ""
    return f" at {watts(limit)} W{where}, {_who(gpus, index)}"


def _who(gpus: GPUs, index: int) -> str:
    uuid = gpus[index].uuid
    leases: list[LeaseInfo] = []
    with contextlib.suppress(ZeusIpcError, ZeusBaseError):
        leases = _node.get_client().leases()
    for lease in leases:
        if lease.gpu == uuid and lease.control == "power_limit":
            if lease.restoring:
                return "which zeusd is restoring"
            if lease.pid == os.getpid():
                return "which this process has set"
            process = "a process" if lease.pid is None else f"process {lease.pid}"
            name = f" ({lease.command})" if lease.command else ""
            return f"which {process}{name} of user {user_name(lease.uid)} has set"
    return "which was set outside zeusd, or is its restore target"
