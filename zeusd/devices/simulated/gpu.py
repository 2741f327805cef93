"""One simulated GPU: its settings, its true power over time, and its sensors."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from zeus_ipc.limited import REASONS
from zeusd.devices.simulated.models import HOPPER, DeviceModel, SimulatedProfile
from zeusd.devices.simulated.physics import LIMIT_TAU_S, OperatingPoint, Relaxation
from zeusd.devices.simulated.sensors import SimulatedSensor
from zeusd.devices.simulated.spec import GpuSpec
from zeusd.devices.simulated.tenants import Tenant
from zeusd.devices.simulated.workloads import SimulatedWorkload


@dataclass(slots=True)
class Quirks:
    """How one GPU's power limit deviates from the requested one.

    Attributes:
        round_to_mw: The limit is truncated to a multiple of this, as AMD's is to whole watts.
        round_up: The limit is raised to a multiple of `round_to_mw` instead.
        clamp_mw: A limit outside this range is moved into it without an error; None: limits outside
            the GPU's range are errors.
        ignored_sets: Number of further sets, of any control, that report success without effect;
            -1: all.
        delay_s: Delay after which a limit takes effect, s.
        stale_reads: Number of reads after a set that still return the previous limit.
    """

    round_to_mw: int = 1
    round_up: bool = False
    clamp_mw: tuple[int, int] | None = None
    ignored_sets: int = 0
    delay_s: float = 0.0
    stale_reads: int = 0

    def __post_init__(self) -> None:
        if self.round_to_mw < 1 or self.ignored_sets < -1 or self.stale_reads < 0:
            raise ValueError("round_to_mw is at least 1, ignored_sets -1, stale_reads 0")
        if not 0 <= self.delay_s <= 3600:
            raise ValueError(f"a limit must take effect within an hour, not after {self.delay_s} s")

    def ignores(self) -> bool:
        """Counts a set; returns whether it is ignored."""
        if self.ignored_sets > 0:
            self.ignored_sets -= 1
            return True
        return self.ignored_sets < 0

    def taken(self, limit_mw: int) -> int:
        """The limit that the device sets for a requested one."""
        if self.clamp_mw is not None:
            limit_mw = min(max(limit_mw, self.clamp_mw[0]), self.clamp_mw[1])
        if self.round_up:
            return limit_mw + -limit_mw % self.round_to_mw
        return limit_mw - limit_mw % self.round_to_mw


AMBIENT_C = 25.0
HOT_C = 83.0
THERMAL_TAU_S = 45.0

REASON_IDLE, REASON_LOCKED, REASON_POWER_CAP = 0x1, 0x2, 0x4
"""nvmlClocksEventReasons."""


class Running(Protocol):
    """The work on a GPU, as far as the GPU needs to know it."""

    workload: SimulatedWorkload
    blocking_w: float | None

    @property
    def active(self) -> bool:
        """Whether any work is left."""

    def rank(self, gpu: SimulatedGpu) -> int:
        """This GPU's position among the work's GPUs."""

    def follow(self, now_s: float, tau_s: float) -> None:
        """Conditions changed."""


class SimulatedGpu:
    """The state of one GPU. Not thread-safe: the node's lock guards it.

    Args:
        spec: Its specification.
        now_s: When the driver is loaded.
        boot: Number of this driver load, so that phases differ between loads.
        second: The other die of the card, whose power limit and sensors are part of this one's.
    """

    def __init__(
        self, spec: GpuSpec, now_s: float, boot: int, second: SimulatedGpu | None = None
    ) -> None:
        self.spec = spec
        self.first = self
        self.second = second
        if second is not None:
            second.first = self
        self.model: DeviceModel = spec.model
        self.chance = random.Random(f"{spec.seed}:{spec.index}:{boot}")
        low, default, high = self.model.power_limits_w
        self.limit_min_mw = round(low * 1000)
        self.limit_default_mw = round(default * 1000)
        self.limit_max_mw = round(high * 1000)
        self.limit_mw = self.limit_default_mw
        self.quirks = Quirks()
        self.limit_next_mw: int | None = None
        self.limit_due_s = 0.0
        self.limit_before_mw = self.limit_mw
        self.stale_reads = 0
        self.board_limit_mw: int | None = None
        self.gpu_lock_mhz: tuple[int, int] | None = None
        self.memory_lock_mhz: tuple[int, int] | None = None
        self.profiles: frozenset[int] = frozenset()
        self.persistence = not self.model.persistence
        self.contexts = 0
        self.work: Running | None = None
        self.tenants: tuple[Tenant, ...] = ()
        clock_mhz = self.model.idle_clock_mhz
        self._idle = [
            OperatingPoint(0.0, watts, clock_mhz, capped=False) for watts in self.model.idle_w
        ]
        self.point = self._idle_point()
        self.also_limited: frozenset[str] = frozenset()
        self._limited = dict.fromkeys(REASONS, 0.0), frozenset[str](), now_s
        gain = 1.0 + self.spec.gain_sigma * random.Random(f"gain:{spec.seed}:{spec.index}").gauss(
            0, 1
        )
        # (start, energy at the start, power since), oldest first.
        self._power: deque[tuple[float, float, Relaxation]] = deque()
        idle_w = self.point.power_w
        self._power.append((now_s - 10.0, 0.0, Relaxation(now_s - 10.0, idle_w, idle_w, 0.0)))
        self._temperature = Relaxation(now_s, 35.0, self._steady_c(idle_w), THERMAL_TAU_S)
        # The driver was loaded some time ago; after a reload the counter starts at 0.
        counter_mj = float(self.chance.randrange(10**6, 10**9)) if boot == 1 else 0.0
        self.sensor = SimulatedSensor(
            self.model.sensor,
            self.card_energy_j,
            now_s,
            gain,
            self.chance,
            counter_mj,
            spec.counts_all,
        )
        limit_w = self._own_limit_w
        self._limit_w = Relaxation(now_s, limit_w, limit_w, 0.0)

    @property
    def busy(self) -> bool:
        """Whether it is working."""
        return self.work is not None and self.work.active

    @property
    def enforced_limit_mw(self) -> int:
        """The smaller of the limits set by software and by the board's controller."""
        if self.first is not self:
            return self.first.enforced_limit_mw
        if self.board_limit_mw is None:
            return self.limit_mw
        return min(self.limit_mw, self.board_limit_mw)

    @property
    def _own_limit_w(self) -> float:
        """Its share of the limit; the dies of a card have equal shares."""
        limit_w = self.enforced_limit_mw / 1000 / self.model.dies
        if not self.profiles:
            return limit_w
        return min([limit_w, *(one.limit * self.limit_max_mw / 1000 for one in self._in_force)])

    @property
    def enforced_profiles(self) -> tuple[int, ...]:
        """Workload power profiles in force: of two that conflict, the one with the lower number."""
        enforced: list[int] = []
        for profile in self.model.profiles:
            if profile.profile in self.profiles and not set(profile.conflicts) & set(enforced):
                enforced.append(profile.profile)
        return tuple(enforced)

    @property
    def _in_force(self) -> list[SimulatedProfile]:
        enforced = self.enforced_profiles
        return [profile for profile in self.model.profiles if profile.profile in enforced]

    def card_energy_j(self, t_s: float) -> float:
        """True energy of everything that the sensor measures."""
        own_j = self.true_energy_j(t_s)
        return own_j if self.second is None else own_j + self.second.true_energy_j(t_s)

    @property
    def work_memory_mib(self) -> int:
        """Memory of the work. No table has it, so it is three fifths of the GPU's memory."""
        return self.model.memory_mib * 3 // 5 if self.work is not None else 0

    @property
    def memory_used_mib(self) -> int:
        """Memory in use, including about 1 % that a driver reserves."""
        return self.model.memory_mib // 100 + self.work_memory_mib

    def true_energy_j(self, t_s: float) -> float:
        """Energy drawn until a time, which must not be older than the sensor still needs."""
        for start_s, before_j, power in reversed(self._power):
            if t_s >= start_s:
                return before_j + power.integral(t_s)
        start_s, before_j, power = self._power[0]
        return before_j + power.start * (t_s - start_s)

    def true_power_w(self, t_s: float) -> float:
        """Power drawn at a time, which must not be before the last change."""
        return self._power[-1][2].value(t_s)

    @property
    def memory_clock_mhz(self) -> int:
        """Memory clock. Unused boards with GDDR memory run at their slowest clock, Hopper does
        not."""
        clocks = self.model.memory_clocks_mhz
        if self.memory_lock_mhz is not None:
            return self.memory_lock_mhz[1]
        keeps = self.contexts or self.model.architecture == HOPPER
        return clocks[0] if keeps else clocks[-1]

    def limit_moved(self, t_s: float) -> None:
        """Starts the capping controller's move if the enforced limit has changed."""
        limit_w = self._own_limit_w
        if limit_w != self._limit_w.end:
            self._limit_w = Relaxation(t_s, self._limit_w.value(t_s), limit_w, LIMIT_TAU_S)

    @property
    def blocking(self) -> bool:
        """Whether it spins because nothing is queued."""
        work = self.work
        return work is not None and not work.active and work.blocking_w is not None

    def power_on_the_way(self, t_s: float) -> float:
        """Present power as a share of the power that it moves to."""
        move = self._power[-1][2]
        return move.value(t_s) / move.end if move.end > 0 else 1.0

    def reset_settings(self, t_s: float) -> None:
        """Resets all settings: the last client has closed a GPU without persistence mode."""
        self.limit_mw = min(self.limit_default_mw, self.limit_max_mw)
        self.limit_next_mw = None
        self.gpu_lock_mhz = self.memory_lock_mhz = None
        self.profiles = frozenset()
        self.limit_moved(t_s)
        self.retarget(t_s, 0.0)

    def steady_point(self) -> OperatingPoint:
        """The steady state of the present settings and work."""
        return self._point_under(self._own_limit_w)

    def starting_point(self, t_s: float) -> OperatingPoint:
        """The state in which work starts now, even if the capping controller has not settled."""
        return self._point_under(self._limit_w.value(t_s))

    def limit_settled(self, t_s: float) -> bool:
        """Whether the capping controller has settled."""
        return self._limit_w.start == self._limit_w.end or (
            t_s - self._limit_w.t0_s > 8 * LIMIT_TAU_S
        )

    def _point_under(self, limit_w: float) -> OperatingPoint:
        if self.work is None or not (self.work.active or self.blocking):
            return self._idle_point()
        ceiling = self.model.clocks_at(self.memory_clock_mhz)[0]
        if self.gpu_lock_mhz is not None:
            ceiling = min(ceiling, self.gpu_lock_mhz[1])
        for profile in self._in_force:
            ceiling = min(ceiling, round(profile.clock * self.model.clocks_mhz[0]))
        if not self.work.active:
            return OperatingPoint(0.0, self.work.blocking_w or 0.0, ceiling, capped=False)
        return self.work.workload.point(self.model, self.work.rank(self), limit_w, ceiling)

    def waiting_w(self, point: OperatingPoint, rate: float) -> float:
        """Power of a GPU that waits for a slower one in every unit."""
        if point.rate <= rate:
            return point.power_w
        context_w = self.model.idle_w[1]
        return context_w + (point.power_w - context_w) * rate / point.rate

    def retarget(
        self,
        t_s: float,
        tau_s: float,
        power_w: float | None = None,
        start_w: float | None = None,
    ) -> None:
        """Moves power to its new steady state after settings or work changed.

        Args:
            t_s: When they changed.
            tau_s: Time constant of the move; 0: at once.
            power_w: Power to move to; None: the steady state of the present settings and work.
            start_w: Power to start from; None: the present power.
        """
        point, last = self.steady_point(), self._power[-1][2]
        self._count_limited(t_s, point)
        rests = last.start == last.end == point.power_w
        if point == self.point and rests and power_w is None and start_w is None:
            return  # no change
        self.sensor.update(t_s)
        self.first.sensor.update(t_s)
        self.point = point
        target_w = point.power_w if power_w is None else power_w
        before_w = self.true_power_w(t_s) if start_w is None else start_w
        move = Relaxation(t_s, before_w, target_w, tau_s)
        self._power.append((t_s, self.true_energy_j(t_s), move))
        needs_since_s = min(self.sensor.needs_since_s, self.first.sensor.needs_since_s)
        while len(self._power) > 1 and self._power[1][0] < needs_since_s:
            self._power.popleft()
        self._temperature = Relaxation(
            t_s, self._temperature.value(t_s), self._steady_c(target_w), THERMAL_TAU_S
        )

    def temperature_c(self, t_s: float) -> float:
        """Temperature of the chip."""
        return self._temperature.value(t_s)

    def limited_ns(self, t_s: float) -> tuple[int, ...]:
        """Time in which the clocks were limited since the driver was loaded, by reason."""
        counted_s, limiting, since_s = self._limited
        return tuple(
            round(1e9 * (counted_s[reason] + (reason in limiting) * (t_s - since_s)))
            for reason in REASONS
        )

    def _count_limited(self, t_s: float, point: OperatingPoint) -> None:
        """Counts the time limited, and what limits the clocks from now on."""
        counted_s = dict(zip(REASONS, (ns / 1e9 for ns in self.limited_ns(t_s)), strict=True))
        power = {"power"} if point.capped else set()
        limiting = power | self.also_limited if self.busy else frozenset()
        self._limited = counted_s, frozenset(limiting), t_s

    def reasons(self) -> int:
        """nvmlClocksEventReasons."""
        if self.work is None or not (self.work.active or self.blocking):
            return REASON_IDLE
        reasons = REASON_POWER_CAP if self.point.capped else 0
        if self.gpu_lock_mhz is not None and self.model.persistence:
            reasons |= REASON_LOCKED
        return reasons

    def _idle_point(self) -> OperatingPoint:
        return self._idle[1 if self.contexts else 0]

    def _steady_c(self, watts: float) -> float:
        most_w = self.model.power_limits_w[2] / self.model.dies
        return AMBIENT_C + (HOT_C - AMBIENT_C) * watts / most_w
