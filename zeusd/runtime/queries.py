"""What can be asked of the sampler's histories."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowsQuery:
    """Energy of these windows: beginning and end, ns, and whether they are aligned with work."""

    windows: tuple[tuple[int, int, int], ...]

    @property
    def until_ns(self) -> int:
        """The newest end."""
        return max((end_ns for _, end_ns, _ in self.windows), default=0)


@dataclass(frozen=True, slots=True)
class TimelineQuery:
    """Readings of a domain between two times, ns; the oldest `limit` of them."""

    domain: str
    start_ns: int
    end_ns: int
    limit: int
