"""What one process of a search does outside itself: it sets GPUs, measures, meets the other
processes, and tells the user.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.optimizer.power_limit import others
from zeus.optimizer.power_limit.core import Reading
from zeus.optimizer.power_limit.held import HeldSetting
from zeus.optimizer.power_limit.leader import Leader
from zeus.optimizer.power_limit.messages import Choose
from zeus.optimizer.power_limit.planner import LimitPlanner
from zeus.optimizer.power_limit.ranks import Ranks, connect
from zeus.optimizer.power_limit.settings import Setting, watts
from zeus.utils import framework
from zeus.utils.warn import warn
from zeus_ipc.circuit import WAIT_S

log = logging.getLogger(__name__)

STEP_WAIT_S = 0.01
"""How long training waits for settings within a step, s, all of its waits together."""


class NodeEffects:
    """`core.Effects` on a node's GPUs.

    Attributes:
        leader: The leader; it may be of an earlier training.
        show: Called with figures, if set.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        indices: Sequence[int],
        planner: LimitPlanner,
        highest_mw: int,
        together: bool,
    ) -> None:
        self.leader: Leader | None = None
        self.show: Callable[[dict[str, float]], None] | None = None
        self._monitor = monitor
        self._planner = planner
        self._highest_mw = highest_mw
        self._together = together
        self._indices = list(indices)
        self._uuids = [monitor.gpus[index].uuid for index in indices]
        self._held = HeldSetting(monitor.gpus, self._indices, self._wait)
        self._wait_s = WAIT_S  # how long this step may still wait
        self._counts = False  # whether to ask how long power limited the clocks

    def meet(self, known_world: int) -> Ranks | None:
        """Finds the processes that train together, see `Effects`."""
        world, planner = framework.world_size() if self._together else 1, self._planner
        if world == known_world:
            return None
        if known_world:
            planner.read_for_rank()  # it belonged to other participants
        self._counts = planner.name == "adaptive"
        self.leader = Leader(world, planner.begin, planner.save, self._counts)
        return connect(self.leader, world)

    def take(self) -> bool:
        """Takes the GPUs, with what an earlier optimizer of this process has set. Returns whether
        one has had them since this one, so that another setting may be in force.
        """
        lost = self.lost
        if others.take(self, self._uuids):
            self._held.inherit()
        return lost

    @property
    def lost(self) -> bool:
        """Whether a later optimizer has taken one of the GPUs, which it sets and restores now."""
        return others.taken(self, self._uuids)

    def may_wait(self, seconds: float) -> None:
        """All of the following waits together may last this long."""
        self._wait_s = seconds

    def _wait(self, event: threading.Event) -> None:
        """Waits for an event, as long as this step may."""
        until_s = time.monotonic() + self._wait_s
        while (left_s := until_s - time.monotonic()) > 0 and not event.wait(left_s):
            pass
        self._wait_s = until_s - time.monotonic()

    def set(self, setting: Setting | None) -> bool:
        """Sets a setting, or restores the GPUs, see `Effects`."""
        if setting is not None:
            return self._held.set(setting)
        own = others.leave(self, self._uuids)
        pairs = zip(self._indices, self._uuids, strict=True)
        self._held.release([index for index, uuid in pairs if uuid in own])
        return True

    def measure(self, limit_mw: int, what: Literal["open", "close", "drop"]) -> list[Measurement]:
        """Opens, closes or drops a window, see `Effects`."""
        monitor, name = self._monitor, f"__GlobalPowerLimitOptimizer_{watts(limit_mw)}"
        if what == "open":
            monitor.begin_window(name, restart=True)
        elif what == "close":
            try:
                return monitor.between_reads(monitor.end_window(name))
            except ValueError as error:  # something else reset the monitor's windows
                raise ZeusBaseError(str(error)) from None
        elif name in monitor.measurement_states:
            monitor.end_window(name, cancel=True)
        return []

    def read(self, window: list[Measurement]) -> Reading | None:
        """Energy and time of a closed window, see `Effects`."""
        if not all(self._monitor.available(one, limited=self._counts) for one in window):
            return None
        for one in window:
            if one.error is not None:
                raise one.error
        time_s = sum(one.time for one in window)
        power_w, error_w = _mean_power(window) if self._indices else (0.0, 0.0)
        limited_s = _limited_s(window, self._indices)
        self._counts = self._counts and limited_s == 0  # below a limit that binds, all do
        return power_w * time_s, error_w * time_s, time_s, limited_s

    def report(self, text: str, *, warn: bool = False) -> None:
        """Tells the user."""
        if warn:
            _warn(text)
        else:
            log.info("%s", text)

    def note(self, figures: dict[str, float]) -> None:
        """Shows figures."""
        if self.show is not None:
            self.show({f"zeus/{name}": value for name, value in figures.items()})

    def chosen(self, choice: Choose) -> None:
        """Tells the user, and the site what each limit is worth."""
        log.info("optimal power limit: %s", choice.setting)
        first, chosen = choice.estimates[0], choice.chosen
        self.note(
            {
                "chosen_power_limit_w": chosen.power_limit_mw / 1000,
                "energy_saving": 1 - chosen.energy_j / first.energy_j,
                "slowdown": chosen.time_s / first.time_s - 1,
            }
        )
        alone = [one for one in choice.estimates if one.beside is None]
        times_s = {one.power_limit_mw: one.time_s for one in alone}
        others.publish(self._monitor.gpus, self._indices, times_s)

    def end(self, reason: str, *, warn: bool) -> None:
        """Tells the user why the search was given up, and which limit is in force."""
        if not warn:
            log.warning("the power limit optimizer stopped: %s", reason)
            return
        words = [" at a power limit that cannot be read now"]
        asked = threading.Event()

        def ask() -> None:
            with contextlib.suppress(ZeusBaseError):
                words.append(limit_in_force(self._monitor.gpus, self._indices, self._highest_mw))
            asked.set()

        threading.Thread(target=ask, daemon=True).start()
        self._wait(asked)
        _warn(f"The power limit optimizer stopped, and training continues{words[-1]}: {reason}")


_warn = warn


def _mean_power(windows: Sequence[Measurement]) -> tuple[float, float]:
    """Returns the mean power of windows of the same work, weighted by how certain each is, and its
    uncertainty, W.
    """
    weights = [(one.time / max(one.uncertainty, 1e-9)) ** 2 for one in windows]
    powers = [one.total_energy / one.time for one in windows]
    mean = sum(weight * one for weight, one in zip(weights, powers, strict=True)) / sum(weights)
    return mean, 1 / math.sqrt(sum(weights))


def _limited_s(windows: Sequence[Measurement], indices: Sequence[int]) -> float | None:
    """Returns the time in which power limited the clocks of the GPU that it limited most; None: it
    is not counted.
    """
    counted = [one.limited_so_far or {} for one in windows]
    seconds = [[one.get(index, {}).get("power") for one in counted] for index in indices]
    if any(None in own for own in seconds):
        return None
    return max((sum(filter(None, own)) for own in seconds), default=None)


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
    return f" at {watts(limit)} W on GPU {index} (`zeusctl status` says who set it)"
