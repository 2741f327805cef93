"""The GPUs of a node, through its zeusd: their limits, their work, and their ceilings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from zeus_fleet.messages import NodeWork
from zeus_fleet.node import FleetCeilings, GpuRange
from zeus_fleet.wire import profile_of
from zeus_ipc import Client
from zeus_ipc.controls import Control
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import LeaseInfo

CEILING = "fleet"
ZEUSD_TIMEOUT_S = 1.0
"""zeusd drops a request that it cannot handle within this time."""
IDLE_S = 10.0
"""A GPU without a lease is idle if it has not computed for this long."""

log = logging.getLogger("zeus_fleet")


@dataclass(frozen=True)
class GpuLoad:
    """The activity of GPUs.

    Attributes:
        wanted_mw: Demand of each GPU: its minimum if it is idle.
        drawn_mw: Total power drawn.
        works: The jobs on them.
    """

    wanted_mw: tuple[int, ...]
    drawn_mw: int
    works: tuple[NodeWork, ...]


class Gpus(Protocol):
    """The GPUs of a node."""

    ranges: Sequence[GpuRange]

    def holds_mw(self) -> list[int]:
        """The most that each may hold now."""
        ...

    def carry_out(self, command: FleetCeilings) -> list[int]:
        """Sets the ceilings; returns the highest power limit that each may have then.

        Raises:
            ZeusIpcError: zeusd did not answer.
        """
        ...

    def load(self) -> GpuLoad:
        """The activity of the GPUs.

        Raises:
            ZeusIpcError: zeusd did not answer.
        """
        ...


class ZeusdGpus:
    """The GPUs of a zeusd, for which this process's user must be an administrator.

    Args:
        client: A client of that zeusd.
        name: Name of the node, also used for jobs without a name.
        clock: Returns seconds since any instant.

    Raises:
        ValueError: A GPU has no power limit.
    """

    def __init__(
        self, client: Client, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._name = name
        self._clock = clock
        self._computed_s: dict[str, float] = {}
        self._uuids = []
        self._kinds = []
        ranges = []
        for gpu in client.node().gpus:
            low, high = gpu.power_limit_min_mw, gpu.power_limit_max_mw
            if low is None or high is None:
                raise ValueError(f"GPU {gpu.index} ({gpu.name}) has no power limit")
            self._uuids.append(gpu.uuid)
            self._kinds.append(gpu.name)
            ranges.append(GpuRange(low, high))
        self.ranges: Sequence[GpuRange] = tuple(ranges)

    def holds_mw(self) -> list[int]:
        """The highest power limit that each may have now: what may be set, and what is in force."""
        bounds = {gpu.uuid: gpu.power_limit_highest_mw for gpu in self._client.node().gpus}
        states = self._client.state(self._uuids)
        holds = []
        for uuid, gpu in zip(self._uuids, self.ranges, strict=True):
            bound, limit = bounds.get(uuid), states[uuid].power_limit_mw
            holds.append(gpu.max_mw if bound is None or limit is None else max(bound, limit))
        return holds

    def carry_out(self, command: FleetCeilings) -> list[int]:
        """Sets the ceilings. A GPU that refuses keeps its limit."""
        before = self.holds_mw()
        holds = []
        for index, (uuid, gpu) in enumerate(zip(self._uuids, self.ranges, strict=True)):
            limit = command.limits_mw[index]
            bounded = limit > gpu.min_mw
            try:
                highest = self._client.set_ceiling(
                    uuid,
                    CEILING,
                    limit,
                    until_boot_ns=command.deadline_ns if bounded else None,
                    fallback_mw=gpu.min_mw if bounded else None,
                )
                holds.append(highest[uuid])
            except ZeusIpcError as error:
                log.warning("GPU %d may still take %g W: %s", index, before[index] / 1000, error)
                holds.append(max(before[index], limit))
        return holds

    def load(self) -> GpuLoad:
        """The activity of the GPUs, from the holders of power limits and their published profiles.

        A GPU is idle if nobody holds its power limit and it has not computed for `IDLE_S`, or if
        the driver has lost it.
        """
        states = self._client.state(self._uuids)
        leases = {
            lease.gpu: lease
            for lease in self._client.leases()
            if lease.control == Control.POWER_LIMIT and not lease.restoring
        }
        now_s = self._clock()
        works: dict[tuple[object, ...], NodeWork] = {}
        wanted = []
        for index, (uuid, gpu) in enumerate(zip(self._uuids, self.ranges, strict=True)):
            state = states[uuid]
            lost = state.power_limit_mw is None and state.power_mw is None
            if state.utilization_percent != 0:
                self._computed_s[uuid] = now_s
            lease = leases.get(uuid)
            if lost or (lease is None and now_s - self._computed_s.get(uuid, -IDLE_S) >= IDLE_S):
                wanted.append(gpu.min_mw)
                continue
            one = self._work(index, gpu, lease)
            key = (one.job, one.kind, one.max_mw, one.profile, one.measuring, one.needs_mw)
            before = works.get(key, replace(one, gpus=()))
            works[key] = replace(one, gpus=(*before.gpus, index))
            wanted.append(one.max_mw)
        drawn = sum(state.power_mw or 0 for state in states.values())
        return GpuLoad(tuple(wanted), drawn, tuple(works.values()))

    def _work(self, index: int, gpu: GpuRange, lease: LeaseInfo | None) -> NodeWork:
        """The activity of one GPU. A user's processes outside of any job count as one job."""
        kind = self._kinds[index]
        if lease is None:
            return NodeWork(f"on {self._name}", kind, (index,), gpu.min_mw, gpu.max_mw)
        asked = lease.asked[0] if lease.asked and not lease.measuring else gpu.max_mw
        profile = lease.profile
        return NodeWork(
            lease.job or f"user {lease.uid} on {self._name}",
            kind,
            (index,),
            gpu.min_mw,
            min(max(asked, gpu.min_mw), gpu.max_mw),
            None if profile is None else profile_of(profile.limits_mw, profile.progress),
            lease.measuring,
            lease.needs_mw,
        )
