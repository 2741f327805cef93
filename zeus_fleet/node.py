"""The node's side of the protocol: its GPUs' limits and their deadline. No I/O, no clock.

The shell sends heartbeats and carries out `FleetCeilings`. At the deadline zeusd lowers the GPUs to
their minimum, even if this process is dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeus_fleet.messages import Budget, GrantPlan, NodeReport, Timing, obeyed_mw
from zeus_fleet.policies import level_by_want


@dataclass(frozen=True)
class GpuRange:
    """Range of a GPU's power limit, mW."""

    min_mw: int
    max_mw: int


@dataclass(frozen=True)
class FleetCeilings:
    """Set the `fleet` ceilings of all GPUs.

    Attributes:
        limits_mw: Limits by GPU.
        deadline_ns: Time, on the node's clock, from which on zeusd holds each GPU at its minimum. A
            command that arrives later does not raise any limit.
    """

    limits_mw: tuple[int, ...]
    deadline_ns: int


class FleetNode:
    """Follows the plan and the budget for one node.

    One command is carried out at a time: the next one follows only after `applied` or `failed`. All
    times are from a clock that counts during suspend (CLOCK_BOOTTIME).

    Args:
        name: The node's name in the budget.
        gpus: The GPUs' ranges.
        holds_mw: The highest power limit that each GPU may have now: its limit or its ceiling.
        timing: The common times.
        deadline_ns: Latest time at which zeusd lowers the GPUs by itself; 0: there is no `fleet`
            ceiling.
        number: Number of this node's newest heartbeat in the store.
    """

    def __init__(
        self,
        name: str,
        gpus: Sequence[GpuRange],
        holds_mw: Sequence[int],
        timing: Timing,
        *,
        deadline_ns: int = 0,
        number: int = 0,
    ) -> None:
        self.name = name
        self.timing = timing
        self.floor_mw = sum(gpu.min_mw for gpu in gpus)
        self.capacity_mw = sum(gpu.max_mw for gpu in gpus)
        self.deadline_ns = deadline_ns
        self._gpus = tuple(gpus)
        self._mins = tuple(gpu.min_mw for gpu in gpus)
        self._holds = list(holds_mw)
        self._wants = tuple(gpu.max_mw for gpu in gpus)
        self._advised: Mapping[int, int] = {}
        self._drawn_mw = 0
        self._stuck: frozenset[int] = frozenset()
        self._commanded: FleetCeilings | None = None
        self._last: FleetCeilings | None = None
        self._number = number
        self._sent_ns: dict[int, int] = {}
        self._epoch = -1
        self._granted_mw = sum(holds_mw) if deadline_ns else self.floor_mw
        self._knows = False

    # --------------------------------------------------------------------------------- heartbeats

    def heartbeat(self, now_ns: int) -> NodeReport:
        """The heartbeat to send now.

        The transaction that stores it reads plan and budget at the same revision, and fails if the
        store has a newer heartbeat of this node.
        """
        self._number += 1
        self._sent_ns[self._number] = now_ns
        for number in [sent for sent in self._sent_ns if sent <= self._number - 32]:
            del self._sent_ns[number]  # they were lost
        return NodeReport(
            number=self._number,
            epoch=self._epoch,
            held_mw=self._held_mw(now_ns),
            floor_mw=self.floor_mw,
            capacity_mw=self.capacity_mw,
            wanted_mw=sum(self._wants),
            stuck_mw=sum(self._holds[index] - self._mins[index] for index in self._stuck),
            drawn_mw=self._drawn_mw,
        )

    def draws(self, power_mw: int) -> None:
        """Total power drawn by its GPUs."""
        self._drawn_mw = power_mw

    def answered(
        self,
        number: int,
        plan: GrantPlan | None,
        budget: Budget | None,
        now_ns: int,
        limits_mw: Mapping[int, int] | None = None,
    ) -> FleetCeilings | None:
        """Handles the store's reply to heartbeat `number`, see `StoreAnswer`."""
        sent_ns = self._sent_ns.pop(number, None)
        if sent_ns is None:
            return None
        for older in [sent for sent in self._sent_ns if sent < number]:
            del self._sent_ns[older]  # a reply that arrives after a newer one is ignored
        self.deadline_ns = self._armed_from(sent_ns, now_ns)
        self._knows = True
        self._granted_mw = self._obeyed_mw(plan, budget)
        grant = plan.grants.get(self.name) if plan is not None else None
        self._epoch = -1 if grant is None else grant.epoch
        self._advised = limits_mw or {}
        return self._next(now_ns)

    # ------------------------------------------------------------------------------------- zeusd

    def applied(self, holds_mw: Sequence[int], now_ns: int) -> FleetCeilings | None:
        """Handles a command that zeusd has carried out.

        Args:
            holds_mw: The highest power limit that each GPU may have now. A GPU above its commanded
                limit cannot be lowered; the others compensate for it, and each heartbeat tries
                again.
            now_ns: The time.
        """
        commanded = self._commanded
        if commanded is None:
            return None
        self._holds = list(holds_mw)
        pairs = zip(holds_mw, commanded.limits_mw, strict=True)
        self._stuck = frozenset(
            index for index, (holds, limit) in enumerate(pairs) if holds > limit
        )
        self._last, self._commanded = commanded, None
        return self._next(now_ns)

    def failed(self) -> None:
        """Handles a command that zeusd may not have carried out: `tick` repeats it."""
        self._holds = self._may_hold()
        self._last = self._commanded = None

    def tick(self, now_ns: int) -> FleetCeilings | None:
        """Handles the passing of time."""
        return self._next(now_ns)

    def wants(self, limits_mw: Sequence[int], now_ns: int) -> FleetCeilings | None:
        """Demand of each GPU: its minimum if it is idle."""
        self._wants = tuple(limits_mw)
        return self._next(now_ns)

    # --------------------------------------------------------------------------------- internals

    def _armed_from(self, sent_ns: int, now_ns: int) -> int:
        """The deadline counts from before the heartbeat was stored, because an allocator's wait
        never begins before it sees the heartbeat.
        """
        return sent_ns + self.timing.hold_ns

    def _obeyed_mw(self, plan: GrantPlan | None, budget: Budget | None) -> int:
        return obeyed_mw(self.name, plan, budget, self.floor_mw)

    def _target_mw(self, now_ns: int) -> int:
        return self._granted_mw if now_ns < self.deadline_ns else self.floor_mw

    def _may_hold(self) -> list[int]:
        if self._commanded is None:
            return self._holds
        return [*map(max, self._holds, self._commanded.limits_mw)]

    def _held_mw(self, now_ns: int) -> int:
        return max(sum(self._may_hold()), self._target_mw(now_ns))

    def _next(self, now_ns: int) -> FleetCeilings | None:
        if self._commanded is not None or not (self._knows or now_ns >= self.deadline_ns):
            return None
        wanted = self._divided(self._target_mw(now_ns))
        pairs = enumerate(zip(wanted, self._holds, strict=True))
        if any(limit < holds for index, (limit, holds) in pairs if index not in self._stuck):
            # Lower first, so that the sum is never above its values before and after.
            wanted = [*map(min, wanted, self._holds)]
        command = FleetCeilings(tuple(wanted), self.deadline_ns)
        if command == self._last:
            return None
        self._commanded = command
        return command

    def _divided(self, total_mw: int) -> list[int]:
        """Divides the target among the GPUs. The others compensate for stuck GPUs."""
        stuck = self._stuck
        others = [index for index in range(len(self._gpus)) if index not in stuck]
        limits = list(self._mins)
        shares = level_by_want(
            total_mw - sum(self._holds[index] for index in stuck),
            [self._mins[index] for index in others],
            [self._use_mw(index) for index in others],
            [self._gpus[index].max_mw for index in others],
        )
        for index, share in zip(others, shares, strict=True):
            limits[index] = share
        return limits

    def _use_mw(self, gpu: int) -> int:
        """The highest useful limit of a GPU, or the policy's limit for it."""
        return min(self._wants[gpu], self._advised.get(gpu, self._wants[gpu]))
