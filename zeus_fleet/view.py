"""The use of a budget, for display. Pure; power in W, times in s."""

from __future__ import annotations

from dataclasses import dataclass

from zeus_fleet import profiles
from zeus_fleet.allocator import Snapshot
from zeus_fleet.messages import NodeReport, NodeWork, S, Timing
from zeus_fleet.profiles import ProgressProfile


@dataclass(frozen=True)
class NodeView:
    """One node.

    Attributes:
        name: The node's name in the budget.
        floor_w: Sum of its GPUs' minimum limits.
        capacity_w: Sum of their maximum limits; 0: not known.
        granted_w: Its grant.
        held_w: Highest sum of limits that its GPUs may have: its floor if it has been silent for
            long.
        drawn_w: Power drawn at the last heartbeat.
        wanted_w: Its demand.
        stuck_w: Power above the minimum of GPUs that cannot be lowered.
        silent_s: Time since its last heartbeat was seen; None: there was none.
        leaving: Whether it must stay at its floor.
        jobs: Names of its jobs.
        reclaimed: Whether it has been silent for so long that its power was granted to others.
        unreadable: Why what it wrote cannot be read; empty: it can.
    """

    name: str
    floor_w: float
    capacity_w: float
    granted_w: float
    held_w: float
    drawn_w: float
    wanted_w: float
    stuck_w: float
    silent_s: float | None
    leaving: bool
    jobs: tuple[str, ...]
    reclaimed: bool = False
    unreadable: str = ""

    @property
    def state(self) -> str:
        """`unreadable`, `absent`, `silent`, `stuck`, `leaving`, `waits` (its demand is higher) or
        `ok`."""
        if self.unreadable:
            return "unreadable"
        if self.silent_s is None:
            return "absent"
        if self.reclaimed:
            return "silent"
        if self.stuck_w > 0:
            return "stuck"
        if self.leaving:
            return "leaving"
        return "waits" if self.wanted_w > self.granted_w + 1 else "ok"


@dataclass(frozen=True)
class DomainView:
    """A site, a row or a rack."""

    name: str
    limit_w: float
    reserve_w: float
    floors_w: float
    granted_w: float
    held_w: float
    drawn_w: float


@dataclass(frozen=True)
class FleetView:
    """The state of the fleet at one instant.

    Attributes:
        at_s: Seconds since 1970.
        standing_w: The site's limit outside of events.
        domains: The first is the site.
        nodes: Nodes by name.
        busy_gpus: GPUs of jobs.
        lost_gpus: Loss of progress because of limits, in GPUs, by the jobs' profiles; unknown ones
            count with the mean. Computed, not measured.
        events: Present and future events: name, limit in W, start, end.
    """

    at_s: float
    standing_w: float
    domains: tuple[DomainView, ...]
    nodes: tuple[NodeView, ...]
    busy_gpus: int
    lost_gpus: float
    events: tuple[tuple[str, float, float, float], ...]

    @property
    def site(self) -> DomainView:
        """The domain of all nodes."""
        return self.domains[0]


class Watcher:
    """Builds views from successive snapshots, and keeps the time of each node's last heartbeat."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[int, float]] = {}

    def look(self, read: Snapshot, now_s: float, wall_s: float) -> FleetView:
        """The present view.

        Args:
            read: The contents of the store.
            now_s: Time on a monotonic clock.
            wall_s: Seconds since 1970.
        """
        nodes = tuple(self._node(name, read, now_s) for name in sorted(read.budget.floors_mw))
        by_name = {node.name: node for node in nodes}
        domains = tuple(
            DomainView(
                domain.name,
                domain.limit_mw / 1000,
                domain.reserve_mw / 1000,
                *(
                    sum(getattr(by_name[name], field) for name in domain.nodes)
                    for field in ("floor_w", "granted_w", "held_w", "drawn_w")
                ),
            )
            for domain in read.budget.domains
        )
        busy, lost = _lost(read)
        standing = read.budget.standing_mw or read.budget.site.limit_mw
        events = tuple(
            (event.name, event.limit_mw / 1000, event.start_s, event.end_s)
            for event in read.budget.events
        )
        return FleetView(wall_s, standing / 1000, domains, nodes, busy, lost, events)

    def _node(self, name: str, read: Snapshot, now_s: float) -> NodeView:
        floor, beat = read.budget.floors_mw[name], read.heartbeats.get(name)
        grant = None if read.plan is None else read.plan.grants.get(name)
        granted = floor if grant is None else max(floor, grant.limit_mw)
        silent_s = self._silent_s(name, beat, now_s)
        beat = beat or NodeReport(0, -1, floor, floor, 0, 0)
        # Allocators count what a node reports to hold, unless they know that it is silent.
        reclaimed = grant is not None and grant.high_mw < beat.held_mw
        reclaimed |= silent_s is not None and silent_s >= Timing().silence_ns / S
        held = beat.floor_mw + beat.stuck_mw if reclaimed or silent_s is None else beat.held_mw
        jobs = sorted({work.job for work in read.works.get(name, ())})
        return NodeView(
            name=name,
            floor_w=beat.floor_mw / 1000,
            capacity_w=beat.capacity_mw / 1000,
            granted_w=granted / 1000,
            held_w=held / 1000,
            drawn_w=beat.drawn_mw / 1000,
            wanted_w=beat.wanted_mw / 1000,
            stuck_w=beat.stuck_mw / 1000,
            silent_s=silent_s,
            leaving=name in read.budget.leaving,
            jobs=tuple(jobs),
            reclaimed=reclaimed,
            unreadable=read.unreadable.get(name, ""),
        )

    def _silent_s(self, name: str, beat: NodeReport | None, now_s: float) -> float | None:
        if beat is None:
            return None
        if name not in self._heard or self._heard[name][0] != beat.number:
            self._heard[name] = (beat.number, now_s)
        return now_s - self._heard[name][1]


def _lost(read: Snapshot) -> tuple[int, float]:
    """The number of busy GPUs, and their loss of progress in GPUs."""
    works = [work for some in read.works.values() for work in some]
    mean = profiles.mean(work.profile for work in works if work.profile is not None)
    busy, lost = 0, 0.0
    for name, some in read.works.items():
        beat = read.heartbeats.get(name)
        count = sum(len(work.gpus) for work in some)
        if beat is None or not count:
            continue
        above = max(0, beat.held_mw - beat.floor_mw) / count
        busy += count
        lost += sum(len(work.gpus) * _loss(work, above, work.profile or mean) for work in some)
    return busy, lost


def _loss(work: NodeWork, above_mw: float, profile: ProgressProfile | None) -> float:
    """Loss of one GPU, if the GPUs of its node share equally; 0 is full speed."""
    if profile is None:
        return 0.0
    limit = min(work.min_mw + above_mw, work.max_mw)
    return 1.0 - profile.at(limit) / profile.at(work.max_mw)
