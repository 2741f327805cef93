"""What a simulated site is made of, and the rules that it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeus_fleet.allocator import Allocator, Claim, Policy
from zeus_fleet.levels import level
from zeus_fleet.messages import Timing
from zeus_fleet.node import Gpu, Node

GPU = Gpu(100_000, 300_000)
GPUS = 2
FLOOR_MW = GPUS * GPU.min_mw
RESERVE_MW = GPU.max_mw - GPU.min_mw
TIMING = Timing()
LOWERING_S = 1.5
RESTART_S = 1.0
"""With the lowering, as long as the guard time."""


class Violation(AssertionError):
    """A sum of limits in hardware was above its bound."""


@dataclass(frozen=True)
class Rules:
    """What is shipped, or what a mutant has in its place."""

    node: Callable[..., Node] = Node
    allocator: Callable[[Timing, Policy], Allocator] = Allocator
    node_timing: Timing = TIMING
    allocator_timing: Timing = TIMING
    compares: frozenset[str] = frozenset({"token", "plan", "budget", "heartbeats"})
    dead_man: str = "zeusd"
    deadline: str = "absolute"
    clock: str = "boottime"


SHIPPED = Rules()


@dataclass
class Machine:
    """A node: hardware, zeusd and agent."""

    name: str
    rate: float
    offset_ns: int
    hardware: list[int] = field(default_factory=lambda: [GPU.min_mw] * GPUS)
    # zeusd
    ceilings: list[int] = field(default_factory=lambda: [GPU.min_mw] * GPUS)
    deadline_ns: int = 0
    stuck: int | None = None
    down_until: float = 0.0
    down_again: float = 0.0
    # agent
    core: Node | None = None
    incarnation: int = 0
    cut_off: int = 0
    frozen_until: float = 0.0
    # the machine
    asleep_until: float = 0.0
    slept: float = 0.0
    excused_until: float = 0.0


def equal_shares(claims: Mapping[str, Claim], total_mw: int) -> Mapping[str, int]:
    """A policy for the other allocator, so that two leaders never agree."""
    rows = claims.values()
    lows, highs = [one.floor_mw for one in rows], [one.capacity_mw for one in rows]
    return dict(zip(claims, level(total_mw, lows, highs), strict=True))
