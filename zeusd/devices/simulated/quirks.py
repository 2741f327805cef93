"""Injected deviations of a driver from what is requested."""

from __future__ import annotations

from dataclasses import dataclass


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
